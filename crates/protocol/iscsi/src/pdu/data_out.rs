//! SCSI Data-Out (RFC 7143 11.7).
//!
//! ```text
//!    0 |.|.| 0x05      |F| reserved                                  |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag                                          |
//!   20 | Target Transfer Tag or 0xffffffff                           |
//!   24 | reserved                                                    |
//!   28 | ExpStatSN                                                   |
//!   32 | reserved                                                    |
//!   36 | DataSN                                                      |
//!   40 | Buffer Offset                                               |
//!   44 | reserved                                                    |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{FINAL, basic_header};

/// Data of a write.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DataOut {
    /// Opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    reserved: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the data.
    pub data_len: [u8; 3],
    /// Logical unit number, with a target transfer tag.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// Which R2T this answers; [`super::NO_TAG`] for unsolicited data.
    pub ttt: U32,
    reserved_word: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    reserved_second: U32,
    /// Place in its sequence, from 0.
    pub data_sn: U32,
    /// Where in the command's data this belongs.
    pub offset: U32,
    reserved_end: U32,
}

basic_header!(DataOut, DataOut);

impl DataOut {
    /// Whether this is the last PDU of its sequence.
    #[must_use]
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }
}
