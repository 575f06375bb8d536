//! A volume as a file, by the kernel's own FUSE. Where nothing can be mounted the tests say so.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "fuse/clients.rs"]
mod clients;
#[path = "fuse/common.rs"]
mod common;
#[path = "nbd/common.rs"]
mod cores;
#[path = "common/threads.rs"]
mod threads;
#[path = "common/tools.rs"]
mod tools;

use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use attach::fuse::{MountError, Options, ServeEnd, Server, is_stale};
use block::testing::faulty::{Effect, OpKind, Rule};
use block::testing::{Rng, TestClient};
use block::{Dev, Epoch, Error, Lba, Mem, MemOptions};
use common::{Site, mounts, number, open, options};
use cores::{on_core, on_core_with};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, ftruncate, seek};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet, spawn_local};
use volume::Volume;

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

fn small() -> MemOptions {
    MemOptions::new(512, 4096)
}

fn is(errno: Errno) -> Option<i32> {
    Some(errno.raw_os_error())
}

/// Ranges of any kind, most of them short and none aligned on purpose.
fn range(rng: &mut Rng, bytes: u64) -> (u64, usize) {
    let most = [16, 600, 5000, 70_000, 3 << 20][rng.below(5) as usize].min(bytes);
    let len = rng.within(1, most);
    let at = rng.below(bytes - len + 1);
    if rng.one_in(3) { (at & !4095, len as usize) } else { (at, len as usize) }
}

/// What is done to the file, and to a vector, is the same.
fn exercise_file(path: &Path, bytes: u64, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut model = vec![0; bytes as usize];
    let file = open(path);
    for step in 0..400u32 {
        let (at, len) = range(&mut rng, bytes);
        let all = at as usize..at as usize + len;
        match rng.below(10) {
            0..4 => {
                let data: Vec<u8> = (0..len).map(|_| rng.u64() as u8).collect();
                file.write_all_at(&data, at).unwrap();
                model[all].copy_from_slice(&data);
            }
            4 => {
                fallocate(&file, PUNCH, at, len as u64).unwrap();
                model[all].fill(0);
            }
            5 => {
                let keeps = [FallocateFlags::empty(), FallocateFlags::KEEP_SIZE];
                let how = FallocateFlags::ZERO_RANGE | keeps[rng.below(2) as usize];
                fallocate(&file, how, at, len as u64).unwrap();
                model[all].fill(0);
            }
            6 => file.sync_data().unwrap(),
            _ => {
                let mut read = vec![0; len];
                file.read_exact_at(&mut read, at).unwrap();
                assert!(read == model[all], "step {step}: {len} bytes from {at}");
            }
        }
    }
    assert!(std::fs::read(path).unwrap() == model);
}

#[test]
fn reads_return_the_written_bytes() {
    if !mounts() {
        return;
    }
    for block_size in [512, 4096] {
        on_core(async move |core| {
            const BYTES: u64 = (9 << 20) + 4096;
            let mem = MemOptions::new(block_size, BYTES / u64::from(block_size));
            let mut site = Site::new(&core, mem).await;
            site.aside(|path| exercise_file(&path, BYTES, 7)).await;
            assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
            assert_eq!(core.buffer_pool().usage().overdrafts, 0);
        });
    }
}

/// Neighbours within a block do not lose what each other writes; nor does one who comes by another
/// door.
#[test]
fn writers_of_the_same_block_do_not_disturb_each_other() {
    const WRITERS: u64 = 4;
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::new(&core, MemOptions::new(4096, 8)).await;
        // Time for the others between a read and its write.
        let slow = Effect::Delay(Duration::ZERO, Duration::from_micros(300));
        site.faults.add(Rule::new(slow));
        let write = |n: u64| {
            move |path: std::path::PathBuf| {
                let file = open(&path);
                for round in 1..=100u8 {
                    let at = 4096 + n * 300;
                    file.write_all_at(&[round; 300], at).unwrap();
                    let mut read = [0; 300];
                    file.read_exact_at(&mut read, at).unwrap();
                    assert_eq!(read, [round; 300], "writer {n}");
                }
            }
        };
        tokio::join!(
            site.aside(write(0)),
            site.aside(write(1)),
            site.aside(write(2)),
            site.aside(write(WRITERS - 1))
        );
        site.faults.clear();
        let all = site.aside(|path| std::fs::read(path).unwrap()).await;
        assert!(all[4096..4096 + 1200] == [100; 1200] && all[4096 + 1200..8192] == [0; 2896]);
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
    });
}

/// Many writes whose ends lie within blocks hold all the memory that there is for data. Each has to
/// read a block before it is through: they do not wait for each other.
#[test]
fn writes_that_take_all_memory_come_to_their_end() {
    const WRITERS: u64 = 8;
    const BYTES: usize = 512 << 10;
    if !mounts() {
        return;
    }
    on_core_with(4 << 20, async |core| {
        let mut site = Site::new(&core, MemOptions::new(512, 1 << 14)).await;
        // They are under way together.
        let slow = Effect::Delay(Duration::from_millis(5), Duration::from_millis(10));
        site.faults.add(Rule::new(slow));
        let mut writers = JoinSet::new();
        for n in 0..WRITERS {
            let (core, path) = (core.clone(), site.path());
            let write = move || open(&path).write_all_at(&[9; BYTES], n * (1 << 20) + 1).unwrap();
            writers.spawn_local(async move { core.run_blocking(write).await.unwrap() });
        }
        let done = tokio::time::timeout(Duration::from_secs(20), writers.join_all()).await;
        done.expect("they wait for each other");
        site.faults.clear();
        let all = site.aside(|path| std::fs::read(path).unwrap()).await;
        for piece in all.chunks_exact(1 << 20) {
            assert!(piece[0] == 0 && piece[1..=BYTES] == [9; BYTES] && piece[BYTES + 1] == 0);
        }
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
        assert_eq!(core.buffer_pool().usage().overdrafts, 0);
    });
}

/// A disk may be made of the file. Who serves it does not wait for it when memory is short: neither
/// the core nor the thread that speaks with the kernel.
#[test]
fn its_threads_count_as_those_of_a_disk() {
    if !mounts() || !threads::may_be_marked() {
        return;
    }
    on_core(async |core| {
        assert!(!threads::serves_disks(&threads::this()));
        let mut site = Site::new(&core, small()).await;
        site.aside(|path| open(&path).sync_all().unwrap()).await;
        assert!(threads::serves_disks(&threads::this()));
        // Those of other tests, too, and one that has just begun has yet to be marked.
        let marked = async {
            loop {
                let readers = threads::waiting_for("/dev/fuse");
                if !readers.is_empty() && readers.iter().all(|t| threads::serves_disks(t)) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), marked).await.expect("some are not marked");
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
    });
}

#[test]
fn what_was_synced_outlives_a_power_cut() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mem = MemOptions { volatile_cache: true, ..small() };
        let mut site = Site::new(&core, mem).await;
        site.aside(|path| {
            let file = open(&path);
            file.write_all_at(&[1; 700], 100).unwrap();
            file.sync_all().unwrap();
            let how = OFlags::DSYNC.bits().cast_signed();
            let through = OpenOptions::new().write(true).custom_flags(how).open(&path).unwrap();
            through.write_all_at(&[2; 700], 10_000).unwrap();
            through.write_all_at(&[3; 4096], 20_480).unwrap();
            file.write_all_at(&[4; 4096], 40_960).unwrap();
        })
        .await;
        site.mem.cut_power(|_| 0);
        let all = site.aside(|path| std::fs::read(path).unwrap()).await;
        assert!(all[100..800] == [1; 700], "fsync");
        assert!(all[10_000..10_700] == [2; 700] && all[20_480..24_576] == [3; 4096], "O_DSYNC");
        assert!(all[40_960..45_056] == [0; 4096], "this is no test");
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
    });
}

#[test]
fn the_file_exists_and_keeps_its_attributes() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let dir = TempDir::new().unwrap();
        rustix::fs::chown(dir.path(), Some(uid(12)), Some(gid(34))).unwrap();
        let options = Options { mode: 0o640, ..options() };
        let mut site = Site::at(&core, dir, small(), options).await.unwrap();
        let known = site.dir.path().to_owned();
        assert!(!is_stale(&core, &known, "web").await);
        site.aside(|path| {
            let dir = path.parent().unwrap();
            let names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
            assert_eq!(names.collect::<Vec<_>>(), ["web"]);
            let seen = std::fs::metadata(&path).unwrap();
            assert_eq!((seen.len(), seen.mode(), seen.nlink()), (2 << 20, 0o100_640, 1));
            assert_eq!((seen.uid(), seen.gid(), seen.blocks()), (12, 34, 4096));
            let space = rustix::fs::statvfs(&path).unwrap();
            assert_eq!((space.f_blocks * space.f_frsize, space.f_bavail), (2 << 20, 0));
            let file = open(&path);
            assert_eq!(number(File::create(&path)), is(Errno::PERM), "O_TRUNC");
            ftruncate(&file, 2 << 20).unwrap();
            for size in [0, (2 << 20) - 1, 4 << 20] {
                assert_eq!(ftruncate(&file, size), Err(Errno::PERM), "{size}");
            }
            assert_eq!(number(File::create(dir.join("other"))), is(Errno::PERM));
            assert_eq!(number(std::fs::create_dir(dir.join("d"))), is(Errno::PERM));
            assert_eq!(number(std::fs::remove_file(&path)), is(Errno::PERM));
            assert_eq!(number(std::fs::rename(&path, dir.join("b"))), is(Errno::PERM));
            assert_eq!(number(std::fs::hard_link(&path, dir.join("b"))), is(Errno::PERM));
            let all = Permissions::from_mode(0o666);
            assert_eq!(number(std::fs::set_permissions(&path, all)), is(Errno::PERM));
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
            assert_eq!(number(std::fs::metadata(dir.join("none"))), is(Errno::NOENT));
            // As at the end of a disk.
            assert_eq!(file.write_at(&[7; 1000], (2 << 20) - 10).unwrap(), 10);
            assert_eq!(number(file.write_at(&[7; 10], 2 << 20)), is(Errno::NOSPC));
            assert_eq!(file.read_at(&mut [0; 100], (2 << 20) - 10).unwrap(), 10);
            assert_eq!(file.read_at(&mut [0; 100], 2 << 20).unwrap(), 0);
            let beyond = (2 << 20) - 100;
            fallocate(&file, PUNCH, beyond, 1000).unwrap();
            assert_eq!(
                fallocate(&file, FallocateFlags::ZERO_RANGE, beyond, 1000),
                Err(Errno::FBIG)
            );
            assert_eq!(fallocate(&file, FallocateFlags::empty(), 0, 10), Err(Errno::OPNOTSUPP));
        })
        .await;
        site.mem.grow(8192);
        let bytes = site.aside(|path| std::fs::metadata(path).unwrap().len()).await;
        assert_eq!(bytes, 4 << 20, "a volume that has grown");
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
        assert_eq!(std::fs::read_dir(site.dir.path()).unwrap().count(), 0);
    });
}

fn uid(n: u32) -> rustix::fs::Uid {
    rustix::fs::Uid::from_raw(n)
}

fn gid(n: u32) -> rustix::fs::Gid {
    rustix::fs::Gid::from_raw(n)
}

#[test]
fn a_read_only_volume_refuses_writes() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::with(&core, small(), Options { read_only: true, ..options() }).await;
        let dir = site.dir.path().to_owned();
        site.aside(move |path| {
            let writing = OpenOptions::new().write(true).open(&path);
            assert_eq!(number(writing), is(Errno::ROFS));
            assert_eq!(std::fs::read(&path).unwrap().len(), 2 << 20);
            // A writable mount does not make it so.
            rustix::mount::mount_remount(&dir, MountFlags::empty(), "").unwrap();
            let file = open(&path);
            assert_eq!(number(file.write_at(&[1; 512], 0)), is(Errno::ROFS));
            assert_eq!(fallocate(&file, PUNCH, 0, 512), Err(Errno::ROFS));
            file.sync_all().unwrap();
        })
        .await;
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
    });
}

#[test]
fn holes_are_found() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::new(&core, MemOptions::new(512, 1 << 14)).await;
        site.aside(|path| {
            let file = open(&path);
            file.write_all_at(&[1; 4096], 1 << 20).unwrap();
            file.write_all_at(&[1; 4096], (1 << 20) + 4096).unwrap();
            let find =
                |from| (seek(&file, SeekFrom::Data(from)), seek(&file, SeekFrom::Hole(from)));
            let mib = 1 << 20;
            assert_eq!(find(0), (Ok(mib), Ok(0)));
            assert_eq!(find(mib - 7), (Ok(mib), Ok(mib - 7)));
            assert_eq!(find(mib + 7), (Ok(mib + 7), Ok(mib + 8192)));
            assert_eq!(find(mib + 8192), (Err(Errno::NXIO), Ok(mib + 8192)));
            assert_eq!(find(8 * mib), (Err(Errno::NXIO), Err(Errno::NXIO)));
            file.write_all_at(&[1; 1], 8 * mib - 1).unwrap();
            assert_eq!(find(8 * mib - 1), (Ok(8 * mib - 1), Ok(8 * mib)));
            fallocate(&file, PUNCH, 0, 8 * mib).unwrap();
            assert_eq!(find(0), (Err(Errno::NXIO), Ok(0)));
        })
        .await;
        assert_eq!(site.mem.space_used(), 0);
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
    });
}

#[test]
fn failures_are_reported_and_later_requests_work() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::new(&core, small()).await;
        let at = Lba(8);
        for (kind, error, told) in [
            (OpKind::Read, Error::Unreadable { at }, Errno::IO),
            (OpKind::Write, Error::Unwritable { at }, Errno::IO),
            (OpKind::Write, Error::NoSpace, Errno::NOSPC),
            (OpKind::Flush, Error::Gone, Errno::IO),
        ] {
            site.faults.add(Rule::new(Effect::Fail(error)).on(&[kind]).times(1));
            let result = site.aside(move |path| {
                let file = open(&path);
                match kind {
                    OpKind::Read => number(file.read_exact_at(&mut [0; 512], 4096)),
                    OpKind::Write => number(file.write_all_at(&[1; 512], 4096)),
                    _ => number(file.sync_all()),
                }
            });
            assert_eq!(result.await, is(told), "{error}");
            if error != Error::Gone {
                let fine = site.aside(|path| open(&path).write_all_at(&[2; 700], 3900));
                fine.await.unwrap();
            }
        }
        site.tell();
        assert_eq!(site.ended().await, ServeEnd::Stopped);
    });
}

/// No user is told that the medium has failed: what is in flight ends with the connection, and the
/// mount point is free.
#[test]
fn a_volume_out_of_reach_ends_it() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::new(&core, small()).await;
        site.away.set(true);
        site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(1));
        site.faults.add(Rule::new(Effect::Fail(Error::Gone)).on(&[OpKind::Read]));
        let stalled = site.aside(|path| number(open(&path).write_all_at(&[1; 512], 0)));
        let faults = site.faults.clone();
        let reads = async {
            while faults.hits() == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let reads = site.aside(|path| {
                let file = open(&path);
                (number(file.read_exact_at(&mut [0; 512], 0)), number(file.sync_all()))
            });
            reads.await
        };
        let release = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            faults.release();
        };
        let (written, read, ()) = tokio::join!(stalled, reads, release);
        // What was in flight and did not fail is answered, as it was done.
        assert_eq!((written, read), (None, (is(Errno::CONNABORTED), is(Errno::NOTCONN))));
        assert_eq!(site.ended().await, ServeEnd::Unreachable);
        assert_eq!(std::fs::read_dir(site.dir.path()).unwrap().count(), 0);
    });
}

#[test]
fn a_stop_under_load_answers_what_is_in_flight() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::new(&core, small()).await;
        let load = site.aside(|path| {
            let file = open(&path);
            let mut rng = Rng::new(3);
            let mut done = Vec::new();
            loop {
                let (at, len) = range(&mut rng, 1 << 20);
                let value = rng.u64() as u8;
                match file.write_all_at(&vec![value; len], at) {
                    Ok(()) => done.push((at, len, value)),
                    Err(e) => return (done, (at, len), e.raw_os_error(), number(file.sync_all())),
                }
            }
        });
        // Two MiB further on, where no other request is.
        site.faults.add(
            Rule::new(Effect::Stall)
                .on(&[OpKind::Write])
                .within(block::Blocks::new(Lba(3000), 1))
                .times(1),
        );
        let waits = site.aside(|path| open(&path).write_all_at(&[9; 512], 3000 * 512));
        let run = async {
            while site.faults.hits() == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            site.tell();
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!site.is_over(), "something is in flight");
            site.faults.release();
        };
        let ((done, (at, len), told, later), waited, ()) = tokio::join!(load, waits, run);
        waited.unwrap();
        assert_eq!((told, later), (is(Errno::CONNABORTED), is(Errno::NOTCONN)));
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
        assert!(!done.is_empty());
        let client = TestClient::new(&site.dev, core.buffer_pool());
        let mut model = vec![0; 2 << 20];
        for (at, len, value) in done {
            model[at as usize..at as usize + len].fill(value);
        }
        model[3000 * 512..3001 * 512].fill(9);
        // The one that was not answered is not promised.
        for n in 0..4096u32 {
            let bytes = u64::from(n) * 512..u64::from(n) * 512 + 512;
            if bytes.end > at && bytes.start < at + len as u64 {
                continue;
            }
            let found = client.read(n.into(), 1).await.unwrap().to_vec();
            assert!(found == model[bytes.start as usize..bytes.end as usize], "block {n}");
        }
    });
}

#[test]
fn an_unmount_ends_the_server() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::new(&core, small()).await;
        let dir = site.dir.path().to_owned();
        site.aside(move |path| {
            let file = open(&path);
            assert_eq!(unmount(&dir, UnmountFlags::empty()), Err(Errno::BUSY));
            drop(file);
            unmount(&dir, UnmountFlags::empty()).unwrap();
        })
        .await;
        assert_eq!(site.ended().await, ServeEnd::Unmounted);
        // Taken out of its place, it stays for those who use it.
        let mut site = Site::new(&core, small()).await;
        let dir = site.dir.path().to_owned();
        let file = site.aside(move |path| {
            let file = open(&path);
            unmount(&dir, UnmountFlags::DETACH).unwrap();
            file.write_all_at(&[5; 999], 77).unwrap();
            file
        });
        let file = file.await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!site.is_over() && file.as_raw_fd() > 0);
        drop(file);
        assert_eq!(site.ended().await, ServeEnd::Unmounted);
    });
}

/// A file system that no process serves.
fn dead(at: &Path, kind: &str, name: &str) {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let data = std::ffi::CString::new(data).unwrap();
    mount(name, at, kind, MountFlags::empty(), Some(&*data)).unwrap();
}

#[test]
fn only_a_stale_mount_is_replaced() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let dir = TempDir::new().unwrap();
        dead(dir.path(), "fuse.windrose", "web");
        assert!(is_stale(&core, dir.path(), "web").await);
        assert!(!is_stale(&core, dir.path(), "db").await);
        let mut site = Site::at(&core, dir, small(), options()).await.unwrap();
        assert!(site.replaced);
        // One that is served is not.
        let (at, volume) = (site.dir.path().to_owned(), site.volume.clone());
        let second = Server::mount(&core, &volume, &at, options()).await;
        assert!(matches!(second, Err(MountError::InUse { ref name, .. }) if name == "web"));
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
        assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0, "there was one below it");

        for (kind, name) in [("fuse.windrose", "db"), ("fuse.sshfs", "web"), ("fuse", "web")] {
            let dir = TempDir::new().unwrap();
            dead(dir.path(), kind, name);
            assert!(!is_stale(&core, dir.path(), "web").await);
            let at = dir.path().to_owned();
            let refused = Site::at(&core, dir, small(), options()).await;
            assert!(matches!(refused.err(), Some(MountError::Stale(_))), "{kind} {name}");
            unmount(&at, UnmountFlags::DETACH).unwrap();
            std::fs::remove_dir(&at).unwrap();
        }
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("mine"), "").unwrap();
        let refused = Site::at(&core, dir, small(), options()).await.err();
        assert!(matches!(refused, Some(MountError::NotEmpty(_))), "{refused:?}");
    });
}

/// Of two that come at once to what a killed process has left one is served, and stays.
#[test]
fn one_of_two_servers_gets_the_mount_point() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        for round in 0..40 {
            let dir = TempDir::new().unwrap();
            dead(dir.path(), "fuse.windrose", "web");
            let mem = Dev::new(Mem::new(small()));
            let volume = Volume::new(mem, Epoch::default());
            let stop = Rc::new(Notify::new());
            let come = || {
                let (core, volume, at) = (core.clone(), volume.clone(), dir.path().to_owned());
                let stop = Rc::clone(&stop);
                spawn_local(async move {
                    let server = Server::mount(&core, &volume, &at, options()).await?;
                    Ok::<_, MountError>(server.run(async move { stop.notified().await }).await)
                })
            };
            let both = [come(), come()];
            while !both.iter().any(JoinHandle::is_finished) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let path = dir.path().join("web");
            let shown = core.run_blocking(move || std::fs::metadata(path).map(|m| m.len())).await;
            assert_eq!(shown.unwrap().ok(), Some(2 << 20), "round {round}");
            stop.notify_one();
            let [a, b] = both.map(async |one| one.await.unwrap());
            let ended = (a.await, b.await);
            assert!(
                matches!(
                    ended,
                    (Ok(ServeEnd::Stopped), Err(MountError::InUse { .. }))
                        | (Err(MountError::InUse { .. }), Ok(ServeEnd::Stopped))
                ),
                "round {round}: {ended:?}"
            );
        }
    });
}

/// Another file system that was mounted over ours stays, and so does one in the place of ours.
#[test]
fn a_foreign_mount_is_not_unmounted() {
    if !mounts() {
        return;
    }
    on_core(async |core| {
        let mut site = Site::new(&core, small()).await;
        let dir = site.dir.path().to_owned();
        assert!(!site.replaced);
        let file = site.aside(|path| open(&path)).await;
        let at = dir.clone();
        site.aside(move |_| {
            unmount(&at, UnmountFlags::DETACH).unwrap();
            mount("none", &at, "tmpfs", MountFlags::empty(), None).unwrap();
            std::fs::write(at.join("mine"), "").unwrap();
        })
        .await;
        drop(file);
        site.stop().await.unwrap();
        assert!(dir.join("mine").exists());
        unmount(&dir, UnmountFlags::DETACH).unwrap();
    });
}
