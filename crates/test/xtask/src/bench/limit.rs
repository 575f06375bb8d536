//! Limits, and whether what was measured keeps them.

use super::{Plan, page::PAGE};
use serde_json::{Value, json};
use std::fmt::Write;

/// A limit, and what was measured.
pub(super) struct Verdict {
    pub(super) what: String,
    /// What the limit is made of.
    pub(super) made_of: String,
    pub(super) limit: f64,
    pub(super) measured: f64,
    pub(super) unit: &'static str,
}

impl Verdict {
    /// At most so many `times` what is `beside` it, in microseconds.
    pub(super) fn at_most(what: String, times: f64, beside: f64, measured: f64) -> Self {
        let made_of = format!("{} × {beside:.2}", (times * 100.0).round() / 100.0);
        Self { what, made_of, limit: times * beside, measured, unit: "µs" }
    }

    pub(super) fn is_held(&self) -> bool {
        self.measured <= self.limit
    }

    pub(super) fn word(&self) -> &'static str {
        if self.is_held() { "held" } else { "**missed**" }
    }

    pub(super) fn json(&self) -> Value {
        let Self { what, limit, measured, unit, .. } = self;
        let held = self.is_held();
        json!({ "what": what, "limit": limit, "measured": measured, "unit": unit, "held": held })
    }
}

/// What the file of a benchmark says that has limits.
pub(super) fn figures(
    machine: &[String],
    plan: Plan,
    samples: impl Iterator<Item = Value>,
    verdicts: &[Verdict],
) -> Value {
    json!({
        "machine": machine,
        "repetitions": plan.repetitions,
        "seconds": plan.seconds,
        "samples": samples.collect::<Vec<_>>(),
        "verdicts": verdicts.iter().map(Verdict::json).collect::<Vec<_>>(),
    })
}

/// How many are held, for who runs it.
pub(super) fn tally(verdicts: &[Verdict]) -> String {
    let held = verdicts.iter().filter(|v| v.is_held()).count();
    format!("{held} of {} limits held, written to {PAGE}", verdicts.len())
}

/// Their table.
pub(super) fn limits(text: &mut String, verdicts: &[Verdict]) {
    text.push_str(
        "\n### Limits\n\n| what | made of | limit | measured | |\n|---|---|---:|---:|---|\n",
    );
    for verdict in verdicts {
        let Verdict { what, made_of, limit, measured, unit } = verdict;
        let word = verdict.word();
        let _ = writeln!(
            text,
            "| {what} | {made_of} | {limit:.2} {unit} | {measured:.2} {unit} | {word} |"
        );
    }
}
