//! The system calls of disks: counted, interrupted, cut short, refused.
#![allow(clippy::unwrap_used, unsafe_code)]

mod common;

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::mpsc;

use common::supervise::{Call, Verdict, supervised};
use common::{KIB, MIB, buffers, on_core, pattern};
use rt::buf::Bufs;
use rt::disk::{Disk, DiskErrorKind, Engine, OpenOptions};
use rt::{Core, DiskEngine};
use testkit::TestDir;

/// Transfers by one piece of memory, and by several.
const TRANSFERS: [libc::c_long; 4] =
    [libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_preadv, libc::SYS_pwritev];

/// Everything that changes or reads a disk served by threads.
const ALL: [libc::c_long; 6] = [
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
];

async fn fresh(core: &Core, path: &std::path::Path) -> Disk {
    core.open_disk(path, OpenOptions::new().create(8 * MIB as u64)).await.unwrap()
}

async fn read(core: &Core, disk: &Disk, bytes: usize) -> Bufs {
    let account = core.buffer_pool().account();
    disk.read(0, buffers(&account, bytes).await).await.unwrap().into()
}

/// Has a disk served by threads judged; gives how many calls there were.
fn judged<Fut: Future<Output = ()> + 'static>(
    judge: impl Fn(u32, &Call) -> Verdict,
    test: impl FnOnce(Core, PathBuf) -> Fut + Send + 'static,
) -> u32 {
    let (dir, count) = (TestDir::on_disk(), Cell::new(0));
    let path = dir.file("disk");
    supervised(
        &ALL,
        |call| {
            count.set(count.get() + 1);
            judge(count.get(), call)
        },
        || on_core(DiskEngine::Threads, |core| test(core, path)),
    );
    count.get()
}

#[test]
fn requests_of_one_wake_up_are_submitted_together() {
    const TASKS: u64 = 32;
    let dir = TestDir::on_disk();
    let path = dir.file("disk");
    let (say, now_measuring) = mpsc::channel();
    let (measuring, submissions) = (Cell::new(false), Cell::new(Vec::new()));
    let judge = |call: &Call| {
        measuring.set(now_measuring.try_iter().last().unwrap_or(measuring.get()));
        let new_requests = call.args[1];
        if measuring.get() && new_requests > 0 {
            let mut all = submissions.take();
            all.push(new_requests);
            submissions.set(all);
        }
        Verdict::Proceed
    };
    let test = |core: Core| async move {
        if core.disk_engine() != Engine::Uring {
            println!("skipped: no io_uring here");
            say.send(false).unwrap();
            return;
        }
        let (disk, account) = (fresh(&core, &path).await, core.buffer_pool().account());
        disk.write(0, pattern(&account, 1, MIB).await).await.unwrap();
        let mut pages = Vec::new();
        for _ in 0..TASKS {
            pages.push(buffers(&account, 4 * KIB).await);
        }
        say.send(true).unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for (i, page) in (0..).zip(pages) {
            let disk = disk.clone();
            tasks.spawn_local(async move { disk.read(i * 4096, page).await.unwrap() });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    };
    supervised(&[libc::SYS_io_uring_enter], judge, || on_core(DiskEngine::Auto, test));
    assert_eq!(submissions.take(), if measuring.get() { vec![TASKS] } else { vec![] });
}

#[test]
fn an_interrupted_io_uring_continues() {
    let dir = TestDir::on_disk();
    let path = dir.file("disk");
    let count = Cell::new(0usize);
    let judge = |_: &Call| {
        count.set(count.get() + 1);
        // The first is the core's own, when it tries the ring out.
        match count.get() {
            1 => Verdict::Proceed,
            n => match [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::ENOMEM].get(n % 6) {
                Some(&errno) => Verdict::Fail(errno),
                None => Verdict::Proceed,
            },
        }
    };
    supervised(&[libc::SYS_io_uring_enter], judge, || {
        on_core(DiskEngine::Auto, |core| async move {
            let (disk, account) = (fresh(&core, &path).await, core.buffer_pool().account());
            for seed in 0..8 {
                let data = pattern(&account, seed, 64 * KIB).await;
                disk.write(0, data.clone()).await.unwrap();
                disk.sync().await.unwrap();
                assert!(read(&core, &disk, 64 * KIB).await.same_bytes(&data));
            }
        });
    });
    assert!(count.get() > 24 || count.get() == 0, "{} calls", count.get());
}

#[test]
fn a_ring_that_accepts_no_requests_is_not_used() {
    let dir = TestDir::on_disk();
    let path = dir.file("disk");
    let refuse = |_: &Call| Verdict::Fail(libc::EPERM);
    supervised(&[libc::SYS_io_uring_enter], refuse, || {
        on_core(DiskEngine::Auto, |core| async move {
            assert_eq!(core.disk_engine(), Engine::Threads);
            let (disk, account) = (fresh(&core, &path).await, core.buffer_pool().account());
            let data = pattern(&account, 1, 64 * KIB).await;
            disk.write(0, data.clone()).await.unwrap();
            assert!(read(&core, &disk, 64 * KIB).await.same_bytes(&data));
        });
    });
}

#[test]
fn interrupted_and_short_calls_are_carried_on() {
    let judge = |n, call: &Call| match n % 3 {
        0 => Verdict::Fail(libc::EINTR),
        1 if TRANSFERS.contains(&call.number) => short(call),
        _ => Verdict::Proceed,
    };
    let count = judged(judge, |core, path| async move {
        let (disk, account) = (fresh(&core, &path).await, core.buffer_pool().account());
        for (i, bytes) in [512, 4 * KIB, 70 * KIB, MIB].into_iter().enumerate() {
            let data = pattern(&account, i as u64, bytes).await;
            disk.write(0, data.clone()).await.unwrap();
            disk.sync().await.unwrap();
            let found = read(&core, &disk, bytes).await;
            assert_eq!(data.first_difference(&found), None, "{bytes} bytes");
        }
        disk.allocate(0, 8 * MIB as u64).await.unwrap();
        disk.punch(0, MIB as u64).await.unwrap();
        assert!(read(&core, &disk, MIB).await.same_bytes(&Bufs::zeroes(MIB)));
    });
    assert!(count > 20, "{count} calls");
}

/// Moves the first 512 bytes of a transfer and no more.
fn short(call: &Call) -> Verdict {
    let [fd, memory, _, at, ..] = call.args;
    let (fd, at) = (fd as libc::c_int, at as libc::off_t);
    let memory = std::ptr::with_exposed_provenance_mut::<libc::c_void>(memory as usize);
    // SAFETY: the call is one of this process and waits: its vectors and what they name, at least
    // 512 bytes here, stay as they are, and its descriptor open.
    let moved = unsafe {
        let first = || (*memory.cast::<libc::iovec>()).iov_base;
        match call.number {
            libc::SYS_pread64 => libc::pread(fd, memory, 512, at),
            libc::SYS_pwrite64 => libc::pwrite(fd, memory, 512, at),
            libc::SYS_preadv => libc::pread(fd, first(), 512, at),
            _ => libc::pwrite(fd, first(), 512, at),
        }
    };
    assert_eq!(moved, 512, "{}", std::io::Error::last_os_error());
    Verdict::Return(512)
}

#[test]
fn kernel_errors_map_to_kinds() {
    let cases = [
        (libc::EIO, DiskErrorKind::Media),
        (libc::EBADMSG, DiskErrorKind::Media),
        (libc::ENOSPC, DiskErrorKind::NoSpace),
        (libc::EDQUOT, DiskErrorKind::NoSpace),
        (libc::EROFS, DiskErrorKind::ReadOnly),
        (libc::ENODEV, DiskErrorKind::Gone),
        (libc::ENOMEM, DiskErrorKind::Other),
    ];
    for (errno, kind) in cases {
        // The first half of the data gets there, then the error.
        let judge = move |n, call: &Call| match n {
            1 => short(call),
            2 | 4 => Verdict::Fail(errno),
            _ => Verdict::Proceed,
        };
        let count = judged(judge, move |core, path| async move {
            let (disk, account) = (fresh(&core, &path).await, core.buffer_pool().account());
            let data = pattern(&account, 1, KIB).await;
            let failed = disk.write(0, data.clone()).await.unwrap_err();
            assert_eq!((failed.kind, failed.errno), (kind, errno));
            disk.write(0, data.clone()).await.expect("it was a write, not the disk");
            let into = buffers(&account, KIB).await;
            assert_eq!(disk.read(0, into).await.unwrap_err().kind, kind);
            assert!(read(&core, &disk, KIB).await.same_bytes(&data));
        });
        assert_eq!(count, 5, "none is repeated");
    }
}

#[test]
fn a_failed_sync_is_not_repeated() {
    let judge = |_, call: &Call| match call.number {
        libc::SYS_fdatasync => Verdict::Fail(libc::EIO),
        _ => Verdict::Proceed,
    };
    let count = judged(judge, |core, path| async move {
        let (disk, account) = (fresh(&core, &path).await, core.buffer_pool().account());
        disk.write(0, pattern(&account, 1, KIB).await).await.unwrap();
        assert_eq!(disk.sync().await.unwrap_err().kind, DiskErrorKind::Media);
        assert_eq!(disk.sync().await.unwrap_err().kind, DiskErrorKind::Gone);
        let write = disk.write(0, Bufs::zeroes(512)).await;
        assert_eq!(write.unwrap_err().kind, DiskErrorKind::Gone);
    });
    assert_eq!(count, 2, "a write and a sync");
}

#[test]
fn unsupported_operations_are_tried_once() {
    let judge = |_, call: &Call| match call.number {
        libc::SYS_fallocate => Verdict::Fail(libc::EOPNOTSUPP),
        _ => Verdict::Proceed,
    };
    let count = judged(judge, |core, path| async move {
        let disk = fresh(&core, &path).await;
        for _ in 0..3 {
            let (punch, zero) = (disk.punch(0, MIB as u64).await, disk.zero(0, MIB as u64).await);
            assert_eq!(punch.unwrap_err().kind, DiskErrorKind::Unsupported);
            assert_eq!(zero.unwrap_err().kind, DiskErrorKind::Unsupported);
        }
        assert!(!disk.info().can_punch && !disk.info().can_zero);
    });
    assert_eq!(count, 2);
}
