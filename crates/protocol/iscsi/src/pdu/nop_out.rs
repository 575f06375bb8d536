//! NOP-Out (RFC 7143 11.18).
//!
//! ```text
//!    0 |.|I| 0x00      |1| reserved                                  |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag or 0xffffffff                            |
//!   20 | Target Transfer Tag or 0xffffffff                           |
//!   24 | CmdSN                                                       |
//!   28 | ExpStatSN                                                   |
//!   32 | reserved                                                    |
//!   48 | ping data                                                   |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::basic_header;

/// A ping from the initiator, or its answer to one.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NopOut {
    /// Immediate bit and opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    reserved: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the ping data.
    pub data_len: [u8; 3],
    /// Logical unit number, with a target transfer tag.
    pub lun: [u8; 8],
    /// Initiator task tag; [`super::NO_TAG`] where no answer is wanted.
    pub itt: U32,
    /// That of the NOP-In it answers; [`super::NO_TAG`] if it answers none.
    pub ttt: U32,
    /// Place in the command order.
    pub cmd_sn: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    reserved_end: [u8; 16],
}

basic_header!(NopOut, NopOut);
