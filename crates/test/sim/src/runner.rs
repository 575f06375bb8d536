//! Runs many seeds of a scenario on several threads.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rt::sim::{ScenarioFailure, TraceDigest};

use crate::Scenario;

/// What to run.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The scenario.
    pub scenario: Scenario,
    /// Its seeds.
    pub seeds: Range<u64>,
    /// Threads.
    pub jobs: usize,
    /// Run every seed twice and compare.
    pub twice: bool,
    /// Print every event.
    pub verbose: bool,
    /// Stop after so many failures.
    pub stop_after: usize,
    /// Begin no seed after so much real time.
    pub time: Option<Duration>,
}

/// A seed that failed.
#[derive(Clone, Debug)]
pub struct FailedSeed {
    /// The seed.
    pub seed: u64,
    /// What went wrong.
    pub failure: ScenarioFailure,
}

/// How a batch went.
#[derive(Clone, Debug, Default)]
pub struct BatchReport {
    /// Number of seeds that were run.
    pub seeds_run: u64,
    /// Events in all of them.
    pub events: u64,
    /// Virtual milliseconds in all of them.
    pub virtual_ms: u64,
    /// The seeds that failed, in ascending order.
    pub failed: Vec<FailedSeed>,
}

/// Runs a batch; `on_failure` is called as failures happen, from any thread.
///
/// # Panics
/// If a thread of the runner panics, which no scenario can cause.
#[expect(clippy::disallowed_methods, reason = "how long the runner runs, in real time")]
pub fn run_batch(batch: &Batch, on_failure: impl Fn(&FailedSeed) + Sync) -> BatchReport {
    let began = Instant::now();
    let next = AtomicU64::new(batch.seeds.start);
    let report = Mutex::new(BatchReport::default());
    let lock = || report.lock().expect("no scenario runs under the lock");
    std::thread::scope(|threads| {
        for _ in 0..batch.jobs.max(1) {
            threads.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let late = batch.time.is_some_and(|time| began.elapsed() >= time);
                    let enough = lock().failed.len() >= batch.stop_after;
                    if seed >= batch.seeds.end || late || enough {
                        return;
                    }
                    let (digest, ms, failure) = run_seed(batch, seed);
                    let mut report = lock();
                    report.seeds_run += 1;
                    report.events += digest.events;
                    report.virtual_ms += ms;
                    if let Some(failure) = failure {
                        let failed = FailedSeed { seed, failure };
                        on_failure(&failed);
                        report.failed.push(failed);
                    }
                }
            });
        }
    });
    let mut report = report.into_inner().expect("no scenario runs under the lock");
    report.failed.sort_by_key(|f| f.seed);
    report
}

fn run_seed(batch: &Batch, seed: u64) -> (TraceDigest, u64, Option<ScenarioFailure>) {
    let first = batch.scenario.run_seed(seed, batch.verbose);
    let ms = u64::try_from(first.duration.as_millis()).unwrap_or(u64::MAX);
    let mut failure = first.result.err();
    if batch.twice {
        let second = batch.scenario.run_seed(seed, false);
        if second.digest != first.digest {
            let what = format!(
                "not deterministic: {:?}, then {:?}{}",
                first.digest,
                second.digest,
                failure.as_ref().map(|f| format!("; first: {}", f.message)).unwrap_or_default()
            );
            failure = Some(ScenarioFailure { message: what, last_events: Vec::new() });
        }
    }
    (first.digest, ms, failure)
}
