//! Requests to other members that wait for answers: flushes, fetches, digests.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::time::Duration;

use block::{Bufs, Error};
use peer::NodeId;

/// What a member reports of a write for which some members have no space.
#[derive(Debug)]
pub(super) struct NoSpaceReport {
    /// Bytes free where its replica is stored.
    pub(super) free_bytes: u64,
    /// Blocks of the write that read as zeroes there (first block, count), if its leg has no space
    /// for it.
    pub(super) zero_blocks: Result<Vec<(u64, u64)>, Error>,
}

/// An answer.
#[derive(Debug)]
pub(super) enum PeerAnswer {
    /// The node has flushed.
    Flushed,
    /// The contents, or the error.
    Fetched(Result<Bufs, Error>),
    /// The report on a write for which some members have no space.
    NoSpace(NoSpaceReport),
    /// The digest of the contents, or the error.
    Digest(Result<[u8; 32], Error>),
}

/// The pending requests of one replica.
#[derive(Debug, Default)]
pub(super) struct PeerRequests(RefCell<RequestTable>);

#[derive(Debug, Default)]
struct RequestTable {
    last_number: u64,
    waiting: BTreeMap<(u64, NodeId), WaitingRequest>,
}

#[derive(Debug)]
struct WaitingRequest {
    answer: Option<PeerAnswer>,
    asked_at: Duration,
    waker: Option<Waker>,
}

/// A request; forgotten when dropped.
#[derive(Debug)]
pub(super) struct PeerRequest<'a> {
    table: &'a PeerRequests,
    number: u64,
    node: NodeId,
}

impl PeerRequests {
    /// The number of a new request.
    pub(super) fn next_number(&self) -> u64 {
        let mut table = self.0.borrow_mut();
        table.last_number += 1;
        table.last_number
    }

    /// Registers the request `number` to `node`.
    pub(super) fn register(&self, number: u64, node: NodeId, now: Duration) -> PeerRequest<'_> {
        let request = WaitingRequest { answer: None, asked_at: now, waker: None };
        self.0.borrow_mut().waiting.insert((number, node), request);
        PeerRequest { table: self, number, node }
    }

    /// The nodes that have not answered a request sent before `before`.
    pub(super) fn overdue(&self, before: Duration) -> Vec<NodeId> {
        let table = self.0.borrow();
        let late = table.waiting.iter().filter(|(_, w)| w.asked_at < before && w.answer.is_none());
        late.map(|((_, node), _)| *node).collect()
    }

    /// How many requests are registered.
    #[cfg(feature = "testing")]
    pub(super) fn len(&self) -> usize {
        self.0.borrow().waiting.len()
    }

    /// An answer has arrived. It is dropped if no task waits for it.
    pub(super) fn complete(&self, number: u64, node: NodeId, answer: PeerAnswer) {
        let waker = {
            let mut table = self.0.borrow_mut();
            let Some(request) = table.waiting.get_mut(&(number, node)) else { return };
            request.answer = Some(answer);
            request.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl PeerRequest<'_> {
    /// Waits for the answer.
    pub(super) async fn wait_answer(&self) -> PeerAnswer {
        poll_fn(|cx| {
            let mut table = self.table.0.borrow_mut();
            let key = (self.number, self.node);
            let Some(request) = table.waiting.get_mut(&key) else { return Poll::Pending };
            match request.answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    request.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for PeerRequest<'_> {
    fn drop(&mut self) {
        self.table.0.borrow_mut().waiting.remove(&(self.number, self.node));
    }
}
