//! The page and files with benchmark results, and the text they share.

use super::{
    BenchPlan,
    figures::{Figures, Operation, Sample},
};
use crate::run_context::RunContext;
use anyhow::{Context, Result};
use serde_json::Value;

pub(super) const PAGE: &str = "bench/README.md";

/// Writes `figures` to the results file of `name` and `section` between its markers on the page;
/// shows the section.
pub(super) fn publish(
    context: &RunContext,
    name: &str,
    figures: &Value,
    section: &str,
) -> Result<()> {
    let file = format!("bench/results/{name}.json");
    let text = serde_json::to_string_pretty(figures).context("cannot write JSON")? + "\n";
    std::fs::write(context.root.join(&file), text)
        .with_context(|| format!("cannot write {file}"))?;
    let page = context.root.join(PAGE);
    let old = std::fs::read_to_string(&page).with_context(|| format!("cannot read {PAGE}"))?;
    let new = replace_section(&old, name, section)
        .with_context(|| format!("{PAGE} has lost its marks for {name}"))?;
    std::fs::write(&page, new).with_context(|| format!("cannot write {PAGE}"))?;
    section.lines().for_each(|line| context.display.line(line));
    Ok(())
}

/// `page` with `section` between the markers of `name`; `None` without markers.
fn replace_section(page: &str, name: &str, section: &str) -> Option<String> {
    let (begin, end) =
        (format!("<!-- measured: {name} -->"), format!("<!-- end of measured: {name} -->"));
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}\n{section}{end}{after}"))
}

/// The head of a section: the machine and the method.
pub(super) fn section_header(machine: &[String], plan: BenchPlan) -> String {
    let facts: String = machine.iter().map(|fact| format!("- {fact}\n")).collect();
    let BenchPlan { repetitions, seconds } = plan;
    format!("\n{facts}- medians of {repetitions} interleaved repetitions of {seconds} s each")
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n.is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// The medians of equal measurements.
pub(super) fn medians(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_measured_part_of_the_page_changes() {
        let marked = |text: &str| {
            format!("head\n<!-- measured: x -->\n{text}\n<!-- end of measured: x -->\ntail\n")
        };
        assert_eq!(replace_section(&marked("old"), "x", "new\n").unwrap(), marked("new"));
        assert!(replace_section(&marked("old"), "y", "new\n").is_none());
    }

    #[test]
    fn a_median_is_the_middle() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(Vec::new()).is_nan());
    }
}
