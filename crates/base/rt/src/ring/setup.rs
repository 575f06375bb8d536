//! Creating and draining a ring.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use io_uring::squeue::{self, EntryMarker};
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::request_queue::{COMPLETION_ENTRIES, RequestQueue, SUBMISSION_ENTRIES, SubmissionEntry};

/// Operations that disks need (all available since Linux 5.6).
pub(super) const DISK_OPCODES: [u8; 8] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// Creates a ring with the best options that the kernel supports.
///
/// Work left by a completion is done at the core's next system call instead of interrupting it
/// (`COOP_TASKRUN`, 5.19). Deferring it until the core asks (`DEFER_TASKRUN`, 6.1) made no
/// measurable difference and costs one more system call per wake-up: such a ring does not become
/// readable, and needs an eventfd.
///
/// # Errors
/// Why io_uring is not available, or `EOPNOTSUPP` if it lacks one of `needed`, as in some
/// sandboxes.
pub(crate) fn build<E: SubmissionEntry + From<squeue::Entry>>(
    needed: &[u8],
) -> io::Result<IoUring<E, cqueue::Entry>> {
    let mut builder = IoUring::<E, cqueue::Entry>::builder();
    builder.dontfork().setup_cqsize(COMPLETION_ENTRIES);
    let plain = builder.clone();
    builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    let cooperative = builder.clone();
    let mut built = builder.setup_single_issuer().build(SUBMISSION_ENTRIES);
    for older in [cooperative, plain] {
        if built.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
            built = older.build(SUBMISSION_ENTRIES);
        }
    }
    let mut uring = built?;
    check_opcodes(&uring, needed)?;
    check_usable(&mut uring)?;
    Ok(uring)
}

/// Submits a no-op: a sandbox may allow creating rings and forbid using them, and requests would
/// then wait for ever.
fn check_usable<E: SubmissionEntry + From<squeue::Entry>>(
    uring: &mut IoUring<E, cqueue::Entry>,
) -> io::Result<()> {
    // SAFETY: the operation names no memory.
    let pushed = unsafe { uring.submission().push(&opcode::Nop::new().build().into()) };
    pushed.expect("a new ring has room");
    while let Err(e) = uring.submit_and_wait(1) {
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
    uring.completion().for_each(drop);
    Ok(())
}

fn check_opcodes<E: EntryMarker>(
    uring: &IoUring<E, cqueue::Entry>,
    needed: &[u8],
) -> io::Result<()> {
    let mut probe = Probe::new();
    uring.submitter().register_probe(&mut probe)?;
    match needed.iter().all(|code| probe.is_supported(*code)) {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    }
}

/// Registers the ring's descriptor with the runtime of this thread.
pub(crate) fn register_readiness<E: EntryMarker>(
    uring: &IoUring<E, cqueue::Entry>,
) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is the ring's and open for as long as `uring` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) }.try_clone_to_owned()?;
    // SAFETY: an `OwnedFd` stays open and the same until it is dropped.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// Waits until no request is left, at most for `limit`; returns whether none is.
#[expect(clippy::disallowed_methods, reason = "the end of a real core, after its runtime's")]
pub(super) fn drain<E: SubmissionEntry, O>(
    queue: &mut RequestQueue<E, O>,
    limit: Duration,
) -> bool {
    let started = Instant::now();
    loop {
        queue.submit_and_discard();
        if queue.is_empty() {
            return true;
        }
        let Some(left) = limit.checked_sub(started.elapsed()) else { return false };
        let left = Timespec::from(left.min(Duration::from_millis(100)));
        // However the wait ended, the next round checks.
        let _ = queue.uring().submitter().submit_with_args(1, &SubmitArgs::new().timespec(&left));
    }
}
