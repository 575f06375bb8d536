//! Decides whether a disk may be claimed, and after which waits. Pure.

use std::fmt;
use std::time::Duration;

use super::record::{NodeIdentity, OwnerRecord, OwnerRecordError, OwnerState};

/// How long to wait after claiming a disk without owner, before checking whether another node did
/// the same.
pub(super) const CONTENTION_WAIT: Duration = Duration::from_secs(1);

/// The owner of a disk, as read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedOwner {
    /// The current claim.
    pub claim: Option<OwnerRecord>,
    /// Number and nonce of its heartbeat.
    pub heartbeat: Option<(u64, u64)>,
    /// The error of an unreadable record: the owner is unknown.
    pub unreadable: Option<OwnerRecordError>,
}

impl ObservedOwner {
    /// Combines these records, the copies of the claim first.
    #[must_use]
    pub fn from_records(
        first: Result<OwnerRecord, OwnerRecordError>,
        second: Result<OwnerRecord, OwnerRecordError>,
        beat: Result<OwnerRecord, OwnerRecordError>,
    ) -> Self {
        let copies = [first, second];
        let newest = copies.iter().filter_map(|copy| copy.as_ref().ok());
        // The first copy is preferred if both are equal.
        let newest = newest.rev().max_by_key(|record| record.claim_generation).copied();
        let bad = |copy: &Result<OwnerRecord, OwnerRecordError>| copy.err();
        let strange = copies.iter().filter_map(bad).find(|bad| {
            // A record that this release does not understand may be newer.
            matches!(bad, OwnerRecordError::Version(_) | OwnerRecordError::InvalidField(_))
        });
        // A disk is not used before the second copy is written: a torn first claim without one does
        // not count.
        let damaged = second.err().filter(|bad| *bad == OwnerRecordError::Damaged);
        let beat = beat.ok().filter(|beat| {
            newest.is_some_and(|n| {
                (n.claim_generation, n.claim_id) == (beat.claim_generation, beat.claim_id)
            })
        });
        Self {
            claim: newest,
            heartbeat: beat.map(|beat| (beat.heartbeat, beat.nonce)),
            unreadable: strange.or(damaged.filter(|_| newest.is_none())),
        }
    }

    /// Whether claim and heartbeat are the same as in `before`.
    #[must_use]
    pub fn is_unchanged_since(&self, before: &Self) -> bool {
        let claim = |seen: &Self| seen.claim.map(|claim| (claim.claim_generation, claim.claim_id));
        (claim(self), self.heartbeat) == (claim(before), before.heartbeat)
    }
}

/// The next step towards claiming a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimStep {
    /// Watch its heartbeat for this time: if it moves, the disk is in use.
    WatchHeartbeat(Duration),
    /// Claim it, wait this time before use, and check that the claim is still there.
    ClaimAndWait(Duration),
    /// Do not touch it.
    Refuse(ClaimRefusal),
}

/// Why a disk must not be touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimRefusal {
    /// Another node owns it and has not released it.
    OwnedByOther(Box<OwnerRecord>),
    /// Its heartbeat moves: it is in use.
    InUse(Box<OwnerRecord>),
    /// Another node has claimed it at the same moment, or since; `None` if something else overwrote
    /// the owner record.
    ClaimedByOther(Option<Box<OwnerRecord>>),
    /// Its owner cannot be determined.
    OwnerUnknown(OwnerRecordError),
}

impl ClaimRefusal {
    /// Whether the operator may have it taken over.
    #[must_use]
    pub fn can_take_over(&self) -> bool {
        match self {
            Self::OwnedByOther(_)
            | Self::OwnerUnknown(OwnerRecordError::Damaged | OwnerRecordError::NoMagic) => true,
            Self::InUse(_) | Self::ClaimedByOther(_) | Self::OwnerUnknown(_) => false,
        }
    }
}

impl fmt::Display for ClaimRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OwnedByOther(record) => write!(
                f,
                "belongs to {}, which has not released it; last seen {} by its clock",
                record.owner,
                record.written_at()
            ),
            Self::InUse(record) => {
                write!(
                    f,
                    "is in use by {}: its heartbeat moves; stop that node first",
                    record.owner
                )
            }
            Self::ClaimedByOther(Some(record)) => write!(f, "was taken by {}", record.owner),
            Self::ClaimedByOther(None) => f.write_str("its owner record was overwritten"),
            Self::OwnerUnknown(bad) => write!(f, "holds {bad}: which node uses it is unknown"),
        }
    }
}

/// How long to wait after claiming a disk until its last owner has stopped: longer than that
/// owner's lease.
fn lease_expiry_wait(lease: Duration) -> Duration {
    lease + lease / 4
}

/// The next step of `me` for a disk of which this was `observed`. `take_over`: the operator wants
/// it taken from its owner; `is_shared`: other machines may reach it; `has_watched`: the heartbeat
/// has not moved for as long as [`ClaimStep::WatchHeartbeat`] said.
#[must_use]
pub fn next_step(
    observed: &ObservedOwner,
    me: &NodeIdentity,
    take_over: bool,
    is_shared: bool,
    has_watched: bool,
) -> ClaimStep {
    let contention_wait = if is_shared { CONTENTION_WAIT } else { Duration::ZERO };
    if let Some(bad) = observed.unreadable {
        let refusal = ClaimRefusal::OwnerUnknown(bad);
        return match take_over && refusal.can_take_over() {
            // The lease of its owner is unknown: assume our own.
            true => ClaimStep::ClaimAndWait(if is_shared {
                lease_expiry_wait(super::LEASE_DURATION)
            } else {
                Duration::ZERO
            }),
            false => ClaimStep::Refuse(refusal),
        };
    }
    let Some(claim) = observed.claim else { return ClaimStep::ClaimAndWait(contention_wait) };
    if claim.state == OwnerState::Released {
        return ClaimStep::ClaimAndWait(contention_wait);
    }
    let is_own = claim.owner.node_id == me.node_id;
    if is_own && claim.owner.boot_instance == me.boot_instance {
        // An earlier process with this data directory has ended.
        return ClaimStep::ClaimAndWait(Duration::ZERO);
    }
    if !is_own && !take_over {
        return ClaimStep::Refuse(ClaimRefusal::OwnedByOther(Box::new(claim)));
    }
    let lease = Duration::from_millis(claim.lease_ms.into());
    if lease.is_zero() {
        return ClaimStep::ClaimAndWait(contention_wait);
    }
    if has_watched {
        ClaimStep::ClaimAndWait(lease_expiry_wait(lease))
    } else {
        ClaimStep::WatchHeartbeat(lease)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::super::{ClaimSubject, LEASE_DURATION};
    use super::*;
    use wire::ShortText;

    fn node(node: u128, boot_instance: u128) -> NodeIdentity {
        NodeIdentity {
            node_id: Uuid::from_u128(node),
            boot_instance: Uuid::from_u128(boot_instance),
            cluster_id: None,
            node_number: 0,
            name: ShortText::new("a"),
            host: ShortText::new("srv1"),
        }
    }

    fn held(owner: NodeIdentity) -> OwnerRecord {
        OwnerRecord {
            claim_generation: 3,
            heartbeat: 4,
            nonce: 5,
            claim_id: Uuid::from_u128(6),
            subject: ClaimSubject { set_id: Uuid::from_u128(7), part_id: Uuid::from_u128(8) },
            owner,
            written_wall_time: Duration::from_secs(9),
            heartbeat_interval_ms: 2000,
            lease_ms: 5000,
            state: OwnerState::Held,
        }
    }

    fn seen(claim: OwnerRecord) -> ObservedOwner {
        ObservedOwner::from_records(Ok(claim), Ok(claim), Err(OwnerRecordError::NoMagic))
    }

    const NONE: Result<OwnerRecord, OwnerRecordError> = Err(OwnerRecordError::NoMagic);
    const LONG: Duration = Duration::from_millis(6250);

    #[test]
    fn an_unowned_disk_is_claimed_after_a_short_wait() {
        let me = node(1, 1);
        let free = ObservedOwner::from_records(NONE, NONE, NONE);
        assert_eq!(
            next_step(&free, &me, false, true, false),
            ClaimStep::ClaimAndWait(CONTENTION_WAIT)
        );
        assert_eq!(
            next_step(&free, &me, false, false, false),
            ClaimStep::ClaimAndWait(Duration::ZERO)
        );
        let released = seen(OwnerRecord { state: OwnerState::Released, ..held(node(2, 2)) });
        assert_eq!(
            next_step(&released, &me, false, true, false),
            ClaimStep::ClaimAndWait(CONTENTION_WAIT)
        );
    }

    #[test]
    fn a_restarted_process_claims_at_once_a_rebooted_machine_watches() {
        let (me, before) = (node(1, 1), node(1, 9));
        assert_eq!(
            next_step(&seen(held(me)), &me, false, true, false),
            ClaimStep::ClaimAndWait(Duration::ZERO)
        );
        let booted = seen(held(before));
        assert_eq!(
            next_step(&booted, &me, false, true, false),
            ClaimStep::WatchHeartbeat(LEASE_DURATION)
        );
        assert_eq!(next_step(&booted, &me, false, true, true), ClaimStep::ClaimAndWait(LONG));
        // A file that no other machine reaches has no heartbeat.
        let file = OwnerRecord { heartbeat_interval_ms: 0, lease_ms: 0, ..held(before) };
        assert_eq!(
            next_step(&seen(file), &me, false, false, false),
            ClaimStep::ClaimAndWait(Duration::ZERO)
        );
    }

    #[test]
    fn a_disk_of_another_node_needs_take_over() {
        let (me, other) = (node(1, 1), node(2, 1));
        let owned = ClaimStep::Refuse(ClaimRefusal::OwnedByOther(Box::new(held(other))));
        assert_eq!(next_step(&seen(held(other)), &me, false, true, true), owned);
        assert_eq!(
            next_step(&seen(held(other)), &me, true, true, false),
            ClaimStep::WatchHeartbeat(LEASE_DURATION)
        );
        assert_eq!(
            next_step(&seen(held(other)), &me, true, true, true),
            ClaimStep::ClaimAndWait(LONG)
        );
    }

    #[test]
    fn a_disk_with_an_unreadable_owner_record_is_refused() {
        let me = node(1, 1);
        let refused = |seen: &ObservedOwner, said| {
            matches!(next_step(seen, &me, said, true, true), ClaimStep::Refuse(_))
        };
        let damaged = ObservedOwner::from_records(
            Err(OwnerRecordError::Damaged),
            Err(OwnerRecordError::Damaged),
            NONE,
        );
        assert!(refused(&damaged, false) && !refused(&damaged, true));
        let torn = ObservedOwner::from_records(Err(OwnerRecordError::Damaged), NONE, NONE);
        assert!(!refused(&torn, false), "the first claim was never finished");
        let newer =
            ObservedOwner::from_records(Ok(held(me)), Err(OwnerRecordError::Version(2)), NONE);
        assert!(
            refused(&newer, false) && refused(&newer, true),
            "it may be newer than what is known"
        );
        let one = ObservedOwner::from_records(Err(OwnerRecordError::Damaged), Ok(held(me)), NONE);
        assert!(!refused(&one, false), "the other copy says it");
    }

    #[test]
    fn a_heartbeat_of_another_claim_is_ignored() {
        let claim = held(node(1, 1));
        let beat = OwnerRecord { heartbeat: 77, ..claim };
        assert_eq!(
            ObservedOwner::from_records(Ok(claim), Ok(claim), Ok(beat)).heartbeat,
            Some((77, 5))
        );
        let before = OwnerRecord { claim_generation: 2, ..beat };
        assert_eq!(ObservedOwner::from_records(Ok(claim), Ok(claim), Ok(before)).heartbeat, None);
        let newer = OwnerRecord { claim_generation: 4, ..claim };
        assert_eq!(ObservedOwner::from_records(Ok(claim), Ok(newer), NONE).claim, Some(newer));
    }
}
