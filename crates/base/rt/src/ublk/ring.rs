//! An io_uring for commands to a driver (`IORING_OP_URING_CMD`).
//!
//! Commands are only queued; whoever drives the ring hands them to the kernel behind the tasks that are ready, in one
//! system call. Its entries are twice as long as those of the core's disks' ring, which a ring has for all of its life, and
//! cores that serve no such device pay nothing for it.

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
use crate::ring::flight::{self, Carrier, Completion, Flight};
use crate::ring::{build, watch};

/// Length of a command in its entry.
pub(super) const COMMAND_BYTES: usize = 80;

pub(super) struct Ring {
    core: Core,
    flight: RefCell<Flight<Entry128, Command>>,
    readiness: AsyncFd<OwnedFd>,
    driver: RefCell<Option<Waker>>,
    /// Whether it will be driven before the core can sleep.
    due: Cell<bool>,
}

/// A command, with all that its entry names.
pub(super) struct Command {
    pub(super) memory: Box<[u8]>,
    _file: Rc<File>,
}

impl Ring {
    pub(super) fn new(core: Core) -> io::Result<Self> {
        let uring = build(&[opcode::UringCmd80::CODE])?;
        Ok(Self {
            core,
            readiness: watch(&uring)?,
            flight: RefCell::new(Flight::new(uring)),
            driver: RefCell::default(),
            due: Cell::new(false),
        })
    }

    /// Queues a command, whose 80 bytes `header` makes of the address of `memory`.
    pub(super) fn send(
        self: &Rc<Self>,
        file: &Rc<File>,
        command: u32,
        mut memory: Box<[u8]>,
        header: impl FnOnce(u64) -> [u8; COMMAND_BYTES],
    ) -> Completion<Rc<Self>> {
        let at = match memory.is_empty() {
            true => 0,
            false => memory.as_mut_ptr().expose_provenance() as u64,
        };
        let entry = opcode::UringCmd80::new(types::Fd(file.as_raw_fd()), command).cmd(header(at));
        let command = Command { memory, _file: Rc::clone(file) };
        // SAFETY: the entry names the file and, on the heap, the memory; both are the command's alone.
        let (key, _) = unsafe { self.flight.borrow_mut().start(command, entry.build()) };
        if !self.due.replace(true)
            && let Some(driver) = &*self.driver.borrow()
        {
            driver.wake_by_ref();
        }
        Completion::new(Rc::clone(self), key)
    }

    /// One turn; the task is woken for the next.
    pub(super) fn drive(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.due.set(false);
        *self.driver.borrow_mut() = Some(cx.waker().clone());
        self.turn();
        if self.flight.borrow().is_short() {
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
        if flight::turn(&self.flight) > 0 {
            self.core.note_activity();
        }
    }
}

impl Carrier for Ring {
    type Entry = Entry128;
    type Op = Command;

    fn flight(&self) -> &RefCell<Flight<Entry128, Command>> {
        &self.flight
    }
}

impl Drop for Ring {
    /// The kernel ends what is left some time after the ring has been closed: until then memory may be written to.
    fn drop(&mut self) {
        for command in self.flight.get_mut().take_unfinished() {
            Box::leak(command.memory);
        }
    }
}
