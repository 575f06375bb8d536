//! One connection to a server ([`crate::connection`]).

use std::time::Duration;

use ::nbd::client::{self, CommandError, Connection, Op, Reply};
use frame::Machine;

use crate::connection::{ClientMachine, FinishedCommand};

/// Why a connection ended.
pub type ConnectionEnd = crate::connection::LinkEnd<client::CloseReason>;

/// The callers' handle of a connection.
pub(super) type Link = crate::connection::Link<Connection>;

impl ClientMachine for Connection {
    /// The operation and its time limit.
    type Command = (Op, Duration);
    type Outcome = Result<Reply, CommandError>;
    type CloseReason = client::CloseReason;
    const CLOSED: client::CloseReason = client::CloseReason::Closed;

    fn submit(&mut self, (op, timeout): (Op, Duration)) -> Option<usize> {
        Self::submit(self, op, Some(timeout)).map(::nbd::Tag::index)
    }

    fn poll_done(&mut self) -> Option<FinishedCommand<Self::Outcome>> {
        let client::CompletedCommand { tag, outcome } = Self::poll_done(self)?;
        let in_doubt = matches!(outcome, Err(CommandError::ConnectionLost));
        Some(FinishedCommand { index: tag.index(), holds_slot: true, outcome, in_doubt })
    }

    fn free_slots(&self) -> Option<usize> {
        self.negotiated().map(|_| Self::free_slots(self))
    }

    fn is_open(&self) -> bool {
        !self.is_closing()
    }

    fn has_notification(&self) -> bool {
        false
    }

    fn close(&mut self) {
        Self::close(self);
    }

    fn close_reason(&self) -> Option<client::CloseReason> {
        Self::close_reason(self)
    }
}
