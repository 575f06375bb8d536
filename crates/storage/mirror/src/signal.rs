//! Waiting for changes of the mirror.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Wakes all waiting tasks on any change; each checks its own condition again.
#[derive(Debug, Default)]
pub(super) struct Signal(RefCell<Vec<Waker>>);

impl Signal {
    /// Wakes the waiting tasks.
    pub(super) fn raise(&self) {
        let woken = std::mem::take(&mut *self.0.borrow_mut());
        woken.into_iter().for_each(Waker::wake);
    }

    /// Waits until `check` returns a value.
    pub(super) async fn until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        poll_fn(|cx| match check() {
            Some(value) => Poll::Ready(value),
            None => {
                self.listen(cx);
                Poll::Pending
            }
        })
        .await
    }

    /// Waits for `wait`; `None` once `give_up` returns true.
    pub(super) async fn unless<T>(
        &self,
        mut give_up: impl FnMut() -> bool,
        wait: impl Future<Output = T>,
    ) -> Option<T> {
        let mut wait = pin!(wait);
        poll_fn(|cx| {
            if give_up() {
                return Poll::Ready(None);
            }
            if let Poll::Ready(value) = wait.as_mut().poll(cx) {
                return Poll::Ready(Some(value));
            }
            self.listen(cx);
            Poll::Pending
        })
        .await
    }

    fn listen(&self, cx: &Context<'_>) {
        let mut wakers = self.0.borrow_mut();
        if !wakers.iter().any(|w| w.will_wake(cx.waker())) {
            wakers.push(cx.waker().clone());
        }
    }
}
