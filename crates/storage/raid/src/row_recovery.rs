//! How a row is recovered after a crash, from the latest log entry that names it.
//!
//! An entry holds the partial parity for each parity, and the new data if several strips changed
//! (RFD 0029, 3 and 5). It is durable before anything of the row is written.

use super::row_plan::{Available, StripSet};

/// The latest entry of a row, and the logs that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedRow {
    /// The strips that were being written.
    pub changed: StripSet,
    /// Whether it is in the log of P's member.
    pub in_p_log: bool,
    /// Whether it is in the log of Q's member.
    pub in_q_log: bool,
}

/// How to make a row consistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryAction {
    /// Nothing to do.
    Nothing,
    /// Recompute the parities from the partial parities and the contents of this strip.
    UpdateParity(u16),
    /// Reconstruct this missing strip from P and its partial parity, and recompute Q with it.
    ReconstructFromP(u16),
    /// Write the logged data to the changed strips, and recompute the parities with it.
    ReplayData,
}

/// How to make a row consistent, of which these strips are `available`.
///
/// The write had not begun unless the entry is in the logs of all available parities: a log that
/// lacks it had not been written yet, or the entry was retired there, and then the write is
/// durable.
#[must_use]
pub fn recovery_action(logged: LoggedRow, available: Available) -> RecoveryAction {
    let begun = (!available.p || logged.in_p_log) && (!available.q || logged.in_q_log);
    if !begun || available.parity_count() == 0 {
        return RecoveryAction::Nothing;
    }
    let mut changed = logged.changed.iter();
    match (changed.next(), changed.next()) {
        (Some(strip), None) if available.data.contains(strip) => {
            RecoveryAction::UpdateParity(strip)
        }
        (Some(strip), None) if available.p && available.q => {
            RecoveryAction::ReconstructFromP(strip)
        }
        (Some(_), Some(_)) => RecoveryAction::ReplayData,
        _ => RecoveryAction::Nothing,
    }
}

#[cfg(test)]
mod tests;
