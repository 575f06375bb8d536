//! A set of slots of an extent.

/// Slots of an extent, as a bitmap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotSet(Vec<u64>);

impl SlotSet {
    /// All slots below `count`.
    #[must_use]
    pub fn all(count: u32) -> Self {
        (0..count).collect()
    }

    /// Whether `slot` is in the set.
    #[must_use]
    pub fn contains(&self, slot: u32) -> bool {
        self.0.get(word(slot)).is_some_and(|bits| bits & bit(slot) != 0)
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|bits| *bits == 0)
    }

    /// Number of slots in the set.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.0.iter().map(|bits| bits.count_ones()).sum()
    }

    /// Adds `slot`.
    pub fn insert(&mut self, slot: u32) {
        if self.0.len() <= word(slot) {
            self.0.resize(word(slot) + 1, 0);
        }
        self.0[word(slot)] |= bit(slot);
    }

    /// Adds the slots of `other`.
    pub fn extend(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// Removes `slot`.
    pub fn remove(&mut self, slot: u32) {
        self.0.get_mut(word(slot)).into_iter().for_each(|bits| *bits &= !bit(slot));
    }

    /// The first slot from `from` on.
    #[must_use]
    pub fn next_from(&self, from: u32) -> Option<u32> {
        let words = self.0.iter().zip(0u32..).skip(word(from));
        let mut found = words.filter_map(|(bits, n)| {
            let mask = if n == from / 64 { u64::MAX << (from % 64) } else { u64::MAX };
            let bits = bits & mask;
            (bits != 0).then(|| n * 64 + bits.trailing_zeros())
        });
        found.next()
    }
}

impl FromIterator<u32> for SlotSet {
    fn from_iter<I: IntoIterator<Item = u32>>(slots: I) -> Self {
        let mut all = Self::default();
        slots.into_iter().for_each(|slot| all.insert(slot));
        all
    }
}

fn word(slot: u32) -> usize {
    slot as usize / 64
}

fn bit(slot: u32) -> u64 {
    1 << (slot % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set(given in prop::collection::btree_set(0u32..300, 0..50), removed in prop::collection::vec(0u32..300, 0..20), from in 0u32..400) {
            let (mut slots, mut model): (SlotSet, BTreeSet<u32>) = (given.iter().copied().collect(), given);
            for slot in removed {
                slots.remove(slot);
                model.remove(&slot);
            }
            prop_assert_eq!(slots.next_from(from), model.range(from..).next().copied());
            prop_assert_eq!((slots.len() as usize, slots.is_empty()), (model.len(), model.is_empty()));
            prop_assert!((0..400).all(|slot| slots.contains(slot) == model.contains(&slot)));
        }
    }
}
