//! Permits dropping operations in flight, where a whole node is dropped.
//!
//! Dropping an operation before its completion loses track of the disk, so [`crate::Dev`] panics on
//! it in debug builds. A simulated power cut drops a node with everything in flight;
//! [`permit_drops`] permits that.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static ACTIVE_PERMITS: Cell<u32> = const { Cell::new(0) };
}

/// While this exists, operations on this thread may be dropped in flight.
#[derive(Debug)]
pub struct DropPermit(PhantomData<*const ()>);

/// Permits dropping operations of this thread until the result is dropped.
#[must_use]
pub fn permit_drops() -> DropPermit {
    ACTIVE_PERMITS.set(ACTIVE_PERMITS.get() + 1);
    DropPermit(PhantomData)
}

impl Drop for DropPermit {
    fn drop(&mut self) {
        ACTIVE_PERMITS.set(ACTIVE_PERMITS.get() - 1);
    }
}

/// Whether dropping an operation now is a bug and panics.
pub(crate) fn is_drop_forbidden() -> bool {
    cfg!(debug_assertions) && ACTIVE_PERMITS.get() == 0 && !std::thread::panicking()
}
