//! Requests to an io_uring of one thread: queued, in the kernel, completed.
//!
//! A request, and everything that its entry names, belongs to the queue until it has completed,
//! even if its future is dropped earlier.
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

/// Most requests submitted with one system call.
pub(super) const SUBMISSION_ENTRIES: u32 = 256;

/// Most requests in the kernel at a time.
pub(super) const COMPLETION_ENTRIES: u32 = 4096;

/// An entry of a submission queue.
pub(crate) trait SubmissionEntry: EntryMarker {
    /// The entry, with the number that its completion returns.
    fn with_request_number(self, number: u64) -> Self;
}

impl SubmissionEntry for squeue::Entry {
    fn with_request_number(self, number: u64) -> Self {
        self.user_data(number)
    }
}

impl SubmissionEntry for Entry128 {
    fn with_request_number(self, number: u64) -> Self {
        self.user_data(number)
    }
}

/// The owner of a request queue.
pub(crate) trait QueueOwner {
    type Entry: SubmissionEntry;
    /// A request, with everything that its entry names.
    type Op: Unpin;

    fn request_queue(&self) -> &RefCell<RequestQueue<Self::Entry, Self::Op>>;
}

pub(crate) struct RequestQueue<E: SubmissionEntry, O> {
    uring: IoUring<E, cqueue::Entry>,
    ops: Slab<QueuedRequest<O>>,
    /// Requests that found no room in the submission queue.
    backlog: VecDeque<E>,
    /// Requests handed to the submission queue whose completions have not been seen.
    in_kernel: usize,
    /// Whether the last attempt to submit was refused.
    must_resubmit: bool,
    /// Whether a persistent error was logged.
    error_logged: bool,
}

struct QueuedRequest<O> {
    op: O,
    state: RequestState,
}

enum RequestState {
    /// In flight; the waiting caller.
    Waiting(Option<Waker>),
    /// The caller is gone.
    Abandoned,
    /// Completed with this result.
    Done(i32),
}

/// The completions found; handled after the queue is no longer borrowed, because wakers and
/// requests may access it.
struct ReapedCompletions<O> {
    wakers: SmallVec<[Waker; 32]>,
    abandoned: SmallVec<[QueuedRequest<O>; 4]>,
    count: usize,
}

impl<O> ReapedCompletions<O> {
    fn new() -> Self {
        Self { wakers: SmallVec::new(), abandoned: SmallVec::new(), count: 0 }
    }
}

impl<E: SubmissionEntry, O> RequestQueue<E, O> {
    pub(crate) fn new(uring: IoUring<E, cqueue::Entry>) -> Self {
        Self {
            uring,
            ops: Slab::new(),
            backlog: VecDeque::new(),
            in_kernel: 0,
            must_resubmit: false,
            error_logged: false,
        }
    }

    pub(super) fn uring(&self) -> &IoUring<E, cqueue::Entry> {
        &self.uring
    }

    /// Queues a request: returns its number, and whether there was room.
    ///
    /// # Safety
    /// What `entry` names belongs to `op`, does not move with it, and is not accessed before `op`
    /// is returned or dropped.
    pub(crate) unsafe fn enqueue(&mut self, op: O, entry: E) -> (usize, bool) {
        let key = self.ops.insert(QueuedRequest { op, state: RequestState::Waiting(None) });
        let entry = entry.with_request_number(key as u64);
        let pushed = self.backlog.is_empty() && self.push(&entry);
        if !pushed {
            self.backlog.push_back(entry);
        }
        (key, pushed)
    }

    fn push(&mut self, entry: &E) -> bool {
        if self.in_kernel >= COMPLETION_ENTRIES as usize {
            return false;
        }
        // SAFETY: the request is in `ops` until its completion has been seen, and with it, by the
        // contract of `enqueue`, everything that the entry names.
        let pushed = unsafe { self.uring.submission().push(entry) }.is_ok();
        self.in_kernel += usize::from(pushed);
        pushed
    }

    /// Whether another round is due unprompted: the kernel was short of resources.
    pub(crate) fn must_resubmit(&self) -> bool {
        self.must_resubmit
    }

    /// Whether the kernel has completed requests that were not handled. No system call.
    pub(super) fn has_completions(&mut self) -> bool {
        self.in_kernel > 0 && !self.uring.completion().is_empty()
    }

    /// Whether nothing is queued or in the kernel.
    pub(super) fn is_empty(&self) -> bool {
        self.in_kernel == 0 && self.backlog.is_empty()
    }

    /// One round of submitting and reaping; returns whether another would find work.
    fn submit_and_reap(&mut self, reaped: &mut ReapedCompletions<O>) -> bool {
        self.refill_from_backlog();
        self.submit();
        self.reap(reaped);
        !self.must_resubmit
            && !self.backlog.is_empty()
            && self.in_kernel < COMPLETION_ENTRIES as usize
    }

    /// One round whose completions are discarded.
    pub(super) fn submit_and_discard(&mut self) {
        self.submit_and_reap(&mut ReapedCompletions::new());
    }

    fn refill_from_backlog(&mut self) {
        while let Some(entry) = self.backlog.pop_front() {
            if !self.push(&entry) {
                self.backlog.push_front(entry);
                return;
            }
        }
    }

    /// Submits new requests and lets the kernel finish deferred work; no system call if there is
    /// neither.
    pub(super) fn submit(&mut self) {
        self.must_resubmit = false;
        let queue = self.uring.submission();
        let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
        drop(queue);
        if idle {
            return;
        }
        if let Err(e) = self.uring.submit() {
            // Interrupted, or briefly out of memory: entries not taken stay queued.
            self.must_resubmit = true;
            let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::ENOMEM];
            let passes = e.raw_os_error().is_some_and(|errno| passing.contains(&errno));
            if !passes && !std::mem::replace(&mut self.error_logged, true) {
                tracing::error!(error = %e, "io_uring accepts no requests");
            }
        }
    }

    fn reap(&mut self, reaped: &mut ReapedCompletions<O>) {
        for entry in self.uring.completion() {
            self.in_kernel -= 1;
            reaped.count += 1;
            let key = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let op = self.ops.get_mut(key).expect("a completion names a request in flight");
            match std::mem::replace(&mut op.state, RequestState::Done(entry.result())) {
                RequestState::Waiting(waker) => reaped.wakers.extend(waker),
                RequestState::Abandoned => reaped.abandoned.push(self.ops.remove(key)),
                RequestState::Done(_) => unreachable!("a request completes once"),
            }
        }
    }

    /// The unfinished requests: the kernel may still use what they name.
    pub(crate) fn take_unfinished(&mut self) -> impl Iterator<Item = O> {
        self.ops.drain().filter(|op| !matches!(op.state, RequestState::Done(_))).map(|op| op.op)
    }
}

/// Submits waiting requests and wakes the callers of completed ones. Returns how many completed.
pub(crate) fn submit_and_wake<E: SubmissionEntry, O>(
    requests: &RefCell<RequestQueue<E, O>>,
) -> usize {
    let mut completed = 0;
    loop {
        let mut reaped = ReapedCompletions::new();
        let again = requests.borrow_mut().submit_and_reap(&mut reaped);
        reaped.wakers.drain(..).for_each(Waker::wake);
        completed += reaped.count;
        if !again {
            return completed;
        }
    }
}

/// A request in flight. Its future returns the kernel's result (negative: an error number) and the
/// request.
#[must_use]
pub(crate) struct RequestFuture<C: Deref<Target: QueueOwner>> {
    owner: C,
    /// `None` when the result has been returned.
    key: Option<usize>,
}

impl<C: Deref<Target: QueueOwner>> RequestFuture<C> {
    /// The future of the request with this number.
    pub(crate) fn new(carrier: C, key: usize) -> Self {
        Self { owner: carrier, key: Some(key) }
    }
}

impl<C: Deref<Target: QueueOwner> + Unpin> Future for RequestFuture<C> {
    type Output = (i32, <C::Target as QueueOwner>::Op);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let key = self.key.expect("polled after the end");
        let mut requests = self.owner.request_queue().borrow_mut();
        let op = &mut requests.ops[key];
        if let RequestState::Waiting(waker) = &mut op.state {
            match waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => *waker = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        let op = requests.ops.remove(key);
        drop(requests);
        self.key = None;
        let RequestState::Done(result) = op.state else { unreachable!("looked at above") };
        Poll::Ready((result, op.op))
    }
}

impl<C: Deref<Target: QueueOwner>> Drop for RequestFuture<C> {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut requests = self.owner.request_queue().borrow_mut();
        let op = &mut requests.ops[key];
        if matches!(op.state, RequestState::Done(_)) {
            let op = requests.ops.remove(key);
            drop(requests);
            drop(op);
        } else {
            op.state = RequestState::Abandoned;
        }
    }
}
