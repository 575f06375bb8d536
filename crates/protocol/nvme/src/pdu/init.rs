//! ICReq and ICResp: capabilities of both sides (NVMe/TCP 3.6.2.2, 3.6.2.3).
//!
//! ```text
//!  byte   0 .. 7          8 .. 9    10           11     12 .. 15               16 .. 127
//!       +---------------+---------+------------+------+----------------------+----------+
//! ICReq | common header | PFV     | HPDA       | DGST | MAXR2T               | reserved |
//! ICResp| common header | PFV     | CPDA       | DGST | MAXH2CDATA           | reserved |
//!       +---------------+---------+------------+------+----------------------+----------+
//! ```

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, PduType};

/// DGST: header digests.
pub const DIGEST_HEADER: u8 = 1 << 0;
/// DGST: data digests.
pub const DIGEST_DATA: u8 = 1 << 1;
/// PDU format version of NVMe/TCP 1.0.
pub const PFV_1_0: u16 = 0;
/// Largest HPDA and CPDA: data aligned to 128 bytes.
pub const MAX_HPDA: u8 = 31;

/// Least that MAXH2CDATA may be, in bytes (NVMe/TCP 3.6.2.3).
pub const MIN_MAX_H2C_DATA: u32 = 4096;

/// Initialize Connection Request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IcReq {
    /// The common header.
    pub common: CommonHeader,
    /// PDU format version.
    pub pfv: U16,
    /// Alignment that the host wants for data sent to it: dwords, 0's based.
    pub hpda: u8,
    /// Digests that the host requests, `DIGEST_*`.
    pub digest: u8,
    /// R2Ts that may be outstanding for one command, 0's based.
    pub max_r2t: U32,
    /// Reserved.
    pub reserved: [u8; 112],
}
const _: () = assert!(size_of::<IcReq>() == 128);

impl IcReq {
    /// A request for `digest` (`DIGEST_*`) and data alignment `hpda`, with one R2T per command.
    #[must_use]
    pub fn new(digest: u8, hpda: u8) -> Self {
        Self {
            common: CommonHeader::new(PduType::IcReq, size_of::<Self>()),
            pfv: U16::new(PFV_1_0),
            hpda,
            digest,
            max_r2t: U32::new(0),
            reserved: [0; 112],
        }
    }
}

/// Initialize Connection Response.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IcResp {
    /// The common header.
    pub common: CommonHeader,
    /// PDU format version.
    pub pfv: U16,
    /// Alignment that the controller wants for data sent to it: dwords, 0's based.
    pub cpda: u8,
    /// Negotiated digests, `DIGEST_*`.
    pub digest: u8,
    /// Most data in one H2CData PDU, in bytes: a multiple of 4, at least 4096.
    pub max_h2c_data: U32,
    /// Reserved.
    pub reserved: [u8; 112],
}
const _: () = assert!(size_of::<IcResp>() == 128);

impl IcResp {
    /// A response that accepts `digest` and up to `max_h2c_data` bytes in one H2CData.
    #[must_use]
    pub fn new(digest: u8, max_h2c_data: u32) -> Self {
        Self {
            common: CommonHeader::new(PduType::IcResp, size_of::<Self>()),
            pfv: U16::new(PFV_1_0),
            cpda: 0,
            digest,
            max_h2c_data: U32::new(max_h2c_data),
            reserved: [0; 112],
        }
    }
}
