//! A server of a device in memory, on a real core.
#![allow(clippy::unwrap_used, dead_code)]

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use attach::OutageSignal;
use attach::nbd::{Options, Server};
use block::testing::faulty::{Faults, Faulty};
use block::{Dev, Epoch, Layer, Mem, MemOptions, RequestError};
use nbd::Address;
use rt::Core;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use volume::Volume;

/// Buffer memory of the core in bytes.
pub(crate) const POOL: usize = 64 << 20;

pub(crate) fn on_core<Fut: Future<Output = ()> + 'static>(
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    on_core_with(POOL, f);
}

/// On a core with so much buffer memory, in bytes.
pub(crate) fn on_core_with<Fut: Future<Output = ()> + 'static>(
    pool: usize,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    testkit::on_first_core(&testkit::cores_config(1, pool), f);
}

/// A server that runs.
pub(crate) struct Site {
    pub(crate) core: Core,
    pub(crate) at: Address,
    pub(crate) mem: Rc<Mem>,
    pub(crate) faults: Faults,
    pub(crate) dev: Dev,
    /// Whether a device that is gone is out of reach, and nothing else.
    pub(crate) away: Rc<Cell<bool>>,
    stop: Rc<Notify>,
    volume: Rc<Volume>,
    run: Option<JoinHandle<()>>,
}

impl Site {
    /// At a Unix socket in `dir`.
    pub(crate) async fn unix(core: &Core, dir: &Path, mem: MemOptions, options: Options) -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path: PathBuf = dir.join(format!("nbd-{number}.sock"));
        Self::at(core, Address::Unix(path), mem, options).await
    }

    /// At a port of the loopback.
    pub(crate) async fn tcp(core: &Core, mem: MemOptions, options: Options) -> Self {
        Self::at(core, Address::Tcp("127.0.0.1:0".parse().unwrap()), mem, options).await
    }

    async fn at(core: &Core, at: Address, mem: MemOptions, options: Options) -> Self {
        let mem = Rc::new(Mem::new(mem));
        let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        let volume = Volume::new(dev.clone(), Epoch::default());
        let server = Server::bind(core, &volume, &at, options).await.unwrap();
        let away = Rc::new(Cell::new(false));
        let known = Rc::clone(&away);
        let server = server.with_outage_signal(&OutageSignal::new(move || known.get()));
        let at = match at {
            Address::Tcp(_) => Address::Tcp(server.local_addr().unwrap()),
            unix => unix,
        };
        let stop = Rc::new(Notify::new());
        let stop_signal = Rc::clone(&stop);
        let run = spawn_local(server.run(async move { stop_signal.notified().await }));
        Self { core: core.clone(), at, mem, faults, dev, away, stop, volume, run: Some(run) }
    }

    /// Stops the server, waits until it has, and closes the volume.
    pub(crate) async fn stop(&mut self) -> Result<(), RequestError> {
        self.stop.notify_one();
        self.run.take().expect("stopped once").await.unwrap();
        self.volume.close(&self.core.buffer_pool().account()).await
    }

    /// Waits until the server ends by itself.
    pub(crate) async fn ended(&mut self) {
        self.run.take().expect("ended once").await.unwrap();
    }

    pub(crate) async fn connect(
        &self,
        options: &initiator::nbd::Options,
    ) -> Rc<initiator::nbd::Disk> {
        initiator::nbd::Disk::connect(&self.core, &self.at, options).await.unwrap()
    }
}

/// A device that counts nothing and does what it is told.
pub(crate) fn dev(layer: impl Layer) -> Dev {
    Dev::new(layer)
}
