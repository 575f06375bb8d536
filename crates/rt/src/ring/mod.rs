//! A core's io_uring: requests in, completions out, buffers safe in between.
//!
//! * [`Ring::run`] only queues. The core's driver ([`crate::real`]) calls [`Ring::turn`] behind
//!   the tasks that are ready, so that whatever they asked for goes to the kernel in one system
//!   call; unless each is to go [at once](Submission::AtOnce).
//! * A request and its buffers belong to the ring until its completion has come. A future that
//!   is dropped earlier leaves them there.
//! * Files are named by descriptor, not registered: that saved nothing measurable, and the kernel
//!   lets go of a registered file, and so of its lock, some time after it was closed.
//! * The kernel is never given more requests than its completion queue has room for; what is
//!   beyond that waits in a list of ours.

mod op;
mod regions;
mod setup;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use io_uring::{IoUring, squeue};
use slab::Slab;
use smallvec::SmallVec;
use tokio::io::unix::AsyncFd;

use crate::buf::Pool;
use crate::real::{Pulse, Submission};

use op::Prepared;
pub(crate) use op::{Request, What};
use regions::Regions;

/// Requests that can wait for one system call.
const SUBMISSIONS: u32 = 256;

/// Requests that the kernel works on at a time.
const COMPLETIONS: u32 = 4096;

/// One core's ring. Lives on the thread that made it.
pub(crate) struct Ring {
    state: RefCell<State>,
    regions: Regions,
    pulse: Rc<Pulse>,
}

struct State {
    uring: IoUring,
    ops: Slab<Op>,
    /// Requests that found no room in the submission queue.
    backlog: VecDeque<squeue::Entry>,
    /// Requests handed to the submission queue whose completions have not been seen.
    in_kernel: usize,
    /// Whether the last attempt to submit was refused.
    short: bool,
    /// Whether a refusal that does not pass was logged.
    complained: bool,
    submission: Submission,
}

/// A request that the ring owns.
struct Op {
    prepared: Prepared,
    state: OpState,
}

enum OpState {
    /// In flight; whoever waits.
    Waiting(Option<Waker>),
    /// Nobody waits any more.
    Abandoned,
    /// Completed with this result.
    Done(i32),
}

/// What one look at the completion queue found; handled when the ring is free again, because
/// wakers and buffers may lead back to it.
#[derive(Default)]
struct Reaped {
    wakers: SmallVec<[Waker; 32]>,
    abandoned: SmallVec<[Op; 4]>,
    count: usize,
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
        let uring = setup::build(SUBMISSIONS, COMPLETIONS)?;
        let regions = regions::register(&uring, pools, own);
        let state = State {
            uring,
            ops: Slab::new(),
            backlog: VecDeque::new(),
            in_kernel: 0,
            short: false,
            complained: false,
            submission,
        };
        Ok(Self { state: RefCell::new(state), regions, pulse })
    }

    /// Registers the ring with the runtime of this thread: readable when completions come.
    pub(crate) fn watch(&self) -> io::Result<AsyncFd<OwnedFd>> {
        setup::watch(&self.state.borrow().uring)
    }

    /// Queues a request. Its future gives the kernel's result (negative: an error number) and the
    /// request back.
    pub(crate) fn run(&self, request: Request) -> Completion<'_> {
        let mut state = self.state.borrow_mut();
        let slot = state.ops.vacant_entry();
        let key = slot.key();
        let (prepared, entry) = Prepared::new(request, &self.regions);
        slot.insert(Op { prepared, state: OpState::Waiting(None) });
        state.push(entry.user_data(key as u64));
        drop(state);
        self.pulse.kick();
        Completion { ring: self, key: Some(key) }
    }

    /// Submits what waits and wakes whoever's requests are through. Gives how many were.
    pub(crate) fn turn(&self) -> usize {
        let mut completed = 0;
        loop {
            let mut reaped = Reaped::default();
            let again = self.state.borrow_mut().turn(&mut reaped);
            reaped.wakers.drain(..).for_each(Waker::wake);
            completed += reaped.count;
            if !again {
                return completed;
            }
        }
    }

    /// Whether a turn is due although nobody will announce it: the kernel was short of something.
    pub(crate) fn wants_turn(&self) -> bool {
        self.state.borrow().short
    }

    /// Waits until the kernel is through with every request, at most for `limit`. Says whether
    /// it is. For the end of a core: what completes is not reported to anybody.
    pub(crate) fn drain(&self, limit: Duration) -> bool {
        setup::drain(&mut self.state.borrow_mut(), limit)
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ring")
    }
}

impl State {
    fn push(&mut self, entry: squeue::Entry) {
        if !self.backlog.is_empty() || !self.try_push(&entry) {
            self.backlog.push_back(entry);
        } else if self.submission == Submission::AtOnce {
            self.enter();
        }
    }

    fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        if self.in_kernel >= COMPLETIONS as usize {
            return false;
        }
        let pushed = op::push(&mut self.uring, entry);
        self.in_kernel += usize::from(pushed);
        pushed
    }

    /// One round of submitting and reaping; says whether another would find work.
    fn turn(&mut self, reaped: &mut Reaped) -> bool {
        self.refill();
        self.enter();
        self.reap(reaped);
        !self.short && !self.backlog.is_empty() && self.in_kernel < COMPLETIONS as usize
    }

    fn refill(&mut self) {
        while let Some(entry) = self.backlog.pop_front() {
            if !self.try_push(&entry) {
                self.backlog.push_front(entry);
                return;
            }
        }
    }

    /// Tells the kernel what is new and lets it finish what it has deferred; no system call when
    /// there is neither.
    fn enter(&mut self) {
        self.short = false;
        let queue = self.uring.submission();
        let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
        drop(queue);
        if idle {
            return;
        }
        if let Err(e) = self.uring.submit() {
            // Interrupted, or out of memory for a moment: what was not taken stays queued.
            self.short = true;
            let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::ENOMEM];
            let passes = e.raw_os_error().is_some_and(|errno| passing.contains(&errno));
            if !passes && !std::mem::replace(&mut self.complained, true) {
                tracing::error!(error = %e, "io_uring takes no requests");
            }
        }
    }

    fn reap(&mut self, reaped: &mut Reaped) {
        for entry in self.uring.completion() {
            self.in_kernel -= 1;
            reaped.count += 1;
            let key = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let op = self.ops.get_mut(key).expect("a completion names a request in flight");
            match std::mem::replace(&mut op.state, OpState::Done(entry.result())) {
                OpState::Waiting(waker) => reaped.wakers.extend(waker),
                OpState::Abandoned => reaped.abandoned.push(self.ops.remove(key)),
                OpState::Done(_) => unreachable!("a request completes once"),
            }
        }
    }
}

/// A request in flight.
#[must_use]
pub(crate) struct Completion<'a> {
    ring: &'a Ring,
    /// `None` when the result has been given out.
    key: Option<usize>,
}

impl Future for Completion<'_> {
    type Output = (i32, Request);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let key = self.key.expect("polled after the end");
        let mut state = self.ring.state.borrow_mut();
        let op = &mut state.ops[key];
        if let OpState::Waiting(waker) = &mut op.state {
            match waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => *waker = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        let op = state.ops.remove(key);
        drop(state);
        self.key = None;
        let OpState::Done(result) = op.state else { unreachable!("looked at above") };
        Poll::Ready((result, op.prepared.into_request()))
    }
}

impl Drop for Completion<'_> {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut state = self.ring.state.borrow_mut();
        let op = &mut state.ops[key];
        if matches!(op.state, OpState::Done(_)) {
            let op = state.ops.remove(key);
            drop(state);
            drop(op);
        } else {
            op.state = OpState::Abandoned;
        }
    }
}
