//! The events of an NVMe/TCP connection.

use block::{Bufs, Credit, Error, RequestError};
use nvme::auth::DhResult;
use nvme::{Connect, Tag};
use reservation::{Notifications, Table};
use volume::ReservationChangeError;

use crate::catalog::VolumeId;
use crate::connection::Inbox;
use crate::connection_notice::ConnectionNotice;

/// An event for a connection.
#[derive(Debug)]
pub(crate) enum Event {
    /// A volume has answered.
    Done { tag: Tag, result: Result<Bufs, RequestError> },
    /// A Diffie-Hellman computation is complete, or failed; `wait` identifies the command.
    Computed { tag: Tag, wait: u64, done: Option<DhResult> },
    /// A delayed Connect may be decided now.
    Decide { tag: Tag, connect: Box<Connect> },
    /// The host has not completed an authentication in time.
    AuthTimeout { number: u64 },
    /// The second command of a fused pair has not arrived in time.
    FusedTimeout { first: Tag, number: u64 },
    /// A copy has ended; with the number of the first range that is not copied.
    CopyDone { tag: Tag, result: Result<(), (u64, RequestError)> },
    /// Memory of so many bytes that a command waited for; `wait` identifies the wait.
    Memory { tag: Tag, wait: u64, credit: Credit, bytes: usize },
    /// Memory that a command waited for can never be available.
    NoMemory { tag: Tag, wait: u64 },
    /// Reservations were changed, or could not be; `wait` identifies the command.
    ReservationsChanged { tag: Tag, wait: u64, result: Result<(), ReservationChangeError> },
    /// Reservations were read.
    ReservationsRead { tag: Tag, wait: u64, result: Result<Table, Error> },
    /// Notifications for the host about a change of a volume's reservations.
    ReservationNotifications { volume: VolumeId, notices: Notifications },
    /// The admin queue wants a command of this queue aborted.
    Abort { cid: u16, abort_request: AbortRequest },
    /// The answer to such an abort.
    AbortAnswer { tag: Tag, aborted: bool },
    /// The controller may have requests; for the connection of its admin queue.
    Controller,
    /// The controller or this queue was removed.
    QueueGone(&'static str),
    /// From the server.
    Notice(ConnectionNotice),
}

/// An Abort command that waits for its answer. If dropped, it answers that nothing was aborted: the
/// queue that it was sent to may be gone.
#[derive(Debug)]
pub(crate) struct AbortRequest {
    inbox: Inbox<Event>,
    tag: Tag,
    aborted: bool,
}

impl AbortRequest {
    pub(crate) fn new(inbox: Inbox<Event>, tag: Tag) -> Self {
        Self { inbox, tag, aborted: false }
    }

    pub(crate) fn answer(mut self, aborted: bool) {
        self.aborted = aborted;
    }
}

impl Drop for AbortRequest {
    fn drop(&mut self) {
        self.inbox.push(Event::AbortAnswer { tag: self.tag, aborted: self.aborted });
    }
}
