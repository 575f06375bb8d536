//! Virtual time: what is to happen, and when.
//!
//! Everything that takes time outside of the hosts' own code (disks, the network) is an entry of
//! the agenda. Entries that are due at the same moment happen in an order drawn from the seed.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::rng::Rng;

/// The agenda of a world. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Agenda(Rc<Inner>);

struct Inner {
    start: Instant,
    entries: RefCell<BinaryHeap<Reverse<Entry>>>,
    next: Cell<u64>,
    changed: Notify,
    rng: Rng,
}

struct Entry {
    at: Instant,
    /// Decides between entries of one moment; the second number only makes it unique.
    order: (u64, u64),
    what: Box<dyn FnOnce()>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

impl Agenda {
    /// An empty agenda; time starts now. Must be called inside a runtime whose clock is paused.
    pub(crate) fn new(seed: u64) -> Self {
        Self(Rc::new(Inner {
            start: Instant::now(),
            entries: RefCell::default(),
            next: Cell::new(0),
            changed: Notify::new(),
            rng: Rng::new(seed, "agenda"),
        }))
    }

    /// Virtual time since the world began.
    pub(crate) fn now(&self) -> Duration {
        self.0.start.elapsed()
    }

    /// Does `what` in `delay`.
    pub(crate) fn after(&self, delay: Duration, what: impl FnOnce() + 'static) {
        let at = Instant::now() + delay;
        let order = (self.0.rng.u64(), self.0.next.replace(self.0.next.get() + 1));
        let mut entries = self.0.entries.borrow_mut();
        let first = entries.peek().is_none_or(|Reverse(e)| at < e.at);
        entries.push(Reverse(Entry { at, order, what: Box::new(what) }));
        if first {
            self.0.changed.notify_one();
        }
    }

    /// Lets time pass until `over`. Between two entries every task that the first one woke gets
    /// its turn.
    pub(crate) async fn drive(&self, over: impl Fn() -> bool) {
        while !over() {
            let next = self.0.entries.borrow().peek().map(|Reverse(e)| e.at);
            let Some(next) = next else {
                self.0.changed.notified().await;
                continue;
            };
            if next > Instant::now() {
                tokio::select! {
                    biased;
                    () = self.0.changed.notified() => {}
                    () = tokio::time::sleep_until(next) => {}
                }
                continue;
            }
            let due = self.0.entries.borrow_mut().pop();
            if let Some(Reverse(entry)) = due {
                (entry.what)();
                tokio::task::yield_now().await;
            }
        }
    }

    /// Forgets everything that was to happen.
    pub(crate) fn clear(&self) {
        // What an entry holds may look at the agenda when it is dropped.
        let entries = std::mem::take(&mut *self.0.entries.borrow_mut());
        drop(entries);
    }
}
