//! Logout Request (RFC 7143 11.14).
//!
//! ```text
//!    0 |.|I| 0x06      |1| Reason      | reserved                    |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | reserved                                                    |
//!   16 | Initiator Task Tag                                          |
//!   20 | CID or reserved               | reserved                    |
//!   24 | CmdSN                                                       |
//!   28 | ExpStatSN                                                   |
//!   32 | reserved                                                    |
//! ```

use wire::open_enum;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::basic_header;

open_enum! {
    /// What is to end (RFC 7143 11.14.1).
    pub enum LogoutReason: u8 {
        /// The session.
        CloseSession = 0,
        /// A connection.
        CloseConnection = 1,
        /// A connection whose tasks are to be reassigned.
        Recovery = 2,
    }
}

/// A logout request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LogoutRequest {
    /// Immediate bit and opcode.
    pub first: u8,
    /// Final bit and reason.
    pub flags: u8,
    reserved: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the data segment: none.
    pub data_len: [u8; 3],
    reserved_middle: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// Which connection, unless the session is to end.
    pub cid: U16,
    reserved_half: U16,
    /// Place in the command order.
    pub cmd_sn: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    reserved_end: [u8; 16],
}

basic_header!(LogoutRequest, LogoutRequest);

impl LogoutRequest {
    /// What is to end.
    #[must_use]
    pub fn reason(&self) -> LogoutReason {
        LogoutReason(self.flags & 0x7f)
    }
}
