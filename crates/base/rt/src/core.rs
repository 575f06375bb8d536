//! What a core gives the code that runs on it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::buf::Pool;
use crate::disk::{Disk, Engine, OpenError, OpenOptions};
use crate::event::Event;
use crate::mailbox::CoreHandle;
use crate::net::{DetachedStream, ListenOptions, Listener, Stream};
use crate::real::RealCore;
#[cfg(feature = "sim")]
use crate::sim::SimCore;

/// A core: one thread, its buffers, and its way to disks, network, time and chance. The thread
/// and the system behind it are real ([`crate::Cores`]) or simulated ([`crate::sim`]); code on it
/// cannot tell. Cheap to clone; stays on its core.
#[derive(Clone)]
pub struct Core(Rc<Inner>);

struct Inner {
    id: usize,
    pool: Pool,
    peers: Arc<[CoreHandle]>,
    system: System,
}

/// Where a core's requests go.
enum System {
    Real(RealCore),
    #[cfg(feature = "sim")]
    Sim(SimCore),
}

/// Calls the same method on whichever system there is.
macro_rules! dispatch {
    ($core:expr, $s:ident => $call:expr) => {
        match &$core.0.system {
            System::Real($s) => $call,
            #[cfg(feature = "sim")]
            System::Sim($s) => $call,
        }
    };
}

impl Core {
    pub(crate) fn real(id: usize, pool: Pool, peers: Arc<[CoreHandle]>, system: RealCore) -> Self {
        Self(Rc::new(Inner { id, pool, peers, system: System::Real(system) }))
    }

    /// A simulated core; `peers` are the cores of its node, itself among them.
    #[cfg(feature = "sim")]
    pub(crate) fn sim(id: usize, pool: Pool, peers: Arc<[CoreHandle]>, system: SimCore) -> Self {
        Self(Rc::new(Inner { id, pool, peers, system: System::Sim(system) }))
    }

    /// The core's number, from 0.
    #[must_use]
    pub fn id(&self) -> usize {
        self.0.id
    }

    /// The core's buffers.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// All cores of this node in order of their numbers, this one among them.
    #[must_use]
    pub fn peers(&self) -> &[CoreHandle] {
        &self.0.peers
    }

    /// What serves the disks of this core; those on memory file systems are [`Engine::Inline`]
    /// whatever this says.
    #[must_use]
    pub fn disk_engine(&self) -> Engine {
        dispatch!(self, s => s.disk_engine())
    }

    /// Opens a file or block device, and holds it against every other open.
    ///
    /// # Errors
    /// [`OpenError`] names the path and the reason.
    pub async fn open_disk(&self, path: &Path, how: OpenOptions) -> Result<Disk, OpenError> {
        let (backend, info, serial) = dispatch!(self, s => s.open_disk(path, how).await)?;
        Ok(Disk::new(path, backend, info, serial))
    }

    /// Deletes a file. Its absence is durable when this returns.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn remove_file(&self, path: &Path) -> io::Result<()> {
        dispatch!(self, s => s.remove_file(path).await)
    }

    /// Renames a file, replacing what had the new name. Durable when this returns.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        dispatch!(self, s => s.rename(from, to).await)
    }

    /// Makes durable the names in a directory.
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
        dispatch!(self, s => s.listen(at, how).await)
    }

    /// Connects to `to`. Has no time limit but the system's: wrap it in `tokio::time::timeout`.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn dial(&self, to: SocketAddr) -> io::Result<Stream> {
        dispatch!(self, s => s.dial(to).await)
    }

    /// Listens at a Unix socket. Who may connect is what the umask of this process says: who may write to the file. It
    /// is removed with the listener. One that a process has left behind that is no more is replaced.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if somebody listens there, [`io::ErrorKind::AlreadyExists`] if something
    /// else than a socket is there; what the system reports. Simulated cores have no Unix sockets.
    pub async fn listen_unix(&self, at: &Path) -> io::Result<Listener> {
        match &self.0.system {
            System::Real(s) => s.listen_unix_for(at, None).await,
            #[cfg(feature = "sim")]
            System::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The same, for whom `mode` lets write to the file, whatever the umask is: nobody connects before it has its mode.
    ///
    /// # Errors
    /// As [`Self::listen_unix`].
    pub async fn listen_unix_for(&self, at: &Path, mode: u32) -> io::Result<Listener> {
        match &self.0.system {
            System::Real(s) => s.listen_unix_for(at, Some(mode)).await,
            #[cfg(feature = "sim")]
            System::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// What the system reports. Simulated cores have no Unix sockets.
    pub async fn dial_unix(&self, to: &Path) -> io::Result<Stream> {
        match &self.0.system {
            System::Real(s) => s.dial_unix(to).await,
            #[cfg(feature = "sim")]
            System::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Takes over a connection that another core gave up ([`Stream::detach`]).
    ///
    /// # Errors
    /// What the system reports.
    pub fn attach(&self, stream: DetachedStream) -> io::Result<Stream> {
        dispatch!(self, s => s.attach(stream))
    }

    /// Waits on this core for an event (`eventfd(2)`) that another process gives.
    ///
    /// # Errors
    /// What the system reports; `PermissionDenied` for what cannot be waited for, such as a file.
    pub fn event(&self, fd: OwnedFd) -> io::Result<Event> {
        match &self.0.system {
            System::Real(s) => s.event(fd),
            #[cfg(feature = "sim")]
            System::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Notes that another core's job was taken: more may follow soon.
    pub(crate) fn note_activity(&self) {
        match &self.0.system {
            System::Real(s) => s.note_activity(),
            #[cfg(feature = "sim")]
            System::Sim(_) => {}
        }
    }

    /// A random number, fit for secrets on real cores and reproducible on simulated ones.
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

    /// Fills `out` with numbers of [`Self::random_u64`].
    pub fn fill_random(&self, out: &mut [u8]) {
        for piece in out.chunks_mut(8) {
            let random = self.random_u64().to_le_bytes();
            piece.copy_from_slice(&random[..piece.len()]);
        }
    }

    /// Runs what takes the processor for milliseconds beside the core, on the threads for what
    /// blocks: nothing on the core waits for it. A simulated core runs it at once. `None` if it has
    /// panicked, or the core is going.
    pub async fn offload<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        match &self.0.system {
            System::Real(_) => tokio::task::spawn_blocking(work).await.ok(),
            #[cfg(feature = "sim")]
            System::Sim(_) => Some(work()),
        }
    }

    /// Time since the machine booted, that which it was suspended included. Never goes back; all
    /// cores of a machine see the same clock.
    ///
    /// For *leases*, and for nothing else: for durations that two machines have agreed on and that
    /// each counts for itself. Limits, keep-alives and pauses of one machine are `tokio::time`'s,
    /// which is cheaper and stands still while nothing can be heard or said anyway.
    ///
    /// `tokio::time` will not do for leases, twice. It counts `CLOCK_MONOTONIC`, which stops while
    /// the machine is suspended: a lease that ran out meanwhile would come back to life. And all
    /// hosts of a simulated world share it, so that a lease counted on it is never tried with
    /// clocks that differ. This clock is the host's own there, with a rate of its own
    /// (`sim::Host::set_clock_drift`).
    ///
    /// A reading says what was, not what is: between it and the next line the process may be
    /// stopped for any time. Look at the lease *after* the work that it covers.
    #[must_use]
    pub fn now(&self) -> Duration {
        dispatch!(self, s => s.now())
    }

    /// Waits for `how_long` of [`Self::now`]; see [`Self::sleep_until`].
    pub async fn sleep(&self, how_long: Duration) {
        self.sleep_until(self.now().saturating_add(how_long)).await;
    }

    /// Waits until [`Self::now`] is at or after `when`; at once if it is. Never ends early. May end
    /// late by any time, as all that runs may: who acts on the end of a lease looks at the clock
    /// again. After a suspend that `when` fell into it ends within a second.
    ///
    /// For leases; everything else waits by `tokio::time`.
    pub async fn sleep_until(&self, when: Duration) {
        dispatch!(self, s => s.sleep_until(when).await);
    }

    /// Names the time between two boots of the machine: kept while the machine runs, whatever
    /// becomes of this process; another one after a power failure or a reboot. Two processes that
    /// read the same number ran on a machine whose memory, page cache and [`Self::now`] were not
    /// lost between them.
    ///
    /// Where the system does not tell, it is a random number for the life of this process, which
    /// is the safe answer: another boot. A virtual machine that is restored from a snapshot keeps
    /// the one it was taken with.
    #[must_use]
    pub fn boot_id(&self) -> u128 {
        dispatch!(self, s => s.boot_id())
    }

    /// Time since the Unix epoch. May jump: for people and certificates, not for intervals
    /// (those are `tokio::time::Instant`'s, or [`Self::now`]'s for leases).
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
