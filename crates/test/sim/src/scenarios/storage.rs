//! A storage stack under random load, crashes and disk faults, judged by the register checker.
//!
//! The stack is whatever [`StorageStack`] opens on a host's disk. Each round loads it with random
//! operations and ends in a power cut or a kill at a random moment; afterwards every block must
//! hold a value that the history permits. At the end all faults are off, and the stack must
//! complete every operation and release all memory.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use block::testing::TestClient;
use block::testing::register::{Checker, CrashKind, InitialContents, Violation};
use block::testing::workload::Workload;
use block::{Blocks, BufferPool, Dev, Lba};
use rt::Core;
use rt::sim::{DiskControl, DiskFaults, DiskSetup, Host, HostFaults, HostSetup, Rng, World};

/// Path of the stack's disk.
pub(crate) const DISK: &str = "/dev/under-test";

/// More operations than a round has time for.
const UNLIMITED_OPERATIONS: usize = 1_000_000;

/// Operations of the last round, in which nothing may fail.
const LAST_ROUND: usize = 100;

/// How often opening a stack is tried before it counts as failed.
const OPEN_ATTEMPTS: u32 = 10;

/// Virtual time limits.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(120);

/// Checks that no memory of `pool` is allocated or waited for, and that it was never overcommitted.
pub(crate) fn check_no_memory_held(pool: &BufferPool) -> Result<(), String> {
    let usage = pool.usage();
    if usage.free != usage.total || usage.waiting > 0 || usage.overdrafts > 0 {
        return Err(format!("memory was leaked or overdrawn: {usage:?}"));
    }
    Ok(())
}

/// Geometry of a stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StackGeometry {
    /// Block size in bytes.
    pub(crate) block_size: u32,
    /// Logical and physical block size of the disk, in bytes.
    pub(crate) disk: (u32, u32),
    /// Size of the device in bytes.
    pub(crate) bytes: u64,
}

impl StackGeometry {
    /// Draws sizes that fit each other.
    pub(crate) fn draw(world: &World) -> Self {
        let (block_size, disk) = *world.rng().pick(&[
            (512, (512, 512)),
            (512, (512, 4096)),
            (4096, (512, 4096)),
            (4096, (4096, 4096)),
        ]);
        let bytes = *world.rng().pick(&[128 << 10, 256 << 10, 1 << 20]);
        Self { block_size, disk, bytes }
    }
}

impl StackGeometry {
    /// Size of the disk: space for the data and the stack's metadata.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.bytes + (4 << 20)
    }
}

/// A stack that can be opened as a device.
pub(crate) trait StorageStack: Clone + 'static {
    /// Prepares a new disk of the host.
    fn prepare(
        &self,
        host: &Host,
        geometry: StackGeometry,
    ) -> impl Future<Output = Result<(), String>>;

    /// Opens the stack, both the first time and after a crash.
    fn open(
        &self,
        core: Core,
        geometry: StackGeometry,
    ) -> impl Future<Output = Result<Dev, String>>;
}

/// Opens a stack on a disk that a killed process may still hold: its last operation takes as long
/// as a stall does, and the disk is busy until then.
pub(crate) async fn open_with_retry(
    core: &Core,
    stack: &impl StorageStack,
    geometry: StackGeometry,
) -> Result<Dev, String> {
    let mut attempts = 0;
    loop {
        match stack.open(core.clone(), geometry).await {
            Ok(dev) => return Ok(dev),
            Err(e) if attempts == OPEN_ATTEMPTS => return Err(e),
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
        attempts += 1;
    }
}

/// Waits for disk operations of a killed process. If a sync failed now, no process would learn of
/// it, and no stack can defend itself against that.
pub(crate) async fn wait_disk_idle(disk: &DiskControl) {
    while disk.in_flight() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Ends the process of `host`, by a power cut or a kill; returns what that may lose.
pub(crate) fn stop_host(host: &Host, world: &World, power: bool) -> CrashKind {
    let loss = if power {
        host.power_cut();
        CrashKind::PowerLoss
    } else {
        host.kill();
        CrashKind::ProcessDeath
    };
    world.note(format!("{loss:?}"));
    loss
}

/// Draws the disk faults of a world.
pub(crate) fn draw_faults(world: &World) -> DiskFaults {
    let rng = world.rng();
    let rate = |most: f64| if rng.chance(0.5) { 0.0 } else { most * rng.unit() };
    if rng.chance(0.5) {
        return DiskFaults::default();
    }
    DiskFaults {
        read_error: rate(0.02),
        write_error: rate(0.02),
        sync_error: rate(0.01),
        stall: rate(0.01),
        stall_for: Duration::from_secs(5),
        ..DiskFaults::default()
    }
}

/// Draws faults of a host's clock and process, each up to `worst` and some of them absent. Uses its
/// own random stream, so that other random choices of a seed do not change.
pub(crate) fn draw_host_faults(rng: &Rng, worst: HostFaults) -> HostFaults {
    let some = |most: Duration| if rng.chance(0.4) { Duration::ZERO } else { most };
    HostFaults {
        max_drift_ppm: if rng.chance(0.2) { 0 } else { worst.max_drift_ppm },
        max_drift_duration: some(worst.max_drift_duration),
        max_pause_interval: some(worst.max_pause_interval),
        max_pause_duration: worst.max_pause_duration,
    }
}

/// One world with one stack.
struct StorageTestbed<S> {
    world: World,
    host: Host,
    disk: DiskControl,
    geometry: StackGeometry,
    stack: S,
    checker: Rc<RefCell<Checker>>,
}

/// Runs the scenario on a stack.
pub(crate) async fn run<S: StorageStack>(world: World, stack: S) -> Result<(), String> {
    let geometry = StackGeometry::draw(&world);
    let host =
        world.add_host("store", HostSetup { memory_bytes: 16 << 20, ..HostSetup::default() });
    let (logical, physical) = geometry.disk;
    let setup = DiskSetup::device(geometry.disk_bytes()).blocks(logical, physical);
    let disk = host.add_disk(DISK, setup);
    stack.prepare(&host, geometry).await?;
    let checker = Checker::new(1, geometry.block_size, InitialContents::Zeroes);
    let checker = Rc::new(RefCell::new(checker));
    let bench = StorageTestbed { world, host, disk, geometry, stack, checker };
    for _ in 0..bench.world.rng().between(1, 4) {
        bench.round().await?;
    }
    bench.last_round().await
}

impl<S: StorageStack> StorageTestbed<S> {
    fn span(&self) -> Blocks {
        Blocks::new(Lba(0), self.geometry.bytes / u64::from(self.geometry.block_size))
    }

    /// Opens the stack on the host and creates a workload on it.
    async fn load(
        core: Core,
        stack: S,
        geometry: StackGeometry,
        span: Blocks,
        seed: u64,
    ) -> Result<Workload, String> {
        let pool = core.buffer_pool().clone();
        let dev = open_with_retry(&core, &stack, geometry).await?;
        let depth = usize::try_from(1 + seed % 12).expect("small");
        Ok(Workload::new(TestClient::new(&dev, &pool), span, depth, seed))
    }

    /// Load, and a crash at a random moment.
    async fn round(&self) -> Result<(), String> {
        let rng = self.world.rng();
        wait_disk_idle(&self.disk).await;
        self.disk.set_faults(draw_faults(&self.world));
        let (stack, geometry, span, seed) =
            (self.stack.clone(), self.geometry, self.span(), rng.u64());
        let checker = Rc::clone(&self.checker);
        let work = self.host.run(move |core| async move {
            // A stack may fail to open on a faulty disk.
            let Ok(load) = Self::load(core, stack, geometry, span, seed).await else {
                return Ok(());
            };
            load.audit(&checker).await?;
            load.run(&checker, UNLIMITED_OPERATIONS).await
        });
        let crash = async {
            tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_millis(400)))
                .await;
        };
        let ended: Option<Result<(), Violation>> = tokio::select! {
            biased;
            ended = work.join() => ended,
            () = crash => None,
        };
        if let Some(Err(violation)) = ended {
            return Err(violation.to_string());
        }
        self.crash();
        Ok(())
    }

    fn crash(&self) {
        // When the process ends after a failed sync, the same data is lost as in a power cut.
        let kill = self.world.rng().chance(0.25) && self.disk.faults().sync_error == 0.0;
        self.checker.borrow_mut().crash(stop_host(&self.host, &self.world, !kill));
    }

    /// Without faults: everything must work, and all memory must be released.
    async fn last_round(&self) -> Result<(), String> {
        wait_disk_idle(&self.disk).await;
        self.disk.set_faults(DiskFaults::default());
        let (stack, geometry, span, seed) =
            (self.stack.clone(), self.geometry, self.span(), self.world.rng().u64());
        let checker = Rc::clone(&self.checker);
        let work = self.host.run(move |core| async move {
            let pool = core.buffer_pool().clone();
            let load = Self::load(core, stack, geometry, span, seed).await?;
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            load.run(&checker, LAST_ROUND).await.map_err(|v| v.to_string())?;
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            let errors = load.take_errors();
            if !errors.is_empty() {
                return Err(format!("without faults: {errors:?}"));
            }
            drop(load);
            check_no_memory_held(&pool)
        });
        match tokio::time::timeout(SCENARIO_TIMEOUT, work.join()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("an operation did not end within {SCENARIO_TIMEOUT:?}")),
        }
    }
}
