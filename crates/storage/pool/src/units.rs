//! Which units of a member are taken.

use std::collections::BTreeMap;

const CHUNK: u32 = 4096;
const WORDS: usize = CHUNK as usize / 64;

/// A set of units, of which memory is taken for the chunks that have any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Units {
    chunks: BTreeMap<u32, Chunk>,
    taken: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Chunk {
    bits: Box<[u64; WORDS]>,
    taken: u32,
}

/// Number of the chunk, number of the word in it, the bit in that.
fn place(unit: u32) -> (u32, usize, u64) {
    let within = unit % CHUNK;
    (unit / CHUNK, (within / 64) as usize, 1 << (within % 64))
}

impl Units {
    /// How many are taken.
    #[must_use]
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Whether `unit` is.
    #[must_use]
    pub fn has(&self, unit: u32) -> bool {
        let (chunk, word, bit) = place(unit);
        self.chunks.get(&chunk).is_some_and(|chunk| chunk.bits[word] & bit != 0)
    }

    /// Takes it; says whether it was free.
    pub fn take(&mut self, unit: u32) -> bool {
        if self.has(unit) {
            return false;
        }
        let (chunk, word, bit) = place(unit);
        let new = || Chunk { bits: Box::new([0; WORDS]), taken: 0 };
        let chunk = self.chunks.entry(chunk).or_insert_with(new);
        chunk.bits[word] |= bit;
        chunk.taken += 1;
        self.taken += 1;
        true
    }

    /// Gives it back; says whether it was taken.
    pub fn give(&mut self, unit: u32) -> bool {
        if !self.has(unit) {
            return false;
        }
        let (number, word, bit) = place(unit);
        if let Some(chunk) = self.chunks.get_mut(&number) {
            chunk.bits[word] &= !bit;
            chunk.taken -= 1;
            if chunk.taken == 0 {
                self.chunks.remove(&number);
            }
        }
        self.taken -= 1;
        true
    }

    /// The lowest of the first `count` units that is free.
    #[must_use]
    pub fn lowest_free(&self, count: u32) -> Option<u32> {
        let mut number = 0;
        while let Some(chunk) = self.chunks.get(&number).filter(|chunk| chunk.taken == CHUNK) {
            debug_assert!(chunk.bits.iter().all(|word| *word == u64::MAX));
            number += 1;
        }
        let within = self.chunks.get(&number).map_or(0, Chunk::lowest_free);
        number.checked_mul(CHUNK)?.checked_add(within).filter(|unit| *unit < count)
    }
}

impl Chunk {
    /// The lowest one, which there is.
    fn lowest_free(&self) -> u32 {
        let words = (0u32..).zip(self.bits.iter());
        let mut free = words.filter(|(_, word)| **word != u64::MAX);
        free.next().map_or(CHUNK, |(n, word)| n * 64 + word.trailing_ones())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((any::<bool>(), 0u32..3 * CHUNK), 0..300), solid in 0u32..2 * CHUNK) {
            let mut units = Units::default();
            let mut set: BTreeSet<u32> = (0..solid).collect();
            for unit in 0..solid {
                prop_assert!(units.take(unit));
            }
            for (take, unit) in steps {
                if take {
                    prop_assert_eq!(units.take(unit), set.insert(unit));
                } else {
                    prop_assert_eq!(units.give(unit), set.remove(&unit));
                }
                prop_assert_eq!(units.has(unit), set.contains(&unit));
            }
            prop_assert_eq!(units.taken() as usize, set.len());
            prop_assert_eq!(units.lowest_free(4 * CHUNK), (0..).find(|unit| !set.contains(unit)));
            prop_assert_eq!(units.lowest_free(0), None);
        }
    }
}
