//! Reject (RFC 7143 11.17).
//!
//! ```text
//!    0 |.|.| 0x3f      |1| reserved    | Reason        | reserved    |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | reserved                                                    |
//!   16 | 0xffffffff                                                  |
//!   20 | reserved                                                    |
//!   24 | StatSN, ExpCmdSN, MaxCmdSN                                  |
//!   36 | DataSN/R2TSN or reserved                                    |
//!   40 | reserved                                                    |
//!   48 | header of the rejected PDU                                  |
//! ```

use wire::open_enum;
use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{SequenceNumbers, basic_header};

open_enum! {
    /// Why a PDU was not accepted (RFC 7143 11.17.1).
    pub enum RejectReason: u8 {
        /// Its data is not what its digest says.
        DataDigest = 0x02,
        /// Nothing can be retransmitted.
        Snack = 0x03,
        /// It must not come here or now.
        ProtocolError = 0x04,
        /// Its opcode is not supported.
        Unsupported = 0x05,
        /// Too many immediate commands.
        TooManyImmediate = 0x06,
        /// A task with its tag is in progress.
        TaskInProgress = 0x07,
        /// A data acknowledgement that acknowledges nothing.
        InvalidDataAck = 0x08,
        /// One of its fields is invalid.
        InvalidField = 0x09,
        /// No target transfer tag is left for it.
        LongOperation = 0x0a,
        /// Only a logout is expected.
        WaitingForLogout = 0x0c,
    }
}

/// A PDU was not accepted.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Reject {
    /// Opcode.
    pub first: u8,
    /// Final bit.
    pub flags: u8,
    /// Why: a [`RejectReason`].
    pub reason: u8,
    reserved: u8,
    ahs_words: u8,
    /// Length of the rejected header.
    pub data_len: [u8; 3],
    reserved_middle: [u8; 8],
    /// [`super::NO_TAG`].
    pub itt: U32,
    reserved_word: U32,
    /// Counters.
    pub numbers: SequenceNumbers,
    /// Next valid data or R2T number, for rejected SNACKs.
    pub data_sn: U32,
    reserved_end: [u8; 8],
}

basic_header!(Reject, Reject, from target);
