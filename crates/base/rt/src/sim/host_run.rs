//! Whether what belongs to one run of a host still has an owner.

use std::cell::Cell;

/// One run of a host, from start to crash.
#[derive(Debug)]
pub(crate) struct HostRun {
    alive: Cell<bool>,
}

impl HostRun {
    /// A run that begins.
    pub(crate) fn new() -> Self {
        Self { alive: Cell::new(true) }
    }

    /// The run has ended.
    pub(crate) fn end(&self) {
        self.alive.set(false);
    }

    /// Whether the host still runs this run's software.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.get()
    }
}
