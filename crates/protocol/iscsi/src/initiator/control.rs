//! What is no SCSI command: pings, text, task management, logout, and what targets say by themselves.

use std::time::Duration;

use super::data::sense;
use super::request::{Answer, End, Lost, Notice};
use super::tasks::Kind;
use super::{Connection, MAX_NOTICES, MAX_PINGS, Phase};
use crate::pdu::{
    AsyncEvent, AsyncMessage, BHS, CONTINUE, FINAL, Header, LogoutOutcome, LogoutResponse, NO_TAG,
    NopIn, Opcode, Reject, RejectReason, TaskOutcome, TaskResponse, TextResponse,
};
use crate::stream::Tag;

/// Most text of one answer in bytes, however many PDUs it comes in: some ten thousand targets.
const MAX_ANSWER: usize = 1 << 20;

impl Connection {
    /// RFC 7143 11.19.
    pub(super) fn on_nop(&mut self, pdu: &NopIn) -> Result<(), &'static str> {
        let (itt, ttt) = (pdu.itt.get(), pdu.ttt.get());
        if itt != NO_TAG {
            let tag = self.expect(itt, |kind| matches!(kind, Kind::Ping | Kind::KeepAlive))?;
            if self.tasks.get(tag).is_some_and(|t| t.kind == Kind::KeepAlive) {
                self.clock.ponged();
            }
            self.answer(tag, Answer::Pong);
        } else if ttt != NO_TAG {
            if self.pings.len() >= MAX_PINGS {
                return Err("pings without end");
            }
            self.pings.push_back((pdu.lun, ttt));
        }
        Ok(())
    }

    /// RFC 7143 11.11.
    pub(super) fn on_text(&mut self, pdu: &TextResponse, text: &[u8]) -> Result<(), &'static str> {
        let tag = self.expect(pdu.itt.get(), |kind| kind == Kind::Text)?;
        let (last, more) = (pdu.flags & FINAL != 0, pdu.flags & CONTINUE != 0);
        let ttt = pdu.ttt.get();
        if last && more || last != (ttt == NO_TAG) {
            return Err("text that ends and goes on");
        }
        let all = self.text.get_or_insert_default();
        if all.len() + text.len() > MAX_ANSWER {
            return Err("text without end");
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

    /// RFC 7143 11.6. Responses are ordered: a command that was over before it was aborted has had its own
    /// status by now, and one that has not gets none any more.
    pub(super) fn on_managed(&mut self, pdu: &TaskResponse) -> Result<(), &'static str> {
        let is = |kind| matches!(kind, Kind::Abort(_) | Kind::ResetUnit(_));
        let tag = self.expect(pdu.itt.get(), is)?;
        let outcome = TaskOutcome(pdu.response);
        let Some(task) = self.tasks.get(tag) else { return Ok(()) };
        let (kind, asked_at) = (task.kind, task.at);
        let victims = match (kind, outcome) {
            (Kind::Abort(victim), TaskOutcome::Complete | TaskOutcome::NoTask) => {
                // The slot may be another command's by now.
                let is_there = self.tasks.get(victim).is_some_and(|t| t.was_sent_before(asked_at));
                is_there.then_some(victim).into_iter().collect()
            }
            (Kind::ResetUnit(lun), TaskOutcome::Complete) => {
                self.tasks.select(|t| t.lun == lun && t.was_sent_before(asked_at))
            }
            _ => Vec::new(),
        };
        for victim in victims {
            self.complete(victim, Err(Lost::Aborted));
        }
        self.answer(tag, Answer::Managed(outcome));
        Ok(())
    }

    /// A command is not to be sent any more, if it is there at all.
    pub(super) fn abort_unsent(&mut self, tag: Tag, victim: Tag) {
        let before = self.pending.len();
        self.pending.retain(|t| *t != victim);
        let found = self.pending.len() < before;
        if found {
            self.complete(victim, Err(Lost::Unsent));
        }
        let outcome = if found { TaskOutcome::Complete } else { TaskOutcome::NoTask };
        self.complete(tag, Ok(Answer::Managed(outcome)));
    }

    /// RFC 7143 11.15.
    pub(super) fn on_logged_out(&mut self, pdu: &LogoutResponse) -> Result<(), &'static str> {
        let tag = self.expect(pdu.itt.get(), |kind| matches!(kind, Kind::Logout | Kind::Leave))?;
        self.complete(tag, Ok(Answer::LoggedOut(LogoutOutcome(pdu.response))));
        self.finish(End::LoggedOut);
        Ok(())
    }

    /// RFC 7143 11.9.
    pub(super) fn on_async(&mut self, pdu: &AsyncMessage, data: &[u8]) -> Result<(), &'static str> {
        match AsyncEvent(pdu.event) {
            AsyncEvent::Scsi => {
                let sense = sense(data, self.receiver.segment())?.into();
                self.note(Notice::Scsi { lun: pdu.lun, sense });
            }
            // A target that wants to negotiate anew gets a new session.
            AsyncEvent::LogoutRequest | AsyncEvent::Negotiation => {
                self.leave(pdu.parameter3.get());
            }
            AsyncEvent::ConnectionDrop | AsyncEvent::SessionDrop => {
                self.finish(End::Dropped { wait_s: pdu.parameter2.get() });
            }
            // FastAbort was not agreed on; what vendors say is for theirs.
            _ => {}
        }
        Ok(())
    }

    fn note(&mut self, notice: Notice) {
        if self.notices.len() < MAX_NOTICES {
            self.notices.push_back(notice);
        }
    }

    /// The target wants the session to end.
    fn leave(&mut self, within_s: u16) {
        if !matches!(self.phase, Phase::Running) {
            return;
        }
        let within = Duration::from_secs(u64::from(within_s).max(1));
        self.phase = Phase::Leaving(self.clock.now() + within);
        self.note(Notice::LogoutRequest { within_s });
        for tag in std::mem::take(&mut self.pending) {
            self.complete(tag, Err(Lost::Unsent));
        }
        self.leave_if_over();
    }

    /// Logs out once no command is in flight, if the target wants the session to end.
    pub(super) fn leave_if_over(&mut self) {
        if matches!(self.phase, Phase::Leaving(_))
            && self.tasks.commands() == 0
            && self.tasks.select(|t| matches!(t.kind, Kind::Logout | Kind::Leave)).is_empty()
        {
            self.send_other(Kind::Leave, None, &[]);
        }
    }

    /// RFC 7143 11.17. A rejected command leaves a hole in the command order, which ends the session; what
    /// takes no place there has ended alone.
    pub(super) fn on_reject(&mut self, pdu: &Reject, data: &[u8]) -> Result<(), &'static str> {
        let reason = RejectReason(pdu.reason);
        let rejected: Option<&[u8; BHS]> = data.first_chunk();
        let rejected = Header::of(rejected.ok_or("a rejection of nothing")?);
        let kind = match rejected.opcode() {
            Opcode::NopOut | Opcode::TaskRequest | Opcode::TextRequest => self
                .tasks
                .find(rejected.itt.get())
                .filter(|tag| self.tasks.get(*tag).is_some_and(|t| t.kind != Kind::Scsi)),
            _ => None,
        };
        match kind {
            Some(tag) => {
                if self.tasks.get(tag).is_some_and(|t| t.kind == Kind::KeepAlive) {
                    self.clock.ponged();
                }
                self.answer(tag, Answer::Rejected(reason));
            }
            None => self.finish(End::Rejected(reason)),
        }
        Ok(())
    }
}
