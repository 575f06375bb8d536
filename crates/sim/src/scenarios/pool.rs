//! A volume of a pool through crashes, with disks that fail, lie, are pulled out, come back, or are replaced: as many as its level
//! bears, and never more. Afterwards every block must hold a value that the history permits, and all is made whole again.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use block::testing::Client;
use block::testing::register::{Checker, Initially};
use block::testing::workload::Workload;
use block::{Blocks, Dev, Lba};
use layers::pool::{
    CreatePool, NewDisk, NewPoolVolume, OpenPool, Pool, PoolDiskState, PoolReport, PoolSeat,
};
use layers::raid::geometry::Level;
use rt::Core;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, World};
use uuid::Uuid;

use super::storage::{end, memory_is_back, settle};

const POOL: Uuid = Uuid::from_u128(0x77);
const VOLUME: Uuid = Uuid::from_u128(0x78);

/// Bytes of a disk: a few units of 4 MiB.
const DISK_BYTES: u64 = 64 << 20;

/// Bytes of the volume: two extents of most levels, of which what is used is a small part at the border.
const VOLUME_BYTES: u64 = 40 << 20;

/// Operations of the last round, in which nothing may fail.
const LAST_ROUND: usize = 100;

/// Virtual time in which these must end.
const PATIENCE: Duration = Duration::from_secs(900);

/// What the scenario knows of disks.
#[derive(Debug, Default)]
struct Shelf {
    /// By number; those that were replaced are gone.
    disks: Vec<PathBuf>,
    /// Those that are pulled out.
    out: Vec<usize>,
    /// Whether one more may be lost, by what was told last, and nothing has happened since.
    bears: bool,
    /// Disks that have lied in some round: only theirs may have checksum errors.
    lied: Vec<PathBuf>,
}

struct Bench {
    world: World,
    host: Host,
    level: Level,
    checksums: bool,
    span: Blocks,
    shelf: Rc<RefCell<Shelf>>,
    checker: Rc<RefCell<Checker>>,
}

/// What is done to a disk in a round.
#[derive(Clone, Copy, Debug)]
enum Harm {
    None,
    /// It misbehaves.
    Faults(usize),
    /// It is pulled out at some moment.
    PullOut(usize),
    /// It forgets what it was told to write, writes it elsewhere, and gives back something else.
    Lies(usize),
}

/// Plays it.
pub(crate) async fn play(world: World) -> Result<(), String> {
    let rng = world.rng();
    let (level, disks) = *rng.pick(&[
        (Level::Parity, 4),
        (Level::Parity, 5),
        (Level::DoubleParity, 5),
        (Level::Copies(2), 4),
        (Level::Copies(3), 3),
    ]);
    let block_size = *rng.pick(&[512, 4096]);
    let host = world.add_host("store", HostSetup { pool_bytes: 48 << 20, ..HostSetup::default() });
    let shelf = Rc::new(RefCell::new(Shelf { bears: true, ..Shelf::default() }));
    let checker = Rc::new(RefCell::new(Checker::new(1, block_size, Initially::Zeroes)));
    // Where two extents meet, on levels of 4 MiB pieces and of 16.
    let blocks = 1 << 20;
    let at = *rng.pick(&[0, (32 << 20) - (blocks / 2), VOLUME_BYTES - blocks]);
    let (at, count) = (at / u64::from(block_size), blocks / u64::from(block_size) / 4);
    let span = Blocks::new(Lba(at), count);
    let checksums = rng.chance(0.5);
    let bench = Bench { world: world.clone(), host, level, checksums, span, shelf, checker };
    (0..disks).for_each(|_| drop(bench.new_disk()));
    bench.create(block_size).await?;
    for _ in 0..rng.between(2, 5) {
        bench.round().await?;
    }
    bench.last_round().await
}

/// The pool, a seat at it, and its volume.
async fn open(core: &Core, paths: Vec<PathBuf>) -> Result<(Rc<Pool>, Rc<PoolSeat>, Dev), String> {
    let what = OpenPool { id: POOL, paths, without: Vec::new(), buffered: false };
    let pool = Pool::open(core, &what).await.map_err(|e| e.to_string())?;
    let seat = PoolSeat::share(core, &pool, 0).await.map_err(|e| e.to_string())?;
    let dev = seat.open(VOLUME).await.map_err(|e| e.to_string())?;
    Ok((pool, seat, dev))
}

/// Looks now and then whether disks are there again.
async fn look(pool: Rc<Pool>, paths: Vec<PathBuf>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        pool.bring_back(paths.clone()).await;
    }
}

/// What a pool says of itself. Disks fail, but only those that have lied give back what nobody wrote.
fn sound(pool: &Pool, shelf: &Shelf) -> Result<PoolReport, String> {
    let report = pool.report();
    let lied = |path: &Option<PathBuf>| path.as_ref().is_some_and(|path| shelf.lied.contains(path));
    match report.disks.iter().all(|disk| disk.checksum_errors == 0 || lied(&disk.path)) {
        true => Ok(report),
        false => Err(format!("checksums do not fit: {report:?}")),
    }
}

/// Reads and compares all, and nothing is beyond repair.
async fn scrub(pool: &Pool) -> Result<(), String> {
    pool.scrub().map_err(|e| e.to_string())?;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let report = pool.report();
        match report.scrub {
            Some(ref scrub) if scrub.running => {}
            Some(ref scrub) if scrub.unrepairable == 0 => return Ok(()),
            _ => return Err(format!("after lies: {report:?}")),
        }
    }
}

/// Whether one more disk may be lost. Of two with a vote one does not open alone, so three copies are never brought down to two.
fn bears_more(report: &PoolReport) -> bool {
    let may = is_whole(report) || report.level == Level::DoubleParity;
    may && report.broken.is_none() && report.bears.is_some_and(|more| more > 0)
}

fn is_whole(report: &PoolReport) -> bool {
    report.behind_pieces == 0 && report.disks.iter().all(|d| d.state != PoolDiskState::Out)
}

impl Bench {
    fn new_disk(&self) -> PathBuf {
        let mut shelf = self.shelf.borrow_mut();
        let path = PathBuf::from(format!("/dev/d{}", shelf.disks.len()));
        self.host.add_disk(&path, DiskSetup::device(DISK_BYTES).blocks(512, 4096));
        shelf.disks.push(path.clone());
        path
    }

    fn joining(path: &std::path::Path) -> NewDisk {
        NewDisk { path: path.to_owned(), overwrite: Vec::new() }
    }

    async fn create(&self, block_size: u32) -> Result<(), String> {
        let disks = self.shelf.borrow().disks.iter().map(|path| Self::joining(path)).collect();
        let what = CreatePool {
            id: POOL,
            name: "tank".into(),
            level: self.level,
            columns: None,
            strip_bytes: *self.world.rng().pick(&[16 << 10, 64 << 10]),
            rings: 1,
            checksums: self.checksums,
            disks,
            spares: Vec::new(),
            buffered: false,
        };
        let thick = self.world.rng().chance(0.3);
        let volume = NewPoolVolume { id: VOLUME, bytes: VOLUME_BYTES, block_size, thick };
        let work = self.host.run(move |core| async move {
            let pool = Pool::create(&core, &what).await.map_err(|e| e.to_string())?;
            pool.create_volume(&volume).await.map_err(|e| e.to_string())?;
            pool.close().await.map_err(|e| e.to_string())
        });
        work.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()))
    }

    async fn settle(&self) {
        let disks = self.shelf.borrow().disks.clone();
        for path in disks {
            if let Some(disk) = self.host.disk(&path) {
                settle(&disk).await;
            }
        }
    }

    fn set_faults(&self, faults: impl Fn(usize) -> DiskFaults) {
        for (n, path) in self.shelf.borrow().disks.iter().enumerate() {
            self.host.disk(path).into_iter().for_each(|disk| disk.set_faults(faults(n)));
        }
    }

    /// What is done in the next round: nothing to a disk while the level does not bear that.
    fn draw_harm(&self) -> Harm {
        let (rng, shelf) = (self.world.rng(), self.shelf.borrow());
        if !shelf.bears || rng.chance(0.3) {
            return Harm::None;
        }
        let victim = usize::try_from(rng.below(shelf.disks.len() as u64)).expect("few");
        match rng.below(5) {
            0 if self.checksums => Harm::Lies(victim),
            1 | 2 => Harm::PullOut(victim),
            _ => Harm::Faults(victim),
        }
    }

    /// How a disk misbehaves.
    fn draw_faults(&self) -> DiskFaults {
        let rng = self.world.rng();
        let rate = |most: f64| if rng.chance(0.5) { 0.0 } else { most * rng.unit() };
        DiskFaults {
            read_error: rate(0.2),
            write_error: rate(0.02),
            sync_error: rate(0.02),
            stall: rate(0.01),
            // Longer than a disk may take, in use and while the pool is opened: it is out then.
            stall_for: Duration::from_secs(*rng.pick(&[2, 2, 2, 25, 100])),
            ..DiskFaults::default()
        }
    }

    fn disk(&self, n: usize) -> Option<rt::sim::DiskControl> {
        self.host.disk(&self.shelf.borrow().disks[n])
    }

    fn pull_out(&self, n: usize) {
        self.shelf.borrow_mut().out.push(n);
        self.shelf.borrow_mut().bears = false;
        self.disk(n).into_iter().for_each(|disk| disk.pull_out());
    }

    /// Disks that were pulled out come back now and then.
    fn plug_in(&self) {
        let out = std::mem::take(&mut self.shelf.borrow_mut().out);
        for n in out {
            if self.world.rng().chance(0.6) {
                self.world.note(format!("disk {n} is plugged in"));
                self.disk(n).into_iter().for_each(|disk| disk.plug_in());
            } else {
                self.shelf.borrow_mut().out.push(n);
            }
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        let (mut paths, rng) = (self.shelf.borrow().disks.clone(), self.world.rng());
        // Found in any order.
        for n in (1..paths.len()).rev() {
            paths.swap(n, usize::try_from(rng.below(n as u64 + 1)).expect("few"));
        }
        paths
    }

    /// Load, harm, and a crash at a random moment.
    async fn round(&self) -> Result<(), String> {
        let rng = self.world.rng();
        self.settle().await;
        self.plug_in();
        let harm = self.draw_harm();
        self.world.note(format!("{harm:?}"));
        if let Harm::Lies(n) = harm {
            return self.lies(n).await;
        }
        let bad = self.draw_faults();
        let victim = if let Harm::Faults(n) = harm { Some(n) } else { None };
        self.set_faults(|n| if victim == Some(n) { bad.clone() } else { DiskFaults::default() });
        let (checker, span, seed) = (Rc::clone(&self.checker), self.span, rng.u64());
        let (paths, shelf, world) = (self.paths(), Rc::clone(&self.shelf), self.world.clone());
        let everywhere = paths.clone();
        let looks = rng.time(Duration::from_millis(20), Duration::from_millis(500));
        let work = self.host.run(move |core| async move {
            let buffers = core.pool().clone();
            let (pool, _seat, dev) = match open(&core, paths).await {
                Ok(opened) => opened,
                Err(why) => {
                    world.note(why.clone());
                    // One disk fails while it is read: the others are enough.
                    return Err(why);
                }
            };
            tokio::task::spawn_local(look(Rc::clone(&pool), everywhere, looks));
            let depth = usize::try_from(1 + seed % 12).expect("small");
            let load = Workload::new(Client::new(&dev, &buffers), span, depth, seed);
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            loop {
                load.run(&checker, 10).await.map_err(|v| v.to_string())?;
                let errors = load.take_errors();
                if !errors.is_empty() {
                    return Err(format!("{errors:?}; {:?}", pool.report()));
                }
                let report = sound(&pool, &shelf.borrow())?;
                shelf.borrow_mut().bears = bears_more(&report);
            }
        });
        let longest = match bad.stall_for {
            long if bad.stall > 0.0 && victim.is_some() && long > Duration::from_secs(10) => {
                200_000
            }
            _ if rng.chance(0.3) => 8000,
            _ => 400,
        };
        let crash = self.meanwhile(harm, Duration::from_millis(longest / 2));
        let ended: Option<Result<(), String>> = tokio::select! {
            biased;
            ended = work.join() => ended,
            () = crash => None,
        };
        if let Some(Err(why)) = ended {
            return Err(why);
        }
        if victim.is_some() {
            // Nobody was told of what happened last.
            self.shelf.borrow_mut().bears = false;
        }
        let kill = rng.chance(0.25) && bad.sync_error == 0.0;
        let loss = end(&self.host, &self.world, !kill);
        self.checker.borrow_mut().crash(loss);
        Ok(())
    }

    /// What happens beside the load. Moments lie up to `apart` apart.
    async fn meanwhile(&self, harm: Harm, apart: Duration) {
        let rng = self.world.rng();
        let some = || rng.time(Duration::ZERO, apart);
        tokio::time::sleep(some()).await;
        if let Harm::PullOut(n) = harm {
            self.pull_out(n);
            tokio::time::sleep(some() / 2).await;
            if rng.chance(0.4) {
                self.world.note(format!("disk {n} is plugged in at once"));
                self.shelf.borrow_mut().out.retain(|out| *out != n);
                self.disk(n).into_iter().for_each(|disk| disk.plug_in());
            }
        }
        tokio::time::sleep(some()).await;
    }

    /// Load on a disk that lies; a scrub afterwards, and an orderly end: when power fails what was written last is believed.
    async fn lies(&self, n: usize) -> Result<(), String> {
        self.set_faults(|_| DiskFaults::default());
        let rng = self.world.rng();
        let rate = || if rng.chance(0.5) { 0.0 } else { 0.1 * rng.unit() };
        let lies = DiskFaults {
            bit_rot: rate(),
            lost_write: rate(),
            misdirected_write: rate(),
            misdirected_read: rate(),
            ..DiskFaults::default()
        };
        {
            let mut shelf = self.shelf.borrow_mut();
            let path = shelf.disks[n].clone();
            shelf.lied.push(path);
            shelf.bears = false;
        }
        let (checker, span, seed) = (Rc::clone(&self.checker), self.span, rng.u64());
        let (paths, disk) = (self.paths(), self.disk(n).ok_or("there is no such disk")?);
        let rounds = 1 + seed % 20;
        let work = self.host.run(move |core| async move {
            let buffers = core.pool().clone();
            let (pool, seat, dev) = open(&core, paths).await?;
            let load = Workload::new(Client::new(&dev, &buffers), span, 4, seed);
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            disk.set_faults(lies);
            for _ in 0..rounds {
                load.run(&checker, 10).await.map_err(|v| v.to_string())?;
            }
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            disk.set_faults(DiskFaults::default());
            scrub(&pool).await?;
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            let errors = load.take_errors();
            if !errors.is_empty() {
                return Err(format!("{errors:?}; {:?}", pool.report()));
            }
            drop((load, dev));
            seat.close().await.map_err(|e| e.to_string())?;
            pool.close().await.map_err(|e| e.to_string())
        });
        match tokio::time::timeout(PATIENCE, work.join()).await {
            Ok(Some(result)) => result?,
            Ok(None) => return Err("the host crashed by itself".into()),
            Err(_) => return Err(format!("with a disk that lies it does not end in {PATIENCE:?}")),
        }
        let loss = end(&self.host, &self.world, false);
        self.checker.borrow_mut().crash(loss);
        Ok(())
    }

    /// No faults any more, and all disks are there, or replaced: everything must work, and be whole in the end.
    async fn last_round(&self) -> Result<(), String> {
        self.settle().await;
        self.set_faults(|_| DiskFaults::default());
        let out = std::mem::take(&mut self.shelf.borrow_mut().out);
        let mut replaced = Vec::new();
        for n in out {
            if self.world.rng().chance(0.5) {
                self.disk(n).into_iter().for_each(|disk| disk.plug_in());
            } else {
                let old = self.shelf.borrow().disks[n].display().to_string();
                replaced.push((old, self.new_disk()));
            }
        }
        let (checker, span, seed) = (Rc::clone(&self.checker), self.span, self.world.rng().u64());
        let (paths, last) = (self.paths(), Rc::new(RefCell::new(String::new())));
        let (told, shelf) = (Rc::clone(&last), Rc::clone(&self.shelf));
        let work = self.host.run(move |core| async move {
            let buffers = core.pool().clone();
            let (pool, seat, dev) = open(&core, paths).await?;
            let load = Workload::new(Client::new(&dev, &buffers), span, 4, seed);
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            for (gone, path) in replaced {
                let with = Self::joining(&path);
                pool.replace(&gone, &with).await.map_err(|e| format!("replacing: {e}"))?;
            }
            load.run(&checker, LAST_ROUND).await.map_err(|v| v.to_string())?;
            while !is_whole(&pool.report()) {
                *told.borrow_mut() = format!("{:?}", pool.report());
                tokio::time::sleep(Duration::from_secs(1)).await;
                load.run(&checker, 5).await.map_err(|v| v.to_string())?;
            }
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            let errors = load.take_errors();
            if !errors.is_empty() {
                return Err(format!("without faults: {errors:?}"));
            }
            sound(&pool, &shelf.borrow())?;
            drop((load, dev));
            seat.close().await.map_err(|e| e.to_string())?;
            pool.close().await.map_err(|e| e.to_string())?;
            drop((seat, pool));
            tokio::time::sleep(Duration::from_secs(1)).await;
            memory_is_back(&buffers)
        });
        match tokio::time::timeout(PATIENCE, work.join()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("it is not whole within {PATIENCE:?}: {}", last.borrow())),
        }
    }
}
