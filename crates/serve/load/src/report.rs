//! Reports of results: text and JSON.
//!
//! The JSON uses fio's names where the meaning is the same: `jobs[].read.iops`, `bw` (KiB/s),
//! `bw_bytes`, `io_bytes`, `runtime` (ms), `total_ios`, `lat_ns`. There is no `slat_ns` and
//! `clat_ns`: queueing takes no time, and latency spans from before an operation is queued to after
//! its completion. Processor time is the process's (`client_cpu`), not a job's.

use std::fmt::Write;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde_json::{Map, Value, json};

use crate::benchmark::{CpuUsage, JobResult, Outcome};
use crate::job::Dir;
use crate::measurement::{DirectionStats, Latency, Measurement, PERCENTILES};

/// The report as JSON.
#[must_use]
pub fn json(outcome: &Outcome) -> Value {
    json!({
        "windrose version": env!("CARGO_PKG_VERSION"),
        "jobs": outcome.results.iter().map(job).collect::<Vec<_>>(),
        "client_cpu": client(&outcome.cpu_usage),
        "server_cpu": outcome.cpu_usage.server.map(|spent| json!({
            "ms": spent.as_millis() as u64,
            "us_per_io": each(spent.as_secs_f64() * 1e6, outcome.cpu_usage.ops),
        })),
    })
}

fn job(line: &JobResult) -> Value {
    let measured = &line.measurement;
    let mut out = json!({
        "jobname": line.name,
        "target": line.target,
        "groupid": line.section,
        "jobs": line.instances,
        "error": i32::from(measured.failure.is_some()),
        "error_text": measured.failure.as_ref().map(ToString::to_string),
        "job_runtime": measured.elapsed.as_millis() as u64,
        "verified_blocks": measured.verified,
        "sync": { "total_ios": measured.flushes.count(), "lat_ns": latency(&measured.flushes) },
    });
    for dir in Dir::ALL {
        out[dir.name()] = moved(measured, measured.direction(dir));
    }
    out
}

fn moved(measured: &Measurement, moved: &DirectionStats) -> Value {
    let bytes_per_second = measured.per_second(moved.bytes);
    json!({
        "io_bytes": moved.bytes,
        "io_kbytes": moved.bytes >> 10,
        "bw_bytes": bytes_per_second.round() as u64,
        "bw": (bytes_per_second / 1024.0).round() as u64,
        "iops": measured.per_second(moved.ops),
        "runtime": measured.elapsed.as_millis() as u64,
        "total_ios": moved.ops,
        "lat_ns": latency(&moved.latency),
    })
}

fn latency(latency: &Latency) -> Value {
    let (min, max, mean, stddev) = latency.summary();
    let mut percentile = Map::new();
    if latency.count() > 0 {
        let pairs = PERCENTILES.map(|p| (format!("{p:.6}"), latency.percentile(p).into()));
        percentile.extend(pairs);
    }
    json!({
        "min": min, "max": max, "mean": mean, "stddev": stddev, "N": latency.count(),
        "percentile": percentile,
    })
}

fn client(spent: &CpuUsage) -> Value {
    let share = |time: std::time::Duration| {
        let elapsed = spent.elapsed.as_secs_f64();
        if elapsed > 0.0 { 100.0 * time.as_secs_f64() / elapsed } else { 0.0 }
    };
    let cpu = spent.client;
    json!({
        "usr_cpu": share(cpu.user),
        "sys_cpu": share(cpu.system),
        "ctx": cpu.voluntary_switches + cpu.involuntary_switches,
        "us_per_io": each((cpu.user + cpu.system).as_secs_f64() * 1e6, spent.ops),
    })
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn each(micros: f64, ops: u64) -> f64 {
    if ops > 0 { micros / ops as f64 } else { 0.0 }
}

/// The report as text. `server` names the process whose processor time was measured.
#[must_use]
pub fn text(outcome: &Outcome, server: Option<&str>) -> String {
    let mut rows = Vec::new();
    for line in &outcome.results {
        let name = match line.instance {
            Some(clone) => format!("{} ({clone})", line.name),
            None if line.instances > 1 => format!("{} (x{})", line.name, line.instances),
            None => line.name.clone(),
        };
        let used = Dir::ALL.into_iter().filter(|dir| line.measurement.direction(*dir).ops > 0);
        rows.extend(
            used.map(|dir| {
                row(&name, dir.name(), &line.measurement, line.measurement.direction(dir))
            }),
        );
        if line.measurement.flushes.count() > 0 {
            rows.push(flushes(&name, &line.measurement));
        }
    }
    let head = ["", "", "ops", "IOPS", "MiB/s", "mean", "p50", "p99", "p99.9", "max"];
    let mut text = table(&head, rows);
    text.push('\n');
    for line in &outcome.results {
        if line.measurement.verified > 0 {
            let verified = wire::plural(line.measurement.verified, "block");
            let _ = writeln!(text, "{}: {verified} verified", line.name);
        }
        if let Some(failed) = &line.measurement.failure {
            let _ = writeln!(text, "{}: FAILED: {failed}", line.name);
        }
    }
    text.push_str(&processors(&outcome.cpu_usage, server));
    text
}

fn row(name: &str, kind: &str, measured: &Measurement, moved: &DirectionStats) -> Vec<String> {
    let mib = measured.per_second(moved.bytes) / f64::from(1 << 20);
    let mut row = vec![
        name.to_owned(),
        kind.to_owned(),
        moved.ops.to_string(),
        format!("{:.0}", measured.per_second(moved.ops)),
        format!("{mib:.1}"),
    ];
    row.extend(times(&moved.latency));
    row
}

fn flushes(name: &str, measured: &Measurement) -> Vec<String> {
    let count = measured.flushes.count();
    let rate = format!("{:.0}", measured.per_second(count));
    let mut row = vec![name.to_owned(), "flush".to_owned(), count.to_string(), rate, String::new()];
    row.extend(times(&measured.flushes));
    row
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn times(latency: &Latency) -> [String; 5] {
    let (_, max, mean, _) = latency.summary();
    let at = |percent| latency.percentile(percent) as f64;
    [mean, at(50.0), at(99.0), at(99.9), max as f64].map(time)
}

/// Formats a time in nanoseconds.
fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} µs", ns / 1e3),
        ns if ns < 1e9 => format!("{:.2} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}

fn processors(spent: &CpuUsage, server: Option<&str>) -> String {
    let cpu = spent.client;
    let elapsed = spent.elapsed.as_secs_f64().max(1e-9);
    let share = |time: std::time::Duration| 100.0 * time.as_secs_f64() / elapsed;
    let mut text = format!(
        "client CPU: {:.0}% user, {:.0}% system, {:.2} µs each",
        share(cpu.user),
        share(cpu.system),
        each((cpu.user + cpu.system).as_secs_f64() * 1e6, spent.ops)
    );
    match (server, spent.server) {
        (Some(who), Some(time)) => {
            let each = each(time.as_secs_f64() * 1e6, spent.ops);
            let _ = write!(text, "\nserver CPU ({who}): {:.0}%, {each:.2} µs each", share(time));
        }
        (Some(who), None) => {
            let _ = write!(text, "\nserver CPU ({who}): unavailable");
        }
        (None, _) => {}
    }
    text
}

fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head);
    rows.into_iter().for_each(|row| {
        table.add_row(row);
    });
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if i > 1 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}
