//! A link: one connection, one task that drives its machine, and callers that share it.
//!
//! Submitting puts the command into the machine and wakes the task. All commands submitted before
//! the task runs leave in one system call; a command costs no allocation. Callers wait in order for
//! a free slot.

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

/// A machine that carries out commands for callers and finishes each of them once.
pub(crate) trait ClientMachine: Machine + 'static {
    /// A command.
    type Command;
    /// What became of a command.
    type Outcome;
    /// Why the connection ended.
    type CloseReason: Copy;
    /// This side closed it.
    const CLOSED: Self::CloseReason;

    /// Takes a command and starts its timeout. Returns the index that its [`FinishedCommand`] will
    /// have; `None` if it was not taken.
    fn submit(&mut self, command: Self::Command) -> Option<usize>;

    /// The next finished command.
    fn poll_done(&mut self) -> Option<FinishedCommand<Self::Outcome>>;

    /// How many commands that hold a slot it takes now; `None` before the connection is open.
    fn free_slots(&self) -> Option<usize>;

    /// Whether it takes commands now, or will.
    fn is_open(&self) -> bool;

    /// Whether an unsolicited notification waits.
    fn has_notification(&self) -> bool;

    /// Ends the connection.
    fn close(&mut self);

    /// Why it ended; `None` while it is open.
    fn close_reason(&self) -> Option<Self::CloseReason>;
}

/// A finished command.
#[derive(Debug)]
pub(crate) struct FinishedCommand<D> {
    /// The index that [`ClientMachine::submit`] returned.
    pub(crate) index: usize,
    pub(crate) outcome: D,
    /// Whether it held a slot ([`ClientMachine::free_slots`]), which is free again.
    pub(crate) holds_slot: bool,
    /// Whether its answer was lost and the peer may have received it.
    pub(crate) in_doubt: bool,
}

/// A byte stream to a controller or a target.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + 'static {
    /// Discards, as far as possible, what was written and has not arrived: the stream is about to
    /// be dropped with commands in doubt.
    fn abandon(&self);
}

impl Transport for rt::net::Stream {
    fn abandon(&self) {
        // A lost connection has nothing left to send.
        let _ = self.reset_on_drop();
    }
}

impl Transport for tokio::io::DuplexStream {
    fn abandon(&self) {}
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd<E> {
    /// Its machine ended it.
    Machine(E),
    /// The peer closed the connection.
    PeerClosed,
    /// The peer received no data within the send timeout.
    SendStalled,
    /// The connection failed.
    Io(io::ErrorKind),
}

impl<E> LinkEnd<E> {
    /// Whether the peer, or the peer's host, ended it.
    pub(crate) fn was_by_peer(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        match self {
            Self::PeerClosed => true,
            Self::Io(kind) => [BrokenPipe, ConnectionAborted, ConnectionReset].contains(kind),
            Self::Machine(_) | Self::SendStalled => false,
        }
    }
}

impl<E: fmt::Display> fmt::Display for LinkEnd<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(end) => write!(f, "{end}"),
            Self::PeerClosed => f.write_str("the peer closed the connection"),
            Self::SendStalled => f.write_str("the peer accepts no data any more"),
            Self::Io(kind) => write!(f, "the connection broke: {kind}"),
        }
    }
}

/// A connection, on this core. Cheap to clone; it ends by [`Link::close`], with the last clone, or
/// when its connection does.
pub(crate) struct Link<C: ClientMachine>(Rc<LinkHandle<C>>);

impl<C: ClientMachine> Clone for Link<C> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<C: ClientMachine> fmt::Debug for Link<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({} waiting)", self.shared().state.borrow().waiters.len())
    }
}

/// The callers' handle of the link.
struct LinkHandle<C: ClientMachine>(Rc<LinkShared<C>>);

impl<C: ClientMachine> Drop for LinkHandle<C> {
    fn drop(&mut self) {
        self.0.close();
    }
}

struct LinkShared<C: ClientMachine> {
    state: RefCell<LinkState<C>>,
    /// A permit for each command that the machine takes; closed once it takes no more.
    slots: Semaphore,
    /// Wakes tasks that wait for the connection to open or end.
    opened_or_ended: Notify,
    /// Wakes the task that listens for notifications.
    notified: Notify,
}

struct LinkState<C: ClientMachine> {
    machine: C,
    /// When the machine's clock read zero.
    began: Instant,
    /// Callers that wait for their commands.
    waiters: Slab<Waiter<C::Outcome>>,
    /// The waiter of each command index.
    by_index: Vec<usize>,
    /// Finished commands whose callers have not been woken yet, each with its waiter.
    finished: VecDeque<(usize, FinishedCommand<C::Outcome>)>,
    driver: Option<Waker>,
    /// Whether the driver runs and will look at the machine before it sleeps.
    awake: bool,
    /// Whether waiting callers have been admitted.
    is_open: bool,
    /// Whether the answer to a command was lost that the peer may have received.
    in_doubt: bool,
    end: Option<LinkEnd<C::CloseReason>>,
}

enum Waiter<D> {
    /// The command is in flight.
    Pending(Option<Waker>),
    /// The command has finished.
    Finished(D),
    /// The caller was dropped.
    Abandoned,
}

impl<C: ClientMachine> Link<C> {
    /// Starts a link on a new connection; commands wait until the machine takes them.
    /// `send_timeout`: how long the peer may receive nothing while output waits.
    pub(crate) fn start(
        stream: impl Transport,
        machine: C,
        staging: Staging,
        send_timeout: Duration,
    ) -> Self {
        let state = LinkState {
            machine,
            began: Instant::now(),
            waiters: Slab::new(),
            by_index: Vec::new(),
            finished: VecDeque::new(),
            driver: None,
            awake: false,
            is_open: false,
            in_doubt: false,
            end: None,
        };
        let (room, over, news) = (Semaphore::new(0), Notify::new(), Notify::new());
        let shared = Rc::new(LinkShared {
            state: RefCell::new(state),
            slots: room,
            opened_or_ended: over,
            notified: news,
        });
        let driver = Driver::new(stream, Rc::clone(&shared), staging, send_timeout);
        tokio::task::spawn_local(driver.run());
        Self(Rc::new(LinkHandle(shared)))
    }

    /// Sends a command once a slot is free and waits for its outcome; `None` if it was not taken.
    /// Dropping the future does not cancel the command.
    pub(crate) async fn submit(&self, command: C::Command) -> Option<C::Outcome> {
        self.reserve().await?.submit(command).await
    }

    /// Waits for a slot, so that the caller can make a last check before sending. `None` once the
    /// link has ended.
    pub(crate) async fn reserve(&self) -> Option<CommandSlot<'_, C>> {
        let permit = self.shared().slots.acquire().await.ok()?;
        Some(CommandSlot { shared: self.shared(), permit })
    }

    /// Waits for slots of two commands that are sent adjacently.
    pub(crate) async fn reserve_pair(&self) -> Option<CommandSlotPair<'_, C>> {
        let permits = self.shared().slots.acquire_many(2).await.ok()?;
        Some(CommandSlotPair { shared: self.shared(), permits })
    }

    /// Sends a command that needs no slot and waits for its outcome; `None` if it was not taken.
    pub(crate) async fn submit_unreserved(&self, command: C::Command) -> Option<C::Outcome> {
        let answer = self.shared().submit(command);
        Some(answer?.await)
    }

    /// Waits until the machine takes commands.
    ///
    /// # Errors
    /// If the connection ends before.
    pub(crate) async fn wait_open(&self) -> Result<(), LinkEnd<C::CloseReason>> {
        loop {
            let changed = self.shared().opened_or_ended.notified();
            if let Some(end) = self.end() {
                return Err(end);
            }
            if self.shared().state.borrow().is_open {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Waits until a notification may be there; for ever if none arrives.
    pub(crate) async fn wait_notification(&self) {
        self.shared().notified.notified().await;
    }

    /// How many commands can be sent now.
    pub(crate) fn free_slots(&self) -> usize {
        self.shared().slots.available_permits()
    }

    /// Calls `f` with the machine.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut C) -> T) -> T {
        f(&mut self.shared().state.borrow_mut().machine)
    }

    /// Closes the connection now; commands in flight are lost.
    pub(crate) fn close(&self) {
        self.shared().close();
    }

    /// Whether it has neither ended nor begun to close.
    pub(crate) fn is_open(&self) -> bool {
        self.shared().state.borrow().machine.is_open()
    }

    /// Why it has ended; `None` while it has not.
    pub(crate) fn end(&self) -> Option<LinkEnd<C::CloseReason>> {
        self.shared().state.borrow().end
    }

    /// Waits for its end.
    pub(crate) async fn wait_end(&self) -> LinkEnd<C::CloseReason> {
        loop {
            let over = self.shared().opened_or_ended.notified();
            if let Some(end) = self.end() {
                return end;
            }
            over.await;
        }
    }

    fn shared(&self) -> &Rc<LinkShared<C>> {
        &self.0.0
    }
}

/// A reserved place for one command.
pub(crate) struct CommandSlot<'a, C: ClientMachine> {
    shared: &'a Rc<LinkShared<C>>,
    permit: SemaphorePermit<'a>,
}

impl<C: ClientMachine> CommandSlot<'_, C> {
    /// Sends a command on the first poll and waits for its outcome: see [`Link::submit`].
    pub(crate) async fn submit(self, command: C::Command) -> Option<C::Outcome> {
        self.permit.forget();
        Some(self.shared.submit(command)?.await)
    }
}

/// Reserved places for two commands.
pub(crate) struct CommandSlotPair<'a, C: ClientMachine> {
    shared: &'a Rc<LinkShared<C>>,
    permits: SemaphorePermit<'a>,
}

impl<C: ClientMachine> CommandSlotPair<'_, C> {
    /// Sends both adjacently on the first poll and waits for their outcomes.
    pub(crate) async fn submit(
        self,
        first: C::Command,
        second: C::Command,
    ) -> (Option<C::Outcome>, Option<C::Outcome>) {
        self.permits.forget();
        let (first, second) = (self.shared.submit(first), self.shared.submit(second));
        (wait_outcome(first).await, wait_outcome(second).await)
    }
}

/// Waits for the outcome of a command, if it was taken.
async fn wait_outcome<C: ClientMachine>(answer: Option<PendingCommand<C>>) -> Option<C::Outcome> {
    match answer {
        Some(answer) => Some(answer.await),
        None => None,
    }
}

impl<C: ClientMachine> LinkShared<C> {
    fn close(&self) {
        let mut state = self.state.borrow_mut();
        state.machine.close();
        state.wake();
    }

    /// Submits a command. The caller holds a permit or needs none.
    fn submit(self: &Rc<Self>, command: C::Command) -> Option<PendingCommand<C>> {
        let mut state = self.state.borrow_mut();
        // The timeout starts now, not when the driver last ran.
        let now = state.began.elapsed();
        state.machine.on_timer(now);
        state.wake();
        let index = state.machine.submit(command)?;
        let place = state.waiters.insert(Waiter::Pending(None));
        if state.by_index.len() <= index {
            state.by_index.resize(index + 1, usize::MAX);
        }
        state.by_index[index] = place;
        Some(PendingCommand { shared: Rc::clone(self), waiter: place })
    }

    /// Wakes the callers of at most `most` finished commands and admits as many new ones. Returns
    /// whether more are finished.
    fn deliver(&self, most: usize) -> bool {
        let mut state = self.state.borrow_mut();
        state.collect_finished();
        let delivered = most.min(state.finished.len());
        let mut ended = 0;
        for _ in 0..delivered {
            ended += state.deliver_next();
        }
        let more = !state.finished.is_empty();
        if !state.is_open
            && let Some(room) = state.machine.free_slots()
        {
            state.is_open = true;
            ended = room;
            self.opened_or_ended.notify_waiters();
        }
        if state.machine.has_notification() {
            self.notified.notify_one();
        }
        drop(state);
        if ended > 0 {
            self.slots.add_permits(ended);
        }
        more
    }

    /// Ends the link and wakes all waiters. Returns whether commands are in doubt.
    fn finish(&self, end: LinkEnd<C::CloseReason>) -> bool {
        self.state.borrow_mut().machine.close();
        self.slots.close();
        self.deliver(usize::MAX);
        let mut state = self.state.borrow_mut();
        state.end.get_or_insert(end);
        self.opened_or_ended.notify_waiters();
        state.in_doubt
    }
}

impl<C: ClientMachine> LinkState<C> {
    /// Wakes the driver.
    fn wake(&self) {
        if !self.awake
            && let Some(waker) = &self.driver
        {
            waker.wake_by_ref();
        }
    }

    /// Takes all finished commands at once: the machine may reuse an index for its next command.
    fn collect_finished(&mut self) {
        while let Some(done) = self.machine.poll_done() {
            self.record_finished(done);
        }
    }

    /// Whether the answer to a command was lost that the peer may have received.
    fn is_in_doubt(&mut self) -> bool {
        self.collect_finished();
        self.in_doubt
    }

    fn record_finished(&mut self, ended: FinishedCommand<C::Outcome>) {
        self.in_doubt |= ended.in_doubt;
        let place = self.by_index.get(ended.index).copied().unwrap_or(usize::MAX);
        self.finished.push_back((place, ended));
    }

    /// Delivers the first finished command. Returns how many commands may be sent in its place.
    fn deliver_next(&mut self) -> usize {
        let Some((place, ended)) = self.finished.pop_front() else { return 0 };
        if let Some(waiting) = self.waiters.get_mut(place) {
            match std::mem::replace(waiting, Waiter::Finished(ended.outcome)) {
                Waiter::Pending(waker) => waker.into_iter().for_each(Waker::wake),
                Waiter::Abandoned | Waiter::Finished(_) => drop(self.waiters.remove(place)),
            }
        }
        usize::from(ended.holds_slot)
    }
}

/// A command in flight.
struct PendingCommand<C: ClientMachine> {
    shared: Rc<LinkShared<C>>,
    waiter: usize,
}

impl<C: ClientMachine> Future for PendingCommand<C> {
    type Output = C::Outcome;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Outcome> {
        let mut state = self.shared.state.borrow_mut();
        let Some(waiting) = state.waiters.get_mut(self.waiter) else { return Poll::Pending };
        match std::mem::replace(waiting, Waiter::Abandoned) {
            Waiter::Finished(done) => Poll::Ready(done),
            Waiter::Pending(known) => {
                let known = known.filter(|k| k.will_wake(cx.waker()));
                let waker = known.unwrap_or_else(|| cx.waker().clone());
                *waiting = Waiter::Pending(Some(waker));
                Poll::Pending
            }
            Waiter::Abandoned => Poll::Pending,
        }
    }
}

impl<C: ClientMachine> Drop for PendingCommand<C> {
    fn drop(&mut self) {
        let mut state = self.shared.state.borrow_mut();
        match state.waiters.get_mut(self.waiter) {
            // The command continues; its slot becomes free when it finishes.
            Some(waiting @ Waiter::Pending(_)) => *waiting = Waiter::Abandoned,
            Some(_) => drop(state.waiters.remove(self.waiter)),
            None => {}
        }
    }
}
