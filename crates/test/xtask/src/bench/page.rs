//! The page and the files that measurements go to, and what all of them say alike.

use super::{
    Plan,
    measure::{Figures, Operation, Sample},
};
use crate::house::House;
use anyhow::{Context, Result};
use serde_json::Value;

pub(super) const PAGE: &str = "bench/README.md";

/// Writes `figures` to the file of `name`, and `section` between its marks of the page; shows the section.
pub(super) fn publish(house: &House, name: &str, figures: &Value, section: &str) -> Result<()> {
    let file = format!("bench/results/{name}.json");
    let text = serde_json::to_string_pretty(figures).context("cannot write JSON")? + "\n";
    std::fs::write(house.root.join(&file), text).with_context(|| format!("cannot write {file}"))?;
    let page = house.root.join(PAGE);
    let old = std::fs::read_to_string(&page).with_context(|| format!("cannot read {PAGE}"))?;
    let new = replaced(&old, name, section)
        .with_context(|| format!("{PAGE} has lost its marks for {name}"))?;
    std::fs::write(&page, new).with_context(|| format!("cannot write {PAGE}"))?;
    section.lines().for_each(|line| house.display.line(line));
    Ok(())
}

/// `page` with `section` between the marks that begin and end what is measured for `name`.
fn replaced(page: &str, name: &str, section: &str) -> Option<String> {
    let (begin, end) =
        (format!("<!-- measured: {name} -->"), format!("<!-- end of measured: {name} -->"));
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}\n{section}{end}{after}"))
}

/// The head of a section: the machine, and how it was measured.
pub(super) fn head(machine: &[String], plan: Plan) -> String {
    let facts: String = machine.iter().map(|fact| format!("- {fact}\n")).collect();
    let Plan { repetitions, seconds } = plan;
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

/// The medians of everything that was measured alike.
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
        assert_eq!(replaced(&marked("old"), "x", "new\n").unwrap(), marked("new"));
        assert!(replaced(&marked("old"), "y", "new\n").is_none());
    }

    #[test]
    fn a_median_is_the_middle() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(Vec::new()).is_nan());
    }
}
