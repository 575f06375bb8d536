//! Ready To Transfer (RFC 7143 11.8).
//!
//! ```text
//!    0 |.|.| 0x31      |1| reserved                                  |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number                                         |
//!   16 | Initiator Task Tag                                          |
//!   20 | Target Transfer Tag                                         |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | R2TSN                                                       |
//!   40 | Buffer Offset                                               |
//!   44 | Desired Data Transfer Length                                |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

/// A request for a part of a write's data.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct R2t {
    /// Opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    reserved: [u8; 2],
    ahs_words: u8,
    /// Length of the data segment: none.
    pub data_len: [u8; 3],
    /// Logical unit number.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// What the initiator puts into the Data-Out PDUs that answer.
    pub ttt: U32,
    /// Counters; `StatSN` is not advanced.
    pub numbers: SequenceNumbers,
    /// Place among the command's R2Ts, from 0.
    pub r2t_sn: U32,
    /// First byte that is asked for.
    pub offset: U32,
    /// How many bytes are asked for.
    pub desired_len: U32,
}

basic_header!(R2t, R2t, from target);
