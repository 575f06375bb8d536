//! Where an operation may vanish in flight: only where a whole node does.
//!
//! Dropping an operation before its completion loses track of what the disk is doing, so
//! [`crate::Dev`] panics on it in debug builds. A simulated power cut drops a node with all that
//! it was doing; it says so with [`permit`].

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static PERMITTED: Cell<u32> = const { Cell::new(0) };
}

/// While this lives, operations on this thread may be dropped in flight.
#[derive(Debug)]
pub struct Permit(PhantomData<*const ()>);

/// Permits operations of this thread to vanish until the permit is dropped.
#[must_use]
pub fn permit() -> Permit {
    PERMITTED.set(PERMITTED.get() + 1);
    Permit(PhantomData)
}

impl Drop for Permit {
    fn drop(&mut self) {
        PERMITTED.set(PERMITTED.get() - 1);
    }
}

/// Whether losing an operation now is a bug worth a panic.
pub(crate) fn is_forbidden() -> bool {
    cfg!(debug_assertions) && PERMITTED.get() == 0 && !std::thread::panicking()
}
