//! Authentication Send and Receive, the commands that carry the messages.

use block::BufsMut;

use super::{MAX_MESSAGE_BYTES, SECURITY_PROTOCOL, SECURITY_PROTOCOL_SPECIFIC};
use crate::controller::PageWriter;
use crate::entry::{AdminOpcode, FabricsType, Sgl, Sqe};
use crate::status::Status;

/// Largest buffer that a host may offer for a message, in bytes: it is filled up with zeroes.
const MAX_ALLOCATION_BYTES: u32 = 16 * 1024;

/// An authentication command
///
/// ```text
///  dword 10   7:0 reserved   15:8 SPSP0   23:16 SPSP1   31:24 SECP
///  dword 11   TL or AL: length of the data in bytes
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthCommand {
    /// Authentication Send.
    Send {
        /// Length of the message in bytes.
        bytes: u32,
    },
    /// Authentication Receive.
    Receive {
        /// Size of the buffer in bytes.
        bytes: u32,
    },
}

impl AuthCommand {
    /// Parses an authentication command; `None` for all others.
    ///
    /// # Errors
    /// [`Status::INVALID_FIELD`] for another security protocol and for an invalid length;
    /// [`Status::DATA_SGL_LENGTH_INVALID`] if the data has another length.
    pub fn parse(sqe: &Sqe) -> Option<Result<Self, Status>> {
        let bytes = sqe.cdw(1);
        let (command, most) = match sqe.fabrics()? {
            FabricsType::AuthenticationSend => {
                (Self::Send { bytes }, u32::try_from(MAX_MESSAGE_BYTES).unwrap_or(u32::MAX))
            }
            FabricsType::AuthenticationReceive => (Self::Receive { bytes }, MAX_ALLOCATION_BYTES),
            _ => return None,
        };
        let [_, first, second, protocol] = sqe.cdw(0).to_le_bytes();
        let is_known =
            protocol == SECURITY_PROTOCOL && [first, second] == SECURITY_PROTOCOL_SPECIFIC;
        Some(if !is_known || bytes == 0 || bytes > most {
            Err(Status::INVALID_FIELD.do_not_retry())
        } else if bytes != sqe.data_bytes() {
            Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())
        } else {
            Ok(command)
        })
    }

    /// Encodes the command, with its data outside of the capsule.
    #[must_use]
    pub fn encode(self, cid: u16) -> Sqe {
        let (kind, bytes) = match self {
            Self::Send { bytes } => (FabricsType::AuthenticationSend, bytes),
            Self::Receive { bytes } => (FabricsType::AuthenticationReceive, bytes),
        };
        let mut sqe = Sqe::new(AdminOpcode::Fabrics.0, cid, u32::from(kind.0));
        let [first, second] = SECURITY_PROTOCOL_SPECIFIC;
        sqe.cdw10[0] = u32::from_le_bytes([0, first, second, SECURITY_PROTOCOL]).into();
        sqe.cdw10[1] = bytes.into();
        sqe.sgl = Sgl::transport(bytes);
        sqe
    }
}

/// Fills a host's buffer with the message, then zeroes.
pub fn write_message(message: &[u8], room: &mut BufsMut) {
    PageWriter::new(0, room).put(0, message);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_read_back_as_they_were_written() {
        for command in [AuthCommand::Send { bytes: 4096 }, AuthCommand::Receive { bytes: 16384 }] {
            assert_eq!(AuthCommand::parse(&command.encode(7)), Some(Ok(command)));
        }
        let linux = AuthCommand::Send { bytes: 24 }.encode(7);
        assert_eq!((linux.cdw(0), linux.cdw(1)), (0xe901_0100, 24));
        let connect = Sqe::new(AdminOpcode::Fabrics.0, 7, u32::from(FabricsType::Connect.0));
        assert_eq!(AuthCommand::parse(&connect), None);
        assert_eq!(AuthCommand::parse(&Sqe::new(0x05, 7, 0x05)), None, "no fabrics command");
    }

    #[test]
    fn other_protocols_and_lengths_are_refused() {
        let good = AuthCommand::Send { bytes: 24 }.encode(7);
        let refused = |change: &dyn Fn(&mut Sqe)| {
            let mut sqe = good;
            change(&mut sqe);
            AuthCommand::parse(&sqe).map(|r| r.unwrap_err().code())
        };
        for dword in [0x0001_0100, 0xe900_0100, 0xe901_0000, 0xea01_0100] {
            assert_eq!(refused(&|sqe| sqe.cdw10[0] = dword.into()), Some(Status::INVALID_FIELD));
        }
        for command in [
            AuthCommand::Send { bytes: 0 },
            AuthCommand::Send { bytes: 4097 },
            AuthCommand::Receive { bytes: 0 },
            AuthCommand::Receive { bytes: 16385 },
        ] {
            let bad = AuthCommand::parse(&command.encode(7)).unwrap().unwrap_err();
            assert_eq!(bad, Status::INVALID_FIELD.do_not_retry(), "{command:?}");
        }
        let short = refused(&|sqe| sqe.sgl = Sgl::transport(23));
        assert_eq!(short, Some(Status::DATA_SGL_LENGTH_INVALID));
    }
}
