//! Requests between a thread and an io_uring of its own: queued, with the kernel, through.
//!
//! A request, and all that its entry names, belongs to the flight until its completion has come. A future that is dropped
//! earlier leaves it there.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use io_uring::squeue::{self, Entry128, EntryMarker};
use io_uring::{IoUring, cqueue};
use slab::Slab;
use smallvec::SmallVec;

/// Requests that can wait for one system call.
pub(super) const SUBMISSIONS: u32 = 256;

/// Requests that the kernel works on at a time.
pub(super) const COMPLETIONS: u32 = 4096;

/// An entry of a submission queue.
pub(crate) trait Entry: EntryMarker {
    /// The entry, with what its completion will bear.
    fn numbered(self, number: u64) -> Self;
}

impl Entry for squeue::Entry {
    fn numbered(self, number: u64) -> Self {
        self.user_data(number)
    }
}

impl Entry for Entry128 {
    fn numbered(self, number: u64) -> Self {
        self.user_data(number)
    }
}

/// What owns a flight.
pub(crate) trait Carrier {
    type Entry: Entry;
    /// A request, with all that its entry names.
    type Op: Unpin;

    fn flight(&self) -> &RefCell<Flight<Self::Entry, Self::Op>>;
}

pub(crate) struct Flight<E: Entry, O> {
    uring: IoUring<E, cqueue::Entry>,
    ops: Slab<Op<O>>,
    /// Requests that found no room in the submission queue.
    backlog: VecDeque<E>,
    /// Requests handed to the submission queue whose completions have not been seen.
    in_kernel: usize,
    /// Whether the last attempt to submit was refused.
    short: bool,
    /// Whether a refusal that does not pass was logged.
    complained: bool,
}

struct Op<O> {
    op: O,
    state: State,
}

enum State {
    /// In flight; whoever waits.
    Waiting(Option<Waker>),
    /// Nobody waits any more.
    Abandoned,
    /// Completed with this result.
    Done(i32),
}

/// What one look at the completion queue found; handled when the flight is free again, because wakers and requests may
/// lead back to it.
struct Reaped<O> {
    wakers: SmallVec<[Waker; 32]>,
    abandoned: SmallVec<[Op<O>; 4]>,
    count: usize,
}

impl<O> Reaped<O> {
    fn new() -> Self {
        Self { wakers: SmallVec::new(), abandoned: SmallVec::new(), count: 0 }
    }
}

impl<E: Entry, O> Flight<E, O> {
    pub(crate) fn new(uring: IoUring<E, cqueue::Entry>) -> Self {
        Self {
            uring,
            ops: Slab::new(),
            backlog: VecDeque::new(),
            in_kernel: 0,
            short: false,
            complained: false,
        }
    }

    pub(super) fn uring(&self) -> &IoUring<E, cqueue::Entry> {
        &self.uring
    }

    /// Queues a request: its number, and whether it has found room.
    ///
    /// # Safety
    /// What `entry` names belongs to `op`, stays in its place when that moves, and nobody touches it before `op` is given
    /// back or dropped.
    pub(crate) unsafe fn start(&mut self, op: O, entry: E) -> (usize, bool) {
        let key = self.ops.insert(Op { op, state: State::Waiting(None) });
        let entry = entry.numbered(key as u64);
        let pushed = self.backlog.is_empty() && self.push(&entry);
        if !pushed {
            self.backlog.push_back(entry);
        }
        (key, pushed)
    }

    fn push(&mut self, entry: &E) -> bool {
        if self.in_kernel >= COMPLETIONS as usize {
            return false;
        }
        // SAFETY: the request stands in `ops` until its completion has been seen, and with it, by the contract of
        // `start`, all that the entry names.
        let pushed = unsafe { self.uring.submission().push(entry) }.is_ok();
        self.in_kernel += usize::from(pushed);
        pushed
    }

    /// Whether a turn is due although nobody will announce it: the kernel was short of something.
    pub(crate) fn is_short(&self) -> bool {
        self.short
    }

    /// Whether the kernel has said something that was not heard yet. No system call.
    pub(super) fn has_completions(&mut self) -> bool {
        self.in_kernel > 0 && !self.uring.completion().is_empty()
    }

    /// Whether nothing is queued, and nothing with the kernel.
    pub(super) fn is_empty(&self) -> bool {
        self.in_kernel == 0 && self.backlog.is_empty()
    }

    /// One round of submitting and reaping; says whether another would find work.
    fn turn(&mut self, reaped: &mut Reaped<O>) -> bool {
        self.refill();
        self.enter();
        self.reap(reaped);
        !self.short && !self.backlog.is_empty() && self.in_kernel < COMPLETIONS as usize
    }

    /// One round, of which nobody hears.
    pub(super) fn turn_unheard(&mut self) {
        self.turn(&mut Reaped::new());
    }

    fn refill(&mut self) {
        while let Some(entry) = self.backlog.pop_front() {
            if !self.push(&entry) {
                self.backlog.push_front(entry);
                return;
            }
        }
    }

    /// Tells the kernel what is new and lets it finish what it has deferred; no system call when there is neither.
    pub(super) fn enter(&mut self) {
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

    fn reap(&mut self, reaped: &mut Reaped<O>) {
        for entry in self.uring.completion() {
            self.in_kernel -= 1;
            reaped.count += 1;
            let key = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let op = self.ops.get_mut(key).expect("a completion names a request in flight");
            match std::mem::replace(&mut op.state, State::Done(entry.result())) {
                State::Waiting(waker) => reaped.wakers.extend(waker),
                State::Abandoned => reaped.abandoned.push(self.ops.remove(key)),
                State::Done(_) => unreachable!("a request completes once"),
            }
        }
    }

    /// The requests that are not through: the kernel may still use what they name.
    pub(crate) fn take_unfinished(&mut self) -> impl Iterator<Item = O> {
        self.ops.drain().filter(|op| !matches!(op.state, State::Done(_))).map(|op| op.op)
    }
}

/// Submits what waits and wakes whoever's requests are through. Gives how many were.
pub(crate) fn turn<E: Entry, O>(flight: &RefCell<Flight<E, O>>) -> usize {
    let mut completed = 0;
    loop {
        let mut reaped = Reaped::new();
        let again = flight.borrow_mut().turn(&mut reaped);
        reaped.wakers.drain(..).for_each(Waker::wake);
        completed += reaped.count;
        if !again {
            return completed;
        }
    }
}

/// A request in flight. Its future gives the kernel's result (negative: an error number) and the request back.
#[must_use]
pub(crate) struct Completion<C: Deref<Target: Carrier>> {
    carrier: C,
    /// `None` when the result has been given out.
    key: Option<usize>,
}

impl<C: Deref<Target: Carrier>> Completion<C> {
    /// Of the request with this number.
    pub(crate) fn new(carrier: C, key: usize) -> Self {
        Self { carrier, key: Some(key) }
    }
}

impl<C: Deref<Target: Carrier> + Unpin> Future for Completion<C> {
    type Output = (i32, <C::Target as Carrier>::Op);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let key = self.key.expect("polled after the end");
        let mut flight = self.carrier.flight().borrow_mut();
        let op = &mut flight.ops[key];
        if let State::Waiting(waker) = &mut op.state {
            match waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => *waker = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        let op = flight.ops.remove(key);
        drop(flight);
        self.key = None;
        let State::Done(result) = op.state else { unreachable!("looked at above") };
        Poll::Ready((result, op.op))
    }
}

impl<C: Deref<Target: Carrier>> Drop for Completion<C> {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut flight = self.carrier.flight().borrow_mut();
        let op = &mut flight.ops[key];
        if matches!(op.state, State::Done(_)) {
            let op = flight.ops.remove(key);
            drop(flight);
            drop(op);
        } else {
            op.state = State::Abandoned;
        }
    }
}
