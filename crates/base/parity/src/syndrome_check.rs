//! The result of checking a stripe, as a scrub does.

use crate::gf256::{self, GROUP_ORDER};

/// Which member P and Q show to be wrong.
///
/// RAID 6 can locate one wrong member: an error `e` in member `i` changes P by `e` and Q by `g^i
/// e`; the quotient is `g^i`. The verdict combines all wrong bytes of the slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyndromeVerdict {
    /// Everything matches.
    Consistent,
    /// P alone is wrong.
    P,
    /// Q alone is wrong.
    Q,
    /// This data member alone is wrong.
    Data(usize),
    /// More than one member is wrong; which ones is unknown.
    Ambiguous,
}

impl SyndromeVerdict {
    /// Which member is wrong, from the differences of P and Q in one byte, with so many data
    /// members.
    pub(crate) fn from_syndromes(p: u8, q: u8, members: usize) -> Self {
        match (p, q) {
            (0, 0) => Self::Consistent,
            (_, 0) => Self::P,
            (0, _) => Self::Q,
            _ => match (gf256::log(q) + GROUP_ORDER - gf256::log(p)) % GROUP_ORDER {
                index if index < members => Self::Data(index),
                _ => Self::Ambiguous,
            },
        }
    }

    /// Combines the verdict on one part of the slices with that on another part.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        match (self, other) {
            (Self::Consistent, only) | (only, Self::Consistent) => only,
            (one, same) if one == same => one,
            _ => Self::Ambiguous,
        }
    }
}
