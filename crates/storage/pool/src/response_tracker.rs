//! Tracks which disks have not answered yet.

use std::cell::Cell;
use std::time::Duration;

use super::metadata::{MemberId, MemberSet};

/// Members that were sent a request, and those that have not answered.
#[derive(Debug, Default)]
pub(super) struct ResponseTracker {
    unanswered: Cell<MemberSet>,
    any_answered: Cell<bool>,
}

impl ResponseTracker {
    /// Tracks one member only; the others are assumed to answer.
    pub(super) fn single(id: MemberId) -> Self {
        let tracker = Self::default();
        tracker.sent(id);
        tracker.any_answered.set(true);
        tracker
    }

    pub(super) fn sent(&self, id: MemberId) {
        self.unanswered.set(self.unanswered.get().with(id));
    }

    pub(super) fn answered(&self, id: MemberId) {
        self.abandoned(id);
        self.any_answered.set(true);
    }

    /// Stops waiting for a member that has not answered.
    pub(super) fn abandoned(&self, id: MemberId) {
        self.unanswered.set(self.unanswered.get().without_member(id));
    }

    pub(super) fn unanswered(&self) -> MemberSet {
        self.unanswered.get()
    }

    /// Waits until some members have been silent for `patience` while others answered, and `accept`
    /// holds for them. If all are silent, none counts.
    pub(super) async fn wait_unresponsive(
        &self,
        patience: Duration,
        accept: impl Fn(MemberSet) -> bool,
    ) -> MemberSet {
        const SECOND: Duration = Duration::from_secs(1);
        let mut waited = Duration::ZERO;
        loop {
            // Counts seconds as this task sees them: a node that was stopped has not waited.
            tokio::time::sleep(SECOND).await;
            waited = if self.any_answered.get() { waited + SECOND } else { Duration::ZERO };
            if waited >= patience && accept(self.unanswered()) {
                return self.unanswered();
            }
        }
    }
}
