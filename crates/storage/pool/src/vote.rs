//! Who may be believed when a pool is opened, and what a version may drop
//! ([RFD 0030](../../../../docs/rfd/0030-pools.md), section 5).
//!
//! Both rules look at what disks know, and do nothing. That together they lose no version that counts is searched for in
//! `search`, with mistakes planted that have to be found.

use std::collections::BTreeMap;

use uuid::Uuid;
use wire::Text;

use super::Mistake;
use super::metadata::{MemberId, Members, Metadata, Stamp};

mod refusal;

pub use refusal::{Disk, Few, Older, Refusal, Truth, TwoTruths};

/// What a disk knows that is there and undamaged. Of two with one identity neither is asked.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// Its number, as its label has it.
    pub member: MemberId,
    /// Its identity, as its label has it.
    pub uuid: Uuid,
    /// The newest version on it.
    pub metadata: &'a Metadata,
}

/// A disk that is there and damaged: it is not asked, but its label still proves that a version was committed.
#[derive(Clone, Copy, Debug)]
pub struct Witness {
    /// Its number, as its label has it.
    pub member: MemberId,
    /// Its identity, as its label has it.
    pub uuid: Uuid,
    /// The serial number of the disk that it was made on.
    pub serial: Text,
    /// A version that was committed.
    pub committed: Stamp,
}

/// A version that may be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Believed<'a> {
    /// The version to go on from.
    pub metadata: &'a Metadata,
    /// Members that are there and of which what they know led to it.
    pub supporters: Members,
    /// Members that a person has said are gone for good, or wrong. Versions of this opening are written without them, and
    /// [`may_count`] is told.
    pub excused: Members,
    /// Members that are there and have to be brought up before they may have a vote.
    pub stale: Vec<Stale>,
    /// Whether it could not be opened if nobody had said that.
    pub forced: bool,
}

/// A member that is there and does not have the version that is opened, or has no vote in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// Which.
    pub member: MemberId,
    /// What it knows.
    pub knows: Stamp,
    /// Whether that led to what is opened: else it is of another history.
    pub led_here: bool,
    /// Whether it is out in what is opened.
    pub out: bool,
}

/// Whom an opening writes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Members that are there and get all that is written, in order: what they have led to the version before.
    pub following: Members,
    /// Those of them on which the version before is durable.
    pub current: Members,
    /// Members that a person has said are gone for good, as long as this opening is open: [`Believed::excused`].
    pub excused: Members,
}

/// Whose numbers are whose in a version, and who has a vote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roll {
    voters: Members,
    uuids: BTreeMap<MemberId, Uuid>,
}

impl Roll {
    /// That of a version.
    #[must_use]
    pub fn of(metadata: &Metadata) -> Self {
        let uuids = metadata.members().map(|(id, member)| (id, member.uuid)).collect();
        Self { voters: metadata.voters(), uuids }
    }
}

/// Why a version may not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MayNot {
    /// Whoever stood behind an older version could be left without a vote.
    #[error(
        "of {voters} disks with a vote in version {version} at most half may have none in the next \
         one, and {dropped} would"
    )]
    Drop {
        /// The older version.
        version: u64,
        /// How many have a vote in it.
        voters: u32,
        /// How many of them would have none.
        dropped: u32,
    },
    /// Its number would be free, or mean another disk, while versions are asked about in which it has a vote.
    #[error("member {} has a vote in a version that may still be opened: it is to be out first", .0.0)]
    Forget(MemberId),
    /// It is not there, or of another history, and would have a vote: with a cut now, all disks together might not be enough.
    #[error("member {} does not get what is written: it is to be out, or brought up", .0.0)]
    Absent(MemberId),
    /// It would get a vote and does not have the version before: likewise.
    #[error("member {} is to be brought up before it has a vote", .0.0)]
    Early(MemberId),
}

/// From which version on who has a vote.
type Voters = (u64, Members);

/// The rules; tests make mistakes in them.
#[derive(Clone, Copy)]
struct Rules {
    /// Whether so many supporters are enough of so many with a vote.
    enough: fn(voters: u32, supporters: u32) -> bool,
    /// The part of a window that is asked about.
    asked: fn(&[Voters]) -> &[Voters],
    /// Whether one that knows of a version supports another.
    supports: fn(&Metadata, Stamp) -> bool,
    /// Whether a version may not be opened because of another that a disk proves to be committed.
    contradicts: fn(&Metadata, Stamp) -> bool,
    /// Whether of so many with a vote so many may be left without.
    may_drop: fn(voters: u32, dropped: u32) -> bool,
    /// Of whom it is asked how many would be left without: of each version's by themselves.
    groups: fn(&[Voters]) -> Vec<Voters>,
    /// Whether only those have a vote that get what is written.
    needs_all: bool,
    /// Whether a member is brought up before it has a vote.
    brings_up: bool,
    /// Whether one is picked of two versions of which neither led to the other, if all that counts led to both.
    picks: bool,
}

const RULES: Rules = Rules {
    enough: |voters, supporters| supporters * 2 > voters,
    asked: |window| window,
    supports: is_up_to_date,
    contradicts,
    may_drop: |voters, dropped| dropped * 2 <= voters,
    groups: <[_]>::to_vec,
    needs_all: true,
    brings_up: true,
    picks: true,
};

/// Whether a disk that knows of `stamp` has all that `metadata` knows to be committed. A voter that has less was set back: it held
/// more once, and what lies on it is as old as what it knows.
fn is_up_to_date(metadata: &Metadata, stamp: Stamp) -> bool {
    metadata.follows(stamp) && stamp.version >= metadata.counted()
}

/// The version that a pool goes on from (rule O): the latest that may be opened, of those that some disk has. All that any disk
/// which is there proves to be committed must have led to it (rule P): if not, disks have been set back, and it is refused.
///
/// `without` are identities of members that a person has said are gone for good. It has to name all with a vote that are
/// missing. One that is there may be named only if what it knows did not lead to what is opened: it is wrong.
///
/// Two versions of which neither led to the other may both be opened after two cuts while nothing counted, and then it does
/// not matter which is taken: all that counts led to both. They are two truths if one of them knows that a version counts
/// which did not lead to the other; by the claim of section 5 that needs a statement that was false.
///
/// # Errors
/// Why there is none.
pub fn open<'a>(
    known: &[Known<'a>],
    damaged: &[Witness],
    without: &[Uuid],
) -> Result<Believed<'a>, Refusal> {
    open_making(Mistake::None, known, damaged, without)
}

/// The same with a mistake.
pub(super) fn open_making<'a>(
    mistake: Mistake,
    known: &[Known<'a>],
    damaged: &[Witness],
    without: &[Uuid],
) -> Result<Believed<'a>, Refusal> {
    let rules = match mistake {
        Mistake::BelievesSetBack => Rules { supports: Metadata::follows, ..RULES },
        Mistake::IgnoresProofs => Rules { contradicts: |_, _| false, ..RULES },
        _ => RULES,
    };
    rules.open(known, damaged, without)
}

/// Whether a version `committed` by a disk of the pool is none of those that led to `metadata`, so that one of the two is lost if the
/// other is believed. What is older than all openings that are remembered is taken for one that did.
#[must_use]
pub fn contradicts(metadata: &Metadata, committed: Stamp) -> bool {
    metadata.remembers(committed) && !metadata.follows(committed)
}

/// Whether `next`, made of `before`, may be written to all that have a vote in it (rule D).
///
/// *Each version in the window is asked by itself*: of those with a vote in it at most half have none in `next`. The proof needs
/// that of the version `a` that the two histories have in common, whichever it is. To ask once about all with a vote in any
/// version is not enough: with two disks, two more that were added and do not count yet would let both be dropped.
///
/// What else is asked: a number means one disk for as long as a version with its vote may be opened, else the proof counts two
/// as one; and a vote is had by those that follow only, else the pool could not be opened after cuts though all disks are there.
///
/// # Errors
/// Why not.
pub fn may_count(before: &Roll, next: &Metadata, written: &Written) -> Result<(), MayNot> {
    RULES.may_count(before, next, written)
}

/// Whether as many as are not `there` may be left without a vote, by the versions of `window` that may be opened.
#[must_use]
pub fn may_do_without(window: &[Voters], there: Members, excused: Members) -> bool {
    (RULES.groups)(window).into_iter().all(|(_, voters)| {
        let asked = voters.without(excused);
        (RULES.may_drop)(asked.len(), asked.without(there).len())
    })
}

/// How a version fares with who is there.
struct Weighed<'a> {
    metadata: &'a Metadata,
    supporters: Members,
    /// Those with a vote in any version that is asked about.
    voters: Members,
    /// Those of them that are not there.
    missing: Members,
    excused: Members,
    /// A version of which not more than half stand behind it, and who has a vote there.
    short: Option<(u64, Members)>,
}

impl Weighed<'_> {
    /// Those that would have to be named.
    fn unnamed(&self) -> Members {
        self.missing.without(self.excused)
    }

    /// Whether all that are missing were named.
    fn is_said(&self) -> bool {
        self.unnamed().is_empty()
    }
}

/// Whether a label and a version are of one member.
fn is_of(metadata: &Metadata, known: &Known<'_>) -> bool {
    metadata.member(known.member).is_some_and(|m| m.uuid == known.uuid)
}

/// Whether a disk may be asked: it has a version, there is no other with its identity, and its own number is not another's.
fn is_heard(known: &Known<'_>, all: &[Known<'_>]) -> bool {
    let same = all.iter().filter(|k| k.uuid == known.uuid).count();
    let own = known.metadata.member(known.member).is_none_or(|m| m.uuid == known.uuid);
    same == 1 && own && known.metadata.stamp().version > 0
}

/// Whether all of which either knows that it counts led to both: the last of it did, and the other's last led to that.
fn is_one_truth(one: &Metadata, other: &Metadata) -> bool {
    let (more, less) = if one.counted() >= other.counted() { (one, other) } else { (other, one) };
    more.counted() == 0 || more.committed().is_some_and(|stamp| less.follows(stamp))
}

impl Rules {
    fn open<'a>(
        &self,
        known: &[Known<'a>],
        damaged: &[Witness],
        without: &[Uuid],
    ) -> Result<Believed<'a>, Refusal> {
        let heard: Vec<_> = known.iter().filter(|k| is_heard(k, known)).copied().collect();
        let has = |uuid| {
            heard.iter().any(|k| k.uuid == uuid || k.metadata.member_of(uuid).is_some())
                || damaged.iter().any(|witness| witness.uuid == uuid)
        };
        if heard.is_empty() {
            return Err(Refusal::Unknown);
        }
        if let Some(uuid) = without.iter().find(|uuid| !has(**uuid)) {
            return Err(Refusal::NoMember(*uuid));
        }
        let there = heard.iter().filter(|k| !without.contains(&k.uuid)).copied();
        let there: Vec<_> = there.collect();
        let weighed = self.weigh_all(&there, without);
        let may = |w: &&Weighed<'_>| w.short.is_none() && (without.is_empty() || w.is_said());
        let latest = weighed.iter().filter(may).max_by_key(|w| w.metadata.stamp());
        let newest =
            |w: &&Weighed<'_>| (w.metadata.committed(), w.supporters.len(), w.metadata.stamp());
        let newest = weighed.iter().max_by_key(newest);
        let Some(target) = latest.or(newest) else {
            return Err(heard.first().map_or(Refusal::Unknown, |k| Refusal::There(disk_of(k))));
        };
        self.check_said(target, &weighed, &heard, without)?;
        let latest = latest.ok_or_else(|| refusal::too_few(target, &there, &heard))?;
        if let Some(other) = weighed.iter().filter(may).find(|w| self.are_two(latest, w)) {
            return Err(refusal::two(latest, other, &heard));
        }
        let damaged_there = damaged.iter().filter(|witness| !without.contains(&witness.uuid));
        self.check_proofs(latest, &there, damaged_there)?;
        Ok(Believed {
            metadata: latest.metadata,
            supporters: latest.supporters,
            excused: latest.excused,
            stale: stale(latest.metadata, &heard),
            forced: !without.is_empty() && !self.is_free(known, damaged, latest.metadata.stamp()),
        })
    }

    /// Whether a statement says neither too much nor too little for `target`.
    fn check_said(
        &self,
        target: &Weighed<'_>,
        all: &[Weighed<'_>],
        heard: &[Known<'_>],
        without: &[Uuid],
    ) -> Result<(), Refusal> {
        let mut named = heard.iter().filter(|k| without.contains(&k.uuid));
        if let Some(right) = named.find(|k| self.supports_it(target.metadata, k)) {
            return Err(Refusal::There(disk_of(right)));
        }
        // A later one for which more is to be said may not be passed over by saying less.
        let mut later = all.iter().filter(|w| w.metadata.follows(target.metadata.stamp()));
        match later.find(|w| !w.is_said()).filter(|_| !without.is_empty()) {
            Some(short) => Err(Refusal::Unnamed {
                pool: short.metadata.name,
                missing: refusal::disks(short.metadata, short.unnamed(), heard),
            }),
            None => Ok(()),
        }
    }

    /// Whether a version is opened though nobody says anything.
    fn is_free(&self, known: &[Known<'_>], damaged: &[Witness], stamp: Stamp) -> bool {
        self.open(known, damaged, &[]).is_ok_and(|free| free.metadata.stamp() == stamp)
    }

    /// That all which those who are there prove to be committed led to `target`.
    fn check_proofs<'w>(
        &self,
        target: &Weighed<'_>,
        there: &[Known<'_>],
        damaged: impl Iterator<Item = &'w Witness>,
    ) -> Result<(), Refusal> {
        let proofs = there.iter().filter_map(|k| Some((disk_of(k), k.metadata.committed()?)));
        let damaged = damaged.map(|witness| {
            let Witness { member, uuid, serial, committed } = *witness;
            (Disk { member, uuid, serial }, committed)
        });
        let newer = proofs.chain(damaged);
        let newer = newer.filter(|(_, committed)| (self.contradicts)(target.metadata, *committed));
        let newer: Vec<(Disk, Stamp)> = newer.collect();
        if newer.is_empty() {
            return Ok(());
        }
        Err(refusal::older(target, &newer, there))
    }

    fn supports_it(&self, metadata: &Metadata, known: &Known<'_>) -> bool {
        is_of(metadata, known) && (self.supports)(metadata, known.metadata.stamp())
    }

    /// Each version that one of them has, once.
    fn weigh_all<'a>(&self, there: &[Known<'a>], without: &[Uuid]) -> Vec<Weighed<'a>> {
        let mut versions: Vec<&Metadata> = there.iter().map(|k| k.metadata).collect();
        versions.sort_by_key(|metadata| metadata.stamp());
        versions.dedup_by_key(|metadata| metadata.stamp());
        versions.into_iter().map(|metadata| self.weigh(metadata, there, without)).collect()
    }

    fn weigh<'a>(
        &self,
        metadata: &'a Metadata,
        there: &[Known<'_>],
        without: &[Uuid],
    ) -> Weighed<'a> {
        let ours = there.iter().filter(|k| is_of(metadata, k));
        let present: Members = ours.map(|k| k.member).collect();
        let behind = there.iter().filter(|k| self.supports_it(metadata, k));
        let supporters: Members = behind.map(|k| k.member).collect();
        let named = metadata.members().filter(|(_, m)| without.contains(&m.uuid));
        let excused: Members = named.map(|(id, _)| id).collect();
        let window = (self.asked)(metadata.window());
        let voters = window.iter().fold(Members::default(), |all, (_, some)| all.or(*some));
        let majority = |some: Members| {
            let asked = some.without(excused);
            asked.is_empty() || (self.enough)(asked.len(), asked.and(supporters).len())
        };
        let short = window.iter().find(|(_, some)| !majority(*some)).copied();
        // Whoever goes on needs a vote.
        let nobody = metadata.voters().and(supporters).is_empty();
        let short = short.or(nobody.then(|| (metadata.stamp().version, metadata.voters())));
        let missing = voters.without(present);
        Weighed { metadata, supporters, voters, missing, excused, short }
    }

    /// Whether two that may be opened exclude each other.
    fn are_two(&self, latest: &Weighed<'_>, other: &Weighed<'_>) -> bool {
        let (latest, other) = (latest.metadata, other.metadata);
        let led = latest.follows(other.stamp());
        !led && (!self.picks || !is_one_truth(latest, other))
    }

    fn may_count(&self, before: &Roll, next: &Metadata, written: &Written) -> Result<(), MayNot> {
        for (version, voters) in (self.groups)(next.window()) {
            let asked = voters.without(written.excused);
            let dropped = asked.without(next.voters());
            if !(self.may_drop)(asked.len(), dropped.len()) {
                let (voters, dropped) = (asked.len(), dropped.len());
                return Err(MayNot::Drop { version, voters, dropped });
            }
        }
        let forgotten = forgotten(before, next);
        let first = next.stamp().version == 1;
        let new = next.voters().without(before.voters).without(written.current);
        let early = new.iter().next().filter(|_| self.brings_up && !first);
        let absent = next.voters().and(before.voters).without(written.following);
        let absent = absent.iter().next().filter(|_| self.needs_all);
        let wrong = forgotten.map(MayNot::Forget).or(early.map(MayNot::Early));
        wrong.or(absent.map(MayNot::Absent)).map_or(Ok(()), Err)
    }
}

/// A number with a vote in a version that may still be opened that `next` gives to another disk, or to none.
fn forgotten(before: &Roll, next: &Metadata) -> Option<MemberId> {
    let older = next.window().iter().filter(|(version, _)| *version < next.stamp().version);
    let older = older.fold(Members::default(), |all, (_, some)| all.or(*some));
    let same = |id: &MemberId| {
        let both = before.uuids.get(id).zip(next.member(*id));
        both.is_some_and(|(then, now)| *then == now.uuid)
    };
    older.iter().find(|id| !same(id))
}

fn disk_of(known: &Known<'_>) -> Disk {
    let member = known.metadata.member_of(known.uuid);
    let serial = member.map_or(Text::new(""), |(_, m)| m.serial);
    Disk { member: known.member, uuid: known.uuid, serial }
}

/// Who is there and has to be brought up.
fn stale(metadata: &Metadata, there: &[Known<'_>]) -> Vec<Stale> {
    let ours = there.iter().filter(|k| is_of(metadata, k));
    let stale = ours.map(|k| Stale {
        member: k.member,
        knows: k.metadata.stamp(),
        led_here: metadata.follows(k.metadata.stamp()),
        out: !metadata.voters().has(k.member),
    });
    stale.filter(|s| s.out || s.knows != metadata.stamp()).collect()
}

#[cfg(test)]
mod search;
#[cfg(test)]
mod tests;
