//! The faults bite: every planted mistake is found, and the same store without it passes.

use sim::planted::pairs;
use sim::{Batch, play_batch};

fn jobs() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into).min(4)
}

#[test]
fn every_planted_mistake_is_found_and_the_innocent_pass() {
    for pair in pairs() {
        let batch = |scenario, seeds, stop_after| Batch {
            scenario,
            seeds: 0..seeds,
            jobs: jobs(),
            twice: false,
            verbose: false,
            stop_after,
            time: None,
        };
        let wrong = play_batch(&batch(pair.wrong, pair.within, 1), |_| {});
        let right = play_batch(&batch(pair.right, pair.right.test_seeds, 1), |_| {});
        if let Some(failed) = right.failed.first() {
            panic!("{} seed {}: {}", pair.right.name, failed.seed, failed.failure);
        }
        println!("{}: found among {} seeds", pair.wrong.name, wrong.played);
        assert!(!wrong.failed.is_empty(), "{} was not found", pair.wrong.name);
    }
}
