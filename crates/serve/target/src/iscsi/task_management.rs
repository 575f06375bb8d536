//! Task management beyond one session (SAM-5 clause 7): the machine ends this session's tasks, this
//! module those of other sessions, and answers when all have ended.

use std::rc::Rc;

use iscsi::pdu::{TaskFunction, TaskOutcome};
use iscsi::target::RequestId;
use reservation::Change;
use scsi::{Address, AttentionScope, UnitAttention};

use super::InitiatorConnection;
use crate::iscsi_sessions::{Event, Session, SessionUnit, TaskBarrier};

impl InitiatorConnection {
    pub(super) fn manage_tasks(&mut self, id: RequestId, function: TaskFunction, lun: [u8; 8]) {
        let Some(session) = self.session.clone() else {
            return self.machine.task_management_done(id, TaskOutcome::NoLun);
        };
        // Created only where its end is the only answer: a second answer could complete the next
        // request with this id.
        let barrier = || Rc::new(TaskBarrier { inbox: self.context.inbox.clone(), id });
        let (unit, away) = match Address::parse(lun) {
            Address::Unit(lun) => (session.unit_at(lun), session.unavailability(lun)),
            Address::ReportLuns | Address::Unsupported => (None, None),
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
            // Only this session's tasks: the machine has ended them.
            (TaskFunction::AbortTaskSet, Some(_)) => self.finish_task_management(id),
            // It has no commands, and returns as if just powered on.
            (_, None) if away.is_some() => self.finish_task_management(id),
            (_, None) => {
                self.machine.task_management_done(id, TaskOutcome::NoLun);
            }
            (_, Some(_)) => self.machine.task_management_done(id, TaskOutcome::Unsupported),
        }
    }

    /// Ends all initiators' commands to a unit: here at once, on all nodes through the shared
    /// state.
    fn clear_tasks(&self, session: &Rc<Session>, unit: &SessionUnit, barrier: &Rc<TaskBarrier>) {
        self.abort_others(session, unit, barrier);
        if let Some(party) = unit.caller.nexus().cloned() {
            let barrier = Rc::clone(barrier);
            let (change, wanted) = (Change::ClearTaskSet, session.liveness_check());
            return unit
                .served
                .volume
                .change_reservations(party, change, wanted, move |_| drop(barrier));
        }
        let others = AttentionScope::Except(unit.nexus);
        unit.state.borrow_mut().establish_attention(others, UnitAttention::CommandsCleared);
    }

    /// Resets a unit: here at once, on all nodes through the shared state.
    fn reset(
        &self,
        session: &Rc<Session>,
        unit: &SessionUnit,
        target: bool,
        barrier: &Rc<TaskBarrier>,
    ) {
        self.abort_others(session, unit, barrier);
        if let Some(party) = unit.caller.nexus().cloned() {
            let barrier = Rc::clone(barrier);
            let done = move |_| drop(barrier);
            let (change, wanted) =
                (Change::Reset { whole_target: target }, session.liveness_check());
            return unit.served.volume.change_reservations(party, change, wanted, done);
        }
        let what = if target { UnitAttention::TargetReset } else { UnitAttention::UnitReset };
        let mut state = unit.state.borrow_mut();
        state.reset();
        state.establish_attention(AttentionScope::All, what);
    }

    fn abort_others(&self, session: &Rc<Session>, unit: &SessionUnit, barrier: &Rc<TaskBarrier>) {
        let id = unit.served.id;
        for other in self.server().iscsi.other_sessions(session, id) {
            let barrier = Some(Rc::clone(barrier));
            other.send_event(Event::Abort { unit: Some(id), barrier });
        }
    }

    pub(super) fn finish_task_management(&mut self, id: RequestId) {
        self.machine.task_management_done(id, TaskOutcome::Complete);
    }
}
