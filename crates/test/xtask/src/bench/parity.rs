//! `./run bench parity`: our parity kernels against Debian's ISA-L, loaded by
//! `crates/base/parity/examples/isal.rs`.
//!
//! The example alternates between both; a repetition here is one run of it.

use super::{
    BenchPlan,
    generator::{command_on_load_cpu, run_and_parse},
    limit::{self, LimitCheck},
    machine,
    results_page::{self, median, section_header},
};
use crate::{
    install::{self, ISAL},
    node::Profile,
    run_context::RunContext,
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fmt::Write;

pub(super) const EXAMPLE: &str = "isal";
/// The least share of ISA-L's throughput.
const MIN_ISAL_SHARE: f64 = 0.95;
/// Cases of the example, each of which takes the plan's seconds,
const CASES: u64 = 20;
/// and the seconds it needs to fill its buffers.
const FILL_SECONDS: u64 = 3;

/// The packages this benchmark needs.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::NETWORK, ISAL]
}

/// A case in one repetition: gigabytes of data per second.
#[derive(Clone, Debug)]
struct Sample {
    case: String,
    bytes: u64,
    memory_level: String,
    /// Our throughput over ISA-L's, the median over pairs of turns.
    ratio: f64,
    isal: f64,
    windrose: f64,
    isal_best: f64,
    windrose_best: f64,
}

impl Sample {
    fn key(&self) -> (&str, u64, &str) {
        (&self.case, self.bytes, &self.memory_level)
    }

    fn read(found: &Value) -> Option<Self> {
        let rate = |side: &str, which: &str| Some(found[side][which].as_f64()? / 1e9);
        Some(Self {
            case: found["case"].as_str()?.to_owned(),
            bytes: found["bytes"].as_u64()?,
            memory_level: found["place"].as_str()?.to_owned(),
            ratio: found["ratio"].as_f64()?,
            isal: rate("isal", "median")?,
            windrose: rate("ours", "median")?,
            isal_best: rate("isal", "best")?,
            windrose_best: rate("ours", "best")?,
        })
    }

    fn json(&self) -> Value {
        let Self {
            case,
            bytes,
            memory_level: place,
            ratio,
            isal,
            windrose: ours,
            isal_best,
            windrose_best: ours_best,
        } = self;
        json!({
            "case": case, "bytes": bytes, "place": place, "ratio": ratio, "isal_gb_s": isal, "ours_gb_s": ours,
            "isal_best_gb_s": isal_best, "ours_best_gb_s": ours_best,
        })
    }
}

/// Measures and writes `bench/README.md` and `bench/results/parity.json`.
pub(super) fn run(context: &RunContext, plan: BenchPlan) -> Result<()> {
    let program = Profile::Dist.example(context, EXAMPLE);
    let (mut samples, mut engine) = (Vec::new(), String::new());
    for repetition in 1..=plan.repetitions {
        context.display.begin_step(&format!("repetition {repetition} of {}", plan.repetitions));
        let mut command = command_on_load_cpu(&program);
        command.arg(plan.seconds.to_string());
        let found =
            run_and_parse(context, EXAMPLE, &mut command, CASES * (plan.seconds + FILL_SECONDS))?;
        found["engine"].as_str().context("no engine")?.clone_into(&mut engine);
        for case in found["cases"].as_array().context("no cases")? {
            samples.push(Sample::read(case).context("a figure is missing")?);
        }
    }
    write(context, plan, &engine, &samples)
}

/// Medians of equal cases, in the order of the first repetition.
fn medians(samples: &[Sample]) -> Vec<Sample> {
    let mut cases: Vec<Sample> = Vec::new();
    for sample in samples {
        if cases.iter().any(|case| case.key() == sample.key()) {
            continue;
        }
        let alike: Vec<&Sample> = samples.iter().filter(|s| s.key() == sample.key()).collect();
        let of = |pick: fn(&Sample) -> f64| median(alike.iter().map(|s| pick(s)).collect());
        let best = |pick: fn(&Sample) -> f64| alike.iter().map(|s| pick(s)).fold(0.0, f64::max);
        cases.push(Sample {
            ratio: of(|s| s.ratio),
            isal: of(|s| s.isal),
            windrose: of(|s| s.windrose),
            isal_best: best(|s| s.isal_best),
            windrose_best: best(|s| s.windrose_best),
            ..sample.clone()
        });
    }
    cases
}

fn verdict(case: &Sample) -> LimitCheck {
    LimitCheck {
        what: format!("{}, {} KiB, {}", case.case, case.bytes / 1024, case.memory_level),
        derivation: format!("1 / {MIN_ISAL_SHARE} of ISA-L's time"),
        limit: 1.0 / MIN_ISAL_SHARE,
        measured: 1.0 / case.ratio,
        unit: "times",
    }
}

fn write(context: &RunContext, plan: BenchPlan, engine: &str, samples: &[Sample]) -> Result<()> {
    let machine = machine::describe(&machine::parity_programs(engine));
    let cases = medians(samples);
    let verdicts: Vec<LimitCheck> = cases.iter().map(verdict).collect();
    let figures = limit::result_json(&machine, plan, samples.iter().map(Sample::json), &verdicts);
    let mut text = section_header(&machine, plan) + ", turn by turn\n";
    table(&mut text, &cases);
    results_page::publish(context, "parity", &figures, &text)?;
    context.pass(samples.len(), &limit::summary(&verdicts));
    Ok(())
}

fn table(text: &mut String, cases: &[Sample]) {
    text.push_str("\n| what | buffers | in | ISA-L GB/s | ours | ratio of pairs | best: ISA-L GB/s | ours | ratio | |\n");
    text.push_str("|---|---:|---|---:|---:|---:|---:|---:|---:|---|\n");
    for sample in cases {
        let word = verdict(sample).result_text();
        let Sample {
            case,
            bytes,
            memory_level: place,
            ratio,
            isal,
            windrose: ours,
            isal_best,
            windrose_best: ours_best,
        } = sample;
        let (kib, best) = (bytes / 1024, ours_best / isal_best);
        let _ = writeln!(
            text,
            "| {case} | {kib} KiB | {place} | {isal:.1} | {ours:.1} | {ratio:.2} | {isal_best:.1} | {ours_best:.1} | {best:.2} | {word} |"
        );
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_held_or_missed_by_the_median_of_its_pairs() {
        let sample = |ratio: f64, rate: f64| {
            let side = json!({ "median": rate, "best": 2.0 * rate });
            let found = json!({
                "case": "P of 4+1", "bytes": 4096, "place": "cache", "ratio": ratio, "isal": side, "ours": side,
            });
            Sample::read(&found).unwrap()
        };
        let cases = medians(&[sample(0.9, 1e9), sample(0.96, 3e9), sample(2.0, 2e9)]);
        assert_eq!(cases.len(), 1);
        assert!(verdict(&cases[0]).is_held() && !verdict(&sample(0.94, 1e9)).is_held());
        let mut text = String::new();
        table(&mut text, &cases);
        let row = "| P of 4+1 | 4 KiB | cache | 2.0 | 2.0 | 0.96 | 6.0 | 6.0 | 1.00 | held |";
        assert!(text.contains(row), "{text}");
        assert!(Sample::read(&json!({})).is_none());
    }
}
