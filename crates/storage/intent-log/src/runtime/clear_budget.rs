//! How many dirty bits may be cleared at a time: as many as are not set again soon. Pure.
//!
//! A bit that is cleared and set again costs a page write and a sync, for which a client's write
//! waits. Random writes over many regions leave each of them alone for a while but return to all,
//! so every bit cleared there is set again. This cost is measured: fewer bits are cleared until it
//! is negligible, and more where none are set again.

use super::super::Region;

/// Acceptable cost: one bit set again for this many operations.
const OPS_PER_REMARK: u64 = 128;

/// Largest and smallest number of bits that are cleared at a time.
const MAX_ALLOWANCE: usize = 4096;
const MIN_ALLOWANCE: usize = 64;

/// Ticks after which a cleared bit is forgotten: setting it again is not counted then.
const FORGET_AFTER_TICKS: u32 = 12;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct ClearBudget {
    /// Regions whose bits were cleared recently, one bit each.
    cleared: Vec<u64>,
    ticks: u32,
    /// Operations, and bits set again, since the last tick.
    operations: u64,
    remarked: u64,
    allowance: usize,
}

impl ClearBudget {
    /// The budget of a log with this many regions, none of them cleared yet.
    pub(super) fn new(regions: u32) -> Self {
        let cleared = vec![0; (regions as usize).div_ceil(64)];
        Self { cleared, ticks: 0, operations: 0, remarked: 0, allowance: MAX_ALLOWANCE }
    }

    /// How many bits may be cleared.
    pub(super) fn allowance(&self) -> usize {
        self.allowance
    }

    /// Counts an operation.
    pub(super) fn note_op(&mut self) {
        self.operations += 1;
    }

    /// Notes that the bit of `region` was cleared.
    pub(super) fn note_cleared(&mut self, region: Region) {
        let (word, bit) = word_and_bit(region);
        self.cleared[word] |= bit;
    }

    /// Notes that the bit of `region` must be written.
    pub(super) fn note_marked(&mut self, region: Region) {
        let (word, bit) = word_and_bit(region);
        if self.cleared[word] & bit != 0 {
            self.cleared[word] &= !bit;
            self.remarked += 1;
        }
    }

    /// Advances the clock.
    pub(super) fn tick(&mut self) {
        let is_costly = self.remarked * OPS_PER_REMARK > self.operations;
        let next = if is_costly { self.allowance / 2 } else { self.allowance * 2 };
        self.allowance = next.clamp(MIN_ALLOWANCE, MAX_ALLOWANCE);
        (self.operations, self.remarked) = (0, 0);
        self.ticks += 1;
        if self.ticks.is_multiple_of(FORGET_AFTER_TICKS) {
            self.cleared.fill(0);
        }
    }
}

fn word_and_bit(region: Region) -> (usize, u64) {
    (region.0 as usize / 64, 1 << (region.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A period with this many operations, in which the bits of `cleared` are set again.
    fn period(budget: &mut ClearBudget, operations: u64, cleared: std::ops::Range<u32>) {
        (0..operations).for_each(|_| budget.note_op());
        cleared.for_each(|region| budget.note_marked(Region(region)));
        budget.tick();
    }

    #[test]
    fn the_budget_shrinks_while_cleared_regions_become_dirty_again() {
        let mut budget = ClearBudget::new(10_000);
        assert_eq!(budget.allowance(), MAX_ALLOWANCE);
        for halved in [2048, 1024, 512] {
            (0..1000).for_each(|region| budget.note_cleared(Region(region)));
            period(&mut budget, 1000 * OPS_PER_REMARK - 1, 0..1000);
            assert_eq!(budget.allowance(), halved);
        }
        (0..1000).for_each(|region| budget.note_cleared(Region(region)));
        period(&mut budget, 1000 * OPS_PER_REMARK, 0..1000);
        assert_eq!(budget.allowance(), 1024, "cheap enough");
        period(&mut budget, 0, 0..0);
        assert_eq!(budget.allowance(), 2048, "idle");
    }

    #[test]
    fn a_minimum_is_always_cleared() {
        let mut budget = ClearBudget::new(100);
        for _ in 0..20 {
            budget.note_cleared(Region(99));
            period(&mut budget, 1, 99..100);
        }
        assert_eq!(budget.allowance(), MIN_ALLOWANCE);
    }

    #[test]
    fn regions_not_cleared_recently_do_not_count() {
        let mut budget = ClearBudget::new(10_000);
        period(&mut budget, 0, 0..10_000);
        assert_eq!(budget.allowance(), MAX_ALLOWANCE);
        budget.note_cleared(Region(7));
        (0..FORGET_AFTER_TICKS).for_each(|_| budget.tick());
        period(&mut budget, 0, 7..8);
        assert_eq!(budget.allowance(), MAX_ALLOWANCE);
    }
}
