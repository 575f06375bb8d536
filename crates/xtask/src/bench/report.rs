//! Medians, ratios, and the page and file they go to.

use super::{
    Plan, machine,
    measure::{Figures, Operation, Sample},
};
use crate::house::House;
use anyhow::{Context, Result};
use serde_json::json;
use std::fmt::Write;

const PAGE: &str = "bench/README.md";
const FIGURES: &str = "bench/results/iscsi.json";
/// What stands between these lines of the page is written by `./run bench iscsi`.
const BEGIN: &str = "<!-- measured: iscsi -->";
const END: &str = "<!-- end of measured: iscsi -->";

/// Writes the figures and the page, and shows what the page says.
pub(super) fn write(house: &House, plan: Plan, samples: &[Sample]) -> Result<()> {
    let machine = machine::describe();
    let figures = json!({
        "machine": machine,
        "repetitions": plan.repetitions,
        "seconds": plan.seconds,
        "samples": samples.iter().map(Sample::json).collect::<Vec<_>>(),
    });
    let text = serde_json::to_string_pretty(&figures).context("cannot write JSON")? + "\n";
    std::fs::write(house.root.join(FIGURES), text)
        .with_context(|| format!("cannot write {FIGURES}"))?;
    let section = section(&machine, plan, samples);
    let page = house.root.join(PAGE);
    let old = std::fs::read_to_string(&page).with_context(|| format!("cannot read {PAGE}"))?;
    let new = replaced(&old, &section)
        .with_context(|| format!("{PAGE} has lost its marks {BEGIN} … {END}"))?;
    std::fs::write(&page, new).with_context(|| format!("cannot write {PAGE}"))?;
    for line in section.lines() {
        house.display.line(line);
    }
    house.pass(
        samples.len(),
        &format!("{} measurements, written to {PAGE} and {FIGURES}", samples.len()),
    );
    Ok(())
}

fn replaced(page: &str, section: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{section}{END}{after}"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n.is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// The medians of everything that was measured alike.
fn medians(
    samples: &[Sample],
    server: &str,
    backing: &str,
    operation: Operation,
    depth: u32,
) -> Option<Figures> {
    let alike: Vec<&Sample> = samples
        .iter()
        .filter(|s| {
            (s.server, s.backing, s.operation, s.depth) == (server, backing, operation, depth)
        })
        .collect();
    let of = |pick: fn(&Figures) -> f64| median(alike.iter().map(|s| pick(&s.figures)).collect());
    (!alike.is_empty()).then(|| Figures {
        per_second: of(|f| f.per_second),
        latency_us: of(|f| f.latency_us),
        server_us: of(|f| f.server_us),
    })
}

fn section(machine: &[String], plan: Plan, samples: &[Sample]) -> String {
    let mut text = String::from("\n");
    for fact in machine {
        let _ = writeln!(text, "- {fact}");
    }
    let _ = writeln!(
        text,
        "- medians of {} interleaved repetitions of {} s each; ratio = windrose / this row",
        plan.repetitions, plan.seconds
    );
    for (operation, depth) in cases(samples) {
        table(&mut text, samples, operation, depth);
    }
    text.push('\n');
    text
}

/// Operations and depths in the order in which they were first measured, without the echo.
fn cases(samples: &[Sample]) -> Vec<(Operation, u32)> {
    let mut cases = Vec::new();
    for sample in samples.iter().filter(|s| s.operation != Operation::Echo) {
        if !cases.contains(&(sample.operation, sample.depth)) {
            cases.push((sample.operation, sample.depth));
        }
    }
    cases.sort_by_key(|(operation, depth)| {
        (*operation == Operation::Write, *depth, *operation != Operation::LeanRead)
    });
    cases
}

fn table(text: &mut String, samples: &[Sample], operation: Operation, depth: u32) {
    let _ = writeln!(text, "\n### 4 KiB {operation}, depth {depth}\n");
    text.push_str("| backing | server | per second | latency µs | server CPU µs each | ratio: rate | latency | CPU |\n");
    text.push_str("|---|---|---:|---:|---:|---:|---:|---:|\n");
    // At depth 1 the echo is measured by the lean client, at others by a queue like the initiators'.
    let comparable = depth > 1 || operation == Operation::LeanRead;
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
        let read = Operation::LeanRead;
        let samples = [
            sample("windrose", "RAM", read, 10_000.0),
            sample("windrose", "RAM", read, 30_000.0),
            sample("windrose", "RAM", read, 20_000.0),
            sample("tgt", "RAM", read, 10_000.0),
            sample("bare echo", "none", Operation::Echo, 40_000.0),
        ];
        let text =
            section(&["a machine".to_owned()], Plan { repetitions: 3, seconds: 1 }, &samples);
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

    #[test]
    fn only_the_measured_part_of_the_page_changes() {
        let page = format!("head\n{BEGIN}\nold\n{END}\ntail\n");
        assert_eq!(replaced(&page, "new\n").unwrap(), format!("head\n{BEGIN}\nnew\n{END}\ntail\n"));
        assert!(replaced("no marks", "new").is_none());
    }

    #[test]
    fn a_median_is_the_middle() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(Vec::new()).is_nan());
    }
}
