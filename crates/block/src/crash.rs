//! Where an operation may vanish in flight: only where a whole node does.
//!
//! Dropping an operation before its completion loses track of what the disk is doing, so
//! [`crate::Dev`] panics on it in debug builds. A simulated power cut drops a node with all that
//! it was doing; it says so with [`permit`].

use std::cell::Cell;

thread_local! {
    static PERMITTED: Cell<u32> = const { Cell::new(0) };
}

/// While this lives, operations on this thread may be dropped in flight.
#[derive(Debug)]
pub struct Permit(());

/// Permits operations of this thread to vanish until the permit is dropped.
#[must_use]
pub fn permit() -> Permit {
    PERMITTED.set(PERMITTED.get() + 1);
    Permit(())
}

impl Drop for Permit {
    fn drop(&mut self) {
        PERMITTED.set(PERMITTED.get() - 1);
    }
}

/// Armed while an operation is in flight.
pub(crate) struct InFlight {
    layer: &'static str,
    armed: bool,
}

impl InFlight {
    pub(crate) fn new(layer: &'static str) -> Self {
        Self { layer, armed: true }
    }

    pub(crate) fn done(mut self) {
        self.armed = false;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if cfg!(debug_assertions) && self.armed && !std::thread::panicking() && PERMITTED.get() == 0
        {
            panic!("an operation on {} was dropped in flight", self.layer);
        }
    }
}
