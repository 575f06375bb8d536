//! Connect (NVMe Base 2.0, 6.3).

use std::time::Duration;

use crate::Status;
use crate::connection::Queue;
use crate::entry::{Completion, Sqe};
use crate::{MAX_QUEUE_ENTRIES, controller::MAX_IO_QUEUES};

/// The well-known name of discovery subsystems.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Length of Connect's data in bytes.
pub(super) const CONNECT_DATA: u32 = 1024;

/// Longest qualified name in bytes.
const MAX_NQN: usize = 223;

/// Any controller: the admin queue asks for one.
const DYNAMIC: u16 = 0xffff;

/// A Connect command, understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connect {
    /// The queue that the connection is to serve.
    pub queue: Queue,
    /// Host identifier.
    pub host: [u8; 16],
    /// Host name.
    pub host_nqn: String,
    /// Subsystem name.
    pub subsystem_nqn: String,
    /// The controller that an I/O queue belongs to; `None` on an admin queue.
    pub controller: Option<u16>,
    /// Keep alive timeout; zero for none.
    pub keep_alive: Duration,
}

/// Why a Connect is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectRefusal {
    /// RECFMT is not 0.
    Format,
    /// A parameter is wrong: its offset, and whether it is in the data.
    Parameter {
        /// Byte offset.
        at: u16,
        /// In the data rather than in the command.
        in_data: bool,
    },
    /// The host may not.
    Host,
    /// The controller has a connection for this queue, or cannot take one now.
    Busy,
}

impl ConnectRefusal {
    /// The subsystem does not exist.
    pub const SUBSYSTEM: Self = Self::Parameter { at: 256, in_data: true };
    /// The controller does not exist.
    pub const CONTROLLER: Self = Self::Parameter { at: 16, in_data: true };
    /// The host is not the controller's.
    pub const HOST_ID: Self = Self::Parameter { at: 0, in_data: true };
    /// The queue identifier.
    pub const QUEUE: Self = Self::Parameter { at: 42, in_data: false };
    const SQSIZE: Self = Self::Parameter { at: 44, in_data: false };
    const HOST_NQN: Self = Self::Parameter { at: 512, in_data: true };

    /// The completion that says so.
    #[must_use]
    pub fn completion(self) -> Completion {
        let (status, result) = match self {
            Self::Format => (Status::CONNECT_FORMAT, 0),
            Self::Parameter { at, in_data } => {
                (Status::CONNECT_INVALID_PARAMETERS, u64::from(at) | u64::from(in_data) << 16)
            }
            Self::Host => (Status::CONNECT_INVALID_HOST, 0),
            Self::Busy => (Status::CONNECT_BUSY, 0),
        };
        let status = if self == Self::Busy { status } else { status.do_not_retry() };
        Completion { result, status }
    }
}

impl Connect {
    /// Understands a Connect command and its data.
    ///
    /// # Errors
    /// What is wrong with it in itself.
    pub fn parse(sqe: &Sqe, data: &[u8]) -> Result<Self, ConnectRefusal> {
        let [format_low, format_high, id_low, id_high] = sqe.cdw(0).to_le_bytes();
        let [size_low, size_high, attributes, _] = sqe.cdw(1).to_le_bytes();
        if u16::from_le_bytes([format_low, format_high]) != 0 {
            return Err(ConnectRefusal::Format);
        }
        let id = u16::from_le_bytes([id_low, id_high]);
        let size = u16::from_le_bytes([size_low, size_high]);
        if id > MAX_IO_QUEUES {
            return Err(ConnectRefusal::QUEUE);
        }
        if size == 0 || size >= MAX_QUEUE_ENTRIES {
            return Err(ConnectRefusal::SQSIZE);
        }
        let host = data.get(..16).and_then(|b| b.try_into().ok()).ok_or(ConnectRefusal::HOST_ID)?;
        let [low, high] =
            data.get(16..18).and_then(|b| b.try_into().ok()).ok_or(ConnectRefusal::CONTROLLER)?;
        let asked = u16::from_le_bytes([low, high]);
        if id == 0 && asked != DYNAMIC {
            // Static controllers are not offered.
            return Err(ConnectRefusal::CONTROLLER);
        }
        let subsystem_nqn = name(data, 256).ok_or(ConnectRefusal::SUBSYSTEM)?;
        let host_nqn = name(data, 512).ok_or(ConnectRefusal::HOST_NQN)?;
        Ok(Self {
            queue: Queue { id, entries: size + 1, flow_control: attributes & 1 << 2 == 0 },
            host,
            host_nqn,
            subsystem_nqn,
            controller: (id != 0).then_some(asked),
            keep_alive: Duration::from_millis(u64::from(sqe.cdw(2))),
        })
    }

    /// Whether it is discovery that the host wants.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.subsystem_nqn == DISCOVERY_NQN
    }
}

/// A zero-terminated name in a field of 256 bytes.
fn name(data: &[u8], at: usize) -> Option<String> {
    let field = data.get(at..at + 256)?;
    let len = field.iter().position(|&b| b == 0)?;
    let text = std::str::from_utf8(&field[..len]).ok()?;
    let proper = text.starts_with("nqn.") && len <= MAX_NQN && !text.contains(char::is_control);
    proper.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::AdminOpcode;
    use zerocopy::little_endian::U32;

    fn connect(id: u16, size: u16) -> (Sqe, Vec<u8>) {
        let mut sqe = Sqe::new(AdminOpcode::Fabrics.0, 1, 1);
        sqe.cdw10[0] = U32::new(u32::from(id) << 16);
        sqe.cdw10[1] = U32::new(u32::from(size) | 1 << 18);
        sqe.cdw10[2] = U32::new(5000);
        let mut data = vec![0; 1024];
        data[..16].copy_from_slice(&[7; 16]);
        data[16..18].copy_from_slice(&if id == 0 { 0xffffu16 } else { 5 }.to_le_bytes());
        data[256..265].copy_from_slice(b"nqn.a.sub");
        data[512..522].copy_from_slice(b"nqn.a.host");
        (sqe, data)
    }

    /// NVMe Base 2.0, figure 380 and 381.
    #[test]
    fn connect_is_understood() {
        let (sqe, data) = connect(3, 127);
        let c = Connect::parse(&sqe, &data).unwrap();
        assert_eq!(c.queue, Queue { id: 3, entries: 128, flow_control: false });
        assert_eq!((c.controller, c.keep_alive.as_millis()), (Some(5), 5000));
        assert_eq!((c.subsystem_nqn.as_str(), c.host_nqn.as_str()), ("nqn.a.sub", "nqn.a.host"));
        assert_eq!(c.host, [7; 16]);
    }

    /// What is wrong is named by its offset.
    #[test]
    fn wrong_parameters_are_named() {
        let refuse = |sqe: &Sqe, data: &[u8]| Connect::parse(sqe, data).unwrap_err();
        let (sqe, mut data) = connect(0, 31);
        assert_eq!(refuse(&connect(0, 0).0, &data), ConnectRefusal::SQSIZE);
        assert_eq!(refuse(&connect(0, 128).0, &data), ConnectRefusal::SQSIZE);
        assert_eq!(refuse(&connect(65, 31).0, &data), ConnectRefusal::QUEUE);
        assert_eq!(refuse(&sqe, &data[..600]), ConnectRefusal::HOST_NQN);
        assert_eq!(refuse(&sqe, &[]), ConnectRefusal::HOST_ID);
        data[16] = 9;
        assert_eq!(refuse(&sqe, &data), ConnectRefusal::CONTROLLER);
        data[16] = 0xff;
        data[256..512].fill(b'x');
        assert_eq!(refuse(&sqe, &data), ConnectRefusal::SUBSYSTEM);
        assert_eq!(ConnectRefusal::SUBSYSTEM.completion().result, 0x1_0100);
    }
}
