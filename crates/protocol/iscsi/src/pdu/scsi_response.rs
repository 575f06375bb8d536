//! SCSI Response (RFC 7143 11.4).
//!
//! ```text
//!    0 |.|.| 0x21      |1|. .|o|u|O|U|.| Response      | Status      |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | reserved                                                    |
//!   16 | Initiator Task Tag                                          |
//!   20 | SNACK Tag or reserved                                       |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | ExpDataSN or reserved                                       |
//!   40 | Bidirectional Read Residual Count or reserved               |
//!   44 | Residual Count or reserved                                  |
//!   48 | SenseLength (2 bytes), sense data, response data            |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

/// The end of a SCSI command.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ScsiResponse {
    /// Opcode.
    pub first: u8,
    /// Final bit and residual flags.
    pub flags: u8,
    /// iSCSI service response.
    pub response: u8,
    /// SCSI status, where the command completed.
    pub status: u8,
    ahs_words: u8,
    /// Length of the sense length, the sense data and the response data.
    pub data_len: [u8; 3],
    reserved: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// SNACK tag.
    pub snack_tag: U32,
    /// Counters.
    pub numbers: SequenceNumbers,
    /// Data-In and R2T PDUs that were sent for the command.
    pub exp_data_sn: U32,
    /// Residual of the read part of a bidirectional command.
    pub bidirectional_residual: U32,
    /// Bytes by which the transfer missed the expected length.
    pub residual: U32,
}

basic_header!(ScsiResponse, ScsiResponse, from target);

impl ScsiResponse {
    /// [`Self::response`]: the command completed at the target.
    pub const COMPLETED: u8 = 0;
    /// [`Self::response`]: the target failed.
    pub const TARGET_FAILURE: u8 = 1;
    /// Bit of [`Self::flags`]: more data than expected was there to be transferred.
    pub const OVERFLOW: u8 = 0x04;
    /// Bit of [`Self::flags`]: less data than expected was transferred.
    pub const UNDERFLOW: u8 = 0x02;
}
