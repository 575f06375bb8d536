//! Quorum rules: which version a pool may be opened with, and which voters a new version may drop
//! ([RFD 0030](../../../../docs/rfd/0030-pools.md), section 5).
//!
//! Both rules are pure functions of what the disks hold. `model_check` searches for histories in
//! which they lose a committed version, and must find the planted mistakes.

use std::collections::BTreeMap;

use uuid::Uuid;
use wire::ShortText;

use super::metadata::{MemberId, MemberSet, Metadata, VersionId};

mod recovery_error;

pub use recovery_error::{
    DiskName, DivergedState, NoQuorum, RecoveryError, RolledBackDisks, SplitBrain,
};

/// The metadata of a disk that is present and undamaged. Two disks with the same identity are both
/// ignored.
#[derive(Clone, Copy, Debug)]
pub struct MemberMetadata<'a> {
    /// Its number, from its label.
    pub member: MemberId,
    /// Its identity, from its label.
    pub uuid: Uuid,
    /// The newest version on it.
    pub metadata: &'a Metadata,
}

/// A disk that is present and damaged: it is no supporter, but its label still proves a commit.
#[derive(Clone, Copy, Debug)]
pub struct DamagedDisk {
    /// Its number, from its label.
    pub member: MemberId,
    /// Its identity, from its label.
    pub uuid: Uuid,
    /// The serial number of the disk that the label was written to.
    pub serial: ShortText,
    /// A version that was committed.
    pub committed: VersionId,
}

/// The version that a pool continues from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredState<'a> {
    /// Its metadata.
    pub metadata: &'a Metadata,
    /// Members that are present and hold an ancestor of it, with all that it knows to be committed.
    pub supporters: MemberSet,
    /// Members that the operator declared lost or wrong. This term writes without them, and
    /// [`check_write_quorum`] leaves them out.
    pub declared_lost: MemberSet,
    /// Members that are present and must catch up before they may become voters.
    pub stale: Vec<StaleMember>,
    /// Whether it could not be opened without that declaration.
    pub is_forced: bool,
}

/// A member that is present and does not hold the recovered version, or is no voter in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleMember {
    /// Its number.
    pub member: MemberId,
    /// The version that it holds.
    pub known_version: VersionId,
    /// Whether that is an ancestor of the recovered version; otherwise it has diverged.
    pub is_ancestor: bool,
    /// Whether the recovered version has it detached.
    pub is_detached: bool,
}

/// The members that a version is written to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteTargets {
    /// Members that are present and get every version in order; they hold ancestors of the previous
    /// one.
    pub following: MemberSet,
    /// Those of them on which the previous version is durable.
    pub current: MemberSet,
    /// Members that the operator declared lost for this term: [`RecoveredState::declared_lost`].
    pub declared_lost: MemberSet,
}

/// The members of a version by number, and which of them are voters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VoterSet {
    voters: MemberSet,
    uuids: BTreeMap<MemberId, Uuid>,
}

impl VoterSet {
    /// The members and voters of a version.
    #[must_use]
    pub fn from_metadata(metadata: &Metadata) -> Self {
        let uuids = metadata.members().map(|(id, member)| (id, member.uuid)).collect();
        Self { voters: metadata.voters(), uuids }
    }
}

/// Why a version may not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuorumViolation {
    /// The supporters of an older version could all lose their votes.
    #[error(
        "version {version} has {voters} voters, of which the next version may drop at most half, \
         not {dropped}"
    )]
    TooManyVotersDropped {
        /// The older version.
        version: u64,
        /// How many voters it has.
        voters: u32,
        /// How many of them would be dropped.
        dropped: u32,
    },
    /// Its number would become free or denote another disk, while it is a voter of a version that
    /// may be opened.
    #[error("member {} has a vote in a version that may still be opened: detach it first", .0.0)]
    VoterIdReleased(MemberId),
    /// It is missing or has diverged, and would be a voter: after a crash now, all disks together
    /// might be no quorum.
    #[error("member {} receives no writes: detach it or resync it", .0.0)]
    AbsentVoter(MemberId),
    /// It would become a voter without holding the previous version; the same could happen.
    #[error("member {} must be a learner before it gets a vote", .0.0)]
    VoterNotCaughtUp(MemberId),
}

/// A version, and the voters from it on.
type VersionVoters = (u64, MemberSet);

/// The rules; tests replace some of them by mistakes.
#[derive(Clone, Copy)]
struct QuorumRules {
    /// Whether so many supporters are a quorum of so many voters.
    is_quorum: fn(voters: u32, supporters: u32) -> bool,
    /// The versions of a voter history that need a quorum.
    quorum_versions: fn(&[VersionVoters]) -> &[VersionVoters],
    /// Whether a disk that holds this version supports opening the given metadata.
    supports: fn(&Metadata, VersionId) -> bool,
    /// Whether metadata may not be opened because of a commit that a disk proves.
    diverges: fn(&Metadata, VersionId) -> bool,
    /// Whether so many of so many voters may be dropped.
    may_drop: fn(voters: u32, dropped: u32) -> bool,
    /// The groups of voters in which dropped ones are counted: one for each version.
    drop_groups: fn(&[VersionVoters]) -> Vec<VersionVoters>,
    /// Whether all voters must be among those written to.
    voters_must_be_present: bool,
    /// Whether a member must catch up before it becomes a voter.
    voters_must_be_caught_up: bool,
    /// Whether one of two diverged versions may be opened if both contain all committed changes.
    resolves_uncommitted_forks: bool,
}

const RULES: QuorumRules = QuorumRules {
    is_quorum: |voters, supporters| supporters * 2 > voters,
    quorum_versions: |window| window,
    supports: holds_all_committed,
    diverges: diverges_from_commit,
    may_drop: |voters, dropped| dropped * 2 <= voters,
    drop_groups: <[_]>::to_vec,
    voters_must_be_present: true,
    voters_must_be_caught_up: true,
    resolves_uncommitted_forks: true,
};

/// Whether a disk that holds `version_id` has all that `metadata` knows to be committed. A voter
/// that has less was rolled back: its data are as old as its metadata.
fn holds_all_committed(metadata: &Metadata, version_id: VersionId) -> bool {
    metadata.descends_from(version_id) && version_id.version >= metadata.committed_version()
}

/// Chooses the version that a pool continues from (rule O): the latest of the versions on its disks
/// that may be opened. Every commit that a present disk proves must be an ancestor of it (rule P);
/// if one is not, disks were rolled back, and the pool is not opened.
///
/// `without` are the identities of members that the operator declares lost. It must name all
/// missing voters. A member that is present may be named only if its version is no ancestor of the
/// recovered one: it is wrong.
///
/// Two diverged versions may both be openable after two crashes with no commit between them. Then
/// either may be taken: both contain all that was committed. It is a split brain if one of them
/// knows of a commit that is no ancestor of the other; by the claim of section 5 that needs a false
/// declaration.
///
/// # Errors
/// Why no version may be opened.
pub fn recover<'a>(
    known: &[MemberMetadata<'a>],
    damaged: &[DamagedDisk],
    without: &[Uuid],
) -> Result<RecoveredState<'a>, RecoveryError> {
    recover_with_mistake(Mistake::None, known, damaged, without)
}

/// A mistake in the rules, which tests plant and must find.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// Accepts a rolled-back disk as if it had all later writes.
    TrustsRolledBackDisks,
    /// Opens rolled-back disks although another disk proves a commit that they lack.
    IgnoresProvenCommits,
}

/// The same with a planted mistake, which has no effect outside tests.
///
/// # Errors
/// As [`recover`].
pub fn recover_with_mistake<'a>(
    mistake: Mistake,
    known: &[MemberMetadata<'a>],
    damaged: &[DamagedDisk],
    without: &[Uuid],
) -> Result<RecoveredState<'a>, RecoveryError> {
    let mistake = if cfg!(feature = "testing") { mistake } else { Mistake::None };
    let rules = match mistake {
        Mistake::TrustsRolledBackDisks => {
            QuorumRules { supports: Metadata::descends_from, ..RULES }
        }
        Mistake::IgnoresProvenCommits => QuorumRules { diverges: |_, _| false, ..RULES },
        Mistake::None => RULES,
    };
    rules.recover(known, damaged, without)
}

/// Whether the version `committed` is no ancestor of `metadata`, so that opening `metadata` would
/// lose it. A version older than all remembered terms counts as an ancestor.
#[must_use]
pub fn diverges_from_commit(metadata: &Metadata, committed: VersionId) -> bool {
    metadata.remembers_term_of(committed) && !metadata.descends_from(committed)
}

/// Checks that `next`, made from `before`, may be written to all of its voters (rule D).
///
/// *Each version of the voter history is checked by itself*: at most half of its voters may be no
/// voters of `next`. The proof needs that of the last common ancestor `a` of two histories,
/// whichever version it is. To check once for the voters of all versions together is not enough: of
/// two disks, both could then be dropped after two more were added whose version is not committed.
///
/// Two more checks: a number denotes one disk as long as a version may be opened in which that is a
/// voter, or the proof would count two disks as one; and only members that get every version are
/// voters, or the pool could not be opened after crashes though all disks are present.
///
/// # Errors
/// Why it may not be written.
pub fn check_write_quorum(
    before: &VoterSet,
    next: &Metadata,
    written: &WriteTargets,
) -> Result<(), QuorumViolation> {
    RULES.check_write_quorum(before, next, written)
}

/// Whether the members that are not `present` may be dropped, by every version of `voter_history`.
#[must_use]
pub fn may_drop_absent(
    voter_history: &[VersionVoters],
    present: MemberSet,
    declared_lost: MemberSet,
) -> bool {
    (RULES.drop_groups)(voter_history).into_iter().all(|(_, voters)| {
        let voters = voters.difference(declared_lost);
        (RULES.may_drop)(voters.len(), voters.difference(present).len())
    })
}

/// How well the present disks support a version.
struct VersionSupport<'a> {
    metadata: &'a Metadata,
    supporters: MemberSet,
    /// The voters of all versions in its voter history.
    voters: MemberSet,
    /// Voters that are not present.
    missing_voters: MemberSet,
    declared_lost: MemberSet,
    /// A version of the voter history without a quorum of supporters, and its voters.
    missing_quorum: Option<(u64, MemberSet)>,
}

impl VersionSupport<'_> {
    /// Missing voters that were not declared lost.
    fn undeclared(&self) -> MemberSet {
        self.missing_voters.difference(self.declared_lost)
    }

    /// Whether all missing voters were declared lost.
    fn all_declared(&self) -> bool {
        self.undeclared().is_empty()
    }
}

/// Whether a label belongs to a member of a version.
fn is_member_of(metadata: &Metadata, known: &MemberMetadata<'_>) -> bool {
    metadata.member(known.member).is_some_and(|m| m.uuid == known.uuid)
}

/// Whether a disk's metadata is used: it holds a version, no other disk has its identity, and its
/// own metadata agrees with its number.
fn is_eligible(known: &MemberMetadata<'_>, all: &[MemberMetadata<'_>]) -> bool {
    let same = all.iter().filter(|k| k.uuid == known.uuid).count();
    let own = known.metadata.member(known.member).is_none_or(|m| m.uuid == known.uuid);
    same == 1 && own && known.metadata.version_id().version > 0
}

/// Whether every commit that either version knows of is an ancestor of both.
fn share_committed_history(one: &Metadata, other: &Metadata) -> bool {
    let (more, less) = if one.committed_version() >= other.committed_version() {
        (one, other)
    } else {
        (other, one)
    };
    more.committed_version() == 0
        || more.last_committed().is_some_and(|version_id| less.descends_from(version_id))
}

impl QuorumRules {
    fn recover<'a>(
        &self,
        known: &[MemberMetadata<'a>],
        damaged: &[DamagedDisk],
        without: &[Uuid],
    ) -> Result<RecoveredState<'a>, RecoveryError> {
        let eligible: Vec<_> = known.iter().filter(|k| is_eligible(k, known)).copied().collect();
        let has = |uuid| {
            eligible.iter().any(|k| k.uuid == uuid || k.metadata.find_member(uuid).is_some())
                || damaged.iter().any(|disk| disk.uuid == uuid)
        };
        if eligible.is_empty() {
            return Err(RecoveryError::NoMetadata);
        }
        if let Some(uuid) = without.iter().find(|uuid| !has(**uuid)) {
            return Err(RecoveryError::NoMember(*uuid));
        }
        let present = eligible.iter().filter(|k| !without.contains(&k.uuid)).copied();
        let present: Vec<_> = present.collect();
        let candidates = self.evaluate_versions(&present, without);
        let may_open = |candidate: &&VersionSupport<'_>| {
            candidate.missing_quorum.is_none() && (without.is_empty() || candidate.all_declared())
        };
        let latest = candidates
            .iter()
            .filter(may_open)
            .max_by_key(|candidate| candidate.metadata.version_id());
        let newest = |candidate: &&VersionSupport<'_>| {
            (
                candidate.metadata.last_committed(),
                candidate.supporters.len(),
                candidate.metadata.version_id(),
            )
        };
        let newest = candidates.iter().max_by_key(newest);
        let Some(target) = latest.or(newest) else {
            return Err(eligible.first().map_or(RecoveryError::NoMetadata, |k| {
                RecoveryError::DeclaredLostButPresent(disk_name_of(k))
            }));
        };
        self.check_declaration(target, &candidates, &eligible, without)?;
        let latest =
            latest.ok_or_else(|| recovery_error::explain_no_quorum(target, &present, &eligible))?;
        if let Some(other) = candidates
            .iter()
            .filter(may_open)
            .find(|candidate| self.have_diverged(latest, candidate))
        {
            return Err(recovery_error::split_brain_between(latest, other, &eligible));
        }
        let damaged_present = damaged.iter().filter(|disk| !without.contains(&disk.uuid));
        self.check_proven_commits(latest, &present, damaged_present)?;
        Ok(RecoveredState {
            metadata: latest.metadata,
            supporters: latest.supporters,
            declared_lost: latest.declared_lost,
            stale: stale_members(latest.metadata, &eligible),
            is_forced: !without.is_empty()
                && !self.recovers_without_declaration(known, damaged, latest.metadata.version_id()),
        })
    }

    /// Checks that the declaration names neither too much nor too little for `target`.
    fn check_declaration(
        &self,
        target: &VersionSupport<'_>,
        all: &[VersionSupport<'_>],
        eligible: &[MemberMetadata<'_>],
        without: &[Uuid],
    ) -> Result<(), RecoveryError> {
        let mut named = eligible.iter().filter(|k| without.contains(&k.uuid));
        if let Some(supporter) = named.find(|k| self.member_supports(target.metadata, k)) {
            return Err(RecoveryError::DeclaredLostButPresent(disk_name_of(supporter)));
        }
        // A later version that needs more to be declared may not be skipped by declaring less.
        let mut later = all
            .iter()
            .filter(|candidate| candidate.metadata.descends_from(target.metadata.version_id()));
        match later.find(|candidate| !candidate.all_declared()).filter(|_| !without.is_empty()) {
            Some(incomplete) => Err(RecoveryError::UndeclaredMissing {
                pool: incomplete.metadata.name,
                missing: recovery_error::disk_names_of(
                    incomplete.metadata,
                    incomplete.undeclared(),
                    eligible,
                ),
            }),
            None => Ok(()),
        }
    }

    /// Whether this version is recovered without any declaration.
    fn recovers_without_declaration(
        &self,
        known: &[MemberMetadata<'_>],
        damaged: &[DamagedDisk],
        version_id: VersionId,
    ) -> bool {
        self.recover(known, damaged, &[])
            .is_ok_and(|recovered| recovered.metadata.version_id() == version_id)
    }

    /// Checks that every commit proven by a present disk is an ancestor of `target`.
    fn check_proven_commits<'w>(
        &self,
        target: &VersionSupport<'_>,
        present: &[MemberMetadata<'_>],
        damaged: impl Iterator<Item = &'w DamagedDisk>,
    ) -> Result<(), RecoveryError> {
        let proofs =
            present.iter().filter_map(|k| Some((disk_name_of(k), k.metadata.last_committed()?)));
        let damaged = damaged.map(|disk| {
            let DamagedDisk { member, uuid, serial, committed } = *disk;
            (DiskName { member, uuid, serial }, committed)
        });
        let newer = proofs.chain(damaged);
        let newer = newer.filter(|(_, committed)| (self.diverges)(target.metadata, *committed));
        let newer: Vec<(DiskName, VersionId)> = newer.collect();
        if newer.is_empty() {
            return Ok(());
        }
        Err(recovery_error::rolled_back_error(target, &newer, present))
    }

    fn member_supports(&self, metadata: &Metadata, known: &MemberMetadata<'_>) -> bool {
        is_member_of(metadata, known) && (self.supports)(metadata, known.metadata.version_id())
    }

    /// Evaluates each version that a present disk holds, once.
    fn evaluate_versions<'a>(
        &self,
        present: &[MemberMetadata<'a>],
        without: &[Uuid],
    ) -> Vec<VersionSupport<'a>> {
        let mut versions: Vec<&Metadata> = present.iter().map(|k| k.metadata).collect();
        versions.sort_by_key(|metadata| metadata.version_id());
        versions.dedup_by_key(|metadata| metadata.version_id());
        versions
            .into_iter()
            .map(|metadata| self.evaluate_version(metadata, present, without))
            .collect()
    }

    fn evaluate_version<'a>(
        &self,
        metadata: &'a Metadata,
        present: &[MemberMetadata<'_>],
        without: &[Uuid],
    ) -> VersionSupport<'a> {
        let members = present.iter().filter(|k| is_member_of(metadata, k));
        let present_ids: MemberSet = members.map(|k| k.member).collect();
        let supporting = present.iter().filter(|k| self.member_supports(metadata, k));
        let supporters: MemberSet = supporting.map(|k| k.member).collect();
        let declared = metadata.members().filter(|(_, m)| without.contains(&m.uuid));
        let declared_lost: MemberSet = declared.map(|(id, _)| id).collect();
        let versions = (self.quorum_versions)(metadata.voter_history());
        let voters = versions.iter().fold(MemberSet::default(), |all, (_, some)| all.union(*some));
        let majority = |some: MemberSet| {
            let counted = some.difference(declared_lost);
            counted.is_empty()
                || (self.is_quorum)(counted.len(), counted.intersection(supporters).len())
        };
        let missing_quorum = versions.iter().find(|(_, some)| !majority(*some)).copied();
        // The recovered version needs a voter that is present.
        let no_voter = metadata.voters().intersection(supporters).is_empty();
        let missing_quorum =
            missing_quorum.or(no_voter.then(|| (metadata.version_id().version, metadata.voters())));
        let missing_voters = voters.difference(present_ids);
        VersionSupport {
            metadata,
            supporters,
            voters,
            missing_voters,
            declared_lost,
            missing_quorum,
        }
    }

    /// Whether two openable versions exclude each other.
    fn have_diverged(&self, latest: &VersionSupport<'_>, other: &VersionSupport<'_>) -> bool {
        let (latest, other) = (latest.metadata, other.metadata);
        let is_ancestor = latest.descends_from(other.version_id());
        !is_ancestor
            && (!self.resolves_uncommitted_forks || !share_committed_history(latest, other))
    }

    fn check_write_quorum(
        &self,
        before: &VoterSet,
        next: &Metadata,
        written: &WriteTargets,
    ) -> Result<(), QuorumViolation> {
        for (version, voters) in (self.drop_groups)(next.voter_history()) {
            let counted = voters.difference(written.declared_lost);
            let dropped = counted.difference(next.voters());
            if !(self.may_drop)(counted.len(), dropped.len()) {
                let (voters, dropped) = (counted.len(), dropped.len());
                return Err(QuorumViolation::TooManyVotersDropped { version, voters, dropped });
            }
        }
        let released = released_voter(before, next);
        let first = next.version_id().version == 1;
        let new = next.voters().difference(before.voters).difference(written.current);
        let not_caught_up = new.iter().next().filter(|_| self.voters_must_be_caught_up && !first);
        let absent = next.voters().intersection(before.voters).difference(written.following);
        let absent = absent.iter().next().filter(|_| self.voters_must_be_present);
        let wrong = released
            .map(QuorumViolation::VoterIdReleased)
            .or(not_caught_up.map(QuorumViolation::VoterNotCaughtUp));
        wrong.or(absent.map(QuorumViolation::AbsentVoter)).map_or(Ok(()), Err)
    }
}

/// A voter of a version that may still be opened whose number `next` gives to another disk, or to
/// none.
fn released_voter(before: &VoterSet, next: &Metadata) -> Option<MemberId> {
    let older =
        next.voter_history().iter().filter(|(version, _)| *version < next.version_id().version);
    let older = older.fold(MemberSet::default(), |all, (_, some)| all.union(*some));
    let same = |id: &MemberId| {
        let both = before.uuids.get(id).zip(next.member(*id));
        both.is_some_and(|(then, now)| *then == now.uuid)
    };
    older.iter().find(|id| !same(id))
}

fn disk_name_of(known: &MemberMetadata<'_>) -> DiskName {
    let member = known.metadata.find_member(known.uuid);
    let serial = member.map_or(ShortText::new(""), |(_, m)| m.serial);
    DiskName { member: known.member, uuid: known.uuid, serial }
}

/// Members that are present and must catch up.
fn stale_members(metadata: &Metadata, present: &[MemberMetadata<'_>]) -> Vec<StaleMember> {
    let members = present.iter().filter(|k| is_member_of(metadata, k));
    let stale = members.map(|k| StaleMember {
        member: k.member,
        known_version: k.metadata.version_id(),
        is_ancestor: metadata.descends_from(k.metadata.version_id()),
        is_detached: !metadata.voters().contains(k.member),
    });
    stale.filter(|s| s.is_detached || s.known_version != metadata.version_id()).collect()
}

#[cfg(test)]
mod model_check;
#[cfg(test)]
mod tests;
