//! SCSI Data-In (RFC 7143 11.7).
//!
//! ```text
//!    0 |.|.| 0x25      |F|A|. . .|O|U|S| reserved      | Status      |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag                                          |
//!   20 | Target Transfer Tag or 0xffffffff                           |
//!   24 | StatSN (with S), ExpCmdSN, MaxCmdSN                         |
//!   36 | DataSN                                                      |
//!   40 | Buffer Offset                                               |
//!   44 | Residual Count                                              |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

/// Data of a read; the last one may carry the status.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DataIn {
    /// Opcode.
    pub first: u8,
    /// F, A, residual flags (as in [`super::ScsiResponse`]) and S.
    pub flags: u8,
    reserved: u8,
    /// SCSI status, with S.
    pub status: u8,
    ahs_words: u8,
    /// Length of the data.
    pub data_len: [u8; 3],
    /// Logical unit number, with a target transfer tag.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// With A: what the initiator acknowledges with.
    pub ttt: U32,
    /// Counters; `StatSN` only with S.
    pub numbers: SequenceNumbers,
    /// Place among the command's Data-In PDUs, from 0.
    pub data_sn: U32,
    /// Where in the command's data this belongs.
    pub offset: U32,
    /// Bytes by which the transfer missed the expected length, with S.
    pub residual: U32,
}

basic_header!(DataIn, DataIn, from target);

impl DataIn {
    /// Bit of [`Self::flags`]: acknowledge the data.
    pub const ACKNOWLEDGE: u8 = 0x40;
    /// Bit of [`Self::flags`]: the PDU carries the status.
    pub const STATUS: u8 = 0x01;
}
