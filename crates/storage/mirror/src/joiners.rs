//! The replicas that the primary is bringing in sync, in its present view (RFD 0010, 6.6).

use std::collections::BTreeMap;
use std::ops::Range;

use peer::{Incarnation, NodeId};

/// Ranges that status names of what nobody can read.
const NAMED: usize = 8;

/// What no replica can read, and another therefore lacks: it is in sync when that has been written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unreadable {
    /// The first ranges of it, in bytes of the volume.
    pub ranges: Vec<Range<u64>>,
    /// Bytes of all of it that is known.
    pub bytes: u64,
    /// Whether all else has been copied, and this alone is waited for.
    pub waited_for: bool,
}

impl Unreadable {
    /// What is in these ranges of bytes, in order.
    pub(super) fn of(ranges: impl Iterator<Item = Range<u64>>, waited_for: bool) -> Self {
        let mut all = Self { waited_for, ..Self::default() };
        for range in ranges {
            let has_room = all.ranges.len() < NAMED;
            all.bytes += range.end - range.start;
            match all.ranges.last_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None if has_room => all.ranges.push(range),
                None => {}
            }
        }
        all
    }
}

/// One attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joiner {
    pub(super) incarnation: Incarnation,
    /// Whether it takes part in flushes.
    pub(super) behind_barrier: bool,
    /// Whether the record may list it already: it cannot be dropped any more in this view.
    pub(super) proposed: bool,
    /// Writes that are refused and that it may have: until it has what takes their place it is not admitted (RFD 0040).
    pub(super) refused: u32,
    /// Bytes to copy in all, and copied.
    pub(super) todo: u64,
    pub(super) done: u64,
}

/// All of one primary.
#[derive(Debug, Default)]
pub(super) struct Joiners {
    all: BTreeMap<NodeId, Joiner>,
    /// What they lack that nobody can read.
    unreadable: BTreeMap<NodeId, Unreadable>,
    /// Bytes to copy in all, and copied, of attempts that have ended.
    ended: (u64, u64),
    /// Why the last attempts failed.
    failed: BTreeMap<NodeId, &'static str>,
}

impl Joiners {
    /// `node` begins an attempt: every write goes to it from now on.
    pub(super) fn attach(&mut self, node: NodeId, incarnation: Incarnation) {
        let (behind_barrier, proposed) = (false, false);
        let fresh = Joiner { incarnation, behind_barrier, proposed, refused: 0, todo: 0, done: 0 };
        self.unreadable.remove(&node);
        self.failed.remove(&node);
        if let Some(old) = self.all.insert(node, fresh) {
            self.count(old);
        }
    }

    /// What `node` lacks that nobody can read.
    pub(super) fn lacks(&mut self, node: NodeId, what: Unreadable) {
        match what.bytes {
            0 => self.unreadable.remove(&node),
            _ => self.unreadable.insert(node, what),
        };
    }

    /// The attempt of `node` has failed.
    pub(super) fn failed(&mut self, node: NodeId, why: &'static str) {
        self.failed.insert(node, why);
    }

    /// Why the last attempt of `node` failed.
    pub(super) fn failure(&self, node: NodeId) -> Option<&'static str> {
        self.failed.get(&node).copied()
    }

    /// What replicas lack that nobody can read, for status.
    pub(super) fn unreadable(&self) -> Vec<(NodeId, Unreadable)> {
        self.unreadable.iter().map(|(node, what)| (*node, what.clone())).collect()
    }

    /// The attempt of `node`, if it is this one.
    pub(super) fn get(&mut self, node: NodeId, incarnation: Incarnation) -> Option<&mut Joiner> {
        self.all.get_mut(&node).filter(|j| j.incarnation == incarnation)
    }

    /// The attempt of `node`.
    pub(super) fn of(&self, node: NodeId) -> Option<Joiner> {
        self.all.get(&node).copied()
    }

    /// Whose acknowledgement every write needs beside the members'.
    pub(super) fn attached(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.all.keys().copied()
    }

    /// Who takes part in every flush beside the members.
    pub(super) fn behind_barrier(&self) -> Vec<NodeId> {
        self.all.iter().filter(|(_, j)| j.behind_barrier).map(|(node, _)| *node).collect()
    }

    /// A write is refused that all of these may have: no attempt of theirs is admitted before [`Self::have_replaced`].
    pub(super) fn await_replacements(&mut self) -> Vec<(NodeId, Incarnation)> {
        let awaited = |(node, joiner): (&NodeId, &mut Joiner)| {
            joiner.refused += 1;
            (*node, joiner.incarnation)
        };
        self.all.iter_mut().map(awaited).collect()
    }

    /// These have what takes its place, or are not needed for it any more.
    pub(super) fn have_replaced(&mut self, which: &[(NodeId, Incarnation)]) {
        for (node, incarnation) in which {
            if let Some(joiner) = self.get(*node, *incarnation) {
                joiner.refused -= 1;
            }
        }
    }

    /// The record will not list the attempt of `node`.
    pub(super) fn not_proposed(&mut self, node: NodeId) {
        if let Some(joiner) = self.all.get_mut(&node) {
            joiner.proposed = false;
        }
    }

    /// Ends the attempt of `node`, unless the record may list it; says whether there was one.
    pub(super) fn detach(&mut self, node: NodeId) -> Option<Joiner> {
        if self.all.get(&node).is_none_or(|j| j.proposed) {
            return None;
        }
        self.unreadable.remove(&node);
        let ended = self.all.remove(&node);
        ended.into_iter().for_each(|joiner| self.count(joiner));
        ended
    }

    fn count(&mut self, ended: Joiner) {
        self.ended.0 += ended.todo;
        self.ended.1 += ended.done;
    }

    /// The view is over, and all attempts with it.
    pub(super) fn end(&mut self) {
        self.unreadable.clear();
        let ended = std::mem::take(&mut self.all);
        ended.into_values().for_each(|joiner| self.count(joiner));
    }

    /// Bytes to copy in all, and copied, of all attempts that there ever were.
    pub(super) fn totals(&self) -> (u64, u64) {
        let add = |(todo, done), joiner: &Joiner| (todo + joiner.todo, done + joiner.done);
        self.all.values().fold(self.ended, add)
    }

    /// All attempts, for status.
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, Joiner)> + '_ {
        self.all.iter().map(|(node, joiner)| (*node, *joiner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unreadable_is_told_in_few_ranges() {
        let blocks = (0..4u64).chain(10..12).map(|n| n * 512..(n + 1) * 512);
        let told = Unreadable::of(blocks, true);
        assert_eq!((told.ranges, told.bytes), (vec![0..2048, 5120..6144], 6 * 512));
        let told = Unreadable::of((0..100u64).map(|n| n * 1024..n * 1024 + 512), false);
        assert_eq!((told.ranges.len(), told.bytes), (NAMED, 100 * 512));
    }
}
