//! The driver of a core: hands disk requests to the kernel, and decides whether the core sleeps.
//!
//! It is a task like any other. Whoever queues a disk request wakes it, which puts it behind the
//! tasks that are ready; when its turn comes, what all of them queued goes to the kernel in one
//! system call. Completions wake it through the ring's descriptor, unless they have woken the core itself ([`awake`]).
//!
//! *Adaptive polling.* Waking a sleeping core costs more than most requests. After activity (bytes
//! received, a disk request or a job of another core completed) the driver asks for another turn
//! each time, for as long as [`Polling`] says; the scheduler then looks at sockets and timers without
//! sleeping, and the core catches what comes at once. Without activity the driver waits, and the
//! core sleeps.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;

use super::polling::Polling;
use crate::ring::Ring;

/// What the rest of a core tells its driver.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    driver: RefCell<Option<Waker>>,
    /// Whether the driver will get a turn before the core can sleep.
    due: Cell<bool>,
    active: Cell<bool>,
    /// Whether activity is to wake the driver.
    wanted: Cell<bool>,
}

impl Pulse {
    /// Gives the driver a turn behind the tasks that are ready.
    pub(crate) fn kick(&self) {
        if !self.due.replace(true)
            && let Some(driver) = &*self.driver.borrow()
        {
            driver.wake_by_ref();
        }
    }

    /// Notes activity: the core is to stay awake a little longer.
    pub(crate) fn active(&self) {
        self.active.set(true);
        if self.wanted.get() {
            self.kick();
        }
    }

    /// Begins a turn of the driver.
    fn begin(&self, cx: &Context<'_>) {
        self.due.set(false);
        let mut driver = self.driver.borrow_mut();
        match &mut *driver {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *driver = Some(cx.waker().clone()),
        }
    }
}

struct Driver {
    pulse: Rc<Pulse>,
    disks: Option<(Rc<Ring>, AsyncFd<OwnedFd>)>,
    polling: Polling,
    /// Where its clock begins.
    began: Instant,
}

thread_local! {
    /// The ring of this thread's core.
    static RING: RefCell<Weak<Ring>> = const { RefCell::new(Weak::new()) };
}

/// Called when the core of this thread has slept; does the driver's turn if disk requests are through. The kernel has the thread
/// that made a request do what is left of it, and ends the thread's sleep for that (`EINTR`). The scheduler finds nothing that
/// could have woken it: without this it would sleep again, only to be told that the ring is readable.
pub(super) fn awake() {
    RING.with_borrow(|ring| {
        if let Some(ring) = ring.upgrade() {
            ring.awake();
        }
    });
}

/// Drives a core for as long as it lives. `window` is how long it polls after activity at most; 0: never.
///
/// # Errors
/// What the system reports when the ring's descriptor is to be watched.
#[expect(clippy::disallowed_methods, reason = "real cores only; not a matter of protocol time")]
pub(super) fn drive(
    pulse: Rc<Pulse>,
    ring: Option<Rc<Ring>>,
    window: Duration,
) -> io::Result<impl Future<Output = ()>> {
    let disks = match ring {
        None => None,
        Some(ring) => {
            let readiness = ring.watch()?;
            RING.set(Rc::downgrade(&ring));
            Some((ring, readiness))
        }
    };
    let mut driver = Driver { pulse, disks, polling: Polling::new(window), began: Instant::now() };
    Ok(poll_fn(move |cx| driver.turn(cx)))
}

impl Driver {
    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.pulse.begin(cx);
        let mut again = false;
        if let Some((ring, _)) = &self.disks {
            if ring.turn() > 0 {
                self.pulse.active.set(true);
            }
            again = ring.wants_turn();
        }
        again |= self.polling.goes_on(self.pulse.active.take(), || self.began.elapsed());
        self.pulse.wanted.set(!again && !self.polling.is_off());
        if again {
            // A future that has yielded once: it asks for a wake-up behind the next look at
            // sockets and timers, which does not sleep then.
            let _ = pin!(tokio::task::yield_now()).poll(cx);
        } else {
            self.watch_ring(cx);
        }
        Poll::Pending
    }

    /// Asks to be woken when completions come. Readiness noted so far is older than this turn,
    /// which has seen all there was: the kernel announces every later completion anew.
    fn watch_ring(&self, cx: &mut Context<'_>) {
        let Some((_, readiness)) = &self.disks else { return };
        while let Poll::Ready(Ok(mut guard)) = readiness.poll_read_ready(cx) {
            guard.clear_ready();
        }
    }
}
