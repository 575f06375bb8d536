//! A device in memory as a file, on a real core.
#![allow(clippy::unwrap_used, dead_code)]

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::PathBuf;
use std::rc::Rc;

use attach::OutageSignal;
use attach::fuse::{MountError, Options, ServeEnd, Server};
use block::testing::faulty::{Faults, Faulty};
use block::{Dev, Epoch, Mem, MemOptions, RequestError};
use rt::Core;
use rustix::mount::UnmountFlags;
use tempfile::TempDir;
use testkit::skipped;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use volume::Volume;

/// Whether file systems can be mounted here.
pub(crate) fn mounts() -> bool {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    if device.is_err() || !rustix::process::geteuid().is_root() {
        skipped("no file system can be mounted: there is no /dev/fuse, or no right to use it");
        return false;
    }
    true
}

/// A volume that is shown.
pub(crate) struct Site {
    pub(crate) core: Core,
    pub(crate) dir: TempDir,
    pub(crate) mem: Rc<Mem>,
    pub(crate) dev: Dev,
    pub(crate) faults: Faults,
    /// Whether a device that is gone is out of reach, and nothing else.
    pub(crate) away: Rc<Cell<bool>>,
    pub(crate) volume: Rc<Volume>,
    /// Whether there was one that no process served.
    pub(crate) replaced: bool,
    stop: Rc<Notify>,
    run: Option<JoinHandle<ServeEnd>>,
}

pub(crate) fn options() -> Options {
    Options { name: "web".to_owned(), mode: 0o600, read_only: false }
}

impl Site {
    pub(crate) async fn new(core: &Core, mem: MemOptions) -> Self {
        Self::with(core, mem, options()).await
    }

    pub(crate) async fn with(core: &Core, mem: MemOptions, options: Options) -> Self {
        Self::at(core, TempDir::new().unwrap(), mem, options).await.unwrap()
    }

    pub(crate) async fn at(
        core: &Core,
        dir: TempDir,
        mem: MemOptions,
        options: Options,
    ) -> Result<Self, MountError> {
        let mem = Rc::new(Mem::new(mem));
        let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        let volume = Volume::new(dev.clone(), Epoch::default());
        let server = Server::mount(core, &volume, dir.path(), options).await?;
        let replaced = server.replaced_stale();
        let away = Rc::new(Cell::new(false));
        let known = Rc::clone(&away);
        let server = server.with_outage_signal(&OutageSignal::new(move || known.get()));
        let stop = Rc::new(Notify::new());
        let stop_signal = Rc::clone(&stop);
        let run = Some(spawn_local(server.run(async move { stop_signal.notified().await })));
        Ok(Self { core: core.clone(), dir, mem, dev, faults, away, volume, replaced, stop, run })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("web")
    }

    /// Does something that may block, beside the core.
    pub(crate) async fn aside<T: Send + 'static>(
        &self,
        f: impl FnOnce(PathBuf) -> T + Send + 'static,
    ) -> T {
        let path = self.path();
        self.core.run_blocking(move || f(path)).await.expect("it panicked, see above")
    }

    pub(crate) fn tell(&self) {
        self.stop.notify_one();
    }

    /// Waits until it ends by itself.
    pub(crate) async fn ended(&mut self) -> ServeEnd {
        self.run.take().expect("ended once").await.unwrap()
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.run.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Stops it, waits until it has, and closes the volume.
    pub(crate) async fn stop(&mut self) -> Result<ServeEnd, RequestError> {
        self.tell();
        let end = self.ended().await;
        self.volume.close(&self.core.buffer_pool().account()).await?;
        Ok(end)
    }
}

/// A test that fails is not to ask, on the core that would answer, what is in the directory.
impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let how = UnmountFlags::FORCE | UnmountFlags::DETACH;
            let _ = rustix::mount::unmount(self.dir.path(), how);
        }
    }
}

pub(crate) fn open(path: &std::path::Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// The number of an error.
pub(crate) fn number<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}
