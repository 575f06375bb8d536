//! The real system: threads, files, sockets and clocks of this machine.

mod adaptive_polling;
mod boot_id;
mod cores;
mod driver;
mod random;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use crate::disk::{Backend, BlockingDisk, InlineDisk, UringDisk};
use crate::disk_file::{self, DiskInfo, Engine, FileDisk, OpenError, OpenOptions, OpenReason};
use crate::driver_waker::DriverWaker;
use crate::event::EventReceiver;
use crate::net::{DetachedStream, ListenOptions, Listener, Stream};
use crate::ring::Ring;
use crate::sys;

pub use cores::{Cores, CoresConfig, DiskEngine};
use random::SystemRandom;

/// Longest single timer of a wait in boot time. tokio's timers stop while the machine is suspended,
/// that clock does not: this is how late the end of a suspend is noticed.
const MAX_TIMER_STEP: Duration = Duration::from_secs(1);

/// One core's share of the system.
pub(crate) struct RealCore {
    driver_waker: Rc<DriverWaker>,
    ring: Option<Rc<Ring>>,
    random: SystemRandom,
}

impl RealCore {
    fn new(pulse: Rc<DriverWaker>, ring: Option<Rc<Ring>>) -> Self {
        Self { driver_waker: pulse, ring, random: SystemRandom::new() }
    }

    /// A job of another core was done.
    pub(crate) fn note_activity(&self) {
        self.driver_waker.note_activity();
    }

    pub(crate) fn disk_engine(&self) -> Engine {
        if self.ring.is_some() { Engine::Uring } else { Engine::Threads }
    }

    pub(crate) async fn open_disk(
        &self,
        path: &Path,
        how: OpenOptions,
    ) -> Result<(Backend, DiskInfo, String), OpenError> {
        let owned = path.to_owned();
        let opened = tokio::task::spawn_blocking(move || disk_file::open(&owned, how))
            .await
            .unwrap_or_else(|_| Err(OpenError::new(path, OpenReason::Io(libc::ECANCELED))))?;
        let file = FileDisk::new(opened.file);
        let backend = if opened.is_on_memory_fs {
            Backend::Inline(InlineDisk::new(file))
        } else if let Some(ring) = &self.ring {
            Backend::Uring(UringDisk::new(Rc::clone(ring), file))
        } else {
            Backend::Threads(BlockingDisk::new(file))
        };
        Ok((backend, opened.info, opened.serial))
    }

    pub(crate) async fn remove_file(&self, path: &Path) -> io::Result<()> {
        let path = path.to_owned();
        run_blocking(move || disk_file::remove_file(&path)).await
    }

    pub(crate) async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (from, to) = (from.to_owned(), to.to_owned());
        run_blocking(move || disk_file::rename(&from, &to)).await
    }

    pub(crate) async fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let dir = dir.to_owned();
        run_blocking(move || disk_file::sync_dir(&dir)).await
    }

    pub(crate) async fn listen(&self, at: SocketAddr, how: ListenOptions) -> io::Result<Listener> {
        Listener::tcp(at, how, Rc::clone(&self.driver_waker))
    }

    pub(crate) async fn dial(&self, to: SocketAddr) -> io::Result<Stream> {
        Stream::dial_tcp(to, Rc::clone(&self.driver_waker)).await
    }

    pub(crate) async fn listen_unix_for(
        &self,
        at: &Path,
        mode: Option<u32>,
    ) -> io::Result<Listener> {
        Listener::unix(at, (ListenOptions::default().backlog, mode), Rc::clone(&self.driver_waker))
            .await
    }

    pub(crate) async fn dial_unix(&self, to: &Path) -> io::Result<Stream> {
        Stream::dial_unix(to, Rc::clone(&self.driver_waker)).await
    }

    pub(crate) fn attach(&self, stream: DetachedStream) -> io::Result<Stream> {
        Stream::attach(stream, &self.driver_waker)
    }

    pub(crate) fn event(&self, fd: OwnedFd) -> io::Result<EventReceiver> {
        EventReceiver::new(fd, Rc::clone(&self.driver_waker))
    }

    pub(crate) fn random_u64(&self) -> u64 {
        self.random.next()
    }

    #[expect(clippy::unused_self, reason = "the same methods as the simulated system")]
    pub(crate) fn now(&self) -> Duration {
        sys::since_boot()
    }

    pub(crate) async fn sleep_until(&self, when: Duration) {
        loop {
            let left = when.saturating_sub(self.now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(MAX_TIMER_STEP)).await;
        }
    }

    #[expect(clippy::unused_self, reason = "the same methods as the simulated system")]
    pub(crate) fn boot_id(&self) -> u128 {
        boot_id::boot_id()
    }

    #[expect(clippy::disallowed_methods, reason = "this is where wall-clock time comes from")]
    pub(crate) fn wall_clock(&self) -> Duration {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
    }
}

async fn run_blocking<T: Send + 'static>(
    f: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(f).await.unwrap_or_else(|e| Err(io::Error::other(e)))
}
