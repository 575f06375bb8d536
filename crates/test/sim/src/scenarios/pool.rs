//! Volumes of a pool on one core or several, thin and thick, made and deleted meanwhile, through crashes, with disks that fail, lie,
//! are pulled out, come back, are set back to what they held once, or are replaced: as many as its level bears, and never more.
//! Afterwards every block must hold a value that the history permits, and all is made whole again. Where more are set back than that,
//! the pool says so, and changes nothing.

use std::cell::RefCell;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::Loss;
use geometry::Level;
use pool::{CreatePool, Mistake, NewDisk, Pool, PoolDiskState, PoolReport};
use rt::Core;
use rt::sim::{DiskControl, DiskCopy, DiskFaults, DiskSetup, Host, HostSetup, World};
use session::{Session, Volumes};
use uuid::Uuid;

use super::storage::{end, memory_is_back, settle};

mod session;

const POOL: Uuid = Uuid::from_u128(0x77);

/// Bytes of a disk: units for all volumes, and to make what is lost anew.
const DISK_BYTES: u64 = 256 << 20;

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
    /// Whether one more may be lost, by what was told last, and nothing has happened since,
    bears: bool,
    /// and whether nothing was lost.
    whole: bool,
    /// Disks that have lied in some round: only theirs may have checksum errors.
    lied: Vec<PathBuf>,
    /// What all disks held once, and whether the pool has been opened since.
    copies: Vec<DiskCopy>,
    outdated: bool,
}

struct Bench {
    world: World,
    host: Host,
    level: Level,
    checksums: bool,
    cores: usize,
    mistake: Mistake,
    shelf: Rc<RefCell<Shelf>>,
    volumes: Rc<Volumes>,
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
    /// It is set back to what it held before the pool was opened last, or earlier.
    SetBack(usize),
    /// It is set back to what it held in the middle of an opening, which ends in order, or by a crash after a while.
    SetBackTo(usize, Ending),
    /// All others are set back, and what is done then is refused.
    SetBackAllBut(usize),
}

/// How an opening ends in which a copy of a disk was made.
#[derive(Clone, Copy, Debug)]
enum Ending {
    InOrder,
    /// Nothing was done for a while before.
    Idle,
}

/// Plays it.
pub(crate) async fn play(world: World, mistake: Mistake) -> Result<(), String> {
    let rng = world.rng();
    let (level, disks, extent) = *rng.pick(&[
        (Level::Parity, 4, 48 << 20),
        (Level::Parity, 5, 64 << 20),
        (Level::DoubleParity, 5, 48 << 20),
        (Level::Copies(2), 4, 32 << 20),
        (Level::Copies(3), 3, 16 << 20),
    ]);
    let cores = *rng.pick(&[1, 1, 2, 3]);
    let setup = HostSetup { cores, pool_bytes: 48 << 20, ..HostSetup::default() };
    let host = world.add_host("store", setup);
    let shelf = Rc::new(RefCell::new(Shelf { bears: true, ..Shelf::default() }));
    let volumes = Volumes::new(&world, extent);
    let checksums = rng.chance(0.5);
    let world = world.clone();
    let bench = Bench { world, host, level, checksums, cores, mistake, shelf, volumes };
    (0..disks).for_each(|_| drop(bench.new_disk()));
    bench.create().await?;
    for _ in 0..bench.world.rng().between(2, 5) {
        bench.round().await?;
    }
    bench.last_round().await
}

/// What uses a pool, and ends only if something is wrong.
type Usage = Pin<Box<dyn Future<Output = Result<(), String>>>>;

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
    // By its serial number, which is where it was: it may be away, and its counts are kept.
    let lied = |serial: &String| shelf.lied.contains(&PathBuf::from(serial));
    match report.disks.iter().all(|disk| disk.checksum_errors == 0 || lied(&disk.serial)) {
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

    async fn create(&self) -> Result<(), String> {
        let disks = self.shelf.borrow().disks.iter().map(|path| Self::joining(path)).collect();
        let what = CreatePool {
            id: POOL,
            name: "tank".into(),
            level: self.level,
            columns: None,
            strip_bytes: *self.world.rng().pick(&[16 << 10, 64 << 10]),
            rings: u16::try_from(self.cores).expect("few"),
            checksums: self.checksums,
            disks,
            spares: Vec::new(),
            buffered: false,
            claim: None,
        };
        let volumes: Vec<_> =
            (0..self.world.rng().between(1, 2)).map(|_| self.volumes.draw()).collect();
        let work = self.host.run(move |core| async move {
            let pool = Pool::create(&core, &what).await.map_err(|e| e.to_string())?;
            for volume in volumes {
                pool.create_volume(&volume).await.map_err(|e| e.to_string())?;
            }
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
        // Those that are in have all that was ever written.
        let is_outdated = shelf.outdated && shelf.out.is_empty();
        match rng.below(9) {
            0 if self.checksums => Harm::Lies(victim),
            1 | 2 => Harm::PullOut(victim),
            3 | 4 if is_outdated => Harm::SetBack(victim),
            5 if is_outdated && shelf.whole => Harm::SetBackAllBut(victim),
            6 if shelf.out.is_empty() => {
                Harm::SetBackTo(victim, *rng.pick(&[Ending::InOrder, Ending::Idle]))
            }
            _ => Harm::Faults(victim),
        }
    }

    fn controls(&self) -> Vec<DiskControl> {
        let disks = self.shelf.borrow().disks.clone();
        disks.iter().filter_map(|path| self.host.disk(path)).collect()
    }

    /// What all disks hold now.
    fn copies(&self) -> Vec<DiskCopy> {
        self.controls().iter().map(DiskControl::copy).collect()
    }

    /// What is done to disks before the pool is opened.
    async fn set_back(&self, harm: Harm) -> Result<(), String> {
        match harm {
            Harm::SetBack(n) => {
                let copy = self.shelf.borrow().copies[n].clone();
                self.controls()[n].set_back(&copy);
                self.shelf.borrow_mut().bears = false;
            }
            Harm::SetBackAllBut(n) => self.set_back_all_but(n).await?,
            _ => {}
        }
        let mut shelf = self.shelf.borrow_mut();
        if shelf.copies.is_empty() || self.world.rng().chance(0.3) {
            drop(shelf);
            let copies = self.copies();
            shelf = self.shelf.borrow_mut();
            (shelf.copies, shelf.outdated) = (copies, false);
        }
        Ok(())
    }

    /// One disk alone knows of what was committed last: nothing is opened that it did not lead to, and nothing is changed.
    async fn set_back_all_but(&self, newer: usize) -> Result<(), String> {
        let (now, controls) = (self.copies(), self.controls());
        let copies = self.shelf.borrow().copies.clone();
        for (n, control) in controls.iter().enumerate().filter(|(n, _)| *n != newer) {
            control.set_back(&copies[n]);
        }
        let before = self.copies();
        let (paths, mistake) = (self.paths(), self.mistake);
        let volumes = Rc::clone(&self.volumes);
        self.set_faults(|_| DiskFaults::default());
        let opened = self.host.run_with_all(move |cores| async move {
            match Session::open(cores, paths, volumes, mistake).await {
                Ok(_) => Err("what a disk proves to be committed is not heeded".to_owned()),
                Err(why) if why.contains("are older than") => Ok(()),
                Err(why) => Err(format!("it is not said which disks are older: {why}")),
            }
        });
        opened.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()))?;
        self.host.kill();
        self.settle().await;
        if self.copies() != before {
            return Err("a pool that is not opened is changed".into());
        }
        controls.iter().zip(&now).for_each(|(control, copy)| control.set_back(copy));
        Ok(())
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

    fn disk(&self, n: usize) -> Option<DiskControl> {
        self.host.disk(&self.shelf.borrow().disks[n])
    }

    fn pull_out(&self, n: usize) {
        self.shelf.borrow_mut().out.push(n);
        self.told_nothing();
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
        self.set_back(harm).await?;
        match harm {
            Harm::Lies(n) => return self.lies(n).await,
            Harm::SetBackTo(n, ending) => return self.copied(n, ending).await,
            _ => {}
        }
        let bad = self.draw_faults();
        let victim = if let Harm::Faults(n) = harm { Some(n) } else { None };
        self.set_faults(|n| if victim == Some(n) { bad.clone() } else { DiskFaults::default() });
        let work = self.host.run_with_all(
            self.load(rng.time(Duration::from_millis(20), Duration::from_millis(500))),
        );
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
            self.told_nothing();
        }
        let kill = rng.chance(0.25) && bad.sync_error == 0.0;
        self.end(!kill);
        Ok(())
    }

    /// Uses the pool without end.
    fn load(&self, looks: Duration) -> impl FnOnce(Vec<Core>) -> Usage + use<> {
        let (paths, shelf, world) = (self.paths(), Rc::clone(&self.shelf), self.world.clone());
        let (volumes, mistake) = (Rc::clone(&self.volumes), self.mistake);
        let everywhere = paths.clone();
        move |cores| {
            Box::pin(async move {
                let session = Session::open(cores, paths, volumes, mistake).await;
                let session = session.inspect_err(|why| world.note(why.clone()))?;
                shelf.borrow_mut().outdated = true;
                tokio::task::spawn_local(look(Rc::clone(&session.pool), everywhere, looks));
                loop {
                    session.run(10).await?;
                    session.change().await?;
                    let report = sound(&session.pool, &shelf.borrow())?;
                    let mut shelf = shelf.borrow_mut();
                    (shelf.bears, shelf.whole) = (bears_more(&report), is_whole(&report));
                }
            })
        }
    }

    fn told_nothing(&self) {
        let mut shelf = self.shelf.borrow_mut();
        (shelf.bears, shelf.whole) = (false, false);
    }

    fn end(&self, power: bool) {
        let loss: Loss = end(&self.host, &self.world, power);
        self.volumes.crash(loss);
    }

    /// A copy of a disk is made while the pool is in use, and put in its place afterwards.
    async fn copied(&self, n: usize, ending: Ending) -> Result<(), String> {
        self.set_faults(|_| DiskFaults::default());
        let (paths, shelf) = (self.paths(), Rc::clone(&self.shelf));
        let (volumes, mistake) = (Rc::clone(&self.volumes), self.mistake);
        let disk = self.disk(n).ok_or("there is no such disk")?;
        let before = self.world.rng().below(5);
        let work = self.host.run_with_all(move |cores| async move {
            let session = Session::open(cores, paths, volumes, mistake).await?;
            for _ in 0..before {
                session.run(10).await?;
                session.change().await?;
            }
            let copy = disk.copy();
            session.run(20).await?;
            let report = sound(&session.pool, &shelf.borrow())?;
            let bears = bears_more(&report) && is_whole(&report);
            match ending {
                Ending::InOrder => session.close().await?,
                // Two versions follow what was written, at most ten seconds later.
                Ending::Idle => tokio::time::sleep(Duration::from_secs(12)).await,
            }
            Ok::<_, String>(bears.then_some(copy))
        });
        let copy = match tokio::time::timeout(PATIENCE, work.join()).await {
            Ok(Some(copy)) => copy?,
            Ok(None) => return Err("the host crashed by itself".into()),
            Err(_) => return Err(format!("it does not end in {PATIENCE:?}")),
        };
        self.shelf.borrow_mut().outdated = true;
        self.end(true);
        self.told_nothing();
        if let (Some(copy), Some(disk)) = (copy, self.disk(n)) {
            disk.set_back(&copy);
        }
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
            (shelf.bears, shelf.whole) = (false, false);
        }
        let (paths, disk) = (self.paths(), self.disk(n).ok_or("there is no such disk")?);
        let (volumes, mistake) = (Rc::clone(&self.volumes), self.mistake);
        let rounds = rng.between(1, 20);
        let work = self.host.run_with_all(move |cores| async move {
            let session = Session::open(cores, paths, volumes, mistake).await?;
            disk.set_faults(lies);
            for _ in 0..rounds {
                session.run(10).await?;
            }
            session.audit().await?;
            disk.set_faults(DiskFaults::default());
            scrub(&session.pool).await?;
            session.audit().await?;
            session.run(0).await?;
            session.close().await
        });
        match tokio::time::timeout(PATIENCE, work.join()).await {
            Ok(Some(result)) => result?,
            Ok(None) => return Err("the host crashed by itself".into()),
            Err(_) => return Err(format!("with a disk that lies it does not end in {PATIENCE:?}")),
        }
        self.shelf.borrow_mut().outdated = true;
        self.end(false);
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
        let (paths, last) = (self.paths(), Rc::new(RefCell::new(String::new())));
        let (told, shelf) = (Rc::clone(&last), Rc::clone(&self.shelf));
        let (volumes, mistake) = (Rc::clone(&self.volumes), self.mistake);
        let work = self.host.run_with_all(move |cores| async move {
            let buffers: Vec<_> = cores.iter().map(|core| core.pool().clone()).collect();
            let session = Session::open(cores, paths, volumes, mistake).await?;
            for (gone, path) in replaced {
                let with = Self::joining(&path);
                let replaced = session.pool.replace(&gone, &with).await;
                replaced.map_err(|e| format!("replacing: {e}"))?;
            }
            session.run(LAST_ROUND).await?;
            while !is_whole(&session.pool.report()) {
                *told.borrow_mut() = format!("{:?}", session.pool.report());
                tokio::time::sleep(Duration::from_secs(1)).await;
                session.run(5).await?;
            }
            session.audit().await?;
            sound(&session.pool, &shelf.borrow())?;
            session.close().await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            buffers.iter().try_for_each(memory_is_back)
        });
        match tokio::time::timeout(PATIENCE, work.join()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("it is not whole within {PATIENCE:?}: {}", last.borrow())),
        }
    }
}
