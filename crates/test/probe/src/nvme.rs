//! An NVMe/TCP host (NVMe Base 2.0, NVMe over Fabrics; TCP transport 1.0): an admin queue and one
//! I/O queue, one command at a time, no digests.

use crate::{BlockClient, DEFAULT_TIMEOUT, Timeouts, iscsi::connect_with_timeouts, protocol_error};
use std::{
    error::Error,
    fmt,
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Instant,
};

/// PDU types (TCP transport 1.0, 3.6.1).
pub mod pdu {
    #![allow(missing_docs, reason = "the specification's own names")]
    pub const IC_REQUEST: u8 = 0x00;
    pub const IC_RESPONSE: u8 = 0x01;
    pub const HOST_TERMINATES: u8 = 0x02;
    pub const CONTROLLER_TERMINATES: u8 = 0x03;
    pub const COMMAND: u8 = 0x04;
    pub const RESPONSE: u8 = 0x05;
    pub const DATA_TO_CONTROLLER: u8 = 0x06;
    pub const DATA_TO_HOST: u8 = 0x07;
    pub const READY_TO_TRANSFER: u8 = 0x09;
}

const COMMON_HEADER: usize = 8;
/// Commands of a queue; we use one at a time.
const QUEUE_ENTRIES: u16 = 32;

/// A PDU as received: its common header, the rest of its header, its data.
struct ReceivedPdu {
    kind: u8,
    flags: u8,
    header: Vec<u8>,
    data: Vec<u8>,
}

impl ReceivedPdu {
    fn word_at(&self, at: usize) -> u32 {
        let bytes = self.header.get(at..at + 4).and_then(|b| b.try_into().ok());
        u32::from_le_bytes(bytes.unwrap_or_default())
    }

    fn half_at(&self, at: usize) -> u16 {
        let bytes = self.header.get(at..at + 2).and_then(|b| b.try_into().ok());
        u16::from_le_bytes(bytes.unwrap_or_default())
    }
}

/// A PDU's bytes: common header (type, flags, header length, data offset, whole length), then the
/// rest.
#[must_use]
pub fn pdu(kind: u8, flags: u8, header: &[u8], data: &[u8]) -> Vec<u8> {
    let header_length = COMMON_HEADER + header.len();
    let offset = if data.is_empty() { 0 } else { header_length };
    let total = u32::try_from(header_length + data.len()).unwrap_or(u32::MAX);
    let short = |n: usize| u8::try_from(n).unwrap_or(u8::MAX);
    let mut bytes = vec![kind, flags, short(header_length), short(offset)];
    bytes.extend_from_slice(&total.to_le_bytes());
    bytes.extend_from_slice(header);
    bytes.extend_from_slice(data);
    bytes
}

/// The first PDU of a connection: version 1.0, no padding, no digests.
#[must_use]
pub fn initialize_request() -> Vec<u8> {
    pdu(pdu::IC_REQUEST, 0, &[0; 120], &[])
}

/// How a command's data is transferred.
enum Payload<'a> {
    None,
    Out(&'a [u8]),
    In(&'a mut [u8]),
}

/// One queue: a connection.
struct Queue {
    stream: TcpStream,
    /// The most one H2CData PDU may carry.
    max_h2c_data: usize,
    /// The most data a command capsule may carry.
    max_in_capsule_data: usize,
    next_id: u16,
    timeouts: Timeouts,
    /// For an I/O queue, its admin queue: it keeps the controller alive, and tells whether the
    /// controller answers.
    admin: Option<Box<Queue>>,
}

/// A command that ended with another status than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeFailure {
    /// The status field without the phase tag (NVMe Base 2.0, 3.3.3.2.1): code, type, and above
    /// them the bits for retries.
    pub status: u16,
}

impl NvmeFailure {
    /// The command failure that `error` holds, if any.
    #[must_use]
    pub fn from_io_error(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }

    /// Status code type and status code.
    #[must_use]
    pub fn code(self) -> (u8, u8) {
        let [kind, code] = self.status.to_be_bytes();
        (kind & 0x07, code)
    }
}

impl fmt::Display for NvmeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVMe status 0x{:04x}", self.status)
    }
}

impl Error for NvmeFailure {}

/// A connection whose controller may be silent while we read: pings through its admin queue.
struct KeepAliveReader<'a> {
    stream: &'a TcpStream,
    admin: Option<&'a mut Queue>,
    deadline: Instant,
}

impl Read for KeepAliveReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let Some(admin) = &mut self.admin else { return Err(error) };
                    if Instant::now() > self.deadline {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    admin.command(submission_entry(0x18, 0, [0; 6]), Payload::None)?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
        }
    }
}

/// A submission queue entry without its data pointer.
#[must_use]
fn submission_entry(opcode: u8, namespace: u32, words: [u32; 6]) -> [u8; 64] {
    let mut entry = [0; 64];
    entry[0] = opcode;
    entry[4..8].copy_from_slice(&namespace.to_le_bytes());
    for (place, word) in entry[40..].chunks_mut(4).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    entry
}

impl Queue {
    fn open(to: SocketAddr, patience: Timeouts) -> io::Result<Self> {
        let mut stream = connect_with_timeouts(to, patience.read_timeout)?;
        stream.write_all(&initialize_request())?;
        let (most_per_pdu, in_capsule, next_id) = (4096, 8192, 0);
        let mut queue = Self {
            stream,
            max_h2c_data: most_per_pdu,
            max_in_capsule_data: in_capsule,
            next_id,
            timeouts: patience,
            admin: None,
        };
        let answer = queue.receive(Instant::now())?;
        if answer.kind != pdu::IC_RESPONSE {
            return Err(protocol_error(format!("expected ICResp, got PDU 0x{:02x}", answer.kind)));
        }
        queue.max_h2c_data = answer.word_at(4) as usize;
        Ok(queue)
    }

    fn receive(&mut self, until: Instant) -> io::Result<ReceivedPdu> {
        let admin = self.admin.as_deref_mut().filter(|_| self.timeouts.ping_when_silent);
        let mut stream = KeepAliveReader { stream: &self.stream, admin, deadline: until };
        let mut common = [0; COMMON_HEADER];
        stream.read_exact(&mut common)?;
        let [kind, flags, header_length, offset, ..] = common;
        let total = u32::from_le_bytes([common[4], common[5], common[6], common[7]]) as usize;
        if total < usize::from(header_length) || total > 64 << 20 {
            return Err(protocol_error(format!("PDU of {total} bytes")));
        }
        let mut rest = vec![0; total - COMMON_HEADER];
        stream.read_exact(&mut rest)?;
        let start = usize::from(offset).max(usize::from(header_length)) - COMMON_HEADER;
        let data = rest.split_off(start.min(rest.len()));
        Ok(ReceivedPdu { kind, flags, header: rest, data })
    }

    /// Runs one command; returns the first two words of its completion.
    fn command(&mut self, mut entry: [u8; 64], mut payload: Payload<'_>) -> io::Result<u64> {
        self.next_id = self.next_id.wrapping_add(1) & 0x7fff;
        let id = self.next_id;
        entry[1] = 0x40; // SGLs are used (NVMe Base 2.0, figure 87)
        entry[2..4].copy_from_slice(&id.to_le_bytes());
        let mut capsule: &[u8] = &[];
        let (length, kind) = match &payload {
            Payload::None => (0, 0x5a),
            Payload::Out(data) if data.len() <= self.max_in_capsule_data => {
                capsule = data;
                (data.len(), 0x01)
            }
            Payload::Out(data) => (data.len(), 0x5a),
            Payload::In(data) => (data.len(), 0x5a),
        };
        entry[32..36].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        entry[39] = kind;
        self.stream.write_all(&pdu(pdu::COMMAND, 0, &entry, capsule))?;
        let until = Instant::now() + self.timeouts.command_timeout;
        loop {
            let answer = self.receive(until)?;
            match answer.kind {
                pdu::RESPONSE => return completion(&answer, id),
                pdu::READY_TO_TRANSFER => self.send_data(&answer, &payload)?,
                pdu::DATA_TO_HOST => {
                    if receive_data(&answer, &mut payload)? {
                        return Ok(0);
                    }
                }
                other => return Err(protocol_error(format!("unexpected PDU 0x{other:02x}"))),
            }
        }
    }

    fn send_data(&mut self, r2t: &ReceivedPdu, payload: &Payload<'_>) -> io::Result<()> {
        let (from, length) = (r2t.word_at(4) as usize, r2t.word_at(8) as usize);
        let Payload::Out(data) = payload else {
            return Err(protocol_error("asked for data of a read"));
        };
        let data = data
            .get(from..from + length)
            .ok_or_else(|| protocol_error("asked for data past the end"))?;
        let chunks = data.chunks(self.max_h2c_data.max(1));
        let last = chunks.len() - 1;
        for (number, (chunk, at)) in
            chunks.zip((from..).step_by(self.max_h2c_data.max(1))).enumerate()
        {
            let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
            let mut header = r2t.header[..4].to_vec();
            header.extend_from_slice(&word(at));
            header.extend_from_slice(&word(chunk.len()));
            header.extend_from_slice(&[0; 4]);
            let flags = if number == last { 0x04 } else { 0 };
            self.stream.write_all(&pdu(pdu::DATA_TO_CONTROLLER, flags, &header, chunk))?;
        }
        Ok(())
    }
}

/// Stores received data; true if it was the last and implies a successful completion (the SUCCESS
/// flag).
fn receive_data(received: &ReceivedPdu, payload: &mut Payload<'_>) -> io::Result<bool> {
    let Payload::In(into) = payload else { return Err(protocol_error("data for a write")) };
    let at = received.word_at(4) as usize;
    let place = into.get_mut(at..at + received.data.len());
    place.ok_or_else(|| protocol_error("data past the buffer"))?.copy_from_slice(&received.data);
    Ok(received.flags & 0x0c == 0x0c)
}

fn completion(response: &ReceivedPdu, id: u16) -> io::Result<u64> {
    let status = response.half_at(14) >> 1;
    if response.half_at(12) != id {
        return Err(protocol_error(format!(
            "completion of command {}, expected {id}",
            response.half_at(12)
        )));
    }
    if status != 0 {
        return Err(io::Error::other(NvmeFailure { status }));
    }
    Ok(u64::from(response.word_at(0)) | u64::from(response.word_at(4)) << 32)
}

/// A controller with one namespace, ready for I/O.
pub struct Controller {
    io: Queue,
    block_bytes: usize,
    blocks: u64,
}

/// The 1024 bytes a Connect command carries (NVMe over Fabrics, Connect data).
fn connect_data(host: &str, subsystem: &str, controller: u16) -> Vec<u8> {
    let mut data = vec![0; 1024];
    data[..16].copy_from_slice(&[0x5a; 16]);
    data[16..18].copy_from_slice(&controller.to_le_bytes());
    data[256..256 + subsystem.len()].copy_from_slice(subsystem.as_bytes());
    data[512..512 + host.len()].copy_from_slice(host.as_bytes());
    data
}

fn connect(queue: &mut Queue, number: u16, data: &[u8], keep_alive_ms: u32) -> io::Result<u64> {
    let mut entry = submission_entry(0x7f, 0, [0; 6]);
    entry[4] = 0x01;
    entry[42..44].copy_from_slice(&number.to_le_bytes());
    entry[44..46].copy_from_slice(&(QUEUE_ENTRIES - 1).to_le_bytes());
    entry[48..52].copy_from_slice(&keep_alive_ms.to_le_bytes());
    queue.command(entry, Payload::Out(data))
}

/// Property Set of a four-byte property (NVMe over Fabrics).
fn property_set(queue: &mut Queue, offset: u32, value: u32) -> io::Result<()> {
    let mut entry = submission_entry(0x7f, 0, [0, offset, value, 0, 0, 0]);
    entry[4] = 0x00;
    queue.command(entry, Payload::None).map(|_| ())
}

fn property_get(queue: &mut Queue, offset: u32) -> io::Result<u64> {
    let mut entry = submission_entry(0x7f, 0, [0, offset, 0, 0, 0, 0]);
    entry[4] = 0x04;
    queue.command(entry, Payload::None)
}

impl Controller {
    /// Connects to `subsystem` as `host` and attaches to its namespace 1.
    pub fn connect(to: SocketAddr, host: &str, subsystem: &str) -> io::Result<Self> {
        Self::connect_with(to, host, subsystem, Timeouts::default())
    }

    /// The same, with timeouts other than the default.
    pub fn connect_with(
        to: SocketAddr,
        host: &str,
        subsystem: &str,
        patience: Timeouts,
    ) -> io::Result<Self> {
        const CONFIGURATION: u32 = 0x14;
        const STATUS: u32 = 0x1c;
        let mut admin = Queue::open(to, patience)?;
        let keep_alive_ms = u32::try_from(DEFAULT_TIMEOUT.as_millis() * 10).unwrap_or(u32::MAX);
        let answer = connect(&mut admin, 0, &connect_data(host, subsystem, 0xffff), keep_alive_ms)?;
        let controller = u16::try_from(answer & 0xffff).unwrap_or(0);
        property_set(&mut admin, CONFIGURATION, 1 | 6 << 16 | 4 << 20)?;
        let mut tries = 0;
        while property_get(&mut admin, STATUS)? & 1 == 0 {
            tries += 1;
            if tries > 1000 {
                return Err(protocol_error("the controller never became ready"));
            }
        }
        let in_capsule = identify(&mut admin, 0, 1).map(|data| {
            let capsule = u32::from_le_bytes([data[1792], data[1793], data[1794], data[1795]]);
            (capsule as usize * 16).saturating_sub(64)
        })?;
        admin.command(submission_entry(0x09, 0, [0x07, 0, 0, 0, 0, 0]), Payload::None)?;
        let namespace = identify(&mut admin, 1, 0)?;
        let blocks = u64::from_le_bytes(namespace[..8].try_into().unwrap_or_default());
        let format = 128 + usize::from(namespace[26] & 0x0f) * 4;
        let block_bytes = 1 << namespace[format + 2];
        let mut io = Queue::open(to, patience)?;
        io.max_in_capsule_data = in_capsule;
        connect(&mut io, 1, &connect_data(host, subsystem, controller), 0)?;
        io.admin = Some(Box::new(admin));
        Ok(Self { io, block_bytes, blocks })
    }

    /// An entry for a range of blocks; `control` is the upper half of its word 12.
    fn block_command(
        &self,
        opcode: u8,
        lba: u64,
        bytes: usize,
        control: u32,
    ) -> io::Result<[u8; 64]> {
        let blocks = bytes / self.block_bytes;
        let count =
            u32::try_from(blocks).ok().and_then(|n| n.checked_sub(1)).filter(|n| *n <= 0xffff);
        let count =
            count.ok_or_else(|| protocol_error(format!("{blocks} blocks in one command")))?;
        let low = u32::try_from(lba & 0xffff_ffff).unwrap_or(0);
        let high = u32::try_from(lba >> 32).unwrap_or(0);
        Ok(submission_entry(opcode, 1, [low, high, count | control << 16, 0, 0, 0]))
    }
}

/// Identify with CNS `what` (NVMe Base 2.0, 5.17): 1 the controller, 0 a namespace.
fn identify(admin: &mut Queue, namespace: u32, what: u32) -> io::Result<Vec<u8>> {
    let mut data = vec![0; 4096];
    admin.command(
        submission_entry(0x06, namespace, [what, 0, 0, 0, 0, 0]),
        Payload::In(&mut data),
    )?;
    Ok(data)
}

impl BlockClient for Controller {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn read(&mut self, lba: u64, into: &mut [u8]) -> io::Result<()> {
        let entry = self.block_command(0x02, lba, into.len(), 0)?;
        self.io.command(entry, Payload::In(into)).map(|_| ())
    }

    fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> io::Result<()> {
        let entry = self.block_command(0x01, lba, data.len(), if fua { 0x4000 } else { 0 })?;
        self.io.command(entry, Payload::Out(data)).map(|_| ())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.io.command(submission_entry(0x00, 1, [0; 6]), Payload::None).map(|_| ())
    }
}
