//! The leases between two members within one epoch (RFD 0010, 5.1).

use std::time::Duration;

use peer::{ClockStamp, NodeId};

use super::super::config::InSyncMember as Listed;
use super::LeaseSettings;

/// The lease state of another member.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PeerLease {
    pub(super) member: Listed,
    /// When its newest grant was requested.
    granted_stamp: Option<Duration>,
    /// When the epoch began here: counts as a first grant when deciding whether it is overdue.
    epoch_began_at: Duration,
    /// When this member last granted it a lease.
    last_grant_at: Duration,
    /// When its newest grant was requested, if that was after this member stopped serving: proves
    /// that it was alive then.
    pub(super) proof_of_life: Option<Duration>,
    /// It gets no more grants; it is going to be excluded.
    pub(super) is_excluded: bool,
    /// The data path has reported it as stuck.
    pub(super) is_stuck: bool,
    /// It was excluded, and has said that it stopped serving in this view.
    pub(super) is_revoked: bool,
    /// A request of its has been answered by a request.
    has_requested_back: bool,
}

impl PeerLease {
    pub(super) fn new(member: Listed, now: Duration) -> Self {
        Self {
            member,
            granted_stamp: None,
            epoch_began_at: now,
            last_grant_at: now,
            proof_of_life: None,
            is_excluded: false,
            is_stuck: false,
            is_revoked: false,
            has_requested_back: false,
        }
    }

    pub(super) fn node(&self) -> NodeId {
        self.member.node
    }

    /// Whether its grant is fresh; only then may this member serve beside it.
    pub(super) fn is_held(&self, now: Duration, settings: &LeaseSettings) -> bool {
        self.expires_at(settings).is_some_and(|expires_at| now < expires_at)
    }

    /// Whether to answer its request by a request: it has granted nothing in this epoch, because it
    /// could not answer requests before it had adopted the epoch. Only once: two members whose
    /// grants are lost would request back for ever.
    pub(super) fn begin_request_back(&mut self) -> bool {
        self.granted_stamp.is_none() && !std::mem::replace(&mut self.has_requested_back, true)
    }

    #[cfg(test)]
    pub(super) fn times(&mut self) -> [Option<&mut Duration>; 3] {
        [self.granted_stamp.as_mut(), Some(&mut self.epoch_began_at), Some(&mut self.last_grant_at)]
    }

    /// When its grant expires, if there is one.
    pub(super) fn expires_at(&self, settings: &LeaseSettings) -> Option<Duration> {
        self.granted_stamp.map(|stamp| stamp + settings.lease())
    }

    pub(super) fn clock_stamp(&self) -> Option<ClockStamp> {
        self.granted_stamp.map(to_clock_stamp)
    }

    /// It has granted the lease requested at `stamp`; this member may have stopped serving before
    /// that.
    pub(super) fn on_grant(
        &mut self,
        stamp: ClockStamp,
        now: Duration,
        stopped_serving_at: Option<Duration>,
    ) {
        let requested_at = Duration::from_nanos(stamp.0);
        // A stamp from the future is of an earlier incarnation.
        if requested_at <= now {
            self.granted_stamp = self.granted_stamp.max(Some(requested_at));
            if stopped_serving_at
                .is_some_and(|stopped_serving_at| requested_at >= stopped_serving_at)
            {
                self.proof_of_life = self.proof_of_life.max(Some(requested_at));
            }
        }
    }

    /// Whether this member may leave the volume to it: it has granted a lease since this member
    /// stopped serving, and recently.
    pub(super) fn is_proven_alive(&self, now: Duration, settings: &LeaseSettings) -> bool {
        self.proof_of_life.is_some_and(|requested_at| now < requested_at + settings.lease() / 2)
    }

    /// This member grants it a lease.
    pub(super) fn grant(&mut self, now: Duration) {
        self.last_grant_at = now;
    }

    /// When its silence makes this member read the store. A new epoch allows it one lease time
    /// first.
    pub(super) fn suspect_at(&self, settings: &LeaseSettings) -> Duration {
        self.granted_stamp.map_or(self.epoch_began_at, |stamp| stamp.max(self.epoch_began_at))
            + settings.lease()
            + settings.renewal_interval()
    }

    /// When it cannot hold a lease of this member any more, whatever its clock does.
    pub(super) fn grace_ends_at(&self, settings: &LeaseSettings) -> Duration {
        self.last_grant_at + settings.grace()
    }

    /// Whether it has certainly stopped serving.
    pub(super) fn has_stopped_serving(&self, now: Duration, settings: &LeaseSettings) -> bool {
        self.is_revoked || now >= self.grace_ends_at(settings)
    }

    /// Takes back the exclusion, for a new view.
    pub(super) fn cancel_exclusion(&mut self) {
        (self.is_excluded, self.is_stuck, self.is_revoked) = (false, false, false);
    }
}

/// The clock of this node, as messages carry it.
pub(super) fn to_clock_stamp(now: Duration) -> ClockStamp {
    // 2^64 ns are 584 years of uptime.
    ClockStamp(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}
