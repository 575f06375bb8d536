//! What one member knows: its newest whole snapshot, and the changes behind it.

use std::collections::BTreeMap;

use super::journal::{Block, NoSuccessor};
use super::label::Label;
use super::metadata::{Metadata, Stamp};

/// Why what a member holds cannot be believed. It has no say then, and what lies on it is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// There is no snapshot to begin with.
    #[error("neither snapshot of the pool's metadata is whole")]
    NoSnapshot,
    /// It had more than it has.
    #[error(
        "its metadata ends with version {}, and it had version {} of that history: what it was last told is lost",
        .reached.version, .told.version
    )]
    Lost {
        /// What it has.
        reached: Stamp,
        /// What it had.
        told: Stamp,
    },
    /// A whole change cannot be made of what was before it.
    #[error("version {version} of its metadata contradicts the one before: {why}")]
    Contradiction {
        /// The version.
        version: u64,
        /// Why not.
        why: NoSuccessor,
    },
}

/// What a member knows that holds these whole snapshots and blocks.
///
/// # Errors
/// Why it has no say.
pub fn known(
    label: &Label,
    snapshots: impl IntoIterator<Item = Metadata>,
    blocks: impl IntoIterator<Item = Block>,
) -> Result<Metadata, Damaged> {
    let newest = snapshots.into_iter().max_by_key(|found| found.stamp().version);
    let mut known = newest.ok_or(Damaged::NoSnapshot)?;
    let blocks: BTreeMap<u64, Block> = blocks.into_iter().map(|b| (b.stamp.version, b)).collect();
    for block in blocks.range(known.stamp().version..).map(|(_, block)| block) {
        match known.replay(block) {
            Ok(()) | Err(NoSuccessor::Elsewhere) => {}
            Err(why) => return Err(Damaged::Contradiction { version: block.stamp.version, why }),
        }
    }
    let reached = known.stamp();
    let is_lost = |told: Stamp| {
        // What another history has left, which this one has overtaken, is nothing that it was told.
        let overtaken = told.opening < reached.opening;
        told.version > reached.version && !overtaken
    };
    let behind = blocks.values().map(|block| block.stamp).rfind(|stamp| is_lost(*stamp));
    let other = |told: Stamp| known.remembers(told) && !known.follows(told);
    let had = Some(label.opened).filter(|opened| is_lost(*opened) || other(*opened));
    match behind.or(had) {
        Some(told) => Err(Damaged::Lost { reached, told }),
        None => Ok(known),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::layout::Layout;
    use crate::metadata::tests::{pool, raid5};
    use crate::metadata::{Change, MemberId};

    /// Versions from the first on, and the blocks that make each but that.
    fn history(versions: u64) -> (Vec<Metadata>, Vec<Block>) {
        let (mut all, mut blocks) = (vec![pool(4)], Vec::new());
        for n in 0..versions {
            let mut next = all.last().cloned().unwrap();
            let (previous, counted) = (next.stamp().id, next.stamp().version);
            let opened = Change::Opened { id: Uuid::from_u128(50 + u128::from(n)), forced: false };
            let out = Change::Out(MemberId(3));
            let changes = match n {
                2 => vec![out],
                n if n % 3 == 0 => vec![opened],
                _ => vec![],
            };
            next.start(counted).unwrap();
            changes.iter().for_each(|change| next.apply(change).unwrap());
            blocks.push(Block { stamp: next.stamp(), previous, counted, changes });
            all.push(next);
        }
        (all, blocks)
    }

    fn label(opened: Stamp) -> Label {
        let shape = raid5(5);
        Label {
            generation: 1,
            pool: Uuid::from_u128(1),
            name: wire::Text::new("tank"),
            member: Uuid::from_u128(100),
            number: MemberId(0),
            serial: wire::Text::new("S0"),
            state: crate::label::State::Made,
            shape,
            rings: 2,
            layout: Layout::of(1 << 30, &shape, 2, false).unwrap(),
            opened,
        }
    }

    #[test]
    fn what_is_missing_at_the_end_was_never_told_unless_somebody_says_so() {
        let (all, blocks) = history(8);
        let (first, last) = (label(all[0].stamp()), label(all[8].stamp()));
        for end in 0..=8 {
            let held = || blocks[..end].iter().cloned();
            assert_eq!(known(&first, [all[0].clone()], held()), Ok(all[end].clone()));
            let told = known(&last, [all[0].clone()], held());
            assert_eq!(told.is_ok(), end == 8, "the label says that it had more");
        }
        let (reached, told) = (all[3].stamp(), all[8].stamp());
        let hole = blocks[..3].iter().chain(&blocks[4..]).cloned();
        let lost = known(&first, [all[0].clone()], hole);
        assert_eq!(lost, Err(Damaged::Lost { reached, told }));
        assert_eq!(known(&first, [], blocks), Err(Damaged::NoSnapshot));
    }

    #[test]
    fn what_is_left_of_a_history_that_was_overtaken_is_not_looked_at() {
        let (all, blocks) = history(8);
        // Another one went on from version 2 by itself, and its block is still there.
        let mut other = all[1].clone();
        let previous = other.stamp().id;
        other.start(other.stamp().version).unwrap();
        let changes = vec![Change::Opened { id: Uuid::from_u128(99), forced: false }];
        changes.iter().for_each(|change| other.apply(change).unwrap());
        let stamp = Stamp { version: 40, ..other.stamp() };
        let block = Block { stamp, previous, counted: 1, changes };
        let held = blocks.iter().cloned().chain([block]);
        assert_eq!(known(&label(all[0].stamp()), [all[8].clone()], held), Ok(all[8].clone()));
    }

    proptest! {
        /// Whatever is torn or lost, a member knows something that was, or has no say.
        #[test]
        fn it_knows_something_that_was(
            snapshots in prop::collection::vec(0usize..=12, 0..3),
            held in prop::collection::vec(any::<bool>(), 12),
        ) {
            let (all, blocks) = history(12);
            let held = blocks.iter().zip(held).filter(|(_, is)| *is).map(|(block, _)| block.clone());
            let snapshots: Vec<_> = snapshots.into_iter().map(|n| all[n].clone()).collect();
            match known(&label(all[0].stamp()), snapshots, held.collect::<Vec<_>>()) {
                Ok(found) => prop_assert!(all.contains(&found)),
                Err(why) => prop_assert!(!matches!(why, Damaged::Contradiction { .. }), "{why}"),
            }
        }
    }
}
