//! The controllers of one core, by identifier.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::time::Duration;

use crate::connection::Queue;
use crate::controller::{Controller, Limits, Role, Subsystem, valid_size};
use crate::entry::Completion;
use crate::fabrics::{CNTLID_DYNAMIC, Connect};

/// A newly connected queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectedQueue {
    /// The controller it belongs to; also what Connect returns to the host.
    pub cntlid: u16,
    /// The queue, for [`crate::Connection::queue_connected`].
    pub queue: Queue,
}

/// The controllers of one core.
///
/// Identifiers are allocated round-robin from a separate range per core, so that they are unique
/// among all cores and nodes that serve a subsystem (hosts refuse duplicates), identify the core of
/// a controller, and are not reused soon.
#[derive(Debug)]
pub struct Controllers {
    live: BTreeMap<u16, Controller>,
    ids: RangeInclusive<u16>,
    next: u16,
}

impl Controllers {
    /// No controllers; new ones get identifiers from `ids`, which must not be empty and lie within
    /// 1 to FFEFh.
    #[must_use]
    pub fn new(ids: RangeInclusive<u16>) -> Self {
        let next = *ids.start();
        Self { live: BTreeMap::new(), ids, next }
    }

    /// Sets the range of identifiers for new controllers; see [`Self::new`]. Existing ones keep
    /// theirs.
    pub fn set_ids(&mut self, ids: RangeInclusive<u16>) {
        if self.ids != ids {
            (self.next, self.ids) = (*ids.start(), ids);
        }
    }

    /// The controllers, in order of their identifiers.
    pub fn iter(&self) -> impl Iterator<Item = &Controller> {
        self.live.values()
    }

    /// The controllers, in order of their identifiers.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Controller> {
        self.live.values_mut()
    }

    /// A controller.
    #[must_use]
    pub fn get(&self, cntlid: u16) -> Option<&Controller> {
        self.live.get(&cntlid)
    }

    /// A controller.
    pub fn get_mut(&mut self, cntlid: u16) -> Option<&mut Controller> {
        self.live.get_mut(&cntlid)
    }

    /// Ends an association whose admin queue has ended. The driver closes its I/O queues.
    pub fn remove(&mut self, cntlid: u16) -> Option<Controller> {
        self.live.remove(&cntlid)
    }

    /// Connects an admin queue and creates its controller. Access of the host to the subsystem has
    /// been checked. `now` is on the clock that the controller's timer is called with.
    ///
    /// # Errors
    /// The completion that refuses it.
    pub fn connect_admin(
        &mut self,
        connect: &Connect,
        subsystem: &Rc<Subsystem>,
        role: Role,
        limits: Limits,
        now: Duration,
    ) -> Result<ConnectedQueue, Completion> {
        if connect.qid != 0 {
            return Err(Connect::refuse_queue());
        }
        if connect.cntlid != CNTLID_DYNAMIC {
            return Err(Connect::refuse_controller());
        }
        if !valid_size(connect.sqsize, &limits) {
            return Err(Connect::refuse_size());
        }
        let cntlid = self.free_id().ok_or_else(Connect::refuse_busy)?;
        let subsystem = Rc::clone(subsystem);
        let controller = Controller::new(cntlid, subsystem, connect, role, limits, now);
        self.live.insert(cntlid, controller);
        Ok(connected_queue(cntlid, connect))
    }

    /// Connects an I/O queue to a controller of the same host.
    ///
    /// # Errors
    /// The completion that refuses it.
    pub fn connect_io(&mut self, connect: &Connect) -> Result<ConnectedQueue, Completion> {
        let controller = self.live.get_mut(&connect.cntlid).filter(|c| c.belongs_to(connect));
        let controller = controller.ok_or_else(Connect::refuse_controller)?;
        controller.connect_io(connect)?;
        Ok(connected_queue(connect.cntlid, connect))
    }

    fn free_id(&mut self) -> Option<u16> {
        let (first, last) = (*self.ids.start(), *self.ids.end());
        let order = (self.next..=last).chain(first..self.next);
        let id = order.into_iter().find(|id| !self.live.contains_key(id))?;
        self.next = if id == last { first } else { id + 1 };
        Some(id)
    }
}

fn connected_queue(cntlid: u16, connect: &Connect) -> ConnectedQueue {
    let queue = Queue {
        id: connect.qid,
        entries: connect.sqsize.saturating_add(1),
        flow_control: connect.flow_control,
    };
    ConnectedQueue { cntlid, queue }
}
