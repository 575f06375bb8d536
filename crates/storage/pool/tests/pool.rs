//! Pools on simulated disks, in what happens to them one thing after the other; everything at once is the simulator's.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use block::testing::Client;
use block::{Dev, crash};
use geometry::Level;
use pool::{
    CreatePool, NewDisk, NewPoolVolume, OpenPool, Pool, PoolDiskState, PoolError, PoolReport,
    PoolSeat, ScrubReport,
};
use rt::Core;
use rt::disk::DiskErrorKind;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, Latency};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::common::{VOLUME, core_of, succeed};

mod set_back;

const POOL: Uuid = Uuid::from_u128(7);
/// Another volume.
const OTHER: Uuid = Uuid::from_u128(9);
const COLUMNS: u16 = 4;
/// As many as an extent has columns, and one more: what is on one that is out can be made again.
pub(crate) const FEW: usize = 4;
pub(crate) const MORE: usize = 5;
const DISK_BYTES: u64 = 200 << 20;

/// All levels, with checksums and without.
pub(crate) const POOL_LEVELS: [(Level, bool); 6] = [
    (Level::Parity, false),
    (Level::Parity, true),
    (Level::DoubleParity, true),
    (Level::DoubleParity, false),
    (Level::Copies(2), true),
    (Level::Copies(1), false),
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
    OpenPool { id: POOL, paths: paths(disks), without: Vec::new(), buffered: false, claim: None }
}

/// A disk that answers so much later.
fn stops(stall_for: Duration) -> DiskFaults {
    DiskFaults { stall: 1.0, stall_for, ..DiskFaults::default() }
}

/// A pool of disks, its seat, and a volume that is written.
pub(crate) struct Bench {
    pub(crate) host: Host,
    pub(crate) pool: Rc<Pool>,
    pub(crate) seat: Rc<PoolSeat>,
    pub(crate) client: Client,
    pub(crate) blocks: u64,
}

impl Bench {
    pub(crate) async fn new(host: Host, disks: usize) -> Self {
        Self::made(host, (Level::Parity, false), disks).await
    }

    pub(crate) async fn checked(host: Host, disks: usize) -> Self {
        Self::made(host, (Level::Parity, true), disks).await
    }

    pub(crate) async fn made(host: Host, how: (Level, bool), disks: usize) -> Self {
        Self::sized(host, how, disks, DISK_BYTES).await
    }

    /// The same with disks of so many bytes.
    pub(crate) async fn sized(
        host: Host,
        (level, checksums): (Level, bool),
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
            level,
            columns: Some(COLUMNS),
            strip_bytes: 64 << 10,
            checksums,
            rings: 2,
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
        let seat = PoolSeat::share(core, &pool, 0).await.unwrap();
        let dev: Dev = seat.open(VOLUME).await.unwrap();
        let blocks = dev.info().blocks;
        Self { host, pool, seat, client: Client::new(&dev, core.pool()), blocks }
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
        self.pool.bring_back(paths(MORE)).await;
    }

    pub(crate) async fn whole(&self) {
        while self.report().behind_pieces > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    pub(crate) async fn scrub(&self) -> ScrubReport {
        self.pool.scrub().unwrap();
        while self.report().scrub.unwrap().running {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.report().scrub.unwrap()
    }

    pub(crate) async fn close(self) {
        drop(self.client);
        self.seat.close().await.unwrap();
        self.pool.close().await.unwrap();
    }
}

pub(crate) fn play<Fut: Future<Output = ()> + 'static>(scene: impl FnOnce(Host) -> Fut + 'static) {
    let setup = HostSetup { pool_bytes: 48 << 20, ..HostSetup::default() };
    succeed(1, setup, |_, host| scene(host));
}

#[test]
fn a_disk_that_was_away_comes_back_while_the_pool_is_open() {
    play(|host| async move {
        let bench = Bench::new(host, FEW).await;
        bench.disk(1).pull_out();
        bench.write(0..256, 2).await;
        assert_eq!(bench.state(1), PoolDiskState::Out);
        bench.look().await;
        bench.write(256..512, 3).await;
        bench.disk(1).plug_in();
        bench.look().await;
        assert_eq!(bench.state(1), PoolDiskState::In);
        assert!(bench.report().behind_pieces > 0);
        bench.whole().await;
        // It is needed now.
        bench.disk(0).pull_out();
        bench.holds(0..256, 2).await;
        bench.holds(256..512, 3).await;
        bench.holds(512..bench.blocks, 1).await;
        bench.close().await;
    });
}

/// Of each extent two columns go elsewhere at once, and where there is most room is the same place for both.
#[test]
fn two_disks_go_at_once() {
    play(|host| async move {
        let bench = Bench::made(host, (Level::DoubleParity, false), FEW).await;
        for (n, bytes) in [(FEW, DISK_BYTES), (FEW + 1, 3 * DISK_BYTES)] {
            bench.host.add_disk(path(n), disk_of(bytes));
            bench.pool.add(&joining(path(n)), false).await.unwrap();
        }
        for n in [0, 1] {
            bench.disk(n).pull_out();
        }
        bench.write(0..64, 2).await;
        let whole = tokio::time::timeout(Duration::from_secs(300), bench.whole()).await;
        assert!(whole.is_ok(), "{:?}", bench.report());
        for n in [2, 3] {
            bench.disk(n).pull_out();
        }
        bench.holds(0..64, 2).await;
        bench.holds(64..bench.blocks, 1).await;
        bench.close().await;
    });
}

/// A disk comes back while what lay on it is made again elsewhere, at any moment of that; then power is lost, and nothing that it
/// lacks is believed.
#[test]
fn a_disk_that_comes_back_in_the_middle_of_a_rebuild() {
    for moment in 0..12 {
        play(move |host| async move {
            let bench = Bench::new(host, MORE).await;
            bench.disk(1).pull_out();
            bench.write(0..64, 2).await;
            bench.look().await;
            tokio::time::sleep(Duration::from_millis(moment * 80)).await;
            bench.disk(1).plug_in();
            let pool = Rc::clone(&bench.pool);
            let looking =
                tokio::task::spawn_local(async move { pool.bring_back(paths(MORE)).await });
            while bench.state(1) == PoolDiskState::Out && !looking.is_finished() {
                bench.write(1024..1280, 3).await;
            }
            bench.write(1024..1280, 4).await;
            let host = bench.host.clone();
            let permit = crash::permit();
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
            assert_eq!(bench.scrub().await.unrepairable, 0, "moment {moment}");
            bench.holds(64..1024, 1).await;
            bench.holds(1280..bench.blocks, 1).await;
            bench.close().await;
        });
    }
}

/// A disk comes back while others are written for the first time since it went: by its checksums it takes long to come in, and what
/// it has not got meanwhile is not read from it.
#[test]
fn what_is_written_while_a_disk_comes_in_is_not_read_from_it() {
    // Blocks from one of what is marked at once to the next.
    const APART: usize = 512;
    for moment in 0..20 {
        play(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            // Nothing is being written any more.
            tokio::time::sleep(Duration::from_secs(60)).await;
            bench.disk(1).pull_out();
            bench.write(0..16, 2).await;
            bench.look().await;
            bench.disk(1).plug_in();
            let (min, max) = (Duration::from_millis(40), Duration::from_millis(60));
            let latency = Latency { min, max, outlier_every: 0 };
            bench.disk(1).set_faults(DiskFaults { latency, ..DiskFaults::default() });
            let pool = Rc::clone(&bench.pool);
            let looking =
                tokio::task::spawn_local(async move { pool.bring_back(paths(MORE)).await });
            tokio::time::sleep(Duration::from_millis(400 * moment)).await;
            let places = || (512..bench.blocks).step_by(APART).map(|at| at..at + 16);
            for blocks in places() {
                bench.write(blocks, 3).await;
            }
            looking.await.unwrap();
            assert_eq!(bench.state(1), PoolDiskState::In);
            bench.disk(1).set_faults(DiskFaults::default());
            bench.whole().await;
            bench.disk(0).pull_out();
            bench.holds(0..16, 2).await;
            for blocks in places() {
                bench.holds(blocks, 3).await;
            }
            bench.close().await;
        });
    }
}

/// It forgets what it was told to write, writes it elsewhere, and gives back what nobody wrote. With one parity only checksums tell who
/// of the row is wrong.
#[test]
fn a_disk_that_lies_is_found_out() {
    for seed in 0..8 {
        let setup = HostSetup { pool_bytes: 48 << 20, ..HostSetup::default() };
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
            assert_eq!(bench.scrub().await.unrepairable, 0);
            assert!(bench.report().disks[1].checksum_errors > 0);
            assert_eq!(bench.scrub().await.repaired, 0, "all is right now");
            // It is needed now.
            bench.disk(0).pull_out();
            bench.holds(256..768, 4).await;
            bench.holds(0..256, 1).await;
            bench.holds(768..bench.blocks, 1).await;
            bench.close().await;
        });
    }
}

/// Another seat of its pool, with the other volume.
async fn at_ring_1(core: &Core, bench: &Bench) -> (Rc<PoolSeat>, Client) {
    let seat = PoolSeat::share(core, &bench.pool, 1).await.unwrap();
    let dev = seat.open(OTHER).await.unwrap();
    let client = Client::new(&dev, core.pool());
    (seat, client)
}

async fn write_both(bench: &Bench, client: &Client, value: u8) {
    let data = [value; 16 * 4096];
    for at in (0..512).step_by(16) {
        let both = [&bench.client, client].map(|c| c.write(at, &data, false));
        futures_util::future::try_join_all(both).await.unwrap();
    }
}

/// Each core has lists of its own, and an opening goes through all of them.
#[test]
fn two_cores_have_checksums_of_the_same_disks() {
    play(move |host| async move {
        let core = core_of(&host).await;
        let mut bench = Bench::checked(host, FEW).await;
        bench.pool.create_volume(&thick(OTHER)).await.unwrap();
        let (seat, mut client) = at_ring_1(&core, &bench).await;
        write_both(&bench, &client, 2).await;
        bench.disk(1).pull_out();
        write_both(&bench, &client, 3).await;
        bench.look().await;
        bench.disk(1).plug_in();
        bench.look().await;
        assert_eq!(bench.state(1), PoolDiskState::In);
        bench.whole().await;
        // Another one lies, whoever reads.
        let lies = DiskFaults { bit_rot: 0.5, ..DiskFaults::default() };
        bench.disk(2).set_faults(lies);
        bench.holds(0..512, 3).await;
        std::mem::swap(&mut bench.client, &mut client);
        bench.holds(0..512, 3).await;
        bench.disk(2).set_faults(DiskFaults::default());
        let scrub = bench.scrub().await;
        assert_eq!(scrub.unrepairable, 0);
        let wrong: Vec<u64> = bench.report().disks.iter().map(|d| d.checksum_errors).collect();
        assert!(wrong[2] > 0 && wrong.iter().sum::<u64>() == wrong[2], "{wrong:?}");
        let host = bench.host.clone();
        drop(client);
        seat.close().await.unwrap();
        drop(seat);
        bench.close().await;
        let what = opening(FEW);
        let pool = Pool::open(&core, &what).await.unwrap();
        let bench = Bench::served(host, &core, pool).await;
        let (seat, client) = at_ring_1(&core, &bench).await;
        bench.holds(0..512, 3).await;
        let scrub = bench.scrub().await;
        assert_eq!((scrub.repaired, scrub.unrepairable), (0, 0));
        let still: Vec<u64> = bench.report().disks.iter().map(|d| d.checksum_errors).collect();
        assert_eq!(still[2], wrong[2], "counted over openings, and none since: {still:?}");
        drop(client);
        seat.close().await.unwrap();
        bench.close().await;
    });
}

#[test]
fn volumes_are_made_at_once() {
    play(|host| async move {
        let bench = Bench::new(host, FEW).await;
        let ids: Vec<Uuid> = (10..14).map(Uuid::from_u128).collect();
        let all = ids.iter().map(|id| async { bench.pool.create_volume(&thick(*id)).await });
        futures_util::future::try_join_all(all).await.unwrap();
        for id in ids {
            assert_eq!(bench.seat.open(id).await.unwrap().info().blocks, BYTES / 4096);
        }
        bench.close().await;
    });
}

/// Its disk is silent while the checksums of what is freed are to be written: it goes out, and nobody waits for ever.
#[test]
fn a_disk_that_stops_holds_up_no_end() {
    play(|host| async move {
        let bench = Bench::checked(host, FEW).await;
        bench.write(0..256, 2).await;
        let stopped = bench.disk(1);
        stopped.set_faults(stops(Duration::from_secs(3600)));
        drop(bench.client);
        tokio::time::timeout(Duration::from_secs(120), bench.seat.close()).await.unwrap().unwrap();
        assert_eq!(bench.pool.report().disks[1].state, PoolDiskState::Out);
    });
}

/// Whenever that begins: the others are enough.
#[test]
fn a_disk_that_stops_keeps_no_pool_from_opening() {
    for n in 0..30 {
        let moment = Duration::from_millis(n * 20);
        play(move |host| async move {
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
            assert_eq!(bench.state(1), PoolDiskState::Out);
        });
    }
}

/// Fails if this waits longer than a disk that stops is waited for, whatever it is asked.
async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(100), Box::pin(what)).await.expect("it is waited for")
}

pub(crate) fn thick(id: Uuid) -> NewPoolVolume {
    NewPoolVolume { id, bytes: BYTES, block_size: 4096, thick: true }
}

/// Two cores use a pool. A disk of it went away, something was written, and now it is there again, and comes back in the task.
async fn one_comes_back(host: Host) -> (Bench, (Rc<PoolSeat>, Client), JoinHandle<()>) {
    let core = core_of(&host).await;
    let bench = Bench::checked(host, MORE).await;
    bench.pool.create_volume(&thick(OTHER)).await.unwrap();
    let (seat, client) = at_ring_1(&core, &bench).await;
    write_both(&bench, &client, 2).await;
    bench.disk(1).pull_out();
    write_both(&bench, &client, 3).await;
    bench.look().await;
    bench.disk(1).plug_in();
    let pool = Rc::clone(&bench.pool);
    let coming = tokio::task::spawn_local(async move {
        pool.bring_back(paths(MORE)).await;
    });
    (bench, (seat, client), coming)
}

/// How many milliseconds that takes.
fn comes_in_after() -> u64 {
    let took = Rc::new(Cell::new(Duration::ZERO));
    let told = Rc::clone(&took);
    play(move |host| async move {
        let (bench, (seat, client), coming) = one_comes_back(host).await;
        let begun = tokio::time::Instant::now();
        let whole = tokio::task::spawn_local(async move {
            coming.await.unwrap();
            begun.elapsed()
        });
        for value in 4..8 {
            in_time(write_both(&bench, &client, value)).await;
        }
        told.set(in_time(whole).await.unwrap());
        drop(client);
        seat.close().await.unwrap();
        bench.close().await;
    });
    u64::try_from(took.get().as_millis()).unwrap()
}

/// Whenever that begins: it stays out, or goes out again, and has all that was written meanwhile when it is back for good, by
/// whichever core.
#[test]
fn a_disk_that_stops_while_it_comes_back_holds_up_nobody() {
    // While its checksums are read, and as cores begin to use it.
    let comes_in = comes_in_after();
    let moments = (0..4).map(|n| n * comes_in / 5).chain((comes_in - 200..comes_in).step_by(16));
    let held = Rc::new(Cell::new(0));
    for moment in moments.map(Duration::from_millis) {
        let held = Rc::clone(&held);
        play(move |host| async move {
            let core = core_of(&host).await;
            let (bench, (seat, client), coming) = one_comes_back(host).await;
            let (pool, stopped) = (Rc::clone(&bench.pool), bench.disk(1));
            let meanwhile = tokio::task::spawn_local(async move {
                tokio::time::sleep(moment).await;
                stopped.set_faults(stops(Duration::from_secs(1000)));
                // A version is written.
                let thin = NewPoolVolume { thick: false, ..thick(Uuid::from_u128(10)) };
                let begun = tokio::time::Instant::now();
                let made = pool.create_volume(&thin);
                tokio::time::timeout(Duration::from_secs(30), made)
                    .await
                    .expect("it is waited for")
                    .unwrap();
                // That has waited for it.
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
            seat.close().await.unwrap();
            drop(seat);
            bench.close().await;
            let pool = Pool::open(&core, &opening(MORE)).await.unwrap();
            let mut bench = Bench::served(host, &core, pool).await;
            let (seat, mut client) = at_ring_1(&core, &bench).await;
            while bench.state(1) != PoolDiskState::In {
                bench.look().await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            bench.whole().await;
            for _ in 0..2 {
                bench.holds(0..512, 7).await;
                std::mem::swap(&mut bench.client, &mut client);
            }
            let scrub = bench.scrub().await;
            assert_eq!((scrub.repaired, scrub.unrepairable), (0, 0));
            drop(client);
            seat.close().await.unwrap();
            bench.close().await;
        });
    }
    assert!(held.get() > 0, "no moment was one at which it was let in");
}

/// One fails as it is let in, for cores or as its vote is written down, and others wait to come in behind it.
#[test]
fn a_disk_that_fails_while_it_comes_back_holds_up_nobody() {
    let comes_in = comes_in_after();
    for n in (comes_in - 180..comes_in).step_by(12) {
        play(move |host| async move {
            let (bench, (seat, client), coming) = one_comes_back(host).await;
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
            in_time(seat.close()).await.unwrap();
            bench.close().await;
        });
    }
}

/// The same of one that is new.
#[test]
fn a_disk_that_stops_while_it_is_added_holds_up_nobody() {
    let came = Rc::new(Cell::new(0));
    for n in 0..30 {
        let came = Rc::clone(&came);
        play(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            let coming = adds_one_that_stops(&bench, Duration::from_millis(n * 20));
            in_time(bench.pool.create_volume(&thick(OTHER))).await.unwrap();
            in_time(bench.write(0..256, 3)).await;
            bench.holds(0..256, 3).await;
            let added = in_time(coming).await.unwrap();
            let disks = bench.report().disks.len();
            match added {
                // It may be out again.
                Ok(()) => assert_eq!(disks, MORE),
                Err(why) => {
                    let why = why.to_string();
                    assert!(why.contains("not answer") || why.contains("gone"), "{why}");
                    assert_eq!(disks, FEW);
                }
            }
            came.set(came.get() + u32::from(disks == MORE));
            bench.close().await;
        });
    }
    assert!((1..30).contains(&came.get()), "{} of 30 have come in", came.get());
}

/// The same where another one is lost, and nothing can be had of what lay there: that is when disks are added.
#[test]
fn a_disk_that_stops_while_it_is_added_to_a_pool_that_has_lost_one_holds_up_nobody() {
    for n in 0..30 {
        play(move |host| async move {
            let bench = Bench::made(host, (Level::Copies(1), false), FEW).await;
            bench.disk(1).pull_out();
            assert!(bench.client.write(0, &[2; 64 * 4096], false).await.is_err());
            let coming = adds_one_that_stops(&bench, Duration::from_millis(n * 20));
            let thin = NewPoolVolume { thick: false, ..thick(OTHER) };
            for _ in 0..40 {
                tokio::time::sleep(Duration::from_millis(30)).await;
                in_time(bench.pool.create_volume(&thin)).await.unwrap();
                in_time(bench.pool.delete_volume(OTHER)).await.unwrap();
            }
            let _ = in_time(coming).await.unwrap();
        });
    }
}

/// Adds a disk, which stops so much later.
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

/// A disk fails while the pool is opened, and then the power: versions follow each other while labels are written, and the others
/// open the pool whatever of that they have.
#[test]
fn the_power_fails_in_an_opening_in_which_a_disk_fails() {
    // From the first write on, which comes after what it holds is read.
    for n in 16..36 {
        play(move |host| async move {
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
                let is_in = |n: usize| bench.state(n) == PoolDiskState::In;
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

/// A controller, a shelf, or the host: they answer again, and all is as it was.
#[test]
fn what_stops_all_disks_puts_none_of_them_out() {
    // Also one that ends while it is found out whether others answer.
    for (n, how_long) in (0..20).flat_map(|n| [100, 12].map(|secs| (n, Duration::from_secs(secs))))
    {
        play(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            bench.write(0..256, 2).await;
            let (host, disks) = (bench.host.clone(), [0, 1, 2, 3].map(|n| bench.disk(n)));
            bench.close().await;
            let core = core_of(&host).await;
            tokio::task::spawn_local(async move {
                tokio::time::sleep(Duration::from_millis(n * 30)).await;
                // As long as it lasts nobody answers, whatever is asked.
                disks.iter().for_each(|disk| disk.set_faults(stops(how_long)));
                tokio::time::sleep(how_long).await;
                disks.iter().for_each(|disk| disk.set_faults(DiskFaults::default()));
            });
            let what = opening(FEW);
            let mut tries = 0;
            let pool = loop {
                match Pool::open(&core, &what).await {
                    Ok(pool) => break pool,
                    // They did not say what they are, and are in use until they do.
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
            assert!((0..FEW).all(|n| bench.state(n) == PoolDiskState::In), "{report:?}");
            bench.whole().await;
            bench.holds(0..256, 2).await;
            bench.holds(256..bench.blocks, 1).await;
            let scrub = bench.scrub().await;
            assert_eq!((scrub.repaired, scrub.unrepairable), (0, 0));
            bench.close().await;
        });
    }
}

/// The same, when a core takes its seat just then.
#[test]
fn what_stops_all_disks_as_a_core_takes_its_seat_puts_none_of_them_out() {
    play(|host| async move {
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
        assert!((0..FEW).all(|n| bench.state(n) == PoolDiskState::In), "{report:?}");
        bench.holds(0..256, 2).await;
        bench.close().await;
    });
}

#[test]
fn nobody_waits_for_a_disk_that_does_not_say_what_it_is() {
    play(|host| async move {
        let bench = Bench::new(host, FEW).await;
        bench.disk(1).pull_out();
        bench.write(0..256, 2).await;
        bench.look().await;
        bench.disk(1).plug_in();
        bench.disk(1).set_faults(stops(Duration::from_secs(3600)));
        tokio::time::timeout(Duration::from_secs(30), bench.look()).await.unwrap();
        assert_eq!(bench.state(1), PoolDiskState::Out);
        let core = core_of(&bench.host).await;
        let disk = path(1);
        let seen = pool::inspect(&core, &disk, false);
        let seen = tokio::time::timeout(Duration::from_secs(90), seen).await.unwrap();
        assert!(seen.unwrap_err().to_string().contains("does not answer"));
        bench.close().await;
    });
}

/// Checksums fit wherever a piece has gone, and whatever was there before.
#[test]
fn checksums_fit_after_openings_and_moves() {
    play(|host| async move {
        let bench = Bench::checked(host, MORE).await;
        let gone = NewPoolVolume { id: OTHER, bytes: 8 * BYTES, block_size: 4096, thick: true };
        bench.pool.create_volume(&gone).await.unwrap();
        let dev = bench.seat.open(OTHER).await.unwrap();
        let client = Client::new(&dev, core_of(&bench.host).await.pool());
        for at in (0..dev.info().blocks).step_by(256) {
            client.write(at, &vec![7; 256 * 4096], false).await.unwrap();
        }
        drop((client, dev));
        bench.pool.delete_volume(OTHER).await.unwrap();
        bench.pool.remove("2").await.unwrap();
        while bench.report().disks.len() == MORE {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        bench.disk(1).pull_out();
        bench.write(0..256, 2).await;
        bench.look().await;
        bench.disk(1).plug_in();
        bench.look().await;
        assert_eq!(bench.state(1), PoolDiskState::In);
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
        assert_eq!((scrub.repaired, scrub.unrepairable), (0, 0));
        assert!(bench.report().disks.iter().all(|disk| disk.checksum_errors == 0));
        bench.close().await;
    });
}

/// Whole stripes of it lie elsewhere, which is saved when it is deleted: in units that others get, with checksums of their own.
#[test]
fn checksums_fit_where_a_deleted_volume_was() {
    play(|host| async move {
        let core = core_of(&host).await;
        let bench = Bench::checked(host, FEW).await;
        for n in 20..24 {
            let volume = thick(Uuid::from_u128(n));
            bench.pool.create_volume(&volume).await.unwrap();
            let dev = bench.seat.open(volume.id).await.unwrap();
            let client = Client::new(&dev, core.pool());
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
fn a_disk_that_has_failed_and_stayed_where_it_is_stays_out() {
    play(|host| async move {
        let bench = Bench::new(host, FEW).await;
        bench.disk(1).set_faults(DiskFaults { write_error: 1.0, ..DiskFaults::default() });
        bench.write(0..256, 2).await;
        assert_eq!(bench.state(1), PoolDiskState::Out);
        bench.disk(1).set_faults(DiskFaults::default());
        for _ in 0..3 {
            bench.look().await;
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        assert_eq!(bench.state(1), PoolDiskState::Out);
        let host = bench.host.clone();
        bench.close().await;
        // With the next opening it comes back.
        let core = core_of(&host).await;
        let what = opening(FEW);
        let pool = Pool::open(&core, &what).await.unwrap();
        let bench = Bench::served(host, &core, pool).await;
        while bench.state(1) != PoolDiskState::In {
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
        level: Level::Parity,
        columns: Some(COLUMNS),
        strip_bytes: 64 << 10,
        checksums: false,
        rings: 2,
        disks: paths(disks).into_iter().map(joining).collect(),
        spares: Vec::new(),
        buffered: false,
        claim: None,
    }
}

/// Whenever that begins: the error names it. One that stops when the pool has been made is out of it.
#[test]
fn a_pool_that_is_created_does_not_wait_for_a_disk_that_does_not_answer() {
    let (mut refused, mut made) = (0, 0);
    for n in 0..12 {
        let outcome = Rc::new(Cell::new(false));
        let told = Rc::clone(&outcome);
        play(move |host| async move {
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
                Ok(_) => told.set(true),
                Err(why) => {
                    let why = why.to_string();
                    assert!(why.contains("/dev/d1") || why.contains("not answer"), "{why}");
                }
            }
        });
        if outcome.get() { made += 1 } else { refused += 1 }
    }
    assert!(refused > 0, "{refused} of {} were refused", refused + made);
}

#[test]
fn a_disk_with_anything_on_it_does_not_come_into_a_pool_unless_it_is_named() {
    play(|host| async move {
        let core = core_of(&host).await;
        for path in paths(MORE) {
            host.add_disk(path, disk_of(DISK_BYTES));
        }
        let vmfs = host.disk(path(2)).unwrap();
        vmfs.poke(1 << 20, b"\x0d\xd0\x01\xc0");
        let refused = Pool::create(&core, &creating(FEW)).await.err().unwrap().to_string();
        assert_eq!(refused, "/dev/d2: holds a VMFS volume; --overwrite /dev/d2 overwrites it");
        let mut what = creating(FEW);
        what.disks[2].overwrite = vec!["/dev/d2".to_owned()];
        let pool = Pool::create(&core, &what).await.unwrap();

        let unknown = host.disk(path(FEW)).unwrap();
        unknown.poke(100 << 20, &[1; 4096]);
        let refused = pool.add(&joining(path(FEW)), false).await.unwrap_err().to_string();
        let says = "/dev/d4: holds data of an unknown kind (at byte 104857600); --overwrite /dev/d4 overwrites it";
        assert_eq!(refused, says);
        pool.destroy().await.unwrap();
        drop(pool);

        // Its labels say that it was removed, and somebody has used it since.
        host.disk(path(0)).unwrap().poke(1080, &[0x53, 0xef]);
        let refused = Pool::create(&core, &creating(FEW)).await.err().unwrap().to_string();
        assert!(refused.contains("/dev/d0: holds an ext2, ext3 or ext4 file system"), "{refused}");
        host.disk(path(0)).unwrap().poke(1080, &[0, 0]);
        Pool::create(&core, &creating(FEW)).await.unwrap();
    });
}
