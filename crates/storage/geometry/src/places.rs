//! A set of places of an extent.

/// Stripes of an extent, by where they lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places(Vec<u64>);

impl Places {
    /// All of `count` places.
    #[must_use]
    pub fn all(count: u32) -> Self {
        (0..count).collect()
    }

    /// Whether `place` is one of them.
    #[must_use]
    pub fn has(&self, place: u32) -> bool {
        self.0.get(word(place)).is_some_and(|bits| bits & bit(place) != 0)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|bits| *bits == 0)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.0.iter().map(|bits| bits.count_ones()).sum()
    }

    /// One more.
    pub fn insert(&mut self, place: u32) {
        if self.0.len() <= word(place) {
            self.0.resize(word(place) + 1, 0);
        }
        self.0[word(place)] |= bit(place);
    }

    /// Those of another set as well.
    pub fn extend(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// Not this one any more.
    pub fn remove(&mut self, place: u32) {
        self.0.get_mut(word(place)).into_iter().for_each(|bits| *bits &= !bit(place));
    }

    /// The first one from `from` on.
    #[must_use]
    pub fn next(&self, from: u32) -> Option<u32> {
        let words = self.0.iter().zip(0u32..).skip(word(from));
        let mut there = words.filter_map(|(bits, n)| {
            let passed = if n == from / 64 { u64::MAX << (from % 64) } else { u64::MAX };
            let bits = bits & passed;
            (bits != 0).then(|| n * 64 + bits.trailing_zeros())
        });
        there.next()
    }
}

impl FromIterator<u32> for Places {
    fn from_iter<I: IntoIterator<Item = u32>>(places: I) -> Self {
        let mut all = Self::default();
        places.into_iter().for_each(|place| all.insert(place));
        all
    }
}

fn word(place: u32) -> usize {
    place as usize / 64
}

fn bit(place: u32) -> u64 {
    1 << (place % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(given in prop::collection::btree_set(0u32..300, 0..50), gone in prop::collection::vec(0u32..300, 0..20), from in 0u32..400) {
            let (mut places, mut model): (Places, BTreeSet<u32>) = (given.iter().copied().collect(), given);
            for place in gone {
                places.remove(place);
                model.remove(&place);
            }
            prop_assert_eq!(places.next(from), model.range(from..).next().copied());
            prop_assert_eq!((places.len() as usize, places.is_empty()), (model.len(), model.is_empty()));
            prop_assert!((0..400).all(|place| places.has(place) == model.contains(&place)));
        }
    }
}
