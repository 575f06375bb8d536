//! Every scenario passes with the seeds that a test run affords, and with those that once found a
//! defect.

use std::thread::available_parallelism;

use sim::{Batch, run_batch, scenarios};

use crate::sample;

/// How many times fewer seeds a sample has: the tier `sim` runs more of them.
const SAMPLE_PARTS: u64 = 10;

#[test]
fn every_scenario_holds() {
    for scenario in scenarios::all() {
        let seeds = match sample::number() {
            Some(_) => scenario.test_seeds.div_ceil(SAMPLE_PARTS),
            None => scenario.test_seeds,
        };
        let batch = Batch {
            scenario,
            seeds: 0..seeds,
            jobs: available_parallelism().map_or(1, Into::into),
            twice: false,
            verbose: false,
            stop_after: 1,
            time: None,
        };
        if let Some(failed) = run_batch(&batch, |_| {}).failed.first() {
            let replay = scenario.replay_command(failed.seed);
            panic!("{} seed {}: {}{replay}", scenario.name, failed.seed, failed.failure);
        }
    }
}

/// `crates/test/sim/seeds/pinned.txt`: scenario, seed, the defect it found.
#[test]
fn pinned_seeds_pass() {
    for line in include_str!("../seeds/pinned.txt").lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.splitn(3, ' ');
        let (name, seed, what) = (words.next(), words.next(), words.next());
        let scenario = name.and_then(sim::find);
        let seed = seed.and_then(|s| s.parse().ok());
        let (Some(scenario), Some(seed), Some(what)) = (scenario, seed, what) else {
            panic!("pinned.txt: scenario, seed, what it found; not {line:?}");
        };
        if let Err(failure) = scenario.run_seed(seed, false).result {
            panic!("{name:?} seed {seed} finds {what:?} again: {failure}");
        }
    }
}
