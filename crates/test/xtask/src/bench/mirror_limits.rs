//! The cost of mirroring against its limits.

use super::{
    BenchPlan,
    figures::{Figures, Operation, Sample},
    limit::{self, LimitCheck, write_limit_table},
    machine,
    results_page::{medians, publish, section_header},
};
use crate::run_context::RunContext;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// The compared volumes: on a standalone node; on node a of the cluster without a second replica;
/// on both nodes, used through node a, the primary, and through node b.
pub(super) const STANDALONE: &str = "a node by itself";
pub(super) const ONE_REPLICA: &str = "one copy";
pub(super) const MIRRORED_VIA_A: &str = "mirrored, at a";
pub(super) const MIRRORED_VIA_B: &str = "mirrored, at b";
/// The disks: in memory, where a disk costs almost nothing and all other costs show; and on a disk
/// of this machine.
pub(super) const RAM: &str = "RAM";
pub(super) const FILE: &str = "file";

/// The operations and depths measured.
pub(super) const LOADS: [(Operation, u32); 4] = [
    (Operation::MinimalClientWrite, 1),
    (Operation::MinimalClientWrite, 32),
    (Operation::MinimalClientRead, 1),
    (Operation::MinimalClientRead, 32),
];

/// The most processor time of a mirrored write at both nodes together, relative to an unmirrored
/// one.
const MAX_CPU_RATIO: f64 = 3.0;
/// The latency of a mirrored write may be an echo between the nodes plus this many times that of
/// an unmirrored one.
const MAX_LATENCY_RATIO: f64 = 1.3;
/// The largest ratio between the two entry nodes, in either direction.
const MAX_ENTRY_NODE_RATIO: f64 = 1.15;
/// Ratios below this between equal figures are noise.
const NOISE_RATIO: f64 = 1.05;
/// The most operations, and bytes, that the intent log may write for each client write.
const MAX_LOG_SHARE: f64 = 0.03;

/// The largest slowdown of a write during a resync.
const MAX_RESYNC_SLOWDOWN: f64 = 2.0;

/// The latency of single writes, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResyncLatency {
    /// With both replicas in sync.
    pub(super) in_sync_us: f64,
    /// During a resync.
    pub(super) resyncing_us: f64,
}

/// What an intent log wrote while clients wrote.
#[derive(Clone, Debug)]
pub(super) struct IntentLogWrites {
    pub(super) node: &'static str,
    pub(super) depth: u32,
    /// Client writes.
    pub(super) writes: u64,
    /// Log pages. A page is as long as a client write, so the share of bytes is the same.
    pub(super) pages: u64,
}

impl IntentLogWrites {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn share(&self) -> f64 {
        self.pages as f64 / self.writes as f64
    }

    fn json(&self) -> Value {
        let Self { node, depth, writes, pages } = self;
        json!({ "node": node, "depth": depth, "client_writes": writes, "log_writes": pages })
    }
}

/// Writes the figures and the page, and shows the page's section.
pub(super) fn write(
    context: &RunContext,
    plan: BenchPlan,
    samples: &[Sample],
    logs: &[IntentLogWrites],
    resync: ResyncLatency,
) -> Result<()> {
    let machine = machine::describe(&machine::store_programs());
    let verdicts = verdicts(samples, logs, resync).context("something was not measured")?;
    let mut figures =
        limit::result_json(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    figures["intent_log"] = logs.iter().map(IntentLogWrites::json).collect();
    let mut text = section_header(&machine, plan) + "; ratio = this row / a node by itself\n";
    write_limit_table(&mut text, &verdicts);
    for backing in [FILE, RAM] {
        for (operation, depth) in LOADS {
            table(&mut text, samples, backing, operation, depth);
        }
    }
    text.push('\n');
    publish(context, "mirror", &figures, &text)?;
    context.pass(samples.len(), &limit::summary(&verdicts));
    Ok(())
}

fn verdicts(
    samples: &[Sample],
    logs: &[IntentLogWrites],
    resync: ResyncLatency,
) -> Option<Vec<LimitCheck>> {
    let echo_us = medians(samples, "bare echo", "none", Operation::Echo, 1)?.latency_us;
    let mut all = Vec::new();
    for backing in [FILE, RAM] {
        all.extend(cpu_limits(samples, backing)?);
        all.extend(latency_limits(samples, backing, echo_us)?);
        all.extend(read_limits(samples, backing)?);
    }
    let mut judge = |what: String, made_of: String, limit, measured, unit| {
        all.push(LimitCheck { what, derivation: made_of, limit, measured, unit });
    };
    for log in logs {
        let what = format!("writes of the log, depth {}, node {}", log.depth, log.node);
        let made_of = format!("{} / {}", log.pages, log.writes);
        judge(what, made_of, MAX_LOG_SHARE * 100.0, log.share() * 100.0, "%");
    }
    let ResyncLatency { in_sync_us: quiet_us, resyncing_us: during_us } = resync;
    let what = "latency, write, depth 1, at a, while b is brought in sync".to_owned();
    judge(
        what,
        format!("{MAX_RESYNC_SLOWDOWN} × {quiet_us:.1}"),
        MAX_RESYNC_SLOWDOWN * quiet_us,
        during_us,
        "µs",
    );
    Some(all)
}

/// Limits for writes, at both nodes together.
fn cpu_limits(samples: &[Sample], backing: &str) -> Option<Vec<LimitCheck>> {
    let mut all = Vec::new();
    for depth in [1, 32] {
        let spent = |server| {
            Some(medians(samples, server, backing, Operation::MinimalClientWrite, depth)?.server_us)
        };
        let alone = spent(STANDALONE)?;
        for at in [MIRRORED_VIA_A, MIRRORED_VIA_B] {
            let what = format!("CPU of both nodes, {backing}, write, depth {depth}, {at}");
            all.push(LimitCheck::at_most(what, MAX_CPU_RATIO, alone, spent(at)?));
        }
    }
    Some(all)
}

/// Limits for writes at depth 1.
fn latency_limits(samples: &[Sample], backing: &str, echo_us: f64) -> Option<Vec<LimitCheck>> {
    let takes = |server| {
        Some(medians(samples, server, backing, Operation::MinimalClientWrite, 1)?.latency_us)
    };
    let (alone, a, b) = (takes(STANDALONE)?, takes(MIRRORED_VIA_A)?, takes(MIRRORED_VIA_B)?);
    let judge = |(at, measured)| LimitCheck {
        what: format!("latency, {backing}, write, depth 1, {at}"),
        derivation: format!("{echo_us:.1} + {MAX_LATENCY_RATIO} × {alone:.1}"),
        limit: echo_us + MAX_LATENCY_RATIO * alone,
        measured,
        unit: "µs",
    };
    let mut all: Vec<_> = [(MIRRORED_VIA_A, a), (MIRRORED_VIA_B, b)].map(judge).into();
    all.push(LimitCheck {
        what: format!("the ways in apart, latency, {backing}, write, depth 1"),
        derivation: "15 %".to_owned(),
        limit: MAX_ENTRY_NODE_RATIO,
        measured: (a / b).max(b / a),
        unit: "times",
    });
    Some(all)
}

/// Reads must cost what they cost on a standalone node.
fn read_limits(samples: &[Sample], backing: &str) -> Option<Vec<LimitCheck>> {
    let of = |server, depth| medians(samples, server, backing, Operation::MinimalClientRead, depth);
    let mut all = Vec::new();
    for at in [MIRRORED_VIA_A, MIRRORED_VIA_B] {
        let cpu = (of(at, 32)?.server_us, of(STANDALONE, 32)?.server_us);
        let latency = (of(at, 1)?.latency_us, of(STANDALONE, 1)?.latency_us);
        for (what, (measured, alone)) in
            [("CPU, read, depth 32", cpu), ("latency, read, depth 1", latency)]
        {
            let what = format!("{what}, {backing}, {at}");
            all.push(LimitCheck::at_most(what, NOISE_RATIO, alone, measured));
        }
    }
    Some(all)
}

fn table(text: &mut String, samples: &[Sample], backing: &str, operation: Operation, depth: u32) {
    let _ = writeln!(text, "\n### 4 KiB {operation}, depth {depth}, {backing}, mirror\n");
    text.push_str("| volume | per second | latency µs | CPU of all servers µs each | ratio: latency | CPU |\n");
    text.push_str("|---|---:|---:|---:|---:|---:|\n");
    let alone = medians(samples, STANDALONE, backing, operation, depth);
    for server in [STANDALONE, ONE_REPLICA, MIRRORED_VIA_A, MIRRORED_VIA_B] {
        if let Some(figures) = medians(samples, server, backing, operation, depth) {
            row(text, server, figures, alone.filter(|_| server != STANDALONE));
        }
    }
    let echo = medians(samples, "bare echo", "none", Operation::Echo, depth);
    if let Some(echo) = echo.filter(|_| operation == Operation::MinimalClientWrite) {
        let Figures { per_second, latency_us, .. } = echo;
        let _ = writeln!(text, "| bare echo | {per_second:.0} | {latency_us:.1} |  |  |  |");
    }
}

fn row(text: &mut String, server: &str, this: Figures, alone: Option<Figures>) {
    let ratio = |pick: fn(&Figures) -> f64| {
        alone.map_or_else(String::new, |alone| format!("{:.2}", pick(&this) / pick(&alone)))
    };
    let Figures { per_second, latency_us, server_us } = this;
    let (latency, cpu) = (ratio(|f| f.latency_us), ratio(|f| f.server_us));
    let _ = writeln!(
        text,
        "| {server} | {per_second:.0} | {latency_us:.1} | {server_us:.2} | {latency} | {cpu} |"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::figures::Load;

    const QUIET: ResyncLatency = ResyncLatency { in_sync_us: 10.0, resyncing_us: 20.0 };

    /// All measurements: 10 µs on a standalone node, `mirrored` times that on a mirror.
    fn samples(mirrored: f64) -> Vec<Sample> {
        let sample = |server, backing, (operation, depth), time: f64| {
            let load = Load { operation, depth, seconds: 1 };
            let figures = Figures { per_second: 1e6 / time, latency_us: time, server_us: time };
            Sample::new(server, backing, &load, figures)
        };
        let mut samples = vec![sample("bare echo", "none", (Operation::Echo, 1), 5.0)];
        let all = [FILE, RAM].into_iter().flat_map(|backing| LOADS.map(|load| (backing, load)));
        for (backing, load) in all {
            let mirrored = if load.0 == Operation::MinimalClientWrite { mirrored } else { 1.0 };
            for (server, times) in
                [(STANDALONE, 1.0), (MIRRORED_VIA_A, mirrored), (MIRRORED_VIA_B, mirrored)]
            {
                samples.push(sample(server, backing, load, 10.0 * times));
            }
        }
        samples
    }

    fn missed(samples: &[Sample], pages: u64) -> Vec<String> {
        let log = IntentLogWrites { node: "a", depth: 32, writes: 1000, pages };
        let verdicts = verdicts(samples, &[log], QUIET).unwrap();
        verdicts.into_iter().filter(|v| !v.is_held()).map(|v| v.what).collect()
    }

    #[test]
    fn limits_are_held_up_to_their_value() {
        assert_eq!(missed(&samples(1.8), 30), Vec::<String>::new());
        assert_eq!(missed(&samples(1.8), 31), ["writes of the log, depth 32, node a"]);
        let late = [FILE, RAM].into_iter().flat_map(|backing| {
            [MIRRORED_VIA_A, MIRRORED_VIA_B]
                .map(|at| format!("latency, {backing}, write, depth 1, {at}"))
        });
        assert_eq!(missed(&samples(1.9), 30), late.collect::<Vec<_>>());
        assert_eq!(missed(&samples(3.1), 30).len(), 12);
        assert!(verdicts(&samples(1.0)[1..], &[], QUIET).is_none());
        let slow = ResyncLatency { resyncing_us: 20.1, ..QUIET };
        let last = verdicts(&samples(1.0), &[], slow).unwrap().pop().unwrap();
        assert_eq!(last.result_text(), "**missed**");
    }

    #[test]
    fn the_page_says_limits_and_ratios() {
        let samples = samples(2.0);
        let mut text = String::new();
        write_limit_table(&mut text, &verdicts(&samples, &[], QUIET).unwrap());
        let held = "| CPU of both nodes, RAM, write, depth 32, mirrored, at a | 3 × 10.00 | 30.00 µs | 20.00 µs | held |";
        assert!(text.contains(held), "{text}");
        let missed = "| 5.0 + 1.3 × 10.0 | 18.00 µs | 20.00 µs | **missed** |";
        assert!(text.contains(missed), "{text}");
        table(&mut text, &samples, RAM, Operation::MinimalClientWrite, 1);
        assert!(text.contains("| mirrored, at a | 50000 | 20.0 | 20.00 | 2.00 | 2.00 |"), "{text}");
        assert!(text.contains("| bare echo | 200000 | 5.0 |  |  |  |"), "{text}");
    }
}
