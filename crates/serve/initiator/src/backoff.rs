//! How long to wait before trying again.

use std::time::Duration;

/// Exponential backoff with a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// First delay.
    pub initial: Duration,
    /// Longest delay.
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial: Duration::from_millis(100), max: Duration::from_secs(10) }
    }
}

impl Backoff {
    /// The delay before attempt `number`, from 0: random between half of the exponential value and
    /// all of it, so that clients that lost a peer together do not return together.
    #[must_use]
    pub fn delay(&self, number: u32, random: u64) -> Duration {
        let factor = 1u32.checked_shl(number.min(31)).unwrap_or(u32::MAX);
        let whole = self.initial.saturating_mul(factor).min(self.max);
        let half = whole / 2;
        let parts = u32::try_from(random >> 40).unwrap_or(0);
        // `parts` are 2^-24ths of the other half.
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
            let shortest = backoff.delay(number, 0);
            let longest = backoff.delay(number, u64::MAX);
            assert_eq!(shortest, whole / 2, "{number}");
            assert!(longest > whole * 9 / 10 && longest <= whole, "{longest:?} of {whole:?}");
        }
    }
}
