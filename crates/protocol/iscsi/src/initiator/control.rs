//! Non-SCSI requests: pings, text, task management, logout; and the target's asynchronous messages.

use std::time::Duration;

use super::data::sense;
use super::request::{Answer, AsyncNotification, CloseReason, LostRequest};
use super::tasks::TaskKind;
use super::{Connection, MAX_NOTIFICATIONS, MAX_PINGS, Phase};
use crate::pdu::{
    AsyncEvent, AsyncMessage, BHS_LEN, CONTINUE, FINAL, Header, LogoutOutcome, LogoutResponse,
    NO_TAG, NopIn, Opcode, Reject, RejectReason, TaskOutcome, TaskResponse, TextResponse,
};
use crate::stream::Tag;

/// Most text of one answer in bytes, over all its PDUs: some ten thousand targets.
const MAX_ANSWER: usize = 1 << 20;

impl Connection {
    /// RFC 7143 11.19.
    pub(super) fn on_nop(&mut self, pdu: &NopIn) -> Result<(), &'static str> {
        let (itt, ttt) = (pdu.itt.get(), pdu.ttt.get());
        if itt != NO_TAG {
            let tag = self
                .find_request(itt, |kind| matches!(kind, TaskKind::Ping | TaskKind::KeepAlive))?;
            if self.tasks.get(tag).is_some_and(|t| t.kind == TaskKind::KeepAlive) {
                self.timers.ping_answered();
            }
            self.answer(tag, Answer::Pong);
        } else if ttt != NO_TAG {
            if self.unanswered_pings.len() >= MAX_PINGS {
                return Err("too many pings");
            }
            self.unanswered_pings.push_back((pdu.lun, ttt));
        }
        Ok(())
    }

    /// RFC 7143 11.11.
    pub(super) fn on_text(&mut self, pdu: &TextResponse, text: &[u8]) -> Result<(), &'static str> {
        let tag = self.find_request(pdu.itt.get(), |kind| kind == TaskKind::Text)?;
        let (last, more) = (pdu.flags & FINAL != 0, pdu.flags & CONTINUE != 0);
        let ttt = pdu.ttt.get();
        if last && more || last != (ttt == NO_TAG) {
            return Err("text that is both final and continued");
        }
        let all = self.text.get_or_insert_default();
        if all.len() + text.len() > MAX_ANSWER {
            return Err("text too long");
        }
        all.extend_from_slice(text);
        if last {
            let all = std::mem::take(all);
            self.answer(tag, Answer::Text(all));
        } else {
            self.send_text(pdu.itt, (pdu.lun, ttt), &[]);
        }
        Ok(())
    }

    /// RFC 7143 11.6. Responses are ordered: a command that completed before its abort has had its
    /// own status by now; any other gets none.
    pub(super) fn on_task_response(&mut self, pdu: &TaskResponse) -> Result<(), &'static str> {
        let is = |kind| matches!(kind, TaskKind::Abort(_) | TaskKind::ResetUnit(_));
        let tag = self.find_request(pdu.itt.get(), is)?;
        let outcome = TaskOutcome(pdu.response);
        let Some(task) = self.tasks.get(tag) else { return Ok(()) };
        let (kind, asked_at) = (task.kind, task.queued_at);
        let victims = match (kind, outcome) {
            (TaskKind::Abort(victim), TaskOutcome::Complete | TaskOutcome::NoTask) => {
                // The slot may belong to another command by now.
                let is_there = self.tasks.get(victim).is_some_and(|t| t.was_sent_before(asked_at));
                is_there.then_some(victim).into_iter().collect()
            }
            (TaskKind::ResetUnit(lun), TaskOutcome::Complete) => {
                self.tasks.select(|t| t.lun == lun && t.was_sent_before(asked_at))
            }
            _ => Vec::new(),
        };
        for victim in victims {
            self.complete(victim, Err(LostRequest::Aborted));
        }
        self.answer(tag, Answer::TaskManagement(outcome));
        Ok(())
    }

    /// Drops an unsent command, if it is there.
    pub(super) fn abort_unsent(&mut self, tag: Tag, victim: Tag) {
        let before = self.pending.len();
        self.pending.retain(|t| *t != victim);
        let found = self.pending.len() < before;
        if found {
            self.complete(victim, Err(LostRequest::Unsent));
        }
        let outcome = if found { TaskOutcome::Complete } else { TaskOutcome::NoTask };
        self.complete(tag, Ok(Answer::TaskManagement(outcome)));
    }

    /// RFC 7143 11.15.
    pub(super) fn on_logout_response(&mut self, pdu: &LogoutResponse) -> Result<(), &'static str> {
        let tag = self.find_request(pdu.itt.get(), |kind| {
            matches!(kind, TaskKind::Logout | TaskKind::RequestedLogout)
        })?;
        self.complete(tag, Ok(Answer::Logout(LogoutOutcome(pdu.response))));
        self.finish(CloseReason::LoggedOut);
        Ok(())
    }

    /// RFC 7143 11.9.
    pub(super) fn on_async(&mut self, pdu: &AsyncMessage, data: &[u8]) -> Result<(), &'static str> {
        match AsyncEvent(pdu.event) {
            AsyncEvent::Scsi => {
                let sense = sense(data, self.receiver.segment_len())?.into();
                self.push_notification(AsyncNotification::Scsi { lun: pdu.lun, sense });
            }
            // A target that requests renegotiation gets a new session.
            AsyncEvent::LogoutRequest | AsyncEvent::Negotiation => {
                self.on_logout_requested(pdu.parameter3.get());
            }
            AsyncEvent::ConnectionDrop | AsyncEvent::SessionDrop => {
                self.finish(CloseReason::DroppedByTarget { wait_s: pdu.parameter2.get() });
            }
            // FastAbort was not negotiated; vendor events are ignored.
            _ => {}
        }
        Ok(())
    }

    fn push_notification(&mut self, notice: AsyncNotification) {
        if self.notifications.len() < MAX_NOTIFICATIONS {
            self.notifications.push_back(notice);
        }
    }

    /// Handles a target's request to end the session.
    fn on_logout_requested(&mut self, within_s: u16) {
        if !matches!(self.phase, Phase::Running) {
            return;
        }
        let within = Duration::from_secs(u64::from(within_s).max(1));
        self.phase = Phase::LogoutRequested(self.timers.now() + within);
        self.push_notification(AsyncNotification::LogoutRequest { within_s });
        for tag in std::mem::take(&mut self.pending) {
            self.complete(tag, Err(LostRequest::Unsent));
        }
        self.logout_if_idle();
    }

    /// Logs out once no command is in flight, if the target requested the end of the session.
    pub(super) fn logout_if_idle(&mut self) {
        if matches!(self.phase, Phase::LogoutRequested(_))
            && self.tasks.commands() == 0
            && self
                .tasks
                .select(|t| matches!(t.kind, TaskKind::Logout | TaskKind::RequestedLogout))
                .is_empty()
        {
            self.send_non_scsi(TaskKind::RequestedLogout, None, &[]);
        }
    }

    /// RFC 7143 11.17. A rejected command leaves a hole in the command order, which ends the
    /// session; a rejected non-command request just ends.
    pub(super) fn on_reject(&mut self, pdu: &Reject, data: &[u8]) -> Result<(), &'static str> {
        let reason = RejectReason(pdu.reason);
        let rejected: Option<&[u8; BHS_LEN]> = data.first_chunk();
        let rejected = Header::of(rejected.ok_or("a Reject of no known PDU")?);
        let kind = match rejected.opcode() {
            Opcode::NopOut | Opcode::TaskRequest | Opcode::TextRequest => self
                .tasks
                .find(rejected.itt.get())
                .filter(|tag| self.tasks.get(*tag).is_some_and(|t| t.kind != TaskKind::Scsi)),
            _ => None,
        };
        match kind {
            Some(tag) => {
                if self.tasks.get(tag).is_some_and(|t| t.kind == TaskKind::KeepAlive) {
                    self.timers.ping_answered();
                }
                self.answer(tag, Answer::Rejected(reason));
            }
            None => self.finish(CloseReason::Rejected(reason)),
        }
        Ok(())
    }
}
