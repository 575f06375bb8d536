//! Simulated hosts: software that runs, crashes and restarts, and disks that persist.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::LocalSet;

use super::core::SimCore;
use super::disk::DiskControl;
use super::faults::DiskSetup;
use super::host_run::HostRun;
use super::host_state::{HostSetup, HostState, HostTasks, Running, Software};
use super::net::HostExit;
use super::world_state::WorldInner;
use crate::Core;
use crate::buf::BufferPool;
use crate::mailbox::mailbox;

/// Length of a simulated core's mailbox.
const MAILBOX_LEN: usize = 256;

/// The longest that tasks of a simulated core run between two looks for events.
const MAX_PASS: Duration = Duration::from_micros(200);

/// A simulated host. Cheap to clone.
#[derive(Clone)]
pub struct Host {
    pub(super) shared: Rc<WorldInner>,
    pub(super) state: Rc<HostState>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Host").field(&self.state.name).finish()
    }
}

/// The result of a task on a host.
#[derive(Debug)]
pub struct HostTask<T>(oneshot::Receiver<T>);

impl<T> HostTask<T> {
    /// Waits for the end; `None` if the host crashed before.
    pub async fn join(self) -> Option<T> {
        self.0.await.ok()
    }
}

impl Host {
    pub(crate) fn new(shared: Rc<WorldInner>, state: Rc<HostState>) -> Self {
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

    /// Changes the configuration of the host, from its next start on.
    pub fn update_setup(&self, change: impl FnOnce(&mut HostSetup)) {
        let mut setup = self.state.setup.borrow_mut();
        change(&mut setup);
        self.state.file_space.capacity.set(setup.space_bytes);
    }

    /// Changes how much faster than true time the host's clock runs ([`Core::now`]), in parts per
    /// million from -1,000,000 to 1,000,000, from now on. The reading does not jump.
    ///
    /// # Panics
    /// If the rate is outside of that range.
    pub fn set_clock_drift(&self, drift_ppm: i32) {
        self.state.setup.borrow_mut().clock_drift_ppm = drift_ppm;
        self.state.machine.clock.set_drift(self.shared.agenda.now(), drift_ppm);
        // Events carry no negative numbers: the whole rate, with true time as one million.
        let rate_ppm = 1_000_000u64.saturating_add_signed(drift_ppm.into());
        self.shared.event("clock rate", &self.state.name, &[rate_ppm]);
    }

    /// Bytes of space used by files.
    #[must_use]
    pub fn space_used(&self) -> u64 {
        self.state.file_space.used.get()
    }

    /// Bytes of space available to files; `None`: unlimited.
    #[must_use]
    pub fn space_limit(&self) -> Option<u64> {
        self.state.file_space.capacity.get()
    }

    /// Adds a disk called `path`, all zeroes, replacing any other of that name.
    pub fn add_disk(&self, path: impl AsRef<Path>, setup: DiskSetup) -> DiskControl {
        let path = path.as_ref();
        let slot = self.state.new_slot(&self.shared, path, setup);
        self.state.files.borrow_mut().insert(path.to_owned(), Rc::clone(&slot));
        DiskControl(slot)
    }

    /// Adds a disk of another host: a logical unit that both machines access. Locks within one
    /// machine do not affect the other. It keeps its power when a host loses power.
    ///
    /// # Panics
    /// If the other host has no such disk.
    pub fn share_disk(&self, path: impl AsRef<Path>, other: &Host) -> DiskControl {
        let path = path.as_ref();
        let shared_slot = other.state.files.borrow().get(path).cloned().expect("a disk to share");
        let name = format!("{}:{}", self.state.name, path.display());
        let slot = Rc::new(shared_slot.shared_with(name.into()));
        self.state.files.borrow_mut().insert(path.to_owned(), Rc::clone(&slot));
        DiskControl(slot)
    }

    /// The disk or file called `path`, if there is one.
    #[must_use]
    pub fn disk(&self, path: impl AsRef<Path>) -> Option<DiskControl> {
        self.state.files.borrow().get(path.as_ref()).cloned().map(DiskControl)
    }

    /// Starts the host with this software on core 0; [`Self::restart`] will start the same.
    /// Software that returns an error fails the scenario.
    ///
    /// # Panics
    /// If the host is running.
    pub fn start<F, Fut>(&self, software: F)
    where
        F: Fn(Core) -> Fut + 'static,
        Fut: Future<Output = Result<(), String>> + 'static,
    {
        let software: Rc<Software> = Rc::new(move |core| Box::pin(software(core)));
        *self.state.software.borrow_mut() = Some(software);
        self.restart();
    }

    /// Starts the host again with its previous software; without any it only runs the work of
    /// [`Self::run`].
    ///
    /// # Panics
    /// If the host is running.
    pub fn restart(&self) {
        self.boot_host();
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

    fn boot_host(&self) {
        assert!(!self.state.is_running(), "{} is running", self.state.name);
        self.shared.event("start", &self.state.name, &[]);
        let drift_ppm = self.state.setup.borrow().clock_drift_ppm;
        self.state.machine.power_on(self.shared.agenda.now(), drift_ppm);
        let boot = Rc::new(HostRun::new());
        let set = LocalSet::new();
        let cores = self.cores(&boot, &set);
        let tasks = Rc::new(HostTasks {
            set: RefCell::new(Some(set)),
            must_drop: Cell::new(false),
            pause: Rc::default(),
        });
        tokio::task::spawn_local(poll_tasks(Rc::clone(&tasks), Rc::clone(&self.shared)));
        *self.state.running.borrow_mut() = Some(Running { run: boot, cores, tasks });
        self.shared.net.host_up(self.state.index);
    }

    fn cores(&self, boot: &Rc<HostRun>, set: &LocalSet) -> Vec<Core> {
        let setup = self.state.setup.borrow();
        let (peers, inboxes): (Vec<_>, Vec<_>) =
            (0..setup.cores.max(1)).map(|id| mailbox(id, MAILBOX_LEN)).unzip();
        let peers: Arc<[_]> = peers.into();
        let mut cores = Vec::new();
        for (id, inbox) in inboxes.into_iter().enumerate() {
            let pool = BufferPool::new(setup.memory_bytes).expect("the system is out of memory");
            let system =
                SimCore::new(Rc::clone(&self.shared), Rc::clone(&self.state), Rc::clone(boot));
            let core = Core::new_sim(id, pool, Arc::clone(&peers), system);
            let served = core.clone();
            set.spawn_local(async move { inbox.serve(&served).await });
            let (flows, host) = (Rc::clone(core.flows()), Rc::clone(&self.state));
            set.spawn_local(async move {
                let look =
                    || tokio::time::sleep(host.rng.duration_between(Duration::ZERO, MAX_PASS));
                flows.run_passes(look).await;
            });
            cores.push(core);
        }
        cores
    }

    /// Whether the host is up.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state.is_running()
    }

    /// Runs `work` on core 0 of the host, starting it if it is down.
    pub fn run<F, Fut>(&self, work: F) -> HostTask<Fut::Output>
    where
        F: FnOnce(Core) -> Fut,
        Fut: Future + 'static,
    {
        self.run_with_all(|cores| work(cores[0].clone()))
    }

    /// The same with all cores of the host: each has its own disks, connections and memory.
    pub fn run_with_all<F, Fut>(&self, work: F) -> HostTask<Fut::Output>
    where
        F: FnOnce(Vec<Core>) -> Fut,
        Fut: Future + 'static,
    {
        if !self.state.is_running() {
            self.boot_host();
        }
        let running = self.state.running.borrow();
        let running = running.as_ref().expect("just started");
        let (answer, result) = oneshot::channel();
        let work = work(running.cores.clone());
        // Boxed, so that tasks of hosts are compiled once and not for each scenario.
        let work: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move {
            // The scenario may not wait for it.
            let _ = answer.send(work.await);
        });
        match running.tasks.set.try_borrow() {
            Ok(set) => drop(set.as_ref().expect("the host runs").spawn_local(work)),
            // Called from one of the host's own tasks.
            Err(_) => drop(tokio::task::spawn_local(work)),
        }
        HostTask(result)
    }

    /// Cuts the power: everything that ran is gone without notice, and the seed decides what
    /// remains of unsynced data. The next start is a new boot.
    pub fn power_cut(&self) {
        self.stop_software("power cut", HostExit::PowerCut);
        self.state.machine.power_cut();
        let slots: Vec<_> = self.state.files.borrow().values().cloned().collect();
        slots.iter().for_each(|slot| slot.power_cut());
    }

    /// Kills the process: the system closes its connections and completes its disk operations; no
    /// written data is lost. The next start is in the same boot.
    pub fn kill(&self) {
        self.stop_software("kill", HostExit::ProcessKilled);
        self.state.files.borrow().values().for_each(|slot| slot.process_killed());
    }

    fn stop_software(&self, how: &'static str, exit: HostExit) {
        self.shared.event(how, &self.state.name, &[]);
        let running = self.state.running.borrow_mut().take();
        if let Some(running) = &running {
            running.run.end();
        }
        self.shared.net.host_down(self.state.index, exit);
        let Some(Running { tasks, .. }) = running else { return };
        tasks.pause.clear();
        match tasks.set.try_borrow_mut() {
            Ok(mut set) => {
                let _guard = self.shared.crash_guard();
                drop(set.take());
            }
            Err(_) => tasks.must_drop.set(true),
        }
    }
}

/// Runs the tasks of one run of a host.
async fn poll_tasks(tasks: Rc<HostTasks>, shared: Rc<WorldInner>) {
    poll_fn(|cx| {
        if tasks.pause.is_blocking(cx) {
            return Poll::Pending;
        }
        let mut set = tasks.set.borrow_mut();
        let Some(running) = &mut *set else { return Poll::Ready(()) };
        // Ready means: no task at the moment.
        let _ = Pin::new(running).poll(cx);
        if tasks.must_drop.get() {
            let _guard = shared.crash_guard();
            drop(set.take());
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
}
