//! The results of both generators side by side, and whether they agree.
//!
//! Two consecutive runs are a pair: changes of the machine affect both alike. A ratio is the median
//! of the pairs' ratios.

use super::{Figures, Load, Sample, Target, results_page};
use crate::bench::BenchPlan;
use std::fmt::Write as _;

/// The largest difference that counts as agreement, in percent.
const AGREEMENT_PERCENT: f64 = 3.0;

const TABLE_HEADER: &str = "\
| target | load | depth | fio per second | windrose | ratio | of the pairs | mean µs fio | windrose | ratio | p50 µs fio | windrose | ratio | p99 µs fio | windrose | ratio | CPU µs each fio | windrose | verdict |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|
";

/// The compared figures, and whether the verdict depends on each.
const COMPARED_FIGURES: [(&str, FigureSelector, bool); 4] = [
    ("rate", |f| f.per_second, true),
    ("mean", |f| f.mean_us, true),
    ("p50", |f| f.p50_us, true),
    ("p99", |f| f.p99_us, false),
];

type FigureSelector = fn(&Figures) -> f64;

pub(super) fn section(
    machine: &[String],
    plan: BenchPlan,
    targets: &[Target],
    samples: &[Sample],
) -> String {
    let mut text = results_page::section_header(machine, plan)
        + ", one and the other in turn; ratio = windrose / fio, the median of the pairs\n";
    for limits in [true, false] {
        text += match limits {
            true => "\n### Where the target is the limit\n\n",
            false => "\n### Where the generators are the limit: what they cost\n\n",
        };
        text += TABLE_HEADER;
        let rows: Vec<Row> = (targets.iter().filter(|t| t.is_bottleneck == limits))
            .flat_map(|t| t.loads.iter().map(|load| Row::new(samples, t, *load)))
            .collect();
        rows.iter().for_each(|row| row.write(&mut text));
        if limits {
            text += &agreement_summary(&rows);
        }
    }
    text.push('\n');
    text
}

/// How many rows agree, on all figures and on each.
fn agreement_summary(rows: &[Row]) -> String {
    let all = rows.len();
    let agreed = rows.iter().filter(|row| row.disagreeing_figures().is_empty()).count();
    let each: Vec<String> = (COMPARED_FIGURES.iter().enumerate())
        .map(|(n, (name, ..))| {
            format!("{name} {}", rows.iter().filter(|row| is_in_agreement(row.ratios[n])).count())
        })
        .collect();
    let each = each.join(", ");
    format!(
        "\n{agreed} of {all} agree within {AGREEMENT_PERCENT} % on rate, mean and p50; by itself each: {each}.\n"
    )
}

fn is_in_agreement(ratio: f64) -> bool {
    100.0 * (ratio - 1.0).abs() <= AGREEMENT_PERCENT
}

struct Row {
    target: &'static str,
    load: Load,
    is_target_bound: bool,
    /// Medians of the compared figures: fio's and ours.
    medians: [(f64, f64); COMPARED_FIGURES.len()],
    /// Medians of the pairs' ratios.
    ratios: [f64; COMPARED_FIGURES.len()],
    /// The smallest and the largest ratio of the rates of a pair.
    spread: (f64, f64),
    cpu_us: (f64, f64),
}

impl Row {
    fn new(samples: &[Sample], target: &Target, load: Load) -> Self {
        let of = |who: &str, pick: FigureSelector| -> Vec<f64> {
            let key = (target.name, load, who);
            let alike = samples.iter().filter(|s| (s.target, s.load, s.generator) == key);
            alike.map(|s| pick(&s.figures)).collect()
        };
        let pairs = |pick: FigureSelector| -> Vec<f64> {
            of("windrose", pick).iter().zip(of("fio", pick)).map(|(a, b)| a / b).collect()
        };
        let both = |pick: FigureSelector| {
            (results_page::median(of("fio", pick)), results_page::median(of("windrose", pick)))
        };
        let widest = |(a, b): (f64, f64), ratio: &f64| (a.min(*ratio), b.max(*ratio));
        Self {
            target: target.name,
            load,
            is_target_bound: target.is_bottleneck,
            medians: COMPARED_FIGURES.map(|(_, pick, _)| both(pick)),
            ratios: COMPARED_FIGURES.map(|(_, pick, _)| results_page::median(pairs(pick))),
            spread: pairs(COMPARED_FIGURES[0].1).iter().fold((f64::INFINITY, 0.0), widest),
            cpu_us: both(|f| f.cpu_us),
        }
    }

    /// The figures relevant to the verdict that do not agree.
    fn disagreeing_figures(&self) -> Vec<&'static str> {
        let compared = COMPARED_FIGURES.iter().zip(self.ratios);
        let differs = compared.filter(|((.., counts), ratio)| *counts && !is_in_agreement(*ratio));
        differs.map(|((name, ..), _)| *name).collect()
    }

    fn write(&self, text: &mut String) {
        let Load { rw, bs, depth } = self.load;
        let _ = write!(text, "| {} | {rw} {bs} | {depth} |", self.target);
        for (n, ((theirs, ours), ratio)) in self.medians.iter().zip(self.ratios).enumerate() {
            let _ = match n {
                0 => {
                    let (least, most) = self.spread;
                    write!(
                        text,
                        " {theirs:.0} | {ours:.0} | {ratio:.3} | {least:.2} to {most:.2} |"
                    )
                }
                _ => write!(text, " {theirs:.1} | {ours:.1} | {ratio:.3} |"),
            };
        }
        let (theirs, ours) = self.cpu_us;
        let differs = self.disagreeing_figures();
        let verdict = match (self.is_target_bound, differs.is_empty()) {
            (false, _) => "none".to_owned(),
            (true, true) => "agreed".to_owned(),
            (true, false) => format!("not: {}", differs.join(", ")),
        };
        let _ = writeln!(text, " {theirs:.2} | {ours:.2} | {verdict} |");
    }
}

#[cfg(test)]
mod tests {
    use super::{super::load, *};

    fn sample(who: &'static str, per_second: f64, p50_us: f64) -> Sample {
        let figures = Figures { per_second, mean_us: 10.0, p50_us, p99_us: 1.0, cpu_us: 1.0 };
        Sample { target: "file", load: LOADS[0], generator: who, figures }
    }

    const LOADS: &[Load] = &[load("randread", "4k", 1)];

    fn target(limits: bool) -> Target {
        Target {
            name: "file",
            windrose_target: String::new(),
            fio_arguments: Vec::new(),
            loads: LOADS,
            is_bottleneck: limits,
        }
    }

    fn row(samples: &[Sample], limits: bool) -> (Vec<&'static str>, String) {
        let row = Row::new(samples, &target(limits), LOADS[0]);
        let mut text = String::new();
        row.write(&mut text);
        (row.disagreeing_figures(), text)
    }

    /// The third pair was measured while the machine was half as fast.
    #[test]
    fn runs_that_followed_each_other_are_compared() {
        let samples = [
            sample("fio", 100.0, 10.0),
            sample("windrose", 102.0, 10.0),
            sample("windrose", 99.0, 10.0),
            sample("fio", 100.0, 10.0),
            sample("fio", 50.0, 20.0),
            sample("windrose", 50.0, 20.0),
        ];
        let (differs, text) = row(&samples, true);
        assert!(differs.is_empty(), "{text}");
        assert!(text.contains("| 100 | 99 | 1.000 | 0.99 to 1.02 |"), "{text}");
        assert!(text.ends_with("| agreed |\n"), "{text}");
    }

    #[test]
    fn what_differs_is_named() {
        let samples = [sample("fio", 100.0, 10.0), sample("windrose", 104.0, 9.6)];
        let (differs, text) = row(&samples, true);
        assert_eq!(differs, ["rate", "p50"]);
        assert!(text.ends_with("| not: rate, p50 |\n"), "{text}");
        assert!(row(&samples, false).1.ends_with("| none |\n"), "no verdict on generators");
        let rows = [Row::new(&samples, &target(true), LOADS[0])];
        let told = agreement_summary(&rows);
        assert!(told.contains("0 of 1 agree within 3 %"), "{told}");
        assert!(told.contains("rate 0, mean 1, p50 0, p99 1"), "{told}");
    }
}
