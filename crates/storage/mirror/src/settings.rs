//! What can be set about a mirror.

use std::time::Duration;

use super::member;

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Leases and grace.
    pub member: member::Settings,
    /// How long commands are held while the volume is not served, before initiators are told to
    /// look elsewhere. More than the grace time and a change of the record take.
    pub hold: Duration,
    /// How long a disk or a replica whose node lives may leave an operation unanswered.
    pub stuck: Duration,
    /// How long a member whose node lives may be without a session.
    pub absent: Duration,
    /// Bytes a second that a resync copies at least, whatever clients ask for.
    pub resync_floor: u64,
    /// A copy with fewer bytes of free space, beside what is on its way there, counts as full: the volume is not left
    /// to it alone because another copy has no space for a write.
    pub scarce_bytes: u64,
    /// How long a replica whose disk failed an attempt to join waits before the next.
    pub rejoin_after_failure: Duration,
    /// What is done wrong, to see that it is found.
    #[cfg(feature = "testing")]
    pub mistake: super::Mistake,
}

impl Settings {
    /// Whether this mistake is to be made; never, but in tests.
    #[cfg(feature = "testing")]
    pub(super) fn makes(&self, mistake: super::Mistake) -> bool {
        self.mistake == mistake
    }

    #[cfg(not(feature = "testing"))]
    pub(super) fn makes(&self, _: super::Mistake) -> bool {
        false
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            member: member::Settings::default(),
            hold: Duration::from_secs(5),
            stuck: Duration::from_secs(5),
            absent: Duration::from_secs(1),
            resync_floor: 8 << 20,
            scarce_bytes: 8 << 20,
            rejoin_after_failure: Duration::from_secs(10),
            #[cfg(feature = "testing")]
            mistake: super::Mistake::None,
        }
    }
}
