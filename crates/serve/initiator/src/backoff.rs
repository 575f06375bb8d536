//! How long to wait before trying again.

use std::time::Duration;

/// Pauses that double, up to a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The first pause.
    pub first: Duration,
    /// The longest one.
    pub longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(100), longest: Duration::from_secs(10) }
    }
}

impl Backoff {
    /// The pause before attempt `number`, from 0: between a half and all of what it has come to, by
    /// `random`, so that those who lost the other side together do not come back together.
    #[must_use]
    pub fn pause(&self, number: u32, random: u64) -> Duration {
        let factor = 1u32.checked_shl(number.min(31)).unwrap_or(u32::MAX);
        let whole = self.first.saturating_mul(factor).min(self.longest);
        let half = whole / 2;
        let parts = u32::try_from(random >> 40).unwrap_or(0);
        // Of 2^24 parts of the other half.
        half + (half / (1 << 12)) * (parts >> 12)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_have_a_bound() {
        let backoff = Backoff::default();
        for (number, whole_ms) in [(0, 100), (1, 200), (5, 3200), (7, 10_000), (4000, 10_000)] {
            let whole = Duration::from_millis(whole_ms);
            let shortest = backoff.pause(number, 0);
            let longest = backoff.pause(number, u64::MAX);
            assert_eq!(shortest, whole / 2, "{number}");
            assert!(longest > whole * 9 / 10 && longest <= whole, "{longest:?} of {whole:?}");
        }
    }
}
