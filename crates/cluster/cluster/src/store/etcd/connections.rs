//! Connections to the members of an etcd cluster, and the order in which they are tried.
//!
//! A call tries one member after another until one answers, the last responder first. A failed
//! member is tried last for a while. So a dead member costs one attempt, once, and its return is
//! noticed only when it is needed.

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

use super::{EtcdSettings, EtcdTls, StoreError};

/// Longest message accepted. A page of keys is far below.
const MAX_MESSAGE_LEN: usize = 32 << 20;

/// Whether a call may be sent to further members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryPolicy {
    /// To any number of members: the call changes nothing, or has the same effect again.
    Idempotent,
    /// Once: to the next member only if this one certainly did not see it, or refused to process
    /// it.
    AtMostOnce,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RpcError {
    /// No member received it.
    Unreachable(String),
    /// No member received it, and at least one connection failed in TLS.
    TlsRejected(String),
    /// A member received it and did not report the result.
    Indeterminate(String),
    /// The requested revision was compacted.
    Compacted,
    /// The named lease or member does not exist.
    NotFound(String),
    /// The cluster refused it.
    Refused(String),
}

/// What a failed attempt at one member means.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AttemptOutcome {
    /// The member did nothing; another one may be tried.
    NotExecuted,
    /// The member may have executed it.
    Indeterminate,
    /// The answer holds for the whole cluster.
    Final(RpcError),
}

/// Refusals before a request is executed: no leader when one is required, overload, or too few
/// healthy members for a membership change.
const NOT_EXECUTED_MESSAGES: [&str; 3] = ["no leader", "too many requests", "unhealthy cluster"];

/// Classifies a member's refusal. Counts as not executed only what certainly was not.
fn classify_status(status: &Status) -> AttemptOutcome {
    let why = || status.message().to_owned();
    match status.code() {
        _ if never_connected(status) => AttemptOutcome::NotExecuted,
        Code::Unavailable | Code::ResourceExhausted
            if NOT_EXECUTED_MESSAGES.iter().any(|b| status.message().contains(b)) =>
        {
            AttemptOutcome::NotExecuted
        }
        Code::OutOfRange if status.message().contains("compacted") => {
            AttemptOutcome::Final(RpcError::Compacted)
        }
        Code::NotFound => AttemptOutcome::Final(RpcError::NotFound(why())),
        Code::InvalidArgument
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Unauthenticated => AttemptOutcome::Final(RpcError::Refused(why())),
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss => AttemptOutcome::Indeterminate,
    }
}

/// Whether there was no connection to send the call on.
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

/// A connection to one member.
struct MemberConnection {
    url: String,
    endpoint: Endpoint,
    /// Held while connecting: other callers wait for the same connection.
    channel: tokio::sync::Mutex<Option<Channel>>,
    backoff_until: Mutex<Option<Instant>>,
}

impl MemberConnection {
    fn backoff_until(&self) -> Option<Instant> {
        *self.backoff_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_backoff(&self, until: Option<Instant>) {
        *self.backoff_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    async fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        let mut channel = self.channel.lock().await;
        if let Some(channel) = &*channel {
            return Ok(channel.clone());
        }
        let fresh = self.endpoint.connect().await?;
        Ok(channel.insert(fresh).clone())
    }

    /// Makes the next call reconnect. Calls and streams in progress keep their connection.
    fn disconnect(&self) {
        // If the lock is held, a reconnect is in progress.
        if let Ok(mut channel) = self.channel.try_lock() {
            *channel = None;
        }
    }
}

/// The innermost cause of an error: the system's message.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut at = error;
    while let Some(cause) = at.source() {
        at = cause;
    }
    at.to_string()
}

/// The text of a failed call: the member's own, or that of the transport.
fn status_text(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(cause) => root_cause(cause),
        None => status.message().to_owned(),
    }
}

/// Whether TLS failed: one side does not trust the other, or does not speak TLS.
fn is_tls_error(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(at) = cause {
        // An I/O error's inner error is not in its source chain.
        let inner = at.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if let Some(inner) = inner
            && inner.is::<rustls::Error>()
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

/// Connections to all members.
pub(super) struct MemberConnections {
    name: String,
    members: Mutex<Vec<Arc<MemberConnection>>>,
    /// Index of the last responder.
    last_responder: AtomicUsize,
    tls: Mutex<Option<ClientTlsConfig>>,
    attempt_timeout: Duration,
    failed_member_backoff: Duration,
}

impl MemberConnections {
    pub(super) fn new(settings: &EtcdSettings) -> Result<Self, StoreError> {
        let name = format!("etcd at {}", settings.endpoints.join(", "));
        let refused = |why: String| StoreError::Failed { path: name.clone(), why };
        if settings.endpoints.is_empty() {
            return Err(refused("no endpoint is set".into()));
        }
        let tls = settings.tls.as_ref().map(tls_config).transpose().map_err(refused)?;
        let pool = Self {
            members: Mutex::default(),
            name: name.clone(),
            last_responder: AtomicUsize::new(0),
            tls: Mutex::new(tls),
            attempt_timeout: settings.attempt_timeout,
            failed_member_backoff: settings.failed_member_backoff,
        };
        pool.set_endpoints(&settings.endpoints).map_err(refused)?;
        Ok(pool)
    }

    /// Uses the members at `urls` from now on. Known members keep their connections.
    pub(super) fn set_endpoints(&self, urls: &[String]) -> Result<(), String> {
        let mut slots = self.members();
        let known = |url: &String| slots.iter().find(|slot| slot.url == *url).map(Arc::clone);
        let slot = |url| match known(url) {
            Some(slot) => Ok(slot),
            None => new_connection(url, self.tls().as_ref(), self.attempt_timeout).map(Arc::new),
        };
        let new: Result<Vec<_>, String> = urls.iter().map(slot).collect();
        *slots = new?;
        self.last_responder.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Uses `next` for new connections. Open ones continue until they end.
    pub(super) fn set_tls(&self, next: &EtcdTls) -> Result<(), String> {
        let next = tls_config(next)?;
        let mut slots = self.members();
        let renewed = slots
            .iter()
            .map(|s| new_connection(&s.url, Some(&next), self.attempt_timeout).map(Arc::new));
        *slots = renewed.collect::<Result<_, _>>()?;
        *self.tls.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
        Ok(())
    }

    fn tls(&self) -> Option<ClientTlsConfig> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn members(&self) -> MutexGuard<'_, Vec<Arc<MemberConnection>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store's name in errors.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn attempt_timeout(&self) -> Duration {
        self.attempt_timeout
    }

    /// Converts a failure for callers of the store.
    pub(super) fn to_store_error(&self, failure: RpcError) -> StoreError {
        let store = self.name.clone();
        match failure {
            RpcError::Unreachable(why) => StoreError::Unreachable { store, why },
            RpcError::TlsRejected(why) => StoreError::TlsRejected { store, why },
            RpcError::Indeterminate(why) => StoreError::Indeterminate { store, why },
            RpcError::Compacted => StoreError::Failed {
                path: store,
                why: "it is compacted repeatedly during the request".into(),
            },
            RpcError::NotFound(why) | RpcError::Refused(why) => {
                StoreError::Failed { path: store, why }
            }
        }
    }

    /// The members in the order in which they are tried now.
    fn attempt_order(&self) -> Vec<Arc<MemberConnection>> {
        let (now, mut order) = (Instant::now(), self.members().clone());
        let first = self.last_responder.load(Ordering::Relaxed).min(order.len());
        order.rotate_left(first);
        // A stable sort: members without a backoff keep their order.
        order.sort_by_key(|slot| slot.backoff_until().filter(|&until| until > now));
        order
    }

    fn record_success(&self, slot: &MemberConnection) {
        slot.set_backoff(None);
        if let Some(at) = self.members().iter().position(|s| std::ptr::eq(&**s, slot)) {
            self.last_responder.store(at, Ordering::Relaxed);
        }
    }

    /// Makes a unary call.
    pub(super) async fn call<Q, A>(
        &self,
        policy: RetryPolicy,
        path: &'static str,
        request: Q,
    ) -> Result<A, RpcError>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        self.try_members(policy, |channel| {
            let request = request.clone();
            async move { unary(channel, path, request).await }
        })
        .await
    }

    /// Tries `call` on the members until one has answered.
    pub(super) async fn try_members<A, F, Fut>(
        &self,
        policy: RetryPolicy,
        call: F,
    ) -> Result<A, RpcError>
    where
        F: Fn(Channel) -> Fut,
        Fut: Future<Output = Result<A, Status>>,
    {
        let (mut last, mut tls_error) = (String::new(), None);
        for slot in self.attempt_order() {
            let deadline = Instant::now() + self.attempt_timeout;
            let verdict = match timeout_at(deadline, slot.channel()).await {
                Err(_) => {
                    last = attempt_error(&slot, "no connection in time");
                    AttemptOutcome::NotExecuted
                }
                Ok(Err(error)) => {
                    last = attempt_error(&slot, root_cause(&error));
                    tls_error = tls_error.or_else(|| is_tls_error(&error).then(|| last.clone()));
                    AttemptOutcome::NotExecuted
                }
                Ok(Ok(channel)) => match timeout_at(deadline, call(channel)).await {
                    Ok(Ok(answer)) => {
                        self.record_success(&slot);
                        return Ok(answer);
                    }
                    Ok(Err(status)) => {
                        last = attempt_error(&slot, status_text(&status));
                        tls_error =
                            tls_error.or_else(|| is_tls_error(&status).then(|| last.clone()));
                        classify_status(&status)
                    }
                    Err(_) => {
                        last = attempt_error(&slot, "no response in time");
                        AttemptOutcome::Indeterminate
                    }
                },
            };
            match verdict {
                AttemptOutcome::Final(failure) => return Err(failure),
                AttemptOutcome::NotExecuted | AttemptOutcome::Indeterminate => {
                    tracing::debug!(why = last, "store member does not respond");
                    slot.set_backoff(Some(Instant::now() + self.failed_member_backoff));
                    slot.disconnect();
                }
            }
            if verdict == AttemptOutcome::Indeterminate && policy == RetryPolicy::AtMostOnce {
                return Err(RpcError::Indeterminate(last));
            }
        }
        Err(tls_error.map_or(RpcError::Unreachable(last), RpcError::TlsRejected))
    }

    /// The members' URLs.
    pub(super) fn urls(&self) -> Vec<String> {
        self.members().iter().map(|slot| slot.url.clone()).collect()
    }

    /// Makes a unary call to the member at `url`, in the list or not. The result does not affect
    /// the order in which members are tried.
    pub(super) async fn call_at<Q, A>(
        &self,
        url: &str,
        path: &'static str,
        request: Q,
    ) -> Result<A, RpcError>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let unreachable = |why: String| RpcError::Unreachable(why);
        let known = self.members().iter().find(|slot| slot.url == url).map(Arc::clone);
        let slot = match known {
            Some(slot) => slot,
            None => Arc::new(
                new_connection(url, self.tls().as_ref(), self.attempt_timeout)
                    .map_err(unreachable)?,
            ),
        };
        let call = async {
            let channel = slot.channel().await.map_err(|e| unreachable(root_cause(&e)))?;
            let answer = call_without_leader(channel, path, request).await;
            answer.map_err(|status| match classify_status(&status) {
                AttemptOutcome::Final(failure) => failure,
                AttemptOutcome::NotExecuted | AttemptOutcome::Indeterminate => {
                    unreachable(status_text(&status))
                }
            })
        };
        let late = || Err(unreachable("no response in time".into()));
        let answer = timeout(self.attempt_timeout, call).await.unwrap_or_else(|_| late());
        if matches!(answer, Err(RpcError::Unreachable(_))) {
            slot.disconnect();
        }
        answer
    }
}

fn attempt_error(slot: &MemberConnection, why: impl Display) -> String {
    format!("{}: {why}", slot.url)
}

/// Wraps a message so that a member without a leader fails instead of waiting for one.
pub(super) fn request_requiring_leader<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let _ = request.metadata_mut().insert("hasleader", "true".parse().expect("it is ASCII"));
    request
}

pub(super) fn grpc_client(channel: Channel) -> Grpc<Channel> {
    Grpc::new(channel).max_decoding_message_size(MAX_MESSAGE_LEN)
}

/// Waits until the channel accepts a request.
pub(super) async fn ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
    grpc.ready().await.map_err(|e| Status::from_error(Box::new(e)))
}

async fn unary<Q, A>(channel: Channel, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    send_unary(channel, path, request_requiring_leader(message)).await
}

/// Makes a call that a member answers from its local state, with a leader or without.
pub(super) async fn call_without_leader<Q, A>(
    channel: Channel,
    path: &'static str,
    message: Q,
) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    send_unary(channel, path, tonic::Request::new(message)).await
}

async fn send_unary<Q, A>(
    channel: Channel,
    path: &'static str,
    request: tonic::Request<Q>,
) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let mut grpc = grpc_client(channel);
    ready(&mut grpc).await?;
    let path = PathAndQuery::from_static(path);
    let codec: ProstCodec<Q, A> = ProstCodec::default();
    grpc.unary(request, path, codec).await.map(tonic::Response::into_inner)
}

fn new_connection(
    url: &str,
    tls: Option<&ClientTlsConfig>,
    timeout: Duration,
) -> Result<MemberConnection, String> {
    let secure = match url.split_once("://") {
        Some(("http", host)) if !host.is_empty() => false,
        Some(("https", host)) if !host.is_empty() => true,
        _ => return Err(format!("{url} is not http://HOST:PORT or https://HOST:PORT")),
    };
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|e| format!("{url}: {e}"))?;
    let endpoint = endpoint.connect_timeout(timeout).tcp_nodelay(true);
    let endpoint = match (secure, tls) {
        (true, Some(tls)) => {
            endpoint.tls_config(tls.clone()).map_err(|e| format!("{url}: {}", root_cause(&e)))?
        }
        (true, None) => return Err(format!("{url}: https needs a CA certificate")),
        (false, Some(_)) => {
            return Err(format!("{url} is not https, but certificates are configured"));
        }
        (false, None) => endpoint,
    };
    Ok(MemberConnection {
        url: url.to_owned(),
        endpoint,
        channel: tokio::sync::Mutex::new(None),
        backoff_until: Mutex::new(None),
    })
}

fn tls_config(tls: &EtcdTls) -> Result<ClientTlsConfig, String> {
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
        let of = |code, message: &str| classify_status(&Status::new(code, message));
        let refused = |why: &str| AttemptOutcome::Final(RpcError::Refused(why.into()));
        let cases = [
            (Code::Unavailable, "etcdserver: no leader", AttemptOutcome::NotExecuted),
            (Code::ResourceExhausted, "etcdserver: too many requests", AttemptOutcome::NotExecuted),
            (Code::Unavailable, "etcdserver: request timed out", AttemptOutcome::Indeterminate),
            (Code::Unavailable, "etcdserver: leader changed", AttemptOutcome::Indeterminate),
            (Code::Unknown, "transport error", AttemptOutcome::Indeterminate),
            (Code::Cancelled, "operation was canceled", AttemptOutcome::Indeterminate),
            (Code::PermissionDenied, "no", refused("no")),
            (
                Code::ResourceExhausted,
                "database space exceeded",
                refused("database space exceeded"),
            ),
            (
                Code::OutOfRange,
                "etcdserver: mvcc: required revision has been compacted",
                AttemptOutcome::Final(RpcError::Compacted),
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
        assert!(is_tls_error(&status));
        assert!(status_text(&status).contains("BadCertificate"), "{}", status_text(&status));
        let gone = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        assert!(!is_tls_error(&Status::from_error(Box::new(gone))));
        assert_eq!(
            status_text(&Status::unavailable("etcdserver: no leader")),
            "etcdserver: no leader"
        );
    }

    fn pool(count: usize) -> MemberConnections {
        let endpoints = (1..=count).map(|i| format!("http://127.0.0.1:{i}")).collect();
        MemberConnections::new(&EtcdSettings { endpoints, ..Default::default() }).unwrap()
    }

    fn urls(pool: &MemberConnections) -> Vec<usize> {
        let at = |slot: &Arc<MemberConnection>| {
            pool.members().iter().position(|s| Arc::ptr_eq(s, slot)).unwrap()
        };
        pool.attempt_order().iter().map(at).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn who_answered_is_asked_first_and_who_failed_last_for_a_while() {
        let pool = pool(3);
        assert_eq!(urls(&pool), [0, 1, 2]);
        let second = Arc::clone(&pool.members()[1]);
        pool.record_success(&second);
        assert_eq!(urls(&pool), [1, 2, 0]);
        second.set_backoff(Some(Instant::now() + pool.failed_member_backoff));
        assert_eq!(urls(&pool), [2, 0, 1]);
        tokio::time::advance(pool.failed_member_backoff).await;
        assert_eq!(urls(&pool), [1, 2, 0]);
        pool.set_endpoints(&["http://127.0.0.1:9".into(), second.url.clone()]).unwrap();
        assert!(Arc::ptr_eq(&pool.members()[1], &second), "it keeps its connection");
        pool.set_endpoints(&["nowhere".into()]).unwrap_err();
        assert_eq!(urls(&pool), [0, 1]);
    }

    #[tokio::test]
    async fn where_nobody_listens_nothing_was_sent() {
        // Nothing listens on ports 1 to 3 of the loopback.
        let pool = pool(3);
        let path = "/etcdserverpb.KV/Txn";
        let failed = pool.call::<_, super::super::rpc::Empty>(
            RetryPolicy::AtMostOnce,
            path,
            super::super::rpc::Empty {},
        );
        assert!(matches!(failed.await, Err(RpcError::Unreachable(_))));
    }
}
