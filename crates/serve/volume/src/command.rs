//! One accepted command, as its front end sees it.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

use block::{Ctx, Error};

/// A handle for aborting an accepted command. Dropping it has no effect.
#[derive(Clone, Debug, Default)]
pub struct Command(Rc<CommandState>);

#[derive(Debug, Default)]
struct CommandState {
    aborted: Cell<bool>,
    /// Whether a reservation has ended it.
    revoked: Cell<bool>,
    /// Set while the command has its memory; a handle that outlives the command holds none.
    ctx: RefCell<Option<Ctx>>,
    waker: RefCell<Option<Waker>>,
}

impl Command {
    /// Requests that the command be abandoned. It is always answered, with [`Error::Aborted`] only
    /// if it has not taken effect.
    pub fn abort(&self) {
        self.0.aborted.set(true);
        if let Some(ctx) = &*self.0.ctx.borrow() {
            ctx.abort();
        }
        if let Some(waker) = self.0.waker.take() {
            waker.wake();
        }
    }

    /// Whether an abort was requested.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.aborted.get()
    }

    /// Its caller has lost the right to do this: ends it as an abort does.
    pub(crate) fn revoke(&self) {
        self.0.revoked.set(true);
        self.abort();
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.0.revoked.get()
    }

    pub(crate) fn set_ctx(&self, ctx: &Ctx) {
        if self.is_aborted() {
            ctx.abort();
        }
        self.0.ctx.replace(Some(ctx.clone()));
    }

    pub(crate) fn finish(&self) {
        self.0.ctx.take();
    }

    /// Waits for `wait` or for an abort.
    pub(crate) async fn unless_aborted<T>(
        &self,
        wait: impl Future<Output = T>,
    ) -> Result<T, Error> {
        let mut wait = pin!(wait);
        let result = poll_fn(|cx| {
            if self.is_aborted() {
                return Poll::Ready(Err(Error::Aborted));
            }
            if let Poll::Ready(v) = wait.as_mut().poll(cx) {
                return Poll::Ready(Ok(v));
            }
            self.0.waker.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
        self.0.waker.take();
        result
    }
}
