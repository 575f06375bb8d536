//! The NVMe controllers of one core: their identifiers, queues and timers, the host's view of the
//! catalog, and the events of their connections.

mod event;
pub(crate) mod host_catalog;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::Access;
use nvme::auth::{SequenceCounter, TransactionRandomness};
use nvme::{
    Completion, Connect, ConnectedQueue, Controller, Controllers, Limits, Namespace, Role,
    Subsystem,
};
use rt::Core;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::catalog::{Catalog, NodeIndex, VolumeId};
use crate::connection::Inbox;
use crate::served_volumes::{ServedVolumes, VolumeSpace};

pub(crate) use event::{AbortRequest, Event};

/// Controller identifiers per core if the node shares nothing: they are unique in the node.
const CONTROLLER_IDS_PER_CORE: u16 = 1000;

/// All NVMe controllers of a core.
#[derive(Debug)]
pub(crate) struct NvmeCore {
    /// Sequence numbers of authentications.
    sequence: RefCell<SequenceCounter>,
    /// Permits for Diffie-Hellman computations.
    dh_permits: Arc<Semaphore>,
    controllers: RefCell<Controllers>,
    /// Identifiers of controllers if the node shares nothing.
    local_ids: RangeInclusive<u16>,
    associations: RefCell<BTreeMap<u16, Association>>,
    /// The zero of the controllers' clock.
    began: Instant,
}

/// The connections of a controller.
#[derive(Debug)]
struct Association {
    queues: BTreeMap<u16, Inbox<Event>>,
    /// Whether all of them use TLS; otherwise none does.
    is_protected: bool,
    /// Wakes the timer task of the controller: it has changed, or is gone.
    timer: Rc<Notify>,
}

/// A queue of a controller, as its connection serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueRef {
    pub(crate) cntlid: u16,
    pub(crate) qid: u16,
}

impl NvmeCore {
    /// No controllers; new ones get identifiers of `core`.
    pub(crate) fn new(core: &Core) -> Self {
        let mut begin = [0; 4];
        core.fill_random(&mut begin);
        let begin = u32::from_le_bytes(begin);
        let core = u16::try_from(core.id()).unwrap_or(u16::MAX);
        let first = core
            .saturating_mul(CONTROLLER_IDS_PER_CORE)
            .min(u16::MAX - 2 * CONTROLLER_IDS_PER_CORE)
            + 1;
        let own_ids = first..=first + CONTROLLER_IDS_PER_CORE - 1;
        Self {
            sequence: RefCell::new(SequenceCounter::new(begin)),
            dh_permits: Arc::new(Semaphore::new(1)),
            controllers: RefCell::new(Controllers::new(own_ids.clone())),
            local_ids: own_ids,
            associations: RefCell::default(),
            began: Instant::now(),
        }
    }

    /// New controllers get identifiers that no other node assigns. A subsystem belongs to one core
    /// of each node, so the cores of a node may use the same ones; identifiers of discovery
    /// controllers, which exist on all cores, are never compared.
    pub(crate) fn set_node(&self, catalog: &Catalog) {
        let alone = catalog.node == NodeIndex::default() && catalog.shared.is_empty();
        let ids = if alone { self.local_ids.clone() } else { catalog.node.controller_ids() };
        self.controllers.borrow_mut().set_ids(ids);
    }

    /// Reports a volume's new access state to its hosts.
    pub(crate) fn access_changed(&self, id: VolumeId, access: Access) {
        let mut answer = Vec::new();
        for controller in self.controllers.borrow_mut().iter_mut() {
            let of = |(_, ns): &(&u32, &Namespace)| ns.uuid == id.0 && ns.is_shared;
            let namespaces: Vec<_> =
                controller.namespaces().iter().filter(of).map(|(nsid, _)| *nsid).collect();
            for nsid in namespaces {
                controller.set_ana(nsid, host_catalog::ana_state(access));
                answer.push(controller.id());
            }
        }
        for cntlid in answer {
            if let Some(admin) = self.queue(QueueRef { cntlid, qid: 0 }) {
                admin.push(Event::Controller);
            }
        }
    }

    /// Reports a volume's new space usage to hosts that have asked for it.
    pub(crate) fn space_changed(&self, id: VolumeId, space: VolumeSpace) {
        for controller in self.controllers.borrow_mut().iter_mut() {
            let of = controller.namespaces().iter().filter(|(_, ns)| ns.uuid == id.0);
            let of: Vec<_> =
                of.map(|(nsid, ns)| (*nsid, host_catalog::used_blocks(space, &ns.info))).collect();
            of.into_iter().for_each(|(nsid, blocks)| controller.set_used(nsid, blocks));
        }
    }

    /// Sets the ANA states of a controller's namespaces.
    pub(crate) fn set_states(&self, volumes: &ServedVolumes, cntlid: u16) {
        self.with_controller(cntlid, |controller| {
            let catalog = volumes.catalog();
            let entry = catalog.subsystems.get(&controller.subsystem().nqn);
            for (nsid, ns) in controller.namespaces().clone() {
                let is_away = entry.is_some_and(|entry| entry.unavailable.contains_key(&nsid));
                let access = match volumes.get(VolumeId(ns.uuid)).filter(|_| !is_away) {
                    // Only this node serves it, and it does.
                    Some(served) => served.access_state(&catalog).unwrap_or_default(),
                    None => Access::Unavailable,
                };
                controller.set_ana(nsid, host_catalog::ana_state(access));
            }
        });
    }

    /// The random values of an authentication transaction.
    pub(crate) fn randomness(&self, core: &Core) -> TransactionRandomness {
        let mut bytes = [0; TransactionRandomness::LEN];
        core.fill_random(&mut bytes);
        TransactionRandomness::new(self.sequence.borrow_mut().take(), &bytes)
    }

    /// A permit for a Diffie-Hellman computation: one connection of a core at a time.
    pub(crate) async fn dh_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.dh_permits).acquire_owned().await.ok()
    }

    /// Calls `f` with a controller, if it exists.
    pub(crate) fn with_controller<T>(
        &self,
        cntlid: u16,
        f: impl FnOnce(&mut Controller) -> T,
    ) -> Option<T> {
        self.controllers.borrow_mut().get_mut(cntlid).map(f)
    }

    /// Whether the keep alive of the controller has expired, so that commands of its host must not
    /// be executed.
    pub(crate) fn is_keep_alive_overdue(&self, cntlid: u16, now: Instant) -> bool {
        let now = now - self.began;
        self.with_controller(cntlid, |c| c.is_keep_alive_overdue(now)).unwrap_or(false)
    }

    /// The inbox of a queue's connection.
    pub(crate) fn queue(&self, queue: QueueRef) -> Option<Inbox<Event>> {
        self.associations.borrow().get(&queue.cntlid)?.queues.get(&queue.qid).cloned()
    }

    /// Wakes the controller's timer task.
    pub(crate) fn timer_changed(&self, cntlid: u16) {
        if let Some(association) = self.associations.borrow().get(&cntlid) {
            association.timer.notify_one();
        }
    }

    /// A connection has ended. With the admin queue the controller ends.
    pub(crate) fn remove_queue(&self, queue: QueueRef) {
        if queue.qid == 0 {
            return self.end(queue.cntlid, "the admin queue was closed");
        }
        self.with_controller(queue.cntlid, |c| c.io_disconnected(queue.qid));
        if let Some(association) = self.associations.borrow_mut().get_mut(&queue.cntlid) {
            association.queues.remove(&queue.qid);
            if let Some(admin) = association.queues.get(&0) {
                // It may have waited for this queue to leave.
                admin.push(Event::Controller);
            }
        }
    }

    /// Whether I/O queues of a controller are connected.
    pub(crate) fn has_io_queues(&self, cntlid: u16) -> bool {
        let associations = self.associations.borrow();
        associations.get(&cntlid).is_some_and(|a| a.queues.range(1..).next().is_some())
    }

    /// Ends an association: removes the controller and closes its connections.
    pub(crate) fn end(&self, cntlid: u16, why: &'static str) {
        self.controllers.borrow_mut().remove(cntlid);
        let Some(association) = self.associations.borrow_mut().remove(&cntlid) else { return };
        association.timer.notify_one();
        for inbox in association.queues.into_values() {
            inbox.push(Event::QueueGone(why));
        }
    }

    /// Closes the connections of the I/O queues after a controller reset.
    pub(crate) fn close_io(&self, cntlid: u16) {
        let mut associations = self.associations.borrow_mut();
        let Some(association) = associations.get_mut(&cntlid) else { return };
        let io = association.queues.split_off(&1);
        drop(associations);
        for inbox in io.into_values() {
            inbox.push(Event::QueueGone("the controller was reset"));
        }
    }

    pub(crate) fn add_queue(
        &self,
        connected: &ConnectedQueue,
        inbox: &Inbox<Event>,
        is_protected: bool,
    ) {
        let mut associations = self.associations.borrow_mut();
        let new = || Association { queues: BTreeMap::new(), is_protected, timer: Rc::default() };
        let association = associations.entry(connected.cntlid).or_insert_with(new);
        association.queues.insert(connected.queue.id, inbox.clone());
    }

    /// Whether the queues of a controller use TLS, if there are any.
    pub(crate) fn protection(&self, cntlid: u16) -> Option<bool> {
        self.associations.borrow().get(&cntlid).map(|a| a.is_protected)
    }

    /// Connects an I/O queue.
    pub(crate) fn connect_io(&self, connect: &Connect) -> Result<ConnectedQueue, Completion> {
        self.controllers.borrow_mut().connect_io(connect)
    }

    /// Connects an admin queue.
    pub(crate) fn connect_admin(
        &self,
        volumes: &ServedVolumes,
        connect: &Connect,
        subsystem: &Rc<Subsystem>,
        role: Role,
        max_transfer_bytes: u32,
    ) -> Result<ConnectedQueue, Completion> {
        let limits = Limits { max_transfer_bytes, ..Limits::default() };
        let now = self.now();
        let mut controllers = self.controllers.borrow_mut();
        let connected = controllers.connect_admin(connect, subsystem, role, limits, now)?;
        drop(controllers);
        self.set_states(volumes, connected.cntlid);
        Ok(connected)
    }

    /// Does what a controller's timer demands by now. Returns when it has to be done again: at a
    /// time, if there is one, and earlier if the timer changes. `None` if the controller is gone.
    pub(crate) fn run_timer(&self, cntlid: u16) -> Option<(Option<Instant>, Rc<Notify>)> {
        loop {
            let next = self.with_controller(cntlid, |c| c.next_timer())?;
            let changed = Rc::clone(&self.associations.borrow().get(&cntlid)?.timer);
            let now = self.now();
            if next.is_none_or(|at| at > now) {
                return Some((next.map(|at| self.began + at), changed));
            }
            self.with_controller(cntlid, |c| c.on_timer(now));
            if let Some(inbox) = self.queue(QueueRef { cntlid, qid: 0 }) {
                inbox.push(Event::Controller);
            }
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}
