//! Whole stacks in simulated worlds: scenarios, and the runner that plays them seed by seed.
//!
//! A scenario ([`Scenario`]) is an async function over a [`World`]: it builds hosts with disks,
//! runs the real code on them, does harm, and judges. `Err` is the story of what went wrong. All
//! scenarios are listed in [`scenarios::all`]; a floor of the house that gets a scenario adds it
//! there. `cargo test -p sim` plays a budgeted number of seeds of each; the binary of this crate
//! plays as many as one likes:
//!
//! ```text
//! cargo run --release -p sim -- --scenario file --seeds 0..100000 --jobs 8
//! ```
//!
//! That the faults bite is shown by [`planted`]: small stores with one well-known mistake each,
//! which the simulator must find, and the same stores without it, which must pass the same seeds.

mod bytes;
pub mod planted;
mod runner;
pub mod scenarios;

use std::future::Future;
use std::pin::Pin;

use rt::sim::{Outcome, Setup, World};

pub use runner::{Batch, Failed, Report, play_batch};

type Played = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// Something to play in a world.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// What the command line calls it.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// Seeds that `cargo test` plays.
    pub test_seeds: u64,
    /// The scenario.
    pub play: fn(World) -> Played,
}

impl Scenario {
    /// Plays one seed; `verbose` prints every event.
    #[must_use]
    pub fn seed(&self, seed: u64, verbose: bool) -> Outcome {
        let crash_guard = || Box::new(block::crash::permit()) as _;
        rt::sim::run(Setup { verbose, crash_guard, ..Setup::new(seed) }, self.play)
    }

    /// The command that plays one seed again.
    #[must_use]
    pub fn replay(&self, seed: u64) -> String {
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
