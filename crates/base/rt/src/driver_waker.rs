//! How sockets, disks and jobs wake the driver of their core, and keep the core awake.

use std::cell::{Cell, RefCell};
use std::task::{Context, Waker};

/// State shared between a core and its driver.
#[derive(Debug, Default)]
pub(crate) struct DriverWaker {
    driver: RefCell<Option<Waker>>,
    /// Whether the driver will run before the core can sleep.
    is_scheduled: Cell<bool>,
    pub(crate) had_activity: Cell<bool>,
    /// Whether activity is to wake the driver.
    pub(crate) wakes_on_activity: Cell<bool>,
}

impl DriverWaker {
    /// Schedules the driver behind the tasks that are ready.
    pub(crate) fn schedule(&self) {
        if !self.is_scheduled.replace(true)
            && let Some(driver) = &*self.driver.borrow()
        {
            driver.wake_by_ref();
        }
    }

    /// Records activity: the core stays awake a little longer.
    pub(crate) fn note_activity(&self) {
        self.had_activity.set(true);
        if self.wakes_on_activity.get() {
            self.schedule();
        }
    }

    /// Begins a poll of the driver.
    pub(crate) fn begin_poll(&self, cx: &Context<'_>) {
        self.is_scheduled.set(false);
        let mut driver = self.driver.borrow_mut();
        match &mut *driver {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *driver = Some(cx.waker().clone()),
        }
    }
}
