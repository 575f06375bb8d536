//! The tiers of `./run test`: each proves one kind of thing, has a time budget and says what it needs installed.

mod clients;
mod fuzz;
mod initiators;
mod libiscsi;
mod style;
mod unit;

use crate::{house::House, install::Package};
use anyhow::Result;
use std::time::{Duration, Instant};

pub(crate) use clients::{against_peers, packages as client_packages};
pub(crate) use fuzz::{Fuzz, fuzz};
pub(crate) use style::lint;

/// One tier.
pub(crate) struct Tier {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// How long it may take on two cores, building included. Longer is said, not failed: machines differ.
    pub(crate) budget: Duration,
    pub(crate) packages: &'static [&'static [Package]],
    pub(crate) run: fn(&House) -> Result<()>,
}

/// In the order in which they run: what fails fast comes first.
pub(crate) const TIERS: &[Tier] = &[
    Tier {
        name: "style",
        about: "rustfmt, clippy, licences and sources of dependencies",
        budget: Duration::from_secs(480),
        packages: &[],
        run: style::run,
    },
    Tier {
        name: "unit",
        about: "every crate's own tests: pure modules, transcripts, conformance, properties",
        budget: Duration::from_secs(480),
        packages: &[],
        run: unit::run,
    },
    Tier {
        name: "fuzz",
        about: "every parser of outside bytes, a short while each",
        budget: Duration::from_secs(420),
        packages: &[],
        run: fuzz::run,
    },
];

/// Runs one tier and says how long it took.
pub(crate) fn run(house: &House, tier: &Tier) {
    house.display.line(&format!("{}: {}", tier.name, tier.about));
    let begun = Instant::now();
    if let Err(error) = (tier.run)(house) {
        house.enter_error(tier.name, &error);
    }
    let took = begun.elapsed();
    let over = if took > tier.budget {
        format!(", over its budget of {} s", tier.budget.as_secs())
    } else {
        String::new()
    };
    house.display.line(&format!("  {} took {} s{over}", tier.name, took.as_secs()));
}
