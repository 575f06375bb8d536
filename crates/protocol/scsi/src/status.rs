//! Status codes of commands (SAM-5 5.3).

/// Status codes (SAM-5 5.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Good = 0x00,
    /// Failed; the sense data says why.
    CheckCondition = 0x02,
    /// Not now; retry.
    Busy = 0x08,
    /// Another initiator has reserved the unit.
    ReservationConflict = 0x18,
    /// Too many commands, or no memory for this one; retry.
    TaskSetFull = 0x28,
    /// Aborted on behalf of another initiator.
    TaskAborted = 0x40,
}
