//! An io_uring for commands to a driver (`IORING_OP_URING_CMD`).
//!
//! Commands are only queued; the driver task submits them to the kernel behind the tasks that are
//! ready, in one system call. Its entries are twice as long as those of the core's ring for disks,
//! and the size is fixed per ring, so cores without such devices do not pay for it.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use io_uring::squeue::Entry128;
use io_uring::{opcode, types};
use tokio::io::unix::AsyncFd;

use crate::Core;
use crate::ring::request_queue::{self, QueueOwner, RequestFuture, RequestQueue};
use crate::ring::{build, register_readiness};

/// Length of a command in its entry.
pub(super) const COMMAND_BYTES: usize = 80;

pub(super) struct CommandRing {
    core: Core,
    requests: RefCell<RequestQueue<Entry128, Command>>,
    readiness: AsyncFd<OwnedFd>,
    driver_waker: RefCell<Option<Waker>>,
    /// Whether it will be driven before the core can sleep.
    is_scheduled: Cell<bool>,
}

/// A command, with everything that its entry names.
pub(super) struct Command {
    pub(super) memory: Box<[u8]>,
    _file: Rc<File>,
}

impl CommandRing {
    pub(super) fn new(core: Core) -> io::Result<Self> {
        let uring = build(&[opcode::UringCmd80::CODE])?;
        Ok(Self {
            core,
            readiness: register_readiness(&uring)?,
            requests: RefCell::new(RequestQueue::new(uring)),
            driver_waker: RefCell::default(),
            is_scheduled: Cell::new(false),
        })
    }

    /// Queues a command; `header` makes its 80 bytes from the address of `memory`.
    pub(super) fn send(
        self: &Rc<Self>,
        file: &Rc<File>,
        command: u32,
        mut memory: Box<[u8]>,
        header: impl FnOnce(u64) -> [u8; COMMAND_BYTES],
    ) -> RequestFuture<Rc<Self>> {
        let at = match memory.is_empty() {
            true => 0,
            false => memory.as_mut_ptr().expose_provenance() as u64,
        };
        let entry = opcode::UringCmd80::new(types::Fd(file.as_raw_fd()), command).cmd(header(at));
        let command = Command { memory, _file: Rc::clone(file) };
        // SAFETY: the entry names the file and, on the heap, the memory; both belong to the command
        // only.
        let (key, _) = unsafe { self.requests.borrow_mut().enqueue(command, entry.build()) };
        if !self.is_scheduled.replace(true)
            && let Some(driver) = &*self.driver_waker.borrow()
        {
            driver.wake_by_ref();
        }
        RequestFuture::new(Rc::clone(self), key)
    }

    /// One round; the task is woken for the next.
    pub(super) fn poll_drive(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.is_scheduled.set(false);
        *self.driver_waker.borrow_mut() = Some(cx.waker().clone());
        self.submit_and_wake();
        if self.requests.borrow().must_resubmit() {
            let _ = pin!(tokio::task::yield_now()).poll(cx);
            return Poll::Pending;
        }
        // Readiness recorded so far is older than this round, which has seen all completions.
        while let Poll::Ready(Ok(mut guard)) = self.readiness.poll_read_ready(cx) {
            guard.clear_ready();
        }
        Poll::Pending
    }

    /// Submits queued commands, and wakes the callers of completed ones.
    pub(super) fn submit_and_wake(&self) {
        if request_queue::submit_and_wake(&self.requests) > 0 {
            self.core.note_activity();
        }
    }
}

impl QueueOwner for CommandRing {
    type Entry = Entry128;
    type Op = Command;

    fn request_queue(&self) -> &RefCell<RequestQueue<Entry128, Command>> {
        &self.requests
    }
}

impl Drop for CommandRing {
    /// The kernel ends the remaining commands some time after the ring was closed: until then it
    /// may write to their memory.
    fn drop(&mut self) {
        for command in self.requests.get_mut().take_unfinished() {
            Box::leak(command.memory);
        }
    }
}
