//! Helpers for the tests of layers.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

#[path = "../../../../base/rt/tests/common/system.rs"]
pub mod system;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use block::testing::TestClient;
use block::testing::faulty::OpKind;
use block::{Dev, Error, drop_permit};
use disk::{ImageLabel, Provisioning};
use image::{CreateImageOptions, FlatImage, OpenImageOptions};
use rt::sim::{Host, HostSetup, ScenarioOutcome, ScriptedFault, World, WorldSetup, run};
use rt::{Core, Cores, CoresConfig, DiskEngine};
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
    let config = CoresConfig {
        cpus: vec![None],
        memory_bytes_per_core: 40 << 20,
        disk_engine: engine,
        ..Default::default()
    };
    let cores = Cores::start(&config).unwrap();
    let wait = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let result = wait.block_on(cores.handles()[0].run(f));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}

/// A directory that is removed with the value.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new(parent: impl AsRef<Path>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.as_ref().join(format!("layers-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// On the disk that holds the build.
    pub fn on_disk() -> Self {
        Self::new(env!("CARGO_TARGET_TMPDIR"))
    }

    /// In memory.
    pub fn in_memory() -> Self {
        Self::new("/dev/shm")
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
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
