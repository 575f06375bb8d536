//! Cores under restrictions: in a container, or as an ordinary user.
//!
//! Each test gives up rights for one thread, which the threads it starts inherit.
#![allow(clippy::unwrap_used, unsafe_code)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{MIB, buffers, config, is_root, on_core, pattern};
use rt::buf::Bufs;
use rt::disk::{Engine, OpenOptions, OpenReason};
use rt::{Core, Cores, CoresConfig, DiskEngine};
use testkit::TestDir;

/// Runs `f` on a thread of its own that first gives up what `give_up` says.
fn restricted(give_up: impl FnOnce() + Send, f: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            give_up();
            f();
        });
        thread.unwrap().join().unwrap();
    });
}

/// Makes `io_uring_setup` fail: with EPERM as the seccomp profiles of container runtimes do, with
/// ENOSYS as kernels without it.
fn forbid_io_uring(errno: i32) {
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    let refuse = libc::SECCOMP_RET_ERRNO | errno as u32;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // The number of the system call is the first word the filter is given.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, ALLOW),
    ];
    let len = program.len() as u16;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    // SAFETY: the program lives through the call; both calls touch this thread only.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
    }
}

/// Turns this thread, and not the process, into an ordinary user's.
fn become_nobody() {
    const NOBODY: libc::uid_t = 65534;
    if is_root() {
        // SAFETY: the bare system call changes this thread only.
        let r = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(r, 0);
    }
}

async fn write_and_read(core: Core, path: &Path) {
    let how = OpenOptions::new().create(8 * MIB as u64);
    let disk = core.open_disk(path, how).await.unwrap();
    assert_eq!(disk.engine(), core.disk_engine());
    let account = core.buffer_pool().account();
    for bytes in [512, 4096, MIB, 3 * MIB] {
        let data = pattern(&account, bytes as u64, bytes).await;
        disk.write(4096, data.clone()).await.unwrap();
        disk.sync().await.unwrap();
        let got: Bufs = disk.read(4096, buffers(&account, bytes).await).await.unwrap().into();
        assert_eq!(data.first_difference(&got), None);
    }
}

#[test]
fn without_io_uring_threads_serve_the_disks() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        let dir = TestDir::on_disk();
        restricted(
            || forbid_io_uring(errno),
            || {
                let path = dir.file("disk");
                on_core(DiskEngine::Auto, |core| async move {
                    assert_eq!(core.disk_engine(), Engine::Threads);
                    write_and_read(core, &path).await;
                });
                let demanded = CoresConfig { disk_engine: DiskEngine::IoUring, ..config(1) };
                assert!(Cores::start(&demanded).is_err(), "what is demanded is not replaced");
            },
        );
    }
}

#[test]
fn without_locked_memory_requests_go_unregistered() {
    let dir = TestDir::new("/var/tmp");
    let open_to_all = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(dir.file(""), open_to_all).unwrap();
    restricted(become_nobody, || {
        let path = dir.file("disk");
        on_core(DiskEngine::Auto, |core| async move {
            write_and_read(core.clone(), &path).await;
            let mine = std::fs::Permissions::from_mode(0o000);
            std::fs::set_permissions(&path, mine).unwrap();
            let refused = core.open_disk(&path, OpenOptions::new()).await.unwrap_err();
            assert_eq!(refused.reason, OpenReason::PermissionDenied);
        });
    });
}
