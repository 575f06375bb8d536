//! Rebuilds the metadata of one member from its newest intact snapshot and the journal blocks after
//! it.

use std::collections::BTreeMap;

use super::journal::{JournalBlock, ReplayError};
use super::metadata::{Metadata, VersionId};

/// Why a member's metadata cannot be used. It is no supporter then, and its data are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DamagedMetadata {
    /// Both snapshots are damaged.
    #[error("neither snapshot of its metadata is intact")]
    NoSnapshot,
    /// Newer metadata that it held is lost.
    #[error(
        "its metadata ends with version {}, but it had version {} of that history: its last versions are lost",
        .found.version, .expected.version
    )]
    Truncated {
        /// The last version that it has.
        found: VersionId,
        /// The version that it had.
        expected: VersionId,
    },
    /// An intact block cannot be applied to the version before it.
    #[error("version {version} of its metadata contradicts the one before: {why}")]
    Inconsistent {
        /// The version.
        version: u64,
        /// Why it cannot be applied.
        why: ReplayError,
    },
}

/// Rebuilds the metadata of a member from its intact snapshots and journal blocks. Its label proves
/// that it has had the version `term_start`.
///
/// # Errors
/// Why it cannot be used.
pub fn replay_member(
    term_start: VersionId,
    snapshots: impl IntoIterator<Item = Metadata>,
    blocks: impl IntoIterator<Item = JournalBlock>,
) -> Result<Metadata, DamagedMetadata> {
    let newest = snapshots.into_iter().max_by_key(|found| found.version_id().version);
    let mut metadata = newest.ok_or(DamagedMetadata::NoSnapshot)?;
    let blocks: BTreeMap<u64, JournalBlock> =
        blocks.into_iter().map(|b| (b.version_id.version, b)).collect();
    for block in blocks.range(metadata.version_id().version..).map(|(_, block)| block) {
        match metadata.replay(block) {
            Ok(()) | Err(ReplayError::NotSuccessor) => {}
            Err(why) => {
                return Err(DamagedMetadata::Inconsistent {
                    version: block.version_id.version,
                    why,
                });
            }
        }
    }
    let reached = metadata.version_id();
    let is_lost = |version_id: VersionId| {
        // Blocks of an older term are leftovers of a history that this one has replaced.
        let overtaken = version_id.term < reached.term;
        version_id.version > reached.version && !overtaken
    };
    let lost_block =
        blocks.values().map(|block| block.version_id).rfind(|version_id| is_lost(*version_id));
    let is_other_history = |version_id: VersionId| {
        metadata.remembers_term_of(version_id) && !metadata.descends_from(version_id)
    };
    let lost_start =
        Some(term_start).filter(|term_start| is_lost(*term_start) || is_other_history(*term_start));
    match lost_block.or(lost_start) {
        Some(version_id) => {
            Err(DamagedMetadata::Truncated { found: reached, expected: version_id })
        }
        None => Ok(metadata),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::metadata::{Change, MemberId};
    use crate::samples::pool;

    /// Versions from the first on, and the blocks that make all of them but the first.
    fn history(versions: u64) -> (Vec<Metadata>, Vec<JournalBlock>) {
        let (mut all, mut blocks) = (vec![pool(4)], Vec::new());
        for n in 0..versions {
            let mut next = all.last().cloned().unwrap();
            let (previous, committed) = (next.version_id().term_id, next.version_id().version);
            let start_term = Change::StartTerm {
                term_id: Uuid::from_u128(50 + u128::from(n)),
                is_forced: false,
            };
            let detach = Change::Detach(MemberId(3));
            let changes = match n {
                2 => vec![detach],
                n if n % 3 == 0 => vec![start_term],
                _ => vec![],
            };
            next.begin_version(committed).unwrap();
            changes.iter().for_each(|change| next.apply(change).unwrap());
            blocks.push(JournalBlock {
                version_id: next.version_id(),
                previous_term: previous,
                committed,
                changes,
            });
            all.push(next);
        }
        (all, blocks)
    }

    #[test]
    fn a_missing_journal_end_is_an_error_only_if_committed() {
        let (all, blocks) = history(8);
        let (first, last) = (all[0].version_id(), all[8].version_id());
        for end in 0..=8 {
            let held = || blocks[..end].iter().cloned();
            assert_eq!(replay_member(first, [all[0].clone()], held()), Ok(all[end].clone()));
            let replayed = replay_member(last, [all[0].clone()], held());
            assert_eq!(replayed.is_ok(), end == 8, "the label says that it had more");
        }
        let (reached, newest) = (all[3].version_id(), all[8].version_id());
        let hole = blocks[..3].iter().chain(&blocks[4..]).cloned();
        let lost = replay_member(first, [all[0].clone()], hole);
        assert_eq!(lost, Err(DamagedMetadata::Truncated { found: reached, expected: newest }));
        assert_eq!(replay_member(first, [], blocks), Err(DamagedMetadata::NoSnapshot));
    }

    #[test]
    fn remains_of_an_overtaken_history_are_ignored() {
        let (all, blocks) = history(8);
        // Another history continued from version 2, and its block is still there.
        let mut other = all[1].clone();
        let previous = other.version_id().term_id;
        other.begin_version(other.version_id().version).unwrap();
        let changes = vec![Change::StartTerm { term_id: Uuid::from_u128(99), is_forced: false }];
        changes.iter().for_each(|change| other.apply(change).unwrap());
        let version_id = VersionId { version: 40, ..other.version_id() };
        let block = JournalBlock { version_id, previous_term: previous, committed: 1, changes };
        let held = blocks.iter().cloned().chain([block]);
        assert_eq!(replay_member(all[0].version_id(), [all[8].clone()], held), Ok(all[8].clone()));
    }

    proptest! {
        /// Whatever is torn or lost, a member knows something that was, or has no say.
        #[test]
        fn replay_yields_a_version_that_was_written(
            snapshots in prop::collection::vec(0usize..=12, 0..3),
            held in prop::collection::vec(any::<bool>(), 12),
        ) {
            let (all, blocks) = history(12);
            let held = blocks.iter().zip(held).filter(|(_, is)| *is).map(|(block, _)| block.clone());
            let snapshots: Vec<_> = snapshots.into_iter().map(|n| all[n].clone()).collect();
            match replay_member(all[0].version_id(), snapshots, held.collect::<Vec<_>>()) {
                Ok(found) => prop_assert!(all.contains(&found)),
                Err(why) => prop_assert!(!matches!(why, DamagedMetadata::Inconsistent { .. }), "{why}"),
            }
        }
    }
}
