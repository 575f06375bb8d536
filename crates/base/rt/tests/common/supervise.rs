//! System calls of a thread, and of those it starts, judged one by one by the test: let through,
//! counted, refused, or done in its own way.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;

/// Requests to the listener of a filter (`linux/seccomp.h`).
const NOTIF_RECV: libc::Ioctl = 0xc050_2100;
const NOTIF_SEND: libc::Ioctl = 0xc018_2101;

/// How long the supervisor waits for a call before it looks whether the test has ended.
const LOOK_MS: libc::c_int = 20;

/// A system call that waits for its verdict.
pub struct Call {
    pub number: libc::c_long,
    pub args: [u64; 6],
}

/// The decision about a system call.
#[derive(Clone, Copy)]
pub enum Verdict {
    /// It happens.
    Proceed,
    /// It fails with this error number and does nothing.
    Fail(i32),
    /// It returns this; whatever it should have done, the test has.
    Return(i64),
}

/// Runs `f` on a thread of its own whose calls of these numbers `judge` decides on.
pub fn supervised(
    calls: &[libc::c_long],
    mut judge: impl FnMut(&Call) -> Verdict,
    f: impl FnOnce() + Send,
) {
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, move || {
            send.send(listener(calls)).unwrap();
            f();
        });
        let thread = thread.unwrap();
        let listener = receive.recv().unwrap();
        while !thread.is_finished() {
            if let Some(call) = next(&listener) {
                answer(&listener, call.id, judge(&of(&call)));
            }
        }
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Installs the filter on this thread.
fn listener(calls: &[libc::c_long]) -> OwnedFd {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    // The number of the system call is the first word the filter is given.
    let mut program = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for &number in calls {
        program.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number as u32));
        program.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_USER_NOTIF));
    }
    program.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
    let len = program.len() as u16;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    // SAFETY: the program lives through the calls, which touch this thread only; what the second
    // returns is a descriptor of ours.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        let fd = libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd as i32)
    }
}

/// The next call, if one comes soon.
fn next(listener: &OwnedFd) -> Option<libc::seccomp_notif> {
    let fd = listener.as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the structures are ours and live through the calls; an all-zero notification is
    // what the kernel asks for.
    unsafe {
        if libc::poll(&raw mut poll, 1, LOOK_MS) != 1 || poll.revents & libc::POLLIN == 0 {
            return None;
        }
        let mut call: libc::seccomp_notif = std::mem::zeroed();
        // The calling thread may be gone by now.
        (libc::ioctl(fd, NOTIF_RECV, &raw mut call) == 0).then_some(call)
    }
}

fn of(call: &libc::seccomp_notif) -> Call {
    Call { number: call.data.nr.into(), args: call.data.args }
}

fn answer(listener: &OwnedFd, id: u64, verdict: Verdict) {
    let (val, error, flags) = match verdict {
        Verdict::Proceed => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        Verdict::Fail(errno) => (0, -errno, 0),
        Verdict::Return(value) => (value, 0, 0),
    };
    let answer = libc::seccomp_notif_resp { id, val, error, flags };
    // SAFETY: the structure is ours and lives through the call. The caller may be gone.
    unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_SEND, &raw const answer) };
}
