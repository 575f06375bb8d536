//! One at a time, asked by the leanest client there is: a blocking socket that writes a request and reads its answer. The
//! bare echo and the targets get the very same client, so that what differs is the server.

use super::{
    LOAD_CPU, SERVER_CPU,
    measure::{Figures, Load, Operation, Sample},
};
use crate::{
    house::House,
    node::{free_port, processor_time},
    process::Daemon,
    server::Unit,
};
use anyhow::{Context, Result, anyhow};
use probe::{
    Disk, PATIENCE, fault,
    iscsi::{HEADER, READ_16, Session, dial, opcode},
    registers::Dice,
};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

const BYTES: usize = 4096;
/// What the echo calls a request.
const REQUEST: usize = 72;
/// More than there will be: making room must not take time from the measurement.
const LATENCIES: usize = 1 << 20;

/// The bare echo as a server of its own.
pub(super) struct EchoServer {
    daemon: Daemon,
    at: SocketAddr,
}

impl EchoServer {
    pub(super) fn start(house: &House, program: &Path) -> Result<Self> {
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), free_port()?);
        let mut command = Command::new(program);
        command.args([format!("serve={at}"), format!("server_cpu={SERVER_CPU}")]);
        let mut daemon = Daemon::start(house.scratch(), "bare echo", &mut command)?;
        daemon.wait_until(Duration::from_secs(10), || TcpStream::connect(at).is_ok())?;
        Ok(Self { daemon, at })
    }

    pub(super) fn measure(&self, seconds: u64) -> Result<Sample> {
        let mut stream = dial(self.at, PATIENCE).context("cannot reach the echo")?;
        let (request, mut answer) = ([1; REQUEST], [0; BYTES]);
        // In two parts, as the answers of a target.
        let (head, rest) = answer.split_at_mut(HEADER);
        let figures = one_at_a_time(self.daemon.id(), seconds, || {
            stream.write_all(&request)?;
            stream.read_exact(head)?;
            stream.read_exact(rest)
        })?;
        let load = Load { operation: Operation::Echo, depth: 1, seconds };
        Ok(Sample::new("bare echo", "none", &load, figures))
    }
}

/// Random reads of `unit`, one after the other.
pub(super) fn read(server: u32, unit: &Unit, seconds: u64) -> Result<Figures> {
    let lun = u8::try_from(unit.lun).context("an odd LUN")?;
    let mut session = Session::login(unit.portal, "iqn.2026-01.test:lean", &unit.target, lun, 7)?;
    let per_read = u32::try_from(BYTES / session.block_bytes()).context("odd blocks")?;
    let places = session.blocks() / u64::from(per_read);
    let cdb = Session::cdb16(READ_16, 0, 0, per_read);
    let command = session.scsi_command(&cdb, 0, BYTES);
    let (mut tag, mut number) = (command.word(16), command.word(24));
    let mut pdu = command.header;
    let mut stream = session.into_stream();
    let (mut dice, mut data) = (Dice::new(3), [0; BYTES]);
    one_at_a_time(server, seconds, || {
        let lba = dice.below(places) * u64::from(per_read);
        pdu[16..20].copy_from_slice(&tag.to_be_bytes());
        pdu[24..28].copy_from_slice(&number.to_be_bytes());
        pdu[34..42].copy_from_slice(&lba.to_be_bytes());
        (tag, number) = (tag.wrapping_add(1), number.wrapping_add(1));
        stream.write_all(&pdu)?;
        let status = answer(&mut stream, &mut data)?;
        pdu[28..32].copy_from_slice(&status.wrapping_add(1).to_be_bytes());
        Ok(())
    })
}

/// Receives the data and the status of one read; returns its StatSN.
fn answer(stream: &mut TcpStream, data: &mut [u8; BYTES]) -> io::Result<u32> {
    loop {
        let mut header = [0; HEADER];
        stream.read_exact(&mut header)?;
        let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
        let into = data.get_mut(..length).ok_or_else(|| fault("more data than asked for"))?;
        stream.read_exact(into)?;
        let ends = match header[0] & 0x3f {
            opcode::DATA_IN => header[1] & 1 != 0,
            opcode::SCSI_RESPONSE => true,
            other => return Err(fault(format!("PDU {other:#x} in place of data"))),
        };
        if ends && header[3] != 0 {
            return Err(fault(format!("SCSI status {:#x}", header[3])));
        }
        if ends {
            return Ok(u32::from_be_bytes([header[24], header[25], header[26], header[27]]));
        }
    }
}

/// Repeats `step` for `seconds` on the load's processor.
fn one_at_a_time(
    server: u32,
    seconds: u64,
    step: impl FnMut() -> io::Result<()> + Send,
) -> Result<Figures> {
    let before = processor_time(server)?;
    let latencies = std::thread::scope(|scope| {
        let load = scope.spawn(|| timed(Duration::from_secs(seconds), step));
        load.join().map_err(|_| anyhow!("the client panicked"))?
    })?;
    let spent = processor_time(server)?.saturating_sub(before);
    Ok(figures(latencies, spent))
}

fn timed(time: Duration, mut step: impl FnMut() -> io::Result<()>) -> Result<Vec<Duration>> {
    let mut own = CpuSet::new();
    own.set(LOAD_CPU);
    sched_setaffinity(None, &own).context("cannot choose a processor")?;
    let mut latencies = Vec::with_capacity(LATENCIES);
    let begun = Instant::now();
    while begun.elapsed() < time {
        let asked = Instant::now();
        step()?;
        latencies.push(asked.elapsed());
    }
    Ok(latencies)
}

/// The rate of all and the median time: a client on a busy machine loses its processor now and then.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn figures(mut latencies: Vec<Duration>, spent: Duration) -> Figures {
    let (count, sum) = (latencies.len() as f64, latencies.iter().sum::<Duration>());
    latencies.sort_unstable();
    let median = latencies.get(latencies.len() / 2).copied().unwrap_or_default();
    Figures {
        per_second: count / sum.as_secs_f64(),
        latency_us: median.as_secs_f64() * 1e6,
        server_us: spent.as_secs_f64() * 1e6 / count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latency_is_the_median_and_the_rate_that_of_all() {
        let latencies = [10, 20, 70].map(Duration::from_micros).to_vec();
        let figures = figures(latencies, Duration::from_micros(30));
        assert!((figures.latency_us - 20.0).abs() < 1e-6);
        assert!((figures.per_second - 30_000.0).abs() < 1e-6);
        assert!((figures.server_us - 10.0).abs() < 1e-6);
    }
}
