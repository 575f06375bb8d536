//! Limits of benchmarks and whether the measurements meet them.

use super::{BenchPlan, results_page::PAGE};
use serde_json::{Value, json};
use std::fmt::Write;

/// A limit and the measured value.
pub(super) struct LimitCheck {
    pub(super) what: String,
    /// How the limit is derived.
    pub(super) derivation: String,
    pub(super) limit: f64,
    pub(super) measured: f64,
    pub(super) unit: &'static str,
}

impl LimitCheck {
    /// At most `times` the reference value `beside`, in microseconds.
    pub(super) fn at_most(what: String, times: f64, beside: f64, measured: f64) -> Self {
        let made_of = format!("{} × {beside:.2}", (times * 100.0).round() / 100.0);
        Self { what, derivation: made_of, limit: times * beside, measured, unit: "µs" }
    }

    pub(super) fn is_held(&self) -> bool {
        self.measured <= self.limit
    }

    pub(super) fn result_text(&self) -> &'static str {
        if self.is_held() { "held" } else { "**missed**" }
    }

    pub(super) fn json(&self) -> Value {
        let Self { what, limit, measured, unit, .. } = self;
        let held = self.is_held();
        json!({ "what": what, "limit": limit, "measured": measured, "unit": unit, "held": held })
    }
}

/// The JSON of a benchmark with limits.
pub(super) fn result_json(
    machine: &[String],
    plan: BenchPlan,
    samples: impl Iterator<Item = Value>,
    verdicts: &[LimitCheck],
) -> Value {
    json!({
        "machine": machine,
        "repetitions": plan.repetitions,
        "seconds": plan.seconds,
        "samples": samples.collect::<Vec<_>>(),
        "verdicts": verdicts.iter().map(LimitCheck::json).collect::<Vec<_>>(),
    })
}

/// How many limits are met, for the terminal.
pub(super) fn summary(verdicts: &[LimitCheck]) -> String {
    let held = verdicts.iter().filter(|v| v.is_held()).count();
    format!("{held} of {} limits held, written to {PAGE}", verdicts.len())
}

/// Writes the table of limits.
pub(super) fn write_limit_table(text: &mut String, verdicts: &[LimitCheck]) {
    text.push_str(
        "\n### Limits\n\n| what | made of | limit | measured | |\n|---|---|---:|---:|---|\n",
    );
    for verdict in verdicts {
        let LimitCheck { what, derivation: made_of, limit, measured, unit } = verdict;
        let word = verdict.result_text();
        let _ = writeln!(
            text,
            "| {what} | {made_of} | {limit:.2} {unit} | {measured:.2} {unit} | {word} |"
        );
    }
}
