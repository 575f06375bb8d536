//! The controllers of one core: Connect, keep alive, shutdown, what changes while they live.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Access, Bufs, Class, Request};
use nvme::auth::{Fresh, Sequence, SharedConfig};
use nvme::fabrics::CONNECT_AUTHENTICATE;
use nvme::{Completion, Connect, Connected, Controller, Controllers, Limits, Namespace, Role, Tag};
use rt::Core;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::authentication::{self, Asked};
use super::{Event, Host, view};
use crate::catalog::{Admission, Catalog, NodeIndex, VolumeId};
use crate::conn::Inbox;
use crate::guesses::Method;
use crate::server::{MAX_TRANSFER_BYTES, MIN_POOL_REQUESTS, Server, Space};

/// Controller identifiers per core, while the node shares nothing: they are unique in the node.
const IDS_PER_CORE: u16 = 1000;

/// All NVMe controllers of a core.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Of the authentications here.
    sequence: RefCell<Sequence>,
    /// Turns at raising powers for them.
    powers: Arc<Semaphore>,
    controllers: RefCell<Controllers>,
    /// Identifiers of controllers while the node shares nothing.
    own_ids: RangeInclusive<u16>,
    associations: RefCell<BTreeMap<u16, Association>>,
    /// The zero of the controllers' clock.
    began: Instant,
}

/// The connections of a controller.
#[derive(Debug)]
struct Association {
    queues: BTreeMap<u16, Inbox<Event>>,
    /// Whether all of them are protected by TLS; else none is.
    is_protected: bool,
    /// Wakes whoever waits for the controller's timer: it has changed, or is gone.
    timer: Rc<Notify>,
}

/// A controller, and the queue of it that a connection serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) cntlid: u16,
    pub(super) qid: u16,
}

impl Shared {
    /// No controllers; those to come get identifiers that are `core`'s.
    pub(crate) fn new(core: &Core) -> Self {
        let mut begin = [0; 4];
        core.fill_random(&mut begin);
        let begin = u32::from_le_bytes(begin);
        let core = u16::try_from(core.id()).unwrap_or(u16::MAX);
        let first = core.saturating_mul(IDS_PER_CORE).min(u16::MAX - 2 * IDS_PER_CORE) + 1;
        let own_ids = first..=first + IDS_PER_CORE - 1;
        Self {
            sequence: RefCell::new(Sequence::new(begin)),
            powers: Arc::new(Semaphore::new(1)),
            controllers: RefCell::new(Controllers::new(own_ids.clone())),
            own_ids,
            associations: RefCell::default(),
            began: Instant::now(),
        }
    }

    /// Controllers to come get identifiers that no other node gives out. A subsystem lives on one
    /// core of each node, so the cores of a node need not differ; of discovery controllers, which
    /// live on all, nobody compares them.
    pub(crate) fn set_node(&self, catalog: &Catalog) {
        let alone = catalog.node == NodeIndex::default() && catalog.shared.is_empty();
        let ids = if alone { self.own_ids.clone() } else { catalog.node.controllers() };
        self.controllers.borrow_mut().set_ids(ids);
    }

    /// Tells the hosts of a volume how it is to be used through this node from now on.
    pub(crate) fn access_changed(&self, id: VolumeId, access: Access) {
        let mut told = Vec::new();
        for controller in self.controllers.borrow_mut().iter_mut() {
            let of = |(_, ns): &(&u32, &Namespace)| ns.uuid == id.0 && ns.is_shared;
            let namespaces: Vec<_> =
                controller.namespaces().iter().filter(of).map(|(nsid, _)| *nsid).collect();
            for nsid in namespaces {
                controller.set_ana(nsid, view::ana_state(access));
                told.push(controller.id());
            }
        }
        for cntlid in told {
            if let Some(admin) = self.queue(Seat { cntlid, qid: 0 }) {
                admin.push(Event::Controller);
            }
        }
    }

    /// A volume takes other space than before: hosts that ask are told.
    pub(crate) fn space_changed(&self, id: VolumeId, space: Space) {
        for controller in self.controllers.borrow_mut().iter_mut() {
            let of = controller.namespaces().iter().filter(|(_, ns)| ns.uuid == id.0);
            let of: Vec<_> =
                of.map(|(nsid, ns)| (*nsid, view::used_blocks(space, &ns.info))).collect();
            of.into_iter().for_each(|(nsid, blocks)| controller.set_used(nsid, blocks));
        }
    }

    /// Tells a controller how its namespaces are to be used.
    fn set_states(&self, server: &Server, cntlid: u16) {
        self.with(cntlid, |controller| {
            let catalog = server.catalog();
            let entry = catalog.subsystems.get(&controller.subsystem().nqn);
            for (nsid, ns) in controller.namespaces().clone() {
                let is_away = entry.is_some_and(|entry| entry.away.contains_key(&nsid));
                let access = match server.volume(VolumeId(ns.uuid)).filter(|_| !is_away) {
                    // Nobody but this node serves it, and it does.
                    Some(served) => served.access_in(&catalog).unwrap_or_default(),
                    None => Access::Unavailable,
                };
                controller.set_ana(nsid, view::ana_state(access));
            }
        });
    }

    /// What a transaction of an authentication needs of the unforeseeable.
    pub(super) fn fresh(&self, core: &Core) -> Fresh {
        let mut bytes = [0; Fresh::BYTES];
        core.fill_random(&mut bytes);
        Fresh::new(self.sequence.borrow_mut().take(), &bytes)
    }

    /// A turn at raising powers: one connection of a core after the other.
    pub(super) async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.powers).acquire_owned().await.ok()
    }

    /// Calls `f` with a controller, if it lives.
    pub(super) fn with<T>(&self, cntlid: u16, f: impl FnOnce(&mut Controller) -> T) -> Option<T> {
        self.controllers.borrow_mut().get_mut(cntlid).map(f)
    }

    /// Whether nothing of this controller's host is to be carried out any more.
    pub(super) fn is_overdue(&self, cntlid: u16, now: Instant) -> bool {
        let now = now - self.began;
        self.with(cntlid, |c| c.is_overdue(now)).unwrap_or(false)
    }

    /// The connection of a queue.
    pub(super) fn queue(&self, seat: Seat) -> Option<Inbox<Event>> {
        self.associations.borrow().get(&seat.cntlid)?.queues.get(&seat.qid).cloned()
    }

    /// The controller's timer may have changed.
    pub(super) fn timer_changed(&self, cntlid: u16) {
        if let Some(association) = self.associations.borrow().get(&cntlid) {
            association.timer.notify_one();
        }
    }

    /// A connection has ended. With the admin queue's the controller goes.
    pub(super) fn leave(&self, seat: Seat) {
        if seat.qid == 0 {
            return self.end(seat.cntlid, "the admin queue is gone");
        }
        self.with(seat.cntlid, |c| c.io_disconnected(seat.qid));
        if let Some(association) = self.associations.borrow_mut().get_mut(&seat.cntlid) {
            association.queues.remove(&seat.qid);
            if let Some(admin) = association.queues.get(&0) {
                // It may have waited for this one to leave.
                admin.push(Event::Controller);
            }
        }
    }

    /// Whether I/O queues of a controller are connected.
    pub(super) fn has_io_queues(&self, cntlid: u16) -> bool {
        let associations = self.associations.borrow();
        associations.get(&cntlid).is_some_and(|a| a.queues.range(1..).next().is_some())
    }

    /// Ends an association: the controller is no more, its connections are closed.
    fn end(&self, cntlid: u16, why: &'static str) {
        self.controllers.borrow_mut().remove(cntlid);
        let Some(association) = self.associations.borrow_mut().remove(&cntlid) else { return };
        association.timer.notify_one();
        for inbox in association.queues.into_values() {
            inbox.push(Event::Gone(why));
        }
    }

    /// Closes the connections of the I/O queues; the controller was reset.
    fn close_io(&self, cntlid: u16) {
        let mut associations = self.associations.borrow_mut();
        let Some(association) = associations.get_mut(&cntlid) else { return };
        let io = association.queues.split_off(&1);
        drop(associations);
        for inbox in io.into_values() {
            inbox.push(Event::Gone("the controller was reset"));
        }
    }

    fn join(&self, connected: &Connected, inbox: &Inbox<Event>, is_protected: bool) {
        let mut associations = self.associations.borrow_mut();
        let new = || Association { queues: BTreeMap::new(), is_protected, timer: Rc::default() };
        let association = associations.entry(connected.cntlid).or_insert_with(new);
        association.queues.insert(connected.queue.id, inbox.clone());
    }

    /// Whether the queues of a controller are protected by TLS, if there are any.
    fn protection(&self, cntlid: u16) -> Option<bool> {
        self.associations.borrow().get(&cntlid).map(|a| a.is_protected)
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Calls a controller's timer when it wants that, as long as it lives (NVMe Base 2.0, 3.9).
async fn watch(server: std::rc::Weak<Server>, cntlid: u16) {
    loop {
        let Some(this) = server.upgrade() else { return };
        let shared = &this.nvme;
        let Some(next) = shared.with(cntlid, |c| c.next_timer()) else { return };
        let timer = match shared.associations.borrow().get(&cntlid) {
            Some(association) => Rc::clone(&association.timer),
            None => return,
        };
        if next.is_some_and(|at| at <= shared.now()) {
            let now = shared.now();
            shared.with(cntlid, |c| c.on_timer(now));
            if let Some(inbox) = shared.queue(Seat { cntlid, qid: 0 }) {
                inbox.push(Event::Controller);
            }
            continue;
        }
        let began = shared.began;
        drop(this);
        match next {
            Some(at) => {
                // Either way the next round looks what is to be done.
                let _ = tokio::time::timeout_at(began + at, timer.notified()).await;
            }
            None => timer.notified().await,
        }
    }
}

/// What becomes of a Connect.
enum Decision {
    /// With what the host has to prove, if anything.
    Here(Result<(Connected, Option<SharedConfig>), Refused>),
    AtCore(usize),
    /// Here, at that time.
    Later(Instant),
}

/// A Connect that is refused.
struct Refused {
    /// What the host is told.
    told: Completion,
    /// What is true, for the node's log: not all of it is the host's to know.
    why: &'static str,
}

impl Refused {
    fn new(told: Completion, why: &'static str) -> Self {
        Self { told, why }
    }
}

impl From<Completion> for Refused {
    fn from(told: Completion) -> Self {
        Self::new(told, "what it asks for does not suit its association")
    }
}

impl Host {
    /// Decides about a Connect, or moves to the core where that has to be done.
    pub(super) fn decide(&mut self, tag: Tag, connect: Box<Connect>) {
        self.place.registration.set_tls(self.is_protected());
        match self.judge(&connect) {
            Decision::AtCore(core) => self.moving = Some((core, tag, connect)),
            Decision::Later(at) => {
                let inbox = self.place.inbox.clone();
                tokio::task::spawn_local(async move {
                    tokio::time::sleep_until(at).await;
                    inbox.push(Event::Decide { tag, connect });
                });
            }
            Decision::Here(Err(Refused { told, why })) => {
                if let Some(left_out) = self.server().refusal_line() {
                    tracing::info!(
                        host = connect.hostnqn,
                        subsystem = connect.subnqn,
                        peer = %self.place.peer,
                        status = ?told.status,
                        why,
                        others_not_logged = left_out,
                        "an NVMe connect is refused"
                    );
                }
                self.complete(tag, told, &Bufs::new());
            }
            Decision::Here(Ok((connected, asked))) => self.seated(tag, connect, &connected, asked),
        }
    }

    fn seated(
        &mut self,
        tag: Tag,
        connect: Box<Connect>,
        connected: &Connected,
        asked: Option<SharedConfig>,
    ) {
        let server = Rc::clone(self.server());
        server.nvme.join(connected, &self.place.inbox, self.is_protected());
        if connect.qid == 0 {
            tokio::task::spawn_local(watch(Rc::downgrade(&server), connected.cntlid));
        }
        self.seat = Some(Seat { cntlid: connected.cntlid, qid: connect.qid });
        self.tasks.remove(tag);
        let result = u64::from(connected.cntlid);
        let Some(config) = asked else {
            self.machine.connected(tag, connected.queue, result);
            return self.enters(&connect);
        };
        self.machine.connected(tag, connected.queue, result | CONNECT_AUTHENTICATE);
        self.asked = Some(Box::new(Asked::new(connect, config)));
        self.begin_patience();
    }

    /// The host is let in.
    pub(super) fn enters(&mut self, connect: &Connect) {
        let target = (!connect.is_discovery()).then_some(connect.subnqn.as_str());
        self.place.registration.logged_in(&connect.hostnqn, target, connect.qid);
        self.is_heard();
        if connect.qid == 0 {
            let (host, subsystem) = (&connect.hostnqn, &connect.subnqn);
            tracing::info!(host, subsystem, peer = %self.place.peer, "NVMe connect");
        }
        self.listen();
    }

    fn judge(&mut self, connect: &Connect) -> Decision {
        let server = &Rc::clone(self.server());
        let catalog = server.catalog();
        let refuse = |told, why| Decision::Here(Err(Refused::new(told, why)));
        if self.draining {
            return refuse(Connect::refuse_busy(), "the node stops");
        }
        if !self.is_named_by(connect) {
            return refuse(Connect::refuse_host(), "its TLS key is for another name");
        }
        if connect.is_discovery() {
            let log = view::discovery(&catalog, &connect.hostnqn, self.place.local);
            let (subsystem, role) = (view::discovery_subsystem(), Role::Discovery(log));
            let connected = admin(server, connect, &subsystem, role);
            return Decision::Here(connected.map(|c| (c, None)).map_err(Refused::from));
        }
        let admitted = catalog
            .subsystems
            .get(&connect.subnqn)
            .and_then(|entry| Some((entry, entry.access.admission(&connect.hostnqn)?)));
        let Some((entry, admission)) = admitted else {
            return Decision::Here(Err(unknown(&catalog, connect)));
        };
        if entry.requires_tls(&connect.hostnqn) && !self.is_protected() {
            return refuse(Connect::refuse_host(), "the host has to come by TLS");
        }
        if !entry.serves(&connect.hostnqn) {
            // Nothing that the host sees of it is here for now: the host is to come again.
            return refuse(Connect::refuse_busy(), "its volumes are not served for now");
        }
        if entry.core != server.core().id() {
            return Decision::AtCore(entry.core);
        }
        let asked = match admission {
            Admission::ByName => None,
            Admission::Proof(secrets) => match authentication::config(secrets, connect) {
                Some(config) => Some(config),
                // It may be known soon.
                None => return refuse(Connect::refuse_busy(), "its secrets cannot be read"),
            },
        };
        let by_name = entry.access.named.contains_key(&connect.hostnqn);
        if server.has_its_share(&connect.hostnqn, by_name, self.place.peer.ip()) {
            return refuse(Connect::refuse_busy(), "it has as many connections as one may have");
        }
        if asked.is_some() && self.attempt.is_none() {
            let whence = (self.place.peer.ip(), Method::Dhchap, connect.subnqn.as_str());
            let Some((at, begun)) = server.attempt(whence) else {
                let why = "too many hosts from its address wait after failures";
                return refuse(Connect::refuse_busy(), why);
            };
            self.attempt = Some(begun);
            if let Some(at) = at {
                return Decision::Later(at);
            }
        }
        if connect.qid > 0 {
            if server.nvme.protection(connect.cntlid) == Some(!self.is_protected()) {
                let why = "its queues are not all protected by TLS, or all not";
                return refuse(Connect::refuse_controller(), why);
            }
            let connected = server.nvme.controllers.borrow_mut().connect_io(connect);
            return Decision::Here(connected.map(|c| (c, asked)).map_err(Refused::from));
        }
        let subsystem = view::subsystem(&connect.subnqn, &entry.serial, catalog.quiesce_ms);
        let who = (connect.subnqn.as_str(), connect.hostnqn.as_str());
        let role = Role::Io(view::namespaces(server, &catalog, who, &BTreeMap::new()));
        let connected = admin(server, connect, &subsystem, role);
        Decision::Here(connected.map(|c| (c, asked)).map_err(Refused::from))
    }

    /// What the host says counts for its keep alive.
    pub(super) fn is_heard(&self) {
        if let Some(seat) = self.seat {
            self.server().nvme.with(seat.cntlid, Controller::heard);
        }
    }

    /// The catalog has changed: the admin queue's connection tells its controller.
    pub(super) fn on_catalog(&mut self) {
        let Some(seat) = self.seat else { return };
        let server = Rc::clone(self.server());
        let catalog = server.catalog();
        let who = |c: &mut Controller| {
            let nqn = (!c.is_discovery()).then(|| c.subsystem().nqn.clone());
            (c.hostnqn().to_owned(), nqn)
        };
        let Some((hostnqn, nqn)) = server.nvme.with(seat.cntlid, who) else { return };
        let Some(nqn) = nqn else {
            let log = view::discovery(&catalog, &hostnqn, self.place.local);
            server.nvme.with(seat.cntlid, |c| c.set_discovery(log));
            return self.on_controller();
        };
        if let Err(why) = self.may_stay(&catalog, &nqn, &hostnqn) {
            // An I/O queue may have come in by another rule than its admin queue.
            return if seat.qid == 0 { server.nvme.end(seat.cntlid, why) } else { self.close(why) };
        }
        if seat.qid > 0 {
            return;
        }
        let before = server.nvme.with(seat.cntlid, |c| c.namespaces().clone());
        let who = (nqn.as_str(), hostnqn.as_str());
        let namespaces = view::namespaces(&server, &catalog, who, &before.unwrap_or_default());
        let is_shared = namespaces.values().any(|ns| ns.is_shared);
        if is_shared && !catalog.node.controllers().contains(&seat.cntlid) {
            return server.nvme.end(seat.cntlid, "another node may have its identifier now");
        }
        server.nvme.with(seat.cntlid, |c| c.set_namespaces(namespaces));
        server.nvme.set_states(&server, seat.cntlid);
        if self.has_proved() {
            self.listen();
        }
        self.on_controller();
    }

    /// Whether the queue goes on, and with an admin queue its association.
    fn may_stay(&self, catalog: &Catalog, nqn: &str, hostnqn: &str) -> Result<(), &'static str> {
        let entry = catalog.subsystems.get(nqn);
        let entry = entry.filter(|entry| entry.core == self.server().core().id());
        let admitted = entry.and_then(|entry| Some((entry, entry.access.admission(hostnqn)?)));
        match admitted {
            None => Err("the host may not use this subsystem any more"),
            Some((_, Admission::Proof(_))) if self.asked.is_none() => {
                Err("the host has to prove who it is")
            }
            Some((entry, _)) if entry.requires_tls(hostnqn) && !self.is_protected() => {
                Err("the host has to come by TLS")
            }
            // A host without multipathing waits for a connection, and not for a namespace.
            Some((entry, _)) if !entry.serves(hostnqn) => {
                Err("nothing of its subsystem is served for now")
            }
            Some(_) => Ok(()),
        }
    }

    /// Does what the controller wants; for the connection of the admin queue.
    pub(super) fn on_controller(&mut self) {
        let Some(seat) = self.seat.filter(|s| s.qid == 0) else { return };
        let server = Rc::clone(self.server());
        while let Some(Some(event)) = server.nvme.with(seat.cntlid, Controller::poll_event) {
            match event {
                nvme::Event::Complete { tag, completion } => {
                    self.complete(tag, completion, &Bufs::new());
                }
                nvme::Event::Forget { tag } => {
                    self.tasks.remove(tag);
                    self.machine.forget(tag);
                }
                nvme::Event::Reset => server.nvme.close_io(seat.cntlid),
                nvme::Event::ShutDown => self.shut_down(seat.cntlid),
                nvme::Event::Expired => {
                    let host = self.place.registration.initiator();
                    tracing::warn!(host, "an NVMe host is silent for longer than its keep alive");
                    server.nvme.end(seat.cntlid, "keep alive timeout");
                }
            }
        }
    }

    /// Makes the writes of a controller durable before it reports that it is shut down
    /// (NVMe Base 2.0, 3.6.1).
    fn shut_down(&self, cntlid: u16) {
        let server = Rc::clone(self.server());
        let account = self.account.clone();
        let volumes = self.volumes();
        tokio::task::spawn_local(async move {
            for served in volumes {
                if let Err(failure) = served.volume.execute(Request::Flush, &account).await {
                    let volume = &served.name;
                    tracing::warn!(volume, %failure, "an NVMe shutdown could not flush");
                }
            }
            server.nvme.with(cntlid, Controller::shut_down);
        });
    }
}

/// Why a host does not get to a subsystem, and what it is told. One that may not use a subsystem is told the same
/// whether there is one of that name or not: names of volumes cannot be found out by asking for them.
fn unknown(catalog: &Catalog, connect: &Connect) -> Refused {
    let (name, host) = (&connect.subnqn, &connect.hostnqn);
    let elsewhere = catalog.remote.subsystems.get(name);
    if elsewhere.is_some_and(|entry| entry.access.admission(host).is_some()) {
        return Refused::new(Connect::refuse_subsystem(), "only other nodes have its volumes");
    }
    let exists = elsewhere.is_some() || catalog.subsystems.contains_key(name);
    let why = if exists { "the host is not allowed" } else { "there is no such subsystem" };
    if catalog.is_incomplete {
        // What a record says that cannot be read for now is no reason to give a path up.
        return Refused::new(Connect::refuse_busy(), why);
    }
    Refused::new(Connect::refuse_host(), why)
}

/// Connects an admin queue.
fn admin(
    server: &Server,
    connect: &Connect,
    subsystem: &Rc<nvme::Subsystem>,
    role: Role,
) -> Result<Connected, Completion> {
    let shared = &server.nvme;
    let max_transfer_bytes = max_transfer(server, &role);
    let limits = Limits { max_transfer_bytes, ..Limits::default() };
    let now = shared.now();
    let mut controllers = shared.controllers.borrow_mut();
    let connected = controllers.connect_admin(connect, subsystem, role, limits, now)?;
    drop(controllers);
    shared.set_states(server, connected.cntlid);
    Ok(connected)
}

/// The largest transfer that one command may ask for: no more than any of the volumes takes, and
/// than the pool can give to one command.
fn max_transfer(server: &Server, role: &Role) -> u32 {
    let pool = server.pool().usage().total / MIN_POOL_REQUESTS;
    let volumes = match role {
        Role::Io(namespaces) => namespaces.values().map(|ns| &ns.info),
        Role::Discovery(_) => return MAX_TRANSFER_BYTES,
    };
    let most = volumes
        .map(|info| u64::from(info.max_transfer_blocks) * u64::from(info.block_size))
        .chain([pool, u64::from(MAX_TRANSFER_BYTES)])
        .min()
        .unwrap_or(0);
    1 << u32::try_from(most.max(4096)).unwrap_or(MAX_TRANSFER_BYTES).ilog2()
}

/// The class of memory for what an admin command returns: it holds none before.
pub(super) const RETURNED: Class = Class::Read;
