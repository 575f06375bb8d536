//! Writes that wait for their stripe lock. The holder of the lock takes all of them, its own among
//! them, and executes them as one write.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::fragments::StripFragment;
use super::stripe::StripeError;
use super::stripe_locks::StripeId;

/// Most queued writes that are merged under one stripe lock.
const MAX_MERGED_WRITES: usize = 32;

/// A write of one stripe that waits for the stripe lock, or for another writer to execute it.
#[derive(Debug)]
pub(super) struct QueuedWrite {
    pub(super) fragments: Vec<StripFragment>,
    pub(super) fua: bool,
    pub(super) outcome: Cell<Option<Result<(), StripeError>>>,
}

/// Writes that wait for their stripe lock, by stripe.
#[derive(Debug, Default)]
pub(super) struct WriteQueues(RefCell<FxHashMap<StripeId, QueuedWrites>>);

type QueuedWrites = Vec<Rc<QueuedWrite>>;

impl WriteQueues {
    pub(super) fn enqueue(&self, stripe: StripeId, write: &Rc<QueuedWrite>) {
        self.0.borrow_mut().entry(stripe).or_default().push(Rc::clone(write));
    }

    /// Takes the first writes of the queue, for the holder of the stripe lock.
    pub(super) fn take_batch(&self, stripe: StripeId) -> QueuedWrites {
        let mut queues = self.0.borrow_mut();
        let Some(queue) = queues.get_mut(&stripe) else { return QueuedWrites::new() };
        let count = queue.len().min(MAX_MERGED_WRITES);
        let taken = queue.drain(..count).collect();
        if queue.is_empty() {
            queues.remove(&stripe);
        }
        taken
    }
}
