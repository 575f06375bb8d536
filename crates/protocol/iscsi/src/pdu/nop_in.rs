//! NOP-In (RFC 7143 11.19).
//!
//! ```text
//!    0 |.|.| 0x20      |1| reserved                                  |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag or 0xffffffff                            |
//!   20 | Target Transfer Tag or 0xffffffff                           |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | reserved                                                    |
//!   48 | ping data                                                   |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

/// A ping from the target, or its answer to one.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NopIn {
    /// Opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    reserved: [u8; 2],
    ahs_words: u8,
    /// Length of the ping data.
    pub data_len: [u8; 3],
    /// Logical unit number, with a target transfer tag.
    pub lun: [u8; 8],
    /// That of the NOP-Out it answers; [`super::NO_TAG`] if it answers none.
    pub itt: U32,
    /// What the initiator answers with; [`super::NO_TAG`] where no answer is wanted.
    pub ttt: U32,
    /// Counters; `StatSN` is advanced by answers only.
    pub numbers: SequenceNumbers,
    reserved_end: [u8; 12],
}

basic_header!(NopIn, NopIn, from target);
