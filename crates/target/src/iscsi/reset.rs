//! Task management beyond one session (SAM-5 clause 7): the machine ends this session's tasks,
//! this module the other sessions', and answers when those have ended too.

use std::rc::Rc;

use iscsi::pdu::{TaskFunction, TaskOutcome};
use iscsi::target::RequestId;
use scsi::{Address, Attention, Reset, Whom};

use super::session::{Session, Unit};
use super::{Event, Initiator};
use crate::conn::Inbox;

/// Held by every task that a request waits for; the last one to let go reports.
#[derive(Debug)]
pub(crate) struct Barrier {
    inbox: Inbox<Event>,
    id: RequestId,
}

impl Drop for Barrier {
    fn drop(&mut self) {
        self.inbox.push(Event::TaskManagementDone { id: self.id });
    }
}

impl Initiator {
    pub(super) fn manage_tasks(&mut self, id: RequestId, function: TaskFunction, lun: [u8; 8]) {
        let Some(session) = self.session.clone() else {
            return self.machine.task_management_done(id, TaskOutcome::NoLun);
        };
        // Made only where its end is the one answer: a second one could end the next request
        // that gets this id.
        let barrier = || Rc::new(Barrier { inbox: self.place.inbox.clone(), id });
        let unit = match Address::parse(lun) {
            Address::Unit(lun) => session.at(lun),
            Address::ReportLuns | Address::Nowhere => None,
        };
        match (function, unit) {
            (TaskFunction::TargetWarmReset | TaskFunction::TargetColdReset, _) => {
                let barrier = barrier();
                for unit in session.units() {
                    self.abort_others(&session, &unit, &barrier);
                    unit.state.borrow_mut().reset(Reset::Target);
                }
            }
            (TaskFunction::LogicalUnitReset, Some(unit)) => {
                self.abort_others(&session, &unit, &barrier());
                unit.state.borrow_mut().reset(Reset::Unit);
            }
            (TaskFunction::ClearTaskSet, Some(unit)) => {
                self.abort_others(&session, &unit, &barrier());
                let others = Whom::AllBut(unit.nexus);
                unit.state.borrow_mut().attend(others, Attention::CommandsCleared);
            }
            // Only this session's tasks: the machine has seen to them.
            (TaskFunction::AbortTaskSet, Some(_)) => self.managed(id),
            (_, None) => {
                self.machine.task_management_done(id, TaskOutcome::NoLun);
            }
            (_, Some(_)) => self.machine.task_management_done(id, TaskOutcome::Unsupported),
        }
    }

    fn abort_others(&self, session: &Rc<Session>, unit: &Unit, barrier: &Rc<Barrier>) {
        let id = unit.served.id;
        for other in self.server().iscsi.others(session, id) {
            let barrier = Rc::clone(barrier);
            other.inbox.push(Event::Abort { unit: Some(id), barrier });
        }
    }

    pub(super) fn managed(&mut self, id: RequestId) {
        self.machine.task_management_done(id, TaskOutcome::Complete);
    }
}
