//! What a replica that rests must not have left, for tests.

use super::Mirror;

/// What has been begun and has not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// Writes with a place in the order that are not known to be committed.
    pub entries: usize,
    /// Writes that entered here and are not answered.
    pub own: usize,
    /// Writes that this primary waits for others to apply.
    pub ordered: usize,
    /// Questions to others.
    pub requests: usize,
    /// Replicas that are brought in sync.
    pub joiners: usize,
    /// Ranges that are in use.
    pub ranges: usize,
}

/// What a replica has copied to others since it was opened, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resynced {
    /// What was marked when each attempt began.
    pub marked: u64,
    /// What was copied.
    pub copied: u64,
}

impl Mirror {
    /// What is in flight.
    #[must_use]
    pub fn in_flight(&self) -> InFlight {
        InFlight {
            entries: self.0.entries.borrow().len(),
            own: self.0.own.len(),
            ordered: self.0.order.borrow().len(),
            requests: self.0.requests.len(),
            joiners: self.0.joiners.borrow().iter().count(),
            ranges: self.0.locks.len(),
        }
    }

    /// What was copied to others.
    #[must_use]
    pub fn resynced(&self) -> Resynced {
        let (marked, copied) = self.0.joiners.borrow().totals();
        Resynced { marked, copied }
    }
}
