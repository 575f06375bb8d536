//! The events of an iSCSI connection.

use std::rc::Rc;

use block::{Bufs, BufsMut, RequestError};
use iscsi::target::{LoginAttempt, RequestId, Tag};
use reservation::Table;
use scsi::{CopyOutcome, TokenResult};
use volume::ReservationChangeError;

use crate::catalog::VolumeId;
use crate::connection::Inbox;
use crate::connection_notice::ConnectionNotice;

/// An event for a connection.
#[derive(Debug)]
pub(crate) enum Event {
    /// The volume has answered.
    Done { ticket: Ticket, result: Result<Bufs, RequestError> },
    /// A third-party copy has ended.
    CopyDone { ticket: Ticket, outcome: CopyOutcome },
    /// A token was created or used, or could not be.
    TokenDone { ticket: Ticket, outcome: TokenResult },
    /// Memory that a command waited for.
    Memory { ticket: Ticket, memory: BufsMut },
    /// Memory that a command waited for was not available in time.
    NoMemory { ticket: Ticket },
    /// Another session aborts the commands for a unit, or for all units.
    Abort { unit: Option<VolumeId>, barrier: Option<Rc<TaskBarrier>> },
    /// The shared unit state was changed, or could not be.
    SharedChanged { ticket: Ticket, result: Result<(), ReservationChangeError> },
    /// The shared unit state.
    SharedRead { ticket: Ticket, result: Result<Table, block::Error> },
    /// All tasks that a task management request waited for have ended.
    TaskManagementDone { id: RequestId },
    /// The same initiator port has logged in again.
    Replaced,
    /// A delayed login may be decided now.
    Decide(Box<LoginAttempt>),
    /// From the server.
    Notice(ConnectionNotice),
}

/// Identifies a command for late answers: tags are reused, and an answer for a command that has
/// ended must not reach the next one with its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) tag: Tag,
    pub(crate) serial: u64,
}

/// Held by every task that a request waits for; dropping the last one reports.
#[derive(Debug)]
pub(crate) struct TaskBarrier {
    pub(crate) inbox: Inbox<Event>,
    pub(crate) id: RequestId,
}

impl Drop for TaskBarrier {
    fn drop(&mut self) {
        self.inbox.push(Event::TaskManagementDone { id: self.id });
    }
}
