//! Simulated hosts: software that runs, crashes and starts again, and disks that stay.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::LocalSet;

use super::core::SimCore;
use super::device::{Device, Space};
use super::disk::{DiskControl, Slot};
use super::faults::DiskSetup;
use super::harm::Harm;
use super::machine::Machine;
use super::net::Goodbye;
use super::pause::Pause;
use super::rng::Rng;
use super::world::Shared;
use crate::Core;
use crate::buf::Pool;
use crate::mailbox::mailbox;

/// Jobs that a simulated core's mailbox holds.
const MAILBOX: usize = 256;

/// One life of a host, from start to crash.
#[derive(Debug)]
pub(crate) struct Boot {
    alive: Cell<bool>,
}

impl Boot {
    /// Whether the host still runs what was started then.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.get()
    }
}

/// What a host is made of.
#[derive(Clone, Debug)]
pub struct HostSetup {
    /// Cores of the node.
    pub cores: usize,
    /// Buffer pool of each core, in bytes.
    pub pool_bytes: usize,
    /// Space that files share, in bytes; `None`: any amount.
    pub space: Option<u64>,
    /// What files that the software creates are like; their size is the creator's choice.
    pub files: DiskSetup,
    /// How far the wall clock is ahead of true time.
    pub clock_ahead: Duration,
    /// How much faster than true time the clock runs that [`Core::now`] reads, in parts per
    /// million: from -1,000,000 (it stands still) to 1,000,000.
    pub clock_drift_ppm: i32,
}

impl Default for HostSetup {
    fn default() -> Self {
        Self {
            cores: 1,
            pool_bytes: 8 << 20,
            space: None,
            files: DiskSetup::file(0),
            clock_ahead: Duration::ZERO,
            clock_drift_ppm: 0,
        }
    }
}

type Software = dyn Fn(Core) -> Pin<Box<dyn Future<Output = Result<(), String>>>>;

pub(crate) struct HostState {
    pub(crate) name: Rc<str>,
    pub(crate) index: usize,
    pub(crate) address: IpAddr,
    pub(crate) setup: RefCell<HostSetup>,
    pub(crate) files: RefCell<BTreeMap<PathBuf, Rc<Slot>>>,
    pub(crate) space: Rc<Space>,
    pub(crate) rng: Rng,
    pub(crate) machine: Machine,
    pub(crate) harm: Harm,
    software: RefCell<Option<Rc<Software>>>,
    running: RefCell<Option<Running>>,
}

struct Running {
    boot: Rc<Boot>,
    cores: Vec<Core>,
    tasks: Rc<Tasks>,
}

/// The tasks of one life of a host.
struct Tasks {
    set: RefCell<Option<LocalSet>>,
    /// The host crashed while one of its own tasks was running.
    doomed: Cell<bool>,
    pause: Rc<Pause>,
}

impl HostState {
    /// It is not started again.
    pub(crate) fn forget_software(&self) {
        drop(self.software.take());
    }

    pub(crate) fn new(shared: &Shared, index: usize, name: &str, setup: HostSetup) -> Self {
        let space = Rc::new(Space::default());
        space.capacity.set(setup.space);
        let now = shared.agenda.now();
        Self {
            name: name.into(),
            index,
            address: super::net::address(index),
            machine: Machine::new(shared.seed, name, now, setup.clock_drift_ppm),
            harm: Harm::new(shared.seed, name),
            setup: RefCell::new(setup),
            files: RefCell::default(),
            space,
            rng: Rng::new(shared.seed, &format!("host {name}")),
            software: RefCell::default(),
            running: RefCell::default(),
        }
    }

    pub(crate) fn new_slot(&self, shared: &Shared, path: &Path, setup: DiskSetup) -> Rc<Slot> {
        let name = format!("{}:{}", self.name, path.display());
        let rng = Rng::new(shared.seed, &name);
        let device = Device::new(setup, Rc::clone(&self.space), rng);
        let trace = Rc::clone(&shared.trace);
        Rc::new(Slot::new(name.into(), device, shared.agenda.clone(), trace))
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.borrow().is_some()
    }

    /// Whether and how long the process is stopped; `None`: there is none.
    pub(crate) fn pause(&self) -> Option<Rc<Pause>> {
        self.running.borrow().as_ref().map(|r| Rc::clone(&r.tasks.pause))
    }
}

/// A simulated host. Cheap to clone.
#[derive(Clone)]
pub struct Host {
    pub(super) shared: Rc<Shared>,
    pub(super) state: Rc<HostState>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Host").field(&self.state.name).finish()
    }
}

/// The result of something that a host was asked to do.
#[derive(Debug)]
pub struct Task<T>(oneshot::Receiver<T>);

impl<T> Task<T> {
    /// Waits for the end; `None` when the host crashed before.
    pub async fn join(self) -> Option<T> {
        self.0.await.ok()
    }
}

impl Host {
    pub(crate) fn new(shared: Rc<Shared>, state: Rc<HostState>) -> Self {
        Self { shared, state }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// Its address in the simulated network.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.state.address
    }

    pub(crate) fn index(&self) -> usize {
        self.state.index
    }

    /// Changes what the host is made of, from its next start on.
    pub fn set_up(&self, change: impl FnOnce(&mut HostSetup)) {
        let mut setup = self.state.setup.borrow_mut();
        change(&mut setup);
        self.state.space.capacity.set(setup.space);
    }

    /// Changes how much faster than true time the host's clock runs ([`Core::now`]), in parts per
    /// million from -1,000,000 to 1,000,000, from now on. The clock does not jump.
    ///
    /// # Panics
    /// When the rate is outside of that.
    pub fn set_clock_drift(&self, drift_ppm: i32) {
        self.state.setup.borrow_mut().clock_drift_ppm = drift_ppm;
        self.state.machine.clock.set_drift(self.shared.agenda.now(), drift_ppm);
        // Events know no negative numbers: the whole rate, true time being a million.
        let rate_ppm = 1_000_000u64.saturating_add_signed(drift_ppm.into());
        self.shared.event("clock rate", &self.state.name, &[rate_ppm]);
    }

    /// Bytes of space that files take.
    #[must_use]
    pub fn space_used(&self) -> u64 {
        self.state.space.used.get()
    }

    /// Bytes of space that files may take; `None`: any amount.
    #[must_use]
    pub fn space_limit(&self) -> Option<u64> {
        self.state.space.capacity.get()
    }

    /// Gives the host a disk called `path`, all zeroes, in place of what had that name.
    pub fn add_disk(&self, path: impl AsRef<Path>, setup: DiskSetup) -> DiskControl {
        let path = path.as_ref();
        let slot = self.state.new_slot(&self.shared, path, setup);
        self.state.files.borrow_mut().insert(path.to_owned(), Rc::clone(&slot));
        DiskControl(slot)
    }

    /// Gives the host a disk of another one: a logical unit that two machines reach. What keeps two programs of one machine from
    /// opening it does not keep the other machine from that. It keeps its power when a host loses it.
    ///
    /// # Panics
    /// When the other host has no such disk.
    pub fn share_disk(&self, path: impl AsRef<Path>, other: &Host) -> DiskControl {
        let path = path.as_ref();
        let theirs = other.state.files.borrow().get(path).cloned().expect("a disk to share");
        let name = format!("{}:{}", self.state.name, path.display());
        let slot = Rc::new(theirs.shared_with(name.into()));
        self.state.files.borrow_mut().insert(path.to_owned(), Rc::clone(&slot));
        DiskControl(slot)
    }

    /// The disk or file called `path`, if there is one.
    #[must_use]
    pub fn disk(&self, path: impl AsRef<Path>) -> Option<DiskControl> {
        self.state.files.borrow().get(path.as_ref()).cloned().map(DiskControl)
    }

    /// Starts the host with this software on core 0; [`Self::restart`] will start the same.
    /// Software that ends with an error fails the scenario.
    ///
    /// # Panics
    /// When the host is running.
    pub fn start<F, Fut>(&self, software: F)
    where
        F: Fn(Core) -> Fut + 'static,
        Fut: Future<Output = Result<(), String>> + 'static,
    {
        let software: Rc<Software> = Rc::new(move |core| Box::pin(software(core)));
        *self.state.software.borrow_mut() = Some(software);
        self.restart();
    }

    /// Starts the host again with the software it had; without any it just runs what
    /// [`Self::run`] brings.
    ///
    /// # Panics
    /// When the host is running.
    pub fn restart(&self) {
        self.boot();
        let software = self.state.software.borrow().clone();
        if let Some(software) = software {
            let (shared, name) = (Rc::clone(&self.shared), Rc::clone(&self.state.name));
            let task = self.run(move |core| software(core));
            tokio::task::spawn_local(async move {
                if let Some(Err(e)) = task.join().await {
                    shared.fail(format!("{name}: {e}"));
                }
            });
        }
    }

    fn boot(&self) {
        assert!(!self.state.is_running(), "{} is running", self.state.name);
        self.shared.event("start", &self.state.name, &[]);
        let drift_ppm = self.state.setup.borrow().clock_drift_ppm;
        self.state.machine.up(self.shared.agenda.now(), drift_ppm);
        let boot = Rc::new(Boot { alive: Cell::new(true) });
        let set = LocalSet::new();
        let cores = self.cores(&boot, &set);
        let tasks = Rc::new(Tasks {
            set: RefCell::new(Some(set)),
            doomed: Cell::new(false),
            pause: Rc::default(),
        });
        tokio::task::spawn_local(poll_tasks(Rc::clone(&tasks), Rc::clone(&self.shared)));
        *self.state.running.borrow_mut() = Some(Running { boot, cores, tasks });
        self.shared.net.host_up(self.state.index);
    }

    fn cores(&self, boot: &Rc<Boot>, set: &LocalSet) -> Vec<Core> {
        let setup = self.state.setup.borrow();
        let (peers, inboxes): (Vec<_>, Vec<_>) =
            (0..setup.cores.max(1)).map(|id| mailbox(id, MAILBOX)).unzip();
        let peers: Arc<[_]> = peers.into();
        let mut cores = Vec::new();
        for (id, inbox) in inboxes.into_iter().enumerate() {
            let pool = Pool::new(setup.pool_bytes).expect("the system is out of memory");
            let system =
                SimCore::new(Rc::clone(&self.shared), Rc::clone(&self.state), Rc::clone(boot));
            let core = Core::sim(id, pool, Arc::clone(&peers), system);
            let served = core.clone();
            set.spawn_local(async move { inbox.serve(&served).await });
            cores.push(core);
        }
        cores
    }

    /// Whether the host is up.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state.is_running()
    }

    /// Runs something on core 0 of the host, starting it if it is down.
    pub fn run<F, Fut>(&self, work: F) -> Task<Fut::Output>
    where
        F: FnOnce(Core) -> Fut,
        Fut: Future + 'static,
    {
        self.run_with_all(|cores| work(cores[0].clone()))
    }

    /// The same with all cores of the host: each has disks, connections and memory of its own.
    pub fn run_with_all<F, Fut>(&self, work: F) -> Task<Fut::Output>
    where
        F: FnOnce(Vec<Core>) -> Fut,
        Fut: Future + 'static,
    {
        if !self.state.is_running() {
            self.boot();
        }
        let running = self.state.running.borrow();
        let running = running.as_ref().expect("just started");
        let (answer, result) = oneshot::channel();
        let work = work(running.cores.clone());
        let work = async move {
            // The scenario may have lost interest.
            let _ = answer.send(work.await);
        };
        match running.tasks.set.try_borrow() {
            Ok(set) => drop(set.as_ref().expect("the host runs").spawn_local(work)),
            // Called from one of the host's own tasks.
            Err(_) => drop(tokio::task::spawn_local(work)),
        }
        Task(result)
    }

    /// The power fails: everything that ran is gone without a word to anybody, and of what was
    /// not synced the seed decides. The next start is another boot.
    pub fn power_cut(&self) {
        self.end("power cut", Goodbye::Silent);
        self.state.machine.power_cut();
        let slots: Vec<_> = self.state.files.borrow().values().cloned().collect();
        slots.iter().for_each(|slot| slot.power_cut());
    }

    /// The process is killed: the system closes its connections and finishes what the disks are
    /// doing; nothing that was written is lost. The next start is in the same boot.
    pub fn kill(&self) {
        self.end("kill", Goodbye::Closed);
        self.state.files.borrow().values().for_each(|slot| slot.killed());
    }

    fn end(&self, how: &'static str, goodbye: Goodbye) {
        self.shared.event(how, &self.state.name, &[]);
        let running = self.state.running.borrow_mut().take();
        if let Some(running) = &running {
            running.boot.alive.set(false);
        }
        self.shared.net.host_down(self.state.index, goodbye);
        let Some(Running { tasks, .. }) = running else { return };
        tasks.pause.forget();
        match tasks.set.try_borrow_mut() {
            Ok(mut set) => {
                let _guard = self.shared.crash_guard();
                drop(set.take());
            }
            Err(_) => tasks.doomed.set(true),
        }
    }
}

/// Runs the tasks of one life of a host.
async fn poll_tasks(tasks: Rc<Tasks>, shared: Rc<Shared>) {
    poll_fn(|cx| {
        if tasks.pause.holds(cx) {
            return Poll::Pending;
        }
        let mut set = tasks.set.borrow_mut();
        let Some(running) = &mut *set else { return Poll::Ready(()) };
        // Ready means: no task at the moment.
        let _ = Pin::new(running).poll(cx);
        if tasks.doomed.get() {
            let _guard = shared.crash_guard();
            drop(set.take());
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
}
