//! Asynchronous Message (RFC 7143 11.9).
//!
//! ```text
//!    0 |.|.| 0x32      |1| reserved                                  |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | 0xffffffff                                                  |
//!   20 | reserved                                                    |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | AsyncEvent    | AsyncVCode    | Parameter1                  |
//!   40 | Parameter2                    | Parameter3                  |
//!   44 | reserved                                                    |
//!   48 | sense data and iSCSI event data                             |
//! ```

use wire::open_enum;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

open_enum! {
    /// What happened (RFC 7143 11.9.1).
    pub enum AsyncEvent: u8 {
        /// A SCSI asynchronous event; sense data follows.
        Scsi = 0,
        /// The target asks for a logout of this connection.
        LogoutRequest = 1,
        /// The target drops a connection.
        ConnectionDrop = 2,
        /// The target drops all connections of the session.
        SessionDrop = 3,
        /// The target asks for parameter negotiation.
        Negotiation = 4,
        /// All active tasks on a logical unit are being terminated.
        TasksTerminated = 5,
        /// Vendor-specific.
        Vendor = 255,
    }
}

/// A message that answers nothing.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct AsyncMessage {
    /// Opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    reserved: [u8; 2],
    ahs_words: u8,
    /// Length of the sense and event data.
    pub data_len: [u8; 3],
    /// Logical unit number, for SCSI events.
    pub lun: [u8; 8],
    /// [`super::NO_TAG`].
    pub itt: U32,
    reserved_word: U32,
    /// Counters.
    pub numbers: SequenceNumbers,
    /// What happened: an [`AsyncEvent`].
    pub event: u8,
    /// Vendor code.
    pub vendor_code: u8,
    /// First parameter of the event.
    pub parameter1: U16,
    /// Second parameter of the event.
    pub parameter2: U16,
    /// Third parameter of the event.
    pub parameter3: U16,
    reserved_end: U32,
}

basic_header!(AsyncMessage, AsyncMessage, from target);
