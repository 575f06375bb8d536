//! Two machines that share the disks of an image or of a pool. Each opens it whenever it may,
//! sometimes by an operator's statement, and serves. Machines are stopped, killed and lose power,
//! their clocks drift, and the disks stall. A machine must never complete an operation that began
//! after the other one had opened the disks; a machine that opens them must find what was
//! acknowledged last.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use block::Dev;
use block::testing::TestClient;
use disk::claim::Mistake;
use disk::{ClaimRequest, NodeIdentity, Provisioning};
use geometry::Redundancy;
use image::{CreateImageOptions, FlatImage, OpenImageOptions};
use pool::{CorePool, CreatePool, NewDisk, NewPoolVolume, OpenPool, Pool};
use rt::Core;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, World};
use uuid::Uuid;

const POOL: Uuid = Uuid::from_u128(0x91);
const VOLUME: Uuid = Uuid::from_u128(0x92);

/// Bytes of a disk.
const DISK_BYTES: u64 = 64 << 20;

/// Bytes of the volume.
const BYTES: u64 = 8 << 20;

/// Block size in bytes; the first eight bytes hold the value.
const BLOCK: usize = 4096;

/// Virtual time limit of a scenario, and of the last open.
const SCENARIO_LENGTH: Duration = Duration::from_secs(240);
const FINAL_OPEN_LIMIT: Duration = Duration::from_secs(300);

/// Checks both machines.
struct OwnershipChecker {
    world: World,
    /// Which machine has opened it last, and when.
    last_owner: Cell<Option<(usize, Duration)>>,
    /// Values that a read may return: the last acknowledged one, and those written since.
    values: RefCell<Vec<u64>>,
    next: Cell<u64>,
    answered: Cell<u64>,
    openings: Cell<u64>,
}

impl OwnershipChecker {
    /// Host `n` completed an operation that began at `began`.
    fn record_completion(&self, n: usize, began: Duration) -> Result<(), String> {
        self.answered.set(self.answered.get() + 1);
        match self.last_owner.get() {
            Some((other, since)) if other != n && since < began => Err(format!(
                "host {n} answered at {:?} an operation begun at {began:?}, but host {other} serves since {since:?}",
                self.world.now()
            )),
            _ => Ok(()),
        }
    }

    fn begin_write(&self) -> u64 {
        let value = self.next.get() + 1;
        self.next.set(value);
        self.values.borrow_mut().push(value);
        value
    }

    fn record_written(&self, value: u64) {
        // Later writes may have taken effect as well.
        self.values.borrow_mut().retain(|v| *v >= value);
    }

    fn check_read(&self, n: usize, found: u64) -> Result<(), String> {
        let values = self.values.borrow();
        if values.contains(&found) {
            return Ok(());
        }
        Err(format!("host {n} reads {found}, and {values:?} may be there"))
    }
}

/// What is open, and how it is closed.
enum OpenResource {
    Image(Rc<FlatImage>),
    Pool(Rc<Pool>, Rc<CorePool>),
}

impl OpenResource {
    async fn close(self) {
        // If an orderly close fails, the disks stay as they are.
        match self {
            Self::Image(file) => drop(file.release().await),
            Self::Pool(pool, core_pool) => {
                let _ = core_pool.close().await;
                let _ = pool.close().await;
            }
        }
    }
}

#[derive(Clone)]
struct SharedDiskTestbed {
    judge: Rc<OwnershipChecker>,
    /// Paths of the disks: one for an image, or those of a pool.
    disks: Vec<PathBuf>,
    mistake: Mistake,
    /// Whether the scenario is ending.
    stop: Rc<Cell<bool>>,
}

fn claim(core: &Core, n: usize, take_over: bool, mistake: Mistake) -> Option<ClaimRequest> {
    let (name, host) = (format!("n{n}"), format!("host{n}"));
    let node = NodeIdentity::ephemeral(core, Uuid::from_u128(1 + n as u128), &name, &host);
    Some(ClaimRequest { take_over, mistake, ..ClaimRequest::for_node(node) })
}

/// Runs the scenario.
pub(crate) async fn run(world: World, mistake: Mistake) -> Result<(), String> {
    let rng = world.rng();
    let is_pool = rng.chance(0.5);
    let setup = || HostSetup {
        memory_bytes: 48 << 20,
        // Up to a tenth off, within what the waits allow for.
        clock_drift_ppm: i32::try_from(rng.below(200_000)).unwrap_or(0) - 100_000,
        ..HostSetup::default()
    };
    let hosts = [world.add_host("a", setup()), world.add_host("b", setup())];
    let count = if is_pool { 3 } else { 1 };
    let disks: Vec<PathBuf> = (0..count).map(|n| format!("/dev/lun{n}").into()).collect();
    for path in &disks {
        hosts[0].add_disk(path, DiskSetup::device(DISK_BYTES));
        hosts[1].share_disk(path, &hosts[0]);
    }
    let judge = Rc::new(OwnershipChecker {
        world: world.clone(),
        last_owner: Cell::default(),
        values: RefCell::new(vec![0]),
        next: Cell::default(),
        answered: Cell::default(),
        openings: Cell::default(),
    });
    let bench = SharedDiskTestbed { judge, disks, mistake, stop: Rc::default() };
    bench.create(&hosts[0]).await?;
    for (n, host) in hosts.iter().enumerate() {
        let bench = bench.clone();
        host.start(move |core| bench.clone().run_host(core, n));
    }
    let until = world.now() + SCENARIO_LENGTH;
    while world.now() < until {
        tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_secs(20))).await;
        bench.inject_fault(&world, &hosts).await;
    }
    bench.finish(&world, &hosts).await
}

impl SharedDiskTestbed {
    async fn create(&self, host: &Host) -> Result<(), String> {
        let bench = self.clone();
        let work = host.run(move |core| async move {
            if let [path] = bench.disks.as_slice() {
                let how = CreateImageOptions {
                    volume_id: VOLUME,
                    block_size: BLOCK as u32,
                    size_bytes: Some(BYTES),
                    provisioning: Provisioning::Thin,
                    allow_page_cache: false,
                    overwrite: false,
                    keep_contents: false,
                    claim: claim(&core, 0, false, Mistake::None),
                };
                let file = FlatImage::create(&core, path, &how).await.map_err(|e| e.to_string())?;
                return file.release().await.map_err(|e| e.to_string());
            }
            let new = |path: &PathBuf| NewDisk { path: path.clone(), overwrite: Vec::new() };
            let what = CreatePool {
                id: POOL,
                name: "tank".into(),
                redundancy: Redundancy::Parity,
                columns: None,
                strip_bytes: 64 << 10,
                max_cores: 1,
                has_checksums: false,
                disks: bench.disks.iter().map(new).collect(),
                spares: Vec::new(),
                buffered: false,
                claim: claim(&core, 0, false, Mistake::None),
            };
            let volume = NewPoolVolume {
                id: VOLUME,
                bytes: BYTES,
                block_size: BLOCK as u32,
                is_thick: false,
            };
            let pool = Pool::create(&core, &what).await.map_err(|e| e.to_string())?;
            pool.create_volume(&volume).await.map_err(|e| e.to_string())?;
            pool.close().await.map_err(|e| e.to_string())
        });
        let made = work.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()));
        host.kill();
        made
    }

    async fn open(
        &self,
        core: &Core,
        n: usize,
        take_over: bool,
    ) -> Result<(Dev, OpenResource), String> {
        let claim = claim(core, n, take_over, self.mistake);
        if let [path] = self.disks.as_slice() {
            let what = OpenImageOptions {
                volume_id: VOLUME,
                min_generation: 0,
                allow_page_cache: false,
                read_only: false,
                claim,
            };
            let file = FlatImage::open(core, path, &what).await.map_err(|e| e.to_string())?;
            let file = Rc::new(file);
            return Ok((Dev::shared(Rc::clone(&file)), OpenResource::Image(file)));
        }
        let (paths, without) = (self.disks.clone(), Vec::new());
        let what = OpenPool { id: POOL, paths, missing_disks: without, buffered: false, claim };
        let pool = Pool::open(core, &what).await.map_err(|e| e.to_string())?;
        let core_pool =
            CorePool::attach_on_owner_core(core, &pool, 0).await.map_err(|e| e.to_string())?;
        let dev = core_pool.open_volume(VOLUME).await.map_err(|e| e.to_string())?;
        Ok((dev, OpenResource::Pool(pool, core_pool)))
    }

    /// The main loop of a host.
    async fn run_host(self, core: Core, n: usize) -> Result<(), String> {
        let rng = self.judge.world.rng();
        while !self.stop.get() {
            let take_over = rng.chance(0.3);
            match self.open(&core, n, take_over).await {
                Ok((dev, opened)) => {
                    self.judge.last_owner.set(Some((n, self.judge.world.now())));
                    self.judge.openings.set(self.judge.openings.get() + 1);
                    self.serve(&core, n, dev).await?;
                    opened.close().await;
                }
                Err(why) => self.judge.world.note(format!("host {n}: {why}")),
            }
            tokio::time::sleep(
                rng.duration_between(Duration::from_secs(1), Duration::from_secs(15)),
            )
            .await;
        }
        Ok(())
    }

    /// Serves until an operation fails, or for a while.
    async fn serve(&self, core: &Core, n: usize, dev: Dev) -> Result<(), String> {
        let (world, checker) = (&self.judge.world, &self.judge);
        let client = TestClient::new(&dev, core.buffer_pool());
        let until =
            world.now() + world.rng().duration_between(Duration::ZERO, Duration::from_secs(60));
        while world.now() < until && !self.stop.get() {
            let began = world.now();
            let Ok(read) = client.read(0, 1).await else { return Ok(()) };
            checker.record_completion(n, began)?;
            let bytes = read.to_vec();
            let found = bytes.first_chunk().map_or(0, |found| u64::from_le_bytes(*found));
            checker.check_read(n, found)?;
            let (began, value) = (world.now(), checker.begin_write());
            let mut block = vec![0; BLOCK];
            block[..8].copy_from_slice(&value.to_le_bytes());
            if client.write(0, &block, true).await.is_err() {
                return Ok(());
            }
            checker.record_completion(n, began)?;
            checker.record_written(value);
            tokio::time::sleep(
                world.rng().duration_between(Duration::ZERO, Duration::from_millis(300)),
            )
            .await;
        }
        Ok(())
    }

    /// Injects a fault into a host or a disk.
    async fn inject_fault(&self, world: &World, hosts: &[Host; 2]) {
        let rng = world.rng();
        let host = rng.pick(hosts);
        let some = |most: u64| rng.duration_between(Duration::ZERO, Duration::from_secs(most));
        match rng.below(6) {
            0 => host.pause(some(8)),
            1 => host.pause(some(60)),
            2 => {
                host.kill();
                tokio::time::sleep(some(20)).await;
                host.restart();
            }
            3 => {
                host.power_cut();
                tokio::time::sleep(some(40)).await;
                host.restart();
            }
            4 => {
                // Cut every path to the disk for a while.
                let all = hosts.iter().flat_map(|host| {
                    self.disks.iter().filter_map(|path| host.disk(path)).collect::<Vec<_>>()
                });
                let all: Vec<_> = all.collect();
                all.iter().for_each(rt::sim::DiskControl::hold_completions);
                tokio::time::sleep(some(20)).await;
                all.iter().for_each(rt::sim::DiskControl::release_completions);
            }
            _ => {
                self.set_faults(
                    &hosts[0],
                    &DiskFaults { write_error: 0.5, ..DiskFaults::default() },
                );
                tokio::time::sleep(some(10)).await;
                self.set_faults(&hosts[0], &DiskFaults::default());
            }
        }
    }

    fn set_faults(&self, host: &Host, faults: &DiskFaults) {
        // Failing disks of a pool are detached; another scenario tests that.
        if let [path] = self.disks.as_slice() {
            host.disk(path).into_iter().for_each(|disk| disk.set_faults(faults.clone()));
        }
    }

    /// At the end one machine opens it by a statement, and finds what was acknowledged last.
    async fn finish(&self, world: &World, hosts: &[Host; 2]) -> Result<(), String> {
        self.stop.set(true);
        hosts.iter().for_each(Host::power_cut);
        tokio::time::sleep(Duration::from_secs(30)).await;
        let n = usize::from(world.rng().chance(0.5));
        let bench = self.clone();
        let work = hosts[n].run(move |core| async move {
            let (dev, opened) = bench.open(&core, n, true).await?;
            bench.judge.last_owner.set(Some((n, bench.judge.world.now())));
            let client = TestClient::new(&dev, core.buffer_pool());
            let read = client.read(0, 1).await.map_err(|e| e.to_string())?.to_vec();
            let found = read.first_chunk().map_or(0, |found| u64::from_le_bytes(*found));
            bench.judge.check_read(n, found)?;
            client.write(0, &[1; BLOCK], true).await.map_err(|e| e.to_string())?;
            drop((client, dev));
            opened.close().await;
            Ok(())
        });
        let done = tokio::time::timeout(FINAL_OPEN_LIMIT, work.join()).await;
        done.map_err(|_| format!("it is not open within {FINAL_OPEN_LIMIT:?}"))?
            .unwrap_or_else(|| Err("the host crashed by itself".into()))
    }
}
