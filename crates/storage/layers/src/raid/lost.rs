//! Rows of an extent that are lost: no disk gave them back, and nothing made them. They are zero on the disks, and read as errors
//! until they are written again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use tokio::time::Instant;

/// Rows of data of an extent, in ranges of which none touches another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowSet(BTreeMap<u32, u32>);

impl RowSet {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many ranges there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        self.0.iter().map(|(start, end)| *start..*end)
    }

    /// Those of `rows` that are in it, in order.
    #[must_use]
    pub fn within(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        let before = self.0.range(..rows.start).next_back();
        let all = before.into_iter().chain(self.0.range(rows.start..rows.end.max(rows.start)));
        let cut = all.map(|(start, end)| (*start).max(rows.start)..(*end).min(rows.end));
        cut.filter(|cut| !cut.is_empty()).collect()
    }

    /// These as well.
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

    /// Without these.
    pub fn remove(&mut self, rows: Range<u32>) {
        for gone in self.within(&rows) {
            let whole = self.0.range(..=gone.start).next_back().map(|(from, to)| *from..*to);
            let Some(whole) = whole else { continue };
            self.0.remove(&whole.start);
            if whole.start < gone.start {
                self.0.insert(whole.start, gone.start);
            }
            if gone.end < whole.end {
                self.0.insert(gone.end, whole.end);
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

/// What is lost of an extent in use.
#[derive(Debug, Default)]
pub(super) struct Lost {
    rows: RefCell<RowSet>,
    /// Rows that a scrub could not repair: they are read as they are.
    unrepaired: RefCell<RowSet>,
    /// Whether something could not be read when it was compared last, and was not given up.
    pub(super) unread: Cell<bool>,
    /// Whether something could not be read of it in this pass,
    fails: Cell<bool>,
    /// in how many passes in a row that was so, and since when.
    failures: Cell<u32>,
    since: Cell<Option<Instant>>,
}

impl Lost {
    pub(super) fn of(rows: RowSet) -> Self {
        Self { rows: RefCell::new(rows), ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.borrow().is_empty()
    }

    pub(super) fn within(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        self.rows.borrow().within(rows)
    }

    pub(super) fn insert(&self, rows: Range<u32>) {
        self.unrepaired.borrow_mut().remove(rows.clone());
        self.rows.borrow_mut().insert(rows);
    }

    /// These rows have been written again.
    pub(super) fn remove(&self, rows: Range<u32>) {
        self.unrepaired.borrow_mut().remove(rows.clone());
        self.rows.borrow_mut().remove(rows);
    }

    /// These rows could not be repaired.
    pub(super) fn note_unrepaired(&self, rows: Range<u32>) {
        self.unrepaired.borrow_mut().insert(rows);
    }

    /// Whether some of these rows could not be repaired.
    pub(super) fn is_unrepaired(&self, rows: &Range<u32>) -> bool {
        !self.unrepaired.borrow().within(rows).is_empty()
    }

    /// Whether no row is lost, and none could not be repaired.
    pub(super) fn remembers_nothing(&self) -> bool {
        self.is_empty() && self.unrepaired.borrow().is_empty()
    }

    /// Those of `rows` that are lost, and those that could not be repaired.
    pub(super) fn remembered_within(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        let mut all = self.within(rows);
        all.extend(self.unrepaired.borrow().within(rows));
        all
    }

    /// A row could not be read, nor made of the rest, with all of its disks there.
    pub(super) fn note_failure(&self) {
        self.fails.set(true);
    }

    /// All that was to be read of it has been tried.
    pub(super) fn end_of_pass(&self) {
        let fails = self.fails.take();
        self.failures.set(if fails { self.failures.get().saturating_add(1) } else { 0 });
        let since = self.since.get().unwrap_or_else(Instant::now);
        self.since.set(fails.then_some(since));
    }

    /// Whether something could not be read in so many passes in a row, and for so long.
    pub(super) fn is_failing(&self, failures: u32, failing: Duration) -> bool {
        let long = self.since.get().is_some_and(|since| since.elapsed() >= failing);
        long && self.failures.get() >= failures
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_rows(
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
            let found: Vec<u32> = set.within(&(at..at + count)).into_iter().flatten().collect();
            prop_assert_eq!(found, model.range(at..at + count).copied().collect::<Vec<_>>());
            prop_assert_eq!(set.iter().collect::<RowSet>(), set.clone());
            prop_assert_eq!(set.is_empty(), model.is_empty());
        }
    }
}
