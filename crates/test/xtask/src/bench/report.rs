//! The tables of `./run bench iscsi`: medians and ratios.

use super::{
    BenchPlan,
    figures::{Figures, Operation, Sample},
    machine,
    results_page::{PAGE, medians, publish, section_header},
};
use crate::run_context::RunContext;
use anyhow::Result;
use serde_json::json;
use std::fmt::Write;

/// Writes the figures and the page, and shows the page's section.
pub(super) fn write(context: &RunContext, plan: BenchPlan, samples: &[Sample]) -> Result<()> {
    let machine = machine::describe(&machine::iscsi_programs());
    let figures = json!({
        "machine": machine,
        "repetitions": plan.repetitions,
        "seconds": plan.seconds,
        "samples": samples.iter().map(Sample::json).collect::<Vec<_>>(),
    });
    publish(context, "iscsi", &figures, &section(&machine, plan, samples))?;
    let count = samples.len();
    context.pass(count, &format!("{count} measurements, written to {PAGE}"));
    Ok(())
}

fn section(machine: &[String], plan: BenchPlan, samples: &[Sample]) -> String {
    let mut text = section_header(machine, plan) + "; ratio = windrose / this row\n";
    for (operation, depth) in cases(samples) {
        table(&mut text, samples, operation, depth);
    }
    text.push('\n');
    text
}

/// Operations and depths in the order they were first measured, without the echo.
fn cases(samples: &[Sample]) -> Vec<(Operation, u32)> {
    let mut cases = Vec::new();
    for sample in samples.iter().filter(|s| s.operation != Operation::Echo) {
        if !cases.contains(&(sample.operation, sample.depth)) {
            cases.push((sample.operation, sample.depth));
        }
    }
    cases.sort_by_key(|(operation, depth)| {
        (*operation == Operation::Write, *depth, *operation != Operation::MinimalClientRead)
    });
    cases
}

fn table(text: &mut String, samples: &[Sample], operation: Operation, depth: u32) {
    let _ = writeln!(text, "\n### 4 KiB {operation}, depth {depth}\n");
    text.push_str("| backing | server | per second | latency µs | server CPU µs each | ratio: rate | latency | CPU |\n");
    text.push_str("|---|---|---:|---:|---:|---:|---:|---:|\n");
    // At depth 1 the echo is measured by the minimal client, at others by a queue like the
    // initiators'.
    let comparable = depth > 1 || operation == Operation::MinimalClientRead;
    let echo = medians(samples, "bare echo", "none", Operation::Echo, depth).filter(|_| comparable);
    for backing in ["RAM", "file"] {
        let ours = medians(samples, "windrose", backing, operation, depth);
        for server in ["windrose", "tgt", "tgt, direct"] {
            if let Some(figures) = medians(samples, server, backing, operation, depth) {
                row(text, backing, server, figures, ours);
            }
        }
        if let Some(echo) = echo.filter(|_| backing == "RAM") {
            row(text, "none", "bare echo", echo, ours);
        }
    }
}

fn row(text: &mut String, backing: &str, server: &str, this: Figures, ours: Option<Figures>) {
    let ratio = |pick: fn(&Figures) -> f64| match ours {
        Some(ours) if server != "windrose" => format!("{:.2}", pick(&ours) / pick(&this)),
        _ => String::new(),
    };
    let _ = writeln!(
        text,
        "| {backing} | {server} | {:.0} | {:.1} | {:.2} | {} | {} | {} |",
        this.per_second,
        this.latency_us,
        this.server_us,
        ratio(|f| f.per_second),
        ratio(|f| f.latency_us),
        ratio(|f| f.server_us),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(
        server: &'static str,
        backing: &'static str,
        operation: Operation,
        per_second: f64,
    ) -> Sample {
        let figures = Figures { per_second, latency_us: 1e6 / per_second, server_us: 2.0 };
        Sample { server, backing, operation, depth: 1, figures }
    }

    #[test]
    fn medians_and_ratios_reach_the_table() {
        let read = Operation::MinimalClientRead;
        let samples = [
            sample("windrose", "RAM", read, 10_000.0),
            sample("windrose", "RAM", read, 30_000.0),
            sample("windrose", "RAM", read, 20_000.0),
            sample("tgt", "RAM", read, 10_000.0),
            sample("bare echo", "none", Operation::Echo, 40_000.0),
        ];
        let text =
            section(&["a machine".to_owned()], BenchPlan { repetitions: 3, seconds: 1 }, &samples);
        assert!(text.contains("| RAM | windrose | 20000 | 50.0 | 2.00 |  |  |  |"), "{text}");
        assert!(
            text.contains("| RAM | tgt | 10000 | 100.0 | 2.00 | 2.00 | 0.50 | 1.00 |"),
            "{text}"
        );
        assert!(
            text.contains("| none | bare echo | 40000 | 25.0 | 2.00 | 0.50 | 2.00 | 1.00 |"),
            "{text}"
        );
    }
}
