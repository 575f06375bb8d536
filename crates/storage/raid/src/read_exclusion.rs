//! Read exclusion: makes client reads of a stripe wait while blocks that they may read are
//! rewritten.
//!
//! A plain read of data takes no stripe lock: a client's write changes only blocks of its own
//! range, and a volume never runs it together with a read of that range. But some operations
//! rewrite blocks that a client may be reading. They exclude reads first:
//! * a write of a part of a row, because it rewrites the whole row,
//! * the repair of rows by a read or a scrub, and the zeroing of rows that are given up as lost,
//! * the relocation of a column, while its position changes.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use rustc_hash::FxHashMap;

/// Active reads by stripe, and the stripes whose reads are excluded. A stripe is named by its
/// [key](super::stripe::stripe_key).
#[derive(Debug, Default)]
pub(super) struct StripeReads(RefCell<FxHashMap<u64, StripeState>>);

#[derive(Debug, Default)]
struct StripeState {
    active_reads: u32,
    is_excluded: bool,
    /// The task that waits until no read is active. There is at most one, because it holds the
    /// stripe lock.
    excluder: Option<Waker>,
    /// Hedged reads: their member is late, so they can also be served from other members. An
    /// exclusion wakes them, and they give up the read that is in progress.
    hedged_readers: Vec<Waker>,
}

/// A read in progress.
#[derive(Debug)]
pub(super) struct ReadGuard<'a>(&'a StripeReads, u64);

/// Keeps reads out of a stripe while it lives. Its holder also holds the stripe lock.
#[derive(Debug)]
pub(super) struct ReadExclusion<'a>(&'a StripeReads, u64);

impl StripeReads {
    /// Begins a read of this stripe. `None` if reads are excluded: then the reader must take the
    /// stripe lock, for which it waits until the exclusion is over.
    pub(super) fn try_begin(&self, stripe: u64) -> Option<ReadGuard<'_>> {
        let mut all = self.0.borrow_mut();
        let state = all.entry(stripe).or_default();
        (!state.is_excluded).then(|| {
            state.active_reads += 1;
            ReadGuard(self, stripe)
        })
    }

    /// Admits no read of this stripe from now on, and waits until none is active.
    pub(super) async fn exclude(&self, stripe: u64) -> ReadExclusion<'_> {
        let hedged_readers = {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            state.is_excluded = true;
            std::mem::take(&mut state.hedged_readers)
        };
        hedged_readers.into_iter().for_each(Waker::wake);
        // It exists before the wait, so that reads are admitted again if the wait is dropped.
        let exclusion = ReadExclusion(self, stripe);
        poll_fn(|cx| {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            if state.active_reads == 0 {
                return Poll::Ready(());
            }
            state.excluder = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        exclusion
    }

    fn update(&self, stripe: u64, change: impl FnOnce(&mut StripeState)) {
        let mut all = self.0.borrow_mut();
        let Some(state) = all.get_mut(&stripe) else { return };
        change(state);
        let excluder = if state.active_reads == 0 { state.excluder.take() } else { None };
        if state.active_reads == 0 && !state.is_excluded {
            all.remove(&stripe);
        }
        drop(all);
        excluder.into_iter().for_each(Waker::wake);
    }
}

impl ReadGuard<'_> {
    /// Completes when an exclusion waits for this read to end. The reader then gives up its read
    /// and drops the guard.
    pub(super) async fn exclusion_requested(&self) {
        poll_fn(|cx| {
            let mut all = self.0.0.borrow_mut();
            let state = all.entry(self.1).or_default();
            if state.is_excluded {
                return Poll::Ready(());
            }
            state.hedged_readers.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        self.0.update(self.1, |state| state.active_reads -= 1);
    }
}

impl Drop for ReadExclusion<'_> {
    fn drop(&mut self) {
        self.0.update(self.1, |state| state.is_excluded = false);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn exclusion_waits_for_reads_and_blocks_new_ones() {
        let reads = StripeReads::default();
        let (first, other) = (reads.try_begin(1).unwrap(), reads.try_begin(2).unwrap());
        let mut exclusion = Box::pin(reads.exclude(1));
        assert!(poll!(&mut exclusion).is_pending());
        assert!(reads.try_begin(1).is_none());
        drop(first);
        let exclusion = exclusion.await;
        assert!(reads.try_begin(1).is_none() && reads.try_begin(2).is_some());
        drop((exclusion, other));
        drop(reads.try_begin(1).unwrap());
        assert!(reads.0.borrow().is_empty());
    }
}
