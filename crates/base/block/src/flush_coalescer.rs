//! Shared flushes.
//!
//! A flush must cover every write completed before it was submitted, so one flush can serve all
//! callers that arrived before it *started*. At most one runs; callers that arrive meanwhile share
//! the next.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use crate::Error;

/// Lets callers share flushes. A failed flush fails for everyone who shared it.
#[derive(Debug, Default)]
pub struct FlushCoalescer(RefCell<State>);

#[derive(Debug, Default)]
struct State {
    /// Rounds started and finished; one runs while they differ.
    started: u64,
    finished: u64,
    /// First round that failed, and why. A failed flush is final for the device.
    failed: Option<(u64, Error)>,
    wakers: Vec<Waker>,
}

enum FlushRole {
    Lead(u64),
    Done(Result<(), Error>),
}

impl FlushCoalescer {
    /// Flushes by `run`, or by another caller's `run` that starts after this call.
    ///
    /// # Errors
    /// What the flush that covers this call reported; [`Error::Gone`] if a crash dropped it.
    pub async fn flush<F>(&self, run: impl FnOnce() -> F) -> Result<(), Error>
    where
        F: Future<Output = Result<(), Error>>,
    {
        // The running round does not cover this call; the one after it does.
        let own_round = self.0.borrow().started + 1;
        let turn = poll_fn(|cx| {
            let mut s = self.0.borrow_mut();
            if s.finished >= own_round {
                return Poll::Ready(FlushRole::Done(s.result(own_round)));
            }
            if s.started == s.finished {
                s.started += 1;
                return Poll::Ready(FlushRole::Lead(s.started));
            }
            s.wakers.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        match turn {
            FlushRole::Done(result) => result,
            FlushRole::Lead(round) => {
                let mut lead = FlushLeader { gate: self, round, result: Err(Error::Gone) };
                lead.result = run().await;
                lead.result
            }
        }
    }
}

impl State {
    fn result(&self, own_round: u64) -> Result<(), Error> {
        match self.failed {
            Some((round, error)) if round >= own_round => Err(error),
            _ => Ok(()),
        }
    }
}

/// The leader of a round; frees the gate even if a crash drops its task.
struct FlushLeader<'a> {
    gate: &'a FlushCoalescer,
    round: u64,
    result: Result<(), Error>,
}

impl Drop for FlushLeader<'_> {
    fn drop(&mut self) {
        let wakers = {
            let mut s = self.gate.0.borrow_mut();
            s.finished = self.round;
            if let Err(error) = self.result {
                s.failed = Some((self.round, error));
            }
            std::mem::take(&mut s.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;
    use tokio::sync::Semaphore;
    use tokio::task::{LocalSet, yield_now};

    #[tokio::test(flavor = "current_thread")]
    async fn flushes_that_arrive_during_one_share_the_next() {
        let (gate, runs, pass) =
            (Rc::new(FlushCoalescer::default()), Rc::new(Cell::new(0)), Rc::new(Semaphore::new(0)));
        let set = LocalSet::new();
        let start = |n: usize| {
            for _ in 0..n {
                let (gate, runs, pass) = (gate.clone(), runs.clone(), pass.clone());
                set.spawn_local(async move {
                    let run = || async {
                        runs.set(runs.get() + 1);
                        pass.acquire().await.expect("open").forget();
                        Ok(())
                    };
                    gate.flush(run).await
                });
            }
        };
        start(1);
        set.run_until(yield_now()).await;
        assert_eq!(runs.get(), 1);
        start(10);
        set.run_until(yield_now()).await;
        assert_eq!(runs.get(), 1, "one at a time");
        pass.add_permits(1);
        set.run_until(async {
            while runs.get() < 2 {
                yield_now().await;
            }
        })
        .await;
        pass.add_permits(1);
        set.await;
        assert_eq!(runs.get(), 2, "ten shared one");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_failure_reaches_everyone_who_shared_it() {
        let gate = FlushCoalescer::default();
        let fail = || async {
            yield_now().await;
            Err(Error::Gone)
        };
        let (a, b, c) = tokio::join!(gate.flush(fail), gate.flush(fail), gate.flush(fail));
        assert_eq!((a, b, c), (Err(Error::Gone), Err(Error::Gone), Err(Error::Gone)));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_dropped_flush_reports_no_success() {
        let gate = Rc::new(FlushCoalescer::default());
        let mut first = Box::pin(gate.flush(std::future::pending));
        let mut second = Box::pin(gate.flush(std::future::pending));
        let mut third = Box::pin(gate.flush(|| async { Ok(()) }));
        assert!(futures_util::poll!(&mut first).is_pending());
        assert!(futures_util::poll!(&mut second).is_pending());
        assert!(futures_util::poll!(&mut third).is_pending());
        drop(first);
        assert!(futures_util::poll!(&mut second).is_pending(), "leads the next round");
        drop(second);
        assert_eq!(third.await, Err(Error::Gone), "its round was the one that vanished");
        assert_eq!(gate.flush(|| async { Ok(()) }).await, Ok(()));
    }
}
