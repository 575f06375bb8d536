//! A client that reconnects after its connection is lost.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use crate::backoff::Backoff;

/// How to connect. Its [`fmt::Display`] is for the log.
pub(crate) trait Connectable: fmt::Display + 'static {
    /// The established connection.
    type Connection: ActiveConnection;
    /// Why connecting failed.
    type Error: Copy + fmt::Debug + fmt::Display;

    /// Connects.
    async fn establish(&self) -> Result<Rc<Self::Connection>, Self::Error>;

    /// Whether retrying is useless until the configuration changes.
    fn is_final(error: &Self::Error) -> bool;

    /// Keeps the connection alive and listens until it ends. Returns how long the peer asked to
    /// wait before reconnecting.
    async fn run_until_end(
        &self,
        live: &Rc<Self::Connection>,
        news: ChangeNotifier<Self>,
    ) -> Duration
    where
        Self: Sized;

    /// Delays between attempts.
    fn backoff(&self) -> Backoff;

    /// A random number, for the delays.
    fn random(&self) -> u64;
}

/// Established connections of a client.
pub(crate) trait ActiveConnection {
    /// Whether none of them has ended or begun to close.
    fn is_up(&self) -> bool;

    /// Closes them.
    fn close(&self);
}

/// Why the client cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreachable {
    /// It did not reconnect in time.
    TimedOut,
    /// It was closed or gave up reconnecting.
    Closed,
}

/// A client on this core that reconnects. Cheap to clone; dropping the last clone drops its
/// connections.
pub(crate) struct ReconnectingClient<R: Connectable>(Rc<ReconnectState<R>>);

impl<R: Connectable> Clone for ReconnectingClient<R> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

struct ReconnectState<R: Connectable> {
    connector: Rc<R>,
    state: RefCell<State<R>>,
    /// Incremented whenever the peer's devices may have been replaced.
    generation: Cell<u64>,
    changed: Notify,
    task: RefCell<Option<AbortOnDropHandle<()>>>,
}

enum State<R: Connectable> {
    /// Connected.
    Up(Rc<R::Connection>),
    /// Connecting again.
    Reconnecting,
    /// Closed by the user, or given up for this reason.
    Closed(Option<R::Error>),
}

impl<R: Connectable> Drop for ReconnectState<R> {
    fn drop(&mut self) {
        if let State::Up(live) = &*self.state.borrow() {
            live.close();
        }
    }
}

impl<R: Connectable> ReconnectingClient<R> {
    /// Connects, and connects again whenever the connection is lost.
    ///
    /// # Errors
    /// Why the first attempt failed.
    pub(crate) async fn connect(connector: R) -> Result<Self, R::Error> {
        let live = connector.establish().await?;
        Ok(Self::new(connector, Some(live)))
    }

    /// The same in the background, for a peer that may be unreachable now.
    pub(crate) fn connect_in_background(connector: R) -> Self {
        Self::new(connector, None)
    }

    fn new(reach: R, live: Option<Rc<R::Connection>>) -> Self {
        let reach = Rc::new(reach);
        let state = live.as_ref().map_or(State::Reconnecting, |live| State::Up(Rc::clone(live)));
        let inner = Rc::new(ReconnectState {
            connector: Rc::clone(&reach),
            state: RefCell::new(state),
            generation: Cell::new(1),
            changed: Notify::new(),
            task: RefCell::new(None),
        });
        let reconnector =
            Reconnector { connector: reach, inner: Rc::downgrade(&inner), failures: 0 };
        let task = tokio::task::spawn_local(reconnector.run(live));
        *inner.task.borrow_mut() = Some(AbortOnDropHandle::new(task));
        Self(inner)
    }

    pub(crate) fn connector(&self) -> &R {
        &self.0.connector
    }

    /// Why it stopped reconnecting, unless it was closed.
    pub(crate) fn final_error(&self) -> Option<R::Error> {
        match &*self.0.state.borrow() {
            State::Closed(why) => *why,
            State::Up(_) | State::Reconnecting => None,
        }
    }

    /// Whether it was closed or stopped reconnecting.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(&*self.0.state.borrow(), State::Closed(_))
    }

    /// The connection, if established.
    pub(crate) fn active(&self) -> Option<Rc<R::Connection>> {
        match &*self.0.state.borrow() {
            State::Up(live) if live.is_up() => Some(Rc::clone(live)),
            _ => None,
        }
    }

    /// Incremented whenever the peer's devices may have changed.
    pub(crate) fn generation(&self) -> u64 {
        self.0.generation.get()
    }

    /// Waits until [`Self::generation`] differs from `known` and returns it; `None` once the client
    /// is closed.
    pub(crate) async fn changed(&self, known: u64) -> Option<u64> {
        loop {
            let changed = self.0.changed.notified();
            if self.is_closed() {
                return None;
            }
            if self.generation() != known {
                return Some(self.generation());
            }
            changed.await;
        }
    }

    /// Waits until it is connected.
    pub(crate) async fn wait_up(&self, until: Instant) -> Result<Rc<R::Connection>, Unreachable> {
        loop {
            let changed = self.0.changed.notified();
            if let Some(live) = self.active() {
                return Ok(live);
            }
            if self.is_closed() {
                return Err(Unreachable::Closed);
            }
            timeout_at(until, changed).await.map_err(|_| Unreachable::TimedOut)?;
        }
    }

    /// Waits for a change, at most until `until`.
    pub(crate) async fn wait_change(&self, until: Instant) {
        // A timeout is as good a reason to check again.
        let _ = timeout_at(until, self.0.changed.notified()).await;
    }

    /// Records that devices may have changed.
    pub(crate) fn bump_generation(&self) {
        self.0.bump_generation();
    }

    /// Stops reconnecting, for all clones. The caller ends the connections.
    pub(crate) fn close(&self) {
        drop(self.0.task.borrow_mut().take());
        self.0.set(State::Closed(None));
    }

    /// Closes the connection of a peer that violated the protocol.
    pub(crate) fn fail_connection(&self, live: &R::Connection, why: &str) {
        warn!("{}: {why}; reconnecting", self.connector());
        live.close();
    }
}

impl<R: Connectable> ReconnectState<R> {
    fn set(&self, state: State<R>) {
        *self.state.borrow_mut() = state;
        self.bump_generation();
    }

    fn bump_generation(&self) {
        self.generation.set(self.generation.get() + 1);
        self.changed.notify_waiters();
    }
}

/// Reports changes to the client from a task that listens to the peer.
pub(crate) struct ChangeNotifier<R: Connectable>(Weak<ReconnectState<R>>);

impl<R: Connectable> ChangeNotifier<R> {
    /// Reports a change. Returns whether the client still exists.
    pub(crate) fn notify(&self) -> bool {
        self.0.upgrade().is_some_and(|inner| {
            inner.bump_generation();
            true
        })
    }
}

/// The task that reconnects a client.
struct Reconnector<R: Connectable> {
    connector: Rc<R>,
    inner: Weak<ReconnectState<R>>,
    /// Failed attempts since it was last connected for a while.
    failures: u32,
}

impl<R: Connectable> Reconnector<R> {
    async fn run(mut self, mut live: Option<Rc<R::Connection>>) {
        loop {
            if let Some(live) = live.take() {
                let rest = self.run_connection(&live).await;
                drop(live);
                if !self.set_state(State::Reconnecting) {
                    return;
                }
                sleep(rest).await;
            }
            let up = match self.reconnect().await {
                Ok(up) => up,
                Err(e) => {
                    warn!("{} cannot be reconnected: {e}", self.connector);
                    self.set_state(State::Closed(Some(e)));
                    return;
                }
            };
            if !self.set_state(State::Up(Rc::clone(&up))) {
                return up.close();
            }
            live = Some(up);
        }
    }

    async fn run_connection(&mut self, live: &Rc<R::Connection>) -> Duration {
        let since = Instant::now();
        let rest = self.connector.run_until_end(live, ChangeNotifier(self.inner.clone())).await;
        live.close();
        // A connection that breaks at once counts as a failed attempt.
        if since.elapsed() >= self.connector.backoff().max {
            self.failures = 0;
        }
        rest
    }

    /// Retries until an attempt succeeds or fails finally.
    async fn reconnect(&mut self) -> Result<Rc<R::Connection>, R::Error> {
        loop {
            let pause = self.connector.backoff().delay(self.failures, self.connector.random());
            self.failures = self.failures.saturating_add(1);
            sleep(pause).await;
            match self.connector.establish().await {
                Err(e) if !R::is_final(&e) => {
                    debug!("reconnecting to {} failed: {e}", self.connector);
                }
                end => return end,
            }
        }
    }

    /// Returns whether the client still exists.
    fn set_state(&self, state: State<R>) -> bool {
        self.inner.upgrade().is_some_and(|inner| {
            inner.set(state);
            true
        })
    }
}
