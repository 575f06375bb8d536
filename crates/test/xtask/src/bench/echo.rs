//! The bare echo: the network of this machine with our runtime, and no storage at all.

use super::{
    LOAD_CPU, SERVER_CPU,
    lean::{BYTES, Setting, measured},
    measure::{Figures, Load, Operation, Sample},
};
use crate::{house::House, node::free_port, process::Daemon};
use anyhow::{Context, Result};
use probe::{PATIENCE, iscsi::dial};
use std::{
    io::{BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// What the echo calls a request.
const REQUEST: usize = 72;

/// Both ends as one program.
pub(super) struct Echo {
    program: PathBuf,
}

impl Echo {
    pub(super) fn new(program: PathBuf) -> Self {
        Self { program }
    }

    pub(super) fn measure(&self, depth: u32, seconds: u64) -> Result<Sample> {
        Ok(sample(depth, seconds, self.talk(depth, seconds, &[])?))
    }

    /// The same with more words for the program, which have the last say. Latency is the mean.
    pub(super) fn talk(&self, depth: u32, seconds: u64, more: &[String]) -> Result<Figures> {
        let mut command = Command::new(&self.program);
        command.args([format!("depth={depth}"), format!("seconds={seconds}")]);
        command.args([format!("server_cpu={SERVER_CPU}"), format!("client_cpu={LOAD_CPU}")]);
        let output = said(command.args(more))?;
        figures(&output, depth).with_context(|| format!("the echo printed no figures\n{output}"))
    }
}

/// Two ends that are where two nodes of a mirror are, and do what these do for a write, but for the writing: 4 KiB there, a
/// short answer back.
pub(super) struct Between<'a> {
    pub(super) program: &'a Path,
    /// Words before the program at either end.
    pub(super) prefixes: [&'a [String]; 2],
    pub(super) cpus: [usize; 2],
    pub(super) server: SocketAddr,
}

impl Between<'_> {
    pub(super) fn measure(&self, house: &House, seconds: u64) -> Result<Sample> {
        let sizes = [format!("request={BYTES}"), "reply=64".to_owned()];
        let mut command = self.end(1);
        command.args([format!("serve={}", self.server), format!("server_cpu={}", self.cpus[1])]);
        let _server = serving(house, "bare echo", command.args(&sizes), self.server)?;
        let mut command = self.end(0);
        // A node polls at either end of a session, as long as a server does.
        command.args([format!("to={}", self.server), "client_window_us=100".to_owned()]);
        command.args([format!("client_cpu={}", self.cpus[0]), format!("seconds={seconds}")]);
        let output = said(command.args(&sizes))?;
        let figures =
            middle(&output).with_context(|| format!("the echo printed no figures\n{output}"))?;
        Ok(sample(1, seconds, figures))
    }

    fn end(&self, which: usize) -> Command {
        let program = self.program.as_os_str().to_owned();
        let mut words = self.prefixes[which].iter().map(Into::into).chain([program]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command
    }
}

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
        Ok(Self { daemon: serving(house, "bare echo", &mut command, at)?, at })
    }

    /// Asks it as targets are asked: by the lean client.
    pub(super) fn measure(&self, seconds: u64) -> Result<Sample> {
        let mut stream = BufReader::new(dial(self.at, PATIENCE).context("cannot reach the echo")?);
        let (request, mut answer) = ([1; REQUEST], [0; BYTES]);
        let setting = Setting { servers: &[self.daemon.id()], load_cpu: LOAD_CPU };
        let run = measured(setting, 1, seconds, |latencies| {
            let asked = Instant::now();
            stream.get_mut().write_all(&request)?;
            stream.read_exact(&mut answer)?;
            latencies.push(asked.elapsed());
            Ok(())
        })?;
        Ok(sample(1, seconds, run.figures()))
    }
}

/// Starts a server and waits until it can be reached.
pub(super) fn serving(
    house: &House,
    name: &str,
    command: &mut Command,
    at: SocketAddr,
) -> Result<Daemon> {
    let mut daemon = Daemon::start(house.scratch(), name, command)?;
    daemon.wait_until(Duration::from_secs(10), || TcpStream::connect(at).is_ok())?;
    Ok(daemon)
}

fn said(command: &mut Command) -> Result<String> {
    let out = command.output().context("cannot run the echo")?;
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn sample(depth: u32, seconds: u64, figures: Figures) -> Sample {
    let load = Load { operation: Operation::Echo, depth, seconds };
    Sample::new("bare echo", "none", &load, figures)
}

/// `1 x 32: 412345 per second, p50 77.1 us, p99 99.0 us, server CPU 1.42 us each`: the number before `mark`.
fn number_before(output: &str, mark: &str) -> Option<f64> {
    output.split_once(mark)?.0.split_whitespace().next_back()?.parse().ok()
}

fn figures(output: &str, depth: u32) -> Option<Figures> {
    let per_second = number_before(output, " per second")?;
    let server_us = number_before(output, " us each")?;
    Some(Figures { per_second, latency_us: f64::from(depth) * 1e6 / per_second, server_us })
}

/// Of one at a time: the median, as of the lean client. Such a client does not see what its server spends.
fn middle(output: &str) -> Option<Figures> {
    let per_second = number_before(output, " per second")?;
    let latency_us = number_before(output, " us, p99")?;
    Some(Figures { per_second, latency_us, server_us: 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_prints_is_read() {
        let echo = "1 x 32: 412345 per second, p50 77.1 us, p99 99.0 us, server CPU 1.42 us each\n";
        let of_32 = figures(echo, 32).unwrap();
        assert!((of_32.per_second - 412_345.0).abs() < 0.5);
        assert!((of_32.server_us - 1.42).abs() < 1e-9);
        assert!((of_32.latency_us - 77.6).abs() < 0.1);
        assert!((middle(echo).unwrap().latency_us - 77.1).abs() < 1e-9);
        assert!(figures("", 1).is_none() && middle("").is_none());
    }
}
