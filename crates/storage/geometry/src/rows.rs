//! Sets of rows of an extent.

use std::collections::BTreeMap;
use std::ops::Range;

/// Rows of an extent's data, as ranges that do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowSet(BTreeMap<u32, u32>);

impl RowSet {
    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of ranges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        self.0.iter().map(|(start, end)| *start..*end)
    }

    /// The parts of `rows` that are in the set, in order.
    #[must_use]
    pub fn intersection(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        let previous = self.0.range(..rows.start).next_back();
        let all = previous.into_iter().chain(self.0.range(rows.start..rows.end.max(rows.start)));
        let parts = all.map(|(start, end)| (*start).max(rows.start)..(*end).min(rows.end));
        parts.filter(|part| !part.is_empty()).collect()
    }

    /// Adds `rows`.
    pub fn insert(&mut self, rows: Range<u32>) {
        if rows.is_empty() {
            return;
        }
        let (mut start, mut end) = (rows.start, rows.end);
        let touching = |(from, to): (&u32, &u32)| (*to >= start).then_some((*from, *to));
        let touching: Vec<(u32, u32)> = self.0.range(..=end).rev().map_while(touching).collect();
        for (from, to) in touching {
            self.0.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.0.insert(start, end);
    }

    /// Removes `rows`.
    pub fn remove(&mut self, rows: Range<u32>) {
        for removed in self.intersection(&rows) {
            let whole = self.0.range(..=removed.start).next_back().map(|(from, to)| *from..*to);
            let Some(whole) = whole else { continue };
            self.0.remove(&whole.start);
            if whole.start < removed.start {
                self.0.insert(whole.start, removed.start);
            }
            if removed.end < whole.end {
                self.0.insert(removed.end, whole.end);
            }
        }
    }
}

impl FromIterator<Range<u32>> for RowSet {
    fn from_iter<I: IntoIterator<Item = Range<u32>>>(ranges: I) -> Self {
        let mut all = Self::default();
        ranges.into_iter().for_each(|rows| all.insert(rows));
        all
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set_of_rows(
            steps in prop::collection::vec((any::<bool>(), 0u32..60, 0u32..12), 0..30),
            at in 0u32..60,
            count in 0u32..20,
        ) {
            let (mut set, mut model) = (RowSet::default(), BTreeSet::new());
            for (inserts, start, count) in steps {
                let rows = start..start + count;
                if inserts {
                    model.extend(rows.clone());
                    set.insert(rows);
                } else {
                    model.retain(|row| !rows.contains(row));
                    set.remove(rows);
                }
                let all: Vec<u32> = set.iter().flatten().collect();
                prop_assert_eq!(&all, &model.iter().copied().collect::<Vec<_>>());
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.windows(2).all(|two| two[0].end < two[1].start), "{ranges:?}");
            }
            let found: Vec<u32> = set.intersection(&(at..at + count)).into_iter().flatten().collect();
            prop_assert_eq!(found, model.range(at..at + count).copied().collect::<Vec<_>>());
            prop_assert_eq!(set.iter().collect::<RowSet>(), set.clone());
            prop_assert_eq!(set.is_empty(), model.is_empty());
        }
    }
}
