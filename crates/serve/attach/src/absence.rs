//! A volume that fails because it is out of reach, and for no other reason.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use block::{Error, Failure};
use tokio::sync::Notify;

/// Tells front ends of a volume that what it stands on is out of reach for good, as far as this process is concerned.
///
/// Nothing is known to be lost then: whoever opens it anew may find it as it was. So what is in flight is not answered:
/// a consumer would take an error for the medium's. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Absence(Rc<Inner>);

struct Inner {
    is_away: Box<dyn Fn() -> bool>,
    certain: Cell<bool>,
    told: Notify,
}

impl Absence {
    /// `is_away` is asked whenever a command has failed as [`Error::Gone`].
    #[must_use]
    pub fn when(is_away: impl Fn() -> bool + 'static) -> Self {
        let is_away = Box::new(is_away);
        Self(Rc::new(Inner { is_away, certain: Cell::new(false), told: Notify::new() }))
    }

    /// Of a volume whose failures are all to be told.
    #[must_use]
    pub fn never() -> Self {
        Self::when(|| false)
    }

    /// Whether a command has failed for this reason.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        self.0.certain.get()
    }

    /// Waits until a command has failed for this reason.
    pub async fn certain(&self) {
        let told = self.0.told.notified();
        if !self.is_certain() {
            told.await;
        }
    }

    /// Whether it is why a command has failed. If so it is certain from now on.
    pub(crate) fn explains(&self, failure: &Failure) -> bool {
        let explains = *failure == Failure::Device(Error::Gone) && (self.0.is_away)();
        if explains && !self.0.certain.replace(true) {
            self.0.told.notify_waiters();
        }
        explains
    }
}

impl fmt::Debug for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Absence").field("certain", &self.is_certain()).finish_non_exhaustive()
    }
}
