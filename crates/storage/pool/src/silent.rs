//! Who of those that were asked has not answered yet.

use std::cell::Cell;
use std::time::Duration;

use super::metadata::{MemberId, Members};

/// Members that were asked, and are waited for.
#[derive(Debug, Default)]
pub(super) struct Silent {
    left: Cell<Members>,
    others_answer: Cell<bool>,
}

impl Silent {
    /// One is asked, and others are not: they answer as far as anybody knows.
    pub(super) fn alone(id: MemberId) -> Self {
        let silent = Self::default();
        silent.asks(id);
        silent.others_answer.set(true);
        silent
    }

    pub(super) fn asks(&self, id: MemberId) {
        self.left.set(self.left.get().with(id));
    }

    pub(super) fn answers(&self, id: MemberId) {
        self.forgets(id);
        self.others_answer.set(true);
    }

    /// Nobody waits for it any more, and that is no answer.
    pub(super) fn forgets(&self, id: MemberId) {
        self.left.set(self.left.get().but(id));
    }

    pub(super) fn left(&self) -> Members {
        self.left.get()
    }

    /// Ends when others have answered for so long, and it is so of those that are left. What stops all of them counts for none.
    pub(super) async fn outlast(
        &self,
        patience: Duration,
        is_so: impl Fn(Members) -> bool,
    ) -> Members {
        const SECOND: Duration = Duration::from_secs(1);
        let mut waited = Duration::ZERO;
        loop {
            // Seconds as a task here sees them pass: a node that was stopped has not waited.
            tokio::time::sleep(SECOND).await;
            waited = if self.others_answer.get() { waited + SECOND } else { Duration::ZERO };
            if waited >= patience && is_so(self.left()) {
                return self.left();
            }
        }
    }
}
