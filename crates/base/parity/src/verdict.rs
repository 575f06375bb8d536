//! What a scrub finds.

use crate::field::{self, ORDER};

/// What P and Q say of the data members.
///
/// One wrong member of a RAID 6 can be told: an error `e` in member `i` adds `e` to what P should be and `g^i e` to what Q
/// should be, and the quotient is `g^i`. Every wrong byte of the slices has its say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything matches.
    Matches,
    /// P alone is wrong.
    P,
    /// Q alone is wrong.
    Q,
    /// This data member alone is wrong.
    Data(usize),
    /// More than one of them all is wrong, and cannot be told.
    Several,
}

impl Verdict {
    /// What is wrong with a byte for which P and Q differ by this from what they should be, with so many data members.
    pub(crate) fn of_byte(p: u8, q: u8, members: usize) -> Self {
        match (p, q) {
            (0, 0) => Self::Matches,
            (_, 0) => Self::P,
            (0, _) => Self::Q,
            _ => match (field::log(q) + ORDER - field::log(p)) % ORDER {
                place if place < members => Self::Data(place),
                _ => Self::Several,
            },
        }
    }

    /// What is wrong with slices of which one part says this, and another part says `other`.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Matches, only) | (only, Self::Matches) => only,
            (one, same) if one == same => one,
            _ => Self::Several,
        }
    }
}
