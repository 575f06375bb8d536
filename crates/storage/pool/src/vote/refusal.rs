//! Why a pool is not opened.

use std::fmt;

use uuid::Uuid;
use wire::Text;

use super::super::metadata::{MemberId, Members, Metadata, Stamp};
use super::{Known, Weighed, contradicts, disk_of};

/// Why no version may be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No disk knows of a version.
    #[error("none of the disks that are there knows of a version of the pool")]
    Unknown,
    /// Not more than half of those with a vote stand behind the newest version, nor behind an older one.
    #[error("{0}")]
    Few(Box<Few>),
    /// Two versions may be opened, and one has what the other has not.
    #[error("{0}")]
    TwoTruths(Box<TwoTruths>),
    /// Disks were set back: others prove that more was committed than they know.
    #[error("{0}")]
    Older(Box<Older>),
    /// More are missing than a person has said are gone for good.
    #[error(
        "{} missing as well; if gone for good: pool open {pool}{}, beside what was said",
        are(.missing),
        without(.missing)
    )]
    Unnamed {
        /// The pool's name.
        pool: Text,
        /// Those that were not named.
        missing: Vec<Disk>,
    },
    /// One that a person has said is gone is there, and what it knows is part of what would be opened.
    #[error("disk {0} is there, and nothing is wrong with what it knows: it cannot be left out")]
    There(Disk),
    /// One that a person has said is gone was never part of the pool.
    #[error("the pool has no disk {0}")]
    NoMember(Uuid),
}

/// Too few for the newest version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Few {
    /// The pool's name.
    pub pool: Text,
    /// The version that would be opened.
    pub newest: u64,
    /// It, or one before it that is asked about, behind which too few stand.
    pub version: u64,
    /// How many have a vote there.
    pub voters: u32,
    /// How many of them know of the newest, or what led to it.
    pub supporters: u32,
    /// All with a vote in any that is asked about that are missing.
    pub missing: Vec<Disk>,
    /// Those that are there and know of something else.
    pub astray: Vec<Disk>,
}

/// Disks that know less than others prove to be committed, or something else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Older {
    /// The pool's name.
    pub pool: Text,
    /// Disks that do not know of what was committed.
    pub older: Vec<Disk>,
    /// The latest version of which one of them knows.
    pub knows: Stamp,
    /// Disks that prove it.
    pub newer: Vec<Disk>,
    /// The latest version that they prove.
    pub committed: Stamp,
    /// Disks that are missing beside, of those with a vote in the newer state.
    pub missing: Vec<Disk>,
    /// Whether the newer ones, without all others, have all data.
    pub newer_have_all: bool,
}

/// Two versions that may be opened, of which neither led to the other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there are two truths: {one}, and {other}; which disks are wrong is to be said: pool open {pool} \
     --without ..."
)]
pub struct TwoTruths {
    /// The pool's name.
    pub pool: Text,
    /// The one that was opened later, or oftener.
    pub one: Truth,
    /// The other one.
    pub other: Truth,
}

/// One of two truths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Truth {
    /// The version.
    pub version: u64,
    /// The number of its opening.
    pub opening: u64,
    /// Who stands behind it, and not behind the other.
    pub disks: Vec<Disk>,
}

/// A disk, as a person is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its number.
    pub member: MemberId,
    /// Its identity; nil if nothing says which it was.
    pub uuid: Uuid,
    /// Its serial number; none if nothing says which it was.
    pub serial: Text,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.serial.is_empty() {
            return self.serial.fmt(f);
        }
        if self.uuid.is_nil() { write!(f, "number {}", self.member.0) } else { self.uuid.fmt(f) }
    }
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, opening, disks } = self;
        write!(f, "version {version} of opening {opening} on {}", names(disks))
    }
}

impl fmt::Display for Few {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, newest, version, voters, supporters, missing, astray } = self;
        if !missing.is_empty() {
            write!(f, "{} missing; ", are(missing))?;
        }
        if !astray.is_empty() {
            let know = if astray.len() == 1 { "knows" } else { "know" };
            write!(f, "{} {know} of another history; ", names(astray))?;
        }
        write!(
            f,
            "of {} with a vote in version {version} {supporters} {} what led ",
            wire::count(*voters, "disk"),
            if *supporters == 1 { "knows" } else { "know" }
        )?;
        write!(f, "to version {newest}, and more than half are needed")?;
        if missing.is_empty() {
            return Ok(());
        }
        let gone = if missing.len() == 1 { "it is" } else { "they are" };
        write!(f, "; if {gone} gone for good: pool open {pool}{}", without(missing))
    }
}

impl fmt::Display for Older {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, older, knows, newer, committed, missing, newer_have_all } = self;
        let verb = |disks: &[Disk], one, more| if disks.len() == 1 { one } else { more };
        write!(
            f,
            "{} older than {}: {} version {} of opening {}, and {} {} that version {} of opening {} \
             was committed; ",
            are(older),
            names(newer),
            verb(older, "it knows", "they know"),
            knows.version,
            knows.opening,
            names(newer),
            verb(newer, "proves", "prove"),
            committed.version,
            committed.opening,
        )?;
        if !missing.is_empty() {
            write!(f, "{} missing; ", are(missing))?;
        }
        write!(
            f,
            "{} set back (a snapshot or a backup of a disk was put back, or another disk was plugged \
             in): nothing has been changed; put the right disks back",
            verb(older, "it was", "they were")
        )?;
        if *newer_have_all {
            let gone = without(&[&missing[..], older].concat());
            write!(f, "; or open what the newer have: windrose pool open {pool}{gone}")?;
        }
        write!(
            f,
            "; or open the older state, which LOSES all that was written since: windrose pool open {pool}{}",
            without(newer)
        )
    }
}

fn names(disks: &[Disk]) -> String {
    let names: Vec<_> = disks.iter().map(ToString::to_string).collect();
    let word = if names.len() == 1 { "disk" } else { "disks" };
    format!("{word} {}", names.join(", "))
}

fn are(disks: &[Disk]) -> String {
    format!("{} {}", names(disks), if disks.len() == 1 { "is" } else { "are" })
}

fn without(disks: &[Disk]) -> String {
    disks.iter().map(|disk| format!(" --without {disk}")).collect()
}

/// What is said of members of a version. One that was removed is looked for in what others know.
pub(super) fn disks(metadata: &Metadata, members: Members, known: &[Known<'_>]) -> Vec<Disk> {
    let all = || std::iter::once(metadata).chain(known.iter().map(|k| k.metadata));
    let disk = |member| {
        let found = all().find_map(|metadata| metadata.member(member));
        let (uuid, serial) = found.map_or((Uuid::nil(), Text::new("")), |m| (m.uuid, m.serial));
        Disk { member, uuid, serial }
    };
    members.iter().map(disk).collect()
}

pub(super) fn few(weighed: &Weighed<'_>, known: &[Known<'_>]) -> Refusal {
    let Weighed { metadata, supporters, voters, missing, short, .. } = weighed;
    let (version, asked) = short.unwrap_or((metadata.stamp().version, *voters));
    let astray = voters.without(*missing).without(*supporters);
    let few = Few {
        pool: metadata.name,
        newest: metadata.stamp().version,
        version,
        voters: asked.len(),
        supporters: asked.and(*supporters).len(),
        missing: disks(metadata, *missing, known),
        astray: disks(metadata, astray, known),
    };
    Refusal::Few(Box::new(few))
}

/// What is to be told where no version may be opened: that disks were set back, if some of those with a vote in the newest version do
/// not know of what is proved to be committed.
pub(super) fn too_few(newest: &Weighed<'_>, there: &[Known<'_>], heard: &[Known<'_>]) -> Refusal {
    let Some(committed) = newest.metadata.committed() else { return few(newest, heard) };
    let knows_it = |k: &&Known<'_>| k.metadata.follows(committed);
    let asked = |k: &&Known<'_>| super::is_of(newest.metadata, k) && newest.voters.has(k.member);
    let older = there.iter().filter(|k| !knows_it(k));
    let older = older.filter(|k| asked(k) || is_another(newest.metadata, k.metadata));
    let older: Vec<_> = older.collect();
    let Some(knows) = older.iter().map(|k| k.metadata.stamp()).max() else {
        return few(newest, heard);
    };
    let newer: Vec<_> = there.iter().filter(knows_it).collect();
    if let Some(other) = older.iter().find(|k| is_another(newest.metadata, k.metadata)) {
        let others = older.iter().filter(|k| other.metadata.follows(k.metadata.stamp()));
        let other = truth_of(other.metadata, others.copied().map(disk_of).collect());
        let one = truth_of(newest.metadata, newer.into_iter().map(disk_of).collect());
        return two_truths(newest.metadata.name, one, other);
    }
    let holding = newer.iter().filter(|k| super::is_of(newest.metadata, k));
    let holding: Members = holding.map(|k| k.member).collect();
    Refusal::Older(Box::new(Older {
        pool: newest.metadata.name,
        older: older.into_iter().map(disk_of).collect(),
        knows,
        newer: newer.into_iter().map(disk_of).collect(),
        committed,
        missing: disks(newest.metadata, newest.missing, heard),
        newer_have_all: newest.metadata.lost(holding).next().is_none(),
    }))
}

/// What would be opened does not know of what others prove.
pub(super) fn older(
    target: &Weighed<'_>,
    proofs: &[(Disk, Stamp)],
    there: &[Known<'_>],
) -> Refusal {
    let newer: Vec<Disk> = proofs.iter().map(|(disk, _)| *disk).collect();
    let committed = proofs.iter().map(|(_, committed)| *committed).max();
    let best = there.iter().filter(|k| newer.iter().any(|disk| disk.uuid == k.uuid));
    let best = best.max_by_key(|k| k.metadata.stamp()).map(|k| k.metadata);
    if let Some(best) = best.filter(|best| is_another(best, target.metadata)) {
        let supporters = disks(target.metadata, target.supporters, there);
        let target = truth_of(target.metadata, supporters);
        return two_truths(best.name, target, truth_of(best, newer));
    }
    let older = there.iter().filter(|k| target.supporters.has(k.member));
    let older = older.filter(|k| committed.is_some_and(|c| contradicts(k.metadata, c)));
    let older: Vec<Disk> = older.map(disk_of).collect();
    let named = |metadata: &Metadata, uuid| metadata.member_of(uuid).map(|(id, _)| id);
    let of = |disks: &[Disk], metadata: &Metadata| -> Members {
        disks.iter().filter_map(|disk| named(metadata, disk.uuid)).collect()
    };
    // Those with a vote in the newer state that are nowhere.
    let missing = best.map_or_else(Members::default, |best| {
        let there: Vec<Disk> = there.iter().map(disk_of).collect();
        best.voters().without(of(&there, best))
    });
    Refusal::Older(Box::new(Older {
        pool: target.metadata.name,
        older,
        knows: target.metadata.stamp(),
        committed: committed.unwrap_or(target.metadata.stamp()),
        missing: best.map_or_else(Vec::new, |best| disks(best, missing, there)),
        newer_have_all: best.is_some_and(|best| best.lost(of(&newer, best)).next().is_none()),
        newer,
    }))
}

pub(super) fn two(one: &Weighed<'_>, other: &Weighed<'_>, known: &[Known<'_>]) -> Refusal {
    let truth = |this: &Weighed<'_>, that: &Weighed<'_>| {
        let behind = this.supporters.without(that.supporters);
        truth_of(this.metadata, disks(this.metadata, behind, known))
    };
    two_truths(one.metadata.name, truth(one, other), truth(other, one))
}

/// Whether `other` proves something to be committed that did not lead to `one`.
fn is_another(one: &Metadata, other: &Metadata) -> bool {
    other.committed().is_some_and(|committed| contradicts(one, committed))
}

fn truth_of(metadata: &Metadata, disks: Vec<Disk>) -> Truth {
    let Stamp { version, opening, .. } = metadata.stamp();
    Truth { version, opening, disks }
}

fn two_truths(pool: Text, one: Truth, other: Truth) -> Refusal {
    Refusal::TwoTruths(Box::new(TwoTruths { pool, one, other }))
}
