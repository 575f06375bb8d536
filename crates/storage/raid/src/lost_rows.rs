//! Lost rows of an extent: no disk returned them and they could not be reconstructed. They are
//! zeroed on the disks, and read as errors until they are rewritten.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Duration;

use geometry::RowSet;
use tokio::time::Instant;

/// The lost rows of an extent in use.
#[derive(Debug, Default)]
pub(super) struct LostRows(RefCell<RowState>);

#[derive(Debug, Default)]
struct RowState {
    lost: RowSet,
    /// Rows that a scrub found inconsistent and could not repair: they still read as they are.
    unrepaired: RowSet,
    /// Whether some row was unreadable in the last scrub and was not recorded as lost.
    has_unreadable: bool,
    /// Whether some row was unreadable in this pass.
    failed_this_pass: bool,
    /// In how many successive passes some row was unreadable.
    failed_passes: u32,
    /// When the first of these passes was.
    failing_since: Option<Instant>,
}

impl LostRows {
    pub(super) fn new(lost: RowSet) -> Self {
        Self(RefCell::new(RowState { lost, ..RowState::default() }))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().lost.is_empty()
    }

    pub(super) fn lost_within(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        self.0.borrow().lost.intersection(rows)
    }

    pub(super) fn insert(&self, rows: Range<u32>) {
        let state = &mut *self.0.borrow_mut();
        state.unrepaired.remove(rows.clone());
        state.lost.insert(rows);
    }

    /// Notes that these rows have been rewritten.
    pub(super) fn remove(&self, rows: Range<u32>) {
        let state = &mut *self.0.borrow_mut();
        state.unrepaired.remove(rows.clone());
        state.lost.remove(rows);
    }

    /// Notes that these rows could not be repaired.
    pub(super) fn note_unrepaired(&self, rows: Range<u32>) {
        self.0.borrow_mut().unrepaired.insert(rows);
    }

    /// Whether any of these rows is unrepaired.
    pub(super) fn is_unrepaired(&self, rows: &Range<u32>) -> bool {
        !self.0.borrow().unrepaired.intersection(rows).is_empty()
    }

    /// Whether no row is lost or unrepaired.
    pub(super) fn is_clean(&self) -> bool {
        let state = self.0.borrow();
        state.lost.is_empty() && state.unrepaired.is_empty()
    }

    /// Those of `rows` that are lost, and those that are unrepaired.
    pub(super) fn lost_or_unrepaired_within(&self, rows: &Range<u32>) -> Vec<Range<u32>> {
        let state = self.0.borrow();
        let mut all = state.lost.intersection(rows);
        all.extend(state.unrepaired.intersection(rows));
        all
    }

    /// Whether some row was unreadable in the last scrub and was not recorded as lost.
    pub(super) fn has_unreadable(&self) -> bool {
        self.0.borrow().has_unreadable
    }

    /// Sets [`Self::has_unreadable`].
    pub(super) fn set_has_unreadable(&self, has_unreadable: bool) {
        self.0.borrow_mut().has_unreadable = has_unreadable;
    }

    /// Notes that a row could not be read or reconstructed although all disks are attached.
    pub(super) fn note_failure(&self) {
        self.0.borrow_mut().failed_this_pass = true;
    }

    /// Ends a pass over the extent.
    pub(super) fn end_pass(&self) {
        let state = &mut *self.0.borrow_mut();
        if std::mem::take(&mut state.failed_this_pass) {
            state.failed_passes = state.failed_passes.saturating_add(1);
            state.failing_since.get_or_insert_with(Instant::now);
        } else {
            (state.failed_passes, state.failing_since) = (0, None);
        }
    }

    /// Whether some row was unreadable in at least `failures` successive passes, and for at least
    /// `failing`.
    pub(super) fn is_failing(&self, failures: u32, failing: Duration) -> bool {
        let state = self.0.borrow();
        let is_long = state.failing_since.is_some_and(|since| since.elapsed() >= failing);
        is_long && state.failed_passes >= failures
    }
}
