//! PDUs of the NVMe/TCP transport (NVMe/TCP Transport 1.0, 3.6.2), one file per family.
//!
//! Every PDU begins with the common header:
//!
//! ```text
//!  byte   0         1       2       3       4 .. 7
//!       +---------+-------+-------+-------+---------------+
//!       | PDU-Type| FLAGS | HLEN  | PDO   | PLEN (LE)     |
//!       +---------+-------+-------+-------+---------------+
//! ```
//!
//! then the rest of its header (HLEN bytes in all), the header digest if agreed, padding up to
//! PDO, data, and the data digest if agreed. PLEN counts all of it. All integers are little
//! endian.

mod capsule;
mod data;
mod init;
mod terminate;

pub use capsule::{CapsuleCmd, CapsuleResp};
pub use data::{DataPdu, R2t};
pub use init::{DIGEST_DATA, DIGEST_HEADER, IcReq, IcResp, MAX_HPDA, MIN_MAX_H2C_DATA, PFV_1_0};
pub use terminate::{FatalError, TermReq};

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of the common header in bytes.
pub const COMMON_BYTES: usize = size_of::<CommonHeader>();

/// Length of a header or data digest in bytes.
pub const DIGEST_BYTES: usize = 4;

/// Longest header of any PDU in bytes, without its digest.
pub const MAX_HEADER_BYTES: usize = size_of::<IcReq>();

wire::open_enum! {
    /// Type of a PDU (NVMe/TCP 3.6.1).
    pub enum PduType: u8 {
        /// Initialize Connection Request, host to controller.
        IcReq = 0x00,
        /// Initialize Connection Response, controller to host.
        IcResp = 0x01,
        /// Terminate connection, host to controller.
        H2CTermReq = 0x02,
        /// Terminate connection, controller to host.
        C2HTermReq = 0x03,
        /// A command, perhaps with data.
        CapsuleCmd = 0x04,
        /// A completion.
        CapsuleResp = 0x05,
        /// Data of a command, host to controller.
        H2CData = 0x06,
        /// Data of a command, controller to host.
        C2HData = 0x07,
        /// The controller asks for data.
        R2T = 0x09,
    }
}

/// FLAGS: a header digest follows the header.
pub const FLAG_HDGST: u8 = 1 << 0;
/// FLAGS: a data digest follows the data.
pub const FLAG_DDGST: u8 = 1 << 1;
/// FLAGS of data PDUs: the last one of its transfer.
pub const FLAG_LAST: u8 = 1 << 2;
/// FLAGS of C2HData: the command succeeded and no CapsuleResp follows.
pub const FLAG_SUCCESS: u8 = 1 << 3;

/// The common header.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct CommonHeader {
    /// A [`PduType`].
    pub pdu_type: u8,
    /// `FLAG_*`.
    pub flags: u8,
    /// Length of the header without its digest, in bytes.
    pub hlen: u8,
    /// Offset of the data from the start of the PDU, in bytes; 0 without data.
    pub pdo: u8,
    /// Length of the whole PDU in bytes.
    pub plen: U32,
}
const _: () = assert!(COMMON_BYTES == 8);

impl CommonHeader {
    /// The header of a PDU without data or digests.
    #[must_use]
    pub fn new(pdu_type: PduType, hlen: usize) -> Self {
        let hlen = u8::try_from(hlen).expect("headers are at most 128 bytes long");
        Self { pdu_type: pdu_type.0, flags: 0, hlen, pdo: 0, plen: U32::new(u32::from(hlen)) }
    }

    /// Type of the PDU.
    #[must_use]
    pub fn kind(&self) -> PduType {
        PduType(self.pdu_type)
    }

    /// Whether all of `flags` are set.
    #[must_use]
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }
}
