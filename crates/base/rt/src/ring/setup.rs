//! The beginning and the end of a ring.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use io_uring::squeue::{self, EntryMarker};
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::flight::{COMPLETIONS, Entry, Flight, SUBMISSIONS};

/// What a disk asks of the kernel (all there since Linux 5.6).
pub(super) const DISKS: [u8; 8] = [
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
///
/// # Errors
/// Why io_uring is not to be had, or `EOPNOTSUPP` where it lacks one of `needed`: some sandboxes offer such.
pub(crate) fn build<E: Entry + From<squeue::Entry>>(
    needed: &[u8],
) -> io::Result<IoUring<E, cqueue::Entry>> {
    let mut builder = IoUring::<E, cqueue::Entry>::builder();
    builder.dontfork().setup_cqsize(COMPLETIONS);
    let plain = builder.clone();
    builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    let cooperative = builder.clone();
    let mut built = builder.setup_single_issuer().build(SUBMISSIONS);
    for older in [cooperative, plain] {
        if built.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
            built = older.build(SUBMISSIONS);
        }
    }
    let mut uring = built?;
    complete(&uring, needed)?;
    try_out(&mut uring)?;
    Ok(uring)
}

/// Has the ring do nothing once: a sandbox may allow making rings and forbid using them, and
/// requests would then wait for ever.
fn try_out<E: Entry + From<squeue::Entry>>(
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

fn complete<E: EntryMarker>(uring: &IoUring<E, cqueue::Entry>, needed: &[u8]) -> io::Result<()> {
    let mut probe = Probe::new();
    uring.submitter().register_probe(&mut probe)?;
    match needed.iter().all(|code| probe.is_supported(*code)) {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    }
}

/// Registers the ring's descriptor with the runtime of this thread.
pub(crate) fn watch<E: EntryMarker>(
    uring: &IoUring<E, cqueue::Entry>,
) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is the ring's and open for as long as `uring` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) }.try_clone_to_owned()?;
    // SAFETY: an `OwnedFd` stays open and the same until it is dropped.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// Waits until no request is left, at most for `limit`; says whether none is.
#[expect(clippy::disallowed_methods, reason = "the end of a real core, after its runtime's")]
pub(super) fn drain<E: Entry, O>(flight: &mut Flight<E, O>, limit: Duration) -> bool {
    let begun = Instant::now();
    loop {
        flight.turn_unheard();
        if flight.is_empty() {
            return true;
        }
        let Some(left) = limit.checked_sub(begun.elapsed()) else { return false };
        let left = Timespec::from(left.min(Duration::from_millis(100)));
        // Whatever ends the wait, the next round looks.
        let _ = flight.uring().submitter().submit_with_args(1, &SubmitArgs::new().timespec(&left));
    }
}
