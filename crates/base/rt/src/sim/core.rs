//! The simulator's side of a [`crate::Core`].

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use super::disk::SimDisk;
use super::faults::DiskSetup;
use super::host_run::HostRun;
use super::host_state::HostState;
use super::net::{DetachedSimStream, SimListener, SimStream};
use super::world_state::WorldInner;
use crate::disk_file::{Engine, OpenError, OpenOptions, OpenReason};
use crate::listen_options::ListenOptions;

/// Wall-clock time at which worlds begin: 2026-01-01 00:00:00 UTC, since the Unix epoch.
pub const WORLD_START: Duration = Duration::from_secs(1_767_225_600);

/// How often opening a busy disk is retried, and the delay: its last holder may be dying.
const BUSY_RETRIES: u32 = 20;
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(50);

/// One simulated core's share of its simulated system.
pub(crate) struct SimCore {
    shared: Rc<WorldInner>,
    host: Rc<HostState>,
    run: Rc<HostRun>,
}

impl SimCore {
    pub(crate) fn new(shared: Rc<WorldInner>, host: Rc<HostState>, boot: Rc<HostRun>) -> Self {
        Self { shared, host, run: boot }
    }

    #[expect(clippy::unused_self, reason = "the same methods as the real system")]
    pub(crate) fn disk_engine(&self) -> Engine {
        Engine::Sim
    }

    /// The duration of a call that the file system answers.
    async fn delay(&self) {
        let ms = Duration::from_millis;
        tokio::time::sleep(self.host.rng.duration_between(ms(0), ms(3))).await;
    }

    pub(crate) async fn open_disk(
        &self,
        path: &Path,
        how: OpenOptions,
    ) -> Result<SimDisk, OpenError> {
        self.delay().await;
        let mut opened = self.open(path, how);
        for _ in 0..BUSY_RETRIES {
            if opened.as_ref().err() == Some(&OpenReason::Busy) {
                tokio::time::sleep(BUSY_RETRY_DELAY).await;
                opened = self.open(path, how);
            }
        }
        let code = u64::from(opened.is_err());
        self.shared.event("open", &self.host.name, &[code]);
        opened.map_err(|reason| OpenError::new(path, reason))
    }

    fn open(&self, path: &Path, how: OpenOptions) -> Result<SimDisk, OpenReason> {
        let mut files = self.host.files.borrow_mut();
        let slot = match (files.get(path), how.create_bytes) {
            (Some(_), Some(_)) => return Err(OpenReason::Exists),
            (Some(slot), None) => Rc::clone(slot),
            (None, None) => return Err(OpenReason::NotFound),
            (None, Some(bytes)) => {
                let setup = DiskSetup { bytes, ..self.host.setup.borrow().new_file_setup.clone() };
                let slot = self.host.new_slot(&self.shared, path, setup);
                files.insert(path.to_owned(), Rc::clone(&slot));
                slot
            }
        };
        if !how.buffered && !slot.device().borrow().setup().direct_io {
            return Err(OpenReason::NoDirectIo);
        }
        if !slot.try_open(how.read_only) {
            return Err(OpenReason::Busy);
        }
        Ok(SimDisk::new(slot, Rc::clone(&self.run), how.read_only))
    }

    pub(crate) async fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.delay().await;
        let gone = self.host.files.borrow_mut().remove(path);
        self.shared.event("remove", &self.host.name, &[u64::from(gone.is_some())]);
        let slot = gone.ok_or(io::ErrorKind::NotFound)?;
        slot.device().borrow_mut().free_all_space();
        Ok(())
    }

    pub(crate) async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.delay().await;
        let mut files = self.host.files.borrow_mut();
        let slot = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        if let Some(replaced) = files.insert(to.to_owned(), slot) {
            replaced.device().borrow_mut().free_all_space();
        }
        Ok(())
    }

    pub(crate) async fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        self.delay().await;
        Ok(())
    }

    pub(crate) fn listen(&self, at: SocketAddr, how: ListenOptions) -> io::Result<SimListener> {
        self.shared.net.listen(self.host.index, &self.run, at, how)
    }

    pub(crate) async fn dial(&self, to: SocketAddr) -> io::Result<SimStream> {
        self.shared.net.dial(self.host.index, &self.run, to).await
    }

    pub(crate) fn attach(&self, stream: DetachedSimStream) -> io::Result<SimStream> {
        SimStream::attach(&self.shared.net, &self.run, stream)
    }

    pub(crate) fn random_u64(&self) -> u64 {
        self.host.rng.u64()
    }

    pub(crate) fn now(&self) -> Duration {
        self.host.machine.clock.reading_at(self.shared.agenda.now())
    }

    pub(crate) async fn sleep_until(&self, when: Duration) {
        self.host.machine.clock.sleep_until(&self.shared.agenda, when).await;
    }

    pub(crate) fn boot_id(&self) -> u128 {
        self.host.machine.boot_id.get()
    }

    pub(crate) fn wall_clock(&self) -> Duration {
        WORLD_START + self.shared.agenda.now() + self.host.setup.borrow().clock_ahead
    }
}
