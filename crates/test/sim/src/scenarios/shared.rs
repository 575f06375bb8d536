//! Two machines that reach the same disks, of an image or of a pool: each opens it whenever it may, by a statement now and then, and
//! serves. They are stopped, killed, cut off from power, their clocks drift, and the disks are silent for a while. Never does one
//! of them complete anything that was begun after the other one had opened it; and whoever opens it finds what was answered last.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use block::Dev;
use block::testing::Client;
use disk::claim::Mistake;
use disk::{Claim, NodeIdentity, Provisioning};
use geometry::Level;
use image::{Create, File, Open};
use pool::{CreatePool, NewDisk, NewPoolVolume, OpenPool, Pool, PoolSeat};
use rt::Core;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, World};
use uuid::Uuid;

const POOL: Uuid = Uuid::from_u128(0x91);
const VOLUME: Uuid = Uuid::from_u128(0x92);

/// Bytes of a disk.
const DISK_BYTES: u64 = 64 << 20;

/// Bytes of the volume.
const BYTES: u64 = 8 << 20;

/// Bytes of a block, of which the first eight say what was written.
const BLOCK: usize = 4096;

/// Virtual time of a scenario, and in which the last opening must succeed.
const LENGTH: Duration = Duration::from_secs(240);
const PATIENCE: Duration = Duration::from_secs(300);

/// What both machines are judged by.
struct Judge {
    world: World,
    /// Who has opened it last, and when.
    serving: Cell<Option<(usize, Duration)>>,
    /// What a read may find: the last value that was answered, and those that were begun since.
    values: RefCell<Vec<u64>>,
    next: Cell<u64>,
    answered: Cell<u64>,
    openings: Cell<u64>,
}

impl Judge {
    /// Something was answered at host `n` that was begun at `began`.
    fn answered(&self, n: usize, began: Duration) -> Result<(), String> {
        self.answered.set(self.answered.get() + 1);
        match self.serving.get() {
            Some((other, since)) if other != n && since < began => Err(format!(
                "host {n} has answered at {:?} what was begun at {began:?}, and host {other} serves since {since:?}",
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

    fn written(&self, value: u64) {
        // What was begun later may be there as well.
        self.values.borrow_mut().retain(|v| *v >= value);
    }

    fn check(&self, n: usize, found: u64) -> Result<(), String> {
        let values = self.values.borrow();
        if values.contains(&found) {
            return Ok(());
        }
        Err(format!("host {n} reads {found}, and {values:?} may be there"))
    }
}

/// What is open, and how it is closed.
enum Opened {
    Image(Rc<File>),
    Pool(Rc<Pool>, Rc<PoolSeat>),
}

impl Opened {
    async fn close(self) {
        // Who cannot close it in order leaves it as it is.
        match self {
            Self::Image(file) => drop(file.release().await),
            Self::Pool(pool, seat) => {
                let _ = seat.close().await;
                let _ = pool.close().await;
            }
        }
    }
}

#[derive(Clone)]
struct Bench {
    judge: Rc<Judge>,
    /// Paths of the disks: one of an image, or those of a pool.
    disks: Vec<PathBuf>,
    mistake: Mistake,
    /// Whether everything is to come to its end.
    ends: Rc<Cell<bool>>,
}

fn claim(core: &Core, n: usize, take_over: bool, mistake: Mistake) -> Option<Claim> {
    let (name, host) = (format!("n{n}"), format!("host{n}"));
    let node = NodeIdentity::on(core, Uuid::from_u128(1 + n as u128), &name, &host);
    Some(Claim { take_over, mistake, ..Claim::of(node) })
}

/// Plays it.
pub(crate) async fn play(world: World, mistake: Mistake) -> Result<(), String> {
    let rng = world.rng();
    let is_pool = rng.chance(0.5);
    let setup = || HostSetup {
        pool_bytes: 48 << 20,
        // A tenth of what the waits allow for.
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
    let judge = Rc::new(Judge {
        world: world.clone(),
        serving: Cell::default(),
        values: RefCell::new(vec![0]),
        next: Cell::default(),
        answered: Cell::default(),
        openings: Cell::default(),
    });
    let bench = Bench { judge, disks, mistake, ends: Rc::default() };
    bench.create(&hosts[0]).await?;
    for (n, host) in hosts.iter().enumerate() {
        let bench = bench.clone();
        host.start(move |core| bench.clone().live(core, n));
    }
    let until = world.now() + LENGTH;
    while world.now() < until {
        tokio::time::sleep(rng.time(Duration::ZERO, Duration::from_secs(20))).await;
        bench.mishap(&world, &hosts).await;
    }
    bench.finish(&world, &hosts).await
}

impl Bench {
    async fn create(&self, host: &Host) -> Result<(), String> {
        let bench = self.clone();
        let work = host.run(move |core| async move {
            if let [path] = bench.disks.as_slice() {
                let how = Create {
                    volume: VOLUME,
                    block_size: BLOCK as u32,
                    bytes: Some(BYTES),
                    provisioning: Provisioning::Thin,
                    buffered: false,
                    force: false,
                    keep_contents: false,
                    claim: claim(&core, 0, false, Mistake::None),
                };
                let file = File::create(&core, path, &how).await.map_err(|e| e.to_string())?;
                return file.release().await.map_err(|e| e.to_string());
            }
            let new = |path: &PathBuf| NewDisk { path: path.clone(), overwrite: Vec::new() };
            let what = CreatePool {
                id: POOL,
                name: "tank".into(),
                level: Level::Parity,
                columns: None,
                strip_bytes: 64 << 10,
                rings: 1,
                checksums: false,
                disks: bench.disks.iter().map(new).collect(),
                spares: Vec::new(),
                buffered: false,
                claim: claim(&core, 0, false, Mistake::None),
            };
            let volume =
                NewPoolVolume { id: VOLUME, bytes: BYTES, block_size: BLOCK as u32, thick: false };
            let pool = Pool::create(&core, &what).await.map_err(|e| e.to_string())?;
            pool.create_volume(&volume).await.map_err(|e| e.to_string())?;
            pool.close().await.map_err(|e| e.to_string())
        });
        let made = work.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()));
        host.kill();
        made
    }

    async fn open(&self, core: &Core, n: usize, take_over: bool) -> Result<(Dev, Opened), String> {
        let claim = claim(core, n, take_over, self.mistake);
        if let [path] = self.disks.as_slice() {
            let what =
                Open { volume: VOLUME, generation: 0, buffered: false, read_only: false, claim };
            let file = File::open(core, path, &what).await.map_err(|e| e.to_string())?;
            let file = Rc::new(file);
            return Ok((Dev::shared(Rc::clone(&file)), Opened::Image(file)));
        }
        let (paths, without) = (self.disks.clone(), Vec::new());
        let what = OpenPool { id: POOL, paths, without, buffered: false, claim };
        let pool = Pool::open(core, &what).await.map_err(|e| e.to_string())?;
        let seat = PoolSeat::share(core, &pool, 0).await.map_err(|e| e.to_string())?;
        let dev = seat.open(VOLUME).await.map_err(|e| e.to_string())?;
        Ok((dev, Opened::Pool(pool, seat)))
    }

    /// What a host does for as long as it runs.
    async fn live(self, core: Core, n: usize) -> Result<(), String> {
        let rng = self.judge.world.rng();
        while !self.ends.get() {
            let take_over = rng.chance(0.3);
            match self.open(&core, n, take_over).await {
                Ok((dev, opened)) => {
                    self.judge.serving.set(Some((n, self.judge.world.now())));
                    self.judge.openings.set(self.judge.openings.get() + 1);
                    self.serve(&core, n, dev).await?;
                    opened.close().await;
                }
                Err(why) => self.judge.world.note(format!("host {n}: {why}")),
            }
            tokio::time::sleep(rng.time(Duration::from_secs(1), Duration::from_secs(15))).await;
        }
        Ok(())
    }

    /// Serves until something fails, or for a while.
    async fn serve(&self, core: &Core, n: usize, dev: Dev) -> Result<(), String> {
        let (world, judge) = (&self.judge.world, &self.judge);
        let client = Client::new(&dev, core.pool());
        let until = world.now() + world.rng().time(Duration::ZERO, Duration::from_secs(60));
        while world.now() < until && !self.ends.get() {
            let began = world.now();
            let Ok(read) = client.read(0, 1).await else { return Ok(()) };
            judge.answered(n, began)?;
            let bytes = read.to_vec();
            let found = bytes.first_chunk().map_or(0, |found| u64::from_le_bytes(*found));
            judge.check(n, found)?;
            let (began, value) = (world.now(), judge.begin_write());
            let mut block = vec![0; BLOCK];
            block[..8].copy_from_slice(&value.to_le_bytes());
            if client.write(0, &block, true).await.is_err() {
                return Ok(());
            }
            judge.answered(n, began)?;
            judge.written(value);
            tokio::time::sleep(world.rng().time(Duration::ZERO, Duration::from_millis(300))).await;
        }
        Ok(())
    }

    /// Something happens to a host or to a disk.
    async fn mishap(&self, world: &World, hosts: &[Host; 2]) {
        let rng = world.rng();
        let host = rng.pick(hosts);
        let some = |most: u64| rng.time(Duration::ZERO, Duration::from_secs(most));
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
                // Every way to it is cut for a while.
                let all = hosts.iter().flat_map(|host| {
                    self.disks.iter().filter_map(|path| host.disk(path)).collect::<Vec<_>>()
                });
                let all: Vec<_> = all.collect();
                all.iter().for_each(rt::sim::DiskControl::hold);
                tokio::time::sleep(some(20)).await;
                all.iter().for_each(rt::sim::DiskControl::release);
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
        // Disks of a pool that fail go out, and what comes of that is another scenario's.
        if let [path] = self.disks.as_slice() {
            host.disk(path).into_iter().for_each(|disk| disk.set_faults(faults.clone()));
        }
    }

    /// In the end one of them has it, by a statement, and finds what was answered last.
    async fn finish(&self, world: &World, hosts: &[Host; 2]) -> Result<(), String> {
        self.ends.set(true);
        hosts.iter().for_each(Host::power_cut);
        tokio::time::sleep(Duration::from_secs(30)).await;
        let n = usize::from(world.rng().chance(0.5));
        let bench = self.clone();
        let work = hosts[n].run(move |core| async move {
            let (dev, opened) = bench.open(&core, n, true).await?;
            bench.judge.serving.set(Some((n, bench.judge.world.now())));
            let client = Client::new(&dev, core.pool());
            let read = client.read(0, 1).await.map_err(|e| e.to_string())?.to_vec();
            let found = read.first_chunk().map_or(0, |found| u64::from_le_bytes(*found));
            bench.judge.check(n, found)?;
            client.write(0, &[1; BLOCK], true).await.map_err(|e| e.to_string())?;
            drop((client, dev));
            opened.close().await;
            Ok(())
        });
        let done = tokio::time::timeout(PATIENCE, work.join()).await;
        done.map_err(|_| format!("it is not open within {PATIENCE:?}"))?
            .unwrap_or_else(|| Err("the host crashed by itself".into()))
    }
}
