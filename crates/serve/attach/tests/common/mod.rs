//! A disk at a socket on a core of its own, and a guest with its monitor in this process.
#![allow(clippy::unwrap_used, dead_code)]

mod guest;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc;

use attach::OutageSignal;
use attach::vhost_user::{Options, OutagePolicy, Server};
use block::testing::faulty::{Faults, Faulty};
use block::{Access, AccessState, Dev, Epoch, Mem, MemOptions};
use rt::{Core, Cores, CoresConfig};
use tempfile::TempDir;
use tokio::sync::oneshot;
use volume::{ReservationContext, ReservationGate, Volume};

pub(crate) use guest::*;

/// What to do with what a test stands on, on its core.
type Job = Box<dyn FnOnce(&Ground) + Send>;

/// What the disk stands on.
pub(crate) struct Ground {
    pub(crate) core: Core,
    pub(crate) mem: Rc<Mem>,
    pub(crate) faults: Faults,
    pub(crate) volume: Rc<Volume>,
    pub(crate) access: AccessState,
    /// Whether a volume that is gone is out of reach, and nothing else.
    pub(crate) away: Rc<Cell<bool>>,
}

/// A disk at a socket.
pub(crate) struct Site {
    cores: Option<Cores>,
    pub(crate) path: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    over: mpsc::Receiver<()>,
    jobs: tokio::sync::mpsc::UnboundedSender<Job>,
    _dir: TempDir,
}

pub(crate) struct Disk {
    pub(crate) options: MemOptions,
    pub(crate) rings: u16,
    pub(crate) read_only: bool,
    pub(crate) pool_bytes: usize,
    /// Whether other nodes have the volume too.
    pub(crate) shared: bool,
    /// Whether it keeps reservations.
    pub(crate) reserves: bool,
}

impl Default for Disk {
    fn default() -> Self {
        let options = MemOptions::new(512, 1 << 16);
        Self {
            options,
            rings: 2,
            read_only: false,
            pool_bytes: 32 << 20,
            shared: false,
            reserves: false,
        }
    }
}

impl AsRef<Path> for Site {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl Site {
    pub(crate) fn start(disk: &Disk) -> Self {
        let config =
            CoresConfig { memory_bytes_per_core: disk.pool_bytes, ..CoresConfig::default() };
        let cores = Cores::start(&config).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let (stop, stopped) = oneshot::channel();
        let (ended, over) = mpsc::channel();
        let (jobs, mut asked) = tokio::sync::mpsc::unbounded_channel::<Job>();
        let options = Options {
            queues: disk.rings,
            read_only: disk.read_only,
            serial: "a serial of more than twenty bytes".to_owned(),
        };
        let (mem_options, at) = (disk.options, path.clone());
        let (shared, reserves) = (disk.shared, disk.reserves);
        let (ready, is_ready) = mpsc::channel();
        let life = async move |core: Core| {
            let mem = Rc::new(Mem::new(mem_options));
            let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
            let volume = Volume::new(dev, Epoch::default());
            if reserves {
                let gate = Rc::new(ReservationGate::default());
                gate.set_context(ReservationContext {
                    power_epoch: 1,
                    incarnation: 1,
                    serving_incarnations: vec![1],
                });
                volume.enable_reservations(gate, core.buffer_pool().account());
            }
            let away = Rc::new(Cell::new(false));
            let known = Rc::clone(&away);
            let absence = OutageSignal::new(move || known.get());
            let access = AccessState::new(Access::Optimized);
            let outage = match shared {
                true => OutagePolicy::Wait(access.clone()),
                false => OutagePolicy::LeaveUnanswered(absence.clone()),
            };
            let server = Server::new(&core, Rc::clone(&volume), outage, &options);
            let listener = core.listen_unix(&at).await.unwrap();
            ready.send(()).unwrap();
            let ground = Ground { core: core.clone(), mem, faults, volume, access, away };
            tokio::select! {
                biased;
                () = async {
                    while let Some(job) = asked.recv().await {
                        job(&ground);
                    }
                    std::future::pending::<()>().await;
                } => {}
                () = server.serve(&listener, async { drop(stopped.await) }) => {}
            }
            let closed = ground.volume.close(&core.buffer_pool().account()).await;
            assert_eq!(closed.is_err(), absence.is_set(), "{closed:?}");
            let usage = core.buffer_pool().usage();
            assert_eq!((usage.free, usage.overdrafts), (usage.total, 0), "memory came back");
            drop(listener);
            ended.send(()).unwrap();
        };
        cores.handles()[0].try_post(life).unwrap();
        is_ready.recv_timeout(PATIENCE).expect("it listens");
        Self { cores: Some(cores), path, stop: Some(stop), over, jobs, _dir: dir }
    }

    /// Does something on the core.
    pub(crate) fn on_core<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Ground) -> T + Send + 'static,
    ) -> T {
        let (answer, result) = mpsc::channel();
        let job = move |ground: &Ground| answer.send(f(ground)).unwrap();
        self.jobs.send(Box::new(job)).ok().unwrap();
        result.recv_timeout(PATIENCE).unwrap()
    }

    /// Tells it to stop.
    pub(crate) fn tell_to_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Stops it, and waits until everything has come back.
    pub(crate) fn end(mut self) {
        self.tell_to_stop();
        self.wait();
    }

    /// Waits until it ends by itself, and everything has come back.
    pub(crate) fn wait(mut self) {
        self.over.recv_timeout(PATIENCE).expect("it ends");
        self.cores.take().unwrap().stop_now();
    }
}
