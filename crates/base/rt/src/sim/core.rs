//! The simulator's side of a [`crate::Core`].

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use super::disk::SimDisk;
use super::faults::DiskSetup;
use super::host::{Boot, HostState};
use super::net::SimStream;
use super::world::Shared;
use crate::disk::{Backend, DiskInfo, Engine, OpenError, OpenOptions, OpenReason};
use crate::net::{DetachedStream, ListenOptions, Listener, Stream};

/// When worlds begin: 2026-01-01 00:00:00 UTC, since the Unix epoch.
pub const EPOCH: Duration = Duration::from_secs(1_767_225_600);

/// How often, and how far apart, a busy disk is looked at again: its last holder may be dying.
const BUSY_LOOKS: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// One simulated core's share of its simulated system.
pub(crate) struct SimCore {
    shared: Rc<Shared>,
    host: Rc<HostState>,
    boot: Rc<Boot>,
}

impl SimCore {
    pub(crate) fn new(shared: Rc<Shared>, host: Rc<HostState>, boot: Rc<Boot>) -> Self {
        Self { shared, host, boot }
    }

    #[expect(clippy::unused_self, reason = "the same methods as the real system")]
    pub(crate) fn disk_engine(&self) -> Engine {
        Engine::Sim
    }

    /// What a call that the file system answers takes.
    async fn delay(&self) {
        let ms = Duration::from_millis;
        tokio::time::sleep(self.host.rng.time(ms(0), ms(3))).await;
    }

    pub(crate) async fn open_disk(
        &self,
        path: &Path,
        how: OpenOptions,
    ) -> Result<(Backend, DiskInfo, String), OpenError> {
        self.delay().await;
        let mut opened = self.open(path, how);
        for _ in 0..BUSY_LOOKS {
            if opened.as_ref().err() == Some(&OpenReason::Busy) {
                tokio::time::sleep(BUSY_PAUSE).await;
                opened = self.open(path, how);
            }
        }
        let code = u64::from(opened.is_err());
        self.shared.event("open", &self.host.name, &[code]);
        let disk = opened.map_err(|reason| OpenError::new(path, reason))?;
        let (info, serial) = (disk.info(), disk.serial());
        Ok((Backend::Sim(disk), info, serial))
    }

    fn open(&self, path: &Path, how: OpenOptions) -> Result<SimDisk, OpenReason> {
        let mut files = self.host.files.borrow_mut();
        let slot = match (files.get(path), how.create_bytes) {
            (Some(_), Some(_)) => return Err(OpenReason::Exists),
            (Some(slot), None) => Rc::clone(slot),
            (None, None) => return Err(OpenReason::NotFound),
            (None, Some(bytes)) => {
                let setup = DiskSetup { bytes, ..self.host.setup.borrow().files.clone() };
                let slot = self.host.new_slot(&self.shared, path, setup);
                files.insert(path.to_owned(), Rc::clone(&slot));
                slot
            }
        };
        if !how.buffered && !slot.device().borrow().setup().direct_io {
            return Err(OpenReason::NoDirectIo);
        }
        if !slot.try_hold(how.read_only) {
            return Err(OpenReason::Busy);
        }
        Ok(SimDisk::new(slot, Rc::clone(&self.boot), how.read_only))
    }

    pub(crate) async fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.delay().await;
        let gone = self.host.files.borrow_mut().remove(path);
        self.shared.event("remove", &self.host.name, &[u64::from(gone.is_some())]);
        let slot = gone.ok_or(io::ErrorKind::NotFound)?;
        slot.device().borrow_mut().give_up_space();
        Ok(())
    }

    pub(crate) async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.delay().await;
        let mut files = self.host.files.borrow_mut();
        let slot = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        if let Some(replaced) = files.insert(to.to_owned(), slot) {
            replaced.device().borrow_mut().give_up_space();
        }
        Ok(())
    }

    pub(crate) async fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        self.delay().await;
        Ok(())
    }

    #[expect(clippy::unused_async, reason = "the same methods as the real system")]
    pub(crate) async fn listen(&self, at: SocketAddr, how: ListenOptions) -> io::Result<Listener> {
        self.shared.net.listen(&self.host, &self.boot, at, how).map(Listener::sim)
    }

    pub(crate) async fn dial(&self, to: SocketAddr) -> io::Result<Stream> {
        self.shared.net.dial(&self.host, &self.boot, to).await.map(Stream::sim)
    }

    pub(crate) fn attach(&self, stream: DetachedStream) -> io::Result<Stream> {
        SimStream::attach(&self.shared.net, &self.boot, stream.into_sim()?).map(Stream::sim)
    }

    pub(crate) fn random_u64(&self) -> u64 {
        self.host.rng.u64()
    }

    pub(crate) fn now(&self) -> Duration {
        self.host.machine.clock.at(self.shared.agenda.now())
    }

    pub(crate) async fn sleep_until(&self, when: Duration) {
        self.host.machine.clock.sleep_until(&self.shared.agenda, when).await;
    }

    pub(crate) fn boot_id(&self) -> u128 {
        self.host.machine.boot_id.get()
    }

    pub(crate) fn wall_clock(&self) -> Duration {
        EPOCH + self.shared.agenda.now() + self.host.setup.borrow().clock_ahead
    }
}
