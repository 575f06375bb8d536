//! One connection to a server ([`crate::drive`]).

use std::time::Duration;

use ::nbd::client::{self, Connection, Failed, Op, Reply};
use frame::Machine;

use crate::drive::{Client, Ended};

/// Why a connection has ended.
pub type End = crate::drive::End<client::End>;

/// A connection, and what callers hold of it.
pub(super) type Link = crate::drive::Link<Connection>;

impl Client for Connection {
    /// What is asked, and how long it may take.
    type Command = (Op, Duration);
    type Done = Result<Reply, Failed>;
    type End = client::End;
    const CLOSED: client::End = client::End::Closed;

    fn submit(&mut self, (op, timeout): (Op, Duration)) -> Option<usize> {
        Self::submit(self, op, Some(timeout)).map(::nbd::Tag::index)
    }

    fn poll_done(&mut self) -> Option<Ended<Self::Done>> {
        let client::Done { tag, outcome } = Self::poll_done(self)?;
        let in_doubt = matches!(outcome, Err(Failed::Lost));
        Some(Ended { index: tag.index(), counts: true, done: outcome, in_doubt })
    }

    fn room(&self) -> Option<usize> {
        self.agreed().map(|_| Self::room(self))
    }

    fn is_open(&self) -> bool {
        !self.is_closing()
    }

    fn has_news(&self) -> bool {
        false
    }

    fn close(&mut self) {
        Self::close(self);
    }

    fn end(&self) -> Option<client::End> {
        Self::end(self)
    }
}
