//! Whole stacks in simulated worlds: scenarios, and the runner that runs them seed by seed.
//!
//! A scenario ([`Scenario`]) is an async function over a [`World`]: it builds hosts with disks,
//! runs the real code on them, injects faults, and checks the results. `Err` describes what went
//! wrong. All scenarios are listed in [`scenarios::all`]; a layer that gets a scenario adds it
//! there. `cargo test -p sim` runs a limited number of seeds of each; the binary of this crate runs
//! as many as you like:
//! runs as many as one likes:
//!
//! ```text
//! cargo run --release -p sim -- --scenario file --seeds 0..100000 --jobs 8
//! ```
//!
//! [`planted`] shows that the faults are effective: small stores with one well-known mistake each,
//! which the simulator must find, and the same stores without it, which must pass the same seeds.

mod bytes;
pub mod planted;
mod runner;
pub mod scenarios;

use std::future::Future;
use std::pin::Pin;

use rt::sim::{ScenarioOutcome, World, WorldSetup};

pub use runner::{Batch, BatchReport, FailedSeed, run_batch};

type ScenarioFuture = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// Something to run in a world.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// What the command line calls it.
    pub name: &'static str,
    /// One line about it.
    pub description: &'static str,
    /// Seeds that `cargo test` runs.
    pub test_seeds: u64,
    /// The scenario.
    pub run: fn(World) -> ScenarioFuture,
}

impl Scenario {
    /// Runs one seed; `verbose` prints every event.
    #[must_use]
    pub fn run_seed(&self, seed: u64, verbose: bool) -> ScenarioOutcome {
        let crash_guard = || Box::new(block::drop_permit::permit_drops()) as _;
        rt::sim::run(WorldSetup { verbose, crash_guard, ..WorldSetup::new(seed) }, self.run)
    }

    /// The command that replays one seed.
    #[must_use]
    pub fn replay_command(&self, seed: u64) -> String {
        format!(
            "cargo run -p sim -- --scenario {} --seeds {seed}..{} --verbose",
            self.name,
            seed.saturating_add(1)
        )
    }
}

/// The scenario called `name`, planted mistakes included.
#[must_use]
pub fn find(name: &str) -> Option<Scenario> {
    scenarios::all().into_iter().chain(planted::all()).find(|s| s.name == name)
}
