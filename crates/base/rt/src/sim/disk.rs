//! Simulated disks in virtual time: the handle that code under test holds, and the one with which
//! a scenario interferes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::agenda::Agenda;
use super::device::{Answer, Device, Mishap, Op, Report};
use super::faults::{Bad, DiskFaults};
use super::host::Boot;
use super::medium::Contents;
use super::trace::Trace;
use crate::buf::{Bufs, BufsMut};
use crate::disk::{DiskError, DiskErrorKind, DiskInfo, DiskKind, Signature, Stretch};

/// Alignment of buffers that the simulator demands: as strict as any real disk.
const MEMORY_ALIGN: u32 = 512;

/// A disk of a host, whoever has it open. Survives crashes.
pub(crate) struct Slot {
    name: Rc<str>,
    device: Rc<RefCell<Device>>,
    /// Whether other hosts have it as well: it keeps its power when one of them loses it.
    shared: Cell<bool>,
    waiting: RefCell<BTreeMap<u64, oneshot::Sender<Answer>>>,
    /// Completions that are held back until the scenario releases them.
    held: RefCell<Option<Vec<u64>>>,
    holder: Cell<Holder>,
    agenda: Agenda,
    trace: Rc<Trace>,
}

/// Who has a disk open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Nobody,
    Readers(u32),
    Writer,
    /// A killed process, until the system is through with its last operations.
    Dying,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Slot {
    pub(crate) fn new(name: Rc<str>, device: Device, agenda: Agenda, trace: Rc<Trace>) -> Self {
        Self {
            name,
            device: Rc::new(RefCell::new(device)),
            shared: Cell::new(false),
            waiting: RefCell::default(),
            held: RefCell::default(),
            holder: Cell::new(Holder::Nobody),
            agenda,
            trace,
        }
    }

    /// The same device as another host has it: locks of one host are nothing to the other.
    pub(crate) fn shared_with(&self, name: Rc<str>) -> Self {
        self.shared.set(true);
        Self {
            name,
            device: Rc::clone(&self.device),
            shared: Cell::new(true),
            waiting: RefCell::default(),
            held: RefCell::default(),
            holder: Cell::new(Holder::Nobody),
            agenda: self.agenda.clone(),
            trace: Rc::clone(&self.trace),
        }
    }

    pub(crate) fn device(&self) -> &RefCell<Device> {
        &self.device
    }

    fn report(&self, report: Report) {
        self.trace.event(self.agenda.now(), report.what, &self.name, &report.numbers);
    }

    fn submit(self: &Rc<Self>, op: Op, opened: u64) -> oneshot::Receiver<Answer> {
        let (id, delay, report) = self.device.borrow_mut().submit(op, opened);
        self.report(report);
        let (answer, receiver) = oneshot::channel();
        self.waiting.borrow_mut().insert(id, answer);
        let slot = Rc::clone(self);
        self.agenda.after(delay, move || slot.due(id));
        receiver
    }

    fn due(self: &Rc<Self>, id: u64) {
        if let Some(held) = &mut *self.held.borrow_mut() {
            held.push(id);
            return;
        }
        let finished = self.device.borrow_mut().finish(id);
        let waiting = self.waiting.borrow_mut().remove(&id);
        let Some((answer, report)) = finished else { return };
        self.report(report);
        if self.holder.get() == Holder::Dying {
            self.killed();
        }
        if let Some(waiting) = waiting {
            // Whoever asked may have gone; the disk has done its work all the same.
            let _ = waiting.send(answer);
        }
    }

    fn release(self: &Rc<Self>) {
        for id in self.held.borrow_mut().take().into_iter().flatten() {
            let slot = Rc::clone(self);
            self.agenda.after(Duration::ZERO, move || slot.due(id));
        }
    }

    /// Takes the lock that opening a disk takes.
    pub(crate) fn try_hold(&self, read_only: bool) -> bool {
        let held = match (self.holder.get(), read_only) {
            (Holder::Nobody, false) => Holder::Writer,
            (Holder::Nobody, true) => Holder::Readers(1),
            (Holder::Readers(n), true) => Holder::Readers(n + 1),
            _ => return false,
        };
        self.holder.set(held);
        true
    }

    /// The process that had the disk open is killed.
    pub(crate) fn killed(&self) {
        let idle = self.waiting.borrow().is_empty();
        self.holder.set(if idle { Holder::Nobody } else { Holder::Dying });
    }

    /// The power of the host fails.
    pub(crate) fn power_cut(&self) {
        if self.shared.get() {
            // The disk has its own: what it was asked for it does.
            self.holder.set(Holder::Nobody);
            return;
        }
        self.holder.set(Holder::Nobody);
        *self.held.borrow_mut() = None;
        self.waiting.borrow_mut().clear();
        let losses = self.device.borrow_mut().power_cut();
        let unreadable = losses.unreadable.len() as u64;
        let numbers = [losses.kept, losses.lost, losses.torn, unreadable];
        self.trace.event(self.agenda.now(), "power cut", &self.name, &numbers);
    }
}

/// An open simulated disk: what [`crate::disk::Disk`] dispatches to.
#[derive(Debug)]
pub(crate) struct SimDisk {
    slot: Rc<Slot>,
    boot: Rc<Boot>,
    read_only: bool,
    /// How often the disk had been pulled out by then.
    opened: u64,
}

impl Drop for SimDisk {
    fn drop(&mut self) {
        // After a crash the lock may already be somebody else's.
        if self.boot.is_alive() {
            self.slot.holder.set(match self.slot.holder.get() {
                Holder::Readers(n) if self.read_only && n > 1 => Holder::Readers(n - 1),
                _ => Holder::Nobody,
            });
        }
    }
}

impl SimDisk {
    /// Opens `slot`, whose lock the caller has taken.
    pub(crate) fn new(slot: Rc<Slot>, boot: Rc<Boot>, read_only: bool) -> Self {
        let opened = slot.device.borrow_mut().reopened();
        Self { slot, boot, read_only, opened }
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
            volatile_cache: true,
            rotational: None,
            read_only: self.read_only,
            shared: setup.kind == DiskKind::BlockDevice,
            attachment: self.opened,
        }
    }

    pub(crate) fn serial(&self) -> String {
        self.slot.device.borrow().setup().serial.clone()
    }

    async fn run(&self, op: Op) -> Answer {
        if !self.boot.is_alive() {
            return Err(DiskError::new(DiskErrorKind::Gone));
        }
        let answer = self.slot.submit(op, self.opened);
        answer.await.unwrap_or(Err(DiskError::new(DiskErrorKind::Gone)))
    }

    async fn change(&self, op: Op) -> Result<(), DiskError> {
        self.run(op).await.map(drop)
    }

    pub(crate) async fn read(&self, at: u64, into: BufsMut) -> Result<BufsMut, DiskError> {
        self.run(Op::Read { at, into }).await
    }

    pub(crate) async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        self.change(Op::Write { at, data }).await
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        self.change(Op::Sync).await
    }

    pub(crate) async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.change(Op::Punch { at, bytes }).await
    }

    pub(crate) async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.change(Op::Zero { at, bytes }).await
    }

    pub(crate) async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.change(Op::Allocate { at, bytes }).await
    }

    pub(crate) async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        self.change(Op::SetLen { bytes }).await
    }

    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        Ok(self.slot.device.borrow().allocated())
    }

    /// There is no such library in a simulated world.
    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn signatures(&self) -> Option<Vec<Signature>> {
        None
    }

    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn stretch(&self, at: u64, bytes: u64) -> Result<Stretch, DiskError> {
        self.slot.device.borrow().stretch(at, bytes)
    }

    #[expect(clippy::unused_async, reason = "the same methods as every other backend")]
    pub(crate) async fn size(&self) -> Result<u64, DiskError> {
        Ok(self.slot.device.borrow().len())
    }
}

/// What a disk held once: see [`DiskControl::copy`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCopy(Contents);

/// A scenario's hand on a disk. Cheap to clone; outlives crashes.
#[derive(Clone, Debug)]
pub struct DiskControl(pub(crate) Rc<Slot>);

impl DiskControl {
    /// Changes how the disk misbehaves from now on.
    pub fn set_faults(&self, faults: DiskFaults) {
        self.0.device.borrow_mut().setup_mut().faults = faults;
    }

    /// How it misbehaves.
    #[must_use]
    pub fn faults(&self) -> DiskFaults {
        self.0.device.borrow().setup().faults.clone()
    }

    /// Adds a bad place.
    pub fn add_bad(&self, bad: Bad) {
        self.0.device.borrow_mut().add_bad(bad);
    }

    /// Puts a mishap in line: it befalls the next operation that it fits, after those before it.
    pub fn next_mishap(&self, mishap: Mishap) {
        self.0.device.borrow_mut().add_mishap(mishap);
    }

    /// Removes bad places and mishaps in line.
    pub fn heal(&self) {
        self.0.device.borrow_mut().heal();
    }

    /// Flips one bit (0 to 7) of the byte at `at`.
    pub fn flip_bit(&self, at: u64, bit: u8) {
        self.0.device.borrow_mut().medium_mut().flip(at, bit);
    }

    /// From now on no operation returns, until [`Self::release`].
    pub fn hold(&self) {
        self.0.held.borrow_mut().get_or_insert_default();
    }

    /// Ends [`Self::hold`]: what was due completes, in any order.
    pub fn release(&self) {
        self.0.release();
    }

    /// Pulls the disk out: every operation fails as gone, and its cache is lost. Who has it open has to open it again once it
    /// is back.
    pub fn pull_out(&self) {
        self.0.device.borrow_mut().set_present(false);
    }

    /// Plugs it in again.
    pub fn plug_in(&self) {
        self.0.device.borrow_mut().set_present(true);
    }

    /// Operations that are not finished.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.0.device.borrow().in_flight()
    }

    /// Changes that a power cut may take.
    #[must_use]
    pub fn unsynced_changes(&self) -> usize {
        self.0.device.borrow().medium().unsynced_changes()
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.device.borrow().len()
    }

    /// Makes a device larger, or cuts a file short behind its owner's back. Durable.
    pub fn resize(&self, bytes: u64) {
        self.0.device.borrow_mut().resize(bytes);
    }

    /// Bytes of space behind the disk.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.0.device.borrow().allocated()
    }

    /// What a read of `len` bytes at `at` would see.
    #[must_use]
    pub fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.0.device.borrow().medium().read(at, &mut out);
        out
    }

    /// What would be there if the power failed now and took all it may.
    #[must_use]
    pub fn peek_durable(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.0.device.borrow().medium().read_durable(at, &mut out);
        out
    }

    /// All that it holds now, as a snapshot or a backup of it would have it.
    #[must_use]
    pub fn copy(&self) -> DiskCopy {
        DiskCopy(self.0.device.borrow().medium().copy())
    }

    /// Puts a copy in its place, while nobody uses it: it holds durably what it held then.
    pub fn set_back(&self, copy: &DiskCopy) {
        self.0.device.borrow_mut().medium_mut().set_back(copy.0.clone());
    }

    /// Overwrites bytes durably, past every layer: what a fault that has no name here would do,
    /// or how a scenario prepares a disk.
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        self.0.device.borrow_mut().medium_mut().poke(at, bytes);
    }
}
