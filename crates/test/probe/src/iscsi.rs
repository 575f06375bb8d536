//! An iSCSI initiator (RFC 7143): one connection, one command at a time, no digests, no
//! authentication.

use crate::{BlockClient, Timeouts, protocol_error};
use std::{
    error::Error,
    fmt,
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// Length of a basic header segment (RFC 7143 11.2.1).
pub const HEADER_LEN: usize = 48;

/// Operation code of READ (16) (SBC-3 5.11).
pub const READ_16: u8 = 0x88;

/// Operation code of WRITE (16) (SBC-3 5.32).
pub const WRITE_16: u8 = 0x8a;

/// Opcodes (RFC 7143 11.1).
pub mod opcode {
    #![allow(missing_docs, reason = "the RFC's own names")]
    pub const NOP_OUT: u8 = 0x00;
    pub const SCSI_COMMAND: u8 = 0x01;
    pub const LOGIN: u8 = 0x03;
    pub const TEXT: u8 = 0x04;
    pub const DATA_OUT: u8 = 0x05;
    pub const LOGOUT: u8 = 0x06;
    pub const NOP_IN: u8 = 0x20;
    pub const SCSI_RESPONSE: u8 = 0x21;
    pub const LOGIN_RESPONSE: u8 = 0x23;
    pub const DATA_IN: u8 = 0x25;
    pub const LOGOUT_RESPONSE: u8 = 0x26;
    pub const R2T: u8 = 0x31;
    pub const ASYNC: u8 = 0x32;
    pub const REJECT: u8 = 0x3f;
}

/// The largest PDU data this initiator accepts, and the burst it offers.
const BURST_LEN: usize = 262_144;

/// A PDU: header and data segment. Tests may change any field before they send it.
#[derive(Clone, Debug)]
pub struct Pdu {
    /// The basic header segment.
    pub header: [u8; HEADER_LEN],
    /// The data segment, without padding.
    pub data: Vec<u8>,
}

impl Pdu {
    /// A PDU with `opcode` and `flags` (byte 1); the rest of the header is zero.
    #[must_use]
    pub fn new(opcode: u8, flags: u8) -> Self {
        let mut header = [0; HEADER_LEN];
        header[0] = opcode;
        header[1] = flags;
        Self { header, data: Vec::new() }
    }

    /// Puts `value` at byte `at` of the header.
    #[must_use]
    pub fn with_bytes_at<const N: usize>(mut self, at: usize, value: [u8; N]) -> Self {
        self.header[at..at + N].copy_from_slice(&value);
        self
    }

    /// Sets the data segment and its length field.
    #[must_use]
    pub fn with_data(mut self, data: &[u8]) -> Self {
        self.data = data.to_vec();
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes();
        self.header[5..8].copy_from_slice(&length[1..]);
        self
    }

    /// The bytes on the wire, padded to four.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.header.to_vec();
        bytes.extend_from_slice(&self.data);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// The opcode without the immediate bit.
    #[must_use]
    pub fn opcode(&self) -> u8 {
        self.header[0] & 0x3f
    }

    /// A big-endian word of the header.
    #[must_use]
    pub fn word_at(&self, at: usize) -> u32 {
        u32::from_be_bytes([
            self.header[at],
            self.header[at + 1],
            self.header[at + 2],
            self.header[at + 3],
        ])
    }

    /// Receives one PDU.
    pub fn receive(from: &mut impl Read) -> io::Result<Self> {
        let mut header = [0; HEADER_LEN];
        from.read_exact(&mut header)?;
        let extra = usize::from(header[4]) * 4;
        let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
        let mut rest = vec![0; extra + length.next_multiple_of(4)];
        from.read_exact(&mut rest)?;
        Ok(Self { header, data: rest[extra..extra + length].to_vec() })
    }
}

/// The text of a login request that asks for a normal session.
#[must_use]
pub fn login_text(initiator: &str, target: &str) -> Vec<u8> {
    let burst = BURST_LEN.to_string();
    let pairs = [
        ("InitiatorName", initiator),
        ("SessionType", "Normal"),
        ("TargetName", target),
        ("HeaderDigest", "None"),
        ("DataDigest", "None"),
        ("InitialR2T", "No"),
        ("ImmediateData", "Yes"),
        ("MaxRecvDataSegmentLength", &burst),
        ("MaxBurstLength", &burst),
        ("FirstBurstLength", &burst),
        ("MaxOutstandingR2T", "1"),
        ("MaxConnections", "1"),
        ("ErrorRecoveryLevel", "0"),
        ("DataPDUInOrder", "Yes"),
        ("DataSequenceInOrder", "Yes"),
    ];
    pairs.iter().flat_map(|(key, value)| format!("{key}={value}\0").into_bytes()).collect()
}

/// A login request that goes from the operational stage straight to full feature phase (RFC 7143
/// 11.12).
#[must_use]
pub fn login_request(text: &[u8], isid: u32) -> Pdu {
    let isid = isid.to_be_bytes();
    Pdu::new(opcode::LOGIN | 0x40, 0x80 | (1 << 2) | 3)
        .with_bytes_at(8, [0x80, 0, isid[0], isid[1], isid[2], isid[3]])
        .with_bytes_at(16, 1u32.to_be_bytes())
        .with_bytes_at(24, 1u32.to_be_bytes())
        .with_data(text)
}

/// What the target declared, as far as it limits what we send.
struct NegotiatedLimits {
    max_recv_segment: usize,
    first_burst: usize,
    immediate: bool,
}

impl NegotiatedLimits {
    fn parse(text: &[u8]) -> Self {
        let mut limits = Self { max_recv_segment: 8192, first_burst: BURST_LEN, immediate: true };
        for pair in text.split(|byte| *byte == 0) {
            let pair = String::from_utf8_lossy(pair);
            let Some((key, value)) = pair.split_once('=') else { continue };
            match key {
                "MaxRecvDataSegmentLength" => {
                    limits.max_recv_segment = value.parse().unwrap_or(8192);
                }
                "FirstBurstLength" => limits.first_burst = value.parse().unwrap_or(8192),
                "ImmediateData" => limits.immediate = value == "Yes",
                _ => {}
            }
        }
        limits
    }
}

/// A command that ended with another status than GOOD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScsiFailure {
    /// Operation code of the command.
    pub operation: u8,
    /// SCSI status (SAM-5 5.3.1).
    pub status: u8,
    /// Sense key, additional sense code and its qualifier (SPC-5 4.5); zeroes without sense data.
    pub sense: [u8; 3],
}

impl ScsiFailure {
    /// How a command ended, with its sense data.
    #[must_use]
    pub fn new(operation: u8, status: u8, sense: &[u8]) -> Self {
        let at = |index: usize| sense.get(index).copied().unwrap_or(0);
        let sense = match at(0) & 0x7f {
            0x70 | 0x71 => [at(2) & 0x0f, at(12), at(13)],
            0x72 | 0x73 => [at(1) & 0x0f, at(2), at(3)],
            _ => [0; 3],
        };
        Self { operation, status, sense }
    }

    /// Whether it is a unit attention, after which the command is sent again (SAM-5 5.14).
    #[must_use]
    pub fn is_unit_attention(&self) -> bool {
        self.sense[0] == 6
    }

    /// The command failure that `error` holds, if any.
    #[must_use]
    pub fn from_io_error(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl fmt::Display for ScsiFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, status, sense: [key, code, qualifier] } = self;
        write!(
            f,
            "SCSI status 0x{status:02x} for command 0x{operation:02x}, sense {key:x}/{code:02x}/{qualifier:02x}"
        )
    }
}

impl Error for ScsiFailure {}

/// A connection whose target may be silent while we read: pings the target once.
struct PingingReader<'a> {
    stream: &'a TcpStream,
    ping: Option<&'a [u8]>,
    pinged: bool,
    deadline: Instant,
}

impl Read for PingingReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.read(into) {
                Ok(count) => {
                    self.pinged = false;
                    return Ok(count);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let Some(ping) = self.ping.filter(|_| !self.pinged) else { return Err(error) };
                    if Instant::now() > self.deadline {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    self.stream.write_all(ping)?;
                    self.pinged = true;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A logged-in session with one logical unit.
pub struct Session {
    stream: TcpStream,
    timeouts: Timeouts,
    logout_requested: bool,
    lun: u8,
    command: u32,
    tag: u32,
    expected_status: u32,
    limits: NegotiatedLimits,
    block_bytes: usize,
    blocks: u64,
}

/// Connects with the timeouts of a test.
pub fn connect_with_timeouts(to: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

impl Session {
    /// Logs in and reads the unit's capacity. `isid` tells sessions of one initiator apart.
    pub fn login(
        portal: SocketAddr,
        initiator: &str,
        target: &str,
        lun: u8,
        isid: u32,
    ) -> io::Result<Self> {
        Self::login_with(portal, initiator, target, lun, isid, Timeouts::default())
    }

    /// The same, with timeouts other than the default.
    pub fn login_with(
        portal: SocketAddr,
        initiator: &str,
        target: &str,
        lun: u8,
        isid: u32,
        patience: Timeouts,
    ) -> io::Result<Self> {
        let mut stream = connect_with_timeouts(portal, patience.read_timeout)?;
        let mut request = login_request(&login_text(initiator, target), isid);
        let mut answers = Vec::new();
        let last = loop {
            stream.write_all(&request.to_bytes())?;
            let answer = Pdu::receive(&mut stream)?;
            if answer.opcode() != opcode::LOGIN_RESPONSE || answer.header[36] != 0 {
                let status = format!("login refused: {:02x?}", &answer.header[36..38]);
                return Err(io::Error::new(ErrorKind::ConnectionRefused, status));
            }
            answers.extend_from_slice(&answer.data);
            if answer.header[1] & 0x83 == 0x83 {
                break answer;
            }
            request = login_request(&[], isid);
            request.header[28..32].copy_from_slice(&answer.header[24..28]);
        };
        let mut session = Self {
            stream,
            timeouts: patience,
            logout_requested: false,
            lun,
            command: last.word_at(28),
            tag: 1,
            expected_status: last.word_at(24).wrapping_add(1),
            limits: NegotiatedLimits::parse(&answers),
            block_bytes: 512,
            blocks: 0,
        };
        session.wait_ready()?;
        Ok(session)
    }

    /// Waits until the unit is ready (a new session finds unit attentions) and asks for its size.
    fn wait_ready(&mut self) -> io::Result<()> {
        let test_unit_ready = [0; 16];
        for _ in 0..8 {
            match self.execute(&test_unit_ready, &[], &mut []) {
                Ok(()) => break,
                Err(error) if ScsiFailure::from_io_error(&error).is_some() => {}
                Err(error) => return Err(error),
            }
        }
        let mut answer = [0; 32];
        let mut cdb = [0; 16];
        cdb[0] = 0x9e;
        cdb[1] = 0x10;
        cdb[13] = 32;
        self.execute(&cdb, &[], &mut answer)?;
        let (last, rest) = answer.split_at(8);
        self.blocks = last.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)) + 1;
        self.block_bytes = rest[..4].iter().fold(0, |n, byte| n << 8 | usize::from(*byte));
        Ok(())
    }

    /// The connection, for a test that wants to misuse it.
    #[must_use]
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// The header of a SCSI command for this session; takes a command number and a task tag.
    #[must_use]
    pub fn scsi_command(&mut self, cdb: &[u8; 16], out: usize, expected_in: usize) -> Pdu {
        let direction = if out > 0 { 0x20 } else { 0x40 };
        let length = u32::try_from(out.max(expected_in)).unwrap_or(u32::MAX);
        let pdu = Pdu::new(opcode::SCSI_COMMAND, 0x80 | direction | 1)
            .with_bytes_at(8, [0, self.lun])
            .with_bytes_at(16, self.tag.to_be_bytes())
            .with_bytes_at(20, length.to_be_bytes())
            .with_bytes_at(24, self.command.to_be_bytes())
            .with_bytes_at(28, self.expected_status.to_be_bytes())
            .with_bytes_at(32, *cdb);
        self.tag = self.tag.wrapping_add(1);
        self.command = self.command.wrapping_add(1);
        pdu
    }

    /// Whether the target has asked this session to end (RFC 7143 11.9, events 1 to 3). The running
    /// command is still answered.
    #[must_use]
    pub fn logout_requested(&self) -> bool {
        self.logout_requested
    }

    /// Runs one command; anything but GOOD is an error that holds a [`ScsiFailure`].
    ///
    /// # Errors
    /// That, and what the connection reports.
    pub fn execute(&mut self, cdb: &[u8; 16], out: &[u8], into: &mut [u8]) -> io::Result<()> {
        let mut pdu = self.scsi_command(cdb, out.len(), into.len());
        let immediate = if self.limits.immediate {
            self.limits.max_recv_segment.min(self.limits.first_burst)
        } else {
            0
        };
        if !out.is_empty() {
            pdu = pdu.with_data(&out[..out.len().min(immediate)]);
        }
        let tag = pdu.word_at(16);
        self.stream.write_all(&pdu.to_bytes())?;
        let until = Instant::now() + self.timeouts.command_timeout;
        loop {
            let answer = self.receive(until)?;
            match answer.opcode() {
                opcode::NOP_IN => self.reply_to_ping(&answer)?,
                opcode::ASYNC => self.logout_requested |= matches!(answer.header[36], 1..=3),
                opcode::R2T => self.send_burst(tag, &answer, out)?,
                opcode::DATA_IN => {
                    let at = answer.word_at(40) as usize;
                    let target = into.get_mut(at..at + answer.data.len());
                    target
                        .ok_or_else(|| protocol_error("data past the buffer"))?
                        .copy_from_slice(&answer.data);
                    if answer.header[1] & 1 != 0 {
                        return self.command_result(cdb[0], &answer);
                    }
                }
                opcode::SCSI_RESPONSE if answer.header[2] != 0 => {
                    return Err(protocol_error(format!(
                        "target failure: response {}",
                        answer.header[2]
                    )));
                }
                opcode::SCSI_RESPONSE => return self.command_result(cdb[0], &answer),
                other => return Err(protocol_error(format!("unexpected PDU 0x{other:02x}"))),
            }
        }
    }

    /// The PDU that ends a command: its status and, behind two bytes of length, its sense data (RFC
    /// 7143 11.4.7).
    fn command_result(&mut self, operation: u8, answer: &Pdu) -> io::Result<()> {
        self.expected_status = answer.word_at(24).wrapping_add(1);
        match answer.header[3] {
            0 => Ok(()),
            status => {
                let sense = answer.data.get(2..).unwrap_or_default();
                Err(io::Error::other(ScsiFailure::new(operation, status, sense)))
            }
        }
    }

    fn receive(&mut self, until: Instant) -> io::Result<Pdu> {
        // A separate tag, so that the target answers.
        let ping = Pdu::new(opcode::NOP_OUT | 0x40, 0x80)
            .with_bytes_at(8, [0, self.lun])
            .with_bytes_at(16, 0x5049_4e47u32.to_be_bytes())
            .with_bytes_at(20, u32::MAX.to_be_bytes())
            .with_bytes_at(24, self.command.to_be_bytes())
            .with_bytes_at(28, self.expected_status.to_be_bytes())
            .to_bytes();
        let ping = self.timeouts.ping_when_silent.then_some(&ping[..]);
        Pdu::receive(&mut PingingReader {
            stream: &self.stream,
            ping,
            pinged: false,
            deadline: until,
        })
    }

    fn reply_to_ping(&mut self, ping: &Pdu) -> io::Result<()> {
        if ping.word_at(20) == u32::MAX {
            return Ok(());
        }
        let pong = Pdu::new(opcode::NOP_OUT | 0x40, 0x80)
            .with_bytes_at(16, u32::MAX.to_be_bytes())
            .with_bytes_at(20, ping.word_at(20).to_be_bytes())
            .with_bytes_at(24, self.command.to_be_bytes())
            .with_bytes_at(28, self.expected_status.to_be_bytes());
        self.stream.write_all(&pong.to_bytes())
    }

    fn send_burst(&mut self, tag: u32, r2t: &Pdu, out: &[u8]) -> io::Result<()> {
        let (from, length) = (r2t.word_at(40) as usize, r2t.word_at(44) as usize);
        let burst = out
            .get(from..from + length)
            .ok_or_else(|| protocol_error("asked for data past the end"))?;
        let segments = burst.chunks(self.limits.max_recv_segment);
        let last = segments.len() - 1;
        for (number, (data, at)) in
            segments.zip((from..).step_by(self.limits.max_recv_segment)).enumerate()
        {
            let flags = if number == last { 0x80 } else { 0 };
            let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_be_bytes();
            let pdu = Pdu::new(opcode::DATA_OUT, flags)
                .with_bytes_at(8, [0, self.lun])
                .with_bytes_at(16, tag.to_be_bytes())
                .with_bytes_at(20, r2t.word_at(20).to_be_bytes())
                .with_bytes_at(28, self.expected_status.to_be_bytes())
                .with_bytes_at(36, word(number))
                .with_bytes_at(40, word(at))
                .with_data(data);
            self.stream.write_all(&pdu.to_bytes())?;
        }
        Ok(())
    }

    /// READ (16) or WRITE (16), as a CDB.
    #[must_use]
    pub fn cdb16(operation: u8, flags: u8, lba: u64, blocks: u32) -> [u8; 16] {
        let mut cdb = [0; 16];
        cdb[0] = operation;
        cdb[1] = flags;
        cdb[2..10].copy_from_slice(&lba.to_be_bytes());
        cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
        cdb
    }

    fn count(&self, bytes: usize) -> u32 {
        u32::try_from(bytes / self.block_bytes).unwrap_or(u32::MAX)
    }

    /// Logs out (RFC 7143 11.14) and closes.
    pub fn logout(mut self) -> io::Result<()> {
        let pdu = Pdu::new(opcode::LOGOUT | 0x40, 0x80)
            .with_bytes_at(16, self.tag.to_be_bytes())
            .with_bytes_at(24, self.command.to_be_bytes())
            .with_bytes_at(28, self.expected_status.to_be_bytes());
        self.stream.write_all(&pdu.to_bytes())?;
        loop {
            let answer = Pdu::receive(&mut self.stream)?;
            if answer.opcode() == opcode::LOGOUT_RESPONSE {
                return Ok(());
            }
        }
    }
}

impl BlockClient for Session {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn read(&mut self, lba: u64, into: &mut [u8]) -> io::Result<()> {
        let cdb = Self::cdb16(READ_16, 0, lba, self.count(into.len()));
        self.execute(&cdb, &[], into)
    }

    fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> io::Result<()> {
        let cdb = Self::cdb16(WRITE_16, if fua { 8 } else { 0 }, lba, self.count(data.len()));
        self.execute(&cdb, data, &mut [])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.execute(&Self::cdb16(0x91, 0, 0, 0), &[], &mut [])
    }
}
