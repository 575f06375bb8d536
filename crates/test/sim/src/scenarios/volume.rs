//! A volume under several clients whose commands overlap, with aborts, crashes and disk faults.

use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use rt::sim::{DiskControl, DiskFaults, DiskSetup, Host, HostSetup, World};
use volume::Volume;

use super::clients::{self, ClientState};
use super::storage::{
    self, DISK, StackGeometry, StorageStack, draw_faults, stop_host, wait_disk_idle,
};

/// Virtual time limits.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(300);

struct VolumeTestbed<S> {
    world: World,
    host: Host,
    disk: DiskControl,
    geometry: StackGeometry,
    stack: S,
    shared: Rc<ClientState>,
}

/// Runs a volume on a stack.
pub(crate) async fn run<S: StorageStack>(world: World, stack: S) -> Result<(), String> {
    let geometry = StackGeometry { bytes: 64 << 10, ..StackGeometry::draw(&world) };
    let host = world.add_host("node", HostSetup { memory_bytes: 32 << 20, ..HostSetup::default() });
    let setup = DiskSetup::device(geometry.disk_bytes()).blocks(geometry.disk.0, geometry.disk.1);
    let disk = host.add_disk(DISK, setup);
    stack.prepare(&host, geometry).await?;
    let shared = ClientState::new(&world, geometry.block_size);
    let bench = VolumeTestbed { world, host, disk, geometry, stack, shared };
    for _ in 0..bench.world.rng().between(1, 3) {
        bench.round().await?;
    }
    bench.last_round().await
}

impl<S: StorageStack> VolumeTestbed<S> {
    /// Runs clients until a crash at a random moment.
    async fn round(&self) -> Result<(), String> {
        wait_disk_idle(&self.disk).await;
        let faults = draw_faults(&self.world);
        let may_kill = faults.sync_error == 0.0;
        self.disk.set_faults(faults);
        let (stack, geometry, shared) =
            (self.stack.clone(), self.geometry, Rc::clone(&self.shared));
        self.host.run(move |core| async move {
            // A stack may fail to open on a faulty disk.
            let Ok(dev) = stack.open(core.clone(), geometry).await else { return };
            let volume = Volume::new(dev, Epoch::default());
            clients::spawn_clients(&core, &volume, &shared);
            std::future::pending::<()>().await;
        });
        let rng = self.world.rng();
        tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_millis(500))).await;
        let kill = may_kill && rng.chance(0.25);
        self.shared.crash(stop_host(&self.host, &self.world, !kill));
        self.shared.first_violation()
    }

    /// Without faults: every command succeeds, the counter is right, and all memory is released.
    async fn last_round(&self) -> Result<(), String> {
        wait_disk_idle(&self.disk).await;
        self.disk.set_faults(DiskFaults::default());
        let (stack, geometry, shared) =
            (self.stack.clone(), self.geometry, Rc::clone(&self.shared));
        let work = self.host.run(move |core| async move {
            let dev = storage::open_with_retry(&core, &stack, geometry).await?;
            clients::check_and_close(&core, Volume::new(dev, Epoch::default()), &shared).await
        });
        let ended = tokio::time::timeout(SCENARIO_TIMEOUT, work.join()).await;
        self.shared.first_violation()?;
        match ended {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("a command did not end within {SCENARIO_TIMEOUT:?}")),
        }
    }
}
