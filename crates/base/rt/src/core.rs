//! What a core provides to the code that runs on it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::buf::BufferPool;
use crate::disk::{Disk, Engine, OpenError, OpenOptions};
use crate::event::EventReceiver;
use crate::flow::{Flow, Flows};
use crate::mailbox::CoreHandle;
use crate::net::{DetachedStream, ListenOptions, Listener, Stream};
use crate::real::RealCore;
#[cfg(feature = "sim")]
use crate::sim::SimCore;

/// A core: one thread, its buffers, and its access to disks, network, time and randomness. The
/// thread and the system are real ([`crate::Cores`]) or simulated ([`crate::sim`]); code on it
/// cannot tell. Cheap to clone; a handle stays on its core.
#[derive(Clone)]
pub struct Core(Rc<CoreInner>);

struct CoreInner {
    id: usize,
    pool: BufferPool,
    peers: Arc<[CoreHandle]>,
    flows: Rc<Flows>,
    system: Backend,
}

/// Where a core's requests go.
enum Backend {
    Real(RealCore),
    #[cfg(feature = "sim")]
    Sim(SimCore),
}

/// Calls the same method of either system.
macro_rules! dispatch {
    ($core:expr, $s:ident => $call:expr) => {
        match &$core.0.system {
            Backend::Real($s) => $call,
            #[cfg(feature = "sim")]
            Backend::Sim($s) => $call,
        }
    };
}

impl Core {
    pub(crate) fn new_real(
        id: usize,
        pool: BufferPool,
        peers: Arc<[CoreHandle]>,
        system: RealCore,
    ) -> Self {
        Self(Rc::new(CoreInner {
            id,
            pool,
            peers,
            flows: Flows::new(),
            system: Backend::Real(system),
        }))
    }

    /// A simulated core; `peers` are the cores of its node, itself among them.
    #[cfg(feature = "sim")]
    pub(crate) fn new_sim(
        id: usize,
        pool: BufferPool,
        peers: Arc<[CoreHandle]>,
        system: SimCore,
    ) -> Self {
        Self(Rc::new(CoreInner {
            id,
            pool,
            peers,
            flows: Flows::new(),
            system: Backend::Sim(system),
        }))
    }

    /// The core's number, from 0.
    #[must_use]
    pub fn id(&self) -> usize {
        self.0.id
    }

    /// The core's buffers.
    #[must_use]
    pub fn buffer_pool(&self) -> &BufferPool {
        &self.0.pool
    }

    pub(crate) fn flows(&self) -> &Rc<Flows> {
        &self.0.flows
    }

    /// A new flow, whose share of the core is `weight` of [`crate::flow::FULL_WEIGHT`] until it
    /// joins a group.
    #[must_use]
    pub fn new_flow(&self, weight: u64) -> Flow {
        Flow::new(&self.0.flows, weight)
    }

    /// All cores of this node in order of their numbers, this one among them.
    #[must_use]
    pub fn peers(&self) -> &[CoreHandle] {
        &self.0.peers
    }

    /// The engine that serves this core's disks; disks on memory file systems always use
    /// [`Engine::Inline`].
    #[must_use]
    pub fn disk_engine(&self) -> Engine {
        dispatch!(self, s => s.disk_engine())
    }

    /// Opens a file or block device, and locks it against every other open.
    ///
    /// # Errors
    /// [`OpenError`] names the path and the reason.
    pub async fn open_disk(&self, path: &Path, how: OpenOptions) -> Result<Disk, OpenError> {
        match &self.0.system {
            Backend::Real(s) => {
                let (backend, info, serial) = s.open_disk(path, how).await?;
                Ok(Disk::new(path, backend, info, serial))
            }
            #[cfg(feature = "sim")]
            Backend::Sim(s) => Ok(Disk::sim(path, s.open_disk(path, how).await?)),
        }
    }

    /// Deletes a file. The deletion is durable when this returns.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn remove_file(&self, path: &Path) -> io::Result<()> {
        dispatch!(self, s => s.remove_file(path).await)
    }

    /// Renames a file, replacing any file of the new name. Durable when this returns.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        dispatch!(self, s => s.rename(from, to).await)
    }

    /// Makes the entries of a directory durable.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        dispatch!(self, s => s.sync_dir(dir).await)
    }

    /// Listens for TCP connections.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn listen(&self, at: SocketAddr) -> io::Result<Listener> {
        self.listen_with(at, ListenOptions::default()).await
    }

    /// [`Self::listen`] with options.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn listen_with(&self, at: SocketAddr, how: ListenOptions) -> io::Result<Listener> {
        match &self.0.system {
            Backend::Real(s) => s.listen(at, how).await,
            #[cfg(feature = "sim")]
            Backend::Sim(s) => s.listen(at, how).map(Listener::sim),
        }
    }

    /// Connects to `to`. Has only the system's time limit: wrap it in `tokio::time::timeout`.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn dial(&self, to: SocketAddr) -> io::Result<Stream> {
        match &self.0.system {
            Backend::Real(s) => s.dial(to).await,
            #[cfg(feature = "sim")]
            Backend::Sim(s) => s.dial(to).await.map(Stream::sim),
        }
    }

    /// Listens at a Unix socket. The umask of this process decides who may connect: those who may
    /// write to the file. The file is removed with the listener; one that a dead process left
    /// behind is replaced.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if another process listens there,
    /// [`io::ErrorKind::AlreadyExists`] if there is a file other than a socket; what the system
    /// reports. Simulated cores have no Unix sockets.
    pub async fn listen_unix(&self, at: &Path) -> io::Result<Listener> {
        match &self.0.system {
            Backend::Real(s) => s.listen_unix_for(at, None).await,
            #[cfg(feature = "sim")]
            Backend::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The same, with `mode` for the file, whatever the umask is: it has its mode before any client
    /// can connect.
    ///
    /// # Errors
    /// As [`Self::listen_unix`].
    pub async fn listen_unix_for(&self, at: &Path, mode: u32) -> io::Result<Listener> {
        match &self.0.system {
            Backend::Real(s) => s.listen_unix_for(at, Some(mode)).await,
            #[cfg(feature = "sim")]
            Backend::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// What the system reports. Simulated cores have no Unix sockets.
    pub async fn dial_unix(&self, to: &Path) -> io::Result<Stream> {
        match &self.0.system {
            Backend::Real(s) => s.dial_unix(to).await,
            #[cfg(feature = "sim")]
            Backend::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Attaches a connection that another core has detached ([`Stream::detach`]).
    ///
    /// # Errors
    /// What the system reports.
    pub fn attach(&self, stream: DetachedStream) -> io::Result<Stream> {
        match &self.0.system {
            Backend::Real(s) => s.attach(stream),
            #[cfg(feature = "sim")]
            Backend::Sim(s) => s.attach(stream.into_sim()?).map(Stream::sim),
        }
    }

    /// Receives an event (`eventfd(2)`) that another process signals.
    ///
    /// # Errors
    /// What the system reports; `PermissionDenied` for a descriptor that cannot be polled, such as
    /// a file.
    pub fn event(&self, fd: OwnedFd) -> io::Result<EventReceiver> {
        match &self.0.system {
            Backend::Real(s) => s.event(fd),
            #[cfg(feature = "sim")]
            Backend::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Records that another core's job was taken: more may follow soon.
    pub(crate) fn note_activity(&self) {
        match &self.0.system {
            Backend::Real(s) => s.note_activity(),
            #[cfg(feature = "sim")]
            Backend::Sim(_) => {}
        }
    }

    /// A random number, cryptographically secure on real cores and reproducible on simulated ones.
    #[must_use]
    pub fn random_u64(&self) -> u64 {
        dispatch!(self, s => s.random_u64())
    }

    /// A random UUID (RFC 9562 5.4).
    #[must_use]
    pub fn random_uuid(&self) -> uuid::Uuid {
        let random = u128::from(self.random_u64()) << 64 | u128::from(self.random_u64());
        uuid::Builder::from_random_bytes(random.to_be_bytes()).into_uuid()
    }

    /// Fills `out` with random bytes, as [`Self::random_u64`].
    pub fn fill_random(&self, out: &mut [u8]) {
        for piece in out.chunks_mut(8) {
            let random = self.random_u64().to_le_bytes();
            piece.copy_from_slice(&random[..piece.len()]);
        }
    }

    /// Runs a computation of milliseconds on the threads for blocking calls, so that the core is
    /// not delayed. A simulated core runs it inline. `None` if it has panicked, or the core is
    /// stopping.
    pub async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        match &self.0.system {
            Backend::Real(_) => tokio::task::spawn_blocking(work).await.ok(),
            #[cfg(feature = "sim")]
            Backend::Sim(_) => Some(work()),
        }
    }

    /// Time since the machine booted, including suspended time. Monotonic; all cores of a machine
    /// see the same clock.
    ///
    /// Only for *leases*: durations that two machines have agreed on and that each measures by
    /// itself. For limits, keep-alives and pauses of one machine use `tokio::time`, which is
    /// cheaper, and stops while the machine can neither send nor receive anyway.
    ///
    /// `tokio::time` does not suffice for leases, for two reasons. It counts `CLOCK_MONOTONIC`,
    /// which stops while the machine is suspended: a lease that expired meanwhile would be valid
    /// again. And all hosts of a simulated world share it, so leases would never be tested with
    /// clocks that differ. This clock is each simulated host's own, with its own rate
    /// (`sim::Host::set_clock_drift`).
    ///
    /// A reading is already in the past: the process may be stopped for any time after it. Check
    /// the lease *after* the work that it covers.
    #[must_use]
    pub fn now(&self) -> Duration {
        dispatch!(self, s => s.now())
    }

    /// Waits for `how_long` by [`Self::now`]; see [`Self::sleep_until`].
    pub async fn sleep(&self, how_long: Duration) {
        self.sleep_until(self.now().saturating_add(how_long)).await;
    }

    /// Waits until [`Self::now`] is at or after `when`. Never ends early. May end arbitrarily late,
    /// as any task may: check the clock again before acting on the end of a lease. If `when` fell
    /// into a suspend, it ends within a second after it.
    ///
    /// For leases; use `tokio::time` for everything else.
    pub async fn sleep_until(&self, when: Duration) {
        dispatch!(self, s => s.sleep_until(when).await);
    }

    /// Identifies the current boot of the machine: unchanged by restarts of this process, different
    /// after a power failure or a reboot. Between two processes that read the same number the
    /// machine's memory, page cache and [`Self::now`] were not lost.
    ///
    /// If the system does not provide it, it is a random number of this process, which is safe: it
    /// looks like another boot. A virtual machine restored from a snapshot keeps the one of the
    /// snapshot.
    #[must_use]
    pub fn boot_id(&self) -> u128 {
        dispatch!(self, s => s.boot_id())
    }

    /// Time since the Unix epoch. May jump: for display and certificates, not for intervals (use
    /// `tokio::time::Instant`, or [`Self::now`] for leases).
    #[must_use]
    pub fn wall_clock(&self) -> Duration {
        dispatch!(self, s => s.wall_clock())
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("id", &self.0.id).finish_non_exhaustive()
    }
}
