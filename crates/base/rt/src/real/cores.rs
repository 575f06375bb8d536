//! Cores: threads, each with its own runtime.

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
use super::driver::{create_driver, on_thread_unpark};
use crate::Core;
use crate::buf::BufferPool;
use crate::driver_waker::DriverWaker;
use crate::mailbox::{CoreHandle, Inbox, mailbox};
use crate::ring::{Ring, SubmissionMode};
use crate::sys::CpuSet;

/// The engine for disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskEngine {
    /// io_uring if available, else threads.
    #[default]
    Auto,
    /// io_uring; without it the cores do not start.
    IoUring,
    /// Threads.
    Threads,
}

/// Configuration of cores.
#[derive(Clone, Debug)]
pub struct CoresConfig {
    /// One core per entry, bound to that processor if one is given.
    pub cpus: Vec<Option<usize>>,
    /// Buffer memory of each core in bytes.
    pub memory_bytes_per_core: usize,
    /// How long a core polls for more work before it sleeps; it stops doing so if polling was
    /// useless recently.
    pub poll_window: Duration,
    /// The engine for disks.
    pub disk_engine: DiskEngine,
    /// When disk requests are submitted.
    pub submission: SubmissionMode,
    /// Jobs that a core's mailbox holds before senders wait.
    pub mailbox_len: usize,
    /// Most threads per core for calls that block.
    pub blocking_threads: usize,
}

impl Default for CoresConfig {
    fn default() -> Self {
        Self {
            cpus: vec![None],
            memory_bytes_per_core: 64 << 20,
            poll_window: Duration::from_micros(100),
            disk_engine: DiskEngine::Auto,
            submission: SubmissionMode::Batched,
            mailbox_len: 256,
            blocking_threads: 8,
        }
    }
}

/// Longest wait for blocking calls, and again for disk requests, that are still running when a core
/// ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Running cores. Dropping this stops them immediately; see [`Self::stop`].
pub struct Cores {
    handles: Arc<[CoreHandle]>,
    threads: Vec<CoreThread>,
}

struct CoreThread {
    /// Dropped to end the core.
    running: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What a core's thread needs to start.
struct CoreStart {
    id: usize,
    config: CoresConfig,
    pools: Arc<[BufferPool]>,
    peers: Arc<[CoreHandle]>,
    inbox: Inbox,
    running: oneshot::Receiver<()>,
    started: mpsc::Sender<io::Result<()>>,
}

impl Cores {
    /// Starts cores; all of them run when this returns.
    ///
    /// # Errors
    /// What the system reports: no memory, no threads, no descriptors; no io_uring if it is
    /// required.
    pub fn start(config: &CoresConfig) -> io::Result<Self> {
        let pools: Arc<[BufferPool]> = (config.cpus.iter())
            .map(|_| BufferPool::new(config.memory_bytes_per_core))
            .collect::<io::Result<_>>()?;
        let (handles, inboxes): (Vec<_>, Vec<_>) =
            (0..config.cpus.len()).map(|id| mailbox(id, config.mailbox_len)).unzip();
        let handles: Arc<[CoreHandle]> = handles.into();
        let (started, starts) = mpsc::channel();
        let mut cores = Self { handles: Arc::clone(&handles), threads: Vec::new() };
        for (id, inbox) in inboxes.into_iter().enumerate() {
            let (running, ends) = oneshot::channel();
            let start = CoreStart {
                id,
                config: config.clone(),
                pools: Arc::clone(&pools),
                peers: Arc::clone(&handles),
                inbox,
                running: ends,
                started: started.clone(),
            };
            let thread =
                thread::Builder::new().name(format!("core-{id}")).spawn(|| run_core(start))?;
            cores.threads.push(CoreThread { running: Some(running), thread: Some(thread) });
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

    /// Runs `shutdown` on every core, waits until all have finished, then ends the cores and waits
    /// for their threads. Cores serve each other until then. Tasks that still run are dropped:
    /// `shutdown` must end connections and sync disks.
    ///
    /// Blocks the caller: must not be called on a core.
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
        // Nothing is ever sent: this ends when the last core has dropped its sender.
        let _ = all_done.recv();
    }

    /// [`Self::stop`] without a `shutdown`.
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

/// The main function of a core's thread.
fn run_core(start: CoreStart) {
    let CoreStart { id, config, pools, peers, inbox, running, started } = start;
    let everywhere = CpuSet::of_this_thread().ok();
    if let Some(cpu) = config.cpus[id]
        && let Err(e) = CpuSet::single(cpu).and_then(|one| one.bind_this_thread())
    {
        tracing::warn!(core = id, cpu, error = %e, "cannot pin the core to its processor: it runs on any");
    }
    let made = create_runtime(&config, everywhere).and_then(|runtime| {
        let pulse = Rc::<DriverWaker>::default();
        let ring = create_ring(&config, &pulse, &pools, id)?;
        let driver = {
            let _inside = runtime.handle().enter();
            create_driver(Rc::clone(&pulse), ring.clone(), config.poll_window)?
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
        let core = Core::new_real(id, pools[id].clone(), peers, system);
        let driver = tokio::task::spawn_local(driver);
        let flows = Rc::clone(core.flows());
        let passes =
            tokio::task::spawn_local(async move { flows.run_passes(tokio::task::yield_now).await });
        let _ = started.send(Ok(()));
        tokio::task::spawn_local(async move { inbox.serve(&core).await });
        tokio::select! {
            // Closed, never sent to.
            _ = running => {}
            // The driver never ends by itself, and without it no disk answers: the core ends, so
            // that its callers get errors.
            _ = driver => tracing::error!(core = id, "the core's driver ended; stopping the core"),
            // Likewise, and without it metered tasks wait for ever.
            _ = passes => tracing::error!(core = id, "the core's fair queue ended; stopping the core"),
        }
    });
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    if let Some(ring) = ring
        && !ring.drain(SHUTDOWN_TIMEOUT)
    {
        tracing::error!(core = id, "disk requests hang; their memory stays allocated");
        Box::leak(Box::new(ring));
    }
}

/// The core's ring, if disks are to use io_uring and it is available.
fn create_ring(
    config: &CoresConfig,
    pulse: &Rc<DriverWaker>,
    pools: &[BufferPool],
    id: usize,
) -> io::Result<Option<Rc<Ring>>> {
    if config.disk_engine == DiskEngine::Threads {
        return Ok(None);
    }
    match Ring::new(Rc::clone(pulse), pools, id, config.submission) {
        Ok(ring) => Ok(Some(Rc::new(ring))),
        Err(e) if config.disk_engine == DiskEngine::Auto => {
            if id == 0 {
                tracing::warn!(error = %e, "io_uring is unavailable: disk I/O uses threads and is slower");
            }
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// A runtime whose threads for blocking calls run on `processors`: they would otherwise inherit the
/// core's processor and compete with it.
fn create_runtime(config: &CoresConfig, processors: Option<CpuSet>) -> io::Result<LocalRuntime> {
    Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(config.blocking_threads.max(1))
        .on_thread_unpark(on_thread_unpark)
        .on_thread_start(move || {
            if let Some(Err(e)) = processors.map(|p| p.bind_this_thread()) {
                tracing::debug!(error = %e, "cannot unpin a blocking thread from its core's processor");
            }
        })
        .build_local(LocalOptions::default())
}
