//! Settings of a mirror.

use std::time::Duration;

use super::membership;

/// Time limits and thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorSettings {
    /// Lease and grace times.
    pub leases: membership::LeaseSettings,
    /// How long commands wait while the volume is not served, before initiators are told to use
    /// another path. Longer than the grace time plus a reconfiguration.
    pub hold_timeout: Duration,
    /// How long an operation of a disk, or of a replica whose node is alive, may take.
    pub stuck_timeout: Duration,
    /// How long a member whose node is alive may have no session.
    pub absent_timeout: Duration,
    /// Lowest rate of a resync in bytes per second, whatever the load of clients.
    pub resync_min_bytes_per_s: u64,
    /// A replica with less free space, less the writes in flight, counts as full: it never becomes
    /// the only member because another replica has no space for a write.
    pub min_free_bytes: u64,
    /// How long a replica whose disk failed a join attempt waits before the next.
    pub rejoin_delay: Duration,
    /// The mistake to make, for tests that must find it.
    #[cfg(feature = "testing")]
    pub mistake: super::Mistake,
}

impl MirrorSettings {
    /// Whether this mistake is to be made; never outside tests.
    #[cfg(feature = "testing")]
    pub(super) fn has_mistake(&self, mistake: super::Mistake) -> bool {
        self.mistake == mistake
    }

    #[cfg(not(feature = "testing"))]
    pub(super) fn has_mistake(&self, _: super::Mistake) -> bool {
        false
    }
}

impl Default for MirrorSettings {
    fn default() -> Self {
        Self {
            leases: membership::LeaseSettings::default(),
            hold_timeout: Duration::from_secs(5),
            stuck_timeout: Duration::from_secs(5),
            absent_timeout: Duration::from_secs(1),
            resync_min_bytes_per_s: 8 << 20,
            min_free_bytes: 8 << 20,
            rejoin_delay: Duration::from_secs(10),
            #[cfg(feature = "testing")]
            mistake: super::Mistake::None,
        }
    }
}
