//! Login Response (RFC 7143 11.13).
//!
//! ```text
//!    0 |.|.| 0x23      |T|C|. .|CSG|NSG| Version-max   | Version-act |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | ISID (6 bytes)                                | TSIH        |
//!   16 | Initiator Task Tag                                          |
//!   20 | reserved                                                    |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | Status-Class  | Status-Detail | reserved                    |
//!   40 | reserved                                                    |
//!   48 | text                                                        |
//! ```

use wire::open_enum;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

open_enum! {
    /// Status-Class and Status-Detail of a login response (RFC 7143 11.13.5).
    pub enum LoginStatus: u16 {
        /// The login is going on or done.
        Success = 0x0000,
        /// The target has moved for now; its address is in the text.
        MovedTemporarily = 0x0101,
        /// The target has moved for good; its address is in the text.
        MovedPermanently = 0x0102,
        /// The initiator made an error that has no status of its own.
        InitiatorError = 0x0200,
        /// The initiator could not be authenticated.
        AuthenticationFailure = 0x0201,
        /// The initiator may not use the target.
        AuthorizationFailure = 0x0202,
        /// The target does not exist here.
        NotFound = 0x0203,
        /// The target is gone for good.
        TargetRemoved = 0x0204,
        /// No common version.
        UnsupportedVersion = 0x0205,
        /// Too many connections in the session.
        TooManyConnections = 0x0206,
        /// A required key was not sent.
        MissingParameter = 0x0207,
        /// The connection cannot be added to the session.
        CannotInclude = 0x0208,
        /// The session type is not supported.
        SessionTypeUnsupported = 0x0209,
        /// The session to which the connection belongs does not exist.
        NoSession = 0x020a,
        /// A request that is not allowed during login.
        InvalidDuringLogin = 0x020b,
        /// The target failed.
        TargetError = 0x0300,
        /// The target is not available now.
        ServiceUnavailable = 0x0301,
        /// The target has no resources left.
        OutOfResources = 0x0302,
    }
}

/// The answer to a login request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LoginResponse {
    /// Opcode.
    pub first: u8,
    /// T, C and the stages, as in the request.
    pub flags: u8,
    /// Highest version the target speaks.
    pub version_max: u8,
    /// Version that is spoken.
    pub version_active: u8,
    ahs_words: u8,
    /// Length of the text.
    pub data_len: [u8; 3],
    /// Initiator's part of the session identifier.
    pub isid: [u8; 6],
    /// Target's part of the session identifier.
    pub tsih: U16,
    /// Initiator task tag of the request.
    pub itt: U32,
    reserved: U32,
    /// Counters.
    pub numbers: SequenceNumbers,
    /// A [`LoginStatus`].
    pub status: U16,
    reserved_end: [u8; 10],
}

basic_header!(LoginResponse, LoginResponse, from target);
