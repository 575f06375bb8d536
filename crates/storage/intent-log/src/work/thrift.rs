//! How many marks may be taken at once: as many as do not come back. Pure.
//!
//! A mark that is taken and set again costs a page and a sync, which a write waits for. Random writes over many regions leave
//! each of them alone for a while and come back to all of them, so whatever is taken there comes back. How
//! much that costs is measured, and less is taken until it costs next to nothing; where nothing comes back, more.

use super::super::Region;

/// One mark that comes back for so many operations is as much as the log may cost.
const WORTH: u64 = 128;

/// Most and fewest marks that are taken at once.
const MOST: usize = 4096;
const FEWEST: usize = 64;

/// Ticks after which a mark that was taken is forgotten: if it is set again, that is news.
const MEMORY: u32 = 12;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Thrift {
    /// Regions whose marks were taken of late, a bit each.
    taken: Vec<u64>,
    ticks: u32,
    /// Operations since the last tick, and marks that came back.
    operations: u64,
    back: u64,
    allowance: usize,
}

impl Thrift {
    /// Nothing has been taken yet from any of so many regions.
    pub(super) fn new(regions: u32) -> Self {
        let taken = vec![0; (regions as usize).div_ceil(64)];
        Self { taken, ticks: 0, operations: 0, back: 0, allowance: MOST }
    }

    /// How many marks may be taken.
    pub(super) fn allowance(&self) -> usize {
        self.allowance
    }

    /// An operation begins.
    pub(super) fn operates(&mut self) {
        self.operations += 1;
    }

    /// The mark of `region` was taken.
    pub(super) fn taken(&mut self, region: Region) {
        let (word, bit) = place(region);
        self.taken[word] |= bit;
    }

    /// The mark of `region` has to be written.
    pub(super) fn set(&mut self, region: Region) {
        let (word, bit) = place(region);
        if self.taken[word] & bit != 0 {
            self.taken[word] &= !bit;
            self.back += 1;
        }
    }

    /// Time passes.
    pub(super) fn tick(&mut self) {
        let dear = self.back * WORTH > self.operations;
        let next = if dear { self.allowance / 2 } else { self.allowance * 2 };
        self.allowance = next.clamp(FEWEST, MOST);
        (self.operations, self.back) = (0, 0);
        self.ticks += 1;
        if self.ticks.is_multiple_of(MEMORY) {
            self.taken.fill(0);
        }
    }
}

fn place(region: Region) -> (usize, u64) {
    (region.0 as usize / 64, 1 << (region.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A period in which so many operations happen, and the marks of `taken` are set again.
    fn period(thrift: &mut Thrift, operations: u64, taken: std::ops::Range<u32>) {
        (0..operations).for_each(|_| thrift.operates());
        taken.for_each(|region| thrift.set(Region(region)));
        thrift.tick();
    }

    #[test]
    fn less_is_taken_while_it_comes_back_and_more_when_not() {
        let mut thrift = Thrift::new(10_000);
        assert_eq!(thrift.allowance(), MOST);
        for halved in [2048, 1024, 512] {
            (0..1000).for_each(|region| thrift.taken(Region(region)));
            period(&mut thrift, 1000 * WORTH - 1, 0..1000);
            assert_eq!(thrift.allowance(), halved);
        }
        (0..1000).for_each(|region| thrift.taken(Region(region)));
        period(&mut thrift, 1000 * WORTH, 0..1000);
        assert_eq!(thrift.allowance(), 1024, "cheap enough");
        period(&mut thrift, 0, 0..0);
        assert_eq!(thrift.allowance(), 2048, "idle");
    }

    #[test]
    fn some_are_taken_whatever_it_costs() {
        let mut thrift = Thrift::new(100);
        for _ in 0..20 {
            thrift.taken(Region(99));
            period(&mut thrift, 1, 99..100);
        }
        assert_eq!(thrift.allowance(), FEWEST);
    }

    #[test]
    fn what_was_not_taken_of_late_does_not_come_back() {
        let mut thrift = Thrift::new(10_000);
        period(&mut thrift, 0, 0..10_000);
        assert_eq!(thrift.allowance(), MOST);
        thrift.taken(Region(7));
        (0..MEMORY).for_each(|_| thrift.tick());
        period(&mut thrift, 0, 7..8);
        assert_eq!(thrift.allowance(), MOST);
    }
}
