//! Whether a replicated volume can be used through this node.

use std::cell::Cell;
use std::rc::Rc;

use tokio::sync::Notify;

/// How a replicated volume can be used through a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Access {
    /// As good as through any other node.
    #[default]
    Optimized,
    /// Not at the moment, but again within seconds: the volume is opening, or a lease has expired.
    /// Requests submitted meanwhile wait, and may fail with [`Error::Fenced`](crate::Error).
    Transitioning,
    /// Not until further notice: this node lacks the current data. Use another node.
    Unavailable,
}

/// The [`Access`] of one volume on this node: a shared handle. The engine sets it; front ends read
/// it and wait for it to change.
///
/// A volume that only one node serves has none.
#[derive(Clone, Debug, Default)]
pub struct AccessState(Rc<State>);

#[derive(Debug, Default)]
struct State {
    access: Cell<Access>,
    changed: Notify,
}

impl AccessState {
    /// A new, independent state.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self(Rc::new(State { access: Cell::new(access), changed: Notify::new() }))
    }

    /// The current access.
    #[must_use]
    pub fn get(&self) -> Access {
        self.0.access.get()
    }

    /// Sets the access to `access` and wakes those waiting for a change; runs no callbacks.
    pub fn set(&self, access: Access) {
        if self.0.access.replace(access) != access {
            self.0.changed.notify_waiters();
        }
    }

    /// Waits until the access differs from `seen`, and returns it. A slow caller misses
    /// intermediate changes, never the last one. The future may be dropped.
    pub async fn changed_from(&self, seen: Access) -> Access {
        loop {
            // Registered before reading the state, so a change in between is not missed.
            let changed = self.0.changed.notified();
            let access = self.get();
            if access != seen {
                return access;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn waiters_see_the_lasting_state() {
        let state = AccessState::default();
        let (setter, mut first) = (state.clone(), Box::pin(state.changed_from(Access::Optimized)));
        let mut second = Box::pin(state.changed_from(Access::Optimized));
        assert_eq!((&mut first).now_or_never(), None);
        setter.set(Access::Optimized);
        assert_eq!((&mut first).now_or_never(), None, "no change");
        setter.set(Access::Transitioning);
        setter.set(Access::Unavailable);
        assert_eq!(first.now_or_never(), Some(Access::Unavailable));
        setter.set(Access::Optimized);
        assert_eq!((&mut second).now_or_never(), None, "it came and went");
        assert_eq!(state.changed_from(Access::Unavailable).now_or_never(), Some(Access::Optimized));
    }
}
