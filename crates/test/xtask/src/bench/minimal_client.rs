//! Random reads and writes by a minimal client: a blocking socket with a few commands in flight. It
//! reads and writes with one call whatever is ready. At depth 1 it writes a request and reads the
//! answer; the echo and the targets get the same client there, so only the servers differ.

use super::figures::{Figures, Load, Operation};
use crate::{node::processor_time, server::IscsiLun};
use anyhow::{Context, Result, anyhow};
use probe::{
    BlockClient,
    iscsi::{HEADER_LEN, READ_16, ScsiFailure, Session, WRITE_16, opcode},
    protocol_error,
    registers::SeededRng,
};
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use std::{
    io::{self, BufReader, Read, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

pub(super) const BLOCK_LEN: usize = 4096;
/// More than will be measured: reallocation must not take time from the measurement.
const LATENCIES: usize = 1 << 20;
/// The most that one call reads from the socket.
const BUFFER: usize = 64 << 10;

/// The measured server, the processes whose processor time counts, and the load's processor.
#[derive(Clone, Copy)]
pub(super) struct CpuSetup<'a> {
    pub(super) servers: &'a [u32],
    pub(super) load_cpu: usize,
}

/// The result of a client's run.
pub(super) struct ClientRun {
    latencies: Vec<Duration>,
    depth: u32,
    /// Processor time of the servers.
    server_cpu_time: Duration,
}

impl ClientRun {
    /// How many commands were answered.
    pub(super) fn count(&self) -> usize {
        self.latencies.len()
    }

    /// The overall rate and the median latency: on a busy machine the client sometimes loses its
    /// processor.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub(super) fn figures(mut self) -> Figures {
        let count = self.latencies.len() as f64;
        let sum = self.latencies.iter().sum::<Duration>().as_secs_f64();
        self.latencies.sort_unstable();
        let median = self.latencies.get(self.latencies.len() / 2).copied().unwrap_or_default();
        Figures {
            per_second: count * f64::from(self.depth) / sum,
            latency_us: median.as_secs_f64() * 1e6,
            server_us: self.server_cpu_time.as_secs_f64() * 1e6 / count,
        }
    }
}

/// Runs `load` against `unit`.
pub(super) fn run(setting: CpuSetup<'_>, unit: &IscsiLun, load: &Load) -> Result<ClientRun> {
    let mut client = Client::login(unit, load)?;
    let run =
        measure_loop(setting, load.depth, load.seconds, |latencies| client.poll_once(latencies))?;
    client.finish().context("what was asked last was not answered")?;
    Ok(run)
}

/// Repeats `step` for `seconds`; `step` records each command's latency.
pub(super) fn measure_loop(
    setting: CpuSetup<'_>,
    depth: u32,
    seconds: u64,
    step: impl FnMut(&mut Vec<Duration>) -> io::Result<()> + Send,
) -> Result<ClientRun> {
    let time = || setting.servers.iter().map(|&id| processor_time(id)).sum::<Result<Duration>>();
    let before = time()?;
    let latencies = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            pin_and_prioritise(setting.load_cpu, depth)?;
            run_for(Duration::from_secs(seconds), step)
        });
        load.join().map_err(|_| anyhow!("the client panicked"))?
    })?;
    Ok(ClientRun { latencies, depth, server_cpu_time: time()?.saturating_sub(before) })
}

/// Pins this thread to `cpu`. At depth 1 only one party works at a time: the load then gets
/// priority over pollers on that processor, where permitted, as if it had its own.
fn pin_and_prioritise(cpu: usize, depth: u32) -> Result<()> {
    let mut own = CpuSet::new();
    own.set(cpu);
    sched_setaffinity(None, &own).context("cannot choose a processor")?;
    if depth == 1 {
        let thread = gettid().as_raw_nonzero().to_string();
        let _ = Command::new("chrt").args(["--fifo", "--pid", "1", &thread]).output();
    }
    Ok(())
}

fn run_for(
    time: Duration,
    mut step: impl FnMut(&mut Vec<Duration>) -> io::Result<()>,
) -> Result<Vec<Duration>> {
    let mut latencies = Vec::with_capacity(LATENCIES);
    let begun = Instant::now();
    while begun.elapsed() < time {
        step(&mut latencies)?;
    }
    Ok(latencies)
}

/// A session with a fixed number of command slots.
struct Client {
    stream: BufReader<TcpStream>,
    /// The command header, except for the fields that change.
    header: [u8; HEADER_LEN],
    /// The data of each write; empty for reads.
    data: Vec<u8>,
    /// The bytes to send next.
    out: Vec<u8>,
    /// When the command of each slot was sent. The slot is the tag.
    sent_at: Vec<Instant>,
    free_slots: Vec<usize>,
    /// Number of the next command.
    number: u32,
    dice: SeededRng,
    slots: u64,
    blocks: u32,
}

impl Client {
    fn login(unit: &IscsiLun, load: &Load) -> Result<Self> {
        let lun = u8::try_from(unit.lun).context("an odd LUN")?;
        let name = "iqn.2026-01.test:lean";
        let mut session = Session::login(unit.portal, name, &unit.target, lun, 7)?;
        let blocks = u32::try_from(BLOCK_LEN / session.block_bytes()).context("odd blocks")?;
        let places = session.blocks() / u64::from(blocks);
        let (operation, bytes) = match load.operation {
            Operation::MinimalClientWrite => (WRITE_16, BLOCK_LEN),
            _ => (READ_16, 0),
        };
        let mut dice = SeededRng::new(3);
        let data = (0..bytes / 8).flat_map(|_| dice.next_u64().to_le_bytes()).collect::<Vec<_>>();
        let cdb = Session::cdb16(operation, 0, 0, blocks);
        let command = session.scsi_command(&cdb, bytes, BLOCK_LEN - bytes).with_data(&data);
        let depth = load.depth as usize;
        Ok(Self {
            number: command.word_at(24),
            header: command.header,
            stream: BufReader::with_capacity(BUFFER, session.into_stream()),
            out: Vec::with_capacity(depth * (HEADER_LEN + bytes)),
            data,
            sent_at: vec![Instant::now(); depth],
            free_slots: (0..depth).collect(),
            dice,
            slots: places,
            blocks,
        })
    }

    /// Sends a command for each free slot and receives the answers that have arrived, at least one.
    fn poll_once(&mut self, latencies: &mut Vec<Duration>) -> io::Result<()> {
        self.out.clear();
        let now = Instant::now();
        for slot in std::mem::take(&mut self.free_slots) {
            self.sent_at[slot] = now;
            self.send_command(slot);
        }
        self.stream.get_mut().write_all(&self.out)?;
        loop {
            let slot = self.receive_completion()?;
            let asked =
                self.sent_at.get(slot).ok_or_else(|| protocol_error("a response to no command"))?;
            latencies.push(asked.elapsed());
            self.free_slots.push(slot);
            if self.stream.buffer().len() < HEADER_LEN {
                return Ok(());
            }
        }
    }

    /// Receives the outstanding answers.
    fn finish(&mut self) -> io::Result<()> {
        while self.free_slots.len() < self.sent_at.len() {
            let slot = self.receive_completion()?;
            self.free_slots.push(slot);
        }
        Ok(())
    }

    fn send_command(&mut self, slot: usize) {
        let tag = u32::try_from(slot).unwrap_or(u32::MAX);
        let lba = self.dice.next_below(self.slots) * u64::from(self.blocks);
        self.header[16..20].copy_from_slice(&tag.to_be_bytes());
        self.header[24..28].copy_from_slice(&self.number.to_be_bytes());
        self.header[34..42].copy_from_slice(&lba.to_be_bytes());
        self.number = self.number.wrapping_add(1);
        self.out.extend_from_slice(&self.header);
        self.out.extend_from_slice(&self.data);
    }

    /// Receives PDUs until a command completes; returns its slot.
    fn receive_completion(&mut self) -> io::Result<usize> {
        let mut into = [0; BLOCK_LEN];
        loop {
            let mut header = [0; HEADER_LEN];
            self.stream.read_exact(&mut header)?;
            let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
            let into =
                into.get_mut(..length).ok_or_else(|| protocol_error("more data than asked for"))?;
            self.stream.read_exact(into)?;
            let ends = match header[0] & 0x3f {
                opcode::DATA_IN => header[1] & 1 != 0,
                opcode::SCSI_RESPONSE => true,
                other => return Err(protocol_error(format!("PDU {other:#x} in place of data"))),
            };
            if !ends {
                continue;
            }
            if header[3] != 0 {
                // The data begin with the length of the sense data (RFC 7143, 11.4.7).
                let refused =
                    ScsiFailure::new(self.header[32], header[3], into.get(2..).unwrap_or(&[]));
                // A unit attention (a path changed) also completes the slot's command.
                if !refused.is_unit_attention() {
                    return Err(io::Error::other(refused));
                }
            }
            let word = |at: usize| {
                u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
            };
            self.header[28..32].copy_from_slice(&word(24).wrapping_add(1).to_be_bytes());
            return Ok(word(16) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latency_is_the_median_and_the_rate_that_of_all() {
        let latencies = [10, 20, 70].map(Duration::from_micros).to_vec();
        let run = |depth| {
            let latencies = latencies.clone();
            ClientRun { latencies, depth, server_cpu_time: Duration::from_micros(30) }.figures()
        };
        assert!((run(1).latency_us - 20.0).abs() < 1e-6);
        assert!((run(1).per_second - 30_000.0).abs() < 1e-6);
        assert!((run(1).server_us - 10.0).abs() < 1e-6);
        assert!((run(2).per_second - 60_000.0).abs() < 1e-6);
    }
}
