//! `./run bench fio`: our load generator beside fio on the same thing. What they measure has to be the same.
//!
//! One measures, then the other, and in the next repetition the other way round; both on the same processor. A target is what
//! both can reach: another one is one more line of [`targets`].

use super::{
    Plan, SERVER_CPU,
    generator::{self, pinned, said},
    machine, page,
};
use crate::{house::House, install, node::Profile, process::Daemon};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    fmt::Write as _, fs, os::unix::net::UnixStream, path::Path, process::Command, time::Duration,
};

/// Size of what is read and written, in MiB.
const MIB: u64 = 256;

/// What is to be agreed on, in hundredths.
const AGREED: f64 = 3.0;

/// What must be installed.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NBD, install::NETWORK]
}

/// What both reach.
struct Target {
    name: &'static str,
    /// As `windrose bench` calls it.
    ours: String,
    /// What tells fio of it.
    theirs: Vec<String>,
    loads: &'static [Load],
}

/// A load, in fio's words.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Load {
    rw: &'static str,
    bs: &'static str,
    depth: u32,
}

const fn load(rw: &'static str, bs: &'static str, depth: u32) -> Load {
    Load { rw, bs, depth }
}

const DISK: &[Load] = &[
    load("randread", "4k", 1),
    load("randread", "4k", 32),
    load("randwrite", "4k", 1),
    load("randwrite", "4k", 32),
    load("read", "128k", 8),
    load("write", "128k", 8),
];

/// In memory nothing is ever in flight: neither asks for more than one thing at a time.
const MEMORY: &[Load] =
    &[load("randread", "4k", 1), load("randwrite", "4k", 1), load("read", "128k", 1)];

/// What one run showed.
#[derive(Clone, Copy, Debug)]
struct Figures {
    per_second: f64,
    p50_us: f64,
    mean_us: f64,
    /// Processor time of the generator for one operation.
    cpu_us: f64,
}

struct Sample {
    target: &'static str,
    load: Load,
    who: &'static str,
    figures: Figures,
}

/// Measures and writes `bench/README.md` and `bench/results/fio.json`.
pub(super) fn run(house: &House, plan: Plan) -> Result<()> {
    let memory = house.memory_directory()?;
    let socket = memory.join("nbd.sock");
    let _served = export(house, &socket)?;
    let targets = targets(house, &memory, &socket)?;
    let program = Profile::Release.program(house);
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        for target in &targets {
            for load in target.loads {
                let mut order = ["fio", "windrose"];
                if repetition % 2 == 0 {
                    order.reverse();
                }
                for who in order {
                    let Load { rw, bs, depth } = *load;
                    house
                        .display
                        .working(&format!("{turn}: {who}, {}, {rw} {bs} {depth}", target.name));
                    let figures = match who {
                        "fio" => theirs(house, target, *load, plan.seconds),
                        _ => ours(house, &program, target, *load, plan.seconds),
                    };
                    let figures = figures
                        .with_context(|| format!("{who}, {}, {rw} {bs} {depth}", target.name))?;
                    samples.push(Sample { target: target.name, load: *load, who, figures });
                }
            }
        }
        house.display.line(&format!("  {turn} done"));
    }
    write(house, plan, &targets, &samples)
}

/// Has somebody else's server export memory by NBD, on the processor of servers.
fn export(house: &House, socket: &Path) -> Result<Daemon> {
    let mut command = Command::new("taskset");
    command.args(["-c", &SERVER_CPU.to_string(), "nbdkit", "--foreground", "--unix"]);
    command.arg(socket).args(["memory", &format!("{MIB}M")]);
    let mut nbdkit = Daemon::start(house.scratch(), "nbdkit", &mut command)?;
    nbdkit.wait_until(Duration::from_secs(10), || UnixStream::connect(socket).is_ok())?;
    Ok(nbdkit)
}

/// A file on the disk beside the build, one in memory, and the export.
fn targets(house: &House, memory: &Path, socket: &Path) -> Result<Vec<Target>> {
    let disk = house.build_directory()?;
    let file = |dir: &Path, name, engine: &str, loads| -> Result<Target> {
        let path = dir.join("target").display().to_string();
        fs::write(&path, noise()).with_context(|| format!("cannot write {path}"))?;
        let theirs = vec![format!("--filename={path}"), format!("--ioengine={engine}")];
        Ok(Target { name, ours: path, theirs, loads })
    };
    Ok(vec![
        file(&disk, "file", "io_uring", DISK)?,
        // Files in memory cannot be waited for: io_uring hands each operation to a thread. We make plain calls, as psync does.
        file(memory, "RAM", "psync", MEMORY)?,
        nbd(socket),
    ])
}

fn nbd(socket: &Path) -> Target {
    let ours = format!("nbd+unix:///?socket={}", socket.display());
    // fio knows an option of an engine only behind its name.
    let theirs = vec!["--ioengine=nbd".to_owned(), format!("--uri={ours}")];
    Target { name: "NBD", ours, theirs, loads: DISK }
}

/// Data that does not compress.
fn noise() -> Vec<u8> {
    let mut dice = probe::registers::Dice::new(1);
    (0..MIB << 17).flat_map(|_| dice.roll().to_le_bytes()).collect()
}

fn words(load: Load, seconds: u64) -> Vec<String> {
    let Load { rw, bs, depth } = load;
    vec![
        format!("--rw={rw}"),
        format!("--bs={bs}"),
        format!("--iodepth={depth}"),
        format!("--size={MIB}m"),
        "--direct=1".to_owned(),
        "--time_based".to_owned(),
        format!("--runtime={seconds}"),
        "--ramp_time=500ms".to_owned(),
    ]
}

fn ours(
    house: &House,
    program: &Path,
    target: &Target,
    load: Load,
    seconds: u64,
) -> Result<Figures> {
    let found = generator::ours(house, program, &target.ours, &words(load, seconds), seconds)?;
    let cpu_us = found["client_cpu"]["us_per_io"].as_f64().context("no processor time")?;
    figures(&found, load, "lat_ns", cpu_us)
}

fn theirs(house: &House, target: &Target, load: Load, seconds: u64) -> Result<Figures> {
    let mut command = pinned(Path::new("fio"));
    command.args(["--name=bench", "--output-format=json", "--lat_percentiles=1"]);
    command.args(&target.theirs).args(words(load, seconds));
    let found = said(house, "fio", &mut command, seconds)?;
    let job = &found["jobs"][0];
    let of = |name: &str| job[name].as_f64().with_context(|| format!("fio tells no {name}"));
    let share = (of("usr_cpu")? + of("sys_cpu")?) / 100.0;
    let figures = figures(&found, load, "lat_ns", 0.0)?;
    // Of one thread, all the time that it ran.
    Ok(Figures { cpu_us: share * 1e6 / figures.per_second, ..figures })
}

/// Both have fio's names.
fn figures(found: &Value, load: Load, latency: &str, cpu_us: f64) -> Result<Figures> {
    let direction = if load.rw.contains("write") { "write" } else { "read" };
    let moved = &found["jobs"][0][direction];
    let number = |value: &Value| value.as_f64().context("a figure is missing");
    Ok(Figures {
        per_second: number(&moved["iops"])?,
        p50_us: number(&moved[latency]["percentile"]["50.000000"])? / 1e3,
        mean_us: number(&moved[latency]["mean"])? / 1e3,
        cpu_us,
    })
}

fn write(house: &House, plan: Plan, targets: &[Target], samples: &[Sample]) -> Result<()> {
    let machine = machine::describe(&machine::generator());
    let figures = json!({
        "machine": machine,
        "repetitions": plan.repetitions,
        "seconds": plan.seconds,
        "samples": samples.iter().map(Sample::json).collect::<Vec<_>>(),
    });
    page::publish(house, "fio", &figures, &section(&machine, plan, targets, samples))?;
    let count = samples.len();
    house.pass(count, &format!("{count} measurements, written to {}", page::PAGE));
    Ok(())
}

impl Sample {
    fn json(&self) -> Value {
        let Load { rw, bs, depth } = self.load;
        let Figures { per_second, p50_us, mean_us, cpu_us } = self.figures;
        json!({
            "target": self.target, "who": self.who, "rw": rw, "bs": bs, "depth": depth,
            "per_second": per_second, "p50_us": p50_us, "mean_us": mean_us, "cpu_us": cpu_us,
        })
    }
}

fn section(machine: &[String], plan: Plan, targets: &[Target], samples: &[Sample]) -> String {
    let mut text =
        page::head(machine, plan) + ", one and the other in turn; ratio = windrose / fio\n\n";
    text.push_str("| target | load | depth | fio per second | windrose | ratio | of the pairs | p50 µs fio | windrose | CPU µs each fio | windrose |\n");
    text.push_str("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n");
    let (mut agreed, mut all) = (0, 0);
    for target in targets {
        for load in target.loads {
            let off = row(&mut text, samples, target.name, *load);
            (agreed, all) = (agreed + usize::from(off.abs() <= AGREED), all + 1);
        }
    }
    let _ = writeln!(text, "\n{agreed} of {all} medians agree within {AGREED} %.\n");
    text
}

/// A row; gives by how many hundredths the medians differ.
fn row(text: &mut String, samples: &[Sample], target: &str, load: Load) -> f64 {
    let of = |who: &str, pick: fn(&Figures) -> f64| -> Vec<f64> {
        let alike = samples.iter().filter(|s| (s.target, s.load, s.who) == (target, load, who));
        alike.map(|s| pick(&s.figures)).collect()
    };
    let median = |who: &str, pick: fn(&Figures) -> f64| page::median(of(who, pick));
    let rate: fn(&Figures) -> f64 = |f| f.per_second;
    let (theirs, ours) = (median("fio", rate), median("windrose", rate));
    let pairs: Vec<f64> =
        of("windrose", rate).iter().zip(of("fio", rate)).map(|(a, b)| a / b).collect();
    let (least, most) =
        pairs.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), r| (a.min(*r), b.max(*r)));
    let Load { rw, bs, depth } = load;
    let _ = writeln!(
        text,
        "| {target} | {rw} {bs} | {depth} | {theirs:.0} | {ours:.0} | {:.3} | {least:.2} to {most:.2} | {:.1} | {:.1} | {:.2} | {:.2} |",
        ours / theirs,
        median("fio", |f| f.p50_us),
        median("windrose", |f| f.p50_us),
        median("fio", |f| f.cpu_us),
        median("windrose", |f| f.cpu_us),
    );
    100.0 * (ours / theirs - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_fios_names() {
        let found = json!({ "jobs": [{ "read": { "iops": 1000.5, "lat_ns": {
            "mean": 2000.0, "percentile": { "50.000000": 1500 },
        } } }] });
        let figures = figures(&found, DISK[0], "lat_ns", 1.0).unwrap();
        assert!((figures.per_second - 1000.5).abs() < 1e-9);
        assert!((figures.p50_us - 1.5).abs() < 1e-9 && (figures.mean_us - 2.0).abs() < 1e-9);
        assert!(super::figures(&found, DISK[2], "lat_ns", 1.0).is_err(), "it wrote nothing");
    }

    #[test]
    fn medians_of_both_are_compared() {
        let sample = |who, per_second| Sample {
            target: "file",
            load: DISK[0],
            who,
            figures: Figures { per_second, p50_us: 1.0, mean_us: 1.0, cpu_us: 1.0 },
        };
        let samples = [
            sample("fio", 100.0),
            sample("windrose", 99.0),
            sample("windrose", 103.0),
            sample("fio", 102.0),
        ];
        let mut text = String::new();
        let off = row(&mut text, &samples, "file", DISK[0]);
        assert!((off - 0.0).abs() < 1e-9, "{off}");
        assert!(text.contains("| 101 | 101 | 1.000 | 0.99 to 1.01 |"), "{text}");
    }
}
