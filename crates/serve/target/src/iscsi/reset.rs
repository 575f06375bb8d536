//! Task management beyond one session (SAM-5 clause 7): the machine ends this session's tasks,
//! this module the other sessions', and answers when those have ended too.

use std::rc::Rc;

use iscsi::pdu::{TaskFunction, TaskOutcome};
use iscsi::target::RequestId;
use reservation::Change;
use scsi::{Address, Attention, Whom};

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
        let (unit, away) = match Address::parse(lun) {
            Address::Unit(lun) => (session.at(lun), session.away(lun)),
            Address::ReportLuns | Address::Nowhere => (None, None),
        };
        match (function, unit) {
            (TaskFunction::TargetWarmReset | TaskFunction::TargetColdReset, _) => {
                let barrier = barrier();
                for unit in session.units() {
                    self.reset(&session, &unit, true, &barrier);
                }
            }
            (TaskFunction::LogicalUnitReset, Some(unit)) => {
                self.reset(&session, &unit, false, &barrier());
            }
            (TaskFunction::ClearTaskSet, Some(unit)) => {
                self.clear_tasks(&session, &unit, &barrier());
            }
            // Only this session's tasks: the machine has seen to them.
            (TaskFunction::AbortTaskSet, Some(_)) => self.managed(id),
            // It has no commands, and comes back as if it was just powered on.
            (_, None) if away.is_some() => self.managed(id),
            (_, None) => {
                self.machine.task_management_done(id, TaskOutcome::NoLun);
            }
            (_, Some(_)) => self.machine.task_management_done(id, TaskOutcome::Unsupported),
        }
    }

    /// Ends everybody's commands to a unit: here at once, at all nodes by what they know together.
    fn clear_tasks(&self, session: &Rc<Session>, unit: &Unit, barrier: &Rc<Barrier>) {
        self.abort_others(session, unit, barrier);
        if let Some(party) = unit.caller.party().cloned() {
            let barrier = Rc::clone(barrier);
            let (change, wanted) = (Change::ClearTasks, session.lives());
            return unit.served.volume.alter(party, change, wanted, move |_| drop(barrier));
        }
        let others = Whom::AllBut(unit.nexus);
        unit.state.borrow_mut().attend(others, Attention::CommandsCleared);
    }

    /// Resets a unit: here at once, at all nodes by what they know together.
    fn reset(&self, session: &Rc<Session>, unit: &Unit, target: bool, barrier: &Rc<Barrier>) {
        self.abort_others(session, unit, barrier);
        if let Some(party) = unit.caller.party().cloned() {
            let barrier = Rc::clone(barrier);
            let done = move |_| drop(barrier);
            let (change, wanted) = (Change::Reset { target }, session.lives());
            return unit.served.volume.alter(party, change, wanted, done);
        }
        let what = if target { Attention::TargetReset } else { Attention::UnitReset };
        let mut state = unit.state.borrow_mut();
        state.reset();
        state.attend(Whom::All, what);
    }

    fn abort_others(&self, session: &Rc<Session>, unit: &Unit, barrier: &Rc<Barrier>) {
        let id = unit.served.id;
        for other in self.server().iscsi.others(session, id) {
            let barrier = Some(Rc::clone(barrier));
            other.tell(Event::Abort { unit: Some(id), barrier });
        }
    }

    pub(super) fn managed(&mut self, id: RequestId) {
        self.machine.task_management_done(id, TaskOutcome::Complete);
    }
}
