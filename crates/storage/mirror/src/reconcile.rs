//! What a new view has to make equal (RFD 0010, 5.8).

use std::collections::BTreeMap;

use block::Blocks;
use peer::{NodeId, PreparedEntry, Seq, View, WriteId};

/// What must be done before a view may become active, and what that commits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reconciliation {
    /// The entries to copy, in order of `(view, seq)`. No two of them overlap.
    pub copies: Vec<EntryCopy>,
    /// The writes of which any member has an entry, each once: all are committed when the view
    /// becomes active.
    pub committed: Vec<WriteId>,
}

/// An entry that some members have applied and others may lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryCopy {
    /// The entry.
    pub entry: PreparedEntry,
    /// The nodes that have applied it, in order. All others get it from one of these.
    pub holders: Vec<NodeId>,
}

/// Two members reported different entries with one op number: one of them is wrong, and it is
/// unknown which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nodes {} and {} hold different changes as {view} seq {}", nodes[0], nodes[1], seq.0)]
pub struct EntryConflict {
    /// The view of the op number.
    pub view: View,
    /// Its sequence number.
    pub seq: Seq,
    /// The nodes that contradict each other.
    pub nodes: [NodeId; 2],
}

/// Decides from the entries of all members what has to be copied, and what is committed by that.
///
/// An entry that overlaps a later one is committed, because the primary releases a range only when
/// all members have applied the earlier write: every member holds it, and it needs no copy.
///
/// # Errors
/// [`EntryConflict`] if the members contradict each other.
pub fn plan_reconciliation(
    entries: impl IntoIterator<Item = (NodeId, PreparedEntry)>,
) -> Result<Reconciliation, EntryConflict> {
    let union = merge_entries(entries)?;
    let mut committed: Vec<_> = union.values().map(|copy| copy.entry.write_id).collect();
    committed.sort_unstable();
    committed.dedup();

    let mut later = RangeSet::default();
    let mut copies = Vec::new();
    for copy in union.into_values().rev() {
        let range = copy.entry.range;
        if !later.overlaps(range) {
            copies.push(copy);
        }
        later.add(range);
    }
    copies.reverse();
    Ok(Reconciliation { copies, committed })
}

/// The union of the entries, by op number, with their holders.
fn merge_entries(
    entries: impl IntoIterator<Item = (NodeId, PreparedEntry)>,
) -> Result<BTreeMap<(View, Seq), EntryCopy>, EntryConflict> {
    let mut union = BTreeMap::<_, EntryCopy>::new();
    for (node, entry) in entries {
        let copy = union
            .entry((entry.view, entry.seq))
            .or_insert_with(|| EntryCopy { entry, holders: Vec::new() });
        if copy.entry != entry {
            let nodes = [copy.holders[0], node];
            return Err(EntryConflict { view: entry.view, seq: entry.seq, nodes });
        }
        if let Err(at) = copy.holders.binary_search(&node) {
            copy.holders.insert(at, node);
        }
    }
    Ok(union)
}

/// A set of blocks: disjoint ranges, by first block, with the end of each (exclusive).
#[derive(Default)]
struct RangeSet(BTreeMap<u64, u64>);

impl RangeSet {
    fn overlaps(&self, range: Blocks) -> bool {
        let (at, end) = bounds(range);
        at < end && self.0.range(..end).next_back().is_some_and(|(_, &e)| e > at)
    }

    fn add(&mut self, range: Blocks) {
        let (mut at, mut end) = bounds(range);
        if at == end {
            return;
        }
        while let Some((&a, &e)) = self.0.range(..end).next_back().filter(|(_, e)| **e > at) {
            self.0.remove(&a);
            (at, end) = (at.min(a), end.max(e));
        }
        self.0.insert(at, end);
    }
}

fn bounds(range: Blocks) -> (u64, u64) {
    (range.at.0, range.end().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use block::{Epoch, Lba};
    use peer::WriteKind;
    use proptest::prelude::*;

    use super::*;

    fn entry(epoch: u64, seq: u64, at: u64, count: u64) -> PreparedEntry {
        PreparedEntry {
            view: View::first(Epoch(epoch)),
            seq: Seq(seq),
            write_id: WriteId { origin: NodeId(1), number: epoch * 100 + seq },
            range: Blocks::new(Lba(at), count),
            kind: WriteKind::Data,
            fua: false,
        }
    }

    #[test]
    fn the_later_entry_wins_and_all_its_holders_are_listed() {
        let (a, b) = (NodeId(1), NodeId(2));
        let (old, new, other) = (entry(1, 5, 0, 4), entry(2, 1, 3, 4), entry(1, 6, 9, 1));
        let entries = [(b, old), (b, new), (a, new), (a, other), (a, other)];
        let plan = plan_reconciliation(entries).unwrap();
        let copies = vec![
            EntryCopy { entry: other, holders: vec![a] },
            EntryCopy { entry: new, holders: vec![a, b] },
        ];
        assert_eq!(
            plan,
            Reconciliation { copies, committed: vec![old.write_id, other.write_id, new.write_id] }
        );
        assert_eq!(plan_reconciliation([]), Ok(Reconciliation::default()));
    }

    #[test]
    fn conflicting_entries_are_reported() {
        let mut wrong = entry(1, 5, 0, 4);
        wrong.range.count = 3;
        let entries = [(NodeId(1), entry(1, 5, 0, 4)), (NodeId(3), wrong)];
        let view = View::first(Epoch(1));
        let nodes = [NodeId(1), NodeId(3)];
        assert_eq!(plan_reconciliation(entries), Err(EntryConflict { view, seq: Seq(5), nodes }));
    }

    #[test]
    fn the_last_block_is_reconciled() {
        let end = entry(1, 1, u64::MAX - 1, 2);
        let over = entry(1, 2, u64::MAX - 1, 1);
        let copies = plan_reconciliation([(NodeId(1), end), (NodeId(1), over)]).unwrap().copies;
        assert_eq!(copies.iter().map(|c| c.entry).collect::<Vec<_>>(), [over]);
    }

    fn told() -> impl Strategy<Value = Vec<(NodeId, PreparedEntry)>> {
        let one = (1..4_u16, 1..3_u64, 0..8_u64, 0..12_u64, 0..5_u64);
        proptest::collection::vec(one, 0..24).prop_map(|all| {
            let mut known = BTreeMap::new();
            let fix = |(node, epoch, seq, at, count)| {
                let first = *known.entry((epoch, seq)).or_insert(entry(epoch, seq, at, count));
                (NodeId(node), first)
            };
            all.into_iter().map(fix).collect()
        })
    }

    proptest! {
        /// Compares with rule 5.8 as written, one pair at a time.
        #[test]
        fn the_plan_follows_the_rule(entries in told()) {
            let op_number = |e: &PreparedEntry| (e.view, e.seq);
            let plan = plan_reconciliation(entries.clone()).unwrap();
            let is_superseded = |e: &PreparedEntry| entries.iter().any(|(_, later)| {
                op_number(later) > op_number(e) && later.range.overlaps(&e.range)
            });
            for (node, e) in &entries {
                let copy = plan.copies.iter().find(|c| c.entry == *e);
                prop_assert_eq!(copy.is_none(), is_superseded(e));
                prop_assert!(copy.is_none_or(|c| c.holders.contains(node)));
                prop_assert!(plan.committed.contains(&e.write_id));
            }
            for copy in &plan.copies {
                prop_assert!(copy.holders.is_sorted_by(|a, b| a < b));
                prop_assert!(copy.holders.iter().all(|n| entries.contains(&(*n, copy.entry))));
            }
            let mut op_numbers = plan.copies.iter().map(|c| op_number(&c.entry));
            prop_assert!(op_numbers.by_ref().is_sorted_by(|a, b| a < b));
        }

        #[test]
        fn the_order_of_reports_does_not_matter(entries in told()) {
            let backwards = plan_reconciliation(entries.iter().rev().copied());
            prop_assert_eq!(plan_reconciliation(entries), backwards);
        }

        #[test]
        fn copies_never_overlap(entries in told()) {
            let copies = plan_reconciliation(entries).unwrap().copies;
            for (i, one) in copies.iter().enumerate() {
                prop_assert!(copies[..i].iter().all(|c| !c.entry.range.overlaps(&one.entry.range)));
            }
        }
    }
}
