//! The driver of a core: submits disk requests to the kernel, and decides whether the core sleeps.
//!
//! It is a task like any other. Queueing a disk request wakes it, which puts it behind the tasks
//! that are ready; when it runs, the requests of all of them go to the kernel in one system call.
//! Completions wake it through the ring's descriptor, unless they have woken the core itself
//! ([`on_thread_unpark`]).
//!
//! *Adaptive polling.* Waking a sleeping core costs more than most requests. After activity (bytes
//! received, a disk request or a job of another core completed) the driver yields and runs again,
//! for as long as [`AdaptivePolling`] says; the scheduler then polls sockets and timers without
//! sleeping, and the core finds new work immediately. Without activity the driver waits, and the
//! core sleeps.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;

use super::adaptive_polling::AdaptivePolling;
use crate::driver_waker::DriverWaker;
use crate::ring::Ring;

struct Driver {
    driver_waker: Rc<DriverWaker>,
    ring: Option<(Rc<Ring>, AsyncFd<OwnedFd>)>,
    polling: AdaptivePolling,
    /// The origin of its clock.
    started_at: Instant,
}

thread_local! {
    /// The ring of this thread's core.
    static RING: RefCell<Weak<Ring>> = const { RefCell::new(Weak::new()) };
}

/// Called when the core's thread has slept; runs the driver if disk requests have completed. The
/// kernel makes the thread that submitted a request complete it, and interrupts its sleep for that
/// (`EINTR`). The scheduler finds no reason for that wake-up: without this call it would sleep
/// again, only to learn that the ring is readable.
pub(super) fn on_thread_unpark() {
    RING.with_borrow(|ring| {
        if let Some(ring) = ring.upgrade() {
            ring.process_completions();
        }
    });
}

/// Drives a core for as long as it exists. `window` is the longest polling after activity; 0:
/// never.
///
/// # Errors
/// What the system reports when registering the ring's descriptor.
#[expect(clippy::disallowed_methods, reason = "real cores only; not a matter of protocol time")]
pub(super) fn create_driver(
    pulse: Rc<DriverWaker>,
    ring: Option<Rc<Ring>>,
    window: Duration,
) -> io::Result<impl Future<Output = ()>> {
    let disks = match ring {
        None => None,
        Some(ring) => {
            let readiness = ring.register_readiness()?;
            RING.set(Rc::downgrade(&ring));
            Some((ring, readiness))
        }
    };
    let mut driver = Driver {
        driver_waker: pulse,
        ring: disks,
        polling: AdaptivePolling::new(window),
        started_at: Instant::now(),
    };
    Ok(poll_fn(move |cx| driver.poll_once(cx)))
}

impl Driver {
    fn poll_once(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.driver_waker.begin_poll(cx);
        let mut again = false;
        if let Some((ring, _)) = &self.ring {
            if ring.submit_and_wake() > 0 {
                self.driver_waker.had_activity.set(true);
            }
            again = ring.must_resubmit();
        }
        again |= self
            .polling
            .should_poll(self.driver_waker.had_activity.take(), || self.started_at.elapsed());
        self.driver_waker.wakes_on_activity.set(!again && !self.polling.is_disabled());
        if again {
            // A future that has yielded once: the scheduler wakes it after polling sockets and
            // timers, and does not sleep then.
            let _ = pin!(tokio::task::yield_now()).poll(cx);
        } else {
            self.watch_ring(cx);
        }
        Poll::Pending
    }

    /// Registers for completions. Readiness recorded so far is older than this poll, which has seen
    /// all completions: the kernel announces every later one anew.
    fn watch_ring(&self, cx: &mut Context<'_>) {
        let Some((_, readiness)) = &self.ring else { return };
        while let Poll::Ready(Ok(mut guard)) = readiness.poll_read_ready(cx) {
            guard.clear_ready();
        }
    }
}
