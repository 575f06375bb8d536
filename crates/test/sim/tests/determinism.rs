//! One seed gives the same events twice.

use sim::{Scenario, planted};
use std::{sync::Mutex, thread};

use crate::sample;

const SEEDS: u64 = 3;

/// How many parts the scenarios have when a sample is run.
const SAMPLE_PARTS: usize = 3;

#[test]
fn a_seed_replays_to_the_same_trace_and_another_does_not() {
    let mut busy = sim::scenarios::all();
    // The correct mirrors and pools are already in the list.
    let others = planted::planted_mistakes().into_iter().map(|p| p.without_mistake);
    let is_another = |name: &str| !name.starts_with("mirror-") && !name.starts_with("pool-");
    busy.extend(others.filter(|right| is_another(right.name)));
    let busy = Mutex::new(sample::part_of(busy, SAMPLE_PARTS).into_iter());
    let next = || busy.lock().unwrap().next();
    thread::scope(|threads| {
        for _ in 0..thread::available_parallelism().map_or(1, Into::into) {
            threads.spawn(|| {
                while let Some(scenario) = next() {
                    replays(scenario);
                }
            });
        }
    });
}

fn replays(scenario: Scenario) {
    let mut hashes = Vec::new();
    for seed in 0..SEEDS {
        let digest = || scenario.run_seed(seed, false).digest;
        let (first, second) = (digest(), digest());
        assert_eq!(first, second, "{} seed {seed}", scenario.name);
        assert!(first.events > 50, "{}: {first:?}", scenario.name);
        assert!(!hashes.contains(&first.hash), "{}: {seed} as one before", scenario.name);
        hashes.push(first.hash);
    }
}
