//! `./run bench raid`: what RAID costs above disks in memory, by `crates/storage/layers/examples/raid.rs`.
//!
//! Time is the layer's own, with that of what it asks of disks that take none; operations of disks are counted, and do not
//! depend on the machine.

use super::{
    Plan,
    generator::pinned,
    limit::{self, Verdict},
    machine,
    page::{self, head, median},
};
use crate::{house::House, install, node::Profile};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fmt::Write;

pub(super) const EXAMPLE: &str = "raid";

/// Above the bare disk's time a small read may take so many microseconds,
const READ_ABOVE: f64 = 0.5;
/// and a small write at RAID 5, with all it does with disks.
const WRITE: f64 = 6.0;
/// Of what disks move for the same processor time large ones move.
const SHARE: f64 = 0.85;
/// Operations of disks for a small write, beside the four or six that there must be.
const HOLE: f64 = 1.05;
/// Bytes written for each byte of large writes at RAID 5, 4+1.
const WRITTEN: f64 = 1.30;
/// So many times what it takes else a small operation may take while a disk is rebuilt.
const BUSY: f64 = 2.0;
/// Small writes under way in the steady state that counts.
const STEADY: u64 = 128;
/// Operations whose data a client has where the limits of time count: what has just arrived is in caches.
const FEW: u64 = 8;

const SMALL: u64 = 4096;
const LARGE: u64 = 1 << 20;

/// What must be installed.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NETWORK]
}

/// A case in one repetition.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    level: String,
    bytes: u64,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// Microseconds of an operation, and of the same on bare disks, by a client that has the data of so many operations. Of long writes
    /// also those of their parities and disks, with nothing else.
    Time { op: String, operations: u64, us: f64, raw_us: f64, plain_us: Option<f64> },
    /// Microseconds of a small operation, one at a time: without and with a rebuild beside it, and of the longest with it;
    /// milliseconds of the rebuild, and of the disk to write as much.
    Rebuild { normal_us: f64, busy_us: f64, longest_us: f64, rebuild_ms: f64, stream_ms: f64 },
    /// What disks do for each write, so many of which are under way; bytes are multiples of the write's.
    Counts { depth: u64, reads: f64, writes: f64, read_bytes: f64, written_bytes: f64 },
}

impl Sample {
    fn read(found: &Value) -> Option<Self> {
        let kind = if let Some(op) = found["op"].as_str() {
            let [us, raw_us] = ["us", "raw_us"].map(|name| found[name].as_f64());
            let operations = found["operations"].as_u64()?;
            let plain_us = found["plain_us"].as_f64();
            Kind::Time { op: op.to_owned(), operations, us: us?, raw_us: raw_us?, plain_us }
        } else if found["rebuild"].is_object() {
            let of = |name| found["rebuild"][name].as_f64();
            Kind::Rebuild {
                normal_us: of("normal_us")?,
                busy_us: of("busy_us")?,
                longest_us: of("longest_us")?,
                rebuild_ms: of("rebuild_ms")?,
                stream_ms: of("stream_ms")?,
            }
        } else {
            let of = |name| found["counts"][name].as_f64();
            Kind::Counts {
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
            Kind::Time { op, operations, us, raw_us, plain_us } => json!({
                "level": level, "bytes": bytes, "op": op, "operations": operations,
                "us": us, "raw_us": raw_us, "plain_us": plain_us,
            }),
            Kind::Rebuild { normal_us, busy_us, longest_us, rebuild_ms, stream_ms } => json!({
                "level": level, "bytes": bytes, "rebuild": {
                    "normal_us": normal_us, "busy_us": busy_us, "longest_us": longest_us,
                    "rebuild_ms": rebuild_ms, "stream_ms": stream_ms,
                },
            }),
            Kind::Counts { depth, reads, writes, read_bytes, written_bytes } => json!({
                "level": level, "bytes": bytes, "depth": depth, "reads": reads, "writes": writes,
                "read_bytes": read_bytes, "written_bytes": written_bytes,
            }),
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        let same = |a: &Kind, b: &Kind| match (a, b) {
            (
                Kind::Time { op, operations, .. },
                Kind::Time { op: other, operations: others, .. },
            ) => (op, operations) == (other, others),
            (Kind::Counts { depth, .. }, Kind::Counts { depth: other, .. }) => depth == other,
            (Kind::Rebuild { .. }, Kind::Rebuild { .. }) => true,
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
pub(super) fn run(house: &House, plan: Plan) -> Result<()> {
    let program = Profile::Release.example(house, EXAMPLE);
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        house.display.working(&format!("repetition {repetition} of {}", plan.repetitions));
        let done = pinned(&program).arg(plan.seconds.to_string()).output();
        let done = done.context("the example cannot be started")?;
        ensure!(done.status.success(), "{EXAMPLE}: {}", String::from_utf8_lossy(&done.stderr));
        for line in String::from_utf8_lossy(&done.stdout).lines() {
            let found: Value = serde_json::from_str(line).context("a line is no JSON")?;
            samples.push(Sample::read(&found).context("a figure is missing")?);
        }
    }
    let machine = machine::describe(&machine::network());
    let cases = medians(&samples);
    let verdicts: Vec<Verdict> = cases.iter().flat_map(verdicts).collect();
    let figures = limit::figures(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    let mut text = head(&machine, plan) + "\n";
    limit::limits(&mut text, &verdicts);
    table(&mut text, &cases);
    page::publish(house, "raid", &figures, &text)?;
    house.pass(samples.len(), &limit::tally(&verdicts));
    Ok(())
}

/// Medians of what was measured alike, in the order of the first repetition. Counts are always the same.
fn medians(samples: &[Sample]) -> Vec<Sample> {
    let mut cases: Vec<Sample> = Vec::new();
    for sample in samples {
        if cases.iter().any(|case| case.is_like(sample)) {
            continue;
        }
        let alike = samples.iter().filter(|s| s.is_like(sample));
        let times: Vec<(f64, f64, Option<f64>)> = alike
            .filter_map(|s| match s.kind {
                Kind::Time { us, raw_us, plain_us, .. } => Some((us, raw_us, plain_us)),
                Kind::Counts { .. } | Kind::Rebuild { .. } => None,
            })
            .collect();
        let kind = match &sample.kind {
            Kind::Time { op, operations, plain_us, .. } => Kind::Time {
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

/// What is demanded of a case: of checksums nothing is.
fn verdicts(case: &Sample) -> Vec<Verdict> {
    if case.has_checksums() {
        return Vec::new();
    }
    let level = &case.level;
    let verdict = |what: &str, made_of: String, limit, measured, unit| Verdict {
        what: format!("{level}, {what}"),
        made_of,
        limit,
        measured,
        unit,
    };
    match (&case.kind, case.bytes) {
        (Kind::Time { op, us, raw_us, .. }, SMALL) if op == "read" => {
            let made_of = format!("{READ_ABOVE} + {raw_us:.2}");
            vec![verdict("CPU of a 4 KiB read", made_of, READ_ABOVE + raw_us, *us, "µs")]
        }
        (Kind::Time { us, .. }, SMALL) if case.is_raid_5() => {
            vec![verdict("CPU of a 4 KiB write", "given".to_owned(), WRITE, *us, "µs")]
        }
        (Kind::Time { op, operations: FEW, us, raw_us, .. }, LARGE) => {
            // Of four disks' data five or six disks are written.
            let moved = match (op.as_str(), case.is_raid_5()) {
                ("write", true) => 1.25,
                ("write", false) => 1.5,
                _ => 1.0,
            };
            let made_of = format!("{moved} / {SHARE} × {raw_us:.1}");
            let limit = moved * raw_us / SHARE;
            vec![verdict(&format!("CPU of a 1 MiB {op}"), made_of, limit, *us, "µs")]
        }
        (Kind::Rebuild { normal_us, busy_us, .. }, _) => {
            let made_of = format!("{BUSY} × {normal_us:.0}");
            let what = "a 4 KiB operation beside a rebuild, one at a time";
            vec![verdict(what, made_of, BUSY * normal_us, *busy_us, "µs")]
        }
        (Kind::Counts { depth, reads, writes, .. }, SMALL) if *depth == STEADY => {
            let needed = if case.is_raid_5() { 4.0 } else { 6.0 };
            let what = format!("disk operations of a 4 KiB write, {depth} at a time");
            let made_of = format!("{HOLE} × {needed}");
            vec![verdict(&what, made_of, HOLE * needed, reads + writes, "")]
        }
        (Kind::Counts { depth, read_bytes, written_bytes, .. }, LARGE) if case.is_raid_5() => {
            let what = |word| format!("bytes {word} for each of 1 MiB writes, {depth} at a time");
            let given = || "given".to_owned();
            vec![
                verdict(&what("written"), given(), WRITTEN, *written_bytes, ""),
                verdict(&what("read"), given(), 0.0, *read_bytes, ""),
            ]
        }
        _ => Vec::new(),
    }
}

fn table(text: &mut String, cases: &[Sample]) {
    text.push_str("\n### Time\n\n| level | operation | KiB | operations' data | µs | of bare disks | with parities |\n|---|---|---:|---:|---:|---:|---:|\n");
    for Sample { level, bytes, kind } in cases {
        if let Kind::Time { op, operations, us, raw_us, plain_us } = kind {
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
        if let Kind::Rebuild { normal_us, busy_us, longest_us, rebuild_ms, stream_ms } = kind {
            let _ = writeln!(
                text,
                "| {level} | {normal_us:.0} | {busy_us:.0} | {longest_us:.0} | {rebuild_ms:.1} | {stream_ms:.1} |"
            );
        }
    }
    text.push_str("\n### What disks do for a write\n\n| level | KiB | at a time | reads | writes | bytes read for each | written |\n|---|---:|---:|---:|---:|---:|---:|\n");
    for Sample { level, bytes, kind } in cases {
        if let Kind::Counts { depth, reads, writes, read_bytes, written_bytes } = kind {
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
        verdicts(case).iter().map(Verdict::is_held).collect()
    }

    #[test]
    fn limits_are_those_of_the_issue() {
        assert_eq!(held(&time("read", SMALL, FEW, 0.7, 0.2)), [true]);
        assert_eq!(held(&time("read", SMALL, FEW, 0.71, 0.2)), [false]);
        assert_eq!(held(&time("write", SMALL, FEW, 6.1, 0.2)), [false]);
        assert_eq!(held(&time("write", LARGE, FEW, 12.4, 8.4)), [false]);
        assert_eq!(held(&time("write", LARGE, FEW, 12.3, 8.4)), [true]);
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
        let samples = [1.0, 9.0, 2.0].map(|us| time("read", SMALL, FEW, us, 0.1));
        assert_eq!(medians(&samples), [time("read", SMALL, FEW, 2.0, 0.1)]);
        let mut text = String::new();
        table(&mut text, &medians(&samples));
        assert!(text.contains("| RAID 5, 4+1 | read | 4 | 8 | 2.00 | 0.10 |  |"), "{text}");
        assert!(Sample::read(&json!({})).is_none());
    }
}
