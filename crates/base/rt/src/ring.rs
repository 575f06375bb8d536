//! A core's io_uring: requests in, completions out, buffers safe in between.
//!
//! * [`Ring::run`] only queues. The core's driver ([`crate::real`]) calls [`Ring::submit_and_wake`]
//!   behind the tasks that are ready, so that their requests go to the kernel in one system call;
//!   unless each is submitted [immediately](SubmissionMode::Immediate).
//! * A request and its buffers belong to the ring until it has completed ([`request_queue`]).
//! * Files are named by descriptor, not registered: that saved nothing measurable, and the kernel
//!   releases a registered file, and so its lock, some time after it was closed.
//! * The kernel never gets more requests than its completion queue has room for; the others wait in
//!   a backlog.

mod registered_buffers;
mod request;
pub(crate) mod request_queue;
mod setup;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use io_uring::squeue;
use tokio::io::unix::AsyncFd;

use crate::buf::BufferPool;
use crate::driver_waker::DriverWaker;

use registered_buffers::RegisteredBuffers;
use request::PreparedRequest;
pub(crate) use request::{Request, RequestOp};
use request_queue::{QueueOwner, RequestFuture, RequestQueue};
pub(crate) use setup::{build, register_readiness};

/// When disk requests are submitted to the kernel, with io_uring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SubmissionMode {
    /// All requests of one scheduler turn in one system call: cheapest.
    #[default]
    Batched,
    /// Each one immediately: an idle disk starts sooner.
    Immediate,
}

/// One core's ring. Belongs to the thread that created it.
pub(crate) struct Ring {
    requests: RefCell<RequestQueue<squeue::Entry, PreparedRequest>>,
    registered_buffers: RegisteredBuffers,
    driver_waker: Rc<DriverWaker>,
    submission: SubmissionMode,
}

impl Ring {
    /// A ring on this thread, with the memory of `pools` registered as far as the system allows;
    /// `pools[own]` is this core's.
    ///
    /// # Errors
    /// Why io_uring is not available.
    pub(crate) fn new(
        pulse: Rc<DriverWaker>,
        pools: &[BufferPool],
        own: usize,
        submission: SubmissionMode,
    ) -> io::Result<Self> {
        let uring = build(&setup::DISK_OPCODES)?;
        let regions = registered_buffers::register(&uring, pools, own);
        let queue = RefCell::new(RequestQueue::new(uring));
        Ok(Self { requests: queue, registered_buffers: regions, driver_waker: pulse, submission })
    }

    /// Registers the ring with the runtime of this thread: readable when requests complete.
    pub(crate) fn register_readiness(&self) -> io::Result<AsyncFd<OwnedFd>> {
        register_readiness(self.requests.borrow().uring())
    }

    /// Queues a request.
    pub(crate) fn run(&self, request: Request) -> RequestFuture<&Self> {
        let mut queue = self.requests.borrow_mut();
        let (key, pushed) = request::enqueue(&mut queue, request, &self.registered_buffers);
        let mut due = true;
        if pushed && self.submission == SubmissionMode::Immediate {
            queue.submit();
            // With nothing to submit and no completions the driver would run for nothing.
            due = queue.must_resubmit() || queue.has_completions();
        }
        drop(queue);
        if due {
            self.driver_waker.schedule();
        }
        RequestFuture::new(self, key)
    }

    /// Submits waiting requests and wakes the callers of completed ones. Returns how many
    /// completed.
    pub(crate) fn submit_and_wake(&self) -> usize {
        request_queue::submit_and_wake(&self.requests)
    }

    /// Runs in the driver's place if requests have completed.
    pub(crate) fn process_completions(&self) {
        if !self.requests.borrow_mut().has_completions() {
            return;
        }
        self.submit_and_wake();
        self.driver_waker.note_activity();
        if self.must_resubmit() {
            self.driver_waker.schedule();
        }
    }

    /// Whether the driver must run again unprompted: the kernel was short of resources.
    pub(crate) fn must_resubmit(&self) -> bool {
        self.requests.borrow().must_resubmit()
    }

    /// Waits until the kernel has completed every request, at most for `limit`; returns whether it
    /// has. For the end of a core: completions are reported to no one.
    pub(crate) fn drain(&self, limit: Duration) -> bool {
        setup::drain(&mut self.requests.borrow_mut(), limit)
    }
}

impl QueueOwner for Ring {
    type Entry = squeue::Entry;
    type Op = PreparedRequest;

    fn request_queue(&self) -> &RefCell<RequestQueue<squeue::Entry, PreparedRequest>> {
        &self.requests
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ring")
    }
}
