//! A queue: one connection, one task that drives it, and callers that share its machine.
//!
//! Who submits puts the command into the machine itself and wakes the task, so all that is submitted
//! before the task's turn leaves in one system call, and nothing is allocated for a command. Who finds the
//! queue full waits in turn.

mod driver;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ::nvme::host::{self, Command, Config, Connection, Done, Lost};
use ::nvme::{Completion, Digests, Tag};
use block::BufsMut;
use frame::Machine;
use slab::Slab;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::Instant;

use driver::Driver;
pub use driver::Staging;

/// A byte stream to a controller.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + 'static {
    /// What was written and has not arrived is not to arrive any more, as far as that can be helped:
    /// the stream is about to be dropped with commands in doubt.
    fn abandon(&self);
}

impl Transport for rt::net::Stream {
    fn abandon(&self) {
        // A connection that is gone has nothing left to send.
        let _ = self.reset_on_drop();
    }
}

impl Transport for tokio::io::DuplexStream {
    fn abandon(&self) {}
}

/// Why a queue has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its machine ended it.
    Machine(host::End),
    /// The controller closed the connection.
    PeerClosed,
    /// The controller did not take what was to be sent, within the send timeout.
    SendStalled,
    /// The connection broke.
    Broken(io::ErrorKind),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(end) => write!(f, "{end}"),
            Self::PeerClosed => f.write_str("the controller closed the connection"),
            Self::SendStalled => f.write_str("the controller takes nothing any more"),
            Self::Broken(kind) => write!(f, "the connection broke: {kind}"),
        }
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
    /// That of a command that the queue has not taken.
    pub(super) fn unsent() -> Self {
        Self { outcome: Err(Lost::Unsent), moved: 0, buffers: BufsMut::new() }
    }
}

/// One queue of a controller, on this core. Cheap to clone; it ends by [`Queue::close`], with the last
/// clone, or when its connection does.
#[derive(Clone, Debug)]
pub struct Queue(Rc<Handle>);

/// What callers hold of it.
#[derive(Debug)]
struct Handle(Rc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug)]
struct Shared {
    state: RefCell<State>,
    /// A permit for each command that the machine takes; closed once it takes no more.
    room: Semaphore,
    over: Notify,
}

#[derive(Debug)]
struct State {
    machine: Connection,
    /// The zero of the machine's clock.
    began: Instant,
    /// Who waits for the end of a command.
    waiting: Slab<Waiting>,
    /// Which of them waits for the command with a tag.
    by_tag: Vec<usize>,
    driver: Option<Waker>,
    /// Whether the driver is at work, and looks at the machine before it rests.
    awake: bool,
    /// Whether those who submit have been let in.
    is_open: bool,
    /// Whether a command has been lost that the controller may know of.
    in_doubt: bool,
    end: Option<End>,
}

#[derive(Debug)]
enum Waiting {
    /// For the end of the command.
    For(Option<Waker>),
    /// It is here.
    Over(Done),
    /// Nobody asks any more.
    Nobody,
}

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
        let state = State {
            machine: Connection::new(config),
            began: Instant::now(),
            waiting: Slab::new(),
            by_tag: Vec::new(),
            driver: None,
            awake: false,
            is_open: false,
            in_doubt: false,
            end: None,
        };
        let (room, over) = (Semaphore::new(0), Notify::new());
        let shared = Rc::new(Shared { state: RefCell::new(state), room, over });
        let driver = Driver::new(stream, Rc::clone(&shared), staging, send_timeout);
        tokio::task::spawn_local(driver.run());
        Self(Rc::new(Handle(shared)))
    }

    /// Sends a command once there is room for it, and waits for its end. A caller that goes away does not
    /// take the command along.
    pub async fn submit(&self, command: Command) -> Reply {
        match self.place().await {
            Some(place) => place.submit(command).await,
            None => Reply::unsent(),
        }
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
        let permit = self.shared().room.acquire().await.ok()?;
        Some(Place { shared: self.shared(), permit })
    }

    /// Likewise for the halves of a fused operation.
    pub async fn pair(&self) -> Option<Pair<'_>> {
        let permits = self.shared().room.acquire_many(2).await.ok()?;
        Some(Pair { shared: self.shared(), permits })
    }

    /// How many commands it would take now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.shared().room.available_permits()
    }

    /// Digests agreed on; `None` before the controller has answered ICReq.
    #[must_use]
    pub fn agreed(&self) -> Option<Digests> {
        self.shared().state.borrow().machine.agreed()
    }

    /// Ends it now; what is in flight is lost.
    pub fn close(&self) {
        self.shared().close();
    }

    /// Whether it has not ended, and is not about to.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.shared().state.borrow().machine.is_closing()
    }

    /// Whether its controller has ended it, or the machine that the controller was on.
    #[must_use]
    pub fn has_been_left(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        let gone = [BrokenPipe, ConnectionAborted, ConnectionReset];
        match self.end() {
            Some(End::PeerClosed) => true,
            Some(End::Broken(kind)) => gone.contains(&kind),
            Some(End::Machine(_) | End::SendStalled) | None => false,
        }
    }

    /// Why it has ended; `None` while it has not.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.shared().state.borrow().end
    }

    /// Waits for its end.
    pub async fn ended(&self) -> End {
        loop {
            let over = self.shared().over.notified();
            if let Some(end) = self.end() {
                return end;
            }
            over.await;
        }
    }
}

impl Queue {
    fn shared(&self) -> &Rc<Shared> {
        &self.0.0
    }
}

/// Room for a command in a queue.
#[derive(Debug)]
pub struct Place<'a> {
    shared: &'a Rc<Shared>,
    permit: SemaphorePermit<'a>,
}

impl Place<'_> {
    /// Sends a command, when this is first polled, and waits for its end: see [`Queue::submit`].
    pub async fn submit(self, command: Command) -> Reply {
        self.permit.forget();
        ended(self.shared.submit(command)).await
    }
}

/// Room for the halves of a fused operation in a queue.
#[derive(Debug)]
pub struct Pair<'a> {
    shared: &'a Rc<Shared>,
    permits: SemaphorePermit<'a>,
}

impl Pair<'_> {
    /// Sends both, when this is first polled, and waits for their ends: see [`Queue::submit_fused`].
    pub async fn submit(self, first: Command, second: Command) -> (Reply, Reply) {
        self.permits.forget();
        let (first, second) = (self.shared.submit(first), self.shared.submit(second));
        (ended(first).await, ended(second).await)
    }
}

/// The end of a command, if the queue has taken it.
async fn ended(answer: Option<Answer>) -> Reply {
    match answer {
        Some(answer) => answer.await,
        None => Reply::unsent(),
    }
}

impl Shared {
    fn close(&self) {
        let mut state = self.state.borrow_mut();
        state.machine.close();
        state.wake();
    }

    /// The caller has a permit.
    fn submit(self: &Rc<Self>, command: Command) -> Option<Answer> {
        let mut state = self.state.borrow_mut();
        // The command's time begins now, not when the driver was last awake.
        let now = state.began.elapsed();
        state.machine.on_timer(now);
        state.wake();
        let tag = state.machine.submit(command)?;
        let place = state.waiting.insert(Waiting::For(None));
        let index = tag.index();
        if state.by_tag.len() <= index {
            state.by_tag.resize(index + 1, usize::MAX);
        }
        state.by_tag[index] = place;
        Some(Answer { shared: Rc::clone(self), place })
    }

    /// Tells those who wait of the commands that have ended, and lets in as many others.
    fn deliver(&self) {
        let mut state = self.state.borrow_mut();
        let mut ended = 0;
        while let Some(done) = state.machine.poll_done() {
            state.hand_over(done);
            ended += 1;
        }
        if !state.is_open && state.machine.agreed().is_some() {
            state.is_open = true;
            ended = state.machine.room();
        }
        drop(state);
        if ended > 0 {
            self.room.add_permits(ended);
        }
    }

    /// It is over: nobody waits any more. Whether commands are in doubt.
    fn finish(&self, end: End) -> bool {
        self.state.borrow_mut().machine.close();
        self.room.close();
        self.deliver();
        let mut state = self.state.borrow_mut();
        state.end.get_or_insert(end);
        self.over.notify_waiters();
        state.in_doubt
    }
}

impl State {
    /// There is something for the driver.
    fn wake(&self) {
        if !self.awake
            && let Some(waker) = &self.driver
        {
            waker.wake_by_ref();
        }
    }

    fn place_of(&self, tag: Tag) -> usize {
        self.by_tag.get(tag.index()).copied().unwrap_or(usize::MAX)
    }

    fn hand_over(&mut self, done: Done) {
        self.in_doubt |= done.outcome == Err(Lost::InDoubt);
        let place = self.place_of(done.tag);
        let Some(waiting) = self.waiting.get_mut(place) else { return };
        match std::mem::replace(waiting, Waiting::Over(done)) {
            Waiting::For(waker) => waker.into_iter().for_each(Waker::wake),
            Waiting::Nobody | Waiting::Over(_) => drop(self.waiting.remove(place)),
        }
    }
}

/// The end of a command, to come.
struct Answer {
    shared: Rc<Shared>,
    place: usize,
}

impl Future for Answer {
    type Output = Reply;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Reply> {
        let mut state = self.shared.state.borrow_mut();
        let Some(waiting) = state.waiting.get_mut(self.place) else { return Poll::Pending };
        match std::mem::replace(waiting, Waiting::Nobody) {
            Waiting::Over(Done { outcome, moved, buffers, .. }) => {
                Poll::Ready(Reply { outcome, moved, buffers })
            }
            Waiting::For(known) => {
                let known = known.filter(|k| k.will_wake(cx.waker()));
                let waker = known.unwrap_or_else(|| cx.waker().clone());
                *waiting = Waiting::For(Some(waker));
                Poll::Pending
            }
            Waiting::Nobody => Poll::Pending,
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let mut state = self.shared.state.borrow_mut();
        match state.waiting.get_mut(self.place) {
            // The command goes on, and its end frees the place.
            Some(waiting @ Waiting::For(_)) => *waiting = Waiting::Nobody,
            Some(_) => drop(state.waiting.remove(self.place)),
            None => {}
        }
    }
}
