//! Text Request (RFC 7143 11.10).
//!
//! ```text
//!    0 |.|I| 0x04      |F|C| reserved                                |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag                                          |
//!   20 | Target Transfer Tag or 0xffffffff                           |
//!   24 | CmdSN                                                       |
//!   28 | ExpStatSN                                                   |
//!   32 | reserved                                                    |
//!   48 | text                                                        |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CONTINUE, FINAL, basic_header};

/// A text request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TextRequest {
    /// Immediate bit and opcode.
    pub first: u8,
    /// F and C.
    pub flags: u8,
    reserved: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the text.
    pub data_len: [u8; 3],
    /// Logical unit number, with a target transfer tag.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// That of the response it continues; [`super::NO_TAG`] for a new exchange.
    pub ttt: U32,
    /// Place in the command order.
    pub cmd_sn: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    reserved_end: [u8; 16],
}

basic_header!(TextRequest, TextRequest);

impl TextRequest {
    /// Whether the initiator has nothing more to say.
    #[must_use]
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// Whether the text goes on in the next request.
    #[must_use]
    pub fn continues(&self) -> bool {
        self.flags & CONTINUE != 0
    }
}
