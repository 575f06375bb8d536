//! The driver of a core: hands disk requests to the kernel, and decides whether the core sleeps.
//!
//! It is a task like any other. Whoever queues a disk request wakes it, which puts it behind the
//! tasks that are ready; when its turn comes, what all of them queued goes to the kernel in one
//! system call. Completions wake it through the ring's descriptor.
//!
//! *Adaptive polling.* Waking a sleeping core costs more than most requests. While the last
//! activity (bytes received, a disk request or a job of another core completed) is younger than
//! the poll window, the driver asks for another turn each time; the scheduler then looks at
//! sockets and timers without sleeping, and the core catches what comes within the window at
//! once. Without activity the driver waits, and the core sleeps.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;

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
    window: Duration,
    last_active: Option<Instant>,
}

/// Drives a core for as long as it lives. `window` is how long it polls after activity; 0: never.
///
/// # Errors
/// What the system reports when the ring's descriptor is to be watched.
pub(super) fn drive(
    pulse: Rc<Pulse>,
    ring: Option<Rc<Ring>>,
    window: Duration,
) -> io::Result<impl Future<Output = ()>> {
    let disks = match ring {
        None => None,
        Some(ring) => {
            let readiness = ring.watch()?;
            Some((ring, readiness))
        }
    };
    let mut driver = Driver { pulse, disks, window, last_active: None };
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
        again |= self.keeps_polling();
        self.pulse.wanted.set(!again && !self.window.is_zero());
        if again {
            // A future that has yielded once: it asks for a wake-up behind the next look at
            // sockets and timers, which does not sleep then.
            let _ = pin!(tokio::task::yield_now()).poll(cx);
        } else {
            self.watch_ring(cx);
        }
        Poll::Pending
    }

    #[expect(clippy::disallowed_methods, reason = "real cores only; not a matter of protocol time")]
    fn keeps_polling(&mut self) -> bool {
        if self.window.is_zero() {
            return false;
        }
        if self.pulse.active.take() {
            self.last_active = Some(Instant::now());
            return true;
        }
        if self.last_active.is_some_and(|at| at.elapsed() >= self.window) {
            self.last_active = None;
        }
        self.last_active.is_some()
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
