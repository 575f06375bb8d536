//! What an idle replica must have none of, for tests.

use super::Mirror;

/// Counts of unfinished work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlightCounts {
    /// Ordered writes that are not known to be committed.
    pub prepared: usize,
    /// Writes that entered here and are not answered.
    pub local_writes: usize,
    /// Writes that this primary waits for other members to apply.
    pub ordered: usize,
    /// Unanswered requests to peers.
    pub peer_requests: usize,
    /// Joiners.
    pub joiners: usize,
    /// Locked ranges.
    pub ranges: usize,
}

/// Bytes copied to joiners since the replica was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResyncTotals {
    /// Bytes marked dirty when each attempt began.
    pub dirty_bytes: u64,
    /// Bytes copied.
    pub copied_bytes: u64,
}

impl Mirror {
    /// Counts of unfinished work.
    #[must_use]
    pub fn in_flight_counts(&self) -> InFlightCounts {
        InFlightCounts {
            prepared: self.0.state().prepared.len(),
            local_writes: self.0.state().local_writes.len(),
            ordered: self.0.state().sequencer.len(),
            peer_requests: self.0.peer_requests.len(),
            joiners: self.0.state().joiners.iter().count(),
            ranges: self.0.range_locks.len(),
        }
    }

    /// Bytes copied to joiners.
    #[must_use]
    pub fn resync_totals(&self) -> ResyncTotals {
        let (dirty, copied_bytes) = self.0.state().joiners.totals();
        ResyncTotals { dirty_bytes: dirty, copied_bytes }
    }
}
