//! Counters of a running job: cheap, owned by one core, merged afterwards.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::job::Dir;
use crate::verify::Mismatch;

/// Longest distinguishable latency in nanoseconds; longer ones count as this.
const MAX_LATENCY_NS: u64 = 3_600_000_000_000;

/// The percentiles that fio reports (`percentile_list`).
pub const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Latencies in nanoseconds, with a relative error of one thousandth.
#[derive(Clone, Debug)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        Self(Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3).expect("constant, valid bounds"))
    }
}

impl Latency {
    /// Adds a value.
    pub fn record(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(MAX_LATENCY_NS));
    }

    /// Merges `other`.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("the same bounds");
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Smallest, largest, mean and standard deviation, in nanoseconds.
    #[must_use]
    pub fn summary(&self) -> (u64, u64, f64, f64) {
        if self.0.is_empty() {
            return (0, 0, 0.0, 0.0);
        }
        (self.0.min(), self.0.max(), self.0.mean(), self.0.stdev())
    }

    /// The latency in nanoseconds that `percent` of the operations do not exceed.
    #[must_use]
    pub fn percentile(&self, percent: f64) -> u64 {
        self.0.value_at_percentile(percent)
    }
}

/// Operations of one direction.
#[derive(Clone, Debug, Default)]
pub struct DirectionStats {
    /// How many.
    pub ops: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Their latencies.
    pub latency: Latency,
}

/// Results of one job since the end of its ramp.
#[derive(Clone, Debug, Default)]
pub struct Measurement {
    /// Indexed by [`Dir`].
    pub by_direction: [DirectionStats; 3],
    /// Flushes that the job asked for.
    pub flushes: Latency,
    /// From the end of the ramp to the last completion.
    pub elapsed: Duration,
    /// Blocks verified successfully, during the run and afterwards.
    pub verified: u64,
    /// Why it ended early.
    pub failure: Option<JobFailure>,
}

/// Why a job ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobFailure {
    /// An operation failed.
    Operation {
        /// Name of the operation.
        doing: &'static str,
        /// Its first byte.
        at: u64,
        /// The device's error.
        error: block::Error,
    },
    /// The data read differs from what was written.
    Mismatch(Mismatch),
}

impl std::fmt::Display for JobFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Operation { doing, at, error } => write!(f, "{doing} at byte {at}: {error}"),
            Self::Mismatch(mismatch) => mismatch.fmt(f),
        }
    }
}

impl Measurement {
    /// Merges the results of a job that ran at the same time.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.by_direction.iter_mut().zip(&other.by_direction) {
            mine.ops += theirs.ops;
            mine.bytes += theirs.bytes;
            mine.latency.add(&theirs.latency);
        }
        self.flushes.add(&other.flushes);
        self.elapsed = self.elapsed.max(other.elapsed);
        self.verified += other.verified;
        if self.failure.is_none() {
            self.failure.clone_from(&other.failure);
        }
    }

    /// Operations of one direction.
    #[must_use]
    pub fn direction(&self, dir: Dir) -> &DirectionStats {
        &self.by_direction[dir.index()]
    }

    /// All operations.
    #[must_use]
    pub fn ops(&self) -> u64 {
        self.by_direction.iter().map(|moved| moved.ops).sum()
    }

    /// `count` per second of the measured time.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    pub fn per_second(&self, count: u64) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_exact_to_a_thousandth() {
        let mut latency = Latency::default();
        (1..=10_000).for_each(|n| latency.record(Duration::from_micros(n)));
        let near = |found: u64, expected: u64| {
            let off = found.abs_diff(expected);
            assert!(off * 1000 <= expected, "{found} in place of {expected}");
        };
        near(latency.percentile(50.0), 5_000_000);
        near(latency.percentile(99.99), 9_999_000);
        let (least, most, mean, deviation) = latency.summary();
        near(least, 1000);
        near(most, 10_000_000);
        near(mean as u64, 5_000_500);
        near(deviation as u64, 2_886_751);
        latency.record(Duration::from_secs(1 << 40));
        assert_eq!(latency.count(), 10_001, "however long one took, it counts");
        assert_eq!(Latency::default().summary(), (0, 0, 0.0, 0.0));
    }

    #[test]
    fn jobs_of_a_group_are_put_together() {
        let one = |ops, ms| {
            let mut measured = Measurement::default();
            measured.by_direction[0].ops = ops;
            measured.elapsed = Duration::from_millis(ms);
            (0..ops)
                .for_each(|_| measured.by_direction[0].latency.record(Duration::from_micros(ops)));
            measured
        };
        let mut all = one(10, 500);
        all.add(&one(30, 1000));
        assert_eq!((all.ops(), all.direction(Dir::Read).latency.count()), (40, 40));
        assert!((all.per_second(all.ops()) - 40.0).abs() < 1e-9);
    }
}
