//! Connections to the members of an etcd cluster, and which of them is asked.
//!
//! A call is put to one member after the other until one answers. The one that answered last is
//! asked first; one that failed is asked last for a while. So a dead member costs one try, once,
//! and is found alive again only when it is needed.

use std::fmt::Display;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, ConnectError, Status};
use tonic_prost::ProstCodec;

use super::{MetaError, Settings, Tls};

/// Longest message that is taken. A page of keys is far below.
const MAX_MESSAGE: usize = 32 << 20;

/// How often a call may be put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// To as many members as it takes: it changes nothing, or the same again.
    Freely,
    /// Once: to the next member only if this one has certainly not seen it, or has refused to
    /// look at it.
    Once,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No member took it.
    Unreachable(String),
    /// No member took it, and one of them for want of trust.
    Untrusted(String),
    /// A member took it and did not say what became of it.
    Unknown(String),
    /// The revision asked for is not kept any more.
    Compacted,
    /// What is named is not there: a lease, a member.
    NotFound(String),
    /// The cluster said no.
    Refused(String),
}

/// What one member's failure means.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// It did nothing, another one may.
    NotDone,
    /// It may have done it.
    Lost,
    /// It has answered for all of them.
    Final(Failure),
}

/// What a member says before it begins with a request: to those who ask that there be a leader, when
/// it has too much to do, when the members are not well enough to change who they are.
const BEFOREHAND: [&str; 3] = ["no leader", "too many requests", "unhealthy cluster"];

/// Reads a member's refusal. Only what certainly was not done is said to be so.
fn verdict(status: &Status) -> Verdict {
    let why = || status.message().to_owned();
    match status.code() {
        _ if never_connected(status) => Verdict::NotDone,
        Code::Unavailable | Code::ResourceExhausted
            if BEFOREHAND.iter().any(|b| status.message().contains(b)) =>
        {
            Verdict::NotDone
        }
        Code::OutOfRange if status.message().contains("compacted") => {
            Verdict::Final(Failure::Compacted)
        }
        Code::NotFound => Verdict::Final(Failure::NotFound(why())),
        Code::InvalidArgument
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Unauthenticated => Verdict::Final(Failure::Refused(why())),
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss => Verdict::Lost,
    }
}

/// Whether there was no connection to send anything through.
fn never_connected(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// A member.
struct Slot {
    url: String,
    endpoint: Endpoint,
    /// Held while somebody connects: the others wait for the same connection.
    channel: tokio::sync::Mutex<Option<Channel>>,
    shunned_until: Mutex<Option<Instant>>,
}

impl Slot {
    fn shunned_until(&self) -> Option<Instant> {
        *self.shunned_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shun(&self, until: Option<Instant>) {
        *self.shunned_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    async fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        let mut channel = self.channel.lock().await;
        if let Some(channel) = &*channel {
            return Ok(channel.clone());
        }
        let fresh = self.endpoint.connect().await?;
        Ok(channel.insert(fresh).clone())
    }

    /// The next call connects anew. Calls and streams under way keep what they have.
    fn disconnect(&self) {
        // Whoever holds the lock connects anew already.
        if let Ok(mut channel) = self.channel.try_lock() {
            *channel = None;
        }
    }
}

/// What is at the bottom of an error: the system's word.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut at = error;
    while let Some(cause) = at.source() {
        at = cause;
    }
    at.to_string()
}

/// What a failed call says: the member's own words, or those of whatever is between.
fn words(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(cause) => innermost(cause),
        None => status.message().to_owned(),
    }
}

/// Whether TLS is what failed: one side does not trust the other, or speaks no TLS at all.
fn is_distrust(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(at) = cause {
        // What an I/O error was made of is not among its causes, only what caused that.
        let made_of = at.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if let Some(made_of) = made_of
            && made_of.is::<rustls::Error>()
        {
            return true;
        }
        if at.is::<rustls::Error>() {
            return true;
        }
        cause = at.source();
    }
    false
}

/// The members.
pub(super) struct Pool {
    name: String,
    slots: Mutex<Vec<Arc<Slot>>>,
    /// Who answered last.
    preferred: AtomicUsize,
    tls: Mutex<Option<ClientTlsConfig>>,
    try_timeout: Duration,
    shun: Duration,
}

impl Pool {
    pub(super) fn new(settings: &Settings) -> Result<Self, MetaError> {
        let name = format!("etcd at {}", settings.endpoints.join(", "));
        let refused = |why: String| MetaError::Failed { path: name.clone(), why };
        if settings.endpoints.is_empty() {
            return Err(refused("no endpoint is set".into()));
        }
        let tls = settings.tls.as_ref().map(tls).transpose().map_err(refused)?;
        let pool = Self {
            slots: Mutex::default(),
            name: name.clone(),
            preferred: AtomicUsize::new(0),
            tls: Mutex::new(tls),
            try_timeout: settings.try_timeout,
            shun: settings.shun,
        };
        pool.set_endpoints(&settings.endpoints).map_err(refused)?;
        Ok(pool)
    }

    /// Asks the members at `urls` from now on. Those that were asked before keep their connections.
    pub(super) fn set_endpoints(&self, urls: &[String]) -> Result<(), String> {
        let mut slots = self.slots();
        let known = |url: &String| slots.iter().find(|slot| slot.url == *url).map(Arc::clone);
        let slot = |url| match known(url) {
            Some(slot) => Ok(slot),
            None => slot(url, self.tls().as_ref(), self.try_timeout).map(Arc::new),
        };
        let new: Result<Vec<_>, String> = urls.iter().map(slot).collect();
        *slots = new?;
        self.preferred.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Shows and trusts what `next` says on new connections. Those that are there go on until they end.
    pub(super) fn set_tls(&self, next: &Tls) -> Result<(), String> {
        let next = tls(next)?;
        let mut slots = self.slots();
        let renewed =
            slots.iter().map(|s| slot(&s.url, Some(&next), self.try_timeout).map(Arc::new));
        *slots = renewed.collect::<Result<_, _>>()?;
        *self.tls.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
        Ok(())
    }

    fn tls(&self) -> Option<ClientTlsConfig> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What errors call the store.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn try_timeout(&self) -> Duration {
        self.try_timeout
    }

    /// A failure as callers of the store see it.
    pub(super) fn error(&self, failure: Failure) -> MetaError {
        let store = self.name.clone();
        match failure {
            Failure::Unreachable(why) => MetaError::Unreachable { store, why },
            Failure::Untrusted(why) => MetaError::Untrusted { store, why },
            Failure::Unknown(why) => MetaError::Unknown { store, why },
            Failure::Compacted => {
                MetaError::Failed { path: store, why: "it is compacted all the time".into() }
            }
            Failure::NotFound(why) | Failure::Refused(why) => {
                MetaError::Failed { path: store, why }
            }
        }
    }

    /// The members in the order in which they are asked now.
    fn order(&self) -> Vec<Arc<Slot>> {
        let (now, mut order) = (Instant::now(), self.slots().clone());
        let first = self.preferred.load(Ordering::Relaxed).min(order.len());
        order.rotate_left(first);
        // Stable: those that nothing is known against stay in their order.
        order.sort_by_key(|slot| slot.shunned_until().filter(|&until| until > now));
        order
    }

    fn succeeded(&self, slot: &Slot) {
        slot.shun(None);
        if let Some(at) = self.slots().iter().position(|s| std::ptr::eq(&**s, slot)) {
            self.preferred.store(at, Ordering::Relaxed);
        }
    }

    /// One request, one answer.
    pub(super) async fn ask<Q, A>(
        &self,
        asked: Asked,
        path: &'static str,
        request: Q,
    ) -> Result<A, Failure>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        self.try_each(asked, |channel| {
            let request = request.clone();
            async move { unary(channel, path, request).await }
        })
        .await
    }

    /// Puts `call` to the members until one has answered.
    pub(super) async fn try_each<A, F, Fut>(&self, asked: Asked, call: F) -> Result<A, Failure>
    where
        F: Fn(Channel) -> Fut,
        Fut: Future<Output = Result<A, Status>>,
    {
        let (mut last, mut distrust) = (String::new(), None);
        for slot in self.order() {
            let deadline = Instant::now() + self.try_timeout;
            let verdict = match timeout_at(deadline, slot.channel()).await {
                Err(_) => {
                    last = at(&slot, "no connection in time");
                    Verdict::NotDone
                }
                Ok(Err(error)) => {
                    last = at(&slot, innermost(&error));
                    distrust = distrust.or_else(|| is_distrust(&error).then(|| last.clone()));
                    Verdict::NotDone
                }
                Ok(Ok(channel)) => match timeout_at(deadline, call(channel)).await {
                    Ok(Ok(answer)) => {
                        self.succeeded(&slot);
                        return Ok(answer);
                    }
                    Ok(Err(status)) => {
                        last = at(&slot, words(&status));
                        distrust = distrust.or_else(|| is_distrust(&status).then(|| last.clone()));
                        verdict(&status)
                    }
                    Err(_) => {
                        last = at(&slot, "no answer in time");
                        Verdict::Lost
                    }
                },
            };
            match verdict {
                Verdict::Final(failure) => return Err(failure),
                Verdict::NotDone | Verdict::Lost => {
                    tracing::debug!(why = last, "a member of the store does not answer");
                    slot.shun(Some(Instant::now() + self.shun));
                    slot.disconnect();
                }
            }
            if verdict == Verdict::Lost && asked == Asked::Once {
                return Err(Failure::Unknown(last));
            }
        }
        Err(distrust.map_or(Failure::Unreachable(last), Failure::Untrusted))
    }

    /// Where the members are asked.
    pub(super) fn urls(&self) -> Vec<String> {
        self.slots().iter().map(|slot| slot.url.clone()).collect()
    }

    /// One request to the member at `url`, be it one of the pool's or not, which answers for itself.
    /// What comes of it changes nothing in the order in which members are asked.
    pub(super) async fn ask_at<Q, A>(
        &self,
        url: &str,
        path: &'static str,
        request: Q,
    ) -> Result<A, Failure>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let unreachable = |why: String| Failure::Unreachable(why);
        let known = self.slots().iter().find(|slot| slot.url == url).map(Arc::clone);
        let slot = match known {
            Some(slot) => slot,
            None => {
                Arc::new(slot(url, self.tls().as_ref(), self.try_timeout).map_err(unreachable)?)
            }
        };
        let call = async {
            let channel = slot.channel().await.map_err(|e| unreachable(innermost(&e)))?;
            let answer = local(channel, path, request).await;
            answer.map_err(|status| match verdict(&status) {
                Verdict::Final(failure) => failure,
                Verdict::NotDone | Verdict::Lost => unreachable(words(&status)),
            })
        };
        let late = || Err(unreachable("no answer in time".into()));
        let answer = timeout(self.try_timeout, call).await.unwrap_or_else(|_| late());
        if matches!(answer, Err(Failure::Unreachable(_))) {
            slot.disconnect();
        }
        answer
    }
}

fn at(slot: &Slot, why: impl Display) -> String {
    format!("{}: {why}", slot.url)
}

/// Speaks with one member. Members that have no leader are to say so instead of waiting for one.
pub(super) fn request<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let _ = request.metadata_mut().insert("hasleader", "true".parse().expect("it is ASCII"));
    request
}

pub(super) fn grpc(channel: Channel) -> Grpc<Channel> {
    Grpc::new(channel).max_decoding_message_size(MAX_MESSAGE)
}

/// Waits until the channel takes a request.
pub(super) async fn ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
    grpc.ready().await.map_err(|e| Status::from_error(Box::new(e)))
}

async fn unary<Q, A>(channel: Channel, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    call(channel, path, request(message)).await
}

/// The same of a member that shall answer from what it knows itself, with a leader or without.
pub(super) async fn local<Q, A>(
    channel: Channel,
    path: &'static str,
    message: Q,
) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    call(channel, path, tonic::Request::new(message)).await
}

async fn call<Q, A>(
    channel: Channel,
    path: &'static str,
    request: tonic::Request<Q>,
) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let mut grpc = grpc(channel);
    ready(&mut grpc).await?;
    let path = PathAndQuery::from_static(path);
    let codec: ProstCodec<Q, A> = ProstCodec::default();
    grpc.unary(request, path, codec).await.map(tonic::Response::into_inner)
}

fn slot(url: &str, tls: Option<&ClientTlsConfig>, timeout: Duration) -> Result<Slot, String> {
    let secure = match url.split_once("://") {
        Some(("http", host)) if !host.is_empty() => false,
        Some(("https", host)) if !host.is_empty() => true,
        _ => return Err(format!("{url} is not http://HOST:PORT or https://HOST:PORT")),
    };
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|e| format!("{url}: {e}"))?;
    let endpoint = endpoint.connect_timeout(timeout).tcp_nodelay(true);
    let endpoint = match (secure, tls) {
        (true, Some(tls)) => {
            endpoint.tls_config(tls.clone()).map_err(|e| format!("{url}: {}", innermost(&e)))?
        }
        (true, None) => return Err(format!("{url}: https needs a CA certificate")),
        (false, Some(_)) => return Err(format!("{url} is not https, and there are certificates")),
        (false, None) => endpoint,
    };
    Ok(Slot {
        url: url.to_owned(),
        endpoint,
        channel: tokio::sync::Mutex::new(None),
        shunned_until: Mutex::new(None),
    })
}

fn tls(tls: &Tls) -> Result<ClientTlsConfig, String> {
    let read = |path: &std::path::Path| {
        std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
    };
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&tls.ca)?));
    if let Some((cert, key)) = &tls.identity {
        config = config.identity(Identity::from_pem(read(cert)?, read(key)?));
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_certainly_not_done_is_said_to_be_so() {
        let of = |code, message: &str| verdict(&Status::new(code, message));
        let refused = |why: &str| Verdict::Final(Failure::Refused(why.into()));
        let cases = [
            (Code::Unavailable, "etcdserver: no leader", Verdict::NotDone),
            (Code::ResourceExhausted, "etcdserver: too many requests", Verdict::NotDone),
            (Code::Unavailable, "etcdserver: request timed out", Verdict::Lost),
            (Code::Unavailable, "etcdserver: leader changed", Verdict::Lost),
            (Code::Unknown, "transport error", Verdict::Lost),
            (Code::Cancelled, "operation was canceled", Verdict::Lost),
            (Code::PermissionDenied, "no", refused("no")),
            (
                Code::ResourceExhausted,
                "database space exceeded",
                refused("database space exceeded"),
            ),
            (
                Code::OutOfRange,
                "etcdserver: mvcc: required revision has been compacted",
                Verdict::Final(Failure::Compacted),
            ),
        ];
        for (code, message, expected) in cases {
            assert_eq!(of(code, message), expected, "{message}");
        }
    }

    #[test]
    fn distrust_is_found_at_the_bottom_of_errors() {
        let bad = rustls::Error::AlertReceived(rustls::AlertDescription::BadCertificate);
        let io = std::io::Error::new(std::io::ErrorKind::InvalidData, bad);
        let status = Status::from_error(Box::new(io));
        assert!(is_distrust(&status));
        assert!(words(&status).contains("BadCertificate"), "{}", words(&status));
        let gone = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        assert!(!is_distrust(&Status::from_error(Box::new(gone))));
        assert_eq!(words(&Status::unavailable("etcdserver: no leader")), "etcdserver: no leader");
    }

    fn pool(count: usize) -> Pool {
        let endpoints = (1..=count).map(|i| format!("http://127.0.0.1:{i}")).collect();
        Pool::new(&Settings { endpoints, ..Default::default() }).unwrap()
    }

    fn urls(pool: &Pool) -> Vec<usize> {
        let at = |slot: &Arc<Slot>| pool.slots().iter().position(|s| Arc::ptr_eq(s, slot)).unwrap();
        pool.order().iter().map(at).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn who_answered_is_asked_first_and_who_failed_last_for_a_while() {
        let pool = pool(3);
        assert_eq!(urls(&pool), [0, 1, 2]);
        let second = Arc::clone(&pool.slots()[1]);
        pool.succeeded(&second);
        assert_eq!(urls(&pool), [1, 2, 0]);
        second.shun(Some(Instant::now() + pool.shun));
        assert_eq!(urls(&pool), [2, 0, 1]);
        tokio::time::advance(pool.shun).await;
        assert_eq!(urls(&pool), [1, 2, 0]);
        pool.set_endpoints(&["http://127.0.0.1:9".into(), second.url.clone()]).unwrap();
        assert!(Arc::ptr_eq(&pool.slots()[1], &second), "it keeps its connection");
        pool.set_endpoints(&["nowhere".into()]).unwrap_err();
        assert_eq!(urls(&pool), [0, 1]);
    }

    #[tokio::test]
    async fn where_nobody_listens_nothing_was_sent() {
        // Ports 1 to 3 of the loopback are nobody's.
        let pool = pool(3);
        let path = "/etcdserverpb.KV/Txn";
        let failed = pool.ask::<_, super::super::Empty>(Asked::Once, path, super::super::Empty {});
        assert!(matches!(failed.await, Err(Failure::Unreachable(_))));
    }
}
