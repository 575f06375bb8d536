//! Task management (RFC 7143 11.5 and 11.6, 4.2.3).

use zerocopy::big_endian::U32;

use super::Connection;
use super::action::{Action, CloseReason, RequestId};
use super::send::StatSnUse;
use super::task::{Disposition, TaskPhase};
use crate::pdu::{FINAL, RejectReason, TaskFunction, TaskOutcome, TaskRequest, TaskResponse};
use crate::sequence_number::SequenceNumber;
use crate::stream::Tag;

/// Most requests in progress; one bit each in [`super::task::Task::awaited_by`].
const MAX_REQUESTS: usize = 8;

/// Task management requests in progress.
#[derive(Debug, Default)]
pub(super) struct TaskManagementRequests([Option<PendingFunction>; MAX_REQUESTS]);

#[derive(Clone, Copy, Debug)]
struct PendingFunction {
    itt: u32,
    function: TaskFunction,
    /// Affected tasks that have not ended.
    tasks: usize,
    /// The driver's outcome.
    outcome: Option<TaskOutcome>,
}

impl Connection {
    pub(super) fn on_management(&mut self, request: &TaskRequest) {
        let itt = request.itt.get();
        match request.function() {
            TaskFunction::AbortTask => self.abort_task(request),
            TaskFunction::AbortTaskSet
            | TaskFunction::ClearTaskSet
            | TaskFunction::LogicalUnitReset => {
                let lun = request.lun;
                let tags = self.tasks.select(|t| t.lun == lun);
                self.abort_tasks(request, &tags, None);
            }
            TaskFunction::TargetWarmReset | TaskFunction::TargetColdReset => {
                let tags = self.tasks.select(|_| true);
                self.abort_tasks(request, &tags, None);
            }
            // Only with error recovery level 2.
            TaskFunction::TaskReassign => self.respond(itt, TaskOutcome::ReassignUnsupported),
            _ => self.respond(itt, TaskOutcome::Unsupported),
        }
    }

    /// RFC 7143 11.6.1: response of ABORT TASK if the task does not exist.
    fn abort_task(&mut self, request: &TaskRequest) {
        if let Some(tag) = self.tasks.find(request.referenced.get()) {
            return self.abort_tasks(request, &[tag], Some(TaskOutcome::Complete));
        }
        let (referenced, own) =
            (SequenceNumber(request.ref_cmd_sn.get()), SequenceNumber(request.cmd_sn.get()));
        let expected = self.window.expected();
        // A command that never arrived: it counts as received and aborted.
        let missing = !referenced.is_before(expected)
            && !self.window.max().is_before(referenced)
            && referenced.is_before(own);
        if missing && referenced == expected {
            self.window.on_command(referenced);
            self.window.release();
        }
        let outcome = if missing { TaskOutcome::Complete } else { TaskOutcome::NoTask };
        self.respond(request.itt.get(), outcome);
    }

    /// Aborts tasks of this session. The response waits until all of them have ended and until
    /// there is an outcome: `outcome`, or else the driver's.
    fn abort_tasks(&mut self, request: &TaskRequest, tags: &[Tag], outcome: Option<TaskOutcome>) {
        let free = self.task_management.0.iter().position(Option::is_none);
        let Some(slot) = free else { return self.reject(RejectReason::TooManyImmediate) };
        let function = request.function();
        let (itt, tasks) = (request.itt.get(), tags.len());
        self.task_management.0[slot] = Some(PendingFunction { itt, function, tasks, outcome });
        if outcome.is_none() {
            let id = RequestId(u8::try_from(slot).expect("few requests"));
            let lun = request.lun;
            self.actions.push_back(Action::TaskManagement { id, function, lun });
        }
        for &tag in tags {
            self.abort(tag, 1 << slot);
        }
        self.finish(slot);
    }

    /// Aborts a command, which gets no response; `awaited_by` wait for its end.
    pub(super) fn abort(&mut self, tag: Tag, awaited_by: u8) {
        let Some(task) = self.tasks.get(tag) else { return };
        task.disposition = Disposition::Aborted;
        task.awaited_by |= awaited_by;
        task.data.clear();
        if task.phase == TaskPhase::Ended {
            return self.retire(tag);
        }
        self.request_abort(tag);
        self.unblock();
    }

    /// Answers [`Action::TaskManagement`]. Ignored if no answer is due.
    pub fn task_management_done(&mut self, id: RequestId, outcome: TaskOutcome) {
        let slot = usize::from(id.0);
        if let Some(Some(function)) = self.task_management.0.get_mut(slot)
            && function.outcome.is_none()
        {
            function.outcome = Some(outcome);
            self.finish(slot);
        }
    }

    /// Records the end of a task without a response.
    pub(super) fn task_ended(&mut self, awaited_by: u8) {
        for slot in 0..MAX_REQUESTS {
            if awaited_by & 1 << slot == 0 {
                continue;
            }
            if let Some(function) = &mut self.task_management.0[slot] {
                function.tasks = function.tasks.saturating_sub(1);
            }
            self.finish(slot);
        }
        self.finish_logout();
    }

    fn finish(&mut self, slot: usize) {
        let Some(PendingFunction { itt, function, tasks: 0, outcome: Some(outcome) }) =
            self.task_management.0[slot]
        else {
            return;
        };
        self.task_management.0[slot] = None;
        self.respond(itt, outcome);
        // RFC 7143 11.5.1: a cold reset ends all sessions.
        if function == TaskFunction::TargetColdReset && outcome == TaskOutcome::Complete {
            self.end(CloseReason::Reset);
        }
    }

    fn respond(&mut self, itt: u32, outcome: TaskOutcome) {
        let mut pdu = TaskResponse::zeroed();
        pdu.flags = FINAL;
        pdu.response = outcome.0;
        pdu.itt = U32::new(itt);
        self.send(pdu, StatSnUse::Advance);
    }
}
