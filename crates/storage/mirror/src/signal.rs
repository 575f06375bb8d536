//! Waiting for something about the mirror to change.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Wakes all who wait whenever anything has changed: they look again.
#[derive(Debug, Default)]
pub(super) struct Signal(RefCell<Vec<Waker>>);

impl Signal {
    /// Something has changed.
    pub(super) fn raise(&self) {
        let woken = std::mem::take(&mut *self.0.borrow_mut());
        woken.into_iter().for_each(Waker::wake);
    }

    /// Waits until `look` finds what it looks for.
    pub(super) async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|cx| match look() {
            Some(found) => Poll::Ready(found),
            None => {
                self.listen(cx);
                Poll::Pending
            }
        })
        .await
    }

    /// Waits for `wait`; `None` if `look` finds that it is in vain.
    pub(super) async fn unless<T>(
        &self,
        mut look: impl FnMut() -> bool,
        wait: impl Future<Output = T>,
    ) -> Option<T> {
        let mut wait = pin!(wait);
        poll_fn(|cx| {
            if look() {
                return Poll::Ready(None);
            }
            if let Poll::Ready(found) = wait.as_mut().poll(cx) {
                return Poll::Ready(Some(found));
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
