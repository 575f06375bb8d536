//! The connection of a session ([`crate::connection`]).

use ::iscsi::initiator::{self, Command, CompletedRequest, Connection, LostRequest};
use frame::Machine;

use crate::connection::{ClientMachine, FinishedCommand};

/// Why a connection ended.
pub type SessionEnd = crate::connection::LinkEnd<initiator::CloseReason>;

/// The callers' handle of a connection.
pub(super) type Link = crate::connection::Link<Connection>;

impl ClientMachine for Connection {
    type Command = Command;
    type Outcome = CompletedRequest;
    type CloseReason = initiator::CloseReason;
    const CLOSED: initiator::CloseReason = initiator::CloseReason::Closed;

    fn submit(&mut self, command: Command) -> Option<usize> {
        Self::submit(self, command).map(|tag| tag.0 as usize)
    }

    fn poll_done(&mut self) -> Option<FinishedCommand<CompletedRequest>> {
        let done = Self::poll_done(self)?;
        let in_doubt = done.outcome == Err(LostRequest::InDoubt);
        Some(FinishedCommand {
            index: done.tag.0 as usize,
            holds_slot: done.is_command,
            outcome: done,
            in_doubt,
        })
    }

    fn free_slots(&self) -> Option<usize> {
        self.params().map(|_| Self::free_command_slots(self))
    }

    fn is_open(&self) -> bool {
        Self::is_open(self) && !self.is_closing()
    }

    fn has_notification(&self) -> bool {
        self.has_notification()
    }

    fn close(&mut self) {
        Self::close(self);
    }

    fn close_reason(&self) -> Option<initiator::CloseReason> {
        Self::close_reason(self)
    }
}
