//! Locks by number, such as the number of a physical block during its read-modify-write.
//!
//! Callers that do not overlap may write two logical blocks of one physical block at the same time;
//! without a lock each would write back a stale version of the other's block.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use rustc_hash::FxHashMap;

/// Locks by number; free ones take no memory.
#[derive(Debug, Default)]
pub struct KeyedLocks(RefCell<FxHashMap<u64, VecDeque<Waker>>>);

/// A held lock.
#[derive(Debug)]
pub struct KeyedLock<'a> {
    locks: &'a KeyedLocks,
    key: u64,
}

impl KeyedLocks {
    /// Waits for the lock of `key`.
    pub async fn lock(&self, key: u64) -> KeyedLock<'_> {
        poll_fn(|cx| {
            let mut held = self.0.borrow_mut();
            match held.get_mut(&key) {
                Some(waiting) => {
                    waiting.push_back(cx.waker().clone());
                    Poll::Pending
                }
                None => {
                    held.insert(key, VecDeque::new());
                    Poll::Ready(())
                }
            }
        })
        .await;
        KeyedLock { locks: self, key }
    }
}

impl Drop for KeyedLock<'_> {
    fn drop(&mut self) {
        let waiting = self.locks.0.borrow_mut().remove(&self.key);
        // The first to be polled takes it, the others wait again: a waiter may have given up.
        waiting.into_iter().flatten().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::future::join_all;
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn each_key_is_locked_once_at_a_time() {
        let (locks, inside, most) =
            (KeyedLocks::default(), [Cell::new(0), Cell::new(0)], Cell::new(0));
        let visit = async |key: usize| {
            let _lock = locks.lock(key as u64).await;
            inside[key].set(inside[key].get() + 1);
            assert_eq!(inside[key].get(), 1);
            most.set(most.get().max(inside[0].get() + inside[1].get()));
            yield_now().await;
            inside[key].set(inside[key].get() - 1);
        };
        join_all((0..20).map(|i| visit(i % 2))).await;
        assert_eq!(most.get(), 2, "keys do not wait for each other");
        assert!(locks.0.borrow().is_empty());
    }

    #[tokio::test]
    async fn a_waiter_that_gives_up_does_not_block_the_next() {
        let locks = KeyedLocks::default();
        let held = locks.lock(1).await;
        let mut gone = Box::pin(locks.lock(1));
        let mut next = Box::pin(locks.lock(1));
        assert!(futures_util::poll!(&mut gone).is_pending());
        assert!(futures_util::poll!(&mut next).is_pending());
        drop(held);
        drop(gone);
        drop(next.await);
    }
}
