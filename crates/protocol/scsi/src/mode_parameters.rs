//! The parameters of mode pages that initiators can change, and how the shared state stores them
//! (SPC-4 7.5, SBC-3 6.4).

use block::Info;

use crate::space::{Threshold, default_thresholds};

/// The changeable parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModeParameters {
    /// Sense data in descriptor format.
    pub(crate) d_sense: bool,
    /// Software write protect.
    pub(crate) swp: bool,
    /// TASK ABORTED for commands that another initiator aborts.
    pub(crate) tas: bool,
    /// Writes may complete in a volatile cache, where there is one.
    pub(crate) wce: bool,
    /// Space thresholds are reported (LBPERE).
    pub(crate) reports_thresholds: bool,
    /// One for available space, one for used space.
    pub(crate) thresholds: [Threshold; 2],
}

impl ModeParameters {
    /// The values at power on and after a reset.
    pub(crate) fn default(info: &Info) -> Self {
        Self {
            d_sense: false,
            swp: false,
            tas: false,
            wce: true,
            reports_thresholds: true,
            thresholds: default_thresholds(info.blocks, info.block_size),
        }
    }

    /// As stored in the shared state: zeroes for the defaults. Thresholds take 33 bits each, one of
    /// which says that they differ from the default.
    pub(crate) fn bits(&self, info: &Info) -> u128 {
        let bit = |set: bool, n: u32| u128::from(set) << n;
        let default = Self::default(info);
        let thresholds = (0..2).map(|n| {
            let own = self.thresholds[n];
            let bits = 1 | bit(own.enabled, 1) | u128::from(own.count) << 2;
            if own == default.thresholds[n] { 0 } else { bits << (8 + 40 * n) }
        });
        bit(self.d_sense, 0)
            | bit(self.swp, 1)
            | bit(self.tas, 2)
            | bit(!self.wce, 3)
            | bit(!self.reports_thresholds, 4)
            | thresholds.fold(0, |all, one| all | one)
    }

    /// Decodes [`Self::bits`].
    pub(crate) fn from_bits(bits: u128, info: &Info) -> Self {
        let bit = |n: u32| bits >> n & 1 == 1;
        let mut modes = Self::default(info);
        for (threshold, n) in modes.thresholds.iter_mut().zip([8, 48]) {
            if bit(n) {
                let count = (bits >> (n + 2)) as u32;
                *threshold = Threshold { enabled: bit(n + 1), count };
            }
        }
        Self {
            d_sense: bit(0),
            swp: bit(1),
            tas: bit(2),
            wce: !bit(3),
            reports_thresholds: !bit(4),
            ..modes
        }
    }

    /// All changeable parameters, with all their bits set.
    pub(crate) fn all_changeable() -> Self {
        let threshold = Threshold { enabled: true, count: u32::MAX };
        Self {
            d_sense: true,
            swp: true,
            tas: true,
            wce: true,
            reports_thresholds: true,
            thresholds: [threshold; 2],
        }
    }
}
