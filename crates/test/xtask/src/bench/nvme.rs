//! `./run bench nvme`: what a command over NVMe/TCP costs beside what its bytes alone cost, and beside the same over iSCSI.
//!
//! The volume is a piece of memory behind the real target (`crates/serve/target/examples/memory.rs`): reading a file on tmpfs alone
//! costs twice as much as the echo. It copies nothing, as nobody's processor copies what a disk reads and writes. `windrose bench`
//! is the load of both protocols; the bare echo asks and answers with as many bytes, with the same runtime at both ends: out of
//! one place, which a small volume is held against, and once more out of as much memory as the volume has. Each measurement
//! has a target of its own: what a former one has left where in its memory is not measured.

use super::{
    Plan, SERVER_CPU,
    echo::{Echo, serving},
    generator,
    limit::{self, Verdict, limits},
    machine,
    page::{self, head, median},
};
use crate::{
    house::House,
    install,
    node::{Profile, free_port},
    process::Daemon,
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    fmt::Write,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

/// Header and completion of NVMe/TCP (TCP transport 1.0, 3.6.2): a command capsule, a response capsule, the header of data.
const COMMAND: u32 = 72;
const RESPONSE: u32 = 24;
const DATA_HEADER: u32 = 24;

/// So many times the echo's processor time may a small read take,
const SMALL_CPU: f64 = 1.5;
/// so many times its time where nobody polls,
const ALONE_LATENCY: f64 = 1.2;
/// and where both sides poll, of the time of an echo that does not.
const POLLED_LATENCY: f64 = 0.35;
/// Large ones move at least 0.8 times as much for the same processor time.
const LARGE_CPU: f64 = 1.25;
/// So much of a difference between two figures that are the same is noise.
const NOISE: f64 = 1.03;

/// How long a side that polls looks for more.
const WINDOW_US: u64 = 100;

/// Size of the volume: with all in flight that is ever in flight, a part of it for each connection still has as many blocks
/// that nobody writes. The load lets writes of one block wait for each other.
const MEMORY_MIB: u64 = 64;
/// Size of one that fits the caches of a core, as the echo's one page does.
const SMALL_MIB: u64 = 1;
/// Buffers of the target: 32 connections with 8 of 128 KiB each are in flight, and the volume lies in them.
const POOL_MIB: u64 = 512;

/// Operations of one kind, so many in flight on each of so many connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pattern {
    rw: &'static str,
    kib: u32,
    depth: u32,
    connections: u32,
}

const fn pattern(rw: &'static str, kib: u32, depth: u32, connections: u32) -> Pattern {
    Pattern { rw, kib, depth, connections }
}

const FEW: u32 = 4;
const MANY: u32 = 32;

/// What is measured with each number of connections.
const KINDS: [(&str, u32, u32); 4] =
    [("randread", 4, 32), ("randwrite", 4, 32), ("read", 128, 8), ("write", 128, 8)];

/// One at a time.
const SINGLE: [Pattern; 2] = [pattern("randread", 4, 1, 1), pattern("randwrite", 4, 1, 1)];

/// Who is asked. Only the target that is called polled polls; so does its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Who {
    Echo,
    /// Out of memory, and into it.
    EchoOfMemory,
    Nvme,
    /// A volume that fits the caches of a core.
    NvmeSmall,
    Iscsi,
    NvmePolled,
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Echo => "bare echo",
            Self::EchoOfMemory => "bare echo, 64 MiB",
            Self::Nvme => "NVMe/TCP",
            Self::NvmeSmall => "NVMe/TCP, 1 MiB",
            Self::Iscsi => "iSCSI",
            Self::NvmePolled => "NVMe/TCP, both poll",
        }
    }

    /// Size of the volume.
    fn mib(self) -> u64 {
        if self == Self::NvmeSmall { SMALL_MIB } else { MEMORY_MIB }
    }

    /// How long the target looks for more before it sleeps, in microseconds.
    fn window_us(self) -> u64 {
        if self == Self::NvmePolled { WINDOW_US } else { 0 }
    }
}

struct Sample {
    who: Who,
    pattern: Pattern,
    per_second: f64,
    /// The mean.
    latency_us: f64,
    /// Processor time of the server for one operation.
    server_us: f64,
}

impl Pattern {
    fn name(self) -> String {
        let Self { rw, kib, depth, connections } = self;
        format!("{rw} {kib}k, {connections} × {depth}")
    }

    /// For `windrose bench`.
    fn words(self, who: Who, seconds: u64, server: u32) -> Vec<String> {
        let Self { rw, kib, depth, connections } = self;
        let mut words = vec![
            format!("--rw={rw}"),
            format!("--bs={kib}k"),
            format!("--iodepth={depth}"),
            format!("--numjobs={connections}"),
            format!("--runtime={seconds}"),
            format!("--server-pid={server}"),
        ];
        words.extend(
            ["--group_reporting", "--time_based", "--norandommap", "--ramp_time=500ms"]
                .map(str::to_owned),
        );
        // Each has a part of the disk to itself: what follows one another is to do so on the disk as well.
        let part = who.mib() * 1024 / u64::from(connections);
        words.extend([format!("--size={part}k"), format!("--offset_increment={part}k")]);
        if who == Who::NvmePolled {
            words.push(format!("--poll={WINDOW_US}"));
        }
        words
    }

    /// For the echo: as many bytes as NVMe/TCP takes for it.
    fn bytes(self) -> Vec<String> {
        let data = self.kib * 1024;
        let (request, reply) = if self.rw.contains("write") {
            (COMMAND + data, RESPONSE)
        } else {
            (COMMAND, DATA_HEADER + data)
        };
        vec![
            format!("connections={}", self.connections),
            format!("request={request}"),
            format!("reply={reply}"),
            "window_us=0".to_owned(),
            "client_window_us=0".to_owned(),
        ]
    }
}

/// Programs that are measured.
struct Scene<'a> {
    house: &'a House,
    echo: Echo,
    memory: PathBuf,
}

/// A volume in memory behind both protocols.
struct Target {
    daemon: Daemon,
    iscsi: SocketAddr,
    nvme: SocketAddr,
}

impl Target {
    /// One whose volume has been written, from one end to the other: memory that was never touched is nobody's yet.
    fn start(house: &House, program: &Path, who: Who) -> Result<Self> {
        let at = || free_port().map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
        let (iscsi, nvme) = (at()?, at()?);
        let mut command = Command::new(program);
        command.args([format!("iscsi={iscsi}"), format!("nvme={nvme}")]);
        command.args([format!("cpu={SERVER_CPU}"), format!("window_us={}", who.window_us())]);
        command.args([format!("mib={}", who.mib()), format!("pool_mib={POOL_MIB}")]);
        command.arg("keeps=1");
        let target = Self { daemon: serving(house, "memory", &mut command, nvme)?, iscsi, nvme };
        let words = ["--rw=write", "--bs=128k"].map(str::to_owned);
        let generator = Profile::Release.program(house);
        generator::ours(house, &generator, &target.uri(Who::Nvme), &words, 1)?;
        Ok(target)
    }

    fn uri(&self, who: Who) -> String {
        match who {
            Who::Iscsi => format!("iscsi://{}/iqn.2026-01.io.windrose:memory/0", self.iscsi),
            _ => format!("nvme://{}/nqn.2026-01.io.windrose:memory", self.nvme),
        }
    }
}

/// What must be installed.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NETWORK]
}

/// Measures and writes `bench/README.md` and `bench/results/nvme.json`.
pub(super) fn run(house: &House, plan: Plan) -> Result<()> {
    let [memory, echo] = ["memory", "echo"].map(|name| Profile::Release.example(house, name));
    let scene = Scene { house, echo: Echo::new(echo), memory };
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        for (pattern, whom) in cases() {
            for &who in whom {
                house.display.working(&format!("{turn}: {}, {}", who.name(), pattern.name()));
                let sample = scene.measure(who, pattern, plan.seconds);
                samples
                    .push(sample.with_context(|| format!("{}, {}", who.name(), pattern.name()))?);
            }
        }
        house.display.line(&format!("  {turn} done"));
    }
    write(house, plan, &samples)
}

/// All patterns, and who is asked.
fn cases() -> Vec<(Pattern, &'static [Who])> {
    const LOADED: &[Who] = &[Who::Echo, Who::EchoOfMemory, Who::Nvme, Who::Iscsi];
    const WITH_SMALL: &[Who] =
        &[Who::Echo, Who::NvmeSmall, Who::EchoOfMemory, Who::Nvme, Who::Iscsi];
    const ONE: &[Who] = &[Who::Echo, Who::Nvme, Who::Iscsi, Who::NvmePolled];
    let whom = |kind, connections| {
        if (kind, connections) == (KINDS[0], FEW) { WITH_SMALL } else { LOADED }
    };
    let loaded = KINDS.into_iter().flat_map(|kind| {
        let (rw, kib, depth) = kind;
        [FEW, MANY]
            .map(|connections| (pattern(rw, kib, depth, connections), whom(kind, connections)))
    });
    SINGLE.into_iter().map(|single| (single, ONE)).chain(loaded).collect()
}

impl Scene<'_> {
    fn measure(&self, who: Who, pattern: Pattern, seconds: u64) -> Result<Sample> {
        if let Who::Echo | Who::EchoOfMemory = who {
            let mut words = pattern.bytes();
            if who == Who::EchoOfMemory {
                let kib = MEMORY_MIB * 1024 / u64::from(pattern.connections);
                words.push(format!("memory_kib={kib}"));
            }
            let figures = self.echo.talk(pattern.depth, seconds, &words)?;
            let latency_us = figures.latency_us * f64::from(pattern.connections);
            let (per_second, server_us) = (figures.per_second, figures.server_us);
            return Ok(Sample { who, pattern, per_second, latency_us, server_us });
        }
        let target = Target::start(self.house, &self.memory, who)?;
        let words = pattern.words(who, seconds, target.daemon.id());
        let program = Profile::Release.program(self.house);
        let found = generator::ours(self.house, &program, &target.uri(who), &words, seconds)?;
        Sample::of(who, pattern, &found)
    }
}

impl Sample {
    fn of(who: Who, pattern: Pattern, found: &Value) -> Result<Self> {
        let direction = if pattern.rw.contains("write") { "write" } else { "read" };
        let moved = &found["jobs"][0][direction];
        let number = |value: &Value| value.as_f64().context("a figure is missing");
        Ok(Self {
            who,
            pattern,
            per_second: number(&moved["iops"])?,
            latency_us: number(&moved["lat_ns"]["mean"])? / 1e3,
            server_us: number(&found["server_cpu"]["us_per_io"])?,
        })
    }

    fn figures(&self) -> Figures {
        let &Self { per_second, latency_us, server_us, .. } = self;
        Figures { per_second, latency_us, server_us }
    }

    fn json(&self) -> Value {
        let Pattern { rw, kib, depth, connections } = self.pattern;
        json!({
            "who": self.who.name(), "rw": rw, "kib": kib, "depth": depth,
            "connections": connections, "per_second": self.per_second,
            "latency_us": self.latency_us, "server_us": self.server_us,
        })
    }
}

/// One measurement's, or the medians of some.
#[derive(Clone, Copy)]
struct Figures {
    per_second: f64,
    latency_us: f64,
    server_us: f64,
}

fn medians(samples: &[Sample], who: Who, pattern: Pattern) -> Figures {
    let of = |pick: Pick| {
        let alike = samples.iter().filter(|s| (s.who, s.pattern) == (who, pattern));
        median(alike.map(|s| pick(&s.figures())).collect())
    };
    Figures {
        per_second: of(|s| s.per_second),
        latency_us: of(|s| s.latency_us),
        server_us: of(|s| s.server_us),
    }
}

/// What a verdict holds one measurement against another by.
type Pick = fn(&Figures) -> f64;

const SERVER: Pick = |f| f.server_us;
const LATENCY: Pick = |f| f.latency_us;
const EACH: Pick = |f| 1e6 / f.per_second;

/// How the figure of one compares with that of the other: the median of the ratios of each repetition, whose measurements lie
/// close together in time. The machine is shared: what it gives changes from one minute to the next.
fn compared(
    samples: &[Sample],
    pick: Pick,
    one: (Who, Pattern),
    other: (Who, Pattern),
) -> (f64, f64) {
    let of = |(who, pattern): (Who, Pattern)| {
        samples.iter().filter(move |s| (s.who, s.pattern) == (who, pattern))
    };
    let figure = |s: &Sample| pick(&s.figures());
    let ratios = of(one).zip(of(other)).map(|(a, b)| figure(a) / figure(b)).collect();
    let beside = median(of(other).map(figure).collect());
    (beside, beside * median(ratios))
}

fn verdicts(samples: &[Sample]) -> Vec<Verdict> {
    let verdict = |what: String, times, pick, one, other| {
        let (beside, measured) = compared(samples, pick, one, other);
        Verdict::at_most(what, times, beside, measured)
    };
    let of = |(rw, kib, depth): (&'static str, u32, u32), connections| {
        pattern(rw, kib, depth, connections)
    };
    let beside = |pattern: Pattern, echo: Who, who: Who, times| {
        let what = format!("CPU, {} beside the {}, {}", who.name(), echo.name(), pattern.name());
        verdict(what, times, SERVER, (who, pattern), (echo, pattern))
    };
    let (read, single) = (of(KINDS[0], FEW), SINGLE[0]);
    let mut all = vec![
        beside(read, Who::Echo, Who::NvmeSmall, SMALL_CPU),
        beside(read, Who::EchoOfMemory, Who::Nvme, SMALL_CPU),
    ];
    for (who, times) in [(Who::Nvme, ALONE_LATENCY), (Who::NvmePolled, POLLED_LATENCY)] {
        let what = format!("latency beside the echo, {}, {}", who.name(), single.name());
        all.push(verdict(what, times, LATENCY, (who, single), (Who::Echo, single)));
    }
    for kind in KINDS.into_iter().filter(|(_, kib, _)| *kib == 128) {
        all.push(beside(of(kind, FEW), Who::EchoOfMemory, Who::Nvme, LARGE_CPU));
    }
    for (pattern, _) in cases() {
        let what = format!("CPU beside iSCSI, {}", pattern.name());
        all.push(verdict(what, NOISE, SERVER, (Who::Nvme, pattern), (Who::Iscsi, pattern)));
    }
    for kind in KINDS {
        let [few, many] = [FEW, MANY].map(|connections| (Who::Nvme, of(kind, connections)));
        // With both ends on a core each, the time of each is the slower end's: of small ones that is the load.
        for (name, pick) in [("CPU", SERVER), ("time", EACH)] {
            let what =
                format!("{name} of each, {MANY} connections beside {FEW}, {} {}k", kind.0, kind.1);
            all.push(verdict(what, NOISE, pick, many, few));
        }
    }
    all
}

fn write(house: &House, plan: Plan, samples: &[Sample]) -> Result<()> {
    let machine = machine::describe(&machine::network());
    let verdicts = verdicts(samples);
    let figures = limit::figures(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    let mut text = head(&machine, plan) + "; ratio = this row / the bare echo\n";
    limits(&mut text, &verdicts);
    table(&mut text, samples);
    page::publish(house, "nvme", &figures, &text)?;
    house.pass(samples.len(), &limit::tally(&verdicts));
    Ok(())
}

fn table(text: &mut String, samples: &[Sample]) {
    text.push_str("\n### All patterns\n\n| pattern | server | per second | latency µs | server CPU µs each | ratio: rate | latency | CPU |\n");
    text.push_str("|---|---|---:|---:|---:|---:|---:|---:|\n");
    for (pattern, whom) in cases() {
        let echo = medians(samples, Who::Echo, pattern);
        for &who in whom {
            let this = medians(samples, who, pattern);
            let ratio = |pick: fn(&Figures) -> f64| match who {
                Who::Echo => String::new(),
                _ => format!("{:.2}", pick(&this) / pick(&echo)),
            };
            let _ = writeln!(
                text,
                "| {} | {} | {:.0} | {:.1} | {:.2} | {} | {} | {} |",
                pattern.name(),
                who.name(),
                this.per_second,
                this.latency_us,
                this.server_us,
                ratio(|f| f.per_second),
                ratio(|f| f.latency_us),
                ratio(|f| f.server_us),
            );
        }
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything measured: the echo 1 µs, the rest so many times that, polled ones a third.
    fn samples(nvme: f64, iscsi: f64) -> Vec<Sample> {
        let times = |who| match who {
            Who::Echo | Who::EchoOfMemory => 1.0,
            Who::Nvme | Who::NvmeSmall => nvme,
            Who::Iscsi => iscsi,
            Who::NvmePolled => nvme / 3.0,
        };
        let all = cases().into_iter().flat_map(|(pattern, whom)| {
            whom.iter().map(move |&who| {
                let us = times(who);
                Sample { who, pattern, per_second: 1e6 / us, latency_us: us, server_us: us }
            })
        });
        all.collect()
    }

    #[test]
    fn limits_are_those_of_the_issue() {
        let missed =
            |nvme, iscsi| verdicts(&samples(nvme, iscsi)).iter().filter(|v| !v.is_held()).count();
        assert_eq!(missed(1.0, 1.0), 0);
        assert_eq!(missed(1.0, 0.9), cases().len(), "iSCSI is cheaper everywhere");
        assert_eq!(missed(1.22, 2.0), 2, "latency, alone and polled");
        assert_eq!(missed(1.3, 2.0), 4, "and large ones");
        assert_eq!(missed(1.6, 2.0), 6, "and small ones, beside both echoes");
    }

    #[test]
    fn the_echo_moves_what_a_command_moves() {
        let bytes = pattern("randwrite", 4, 1, 2).bytes();
        assert_eq!(bytes[..3], ["connections=2", "request=4168", "reply=24"]);
        let bytes = pattern("read", 128, 8, 4).bytes();
        assert_eq!(bytes[..3], ["connections=4", "request=72", "reply=131096"]);
    }

    #[test]
    fn the_table_has_ratios() {
        let mut text = String::new();
        table(&mut text, &samples(2.0, 4.0));
        let row = "| randread 4k, 4 × 32 | NVMe/TCP | 500000 | 2.0 | 2.00 | 0.50 | 2.00 | 2.00 |";
        assert!(text.contains(row), "{text}");
    }
}
