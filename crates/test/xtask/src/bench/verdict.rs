//! What mirroring costs beside what it may cost.

use super::{
    Plan,
    limit::{self, Verdict, limits},
    machine,
    measure::{Figures, Operation, Sample},
    mirror::{ALONE, AT_A, AT_B, FILE, LOADS, ONE_COPY, RAM},
    page::{head, medians, publish},
};
use crate::house::House;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// A mirrored write may take so many times the processor time of one that is not, at both nodes together,
const CPU: f64 = 3.0;
/// and so many times its time beyond an echo between the nodes.
const LATENCY: f64 = 1.3;
/// So much apart may the ways in be, either way.
const APART: f64 = 1.15;
/// So much of a difference between two figures that are the same is noise.
const NOISE: f64 = 1.05;
/// So many operations, and bytes, may the intent log write for each that clients write.
const LOG: f64 = 0.03;

/// So many times its time may a write take while another copy is brought in sync.
const RESYNC: f64 = 2.0;

/// What one write at a time takes, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resync {
    /// With both copies in sync.
    pub(super) quiet_us: f64,
    /// While one is brought in sync.
    pub(super) during_us: f64,
}

/// What an intent log has written while clients wrote.
#[derive(Clone, Debug)]
pub(super) struct LogCost {
    pub(super) node: &'static str,
    pub(super) depth: u32,
    /// Of clients.
    pub(super) writes: u64,
    /// Of the log. A page is as long as what clients write, so bytes have the same share.
    pub(super) pages: u64,
}

impl LogCost {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn share(&self) -> f64 {
        self.pages as f64 / self.writes as f64
    }

    fn json(&self) -> Value {
        let Self { node, depth, writes, pages } = self;
        json!({ "node": node, "depth": depth, "client_writes": writes, "log_writes": pages })
    }
}

/// Writes the figures and the page, and shows what the page says.
pub(super) fn write(
    house: &House,
    plan: Plan,
    samples: &[Sample],
    logs: &[LogCost],
    resync: Resync,
) -> Result<()> {
    let machine = machine::describe(&machine::store());
    let verdicts = verdicts(samples, logs, resync).context("something was not measured")?;
    let mut figures = limit::figures(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    figures["intent_log"] = logs.iter().map(LogCost::json).collect();
    let mut text = head(&machine, plan) + "; ratio = this row / a node by itself\n";
    limits(&mut text, &verdicts);
    for backing in [FILE, RAM] {
        for (operation, depth) in LOADS {
            table(&mut text, samples, backing, operation, depth);
        }
    }
    text.push('\n');
    publish(house, "mirror", &figures, &text)?;
    house.pass(samples.len(), &limit::tally(&verdicts));
    Ok(())
}

fn verdicts(samples: &[Sample], logs: &[LogCost], resync: Resync) -> Option<Vec<Verdict>> {
    let echo_us = medians(samples, "bare echo", "none", Operation::Echo, 1)?.latency_us;
    let mut all = Vec::new();
    for backing in [FILE, RAM] {
        all.extend(processor_time(samples, backing)?);
        all.extend(latency(samples, backing, echo_us)?);
        all.extend(reads(samples, backing)?);
    }
    let mut judge = |what: String, made_of: String, limit, measured, unit| {
        all.push(Verdict { what, made_of, limit, measured, unit });
    };
    for log in logs {
        let what = format!("writes of the log, depth {}, node {}", log.depth, log.node);
        let made_of = format!("{} / {}", log.pages, log.writes);
        judge(what, made_of, LOG * 100.0, log.share() * 100.0, "%");
    }
    let Resync { quiet_us, during_us } = resync;
    let what = "latency, write, depth 1, at a, while b is brought in sync".to_owned();
    judge(what, format!("{RESYNC} × {quiet_us:.1}"), RESYNC * quiet_us, during_us, "µs");
    Some(all)
}

/// Of writes, at both nodes together.
fn processor_time(samples: &[Sample], backing: &str) -> Option<Vec<Verdict>> {
    let mut all = Vec::new();
    for depth in [1, 32] {
        let spent = |server| {
            Some(medians(samples, server, backing, Operation::LeanWrite, depth)?.server_us)
        };
        let alone = spent(ALONE)?;
        for at in [AT_A, AT_B] {
            let what = format!("CPU of both nodes, {backing}, write, depth {depth}, {at}");
            all.push(Verdict::at_most(what, CPU, alone, spent(at)?));
        }
    }
    Some(all)
}

/// Of writes, one at a time.
fn latency(samples: &[Sample], backing: &str, echo_us: f64) -> Option<Vec<Verdict>> {
    let takes =
        |server| Some(medians(samples, server, backing, Operation::LeanWrite, 1)?.latency_us);
    let (alone, a, b) = (takes(ALONE)?, takes(AT_A)?, takes(AT_B)?);
    let judge = |(at, measured)| Verdict {
        what: format!("latency, {backing}, write, depth 1, {at}"),
        made_of: format!("{echo_us:.1} + {LATENCY} × {alone:.1}"),
        limit: echo_us + LATENCY * alone,
        measured,
        unit: "µs",
    };
    let mut all: Vec<_> = [(AT_A, a), (AT_B, b)].map(judge).into();
    all.push(Verdict {
        what: format!("the ways in apart, latency, {backing}, write, depth 1"),
        made_of: "15 %".to_owned(),
        limit: APART,
        measured: (a / b).max(b / a),
        unit: "times",
    });
    Some(all)
}

/// They cost what they cost at a node by itself.
fn reads(samples: &[Sample], backing: &str) -> Option<Vec<Verdict>> {
    let of = |server, depth| medians(samples, server, backing, Operation::LeanRead, depth);
    let mut all = Vec::new();
    for at in [AT_A, AT_B] {
        let cpu = (of(at, 32)?.server_us, of(ALONE, 32)?.server_us);
        let latency = (of(at, 1)?.latency_us, of(ALONE, 1)?.latency_us);
        for (what, (measured, alone)) in
            [("CPU, read, depth 32", cpu), ("latency, read, depth 1", latency)]
        {
            let what = format!("{what}, {backing}, {at}");
            all.push(Verdict::at_most(what, NOISE, alone, measured));
        }
    }
    Some(all)
}

fn table(text: &mut String, samples: &[Sample], backing: &str, operation: Operation, depth: u32) {
    let _ = writeln!(text, "\n### 4 KiB {operation}, depth {depth}, {backing}, mirror\n");
    text.push_str("| volume | per second | latency µs | CPU of all servers µs each | ratio: latency | CPU |\n");
    text.push_str("|---|---:|---:|---:|---:|---:|\n");
    let alone = medians(samples, ALONE, backing, operation, depth);
    for server in [ALONE, ONE_COPY, AT_A, AT_B] {
        if let Some(figures) = medians(samples, server, backing, operation, depth) {
            row(text, server, figures, alone.filter(|_| server != ALONE));
        }
    }
    let echo = medians(samples, "bare echo", "none", Operation::Echo, depth);
    if let Some(echo) = echo.filter(|_| operation == Operation::LeanWrite) {
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
    use crate::bench::measure::Load;

    const QUIET: Resync = Resync { quiet_us: 10.0, during_us: 20.0 };

    /// Everything measured: at a node by itself 10 µs, mirrored so many times that.
    fn samples(mirrored: f64) -> Vec<Sample> {
        let sample = |server, backing, (operation, depth), time: f64| {
            let load = Load { operation, depth, seconds: 1 };
            let figures = Figures { per_second: 1e6 / time, latency_us: time, server_us: time };
            Sample::new(server, backing, &load, figures)
        };
        let mut samples = vec![sample("bare echo", "none", (Operation::Echo, 1), 5.0)];
        let all = [FILE, RAM].into_iter().flat_map(|backing| LOADS.map(|load| (backing, load)));
        for (backing, load) in all {
            let mirrored = if load.0 == Operation::LeanWrite { mirrored } else { 1.0 };
            for (server, times) in [(ALONE, 1.0), (AT_A, mirrored), (AT_B, mirrored)] {
                samples.push(sample(server, backing, load, 10.0 * times));
            }
        }
        samples
    }

    fn missed(samples: &[Sample], pages: u64) -> Vec<String> {
        let log = LogCost { node: "a", depth: 32, writes: 1000, pages };
        let verdicts = verdicts(samples, &[log], QUIET).unwrap();
        verdicts.into_iter().filter(|v| !v.is_held()).map(|v| v.what).collect()
    }

    #[test]
    fn limits_are_held_up_to_their_value() {
        assert_eq!(missed(&samples(1.8), 30), Vec::<String>::new());
        assert_eq!(missed(&samples(1.8), 31), ["writes of the log, depth 32, node a"]);
        let late = [FILE, RAM].into_iter().flat_map(|backing| {
            [AT_A, AT_B].map(|at| format!("latency, {backing}, write, depth 1, {at}"))
        });
        assert_eq!(missed(&samples(1.9), 30), late.collect::<Vec<_>>());
        assert_eq!(missed(&samples(3.1), 30).len(), 12);
        assert!(verdicts(&samples(1.0)[1..], &[], QUIET).is_none());
        let slow = Resync { during_us: 20.1, ..QUIET };
        let last = verdicts(&samples(1.0), &[], slow).unwrap().pop().unwrap();
        assert_eq!(last.word(), "**missed**");
    }

    #[test]
    fn the_page_says_limits_and_ratios() {
        let samples = samples(2.0);
        let mut text = String::new();
        limits(&mut text, &verdicts(&samples, &[], QUIET).unwrap());
        let held = "| CPU of both nodes, RAM, write, depth 32, mirrored, at a | 3 × 10.00 | 30.00 µs | 20.00 µs | held |";
        assert!(text.contains(held), "{text}");
        let missed = "| 5.0 + 1.3 × 10.0 | 18.00 µs | 20.00 µs | **missed** |";
        assert!(text.contains(missed), "{text}");
        table(&mut text, &samples, RAM, Operation::LeanWrite, 1);
        assert!(text.contains("| mirrored, at a | 50000 | 20.0 | 20.00 | 2.00 | 2.00 |"), "{text}");
        assert!(text.contains("| bare echo | 200000 | 5.0 |  |  |  |"), "{text}");
    }
}
