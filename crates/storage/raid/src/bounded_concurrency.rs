//! Runs a bounded number of operations at a time.

use std::cell::Cell;

use block::Error;
use futures_util::{StreamExt, stream};

/// Runs these operations, at most `most` at a time. Starts none after a failure, but completes all
/// that have started.
pub(super) async fn run_bounded<F>(each: impl Iterator<Item = F>, most: usize) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let failed = &Cell::new(None);
    let each = each.take_while(|_| failed.get().is_none());
    let outcomes = stream::iter(each).buffer_unordered(most);
    outcomes.for_each(|outcome| async move { failed.set(failed.get().or(outcome.err())) }).await;
    failed.get().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn concurrency_is_bounded_and_no_task_starts_after_a_failure() {
        let (running, most, begun) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let run = |n: u32, fails: bool| {
            let (running, most, begun) = (&running, &most, &begun);
            async move {
                begun.set(begun.get() + 1);
                running.set(running.get() + 1);
                most.set(most.get().max(running.get()));
                tokio::time::sleep(Duration::from_millis(u64::from(n % 3) + 1)).await;
                running.set(running.get() - 1);
                if fails { Err(Error::Gone) } else { Ok(()) }
            }
        };
        assert_eq!(run_bounded((0..40).map(|n| run(n, false)), 7).await, Ok(()));
        assert_eq!((begun.take(), most.take(), running.get()), (40, 7, 0));
        assert_eq!(run_bounded((0..40).map(|n| run(n, n == 3)), 4).await, Err(Error::Gone));
        assert!(begun.get() < 12 && running.get() == 0, "{} have begun", begun.get());
        assert_eq!(run_bounded(std::iter::empty::<std::future::Ready<_>>(), 4).await, Ok(()));
    }
}
