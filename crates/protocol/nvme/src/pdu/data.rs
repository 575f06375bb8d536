//! H2CData, C2HData and R2T: data outside capsules (NVMe/TCP 3.6.2.8 to 3.6.2.10).
//!
//! ```text
//!          byte   0 .. 7          8 .. 9   10 .. 11   12 .. 15   16 .. 19   20 .. 23
//!               +---------------+--------+----------+----------+----------+----------+
//! H2CData       | common header | CCCID  | TTAG     | DATAO    | DATAL    | reserved | ...
//! C2HData       | common header | CCCID  | reserved | DATAO    | DATAL    | reserved | ...
//! R2T           | common header | CCCID  | TTAG     | R2TO     | R2TL     | reserved |
//!               +---------------+--------+----------+----------+----------+----------+
//! ```

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, PduType};

/// Header of H2CData and C2HData.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DataPdu {
    /// The common header.
    pub common: CommonHeader,
    /// Identifier of the command the data belongs to.
    pub command_id: U16,
    /// The controller's tag from the R2T; reserved in C2HData.
    pub transfer_tag: U16,
    /// Offset of this data within the command's data, in bytes.
    pub offset: U32,
    /// Length of this data in bytes.
    pub length: U32,
    /// Reserved.
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<DataPdu>() == 24);

impl DataPdu {
    /// Byte offset of CCCID within the header.
    pub const COMMAND_ID_AT: u32 = 8;
    /// Byte offset of TTAG within the header.
    pub const TRANSFER_TAG_AT: u32 = 10;

    /// The header of a data PDU of the given type, as yet without lengths and flags in the
    /// common header.
    #[must_use]
    pub fn new(
        kind: PduType,
        command_id: u16,
        transfer_tag: u16,
        offset: u32,
        length: u32,
    ) -> Self {
        Self {
            common: CommonHeader::new(kind, size_of::<Self>()),
            command_id: U16::new(command_id),
            transfer_tag: U16::new(transfer_tag),
            offset: U32::new(offset),
            length: U32::new(length),
            reserved: [0; 4],
        }
    }
}

/// Ready to Transfer: the controller requests data of a command.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct R2t {
    /// The common header.
    pub common: CommonHeader,
    /// Identifier of the command.
    pub command_id: U16,
    /// The controller's tag, which the data carries back.
    pub transfer_tag: U16,
    /// Offset of the wanted data within the command's data, in bytes.
    pub offset: U32,
    /// Length of the wanted data in bytes.
    pub length: U32,
    /// Reserved.
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<R2t>() == 24);

impl R2t {
    /// A request for all `length` bytes of a command's data.
    #[must_use]
    pub fn new(command_id: u16, transfer_tag: u16, length: u32) -> Self {
        Self {
            common: CommonHeader::new(PduType::R2T, size_of::<Self>()),
            command_id: U16::new(command_id),
            transfer_tag: U16::new(transfer_tag),
            offset: U32::new(0),
            length: U32::new(length),
            reserved: [0; 4],
        }
    }
}
