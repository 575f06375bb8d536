//! What there is of a simulated host: its setup, disks, clock and software, and its tasks while it
//! runs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::LocalSet;

use super::device::{Device, FileSystemSpace};
use super::disk::DiskSlot;
use super::faults::DiskSetup;
use super::host_fault_state::HostFaultState;
use super::host_run::HostRun;
use super::machine::Machine;
use super::process_pause::ProcessPause;
use super::rng::Rng;
use super::world_state::WorldInner;
use crate::Core;

/// Configuration of a host.
#[derive(Clone, Debug)]
pub struct HostSetup {
    /// Cores of the node.
    pub cores: usize,
    /// Buffer pool of each core, in bytes.
    pub memory_bytes: usize,
    /// Space shared by files, in bytes; `None`: unlimited.
    pub space_bytes: Option<u64>,
    /// Properties of files that the software creates; the creator chooses their size.
    pub new_file_setup: DiskSetup,
    /// How far the wall clock is ahead of true time.
    pub clock_ahead: Duration,
    /// How much faster than true time the clock of [`Core::now`] runs, in parts per million: from
    /// -1,000,000 (it stands still) to 1,000,000.
    pub clock_drift_ppm: i32,
}

impl Default for HostSetup {
    fn default() -> Self {
        Self {
            cores: 1,
            memory_bytes: 8 << 20,
            space_bytes: None,
            new_file_setup: DiskSetup::file(0),
            clock_ahead: Duration::ZERO,
            clock_drift_ppm: 0,
        }
    }
}

/// The software of a host.
pub(super) type Software = dyn Fn(Core) -> Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// A host, running or not.
pub(crate) struct HostState {
    pub(crate) name: Rc<str>,
    pub(crate) index: usize,
    pub(crate) address: IpAddr,
    pub(crate) setup: RefCell<HostSetup>,
    pub(crate) files: RefCell<BTreeMap<PathBuf, Rc<DiskSlot>>>,
    pub(crate) file_space: Rc<FileSystemSpace>,
    pub(crate) rng: Rng,
    pub(crate) machine: Machine,
    pub(crate) fault_state: HostFaultState,
    pub(super) software: RefCell<Option<Rc<Software>>>,
    pub(super) running: RefCell<Option<Running>>,
}

/// What there is of a host only while it runs.
pub(super) struct Running {
    pub(super) run: Rc<HostRun>,
    pub(super) cores: Vec<Core>,
    pub(super) tasks: Rc<HostTasks>,
}

/// The tasks of one run of a host.
pub(super) struct HostTasks {
    pub(super) set: RefCell<Option<LocalSet>>,
    /// The host crashed while one of its own tasks was running.
    pub(super) must_drop: Cell<bool>,
    pub(super) pause: Rc<ProcessPause>,
}

impl HostState {
    /// Prevents a restart.
    pub(crate) fn forget_software(&self) {
        drop(self.software.take());
    }

    pub(crate) fn new(shared: &WorldInner, index: usize, name: &str, setup: HostSetup) -> Self {
        let space = Rc::new(FileSystemSpace::default());
        space.capacity.set(setup.space_bytes);
        let now = shared.agenda.now();
        Self {
            name: name.into(),
            index,
            address: super::net::address(index),
            machine: Machine::new(shared.seed, name, now, setup.clock_drift_ppm),
            fault_state: HostFaultState::new(shared.seed, name),
            setup: RefCell::new(setup),
            files: RefCell::default(),
            file_space: space,
            rng: Rng::new(shared.seed, &format!("host {name}")),
            software: RefCell::default(),
            running: RefCell::default(),
        }
    }

    pub(crate) fn new_slot(
        &self,
        shared: &WorldInner,
        path: &Path,
        setup: DiskSetup,
    ) -> Rc<DiskSlot> {
        let name = format!("{}:{}", self.name, path.display());
        let rng = Rng::new(shared.seed, &name);
        let device = Device::new(setup, Rc::clone(&self.file_space), rng);
        let trace = Rc::clone(&shared.trace);
        Rc::new(DiskSlot::new(name.into(), device, shared.agenda.clone(), trace))
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.borrow().is_some()
    }

    /// The pause state of the process; `None`: there is no process.
    pub(crate) fn pause(&self) -> Option<Rc<ProcessPause>> {
        self.running.borrow().as_ref().map(|r| Rc::clone(&r.tasks.pause))
    }
}
