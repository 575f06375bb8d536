//! Read exclusion: makes client reads of a stripe wait while blocks that they may read are
//! rewritten.
//!
//! Plain reads of data take no stripe lock, because normal writes do not change what they read.
//! Exceptions are the repair of an unreadable block, and a write to a part of a row whose other
//! part is being read.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use rustc_hash::FxHashMap;

/// Active reads by stripe, and the stripes whose reads are excluded.
#[derive(Debug, Default)]
pub(super) struct StripeReads(RefCell<FxHashMap<u64, StripeState>>);

#[derive(Debug, Default)]
struct StripeState {
    active_reads: u32,
    is_excluded: bool,
    waker: Option<Waker>,
    /// Late reads, which can be served from other members.
    late_readers: Vec<Waker>,
}

/// A read in progress.
#[derive(Debug)]
pub(super) struct ReadGuard<'a>(&'a StripeReads, u64);

/// A stripe without reads. Its holder also holds the stripe lock.
#[derive(Debug)]
pub(super) struct ReadExclusion<'a>(&'a StripeReads, u64);

impl StripeReads {
    /// Begins a read of this stripe; none if reads are excluded: then wait for the stripe lock.
    pub(super) fn try_begin(&self, stripe: u64) -> Option<ReadGuard<'_>> {
        let mut all = self.0.borrow_mut();
        let state = all.entry(stripe).or_default();
        (!state.is_excluded).then(|| {
            state.active_reads += 1;
            ReadGuard(self, stripe)
        })
    }

    /// Waits until no read of this stripe is active, and admits none from now on.
    pub(super) async fn exclude(&self, stripe: u64) -> ReadExclusion<'_> {
        let late = {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            state.is_excluded = true;
            std::mem::take(&mut state.late_readers)
        };
        late.into_iter().for_each(Waker::wake);
        let exclusion = ReadExclusion(self, stripe);
        poll_fn(|cx| {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            if state.active_reads == 0 {
                return Poll::Ready(());
            }
            state.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        exclusion
    }

    fn update(&self, stripe: u64, change: impl FnOnce(&mut StripeState)) {
        let mut all = self.0.borrow_mut();
        let Some(state) = all.get_mut(&stripe) else { return };
        change(state);
        let waker = if state.active_reads == 0 { state.waker.take() } else { None };
        if state.active_reads == 0 && !state.is_excluded {
            all.remove(&stripe);
        }
        drop(all);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl ReadGuard<'_> {
    /// Returns when an exclusion waits for this read to end.
    pub(super) async fn exclusion_requested(&self) {
        poll_fn(|cx| {
            let mut all = self.0.0.borrow_mut();
            let state = all.entry(self.1).or_default();
            if state.is_excluded {
                return Poll::Ready(());
            }
            state.late_readers.push(cx.waker().clone());
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
