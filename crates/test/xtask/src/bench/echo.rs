//! The bare echo: this machine's network with our runtime, without storage.

use super::{
    LOAD_CPU, SERVER_CPU,
    figures::{Figures, Load, Operation, Sample},
    minimal_client::{BLOCK_LEN, CpuSetup, measure_loop},
};
use crate::{node::free_port, process::Daemon, run_context::RunContext};
use anyhow::{Context, Result};
use probe::{DEFAULT_TIMEOUT, iscsi::connect_with_timeouts};
use std::{
    io::{BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Length of an echo request.
const ECHO_REQUEST_LEN: usize = 72;

/// Client and server in one program.
pub(super) struct EchoPair {
    program: PathBuf,
}

impl EchoPair {
    pub(super) fn new(program: PathBuf) -> Self {
        Self { program }
    }

    pub(super) fn measure(&self, depth: u32, seconds: u64) -> Result<Sample> {
        Ok(sample(depth, seconds, self.run_with_args(depth, seconds, &[])?))
    }

    /// Like [`Self::measure`], with further arguments, which take precedence. Latency is the mean.
    pub(super) fn run_with_args(
        &self,
        depth: u32,
        seconds: u64,
        more: &[String],
    ) -> Result<Figures> {
        let mut command = Command::new(&self.program);
        command.args([format!("depth={depth}"), format!("seconds={seconds}")]);
        command.args([format!("server_cpu={SERVER_CPU}"), format!("client_cpu={LOAD_CPU}")]);
        let output = run_and_read(command.args(more))?;
        figures(&output, depth).with_context(|| format!("the echo printed no figures\n{output}"))
    }
}

/// Two ends placed like two nodes of a mirror, doing what those do for a write except the write
/// itself: 4 KiB one way, a short answer back.
pub(super) struct NodeToNodeEcho<'a> {
    pub(super) program: &'a Path,
    /// The command prefix at either end.
    pub(super) prefixes: [&'a [String]; 2],
    pub(super) cpus: [usize; 2],
    pub(super) server: SocketAddr,
}

impl NodeToNodeEcho<'_> {
    pub(super) fn measure(&self, context: &RunContext, seconds: u64) -> Result<Sample> {
        let sizes = [format!("request={BLOCK_LEN}"), "reply=64".to_owned()];
        let mut command = self.end(1);
        command.args([format!("serve={}", self.server), format!("server_cpu={}", self.cpus[1])]);
        let _server = start_server(context, "bare echo", command.args(&sizes), self.server)?;
        let mut command = self.end(0);
        // A node polls at either end of a session, as long as a server does.
        command.args([format!("to={}", self.server), "client_window_us=100".to_owned()]);
        command.args([format!("client_cpu={}", self.cpus[0]), format!("seconds={seconds}")]);
        let output = run_and_read(command.args(&sizes))?;
        let figures = median_figures(&output)
            .with_context(|| format!("the echo printed no figures\n{output}"))?;
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

/// The bare echo as a separate server.
pub(super) struct EchoServer {
    daemon: Daemon,
    at: SocketAddr,
}

impl EchoServer {
    pub(super) fn start(context: &RunContext, program: &Path) -> Result<Self> {
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), free_port()?);
        let mut command = Command::new(program);
        command.args([format!("serve={at}"), format!("server_cpu={SERVER_CPU}")]);
        Ok(Self { daemon: start_server(context, "bare echo", &mut command, at)?, at })
    }

    /// Measures it as targets are measured: with the minimal client.
    pub(super) fn measure(&self, seconds: u64) -> Result<Sample> {
        let mut stream = BufReader::new(
            connect_with_timeouts(self.at, DEFAULT_TIMEOUT).context("cannot reach the echo")?,
        );
        let (request, mut answer) = ([1; ECHO_REQUEST_LEN], [0; BLOCK_LEN]);
        let setting = CpuSetup { servers: &[self.daemon.id()], load_cpu: LOAD_CPU };
        let run = measure_loop(setting, 1, seconds, |latencies| {
            let asked = Instant::now();
            stream.get_mut().write_all(&request)?;
            stream.read_exact(&mut answer)?;
            latencies.push(asked.elapsed());
            Ok(())
        })?;
        Ok(sample(1, seconds, run.figures()))
    }
}

/// Starts a server and waits until it accepts connections.
pub(super) fn start_server(
    context: &RunContext,
    name: &str,
    command: &mut Command,
    at: SocketAddr,
) -> Result<Daemon> {
    let mut daemon = Daemon::start(context.scratch(), name, command)?;
    daemon.wait_until(Duration::from_secs(10), || TcpStream::connect(at).is_ok())?;
    Ok(daemon)
}

fn run_and_read(command: &mut Command) -> Result<String> {
    let out = command.output().context("cannot run the echo")?;
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn sample(depth: u32, seconds: u64, figures: Figures) -> Sample {
    let load = Load { operation: Operation::Echo, depth, seconds };
    Sample::new("bare echo", "none", &load, figures)
}

/// The number before `mark` in a line such as
/// `1 x 32: 412345 per second, p50 77.1 us, p99 99.0 us, server CPU 1.42 us each`.
fn number_before(output: &str, mark: &str) -> Option<f64> {
    output.split_once(mark)?.0.split_whitespace().next_back()?.parse().ok()
}

fn figures(output: &str, depth: u32) -> Option<Figures> {
    let per_second = number_before(output, " per second")?;
    let server_us = number_before(output, " us each")?;
    Some(Figures { per_second, latency_us: f64::from(depth) * 1e6 / per_second, server_us })
}

/// Figures at depth 1: the median, as with the minimal client. The server's time is unknown here.
fn median_figures(output: &str) -> Option<Figures> {
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
        assert!((median_figures(echo).unwrap().latency_us - 77.1).abs() < 1e-9);
        assert!(figures("", 1).is_none() && median_figures("").is_none());
    }
}
