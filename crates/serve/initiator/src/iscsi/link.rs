//! The connection of a session ([`crate::drive`]).

use ::iscsi::initiator::{self, Command, Connection, Done, Lost};
use frame::Machine;

use crate::drive::{Client, Ended};

/// Why a connection has ended.
pub type End = crate::drive::End<initiator::End>;

/// A connection, and what callers hold of it.
pub(super) type Link = crate::drive::Link<Connection>;

impl Client for Connection {
    type Command = Command;
    type Done = Done;
    type End = initiator::End;
    const CLOSED: initiator::End = initiator::End::Closed;

    fn submit(&mut self, command: Command) -> Option<usize> {
        Self::submit(self, command).map(|tag| tag.0 as usize)
    }

    fn poll_done(&mut self) -> Option<Ended<Done>> {
        let done = Self::poll_done(self)?;
        let in_doubt = done.outcome == Err(Lost::InDoubt);
        Some(Ended { index: done.tag.0 as usize, counts: done.is_command, done, in_doubt })
    }

    fn room(&self) -> Option<usize> {
        self.params().map(|_| Self::room(self))
    }

    fn is_open(&self) -> bool {
        Self::is_open(self) && !self.is_closing()
    }

    fn has_news(&self) -> bool {
        self.has_notice()
    }

    fn close(&mut self) {
        Self::close(self);
    }

    fn end(&self) -> Option<initiator::End> {
        Self::end(self)
    }
}
