//! Every planted mistake is found, and the same store without it passes.

use sim::planted::planted_mistakes;
use sim::{Batch, run_batch};

use crate::sample;

/// How many parts the mistakes have when a sample is run.
const SAMPLE_PARTS: usize = 5;

fn jobs() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into).min(4)
}

#[test]
fn each_planted_mistake_is_found_and_correct_variants_pass() {
    for pair in sample::part_of(planted_mistakes(), SAMPLE_PARTS) {
        let batch = |scenario, seeds, stop_after| Batch {
            scenario,
            seeds: 0..seeds,
            jobs: jobs(),
            twice: false,
            verbose: false,
            stop_after,
            time: None,
        };
        let wrong = run_batch(&batch(pair.with_mistake, pair.detection_seeds, 1), |_| {});
        let right =
            run_batch(&batch(pair.without_mistake, pair.without_mistake.test_seeds, 1), |_| {});
        if let Some(failed) = right.failed.first() {
            panic!("{} seed {}: {}", pair.without_mistake.name, failed.seed, failed.failure);
        }
        println!("{}: found among {} seeds", pair.with_mistake.name, wrong.seeds_run);
        assert!(!wrong.failed.is_empty(), "{} was not found", pair.with_mistake.name);
    }
}
