//! Simulated disks in virtual time: the handle for code under test, and the one for a scenario.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::device::{Device, DeviceOp, OpResult, ScriptedFault, TraceRecord};
use super::event_queue::EventQueue;
use super::faults::{BadRange, DiskFaults};
use super::host_run::HostRun;
use super::medium::Contents;
use super::trace::Trace;
use crate::buf::{Bufs, BufsMut};
use crate::disk_file::{DiskError, DiskErrorKind, DiskInfo, DiskKind, Signature, SparseRun};

/// Required alignment of buffers: as strict as any real disk.
const MEMORY_ALIGN: u32 = 512;

/// A disk of a host, open or not. Survives crashes.
pub(crate) struct DiskSlot {
    name: Rc<str>,
    device: Rc<RefCell<Device>>,
    /// Whether other hosts have it as well: then it keeps its power when one of them loses power.
    shared: Cell<bool>,
    pending: RefCell<BTreeMap<u64, oneshot::Sender<OpResult>>>,
    /// Completions held back until the scenario releases them.
    held_completions: RefCell<Option<Vec<u64>>>,
    open_state: Cell<OpenState>,
    agenda: EventQueue,
    trace: Rc<Trace>,
}

/// Whether a disk is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenState {
    Closed,
    Readers(u32),
    Writer,
    /// By a killed process, until the system has finished its last operations.
    Dying,
}

impl fmt::Debug for DiskSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskSlot").field("name", &self.name).finish_non_exhaustive()
    }
}

impl DiskSlot {
    pub(crate) fn new(name: Rc<str>, device: Device, agenda: EventQueue, trace: Rc<Trace>) -> Self {
        Self {
            name,
            device: Rc::new(RefCell::new(device)),
            shared: Cell::new(false),
            pending: RefCell::default(),
            held_completions: RefCell::default(),
            open_state: Cell::new(OpenState::Closed),
            agenda,
            trace,
        }
    }

    /// The same device on another host: locks of one host do not affect the other.
    pub(crate) fn shared_with(&self, name: Rc<str>) -> Self {
        self.shared.set(true);
        Self {
            name,
            device: Rc::clone(&self.device),
            shared: Cell::new(true),
            pending: RefCell::default(),
            held_completions: RefCell::default(),
            open_state: Cell::new(OpenState::Closed),
            agenda: self.agenda.clone(),
            trace: Rc::clone(&self.trace),
        }
    }

    pub(crate) fn device(&self) -> &RefCell<Device> {
        &self.device
    }

    fn report(&self, report: TraceRecord) {
        self.trace.event(self.agenda.now(), report.what, &self.name, &report.numbers);
    }

    fn submit(self: &Rc<Self>, op: DeviceOp, opened: u64) -> oneshot::Receiver<OpResult> {
        let (id, delay, report) = self.device.borrow_mut().submit(op, opened);
        self.report(report);
        let (answer, receiver) = oneshot::channel();
        self.pending.borrow_mut().insert(id, answer);
        let slot = Rc::clone(self);
        self.agenda.schedule(delay, move || slot.complete(id));
        receiver
    }

    fn complete(self: &Rc<Self>, id: u64) {
        if let Some(held) = &mut *self.held_completions.borrow_mut() {
            held.push(id);
            return;
        }
        let finished = self.device.borrow_mut().finish(id);
        let waiting = self.pending.borrow_mut().remove(&id);
        let Some((answer, report)) = finished else { return };
        self.report(report);
        if self.open_state.get() == OpenState::Dying {
            self.process_killed();
        }
        if let Some(waiting) = waiting {
            // The caller may be gone; the disk has done its work all the same.
            let _ = waiting.send(answer);
        }
    }

    fn release_completions(self: &Rc<Self>) {
        for id in self.held_completions.borrow_mut().take().into_iter().flatten() {
            let slot = Rc::clone(self);
            self.agenda.schedule(Duration::ZERO, move || slot.complete(id));
        }
    }

    /// Takes the lock for opening a disk.
    pub(crate) fn try_open(&self, read_only: bool) -> bool {
        let held = match (self.open_state.get(), read_only) {
            (OpenState::Closed, false) => OpenState::Writer,
            (OpenState::Closed, true) => OpenState::Readers(1),
            (OpenState::Readers(n), true) => OpenState::Readers(n + 1),
            _ => return false,
        };
        self.open_state.set(held);
        true
    }

    /// The process that had the disk open is killed.
    pub(crate) fn process_killed(&self) {
        let idle = self.pending.borrow().is_empty();
        self.open_state.set(if idle { OpenState::Closed } else { OpenState::Dying });
    }

    /// The power of the host fails.
    pub(crate) fn power_cut(&self) {
        if self.shared.get() {
            // A shared disk has its own power: it completes its operations.
            self.open_state.set(OpenState::Closed);
            return;
        }
        self.open_state.set(OpenState::Closed);
        *self.held_completions.borrow_mut() = None;
        self.pending.borrow_mut().clear();
        let losses = self.device.borrow_mut().power_cut();
        let unreadable = losses.unreadable.len() as u64;
        let numbers = [losses.kept, losses.lost, losses.torn, unreadable];
        self.trace.event(self.agenda.now(), "power cut", &self.name, &numbers);
    }
}

/// An open simulated disk: what [`crate::disk::Disk`] dispatches to.
#[derive(Debug)]
pub(crate) struct SimDisk {
    slot: Rc<DiskSlot>,
    run: Rc<HostRun>,
    read_only: bool,
    /// The disk's unplug count at that time.
    open_generation: u64,
}

impl Drop for SimDisk {
    fn drop(&mut self) {
        // After a crash another process may hold the lock.
        if self.run.is_alive() {
            self.slot.open_state.set(match self.slot.open_state.get() {
                OpenState::Readers(n) if self.read_only && n > 1 => OpenState::Readers(n - 1),
                _ => OpenState::Closed,
            });
        }
    }
}

impl SimDisk {
    /// Opens `slot`, whose lock the caller has taken.
    pub(crate) fn new(slot: Rc<DiskSlot>, boot: Rc<HostRun>, read_only: bool) -> Self {
        let opened = slot.device.borrow_mut().on_open();
        Self { slot, run: boot, read_only, open_generation: opened }
    }

    pub(crate) fn info(&self) -> DiskInfo {
        let device = self.slot.device.borrow();
        let setup = device.setup();
        DiskInfo {
            size: device.len(),
            logical_block: setup.logical_block,
            physical_block: setup.physical_block,
            memory_align: MEMORY_ALIGN,
            kind: setup.kind,
            can_punch: setup.can_punch,
            can_zero: setup.can_zero,
            has_volatile_cache: true,
            is_rotational: None,
            read_only: self.read_only,
            is_shareable: setup.kind == DiskKind::BlockDevice,
            attachment_number: self.open_generation,
        }
    }

    pub(crate) fn serial(&self) -> String {
        self.slot.device.borrow().setup().serial.clone()
    }

    async fn run(&self, op: DeviceOp) -> OpResult {
        if !self.run.is_alive() {
            return Err(DiskError::new(DiskErrorKind::Gone));
        }
        let answer = self.slot.submit(op, self.open_generation);
        answer.await.unwrap_or(Err(DiskError::new(DiskErrorKind::Gone)))
    }

    async fn change(&self, op: DeviceOp) -> Result<(), DiskError> {
        self.run(op).await.map(drop)
    }

    pub(crate) async fn read(&self, at: u64, into: BufsMut) -> Result<BufsMut, DiskError> {
        self.run(DeviceOp::Read { at, into }).await
    }

    pub(crate) async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        self.change(DeviceOp::Write { at, data }).await
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        self.change(DeviceOp::Sync).await
    }

    pub(crate) async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.change(DeviceOp::Punch { at, bytes }).await
    }

    pub(crate) async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.change(DeviceOp::Zero { at, bytes }).await
    }

    pub(crate) async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.change(DeviceOp::Allocate { at, bytes }).await
    }

    pub(crate) async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        self.change(DeviceOp::SetLen { bytes }).await
    }

    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        Ok(self.slot.device.borrow().allocated())
    }

    /// A simulated world has no such library.
    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn signatures(&self) -> Option<Vec<Signature>> {
        None
    }

    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn sparse_run(&self, at: u64, bytes: u64) -> Result<SparseRun, DiskError> {
        self.slot.device.borrow().sparse_run(at, bytes)
    }

    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn size(&self) -> Result<u64, DiskError> {
        Ok(self.slot.device.borrow().len())
    }
}

/// The contents of a disk at some time: see [`DiskControl::capture_image`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskImage(Contents);

/// A scenario's handle to a disk. Cheap to clone; outlives crashes.
#[derive(Clone, Debug)]
pub struct DiskControl(pub(crate) Rc<DiskSlot>);

impl DiskControl {
    /// Changes the disk's faults.
    pub fn set_faults(&self, faults: DiskFaults) {
        self.0.device.borrow_mut().setup_mut().faults = faults;
    }

    /// The disk's faults.
    #[must_use]
    pub fn faults(&self) -> DiskFaults {
        self.0.device.borrow().setup().faults.clone()
    }

    /// Adds a bad range.
    pub fn add_bad_range(&self, bad: BadRange) {
        self.0.device.borrow_mut().add_bad_range(bad);
    }

    /// Queues a fault for the next operation of its kind, after earlier faults.
    pub fn script_fault(&self, fault: ScriptedFault) {
        self.0.device.borrow_mut().add_scripted_fault(fault);
    }

    /// Removes bad ranges and queued faults.
    pub fn clear_faults(&self) {
        self.0.device.borrow_mut().clear_faults();
    }

    /// Flips one bit (0 to 7) of the byte at `at`.
    pub fn flip_bit(&self, at: u64, bit: u8) {
        self.0.device.borrow_mut().medium_mut().flip_bit(at, bit);
    }

    /// Holds back all completions until [`Self::release_completions`].
    pub fn hold_completions(&self) {
        self.0.held_completions.borrow_mut().get_or_insert_default();
    }

    /// Ends [`Self::hold_completions`]: due operations complete, in any order.
    pub fn release_completions(&self) {
        self.0.release_completions();
    }

    /// Unplugs the disk: every operation fails as gone, and its cache is lost. Once it is back it
    /// must be opened again.
    pub fn unplug(&self) {
        self.0.device.borrow_mut().set_present(false);
    }

    /// Plugs it in again.
    pub fn plug(&self) {
        self.0.device.borrow_mut().set_present(true);
    }

    /// Operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.0.device.borrow().in_flight()
    }

    /// Changes that a power cut may lose.
    #[must_use]
    pub fn unsynced_changes(&self) -> usize {
        self.0.device.borrow().medium().unsynced_changes()
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.device.borrow().len()
    }

    /// Grows a device, or truncates a file without its owner's knowledge. Durable.
    pub fn resize(&self, bytes: u64) {
        self.0.device.borrow_mut().resize(bytes);
    }

    /// Bytes of allocated space.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.0.device.borrow().allocated()
    }

    /// What a read of `len` bytes at `at` would return.
    #[must_use]
    pub fn read_visible(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.0.device.borrow().medium().read(at, &mut out);
        out
    }

    /// The contents if the power failed now and everything unsynced was lost.
    #[must_use]
    pub fn read_durable(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.0.device.borrow().medium().read_durable(at, &mut out);
        out
    }

    /// The current contents, as a snapshot or a backup.
    #[must_use]
    pub fn capture_image(&self) -> DiskImage {
        DiskImage(self.0.device.borrow().medium().capture())
    }

    /// Restores a copy durably, while the disk is not in use.
    pub fn restore_image(&self, copy: &DiskImage) {
        self.0.device.borrow_mut().medium_mut().restore(copy.0.clone());
    }

    /// Overwrites bytes durably, bypassing every layer: for faults without a name here, or to
    /// prepare a disk.
    pub fn write_durable(&self, at: u64, bytes: &[u8]) {
        self.0.device.borrow_mut().medium_mut().write_durable(at, bytes);
    }
}
