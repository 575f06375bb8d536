//! Lost rows of an extent: no disk returned them and they could not be reconstructed. They are
//! zeroed on the disks, and read as errors until they are rewritten.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::time::Duration;

use geometry::RowSet;
use tokio::time::Instant;

/// The lost rows of an extent in use.
#[derive(Debug, Default)]
pub(super) struct LostRows {
    rows: RefCell<RowSet>,
    /// Rows that a scrub found inconsistent and could not repair: they still read as they are.
    unrepaired: RefCell<RowSet>,
    /// Whether some row was unreadable in the last scrub and was not given up.
    pub(super) has_unread: Cell<bool>,
    /// Whether some row was unreadable in this pass,
    failed_this_pass: Cell<bool>,
    /// in how many successive passes that was so, and since when.
    failed_passes: Cell<u32>,
    failing_since: Cell<Option<Instant>>,
}

impl LostRows {
    pub(super) fn new(rows: RowSet) -> Self {
        Self { rows: RefCell::new(rows), ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.borrow().is_empty()
    }

    pub(super) fn lost_within(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        self.rows.borrow().intersection(rows)
    }

    pub(super) fn insert(&self, rows: Range<u32>) {
        self.unrepaired.borrow_mut().remove(rows.clone());
        self.rows.borrow_mut().insert(rows);
    }

    /// Notes that these rows have been rewritten.
    pub(super) fn remove(&self, rows: Range<u32>) {
        self.unrepaired.borrow_mut().remove(rows.clone());
        self.rows.borrow_mut().remove(rows);
    }

    /// Notes that these rows could not be repaired.
    pub(super) fn note_unrepaired(&self, rows: Range<u32>) {
        self.unrepaired.borrow_mut().insert(rows);
    }

    /// Whether any of these rows is unrepaired.
    pub(super) fn is_unrepaired(&self, rows: &Range<u32>) -> bool {
        !self.unrepaired.borrow().intersection(rows).is_empty()
    }

    /// Whether no row is lost or unrepaired.
    pub(super) fn is_clean(&self) -> bool {
        self.is_empty() && self.unrepaired.borrow().is_empty()
    }

    /// Those of `rows` that are lost, and those that are unrepaired.
    pub(super) fn lost_or_unrepaired_within(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        let mut all = self.lost_within(rows);
        all.extend(self.unrepaired.borrow().intersection(rows));
        all
    }

    /// Notes that a row could not be read or reconstructed although all disks are attached.
    pub(super) fn note_failure(&self) {
        self.failed_this_pass.set(true);
    }

    /// Ends a pass over the extent.
    pub(super) fn end_pass(&self) {
        let failed = self.failed_this_pass.take();
        self.failed_passes.set(if failed { self.failed_passes.get().saturating_add(1) } else { 0 });
        let since = self.failing_since.get().unwrap_or_else(Instant::now);
        self.failing_since.set(failed.then_some(since));
    }

    /// Whether some row was unreadable in at least `failures` successive passes, and for at least
    /// `failing`.
    pub(super) fn is_failing(&self, failures: u32, failing: Duration) -> bool {
        let is_long = self.failing_since.get().is_some_and(|since| since.elapsed() >= failing);
        is_long && self.failed_passes.get() >= failures
    }
}
