//! `./run bench vhost`: what a virtual machine saves that reaches its node's volume by shared memory, and not by NVMe/TCP.
//!
//! One volume of a real node, in a file in memory, is read 4 KiB at a time: by `windrose bench` over loopback, and by a guest's
//! driver at the node's socket (`crates/serve/attach/examples/ring.rs`), which sleeps until it is notified as the other does. How
//! long a monitor takes to wake a processor of its guest is not in it: what looks for answers itself is told beside it.

use super::{
    Plan, SERVER_CPU,
    generator::{self, pinned, said},
    limit::{self, Verdict, limits},
    machine,
    page::{self, head, median},
};
use crate::{
    house::House,
    install,
    node::{Node, Profile, Wishes},
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// Of the time that NVMe/TCP takes.
const HALF: f64 = 0.5;
const SIZE: &str = "16MiB";
const VOLUME: &str = "near";
pub(super) const EXAMPLE: &str = "ring";

/// Medians of a repetition, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    nvme: f64,
    guest: f64,
    /// A guest that does not sleep.
    looking: f64,
}

/// What must be installed.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NETWORK]
}

/// Measures and writes `bench/README.md` and `bench/results/vhost.json`.
pub(super) fn run(house: &House, plan: Plan) -> Result<()> {
    let processor = SERVER_CPU.to_string();
    let wishes = Wishes {
        profile: Profile::Release,
        cores: 1,
        prefix: &["taskset", "-c", &processor],
        ..Wishes::default()
    };
    let mut node = Node::new(house, &house.memory_directory()?, "vhost", &wishes)?;
    node.start()?;
    let exported = node.create_with(VOLUME, SIZE, &["--via", "both,vhost-user"])?;
    let shown = node.query(&["volume", "show", VOLUME])?;
    let socket = shown.pointer("/vhost_user/socket").and_then(Value::as_str);
    let socket = socket.context("the node names no socket")?;
    let uri = format!("nvme://{}/{}", node.nvme, exported.subsystem.nqn);
    fill(house, &uri)?;
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        house.display.working(&format!("repetition {repetition} of {}", plan.repetitions));
        let nvme = by_network(house, &uri, plan.seconds)?;
        let (guest, looking) = by_memory(house, socket, plan.seconds)?;
        samples.push(Sample { nvme, guest, looking });
    }
    node.stop()?;
    write(house, plan, &samples)
}

/// What is read has been written: holes are read faster.
fn fill(house: &House, uri: &str) -> Result<()> {
    let words = ["--rw=write", "--bs=128k", "--iodepth=4"].map(str::to_owned);
    generator::ours(house, &Profile::Release.program(house), uri, &words, 10).map(drop)
}

fn by_network(house: &House, uri: &str, seconds: u64) -> Result<f64> {
    let words = ["--rw=randread", "--bs=4k", "--iodepth=1", "--time_based", "--ramp_time=500ms"];
    let words = [&words.map(str::to_owned)[..], &[format!("--runtime={seconds}")]].concat();
    let program = Profile::Release.program(house);
    let found = generator::ours(house, &program, uri, &words, seconds)?;
    let median = &found["jobs"][0]["read"]["lat_ns"]["percentile"]["50.000000"];
    Ok(median.as_f64().context("no median")? / 1e3)
}

fn by_memory(house: &House, socket: &str, seconds: u64) -> Result<(f64, f64)> {
    let mut command = pinned(&Profile::Release.example(house, EXAMPLE));
    command.args([socket, &(2 * seconds).to_string()]);
    let found = said(house, EXAMPLE, &mut command, 2 * seconds)?;
    let of = |name: &str| found[name].as_f64().with_context(|| format!("no {name}"));
    Ok((of("sleeping_us")?, of("looking_us")?))
}

fn verdicts(samples: &[Sample]) -> Vec<Verdict> {
    let of = |pick: fn(&Sample) -> f64| median(samples.iter().map(pick).collect());
    let what = "latency beside NVMe/TCP, randread 4k, depth 1".to_owned();
    vec![Verdict::at_most(what, HALF, of(|s| s.nvme), of(|s| s.guest))]
}

fn write(house: &House, plan: Plan, samples: &[Sample]) -> Result<()> {
    let machine = machine::describe(&machine::network());
    let verdicts = verdicts(samples);
    let figures = limit::figures(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    let mut text = head(&machine, plan) + "\n";
    limits(&mut text, &verdicts);
    text.push_str("\n| repetition | NVMe/TCP µs | guest µs | ratio | guest that looks µs |\n");
    text.push_str("|---:|---:|---:|---:|---:|\n");
    for (number, Sample { nvme, guest, looking }) in samples.iter().enumerate() {
        let (number, ratio) = (number + 1, guest / nvme);
        let _ = writeln!(text, "| {number} | {nvme:.1} | {guest:.1} | {ratio:.2} | {looking:.1} |");
    }
    text.push('\n');
    page::publish(house, "vhost", &figures, &text)?;
    house.pass(3 * samples.len(), &limit::tally(&verdicts));
    Ok(())
}

impl Sample {
    fn json(&self) -> Value {
        let Self { nvme, guest, looking } = self;
        json!({ "nvme_us": nvme, "guest_us": guest, "looking_us": looking })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_that_of_the_issue() {
        let held = |guest| {
            let samples = [40.0, 30.0, 36.0].map(|nvme| Sample { nvme, guest, looking: 1.0 });
            verdicts(&samples)[0].is_held()
        };
        assert!(held(18.0) && !held(18.1));
    }
}
