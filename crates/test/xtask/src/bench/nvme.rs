//! `./run bench nvme`: the cost of a command over NVMe/TCP, compared with a bare echo of its bytes
//! and with iSCSI.
//!
//! The volume is memory behind the real target (`crates/serve/target/examples/memory.rs`): reading
//! a file on tmpfs alone costs twice as much as the echo. It copies nothing, just as no processor
//! copies a disk's data. `windrose bench` is the load of both protocols. The bare echo exchanges as
//! many bytes with the same runtime at both ends: from one buffer, the reference of a small volume,
//! and from as much memory as the volume has. Each measurement starts a new target, so the memory
//! layout an earlier one left has no effect.

use super::{
    BenchPlan, SERVER_CPU,
    echo::{EchoPair, start_server},
    generator,
    limit::{self, LimitCheck, write_limit_table},
    machine,
    results_page::{self, median, section_header},
};
use crate::{
    install,
    node::{Profile, free_port},
    process::Daemon,
    run_context::RunContext,
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    fmt::Write,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

/// Header lengths of NVMe/TCP (TCP transport 1.0, 3.6.2): command capsule, response capsule, data
/// header.
const COMMAND: u32 = 72;
const RESPONSE: u32 = 24;
const DATA_HEADER: u32 = 24;

/// The largest processor time of a small read, relative to the echo,
const MAX_SMALL_CPU_RATIO: f64 = 1.5;
/// the largest latency without polling, relative to the echo,
const MAX_LATENCY_RATIO: f64 = 1.2;
/// and the largest latency with both sides polling, relative to an echo that does not poll.
const MAX_POLLED_LATENCY_RATIO: f64 = 0.35;
/// Large operations move at least 0.8 times as many bytes for the same processor time.
const MAX_LARGE_CPU_RATIO: f64 = 1.25;
/// Ratios below this between equal figures are noise.
const NOISE_RATIO: f64 = 1.03;

/// How long a polling side polls.
const WINDOW_US: u64 = 100;

/// Size of the volume: even at the largest depth, each connection's part has as many blocks again
/// without a write in flight. The load serialises writes to the same block.
const MEMORY_MIB: u64 = 64;
/// Size of a volume that fits a core's caches, as the echo's one page does.
const SMALL_MIB: u64 = 1;
/// Buffers of the target: 32 connections with 8 of 128 KiB each are in flight, and the volume lies
/// in them.
const POOL_MIB: u64 = 512;

/// Operations of one kind, with a depth and a number of connections.
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

const FEW_CONNECTIONS: u32 = 4;
const MANY_CONNECTIONS: u32 = 32;

/// What is measured with each number of connections.
const KINDS: [(&str, u32, u32); 4] =
    [("randread", 4, 32), ("randwrite", 4, 32), ("read", 128, 8), ("write", 128, 8)];

/// One operation at a time.
const SINGLE_PATTERNS: [Pattern; 2] = [pattern("randread", 4, 1, 1), pattern("randwrite", 4, 1, 1)];

/// The measured server. Only the polled target and its client poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Server {
    Echo,
    /// From memory and into memory.
    EchoFromMemory,
    Nvme,
    /// A volume that fits a core's caches.
    NvmeSmall,
    Iscsi,
    NvmePolled,
}

impl Server {
    fn name(self) -> &'static str {
        match self {
            Self::Echo => "bare echo",
            Self::EchoFromMemory => "bare echo, 64 MiB",
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

    /// How long the target polls before it sleeps, in microseconds.
    fn window_us(self) -> u64 {
        if self == Self::NvmePolled { WINDOW_US } else { 0 }
    }
}

struct Sample {
    server: Server,
    pattern: Pattern,
    per_second: f64,
    /// The mean.
    latency_us: f64,
    /// Processor time of the server for each operation.
    server_us: f64,
}

impl Pattern {
    fn name(self) -> String {
        let Self { rw, kib, depth, connections } = self;
        format!("{rw} {kib}k, {connections} × {depth}")
    }

    /// The arguments of `windrose bench`.
    fn bench_arguments(self, who: Server, seconds: u64, server: u32) -> Vec<String> {
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
        // Each connection has its own part of the disk, so sequential I/O is sequential on the disk
        // too.
        let part = who.mib() * 1024 / u64::from(connections);
        words.extend([format!("--size={part}k"), format!("--offset_increment={part}k")]);
        if who == Server::NvmePolled {
            words.push(format!("--poll={WINDOW_US}"));
        }
        words
    }

    /// The arguments of the echo: as many bytes as NVMe/TCP uses.
    fn echo_arguments(self) -> Vec<String> {
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

/// The measured programs.
struct NvmeBench<'a> {
    context: &'a RunContext,
    echo: EchoPair,
    memory: PathBuf,
}

/// A volume in memory behind both protocols.
struct MemoryTarget {
    daemon: Daemon,
    iscsi: SocketAddr,
    nvme: SocketAddr,
}

impl MemoryTarget {
    /// Starts a target and writes its whole volume: untouched memory is not allocated yet.
    fn start(context: &RunContext, program: &Path, who: Server) -> Result<Self> {
        let at = || free_port().map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
        let (iscsi, nvme) = (at()?, at()?);
        let mut command = Command::new(program);
        command.args([format!("iscsi={iscsi}"), format!("nvme={nvme}")]);
        command.args([format!("cpu={SERVER_CPU}"), format!("window_us={}", who.window_us())]);
        command.args([format!("mib={}", who.mib()), format!("pool_mib={POOL_MIB}")]);
        command.arg("keeps=1");
        let target =
            Self { daemon: start_server(context, "memory", &mut command, nvme)?, iscsi, nvme };
        let words = ["--rw=write", "--bs=128k"].map(str::to_owned);
        let generator = Profile::Dist.program(context);
        generator::run_windrose_bench(context, &generator, &target.uri(Server::Nvme), &words, 1)?;
        Ok(target)
    }

    fn uri(&self, who: Server) -> String {
        match who {
            Server::Iscsi => format!("iscsi://{}/iqn.2026-01.io.windrose:memory/0", self.iscsi),
            _ => format!("nvme://{}/nqn.2026-01.io.windrose:memory", self.nvme),
        }
    }
}

/// The packages this benchmark needs.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NETWORK]
}

/// Measures and writes `bench/README.md` and `bench/results/nvme.json`.
pub(super) fn run(context: &RunContext, plan: BenchPlan) -> Result<()> {
    let [memory, echo] = ["memory", "echo"].map(|name| Profile::Dist.example(context, name));
    let scene = NvmeBench { context, echo: EchoPair::new(echo), memory };
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        for (pattern, whom) in benchmark_cases() {
            for &who in whom {
                context.display.begin_step(&format!("{turn}: {}, {}", who.name(), pattern.name()));
                let sample = scene.measure(who, pattern, plan.seconds);
                samples
                    .push(sample.with_context(|| format!("{}, {}", who.name(), pattern.name()))?);
            }
        }
        context.display.line(&format!("  {turn} done"));
    }
    write(context, plan, &samples)
}

/// All patterns, each with the servers it is measured on.
fn benchmark_cases() -> Vec<(Pattern, &'static [Server])> {
    const LOADED: &[Server] = &[Server::Echo, Server::EchoFromMemory, Server::Nvme, Server::Iscsi];
    const WITH_SMALL: &[Server] =
        &[Server::Echo, Server::NvmeSmall, Server::EchoFromMemory, Server::Nvme, Server::Iscsi];
    const ONE: &[Server] = &[Server::Echo, Server::Nvme, Server::Iscsi, Server::NvmePolled];
    let whom = |kind, connections| {
        if (kind, connections) == (KINDS[0], FEW_CONNECTIONS) { WITH_SMALL } else { LOADED }
    };
    let loaded = KINDS.into_iter().flat_map(|kind| {
        let (rw, kib, depth) = kind;
        [FEW_CONNECTIONS, MANY_CONNECTIONS]
            .map(|connections| (pattern(rw, kib, depth, connections), whom(kind, connections)))
    });
    SINGLE_PATTERNS.into_iter().map(|single| (single, ONE)).chain(loaded).collect()
}

impl NvmeBench<'_> {
    fn measure(&self, who: Server, pattern: Pattern, seconds: u64) -> Result<Sample> {
        if let Server::Echo | Server::EchoFromMemory = who {
            let mut words = pattern.echo_arguments();
            if who == Server::EchoFromMemory {
                let kib = MEMORY_MIB * 1024 / u64::from(pattern.connections);
                words.push(format!("memory_kib={kib}"));
            }
            let figures = self.echo.run_with_args(pattern.depth, seconds, &words)?;
            let latency_us = figures.latency_us * f64::from(pattern.connections);
            let (per_second, server_us) = (figures.per_second, figures.server_us);
            return Ok(Sample { server: who, pattern, per_second, latency_us, server_us });
        }
        let target = MemoryTarget::start(self.context, &self.memory, who)?;
        let words = pattern.bench_arguments(who, seconds, target.daemon.id());
        let program = Profile::Dist.program(self.context);
        let found = generator::run_windrose_bench(
            self.context,
            &program,
            &target.uri(who),
            &words,
            seconds,
        )?;
        Sample::of(who, pattern, &found)
    }
}

impl Sample {
    fn of(who: Server, pattern: Pattern, found: &Value) -> Result<Self> {
        let direction = if pattern.rw.contains("write") { "write" } else { "read" };
        let moved = &found["jobs"][0][direction];
        let number = |value: &Value| value.as_f64().context("a figure is missing");
        Ok(Self {
            server: who,
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
            "who": self.server.name(), "rw": rw, "kib": kib, "depth": depth,
            "connections": connections, "per_second": self.per_second,
            "latency_us": self.latency_us, "server_us": self.server_us,
        })
    }
}

/// The figures of one measurement, or medians of several.
#[derive(Clone, Copy)]
struct Figures {
    per_second: f64,
    latency_us: f64,
    server_us: f64,
}

fn medians(samples: &[Sample], who: Server, pattern: Pattern) -> Figures {
    let of = |pick: FigureSelector| {
        let alike = samples.iter().filter(|s| (s.server, s.pattern) == (who, pattern));
        median(alike.map(|s| pick(&s.figures())).collect())
    };
    Figures {
        per_second: of(|s| s.per_second),
        latency_us: of(|s| s.latency_us),
        server_us: of(|s| s.server_us),
    }
}

/// The figure that a verdict compares.
type FigureSelector = fn(&Figures) -> f64;

const SERVER_CPU_TIME: FigureSelector = |f| f.server_us;
const LATENCY: FigureSelector = |f| f.latency_us;
const TIME_PER_OPERATION: FigureSelector = |f| 1e6 / f.per_second;

/// The ratio of two measurements' figures: the median of each repetition's ratio, whose
/// measurements are close in time. The machine is shared and its speed changes from minute to
/// minute.
fn median_ratio(
    samples: &[Sample],
    pick: FigureSelector,
    one: (Server, Pattern),
    other: (Server, Pattern),
) -> (f64, f64) {
    let of = |(who, pattern): (Server, Pattern)| {
        samples.iter().filter(move |s| (s.server, s.pattern) == (who, pattern))
    };
    let figure = |s: &Sample| pick(&s.figures());
    let ratios = of(one).zip(of(other)).map(|(a, b)| figure(a) / figure(b)).collect();
    let beside = median(of(other).map(figure).collect());
    (beside, beside * median(ratios))
}

fn verdicts(samples: &[Sample]) -> Vec<LimitCheck> {
    let verdict = |what: String, times, pick, one, other| {
        let (beside, measured) = median_ratio(samples, pick, one, other);
        LimitCheck::at_most(what, times, beside, measured)
    };
    let of = |(rw, kib, depth): (&'static str, u32, u32), connections| {
        pattern(rw, kib, depth, connections)
    };
    let beside = |pattern: Pattern, echo: Server, who: Server, times| {
        let what = format!("CPU, {} beside the {}, {}", who.name(), echo.name(), pattern.name());
        verdict(what, times, SERVER_CPU_TIME, (who, pattern), (echo, pattern))
    };
    let (read, single) = (of(KINDS[0], FEW_CONNECTIONS), SINGLE_PATTERNS[0]);
    let mut all = vec![
        beside(read, Server::Echo, Server::NvmeSmall, MAX_SMALL_CPU_RATIO),
        beside(read, Server::EchoFromMemory, Server::Nvme, MAX_SMALL_CPU_RATIO),
    ];
    for (who, times) in
        [(Server::Nvme, MAX_LATENCY_RATIO), (Server::NvmePolled, MAX_POLLED_LATENCY_RATIO)]
    {
        let what = format!("latency beside the echo, {}, {}", who.name(), single.name());
        all.push(verdict(what, times, LATENCY, (who, single), (Server::Echo, single)));
    }
    for kind in KINDS.into_iter().filter(|(_, kib, _)| *kib == 128) {
        all.push(beside(
            of(kind, FEW_CONNECTIONS),
            Server::EchoFromMemory,
            Server::Nvme,
            MAX_LARGE_CPU_RATIO,
        ));
    }
    for (pattern, _) in benchmark_cases() {
        let what = format!("CPU beside iSCSI, {}", pattern.name());
        all.push(verdict(
            what,
            NOISE_RATIO,
            SERVER_CPU_TIME,
            (Server::Nvme, pattern),
            (Server::Iscsi, pattern),
        ));
    }
    for kind in KINDS {
        let [few, many] = [FEW_CONNECTIONS, MANY_CONNECTIONS]
            .map(|connections| (Server::Nvme, of(kind, connections)));
        // Each end has its own core and the slower one sets the time: for small operations, the
        // load.
        for (name, pick) in [("CPU", SERVER_CPU_TIME), ("time", TIME_PER_OPERATION)] {
            let what = format!(
                "{name} of each, {MANY_CONNECTIONS} connections beside {FEW_CONNECTIONS}, {} {}k",
                kind.0, kind.1
            );
            all.push(verdict(what, NOISE_RATIO, pick, many, few));
        }
    }
    all
}

fn write(context: &RunContext, plan: BenchPlan, samples: &[Sample]) -> Result<()> {
    let machine = machine::describe(&machine::network_programs());
    let verdicts = verdicts(samples);
    let figures = limit::result_json(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    let mut text = section_header(&machine, plan) + "; ratio = this row / the bare echo\n";
    write_limit_table(&mut text, &verdicts);
    table(&mut text, samples);
    results_page::publish(context, "nvme", &figures, &text)?;
    context.pass(samples.len(), &limit::summary(&verdicts));
    Ok(())
}

fn table(text: &mut String, samples: &[Sample]) {
    text.push_str("\n### All patterns\n\n| pattern | server | per second | latency µs | server CPU µs each | ratio: rate | latency | CPU |\n");
    text.push_str("|---|---|---:|---:|---:|---:|---:|---:|\n");
    for (pattern, whom) in benchmark_cases() {
        let echo = medians(samples, Server::Echo, pattern);
        for &who in whom {
            let this = medians(samples, who, pattern);
            let ratio = |pick: fn(&Figures) -> f64| match who {
                Server::Echo => String::new(),
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

    /// All measurements: the echo 1 µs, the others times the given factors, polled ones a third.
    fn samples(nvme: f64, iscsi: f64) -> Vec<Sample> {
        let times = |who| match who {
            Server::Echo | Server::EchoFromMemory => 1.0,
            Server::Nvme | Server::NvmeSmall => nvme,
            Server::Iscsi => iscsi,
            Server::NvmePolled => nvme / 3.0,
        };
        let all = benchmark_cases().into_iter().flat_map(|(pattern, whom)| {
            whom.iter().map(move |&who| {
                let us = times(who);
                Sample { server: who, pattern, per_second: 1e6 / us, latency_us: us, server_us: us }
            })
        });
        all.collect()
    }

    #[test]
    fn limits_are_those_of_the_issue() {
        let missed =
            |nvme, iscsi| verdicts(&samples(nvme, iscsi)).iter().filter(|v| !v.is_held()).count();
        assert_eq!(missed(1.0, 1.0), 0);
        assert_eq!(missed(1.0, 0.9), benchmark_cases().len(), "iSCSI is cheaper everywhere");
        assert_eq!(missed(1.22, 2.0), 2, "latency, alone and polled");
        assert_eq!(missed(1.3, 2.0), 4, "and large ones");
        assert_eq!(missed(1.6, 2.0), 6, "and small ones, beside both echoes");
    }

    #[test]
    fn the_echo_moves_what_a_command_moves() {
        let bytes = pattern("randwrite", 4, 1, 2).echo_arguments();
        assert_eq!(bytes[..3], ["connections=2", "request=4168", "reply=24"]);
        let bytes = pattern("read", 128, 8, 4).echo_arguments();
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
