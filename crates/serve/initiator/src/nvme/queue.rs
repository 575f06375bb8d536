//! A queue: one connection, one task that drives it, and callers that share its machine
//! ([`crate::connection`]).

use std::time::Duration;

use ::nvme::host::{self, Command, CompletedCommand, Config, Connection, LostCommand};
use ::nvme::{Completion, Digests};
use block::BufsMut;
use frame::Machine;

use crate::connection::{self, ClientMachine, FinishedCommand, Link};
pub use crate::connection::{Staging, Transport};

/// Why a queue ended.
pub type QueueEnd = connection::LinkEnd<host::CloseReason>;

impl ClientMachine for Connection {
    type Command = Command;
    type Outcome = CompletedCommand;
    type CloseReason = host::CloseReason;
    const CLOSED: host::CloseReason = host::CloseReason::Closed;

    fn submit(&mut self, command: Command) -> Option<usize> {
        Self::submit(self, command).map(::nvme::Tag::index)
    }

    fn poll_done(&mut self) -> Option<FinishedCommand<CompletedCommand>> {
        let done = Self::poll_done(self)?;
        let in_doubt = done.outcome == Err(LostCommand::InDoubt);
        Some(FinishedCommand { index: done.tag.index(), outcome: done, holds_slot: true, in_doubt })
    }

    fn free_slots(&self) -> Option<usize> {
        self.digests().map(|_| Self::free_slots(self))
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

    fn close_reason(&self) -> Option<host::CloseReason> {
        Self::close_reason(self)
    }
}

/// Outcome of a command.
#[derive(Debug)]
pub struct Reply {
    /// The controller's answer, or why there is none.
    pub outcome: Result<Completion, LostCommand>,
    /// Bytes of its data transferred; fewer than a successful command's length if the controller
    /// did not request or send all.
    pub transferred: u32,
    /// The buffers of [`host::Payload::ToHost`]; undefined beyond the first `transferred` bytes.
    pub buffers: BufsMut,
}

impl Reply {
    /// `None`: the queue did not take the command.
    fn of(done: Option<CompletedCommand>) -> Self {
        match done {
            Some(CompletedCommand { outcome, transferred: moved, buffers, .. }) => {
                Self { outcome, transferred: moved, buffers }
            }
            None => Self::unsent(),
        }
    }

    pub(super) fn unsent() -> Self {
        Self { outcome: Err(LostCommand::Unsent), transferred: 0, buffers: BufsMut::new() }
    }
}

/// A reserved place for one command in a queue.
pub struct CommandSlot<'a>(connection::CommandSlot<'a, Connection>);

impl CommandSlot<'_> {
    /// Sends a command on the first poll and waits for its outcome: see [`Queue::submit`].
    pub async fn submit(self, command: Command) -> Reply {
        Reply::of(self.0.submit(command).await)
    }
}

/// Reserved places for the halves of a fused operation.
pub struct CommandSlotPair<'a>(connection::CommandSlotPair<'a, Connection>);

impl CommandSlotPair<'_> {
    /// Sends both on the first poll and waits for their outcomes: see [`Queue::submit_fused`].
    pub async fn submit(self, first: Command, second: Command) -> (Reply, Reply) {
        let (first, second) = self.0.submit(first, second).await;
        (Reply::of(first), Reply::of(second))
    }
}

/// One queue of a controller, on this core. Cheap to clone; it ends by [`Queue::close`], with the
/// last clone, or when its connection does.
#[derive(Clone, Debug)]
pub struct Queue(Link<Connection>);

impl Queue {
    /// Starts a queue on a new connection; commands wait for the controller's ICResp.
    /// `send_timeout`: how long it may receive nothing while output waits.
    #[must_use]
    pub fn start(
        stream: impl Transport,
        config: Config,
        staging: Staging,
        send_timeout: Duration,
    ) -> Self {
        Self(Link::start(stream, Connection::new(config), staging, send_timeout))
    }

    /// Sends a command once a slot is free and waits for its outcome. Dropping the future does not
    /// cancel the command.
    pub async fn submit(&self, command: Command) -> Reply {
        Reply::of(self.0.submit(command).await)
    }

    /// Sends the halves of a fused operation adjacently (NVMe Base 2.0, 3.4.2) and waits for both
    /// outcomes.
    pub async fn submit_fused(&self, first: Command, second: Command) -> (Reply, Reply) {
        match self.reserve_pair().await {
            Some(pair) => pair.submit(first, second).await,
            None => (Reply::unsent(), Reply::unsent()),
        }
    }

    /// Waits for a slot, so that the caller can make a last check before sending. `None` once the
    /// queue has ended.
    pub async fn reserve(&self) -> Option<CommandSlot<'_>> {
        self.0.reserve().await.map(CommandSlot)
    }

    /// Waits for the slots of a fused operation.
    pub async fn reserve_pair(&self) -> Option<CommandSlotPair<'_>> {
        self.0.reserve_pair().await.map(CommandSlotPair)
    }

    /// How many commands can be sent now.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.0.free_slots()
    }

    /// Negotiated digests; `None` before ICResp.
    #[must_use]
    pub fn digests(&self) -> Option<Digests> {
        self.0.with(|machine| machine.digests())
    }

    /// Closes the connection now; commands in flight are lost.
    pub fn close(&self) {
        self.0.close();
    }

    /// Whether it has neither ended nor begun to close.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.is_open()
    }

    /// Why it ended; `None` while it is open.
    #[must_use]
    pub fn end(&self) -> Option<QueueEnd> {
        self.0.end()
    }

    /// Whether the controller, or its machine, ended it.
    #[must_use]
    pub fn was_ended_by_peer(&self) -> bool {
        self.end().is_some_and(|end| end.was_by_peer())
    }

    /// Waits for its end.
    pub async fn wait_end(&self) -> QueueEnd {
        self.0.wait_end().await
    }
}
