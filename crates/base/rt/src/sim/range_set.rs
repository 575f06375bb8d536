//! A set of numbers kept as ranges: the allocated space of a file.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint, non-adjacent ranges.
#[derive(Clone, Debug, Default)]
pub(crate) struct RangeSet(BTreeMap<u64, u64>);

impl RangeSet {
    /// How many numbers of `range` are in the set.
    pub(crate) fn count(&self, range: Range<u64>) -> u64 {
        self.touching(&range)
            .map(|(start, end)| end.min(range.end).saturating_sub(start.max(range.start)))
            .sum()
    }

    /// The first range that ends behind `from`.
    pub(crate) fn next(&self, from: u64) -> Option<Range<u64>> {
        let around = self.0.range(..=from).next_back().filter(|&(_, &end)| end > from);
        around.or_else(|| self.0.range(from..).next()).map(|(&start, &end)| start..end)
    }

    /// Adds `range`; returns how many numbers were new.
    pub(crate) fn insert(&mut self, range: Range<u64>) -> u64 {
        if range.is_empty() {
            return 0;
        }
        let new = range.end - range.start - self.count(range.clone());
        let merged: Vec<_> = self.touching(&range).collect();
        let (mut start, mut end) = (range.start, range.end);
        for (s, e) in merged {
            self.0.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.0.insert(start, end);
        new
    }

    /// Removes `range`; returns how many numbers were there.
    pub(crate) fn remove(&mut self, range: Range<u64>) -> u64 {
        if range.is_empty() {
            return 0;
        }
        let gone = self.count(range.clone());
        let cut: Vec<_> = self.touching(&range).collect();
        for (s, e) in cut {
            self.0.remove(&s);
            if s < range.start {
                self.0.insert(s, range.start);
            }
            if e > range.end {
                self.0.insert(range.end, e);
            }
        }
        gone
    }

    /// Ranges that overlap `range` or lie next to it.
    fn touching(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (start, end) = (range.start, range.end);
        let first = self.0.range(..start).next_back().map_or(start, |(&s, _)| s);
        self.0.range(first..=end).map(|(&s, &e)| (s, e)).filter(move |&(_, e)| e >= start)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::sim::rng::Rng;

    #[test]
    fn agrees_with_a_plain_set() {
        let rng = Rng::new(3, "extents");
        let (mut ours, mut plain) = (RangeSet::default(), BTreeSet::new());
        for _ in 0..5_000 {
            let start = rng.below(60);
            let range = start..start + rng.below(12);
            if rng.chance(0.5) {
                let new = range.clone().filter(|&n| plain.insert(n)).count() as u64;
                assert_eq!(ours.insert(range), new);
            } else {
                let gone = range.clone().filter(|n| plain.remove(n)).count() as u64;
                assert_eq!(ours.remove(range), gone);
            }
            let spans: u64 = ours.0.iter().map(|(s, e)| e - s).sum();
            assert_eq!(spans, plain.len() as u64);
            let from = rng.below(72);
            let next = ours.next(from).map(|r| r.start.max(from));
            assert_eq!(next, plain.range(from..).next().copied());
            let (a, b) = (rng.below(30), 30 + rng.below(30));
            assert_eq!(ours.count(a..b), plain.range(a..b).count() as u64);
        }
    }
}
