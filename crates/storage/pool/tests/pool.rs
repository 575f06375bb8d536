//! Pools on simulated disks, one event after the other; the simulator tests combinations.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use block::testing::TestClient;
use block::{Dev, drop_permit};
use geometry::Redundancy;
use pool::{
    CorePool, CreatePool, NewDisk, NewPoolVolume, OpenPool, Pool, PoolDiskState, PoolError,
    PoolReport, PoolScrubReport,
};
use rt::Core;
use rt::disk::DiskErrorKind;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, Latency};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::common::{VOLUME, core_of, succeed};

mod rolled_back_disks;

const POOL: Uuid = Uuid::from_u128(7);
/// Another volume.
const OTHER: Uuid = Uuid::from_u128(9);
const COLUMNS: u16 = 4;
/// As many disks as an extent has columns, and one more, so that a detached disk can be rebuilt.
pub(crate) const FEW: usize = 4;
pub(crate) const MORE: usize = 5;
const DISK_BYTES: u64 = 200 << 20;

/// All levels, with checksums and without.
pub(crate) const POOL_LEVELS: [(Redundancy, bool); 6] = [
    (Redundancy::Parity, false),
    (Redundancy::Parity, true),
    (Redundancy::DoubleParity, true),
    (Redundancy::DoubleParity, false),
    (Redundancy::Copies(2), true),
    (Redundancy::Copies(1), false),
];
const BYTES: u64 = 24 << 20;

pub(crate) fn path(n: usize) -> PathBuf {
    format!("/dev/d{n}").into()
}

pub(crate) fn paths(disks: usize) -> Vec<PathBuf> {
    (0..disks).map(path).collect()
}

pub(crate) fn disk_of(bytes: u64) -> DiskSetup {
    DiskSetup::device(bytes).blocks(512, 4096)
}

pub(crate) fn joining(path: PathBuf) -> NewDisk {
    NewDisk { path, overwrite: Vec::new() }
}

pub(crate) fn opening(disks: usize) -> OpenPool {
    OpenPool {
        id: POOL,
        paths: paths(disks),
        missing_disks: Vec::new(),
        buffered: false,
        claim: None,
    }
}

/// Faults of a disk that answers with this delay.
fn stops(stall_for: Duration) -> DiskFaults {
    DiskFaults { stall: 1.0, stall_for, ..DiskFaults::default() }
}

/// A pool of disks, its core pool, and a volume under test.
pub(crate) struct Bench {
    pub(crate) host: Host,
    pub(crate) pool: Rc<Pool>,
    pub(crate) core_pool: Rc<CorePool>,
    pub(crate) client: TestClient,
    pub(crate) blocks: u64,
}

impl Bench {
    pub(crate) async fn new(host: Host, disks: usize) -> Self {
        Self::made(host, (Redundancy::Parity, false), disks).await
    }

    pub(crate) async fn checked(host: Host, disks: usize) -> Self {
        Self::made(host, (Redundancy::Parity, true), disks).await
    }

    pub(crate) async fn made(host: Host, how: (Redundancy, bool), disks: usize) -> Self {
        Self::sized(host, how, disks, DISK_BYTES).await
    }

    /// The same with disks of so many bytes.
    pub(crate) async fn sized(
        host: Host,
        (level, checksums): (Redundancy, bool),
        disks: usize,
        bytes: u64,
    ) -> Self {
        let core = core_of(&host).await;
        let paths = paths(disks);
        for path in &paths {
            host.add_disk(path, disk_of(bytes));
        }
        let what = CreatePool {
            id: POOL,
            name: "tank".into(),
            redundancy: level,
            columns: Some(COLUMNS),
            strip_bytes: 64 << 10,
            has_checksums: checksums,
            max_cores: 2,
            disks: paths.into_iter().map(joining).collect(),
            spares: Vec::new(),
            buffered: false,
            claim: None,
        };
        let pool = Pool::create(&core, &what).await.unwrap();
        pool.create_volume(&thick(VOLUME)).await.unwrap();
        let bench = Self::served(host, &core, pool).await;
        bench.write(0..bench.blocks, 1).await;
        bench
    }

    pub(crate) async fn served(host: Host, core: &Core, pool: Rc<Pool>) -> Self {
        let core_pool = CorePool::attach_on_owner_core(core, &pool, 0).await.unwrap();
        let dev: Dev = core_pool.open_volume(VOLUME).await.unwrap();
        let blocks = dev.info().blocks;
        Self { host, pool, core_pool, client: TestClient::new(&dev, core.buffer_pool()), blocks }
    }

    pub(crate) async fn write(&self, blocks: std::ops::Range<u64>, value: u8) {
        for at in blocks.step_by(16) {
            self.client.write(at, &[value; 16 * 4096], false).await.unwrap();
        }
    }

    pub(crate) async fn holds(&self, blocks: std::ops::Range<u64>, value: u8) {
        for at in blocks.step_by(16) {
            let data = self.client.read(at, 16).await.unwrap().to_vec();
            assert!(data == [value; 16 * 4096], "block {at}");
        }
    }

    pub(crate) fn report(&self) -> PoolReport {
        self.pool.report()
    }

    pub(crate) fn state(&self, n: usize) -> PoolDiskState {
        self.report().disks[n].state
    }

    pub(crate) fn disk(&self, n: usize) -> rt::sim::DiskControl {
        self.host.disk(Path::new(&path(n))).unwrap()
    }

    pub(crate) async fn look(&self) {
        self.pool.reattach_found(paths(MORE)).await;
    }

    pub(crate) async fn whole(&self) {
        while self.report().stale_extents > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    pub(crate) async fn scrub(&self) -> PoolScrubReport {
        self.pool.start_scrub().unwrap();
        while self.report().scrub.unwrap().is_running {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.report().scrub.unwrap()
    }

    pub(crate) async fn close(self) {
        drop(self.client);
        self.core_pool.close().await.unwrap();
        self.pool.close().await.unwrap();
    }
}

pub(crate) fn run_scenario<Fut: Future<Output = ()> + 'static>(
    scene: impl FnOnce(Host) -> Fut + 'static,
) {
    let setup = HostSetup { memory_bytes: 48 << 20, ..HostSetup::default() };
    succeed(1, setup, |_, host| scene(host));
}

#[test]
fn a_returning_disk_is_reattached_while_the_pool_is_open() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        bench.disk(1).unplug();
        bench.write(0..256, 2).await;
        assert_eq!(bench.state(1), PoolDiskState::Detached);
        bench.look().await;
        bench.write(256..512, 3).await;
        bench.disk(1).plug();
        bench.look().await;
        assert_eq!(bench.state(1), PoolDiskState::Active);
        assert!(bench.report().stale_extents > 0);
        bench.whole().await;
        // Now its data are needed.
        bench.disk(0).unplug();
        bench.holds(0..256, 2).await;
        bench.holds(256..512, 3).await;
        bench.holds(512..bench.blocks, 1).await;
        bench.close().await;
    });
}

/// Two columns of each extent move at once, and the member with the most free space is the same for
/// both.
#[test]
fn two_disks_fail_at_once() {
    run_scenario(|host| async move {
        let bench = Bench::made(host, (Redundancy::DoubleParity, false), FEW).await;
        for (n, bytes) in [(FEW, DISK_BYTES), (FEW + 1, 3 * DISK_BYTES)] {
            bench.host.add_disk(path(n), disk_of(bytes));
            bench.pool.add(&joining(path(n)), false).await.unwrap();
        }
        for n in [0, 1] {
            bench.disk(n).unplug();
        }
        bench.write(0..64, 2).await;
        let whole = tokio::time::timeout(Duration::from_secs(300), bench.whole()).await;
        assert!(whole.is_ok(), "{:?}", bench.report());
        for n in [2, 3] {
            bench.disk(n).unplug();
        }
        bench.holds(0..64, 2).await;
        bench.holds(64..bench.blocks, 1).await;
        bench.close().await;
    });
}

/// A disk returns while its columns are rebuilt elsewhere, at any moment; then power fails, and no
/// stale data may be read.
#[test]
fn a_disk_returns_during_a_rebuild() {
    for moment in 0..12 {
        run_scenario(move |host| async move {
            let bench = Bench::new(host, MORE).await;
            bench.disk(1).unplug();
            bench.write(0..64, 2).await;
            bench.look().await;
            tokio::time::sleep(Duration::from_millis(moment * 80)).await;
            bench.disk(1).plug();
            let pool = Rc::clone(&bench.pool);
            let looking =
                tokio::task::spawn_local(async move { pool.reattach_found(paths(MORE)).await });
            while bench.state(1) == PoolDiskState::Detached && !looking.is_finished() {
                bench.write(1024..1280, 3).await;
            }
            bench.write(1024..1280, 4).await;
            let host = bench.host.clone();
            let permit = drop_permit::permit_drops();
            drop(bench);
            looking.abort();
            let _ = looking.await;
            host.power_cut();
            drop(permit);
            let core = core_of(&host).await;
            let what = opening(MORE);
            let pool = Pool::open(&core, &what).await.unwrap();
            let bench = Bench::served(host, &core, pool).await;
            bench.whole().await;
            assert_eq!(bench.scrub().await.unrecoverable_rows, 0, "moment {moment}");
            bench.holds(64..1024, 1).await;
            bench.holds(1280..bench.blocks, 1).await;
            bench.close().await;
        });
    }
}

/// A disk returns while regions are written for the first time since it left. Its checksums make
/// its admission slow; what it misses meanwhile is not read from it.
#[test]
fn a_learner_is_not_read_before_it_is_resynced() {
    // Distance in blocks from one region to the next.
    const APART: usize = 512;
    for moment in 0..20 {
        run_scenario(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            // No write is in progress any more.
            tokio::time::sleep(Duration::from_secs(60)).await;
            bench.disk(1).unplug();
            bench.write(0..16, 2).await;
            bench.look().await;
            bench.disk(1).plug();
            let (min, max) = (Duration::from_millis(40), Duration::from_millis(60));
            let latency = Latency { min, max, outlier_every: 0 };
            bench.disk(1).set_faults(DiskFaults { latency, ..DiskFaults::default() });
            let pool = Rc::clone(&bench.pool);
            let looking =
                tokio::task::spawn_local(async move { pool.reattach_found(paths(MORE)).await });
            tokio::time::sleep(Duration::from_millis(400 * moment)).await;
            let places = || (512..bench.blocks).step_by(APART).map(|at| at..at + 16);
            for blocks in places() {
                bench.write(blocks, 3).await;
            }
            looking.await.unwrap();
            assert_eq!(bench.state(1), PoolDiskState::Active);
            bench.disk(1).set_faults(DiskFaults::default());
            bench.whole().await;
            bench.disk(0).unplug();
            bench.holds(0..16, 2).await;
            for blocks in places() {
                bench.holds(blocks, 3).await;
            }
            bench.close().await;
        });
    }
}

/// The disk loses writes, misdirects them, and returns corrupt data. With one parity only checksums
/// tell which column is wrong.
#[test]
fn silent_corruption_is_detected() {
    for seed in 0..8 {
        let setup = HostSetup { memory_bytes: 48 << 20, ..HostSetup::default() };
        succeed(seed, setup, |_, host| async move {
            let bench = Bench::checked(host, FEW).await;
            let lies = DiskFaults {
                bit_rot: 0.05,
                lost_write: 0.1,
                misdirected_write: 0.05,
                misdirected_read: 0.05,
                ..DiskFaults::default()
            };
            bench.disk(1).set_faults(lies);
            for value in 2..5 {
                bench.write(256..768, value).await;
                bench.holds(256..768, value).await;
                bench.holds(0..256, 1).await;
            }
            bench.disk(1).set_faults(DiskFaults::default());
            assert_eq!(bench.scrub().await.unrecoverable_rows, 0);
            assert!(bench.report().disks[1].checksum_errors > 0);
            assert_eq!(bench.scrub().await.repaired_rows, 0, "all is right now");
            // Now its data are needed.
            bench.disk(0).unplug();
            bench.holds(256..768, 4).await;
            bench.holds(0..256, 1).await;
            bench.holds(768..bench.blocks, 1).await;
            bench.close().await;
        });
    }
}

/// Another core pool of the pool, with the other volume.
async fn at_ring_1(core: &Core, bench: &Bench) -> (Rc<CorePool>, TestClient) {
    let core_pool = CorePool::attach_on_owner_core(core, &bench.pool, 1).await.unwrap();
    let dev = core_pool.open_volume(OTHER).await.unwrap();
    let client = TestClient::new(&dev, core.buffer_pool());
    (core_pool, client)
}

async fn write_both(bench: &Bench, client: &TestClient, value: u8) {
    let data = [value; 16 * 4096];
    for at in (0..512).step_by(16) {
        let both = [&bench.client, client].map(|c| c.write(at, &data, false));
        futures_util::future::try_join_all(both).await.unwrap();
    }
}

/// Each core has its own dirty lists, and opening goes through all of them.
#[test]
fn two_cores_keep_checksums_of_the_same_disks() {
    run_scenario(move |host| async move {
        let core = core_of(&host).await;
        let mut bench = Bench::checked(host, FEW).await;
        bench.pool.create_volume(&thick(OTHER)).await.unwrap();
        let (core_pool, mut client) = at_ring_1(&core, &bench).await;
        write_both(&bench, &client, 2).await;
        bench.disk(1).unplug();
        write_both(&bench, &client, 3).await;
        bench.look().await;
        bench.disk(1).plug();
        bench.look().await;
        assert_eq!(bench.state(1), PoolDiskState::Active);
        bench.whole().await;
        // Another one returns corrupt data to any reader.
        let lies = DiskFaults { bit_rot: 0.5, ..DiskFaults::default() };
        bench.disk(2).set_faults(lies);
        bench.holds(0..512, 3).await;
        std::mem::swap(&mut bench.client, &mut client);
        bench.holds(0..512, 3).await;
        bench.disk(2).set_faults(DiskFaults::default());
        let scrub = bench.scrub().await;
        assert_eq!(scrub.unrecoverable_rows, 0);
        let wrong: Vec<u64> = bench.report().disks.iter().map(|d| d.checksum_errors).collect();
        assert!(wrong[2] > 0 && wrong.iter().sum::<u64>() == wrong[2], "{wrong:?}");
        let host = bench.host.clone();
        drop(client);
        core_pool.close().await.unwrap();
        drop(core_pool);
        bench.close().await;
        let what = opening(FEW);
        let pool = Pool::open(&core, &what).await.unwrap();
        let bench = Bench::served(host, &core, pool).await;
        let (core_pool, client) = at_ring_1(&core, &bench).await;
        bench.holds(0..512, 3).await;
        let scrub = bench.scrub().await;
        assert_eq!((scrub.repaired_rows, scrub.unrecoverable_rows), (0, 0));
        let still: Vec<u64> = bench.report().disks.iter().map(|d| d.checksum_errors).collect();
        assert_eq!(still[2], wrong[2], "counted over openings, and none since: {still:?}");
        drop(client);
        core_pool.close().await.unwrap();
        bench.close().await;
    });
}

#[test]
fn volumes_are_created_concurrently() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        let ids: Vec<Uuid> = (10..14).map(Uuid::from_u128).collect();
        let all = ids.iter().map(|id| async { bench.pool.create_volume(&thick(*id)).await });
        futures_util::future::try_join_all(all).await.unwrap();
        for id in ids {
            assert_eq!(bench.core_pool.open_volume(id).await.unwrap().info().blocks, BYTES / 4096);
        }
        bench.close().await;
    });
}

/// Its disk is unresponsive while the checksums of a freed extent are to be written: it is
/// detached, and nothing waits for ever.
#[test]
fn a_stalled_disk_does_not_delay_closing() {
    run_scenario(|host| async move {
        let bench = Bench::checked(host, FEW).await;
        bench.write(0..256, 2).await;
        let stopped = bench.disk(1);
        stopped.set_faults(stops(Duration::from_secs(3600)));
        drop(bench.client);
        tokio::time::timeout(Duration::from_secs(120), bench.core_pool.close())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(bench.pool.report().disks[1].state, PoolDiskState::Detached);
    });
}

/// At any moment: the other disks are enough.
#[test]
fn a_stalled_disk_does_not_prevent_opening() {
    for n in 0..30 {
        let moment = Duration::from_millis(n * 20);
        run_scenario(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            bench.write(0..256, 2).await;
            let (host, stopped) = (bench.host.clone(), bench.disk(1));
            bench.close().await;
            let core = core_of(&host).await;
            let begun = tokio::time::Instant::now();
            tokio::task::spawn_local(async move {
                tokio::time::sleep(moment).await;
                stopped.set_faults(stops(Duration::from_secs(3600)));
            });
            let what = opening(FEW);
            let pool = Pool::open(&core, &what).await.unwrap();
            let bench = Bench::served(host, &core, pool).await;
            bench.holds(0..256, 2).await;
            bench.write(0..256, 3).await;
            bench.holds(0..256, 3).await;
            assert!(
                begun.elapsed() < Duration::from_secs(400),
                "{moment:?}: {:?}",
                begun.elapsed()
            );
            assert_eq!(bench.state(1), PoolDiskState::Detached);
        });
    }
}

/// Fails if this takes longer than an unresponsive disk is waited for.
async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(100), Box::pin(what)).await.expect("it is waited for")
}

pub(crate) fn thick(id: Uuid) -> NewPoolVolume {
    NewPoolVolume { id, bytes: BYTES, block_size: 4096, is_thick: true }
}

/// Two cores use a pool. A disk went missing, data were written, and now it is present again and is
/// being reattached in the task.
async fn one_comes_back(host: Host) -> (Bench, (Rc<CorePool>, TestClient), JoinHandle<()>) {
    let core = core_of(&host).await;
    let bench = Bench::checked(host, MORE).await;
    bench.pool.create_volume(&thick(OTHER)).await.unwrap();
    let (core_pool, client) = at_ring_1(&core, &bench).await;
    write_both(&bench, &client, 2).await;
    bench.disk(1).unplug();
    write_both(&bench, &client, 3).await;
    bench.look().await;
    bench.disk(1).plug();
    let pool = Rc::clone(&bench.pool);
    let coming = tokio::task::spawn_local(async move {
        pool.reattach_found(paths(MORE)).await;
    });
    (bench, (core_pool, client), coming)
}

/// How many milliseconds a reattachment takes.
fn comes_in_after() -> u64 {
    let took = Rc::new(Cell::new(Duration::ZERO));
    let result = Rc::clone(&took);
    run_scenario(move |host| async move {
        let (bench, (core_pool, client), coming) = one_comes_back(host).await;
        let begun = tokio::time::Instant::now();
        let whole = tokio::task::spawn_local(async move {
            coming.await.unwrap();
            begun.elapsed()
        });
        for value in 4..8 {
            in_time(write_both(&bench, &client, value)).await;
        }
        result.set(in_time(whole).await.unwrap());
        drop(client);
        core_pool.close().await.unwrap();
        bench.close().await;
    });
    u64::try_from(took.get().as_millis()).unwrap()
}

/// At any moment: it stays detached, or is detached again, and has all that was written meanwhile
/// once it is reattached, for every core.
#[test]
fn a_disk_that_stalls_while_reattached_delays_nothing() {
    // While its checksums are read, and as cores begin to use it.
    let comes_in = comes_in_after();
    let moments = (0..4).map(|n| n * comes_in / 5).chain((comes_in - 200..comes_in).step_by(16));
    let held = Rc::new(Cell::new(0));
    for moment in moments.map(Duration::from_millis) {
        let held = Rc::clone(&held);
        run_scenario(move |host| async move {
            let core = core_of(&host).await;
            let (bench, (core_pool, client), coming) = one_comes_back(host).await;
            let (pool, stopped) = (Rc::clone(&bench.pool), bench.disk(1));
            let meanwhile = tokio::task::spawn_local(async move {
                tokio::time::sleep(moment).await;
                stopped.set_faults(stops(Duration::from_secs(1000)));
                // A version is written.
                let thin = NewPoolVolume { is_thick: false, ..thick(Uuid::from_u128(10)) };
                let begun = tokio::time::Instant::now();
                let made = pool.create_volume(&thin);
                tokio::time::timeout(Duration::from_secs(30), made)
                    .await
                    .expect("it is waited for")
                    .unwrap();
                // The commit has waited for it.
                held.set(held.get() + u32::from(begun.elapsed() > Duration::from_secs(5)));
                tokio::time::sleep(Duration::from_secs(1000)).await;
                stopped.set_faults(DiskFaults::default());
            });
            for value in 4..8 {
                in_time(write_both(&bench, &client, value)).await;
            }
            in_time(bench.pool.create_volume(&thick(Uuid::from_u128(11)))).await.unwrap();
            in_time(coming).await.unwrap();
            meanwhile.await.unwrap();
            tokio::time::sleep(Duration::from_secs(1000)).await;
            let host = bench.host.clone();
            drop(client);
            core_pool.close().await.unwrap();
            drop(core_pool);
            bench.close().await;
            let pool = Pool::open(&core, &opening(MORE)).await.unwrap();
            let mut bench = Bench::served(host, &core, pool).await;
            let (core_pool, mut client) = at_ring_1(&core, &bench).await;
            while bench.state(1) != PoolDiskState::Active {
                bench.look().await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            bench.whole().await;
            for _ in 0..2 {
                bench.holds(0..512, 7).await;
                std::mem::swap(&mut bench.client, &mut client);
            }
            let scrub = bench.scrub().await;
            assert_eq!((scrub.repaired_rows, scrub.unrecoverable_rows), (0, 0));
            drop(client);
            core_pool.close().await.unwrap();
            bench.close().await;
        });
    }
    assert!(held.get() > 0, "no moment was one at which it was let in");
}

/// A disk fails during its admission, for a core or as its vote is committed, and other disks wait
/// to be admitted after it.
#[test]
fn a_disk_that_fails_while_reattached_delays_nothing() {
    let comes_in = comes_in_after();
    for n in (comes_in - 180..comes_in).step_by(12) {
        run_scenario(move |host| async move {
            let (bench, (core_pool, client), coming) = one_comes_back(host).await;
            let fails = bench.disk(1);
            tokio::task::spawn_local(async move {
                tokio::time::sleep(Duration::from_millis(n)).await;
                fails.set_faults(DiskFaults { write_error: 1.0, ..DiskFaults::default() });
            });
            let adding = [MORE, MORE + 1].map(|n| {
                let pool = Rc::clone(&bench.pool);
                bench.host.add_disk(path(n), disk_of(DISK_BYTES));
                tokio::task::spawn_local(async move {
                    tokio::time::sleep(Duration::from_millis(comes_in - 250)).await;
                    pool.add(&joining(path(n)), false).await
                })
            });
            tokio::time::sleep(Duration::from_millis(comes_in - 350)).await;
            for value in 4..8 {
                in_time(write_both(&bench, &client, value)).await;
            }
            in_time(coming).await.unwrap();
            for adding in adding {
                in_time(adding).await.unwrap().unwrap();
            }
            for _ in 0..2 {
                write_both(&bench, &client, 8).await;
                bench.holds(0..512, 8).await;
            }
            drop(client);
            in_time(core_pool.close()).await.unwrap();
            bench.close().await;
        });
    }
}

/// The same for a new disk.
#[test]
fn a_disk_that_stalls_while_added_delays_nothing() {
    let came = Rc::new(Cell::new(0));
    for n in 0..30 {
        let came = Rc::clone(&came);
        run_scenario(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            let coming = adds_one_that_stops(&bench, Duration::from_millis(n * 20));
            in_time(bench.pool.create_volume(&thick(OTHER))).await.unwrap();
            in_time(bench.write(0..256, 3)).await;
            bench.holds(0..256, 3).await;
            let added = in_time(coming).await.unwrap();
            let disks = bench.report().disks.len();
            match added {
                // It may be detached again.
                Ok(()) => assert_eq!(disks, MORE),
                Err(why) => {
                    let why = why.to_string();
                    assert!(why.contains("not respond") || why.contains("gone"), "{why}");
                    assert_eq!(disks, FEW);
                }
            }
            came.set(came.get() + u32::from(disks == MORE));
            bench.close().await;
        });
    }
    assert!((1..30).contains(&came.get()), "{} of 30 have come in", came.get());
}

/// The same when another disk has failed and its columns cannot be rebuilt: that is when disks are
/// added.
#[test]
fn a_disk_that_stalls_while_added_to_a_degraded_pool_delays_nothing() {
    for n in 0..30 {
        run_scenario(move |host| async move {
            let bench = Bench::made(host, (Redundancy::Copies(1), false), FEW).await;
            bench.disk(1).unplug();
            assert!(bench.client.write(0, &[2; 64 * 4096], false).await.is_err());
            let coming = adds_one_that_stops(&bench, Duration::from_millis(n * 20));
            let thin = NewPoolVolume { is_thick: false, ..thick(OTHER) };
            for _ in 0..40 {
                tokio::time::sleep(Duration::from_millis(30)).await;
                in_time(bench.pool.create_volume(&thin)).await.unwrap();
                in_time(bench.pool.delete_volume(OTHER)).await.unwrap();
            }
            let _ = in_time(coming).await.unwrap();
        });
    }
}

/// Adds a disk that becomes unresponsive after this time.
fn adds_one_that_stops(bench: &Bench, moment: Duration) -> JoinHandle<Result<(), PoolError>> {
    let stopped = bench.host.add_disk(path(FEW), disk_of(DISK_BYTES));
    let pool = Rc::clone(&bench.pool);
    tokio::task::spawn_local(async move {
        tokio::task::spawn_local(async move {
            tokio::time::sleep(moment).await;
            stopped.set_faults(stops(Duration::from_secs(3600)));
        });
        pool.add(&joining(path(FEW)), false).await
    })
}

/// A disk fails while the pool is opened, and then power fails: versions follow each other while
/// labels are written, and the other disks open the pool whatever part of that they have.
#[test]
fn power_fails_during_an_opening_with_a_failing_disk() {
    // From the first write on; reading the metadata comes before that.
    for n in 16..36 {
        run_scenario(move |host| async move {
            let bench = Bench::new(host, FEW).await;
            let host = bench.host.clone();
            bench.close().await;
            for cut in 0..10 {
                let fails = (n, DiskErrorKind::Media);
                let fails = DiskFaults { fail_after: Some(fails), ..DiskFaults::default() };
                host.disk(path(0)).unwrap().set_faults(fails);
                let moment = async {
                    while host.disk(path(0)).unwrap().faults().fail_after.is_some() {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    tokio::time::sleep(Duration::from_millis(cut * 10)).await;
                };
                let open = host.run(|core| async move {
                    let pool = Pool::open(&core, &opening(FEW)).await.unwrap();
                    std::future::pending::<()>().await;
                    drop(pool);
                });
                in_time(moment).await;
                host.power_cut();
                drop(open);
                host.disk(path(0)).unwrap().set_faults(DiskFaults::default());
                let core = core_of(&host).await;
                let pool = Pool::open(&core, &opening(FEW)).await.unwrap();
                let bench = Bench::served(host.clone(), &core, pool).await;
                let is_in = |n: usize| bench.state(n) == PoolDiskState::Active;
                assert!((1..FEW).all(is_in), "{:?}", bench.report());
                while !is_in(0) {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                bench.whole().await;
                bench.close().await;
            }
        });
    }
}

/// A controller, a shelf or the host stalls: the disks answer again, and nothing has changed.
#[test]
fn a_stall_of_all_disks_detaches_none() {
    // Also a stall that ends while the other disks are probed.
    for (n, how_long) in (0..20).flat_map(|n| [100, 12].map(|secs| (n, Duration::from_secs(secs))))
    {
        run_scenario(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            bench.write(0..256, 2).await;
            let (host, disks) = (bench.host.clone(), [0, 1, 2, 3].map(|n| bench.disk(n)));
            bench.close().await;
            let core = core_of(&host).await;
            tokio::task::spawn_local(async move {
                tokio::time::sleep(Duration::from_millis(n * 30)).await;
                // During the stall no disk answers any request.
                disks.iter().for_each(|disk| disk.set_faults(stops(how_long)));
                tokio::time::sleep(how_long).await;
                disks.iter().for_each(|disk| disk.set_faults(DiskFaults::default()));
            });
            let what = opening(FEW);
            let mut tries = 0;
            let pool = loop {
                match Pool::open(&core, &what).await {
                    Ok(pool) => break pool,
                    // They have not shown their labels, and stay in use until they answer.
                    Err(why) => assert!(tries < 20, "{why}"),
                }
                tries += 1;
                tokio::time::sleep(Duration::from_secs(60)).await;
            };
            let bench = Bench::served(host, &core, pool).await;
            for _ in 0..10 {
                bench.look().await;
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
            let report = bench.report();
            assert!((0..FEW).all(|n| bench.state(n) == PoolDiskState::Active), "{report:?}");
            bench.whole().await;
            bench.holds(0..256, 2).await;
            bench.holds(256..bench.blocks, 1).await;
            let scrub = bench.scrub().await;
            assert_eq!((scrub.repaired_rows, scrub.unrecoverable_rows), (0, 0));
            bench.close().await;
        });
    }
}

/// The same while a core attaches.
#[test]
fn a_stall_of_all_disks_while_a_core_attaches_detaches_none() {
    run_scenario(|host| async move {
        let bench = Bench::checked(host, FEW).await;
        bench.write(0..256, 2).await;
        let (host, disks) = (bench.host.clone(), [0, 1, 2, 3].map(|n| bench.disk(n)));
        bench.close().await;
        let core = core_of(&host).await;
        let pool = Pool::open(&core, &opening(FEW)).await.unwrap();
        let late = stops(Duration::from_secs(400));
        disks.iter().for_each(|disk| disk.set_faults(late.clone()));
        tokio::task::spawn_local(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            disks.iter().for_each(|disk| disk.set_faults(DiskFaults::default()));
        });
        let bench = Bench::served(host, &core, pool).await;
        let report = bench.report();
        assert!((0..FEW).all(|n| bench.state(n) == PoolDiskState::Active), "{report:?}");
        bench.holds(0..256, 2).await;
        bench.close().await;
    });
}

#[test]
fn an_unidentifiable_disk_delays_nothing() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        bench.disk(1).unplug();
        bench.write(0..256, 2).await;
        bench.look().await;
        bench.disk(1).plug();
        bench.disk(1).set_faults(stops(Duration::from_secs(3600)));
        tokio::time::timeout(Duration::from_secs(30), bench.look()).await.unwrap();
        assert_eq!(bench.state(1), PoolDiskState::Detached);
        let core = core_of(&bench.host).await;
        let disk = path(1);
        let seen = pool::inspect(&core, &disk, false);
        let seen = tokio::time::timeout(Duration::from_secs(90), seen).await.unwrap();
        assert!(seen.unwrap_err().to_string().contains("does not respond"));
        bench.close().await;
    });
}

/// Checksums match wherever a column has moved, and whatever was there before.
#[test]
fn checksums_match_after_reopening_and_moving() {
    run_scenario(|host| async move {
        let bench = Bench::checked(host, MORE).await;
        let gone = NewPoolVolume { id: OTHER, bytes: 8 * BYTES, block_size: 4096, is_thick: true };
        bench.pool.create_volume(&gone).await.unwrap();
        let dev = bench.core_pool.open_volume(OTHER).await.unwrap();
        let client = TestClient::new(&dev, core_of(&bench.host).await.buffer_pool());
        for at in (0..dev.info().blocks).step_by(256) {
            client.write(at, &vec![7; 256 * 4096], false).await.unwrap();
        }
        drop((client, dev));
        bench.pool.delete_volume(OTHER).await.unwrap();
        bench.pool.remove("2").await.unwrap();
        while bench.report().disks.len() == MORE {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        bench.disk(1).unplug();
        bench.write(0..256, 2).await;
        bench.look().await;
        bench.disk(1).plug();
        bench.look().await;
        assert_eq!(bench.state(1), PoolDiskState::Active);
        bench.whole().await;
        let host = bench.host.clone();
        bench.close().await;
        let core = core_of(&host).await;
        let what = opening(MORE);
        let pool = Pool::open(&core, &what).await.unwrap();
        let bench = Bench::served(host, &core, pool).await;
        bench.holds(0..256, 2).await;
        bench.holds(256..bench.blocks, 1).await;
        let scrub = bench.scrub().await;
        assert_eq!((scrub.repaired_rows, scrub.unrecoverable_rows), (0, 0));
        assert!(bench.report().disks.iter().all(|disk| disk.checksum_errors == 0));
        bench.close().await;
    });
}

/// Whole stripes of it lie elsewhere, and their map is saved when it is deleted: in physical
/// extents that others get, with their own checksums.
#[test]
fn checksums_match_in_the_space_of_a_deleted_volume() {
    run_scenario(|host| async move {
        let core = core_of(&host).await;
        let bench = Bench::checked(host, FEW).await;
        for n in 20..24 {
            let volume = thick(Uuid::from_u128(n));
            bench.pool.create_volume(&volume).await.unwrap();
            let dev = bench.core_pool.open_volume(volume.id).await.unwrap();
            let client = TestClient::new(&dev, core.buffer_pool());
            for at in (0..dev.info().blocks).step_by(192) {
                let data = client.read(at, 16).await.unwrap().to_vec();
                assert!(data == [0; 16 * 4096], "volume {n}, block {at}");
            }
            for at in (0..192 * 8).step_by(192) {
                client.write(at, &vec![7; 192 * 4096], false).await.unwrap();
            }
            drop((client, dev));
            bench.pool.delete_volume(volume.id).await.unwrap();
        }
        assert!(bench.report().disks.iter().all(|disk| disk.checksum_errors == 0));
        bench.close().await;
    });
}

#[test]
fn a_failed_disk_that_stays_connected_stays_detached() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        bench.disk(1).set_faults(DiskFaults { write_error: 1.0, ..DiskFaults::default() });
        bench.write(0..256, 2).await;
        assert_eq!(bench.state(1), PoolDiskState::Detached);
        bench.disk(1).set_faults(DiskFaults::default());
        for _ in 0..3 {
            bench.look().await;
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        assert_eq!(bench.state(1), PoolDiskState::Detached);
        let host = bench.host.clone();
        bench.close().await;
        // The next opening reattaches it.
        let core = core_of(&host).await;
        let what = opening(FEW);
        let pool = Pool::open(&core, &what).await.unwrap();
        let bench = Bench::served(host, &core, pool).await;
        while bench.state(1) != PoolDiskState::Active {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        bench.whole().await;
        bench.holds(0..256, 2).await;
        bench.close().await;
    });
}

fn creating(disks: usize) -> CreatePool {
    CreatePool {
        id: POOL,
        name: "tank".into(),
        redundancy: Redundancy::Parity,
        columns: Some(COLUMNS),
        strip_bytes: 64 << 10,
        has_checksums: false,
        max_cores: 2,
        disks: paths(disks).into_iter().map(joining).collect(),
        spares: Vec::new(),
        buffered: false,
        claim: None,
    }
}

/// At any moment: the error names it. A disk that stops after the pool was made is detached from
/// it.
#[test]
fn pool_creation_does_not_wait_for_an_unresponsive_disk() {
    let (mut refused, mut made) = (0, 0);
    for n in 0..12 {
        let outcome = Rc::new(Cell::new(false));
        let result = Rc::clone(&outcome);
        run_scenario(move |host| async move {
            let core = core_of(&host).await;
            for path in paths(FEW) {
                host.add_disk(path, disk_of(DISK_BYTES));
            }
            let stopped = host.disk(path(1)).unwrap();
            tokio::task::spawn_local(async move {
                tokio::time::sleep(Duration::from_millis(n * n * 20)).await;
                stopped.set_faults(stops(Duration::from_secs(36_000)));
            });
            let what = creating(FEW);
            let create = Box::pin(Pool::create(&core, &what));
            let create = tokio::time::timeout(Duration::from_secs(400), create).await;
            match create.expect("it is waited for") {
                Ok(_) => result.set(true),
                Err(why) => {
                    let why = why.to_string();
                    assert!(why.contains("/dev/d1") || why.contains("not respond"), "{why}");
                }
            }
        });
        if outcome.get() { made += 1 } else { refused += 1 }
    }
    assert!(refused > 0, "{refused} of {} were refused", refused + made);
}

#[test]
fn a_disk_with_data_joins_a_pool_only_if_named_for_overwriting() {
    run_scenario(|host| async move {
        let core = core_of(&host).await;
        for path in paths(MORE) {
            host.add_disk(path, disk_of(DISK_BYTES));
        }
        let vmfs = host.disk(path(2)).unwrap();
        vmfs.write_durable(1 << 20, b"\x0d\xd0\x01\xc0");
        let refused = Pool::create(&core, &creating(FEW)).await.err().unwrap().to_string();
        assert_eq!(refused, "/dev/d2: holds a VMFS volume; --overwrite /dev/d2 overwrites it");
        let mut what = creating(FEW);
        what.disks[2].overwrite = vec!["/dev/d2".to_owned()];
        let pool = Pool::create(&core, &what).await.unwrap();

        let unknown = host.disk(path(FEW)).unwrap();
        unknown.write_durable(100 << 20, &[1; 4096]);
        let refused = pool.add(&joining(path(FEW)), false).await.unwrap_err().to_string();
        let says = "/dev/d4: holds data of an unknown kind (at byte 104857600); --overwrite /dev/d4 overwrites it";
        assert_eq!(refused, says);
        pool.destroy().await.unwrap();
        drop(pool);

        // Its labels say that it was removed, and it has been used otherwise since.
        host.disk(path(0)).unwrap().write_durable(1080, &[0x53, 0xef]);
        let refused = Pool::create(&core, &creating(FEW)).await.err().unwrap().to_string();
        assert!(refused.contains("/dev/d0: holds an ext2, ext3 or ext4 file system"), "{refused}");
        host.disk(path(0)).unwrap().write_durable(1080, &[0, 0]);
        Pool::create(&core, &creating(FEW)).await.unwrap();
    });
}
