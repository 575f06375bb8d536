//! Decides which commands a volume's reservations allow, on all of its nodes (RFD 0013, 5).
//!
//! The gate of a volume knows the table as last read through the device, on which all nodes agree,
//! and the tables applied on this node since, which may not be committed yet. A caller's rights are
//! what all of these allow: so a right is revoked here before the change that revokes it can be
//! committed, and granted only after.
//!
//! Until the table has been read, and whenever anything but a whole table was written to it, the
//! gate is closed, and commands wait.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::pin::Pin;
use std::rc::{Rc, Weak};

use block::{Blocks, Bufs, Error, METADATA_LBA, MetadataObserver, Request, RequestError};
use reservation::{COPY_BYTES, ItNexus, Notification, Notifications, Rights, Table};
use slab::Slab;
use tokio::sync::Notify;

use crate::command::Command;

/// Most uncommitted tables; with more, the gate closes until it has read the table.
const MAX_UNCOMMITTED_TABLES: usize = 8;

/// How a command accesses the contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataAccess {
    /// Not at all: always allowed.
    None,
    /// Reads them.
    Read,
    /// Changes them.
    Write,
}

impl DataAccess {
    /// The access that `request` needs.
    #[must_use]
    pub fn of_request(request: &Request) -> Self {
        match request {
            Request::Read { .. }
            | Request::Compare { .. }
            | Request::Verify { .. }
            | Request::BlockStatus { .. }
            | Request::DrainWrites { .. } => Self::Read,
            Request::Write { .. }
            | Request::WriteSame { .. }
            | Request::Zero { .. }
            | Request::Unmap { .. }
            | Request::OrWrite { .. }
            | Request::CompareAndWrite { .. } => Self::Write,
            Request::Flush => Self::None,
        }
    }

    fn is_allowed_by(self, rights: Rights) -> bool {
        match self {
            Self::None => true,
            Self::Read => rights.passes_spc2 && rights.can_read,
            Self::Write => rights.may_write(),
        }
    }
}

/// Which entries of a table are still valid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationContext {
    /// The current power epoch: a new one after each loss of power.
    pub power_epoch: u64,
    /// This node's incarnation.
    pub incarnation: u64,
    /// The incarnations of all nodes that serve the volume.
    pub serving_incarnations: Vec<u64>,
}

/// A table applied on this node and not known to be committed.
struct UncommittedTable {
    serial: u64,
    /// The table that was written; `None` if the current contents are unknown.
    table: Option<Table>,
}

#[derive(Default)]
struct GateState {
    context: Option<ReservationContext>,
    /// The table as last read.
    last_read: Option<Table>,
    /// Number of failed reads, and the reason of the last one.
    read_failures: u64,
    last_failure: Option<Error>,
    /// What of it is valid.
    effective: Option<Table>,
    /// Tables applied here and not known to be committed.
    uncommitted: Vec<UncommittedTable>,
    serial: u64,
    clients: Slab<Weak<VolumeClient>>,
    /// Nexuses that were lost and may hold reservations that end with them.
    lost_nexuses: Vec<ItNexus>,
}

/// The gate of one volume.
#[derive(Default)]
pub struct ReservationGate {
    state: RefCell<GateState>,
    /// Provides the current context.
    context_source: RefCell<Option<ContextSource>>,
    is_open: Cell<bool>,
    /// The table must be read.
    read_wanted: Notify,
    /// Rights, or the commands in flight, may have changed.
    changed: Notify,
}

/// Returns which entries of a table are valid now; `None` while unknown.
pub type ContextSource = Box<dyn Fn() -> Option<ReservationContext>>;

/// Receives a caller's notifications of changes.
pub type NotificationListener = Box<dyn Fn(Notifications)>;

/// A client of this node's volume: commands are executed for a caller.
pub struct VolumeClient {
    /// None: the node itself, to which no reservation applies.
    nexus: Option<ItNexus>,
    /// Whether the nexus ends with this.
    is_nexus: bool,
    gate: Weak<ReservationGate>,
    key: Cell<usize>,
    rights: Cell<Rights>,
    mode_pages: Cell<u128>,
    in_flight: RefCell<Slab<InFlightCommand>>,
    listener: NotificationListener,
}

struct InFlightCommand {
    access: DataAccess,
    /// The mode pages under which it was decided.
    mode_pages: u128,
    command: Command,
    /// Whether it was admitted.
    is_admitted: bool,
    /// Whether it must end before the change is in force.
    must_end: bool,
}

/// A command in flight for a caller, until dropped.
pub(crate) struct InFlightGuard(Option<(Rc<VolumeClient>, usize)>);

impl ReservationGate {
    /// Sets which entries of tables are valid.
    pub fn set_context(&self, context: ReservationContext) {
        let mut state = self.state.borrow_mut();
        if state.context.as_ref() != Some(&context) {
            state.context = Some(context);
            drop(state);
            self.reevaluate();
        }
    }

    /// Sets the source of the context, which is asked whenever a table is read, so that none is
    /// judged by an outdated context. Between reads [`Self::set_context`] reports changes.
    pub fn set_context_source(&self, source: ContextSource) {
        self.context_source.replace(Some(source));
    }

    pub(crate) fn clear_context_source(&self) {
        self.context_source.take();
    }

    /// The context for a table that was just read; nothing while unknown.
    pub(crate) fn current_context(&self) -> Option<ReservationContext> {
        let now = self.context_source.borrow().as_ref().and_then(|source| source());
        if let Some(now) = now {
            self.set_context(now);
        }
        self.state.borrow().context.clone()
    }

    /// Registers a client. `listener` receives its notifications of changes; it is called while the
    /// volume works, and must not call back.
    #[must_use]
    pub fn attach_client(
        self: &Rc<Self>,
        nexus: ItNexus,
        listener: NotificationListener,
    ) -> Rc<VolumeClient> {
        self.add_client(nexus, true, listener)
    }

    /// Registers a client for a command that reaches the volume outside its nexus, if it has one: a
    /// command that it sent elsewhere. Its reservations apply; it gets no notifications, and no
    /// nexus ends with this.
    #[must_use]
    pub fn client_on_behalf_of(self: &Rc<Self>, nexus: ItNexus) -> Rc<VolumeClient> {
        self.add_client(nexus, false, Box::new(|_| {}))
    }

    fn add_client(
        self: &Rc<Self>,
        nexus: ItNexus,
        is_nexus: bool,
        listener: NotificationListener,
    ) -> Rc<VolumeClient> {
        let rights = self.rights_of(&nexus);
        let caller = Rc::new(VolumeClient {
            nexus: Some(nexus),
            is_nexus,
            gate: Rc::downgrade(self),
            key: Cell::new(usize::MAX),
            rights: Cell::new(rights),
            mode_pages: Cell::new(self.mode_pages()),
            in_flight: RefCell::default(),
            listener,
        });
        caller.key.set(self.state.borrow_mut().clients.insert(Rc::downgrade(&caller)));
        if !self.is_open() {
            self.read_wanted.notify_one();
        }
        caller
    }

    /// The node itself: no checks, and nothing is tracked. One per core serves all of its volumes,
    /// because some callers need it for every command.
    #[must_use]
    pub fn node_client() -> Rc<VolumeClient> {
        thread_local! {
            static NODE: Rc<VolumeClient> = Rc::new(VolumeClient {
                nexus: None,
                is_nexus: false,
                gate: Weak::new(),
                key: Cell::new(usize::MAX),
                rights: Cell::new(Rights::ALL),
                mode_pages: Cell::new(0),
                in_flight: RefCell::default(),
                listener: Box::new(|_| {}),
            });
        }
        NODE.with(Rc::clone)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.is_open.get()
    }

    /// Admits a command if it need not wait for anything.
    pub(crate) fn try_admit(&self, guard: &InFlightGuard) -> bool {
        let Some((caller, need, _)) = guard.access_check() else { return true };
        let may = self.is_open() && caller.has_access(need);
        if may {
            guard.mark_admitted();
        }
        may
    }

    /// Decides whether to admit a command, once possible.
    ///
    /// # Errors
    /// [`RequestError::ReservationConflict`]; why the table cannot be read; [`Error::Fenced`] for a
    /// write decided under mode pages that have changed, which its initiator sends again.
    pub(crate) async fn admit(
        &self,
        guard: &InFlightGuard,
        command: &Command,
    ) -> Result<(), RequestError> {
        let Some((caller, need, modes)) = guard.access_check() else { return Ok(()) };
        if !self.is_open() && need != DataAccess::None {
            Box::pin(command.unless_aborted(self.wait_open())).await??;
        }
        // Whether it is durable, and allowed at all, was decided by the mode pages when it arrived.
        if need == DataAccess::Write && caller.mode_pages() != modes {
            return Err(Error::Fenced.into());
        }
        if !caller.has_access(need) {
            return Err(RequestError::ReservationConflict);
        }
        guard.mark_admitted();
        Ok(())
    }

    /// Waits until the gate is open.
    ///
    /// # Errors
    /// Why the table cannot be read.
    async fn wait_open(&self) -> Result<(), Error> {
        let before = self.state.borrow().read_failures;
        loop {
            let changed = self.changed.notified();
            if self.is_open() {
                return Ok(());
            }
            let failed = Some(self.state.borrow()).filter(|state| state.read_failures != before);
            if let Some(failure) = failed.and_then(|state| state.last_failure) {
                return Err(failure);
            }
            self.read_wanted.notify_one();
            changed.await;
        }
    }

    /// Requests a first read of the table, so that errors in it are known before any client
    /// connects.
    pub fn request_read(&self) {
        if !self.is_open() {
            self.read_wanted.notify_one();
        }
    }

    /// Waits until a read of the table is requested.
    pub(crate) async fn wait_read_wanted(&self) {
        self.read_wanted.notified().await;
    }

    /// Whether the table may have changed since it was last read.
    pub(crate) fn is_stale(&self) -> bool {
        let state = self.state.borrow();
        !state.uncommitted.is_empty() || state.last_read.is_none()
    }

    /// A read of the table begins; pass the result to [`Self::read_succeeded`].
    pub(crate) fn read_started(&self) -> u64 {
        self.state.borrow().serial
    }

    /// The result of a read that began at `serial`.
    pub(crate) fn read_succeeded(&self, serial: u64, table: Table) {
        // Ask first: the power epoch may have changed.
        let _ = self.current_context();
        {
            let mut state = self.state.borrow_mut();
            state.uncommitted.retain(|a| a.serial > serial);
            (state.last_read, state.last_failure) = (Some(table), None);
        }
        self.reevaluate();
    }

    /// The read failed: waiting commands fail. Returns whether that is a new error.
    pub(crate) fn read_failed(&self, e: Error) -> bool {
        let news = {
            let mut state = self.state.borrow_mut();
            state.read_failures += 1;
            state.last_failure.replace(e) != Some(e)
        };
        self.changed.notify_waiters();
        news
    }

    /// Why the table cannot be read, if the disk or the table is to blame: commands fail with it.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.state.borrow().last_failure.filter(|e| *e != Error::Fenced)
    }

    /// Re-evaluates all clients' rights.
    fn reevaluate(&self) {
        let notified = {
            let mut state = self.state.borrow_mut();
            let before = state.effective.take();
            state.effective = state.effective_table(state.last_read.as_ref());
            // Its nexus was lost while the reservation was being made.
            let gone = state.last_read.as_ref().and_then(|table| state.lost_spc2_holder(table));
            if let Some(gone) = gone.filter(|gone| !state.lost_nexuses.contains(gone)) {
                state.lost_nexuses.push(gone);
                self.read_wanted.notify_one();
            }
            let open =
                state.effective.is_some() && state.uncommitted.iter().all(|a| a.table.is_some());
            self.is_open.set(open);
            let applied: Vec<_> =
                state.uncommitted.iter().filter_map(|a| a.table.as_ref()).collect();
            let applied: Vec<_> =
                applied.into_iter().filter_map(|t| state.effective_table(Some(t))).collect();
            let callers: Vec<_> = state.clients.iter().filter_map(|(_, c)| c.upgrade()).collect();
            let mut notified = Vec::new();
            for caller in callers {
                let Some(nexus) = &caller.nexus else { continue };
                let tables = state.effective.iter().chain(&applied);
                let rights = tables.fold(Rights::ALL, |all, t| all.intersection(t.rights(nexus)));
                caller.apply_rights(rights);
                caller.mode_pages.set(state.effective.as_ref().map_or(0, |t| t.mode_pages));
                if let (Some(before), Some(after)) = (&before, &state.effective) {
                    let notifications = Table::notifications(before, after, nexus);
                    notified.push((Rc::clone(&caller), notifications));
                }
            }
            notified
        };
        for (caller, notifications) in notified {
            caller.notify(notifications);
        }
        self.changed.notify_waiters();
    }

    fn mode_pages(&self) -> u128 {
        self.state.borrow().effective.as_ref().map_or(0, |t| t.mode_pages)
    }

    fn rights_of(&self, nexus: &ItNexus) -> Rights {
        let state = self.state.borrow();
        let applied =
            state.uncommitted.iter().filter_map(|a| state.effective_table(a.table.as_ref()));
        let committed = state.effective.iter().map(|t| t.rights(nexus));
        committed.chain(applied.map(|t| t.rights(nexus))).fold(Rights::ALL, Rights::intersection)
    }

    /// Whether all changes are in force.
    fn is_in_force(&self) -> bool {
        let state = self.state.borrow();
        // While the applied table is unreadable no command begins, and none may be in flight,
        // except flushes.
        let unread = state.last_failure.is_some_and(|e| e != Error::Fenced);
        if !state.uncommitted.is_empty() && !unread {
            return false;
        }
        let all_end = !state.uncommitted.is_empty();
        let ended =
            |c: &Weak<VolumeClient>| c.upgrade().is_none_or(|c| !c.must_wait_for_end(all_end));
        state.clients.iter().all(|(_, c)| ended(c))
    }

    /// Lost nexuses with reservations that end with them; each is returned once.
    pub(crate) fn take_lost_nexuses(&self) -> Vec<ItNexus> {
        std::mem::take(&mut self.state.borrow_mut().lost_nexuses)
    }

    /// Puts them back: they are still lost.
    pub(crate) fn requeue_lost_nexuses(&self, parties: Vec<ItNexus>) {
        let mut state = self.state.borrow_mut();
        for nexus in parties {
            if !state.lost_nexuses.contains(&nexus) {
                state.lost_nexuses.push(nexus);
            }
        }
    }

    /// Wakes the reader task to release lost nexuses.
    pub(crate) fn wake_reader(&self) {
        self.read_wanted.notify_one();
    }

    /// `nexus` was lost.
    pub(crate) fn note_lost_nexus(&self, nexus: ItNexus) {
        self.state.borrow_mut().lost_nexuses.push(nexus);
        self.read_wanted.notify_one();
    }

    /// The table was written: as a whole, or in part.
    fn note_written(&self, table: Option<Table>) {
        {
            let mut state = self.state.borrow_mut();
            state.serial += 1;
            let serial = state.serial;
            if state.uncommitted.len() >= MAX_UNCOMMITTED_TABLES {
                state.uncommitted.clear();
                state.uncommitted.push(UncommittedTable { serial, table: None });
            }
            state.uncommitted.push(UncommittedTable { serial, table });
        }
        self.reevaluate();
        self.read_wanted.notify_one();
    }
}

impl GateState {
    /// Whether `nexus` holds an SPC-2 reservation in any table that may be valid.
    fn holds_spc2_reservation(&self, nexus: &ItNexus) -> bool {
        let applied = self.uncommitted.iter().filter_map(|a| a.table.as_ref());
        let mut tables = self.last_read.iter().chain(applied);
        tables.any(|t| t.spc2_reservation.as_ref().is_some_and(|spc2| spc2.nexus == *nexus))
    }

    /// The holder of an SPC-2 reservation in `table` through this node that is no longer connected.
    fn lost_spc2_holder(&self, table: &Table) -> Option<ItNexus> {
        let spc2 = table.spc2_reservation.as_ref()?;
        let mine = self.context.as_ref().is_some_and(|s| s.incarnation == spc2.incarnation);
        let mut callers = self.clients.iter().filter_map(|(_, c)| c.upgrade());
        let here = callers.any(|c| c.is_nexus && c.nexus.as_ref() == Some(&spc2.nexus));
        (mine && !here).then(|| spc2.nexus.clone())
    }

    /// The valid part of `table`.
    fn effective_table(&self, table: Option<&Table>) -> Option<Table> {
        let context = self.context.as_ref()?;
        let is_serving = |incarnation| context.serving_incarnations.contains(&incarnation);
        let mut table = table?.clone().as_of(context.power_epoch, is_serving);
        if self.lost_spc2_holder(&table).is_some() {
            // Its reservation ends with its nexus; other nodes learn of that a moment later.
            table.spc2_reservation = None;
        }
        Some(table)
    }
}

/// Changes reported by a mirror.
impl MetadataObserver for ReservationGate {
    fn on_applied(&self, range: Blocks, data: &Bufs) {
        let is_copy = [0, range.count].contains(&(range.at.0 - METADATA_LBA.0));
        let whole = is_copy && data.len() == COPY_BYTES;
        let table = whole.then(|| Table::parse(&data.to_vec()).ok()).flatten();
        self.note_written(table);
    }

    fn wait_in_force(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(async {
            loop {
                let changed = self.changed.notified();
                if self.is_in_force() {
                    return;
                }
                changed.await;
            }
        })
    }
}

impl VolumeClient {
    /// Its nexus; none for the node itself.
    #[must_use]
    pub fn nexus(&self) -> Option<&ItNexus> {
        self.nexus.as_ref()
    }

    /// Whether it is a client of this gate.
    #[must_use]
    pub fn is_client_of(&self, gate: &Rc<ReservationGate>) -> bool {
        std::ptr::eq(self.gate.as_ptr(), Rc::as_ptr(gate))
    }

    /// Its rights, as far as this node knows.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.rights.get()
    }

    /// Changed mode page parameters (`Table::modes`).
    #[must_use]
    pub fn mode_pages(&self) -> u128 {
        self.mode_pages.get()
    }

    pub(crate) fn has_access(&self, need: DataAccess) -> bool {
        need.is_allowed_by(self.rights.get())
    }

    /// A command of this caller begins.
    pub(crate) fn track(self: &Rc<Self>, need: DataAccess, command: &Command) -> InFlightGuard {
        if self.nexus.is_none() {
            return InFlightGuard(None);
        }
        let (modes, command) = (self.mode_pages(), command.clone());
        let guard = InFlightCommand {
            access: need,
            mode_pages: modes,
            command,
            is_admitted: false,
            must_end: false,
        };
        let key = self.in_flight.borrow_mut().insert(guard);
        InFlightGuard(Some((Rc::clone(self), key)))
    }

    /// Sets its rights. Commands that are no longer allowed end.
    fn apply_rights(&self, rights: Rights) {
        self.rights.set(rights);
        for (_, guard) in self.in_flight.borrow_mut().iter_mut() {
            if !guard.access.is_allowed_by(rights) {
                guard.must_end = true;
                guard.command.revoke();
            }
        }
    }

    fn notify(&self, notifications: Notifications) {
        if notifications.is_empty() {
            return;
        }
        let ends =
            [Notification::AbortCommands, Notification::UnitReset, Notification::TargetReset];
        if ends.into_iter().any(|notice| notifications.contains(notice)) {
            for (_, guard) in self.in_flight.borrow_mut().iter_mut() {
                // A flush cannot come too late, and may be what the others wait for.
                guard.must_end |= guard.access != DataAccess::None;
                guard.command.abort();
            }
        }
        (self.listener)(notifications);
    }

    /// Whether any command that must end is in flight, or, with `all_end`, any command at all.
    fn must_wait_for_end(&self, all_end: bool) -> bool {
        let begun = |guard: &InFlightCommand| {
            all_end && guard.is_admitted && guard.access != DataAccess::None
        };
        self.in_flight.borrow().iter().any(|(_, guard)| guard.must_end || begun(guard))
    }
}

impl Drop for VolumeClient {
    fn drop(&mut self) {
        let (Some(gate), Some(nexus)) = (self.gate.upgrade(), self.nexus.take()) else { return };
        gate.state.borrow_mut().clients.try_remove(self.key.get());
        let held = self.is_nexus && gate.state.borrow().holds_spc2_reservation(&nexus);
        if held {
            gate.note_lost_nexus(nexus);
            gate.reevaluate();
        }
    }
}

impl InFlightGuard {
    /// Marks it as admitted.
    fn mark_admitted(&self) {
        if let Some((caller, key)) = &self.0
            && let Some(guard) = caller.in_flight.borrow_mut().get_mut(*key)
        {
            guard.is_admitted = true;
        }
    }

    /// The client, access and mode pages to check; nothing for the node itself.
    fn access_check(&self) -> Option<(&Rc<VolumeClient>, DataAccess, u128)> {
        let (caller, key) = self.0.as_ref()?;
        let in_flight = caller.in_flight.borrow();
        let guard = in_flight.get(*key)?;
        Some((caller, guard.access, guard.mode_pages))
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let Some((caller, key)) = self.0.take() else { return };
        let ended = caller.in_flight.borrow_mut().remove(key);
        if let Some(gate) = caller.gate.upgrade()
            && (ended.must_end || !gate.is_open())
        {
            gate.changed.notify_waiters();
        }
    }
}

impl fmt::Debug for ReservationGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.borrow();
        f.debug_struct("ReservationGate")
            .field("is_open", &self.is_open.get())
            .field("effective", &state.effective)
            .field("uncommitted", &state.uncommitted.len())
            .field("clients", &state.clients.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for VolumeClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeClient")
            .field("nexus", &self.nexus)
            .field("rights", &self.rights.get())
            .finish_non_exhaustive()
    }
}
