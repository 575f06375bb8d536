//! SNACK Request (RFC 7143 11.16).
//!
//! ```text
//!    0 |.|.| 0x10      |1|. . .| Type  | reserved                    |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag or 0xffffffff                            |
//!   20 | Target Transfer Tag, SNACK Tag or 0xffffffff                |
//!   24 | reserved                                                    |
//!   28 | ExpStatSN                                                   |
//!   32 | reserved                                                    |
//!   40 | BegRun                                                      |
//!   44 | RunLength                                                   |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::basic_header;

/// A request for retransmission.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Snack {
    /// Opcode.
    pub first: u8,
    /// Final bit and type.
    pub flags: u8,
    reserved: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the data segment: none.
    pub data_len: [u8; 3],
    /// Logical unit number, with a target transfer tag.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// Target transfer tag or SNACK tag.
    pub ttt: U32,
    reserved_word: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    reserved_middle: [u8; 8],
    /// First number of the run.
    pub begin: U32,
    /// Length of the run; 0 for all.
    pub run_len: U32,
}

basic_header!(Snack, Snack);
