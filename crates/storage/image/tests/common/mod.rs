//! Helpers for the tests of layers.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::rc::Rc;

use block::testing::TestClient;
use block::testing::faulty::OpKind;
use block::{Dev, Error, drop_permit};
use disk::{ImageLabel, Provisioning};
use image::{CreateImageOptions, FlatImage, OpenImageOptions};
use rt::sim::{Host, HostSetup, ScenarioOutcome, ScriptedFault, World, WorldSetup, run};
use rt::{Core, CoresConfig, DiskEngine};
use uuid::Uuid;

pub const VOLUME: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);

/// A thin image of `bytes` with blocks of 512 bytes.
pub fn thin(bytes: u64) -> CreateImageOptions {
    CreateImageOptions {
        volume_id: VOLUME,
        block_size: 512,
        size_bytes: Some(bytes),
        provisioning: Provisioning::Thin,
        allow_page_cache: false,
        overwrite: false,
        keep_contents: false,
        claim: None,
    }
}

pub fn existing() -> OpenImageOptions {
    OpenImageOptions {
        volume_id: VOLUME,
        min_generation: 0,
        allow_page_cache: false,
        read_only: false,
        claim: None,
    }
}

/// A core of a simulated host, which is started if it is down.
pub async fn core_of(host: &Host) -> Core {
    host.run(|core| async move { core }).join().await.unwrap()
}

/// A client of the image that `file` is.
pub fn client(core: &Core, file: &Rc<FlatImage>) -> TestClient {
    TestClient::new(&Dev::shared(Rc::clone(file)), core.buffer_pool())
}

/// The fault that makes the next operation of this kind end with `error`, if a simulated disk can
/// inject it.
pub fn mishap(kind: OpKind, error: Error) -> Option<ScriptedFault> {
    match (kind, error) {
        (OpKind::Read, Error::Unreadable { .. }) => Some(ScriptedFault::ReadError),
        (OpKind::Write, Error::Unwritable { .. }) => Some(ScriptedFault::WriteError),
        (OpKind::Flush, Error::Gone) => Some(ScriptedFault::SyncError),
        _ => None,
    }
}

/// The fields of a label without random ones.
pub fn essence(label: ImageLabel) -> (Uuid, u64, u32, Provisioning) {
    (label.volume_id, label.data_bytes, label.block_size, label.provisioning)
}

/// Runs `f` on a real core of its own, with this disk engine.
pub fn on_core<Fut: Future<Output = ()> + 'static>(
    engine: DiskEngine,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    let config = CoresConfig { disk_engine: engine, ..testkit::cores_config(1, 40 << 20) };
    testkit::on_first_core(&config, f);
}

/// Plays a scenario with one host in a simulated world.
pub fn run_scenario<F, Fut>(seed: u64, setup: HostSetup, scenario: F) -> ScenarioOutcome
where
    F: FnOnce(World, Host) -> Fut,
    Fut: Future<Output = ()>,
{
    let guarded = WorldSetup {
        crash_guard: || Box::new(drop_permit::permit_drops()),
        ..WorldSetup::new(seed)
    };
    run(guarded, |world| {
        let host = world.add_host("host", setup);
        let scene = scenario(world, host);
        async move {
            scene.await;
            Ok(())
        }
    })
}

/// [`run_scenario`] that must succeed.
pub fn succeed<F, Fut>(seed: u64, setup: HostSetup, scenario: F)
where
    F: FnOnce(World, Host) -> Fut,
    Fut: Future<Output = ()>,
{
    run_scenario(seed, setup, scenario).result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
}
