//! Space that a thin unit takes and has left, and the thresholds at which initiators are told
//! (SBC-3 4.7.3.7, 6.4).

use crate::mode::{Modes, Threshold};
use crate::nexus::{Attention, Whom};
use crate::unit::LogicalUnit;

/// Bytes of a threshold set: what space is counted in.
const SET_BYTES: u32 = 1 << 20;

/// Space in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) used: u64,
    pub(crate) available: u64,
    /// Whether each threshold has not been reached, so that reaching it is told.
    armed: [bool; 2],
}

impl LogicalUnit {
    /// The unit takes space for `used_blocks`, and there is space for `available_blocks` more. Whoever
    /// measures it tells it now and then; a threshold that it crosses is told to every initiator,
    /// once. Only of a thin unit.
    pub fn set_space(&mut self, used_blocks: u64, available_blocks: u64) {
        if !self.config.thin || !self.can_unmap() {
            return;
        }
        let first = self.space.is_none();
        let space = Space { used: used_blocks, available: available_blocks, armed: [false; 2] };
        let reached = self.reached(&self.modes, &space);
        let was_armed = self.space.map_or([false; 2], |s| s.armed);
        self.space = Some(Space { armed: reached.map(|r| !r), ..space });
        if first {
            // There are a log page, a mode page and an exponent more.
            self.nexuses.raise(Whom::All, Attention::InquiryChanged);
        }
        let told = self.modes.reports_thresholds;
        for (n, what) in [Attention::SpaceLow, Attention::SpaceTaken].into_iter().enumerate() {
            if told && self.modes.thresholds[n].enabled && was_armed[n] && reached[n] {
                self.nexuses.raise(Whom::All, what);
            }
        }
    }

    /// The thresholds are others now: whoever has set them knows what is reached already.
    pub(crate) fn rearm(&mut self) {
        if let Some(space) = self.space {
            let armed = self.reached(&self.modes, &space).map(|reached| !reached);
            self.space = Some(Space { armed, ..space });
        }
    }

    fn reached(&self, modes: &Modes, space: &Space) -> [bool; 2] {
        let [low, taken] = modes.thresholds;
        [self.sets(space.available) <= low.count, self.sets(space.used) >= taken.count]
    }

    /// `blocks` in threshold sets.
    pub(crate) fn sets(&self, blocks: u64) -> u32 {
        sets(blocks, self.info.block_size)
    }
}

/// THRESHOLD EXPONENT: how many blocks are in a threshold set, as a power of two (SBC-3 6.5).
pub(crate) fn threshold_exponent(block_size: u32) -> u32 {
    (SET_BYTES / block_size.max(1)).checked_ilog2().unwrap_or(0).max(1)
}

fn sets(blocks: u64, block_size: u32) -> u32 {
    u32::try_from(blocks >> threshold_exponent(block_size)).unwrap_or(u32::MAX)
}

/// The thresholds of a unit of `blocks`: one that tells when there is space for a tenth of it only, and
/// one for what it takes, which is for initiators to set.
pub(crate) fn default_thresholds(blocks: u64, block_size: u32) -> [Threshold; 2] {
    const TENTH: u64 = 10;
    let low = Threshold { enabled: true, count: sets(blocks / TENTH, block_size) };
    [low, Threshold { enabled: false, count: sets(blocks, block_size) }]
}
