//! Read locks: keep client reads of a stripe away from blocks that are being rewritten.
//!
//! *What a lock protects*: the data blocks of a stripe, against being rewritten while a client
//! reads them. A plain read of data shares the lock and takes no stripe lock: a client's write
//! changes only blocks of its own range, and a volume never runs it together with a read of that
//! range. But some operations rewrite blocks that a client may be reading. They take the lock
//! exclusively:
//! * a write of a part of a row, because it rewrites the whole row,
//! * the repair of rows by a read or a scrub, and the zeroing of rows that are given up as lost,
//! * the relocation of a column, while its position changes.
//!
//! *Order*: below the stripe lock, whose holder alone may lock exclusively. A holder of a shared
//! lock waits for nothing but its member. A hedged read also waits for the stripe lock, but gives
//! that up as soon as the exclusive lock is requested.
//!
//! *Who waits*: the exclusive locker, until all shared locks are released. A reader never waits
//! here: where the lock is exclusive, it takes the stripe lock instead, and so waits for its
//! holder.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use rustc_hash::FxHashMap;

/// The read locks that are held, by the key of the stripe (`stripe_locks::stripe_key`).
#[derive(Debug, Default)]
pub(super) struct ReadLocks(RefCell<FxHashMap<u64, LockState>>);

#[derive(Debug, Default)]
struct LockState {
    shared: u32,
    is_exclusive: bool,
    /// The task that waits until no read is in progress. There is at most one, because it holds the
    /// stripe lock.
    excluder: Option<Waker>,
    /// Hedged reads: their member is late, so they can also be served from other members. An
    /// exclusion wakes them, and they give up the read that is in progress.
    hedged_readers: Vec<Waker>,
}

/// Held by a read in progress.
#[derive(Debug)]
pub(super) struct SharedReadLock<'a>(&'a ReadLocks, u64);

/// Keeps reads out of a stripe. Its holder also holds the stripe lock.
#[derive(Debug)]
pub(super) struct ExclusiveReadLock<'a>(&'a ReadLocks, u64);

impl ReadLocks {
    /// Locks this stripe for a read. `None` if it is locked exclusively: then the reader must take
    /// the stripe lock, for which it waits until that is over.
    pub(super) fn try_lock_shared(&self, stripe: u64) -> Option<SharedReadLock<'_>> {
        let mut all = self.0.borrow_mut();
        let state = all.entry(stripe).or_default();
        (!state.is_exclusive).then(|| {
            state.shared += 1;
            SharedReadLock(self, stripe)
        })
    }

    /// Admits no read of this stripe from now on, and waits until none is in progress.
    pub(super) async fn lock_exclusive(&self, stripe: u64) -> ExclusiveReadLock<'_> {
        let hedged_readers = {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            state.is_exclusive = true;
            std::mem::take(&mut state.hedged_readers)
        };
        hedged_readers.into_iter().for_each(Waker::wake);
        // It exists before the wait, so that reads are admitted again if the wait is dropped.
        let exclusion = ExclusiveReadLock(self, stripe);
        poll_fn(|cx| {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            if state.shared == 0 {
                return Poll::Ready(());
            }
            state.excluder = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        exclusion
    }

    fn update(&self, stripe: u64, change: impl FnOnce(&mut LockState)) {
        let mut all = self.0.borrow_mut();
        let Some(state) = all.get_mut(&stripe) else { return };
        change(state);
        let excluder = if state.shared == 0 { state.excluder.take() } else { None };
        if state.shared == 0 && !state.is_exclusive {
            all.remove(&stripe);
        }
        drop(all);
        excluder.into_iter().for_each(Waker::wake);
    }
}

impl SharedReadLock<'_> {
    /// Completes when an exclusion waits for this read to end. The reader then gives up its read
    /// and drops the guard.
    pub(super) async fn exclusion_requested(&self) {
        poll_fn(|cx| {
            let mut all = self.0.0.borrow_mut();
            let state = all.entry(self.1).or_default();
            if state.is_exclusive {
                return Poll::Ready(());
            }
            state.hedged_readers.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for SharedReadLock<'_> {
    fn drop(&mut self) {
        self.0.update(self.1, |state| state.shared -= 1);
    }
}

impl Drop for ExclusiveReadLock<'_> {
    fn drop(&mut self) {
        self.0.update(self.1, |state| state.is_exclusive = false);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn an_exclusive_lock_waits_for_reads_and_blocks_new_ones() {
        let reads = ReadLocks::default();
        let (first, other) = (reads.try_lock_shared(1).unwrap(), reads.try_lock_shared(2).unwrap());
        let mut exclusion = Box::pin(reads.lock_exclusive(1));
        assert!(poll!(&mut exclusion).is_pending());
        assert!(reads.try_lock_shared(1).is_none());
        drop(first);
        let exclusion = exclusion.await;
        assert!(reads.try_lock_shared(1).is_none() && reads.try_lock_shared(2).is_some());
        drop((exclusion, other));
        drop(reads.try_lock_shared(1).unwrap());
        assert!(reads.0.borrow().is_empty());
    }
}
