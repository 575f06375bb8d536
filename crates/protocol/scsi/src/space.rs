//! Space that a thin unit uses and has available, and the thresholds reported to initiators (SBC-3
//! 4.7.3.7, 6.4).

use crate::mode::{ModeParameters, Threshold};
use crate::nexus::{AttentionScope, UnitAttention};
use crate::unit::LogicalUnit;

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

impl LogicalUnit {
    /// The unit uses `used_blocks`, and `available_blocks` more are available. The driver calls
    /// this periodically; when a threshold is crossed every initiator gets a unit attention, once.
    /// Only for thin units.
    pub fn set_space(&mut self, used_blocks: u64, available_blocks: u64) {
        if !self.config.thin || !self.can_unmap() {
            return;
        }
        let first = self.space.is_none();
        let space = ThinSpace { used: used_blocks, available: available_blocks, armed: [false; 2] };
        let reached = self.thresholds_reached(&self.modes, &space);
        let was_armed = self.space.map_or([false; 2], |s| s.armed);
        self.space = Some(ThinSpace { armed: reached.map(|r| !r), ..space });
        if first {
            // A log page, a mode page and the exponent have appeared.
            self.nexuses.raise(AttentionScope::All, UnitAttention::InquiryChanged);
        }
        let reported = self.modes.reports_thresholds;
        for (n, what) in [UnitAttention::SpaceLow, UnitAttention::SpaceUsed].into_iter().enumerate()
        {
            if reported && self.modes.thresholds[n].enabled && was_armed[n] && reached[n] {
                self.nexuses.raise(AttentionScope::All, what);
            }
        }
    }

    /// The thresholds have changed: the initiator that set them knows which are already reached.
    pub(crate) fn rearm_thresholds(&mut self) {
        if let Some(space) = self.space {
            let armed = self.thresholds_reached(&self.modes, &space).map(|reached| !reached);
            self.space = Some(ThinSpace { armed, ..space });
        }
    }

    fn thresholds_reached(&self, modes: &ModeParameters, space: &ThinSpace) -> [bool; 2] {
        let [low, taken] = modes.thresholds;
        [
            self.threshold_sets(space.available) <= low.count,
            self.threshold_sets(space.used) >= taken.count,
        ]
    }

    /// `blocks` converted to threshold sets.
    pub(crate) fn threshold_sets(&self, blocks: u64) -> u32 {
        threshold_sets(blocks, self.info.block_size)
    }
}

/// THRESHOLD EXPONENT: blocks per threshold set, as a power of two (SBC-3 6.5).
pub(crate) fn threshold_exponent(block_size: u32) -> u32 {
    (THRESHOLD_SET_BYTES / block_size.max(1)).checked_ilog2().unwrap_or(0).max(1)
}

fn threshold_sets(blocks: u64, block_size: u32) -> u32 {
    u32::try_from(blocks >> threshold_exponent(block_size)).unwrap_or(u32::MAX)
}

/// The default thresholds of a unit of `blocks`: one for available space at a tenth of its size,
/// and one for used space, which initiators must set.
pub(crate) fn default_thresholds(blocks: u64, block_size: u32) -> [Threshold; 2] {
    const TENTH: u64 = 10;
    let low = Threshold { enabled: true, count: threshold_sets(blocks / TENTH, block_size) };
    [low, Threshold { enabled: false, count: threshold_sets(blocks, block_size) }]
}
