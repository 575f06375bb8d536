//! Space that a thin unit uses and has available, and the thresholds reported to initiators (SBC-3
//! 4.7.3.7, 6.4).

/// Offsets of the descriptors of the thresholds in the logical block provisioning mode page: one
/// for available space, one for used space.
pub(crate) const THRESHOLDS: [usize; 2] = [16, 24];

/// Bytes of a threshold set, the unit of space.
const THRESHOLD_SET_BYTES: u32 = 1 << 20;

/// Space in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThinSpace {
    pub(crate) used: u64,
    pub(crate) available: u64,
    /// Whether each threshold is armed: not reached, so that reaching it is reported.
    armed: [bool; 2],
}

/// A threshold of space, in threshold sets (SBC-3 4.7.3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Threshold {
    pub(crate) enabled: bool,
    pub(crate) count: u32,
}

impl ThinSpace {
    /// Space of a unit with blocks of `block_size` bytes; the thresholds that it has not reached
    /// are armed.
    pub(crate) fn new(
        used: u64,
        available: u64,
        thresholds: &[Threshold; 2],
        block_size: u32,
    ) -> Self {
        let mut space = Self { used, available, armed: [false; 2] };
        space.rearm(thresholds, block_size);
        space
    }

    /// Arms the thresholds that are not reached.
    pub(crate) fn rearm(&mut self, thresholds: &[Threshold; 2], block_size: u32) {
        let [low, taken] = thresholds;
        let reached = [
            threshold_sets(self.available, block_size) <= low.count,
            threshold_sets(self.used, block_size) >= taken.count,
        ];
        self.armed = reached.map(|reached| !reached);
    }

    /// Which thresholds it has reached that were armed `before`.
    pub(crate) fn newly_reached(&self, before: Option<&Self>) -> [bool; 2] {
        let was_armed = before.map_or([false; 2], |space| space.armed);
        std::array::from_fn(|n| was_armed[n] && !self.armed[n])
    }
}

/// THRESHOLD EXPONENT: blocks per threshold set, as a power of two (SBC-3 6.5).
pub(crate) fn threshold_exponent(block_size: u32) -> u32 {
    (THRESHOLD_SET_BYTES / block_size.max(1)).checked_ilog2().unwrap_or(0).max(1)
}

/// `blocks` converted to threshold sets.
pub(crate) fn threshold_sets(blocks: u64, block_size: u32) -> u32 {
    u32::try_from(blocks >> threshold_exponent(block_size)).unwrap_or(u32::MAX)
}

/// The default thresholds of a unit of `blocks`: one for available space at a tenth of its size,
/// and one for used space, which initiators must set.
pub(crate) fn default_thresholds(blocks: u64, block_size: u32) -> [Threshold; 2] {
    const TENTH: u64 = 10;
    let low = Threshold { enabled: true, count: threshold_sets(blocks / TENTH, block_size) };
    [low, Threshold { enabled: false, count: threshold_sets(blocks, block_size) }]
}
