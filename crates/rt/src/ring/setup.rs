//! The beginning and the end of a ring.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Reaped, State};

/// What a disk asks of the kernel (all there since Linux 5.6).
const NEEDED: [u8; 8] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// Makes a ring with the best manners that the kernel knows.
///
/// Work that a completion leaves to be done is done at the core's next system call instead of by
/// interrupting it (`COOP_TASKRUN`, 5.19). Deferring it until the core asks (`DEFER_TASKRUN`,
/// 6.1) made no difference that could be measured and costs a system call more per wake-up: a
/// ring that defers does not tell those who poll it, and wants an eventfd beside it.
pub(super) fn build(submissions: u32, completions: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.dontfork().setup_cqsize(completions);
    let plain = builder.clone();
    builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    let cooperative = builder.clone();
    let mut built = builder.setup_single_issuer().build(submissions);
    for older in [cooperative, plain] {
        if built.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
            built = older.build(submissions);
        }
    }
    let mut uring = built?;
    complete(&uring)?;
    try_out(&mut uring)?;
    Ok(uring)
}

/// Has the ring do nothing once: a sandbox may allow making rings and forbid using them, and
/// requests would then wait for ever.
fn try_out(uring: &mut IoUring) -> io::Result<()> {
    // SAFETY: the operation names no memory.
    let pushed = unsafe { uring.submission().push(&opcode::Nop::new().build()) };
    pushed.expect("a new ring has room");
    while let Err(e) = uring.submit_and_wait(1) {
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
    uring.completion().for_each(drop);
    Ok(())
}

/// Refuses rings that lack an operation, as some sandboxes offer them.
fn complete(uring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    uring.submitter().register_probe(&mut probe)?;
    match NEEDED.iter().all(|code| probe.is_supported(*code)) {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    }
}

/// Registers the ring's descriptor with the runtime of this thread.
pub(super) fn watch(uring: &IoUring) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is the ring's and open for as long as `uring` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) }.try_clone_to_owned()?;
    // SAFETY: an `OwnedFd` stays open and the same until it is dropped.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// Waits until no request is left, at most for `limit`; says whether none is.
#[expect(clippy::disallowed_methods, reason = "the end of a real core, after its runtime's")]
pub(super) fn drain(state: &mut State, limit: Duration) -> bool {
    let begun = Instant::now();
    loop {
        let mut reaped = Reaped::default();
        state.turn(&mut reaped);
        drop(reaped);
        if state.in_kernel == 0 && state.backlog.is_empty() {
            return true;
        }
        let Some(left) = limit.checked_sub(begun.elapsed()) else { return false };
        let left = Timespec::from(left.min(Duration::from_millis(100)));
        // Whatever ends the wait, the next round looks.
        let _ = state.uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&left));
    }
}
