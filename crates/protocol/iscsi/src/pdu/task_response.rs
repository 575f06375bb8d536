//! Task Management Function Response (RFC 7143 11.6).
//!
//! ```text
//!    0 |.|.| 0x22      |1| reserved    | Response      | reserved    |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | reserved                                                    |
//!   16 | Initiator Task Tag                                          |
//!   20 | reserved                                                    |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | reserved                                                    |
//! ```

use wire::open_enum;
use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

open_enum! {
    /// What became of a task management request (RFC 7143 11.6.1).
    pub enum TaskOutcome: u8 {
        /// Done.
        Complete = 0,
        /// The referenced task does not exist.
        NoTask = 1,
        /// The logical unit does not exist.
        NoLun = 2,
        /// The task is still allegiant to another connection.
        StillAllegiant = 3,
        /// Tasks cannot be reassigned.
        ReassignUnsupported = 4,
        /// The function is not supported.
        Unsupported = 5,
        /// The initiator may not do this.
        Unauthorized = 6,
        /// Rejected.
        Rejected = 255,
    }
}

/// The answer to a task management request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TaskResponse {
    /// Opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    /// What became of the request: a [`TaskOutcome`].
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
    reserved_end: [u8; 12],
}

basic_header!(TaskResponse, TaskResponse, from target);
