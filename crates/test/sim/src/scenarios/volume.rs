//! A volume under several clients whose commands overlap, with aborts, crashes and disk faults.

use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use rt::sim::{DiskControl, DiskFaults, DiskSetup, Host, HostSetup, World};
use volume::Volume;

use super::clients::{self, Shared};
use super::storage::{self, DISK, Shape, Stack, draw_faults, end, settle};

/// Virtual time in which these must end.
const PATIENCE: Duration = Duration::from_secs(300);

struct Bench<S> {
    world: World,
    host: Host,
    disk: DiskControl,
    shape: Shape,
    stack: S,
    shared: Rc<Shared>,
}

/// Plays a volume on a stack.
pub(crate) async fn play<S: Stack>(world: World, stack: S) -> Result<(), String> {
    let shape = Shape { bytes: 64 << 10, ..Shape::draw(&world) };
    let host = world.add_host("node", HostSetup { pool_bytes: 32 << 20, ..HostSetup::default() });
    let setup = DiskSetup::device(shape.disk_bytes()).blocks(shape.disk.0, shape.disk.1);
    let disk = host.add_disk(DISK, setup);
    stack.prepare(&host, shape).await?;
    let shared = Shared::new(&world, shape.block_size);
    let bench = Bench { world, host, disk, shape, stack, shared };
    for _ in 0..bench.world.rng().between(1, 3) {
        bench.round().await?;
    }
    bench.last_round().await
}

impl<S: Stack> Bench<S> {
    /// Clients at work until a crash at a random moment.
    async fn round(&self) -> Result<(), String> {
        settle(&self.disk).await;
        let faults = draw_faults(&self.world);
        let may_kill = faults.sync_error == 0.0;
        self.disk.set_faults(faults);
        let (stack, shape, shared) = (self.stack.clone(), self.shape, Rc::clone(&self.shared));
        self.host.run(move |core| async move {
            // A stack that does not open on a faulty disk is not at fault.
            let Ok(dev) = stack.open(core.clone(), shape).await else { return };
            let volume = Volume::new(dev, Epoch::default());
            clients::load(&core, &volume, &shared);
            std::future::pending::<()>().await;
        });
        let rng = self.world.rng();
        tokio::time::sleep(rng.time(Duration::ZERO, Duration::from_millis(500))).await;
        let kill = may_kill && rng.chance(0.25);
        self.shared.crash(end(&self.host, &self.world, !kill));
        self.shared.verdict()
    }

    /// No faults: every command ends well, the tally is right, and all memory comes back.
    async fn last_round(&self) -> Result<(), String> {
        settle(&self.disk).await;
        self.disk.set_faults(DiskFaults::default());
        let (stack, shape, shared) = (self.stack.clone(), self.shape, Rc::clone(&self.shared));
        let work = self.host.run(move |core| async move {
            let dev = storage::open_patiently(&core, &stack, shape).await?;
            clients::finish(&core, Volume::new(dev, Epoch::default()), &shared).await
        });
        let ended = tokio::time::timeout(PATIENCE, work.join()).await;
        self.shared.verdict()?;
        match ended {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("a command did not end within {PATIENCE:?}")),
        }
    }
}
