//! Stripes in which what is stored is written again while clients may read it: they wait until that is over.
//!
//! Reads of data do not wait for a stripe's turn, as nobody writes what they read. Three do: whoever mends a block that could
//! not be read, and whoever writes a part of a row of which another part is being read.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use rustc_hash::FxHashMap;

/// Reads under way by stripe, and the stripes that are quiet.
#[derive(Debug, Default)]
pub(super) struct Reads(RefCell<FxHashMap<u64, State>>);

#[derive(Debug, Default)]
struct State {
    reads: u32,
    is_quiet: bool,
    waker: Option<Waker>,
    /// Reads that lag, and have others to answer them.
    lagging: Vec<Waker>,
}

/// A read under way.
#[derive(Debug)]
pub(super) struct Reading<'a>(&'a Reads, u64);

/// A stripe that nobody reads. Whoever has it has the stripe's turn as well.
#[derive(Debug)]
pub(super) struct Quiet<'a>(&'a Reads, u64);

impl Reads {
    /// A read of this stripe begins; not if it is quiet, and then its turn is to be waited for.
    pub(super) fn begin(&self, stripe: u64) -> Option<Reading<'_>> {
        let mut all = self.0.borrow_mut();
        let state = all.entry(stripe).or_default();
        (!state.is_quiet).then(|| {
            state.reads += 1;
            Reading(self, stripe)
        })
    }

    /// Waits until nobody reads this stripe. From now on no read of it begins.
    pub(super) async fn quiet(&self, stripe: u64) -> Quiet<'_> {
        let lagging = {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            state.is_quiet = true;
            std::mem::take(&mut state.lagging)
        };
        lagging.into_iter().for_each(Waker::wake);
        let quiet = Quiet(self, stripe);
        poll_fn(|cx| {
            let mut all = self.0.borrow_mut();
            let state = all.entry(stripe).or_default();
            if state.reads == 0 {
                return Poll::Ready(());
            }
            state.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        quiet
    }

    fn change(&self, stripe: u64, change: impl FnOnce(&mut State)) {
        let mut all = self.0.borrow_mut();
        let Some(state) = all.get_mut(&stripe) else { return };
        change(state);
        let waker = if state.reads == 0 { state.waker.take() } else { None };
        if state.reads == 0 && !state.is_quiet {
            all.remove(&stripe);
        }
        drop(all);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Reading<'_> {
    /// Ends when somebody waits for this read to end.
    pub(super) async fn is_waited_for(&self) {
        poll_fn(|cx| {
            let mut all = self.0.0.borrow_mut();
            let state = all.entry(self.1).or_default();
            if state.is_quiet {
                return Poll::Ready(());
            }
            state.lagging.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.change(self.1, |state| state.reads -= 1);
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.0.change(self.1, |state| state.is_quiet = false);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn whoever_wants_quiet_waits_for_reads_and_keeps_others_away() {
        let reads = Reads::default();
        let (first, other) = (reads.begin(1).unwrap(), reads.begin(2).unwrap());
        let mut quiet = Box::pin(reads.quiet(1));
        assert!(poll!(&mut quiet).is_pending());
        assert!(reads.begin(1).is_none());
        drop(first);
        let quiet = quiet.await;
        assert!(reads.begin(1).is_none() && reads.begin(2).is_some());
        drop((quiet, other));
        drop(reads.begin(1).unwrap());
        assert!(reads.0.borrow().is_empty());
    }
}
