//! A core's io_uring: requests in, completions out, buffers safe in between.
//!
//! * [`Ring::run`] only queues. The core's driver ([`crate::real`]) calls [`Ring::turn`] behind
//!   the tasks that are ready, so that whatever they asked for goes to the kernel in one system
//!   call; unless each is to go [at once](Submission::AtOnce).
//! * A request and its buffers belong to the ring until its completion has come ([`flight`]).
//! * Files are named by descriptor, not registered: that saved nothing measurable, and the kernel
//!   lets go of a registered file, and so of its lock, some time after it was closed.
//! * The kernel is never given more requests than its completion queue has room for; what is
//!   beyond that waits in a list of ours.

pub(crate) mod flight;
mod op;
mod regions;
mod setup;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use io_uring::squeue;
use tokio::io::unix::AsyncFd;

use crate::buf::Pool;
use crate::real::{Pulse, Submission};

use flight::{Carrier, Completion, Flight};
use op::Prepared;
pub(crate) use op::{Request, What};
use regions::Regions;
pub(crate) use setup::{build, watch};

/// One core's ring. Lives on the thread that made it.
pub(crate) struct Ring {
    flight: RefCell<Flight<squeue::Entry, Prepared>>,
    regions: Regions,
    pulse: Rc<Pulse>,
    submission: Submission,
}

impl Ring {
    /// A ring on this thread, with the memory of `pools` registered as far as the system allows;
    /// `pools[own]` is this core's.
    ///
    /// # Errors
    /// Why io_uring is not to be had.
    pub(crate) fn new(
        pulse: Rc<Pulse>,
        pools: &[Pool],
        own: usize,
        submission: Submission,
    ) -> io::Result<Self> {
        let uring = build(&setup::DISKS)?;
        let regions = regions::register(&uring, pools, own);
        let flight = RefCell::new(Flight::new(uring));
        Ok(Self { flight, regions, pulse, submission })
    }

    /// Registers the ring with the runtime of this thread: readable when completions come.
    pub(crate) fn watch(&self) -> io::Result<AsyncFd<OwnedFd>> {
        watch(self.flight.borrow().uring())
    }

    /// Queues a request.
    pub(crate) fn run(&self, request: Request) -> Completion<&Self> {
        let mut flight = self.flight.borrow_mut();
        let (key, pushed) = op::start(&mut flight, request, &self.regions);
        let mut due = true;
        if pushed && self.submission == Submission::AtOnce {
            flight.enter();
            // With nothing to submit and nothing to hear of, the driver would have a turn for nothing.
            due = flight.is_short() || flight.has_completions();
        }
        drop(flight);
        if due {
            self.pulse.kick();
        }
        Completion::new(self, key)
    }

    /// Submits what waits and wakes whoever's requests are through. Gives how many were.
    pub(crate) fn turn(&self) -> usize {
        flight::turn(&self.flight)
    }

    /// Does a turn in the driver's place if something has completed.
    pub(crate) fn awake(&self) {
        if !self.flight.borrow_mut().has_completions() {
            return;
        }
        self.turn();
        self.pulse.active();
        if self.wants_turn() {
            self.pulse.kick();
        }
    }

    /// Whether a turn is due although nobody will announce it: the kernel was short of something.
    pub(crate) fn wants_turn(&self) -> bool {
        self.flight.borrow().is_short()
    }

    /// Waits until the kernel is through with every request, at most for `limit`. Says whether
    /// it is. For the end of a core: what completes is not reported to anybody.
    pub(crate) fn drain(&self, limit: Duration) -> bool {
        setup::drain(&mut self.flight.borrow_mut(), limit)
    }
}

impl Carrier for Ring {
    type Entry = squeue::Entry;
    type Op = Prepared;

    fn flight(&self) -> &RefCell<Flight<squeue::Entry, Prepared>> {
        &self.flight
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ring")
    }
}
