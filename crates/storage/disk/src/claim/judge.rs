//! Whether a disk may be taken, and after which waits. Pure: what was read goes in, what to do comes out.

use std::fmt;
use std::time::Duration;

use super::record::{BadRecord, NodeIdentity, OwnerRecord, State};

/// How long whoever takes a disk that nobody has waits until it looks whether another one has done the same.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// What is found of a disk's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The claim that counts.
    pub claim: Option<OwnerRecord>,
    /// Number and nonce of its heartbeat.
    pub beat: Option<(u64, u64)>,
    /// A record that cannot be understood: who has the disk is not known.
    pub unclear: Option<BadRecord>,
}

impl Seen {
    /// What these records say, the copies of the claim first.
    #[must_use]
    pub fn of(
        first: Result<OwnerRecord, BadRecord>,
        second: Result<OwnerRecord, BadRecord>,
        beat: Result<OwnerRecord, BadRecord>,
    ) -> Self {
        let copies = [first, second];
        let newest = copies.iter().filter_map(|copy| copy.as_ref().ok());
        // Of two alike the first is taken.
        let newest = newest.rev().max_by_key(|record| record.claim).copied();
        let bad = |copy: &Result<OwnerRecord, BadRecord>| copy.err();
        let strange = copies.iter().filter_map(bad).find(|bad| {
            // It may be newer than what is understood.
            matches!(bad, BadRecord::Version(_) | BadRecord::Field(_))
        });
        // Nobody uses a disk before the second copy lies there: a first claim that was torn is none.
        let damaged = second.err().filter(|bad| *bad == BadRecord::Damaged);
        let beat = beat
            .ok()
            .filter(|beat| newest.is_some_and(|n| (n.claim, n.life) == (beat.claim, beat.life)));
        Self {
            claim: newest,
            beat: beat.map(|beat| (beat.beat, beat.nonce)),
            unclear: strange.or(damaged.filter(|_| newest.is_none())),
        }
    }

    /// Whether the owner has given no sign of life since `before` was seen.
    #[must_use]
    pub fn is_as_still_as(&self, before: &Self) -> bool {
        let claim = |seen: &Self| seen.claim.map(|claim| (claim.claim, claim.life));
        (claim(self), self.beat) == (claim(before), before.beat)
    }
}

/// What is to be done with a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Its heartbeat is to be watched for so long: if it moves the disk is in use.
    Watch(Duration),
    /// It may be claimed. Whoever has done so waits so long before the disk is used, and looks whether the claim is still there.
    Take(Duration),
    /// It must not be touched.
    Refuse(Refusal),
}

/// Why a disk must not be touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another node has it and has not given it back.
    Owned(Box<OwnerRecord>),
    /// Its heartbeat moves: it is in use now.
    InUse(Box<OwnerRecord>),
    /// Another node has claimed it at the same moment, or since; none if something else lies in place of the owner record.
    Lost(Option<Box<OwnerRecord>>),
    /// Who has it cannot be told.
    Unclear(BadRecord),
}

impl Refusal {
    /// Whether a person may say that it is to be taken all the same.
    #[must_use]
    pub fn may_take_over(&self) -> bool {
        match self {
            Self::Owned(_) | Self::Unclear(BadRecord::Damaged | BadRecord::NoMagic) => true,
            Self::InUse(_) | Self::Lost(_) | Self::Unclear(_) => false,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owned(record) => write!(
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
            Self::Lost(Some(record)) => write!(f, "was taken by {}", record.owner),
            Self::Lost(None) => f.write_str("its owner record was overwritten"),
            Self::Unclear(bad) => write!(f, "holds {bad}: which node uses it is not known"),
        }
    }
}

/// How long whoever claims a disk waits until its last owner has stopped: longer than that one goes on after a look.
fn until_stopped(stop: Duration) -> Duration {
    stop + stop / 4
}

/// What `me` is to do with a disk of which this was `seen`. `take_over` says that a person wants it taken from its owner;
/// `is_shared`, that other machines may reach it; `has_watched`, that the heartbeat of what was seen has not moved as long as
/// [`Step::Watch`] had said.
#[must_use]
pub fn judge(
    seen: &Seen,
    me: &NodeIdentity,
    take_over: bool,
    is_shared: bool,
    has_watched: bool,
) -> Step {
    let settle = if is_shared { SETTLE } else { Duration::ZERO };
    if let Some(bad) = seen.unclear {
        let refusal = Refusal::Unclear(bad);
        return match take_over && refusal.may_take_over() {
            // Nobody knows how long its owner goes on: as long as one of ours.
            true => Step::Take(if is_shared { until_stopped(super::STOP) } else { Duration::ZERO }),
            false => Step::Refuse(refusal),
        };
    }
    let Some(claim) = seen.claim else { return Step::Take(settle) };
    if claim.state == State::Released {
        return Step::Take(settle);
    }
    let is_mine = claim.owner.node == me.node;
    if is_mine && claim.owner.place == me.place {
        // Of two processes with this data directory the one before has ended.
        return Step::Take(Duration::ZERO);
    }
    if !is_mine && !take_over {
        return Step::Refuse(Refusal::Owned(Box::new(claim)));
    }
    let stop = Duration::from_millis(claim.stop_ms.into());
    if stop.is_zero() {
        return Step::Take(settle);
    }
    if has_watched { Step::Take(until_stopped(stop)) } else { Step::Watch(stop) }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::super::{STOP, Subject};
    use super::*;
    use wire::Text;

    fn node(node: u128, place: u128) -> NodeIdentity {
        NodeIdentity {
            node: Uuid::from_u128(node),
            place: Uuid::from_u128(place),
            cluster: None,
            number: 0,
            name: Text::new("a"),
            host: Text::new("srv1"),
        }
    }

    fn held(owner: NodeIdentity) -> OwnerRecord {
        OwnerRecord {
            claim: 3,
            beat: 4,
            nonce: 5,
            life: Uuid::from_u128(6),
            subject: Subject { set: Uuid::from_u128(7), part: Uuid::from_u128(8) },
            owner,
            written: Duration::from_secs(9),
            interval_ms: 2000,
            stop_ms: 5000,
            state: State::Held,
        }
    }

    fn seen(claim: OwnerRecord) -> Seen {
        Seen::of(Ok(claim), Ok(claim), Err(BadRecord::NoMagic))
    }

    const NONE: Result<OwnerRecord, BadRecord> = Err(BadRecord::NoMagic);
    const LONG: Duration = Duration::from_millis(6250);

    #[test]
    fn a_disk_that_nobody_has_is_taken_after_a_moment() {
        let me = node(1, 1);
        let free = Seen::of(NONE, NONE, NONE);
        assert_eq!(judge(&free, &me, false, true, false), Step::Take(SETTLE));
        assert_eq!(judge(&free, &me, false, false, false), Step::Take(Duration::ZERO));
        let released = seen(OwnerRecord { state: State::Released, ..held(node(2, 2)) });
        assert_eq!(judge(&released, &me, false, true, false), Step::Take(SETTLE));
    }

    #[test]
    fn a_process_after_a_kill_takes_its_disks_at_once_and_a_booted_machine_watches() {
        let (me, before) = (node(1, 1), node(1, 9));
        assert_eq!(judge(&seen(held(me)), &me, false, true, false), Step::Take(Duration::ZERO));
        let booted = seen(held(before));
        assert_eq!(judge(&booted, &me, false, true, false), Step::Watch(STOP));
        assert_eq!(judge(&booted, &me, false, true, true), Step::Take(LONG));
        // A file that no other machine reaches has no heartbeat.
        let file = OwnerRecord { interval_ms: 0, stop_ms: 0, ..held(before) };
        assert_eq!(judge(&seen(file), &me, false, false, false), Step::Take(Duration::ZERO));
    }

    #[test]
    fn anothers_disk_is_refused_until_a_person_says_otherwise() {
        let (me, other) = (node(1, 1), node(2, 1));
        let owned = Step::Refuse(Refusal::Owned(Box::new(held(other))));
        assert_eq!(judge(&seen(held(other)), &me, false, true, true), owned);
        assert_eq!(judge(&seen(held(other)), &me, true, true, false), Step::Watch(STOP));
        assert_eq!(judge(&seen(held(other)), &me, true, true, true), Step::Take(LONG));
    }

    #[test]
    fn what_cannot_be_understood_is_nobodys_to_take() {
        let me = node(1, 1);
        let refused =
            |seen: &Seen, said| matches!(judge(seen, &me, said, true, true), Step::Refuse(_));
        let damaged = Seen::of(Err(BadRecord::Damaged), Err(BadRecord::Damaged), NONE);
        assert!(refused(&damaged, false) && !refused(&damaged, true));
        let torn = Seen::of(Err(BadRecord::Damaged), NONE, NONE);
        assert!(!refused(&torn, false), "the first claim was never finished");
        let newer = Seen::of(Ok(held(me)), Err(BadRecord::Version(2)), NONE);
        assert!(
            refused(&newer, false) && refused(&newer, true),
            "it may be newer than what is known"
        );
        let one = Seen::of(Err(BadRecord::Damaged), Ok(held(me)), NONE);
        assert!(!refused(&one, false), "the other copy says it");
    }

    #[test]
    fn a_heartbeat_of_another_claim_is_none() {
        let claim = held(node(1, 1));
        let beat = OwnerRecord { beat: 77, ..claim };
        assert_eq!(Seen::of(Ok(claim), Ok(claim), Ok(beat)).beat, Some((77, 5)));
        let before = OwnerRecord { claim: 2, ..beat };
        assert_eq!(Seen::of(Ok(claim), Ok(claim), Ok(before)).beat, None);
        let newer = OwnerRecord { claim: 4, ..claim };
        assert_eq!(Seen::of(Ok(claim), Ok(newer), NONE).claim, Some(newer));
    }
}
