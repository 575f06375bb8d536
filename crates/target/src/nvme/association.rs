//! The controllers of one core: Connect, what they see of the catalog, keep alive.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use nvme::{Connect, ConnectRefusal, Controller, DISCOVERY_NQN, Namespace, Portal, Subsystem, Tag};
use tokio::time::Instant;

use super::{Event, Host};
use crate::catalog::Catalog;
use crate::conn::Inbox;
use crate::server::Server;

/// Controller identifiers per core: they are unique in the node.
const IDS_PER_CORE: u16 = 1000;

/// All NVMe controllers of a core.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    associations: RefCell<BTreeMap<u16, Rc<Association>>>,
    last: Cell<u16>,
}

/// A controller and the connections that serve its queues.
#[derive(Debug)]
pub(crate) struct Association {
    pub(super) controller: RefCell<Controller>,
    queues: RefCell<BTreeMap<u16, Inbox<Event>>>,
    heard: Cell<Instant>,
    id: u16,
}

impl Association {
    /// The connection of a queue.
    pub(super) fn queue(&self, id: u16) -> Option<Inbox<Event>> {
        self.queues.borrow().get(&id).cloned()
    }

    /// A command has come.
    pub(super) fn hear(&self) {
        self.heard.set(Instant::now());
    }

    fn end(&self, why: &'static str) {
        let queues = std::mem::take(&mut *self.queues.borrow_mut());
        for inbox in queues.into_values() {
            inbox.push(Event::Gone(why));
        }
    }
}

/// NVMe Base 2.0, 3.9: a host that is silent for too long is gone.
async fn watch(association: Weak<Association>) {
    loop {
        let Some(this) = association.upgrade() else { return };
        let patience = this.controller.borrow().keep_alive();
        let deadline = patience.map(|p| this.heard.get() + p);
        match deadline {
            Some(at) if at <= Instant::now() => {
                let host = this.controller.borrow().host_nqn.clone();
                tracing::warn!(host, "an NVMe host is silent for longer than its keep alive");
                return this.end("keep alive timeout");
            }
            Some(at) => {
                drop(this);
                tokio::time::sleep_until(at).await;
            }
            // The host may set one later.
            None => {
                drop(this);
                tokio::time::sleep(std::time::Duration::from_secs(10)).await;
            }
        }
    }
}

impl Shared {
    fn next_id(&self, core: usize) -> Option<u16> {
        let base = u16::try_from(core).ok()?.checked_mul(IDS_PER_CORE)?;
        let associations = self.associations.borrow();
        (1..=IDS_PER_CORE)
            .map(|n| base + (self.last.get() + n - 1) % IDS_PER_CORE + 1)
            .find(|id| !associations.contains_key(id))
            .inspect(|id| self.last.set(id - base))
    }

    /// Makes a controller; its admin queue is served by `inbox`.
    fn create(
        &self,
        server: &Server,
        connect: &Connect,
        subsystem: Subsystem,
        inbox: &Inbox<Event>,
    ) -> Result<Rc<Association>, ConnectRefusal> {
        let id = self.next_id(server.core().id()).ok_or(ConnectRefusal::Busy)?;
        let association = Rc::new(Association {
            controller: RefCell::new(Controller::new(id, connect, subsystem)),
            queues: RefCell::new(BTreeMap::from([(0, inbox.clone())])),
            heard: Cell::new(Instant::now()),
            id,
        });
        self.associations.borrow_mut().insert(id, Rc::clone(&association));
        tokio::task::spawn_local(watch(Rc::downgrade(&association)));
        Ok(association)
    }

    /// Joins an I/O queue to its controller.
    fn join(
        &self,
        connect: &Connect,
        inbox: &Inbox<Event>,
    ) -> Result<Rc<Association>, ConnectRefusal> {
        let id = connect.controller.ok_or(ConnectRefusal::CONTROLLER)?;
        let associations = self.associations.borrow();
        let association = associations.get(&id).ok_or(ConnectRefusal::CONTROLLER)?;
        let controller = association.controller.borrow();
        if controller.host != connect.host || controller.host_nqn != connect.host_nqn {
            return Err(ConnectRefusal::HOST_ID);
        }
        if controller.subsystem.nqn != connect.subsystem_nqn || controller.is_discovery() {
            return Err(ConnectRefusal::SUBSYSTEM);
        }
        if !controller.is_ready() {
            return Err(ConnectRefusal::CONTROLLER);
        }
        let mut queues = association.queues.borrow_mut();
        if queues.contains_key(&connect.queue.id) {
            return Err(ConnectRefusal::Busy);
        }
        queues.insert(connect.queue.id, inbox.clone());
        Ok(Rc::clone(association))
    }

    /// A connection has ended. With the admin queue's the controller goes.
    pub(super) fn leave(&self, association: &Association, inbox: &Inbox<Event>) {
        let mut queues = association.queues.borrow_mut();
        let id = queues.iter().find(|(_, i)| i.is_same(inbox)).map(|(id, _)| *id);
        if let Some(id) = id {
            queues.remove(&id);
        }
        drop(queues);
        if id == Some(0) || association.queues.borrow().is_empty() {
            association.end("the admin queue is gone");
            self.associations.borrow_mut().remove(&association.id);
        }
    }
}

/// What becomes of a Connect.
enum Decision {
    Here(Result<Rc<Association>, ConnectRefusal>),
    AtCore(usize),
}

impl Host {
    /// Decides about a Connect, or moves to the core where that has to be done.
    pub(super) fn decide(&mut self, tag: Tag, connect: Box<Connect>) {
        match self.judge(&connect) {
            Decision::AtCore(core) => self.moving = Some((core, tag, connect)),
            Decision::Here(Err(refusal)) => {
                tracing::info!(
                    host = connect.host_nqn,
                    subsystem = connect.subsystem_nqn,
                    peer = %self.place.peer,
                    ?refusal,
                    "an NVMe connect is refused"
                );
                self.complete(tag, refusal.completion(), &block::Bufs::new());
            }
            Decision::Here(Ok(association)) => {
                let id = association.id;
                let target = (!connect.is_discovery()).then_some(connect.subsystem_nqn.as_str());
                self.place.registration.logged_in(&connect.host_nqn, target, connect.queue.id);
                if connect.queue.id == 0 {
                    let (host, subsystem) = (&connect.host_nqn, &connect.subsystem_nqn);
                    tracing::info!(host, subsystem, peer = %self.place.peer, "NVMe connect");
                }
                self.association = Some(association);
                self.tasks.remove(tag);
                self.machine.connected(tag, connect.queue, u64::from(id));
            }
        }
    }

    fn judge(&self, connect: &Connect) -> Decision {
        let (server, inbox) = (self.server(), &self.place.inbox);
        let catalog = server.catalog();
        if self.draining {
            return Decision::Here(Err(ConnectRefusal::Busy));
        }
        if connect.is_discovery() {
            if connect.queue.id != 0 {
                return Decision::Here(Err(ConnectRefusal::QUEUE));
            }
            let subsystem = discovery(&catalog, &connect.host_nqn, self.place.local);
            return Decision::Here(server.nvme.create(server, connect, subsystem, inbox));
        }
        let Some(entry) = catalog.subsystems.get(&connect.subsystem_nqn) else {
            return Decision::Here(Err(ConnectRefusal::SUBSYSTEM));
        };
        match entry.access.admission(&connect.host_nqn) {
            // CHAP secrets of iSCSI say nothing about an NVMe host: no way to check, no way in.
            Some(admission) if admission.chap.is_none() => {}
            _ => return Decision::Here(Err(ConnectRefusal::Host)),
        }
        if entry.core != server.core().id() {
            return Decision::AtCore(entry.core);
        }
        Decision::Here(match connect.queue.id {
            0 => {
                let subsystem = view(server, &catalog, &connect.subsystem_nqn);
                server.nvme.create(server, connect, subsystem, inbox)
            }
            _ => server.nvme.join(connect, inbox),
        })
    }

    /// The catalog has changed: the admin queue's connection tells its controller.
    pub(super) fn on_catalog(&mut self) {
        let Some(association) = self.association.clone() else { return };
        if self.machine.queue().is_none_or(|q| q.id != 0) {
            return;
        }
        let server = Rc::clone(self.server());
        let catalog = server.catalog();
        let mut controller = association.controller.borrow_mut();
        let nqn = controller.subsystem.nqn.clone();
        let host = controller.host_nqn.clone();
        if controller.is_discovery() {
            controller.update(discovery(&catalog, &host, self.place.local));
        } else {
            let entry = catalog.subsystems.get(&nqn);
            let welcome = entry.is_some_and(|e| {
                e.core == server.core().id()
                    && e.access.admission(&host).is_some_and(|a| a.chap.is_none())
            });
            if !welcome {
                drop(controller);
                association.end("the host may not use this subsystem any more");
                return;
            }
            controller.update(view(&server, &catalog, &nqn));
        }
        drop(controller);
        self.tell_events(&association);
    }

    /// Ends event requests that have something to tell.
    pub(super) fn tell_events(&mut self, association: &Association) {
        loop {
            let next = association.controller.borrow_mut().next_event();
            let Some((tag, completion)) = next else { return };
            self.complete(tag, completion, &block::Bufs::new());
        }
    }
}

/// A subsystem as the catalog and the volumes of this core have it.
fn view(server: &Server, catalog: &Catalog, nqn: &str) -> Subsystem {
    let Some(entry) = catalog.subsystems.get(nqn) else { return Subsystem::default() };
    let namespaces = entry.namespaces.iter().filter_map(|(&nsid, &id)| {
        let served = server.volume(id)?;
        let info = served.volume.info();
        Some((nsid, Namespace { uuid: id.0, info, thin: served.thin }))
    });
    Subsystem {
        nqn: nqn.into(),
        serial: entry.serial.clone(),
        namespaces: namespaces.collect(),
        ..Subsystem::default()
    }
}

/// What discovery tells this host: the subsystems that it may use, at every portal.
fn discovery(catalog: &Catalog, host: &str, local: SocketAddr) -> Subsystem {
    let own = SocketAddr::new(local.ip().to_canonical(), local.port());
    let portals: Vec<SocketAddr> = match catalog.nvme_portals.as_slice() {
        [] => vec![own],
        portals => portals.to_vec(),
    };
    let allowed = |access: &crate::Access| access.admission(host).is_some_and(|a| a.chap.is_none());
    let portals = catalog
        .subsystems
        .iter()
        .filter(|(_, entry)| allowed(&entry.access))
        .flat_map(|(nqn, _)| portals.iter().map(|&address| Portal { nqn: nqn.clone(), address }))
        .collect();
    Subsystem {
        nqn: DISCOVERY_NQN.into(),
        serial: "discovery".into(),
        portals,
        generation: catalog.generation,
        ..Subsystem::default()
    }
}
