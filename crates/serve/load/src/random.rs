//! Reproducible randomness: numbers, data and permutations from a seed.

/// Scrambles 64 bits (the finaliser of SplitMix64: Steele, Lea, Flood 2014).
#[must_use]
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN_GAMMA);
        mix(self.0)
    }

    /// A number below `limit`, which is not 0. The bias is below 2^-64 times the limit.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// Fills `out`.
    pub(crate) fn fill(&mut self, out: &mut [u8]) {
        for piece in out.chunks_mut(8) {
            let random = self.next_u64().to_le_bytes();
            piece.copy_from_slice(&random[..piece.len()]);
        }
    }
}

/// A permutation of the numbers below `count` without a table: a Feistel network over the next
/// power of two, iterated until the result is in range (Black and Rogaway 2002, "cycle walking").
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    count: u64,
    /// Bits of the right and the left half.
    right_bits: u32,
    left_bits: u32,
    seed: u64,
}

impl Permutation {
    const ROUNDS: u64 = 4;

    /// `count` is not 0.
    pub(crate) fn new(count: u64, seed: u64) -> Self {
        let bits = (u64::BITS - (count - 1).leading_zeros()).max(2);
        let right = bits / 2;
        Self { count, right_bits: right, left_bits: bits - right, seed: mix(seed ^ GOLDEN_GAMMA) }
    }

    /// The image of `number`, which is below the count.
    pub(crate) fn permute(&self, number: u64) -> u64 {
        let mut at = number;
        loop {
            at = self.feistel_pass(at);
            if at < self.count {
                return at;
            }
        }
    }

    fn feistel_pass(&self, at: u64) -> u64 {
        let mask = |bits: u32| (1u64 << bits) - 1;
        let (mut low, mut high) = (at & mask(self.right_bits), at >> self.right_bits);
        for round in 0..Self::ROUNDS {
            let key = self.seed.wrapping_add(round.wrapping_mul(GOLDEN_GAMMA));
            if round % 2 == 0 {
                high ^= mix(low ^ key) & mask(self.left_bits);
            } else {
                low ^= mix(high ^ key) & mask(self.right_bits);
            }
        }
        high << self.right_bits | low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_reaches_each_once() {
        for count in [1, 2, 3, 5, 64, 100, 1000, 4097] {
            for seed in 0..4 {
                let permutation = Permutation::new(count, seed);
                let mut seen: Vec<u64> = (0..count).map(|n| permutation.permute(n)).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..count), "{count} {seed}");
            }
        }
        // The largest count does not overflow.
        assert!(Permutation::new(1 << 62, 7).permute((1 << 62) - 1) < 1 << 62);
    }

    /// Neighbours do not stay neighbours, and passes differ.
    #[test]
    fn a_permutation_looks_random() {
        let (one, two) = (Permutation::new(10_000, 1), Permutation::new(10_000, 2));
        let near =
            (1..10_000).filter(|n| one.permute(*n).abs_diff(one.permute(n - 1)) <= 8).count();
        assert!(near < 60, "of 10000 pairs about 16 are near by chance: {near}");
        let same = (0..10_000).filter(|n| one.permute(*n) == two.permute(*n)).count();
        assert!(same < 20, "{same}");
        let low = (0..5000).filter(|n| one.permute(*n) < 5000).count();
        assert!((2200..2800).contains(&low), "{low}");
    }
}
