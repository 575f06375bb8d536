//! The controllers of one core, by identifier.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::time::Duration;

use crate::connection::Queue;
use crate::controller::{Controller, Limits, Role, Subsystem, valid_size};
use crate::entry::Completion;
use crate::fabrics::{CNTLID_DYNAMIC, Connect};

/// A queue that Connect has just made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connected {
    /// The controller it belongs to; also what Connect returns to the host.
    pub cntlid: u16,
    /// The queue, for [`crate::Connection::connected`].
    pub queue: Queue,
}

/// The controllers of one core.
///
/// Identifiers are handed out round robin from a range of its own, so that they are unique among
/// all cores and nodes that serve a subsystem (hosts refuse duplicates), say where a controller
/// lives, and are not used again soon.
#[derive(Debug)]
pub struct Controllers {
    live: BTreeMap<u16, Controller>,
    ids: RangeInclusive<u16>,
    next: u16,
}

impl Controllers {
    /// No controllers; new ones get identifiers out of `ids`, which must not be empty and lie
    /// within 1 to FFEFh.
    #[must_use]
    pub fn new(ids: RangeInclusive<u16>) -> Self {
        let next = *ids.start();
        Self { live: BTreeMap::new(), ids, next }
    }

    /// From now on new controllers get identifiers out of `ids`, which is as [`Self::new`] wants
    /// it. Those that live keep theirs.
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

    /// Ends an association: its admin queue is gone. The driver closes its I/O queues.
    pub fn remove(&mut self, cntlid: u16) -> Option<Controller> {
        self.live.remove(&cntlid)
    }

    /// Connects an admin queue, and thus creates a controller. Whether this host may reach this
    /// subsystem has been decided. `now` is on any clock that the controller's timer is then
    /// called by.
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
    ) -> Result<Connected, Completion> {
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
        Ok(connected(cntlid, connect))
    }

    /// Connects an I/O queue to a controller of the same host.
    ///
    /// # Errors
    /// The completion that refuses it.
    pub fn connect_io(&mut self, connect: &Connect) -> Result<Connected, Completion> {
        let controller = self.live.get_mut(&connect.cntlid).filter(|c| c.belongs_to(connect));
        let controller = controller.ok_or_else(Connect::refuse_controller)?;
        controller.connect_io(connect)?;
        Ok(connected(connect.cntlid, connect))
    }

    fn free_id(&mut self) -> Option<u16> {
        let (first, last) = (*self.ids.start(), *self.ids.end());
        let order = (self.next..=last).chain(first..self.next);
        let id = order.into_iter().find(|id| !self.live.contains_key(id))?;
        self.next = if id == last { first } else { id + 1 };
        Some(id)
    }
}

fn connected(cntlid: u16, connect: &Connect) -> Connected {
    let queue = Queue {
        id: connect.qid,
        entries: connect.sqsize.saturating_add(1),
        flow_control: connect.flow_control,
    };
    Connected { cntlid, queue }
}
