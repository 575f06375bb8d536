//! What everything in a world shares: its seed, its time, its trace, its network, and why it
//! failed.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

use tokio::sync::Notify;

use super::event_queue::EventQueue;
use super::net::Network;
use super::rng::Rng;
use super::trace::Trace;

/// State shared by everything in a world.
pub(crate) struct WorldInner {
    pub(crate) seed: u64,
    pub(crate) agenda: EventQueue,
    pub(crate) trace: Rc<Trace>,
    pub(crate) net: Network,
    pub(super) rng: Rng,
    crash_guard: fn() -> Box<dyn Any>,
    pub(super) failure_message: RefCell<Option<String>>,
    pub(super) failure_signal: Notify,
}

impl WorldInner {
    /// A new world; `crash_guard` is called when a host crashes.
    pub(crate) fn new(seed: u64, verbose: bool, crash_guard: fn() -> Box<dyn Any>) -> Self {
        let agenda = EventQueue::new(seed);
        let trace = Rc::new(Trace::new(verbose));
        Self {
            seed,
            net: Network::new(seed, agenda.clone(), Rc::clone(&trace)),
            agenda,
            trace,
            rng: Rng::new(seed, "scenario"),
            crash_guard,
            failure_message: RefCell::default(),
            failure_signal: Notify::new(),
        }
    }

    pub(crate) fn event(&self, what: &'static str, place: &Rc<str>, numbers: &[u64]) {
        self.trace.event(self.agenda.now(), what, place, numbers);
    }

    pub(crate) fn crash_guard(&self) -> Box<dyn Any> {
        (self.crash_guard)()
    }

    /// Ends the scenario; the first reason counts.
    pub(crate) fn fail(&self, why: String) {
        self.failure_message.borrow_mut().get_or_insert(why);
        self.failure_signal.notify_one();
    }
}
