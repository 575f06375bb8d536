//! One measurement: the client counts operations, the kernel the processor time of the server.

use super::{
    LOAD_CPU,
    figures::{Figures, Load, Operation},
    minimal_client::{self, CpuSetup},
};
use crate::{
    node::processor_time, process::FinishedProcess, run_context::RunContext, server::IscsiLun,
};
use anyhow::{Context, Result};
use std::{
    process::Command,
    time::{Duration, Instant},
};

/// 4 KiB, in the 512-byte blocks that `iscsi-perf` counts in.
const BLOCKS: &str = "8";
/// Writes that take about a second, for each depth: `qemu-img bench` needs a number, not a time.
const WRITES_PER_SECOND: [(u32, u64); 2] = [(1, 10_000), (32, 40_000)];

/// Runs `load` against `unit` and measures the processor time of `server`.
pub(super) fn run(
    context: &RunContext,
    server: u32,
    unit: &IscsiLun,
    load: &Load,
) -> Result<Figures> {
    if load.operation == Operation::MinimalClientRead {
        let setting = CpuSetup { servers: &[server], load_cpu: LOAD_CPU };
        return Ok(minimal_client::run(setting, unit, load)?.figures());
    }
    let before = processor_time(server)?;
    let begun = Instant::now();
    let (count, took) = match load.operation {
        Operation::Write => write(context, unit, load)?,
        _ => random_read(context, unit, load, begun)?,
    };
    let spent = processor_time(server)?.saturating_sub(before);
    let per_second = count / took.as_secs_f64();
    Ok(Figures {
        per_second,
        latency_us: f64::from(load.depth) * 1e6 / per_second,
        server_us: spent.as_secs_f64() * 1e6 / count,
    })
}

fn pinned(program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &LOAD_CPU.to_string(), program]);
    command
}

/// Runs `iscsi-perf`: its average rate and its run time.
fn random_read(
    context: &RunContext,
    unit: &IscsiLun,
    load: &Load,
    begun: Instant,
) -> Result<(f64, Duration)> {
    let (depth, seconds) = (load.depth.to_string(), load.seconds.to_string());
    let mut command = pinned("iscsi-perf");
    command.args(["-m", &depth, "-b", BLOCKS, "-r", "-t", &seconds]).arg(unit.url());
    let limit = Duration::from_secs(load.seconds + 30);
    let output =
        context.run("iscsi-perf", &mut command, limit).and_then(FinishedProcess::success_output)?;
    let took = begun.elapsed();
    let rate =
        last_average(&output).with_context(|| format!("iscsi-perf printed no rate\n{output}"))?;
    let measured = Duration::from_secs(load.seconds).min(took);
    Ok((rate * measured.as_secs_f64(), measured))
}

/// The last `iops average N` of its output, which overwrites itself with carriage returns.
fn last_average(output: &str) -> Option<f64> {
    let (_, after) = output.rsplit_once("iops average ")?;
    after.split_whitespace().next()?.parse().ok()
}

/// Runs `qemu-img bench -w`: a number of writes and the time they took.
fn write(context: &RunContext, unit: &IscsiLun, load: &Load) -> Result<(f64, Duration)> {
    let rate = WRITES_PER_SECOND
        .iter()
        .find(|(depth, _)| *depth == load.depth)
        .map_or(10_000, |(_, n)| *n);
    let count = rate * load.seconds;
    let mut command = pinned("qemu-img");
    command.args(["bench", "-t", "none", "-w", "-f", "raw", "-s", "4096"]);
    command.args(["-c", &count.to_string(), "-d", &load.depth.to_string()]).arg(unit.qemu_url());
    let limit = Duration::from_secs(load.seconds * 20 + 60);
    let output = context
        .run("qemu-img bench", &mut command, limit)
        .and_then(FinishedProcess::success_output)?;
    let seconds =
        completed_in(&output).with_context(|| format!("qemu-img printed no time\n{output}"))?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    Ok((count as f64, Duration::from_secs_f64(seconds)))
}

fn completed_in(output: &str) -> Option<f64> {
    let (_, after) = output.rsplit_once("Run completed in ")?;
    after.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_outputs_are_read() {
        let perf = "00:00:01 - lba 4, iops current 32, iops average 32077 (125 MB/s)\riops average 33180 (129 MB/s) \n\nfinished.\n";
        assert_eq!(last_average(perf), Some(33180.0));
        assert_eq!(completed_in("Sending 2\nRun completed in 0.636 seconds.\n"), Some(0.636));
    }
}
