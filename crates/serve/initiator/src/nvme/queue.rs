//! A queue: one connection, one task that drives it, and callers that share its machine
//! ([`crate::drive`]).

use std::time::Duration;

use ::nvme::host::{self, Command, Config, Connection, Done, Lost};
use ::nvme::{Completion, Digests};
use block::BufsMut;
use frame::Machine;

use crate::drive::{self, Client, Ended, Link};
pub use crate::drive::{Staging, Transport};

/// Why a queue has ended.
pub type End = drive::End<host::End>;

impl Client for Connection {
    type Command = Command;
    type Done = Done;
    type End = host::End;
    const CLOSED: host::End = host::End::Closed;

    fn submit(&mut self, command: Command) -> Option<usize> {
        Self::submit(self, command).map(::nvme::Tag::index)
    }

    fn poll_done(&mut self) -> Option<Ended<Done>> {
        let done = Self::poll_done(self)?;
        let in_doubt = done.outcome == Err(Lost::InDoubt);
        Some(Ended { index: done.tag.index(), done, counts: true, in_doubt })
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

    fn end(&self) -> Option<host::End> {
        Self::end(self)
    }
}

/// What has become of a command.
#[derive(Debug)]
pub struct Reply {
    /// What the controller has answered, or that there will be no answer.
    pub outcome: Result<Completion, Lost>,
    /// Bytes of its data that have been moved: less than all of a command that succeeded where the
    /// controller did not want them, or did not give them.
    pub moved: u32,
    /// The buffers of [`host::Payload::ToHost`]; behind the first `moved` bytes they hold anything.
    pub buffers: BufsMut,
}

impl Reply {
    /// That of a command which the queue has not taken where there is no end of it.
    fn of(done: Option<Done>) -> Self {
        match done {
            Some(Done { outcome, moved, buffers, .. }) => Self { outcome, moved, buffers },
            None => Self::unsent(),
        }
    }

    pub(super) fn unsent() -> Self {
        Self { outcome: Err(Lost::Unsent), moved: 0, buffers: BufsMut::new() }
    }
}

/// Room for a command in a queue.
pub struct Place<'a>(drive::Place<'a, Connection>);

impl Place<'_> {
    /// Sends a command, when this is first polled, and waits for its end: see [`Queue::submit`].
    pub async fn submit(self, command: Command) -> Reply {
        Reply::of(self.0.submit(command).await)
    }
}

/// Room for the halves of a fused operation in a queue.
pub struct Pair<'a>(drive::Pair<'a, Connection>);

impl Pair<'_> {
    /// Sends both, when this is first polled, and waits for their ends: see [`Queue::submit_fused`].
    pub async fn submit(self, first: Command, second: Command) -> (Reply, Reply) {
        let (first, second) = self.0.submit(first, second).await;
        (Reply::of(first), Reply::of(second))
    }
}

/// One queue of a controller, on this core. Cheap to clone; it ends by [`Queue::close`], with the last
/// clone, or when its connection does.
#[derive(Clone, Debug)]
pub struct Queue(Link<Connection>);

impl Queue {
    /// A queue on a connection that has just been made; commands wait until the controller has answered
    /// ICReq. `send_timeout`: how long it may take nothing of what waits to be sent.
    #[must_use]
    pub fn start(
        stream: impl Transport,
        config: Config,
        staging: Staging,
        send_timeout: Duration,
    ) -> Self {
        Self(Link::start(stream, Connection::new(config), staging, send_timeout))
    }

    /// Sends a command once there is room for it, and waits for its end. A caller that goes away does not
    /// take the command along.
    pub async fn submit(&self, command: Command) -> Reply {
        Reply::of(self.0.submit(command).await)
    }

    /// Sends the halves of a fused operation next to each other (NVMe Base 2.0, 3.4.2), and waits for the
    /// ends of both.
    pub async fn submit_fused(&self, first: Command, second: Command) -> (Reply, Reply) {
        match self.pair().await {
            Some(pair) => pair.submit(first, second).await,
            None => (Reply::unsent(), Reply::unsent()),
        }
    }

    /// Waits for room for a command, so that its caller can have a last look before it is sent. `None` once
    /// the queue has ended.
    pub async fn place(&self) -> Option<Place<'_>> {
        self.0.place().await.map(Place)
    }

    /// Likewise for the halves of a fused operation.
    pub async fn pair(&self) -> Option<Pair<'_>> {
        self.0.pair().await.map(Pair)
    }

    /// How many commands it would take now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.0.room()
    }

    /// Digests agreed on; `None` before the controller has answered ICReq.
    #[must_use]
    pub fn agreed(&self) -> Option<Digests> {
        self.0.with(|machine| machine.agreed())
    }

    /// Ends it now; what is in flight is lost.
    pub fn close(&self) {
        self.0.close();
    }

    /// Whether it has not ended, and is not about to.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.is_open()
    }

    /// Why it has ended; `None` while it has not.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.0.end()
    }

    /// Whether its controller has ended it, or the machine that the controller was on.
    #[must_use]
    pub fn has_been_left(&self) -> bool {
        self.end().is_some_and(|end| end.was_theirs())
    }

    /// Waits for its end.
    pub async fn ended(&self) -> End {
        self.0.ended().await
    }
}
