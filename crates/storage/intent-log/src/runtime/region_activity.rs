//! Activity of regions: operations in flight, and when the last one was. Pure.
//!
//! Time is counted in *intervals*: one ends when a flush begins or at a tick, if there was any
//! activity in it. Regions are kept in blocks that exist only where activity was recent, so idle
//! regions cost almost nothing, and further activity in a recently used region allocates nothing.

use std::ops::Range;

use super::super::Region;

/// Regions in a block.
const REGIONS_PER_BLOCK: usize = 256;

/// Bits for the number of operations in flight. Each needs a page of memory at least, so that many
/// would hold 4 GiB in one region.
const COUNT_BITS: u32 = 20;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// A region: the interval of its last activity, above the number of operations in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RegionEntry(u64);

impl RegionEntry {
    fn in_flight(self) -> u64 {
        self.0 & COUNT_MASK
    }

    fn interval(self) -> u64 {
        self.0 >> COUNT_BITS
    }

    /// The same entry with its last activity in `interval`.
    fn with_interval(self, interval: u64) -> Self {
        Self(interval << COUNT_BITS | self.in_flight())
    }
}

/// When a flush began: it covers operations that ended before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlushStamp(u64);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct RegionActivity {
    current_interval: u64,
    /// Whether there was activity in the current interval.
    is_interval_used: bool,
    /// Last activity of regions in blocks that do not exist: at or after their real one.
    forgotten_interval: u64,
    /// The intervals that the last two ticks began, the older one first; 0 if there was none.
    tick_intervals: [u64; 2],
    in_flight: u64,
    blocks: Vec<Option<Box<[RegionEntry; REGIONS_PER_BLOCK]>>>,
}

impl RegionActivity {
    /// The activity of this many regions, all idle.
    pub(super) fn new(regions: u32) -> Self {
        let blocks = vec![None; (regions as usize).div_ceil(REGIONS_PER_BLOCK)];
        Self {
            current_interval: 1,
            is_interval_used: false,
            forgotten_interval: 0,
            tick_intervals: [0; 2],
            in_flight: 0,
            blocks,
        }
    }

    /// Operations in flight in all regions.
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Begins an operation in `regions`.
    pub(super) fn begin_op(&mut self, regions: Range<u32>) {
        (self.is_interval_used, self.in_flight) = (true, self.in_flight + 1);
        let now = self.current_interval;
        for region in regions {
            let entry = self.entry_mut(region);
            assert!(
                entry.in_flight() < COUNT_MASK,
                "a buffer pool has no memory for so many operations"
            );
            *entry = RegionEntry(entry.with_interval(now).0 + 1);
        }
    }

    /// Ends an operation in `regions`.
    pub(super) fn end_op(&mut self, regions: Range<u32>) {
        (self.is_interval_used, self.in_flight) = (true, self.in_flight - 1);
        let now = self.current_interval;
        for region in regions {
            let entry = self.entry_mut(region);
            *entry = RegionEntry(entry.with_interval(now).0 - 1);
        }
    }

    /// Begins a flush, which ends the interval.
    pub(super) fn begin_flush(&mut self) -> FlushStamp {
        self.end_interval();
        FlushStamp(self.current_interval)
    }

    /// Advances the clock: ends the interval, and forgets regions that were idle for two ticks.
    pub(super) fn tick(&mut self) {
        self.end_interval();
        self.tick_intervals = [self.tick_intervals[1], self.current_interval];
        let limit = self.tick_intervals[0];
        for block in &mut self.blocks {
            let is_idle = |e: &RegionEntry| e.in_flight() == 0 && e.interval() < limit;
            let removed = block.take_if(|entries| entries.iter().all(is_idle));
            let last =
                removed.iter().flat_map(|entries| entries.iter()).map(|e| e.interval()).max();
            self.forgotten_interval = self.forgotten_interval.max(last.unwrap_or(0));
        }
    }

    /// Whether no operation was active in `region` since `flush` began.
    pub(super) fn is_quiet_since(&self, region: Region, flush: FlushStamp) -> bool {
        let entry = self.get(region);
        entry.in_flight() == 0 && entry.interval() < flush.0
    }

    /// If no operation is in flight in `region`: its last activity, as a growing number, and
    /// whether it has been idle for two ticks.
    pub(super) fn idle(&self, region: Region) -> Option<(u64, bool)> {
        let entry = self.get(region);
        (entry.in_flight() == 0)
            .then(|| (entry.interval(), entry.interval() < self.tick_intervals[0]))
    }

    fn end_interval(&mut self) {
        if std::mem::take(&mut self.is_interval_used) {
            self.current_interval += 1;
        }
    }

    fn get(&self, region: Region) -> RegionEntry {
        let (block, index) =
            (region.0 as usize / REGIONS_PER_BLOCK, region.0 as usize % REGIONS_PER_BLOCK);
        let forgotten = RegionEntry::default().with_interval(self.forgotten_interval);
        self.blocks[block].as_ref().map_or(forgotten, |entries| entries[index])
    }

    fn entry_mut(&mut self, region: u32) -> &mut RegionEntry {
        let (block, index) =
            (region as usize / REGIONS_PER_BLOCK, region as usize % REGIONS_PER_BLOCK);
        let forgotten = RegionEntry::default().with_interval(self.forgotten_interval);
        let entries =
            self.blocks[block].get_or_insert_with(|| Box::new([forgotten; REGIONS_PER_BLOCK]));
        &mut entries[index]
    }
}

#[cfg(test)]
mod tests;
