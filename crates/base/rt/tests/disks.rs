//! Disks by every engine, on a disk and in memory: one suite.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use common::{KIB, MIB, buffers, fill, is_root, on_core, pattern};
use rt::buf::{Bufs, MemoryClass};
use rt::disk::{Disk, DiskErrorKind, DiskKind, Engine, OpenOptions, OpenReason};
use rt::memory::PAGE;
use rt::{Core, DiskEngine};
use testkit::TestDir;
use testkit::system::{Loop, Mount, program, text};

/// Runs `test` with a fresh file of `bytes` for every engine and file system.
fn everywhere<Fut: Future<Output = ()> + 'static>(
    bytes: usize,
    test: impl Fn(Core, Disk) -> Fut + Clone + Send + 'static,
) {
    for engine in [DiskEngine::Auto, DiskEngine::Threads] {
        for dir in [TestDir::on_disk(), TestDir::in_memory()] {
            let test = test.clone();
            on_core(engine, move |core| async move {
                let how = OpenOptions::new().create(bytes as u64);
                let disk = core.open_disk(&dir.file("disk"), how).await.unwrap();
                test(core, disk).await;
            });
        }
    }
}

#[test]
fn it_round_trips() {
    everywhere(16 * MIB, |core, disk| async move {
        let account = core.buffer_pool().account();
        for (i, bytes) in
            [512, 4 * KIB, 7 * KIB, 64 * KIB, MIB, 3 * MIB + 512].into_iter().enumerate()
        {
            let at = (i * MIB + i * 512) as u64;
            let data = pattern(&account, i as u64, bytes).await;
            disk.write(at, data.clone()).await.unwrap();
            let got: Bufs = disk.read(at, buffers(&account, bytes).await).await.unwrap().into();
            assert_eq!(data.first_difference(&got), None);
            disk.sync().await.unwrap();
            let mut plain = vec![0; bytes];
            std::fs::File::open(disk.path()).unwrap().read_exact_at(&mut plain, at).unwrap();
            assert!(data.to_vec() == plain, "{bytes} bytes by other means");
        }
    });
}

#[test]
fn memory_in_many_pieces_and_from_outside_the_pool() {
    everywhere(8 * MIB, |core, disk| async move {
        let account = core.buffer_pool().account();
        let one = pattern(&account, 1, 4 * MIB).await;
        let mut pieces = Bufs::new();
        for i in (0..4 * MIB / PAGE).rev() {
            pieces.append(one.slice(i * PAGE..(i + 1) * PAGE));
        }
        pieces.append(Bufs::zeroes(2 * MIB));
        disk.write(0, pieces.clone()).await.unwrap();
        let mut into = buffers(&account, 2 * MIB).await;
        for _ in 0..1024 {
            into.extend(buffers(&account, PAGE).await);
        }
        let got: Bufs = disk.read(0, into).await.unwrap().into();
        assert_eq!(pieces.first_difference(&got), None);
        disk.write(0, Bufs::zeroes(64 * KIB)).await.unwrap();
        let got: Bufs = disk.read(0, buffers(&account, 64 * KIB).await).await.unwrap().into();
        assert!(got.same_bytes(&Bufs::zeroes(64 * KIB)));
    });
}

#[test]
fn more_requests_than_ring_entries() {
    const COUNT: u64 = 6000;
    everywhere(COUNT as usize * PAGE, |core, disk| async move {
        let account = core.buffer_pool().account();
        let mut tasks = tokio::task::JoinSet::new();
        for i in 0..COUNT {
            // Clients of their own: one may not hold more than half of the pool.
            let (disk, account) = (disk.clone(), core.buffer_pool().account());
            tasks.spawn_local(async move {
                let mut page = buffers(&account, PAGE).await;
                fill(&mut page, i);
                disk.write(i * PAGE as u64, page.into()).await.unwrap();
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        for i in (0..COUNT).step_by(97) {
            let page = buffers(&account, PAGE).await;
            let got: Bufs = disk.read(i * PAGE as u64, page).await.unwrap().into();
            assert!(got.same_bytes(&pattern(&account, i, PAGE).await), "page {i}");
        }
    });
}

#[test]
fn a_dropped_request_keeps_its_memory_until_completion() {
    everywhere(64 * MIB, |core, disk| async move {
        let account = core.buffer_pool().account();
        let total = core.buffer_pool().usage().total;
        for round in 0..50u64 {
            for i in 0..16 {
                let write = disk.write(i * MIB as u64, pattern(&account, round, MIB).await);
                tokio::select! {
                    biased;
                    done = write => done.unwrap(),
                    () = std::future::ready(()) => {}
                }
            }
            while core.buffer_pool().usage().free < total {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let got: Bufs = disk.read(0, buffers(&account, MIB).await).await.unwrap().into();
        assert!(
            got.same_bytes(&pattern(&account, 49, MIB).await),
            "the last write, though dropped"
        );
    });
}

#[test]
fn space_is_freed_zeroed_and_reserved() {
    everywhere(8 * MIB, |core, disk| async move {
        let account = core.buffer_pool().account();
        assert_eq!(disk.allocated().await.unwrap(), 0);
        let data = pattern(&account, 7, 4 * MIB).await;
        disk.write(0, data.clone()).await.unwrap();
        disk.sync().await.unwrap();
        assert!(disk.allocated().await.unwrap() >= 4 * MIB as u64);

        assert!(disk.info().can_punch);
        disk.punch(MIB as u64, 2 * MIB as u64).await.unwrap();
        assert!(disk.allocated().await.unwrap() < 3 * MIB as u64, "freed");
        let mut expect = data.slice(0..MIB);
        expect.append(Bufs::zeroes(2 * MIB));
        expect.append(data.slice(3 * MIB..4 * MIB));
        let got: Bufs = disk.read(0, buffers(&account, 4 * MIB).await).await.unwrap().into();
        assert_eq!(expect.first_difference(&got), None);

        let before = disk.allocated().await.unwrap();
        match disk.zero(0, MIB as u64).await {
            Ok(()) => {
                assert!(disk.allocated().await.unwrap() >= before, "kept");
                let got: Bufs = disk.read(0, buffers(&account, MIB).await).await.unwrap().into();
                assert!(got.same_bytes(&Bufs::zeroes(MIB)));
            }
            Err(e) => {
                assert_eq!(e.kind, DiskErrorKind::Unsupported);
                assert!(!disk.info().can_zero);
            }
        }
        disk.allocate(4 * MIB as u64, 4 * MIB as u64).await.unwrap();
        assert!(disk.allocated().await.unwrap() >= before + 4 * MIB as u64);
        assert_eq!(std::fs::metadata(disk.path()).unwrap().len(), 8 * MIB as u64, "size as it was");
    });
}

#[test]
fn ranges_and_alignment_are_checked() {
    everywhere(MIB, |core, disk| async move {
        let account = core.buffer_pool().account();
        let size = MIB as u64;
        let page = || account.try_credit(PAGE, MemoryClass::LocalIo).unwrap().alloc(PAGE);
        let kind = |r: Result<_, rt::disk::DiskError>| r.map(drop).unwrap_err().kind;

        assert_eq!(kind(disk.read(size, page()).await), DiskErrorKind::PastEnd);
        assert_eq!(kind(disk.read(size - 512, page()).await), DiskErrorKind::PastEnd);
        assert_eq!(kind(disk.read(u64::MAX - 511, page()).await), DiskErrorKind::PastEnd);
        assert_eq!(kind(disk.read(1, page()).await), DiskErrorKind::Misaligned);
        let past = disk.write(size, page().into()).await;
        assert_eq!(past.unwrap_err().kind, DiskErrorKind::PastEnd);
        let odd = Bufs::from(page()).slice(0..100);
        assert_eq!(disk.write(0, odd).await.unwrap_err().kind, DiskErrorKind::Misaligned);
        assert_eq!(disk.punch(0, 100).await.unwrap_err().kind, DiskErrorKind::Misaligned);
        assert_eq!(disk.zero(size, 512).await.unwrap_err().kind, DiskErrorKind::PastEnd);

        disk.set_len(2 * size).await.unwrap();
        assert_eq!(disk.info().size, 2 * size);
        disk.write(size, page().into()).await.unwrap();
        disk.set_len(size).await.unwrap();
        assert_eq!(kind(disk.read(size, page()).await), DiskErrorKind::PastEnd);
        disk.read(size - PAGE as u64, page()).await.unwrap();

        std::fs::File::options().write(true).open(disk.path()).unwrap().set_len(512).unwrap();
        assert_eq!(kind(disk.read(0, page()).await), DiskErrorKind::PastEnd, "cut by others");
    });
}

#[test]
fn an_open_disk_is_exclusive() {
    for engine in [DiskEngine::Auto, DiskEngine::Threads] {
        for dir in [TestDir::on_disk(), TestDir::in_memory()] {
            on_core(engine, move |core| async move {
                let path = dir.file("held");
                let reason = async |how| core.open_disk(&path, how).await.unwrap_err().reason;
                let reader = OpenOptions::new().read_only(true);
                assert_eq!(reason(OpenOptions::new()).await, OpenReason::NotFound);
                let create = OpenOptions::new().create(MIB as u64);
                let held = core.open_disk(&path, create).await.unwrap();
                assert_eq!(reason(create).await, OpenReason::Exists);
                assert_eq!(reason(OpenOptions::new()).await, OpenReason::Busy);
                assert_eq!(reason(reader).await, OpenReason::Busy);
                // Of a process that holds it, several cores may use it.
                let beside = core.open_disk(&path, OpenOptions::new().shared(true)).await.unwrap();
                beside.write(0, Bufs::zeroes(4096)).await.unwrap();
                drop(beside);
                assert_eq!(reason(reader).await, OpenReason::Busy, "it is held as before");
                drop(held);
                let one = core.open_disk(&path, reader).await.unwrap();
                let two = core.open_disk(&path, reader).await.unwrap();
                assert_eq!(reason(OpenOptions::new()).await, OpenReason::Busy);
                let write = one.write(0, Bufs::zeroes(512)).await;
                assert_eq!(write.unwrap_err().kind, DiskErrorKind::ReadOnly);
                drop((one, two));
                drop(core.open_disk(&path, OpenOptions::new()).await.unwrap());
                core.rename(&path, &dir.file("new")).await.unwrap();
                core.remove_file(&dir.file("new")).await.unwrap();
                assert_eq!(reason(OpenOptions::new()).await, OpenReason::NotFound);
            });
        }
    }
}

#[test]
fn non_disks_are_refused_with_a_reason() {
    on_core(DiskEngine::Auto, |core| async move {
        let dir = TestDir::on_disk();
        let reason =
            async |path: &Path, how| core.open_disk(path, how).await.map(drop).unwrap_err().reason;
        let how = OpenOptions::new();
        assert_eq!(reason(&dir.file(""), how).await, OpenReason::NotAFileOrBlockDevice);
        assert_eq!(reason(Path::new("/dev/null"), how).await, OpenReason::NotAFileOrBlockDevice);
        let proc = Path::new("/proc/self/status");
        assert_eq!(reason(proc, how.read_only(true)).await, OpenReason::NoDirectIo);
        let e = core.open_disk(Path::new("/no/such"), how).await.unwrap_err();
        assert_eq!(e.to_string(), "/no/such: no such file or device");
        let e = core.open_disk(Path::new("/no/such"), how.create(512)).await.unwrap_err();
        assert_eq!(e.reason, OpenReason::NotFound);
        if is_root() {
            println!("skipped: nothing is forbidden to root");
        } else {
            assert_eq!(reason(Path::new("/etc/shadow"), how).await, OpenReason::PermissionDenied);
        }
    });
}

#[test]
fn buffered_disks_do_without_direct_io() {
    on_core(DiskEngine::Auto, |core| async move {
        let dir = TestDir::on_disk();
        let how = OpenOptions::new().buffered(true).create(MIB as u64);
        let disk = core.open_disk(&dir.file("buffered"), how).await.unwrap();
        let account = core.buffer_pool().account();
        let data = pattern(&account, 3, 12 * KIB).await;
        disk.write(512, data.clone()).await.unwrap();
        disk.sync().await.unwrap();
        let got: Bufs = disk.read(512, buffers(&account, 12 * KIB).await).await.unwrap().into();
        assert!(data.same_bytes(&got));
    });
}

#[test]
fn memory_is_served_inline_and_disks_by_the_core_s_engine() {
    on_core(DiskEngine::Auto, |core| async move {
        let (disk, memory) = (TestDir::on_disk(), TestDir::in_memory());
        let how = OpenOptions::new().create(MIB as u64);
        let a = core.open_disk(&disk.file("a"), how).await.unwrap();
        let b = core.open_disk(&memory.file("b"), how).await.unwrap();
        assert_eq!((a.engine(), b.engine()), (core.disk_engine(), Engine::Inline));
        assert!(a.info().has_volatile_cache && !b.info().has_volatile_cache);
        assert_eq!(a.info().kind, DiskKind::File);
    });
    on_core(DiskEngine::Threads, |core| async move {
        assert_eq!(core.disk_engine(), Engine::Threads);
    });
}

#[test]
fn a_full_file_system_is_named() {
    let Some(mount) = Mount::memory("1m") else {
        println!("skipped: no right to mount a file system");
        return;
    };
    on_core(DiskEngine::Auto, move |core| async move {
        let how = OpenOptions::new().create(8 * MIB as u64);
        let disk = core.open_disk(&mount.file("sparse"), how).await.unwrap();
        let account = core.buffer_pool().account();
        let data = pattern(&account, 1, 2 * MIB).await;
        let e = disk.write(0, data.clone()).await.unwrap_err();
        assert_eq!((e.kind, e.errno), (DiskErrorKind::NoSpace, 28));
        let e = disk.allocate(0, 4 * MIB as u64).await.unwrap_err();
        assert_eq!(e.kind, DiskErrorKind::NoSpace);
        disk.punch(0, 8 * MIB as u64).await.unwrap();
        disk.write(0, data.slice(0..512 * KIB)).await.unwrap();
    });
}

#[test]
fn a_block_device_is_a_disk() {
    for engine in [DiskEngine::Auto, DiskEngine::Threads] {
        let dir = TestDir::in_memory();
        let backing = dir.file("backing");
        std::fs::File::create(&backing).unwrap().set_len(16 * MIB as u64).unwrap();
        let Some(device) = Loop::new(&backing, &[]) else {
            println!("skipped: no right to make a loop device");
            return;
        };
        let path = device.path().to_owned();
        on_core(engine, move |core| async move {
            let disk = core.open_disk(&path, OpenOptions::new()).await.unwrap();
            let info = disk.info();
            assert_eq!((info.kind, info.size), (DiskKind::BlockDevice, 16 * MIB as u64));
            assert_eq!(disk.engine(), core.disk_engine());
            let second = core.open_disk(&path, OpenOptions::new()).await;
            assert_eq!(second.unwrap_err().reason, OpenReason::Busy);
            let account = core.buffer_pool().account();
            let data = pattern(&account, 1, 2 * MIB).await;
            disk.write(MIB as u64, data.clone()).await.unwrap();
            disk.sync().await.unwrap();
            disk.punch(MIB as u64, MIB as u64).await.unwrap();
            disk.zero(2 * MIB as u64, 512 * KIB as u64).await.unwrap();
            disk.allocate(0, MIB as u64).await.unwrap();
            let mut expect = Bufs::zeroes(MIB + 512 * KIB);
            expect.append(data.slice(MIB + 512 * KIB..2 * MIB));
            let into = buffers(&account, 2 * MIB).await;
            let got: Bufs = disk.read(MIB as u64, into).await.unwrap().into();
            assert_eq!(expect.first_difference(&got), None);
            let e = disk.set_len(0).await.unwrap_err();
            assert_eq!(e.kind, DiskErrorKind::Unsupported);
            drop(disk);
            drop(core.open_disk(&path, OpenOptions::new()).await.unwrap());
        });
    }
}

/// Opens a file whose device has less space than it claims, writes more than that into the cache
/// and returns the file: the next sync fails. `None`, with a message, without the necessary rights.
fn on_a_disk_that_cannot_sync<Fut: Future<Output = ()> + 'static>(
    test: impl FnOnce(Core, Disk) -> Fut + Send + 'static,
) {
    let Some(mount) = Mount::memory("1m") else {
        println!("skipped: no right to mount a file system");
        return;
    };
    let backing = mount.file("backing");
    std::fs::File::create(&backing).unwrap().set_len(16 * MIB as u64).unwrap();
    let Some(device) = Loop::new(&backing, &[]) else {
        println!("skipped: no right to make a loop device");
        return;
    };
    // The cache of a block device itself is never used.
    let at = text(device.path());
    let formatted = program("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", "-N", "16", at]);
    let Some(files) = formatted.and_then(|_| Mount::new(&[at])) else {
        println!("skipped: no file system on a loop device");
        return;
    };
    let path = files.file("disk");
    std::fs::File::create(&path).unwrap().set_len(4 * MIB as u64).unwrap();
    on_core(DiskEngine::Auto, move |core| async move {
        let how = OpenOptions::new().buffered(true);
        let disk = core.open_disk(&path, how).await.unwrap();
        disk.sync().await.unwrap();
        let data = pattern(&core.buffer_pool().account(), 1, 4 * MIB).await;
        disk.write(0, data).await.unwrap();
        test(core, disk).await;
    });
    drop(files);
    drop(device);
    drop(mount);
}

#[test]
fn a_failed_sync_is_never_retried() {
    on_a_disk_that_cannot_sync(|_, disk| async move {
        let failed = disk.sync().await.unwrap_err();
        assert_ne!(failed.kind, DiskErrorKind::Gone);
        assert_eq!(disk.sync().await.unwrap_err().kind, DiskErrorKind::Gone);
        let write = disk.write(0, Bufs::zeroes(512)).await;
        assert_eq!(write.unwrap_err().kind, DiskErrorKind::Gone);
    });
}

#[test]
fn a_failed_sync_counts_without_a_waiter() {
    on_a_disk_that_cannot_sync(|_, disk| async move {
        let dropped = tokio::time::timeout(Duration::ZERO, disk.sync());
        assert!(dropped.await.is_err(), "not through at once");
        while disk.write(0, Bufs::zeroes(512)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(disk.sync().await.unwrap_err().kind, DiskErrorKind::Gone);
    });
}
