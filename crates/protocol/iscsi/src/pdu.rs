//! Protocol data units: one file per PDU, shared by both roles.
//!
//! Every PDU begins with a basic header segment of 48 bytes (RFC 7143 11.2.1):
//!
//! ```text
//! byte     0              1              2              3
//!    0 |.|I| Opcode   |F| opcode-specific fields                    |
//!    4 | TotalAHSLen  | DataSegmentLength                           |
//!    8 | LUN or opcode-specific fields                              |
//!   12 |                                                            |
//!   16 | Initiator Task Tag                                         |
//!   20 | opcode-specific fields                                     |
//!      :                                                            :
//!   48 | additional header segments, header digest, data, padding, data digest
//! ```
//!
//! The structs here are those 48 bytes: every bit pattern is a valid value, so that parsing is a
//! cast and what a value means is the machine's decision. Reserved fields are sent as zero and
//! ignored on receipt (RFC 7143 11).

mod ahs;
mod async_message;
mod data_in;
mod data_out;
mod login_request;
mod login_response;
mod logout_request;
mod logout_response;
mod nop_in;
mod nop_out;
mod r2t;
mod reject;
mod scsi_command;
mod scsi_response;
mod snack;
mod task_request;
mod task_response;
mod text_request;
mod text_response;

use wire::open_enum;
use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute_ref};

pub use ahs::{AdditionalHeaders, MAX_CDB};
pub use async_message::{AsyncEvent, AsyncMessage};
pub use data_in::DataIn;
pub use data_out::DataOut;
pub use login_request::{LoginRequest, LoginStage};
pub use login_response::{LoginResponse, LoginStatus};
pub use logout_request::{LogoutReason, LogoutRequest};
pub use logout_response::{LogoutOutcome, LogoutResponse};
pub use nop_in::NopIn;
pub use nop_out::NopOut;
pub use r2t::R2t;
pub use reject::{Reject, RejectReason};
pub use scsi_command::ScsiCommand;
pub use scsi_response::ScsiResponse;
pub use snack::Snack;
pub use task_request::{TaskFunction, TaskRequest};
pub use task_response::{TaskOutcome, TaskResponse};
pub use text_request::TextRequest;
pub use text_response::TextResponse;

/// Size of a basic header segment in bytes.
pub const BHS_LEN: usize = 48;

/// Most bytes that additional header segments take.
pub const MAX_AHS: usize = 255 * 4;

/// Size of a digest in bytes.
pub const DIGEST_LEN: usize = 4;

/// Largest data segment that the 24-bit length can say, in bytes.
pub const MAX_SEGMENT: u32 = 0x00ff_ffff;

/// The reserved tag: no task, no transfer.
pub const NO_TAG: u32 = 0xffff_ffff;

/// Bit of byte 0: the PDU is delivered at once and has no position in the command order.
pub const IMMEDIATE: u8 = 0x40;

/// Bit of byte 1: the last PDU of a sequence.
pub const FINAL: u8 = 0x80;

/// Bit of byte 1 of login and text PDUs: the text goes on in the next PDU.
pub const CONTINUE: u8 = 0x40;

open_enum! {
    /// Type of a PDU (RFC 7143
    pub enum Opcode: u8 {
        /// Ping from the initiator, or its answer to a ping.
        NopOut = 0x00,
        /// SCSI command.
        ScsiCommand = 0x01,
        /// Task management request.
        TaskRequest = 0x02,
        /// Login request.
        LoginRequest = 0x03,
        /// Text request.
        TextRequest = 0x04,
        /// Data for a write.
        DataOut = 0x05,
        /// Logout request.
        LogoutRequest = 0x06,
        /// Request for retransmission.
        Snack = 0x10,
        /// Ping from the target, or its answer to a ping.
        NopIn = 0x20,
        /// SCSI response.
        ScsiResponse = 0x21,
        /// Task management response.
        TaskResponse = 0x22,
        /// Login response.
        LoginResponse = 0x23,
        /// Text response.
        TextResponse = 0x24,
        /// Data of a read.
        DataIn = 0x25,
        /// Logout response.
        LogoutResponse = 0x26,
        /// Request for the data of a write.
        R2t = 0x31,
        /// Asynchronous message.
        AsyncMessage = 0x32,
        /// A PDU was not accepted.
        Reject = 0x3f,
    }
}

/// The fields that all basic header segments share.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Immediate bit and opcode.
    pub first: u8,
    /// Final bit and opcode-specific bits.
    pub flags: u8,
    /// Opcode-specific.
    pub specific: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the data segment in bytes, without padding.
    pub data_len: [u8; 3],
    /// Logical unit number, where the opcode has one.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// Opcode-specific.
    pub rest: [u8; 28],
}

const _: () = assert!(size_of::<Header>() == BHS_LEN);

impl Header {
    /// The header that these bytes are.
    #[must_use]
    pub fn of(bytes: &[u8; BHS_LEN]) -> &Self {
        transmute_ref!(bytes)
    }

    /// What the PDU is.
    #[must_use]
    pub fn opcode(&self) -> Opcode {
        Opcode(self.first & 0x3f)
    }

    /// Whether the PDU is marked for immediate delivery.
    #[must_use]
    pub fn is_immediate(&self) -> bool {
        self.first & IMMEDIATE != 0
    }

    /// Length of the data segment in bytes, without padding.
    #[must_use]
    pub fn data_segment_len(&self) -> usize {
        let [a, b, c] = self.data_len;
        usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)
    }

    /// Length of the additional header segments in bytes.
    #[must_use]
    pub fn ahs_len(&self) -> usize {
        usize::from(self.ahs_words) * 4
    }

    /// `CmdSN`, of PDUs that initiators send in command order.
    #[must_use]
    pub fn cmd_sn(&self) -> u32 {
        let [_, _, _, _, a, b, c, d, ..] = self.rest;
        u32::from_be_bytes([a, b, c, d])
    }
}

/// The counters in every PDU that a target sends.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct SequenceNumbers {
    /// Status sequence number.
    pub stat_sn: U32,
    /// Next command number that the target expects.
    pub exp_cmd_sn: U32,
    /// Last command number that the target takes.
    pub max_cmd_sn: U32,
}

/// Bytes of padding behind `len` bytes of data.
#[must_use]
pub fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

/// `len` as the length field of a header.
///
/// # Panics
/// If `len` needs more than 24 bits; senders split by limits that are smaller.
#[must_use]
pub fn segment_len(len: usize) -> [u8; 3] {
    let len = u32::try_from(len).ok().filter(|&n| n <= MAX_SEGMENT).expect("a segment has 24 bits");
    let [_, a, b, c] = len.to_be_bytes();
    [a, b, c]
}

/// A PDU that a target sends: [`SequenceNumbers`] stand at byte 24 of all of them.
pub trait TargetPdu: Sized {
    /// The header's bytes.
    fn bytes(&self) -> &[u8; BHS_LEN];
    /// Its counters.
    fn numbers(&mut self) -> &mut SequenceNumbers;
    /// Its data segment length.
    fn data_len(&mut self) -> &mut [u8; 3];
}

/// Ties a struct to the 48 bytes it stands for.
macro_rules! basic_header {
    ($name:ident, $opcode:ident) => {
        const _: () = assert!(size_of::<$name>() == $crate::pdu::BHS_LEN);

        impl $name {
            /// The header that these bytes are.
            #[must_use]
            pub fn of(bytes: &[u8; $crate::pdu::BHS_LEN]) -> &Self {
                zerocopy::transmute_ref!(bytes)
            }

            /// A header of this kind with all else zero.
            #[must_use]
            pub fn zeroed() -> Self {
                let mut new: Self = zerocopy::FromZeros::new_zeroed();
                new.first = $crate::pdu::Opcode::$opcode.0;
                new
            }

            /// The header's bytes.
            #[must_use]
            pub fn as_bytes(&self) -> &[u8; $crate::pdu::BHS_LEN] {
                zerocopy::transmute_ref!(self)
            }
        }
    };
    ($name:ident, $opcode:ident, from target) => {
        $crate::pdu::basic_header!($name, $opcode);

        impl $crate::pdu::TargetPdu for $name {
            fn bytes(&self) -> &[u8; $crate::pdu::BHS_LEN] {
                self.as_bytes()
            }
            fn numbers(&mut self) -> &mut $crate::pdu::SequenceNumbers {
                &mut self.numbers
            }
            fn data_len(&mut self) -> &mut [u8; 3] {
                &mut self.data_len
            }
        }

        const _: () = assert!(std::mem::offset_of!($name, numbers) == 24);
    };
}
pub(crate) use basic_header;

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7143 11.2.1: opcode, lengths and padding of a header.
    #[test]
    fn a_header_tells_its_opcode_and_lengths() {
        let mut bytes = [0; BHS_LEN];
        bytes[..8].copy_from_slice(&[0x41, 0xa1, 0, 0, 2, 0x01, 0x02, 0x03]);
        bytes[24..28].copy_from_slice(&[1, 2, 3, 4]);
        let h = Header::of(&bytes);
        assert_eq!((h.opcode(), h.is_immediate()), (Opcode::ScsiCommand, true));
        assert_eq!((h.data_segment_len(), h.ahs_len(), h.cmd_sn()), (0x01_0203, 8, 0x0102_0304));
        assert_eq!([0, 1, 2, 3, 4, 5].map(padding), [0, 3, 2, 1, 0, 3]);
        assert_eq!(segment_len(0x01_0203), [1, 2, 3]);
    }
}
