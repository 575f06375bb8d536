//! Following the changes of an etcd cluster, through whatever happens to it.
//!
//! A stream of changes belongs to one member and ends with it, with its connection, or when it has
//! lost its leader. Then another one is opened, at any member, from the change after the last that
//! was taken over. A stream that says nothing is asked for a sign of life, so that a connection
//! that silently broke is noticed. What ends a follower is only that changes it needs were
//! compacted, or that the store is not as far as the follower: it was restored from the past.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;
use tonic::Status;
use tonic::codec::Streaming;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use super::pool::{self, Asked};
use super::wire::{Empty, WatchCreate, WatchRequest, WatchResponse, Watching};
use super::{Answer, Inner, MetaError, Revision, Watch, number, range_end, revision};
use crate::meta::Event;

/// First pause after a stream could not be opened, doubled up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Requests that may wait to be sent: the first, and signs of life.
const REQUESTS: usize = 4;

/// An open stream.
struct Open {
    requests: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
    /// A sign of life was asked for and has not come.
    asked: bool,
}

/// Follows the changes under a prefix.
pub(super) struct Follower {
    store: Arc<Inner>,
    prefix: Vec<u8>,
    /// Every commit up to this one has been taken over.
    seen: Revision,
    ready: VecDeque<Event>,
    open: Option<Open>,
    pause: Duration,
}

/// What a stream's answer asks for.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    /// The member is not as far as the follower.
    Behind,
    Reopen,
    Compacted,
}

impl Follower {
    pub(super) fn new(store: Arc<Inner>, prefix: &str, after: Revision) -> Self {
        let prefix = store.key(prefix);
        Self { store, prefix, seen: after, ready: VecDeque::new(), open: None, pause: FIRST_PAUSE }
    }

    /// Opens a stream at whichever member lets it.
    async fn open(&mut self) {
        let mut key = self.prefix.clone();
        let range_end = range_end(&key);
        if key.is_empty() {
            key = vec![0];
        }
        let create = WatchCreate { key, range_end, start_revision: number(self.seen) + 1 };
        let opened = self.store.pool.try_each(Asked::Freely, |c| stream(c, create.clone())).await;
        match opened {
            Ok(open) => self.open = Some(open),
            Err(error) => {
                tracing::debug!(?error, "the store cannot be followed now");
                self.back_off().await;
            }
        }
    }

    async fn back_off(&mut self) {
        sleep(self.pause).await;
        if self.pause < LONGEST_PAUSE && self.pause * 2 >= LONGEST_PAUSE {
            tracing::warn!(
                store = self.store.pool.name(),
                "changes of the store are not told; trying on"
            );
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    /// Takes over an answer of the stream.
    fn take(&mut self, answer: WatchResponse) -> Next {
        if answer.compact_revision != 0 {
            return Next::Compacted;
        }
        if answer.canceled {
            tracing::debug!(why = answer.cancel_reason, "a member ended a stream");
            return Next::Reopen;
        }
        let at = revision(answer.header.unwrap_or_default().revision);
        if answer.created {
            return if at < self.seen { Next::Behind } else { Next::GoOn };
        }
        let before = self.seen;
        for event in answer.events {
            let Some(kv) = event.kv else { continue };
            let revision = revision(kv.mod_revision);
            if revision > before {
                let key = self.store.bare(&kv.key);
                self.ready.push_back(Event { key, removed: event.kind == 1, revision });
                self.seen = self.seen.max(revision);
            }
        }
        self.pause = FIRST_PAUSE;
        Next::GoOn
    }

    /// Waits for the next answer of the open stream, and for a sign of life where none comes.
    async fn wait(&mut self) -> Next {
        let quiet = self.store.pool.try_timeout();
        let Some(open) = &mut self.open else { return Next::Reopen };
        match timeout(quiet, open.answers.next()).await {
            Ok(Some(Ok(answer))) => {
                open.asked = false;
                self.take(answer)
            }
            Ok(Some(Err(status))) => {
                tracing::debug!(why = status.message(), "a stream of the store broke");
                Next::Reopen
            }
            Ok(None) => Next::Reopen,
            Err(_) if open.asked => {
                tracing::debug!("a stream of the store is silent");
                Next::Reopen
            }
            Err(_) => {
                open.asked = true;
                let ask = WatchRequest { request: Some(Watching::Progress(Empty {})) };
                if open.requests.try_send(ask).is_ok() { Next::GoOn } else { Next::Reopen }
            }
        }
    }

    /// What to do about a member that is not as far as the follower: to wait for it, unless the
    /// store as a whole is behind.
    async fn behind(&self) -> Next {
        match self.store.revision().await {
            Ok(at) if at < self.seen => {
                tracing::warn!(seen = %self.seen, %at, "the store is older than what was read of it");
                Next::Compacted
            }
            Ok(_) => Next::GoOn,
            Err(_) => Next::Reopen,
        }
    }

    async fn next(&mut self) -> Result<Event, MetaError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            if self.open.is_none() {
                self.open().await;
                continue;
            }
            let next = match self.wait().await {
                Next::Behind => self.behind().await,
                next => next,
            };
            match next {
                Next::GoOn | Next::Behind => {}
                Next::Reopen => {
                    self.open = None;
                    self.back_off().await;
                }
                Next::Compacted => {
                    self.open = None;
                    return Err(MetaError::Compacted { after: self.seen });
                }
            }
        }
    }
}

/// Opens a stream at one member; answers when the member has.
async fn stream(channel: Channel, create: WatchCreate) -> Result<Open, Status> {
    let (requests, to_send) = mpsc::channel(REQUESTS);
    let first = WatchRequest { request: Some(Watching::Create(create)) };
    requests.try_send(first).map_err(|_| Status::internal("there is room for one"))?;
    let mut grpc = pool::grpc(channel);
    pool::ready(&mut grpc).await?;
    let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
    let codec: ProstCodec<WatchRequest, WatchResponse> = ProstCodec::default();
    let to_send = tokio_stream::wrappers::ReceiverStream::new(to_send);
    let answers = grpc.streaming(pool::request(to_send), path, codec).await?.into_inner();
    Ok(Open { requests, answers, asked: false })
}

impl Watch for Follower {
    fn next(&mut self) -> Answer<'_, Event> {
        Box::pin(Self::next(self))
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::{Header, KeyValue, WireEvent};
    use super::super::{Etcd, Settings};
    use super::*;

    fn follower() -> Follower {
        let endpoints = vec!["http://127.0.0.1:1".into()];
        let Etcd(store) =
            Etcd::new(&Settings { endpoints, prefix: "w/".into(), ..Default::default() }).unwrap();
        Follower::new(store, "v/", Revision(5))
    }

    fn changes(events: &[(&str, i64, i32)]) -> WatchResponse {
        let event = |&(key, mod_revision, kind): &(&str, i64, i32)| WireEvent {
            kind,
            kv: Some(KeyValue { key: key.into(), mod_revision, value: Vec::new() }),
        };
        WatchResponse { events: events.iter().map(event).collect(), ..Default::default() }
    }

    #[tokio::test]
    async fn what_was_seen_already_is_not_told_again() {
        let mut follower = follower();
        let twice = changes(&[("w/v/1", 5, 0), ("w/v/1", 6, 0), ("w/v/2", 6, 1)]);
        assert_eq!(follower.take(twice), Next::GoOn);
        let told = |key: &str, removed| Event { key: key.into(), removed, revision: Revision(6) };
        assert_eq!(follower.ready, [told("v/1", false), told("v/2", true)]);
        assert_eq!(follower.seen, Revision(6));
    }

    #[tokio::test]
    async fn ends_of_streams_are_told_apart() {
        let mut follower = follower();
        let header = |revision| Some(Header { revision, ..Default::default() });
        let created =
            |at| WatchResponse { created: true, header: header(at), ..Default::default() };
        assert_eq!(follower.take(created(5)), Next::GoOn);
        assert_eq!(follower.take(created(4)), Next::Behind);
        let canceled = WatchResponse { canceled: true, ..Default::default() };
        assert_eq!(follower.take(canceled.clone()), Next::Reopen);
        assert_eq!(
            follower.take(WatchResponse { compact_revision: 9, ..canceled }),
            Next::Compacted
        );
    }
}
