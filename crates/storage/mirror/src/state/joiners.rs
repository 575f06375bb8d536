//! The joiners: replicas that the primary is resyncing in its present view (RFD 0010, 6.6).

use std::collections::BTreeMap;
use std::ops::Range;

use peer::{Incarnation, NodeId};

/// Most unreadable ranges that the status lists.
const MAX_STATUS_RANGES: usize = 8;

/// Data that no replica can read, so that a joiner lacks it. The joiner is admitted once it has
/// been rewritten.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnreadableData {
    /// The first ranges, in bytes of the volume.
    pub ranges: Vec<Range<u64>>,
    /// Total bytes known.
    pub bytes: u64,
    /// Whether everything else has been copied, and only this blocks the admission.
    pub blocks_admission: bool,
}

impl UnreadableData {
    /// From ranges of bytes, in order.
    pub(in super::super) fn from_ranges(
        ranges: impl Iterator<Item = Range<u64>>,
        blocks_admission: bool,
    ) -> Self {
        let mut all = Self { blocks_admission, ..Self::default() };
        for range in ranges {
            let has_room = all.ranges.len() < MAX_STATUS_RANGES;
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

/// One resync attempt.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Joiner {
    pub(in super::super) incarnation: Incarnation,
    /// Whether it takes part in flushes.
    pub(in super::super) in_flushes: bool,
    /// Whether the configuration may list it already: it cannot be dropped any more in this view.
    pub(in super::super) admission_proposed: bool,
    /// Rejected writes that it may have applied: it is not admitted before it has their
    /// replacements (RFD 0040).
    pub(in super::super) pending_replacements: u32,
    /// Bytes to copy in total, and copied.
    pub(in super::super) total_bytes: u64,
    pub(in super::super) copied_bytes: u64,
}

/// All joiners of one primary.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Joiners {
    by_node: BTreeMap<NodeId, Joiner>,
    /// Data that they lack and no replica can read.
    unreadable_data: BTreeMap<NodeId, UnreadableData>,
    /// Bytes to copy in total, and copied, of attempts that have ended.
    ended_totals: (u64, u64),
    /// Why the last attempts failed.
    failures: BTreeMap<NodeId, &'static str>,
}

impl Joiners {
    /// Begins an attempt of `node`, with so many bytes to copy: every write goes to it from now on.
    pub(in super::super) fn attach(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        total_bytes: u64,
    ) {
        let (in_flushes, admission_proposed) = (false, false);
        let joiner = Joiner {
            incarnation,
            in_flushes,
            admission_proposed,
            pending_replacements: 0,
            total_bytes,
            copied_bytes: 0,
        };
        self.unreadable_data.remove(&node);
        self.failures.remove(&node);
        if let Some(old) = self.by_node.insert(node, joiner) {
            self.add_to_totals(old);
        }
    }

    /// Sets the data that `node` lacks and no replica can read.
    pub(in super::super) fn set_unreadable(&mut self, node: NodeId, data: UnreadableData) {
        match data.bytes {
            0 => self.unreadable_data.remove(&node),
            _ => self.unreadable_data.insert(node, data),
        };
    }

    /// Notes that the attempt of `node` has failed.
    pub(in super::super) fn set_failure(&mut self, node: NodeId, reason: &'static str) {
        self.failures.insert(node, reason);
    }

    /// Why the last attempt of `node` failed.
    pub(in super::super) fn last_failure(&self, node: NodeId) -> Option<&'static str> {
        self.failures.get(&node).copied()
    }

    /// The data that joiners lack and no replica can read, for status.
    pub(in super::super) fn unreadable_data(&self) -> Vec<(NodeId, UnreadableData)> {
        self.unreadable_data.iter().map(|(node, data)| (*node, data.clone())).collect()
    }

    /// The attempt of `node`, if it has this incarnation.
    pub(in super::super) fn get(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
    ) -> Option<&mut Joiner> {
        self.by_node.get_mut(&node).filter(|j| j.incarnation == incarnation)
    }

    /// The attempt of `node`.
    pub(in super::super) fn current(&self, node: NodeId) -> Option<Joiner> {
        self.by_node.get(&node).copied()
    }

    /// The nodes whose acknowledgement every write needs besides the members'.
    pub(in super::super) fn attached(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.by_node.keys().copied()
    }

    /// The nodes that take part in every flush besides the members.
    pub(in super::super) fn in_flushes(&self) -> Vec<NodeId> {
        self.by_node.iter().filter(|(_, j)| j.in_flushes).map(|(node, _)| *node).collect()
    }

    /// A write was rejected that all of these may have applied: none of these attempts is admitted
    /// before [`Self::replacements_done`].
    pub(in super::super) fn await_replacements(&mut self) -> Vec<(NodeId, Incarnation)> {
        let add_one = |(node, joiner): (&NodeId, &mut Joiner)| {
            joiner.pending_replacements += 1;
            (*node, joiner.incarnation)
        };
        self.by_node.iter_mut().map(add_one).collect()
    }

    /// These have applied the replacement, or are not needed for it any more.
    pub(in super::super) fn replacements_done(&mut self, joiners: &[(NodeId, Incarnation)]) {
        for (node, incarnation) in joiners {
            if let Some(joiner) = self.get(*node, *incarnation) {
                joiner.pending_replacements -= 1;
            }
        }
    }

    /// The configuration will not list the attempt of `node`.
    pub(in super::super) fn clear_admission_proposed(&mut self, node: NodeId) {
        if let Some(joiner) = self.by_node.get_mut(&node) {
            joiner.admission_proposed = false;
        }
    }

    /// Ends the attempt of `node`, unless the configuration may list it. Returns it if it ended.
    pub(in super::super) fn detach(&mut self, node: NodeId) -> Option<Joiner> {
        if self.by_node.get(&node).is_none_or(|j| j.admission_proposed) {
            return None;
        }
        self.unreadable_data.remove(&node);
        let ended = self.by_node.remove(&node);
        ended.into_iter().for_each(|joiner| self.add_to_totals(joiner));
        ended
    }

    fn add_to_totals(&mut self, ended: Joiner) {
        self.ended_totals.0 += ended.total_bytes;
        self.ended_totals.1 += ended.copied_bytes;
    }

    /// Ends the view, and all attempts with it.
    pub(in super::super) fn end_view(&mut self) {
        self.unreadable_data.clear();
        let ended = std::mem::take(&mut self.by_node);
        ended.into_values().for_each(|joiner| self.add_to_totals(joiner));
    }

    /// Bytes to copy in total, and copied, of all attempts so far.
    pub(in super::super) fn totals(&self) -> (u64, u64) {
        let add = |(total, copied), joiner: &Joiner| {
            (total + joiner.total_bytes, copied + joiner.copied_bytes)
        };
        self.by_node.values().fold(self.ended_totals, add)
    }

    /// All attempts, for status.
    pub(in super::super) fn iter(&self) -> impl Iterator<Item = (NodeId, Joiner)> + '_ {
        self.by_node.iter().map(|(node, joiner)| (*node, *joiner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_data_is_reported_in_few_ranges() {
        let blocks = (0..4u64).chain(10..12).map(|n| n * 512..(n + 1) * 512);
        let data = UnreadableData::from_ranges(blocks, true);
        assert_eq!((data.ranges, data.bytes), (vec![0..2048, 5120..6144], 6 * 512));
        let data =
            UnreadableData::from_ranges((0..100u64).map(|n| n * 1024..n * 1024 + 512), false);
        assert_eq!((data.ranges.len(), data.bytes), (MAX_STATUS_RANGES, 100 * 512));
    }
}
