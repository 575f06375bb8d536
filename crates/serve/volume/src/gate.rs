//! Who may do what with a volume, by the reservations that all its nodes keep (RFD 0013, 5).
//!
//! The gate of a volume knows the table as it was last read through the device, which is what all
//! nodes agree on, and what has been applied at this node since, which they may not have agreed on
//! yet. A party's rights are what both allow: so a right is taken away here before the change that
//! takes it can be committed, and given only after.
//!
//! Until the table has been read, and whenever something was written there that is no whole table, the gate is
//! closed, and commands wait.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::pin::Pin;
use std::rc::{Rc, Weak};

use block::{ASIDE, Aside, Blocks, Bufs, Error, Failure, Request};
use reservation::{COPY_BYTES, Notice, Notices, Party, Rights, Table};
use slab::Slab;
use tokio::sync::Notify;

use crate::command::Command;

/// Tables that may be applied and not committed; with more, the gate closes until it has read.
const MOST_APPLIED: usize = 8;

/// What a command does with the contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Neither: everybody may.
    Nothing,
    /// Reads them.
    Read,
    /// Changes them.
    Write,
}

impl Need {
    /// What `request` needs.
    #[must_use]
    pub fn of(request: &Request) -> Self {
        match request {
            Request::Read { .. }
            | Request::Compare { .. }
            | Request::Verify { .. }
            | Request::Map { .. }
            | Request::Settle { .. } => Self::Read,
            Request::Write { .. }
            | Request::WriteSame { .. }
            | Request::Zero { .. }
            | Request::Unmap { .. }
            | Request::OrWrite { .. }
            | Request::CompareAndWrite { .. } => Self::Write,
            Request::Flush => Self::Nothing,
        }
    }

    fn is_given(self, rights: Rights) -> bool {
        match self {
            Self::Nothing => true,
            Self::Read => rights.sole && rights.reads,
            Self::Write => rights.may_write(),
        }
    }
}

/// Which of what a table says still holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Names the time since power was last lost: another one after each loss of it.
    pub era: u64,
    /// This node's seat.
    pub seat: u64,
    /// The seats of all nodes that serve the volume.
    pub seats: Vec<u64>,
}

/// What became of the table at this node.
struct Applied {
    serial: u64,
    /// The table that was written; none if what is there now is not known.
    table: Option<Table>,
}

#[derive(Default)]
struct State {
    standing: Option<Standing>,
    /// As it was read last.
    read: Option<Table>,
    /// Counts reads that came to nothing, and why the last one did.
    failures: u64,
    failure: Option<Error>,
    /// What of it holds.
    committed: Option<Table>,
    /// What was applied here and is not known to be committed.
    applied: Vec<Applied>,
    serial: u64,
    callers: Slab<Weak<Caller>>,
    /// Parties that have left and may hold what ends with them.
    left: Vec<Party>,
}

/// The gate of one volume. See the [module](self).
#[derive(Default)]
pub struct Gate {
    state: RefCell<State>,
    /// Knows what holds now.
    source: RefCell<Option<Source>>,
    open: Cell<bool>,
    /// The table is to be read.
    stale: Notify,
    /// Rights, or what is in flight, may have changed.
    changed: Notify,
}

/// Says what of a table holds now; nothing as long as that is not known.
pub type Source = Box<dyn Fn() -> Option<Standing>>;

/// Who is told what a change means to him.
pub type Listener = Box<dyn Fn(Notices)>;

/// A party as this node's volume knows it: commands are done for a caller.
pub struct Caller {
    /// None: the node itself, which no reservation binds.
    party: Option<Party>,
    /// Whether what ends with the party's nexus ends with this.
    is_nexus: bool,
    gate: Weak<Gate>,
    key: Cell<usize>,
    rights: Cell<Rights>,
    modes: Cell<u128>,
    in_flight: RefCell<Slab<InFlight>>,
    listener: Listener,
}

struct InFlight {
    need: Need,
    /// The mode pages by which it was made up.
    modes: u128,
    command: Command,
    /// It has been let through.
    begun: bool,
    /// It has to end before what was changed is in force.
    ends: bool,
}

/// A command in flight for a caller, until this is dropped.
pub(crate) struct Flight(Option<(Rc<Caller>, usize)>);

impl Gate {
    /// From now on this holds of what tables say.
    pub fn set_standing(&self, standing: Standing) {
        let mut state = self.state.borrow_mut();
        if state.standing.as_ref() != Some(&standing) {
            state.standing = Some(standing);
            drop(state);
            self.judge_anew();
        }
    }

    /// What holds of tables is what `source` says whenever one is read, so that none is judged by what held
    /// before. Between reads [`Self::set_standing`] tells of changes.
    pub fn set_source(&self, source: Source) {
        self.source.replace(Some(source));
    }

    pub(crate) fn forget_source(&self) {
        self.source.take();
    }

    /// What of a table holds that has just been read; nothing before that is known.
    pub(crate) fn standing(&self) -> Option<Standing> {
        let now = self.source.borrow().as_ref().and_then(|source| source());
        if let Some(now) = now {
            self.set_standing(now);
        }
        self.state.borrow().standing.clone()
    }

    /// A party begins to use the volume. `listener` is told what changes mean to it; it is called while the
    /// volume works, and must not call back.
    #[must_use]
    pub fn enter(self: &Rc<Self>, party: Party, listener: Listener) -> Rc<Caller> {
        self.admit_caller(party, true, listener)
    }

    /// A party has something done beside the nexus that it has with the volume, if it has one: for a command that it
    /// sent elsewhere. It is bound as with its own commands; it is told nothing, and nothing ends with this.
    #[must_use]
    pub fn on_behalf_of(self: &Rc<Self>, party: Party) -> Rc<Caller> {
        self.admit_caller(party, false, Box::new(|_| {}))
    }

    fn admit_caller(
        self: &Rc<Self>,
        party: Party,
        is_nexus: bool,
        listener: Listener,
    ) -> Rc<Caller> {
        let rights = self.rights(&party);
        let caller = Rc::new(Caller {
            party: Some(party),
            is_nexus,
            gate: Rc::downgrade(self),
            key: Cell::new(usize::MAX),
            rights: Cell::new(rights),
            modes: Cell::new(self.modes()),
            in_flight: RefCell::default(),
            listener,
        });
        caller.key.set(self.state.borrow_mut().callers.insert(Rc::downgrade(&caller)));
        if !self.is_open() {
            self.stale.notify_one();
        }
        caller
    }

    /// The node itself: nothing is judged of it, and nothing kept. One for each core serves all of
    /// its volumes, for some ask with every command.
    #[must_use]
    pub fn node() -> Rc<Caller> {
        thread_local! {
            static NODE: Rc<Caller> = Rc::new(Caller {
                party: None,
                is_nexus: false,
                gate: Weak::new(),
                key: Cell::new(usize::MAX),
                rights: Cell::new(Rights::ALL),
                modes: Cell::new(0),
                in_flight: RefCell::default(),
                listener: Box::new(|_| {}),
            });
        }
        NODE.with(Rc::clone)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.get()
    }

    /// Whether a command may begin that is not to wait for anything; then it has begun.
    pub(crate) fn admits(&self, flight: &Flight) -> bool {
        let Some((caller, need, _)) = flight.judged() else { return true };
        let may = self.is_open() && caller.may(need);
        if may {
            flight.begins();
        }
        may
    }

    /// Judges a command that begins, once it can.
    ///
    /// # Errors
    /// [`Failure::Conflict`]; why the table cannot be read; [`Error::Fenced`] for a write that was made up by other mode pages
    /// than hold, which its initiator sends again.
    pub(crate) async fn admit(&self, flight: &Flight, command: &Command) -> Result<(), Failure> {
        let Some((caller, need, modes)) = flight.judged() else { return Ok(()) };
        if !self.is_open() && need != Need::Nothing {
            Box::pin(command.unless_aborted(self.opened())).await??;
        }
        // Whether it is durable, and allowed at all, was decided by what was known when it came.
        if need == Need::Write && caller.modes() != modes {
            return Err(Error::Fenced.into());
        }
        if !caller.may(need) {
            return Err(Failure::Conflict);
        }
        flight.begins();
        Ok(())
    }

    /// Waits until commands can be judged.
    ///
    /// # Errors
    /// Why the table cannot be read.
    async fn opened(&self) -> Result<(), Error> {
        let before = self.state.borrow().failures;
        loop {
            let changed = self.changed.notified();
            if self.is_open() {
                return Ok(());
            }
            let failed = Some(self.state.borrow()).filter(|state| state.failures != before);
            if let Some(failure) = failed.and_then(|state| state.failure) {
                return Err(failure);
            }
            self.stale.notify_one();
            changed.await;
        }
    }

    /// Has the table read, if it was not yet: what is wrong with it is to be known before somebody comes.
    pub fn look(&self) {
        if !self.is_open() {
            self.stale.notify_one();
        }
    }

    /// Waits until somebody wants the table read.
    pub(crate) async fn wanted(&self) {
        self.stale.notified().await;
    }

    /// Whether what was read before is not all there is.
    pub(crate) fn is_stale(&self) -> bool {
        let state = self.state.borrow();
        !state.applied.is_empty() || state.read.is_none()
    }

    /// A read of the table begins; what it finds is told to [`Self::found`] with this.
    pub(crate) fn reading(&self) -> u64 {
        self.state.borrow().serial
    }

    /// A read that began at `serial` has found this.
    pub(crate) fn found(&self, serial: u64, table: Table) {
        // Asked for first: it may be another one since power was lost.
        let _ = self.standing();
        {
            let mut state = self.state.borrow_mut();
            state.applied.retain(|a| a.serial > serial);
            (state.read, state.failure) = (Some(table), None);
        }
        self.judge_anew();
    }

    /// It could not be read: commands that wait for that end. Whether that is news.
    pub(crate) fn failed(&self, e: Error) -> bool {
        let news = {
            let mut state = self.state.borrow_mut();
            state.failures += 1;
            state.failure.replace(e) != Some(e)
        };
        self.changed.notify_waiters();
        news
    }

    /// Why the table cannot be read, if the disk or the table is to blame: commands end with that.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.state.borrow().failure.filter(|e| *e != Error::Fenced)
    }

    /// Everybody's rights, by what is known now.
    fn judge_anew(&self) {
        let told = {
            let mut state = self.state.borrow_mut();
            let before = state.committed.take();
            state.committed = state.holding(state.read.as_ref());
            // Its nexus was lost while the reservation was on its way.
            let gone = state.read.as_ref().and_then(|table| state.gone(table));
            if let Some(gone) = gone.filter(|gone| !state.left.contains(gone)) {
                state.left.push(gone);
                self.stale.notify_one();
            }
            let open = state.committed.is_some() && state.applied.iter().all(|a| a.table.is_some());
            self.open.set(open);
            let applied: Vec<_> = state.applied.iter().filter_map(|a| a.table.as_ref()).collect();
            let applied: Vec<_> =
                applied.into_iter().filter_map(|t| state.holding(Some(t))).collect();
            let callers: Vec<_> = state.callers.iter().filter_map(|(_, c)| c.upgrade()).collect();
            let mut told = Vec::new();
            for caller in callers {
                let Some(party) = &caller.party else { continue };
                let tables = state.committed.iter().chain(&applied);
                let rights = tables.fold(Rights::ALL, |all, t| all.meet(t.rights(party)));
                caller.judged(rights);
                caller.modes.set(state.committed.as_ref().map_or(0, |t| t.modes));
                if let (Some(before), Some(after)) = (&before, &state.committed) {
                    let notices = Table::notices(before, after, party);
                    told.push((Rc::clone(&caller), notices));
                }
            }
            told
        };
        for (caller, notices) in told {
            caller.told(notices);
        }
        self.changed.notify_waiters();
    }

    fn modes(&self) -> u128 {
        self.state.borrow().committed.as_ref().map_or(0, |t| t.modes)
    }

    fn rights(&self, party: &Party) -> Rights {
        let state = self.state.borrow();
        let applied = state.applied.iter().filter_map(|a| state.holding(a.table.as_ref()));
        let committed = state.committed.iter().map(|t| t.rights(party));
        committed.chain(applied.map(|t| t.rights(party))).fold(Rights::ALL, Rights::meet)
    }

    /// Whether all that was changed is in force.
    fn is_settled(&self) -> bool {
        let state = self.state.borrow();
        // Where nobody can read what was applied, nothing begins, and nothing must be under way: flushes go on.
        let unread = state.failure.is_some_and(|e| e != Error::Fenced);
        if !state.applied.is_empty() && !unread {
            return false;
        }
        let all_end = !state.applied.is_empty();
        let ended = |c: &Weak<Caller>| c.upgrade().is_none_or(|c| !c.awaits_end(all_end));
        state.callers.iter().all(|(_, c)| ended(c))
    }

    /// Parties that have left with something that ends with them; each is told once.
    pub(crate) fn left(&self) -> Vec<Party> {
        std::mem::take(&mut self.state.borrow_mut().left)
    }

    /// These have left still.
    pub(crate) fn still_left(&self, parties: Vec<Party>) {
        let mut state = self.state.borrow_mut();
        for party in parties {
            if !state.left.contains(&party) {
                state.left.push(party);
            }
        }
    }

    /// Somebody shall see to who has left.
    pub(crate) fn look_again(&self) {
        self.stale.notify_one();
    }

    /// `party` has left.
    pub(crate) fn leaves(&self, party: Party) {
        self.state.borrow_mut().left.push(party);
        self.stale.notify_one();
    }

    /// Something was written beside the volume: a whole table, or a part of one.
    fn note(&self, table: Option<Table>) {
        {
            let mut state = self.state.borrow_mut();
            state.serial += 1;
            let serial = state.serial;
            if state.applied.len() >= MOST_APPLIED {
                state.applied.clear();
                state.applied.push(Applied { serial, table: None });
            }
            state.applied.push(Applied { serial, table });
        }
        self.judge_anew();
        self.stale.notify_one();
    }
}

impl State {
    /// Whether `party` has the unit for itself, by any table that may hold.
    fn sole_of(&self, party: &Party) -> bool {
        let applied = self.applied.iter().filter_map(|a| a.table.as_ref());
        let mut tables = self.read.iter().chain(applied);
        tables.any(|t| t.sole.as_ref().is_some_and(|sole| sole.party == *party))
    }

    /// Who has the unit for itself by `table`, through this node, and is not here any more.
    fn gone(&self, table: &Table) -> Option<Party> {
        let sole = table.sole.as_ref()?;
        let mine = self.standing.as_ref().is_some_and(|s| s.seat == sole.seat);
        let mut callers = self.callers.iter().filter_map(|(_, c)| c.upgrade());
        let here = callers.any(|c| c.is_nexus && c.party.as_ref() == Some(&sole.party));
        (mine && !here).then(|| sole.party.clone())
    }

    /// What of `table` holds now.
    fn holding(&self, table: Option<&Table>) -> Option<Table> {
        let standing = self.standing.as_ref()?;
        let seated = |seat| standing.seats.contains(&seat);
        let mut table = table?.clone().as_of(standing.era, seated);
        if self.gone(&table).is_some() {
            // With its nexus goes what it had; that others learn of it takes a moment.
            table.sole = None;
        }
        Some(table)
    }
}

/// What a mirror tells of.
impl Aside for Gate {
    fn changed(&self, range: Blocks, data: &Bufs) {
        let is_copy = [0, range.count].contains(&(range.at.0 - ASIDE.0));
        let whole = is_copy && data.len() == COPY_BYTES;
        let table = whole.then(|| Table::parse(&data.to_vec()).ok()).flatten();
        self.note(table);
    }

    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(async {
            loop {
                let changed = self.changed.notified();
                if self.is_settled() {
                    return;
                }
                changed.await;
            }
        })
    }
}

impl Caller {
    /// Who it is; none for the node itself.
    #[must_use]
    pub fn party(&self) -> Option<&Party> {
        self.party.as_ref()
    }

    /// Whether it is one of this gate's.
    #[must_use]
    pub fn is_of(&self, gate: &Rc<Gate>) -> bool {
        std::ptr::eq(self.gate.as_ptr(), Rc::as_ptr(gate))
    }

    /// What it may do now, as far as this node knows.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.rights.get()
    }

    /// What of the mode pages is not as it was at first (`Table::modes`).
    #[must_use]
    pub fn modes(&self) -> u128 {
        self.modes.get()
    }

    pub(crate) fn may(&self, need: Need) -> bool {
        need.is_given(self.rights.get())
    }

    /// A command of this caller begins.
    pub(crate) fn begins(self: &Rc<Self>, need: Need, command: &Command) -> Flight {
        if self.party.is_none() {
            return Flight(None);
        }
        let (modes, command) = (self.modes(), command.clone());
        let flight = InFlight { need, modes, command, begun: false, ends: false };
        let key = self.in_flight.borrow_mut().insert(flight);
        Flight(Some((Rc::clone(self), key)))
    }

    /// These are its rights from now on. What it may not do any more ends.
    fn judged(&self, rights: Rights) {
        self.rights.set(rights);
        for (_, flight) in self.in_flight.borrow_mut().iter_mut() {
            if !flight.need.is_given(rights) {
                flight.ends = true;
                flight.command.revoke();
            }
        }
    }

    fn told(&self, notices: Notices) {
        if notices.is_empty() {
            return;
        }
        let ends = [Notice::Aborted, Notice::UnitReset, Notice::TargetReset];
        if ends.into_iter().any(|notice| notices.contains(notice)) {
            for (_, flight) in self.in_flight.borrow_mut().iter_mut() {
                // A flush has nothing that could come too late, and may be what waits for the others to end.
                flight.ends |= flight.need != Need::Nothing;
                flight.command.abort();
            }
        }
        (self.listener)(notices);
    }

    /// Whether anything is under way that has to end, or anything at all.
    fn awaits_end(&self, all_end: bool) -> bool {
        let begun = |flight: &InFlight| all_end && flight.begun && flight.need != Need::Nothing;
        self.in_flight.borrow().iter().any(|(_, flight)| flight.ends || begun(flight))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let (Some(gate), Some(party)) = (self.gate.upgrade(), self.party.take()) else { return };
        gate.state.borrow_mut().callers.try_remove(self.key.get());
        let held = self.is_nexus && gate.state.borrow().sole_of(&party);
        if held {
            gate.leaves(party);
            gate.judge_anew();
        }
    }
}

impl Flight {
    /// It has been let through.
    fn begins(&self) {
        if let Some((caller, key)) = &self.0
            && let Some(flight) = caller.in_flight.borrow_mut().get_mut(*key)
        {
            flight.begun = true;
        }
    }

    /// Who is to be judged, for what, and by which mode pages that was made up; nobody if it is the node itself.
    fn judged(&self) -> Option<(&Rc<Caller>, Need, u128)> {
        let (caller, key) = self.0.as_ref()?;
        let in_flight = caller.in_flight.borrow();
        let flight = in_flight.get(*key)?;
        Some((caller, flight.need, flight.modes))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let Some((caller, key)) = self.0.take() else { return };
        let ended = caller.in_flight.borrow_mut().remove(key);
        if let Some(gate) = caller.gate.upgrade()
            && (ended.ends || !gate.is_open())
        {
            gate.changed.notify_waiters();
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.borrow();
        f.debug_struct("Gate")
            .field("open", &self.open.get())
            .field("committed", &state.committed)
            .field("applied", &state.applied.len())
            .field("callers", &state.callers.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("party", &self.party)
            .field("rights", &self.rights.get())
            .finish_non_exhaustive()
    }
}
