//! Why a pool is not opened.

use std::fmt;

use uuid::Uuid;
use wire::ShortText;

use super::super::metadata::{MemberId, MemberSet, Metadata, VersionId};
use super::{MemberMetadata, VersionSupport, disk_name_of, diverges_from_commit};

/// Why no version may be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoveryError {
    /// No disk holds a version.
    #[error("none of the disks found holds metadata of the pool")]
    NoMetadata,
    /// Neither the newest version nor an older one has a quorum of supporters.
    #[error("{0}")]
    NoQuorum(Box<NoQuorum>),
    /// Two versions may be opened, and each has committed changes that the other lacks.
    #[error("{0}")]
    SplitBrain(Box<SplitBrain>),
    /// Disks were rolled back: others prove commits that they lack.
    #[error("{0}")]
    RolledBackDisks(Box<RolledBackDisks>),
    /// More disks are missing than the operator declared lost.
    #[error(
        "{} missing as well; if gone for good, also give: pool open {pool}{}",
        disks_are(.missing),
        missing_disk_options(.missing)
    )]
    UndeclaredMissing {
        /// The pool's name.
        pool: ShortText,
        /// Those that were not declared lost.
        missing: Vec<DiskName>,
    },
    /// A disk that was declared lost is present, and holds an ancestor of what would be opened.
    #[error("disk {0} is present and its metadata is good: it cannot be left out")]
    DeclaredLostButPresent(DiskName),
    /// A disk that was declared lost was never part of the pool.
    #[error("the pool has no disk {0}")]
    NoMember(Uuid),
}

/// The newest version has no quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoQuorum {
    /// The pool's name.
    pub pool: ShortText,
    /// The version that would be opened.
    pub target_version: u64,
    /// The version without a quorum: that one, or an older one of its voter history.
    pub version: u64,
    /// How many voters it has.
    pub voters: u32,
    /// How many of them hold the newest version or an ancestor.
    pub supporters: u32,
    /// Missing voters of all versions in the voter history.
    pub missing: Vec<DiskName>,
    /// Disks that are present and have diverged.
    pub diverged: Vec<DiskName>,
}

/// Disks that lack, or have diverged from, what others prove to be committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolledBackDisks {
    /// The pool's name.
    pub pool: ShortText,
    /// Disks that lack a commit.
    pub rolled_back: Vec<DiskName>,
    /// The latest version on one of them.
    pub newest_rolled_back_version: VersionId,
    /// Disks that prove the commit.
    pub newer: Vec<DiskName>,
    /// The latest version that they prove.
    pub committed: VersionId,
    /// Voters of the newer state that are missing besides.
    pub missing: Vec<DiskName>,
    /// Whether the newer disks alone have all data.
    pub newer_are_complete: bool,
}

/// Two versions that may be opened, and have diverged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "split brain: {one}, and {other}; choose the disks to leave out: pool open {pool} \
     --without ..."
)]
pub struct SplitBrain {
    /// The pool's name.
    pub pool: ShortText,
    /// The one with the higher term.
    pub one: DivergedState,
    /// The other one.
    pub other: DivergedState,
}

/// One of two diverged versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DivergedState {
    /// The version.
    pub version: u64,
    /// The number of its term.
    pub term: u64,
    /// Its supporters that do not support the other.
    pub disks: Vec<DiskName>,
}

/// How messages name a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskName {
    /// Its number.
    pub member: MemberId,
    /// Its identity; nil if unknown.
    pub uuid: Uuid,
    /// Its serial number; empty if unknown.
    pub serial: ShortText,
}

impl fmt::Display for DiskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.serial.is_empty() {
            return self.serial.fmt(f);
        }
        if self.uuid.is_nil() { write!(f, "number {}", self.member.0) } else { self.uuid.fmt(f) }
    }
}

impl fmt::Display for DivergedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, term, disks } = self;
        write!(f, "version {version} of term {term} on {}", disk_list(disks))
    }
}

impl fmt::Display for NoQuorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, target_version, version, voters, supporters, missing, diverged } = self;
        if !missing.is_empty() {
            write!(f, "{} missing; ", disks_are(missing))?;
        }
        if !diverged.is_empty() {
            let have = if diverged.len() == 1 { "has" } else { "have" };
            write!(f, "{} {have} another history; ", disk_list(diverged))?;
        }
        write!(
            f,
            "{supporters} of {} of version {version} {} version {target_version}, but more than half \
             must",
            wire::plural(*voters, "voter"),
            if *supporters == 1 { "supports" } else { "support" }
        )?;
        if missing.is_empty() {
            return Ok(());
        }
        let gone = if missing.len() == 1 { "it is" } else { "they are" };
        write!(f, "; if {gone} gone for good: pool open {pool}{}", missing_disk_options(missing))
    }
}

impl fmt::Display for RolledBackDisks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pool,
            rolled_back,
            newest_rolled_back_version: newest,
            newer,
            committed,
            missing,
            newer_are_complete,
        } = self;
        let verb = |disks: &[DiskName], one, more| if disks.len() == 1 { one } else { more };
        write!(
            f,
            "{} older than {}: {} version {} of term {}, and {} {} that version {} of term {} was \
             committed; ",
            disks_are(rolled_back),
            disk_list(newer),
            verb(rolled_back, "it has", "they have"),
            newest.version,
            newest.term,
            disk_list(newer),
            verb(newer, "proves", "prove"),
            committed.version,
            committed.term,
        )?;
        if !missing.is_empty() {
            write!(f, "{} missing; ", disks_are(missing))?;
        }
        write!(
            f,
            "{} rolled back (a snapshot or backup of a disk was restored, or another disk was plugged \
             in): nothing has been changed; reconnect the right disks",
            verb(rolled_back, "it was", "they were")
        )?;
        if *newer_are_complete {
            let gone = missing_disk_options(&[&missing[..], rolled_back].concat());
            write!(f, "; or open the newer state: windrose pool open {pool}{gone}")?;
        }
        write!(
            f,
            "; or open the older state, which LOSES all later writes: windrose pool open {pool}{}",
            missing_disk_options(newer)
        )
    }
}

fn disk_list(disks: &[DiskName]) -> String {
    let names: Vec<_> = disks.iter().map(ToString::to_string).collect();
    let word = if names.len() == 1 { "disk" } else { "disks" };
    format!("{word} {}", names.join(", "))
}

fn disks_are(disks: &[DiskName]) -> String {
    format!("{} {}", disk_list(disks), if disks.len() == 1 { "is" } else { "are" })
}

fn missing_disk_options(disks: &[DiskName]) -> String {
    disks.iter().map(|disk| format!(" --without {disk}")).collect()
}

/// Names of members of a version. A member that was removed from it is looked up in the metadata of
/// other disks.
pub(super) fn disk_names_of(
    metadata: &Metadata,
    members: MemberSet,
    known: &[MemberMetadata<'_>],
) -> Vec<DiskName> {
    let all = || std::iter::once(metadata).chain(known.iter().map(|k| k.metadata));
    let disk = |member| {
        let found = all().find_map(|metadata| metadata.member(member));
        let (uuid, serial) =
            found.map_or((Uuid::nil(), ShortText::new("")), |m| (m.uuid, m.serial));
        DiskName { member, uuid, serial }
    };
    members.iter().map(disk).collect()
}

pub(super) fn no_quorum_error(
    support: &VersionSupport<'_>,
    known: &[MemberMetadata<'_>],
) -> RecoveryError {
    let VersionSupport { metadata, supporters, voters, missing_voters, missing_quorum, .. } =
        support;
    let (version, version_voters) =
        missing_quorum.unwrap_or((metadata.version_id().version, *voters));
    let diverged = voters.difference(*missing_voters).difference(*supporters);
    let error = NoQuorum {
        pool: metadata.name,
        target_version: metadata.version_id().version,
        version,
        voters: version_voters.len(),
        supporters: version_voters.intersection(*supporters).len(),
        missing: disk_names_of(metadata, *missing_voters, known),
        diverged: disk_names_of(metadata, diverged, known),
    };
    RecoveryError::NoQuorum(Box::new(error))
}

/// The error if no version may be opened: disks were rolled back, if voters of the newest version
/// lack a commit that others prove.
pub(super) fn explain_no_quorum(
    newest: &VersionSupport<'_>,
    present: &[MemberMetadata<'_>],
    eligible: &[MemberMetadata<'_>],
) -> RecoveryError {
    let Some(committed) = newest.metadata.last_committed() else {
        return no_quorum_error(newest, eligible);
    };
    let has_commit = |k: &&MemberMetadata<'_>| k.metadata.descends_from(committed);
    let is_voter = |k: &&MemberMetadata<'_>| {
        super::is_member_of(newest.metadata, k) && newest.voters.contains(k.member)
    };
    let older = present.iter().filter(|k| !has_commit(k));
    let older = older.filter(|k| is_voter(k) || has_diverged(newest.metadata, k.metadata));
    let older: Vec<_> = older.collect();
    let Some(newest_rolled_back) = older.iter().map(|k| k.metadata.version_id()).max() else {
        return no_quorum_error(newest, eligible);
    };
    let newer: Vec<_> = present.iter().filter(has_commit).collect();
    if let Some(other) = older.iter().find(|k| has_diverged(newest.metadata, k.metadata)) {
        let others = older.iter().filter(|k| other.metadata.descends_from(k.metadata.version_id()));
        let other = diverged_state(other.metadata, others.copied().map(disk_name_of).collect());
        let one = diverged_state(newest.metadata, newer.into_iter().map(disk_name_of).collect());
        return split_brain_error(newest.metadata.name, one, other);
    }
    let newer_members = newer.iter().filter(|k| super::is_member_of(newest.metadata, k));
    let newer_members: MemberSet = newer_members.map(|k| k.member).collect();
    RecoveryError::RolledBackDisks(Box::new(RolledBackDisks {
        pool: newest.metadata.name,
        rolled_back: older.into_iter().map(disk_name_of).collect(),
        newest_rolled_back_version: newest_rolled_back,
        newer: newer.into_iter().map(disk_name_of).collect(),
        committed,
        missing: disk_names_of(newest.metadata, newest.missing_voters, eligible),
        newer_are_complete: newest.metadata.lost_volumes(newer_members).next().is_none(),
    }))
}

/// The error if the version to be opened lacks a commit that other disks prove.
pub(super) fn rolled_back_error(
    target: &VersionSupport<'_>,
    proofs: &[(DiskName, VersionId)],
    present: &[MemberMetadata<'_>],
) -> RecoveryError {
    let newer: Vec<DiskName> = proofs.iter().map(|(disk, _)| *disk).collect();
    let committed = proofs.iter().map(|(_, committed)| *committed).max();
    let best = present.iter().filter(|k| newer.iter().any(|disk| disk.uuid == k.uuid));
    let best = best.max_by_key(|k| k.metadata.version_id()).map(|k| k.metadata);
    if let Some(best) = best.filter(|best| has_diverged(best, target.metadata)) {
        let supporters = disk_names_of(target.metadata, target.supporters, present);
        let target = diverged_state(target.metadata, supporters);
        return split_brain_error(best.name, target, diverged_state(best, newer));
    }
    let older = present.iter().filter(|k| target.supporters.contains(k.member));
    let older = older.filter(|k| committed.is_some_and(|c| diverges_from_commit(k.metadata, c)));
    let older: Vec<DiskName> = older.map(disk_name_of).collect();
    let id_in = |metadata: &Metadata, uuid| metadata.find_member(uuid).map(|(id, _)| id);
    let ids_in = |disks: &[DiskName], metadata: &Metadata| -> MemberSet {
        disks.iter().filter_map(|disk| id_in(metadata, disk.uuid)).collect()
    };
    // Voters of the newer state that are missing.
    let missing = best.map_or_else(MemberSet::default, |best| {
        let present: Vec<DiskName> = present.iter().map(disk_name_of).collect();
        best.voters().difference(ids_in(&present, best))
    });
    RecoveryError::RolledBackDisks(Box::new(RolledBackDisks {
        pool: target.metadata.name,
        rolled_back: older,
        newest_rolled_back_version: target.metadata.version_id(),
        committed: committed.unwrap_or(target.metadata.version_id()),
        missing: best.map_or_else(Vec::new, |best| disk_names_of(best, missing, present)),
        newer_are_complete: best
            .is_some_and(|best| best.lost_volumes(ids_in(&newer, best)).next().is_none()),
        newer,
    }))
}

pub(super) fn split_brain_between(
    one: &VersionSupport<'_>,
    other: &VersionSupport<'_>,
    known: &[MemberMetadata<'_>],
) -> RecoveryError {
    let state = |this: &VersionSupport<'_>, that: &VersionSupport<'_>| {
        let supporters = this.supporters.difference(that.supporters);
        diverged_state(this.metadata, disk_names_of(this.metadata, supporters, known))
    };
    split_brain_error(one.metadata.name, state(one, other), state(other, one))
}

/// Whether `other` proves a commit that is no ancestor of `one`.
fn has_diverged(one: &Metadata, other: &Metadata) -> bool {
    other.last_committed().is_some_and(|committed| diverges_from_commit(one, committed))
}

fn diverged_state(metadata: &Metadata, disks: Vec<DiskName>) -> DivergedState {
    let VersionId { version, term, .. } = metadata.version_id();
    DivergedState { version, term, disks }
}

fn split_brain_error(pool: ShortText, one: DivergedState, other: DivergedState) -> RecoveryError {
    RecoveryError::SplitBrain(Box::new(SplitBrain { pool, one, other }))
}
