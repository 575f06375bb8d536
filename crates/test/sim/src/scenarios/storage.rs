//! A storage stack under random load, crashes and disk faults, judged by the register checker.
//!
//! The stack is whatever [`Stack`] opens on a host's disk. Each round loads it with random
//! operations and ends in a power cut or a kill at a random moment; afterwards every block must
//! hold a value that the history permits. At the end all faults are off and the stack must answer
//! every operation, and give back all memory.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use block::testing::Client;
use block::testing::register::{Checker, Initially, Loss, Violation};
use block::testing::workload::Workload;
use block::{Blocks, Dev, Lba, Pool};
use rt::Core;
use rt::sim::{DiskControl, DiskFaults, DiskSetup, Host, HostFaults, HostSetup, Rng, World};

/// Where the disk of the stack is.
pub(crate) const DISK: &str = "/dev/under-test";

/// More operations than a round has time for.
const ENDLESS: usize = 1_000_000;

/// Operations of the last round, in which nothing may fail.
const LAST_ROUND: usize = 100;

/// How often a stack is opened before that counts as failed.
const ATTEMPTS: u32 = 10;

/// Virtual time in which these must end.
const PATIENCE: Duration = Duration::from_secs(120);

/// That nobody has memory of `pool` any more, or waits for it, and nobody had more than it has.
pub(crate) fn memory_is_back(pool: &Pool) -> Result<(), String> {
    let usage = pool.usage();
    if usage.free != usage.total || usage.waiting > 0 || usage.overdrafts > 0 {
        return Err(format!("memory was kept or overdrawn: {usage:?}"));
    }
    Ok(())
}

/// What a stack is to be like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Size of its blocks in bytes.
    pub(crate) block_size: u32,
    /// Logical and physical block size of the disk, in bytes.
    pub(crate) disk: (u32, u32),
    /// Size of the device in bytes.
    pub(crate) bytes: u64,
}

impl Shape {
    /// Sizes that fit each other.
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

impl Shape {
    /// Size of the disk below: room for whatever a stack keeps beside its data.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.bytes + (4 << 20)
    }
}

/// Something that can be opened as a device.
pub(crate) trait Stack: Clone + 'static {
    /// Prepares a new disk of the host.
    fn prepare(&self, host: &Host, shape: Shape) -> impl Future<Output = Result<(), String>>;

    /// Opens the stack, after a crash like the first time.
    fn open(&self, core: Core, shape: Shape) -> impl Future<Output = Result<Dev, String>>;
}

/// Opens a stack on a disk that may still be held: the last operation of a killed process takes as
/// long as a stall does, and the disk is not free before.
pub(crate) async fn open_patiently(
    core: &Core,
    stack: &impl Stack,
    shape: Shape,
) -> Result<Dev, String> {
    let mut attempts = 0;
    loop {
        match stack.open(core.clone(), shape).await {
            Ok(dev) => return Ok(dev),
            Err(e) if attempts == ATTEMPTS => return Err(e),
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
        attempts += 1;
    }
}

/// Waits for what a killed process has left running on the disk. Were it to fail now, nobody would
/// learn that a sync had failed, and no stack can defend itself against that.
pub(crate) async fn settle(disk: &DiskControl) {
    while disk.in_flight() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Ends the process of `host`, with the power or by force; what that may lose.
pub(crate) fn end(host: &Host, world: &World, power: bool) -> Loss {
    let loss = if power {
        host.power_cut();
        Loss::Unflushed
    } else {
        host.kill();
        Loss::InFlight
    };
    world.note(format!("{loss:?}"));
    loss
}

/// How much harm is done besides crashes.
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

/// What befalls a host's clock and process, each of it up to `worst` and some of it not at all.
/// Draws from a stream of its own, so that what else a seed decides stays as it was.
pub(crate) fn draw_host_faults(rng: &Rng, worst: HostFaults) -> HostFaults {
    let some = |most: Duration| if rng.chance(0.4) { Duration::ZERO } else { most };
    HostFaults {
        drift_ppm: if rng.chance(0.2) { 0 } else { worst.drift_ppm },
        drift_for: some(worst.drift_for),
        pause_every: some(worst.pause_every),
        pause_for: worst.pause_for,
    }
}

/// One world with one stack.
struct Bench<S> {
    world: World,
    host: Host,
    disk: DiskControl,
    shape: Shape,
    stack: S,
    checker: Rc<RefCell<Checker>>,
}

/// Plays a stack.
pub(crate) async fn play<S: Stack>(world: World, stack: S) -> Result<(), String> {
    let shape = Shape::draw(&world);
    let host = world.add_host("store", HostSetup { pool_bytes: 16 << 20, ..HostSetup::default() });
    let (logical, physical) = shape.disk;
    let setup = DiskSetup::device(shape.disk_bytes()).blocks(logical, physical);
    let disk = host.add_disk(DISK, setup);
    stack.prepare(&host, shape).await?;
    let checker = Checker::new(1, shape.block_size, Initially::Zeroes);
    let checker = Rc::new(RefCell::new(checker));
    let bench = Bench { world, host, disk, shape, stack, checker };
    for _ in 0..bench.world.rng().between(1, 4) {
        bench.round().await?;
    }
    bench.last_round().await
}

impl<S: Stack> Bench<S> {
    fn span(&self) -> Blocks {
        Blocks::new(Lba(0), self.shape.bytes / u64::from(self.shape.block_size))
    }

    /// Opens the stack on the host and makes a workload on it.
    async fn load(
        core: Core,
        stack: S,
        shape: Shape,
        span: Blocks,
        seed: u64,
    ) -> Result<Workload, String> {
        let pool = core.pool().clone();
        let dev = open_patiently(&core, &stack, shape).await?;
        let depth = usize::try_from(1 + seed % 12).expect("small");
        Ok(Workload::new(Client::new(&dev, &pool), span, depth, seed))
    }

    /// Load, and a crash at a random moment.
    async fn round(&self) -> Result<(), String> {
        let rng = self.world.rng();
        settle(&self.disk).await;
        self.disk.set_faults(draw_faults(&self.world));
        let (stack, shape, span, seed) = (self.stack.clone(), self.shape, self.span(), rng.u64());
        let checker = Rc::clone(&self.checker);
        let work = self.host.run(move |core| async move {
            // A stack that does not open on a faulty disk is not at fault.
            let Ok(load) = Self::load(core, stack, shape, span, seed).await else { return Ok(()) };
            load.audit(&checker).await?;
            load.run(&checker, ENDLESS).await
        });
        let crash = async {
            tokio::time::sleep(rng.time(Duration::ZERO, Duration::from_millis(400))).await;
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
        // A failed sync loses what a power cut loses, when the process ends.
        let kill = self.world.rng().chance(0.25) && self.disk.faults().sync_error == 0.0;
        self.checker.borrow_mut().crash(end(&self.host, &self.world, !kill));
    }

    /// No faults any more: everything must work, and all memory must come back.
    async fn last_round(&self) -> Result<(), String> {
        settle(&self.disk).await;
        self.disk.set_faults(DiskFaults::default());
        let (stack, shape, span, seed) =
            (self.stack.clone(), self.shape, self.span(), self.world.rng().u64());
        let checker = Rc::clone(&self.checker);
        let work = self.host.run(move |core| async move {
            let pool = core.pool().clone();
            let load = Self::load(core, stack, shape, span, seed).await?;
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            load.run(&checker, LAST_ROUND).await.map_err(|v| v.to_string())?;
            load.audit(&checker).await.map_err(|v| v.to_string())?;
            let errors = load.take_errors();
            if !errors.is_empty() {
                return Err(format!("without faults: {errors:?}"));
            }
            drop(load);
            memory_is_back(&pool)
        });
        match tokio::time::timeout(PATIENCE, work.join()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("an operation did not end within {PATIENCE:?}")),
        }
    }
}
