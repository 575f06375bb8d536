//! `./run bench raid`: the cost of RAID above disks in memory, by
//! `crates/storage/raid/examples/raid.rs`.
//!
//! Times are those of the RAID layer and of its calls to disks that take no time. Disk operations
//! are counted; the counts do not depend on the machine.

use super::{
    BenchPlan,
    generator::command_on_load_cpu,
    limit::{self, LimitCheck},
    machine,
    results_page::{self, median, section_header},
};
use crate::{install, node::Profile, run_context::RunContext};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fmt::Write;

pub(super) const EXAMPLE: &str = "raid";

/// The most a small read may add to the bare disk's time, in microseconds,
const MAX_READ_OVERHEAD_US: f64 = 0.5;
/// and the most a small write at RAID 5 may take with all its disk operations.
const MAX_SMALL_WRITE_US: f64 = 6.0;
/// The least bandwidth of large operations, relative to bare disks with the same processor time.
const MIN_BANDWIDTH_SHARE: f64 = 0.85;
/// The most disk operations of a small write, relative to the four or six it needs.
const MAX_WRITE_AMPLIFICATION: f64 = 1.05;
/// Bytes written for each byte of large writes at RAID 5, 4+1.
const MAX_BYTES_WRITTEN_RATIO: f64 = 1.30;
/// The largest slowdown of a small operation during a rebuild.
const MAX_REBUILD_SLOWDOWN: f64 = 2.0;
/// Depth of small writes in the steady state that counts.
const STEADY_DEPTH: u64 = 128;
/// Operations whose data stays in caches, for the limits of time: data that just arrived is cached.
const HOT_OPERATIONS: u64 = 8;

const SMALL: u64 = 4096;
const LARGE: u64 = 1 << 20;

/// The packages this benchmark needs.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NETWORK]
}

/// A case in one repetition.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    level: String,
    bytes: u64,
    kind: SampleKind,
}

#[derive(Clone, Debug, PartialEq)]
enum SampleKind {
    /// Microseconds of an operation here and on bare disks, by a client that reuses the data of
    /// `operations` operations. For long writes also the time of their parity and disk writes
    /// alone.
    Time { op: String, operations: u64, us: f64, raw_us: f64, plain_us: Option<f64> },
    /// Microseconds of single small operations: without a rebuild, during one, and the longest
    /// during one; milliseconds of the rebuild, and of writing a disk of that size.
    Rebuild { normal_us: f64, busy_us: f64, longest_us: f64, rebuild_ms: f64, stream_ms: f64 },
    /// Disk operations and bytes for each write, at `depth` writes in flight; bytes are multiples
    /// of the write's length.
    Counts { depth: u64, reads: f64, writes: f64, read_bytes: f64, written_bytes: f64 },
}

impl Sample {
    fn read(found: &Value) -> Option<Self> {
        let kind = if let Some(op) = found["op"].as_str() {
            let [us, raw_us] = ["us", "raw_us"].map(|name| found[name].as_f64());
            let operations = found["operations"].as_u64()?;
            let plain_us = found["plain_us"].as_f64();
            SampleKind::Time { op: op.to_owned(), operations, us: us?, raw_us: raw_us?, plain_us }
        } else if found["rebuild"].is_object() {
            let of = |name| found["rebuild"][name].as_f64();
            SampleKind::Rebuild {
                normal_us: of("normal_us")?,
                busy_us: of("busy_us")?,
                longest_us: of("longest_us")?,
                rebuild_ms: of("rebuild_ms")?,
                stream_ms: of("stream_ms")?,
            }
        } else {
            let of = |name| found["counts"][name].as_f64();
            SampleKind::Counts {
                depth: found["depth"].as_u64()?,
                reads: of("reads")?,
                writes: of("writes")?,
                read_bytes: of("read_bytes")?,
                written_bytes: of("written_bytes")?,
            }
        };
        let (level, bytes) = (found["level"].as_str()?.to_owned(), found["bytes"].as_u64()?);
        Some(Self { level, bytes, kind })
    }

    fn json(&self) -> Value {
        let Self { level, bytes, kind } = self;
        match kind {
            SampleKind::Time { op, operations, us, raw_us, plain_us } => json!({
                "level": level, "bytes": bytes, "op": op, "operations": operations,
                "us": us, "raw_us": raw_us, "plain_us": plain_us,
            }),
            SampleKind::Rebuild { normal_us, busy_us, longest_us, rebuild_ms, stream_ms } => {
                json!({
                    "level": level, "bytes": bytes, "rebuild": {
                        "normal_us": normal_us, "busy_us": busy_us, "longest_us": longest_us,
                        "rebuild_ms": rebuild_ms, "stream_ms": stream_ms,
                    },
                })
            }
            SampleKind::Counts { depth, reads, writes, read_bytes, written_bytes } => json!({
                "level": level, "bytes": bytes, "depth": depth, "reads": reads, "writes": writes,
                "read_bytes": read_bytes, "written_bytes": written_bytes,
            }),
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        let same = |a: &SampleKind, b: &SampleKind| match (a, b) {
            (
                SampleKind::Time { op, operations, .. },
                SampleKind::Time { op: other, operations: others, .. },
            ) => (op, operations) == (other, others),
            (SampleKind::Counts { depth, .. }, SampleKind::Counts { depth: other, .. }) => {
                depth == other
            }
            (SampleKind::Rebuild { .. }, SampleKind::Rebuild { .. }) => true,
            _ => false,
        };
        self.level == other.level && self.bytes == other.bytes && same(&self.kind, &other.kind)
    }

    fn has_checksums(&self) -> bool {
        self.level.ends_with("checksums")
    }

    fn is_raid_5(&self) -> bool {
        self.level.starts_with("RAID 5")
    }
}

/// Measures and writes `bench/README.md` and `bench/results/raid.json`.
pub(super) fn run(context: &RunContext, plan: BenchPlan) -> Result<()> {
    let program = Profile::Dist.example(context, EXAMPLE);
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        context.display.begin_step(&format!("repetition {repetition} of {}", plan.repetitions));
        let done = command_on_load_cpu(&program).arg(plan.seconds.to_string()).output();
        let done = done.context("the example cannot be started")?;
        ensure!(done.status.success(), "{EXAMPLE}: {}", String::from_utf8_lossy(&done.stderr));
        for line in String::from_utf8_lossy(&done.stdout).lines() {
            let found: Value = serde_json::from_str(line).context("a line is no JSON")?;
            samples.push(Sample::read(&found).context("a figure is missing")?);
        }
    }
    let machine = machine::describe(&machine::network_programs());
    let cases = medians(&samples);
    let verdicts: Vec<LimitCheck> = cases.iter().flat_map(verdicts).collect();
    let figures = limit::result_json(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    let mut text = section_header(&machine, plan) + "\n";
    limit::write_limit_table(&mut text, &verdicts);
    table(&mut text, &cases);
    results_page::publish(context, "raid", &figures, &text)?;
    context.pass(samples.len(), &limit::summary(&verdicts));
    Ok(())
}

/// Medians of equal cases, in the order of the first repetition. Counts never vary.
fn medians(samples: &[Sample]) -> Vec<Sample> {
    let mut cases: Vec<Sample> = Vec::new();
    for sample in samples {
        if cases.iter().any(|case| case.is_like(sample)) {
            continue;
        }
        let alike = samples.iter().filter(|s| s.is_like(sample));
        let times: Vec<(f64, f64, Option<f64>)> = alike
            .filter_map(|s| match s.kind {
                SampleKind::Time { us, raw_us, plain_us, .. } => Some((us, raw_us, plain_us)),
                SampleKind::Counts { .. } | SampleKind::Rebuild { .. } => None,
            })
            .collect();
        let kind = match &sample.kind {
            SampleKind::Time { op, operations, plain_us, .. } => SampleKind::Time {
                op: op.clone(),
                operations: *operations,
                us: median(times.iter().map(|times| times.0).collect()),
                raw_us: median(times.iter().map(|times| times.1).collect()),
                plain_us: plain_us.map(|_| median(times.iter().filter_map(|t| t.2).collect())),
            },
            simulated => simulated.clone(),
        };
        cases.push(Sample { kind, ..sample.clone() });
    }
    cases
}

/// The limits of a case; cases with checksums have none.
fn verdicts(case: &Sample) -> Vec<LimitCheck> {
    if case.has_checksums() {
        return Vec::new();
    }
    let level = &case.level;
    let verdict = |what: &str, made_of: String, limit, measured, unit| LimitCheck {
        what: format!("{level}, {what}"),
        derivation: made_of,
        limit,
        measured,
        unit,
    };
    match (&case.kind, case.bytes) {
        (SampleKind::Time { op, us, raw_us, .. }, SMALL) if op == "read" => {
            let made_of = format!("{MAX_READ_OVERHEAD_US} + {raw_us:.2}");
            vec![verdict("CPU of a 4 KiB read", made_of, MAX_READ_OVERHEAD_US + raw_us, *us, "µs")]
        }
        (SampleKind::Time { us, .. }, SMALL) if case.is_raid_5() => {
            vec![verdict("CPU of a 4 KiB write", "given".to_owned(), MAX_SMALL_WRITE_US, *us, "µs")]
        }
        (SampleKind::Time { op, operations: HOT_OPERATIONS, us, raw_us, .. }, LARGE) => {
            // The data of four disks is written to five or six disks.
            let moved = match (op.as_str(), case.is_raid_5()) {
                ("write", true) => 1.25,
                ("write", false) => 1.5,
                _ => 1.0,
            };
            let made_of = format!("{moved} / {MIN_BANDWIDTH_SHARE} × {raw_us:.1}");
            let limit = moved * raw_us / MIN_BANDWIDTH_SHARE;
            vec![verdict(&format!("CPU of a 1 MiB {op}"), made_of, limit, *us, "µs")]
        }
        (SampleKind::Rebuild { normal_us, busy_us, .. }, _) => {
            let made_of = format!("{MAX_REBUILD_SLOWDOWN} × {normal_us:.0}");
            let what = "a 4 KiB operation beside a rebuild, one at a time";
            vec![verdict(what, made_of, MAX_REBUILD_SLOWDOWN * normal_us, *busy_us, "µs")]
        }
        (SampleKind::Counts { depth, reads, writes, .. }, SMALL) if *depth == STEADY_DEPTH => {
            let needed = if case.is_raid_5() { 4.0 } else { 6.0 };
            let what = format!("disk operations of a 4 KiB write, {depth} at a time");
            let made_of = format!("{MAX_WRITE_AMPLIFICATION} × {needed}");
            vec![verdict(&what, made_of, MAX_WRITE_AMPLIFICATION * needed, reads + writes, "")]
        }
        (SampleKind::Counts { depth, read_bytes, written_bytes, .. }, LARGE)
            if case.is_raid_5() =>
        {
            let what = |word| format!("bytes {word} for each of 1 MiB writes, {depth} at a time");
            let given = || "given".to_owned();
            vec![
                verdict(&what("written"), given(), MAX_BYTES_WRITTEN_RATIO, *written_bytes, ""),
                verdict(&what("read"), given(), 0.0, *read_bytes, ""),
            ]
        }
        _ => Vec::new(),
    }
}

fn table(text: &mut String, cases: &[Sample]) {
    text.push_str("\n### Time\n\n| level | operation | KiB | operations' data | µs | of bare disks | with parities |\n|---|---|---:|---:|---:|---:|---:|\n");
    for Sample { level, bytes, kind } in cases {
        if let SampleKind::Time { op, operations, us, raw_us, plain_us } = kind {
            let (kib, plain) =
                (bytes / 1024, plain_us.map_or(String::new(), |us| format!("{us:.2}")));
            let _ = writeln!(
                text,
                "| {level} | {op} | {kib} | {operations} | {us:.2} | {raw_us:.2} | {plain} |"
            );
        }
    }
    text.push_str("\n### A rebuild beside a client\n\nDisks of 100 µs and 2 GB/s, in simulated time.\n\n| level | 4 KiB operation, µs | beside a rebuild | the longest | rebuild, ms | the disk alone |\n|---|---:|---:|---:|---:|---:|\n");
    for Sample { level, kind, .. } in cases {
        if let SampleKind::Rebuild { normal_us, busy_us, longest_us, rebuild_ms, stream_ms } = kind
        {
            let _ = writeln!(
                text,
                "| {level} | {normal_us:.0} | {busy_us:.0} | {longest_us:.0} | {rebuild_ms:.1} | {stream_ms:.1} |"
            );
        }
    }
    text.push_str("\n### What disks do for a write\n\n| level | KiB | at a time | reads | writes | bytes read for each | written |\n|---|---:|---:|---:|---:|---:|---:|\n");
    for Sample { level, bytes, kind } in cases {
        if let SampleKind::Counts { depth, reads, writes, read_bytes, written_bytes } = kind {
            let kib = bytes / 1024;
            let _ = writeln!(
                text,
                "| {level} | {kib} | {depth} | {reads:.2} | {writes:.2} | {read_bytes:.2} | {written_bytes:.2} |"
            );
        }
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(op: &str, bytes: u64, operations: u64, us: f64, raw_us: f64) -> Sample {
        let found = json!({
            "level": "RAID 5, 4+1", "bytes": bytes, "op": op, "operations": operations,
            "us": us, "raw_us": raw_us,
        });
        Sample::read(&found).unwrap()
    }

    fn held(case: &Sample) -> Vec<bool> {
        verdicts(case).iter().map(LimitCheck::is_held).collect()
    }

    #[test]
    fn limits_are_those_of_the_issue() {
        assert_eq!(held(&time("read", SMALL, HOT_OPERATIONS, 0.7, 0.2)), [true]);
        assert_eq!(held(&time("read", SMALL, HOT_OPERATIONS, 0.71, 0.2)), [false]);
        assert_eq!(held(&time("write", SMALL, HOT_OPERATIONS, 6.1, 0.2)), [false]);
        assert_eq!(held(&time("write", LARGE, HOT_OPERATIONS, 12.4, 8.4)), [false]);
        assert_eq!(held(&time("write", LARGE, HOT_OPERATIONS, 12.3, 8.4)), [true]);
        assert!(held(&time("write", LARGE, 64, 12.4, 8.4)).is_empty());
        let counts = |bytes: u64, depth: u64, writes: f64, written: f64| {
            let counts = json!({ "reads": 2.0, "writes": writes, "read_bytes": 0.0, "written_bytes": written });
            let found =
                json!({ "level": "RAID 5, 4+1", "bytes": bytes, "depth": depth, "counts": counts });
            Sample::read(&found).unwrap()
        };
        assert_eq!(held(&counts(SMALL, 128, 2.2, 3.0)), [true]);
        assert_eq!(held(&counts(SMALL, 128, 2.3, 3.0)), [false]);
        assert!(held(&counts(SMALL, 32, 2.3, 3.0)).is_empty());
        assert_eq!(held(&counts(LARGE, 8, 20.0, 1.31)), [false, true]);
    }

    #[test]
    fn a_rebuild_may_double_what_an_operation_takes() {
        let beside = |busy: f64| {
            let rebuild = json!({
                "normal_us": 200.0, "busy_us": busy, "longest_us": 900.0, "rebuild_ms": 60.0, "stream_ms": 4.0
            });
            let found = json!({ "level": "RAID 5, 4+1", "bytes": SMALL, "rebuild": rebuild });
            Sample::read(&found).unwrap()
        };
        assert_eq!((held(&beside(400.0)), held(&beside(401.0))), (vec![true], vec![false]));
        assert_eq!(Sample::read(&beside(300.0).json()), Some(beside(300.0)));
    }

    #[test]
    fn what_was_measured_alike_is_one_row() {
        let samples = [1.0, 9.0, 2.0].map(|us| time("read", SMALL, HOT_OPERATIONS, us, 0.1));
        assert_eq!(medians(&samples), [time("read", SMALL, HOT_OPERATIONS, 2.0, 0.1)]);
        let mut text = String::new();
        table(&mut text, &medians(&samples));
        assert!(text.contains("| RAID 5, 4+1 | read | 4 | 8 | 2.00 | 0.10 |  |"), "{text}");
        assert!(Sample::read(&json!({})).is_none());
    }
}
