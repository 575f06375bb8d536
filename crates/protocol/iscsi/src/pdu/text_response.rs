//! Text Response (RFC 7143 11.11).
//!
//! ```text
//!    0 |.|.| 0x24      |F|C| reserved                                |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag                                          |
//!   20 | Target Transfer Tag or 0xffffffff                           |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | reserved                                                    |
//!   48 | text                                                        |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

/// The answer to a text request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TextResponse {
    /// Opcode.
    pub first: u8,
    /// F and C.
    pub flags: u8,
    reserved: [u8; 2],
    ahs_words: u8,
    /// Length of the text.
    pub data_len: [u8; 3],
    /// Logical unit number, with a target transfer tag.
    pub lun: [u8; 8],
    /// Initiator task tag of the request.
    pub itt: U32,
    /// What the initiator continues the exchange with; [`super::NO_TAG`] at its end.
    pub ttt: U32,
    /// Counters.
    pub numbers: SequenceNumbers,
    reserved_end: [u8; 12],
}

basic_header!(TextResponse, TextResponse, from target);
