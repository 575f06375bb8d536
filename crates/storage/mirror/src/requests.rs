//! Questions to other members that wait for answers: flushes, fetches, digests.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::time::Duration;

use block::{Bufs, Error};
use peer::NodeId;

use super::space::Assessment;

/// An answer.
#[derive(Debug)]
pub(super) enum Answer {
    /// It has flushed.
    Flushed,
    /// The contents, or why there are none.
    Data(Result<Bufs, Error>),
    /// What it says of a write that some have no space for.
    Assessed(Assessment),
    /// The digest of the contents, or why there is none.
    Sum(Result<[u8; 32], Error>),
}

/// All of one replica.
#[derive(Debug, Default)]
pub(super) struct Requests(RefCell<State>);

#[derive(Debug, Default)]
struct State {
    last: u64,
    waiting: BTreeMap<(u64, NodeId), Waiting>,
}

#[derive(Debug)]
struct Waiting {
    answer: Option<Answer>,
    since: Duration,
    waker: Option<Waker>,
}

/// A question; forgotten when it is dropped.
#[derive(Debug)]
pub(super) struct Request<'a> {
    all: &'a Requests,
    number: u64,
    node: NodeId,
}

impl Requests {
    /// A number for a question.
    pub(super) fn number(&self) -> u64 {
        let mut state = self.0.borrow_mut();
        state.last += 1;
        state.last
    }

    /// Registers that `node` is going to be asked under `number`.
    pub(super) fn ask(&self, number: u64, node: NodeId, now: Duration) -> Request<'_> {
        let waiting = Waiting { answer: None, since: now, waker: None };
        self.0.borrow_mut().waiting.insert((number, node), waiting);
        Request { all: self, number, node }
    }

    /// Who was asked before `before` and has not answered.
    pub(super) fn late(&self, before: Duration) -> Vec<NodeId> {
        let state = self.0.borrow();
        let late = state.waiting.iter().filter(|(_, w)| w.since < before && w.answer.is_none());
        late.map(|((_, node), _)| *node).collect()
    }

    /// How many wait for an answer.
    #[cfg(feature = "testing")]
    pub(super) fn len(&self) -> usize {
        self.0.borrow().waiting.len()
    }

    /// An answer has come. One that nobody waits for any more is dropped.
    pub(super) fn answer(&self, number: u64, node: NodeId, answer: Answer) {
        let waker = {
            let mut state = self.0.borrow_mut();
            let Some(waiting) = state.waiting.get_mut(&(number, node)) else { return };
            waiting.answer = Some(answer);
            waiting.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Request<'_> {
    /// Waits for the answer.
    pub(super) async fn answered(&self) -> Answer {
        poll_fn(|cx| {
            let mut state = self.all.0.borrow_mut();
            let key = (self.number, self.node);
            let Some(waiting) = state.waiting.get_mut(&key) else { return Poll::Pending };
            match waiting.answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    waiting.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.all.0.borrow_mut().waiting.remove(&(self.number, self.node));
    }
}
