//! `./run bench vhost`: what a virtual machine saves by using its node's volume over shared memory
//! instead of NVMe/TCP.
//!
//! One volume of a real node, in a file in memory, is read 4 KiB at a time: by `windrose bench`
//! over loopback, and by a guest's driver at the node's socket
//! (`crates/serve/attach/examples/ring.rs`). Both sleep until notified. The time a monitor takes to
//! wake a guest's processor is not included; a polling guest is measured separately.

use super::{
    BenchPlan, SERVER_CPU,
    generator::{self, command_on_load_cpu, run_and_parse},
    limit::{self, LimitCheck, write_limit_table},
    machine,
    results_page::{self, median, section_header},
};
use crate::{
    install,
    node::{Node, NodeOptions, Profile},
    run_context::RunContext,
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// The largest share of NVMe/TCP's time.
const MAX_TIME_RATIO: f64 = 0.5;
const SIZE: &str = "16MiB";
const VOLUME: &str = "near";
pub(super) const EXAMPLE: &str = "ring";

/// Medians of a repetition, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    nvme: f64,
    guest: f64,
    /// A guest that polls.
    polling_guest: f64,
}

/// The packages this benchmark needs.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NETWORK]
}

/// Measures and writes `bench/README.md` and `bench/results/vhost.json`.
pub(super) fn run(context: &RunContext, plan: BenchPlan) -> Result<()> {
    let processor = SERVER_CPU.to_string();
    let wishes = NodeOptions {
        profile: Profile::Dist,
        cores: 1,
        prefix: &["taskset", "-c", &processor],
        ..NodeOptions::default()
    };
    let mut node = Node::new(context, &context.memory_directory()?, "vhost", &wishes)?;
    node.start()?;
    let exported = node.create_with(VOLUME, SIZE, &["--protocols", "iscsi,nvme,vhost-user"])?;
    let shown = node.query(&["volume", "show", VOLUME])?;
    let socket = shown.pointer("/vhost_user/socket").and_then(Value::as_str);
    let socket = socket.context("the node names no socket")?;
    let uri = format!("nvme://{}/{}", node.nvme, exported.subsystem.nqn);
    fill(context, &uri)?;
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        context.display.begin_step(&format!("repetition {repetition} of {}", plan.repetitions));
        let nvme = measure_nvme(context, &uri, plan.seconds)?;
        let (guest, looking) = measure_vhost(context, socket, plan.seconds)?;
        samples.push(Sample { nvme, guest, polling_guest: looking });
    }
    node.stop()?;
    write(context, plan, &samples)
}

/// Fills the volume first: holes are read faster.
fn fill(context: &RunContext, uri: &str) -> Result<()> {
    let words = ["--rw=write", "--bs=128k", "--iodepth=4"].map(str::to_owned);
    generator::run_windrose_bench(context, &Profile::Dist.program(context), uri, &words, 10)
        .map(drop)
}

fn measure_nvme(context: &RunContext, uri: &str, seconds: u64) -> Result<f64> {
    let words = ["--rw=randread", "--bs=4k", "--iodepth=1", "--time_based", "--ramp_time=500ms"];
    let words = [&words.map(str::to_owned)[..], &[format!("--runtime={seconds}")]].concat();
    let program = Profile::Dist.program(context);
    let found = generator::run_windrose_bench(context, &program, uri, &words, seconds)?;
    let median = &found["jobs"][0]["read"]["lat_ns"]["percentile"]["50.000000"];
    Ok(median.as_f64().context("no median")? / 1e3)
}

fn measure_vhost(context: &RunContext, socket: &str, seconds: u64) -> Result<(f64, f64)> {
    let mut command = command_on_load_cpu(&Profile::Dist.example(context, EXAMPLE));
    command.args([socket, &(2 * seconds).to_string()]);
    let found = run_and_parse(context, EXAMPLE, &mut command, 2 * seconds)?;
    let of = |name: &str| found[name].as_f64().with_context(|| format!("no {name}"));
    Ok((of("sleeping_us")?, of("looking_us")?))
}

fn verdicts(samples: &[Sample]) -> Vec<LimitCheck> {
    let of = |pick: fn(&Sample) -> f64| median(samples.iter().map(pick).collect());
    let what = "latency beside NVMe/TCP, randread 4k, depth 1".to_owned();
    vec![LimitCheck::at_most(what, MAX_TIME_RATIO, of(|s| s.nvme), of(|s| s.guest))]
}

fn write(context: &RunContext, plan: BenchPlan, samples: &[Sample]) -> Result<()> {
    let machine = machine::describe(&machine::network_programs());
    let verdicts = verdicts(samples);
    let figures = limit::result_json(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    let mut text = section_header(&machine, plan) + "\n";
    write_limit_table(&mut text, &verdicts);
    text.push_str("\n| repetition | NVMe/TCP µs | guest µs | ratio | guest that looks µs |\n");
    text.push_str("|---:|---:|---:|---:|---:|\n");
    for (number, Sample { nvme, guest, polling_guest: looking }) in samples.iter().enumerate() {
        let (number, ratio) = (number + 1, guest / nvme);
        let _ = writeln!(text, "| {number} | {nvme:.1} | {guest:.1} | {ratio:.2} | {looking:.1} |");
    }
    text.push('\n');
    results_page::publish(context, "vhost", &figures, &text)?;
    context.pass(3 * samples.len(), &limit::summary(&verdicts));
    Ok(())
}

impl Sample {
    fn json(&self) -> Value {
        let Self { nvme, guest, polling_guest: looking } = self;
        json!({ "nvme_us": nvme, "guest_us": guest, "looking_us": looking })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_that_of_the_issue() {
        let held = |guest| {
            let samples = [40.0, 30.0, 36.0].map(|nvme| Sample { nvme, guest, polling_guest: 1.0 });
            verdicts(&samples)[0].is_held()
        };
        assert!(held(18.0) && !held(18.1));
    }
}
