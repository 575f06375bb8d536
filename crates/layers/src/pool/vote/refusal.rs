//! Why a pool is not opened.

use std::fmt;

use uuid::Uuid;

use super::super::Text;
use super::super::metadata::{MemberId, Members, Metadata};
use super::{Known, Weighed};

/// Why no version may be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No disk knows of a version.
    #[error("none of the disks that are there knows of a version of the pool")]
    Unknown,
    /// Not more than half of those with a vote stand behind any version.
    #[error("{0}")]
    Few(Box<Few>),
    /// Two versions may be opened, and one has what the other has not.
    #[error("{0}")]
    TwoTruths(Box<TwoTruths>),
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

/// Too few for the version that most stand behind.
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
            "of {voters} disks with a vote in version {version} {supporters} know what led "
        )?;
        write!(f, "to version {newest}, and more than half are needed")?;
        if missing.is_empty() {
            return Ok(());
        }
        let gone = if missing.len() == 1 { "it is" } else { "they are" };
        write!(f, "; if {gone} gone for good: pool open {pool}{}", without(missing))
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

pub(super) fn two(one: &Weighed<'_>, other: &Weighed<'_>, known: &[Known<'_>]) -> Refusal {
    let truth = |this: &Weighed<'_>, that: &Weighed<'_>| Truth {
        version: this.metadata.stamp().version,
        opening: this.metadata.stamp().opening,
        disks: disks(this.metadata, this.supporters.without(that.supporters), known),
    };
    let two =
        TwoTruths { pool: one.metadata.name, one: truth(one, other), other: truth(other, one) };
    Refusal::TwoTruths(Box::new(two))
}
