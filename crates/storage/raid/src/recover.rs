//! What is done for a row after a crash, by the last entry of the log that names it.
//!
//! An entry holds for each parity the sum of the strips that a write kept, and the new data where several strips changed (RFD
//! 0029, 3 and 5). It is durable before anything of the row is written.

use super::row::{Strips, There};

/// What the entry says, and where it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The strips that were being written.
    pub changed: Strips,
    /// Whether it is in the log of the member with P.
    pub by_p: bool,
    /// Whether it is in the log of the member with Q.
    pub by_q: bool,
}

/// What makes a row whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mend {
    /// It is whole.
    Nothing,
    /// The parities follow from the sums of the kept strips and what this strip holds.
    Follow(u16),
    /// P and its sum say what this strip is that is lost; Q follows from its own sum and that.
    Answer(u16),
    /// The changed strips get the data of the entry, and the parities follow from that.
    Redo,
}

/// What makes a row whole of which so much is `there`.
///
/// Nothing of it was begun unless the entry is in the logs of all parities that are there: one that lacks it was not waited
/// for, or its entry has been retired, and then all of it is durable.
#[must_use]
pub fn mend(found: Found, there: There) -> Mend {
    let begun = (!there.p || found.by_p) && (!there.q || found.by_q);
    if !begun || there.parities() == 0 {
        return Mend::Nothing;
    }
    let mut changed = found.changed.iter();
    match (changed.next(), changed.next()) {
        (Some(strip), None) if there.data.has(strip) => Mend::Follow(strip),
        (Some(strip), None) if there.p && there.q => Mend::Answer(strip),
        (Some(_), Some(_)) => Mend::Redo,
        _ => Mend::Nothing,
    }
}

#[cfg(test)]
mod tests;
