//! Virtual time: scheduled events.
//!
//! Everything that takes time outside of the hosts' own code (disks, the network) is an event.
//! Events of the same time happen in an order drawn from the seed.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::rng::Rng;

/// The event queue of a world. Cheap to clone.
#[derive(Clone)]
pub(crate) struct EventQueue(Rc<Inner>);

struct Inner {
    start: Instant,
    events: RefCell<BinaryHeap<Reverse<ScheduledEvent>>>,
    next: Cell<u64>,
    changed: Notify,
    rng: Rng,
}

struct ScheduledEvent {
    due: Instant,
    /// Order among events of the same time; the second number makes it unique.
    order: (u64, u64),
    action: Box<dyn FnOnce()>,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.due, self.order) == (other.due, other.order)
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.order).cmp(&(other.due, other.order))
    }
}

impl EventQueue {
    /// An empty queue; time starts now. Must be called inside a runtime whose clock is paused.
    pub(crate) fn new(seed: u64) -> Self {
        Self(Rc::new(Inner {
            start: Instant::now(),
            events: RefCell::default(),
            next: Cell::new(0),
            changed: Notify::new(),
            rng: Rng::new(seed, "agenda"),
        }))
    }

    /// Virtual time since the world began.
    pub(crate) fn now(&self) -> Duration {
        self.0.start.elapsed()
    }

    /// Schedules `what` in `delay`.
    pub(crate) fn schedule(&self, delay: Duration, what: impl FnOnce() + 'static) {
        let at = Instant::now() + delay;
        let order = (self.0.rng.u64(), self.0.next.replace(self.0.next.get() + 1));
        let mut entries = self.0.events.borrow_mut();
        let first = entries.peek().is_none_or(|Reverse(e)| at < e.due);
        entries.push(Reverse(ScheduledEvent { due: at, order, action: Box::new(what) }));
        if first {
            self.0.changed.notify_one();
        }
    }

    /// Advances time until `over`. Between two events every task that the first one woke runs.
    pub(crate) async fn run_until(&self, over: impl Fn() -> bool) {
        while !over() {
            let next = self.0.events.borrow().peek().map(|Reverse(e)| e.due);
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
            let due = self.0.events.borrow_mut().pop();
            if let Some(Reverse(entry)) = due {
                (entry.action)();
                tokio::task::yield_now().await;
            }
        }
    }

    /// Removes all events.
    pub(crate) fn clear(&self) {
        // Dropping an event may access the queue.
        let entries = std::mem::take(&mut *self.0.events.borrow_mut());
        drop(entries);
    }
}
