//! H2CTermReq and C2HTermReq: end a connection after a fatal error (NVMe/TCP 3.6.2.4, 3.6.2.5).
//!
//! ```text
//!  byte   0 .. 7          8 .. 9   10 .. 13   14 .. 23   24 .. 151
//!       +---------------+--------+----------+----------+------------------------------------+
//!       | common header | FES    | FEI      | reserved | header of the PDU in error, if any |
//!       +---------------+--------+----------+----------+------------------------------------+
//! ```

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, PduType};

wire::open_enum! {
    /// FES: kind of the fatal error.
    pub enum FatalError: u16 {
        /// A header field is invalid; FEI is its byte offset.
        InvalidHeaderField = 0x01,
        /// An unexpected PDU.
        PduSequence = 0x02,
        /// The header digest is wrong; FEI is the digest received.
        HeaderDigest = 0x03,
        /// Data outside the range that was asked for.
        DataOutOfRange = 0x04,
        /// More data than the receiver allows in one PDU (or, from the host, too many R2Ts).
        DataLimit = 0x05,
        /// A parameter is not supported; FEI is its byte offset.
        UnsupportedParameter = 0x06,
    }
}

/// Header of a termination request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TermReq {
    /// The common header.
    pub common: CommonHeader,
    /// A [`FatalError`].
    pub status: U16,
    /// FEI: details.
    pub information: U32,
    /// Reserved.
    pub reserved: [u8; 10],
}
const _: () = assert!(size_of::<TermReq>() == 24);

impl TermReq {
    /// Longest PDU: a header and 128 bytes of the header in error.
    pub const MAX_BYTES: u32 = 152;

    /// The header of a request that is followed by `excerpt` bytes of the PDU in error.
    #[must_use]
    pub fn new(kind: PduType, error: FatalError, information: u32, excerpt: usize) -> Self {
        let mut common = CommonHeader::new(kind, size_of::<Self>());
        let excerpt = u32::try_from(excerpt).unwrap_or(u32::MAX);
        common.plen = U32::new(common.plen.get().saturating_add(excerpt));
        Self {
            common,
            status: U16::new(error.0),
            information: U32::new(information),
            reserved: [0; 10],
        }
    }
}
