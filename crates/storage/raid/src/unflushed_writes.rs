//! Writes that have completed but may not be durable.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::extent::SlotId;
use super::parity_log::LogPositions;

/// Writes that have completed but may not be durable.
#[derive(Debug, Default)]
pub(super) struct UnflushedWrites {
    /// Number of flushes of all members that have begun.
    flushes_begun: u64,
    /// The entries of the writes, with the value of `flushes_begun` then.
    entries: VecDeque<(u64, LogPositions)>,
    /// Slots with such an entry, likewise, and the region of each.
    slots: FxHashMap<SlotId, (u64, u32)>,
}

impl UnflushedWrites {
    /// What the entry covers has been written.
    pub(super) fn insert(&mut self, slot: SlotId, region: u32, positions: LogPositions) {
        self.entries.push_back((self.flushes_begun, positions));
        self.slots.insert(slot, (self.flushes_begun, region));
    }

    /// A flush begins; returns its number.
    pub(super) fn begin_flush(&mut self) -> u64 {
        self.flushes_begun += 1;
        self.flushes_begun
    }

    /// Everything that was written before this flush began is durable: returns its entries.
    pub(super) fn take_before(&mut self, flush: u64) -> Vec<LogPositions> {
        self.slots.retain(|_, (begun, _)| *begun >= flush);
        let count = self.entries.partition_point(|(begun, _)| *begun < flush);
        self.entries.drain(..count).map(|(_, positions)| positions).collect()
    }

    /// Number of flushes of all members that have begun.
    pub(super) fn flushes_begun(&self) -> u64 {
        self.flushes_begun
    }

    /// Whether a flush would retire entries.
    pub(super) fn has_entries(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Whether the slot has an entry that is not retired.
    pub(super) fn contains(&self, slot: &SlotId) -> bool {
        self.slots.contains_key(slot)
    }

    /// The region of each such slot, with its extent.
    pub(super) fn regions(&self) -> impl Iterator<Item = (u64, u32)> {
        self.slots.iter().map(|((extent, _), (_, region))| (*extent, *region))
    }
}
