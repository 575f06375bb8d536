//! Logout Response (RFC 7143 11.15).
//!
//! ```text
//!    0 |.|.| 0x26      |1| reserved    | Response      | reserved    |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | reserved                                                    |
//!   16 | Initiator Task Tag                                          |
//!   20 | reserved                                                    |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | reserved                                                    |
//!   40 | Time2Wait                     | Time2Retain                 |
//!   44 | reserved                                                    |
//! ```

use wire::open_enum;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

open_enum! {
    /// What became of a logout request (RFC 7143 11.15.1).
    pub enum LogoutOutcome: u8 {
        /// The connection or session was closed.
        Closed = 0,
        /// There is no such connection.
        NoConnection = 1,
        /// Connections cannot be recovered.
        RecoveryUnsupported = 2,
        /// Cleaning up failed.
        CleanupFailed = 3,
    }
}

/// The answer to a logout request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LogoutResponse {
    /// Opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    /// What became of the request: a [`LogoutOutcome`].
    pub response: u8,
    reserved: u8,
    ahs_words: u8,
    /// Length of the data segment: none.
    pub data_len: [u8; 3],
    reserved_middle: [u8; 8],
    /// Initiator task tag of the request.
    pub itt: U32,
    reserved_word: U32,
    /// Counters.
    pub numbers: SequenceNumbers,
    reserved_second: U32,
    /// Seconds to wait before connecting again.
    pub time2wait: U16,
    /// Seconds for which tasks are kept.
    pub time2retain: U16,
    reserved_end: U32,
}

basic_header!(LogoutResponse, LogoutResponse, from target);
