//! `./run bench fio`: our load generator against fio on the same target. Both must measure the
//! same.
//!
//! The two run one after the other, in the opposite order in the next repetition, on the same
//! processor. A target is anything both can reach; [`targets`] lists them. [`table`] compares the
//! results.

mod table;
mod targets;

use super::{
    BenchPlan,
    generator::{self, command_on_load_cpu, run_and_parse},
    machine, results_page,
};
use crate::{install, node::Profile, run_context::RunContext};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::Path;
use targets::{Target, Targets};

/// Size of the data read and written, in MiB.
const MIB: u64 = 256;

/// The packages this benchmark needs.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NBD, install::NETWORK, install::LOOP]
}

/// A load, in fio's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    rw: &'static str,
    bs: &'static str,
    depth: u32,
}

const fn load(rw: &'static str, bs: &'static str, depth: u32) -> Load {
    Load { rw, bs, depth }
}

/// The result of one run.
#[derive(Clone, Copy, Debug)]
struct Figures {
    per_second: f64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    /// Processor time of the generator for each operation.
    cpu_us: f64,
}

struct Sample {
    target: &'static str,
    load: Load,
    generator: &'static str,
    figures: Figures,
}

/// Measures and writes `bench/README.md` and `bench/results/fio.json`.
pub(super) fn run(context: &RunContext, plan: BenchPlan) -> Result<()> {
    let targets = Targets::new(context)?;
    let program = Profile::Dist.program(context);
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        for target in &targets.all {
            for load in target.loads {
                let mut order = ["fio", "windrose"];
                if repetition % 2 == 0 {
                    order.reverse();
                }
                for who in order {
                    let Load { rw, bs, depth } = *load;
                    context
                        .display
                        .begin_step(&format!("{turn}: {who}, {}, {rw} {bs} {depth}", target.name));
                    let figures = match who {
                        "fio" => run_fio(context, target, *load, plan.seconds),
                        _ => run_windrose_bench(context, &program, target, *load, plan.seconds),
                    };
                    let figures = figures
                        .with_context(|| format!("{who}, {}, {rw} {bs} {depth}", target.name))?;
                    samples.push(Sample {
                        target: target.name,
                        load: *load,
                        generator: who,
                        figures,
                    });
                }
            }
        }
        context.display.line(&format!("  {turn} done"));
    }
    write(context, plan, &targets.all, &samples)
}

fn fio_arguments(load: Load, seconds: u64) -> Vec<String> {
    let Load { rw, bs, depth } = load;
    vec![
        format!("--rw={rw}"),
        format!("--bs={bs}"),
        format!("--iodepth={depth}"),
        format!("--size={MIB}m"),
        "--direct=1".to_owned(),
        "--time_based".to_owned(),
        format!("--runtime={seconds}"),
        "--ramp_time=300ms".to_owned(),
    ]
}

fn run_windrose_bench(
    context: &RunContext,
    program: &Path,
    target: &Target,
    load: Load,
    seconds: u64,
) -> Result<Figures> {
    let found = generator::run_windrose_bench(
        context,
        program,
        &target.windrose_target,
        &fio_arguments(load, seconds),
        seconds,
    )?;
    let cpu_us = found["client_cpu"]["us_per_io"].as_f64().context("no processor time")?;
    parse_figures(&found, load, cpu_us)
}

fn run_fio(context: &RunContext, target: &Target, load: Load, seconds: u64) -> Result<Figures> {
    let mut command = command_on_load_cpu(Path::new("fio"));
    command.args(["--name=bench", "--output-format=json", "--lat_percentiles=1"]);
    command.args(&target.fio_arguments).args(fio_arguments(load, seconds));
    let found = run_and_parse(context, "fio", &mut command, seconds)?;
    let job = &found["jobs"][0];
    let of = |name: &str| job[name].as_f64().with_context(|| format!("fio tells no {name}"));
    let share = (of("usr_cpu")? + of("sys_cpu")?) / 100.0;
    let figures = parse_figures(&found, load, 0.0)?;
    // The share of one thread over its whole run.
    Ok(Figures { cpu_us: share * 1e6 / figures.per_second, ..figures })
}

/// Both programs use fio's names.
fn parse_figures(found: &Value, load: Load, cpu_us: f64) -> Result<Figures> {
    let direction = if load.rw.contains("write") { "write" } else { "read" };
    let moved = &found["jobs"][0][direction];
    let number = |value: &Value| value.as_f64().context("a figure is missing");
    let took = &moved["lat_ns"];
    Ok(Figures {
        per_second: number(&moved["iops"])?,
        mean_us: number(&took["mean"])? / 1e3,
        p50_us: number(&took["percentile"]["50.000000"])? / 1e3,
        p99_us: number(&took["percentile"]["99.000000"])? / 1e3,
        cpu_us,
    })
}

fn write(
    context: &RunContext,
    plan: BenchPlan,
    targets: &[Target],
    samples: &[Sample],
) -> Result<()> {
    let machine = machine::describe(&machine::fio_programs());
    let figures = json!({
        "machine": machine,
        "repetitions": plan.repetitions,
        "seconds": plan.seconds,
        "samples": samples.iter().map(Sample::json).collect::<Vec<_>>(),
    });
    results_page::publish(
        context,
        "fio",
        &figures,
        &table::section(&machine, plan, targets, samples),
    )?;
    let count = samples.len();
    context.pass(count, &format!("{count} measurements, written to {}", results_page::PAGE));
    Ok(())
}

impl Sample {
    fn json(&self) -> Value {
        let Load { rw, bs, depth } = self.load;
        let Figures { per_second, mean_us, p50_us, p99_us, cpu_us } = self.figures;
        json!({
            "target": self.target, "who": self.generator, "rw": rw, "bs": bs, "depth": depth,
            "per_second": per_second, "mean_us": mean_us, "p50_us": p50_us, "p99_us": p99_us,
            "cpu_us": cpu_us,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_fios_names() {
        let found = json!({ "jobs": [{ "read": { "iops": 1000.5, "lat_ns": {
            "mean": 2000.0, "percentile": { "50.000000": 1500, "99.000000": 9000 },
        } } }] });
        let figures = parse_figures(&found, load("randread", "4k", 1), 1.0).unwrap();
        assert!((figures.per_second - 1000.5).abs() < 1e-9);
        assert!((figures.p50_us - 1.5).abs() < 1e-9 && (figures.mean_us - 2.0).abs() < 1e-9);
        assert!((figures.p99_us - 9.0).abs() < 1e-9);
        let wrote = parse_figures(&found, load("write", "4k", 1), 1.0);
        assert!(wrote.is_err(), "it wrote nothing");
    }
}
