//! A link: one connection, one task that drives its machine, and callers that share it.
//!
//! Who submits puts the command into the machine itself and wakes the task, so all that is submitted
//! before the task's turn leaves in one system call, and nothing is allocated for a command. Who finds no
//! room waits in turn.

mod driver;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use frame::Machine;
use slab::Slab;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::Instant;

use driver::Driver;
pub use driver::Staging;

/// A machine that carries out commands for callers, each of which ends once.
pub(crate) trait Client: Machine + 'static {
    /// What is asked.
    type Command;
    /// What has become of it.
    type Done;
    /// Why the connection ends.
    type End: Copy;
    /// This side closed it.
    const CLOSED: Self::End;

    /// Takes a command, whose time begins now; the number by which its end is known.
    fn submit(&mut self, command: Self::Command) -> Option<usize>;

    /// The next command that has ended.
    fn poll_done(&mut self) -> Option<Ended<Self::Done>>;

    /// How many commands that count it takes now; `None` before it takes any.
    fn room(&self) -> Option<usize>;

    /// Whether it takes commands, or will.
    fn is_open(&self) -> bool;

    /// Whether it has something to tell that nobody has asked for.
    fn has_news(&self) -> bool;

    /// Ends the connection.
    fn close(&mut self);

    /// Why it ends.
    fn end(&self) -> Option<Self::End>;
}

/// The end of a command.
#[derive(Debug)]
pub(crate) struct Ended<D> {
    /// The number that [`Client::submit`] gave.
    pub(crate) index: usize,
    pub(crate) done: D,
    /// Whether it has taken [`Client::room`], which is free again.
    pub(crate) counts: bool,
    /// Whether it was lost and the other side may know of it.
    pub(crate) in_doubt: bool,
}

/// A byte stream to a controller or a target.
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

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End<E> {
    /// Its machine ended it.
    Machine(E),
    /// The other side closed the connection.
    PeerClosed,
    /// The other side did not take what was to be sent, within the send timeout.
    SendStalled,
    /// The connection broke.
    Broken(io::ErrorKind),
}

impl<E> End<E> {
    /// Whether the other side has ended it, or the machine that the other side was on.
    pub(crate) fn was_theirs(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        match self {
            Self::PeerClosed => true,
            Self::Broken(kind) => [BrokenPipe, ConnectionAborted, ConnectionReset].contains(kind),
            Self::Machine(_) | Self::SendStalled => false,
        }
    }
}

impl<E: fmt::Display> fmt::Display for End<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(end) => write!(f, "{end}"),
            Self::PeerClosed => f.write_str("the other side closed the connection"),
            Self::SendStalled => f.write_str("the other side takes nothing any more"),
            Self::Broken(kind) => write!(f, "the connection broke: {kind}"),
        }
    }
}

/// A connection, on this core. Cheap to clone; it ends by [`Link::close`], with the last clone, or when its
/// connection does.
pub(crate) struct Link<C: Client>(Rc<Handle<C>>);

impl<C: Client> Clone for Link<C> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<C: Client> fmt::Debug for Link<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({} waiting)", self.shared().state.borrow().waiting.len())
    }
}

/// What callers hold of it.
struct Handle<C: Client>(Rc<Shared<C>>);

impl<C: Client> Drop for Handle<C> {
    fn drop(&mut self) {
        self.0.close();
    }
}

struct Shared<C: Client> {
    state: RefCell<State<C>>,
    /// A permit for each command that the machine takes; closed once it takes no more.
    room: Semaphore,
    /// Wakes those who wait for the first room, or for the end.
    over: Notify,
    /// Wakes who listens to the machine.
    news: Notify,
}

struct State<C: Client> {
    machine: C,
    /// The zero of the machine's clock.
    began: Instant,
    /// Who waits for the end of a command.
    waiting: Slab<Waiting<C::Done>>,
    /// Which of them waits for the command with a number.
    by_index: Vec<usize>,
    /// Commands that have ended, and the place of who waits for each: who has not been told yet.
    ended: VecDeque<(usize, Ended<C::Done>)>,
    driver: Option<Waker>,
    /// Whether the driver is at work, and looks at the machine before it rests.
    awake: bool,
    /// Whether those who submit have been let in.
    is_open: bool,
    /// Whether a command has been lost that the other side may know of.
    in_doubt: bool,
    end: Option<End<C::End>>,
}

enum Waiting<D> {
    /// For the end of the command.
    For(Option<Waker>),
    /// It is here.
    Over(D),
    /// Nobody asks any more.
    Nobody,
}

impl<C: Client> Link<C> {
    /// A link on a connection that has just been made; commands wait until the machine takes them.
    /// `send_timeout`: how long the other side may take nothing of what waits to be sent.
    pub(crate) fn start(
        stream: impl Transport,
        machine: C,
        staging: Staging,
        send_timeout: Duration,
    ) -> Self {
        let state = State {
            machine,
            began: Instant::now(),
            waiting: Slab::new(),
            by_index: Vec::new(),
            ended: VecDeque::new(),
            driver: None,
            awake: false,
            is_open: false,
            in_doubt: false,
            end: None,
        };
        let (room, over, news) = (Semaphore::new(0), Notify::new(), Notify::new());
        let shared = Rc::new(Shared { state: RefCell::new(state), room, over, news });
        let driver = Driver::new(stream, Rc::clone(&shared), staging, send_timeout);
        tokio::task::spawn_local(driver.run());
        Self(Rc::new(Handle(shared)))
    }

    /// Sends a command once there is room for it, and waits for its end; `None` where it was not taken. A
    /// caller that goes away does not take the command along.
    pub(crate) async fn submit(&self, command: C::Command) -> Option<C::Done> {
        self.place().await?.submit(command).await
    }

    /// Waits for room for a command, so that its caller can have a last look before it is sent. `None` once
    /// the link has ended.
    pub(crate) async fn place(&self) -> Option<Place<'_, C>> {
        let permit = self.shared().room.acquire().await.ok()?;
        Some(Place { shared: self.shared(), permit })
    }

    /// Likewise for two commands that are sent next to each other.
    pub(crate) async fn pair(&self) -> Option<Pair<'_, C>> {
        let permits = self.shared().room.acquire_many(2).await.ok()?;
        Some(Pair { shared: self.shared(), permits })
    }

    /// Sends a command that takes no room, and waits for its end; `None` where it was not taken.
    pub(crate) async fn submit_now(&self, command: C::Command) -> Option<C::Done> {
        let answer = self.shared().submit(command);
        Some(answer?.await)
    }

    /// Waits until the machine takes commands.
    ///
    /// # Errors
    /// Why it never will.
    pub(crate) async fn opened(&self) -> Result<(), End<C::End>> {
        loop {
            let changed = self.shared().over.notified();
            if let Some(end) = self.end() {
                return Err(end);
            }
            if self.shared().state.borrow().is_open {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Waits until the machine may have something to tell that nobody has asked for; for ever, where it
    /// never has.
    pub(crate) async fn news(&self) {
        self.shared().news.notified().await;
    }

    /// How many commands it would take now.
    pub(crate) fn room(&self) -> usize {
        self.shared().room.available_permits()
    }

    /// Looks at the machine.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut C) -> T) -> T {
        look(&mut self.shared().state.borrow_mut().machine)
    }

    /// Ends it now; what is in flight is lost.
    pub(crate) fn close(&self) {
        self.shared().close();
    }

    /// Whether it has not ended, and is not about to.
    pub(crate) fn is_open(&self) -> bool {
        self.shared().state.borrow().machine.is_open()
    }

    /// Why it has ended; `None` while it has not.
    pub(crate) fn end(&self) -> Option<End<C::End>> {
        self.shared().state.borrow().end
    }

    /// Waits for its end.
    pub(crate) async fn ended(&self) -> End<C::End> {
        loop {
            let over = self.shared().over.notified();
            if let Some(end) = self.end() {
                return end;
            }
            over.await;
        }
    }

    fn shared(&self) -> &Rc<Shared<C>> {
        &self.0.0
    }
}

/// Room for a command.
pub(crate) struct Place<'a, C: Client> {
    shared: &'a Rc<Shared<C>>,
    permit: SemaphorePermit<'a>,
}

impl<C: Client> Place<'_, C> {
    /// Sends a command, when this is first polled, and waits for its end: see [`Link::submit`].
    pub(crate) async fn submit(self, command: C::Command) -> Option<C::Done> {
        self.permit.forget();
        Some(self.shared.submit(command)?.await)
    }
}

/// Room for two commands.
pub(crate) struct Pair<'a, C: Client> {
    shared: &'a Rc<Shared<C>>,
    permits: SemaphorePermit<'a>,
}

impl<C: Client> Pair<'_, C> {
    /// Sends both next to each other, when this is first polled, and waits for their ends.
    pub(crate) async fn submit(
        self,
        first: C::Command,
        second: C::Command,
    ) -> (Option<C::Done>, Option<C::Done>) {
        self.permits.forget();
        let (first, second) = (self.shared.submit(first), self.shared.submit(second));
        (ended(first).await, ended(second).await)
    }
}

/// The end of a command, if it was taken.
async fn ended<C: Client>(answer: Option<Answer<C>>) -> Option<C::Done> {
    match answer {
        Some(answer) => Some(answer.await),
        None => None,
    }
}

impl<C: Client> Shared<C> {
    fn close(&self) {
        let mut state = self.state.borrow_mut();
        state.machine.close();
        state.wake();
    }

    /// The caller has a permit, or needs none.
    fn submit(self: &Rc<Self>, command: C::Command) -> Option<Answer<C>> {
        let mut state = self.state.borrow_mut();
        // The command's time begins now, not when the driver was last awake.
        let now = state.began.elapsed();
        state.machine.on_timer(now);
        state.wake();
        let index = state.machine.submit(command)?;
        let place = state.waiting.insert(Waiting::For(None));
        if state.by_index.len() <= index {
            state.by_index.resize(index + 1, usize::MAX);
        }
        state.by_index[index] = place;
        Some(Answer { shared: Rc::clone(self), place })
    }

    /// Tells those who wait of the commands that have ended, of `most` at a time, and lets in as many others. Whether
    /// there are more.
    fn deliver(&self, most: usize) -> bool {
        let mut state = self.state.borrow_mut();
        state.gather();
        let told = most.min(state.ended.len());
        let mut ended = 0;
        for _ in 0..told {
            ended += state.hand_over();
        }
        let more = !state.ended.is_empty();
        if !state.is_open
            && let Some(room) = state.machine.room()
        {
            state.is_open = true;
            ended = room;
            self.over.notify_waiters();
        }
        if state.machine.has_news() {
            self.news.notify_one();
        }
        drop(state);
        if ended > 0 {
            self.room.add_permits(ended);
        }
        more
    }

    /// It is over: nobody waits any more. Whether commands are in doubt.
    fn finish(&self, end: End<C::End>) -> bool {
        self.state.borrow_mut().machine.close();
        self.room.close();
        self.deliver(usize::MAX);
        let mut state = self.state.borrow_mut();
        state.end.get_or_insert(end);
        self.over.notify_waiters();
        state.in_doubt
    }
}

impl<C: Client> State<C> {
    /// There is something for the driver.
    fn wake(&self) {
        if !self.awake
            && let Some(waker) = &self.driver
        {
            waker.wake_by_ref();
        }
    }

    /// Takes the commands that have ended: all at once, for the number of one may be the next one's.
    fn gather(&mut self) {
        while let Some(done) = self.machine.poll_done() {
            self.has_ended(done);
        }
    }

    /// Whether a command has been lost that the other side may know of.
    fn is_in_doubt(&mut self) -> bool {
        self.gather();
        self.in_doubt
    }

    fn has_ended(&mut self, ended: Ended<C::Done>) {
        self.in_doubt |= ended.in_doubt;
        let place = self.by_index.get(ended.index).copied().unwrap_or(usize::MAX);
        self.ended.push_back((place, ended));
    }

    /// Tells who waits for the first of the commands that have ended. How many commands may be sent in its place.
    fn hand_over(&mut self) -> usize {
        let Some((place, ended)) = self.ended.pop_front() else { return 0 };
        if let Some(waiting) = self.waiting.get_mut(place) {
            match std::mem::replace(waiting, Waiting::Over(ended.done)) {
                Waiting::For(waker) => waker.into_iter().for_each(Waker::wake),
                Waiting::Nobody | Waiting::Over(_) => drop(self.waiting.remove(place)),
            }
        }
        usize::from(ended.counts)
    }
}

/// The end of a command, to come.
struct Answer<C: Client> {
    shared: Rc<Shared<C>>,
    place: usize,
}

impl<C: Client> Future for Answer<C> {
    type Output = C::Done;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Done> {
        let mut state = self.shared.state.borrow_mut();
        let Some(waiting) = state.waiting.get_mut(self.place) else { return Poll::Pending };
        match std::mem::replace(waiting, Waiting::Nobody) {
            Waiting::Over(done) => Poll::Ready(done),
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

impl<C: Client> Drop for Answer<C> {
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
