//! An io_uring for commands to a driver (`IORING_OP_URING_CMD`).
//!
//! It is the core's disks' ring ([`crate::ring`]) in little: commands are only queued; whoever drives the ring hands them to
//! the kernel behind the tasks that are ready, in one system call. Its entries are twice as long, which a ring has for all
//! of its life, and cores that serve no such device pay nothing for it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use io_uring::squeue::Entry128;
use io_uring::{IoUring, Probe, cqueue, opcode, types};
use slab::Slab;
use smallvec::SmallVec;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::Core;

/// Length of a command in its entry.
pub(super) const COMMAND_BYTES: usize = 80;

/// Commands that can wait for one system call.
const SUBMISSIONS: u32 = 256;

/// Commands that the kernel has at a time: all places of a device, and some more.
const COMPLETIONS: u32 = 4096;

pub(super) struct Ring {
    core: Core,
    state: RefCell<State>,
    readiness: AsyncFd<OwnedFd>,
    driver: RefCell<Option<Waker>>,
    /// Whether it will be driven before the core can sleep.
    due: Cell<bool>,
}

struct State {
    uring: IoUring<Entry128, cqueue::Entry>,
    ops: Slab<Op>,
    /// Commands that found no room.
    backlog: VecDeque<Entry128>,
    /// Whether the last attempt to submit was refused.
    short: bool,
}

/// A command that the ring owns, with all that its entry names.
struct Op {
    progress: Progress,
    memory: Box<[u8]>,
    _file: Rc<File>,
}

enum Progress {
    /// With the kernel; whoever waits.
    Waiting(Option<Waker>),
    /// Nobody waits any more.
    Abandoned,
    Done(i32),
}

impl Ring {
    pub(super) fn new(core: Core) -> io::Result<Self> {
        let mut builder = IoUring::<Entry128, cqueue::Entry>::builder();
        builder.dontfork().setup_cqsize(COMPLETIONS).setup_coop_taskrun().setup_taskrun_flag();
        let uring = builder.setup_submit_all().setup_single_issuer().build(SUBMISSIONS)?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::UringCmd80::CODE) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        // SAFETY: the descriptor is the ring's and open for as long as `uring` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) }.try_clone_to_owned()?;
        // SAFETY: an `OwnedFd` stays open and the same until it is dropped.
        let readiness = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        let state = State { uring, ops: Slab::new(), backlog: VecDeque::new(), short: false };
        Ok(Self {
            core,
            state: RefCell::new(state),
            readiness: readiness.map_err(io::Error::from)?,
            driver: RefCell::default(),
            due: Cell::new(false),
        })
    }

    /// Queues a command, whose 80 bytes `header` makes of the address of `memory`. Its future gives the result and the
    /// memory.
    pub(super) fn send(
        self: &Rc<Self>,
        file: &Rc<File>,
        command: u32,
        mut memory: Box<[u8]>,
        header: impl FnOnce(u64) -> [u8; COMMAND_BYTES],
    ) -> Completion {
        let at = match memory.is_empty() {
            true => 0,
            false => memory.as_mut_ptr().expose_provenance() as u64,
        };
        let entry = opcode::UringCmd80::new(types::Fd(file.as_raw_fd()), command).cmd(header(at));
        let mut state = self.state.borrow_mut();
        let op = Op { progress: Progress::Waiting(None), memory, _file: Rc::clone(file) };
        let key = state.ops.insert(op);
        state.backlog.push_back(entry.build().user_data(key as u64));
        drop(state);
        if !self.due.replace(true)
            && let Some(driver) = &*self.driver.borrow()
        {
            driver.wake_by_ref();
        }
        Completion { ring: Rc::clone(self), key: Some(key) }
    }

    /// One turn; the task is woken for the next.
    pub(super) fn drive(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.due.set(false);
        *self.driver.borrow_mut() = Some(cx.waker().clone());
        self.turn();
        if self.state.borrow().short {
            let _ = pin!(tokio::task::yield_now()).poll(cx);
            return Poll::Pending;
        }
        // Readiness noted so far is older than this turn, which has seen all there was.
        while let Poll::Ready(Ok(mut guard)) = self.readiness.poll_read_ready(cx) {
            guard.clear_ready();
        }
        Poll::Pending
    }

    /// Submits what waits, and wakes those whose commands are through.
    pub(super) fn turn(&self) {
        loop {
            let (mut wakers, mut abandoned) = (SmallVec::new(), SmallVec::new());
            let mut state = self.state.borrow_mut();
            let more = state.turn(&mut wakers, &mut abandoned);
            drop(state);
            if !wakers.is_empty() {
                self.core.note_activity();
            }
            wakers.into_iter().for_each(Waker::wake);
            // With these goes what they named; that may lead back here.
            drop(abandoned);
            if !more {
                return;
            }
        }
    }
}

impl State {
    /// One round; whether another would find work.
    fn turn(
        &mut self,
        wakers: &mut SmallVec<[Waker; 32]>,
        abandoned: &mut SmallVec<[Op; 4]>,
    ) -> bool {
        while let Some(entry) = self.backlog.pop_front() {
            // SAFETY: what the entry names, file and memory, stands in `ops` until its completion has been seen; nobody
            // touches the memory meanwhile.
            if unsafe { self.uring.submission().push(&entry) }.is_err() {
                self.backlog.push_front(entry);
                break;
            }
        }
        self.short = false;
        let queue = self.uring.submission();
        let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
        drop(queue);
        if !idle && let Err(error) = self.uring.submit() {
            // Interrupted, or out of memory for a moment: what was not taken stays queued.
            self.short = true;
            tracing::debug!(%error, "the kernel takes no commands just now");
        }
        for entry in self.uring.completion() {
            let key = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let Some(op) = self.ops.get_mut(key) else { continue };
            match std::mem::replace(&mut op.progress, Progress::Done(entry.result())) {
                Progress::Waiting(waker) => wakers.extend(waker),
                Progress::Abandoned => abandoned.push(self.ops.remove(key)),
                Progress::Done(_) => {}
            }
        }
        !self.short && !self.backlog.is_empty()
    }
}

impl Drop for State {
    /// The kernel ends what is left some time after the ring has been closed: until then memory may be written to.
    fn drop(&mut self) {
        for op in self.ops.drain().filter(|op| !matches!(op.progress, Progress::Done(_))) {
            Box::leak(op.memory);
        }
    }
}

/// A command under way.
#[must_use]
pub(super) struct Completion {
    ring: Rc<Ring>,
    /// `None` when the result has been given out.
    key: Option<usize>,
}

impl Future for Completion {
    type Output = (i32, Box<[u8]>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let key = self.key.expect("polled after the end");
        let mut state = self.ring.state.borrow_mut();
        let op = &mut state.ops[key];
        if let Progress::Waiting(waker) = &mut op.progress {
            *waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let op = state.ops.remove(key);
        drop(state);
        self.key = None;
        let Progress::Done(result) = op.progress else { unreachable!("looked at above") };
        Poll::Ready((result, op.memory))
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut state = self.ring.state.borrow_mut();
        let op = &mut state.ops[key];
        if matches!(op.progress, Progress::Done(_)) {
            let op = state.ops.remove(key);
            drop(state);
            drop(op);
        } else {
            op.progress = Progress::Abandoned;
        }
    }
}
