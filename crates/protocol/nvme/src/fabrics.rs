//! Fabrics commands: Connect and the properties (NVMe Base 2.0, 6).

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::entry::{AdminOpcode, Completion, FabricsType, Sqe};
use crate::status::Status;

/// NQN of the discovery subsystem (NVMe Base 2.0, 4.5).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Longest NVMe qualified name in bytes (NVMe Base 2.0, 4.5).
pub const MAX_NQN_BYTES: usize = 223;

/// Length in bytes of the data that comes with Connect.
pub const CONNECT_BYTES: u32 = 1024;

/// CNTLID by which a host asks for any controller (dynamic controller model).
pub const CNTLID_DYNAMIC: u16 = 0xffff;

/// AUTHREQ in the result of Connect: the host has to authenticate on this queue, by messages (ATR).
pub const CONNECT_AUTHENTICATE: u64 = 1 << 17;

/// CATTR: the host disables SQ flow control.
const CATTR_NO_FLOW_CONTROL: u32 = 1 << 2;

/// Data of a Connect command (NVMe Base 2.0, figure 387).
///
/// ```text
///  byte   0 .. 15   16 .. 17  18 .. 255   256 .. 511  512 .. 767  768 .. 1023
///       +---------+---------+-----------+-----------+-----------+-------------+
///       | HOSTID  | CNTLID  | reserved  | SUBNQN    | HOSTNQN   | reserved    |
///       +---------+---------+-----------+-----------+-----------+-------------+
/// ```
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ConnectData {
    /// Host identifier.
    pub host_id: [u8; 16],
    /// Controller asked for; [`CNTLID_DYNAMIC`] on the admin queue.
    pub cntlid: U16,
    /// Reserved.
    pub reserved: [u8; 238],
    /// NQN of the subsystem, NUL terminated.
    pub subnqn: [u8; 256],
    /// NQN of the host, NUL terminated.
    pub hostnqn: [u8; 256],
    /// Reserved.
    pub reserved2: [u8; 256],
}
const _: () = assert!(size_of::<ConnectData>() == CONNECT_BYTES as usize);

/// Byte offsets of the fields of Connect that can be invalid.
mod at {
    pub(super) const SQE_SQSIZE: u32 = 44;
    pub(super) const SQE_QID: u32 = 42;
    pub(super) const DATA_HOST_ID: u32 = 0;
    pub(super) const DATA_CNTLID: u32 = 16;
    pub(super) const DATA_SUBNQN: u32 = 256;
    pub(super) const DATA_HOSTNQN: u32 = 512;
}

/// A decoded Connect command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Size of the submission queue in entries, 0's based.
    pub sqsize: u16,
    /// Whether the host uses SQHD.
    pub flow_control: bool,
    /// Keep alive timeout in milliseconds; 0: none.
    pub kato_ms: u32,
    /// Host identifier.
    pub host_id: [u8; 16],
    /// Host NQN.
    pub hostnqn: String,
    /// Subsystem NQN.
    pub subnqn: String,
    /// Controller identifier.
    pub cntlid: u16,
}

impl Connect {
    /// Parses a Connect command and its data.
    ///
    /// # Errors
    /// The completion that refuses it.
    pub fn parse(sqe: &Sqe, data: &[u8]) -> Result<Self, Completion> {
        let format = sqe.cdw(0) & 0xffff;
        if format != 0 {
            return Err(Completion::failed(Status::FABRICS_FORMAT.do_not_retry()));
        }
        let wrong_length = Completion::failed(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        let data = ConnectData::read_from_bytes(data).map_err(|_| wrong_length)?;
        let [sqsize, attributes] = halves(sqe.cdw(1));
        let connect = Self {
            qid: halves(sqe.cdw(0))[1],
            sqsize,
            flow_control: u32::from(attributes) & CATTR_NO_FLOW_CONTROL == 0,
            kato_ms: sqe.cdw(2),
            host_id: data.host_id,
            hostnqn: nqn(&data.hostnqn).ok_or(invalid_data(at::DATA_HOSTNQN))?,
            subnqn: nqn(&data.subnqn).ok_or(invalid_data(at::DATA_SUBNQN))?,
            cntlid: data.cntlid.get(),
        };
        // Reservations identify hosts by this identifier, and 0 is none.
        if connect.host_id == [0; 16] && !connect.is_discovery() {
            return Err(invalid_data(at::DATA_HOST_ID));
        }
        Ok(connect)
    }

    /// Encodes the command and its data.
    #[must_use]
    pub fn encode(&self, cid: u16) -> (Sqe, ConnectData) {
        let connect = u32::from(FabricsType::Connect.0);
        let mut sqe = Sqe::new(AdminOpcode::Fabrics.0, cid, connect);
        let attributes = if self.flow_control { 0 } else { CATTR_NO_FLOW_CONTROL };
        sqe.cdw10[0] = (u32::from(self.qid) << 16).into();
        sqe.cdw10[1] = (u32::from(self.sqsize) | attributes << 16).into();
        sqe.cdw10[2] = self.kato_ms.into();
        let mut data = ConnectData {
            host_id: self.host_id,
            cntlid: self.cntlid.into(),
            reserved: [0; 238],
            subnqn: [0; 256],
            hostnqn: [0; 256],
            reserved2: [0; 256],
        };
        for (field, name) in [(&mut data.subnqn, &self.subnqn), (&mut data.hostnqn, &self.hostnqn)]
        {
            let n = name.len().min(MAX_NQN_BYTES);
            field[..n].copy_from_slice(&name.as_bytes()[..n]);
        }
        (sqe, data)
    }

    /// Whether the subsystem is the discovery subsystem.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.subnqn == DISCOVERY_NQN
    }

    /// Refusal: this host may not connect (or the subsystem does not exist for it).
    #[must_use]
    pub fn refuse_host() -> Completion {
        Completion::failed(Status::CONNECT_INVALID_HOST.do_not_retry())
    }

    /// Refusal: no such subsystem.
    #[must_use]
    pub fn refuse_subsystem() -> Completion {
        invalid_data(at::DATA_SUBNQN)
    }

    /// Refusal: no such controller, or not this host's.
    #[must_use]
    pub fn refuse_controller() -> Completion {
        invalid_data(at::DATA_CNTLID)
    }

    /// Refusal: not the host identifier of this association.
    #[must_use]
    pub fn refuse_host_id() -> Completion {
        invalid_data(at::DATA_HOST_ID)
    }

    /// Refusal: no such queue.
    #[must_use]
    pub fn refuse_queue() -> Completion {
        invalid_sqe(at::SQE_QID)
    }

    /// Refusal: not such a queue size.
    #[must_use]
    pub fn refuse_size() -> Completion {
        invalid_sqe(at::SQE_SQSIZE)
    }

    /// Refusal for now: try again.
    #[must_use]
    pub fn refuse_busy() -> Completion {
        Completion::failed(Status::CONNECT_BUSY)
    }
}

/// Connect Invalid Parameters: IPO is an offset into the command.
fn invalid_sqe(offset: u32) -> Completion {
    let status = Status::CONNECT_INVALID_PARAMETERS.do_not_retry();
    Completion { result: offset.into(), status }
}

/// Connect Invalid Parameters: IPO is an offset into the data (IATTR set).
fn invalid_data(offset: u32) -> Completion {
    invalid_sqe(offset | 1 << 16)
}

fn halves(dword: u32) -> [u16; 2] {
    let [a, b, c, d] = dword.to_le_bytes();
    [u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d])]
}

/// A NUL terminated name; `None` unless it is 1 to 223 bytes of printable UTF-8.
fn nqn(field: &[u8; 256]) -> Option<String> {
    let end = field.iter().position(|&b| b == 0)?;
    let name = std::str::from_utf8(&field[..end]).ok()?;
    is_name(name).then(|| name.to_owned())
}

/// Whether Connect may contain this name of a host or subsystem: 1 to 223 bytes without control
/// characters. Hosts do not follow the format of NVMe Base 2.0, 4.5.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NQN_BYTES).contains(&name.len()) && !name.chars().any(char::is_control)
}

/// Checks a Disconnect command
pub(crate) fn is_disconnect(sqe: &Sqe) -> bool {
    let [record_format, _] = halves(sqe.cdw(0));
    record_format == 0
}

/// A Property Get or Set command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Property {
    /// Offset of the property in bytes.
    pub offset: u32,
    /// Whether it is 8 bytes long rather than 4.
    pub wide: bool,
    /// The new value for Property Set.
    pub value: u64,
}

impl Property {
    /// Parses a Property Get or Set command; `None` for an invalid size.
    #[must_use]
    pub fn parse(sqe: &Sqe) -> Option<Self> {
        let wide = match sqe.cdw(0) & 0b111 {
            0 => false,
            1 => true,
            _ => return None,
        };
        let value = u64::from(sqe.cdw(2)) | u64::from(sqe.cdw(3)) << 32;
        Some(Self { offset: sqe.cdw(1), wide, value })
    }

    /// Encodes a command that gets (`value` is `None`) or sets a property.
    #[must_use]
    pub fn encode(cid: u16, offset: u32, wide: bool, value: Option<u64>) -> Sqe {
        let kind =
            if value.is_some() { FabricsType::PropertySet } else { FabricsType::PropertyGet };
        let mut sqe = Sqe::new(AdminOpcode::Fabrics.0, cid, u32::from(kind.0));
        let value = value.unwrap_or(0);
        sqe.cdw10[0] = u32::from(wide).into();
        sqe.cdw10[1] = offset.into();
        sqe.cdw10[2] = low(value).into();
        sqe.cdw10[3] = low(value >> 32).into();
        sqe
    }
}

fn low(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connect() -> Connect {
        Connect {
            qid: 3,
            sqsize: 127,
            flow_control: false,
            kato_ms: 15_000,
            host_id: [7; 16],
            hostnqn: "nqn.2014-08.org.nvmexpress:uuid:1".into(),
            subnqn: "nqn.2026-01.io.example:v".into(),
            cntlid: 17,
        }
    }

    /// NVMe Base 2.0, 6.3.
    #[test]
    fn connect_reads_back_what_was_written() {
        use zerocopy::IntoBytes;
        let (sqe, data) = connect().encode(9);
        assert_eq!(Connect::parse(&sqe, data.as_bytes()), Ok(connect()));
        let short = Connect::parse(&sqe, &data.as_bytes()[..1000]);
        assert_eq!(short.map_err(|c| c.status.code()), Err(Status::DATA_SGL_LENGTH_INVALID));
    }

    /// NVMe Base 2.0, 6.3: RECFMT, and the place of what is invalid.
    #[test]
    fn connect_refuses_formats_and_names_it_cannot_read() {
        use zerocopy::IntoBytes;
        let (mut sqe, mut data) = connect().encode(9);
        data.hostnqn = [b'x'; 256];
        let refused = Connect::parse(&sqe, data.as_bytes()).map_err(|c| c.result);
        assert_eq!(refused, Err(512 | 1 << 16));
        sqe.cdw10[0] = 1.into();
        let refused = Connect::parse(&sqe, data.as_bytes()).map_err(|c| c.status.code());
        assert_eq!(refused, Err(Status::FABRICS_FORMAT));
    }
}
