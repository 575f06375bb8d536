//! Rows of an extent that are lost: no disk gave them back, and nothing made them. They are zero on the disks, and read as errors
//! until they are written again.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::time::Duration;

use geometry::RowSet;
use tokio::time::Instant;

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
