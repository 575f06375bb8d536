//! What is reached by connections, for as long as somebody wants it: connected, and connected again.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use crate::backoff::Backoff;

/// How something is reached. Its [`fmt::Display`] is for the log.
pub(crate) trait Reach: fmt::Display + 'static {
    /// What there is while it is connected.
    type Live: Alive;
    /// Why it is not reached.
    type Error: Copy + fmt::Debug + fmt::Display;

    /// Connects.
    async fn bring_up(&self) -> Result<Rc<Self::Live>, Self::Error>;

    /// Whether trying again makes no sense before somebody has changed something.
    fn is_final(error: &Self::Error) -> bool;

    /// Keeps it alive and listens to it until it ends, and says for how long it wants to be left alone then.
    async fn keep(&self, live: &Rc<Self::Live>, news: News<Self>) -> Duration
    where
        Self: Sized;

    /// How long to wait before connecting again.
    fn backoff(&self) -> Backoff;

    /// Any number, for the pauses.
    fn random(&self) -> u64;
}

/// Connections that are up.
pub(crate) trait Alive {
    /// Whether none of them has ended, or is about to.
    fn is_up(&self) -> bool;

    /// Ends them.
    fn close(&self);
}

/// Why something cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// It has not come back in time.
    Away,
    /// It does not come back.
    Over,
}

/// Something that is kept, on this core. Cheap to clone; with the last clone its connections go.
pub(crate) struct Kept<R: Reach>(Rc<Inner<R>>);

impl<R: Reach> Clone for Kept<R> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

struct Inner<R: Reach> {
    reach: Rc<R>,
    state: RefCell<State<R>>,
    /// Counts the moments at which what is there may have become something else.
    generation: Cell<u64>,
    changed: Notify,
    keeper: RefCell<Option<AbortOnDropHandle<()>>>,
}

enum State<R: Reach> {
    /// It can be used.
    Up(Rc<R::Live>),
    /// It is being connected again.
    Away,
    /// It does not come back: by choice, or for this reason.
    Over(Option<R::Error>),
}

impl<R: Reach> Drop for Inner<R> {
    fn drop(&mut self) {
        if let State::Up(live) = &*self.state.borrow() {
            live.close();
        }
    }
}

impl<R: Reach> Kept<R> {
    /// Connects, and from then on connects again whenever that is lost.
    ///
    /// # Errors
    /// Why the first time has failed.
    pub(crate) async fn connect(reach: R) -> Result<Self, R::Error> {
        let live = reach.bring_up().await?;
        Ok(Self::new(reach, Some(live)))
    }

    /// The same for what may be away now: it is connected as soon as it is there.
    pub(crate) fn expect(reach: R) -> Self {
        Self::new(reach, None)
    }

    fn new(reach: R, live: Option<Rc<R::Live>>) -> Self {
        let reach = Rc::new(reach);
        let state = live.as_ref().map_or(State::Away, |live| State::Up(Rc::clone(live)));
        let inner = Rc::new(Inner {
            reach: Rc::clone(&reach),
            state: RefCell::new(state),
            generation: Cell::new(1),
            changed: Notify::new(),
            keeper: RefCell::new(None),
        });
        let keeper = Keeper { reach, inner: Rc::downgrade(&inner), failures: 0 };
        let task = tokio::task::spawn_local(keeper.run(live));
        *inner.keeper.borrow_mut() = Some(AbortOnDropHandle::new(task));
        Self(inner)
    }

    pub(crate) fn reach(&self) -> &R {
        &self.0.reach
    }

    /// Why it does not come back, if it does not, and not by choice.
    pub(crate) fn over(&self) -> Option<R::Error> {
        match &*self.0.state.borrow() {
            State::Over(why) => *why,
            State::Up(_) | State::Away => None,
        }
    }

    /// Whether it does not come back, by choice or not.
    pub(crate) fn is_over(&self) -> bool {
        matches!(&*self.0.state.borrow(), State::Over(_))
    }

    /// What there is, if it is up.
    pub(crate) fn live(&self) -> Option<Rc<R::Live>> {
        match &*self.0.state.borrow() {
            State::Up(live) if live.is_up() => Some(Rc::clone(live)),
            _ => None,
        }
    }

    /// Counts the moments at which what is there may have changed.
    pub(crate) fn generation(&self) -> u64 {
        self.0.generation.get()
    }

    /// Waits until [`Self::generation`] is another one, and gives it; `None` once it is over.
    pub(crate) async fn changed(&self, known: u64) -> Option<u64> {
        loop {
            let changed = self.0.changed.notified();
            if self.is_over() {
                return None;
            }
            if self.generation() != known {
                return Some(self.generation());
            }
            changed.await;
        }
    }

    /// Waits for it to be up.
    pub(crate) async fn up(&self, until: Instant) -> Result<Rc<R::Live>, Absent> {
        loop {
            let changed = self.0.changed.notified();
            if let Some(live) = self.live() {
                return Ok(live);
            }
            if self.is_over() {
                return Err(Absent::Over);
            }
            timeout_at(until, changed).await.map_err(|_| Absent::Away)?;
        }
    }

    /// Waits for a change, until then at most.
    pub(crate) async fn pause(&self, until: Instant) {
        // Time that has run out is as good a reason to look again.
        let _ = timeout_at(until, self.0.changed.notified()).await;
    }

    /// Something is to be looked at again.
    pub(crate) fn note(&self) {
        self.0.note();
    }

    /// Nobody wants it any more: it is over for all clones. Its connections are the caller's to end.
    pub(crate) fn let_go(&self) {
        drop(self.0.keeper.borrow_mut().take());
        self.0.set(State::Over(None));
    }

    /// It has said what cannot be: nothing of it is to be believed.
    pub(crate) fn give_up(&self, live: &R::Live, why: &str) {
        warn!("{}: {why}; connecting again", self.reach());
        live.close();
    }
}

impl<R: Reach> Inner<R> {
    fn set(&self, state: State<R>) {
        *self.state.borrow_mut() = state;
        self.note();
    }

    fn note(&self) {
        self.generation.set(self.generation.get() + 1);
        self.changed.notify_waiters();
    }
}

/// Where somebody who listens tells that something is to be looked at again.
pub(crate) struct News<R: Reach>(Weak<Inner<R>>);

impl<R: Reach> News<R> {
    /// Tells it; whether anybody wants to know.
    pub(crate) fn tell(&self) -> bool {
        self.0.upgrade().is_some_and(|inner| {
            inner.note();
            true
        })
    }
}

/// Keeps something connected.
struct Keeper<R: Reach> {
    reach: Rc<R>,
    inner: Weak<Inner<R>>,
    /// Attempts since it was last up for a while.
    failures: u32,
}

impl<R: Reach> Keeper<R> {
    async fn run(mut self, mut live: Option<Rc<R::Live>>) {
        loop {
            if let Some(live) = live.take() {
                let rest = self.keep(&live).await;
                drop(live);
                if !self.tell(State::Away) {
                    return;
                }
                sleep(rest).await;
            }
            let up = match self.again().await {
                Ok(up) => up,
                Err(e) => {
                    warn!("{} is given up: {e}", self.reach);
                    self.tell(State::Over(Some(e)));
                    return;
                }
            };
            if !self.tell(State::Up(Rc::clone(&up))) {
                return up.close();
            }
            live = Some(up);
        }
    }

    async fn keep(&mut self, live: &Rc<R::Live>) -> Duration {
        let since = Instant::now();
        let rest = self.reach.keep(live, News(self.inner.clone())).await;
        live.close();
        // What breaks as soon as it is up is no better than what does not come up.
        if since.elapsed() >= self.reach.backoff().longest {
            self.failures = 0;
        }
        rest
    }

    /// Connects until that succeeds, or makes no sense any more.
    async fn again(&mut self) -> Result<Rc<R::Live>, R::Error> {
        loop {
            let pause = self.reach.backoff().pause(self.failures, self.reach.random());
            self.failures = self.failures.saturating_add(1);
            sleep(pause).await;
            match self.reach.bring_up().await {
                Err(e) if !R::is_final(&e) => debug!("connecting to {} again: {e}", self.reach),
                end => return end,
            }
        }
    }

    /// Whether anybody wants to know.
    fn tell(&self, state: State<R>) -> bool {
        self.inner.upgrade().is_some_and(|inner| {
            inner.set(state);
            true
        })
    }
}
