//! SCSI Command (RFC 7143 11.3).
//!
//! ```text
//!    0 |.|I| 0x01      |F|R|W|. .|ATTR | reserved                    |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number                                         |
//!   16 | Initiator Task Tag                                          |
//!   20 | Expected Data Transfer Length                               |
//!   24 | CmdSN                                                       |
//!   28 | ExpStatSN                                                   |
//!   32 | Command Descriptor Block, 16 bytes                          |
//!   48 | AHS, header digest, immediate data, data digest             |
//! ```

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{FINAL, basic_header};

/// A SCSI command.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ScsiCommand {
    /// Immediate bit and opcode.
    pub first: u8,
    /// F, R, W and the task attribute.
    pub flags: u8,
    reserved: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the immediate data.
    pub data_len: [u8; 3],
    /// Logical unit number.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// Bytes the initiator expects to transfer.
    pub expected_len: U32,
    /// Place in the command order.
    pub cmd_sn: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    /// Command descriptor block; longer ones go on in an additional header segment.
    pub cdb: [u8; 16],
}

basic_header!(ScsiCommand, ScsiCommand);

impl ScsiCommand {
    /// Bit of [`Self::flags`]: the command reads.
    pub const READ: u8 = 0x40;
    /// Bit of [`Self::flags`]: the command writes.
    pub const WRITE: u8 = 0x20;

    /// Whether no unsolicited data follows in Data-Out PDUs.
    #[must_use]
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// Whether data is to be transferred to the initiator.
    #[must_use]
    pub fn reads(&self) -> bool {
        self.flags & Self::READ != 0
    }

    /// Whether data is to be transferred to the target.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.flags & Self::WRITE != 0
    }

    /// Task attribute, three bits: 0 untagged, 1 simple, 2 ordered, 3 head of queue, 4 ACA.
    #[must_use]
    pub fn attribute(&self) -> u8 {
        self.flags & 0x07
    }
}
