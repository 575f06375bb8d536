//! Login Request (RFC 7143 11.12).
//!
//! ```text
//!    0 |.|1| 0x03      |T|C|. .|CSG|NSG| Version-max   | Version-min |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | ISID (6 bytes)                                | TSIH        |
//!   16 | Initiator Task Tag                                          |
//!   20 | CID                           | reserved                    |
//!   24 | CmdSN                                                       |
//!   28 | ExpStatSN or reserved                                       |
//!   32 | reserved                                                    |
//!   48 | text                                                        |
//! ```

use wire::open_enum;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CONTINUE, FINAL, basic_header};

open_enum! {
    /// A stage of the login (RFC 7143 11.12.3).
    pub enum LoginStage: u8 {
        /// Security negotiation.
        Security = 0,
        /// Operational parameter negotiation.
        Operational = 1,
        /// Full feature phase.
        FullFeature = 3,
    }
}

/// A login request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LoginRequest {
    /// Immediate bit and opcode.
    pub first: u8,
    /// T, C and the stages.
    pub flags: u8,
    /// Highest version the initiator speaks.
    pub version_max: u8,
    /// Lowest version the initiator speaks.
    pub version_min: u8,
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the text.
    pub data_len: [u8; 3],
    /// Initiator's part of the session identifier.
    pub isid: [u8; 6],
    /// Target's part of the session identifier; 0 for a new session.
    pub tsih: U16,
    /// Initiator task tag.
    pub itt: U32,
    /// Connection identifier within the session.
    pub cid: U16,
    reserved: U16,
    /// Where the command order begins.
    pub cmd_sn: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    reserved_end: [u8; 16],
}

basic_header!(LoginRequest, LoginRequest);

impl LoginRequest {
    /// Whether the initiator is ready for the next stage.
    #[must_use]
    pub fn transits(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// Whether the text goes on in the next request.
    #[must_use]
    pub fn continues(&self) -> bool {
        self.flags & CONTINUE != 0
    }

    /// The stage the login is in.
    #[must_use]
    pub fn current(&self) -> LoginStage {
        LoginStage(self.flags >> 2 & 3)
    }

    /// The stage that comes next; of meaning with T only.
    #[must_use]
    pub fn next(&self) -> LoginStage {
        LoginStage(self.flags & 3)
    }
}
