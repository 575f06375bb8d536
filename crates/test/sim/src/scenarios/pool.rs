//! Volumes of a pool on one or several cores, thin and thick, created and deleted during the run,
//! with crashes and with disks that fail, return wrong data, are pulled out, return, are rolled
//! back or are replaced: never more than the redundancy tolerates. Afterwards every block must hold
//! a value that the history permits, and redundancy is restored. If more disks are rolled back than
//! that, the pool reports it and changes nothing.

use std::cell::RefCell;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::CrashKind;
use geometry::Redundancy;
use pool::{CreatePool, Mistake, NewDisk, Pool, PoolDiskState, PoolReport};
use rt::Core;
use rt::sim::{DiskControl, DiskFaults, DiskImage, DiskSetup, Host, HostSetup, World};
use session::{ExpectedVolumes, Session};
use uuid::Uuid;

use super::storage::{check_no_memory_held, stop_host, wait_disk_idle};

mod session;

const POOL: Uuid = Uuid::from_u128(0x77);

/// Bytes of a disk: space for all volumes, and for rebuilding lost data.
const DISK_BYTES: u64 = 256 << 20;

/// Operations of the last round, in which nothing may fail.
const LAST_ROUND: usize = 100;

/// Virtual time limits.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(900);

/// What the scenario knows of the disks.
#[derive(Debug, Default)]
struct DiskInventory {
    /// Paths by number; replaced disks are removed.
    disks: Vec<PathBuf>,
    /// Numbers of the disks that are pulled out.
    unplugged: Vec<usize>,
    /// Whether one more disk may be lost, by the last report, with no fault since.
    can_lose_one_more: bool,
    /// Whether nothing was lost, by the same report.
    is_intact: bool,
    /// Disks that have returned wrong data in some round: only these may have checksum errors.
    corrupting_disks: Vec<PathBuf>,
    /// Earlier contents of all disks, and whether the pool has been opened since.
    disk_snapshots: Vec<DiskImage>,
    outdated: bool,
}

struct PoolTestbed {
    world: World,
    host: Host,
    level: Redundancy,
    checksums: bool,
    cores: usize,
    mistake: Mistake,
    inventory: Rc<RefCell<DiskInventory>>,
    volumes: Rc<ExpectedVolumes>,
}

/// The fault injected into a disk in a round.
#[derive(Clone, Copy, Debug)]
enum DiskFault {
    None,
    /// It fails or stalls.
    Faults(usize),
    /// It is pulled out at a random moment.
    PullOut(usize),
    /// It loses writes, misdirects them, and returns wrong data.
    Corrupts(usize),
    /// It is rolled back to its contents before the last open, or earlier.
    RollBack(usize),
    /// It is rolled back to its contents in the middle of a session, which ends in order, or by a
    /// crash after a while.
    RollBackToMidSession(usize, SessionEnding),
    /// All other disks are rolled back, and the open must be refused.
    RollBackAllBut(usize),
}

/// How a session ends during which the image of a disk was captured.
#[derive(Clone, Copy, Debug)]
enum SessionEnding {
    Orderly,
    /// The pool was idle for a while before.
    Idle,
}

/// Runs the scenario.
pub(crate) async fn run(world: World, mistake: Mistake) -> Result<(), String> {
    let rng = world.rng();
    let (level, disks, extent) = *rng.pick(&[
        (Redundancy::Parity, 4, 48 << 20),
        (Redundancy::Parity, 5, 64 << 20),
        (Redundancy::DoubleParity, 5, 48 << 20),
        (Redundancy::Copies(2), 4, 32 << 20),
        (Redundancy::Copies(3), 3, 16 << 20),
    ]);
    let cores = *rng.pick(&[1, 1, 2, 3]);
    let setup = HostSetup { cores, memory_bytes: 48 << 20, ..HostSetup::default() };
    let host = world.add_host("store", setup);
    let inventory = Rc::new(RefCell::new(DiskInventory {
        can_lose_one_more: true,
        ..DiskInventory::default()
    }));
    let volumes = ExpectedVolumes::new(&world, extent);
    let checksums = rng.chance(0.5);
    let world = world.clone();
    let bench = PoolTestbed { world, host, level, checksums, cores, mistake, inventory, volumes };
    (0..disks).for_each(|_| drop(bench.new_disk()));
    bench.create().await?;
    for _ in 0..bench.world.rng().between(2, 5) {
        bench.round().await?;
    }
    bench.last_round().await
}

/// A task that uses the pool, and ends only on an error.
type PoolWorkload = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// Checks now and then whether disks have returned.
async fn rescan_disks(pool: Rc<Pool>, paths: Vec<PathBuf>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        pool.reattach_found(paths.clone()).await;
    }
}

/// Checks the pool's report. Disks may fail, but only those with injected corruption may have
/// checksum errors.
fn check_checksum_errors(pool: &Pool, inventory: &DiskInventory) -> Result<PoolReport, String> {
    let report = pool.report();
    // By path, which keeps the counts of an absent disk.
    let lied = |serial: &String| inventory.corrupting_disks.contains(&PathBuf::from(serial));
    match report.disks.iter().all(|disk| disk.checksum_errors == 0 || lied(&disk.serial)) {
        true => Ok(report),
        false => Err(format!("checksums do not match: {report:?}")),
    }
}

/// Scrubs the pool; nothing may be unrepairable.
async fn scrub(pool: &Pool) -> Result<(), String> {
    pool.start_scrub().map_err(|e| e.to_string())?;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let report = pool.report();
        match report.scrub {
            Some(ref scrub) if scrub.is_running => {}
            Some(ref scrub) if scrub.unrecoverable_rows == 0 => return Ok(()),
            _ => return Err(format!("after silent corruption: {report:?}")),
        }
    }
}

/// Whether one more disk may be lost. One of two voters does not open alone, so a three-way mirror
/// is never reduced to two disks.
fn can_lose_one_more(report: &PoolReport) -> bool {
    let may = is_intact(report) || report.redundancy == Redundancy::DoubleParity;
    may && report.write_error.is_none() && report.fault_tolerance.is_some_and(|more| more > 0)
}

fn is_intact(report: &PoolReport) -> bool {
    report.stale_extents == 0 && report.disks.iter().all(|d| d.state != PoolDiskState::Detached)
}

impl PoolTestbed {
    fn new_disk(&self) -> PathBuf {
        let mut inventory = self.inventory.borrow_mut();
        let path = PathBuf::from(format!("/dev/d{}", inventory.disks.len()));
        self.host.add_disk(&path, DiskSetup::device(DISK_BYTES).blocks(512, 4096));
        inventory.disks.push(path.clone());
        path
    }

    fn new_disk_spec(path: &std::path::Path) -> NewDisk {
        NewDisk { path: path.to_owned(), overwrite: Vec::new() }
    }

    async fn create(&self) -> Result<(), String> {
        let disks =
            self.inventory.borrow().disks.iter().map(|path| Self::new_disk_spec(path)).collect();
        let what = CreatePool {
            id: POOL,
            name: "tank".into(),
            redundancy: self.level,
            columns: None,
            strip_bytes: *self.world.rng().pick(&[16 << 10, 64 << 10]),
            max_cores: u16::try_from(self.cores).expect("few"),
            has_checksums: self.checksums,
            disks,
            spares: Vec::new(),
            buffered: false,
            claim: None,
        };
        let volumes: Vec<_> =
            (0..self.world.rng().between(1, 2)).map(|_| self.volumes.draw_new_volume()).collect();
        let work = self.host.run(move |core| async move {
            let pool = Pool::create(&core, &what).await.map_err(|e| e.to_string())?;
            for volume in volumes {
                pool.create_volume(&volume).await.map_err(|e| e.to_string())?;
            }
            pool.close().await.map_err(|e| e.to_string())
        });
        work.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()))
    }

    async fn wait_disks_idle(&self) {
        let disks = self.inventory.borrow().disks.clone();
        for path in disks {
            if let Some(disk) = self.host.disk(&path) {
                wait_disk_idle(&disk).await;
            }
        }
    }

    fn set_faults(&self, faults: impl Fn(usize) -> DiskFaults) {
        for (n, path) in self.inventory.borrow().disks.iter().enumerate() {
            self.host.disk(path).into_iter().for_each(|disk| disk.set_faults(faults(n)));
        }
    }

    /// Draws the disk fault of the next round: none while the redundancy does not tolerate it.
    fn draw_disk_fault(&self) -> DiskFault {
        let (rng, inventory) = (self.world.rng(), self.inventory.borrow());
        if !inventory.can_lose_one_more || rng.chance(0.3) {
            return DiskFault::None;
        }
        let victim = usize::try_from(rng.below(inventory.disks.len() as u64)).expect("few");
        // The disks that are present hold all data ever written.
        let is_outdated = inventory.outdated && inventory.unplugged.is_empty();
        match rng.below(9) {
            0 if self.checksums => DiskFault::Corrupts(victim),
            1 | 2 => DiskFault::PullOut(victim),
            3 | 4 if is_outdated => DiskFault::RollBack(victim),
            5 if is_outdated && inventory.is_intact => DiskFault::RollBackAllBut(victim),
            6 if inventory.unplugged.is_empty() => DiskFault::RollBackToMidSession(
                victim,
                *rng.pick(&[SessionEnding::Orderly, SessionEnding::Idle]),
            ),
            _ => DiskFault::Faults(victim),
        }
    }

    fn controls(&self) -> Vec<DiskControl> {
        let disks = self.inventory.borrow().disks.clone();
        disks.iter().filter_map(|path| self.host.disk(path)).collect()
    }

    /// The contents of all disks now.
    fn copies(&self) -> Vec<DiskImage> {
        self.controls().iter().map(DiskControl::capture_image).collect()
    }

    /// Injects disk faults before the pool is opened.
    async fn roll_back_disks(&self, fault: DiskFault) -> Result<(), String> {
        match fault {
            DiskFault::RollBack(n) => {
                let copy = self.inventory.borrow().disk_snapshots[n].clone();
                self.controls()[n].restore_image(&copy);
                self.inventory.borrow_mut().can_lose_one_more = false;
            }
            DiskFault::RollBackAllBut(n) => self.check_roll_back_all_but(n).await?,
            _ => {}
        }
        let mut inventory = self.inventory.borrow_mut();
        if inventory.disk_snapshots.is_empty() || self.world.rng().chance(0.3) {
            drop(inventory);
            let copies = self.copies();
            inventory = self.inventory.borrow_mut();
            (inventory.disk_snapshots, inventory.outdated) = (copies, false);
        }
        Ok(())
    }

    /// Only one disk has the last commit: opening must fail, name older disks, and change nothing.
    async fn check_roll_back_all_but(&self, newer: usize) -> Result<(), String> {
        let (now, controls) = (self.copies(), self.controls());
        let copies = self.inventory.borrow().disk_snapshots.clone();
        for (n, control) in controls.iter().enumerate().filter(|(n, _)| *n != newer) {
            control.restore_image(&copies[n]);
        }
        let before = self.copies();
        let (paths, mistake) = (self.paths(), self.mistake);
        let volumes = Rc::clone(&self.volumes);
        self.set_faults(|_| DiskFaults::default());
        let opened = self.host.run_with_all(move |cores| async move {
            match Session::open(cores, paths, volumes, mistake).await {
                Ok(_) => Err("a commit that a disk proves is ignored".to_owned()),
                Err(why) if why.contains("are older than") => Ok(()),
                Err(why) => Err(format!("the error does not name the older disks: {why}")),
            }
        });
        opened.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()))?;
        self.host.kill();
        self.wait_disks_idle().await;
        if self.copies() != before {
            return Err("a pool that was not opened has changed".into());
        }
        controls.iter().zip(&now).for_each(|(control, copy)| control.restore_image(copy));
        Ok(())
    }

    /// Draws how a disk fails.
    fn draw_faults(&self) -> DiskFaults {
        let rng = self.world.rng();
        let rate = |most: f64| if rng.chance(0.5) { 0.0 } else { most * rng.unit() };
        DiskFaults {
            read_error: rate(0.2),
            write_error: rate(0.02),
            sync_error: rate(0.02),
            stall: rate(0.01),
            // Longer than the timeout of a disk, both in use and during open: the disk is detached.
            stall_for: Duration::from_secs(*rng.pick(&[2, 2, 2, 25, 100])),
            ..DiskFaults::default()
        }
    }

    fn disk(&self, n: usize) -> Option<DiskControl> {
        self.host.disk(&self.inventory.borrow().disks[n])
    }

    fn pull_out(&self, n: usize) {
        self.inventory.borrow_mut().unplugged.push(n);
        self.forget_reported_state();
        self.disk(n).into_iter().for_each(|disk| disk.unplug());
    }

    /// Plugs in some of the disks that were pulled out.
    fn plug_in(&self) {
        let unplugged = std::mem::take(&mut self.inventory.borrow_mut().unplugged);
        for n in unplugged {
            if self.world.rng().chance(0.6) {
                self.world.note(format!("disk {n} is plugged in"));
                self.disk(n).into_iter().for_each(|disk| disk.plug());
            } else {
                self.inventory.borrow_mut().unplugged.push(n);
            }
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        let (mut paths, rng) = (self.inventory.borrow().disks.clone(), self.world.rng());
        // The paths are found in any order.
        for n in (1..paths.len()).rev() {
            paths.swap(n, usize::try_from(rng.below(n as u64 + 1)).expect("few"));
        }
        paths
    }

    /// Load, faults, and a crash at a random moment.
    async fn round(&self) -> Result<(), String> {
        let rng = self.world.rng();
        self.wait_disks_idle().await;
        self.plug_in();
        let fault = self.draw_disk_fault();
        self.world.note(format!("{fault:?}"));
        self.roll_back_disks(fault).await?;
        match fault {
            DiskFault::Corrupts(n) => return self.check_corrupting_disk(n).await,
            DiskFault::RollBackToMidSession(n, ending) => {
                return self.run_roll_back_to_mid_session(n, ending).await;
            }
            _ => {}
        }
        let bad = self.draw_faults();
        let victim = if let DiskFault::Faults(n) = fault { Some(n) } else { None };
        self.set_faults(|n| if victim == Some(n) { bad.clone() } else { DiskFaults::default() });
        let work = self.host.run_with_all(
            self.load(rng.duration_between(Duration::from_millis(20), Duration::from_millis(500))),
        );
        let longest = match bad.stall_for {
            long if bad.stall > 0.0 && victim.is_some() && long > Duration::from_secs(10) => {
                200_000
            }
            _ if rng.chance(0.3) => 8000,
            _ => 400,
        };
        let crash = self.inject_during_load(fault, Duration::from_millis(longest / 2));
        let ended: Option<Result<(), String>> = tokio::select! {
            biased;
            ended = work.join() => ended,
            () = crash => None,
        };
        if let Some(Err(why)) = ended {
            return Err(why);
        }
        if victim.is_some() {
            // The last changes were not reported.
            self.forget_reported_state();
        }
        let kill = rng.chance(0.25) && bad.sync_error == 0.0;
        self.end(!kill);
        Ok(())
    }

    /// Uses the pool forever.
    fn load(&self, looks: Duration) -> impl FnOnce(Vec<Core>) -> PoolWorkload + use<> {
        let (paths, inventory, world) =
            (self.paths(), Rc::clone(&self.inventory), self.world.clone());
        let (volumes, mistake) = (Rc::clone(&self.volumes), self.mistake);
        let everywhere = paths.clone();
        move |cores| {
            Box::pin(async move {
                let session = Session::open(cores, paths, volumes, mistake).await;
                let session = session.inspect_err(|why| world.note(why.clone()))?;
                inventory.borrow_mut().outdated = true;
                tokio::task::spawn_local(rescan_disks(Rc::clone(&session.pool), everywhere, looks));
                loop {
                    session.run(10).await?;
                    session.run_random_change().await?;
                    let report = check_checksum_errors(&session.pool, &inventory.borrow())?;
                    let mut inventory = inventory.borrow_mut();
                    (inventory.can_lose_one_more, inventory.is_intact) =
                        (can_lose_one_more(&report), is_intact(&report));
                }
            })
        }
    }

    fn forget_reported_state(&self) {
        let mut inventory = self.inventory.borrow_mut();
        (inventory.can_lose_one_more, inventory.is_intact) = (false, false);
    }

    fn end(&self, power: bool) {
        let loss: CrashKind = stop_host(&self.host, &self.world, power);
        self.volumes.crash(loss);
    }

    /// Captures the image of a disk while the pool is in use, and restores it afterwards.
    async fn run_roll_back_to_mid_session(
        &self,
        n: usize,
        ending: SessionEnding,
    ) -> Result<(), String> {
        self.set_faults(|_| DiskFaults::default());
        let (paths, inventory) = (self.paths(), Rc::clone(&self.inventory));
        let (volumes, mistake) = (Rc::clone(&self.volumes), self.mistake);
        let disk = self.disk(n).ok_or("there is no such disk")?;
        let before = self.world.rng().below(5);
        let work = self.host.run_with_all(move |cores| async move {
            let session = Session::open(cores, paths, volumes, mistake).await?;
            for _ in 0..before {
                session.run(10).await?;
                session.run_random_change().await?;
            }
            let copy = disk.capture_image();
            session.run(20).await?;
            let report = check_checksum_errors(&session.pool, &inventory.borrow())?;
            let can_restore = can_lose_one_more(&report) && is_intact(&report);
            match ending {
                SessionEnding::Orderly => session.close().await?,
                // Two metadata versions follow the last write within ten seconds.
                SessionEnding::Idle => tokio::time::sleep(Duration::from_secs(12)).await,
            }
            Ok::<_, String>(can_restore.then_some(copy))
        });
        let copy = match tokio::time::timeout(SCENARIO_TIMEOUT, work.join()).await {
            Ok(Some(copy)) => copy?,
            Ok(None) => return Err("the host crashed by itself".into()),
            Err(_) => return Err(format!("it does not end in {SCENARIO_TIMEOUT:?}")),
        };
        self.inventory.borrow_mut().outdated = true;
        self.end(true);
        self.forget_reported_state();
        if let (Some(copy), Some(disk)) = (copy, self.disk(n)) {
            disk.restore_image(&copy);
        }
        Ok(())
    }

    /// Faults during the load, at moments up to `apart` apart.
    async fn inject_during_load(&self, fault: DiskFault, apart: Duration) {
        let rng = self.world.rng();
        let some = || rng.duration_between(Duration::ZERO, apart);
        tokio::time::sleep(some()).await;
        if let DiskFault::PullOut(n) = fault {
            self.pull_out(n);
            tokio::time::sleep(some() / 2).await;
            if rng.chance(0.4) {
                self.world.note(format!("disk {n} is plugged in at once"));
                self.inventory.borrow_mut().unplugged.retain(|out| *out != n);
                self.disk(n).into_iter().for_each(|disk| disk.plug());
            }
        }
        tokio::time::sleep(some()).await;
    }

    /// Load on a disk that returns wrong data, a scrub, and an orderly close: after a power cut,
    /// recent writes are not verified.
    async fn check_corrupting_disk(&self, n: usize) -> Result<(), String> {
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
            let mut inventory = self.inventory.borrow_mut();
            let path = inventory.disks[n].clone();
            inventory.corrupting_disks.push(path);
            (inventory.can_lose_one_more, inventory.is_intact) = (false, false);
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
        match tokio::time::timeout(SCENARIO_TIMEOUT, work.join()).await {
            Ok(Some(result)) => result?,
            Ok(None) => return Err("the host crashed by itself".into()),
            Err(_) => {
                return Err(format!(
                    "with a corrupting disk it does not end in {SCENARIO_TIMEOUT:?}"
                ));
            }
        }
        self.inventory.borrow_mut().outdated = true;
        self.end(false);
        Ok(())
    }

    /// Without faults, and with all disks present or replaced: everything must work, and be fully
    /// redundant in the end.
    async fn last_round(&self) -> Result<(), String> {
        self.wait_disks_idle().await;
        self.set_faults(|_| DiskFaults::default());
        let unplugged = std::mem::take(&mut self.inventory.borrow_mut().unplugged);
        let mut replaced = Vec::new();
        for n in unplugged {
            if self.world.rng().chance(0.5) {
                self.disk(n).into_iter().for_each(|disk| disk.plug());
            } else {
                let old = self.inventory.borrow().disks[n].display().to_string();
                replaced.push((old, self.new_disk()));
            }
        }
        let (paths, last) = (self.paths(), Rc::new(RefCell::new(String::new())));
        let (last_report, inventory) = (Rc::clone(&last), Rc::clone(&self.inventory));
        let (volumes, mistake) = (Rc::clone(&self.volumes), self.mistake);
        let work = self.host.run_with_all(move |cores| async move {
            let buffers: Vec<_> = cores.iter().map(|core| core.buffer_pool().clone()).collect();
            let session = Session::open(cores, paths, volumes, mistake).await?;
            for (gone, path) in replaced {
                let with = Self::new_disk_spec(&path);
                let replaced = session.pool.replace(&gone, &with).await;
                replaced.map_err(|e| format!("replacing: {e}"))?;
            }
            session.run(LAST_ROUND).await?;
            while !is_intact(&session.pool.report()) {
                *last_report.borrow_mut() = format!("{:?}", session.pool.report());
                tokio::time::sleep(Duration::from_secs(1)).await;
                session.run(5).await?;
            }
            session.audit().await?;
            check_checksum_errors(&session.pool, &inventory.borrow())?;
            session.close().await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            buffers.iter().try_for_each(check_no_memory_held)
        });
        match tokio::time::timeout(SCENARIO_TIMEOUT, work.join()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => {
                Err(format!("it is not rebuilt within {SCENARIO_TIMEOUT:?}: {}", last.borrow()))
            }
        }
    }
}
