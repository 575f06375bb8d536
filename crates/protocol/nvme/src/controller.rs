//! One controller: executes the commands of all its queues. Pure: no bytes on the wire, no clock,
//! no I/O; connections and volumes are the driver's.
//!
//! A controller belongs to one association (NVMe Base 2.0, 2.2): the admin queue and the I/O
//! queues of one host, each a [`crate::Connection`] of its own. The driver keeps the controllers
//! of a core in [`crate::Controllers`] and passes each command that arrives to
//! [`Controller::admin`] or [`Controller::io`].

mod admin;
mod copy;
mod error_log;
mod events;
mod features;
mod identify;
mod io;
mod keep_alive;
mod logs;
mod namespace;
mod page_writer;
mod properties;
mod reservations;

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use block::RequestError;

use crate::entry::{Completion, NSID_ALL, Sqe};
use crate::fabrics::Connect;
use crate::log::AnaState;
use crate::status::Status;
use crate::stream::Tag;

pub use admin::AdminAction;
pub use copy::CopyRequest;
use error_log::{CommandError, ErrorLog};
use events::{EventKind, Events};
use features::Features;
pub use io::{FusedError, IoCommand, IoOp, IoWork};
use keep_alive::KeepAlive;
pub use logs::{DiscoveryEntry, DiscoveryKind, DiscoveryLog, TlsRequirement};
pub use namespace::Namespace;
pub(crate) use page_writer::PageWriter;
use properties::Properties;
use reservations::ReservationLog;
pub use reservations::{ReservationOp, write_report};

/// Most I/O queues of a controller, as its queue bitmap allows.
pub const MAX_IO_QUEUES: u16 = 127;

/// Abort commands that may be outstanding (ACL + 1).
const ABORT_LIMIT: u8 = 4;

/// Properties of a subsystem; the same on every node that serves it.
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
    /// How long commands may run after their association has ended, in milliseconds (CQT, NVMe Base
    /// 2.1, 5.1.13.2.1); 0: not reported.
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
    /// Highest namespace identifier, and maximum number of namespaces. Each forms an ANA group of
    /// its own (ANAGRPID) with the same number.
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

/// Kind of a controller.
#[derive(Clone, Debug)]
pub enum Role {
    /// An I/O controller with the namespaces that its host may see, by identifier.
    Io(BTreeMap<u32, Namespace>),
    /// A discovery controller with the log that its host may see.
    Discovery(Rc<DiscoveryLog>),
}

/// A request to the driver besides answers to commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Complete a command that was held on the admin queue.
    Complete {
        /// The command.
        tag: Tag,
        /// Its completion.
        completion: Completion,
    },
    /// Drop a command that was held on the admin queue: the controller was reset, and the host
    /// expects no completion ([`crate::Connection::discard`]).
    Discard {
        /// The command.
        tag: Tag,
    },
    /// The host shuts the controller down: make its writes durable, then call
    /// [`Controller::shut_down`].
    ShutDown,
    /// The controller was reset: its I/O queues are gone, close their connections.
    Reset,
    /// The host has been silent for too long: close all connections.
    KeepAliveExpired,
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
    discovery: Option<Rc<DiscoveryLog>>,
    properties: Properties,
    features: Features,
    events: Events,
    error_log: ErrorLog,
    reservation_log: ReservationLog,
    ana: AnaStates,
    keep_alive: KeepAlive,
    /// Connected queues: bit 0 is the admin queue.
    queues: u128,
    outstanding_aborts: u8,
    counters: Counters,
    pending_events: VecDeque<Event>,
}

/// Access states of namespaces.
#[derive(Debug, Default)]
struct AnaStates {
    /// By namespace: states that have changed, with the change count of the last change. All others
    /// are optimized. Entries of removed namespaces are kept, as the host remembers what it was
    /// told.
    states: BTreeMap<u32, (AnaState, u64)>,
    changes: u64,
}

impl AnaStates {
    fn state(&self, nsid: u32) -> (AnaState, u64) {
        self.states.get(&nsid).copied().unwrap_or((AnaState::Optimized, 0))
    }
}

/// Counters of the health log.
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
            error_log: ErrorLog::default(),
            reservation_log: ReservationLog::default(),
            ana: AnaStates::default(),
            keep_alive: KeepAlive::new(connect.kato_ms, discovery.is_some(), now),
            discovery,
            queues: 1,
            outstanding_aborts: 0,
            counters: Counters::default(),
            pending_events: VecDeque::new(),
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

    /// Whether the host has enabled it and not shut it down.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.properties.is_ready()
    }

    /// I/O queues connected.
    #[must_use]
    pub fn io_queues(&self) -> u32 {
        (self.queues & !1).count_ones()
    }

    /// Identifier of its host
    #[must_use]
    pub fn host_id(&self) -> [u8; 16] {
        self.host_id
    }

    /// Namespaces that the host sees, by identifier.
    #[must_use]
    pub fn namespaces(&self) -> &BTreeMap<u32, Namespace> {
        &self.namespaces
    }

    /// The controller's next request, if any. Call this after every other call.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(event) = self.pending_events.pop_front() {
            return Some(event);
        }
        if !self.is_ready() {
            return None;
        }
        let (tag, completion) = self.events.poll()?;
        Some(Event::Complete { tag, completion })
    }

    /// When to call [`Self::on_timer`], on the clock of the calls' `now`.
    #[must_use]
    pub fn next_timer(&self) -> Option<Duration> {
        self.keep_alive.next_timer()
    }

    /// Advances the controller's clock, the one it was created with, to `now`.
    pub fn on_timer(&mut self, now: Duration) {
        if self.keep_alive.has_expired(now) {
            self.error_log.record(0, None, 0, CommandError::new(Status::KEEP_ALIVE_EXPIRED));
            self.properties.set_fatal();
            self.pending_events.push_back(Event::KeepAliveExpired);
        }
    }

    /// Whether the host has been silent for so long that its commands must not be executed any
    /// more, even if [`Self::on_timer`] has not been called yet: it may have retried them through
    /// another path.
    #[must_use]
    pub fn is_keep_alive_overdue(&self, now: Duration) -> bool {
        self.keep_alive.is_overdue(now)
    }

    /// Replaces the namespaces of an I/O controller and notifies the host of changes.
    pub fn set_namespaces(&mut self, namespaces: BTreeMap<u32, Namespace>) {
        let old = std::mem::replace(&mut self.namespaces, namespaces);
        for (nsid, ns) in &self.namespaces {
            if !old.get(nsid).is_some_and(|old| old.has_same_attributes(ns)) {
                self.events.namespace_changed(*nsid);
            }
        }
        for nsid in old.keys().filter(|n| !self.namespaces.contains_key(n)) {
            self.events.namespace_changed(*nsid);
        }
    }

    /// Sets the number of allocated blocks of a namespace. The host is not notified: it polls.
    pub fn set_used(&mut self, nsid: u32, blocks: u64) {
        if let Some(ns) = self.namespaces.get_mut(&nsid) {
            ns.used_blocks = Some(blocks);
        }
    }

    /// Replaces the log of a discovery controller; notifies the host if the entries differ.
    pub fn set_discovery(&mut self, log: Rc<DiscoveryLog>) {
        if self.discovery.as_ref().is_some_and(|old| old.entries != log.entries) {
            self.discovery = Some(log);
            self.events.notify(EventKind::Discovery);
        }
    }

    /// Sets the access state of a namespace and notifies the host of a change. Ignored for
    /// namespaces that the host does not see.
    pub fn set_ana(&mut self, nsid: u32, state: AnaState) {
        let (old, _) = self.ana.state(nsid);
        if old == state || !self.namespaces.contains_key(&nsid) {
            return;
        }
        self.ana.changes += 1;
        self.ana.states.insert(nsid, (state, self.ana.changes));
        self.events.notify(EventKind::Ana);
    }

    /// The limits that the host was told when it connected.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Reports that all writes of a controller that shuts down are durable.
    pub fn shut_down(&mut self) {
        self.properties.shut_down();
    }

    /// The completion of a command whose request to the volume failed; logs the failure.
    pub fn fail(&mut self, qid: u16, sqe: &Sqe, failure: RequestError) -> Completion {
        let fault = CommandError::new(self.status_of(sqe, failure));
        let lba = if qid == 0 { 0 } else { sqe.slba() };
        Completion::failed(self.error_log.record(qid, Some(sqe), lba, fault))
    }

    fn status_of(&self, sqe: &Sqe, failure: RequestError) -> Status {
        let state = |(nsid, ns): (&u32, &Namespace)| {
            let (state, _) = self.ana.state(*nsid);
            (ns.is_shared || state != AnaState::Optimized).then_some(state)
        };
        let states: Vec<_> = match sqe.nsid.get() {
            // A Flush of all namespaces fails with the worst access state of them.
            NSID_ALL => self.namespaces.iter().filter_map(state).collect(),
            nsid => self.namespaces.get_key_value(&nsid).and_then(state).into_iter().collect(),
        };
        let closed = states.iter().find(|s| matches!(**s, AnaState::Inaccessible));
        match closed.or(states.first()) {
            Some(&state) => Status::on_path(failure, state),
            None => failure.into(),
        }
    }

    /// Records a sign of life of the host: it has connected a queue, or sent a command that the
    /// controller does not handle.
    pub fn record_traffic(&mut self) {
        self.keep_alive.record_traffic();
    }

    /// The completion of an Abort command that caused [`AdminAction::Abort`].
    pub fn abort_finished(&mut self, aborted: bool) -> Completion {
        self.outstanding_aborts = self.outstanding_aborts.saturating_sub(1);
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
            // Not final: the holder of the queue may not even be able to authenticate as the host.
            return Err(Completion::failed(Status::COMMAND_SEQUENCE));
        }
        self.queues |= 1 << connect.qid;
        Ok(())
    }

    /// The connection of an I/O queue has ended; the queue may be connected again.
    pub fn io_disconnected(&mut self, qid: u16) {
        if (1..=MAX_IO_QUEUES).contains(&qid) {
            self.queues &= !(1 << qid);
        }
    }

    /// Logs why a command fails and returns its completion.
    fn refuse(&mut self, qid: u16, sqe: &Sqe, fault: CommandError) -> Completion {
        let lba = if qid == 0 { 0 } else { sqe.slba() };
        Completion::failed(self.error_log.record(qid, Some(sqe), lba, fault))
    }
}

/// Whether a queue may have this SQSIZE (0's based; one entry is too few).
pub(crate) fn valid_size(sqsize: u16, limits: &Limits) -> bool {
    sqsize > 0 && sqsize < limits.queue_entries
}
