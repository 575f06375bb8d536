//! One controller: what the commands of all its queues mean. Pure: no bytes on the wire, no
//! clock, no I/O; connections and volumes are the driver's.
//!
//! A controller belongs to one association (NVMe Base 2.0, 2.2): the admin queue and the I/O
//! queues of one host, each a [`crate::Connection`] of its own. The driver keeps the controllers
//! of a core in [`crate::Controllers`] and passes each command that arrives to
//! [`Controller::admin`] or [`Controller::io`].

mod admin;
mod alive;
mod copy;
mod errors;
mod events;
mod features;
mod identify;
mod io;
mod logs;
mod namespace;
mod properties;
mod reservations;
mod window;

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use block::Failure;

use crate::entry::{Completion, NSID_ALL, Sqe};
use crate::fabrics::Connect;
use crate::log::AnaState;
use crate::status::Status;
use crate::stream::Tag;

pub use admin::Verdict;
use alive::Alive;
pub use copy::CopyWork;
use errors::{ErrorLog, Fault};
use events::{Events, Kind};
use features::Features;
pub use io::{IoCommand, IoOp, Unfused, Work};
pub use logs::{Discovery, DiscoveryEntry, DiscoveryKind, Tls};
pub use namespace::Namespace;
use properties::Properties;
use reservations::Told;
pub use reservations::{ReservationOp, write_report};
pub(crate) use window::Window;

/// Most I/O queues of a controller that the queue map has room for.
pub const MAX_IO_QUEUES: u16 = 127;

/// Abort commands that may be outstanding (ACL + 1).
const ABORT_LIMIT: u8 = 4;

/// What the subsystem of a controller is; the same on every node that serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subsystem {
    /// NQN.
    pub nqn: String,
    /// Serial number, at most 20 ASCII characters.
    pub serial: String,
    /// Model number, at most 40 ASCII characters.
    pub model: String,
    /// Firmware revision, at most 8 ASCII characters.
    pub firmware: String,
    /// How long commands may go on after their association has ended, in milliseconds (CQT, NVMe Base 2.1,
    /// 5.1.13.2.1); 0 where nothing is said.
    pub quiesce_ms: u16,
}

/// Limits of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// I/O queues, at most [`MAX_IO_QUEUES`].
    pub io_queues: u16,
    /// Entries of a queue (CAP.MQES + 1).
    pub queue_entries: u16,
    /// Most data of one command in bytes: a power of two times 4096.
    pub max_transfer_bytes: u32,
    /// Highest namespace identifier, and most namespaces. Each is a group with an access state of
    /// its own (ANAGRPID), which has its number.
    pub namespaces: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { io_queues: 64, queue_entries: 128, max_transfer_bytes: 1 << 20, namespaces: 1024 }
    }
}

impl Limits {
    /// MDTS: the largest transfer as a power of two pages of 4 KiB.
    pub(crate) fn mdts(&self) -> u8 {
        let pages = (self.max_transfer_bytes / 4096).max(1);
        u8::try_from(pages.ilog2()).expect("at most 31")
    }
}

/// What kind of controller.
#[derive(Clone, Debug)]
pub enum Role {
    /// An I/O controller with the namespaces that its host may see, by identifier.
    Io(BTreeMap<u32, Namespace>),
    /// A discovery controller with the log that its host may see.
    Discovery(Rc<Discovery>),
}

/// What a controller wants of its driver beyond answers to commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Complete a command that was held on the admin queue.
    Complete {
        /// The command.
        tag: Tag,
        /// How it ends.
        completion: Completion,
    },
    /// Drop a command that was held on the admin queue: the controller was reset, and the host
    /// expects no completion ([`crate::Connection::forget`]).
    Forget {
        /// The command.
        tag: Tag,
    },
    /// The host shuts the controller down: make its writes durable, then say
    /// [`Controller::shut_down`].
    ShutDown,
    /// The controller was reset: its I/O queues are gone, close their connections.
    Reset,
    /// The host has been silent for too long: close all connections.
    Expired,
}

/// A controller.
#[derive(Debug)]
pub struct Controller {
    id: u16,
    subsystem: Rc<Subsystem>,
    hostnqn: String,
    host_id: [u8; 16],
    limits: Limits,
    namespaces: BTreeMap<u32, Namespace>,
    /// `Some` in a discovery controller.
    discovery: Option<Rc<Discovery>>,
    properties: Properties,
    features: Features,
    events: Events,
    errors: ErrorLog,
    told: Told,
    ana: Ana,
    alive: Alive,
    /// Connected queues: bit 0 is the admin queue.
    queues: u128,
    aborts: u8,
    counters: Counters,
    pending: VecDeque<Event>,
}

/// Access states of namespaces.
#[derive(Debug, Default)]
struct Ana {
    /// By namespace: those whose state has changed, with the change count of their last change. All
    /// others are optimized. What the host was told of one that has gone is what it knows when it is
    /// back.
    states: BTreeMap<u32, (AnaState, u64)>,
    changes: u64,
}

impl Ana {
    fn of(&self, nsid: u32) -> (AnaState, u64) {
        self.states.get(&nsid).copied().unwrap_or((AnaState::Optimized, 0))
    }
}

/// What the health log reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    reads: u64,
    read_sectors: u64,
    writes: u64,
    written_sectors: u64,
}

impl Controller {
    pub(crate) fn new(
        id: u16,
        subsystem: Rc<Subsystem>,
        connect: &Connect,
        role: Role,
        limits: Limits,
        now: Duration,
    ) -> Self {
        let (namespaces, discovery) = match role {
            Role::Io(namespaces) => (namespaces, None),
            Role::Discovery(log) => (BTreeMap::new(), Some(log)),
        };
        Self {
            id,
            subsystem,
            hostnqn: connect.hostnqn.clone(),
            host_id: connect.host_id,
            limits: Limits { io_queues: limits.io_queues.clamp(1, MAX_IO_QUEUES), ..limits },
            namespaces,
            properties: Properties::new(&limits, discovery.is_some()),
            features: Features::default(),
            events: Events::default(),
            errors: ErrorLog::default(),
            told: Told::default(),
            ana: Ana::default(),
            alive: Alive::new(connect.kato_ms, discovery.is_some(), now),
            discovery,
            queues: 1,
            aborts: 0,
            counters: Counters::default(),
            pending: VecDeque::new(),
        }
    }

    /// Controller identifier.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// NQN of the host.
    #[must_use]
    pub fn hostnqn(&self) -> &str {
        &self.hostnqn
    }

    /// The subsystem.
    #[must_use]
    pub fn subsystem(&self) -> &Subsystem {
        &self.subsystem
    }

    /// Whether this is a discovery controller.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.discovery.is_some()
    }

    /// Whether the host has enabled it, and it is not shut down.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.properties.is_ready()
    }

    /// I/O queues connected.
    #[must_use]
    pub fn io_queues(&self) -> u32 {
        (self.queues & !1).count_ones()
    }

    /// The host that it is for (NVMe over Fabrics 1.1, 3.3: HOSTID).
    #[must_use]
    pub fn host_id(&self) -> [u8; 16] {
        self.host_id
    }

    /// Namespaces that the host sees, by identifier.
    #[must_use]
    pub fn namespaces(&self) -> &BTreeMap<u32, Namespace> {
        &self.namespaces
    }

    /// What the controller wants next, if anything. Ask after every call.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(event) = self.pending.pop_front() {
            return Some(event);
        }
        if !self.is_ready() {
            return None;
        }
        let (tag, completion) = self.events.poll()?;
        Some(Event::Complete { tag, completion })
    }

    /// When [`Self::on_timer`] is wanted, on the clock of the calls' `now`.
    #[must_use]
    pub fn next_timer(&self) -> Option<Duration> {
        self.alive.next_timer()
    }

    /// It is `now`, on the clock that the controller was created by.
    pub fn on_timer(&mut self, now: Duration) {
        if self.alive.has_expired(now) {
            self.errors.note(0, None, 0, Fault::new(Status::KEEP_ALIVE_EXPIRED));
            self.properties.fail();
            self.pending.push_back(Event::Expired);
        }
    }

    /// Whether the host has been silent for so long that nothing of it is to be carried out any more, whether or
    /// not [`Self::on_timer`] has been called: it may have sent it again by another path.
    #[must_use]
    pub fn is_overdue(&self, now: Duration) -> bool {
        self.alive.is_overdue(now)
    }

    /// Replaces what an I/O controller serves; the host is told what has changed.
    pub fn set_namespaces(&mut self, namespaces: BTreeMap<u32, Namespace>) {
        let old = std::mem::replace(&mut self.namespaces, namespaces);
        for (nsid, ns) in &self.namespaces {
            if !old.get(nsid).is_some_and(|old| old.is_as(ns)) {
                self.events.namespace_changed(*nsid);
            }
        }
        for nsid in old.keys().filter(|n| !self.namespaces.contains_key(n)) {
            self.events.namespace_changed(*nsid);
        }
    }

    /// A namespace takes this many blocks of space from now on. The host is not told: it asks.
    pub fn set_used(&mut self, nsid: u32, blocks: u64) {
        if let Some(ns) = self.namespaces.get_mut(&nsid) {
            ns.used_blocks = Some(blocks);
        }
    }

    /// Replaces the log of a discovery controller if its entries are others; then the host is told.
    pub fn set_discovery(&mut self, log: Rc<Discovery>) {
        if self.discovery.as_ref().is_some_and(|old| old.entries != log.entries) {
            self.discovery = Some(log);
            self.events.notify(Kind::Discovery);
        }
    }

    /// How this controller reaches a namespace; the host is told of a change. A namespace that the
    /// host does not see has no state.
    pub fn set_ana(&mut self, nsid: u32, state: AnaState) {
        let (old, _) = self.ana.of(nsid);
        if old == state || !self.namespaces.contains_key(&nsid) {
            return;
        }
        self.ana.changes += 1;
        self.ana.states.insert(nsid, (state, self.ana.changes));
        self.events.notify(Kind::Ana);
    }

    /// Bounds that the host was told when it connected.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// All writes of a controller that shuts down are durable.
    pub fn shut_down(&mut self) {
        self.properties.shut_down();
    }

    /// How a command ends whose request to the volume failed; the failure is logged.
    pub fn failed(&mut self, qid: u16, sqe: &Sqe, failure: Failure) -> Completion {
        let fault = Fault::new(self.status_of(sqe, failure));
        let lba = if qid == 0 { 0 } else { sqe.slba() };
        Completion::failed(self.errors.note(qid, Some(sqe), lba, fault))
    }

    fn status_of(&self, sqe: &Sqe, failure: Failure) -> Status {
        let state = |(nsid, ns): (&u32, &Namespace)| {
            let (state, _) = self.ana.of(*nsid);
            (ns.is_shared || state != AnaState::Optimized).then_some(state)
        };
        let states: Vec<_> = match sqe.nsid.get() {
            // A Flush of all namespaces fails for the one that is furthest away.
            NSID_ALL => self.namespaces.iter().filter_map(state).collect(),
            nsid => self.namespaces.get_key_value(&nsid).and_then(state).into_iter().collect(),
        };
        let closed = states.iter().find(|s| matches!(**s, AnaState::Inaccessible));
        match closed.or(states.first()) {
            Some(&state) => Status::on_path(failure, state),
            None => failure.into(),
        }
    }

    /// The host lives: it has connected a queue, or sent a command that is not the controller's to answer.
    pub fn heard(&mut self) {
        self.alive.touch();
    }

    /// How an Abort command ends that [`Verdict::Abort`] was about.
    pub fn abort_finished(&mut self, aborted: bool) -> Completion {
        self.aborts = self.aborts.saturating_sub(1);
        // Dword 0, bit 0: the command was not aborted.
        Completion::ok(u64::from(!aborted))
    }

    /// Whether this Connect comes from the host of this association.
    pub(crate) fn belongs_to(&self, connect: &Connect) -> bool {
        self.hostnqn == connect.hostnqn && self.subsystem.nqn == connect.subnqn
    }

    /// Connects an I/O queue.
    ///
    /// # Errors
    /// The completion that refuses it.
    pub(crate) fn connect_io(&mut self, connect: &Connect) -> Result<(), Completion> {
        if self.host_id != connect.host_id {
            return Err(Connect::refuse_host_id());
        }
        if !self.is_ready() {
            return Err(Completion::failed(Status::COMMAND_SEQUENCE.do_not_retry()));
        }
        if self.is_discovery() || connect.qid > self.limits.io_queues {
            return Err(Connect::refuse_queue());
        }
        if !valid_size(connect.sqsize, &self.limits) {
            return Err(Connect::refuse_size());
        }
        if self.queues & 1 << connect.qid != 0 {
            // Not for good: who holds it may not even prove that it is the host.
            return Err(Completion::failed(Status::COMMAND_SEQUENCE));
        }
        self.queues |= 1 << connect.qid;
        Ok(())
    }

    /// The connection of an I/O queue has gone; the queue may be connected again.
    pub fn io_disconnected(&mut self, qid: u16) {
        if (1..=MAX_IO_QUEUES).contains(&qid) {
            self.queues &= !(1 << qid);
        }
    }

    /// Logs why a command fails, and gives the completion that says so.
    fn refuse(&mut self, qid: u16, sqe: &Sqe, fault: Fault) -> Completion {
        let lba = if qid == 0 { 0 } else { sqe.slba() };
        Completion::failed(self.errors.note(qid, Some(sqe), lba, fault))
    }
}

/// Whether a queue may have this SQSIZE (0's based; one entry is no queue).
pub(crate) fn valid_size(sqsize: u16, limits: &Limits) -> bool {
    sqsize > 0 && sqsize < limits.queue_entries
}
