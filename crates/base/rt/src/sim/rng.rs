//! Seeded randomness of simulated worlds.

use std::cell::Cell;
use std::time::Duration;

/// A stream of random numbers. Streams of one seed with different labels are independent, so that
/// one more draw in one place does not change those everywhere else.
///
/// A probability of 0 or 1 draws nothing: a disabled fault does not change a replay.
#[derive(Debug)]
pub struct Rng(Cell<u64>);

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of `SplitMix64` (Steele, Lea, Flood 2014).
pub(crate) fn splitmix64_mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// The stream called `label` of `seed`.
    #[must_use]
    pub fn new(seed: u64, label: &str) -> Self {
        let named = label
            .bytes()
            .fold(splitmix64_mix(seed ^ GOLDEN_GAMMA), |h, b| splitmix64_mix(h ^ u64::from(b)));
        Self(Cell::new(named))
    }

    /// 64 random bits.
    pub fn u64(&self) -> u64 {
        let state = self.0.get().wrapping_add(GOLDEN_GAMMA);
        self.0.set(state);
        splitmix64_mix(state)
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub fn below(&self, bound: u64) -> u64 {
        let wide = u128::from(self.u64()) * u128::from(bound);
        u64::try_from(wide >> 64).expect("below `bound`")
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// An index into something of `len` elements.
    pub fn index(&self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below `len`")
    }

    /// Whether something of this probability happens.
    pub fn chance(&self, probability: f64) -> bool {
        if probability <= 0.0 {
            return false;
        }
        if probability >= 1.0 {
            return true;
        }
        self.unit() < probability
    }

    /// A number in `[0, 1)`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit exactly")]
    pub fn unit(&self) -> f64 {
        (self.u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A time from `low` to `high` in whole milliseconds, the resolution of virtual time.
    pub fn duration_between(&self, low: Duration, high: Duration) -> Duration {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(self.between(ms(low), ms(high)))
    }

    /// Fills `bytes`.
    pub fn fill(&self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.u64().to_le_bytes()[..chunk.len()]);
        }
    }

    /// Shuffles `items`.
    pub fn shuffle<T>(&self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.index(i + 1));
        }
    }

    /// One of `items`, which is not empty.
    pub fn pick<'a, T>(&self, items: &'a [T]) -> &'a T {
        &items[self.index(items.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_replay_and_differ_by_label_and_seed() {
        let draw = |seed, label| {
            let r = Rng::new(seed, label);
            (0..4).map(|_| r.u64()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7, "disk"), draw(7, "disk"));
        assert_ne!(draw(7, "disk"), draw(8, "disk"));
        assert_ne!(draw(7, "disk"), draw(7, "disc"));
    }

    #[test]
    fn draws_stay_in_their_range_and_reach_its_ends() {
        let r = Rng::new(1, "");
        let seen: std::collections::BTreeSet<_> = (0..200).map(|_| r.between(3, 6)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [3, 4, 5, 6]);
        assert_eq!(r.below(0), 0);
        assert_eq!(r.between(u64::MAX, u64::MAX), u64::MAX);
        let hits = (0..10_000).filter(|_| r.chance(0.25)).count();
        assert!((2_300..2_700).contains(&hits), "{hits}");
    }

    #[test]
    fn probabilities_zero_and_one_draw_nothing() {
        let (a, b) = (Rng::new(1, ""), Rng::new(1, ""));
        assert!(!a.chance(0.0) && a.chance(1.0));
        assert_eq!(a.u64(), b.u64());
    }
}
