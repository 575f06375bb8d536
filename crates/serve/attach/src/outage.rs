//! Detects that a volume fails only because it is unreachable.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use block::{Error, RequestError};
use tokio::sync::Notify;

/// Tells a volume's front ends that its storage is permanently unreachable for this process.
///
/// No data is known to be lost: opening the volume again may succeed. So requests in flight are not
/// answered, as a consumer would take an error for a media error. Cheap to clone; clones share
/// their state.
#[derive(Clone)]
pub struct OutageSignal(Rc<OutageState>);

struct OutageState {
    probe: Box<dyn Fn() -> bool>,
    is_set: Cell<bool>,
    notify: Notify,
}

impl OutageSignal {
    /// `is_away` is called whenever a command has failed with [`Error::Gone`].
    #[must_use]
    pub fn new(is_away: impl Fn() -> bool + 'static) -> Self {
        let is_away = Box::new(is_away);
        Self(Rc::new(OutageState {
            probe: is_away,
            is_set: Cell::new(false),
            notify: Notify::new(),
        }))
    }

    /// For a volume whose failures are all reported.
    #[must_use]
    pub fn never() -> Self {
        Self::new(|| false)
    }

    /// Whether a command has failed for this reason.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.is_set.get()
    }

    /// Waits until a command has failed for this reason.
    pub async fn wait(&self) {
        let notified = self.0.notify.notified();
        if !self.is_set() {
            notified.await;
        }
    }

    /// Whether this failure means that the volume is unreachable. If so the signal stays set.
    pub(crate) fn set_if_cause(&self, failure: &RequestError) -> bool {
        let is_cause = *failure == RequestError::Device(Error::Gone) && (self.0.probe)();
        if is_cause && !self.0.is_set.replace(true) {
            self.0.notify.notify_waiters();
        }
        is_cause
    }
}

impl fmt::Debug for OutageSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutageSignal").field("is_set", &self.is_set()).finish_non_exhaustive()
    }
}
