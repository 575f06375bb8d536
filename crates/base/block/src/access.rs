//! How a volume that several nodes serve is to be used on one of them.

use std::cell::Cell;
use std::rc::Rc;

use tokio::sync::Notify;

/// Whether a node is the one to ask for a volume that several nodes serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Access {
    /// As good as any other node.
    #[default]
    Optimized,
    /// Not at this moment, and again within seconds: the volume opens, or a lease has lapsed.
    /// What is submitted meanwhile is held, and may come back as [`Error::Fenced`](crate::Error).
    Transitioning,
    /// Not until further notice: this node does not have what the others have. Use those.
    Unavailable,
}

/// The [`Access`] of one volume on this node: a handle that all who have it share. Whoever knows
/// sets it, front ends look at it and wait for it to change.
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
    /// A state of its own.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self(Rc::new(State { access: Cell::new(access), changed: Notify::new() }))
    }

    /// What it is now.
    #[must_use]
    pub fn get(&self) -> Access {
        self.0.access.get()
    }

    /// From now on it is `access`. Wakes those who wait for that; calls nobody.
    pub fn set(&self, access: Access) {
        if self.0.access.replace(access) != access {
            self.0.changed.notify_waiters();
        }
    }

    /// Waits until it is another than `seen`, and tells which. Who is slow misses what came and
    /// went meanwhile, and never what stays. Dropping the future does no harm.
    pub async fn other_than(&self, seen: Access) -> Access {
        loop {
            // Made before looking: a change in between is not missed.
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
    fn who_waits_is_told_what_stays() {
        let state = AccessState::default();
        let (setter, mut first) = (state.clone(), Box::pin(state.other_than(Access::Optimized)));
        let mut second = Box::pin(state.other_than(Access::Optimized));
        assert_eq!((&mut first).now_or_never(), None);
        setter.set(Access::Optimized);
        assert_eq!((&mut first).now_or_never(), None, "no change");
        setter.set(Access::Transitioning);
        setter.set(Access::Unavailable);
        assert_eq!(first.now_or_never(), Some(Access::Unavailable));
        setter.set(Access::Optimized);
        assert_eq!((&mut second).now_or_never(), None, "it came and went");
        assert_eq!(state.other_than(Access::Unavailable).now_or_never(), Some(Access::Optimized));
    }
}
