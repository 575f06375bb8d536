//! How simulated disks behave.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use rt::Core;
use rt::buf::{BufsMut, MemoryClass, copy_in};
use rt::disk::{Disk, DiskError, DiskErrorKind, OpenOptions, OpenReason};
use rt::sim::{
    BadDuration, BadRange, DiskControl, DiskFaults, DiskSetup, FailingOps, Host, HostSetup,
    ScriptedFault, UnsyncedFate, World, WorldSetup, run,
};

const DISK: &str = "/dev/disk";
const SECTOR_LEN: usize = 4096;

fn run_scenario<F, Fut>(seeds: u64, setup: &DiskSetup, scenario: F)
where
    F: Fn(World, Host, DiskControl) -> Fut,
    Fut: Future<Output = ()>,
{
    for seed in 0..seeds {
        let outcome = run(WorldSetup::new(seed), |world| {
            let host = world.add_host("host", HostSetup::default());
            let disk = host.add_disk(DISK, setup.clone());
            let scene = scenario(world, host, disk);
            async move {
                scene.await;
                Ok(())
            }
        });
        outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// Runs a closure with the open disk; `None` if the host crashed before it ended.
async fn with_disk<F, Fut>(host: &Host, work: F) -> Option<Fut::Output>
where
    F: FnOnce(Core, Disk) -> Fut + 'static,
    Fut: Future + 'static,
{
    let work = host.run(move |core| async move {
        let disk = core.open_disk(Path::new(DISK), OpenOptions::new()).await.unwrap();
        work(core, disk).await
    });
    work.join().await
}

fn alloc(core: &Core, bytes: usize) -> BufsMut {
    core.buffer_pool().account().try_credit(bytes, MemoryClass::LocalIo).unwrap().alloc(bytes)
}

async fn read(core: &Core, disk: &Disk, at: u64) -> Result<u8, DiskError> {
    let bufs = disk.read(at, alloc(core, 512)).await?;
    assert!(bufs[0].iter().all(|&b| b == bufs[0][0]), "torn");
    Ok(bufs[0][0])
}

async fn write(core: &Core, disk: &Disk, at: u64, len: usize, byte: u8) -> Result<(), DiskError> {
    let credit = core.buffer_pool().account().try_credit(len, MemoryClass::LocalIo).unwrap();
    disk.write(at, copy_in(&credit, &vec![byte; len])).await
}

fn kind<T>(result: Result<T, DiskError>) -> DiskErrorKind {
    result.err().expect("must fail").kind
}

#[test]
fn an_open_disk_is_held_until_it_is_dropped_or_its_holder_dies() {
    run_scenario(10, &DiskSetup::device(1 << 20), |_, host, _| async move {
        for crash in [Host::power_cut, Host::kill] {
            let first = with_disk(&host, |core, disk| async move {
                let again = core.open_disk(Path::new(DISK), OpenOptions::new()).await;
                assert_eq!(again.unwrap_err().reason, OpenReason::Busy);
                drop(disk);
                core.open_disk(Path::new(DISK), OpenOptions::new()).await.unwrap()
            });
            let held = first.await.unwrap();
            crash(&host);
            let dead = held.sync().await;
            assert_eq!(kind(dead), DiskErrorKind::Gone, "a handle of an earlier life");
            let second = with_disk(&host, |_, disk| async move { disk }).await.unwrap();
            drop(held);
            let third = host.run(|core| async move {
                let how = OpenOptions::new();
                core.open_disk(Path::new(DISK), how).await.map(drop).map_err(|e| e.reason)
            });
            assert_eq!(third.join().await.unwrap(), Err(OpenReason::Busy), "whose lock is it?");
            drop(second);
        }
    });
}

#[test]
fn a_killed_process_loses_nothing_and_a_power_cut_what_was_not_synced() {
    let faults = DiskFaults { unsynced: UnsyncedFate::Lost, ..DiskFaults::default() };
    let setup = DiskSetup::device(1 << 20).faults(faults);
    run_scenario(10, &setup, |_, host, control| async move {
        let write = |byte| {
            with_disk(&host, move |core, disk| async move {
                write(&core, &disk, 0, SECTOR_LEN, byte).await.unwrap();
                disk
            })
        };
        let disk = write(1).await.unwrap();
        disk.sync().await.unwrap();
        drop(disk);
        let _disk = write(2).await.unwrap();
        host.kill();
        assert_eq!((control.read_visible(0, 1), control.read_durable(0, 1)), (vec![2], vec![1]));
        host.power_cut();
        assert_eq!(control.read_visible(0, 1), [1], "the cache needs power, not a process");
        let _disk = write(3).await.unwrap();
        host.power_cut();
        assert_eq!(control.read_visible(0, 1), [1]);
    });
}

#[test]
fn an_operation_without_its_caller_completes() {
    run_scenario(10, &DiskSetup::device(1 << 20), |_, host, control| async move {
        with_disk(&host, |core, disk| async move {
            let impatient = Duration::from_micros(100);
            let write = write(&core, &disk, 0, SECTOR_LEN, 7);
            assert!(tokio::time::timeout(impatient, write).await.is_err());
        })
        .await
        .unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(control.read_visible(0, 1), [7]);
        assert_eq!(control.in_flight(), 0);
    });
}

#[test]
fn concurrent_operations_end_in_any_order() {
    let orders = Rc::new(std::cell::RefCell::new(BTreeSet::new()));
    let seen = Rc::clone(&orders);
    run_scenario(40, &DiskSetup::device(1 << 20), move |_, host, _| {
        let seen = Rc::clone(&seen);
        async move {
            let order = with_disk(&host, |core, disk| async move {
                let ended = Rc::new(std::cell::RefCell::new(Vec::new()));
                let tasks: Vec<_> = (0..3u8)
                    .map(|i| {
                        let (core, disk, ended) = (core.clone(), disk.clone(), Rc::clone(&ended));
                        tokio::task::spawn_local(async move {
                            write(&core, &disk, u64::from(i) * 4096, SECTOR_LEN, i).await.unwrap();
                            ended.borrow_mut().push(i);
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await.unwrap();
                }
                ended.take()
            });
            let order = order.await.unwrap();
            seen.borrow_mut().insert(order);
        }
    });
    assert_eq!(orders.borrow().len(), 6, "{orders:?}");
}

#[test]
fn bad_sectors_fail_and_heal_as_configured() {
    run_scenario(5, &DiskSetup::device(1 << 20), |_, host, control| async move {
        let bad =
            |bytes, ops, until| control.add_bad_range(BadRange { bytes, ops, duration: until });
        bad(8192..8704, FailingOps::Reads, BadDuration::Rewritten);
        bad(16384..16385, FailingOps::Writes, BadDuration::Times(1));
        bad(32768..36864, FailingOps::Both, BadDuration::Forever);
        with_disk(&host, |core, disk| async move {
            assert_eq!(kind(read(&core, &disk, 8192).await), DiskErrorKind::Media);
            assert_eq!(read(&core, &disk, 8704).await, Ok(0), "the neighbour");
            write(&core, &disk, 8192, 512, 1).await.unwrap();
            assert_eq!(read(&core, &disk, 8192).await, Ok(1));
            assert_eq!(kind(write(&core, &disk, 16384, 512, 1).await), DiskErrorKind::Media);
            write(&core, &disk, 16384, 512, 2).await.unwrap();
            assert_eq!(kind(write(&core, &disk, 36352, 512, 2).await), DiskErrorKind::Media);
            assert_eq!(kind(read(&core, &disk, 36352).await), DiskErrorKind::Media);
        })
        .await
        .unwrap();
        control.clear_faults();
        with_disk(&host, |core, disk| async move {
            write(&core, &disk, 36352, 512, 2).await.unwrap();
        })
        .await
        .unwrap();
    });
}

#[test]
fn scripted_faults_hit_the_matching_operation() {
    run_scenario(5, &DiskSetup::device(1 << 20), |_, host, control| async move {
        control.script_fault(ScriptedFault::LostWrite);
        control.script_fault(ScriptedFault::MisdirectedWrite(8192));
        control.script_fault(ScriptedFault::MisdirectedRead(8192));
        control.script_fault(ScriptedFault::ReadError);
        control.script_fault(ScriptedFault::WriteError);
        control.script_fault(ScriptedFault::SyncError);
        let disk_control = control.clone();
        with_disk(&host, move |core, disk| async move {
            assert_eq!(read(&core, &disk, 0).await, Ok(0), "not the first in line");
            write(&core, &disk, 0, 512, 1).await.unwrap();
            write(&core, &disk, 0, 512, 2).await.unwrap();
            assert_eq!(
                (disk_control.read_visible(0, 1), disk_control.read_visible(8192, 1)),
                (vec![0], vec![2])
            );
            assert_eq!(read(&core, &disk, 0).await, Ok(2));
            assert_eq!(kind(read(&core, &disk, 0).await), DiskErrorKind::Media);
            assert_eq!(kind(write(&core, &disk, 0, 512, 3).await), DiskErrorKind::Media);
            assert_eq!(kind(disk.sync().await), DiskErrorKind::Media);
            assert_eq!(kind(disk.sync().await), DiskErrorKind::Gone, "given up for good");
        })
        .await
        .unwrap();
        assert_eq!(control.read_durable(8192, 1), [0]);
    });
}

#[test]
fn a_disk_that_stalls_and_one_that_is_pulled_out() {
    run_scenario(10, &DiskSetup::device(1 << 20), |_, host, control| async move {
        control.hold_completions();
        let task = host.run(|core| async move {
            let disk = core.open_disk(Path::new(DISK), OpenOptions::new()).await.unwrap();
            write(&core, &disk, 0, SECTOR_LEN, 1).await.unwrap();
            disk
        });
        tokio::time::sleep(Duration::from_secs(1000)).await;
        assert_eq!(control.in_flight(), 1);
        control.release_completions();
        let disk = task.join().await.unwrap();
        control.unplug();
        assert_eq!(kind(disk.sync().await), DiskErrorKind::Gone);
        control.plug();
        assert_eq!(kind(disk.sync().await), DiskErrorKind::Gone, "its cache is lost");
        drop(disk);
        with_disk(&host, |core, disk| async move {
            let byte = read(&core, &disk, 0).await.unwrap();
            assert!(byte <= 1);
            disk.sync().await.unwrap();
        })
        .await
        .unwrap();
    });
}

#[test]
fn files_allocate_free_and_exhaust_space() {
    run_scenario(20, &DiskSetup::device(1 << 20), |_, host, _| async move {
        host.update_setup(|s| s.space_bytes = Some(64 << 10));
        let used = host.clone();
        let work = host.run(|core| async move {
            let path = Path::new("/images/one");
            let missing = core.open_disk(path, OpenOptions::new()).await;
            assert_eq!(missing.unwrap_err().reason, OpenReason::NotFound);
            let how = OpenOptions::new().create(1 << 40);
            let file = core.open_disk(path, how).await.unwrap();
            assert_eq!(core.open_disk(path, how).await.unwrap_err().reason, OpenReason::Exists);
            assert_eq!(used.space_used(), 0);
            write(&core, &file, 1 << 30, 3 * SECTOR_LEN, 1).await.unwrap();
            assert_eq!(file.allocated().await, Ok(3 * 4096));
            file.punch((1 << 30) + 4096, 4096).await.unwrap();
            assert_eq!(
                (used.space_used(), read(&core, &file, (1 << 30) + 4096).await),
                (8192, Ok(0))
            );
            file.zero(1 << 30, 4096).await.unwrap();
            assert_eq!((used.space_used(), read(&core, &file, 1 << 30).await), (8192, Ok(0)));
            file.allocate(0, 8192).await.unwrap();
            assert_eq!(kind(file.allocate(0, 1 << 20).await), DiskErrorKind::NoSpace);
            assert_eq!(used.space_used(), 16384);
            assert_eq!(kind(write(&core, &file, 0, 64 << 10, 9).await), DiskErrorKind::NoSpace);
            assert_eq!(used.space_used(), 64 << 10);
            write(&core, &file, 0, 8192, 9).await.expect("allocated before");
            file.set_len(4096).await.unwrap();
            assert_eq!((file.info().size, used.space_used()), (4096, 4096));
            drop(file);
            core.rename(path, Path::new("/images/two")).await.unwrap();
            core.remove_file(Path::new("/images/two")).await.unwrap();
            assert!(core.remove_file(path).await.is_err());
            assert_eq!(used.space_used(), 0);
        });
        work.join().await.unwrap();
    });
}

/// Works on a new file of 4 KiB, then cuts the power; returns the file's size afterwards, if
/// `judge` accepts what is left.
fn size_after_power_cut<Fut: Future<Output = ()> + 'static>(
    seed: u64,
    work: impl FnOnce(Core, Disk) -> Fut + 'static,
    judge: fn(&DiskControl),
) -> u64 {
    let outcome = run(WorldSetup::new(seed), |world: World| async move {
        let host = world.add_host("host", HostSetup::default());
        let worked = host.run(|core| async move {
            let how = OpenOptions::new().create(4096);
            let file = core.open_disk(Path::new("/f"), how).await.unwrap();
            work(core, file).await;
        });
        worked.join().await.unwrap();
        host.power_cut();
        let disk = host.disk("/f").unwrap();
        judge(&disk);
        Err(disk.size().to_string())
    });
    outcome.result.unwrap_err().message.parse().unwrap()
}

#[test]
fn a_file_may_lose_the_length_it_was_not_synced_with() {
    let grow = |core: Core, file: Disk| async move {
        file.set_len(8192).await.unwrap();
        file.sync().await.unwrap();
        file.set_len(16384).await.unwrap();
        write(&core, &file, 12288, SECTOR_LEN, 1).await.unwrap();
    };
    let judge = |disk: &DiskControl| {
        assert!(disk.read_visible(12288, 1) == [0] || disk.size() == 16384);
    };
    let sizes: BTreeSet<_> = (0..40).map(|seed| size_after_power_cut(seed, grow, judge)).collect();
    assert_eq!(sizes, [8192, 16384].into());
}

#[test]
fn a_sync_that_ends_late_takes_no_length_back() {
    let grow = |_: Core, file: Disk| async move {
        let early = tokio::task::spawn_local({
            let file = file.clone();
            async move { file.sync().await }
        });
        file.set_len(8192).await.unwrap();
        file.sync().await.unwrap();
        early.await.unwrap().unwrap();
    };
    for seed in 0..40 {
        assert_eq!(size_after_power_cut(seed, grow, |_| {}), 8192, "seed {seed}");
    }
}
