//! What a new view has to make equal (RFD 0010, 5.8).

use std::collections::BTreeMap;

use block::Blocks;
use peer::{Entry, NodeId, Seq, Tag, View};

/// What has to be done before a view may open, and what its opening settles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// What is copied, in order of `(view, seq)`. No two of them overlap.
    pub copies: Vec<Copy>,
    /// The writes that somebody has an entry of, each once: all are committed when the view opens.
    pub settled: Vec<Tag>,
}

/// An entry that some members have and others may lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// What it is.
    pub entry: Entry,
    /// Who has applied it, by node. All others get it from one of these.
    pub holders: Vec<NodeId>,
}

/// Two members tell different changes under one place in the order: one of them is wrong, and
/// nobody can say which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nodes {} and {} hold different changes as {view} seq {}", nodes[0], nodes[1], seq.0)]
pub struct Conflict {
    /// Where the place was given out.
    pub view: View,
    /// The place.
    pub seq: Seq,
    /// Who contradict each other.
    pub nodes: [NodeId; 2],
}

/// Decides from the entries of all members what has to be copied, and what is settled by it.
///
/// An entry that overlaps a later one is committed, for the primary gives a range out again only
/// when all have applied what had it before: every member holds it, and it needs no copy.
///
/// # Errors
/// [`Conflict`] if the members contradict each other.
pub fn settle(entries: impl IntoIterator<Item = (NodeId, Entry)>) -> Result<Settlement, Conflict> {
    let union = gather(entries)?;
    let mut settled: Vec<_> = union.values().map(|copy| copy.entry.tag).collect();
    settled.sort_unstable();
    settled.dedup();

    let mut later = Covered::default();
    let mut copies = Vec::new();
    for copy in union.into_values().rev() {
        let range = copy.entry.range;
        if !later.overlaps(range) {
            copies.push(copy);
        }
        later.add(range);
    }
    copies.reverse();
    Ok(Settlement { copies, settled })
}

/// The union of the entries, by their place, with all who have them.
fn gather(
    entries: impl IntoIterator<Item = (NodeId, Entry)>,
) -> Result<BTreeMap<(View, Seq), Copy>, Conflict> {
    let mut union = BTreeMap::<_, Copy>::new();
    for (node, entry) in entries {
        let copy = union
            .entry((entry.view, entry.seq))
            .or_insert_with(|| Copy { entry, holders: Vec::new() });
        if copy.entry != entry {
            let nodes = [copy.holders[0], node];
            return Err(Conflict { view: entry.view, seq: entry.seq, nodes });
        }
        if let Err(at) = copy.holders.binary_search(&node) {
            copy.holders.insert(at, node);
        }
    }
    Ok(union)
}

/// A set of blocks: disjoint ranges, by their first block, each with the block behind its last.
#[derive(Default)]
struct Covered(BTreeMap<u64, u64>);

impl Covered {
    fn overlaps(&self, range: Blocks) -> bool {
        let (at, end) = ends(range);
        at < end && self.0.range(..end).next_back().is_some_and(|(_, &e)| e > at)
    }

    fn add(&mut self, range: Blocks) {
        let (mut at, mut end) = ends(range);
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

fn ends(range: Blocks) -> (u64, u64) {
    (range.at.0, range.end().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use block::{Epoch, Lba};
    use peer::Kind;
    use proptest::prelude::*;

    use super::*;

    fn entry(epoch: u64, seq: u64, at: u64, count: u64) -> Entry {
        Entry {
            view: View::first(Epoch(epoch)),
            seq: Seq(seq),
            tag: Tag { node: NodeId(1), number: epoch * 100 + seq },
            range: Blocks::new(Lba(at), count),
            kind: Kind::Write,
            fua: false,
        }
    }

    #[test]
    fn holders_are_all_that_have_it_and_the_later_wins() {
        let (a, b) = (NodeId(1), NodeId(2));
        let (old, new, other) = (entry(1, 5, 0, 4), entry(2, 1, 3, 4), entry(1, 6, 9, 1));
        let told = [(b, old), (b, new), (a, new), (a, other), (a, other)];
        let settlement = settle(told).unwrap();
        let copies =
            vec![Copy { entry: other, holders: vec![a] }, Copy { entry: new, holders: vec![a, b] }];
        assert_eq!(settlement, Settlement { copies, settled: vec![old.tag, other.tag, new.tag] });
        assert_eq!(settle([]), Ok(Settlement::default()));
    }

    #[test]
    fn a_contradiction_is_named() {
        let mut wrong = entry(1, 5, 0, 4);
        wrong.range.count = 3;
        let told = [(NodeId(1), entry(1, 5, 0, 4)), (NodeId(3), wrong)];
        let view = View::first(Epoch(1));
        let nodes = [NodeId(1), NodeId(3)];
        assert_eq!(settle(told), Err(Conflict { view, seq: Seq(5), nodes }));
    }

    #[test]
    fn the_last_block_of_all_is_one_too() {
        let end = entry(1, 1, u64::MAX - 1, 2);
        let over = entry(1, 2, u64::MAX - 1, 1);
        let copies = settle([(NodeId(1), end), (NodeId(1), over)]).unwrap().copies;
        assert_eq!(copies.iter().map(|c| c.entry).collect::<Vec<_>>(), [over]);
    }

    fn told() -> impl Strategy<Value = Vec<(NodeId, Entry)>> {
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
        /// 5.8 as it is written, one pair at a time.
        #[test]
        fn is_what_the_rule_says(told in told()) {
            let place = |e: &Entry| (e.view, e.seq);
            let settlement = settle(told.clone()).unwrap();
            let lies_under = |e: &Entry| told.iter().any(|(_, later)| {
                place(later) > place(e) && later.range.overlaps(&e.range)
            });
            for (node, e) in &told {
                let copy = settlement.copies.iter().find(|c| c.entry == *e);
                prop_assert_eq!(copy.is_none(), lies_under(e));
                prop_assert!(copy.is_none_or(|c| c.holders.contains(node)));
                prop_assert!(settlement.settled.contains(&e.tag));
            }
            for copy in &settlement.copies {
                prop_assert!(copy.holders.is_sorted_by(|a, b| a < b));
                prop_assert!(copy.holders.iter().all(|n| told.contains(&(*n, copy.entry))));
            }
            let mut places = settlement.copies.iter().map(|c| place(&c.entry));
            prop_assert!(places.by_ref().is_sorted_by(|a, b| a < b));
        }

        #[test]
        fn the_order_of_telling_does_not_matter(told in told()) {
            let backwards = settle(told.iter().rev().copied());
            prop_assert_eq!(settle(told), backwards);
        }

        #[test]
        fn copies_never_overlap(told in told()) {
            let copies = settle(told).unwrap().copies;
            for (i, one) in copies.iter().enumerate() {
                prop_assert!(copies[..i].iter().all(|c| !c.entry.range.overlaps(&one.entry.range)));
            }
        }
    }
}
