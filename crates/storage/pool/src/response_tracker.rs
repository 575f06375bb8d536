//! Tracks which disks have not answered yet.

use std::cell::Cell;
use std::time::Duration;

use pool_metadata::{MemberId, MemberSet};

/// Members that were sent a request, and those that have not answered.
#[derive(Debug, Default)]
pub(super) struct ResponseTracker {
    responses: Cell<Responses>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Responses {
    unanswered: MemberSet,
    any_answered: bool,
}

impl ResponseTracker {
    /// Tracks one member only; the others are assumed to answer.
    pub(super) fn single(id: MemberId) -> Self {
        let tracker = Self::default();
        tracker.sent(id);
        tracker.responses.update(|r| Responses { any_answered: true, ..r });
        tracker
    }

    pub(super) fn sent(&self, id: MemberId) {
        self.responses.update(|r| Responses { unanswered: r.unanswered.with(id), ..r });
    }

    pub(super) fn answered(&self, id: MemberId) {
        self.abandoned(id);
        self.responses.update(|r| Responses { any_answered: true, ..r });
    }

    /// Stops waiting for a member that has not answered.
    pub(super) fn abandoned(&self, id: MemberId) {
        self.responses.update(|r| Responses { unanswered: r.unanswered.without_member(id), ..r });
    }

    pub(super) fn unanswered(&self) -> MemberSet {
        self.responses.get().unanswered
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
            waited =
                if self.responses.get().any_answered { waited + SECOND } else { Duration::ZERO };
            if waited >= patience && accept(self.unanswered()) {
                return self.unanswered();
            }
        }
    }
}
