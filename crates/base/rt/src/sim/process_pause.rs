//! Whether a process is paused, and who runs its tasks once it is not.

use std::cell::{Cell, RefCell};
use std::task::{Context, Waker};
use std::time::Duration;

/// Whether the process of one run of a host is paused.
#[derive(Debug, Default)]
pub(crate) struct ProcessPause {
    /// Virtual time at which it continues; `None`: it is running.
    until: Cell<Option<Duration>>,
    /// The poller of its tasks, which found it paused.
    blocked_poller: RefCell<Option<Waker>>,
}

impl ProcessPause {
    /// Whether the tasks must not run now; the caller is woken when they may again.
    pub(crate) fn is_blocking(&self, cx: &Context<'_>) -> bool {
        let stopped = self.is_active();
        if stopped {
            *self.blocked_poller.borrow_mut() = Some(cx.waker().clone());
        }
        stopped
    }

    /// Whether the process is paused.
    pub(super) fn is_active(&self) -> bool {
        self.until.get().is_some()
    }

    /// The process is gone.
    pub(crate) fn clear(&self) {
        self.until.set(None);
    }

    /// The process stays paused until then, if not longer.
    pub(super) fn extend_until(&self, until: Duration) {
        self.until.set(self.until.get().max(Some(until)));
    }

    /// Whether it is paused and was to continue by `now`.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.until.get().is_some_and(|until| until <= now)
    }

    /// The process continues.
    pub(super) fn end(&self) {
        self.until.set(None);
        self.blocked_poller.take().into_iter().for_each(Waker::wake);
    }
}
