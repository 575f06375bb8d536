//! Cores: threads, one per core, each with a runtime of its own.

use std::fmt;
use std::future::{Future, ready};
use std::io;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::{Builder, LocalOptions, LocalRuntime};
use tokio::sync::oneshot;

use super::RealCore;
use super::driver::{Pulse, awake, drive};
use crate::Core;
use crate::buf::Pool;
use crate::mailbox::{CoreHandle, Inbox, mailbox};
use crate::ring::Ring;
use crate::sys::Processors;

/// How disks are to be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskEngine {
    /// By io_uring where there is one, else by threads.
    #[default]
    Auto,
    /// By io_uring, or the cores do not start.
    Uring,
    /// By threads.
    Pool,
}

/// When disk requests go to the kernel, where disks are served by io_uring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Submission {
    /// All that the tasks of a turn have asked for in one system call: cheapest.
    #[default]
    Together,
    /// Each by itself, as soon as it is asked for: a disk that is idle begins sooner.
    AtOnce,
}

/// What cores are made of.
#[derive(Clone, Debug)]
pub struct CoresConfig {
    /// One core per entry, bound to that processor if one is given.
    pub cpus: Vec<Option<usize>>,
    /// Buffer memory of each core in bytes.
    pub pool_bytes_per_core: usize,
    /// How long a core that has just done something keeps looking for more before it sleeps, if it keeps looking: where
    /// nothing came in that time of late, it does not.
    pub poll_window: Duration,
    /// How disks are served.
    pub disk_engine: DiskEngine,
    /// When disks hear of it.
    pub submission: Submission,
    /// Jobs that a core's mailbox holds before senders wait.
    pub mailbox_len: usize,
    /// Most threads per core for calls that block.
    pub blocking_threads: usize,
}

impl Default for CoresConfig {
    fn default() -> Self {
        Self {
            cpus: vec![None],
            pool_bytes_per_core: 64 << 20,
            poll_window: Duration::from_micros(100),
            disk_engine: DiskEngine::Auto,
            submission: Submission::Together,
            mailbox_len: 256,
            blocking_threads: 8,
        }
    }
}

/// Longest wait for blocking calls, and again for disk requests, still running when a core ends.
const GRACE: Duration = Duration::from_secs(10);

/// Running cores. Dropping this stops them without ceremony; see [`Self::stop`].
pub struct Cores {
    handles: Arc<[CoreHandle]>,
    threads: Vec<Thread>,
}

struct Thread {
    /// Closed to end the core.
    running: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What a core's thread needs to begin.
struct Birth {
    id: usize,
    config: CoresConfig,
    pools: Arc<[Pool]>,
    peers: Arc<[CoreHandle]>,
    inbox: Inbox,
    running: oneshot::Receiver<()>,
    started: mpsc::Sender<io::Result<()>>,
}

impl Cores {
    /// Starts cores; all of them run when this returns.
    ///
    /// # Errors
    /// What the system reports: no memory, no threads, no descriptors; no io_uring where it is
    /// demanded.
    pub fn start(config: &CoresConfig) -> io::Result<Self> {
        let pools: Arc<[Pool]> = (config.cpus.iter())
            .map(|_| Pool::new(config.pool_bytes_per_core))
            .collect::<io::Result<_>>()?;
        let (handles, inboxes): (Vec<_>, Vec<_>) =
            (0..config.cpus.len()).map(|id| mailbox(id, config.mailbox_len)).unzip();
        let handles: Arc<[CoreHandle]> = handles.into();
        let (started, starts) = mpsc::channel();
        let mut cores = Self { handles: Arc::clone(&handles), threads: Vec::new() };
        for (id, inbox) in inboxes.into_iter().enumerate() {
            let (running, ends) = oneshot::channel();
            let birth = Birth {
                id,
                config: config.clone(),
                pools: Arc::clone(&pools),
                peers: Arc::clone(&handles),
                inbox,
                running: ends,
                started: started.clone(),
            };
            let thread = thread::Builder::new().name(format!("core-{id}")).spawn(|| live(birth))?;
            cores.threads.push(Thread { running: Some(running), thread: Some(thread) });
        }
        drop(started);
        for _ in &cores.threads {
            starts.recv().unwrap_or_else(|e| Err(io::Error::other(e)))?;
        }
        Ok(cores)
    }

    /// The cores in order of their numbers.
    #[must_use]
    pub fn handles(&self) -> &[CoreHandle] {
        &self.handles
    }

    /// Runs `shutdown` on every core, waits until all are through, then ends the cores and waits
    /// for their threads. Cores serve each other to the last. What still runs then is dropped:
    /// `shutdown` is where connections are ended and disks are synced.
    ///
    /// Blocks the caller: not to be called on a core.
    pub fn stop<F, Fut>(self, shutdown: F)
    where
        F: Fn(Core) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let (done, all_done) = mpsc::channel::<()>();
        for handle in &*self.handles {
            let (shutdown, done) = (shutdown.clone(), done.clone());
            let job = move |core: Core| async move {
                shutdown(core).await;
                drop(done);
            };
            if handle.post_blocking(job).is_err() {
                tracing::error!(core = handle.id(), "the core was gone before it was stopped");
            }
        }
        drop(done);
        // Nothing is ever sent: this ends when the last core has dropped its end.
        let _ = all_done.recv();
    }

    /// [`Self::stop`] with nothing to do on the cores.
    pub fn stop_now(self) {
        self.stop(|_| ready(()));
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        for t in &mut self.threads {
            t.running = None;
        }
        for t in &mut self.threads {
            if t.thread.take().is_some_and(|t| t.join().is_err()) {
                tracing::error!("a core ended by a panic");
            }
        }
    }
}

impl fmt::Debug for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cores").field("cores", &self.handles.len()).finish_non_exhaustive()
    }
}

/// A core's life.
fn live(birth: Birth) {
    let Birth { id, config, pools, peers, inbox, running, started } = birth;
    let everywhere = Processors::of_this_thread().ok();
    if let Some(cpu) = config.cpus[id]
        && let Err(e) = Processors::one(cpu).and_then(|one| one.bind_this_thread())
    {
        tracing::warn!(core = id, cpu, error = %e, "the core floats: its processor is not to be had");
    }
    let made = runtime(&config, everywhere).and_then(|runtime| {
        let pulse = Rc::<Pulse>::default();
        let ring = ring(&config, &pulse, &pools, id)?;
        let driver = {
            let _inside = runtime.handle().enter();
            drive(Rc::clone(&pulse), ring.clone(), config.poll_window)?
        };
        Ok((runtime, pulse, ring, driver))
    });
    let (runtime, pulse, ring, driver) = match made {
        Ok(parts) => parts,
        Err(e) => {
            let _ = started.send(Err(e));
            return;
        }
    };
    let system = RealCore::new(pulse, ring.clone());
    runtime.block_on(async move {
        let core = Core::real(id, pools[id].clone(), peers, system);
        let driver = tokio::task::spawn_local(driver);
        let _ = started.send(Ok(()));
        tokio::task::spawn_local(async move { inbox.serve(&core).await });
        tokio::select! {
            // Closed, never sent on.
            _ = running => {}
            // It never ends by itself, and without it no disk answers: the core goes down, so that
            // whoever asks it for something learns of it.
            _ = driver => tracing::error!(core = id, "the core's driver died; the core ends"),
        }
    });
    runtime.shutdown_timeout(GRACE);
    if let Some(ring) = ring
        && !ring.drain(GRACE)
    {
        tracing::error!(core = id, "disk requests hang; their memory is left to the kernel");
        Box::leak(Box::new(ring));
    }
}

/// The core's ring, if disks are to be served by one and there is one.
fn ring(
    config: &CoresConfig,
    pulse: &Rc<Pulse>,
    pools: &[Pool],
    id: usize,
) -> io::Result<Option<Rc<Ring>>> {
    if config.disk_engine == DiskEngine::Pool {
        return Ok(None);
    }
    match Ring::new(Rc::clone(pulse), pools, id, config.submission) {
        Ok(ring) => Ok(Some(Rc::new(ring))),
        Err(e) if config.disk_engine == DiskEngine::Auto => {
            if id == 0 {
                tracing::warn!(error = %e, "no io_uring: disks are served by threads, and slower");
            }
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// A runtime whose threads for blocking calls run on `processors`: they would inherit the core's
/// own and be in its way.
fn runtime(config: &CoresConfig, processors: Option<Processors>) -> io::Result<LocalRuntime> {
    Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(config.blocking_threads.max(1))
        .on_thread_unpark(awake)
        .on_thread_start(move || {
            if let Some(Err(e)) = processors.map(|p| p.bind_this_thread()) {
                tracing::debug!(error = %e, "a blocking thread stays on its core's processor");
            }
        })
        .build_local(LocalOptions::default())
}
