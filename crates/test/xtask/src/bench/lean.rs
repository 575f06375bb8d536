//! Random reads and writes by the leanest client there is: a blocking socket on which a few commands are kept in flight.
//! What is asked and answered with one call is what came together. One at a time, it writes a request and reads its answer;
//! the bare echo and the targets get the very same client then, so that what differs is the server.

use super::measure::{Figures, Load, Operation};
use crate::{node::processor_time, server::Unit};
use anyhow::{Context, Result, anyhow};
use probe::{
    Disk, fault,
    iscsi::{HEADER, READ_16, Refused, Session, WRITE_16, opcode},
    registers::Dice,
};
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use std::{
    io::{self, BufReader, Read, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

pub(super) const BYTES: usize = 4096;
/// More than there will be: making room must not take time from the measurement.
const LATENCIES: usize = 1 << 20;
/// What is read from the socket with one call at most.
const BUFFER: usize = 64 << 10;

/// Who serves, all whose processor time counts, and where the load runs.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub(super) servers: &'a [u32],
    pub(super) load_cpu: usize,
}

/// What a client saw.
pub(super) struct Run {
    latencies: Vec<Duration>,
    depth: u32,
    /// Processor time of the servers.
    spent: Duration,
}

impl Run {
    /// How many commands were answered.
    pub(super) fn count(&self) -> usize {
        self.latencies.len()
    }

    /// The rate of all and the median time: a client on a busy machine loses its processor now and then.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub(super) fn figures(mut self) -> Figures {
        let count = self.latencies.len() as f64;
        let sum = self.latencies.iter().sum::<Duration>().as_secs_f64();
        self.latencies.sort_unstable();
        let median = self.latencies.get(self.latencies.len() / 2).copied().unwrap_or_default();
        Figures {
            per_second: count * f64::from(self.depth) / sum,
            latency_us: median.as_secs_f64() * 1e6,
            server_us: self.spent.as_secs_f64() * 1e6 / count,
        }
    }
}

/// Runs `load` against `unit`.
pub(super) fn run(setting: Setting<'_>, unit: &Unit, load: &Load) -> Result<Run> {
    let mut client = Client::login(unit, load)?;
    let run = measured(setting, load.depth, load.seconds, |latencies| client.turn(latencies))?;
    client.finish().context("what was asked last was not answered")?;
    Ok(run)
}

/// Repeats `step` for `seconds`; it notes how long each command took.
pub(super) fn measured(
    setting: Setting<'_>,
    depth: u32,
    seconds: u64,
    step: impl FnMut(&mut Vec<Duration>) -> io::Result<()> + Send,
) -> Result<Run> {
    let time = || setting.servers.iter().map(|&id| processor_time(id)).sum::<Result<Duration>>();
    let before = time()?;
    let latencies = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            settle(setting.load_cpu, depth)?;
            timed(Duration::from_secs(seconds), step)
        });
        load.join().map_err(|_| anyhow!("the client panicked"))?
    })?;
    Ok(Run { latencies, depth, spent: time()?.saturating_sub(before) })
}

/// Gives this thread its processor. One command at a time is the work of one party at a time: the load then goes before
/// whoever polls there, where that is permitted, as if it had a processor of its own.
fn settle(cpu: usize, depth: u32) -> Result<()> {
    let mut own = CpuSet::new();
    own.set(cpu);
    sched_setaffinity(None, &own).context("cannot choose a processor")?;
    if depth == 1 {
        let thread = gettid().as_raw_nonzero().to_string();
        let _ = Command::new("chrt").args(["--fifo", "--pid", "1", &thread]).output();
    }
    Ok(())
}

fn timed(
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

/// A session with as many commands in flight as it has places.
struct Client {
    stream: BufReader<TcpStream>,
    /// The command, but for what differs from one to the next.
    header: [u8; HEADER],
    /// What each of them writes; nothing if it reads.
    data: Vec<u8>,
    /// What is to be sent next.
    out: Vec<u8>,
    /// When the command of each place was sent. Its place is its tag.
    asked: Vec<Instant>,
    free: Vec<usize>,
    /// Number of the next command.
    number: u32,
    dice: Dice,
    places: u64,
    blocks: u32,
}

impl Client {
    fn login(unit: &Unit, load: &Load) -> Result<Self> {
        let lun = u8::try_from(unit.lun).context("an odd LUN")?;
        let name = "iqn.2026-01.test:lean";
        let mut session = Session::login(unit.portal, name, &unit.target, lun, 7)?;
        let blocks = u32::try_from(BYTES / session.block_bytes()).context("odd blocks")?;
        let places = session.blocks() / u64::from(blocks);
        let (operation, bytes) = match load.operation {
            Operation::LeanWrite => (WRITE_16, BYTES),
            _ => (READ_16, 0),
        };
        let mut dice = Dice::new(3);
        let data = (0..bytes / 8).flat_map(|_| dice.roll().to_le_bytes()).collect::<Vec<_>>();
        let cdb = Session::cdb16(operation, 0, 0, blocks);
        let command = session.scsi_command(&cdb, bytes, BYTES - bytes).with_data(&data);
        let depth = load.depth as usize;
        Ok(Self {
            number: command.word(24),
            header: command.header,
            stream: BufReader::with_capacity(BUFFER, session.into_stream()),
            out: Vec::with_capacity(depth * (HEADER + bytes)),
            data,
            asked: vec![Instant::now(); depth],
            free: (0..depth).collect(),
            dice,
            places,
            blocks,
        })
    }

    /// Sends a command for each place that is free, and takes the answers that have come, one at least.
    fn turn(&mut self, latencies: &mut Vec<Duration>) -> io::Result<()> {
        self.out.clear();
        let now = Instant::now();
        for place in std::mem::take(&mut self.free) {
            self.asked[place] = now;
            self.ask(place);
        }
        self.stream.get_mut().write_all(&self.out)?;
        loop {
            let place = self.answer()?;
            let asked = self.asked.get(place).ok_or_else(|| fault("an answer to nothing"))?;
            latencies.push(asked.elapsed());
            self.free.push(place);
            if self.stream.buffer().len() < HEADER {
                return Ok(());
            }
        }
    }

    /// Takes the answers that are due.
    fn finish(&mut self) -> io::Result<()> {
        while self.free.len() < self.asked.len() {
            let place = self.answer()?;
            self.free.push(place);
        }
        Ok(())
    }

    fn ask(&mut self, place: usize) {
        let tag = u32::try_from(place).unwrap_or(u32::MAX);
        let lba = self.dice.below(self.places) * u64::from(self.blocks);
        self.header[16..20].copy_from_slice(&tag.to_be_bytes());
        self.header[24..28].copy_from_slice(&self.number.to_be_bytes());
        self.header[34..42].copy_from_slice(&lba.to_be_bytes());
        self.number = self.number.wrapping_add(1);
        self.out.extend_from_slice(&self.header);
        self.out.extend_from_slice(&self.data);
    }

    /// Receives what ends a command; gives its place.
    fn answer(&mut self) -> io::Result<usize> {
        let mut into = [0; BYTES];
        loop {
            let mut header = [0; HEADER];
            self.stream.read_exact(&mut header)?;
            let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
            let into = into.get_mut(..length).ok_or_else(|| fault("more data than asked for"))?;
            self.stream.read_exact(into)?;
            let ends = match header[0] & 0x3f {
                opcode::DATA_IN => header[1] & 1 != 0,
                opcode::SCSI_RESPONSE => true,
                other => return Err(fault(format!("PDU {other:#x} in place of data"))),
            };
            if !ends {
                continue;
            }
            if header[3] != 0 {
                // The data begin with the length of the sense data (RFC 7143, 11.4.7).
                let refused =
                    Refused::new(self.header[32], header[3], into.get(2..).unwrap_or(&[]));
                // What tells of a change of the paths ends the turn of its place, as an answer does.
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
            Run { latencies, depth, spent: Duration::from_micros(30) }.figures()
        };
        assert!((run(1).latency_us - 20.0).abs() < 1e-6);
        assert!((run(1).per_second - 30_000.0).abs() < 1e-6);
        assert!((run(1).server_us - 10.0).abs() < 1e-6);
        assert!((run(2).per_second - 60_000.0).abs() < 1e-6);
    }
}
