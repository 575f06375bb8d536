//! What goes on in the regions: what is in flight, and when it was last. Pure.
//!
//! Time is counted in *eras*: one ends when a flush begins or a tick comes, if anything was touched in
//! it. Regions are kept in blocks that exist only where something went on of late, so what idles costs
//! next to nothing, and to touch a region that was touched before takes no memory.

use std::ops::Range;

use super::super::Region;

/// Regions in a block.
const BLOCK: usize = 256;

/// Bits for the number of operations in flight. Each has a page of memory at least, so that many
/// would hold 4 GiB in one region.
const COUNT_BITS: u32 = 20;
const COUNT: u64 = (1 << COUNT_BITS) - 1;

/// One region: the era in which it was last touched above the number of operations in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    fn in_flight(self) -> u64 {
        self.0 & COUNT
    }

    fn era(self) -> u64 {
        self.0 >> COUNT_BITS
    }

    /// With as many in flight, touched in `era`.
    fn touched(self, era: u64) -> Self {
        Self(era << COUNT_BITS | self.in_flight())
    }
}

/// When a flush began: what was touched before and not since is covered by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlushStamp(u64);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Activity {
    now: u64,
    /// Whether anything was touched in the present era.
    touched: bool,
    /// When the regions of blocks that do not exist count as touched: not before they were.
    floor: u64,
    /// The eras that the last two ticks began, the older one first; 0 if there was none.
    ticks: [u64; 2],
    in_flight: u64,
    blocks: Vec<Option<Box<[Entry; BLOCK]>>>,
}

impl Activity {
    /// Nothing has been touched yet in any of so many regions.
    pub(super) fn new(regions: u32) -> Self {
        let blocks = vec![None; (regions as usize).div_ceil(BLOCK)];
        Self { now: 1, touched: false, floor: 0, ticks: [0; 2], in_flight: 0, blocks }
    }

    /// Operations in flight, in whatever region.
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// An operation begins in `regions`.
    pub(super) fn begin(&mut self, regions: Range<u32>) {
        (self.touched, self.in_flight) = (true, self.in_flight + 1);
        let now = self.now;
        for region in regions {
            let entry = self.entry(region);
            assert!(entry.in_flight() < COUNT, "no pool has memory for so many");
            *entry = Entry(entry.touched(now).0 + 1);
        }
    }

    /// One that had begun there ends.
    pub(super) fn end(&mut self, regions: Range<u32>) {
        (self.touched, self.in_flight) = (true, self.in_flight - 1);
        let now = self.now;
        for region in regions {
            let entry = self.entry(region);
            *entry = Entry(entry.touched(now).0 - 1);
        }
    }

    /// A flush begins: ends the era.
    pub(super) fn flush_begins(&mut self) -> FlushStamp {
        self.advance();
        FlushStamp(self.now)
    }

    /// Time passes: ends the era, and forgets what was not touched for two ticks.
    pub(super) fn tick(&mut self) {
        self.advance();
        self.ticks = [self.ticks[1], self.now];
        let old = self.ticks[0];
        for block in &mut self.blocks {
            let idle = |e: &Entry| e.in_flight() == 0 && e.era() < old;
            let gone = block.take_if(|entries| entries.iter().all(idle));
            let last = gone.iter().flat_map(|entries| entries.iter()).map(|e| e.era()).max();
            self.floor = self.floor.max(last.unwrap_or(0));
        }
    }

    /// Whether nothing is in flight in `region`, and nothing was since `flush` began.
    pub(super) fn is_quiet_since(&self, region: Region, flush: FlushStamp) -> bool {
        let entry = self.look(region);
        entry.in_flight() == 0 && entry.era() < flush.0
    }

    /// Whether nothing is in flight in `region`; then also when it was last touched, as a number
    /// that grows, and whether it was left alone for two ticks.
    pub(super) fn idle(&self, region: Region) -> Option<(u64, bool)> {
        let entry = self.look(region);
        (entry.in_flight() == 0).then(|| (entry.era(), entry.era() < self.ticks[0]))
    }

    fn advance(&mut self) {
        if std::mem::take(&mut self.touched) {
            self.now += 1;
        }
    }

    fn look(&self, region: Region) -> Entry {
        let (block, place) = (region.0 as usize / BLOCK, region.0 as usize % BLOCK);
        let forgotten = Entry::default().touched(self.floor);
        self.blocks[block].as_ref().map_or(forgotten, |entries| entries[place])
    }

    fn entry(&mut self, region: u32) -> &mut Entry {
        let (block, place) = (region as usize / BLOCK, region as usize % BLOCK);
        let forgotten = Entry::default().touched(self.floor);
        let entries = self.blocks[block].get_or_insert_with(|| Box::new([forgotten; BLOCK]));
        &mut entries[place]
    }
}

#[cfg(test)]
mod tests;
