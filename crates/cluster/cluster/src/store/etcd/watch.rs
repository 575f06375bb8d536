//! Watches on an etcd cluster that survive failures.
//!
//! A watch stream belongs to one member and ends with the member, its connection or its leader.
//! Then another stream is opened, at any member, from the change after the last one processed. A
//! silent stream is asked for a progress notification, so that a silently broken connection is
//! noticed. A watch fails only if changes it needs were compacted, or if the store is behind it
//! because it was restored to an earlier state.

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

use super::connections::{self, RetryPolicy};
use super::rpc::{Empty, WatchCreateRequest, WatchRequest, WatchRequestKind, WatchResponse};
use super::{
    EtcdInner, Revision, StoreError, StoreFuture, Watcher, from_etcd_revision, range_end,
    to_etcd_revision,
};
use crate::store::ChangeEvent;

/// First pause after a stream could not be opened, doubled up to the longest.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// Requests that may wait to be sent: the first, and progress requests.
const REQUEST_QUEUE_LEN: usize = 4;

/// An open stream.
struct WatchStream {
    requests: mpsc::Sender<WatchRequest>,
    responses: Streaming<WatchResponse>,
    /// A progress notification was requested and has not come.
    progress_requested: bool,
}

/// Watches the changes under a prefix.
pub(super) struct EtcdWatcher {
    store: Arc<EtcdInner>,
    prefix: Vec<u8>,
    /// Every commit up to this one was processed.
    last_seen: Revision,
    pending_events: VecDeque<ChangeEvent>,
    stream: Option<WatchStream>,
    backoff: Duration,
}

/// What to do after a stream's response.
#[derive(Debug, PartialEq, Eq)]
enum WatchStep {
    Continue,
    /// The member is behind this watcher.
    MemberBehind,
    Reopen,
    Compacted,
}

impl EtcdWatcher {
    pub(super) fn new(store: Arc<EtcdInner>, prefix: &str, after: Revision) -> Self {
        let prefix = store.full_key(prefix);
        Self {
            store,
            prefix,
            last_seen: after,
            pending_events: VecDeque::new(),
            stream: None,
            backoff: MIN_BACKOFF,
        }
    }

    /// Opens a stream at any member that accepts it.
    async fn open_stream(&mut self) {
        let mut key = self.prefix.clone();
        let range_end = range_end(&key);
        if key.is_empty() {
            key = vec![0];
        }
        let create = WatchCreateRequest {
            key,
            range_end,
            start_revision: to_etcd_revision(self.last_seen) + 1,
        };
        let opened = self
            .store
            .connections
            .try_members(RetryPolicy::Idempotent, |c| open_watch_stream(c, create.clone()))
            .await;
        match opened {
            Ok(open) => self.stream = Some(open),
            Err(error) => {
                tracing::debug!(?error, "cannot watch the store");
                self.back_off().await;
            }
        }
    }

    async fn back_off(&mut self) {
        sleep(self.backoff).await;
        if self.backoff < MAX_BACKOFF && self.backoff * 2 >= MAX_BACKOFF {
            tracing::warn!(
                store = self.store.connections.name(),
                "watch of the store keeps failing; retrying"
            );
        }
        self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
    }

    /// Processes a response of the stream.
    fn apply_response(&mut self, answer: WatchResponse) -> WatchStep {
        if answer.compact_revision != 0 {
            return WatchStep::Compacted;
        }
        if answer.canceled {
            tracing::debug!(why = answer.cancel_reason, "store member ended a stream");
            return WatchStep::Reopen;
        }
        let at = from_etcd_revision(answer.header.unwrap_or_default().revision);
        if answer.created {
            return if at < self.last_seen { WatchStep::MemberBehind } else { WatchStep::Continue };
        }
        let before = self.last_seen;
        for event in answer.events {
            let Some(kv) = event.kv else { continue };
            let revision = from_etcd_revision(kv.mod_revision);
            if revision > before {
                let key = self.store.strip_prefix(&kv.key);
                self.pending_events.push_back(ChangeEvent {
                    key,
                    is_removal: event.kind == 1,
                    revision,
                });
                self.last_seen = self.last_seen.max(revision);
            }
        }
        self.backoff = MIN_BACKOFF;
        WatchStep::Continue
    }

    /// Waits for the next response of the open stream; if none comes, requests a progress
    /// notification.
    async fn wait_response(&mut self) -> WatchStep {
        let idle_timeout = self.store.connections.attempt_timeout();
        let Some(open) = &mut self.stream else { return WatchStep::Reopen };
        match timeout(idle_timeout, open.responses.next()).await {
            Ok(Some(Ok(answer))) => {
                open.progress_requested = false;
                self.apply_response(answer)
            }
            Ok(Some(Err(status))) => {
                tracing::debug!(why = status.message(), "store stream failed");
                WatchStep::Reopen
            }
            Ok(None) => WatchStep::Reopen,
            Err(_) if open.progress_requested => {
                tracing::debug!("store stream timed out");
                WatchStep::Reopen
            }
            Err(_) => {
                open.progress_requested = true;
                let request = WatchRequest { request: Some(WatchRequestKind::Progress(Empty {})) };
                if open.requests.try_send(request).is_ok() {
                    WatchStep::Continue
                } else {
                    WatchStep::Reopen
                }
            }
        }
    }

    /// Handles a member that is behind this watcher: wait for it, unless the whole store is behind.
    async fn resolve_member_behind(&self) -> WatchStep {
        match self.store.store_revision().await {
            Ok(at) if at < self.last_seen => {
                tracing::warn!(seen = %self.last_seen, %at, "store is at an older revision than was read before");
                WatchStep::Compacted
            }
            Ok(_) => WatchStep::Continue,
            Err(_) => WatchStep::Reopen,
        }
    }

    async fn next_event(&mut self) -> Result<ChangeEvent, StoreError> {
        loop {
            if let Some(event) = self.pending_events.pop_front() {
                return Ok(event);
            }
            if self.stream.is_none() {
                self.open_stream().await;
                continue;
            }
            let next = match self.wait_response().await {
                WatchStep::MemberBehind => self.resolve_member_behind().await,
                next => next,
            };
            match next {
                WatchStep::Continue | WatchStep::MemberBehind => {}
                WatchStep::Reopen => {
                    self.stream = None;
                    self.back_off().await;
                }
                WatchStep::Compacted => {
                    self.stream = None;
                    return Err(StoreError::Compacted { after: self.last_seen });
                }
            }
        }
    }
}

/// Opens a stream at one member; returns when the member has responded.
async fn open_watch_stream(
    channel: Channel,
    create: WatchCreateRequest,
) -> Result<WatchStream, Status> {
    let (requests, to_send) = mpsc::channel(REQUEST_QUEUE_LEN);
    let first = WatchRequest { request: Some(WatchRequestKind::Create(create)) };
    requests.try_send(first).map_err(|_| Status::internal("there is room for one"))?;
    let mut grpc = connections::grpc_client(channel);
    connections::ready(&mut grpc).await?;
    let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
    let codec: ProstCodec<WatchRequest, WatchResponse> = ProstCodec::default();
    let to_send = tokio_stream::wrappers::ReceiverStream::new(to_send);
    let answers = grpc
        .streaming(connections::request_requiring_leader(to_send), path, codec)
        .await?
        .into_inner();
    Ok(WatchStream { requests, responses: answers, progress_requested: false })
}

impl Watcher for EtcdWatcher {
    fn next_event(&mut self) -> StoreFuture<'_, ChangeEvent> {
        Box::pin(Self::next_event(self))
    }
}

#[cfg(test)]
mod tests {
    use super::super::rpc::{KeyValue, ResponseHeader, RpcEvent};
    use super::super::{EtcdSettings, EtcdStore};
    use super::*;

    fn follower() -> EtcdWatcher {
        let endpoints = vec!["http://127.0.0.1:1".into()];
        let EtcdStore(store) =
            EtcdStore::new(&EtcdSettings { endpoints, prefix: "w/".into(), ..Default::default() })
                .unwrap();
        EtcdWatcher::new(store, "v/", Revision(5))
    }

    fn changes(events: &[(&str, i64, i32)]) -> WatchResponse {
        let event = |&(key, mod_revision, kind): &(&str, i64, i32)| RpcEvent {
            kind,
            kv: Some(KeyValue { key: key.into(), mod_revision, value: Vec::new() }),
        };
        WatchResponse { events: events.iter().map(event).collect(), ..Default::default() }
    }

    #[tokio::test]
    async fn what_was_seen_already_is_not_told_again() {
        let mut follower = follower();
        let twice = changes(&[("w/v/1", 5, 0), ("w/v/1", 6, 0), ("w/v/2", 6, 1)]);
        assert_eq!(follower.apply_response(twice), WatchStep::Continue);
        let events = |key: &str, removed| ChangeEvent {
            key: key.into(),
            is_removal: removed,
            revision: Revision(6),
        };
        assert_eq!(follower.pending_events, [events("v/1", false), events("v/2", true)]);
        assert_eq!(follower.last_seen, Revision(6));
    }

    #[tokio::test]
    async fn ends_of_streams_are_told_apart() {
        let mut follower = follower();
        let header = |revision| Some(ResponseHeader { revision, ..Default::default() });
        let created =
            |at| WatchResponse { created: true, header: header(at), ..Default::default() };
        assert_eq!(follower.apply_response(created(5)), WatchStep::Continue);
        assert_eq!(follower.apply_response(created(4)), WatchStep::MemberBehind);
        let canceled = WatchResponse { canceled: true, ..Default::default() };
        assert_eq!(follower.apply_response(canceled.clone()), WatchStep::Reopen);
        assert_eq!(
            follower.apply_response(WatchResponse { compact_revision: 9, ..canceled }),
            WatchStep::Compacted
        );
    }
}
