//! A session, for as long as somebody wants it: logged in, and logged in again.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use ::iscsi::initiator::{Lost, Notice};
use rt::Core;
use scsi::Lun as Number;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info, warn};

use super::connect::{ConnectError, Connector};
use super::identity::Described;
use super::link::End;
use super::live::{Failed, Live};
use super::options::Options;
use crate::drive::Staging;

/// A session with a target, on this core. Cheap to clone; with the last clone its connection goes, and what is
/// in flight with it.
#[derive(Clone)]
pub struct Session(Rc<Inner>);

struct Inner {
    connector: Rc<Connector>,
    state: RefCell<State>,
    /// Counts the moments at which units may have become others.
    generation: Cell<u64>,
    changed: Notify,
    keeper: RefCell<Option<AbortOnDropHandle<()>>>,
}

#[derive(Clone, Debug)]
enum State {
    /// It can be used.
    Up(Rc<Live>),
    /// It is being logged in again.
    Away,
    /// It does not come back: by choice, or for this reason.
    Over(Option<ConnectError>),
}

/// Why a session cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// It has not come back in time.
    #[error("the target has been away for too long")]
    Away,
    /// It does not come back.
    #[error("the target does not come back")]
    Over,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = &self.0.connector.options;
        write!(f, "Session({} at {})", options.target, options.address)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let State::Up(live) = &*self.state.borrow() {
            live.close();
        }
    }
}

impl Session {
    /// Logs in to a target, and from then on logs in again whenever the connection is lost.
    ///
    /// # Errors
    /// Why the first time has failed.
    pub async fn connect(
        core: &Core,
        options: Options,
        staging: Staging,
    ) -> Result<Self, ConnectError> {
        let connector = Rc::new(Connector::new(core, options, staging, false)?);
        let live = connector.bring_up().await?;
        let inner = Rc::new(Inner {
            connector: Rc::clone(&connector),
            state: RefCell::new(State::Up(Rc::clone(&live))),
            generation: Cell::new(1),
            changed: Notify::new(),
            keeper: RefCell::new(None),
        });
        let keeper = Keeper { connector, inner: Rc::downgrade(&inner), failures: 0 };
        let task = tokio::task::spawn_local(keeper.run(live));
        *inner.keeper.borrow_mut() = Some(AbortOnDropHandle::new(task));
        Ok(Self(inner))
    }

    /// What it was told when it was connected.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.0.connector.options
    }

    /// Why it does not come back, if it does not, and not by choice.
    #[must_use]
    pub fn over(&self) -> Option<ConnectError> {
        match &*self.0.state.borrow() {
            State::Over(why) => *why,
            State::Up(_) | State::Away => None,
        }
    }

    /// Whether it can be used now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.live().is_some()
    }

    /// Counts the moments at which its units may have changed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation.get()
    }

    /// Waits until [`Self::generation`] is another one, and gives it; `None` once the session is over.
    pub async fn changed(&self, known: u64) -> Option<u64> {
        loop {
            let changed = self.0.changed.notified();
            if matches!(&*self.0.state.borrow(), State::Over(_)) {
                return None;
            }
            if self.generation() != known {
                return Some(self.generation());
            }
            changed.await;
        }
    }

    /// The numbers of the units that this initiator may use, in order.
    ///
    /// # Errors
    /// [`Failed`]; as if a connection had ended where the target is away.
    pub async fn luns(&self) -> Result<Vec<u16>, Failed> {
        self.here()?.luns().await
    }

    /// What a unit is; `None` for one that there is not, or that cannot be used.
    ///
    /// # Errors
    /// [`Failed`]; as if a connection had ended where the target is away.
    pub async fn describe(&self, unit: u16) -> Result<Option<Described>, Failed> {
        let Some(unit) = Number::new(unit) else { return Ok(None) };
        self.here()?.describe(unit).await
    }

    /// LOGICAL UNIT RESET (SAM-5 7.7): ends all that anybody does with the unit.
    ///
    /// # Errors
    /// [`Failed`] where the target did not confirm it.
    pub async fn reset(&self, unit: u16) -> Result<(), Failed> {
        let unit = Number::new(unit).ok_or(Failed::Nonsense("there is no such unit"))?;
        self.here()?.reset(unit).await
    }

    /// Logs out. It is over for all clones. What was written and not flushed is the target's to keep.
    ///
    /// # Errors
    /// [`Failed`] where the target did not confirm it.
    pub async fn shut_down(&self) -> Result<(), Failed> {
        let live = self.here()?;
        drop(self.0.keeper.borrow_mut().take());
        self.0.set(State::Over(None));
        let done = live.log_out().await;
        live.close();
        done
    }

    fn here(&self) -> Result<Rc<Live>, Failed> {
        self.live().ok_or(Failed::Lost(Lost::Unsent))
    }

    /// The session, if it is up.
    pub(super) fn live(&self) -> Option<Rc<Live>> {
        match &*self.0.state.borrow() {
            State::Up(live) if live.is_up() => Some(Rc::clone(live)),
            _ => None,
        }
    }

    /// Waits for the session to be up.
    pub(super) async fn up(&self, until: Instant) -> Result<Rc<Live>, Absent> {
        loop {
            let changed = self.0.changed.notified();
            if let Some(live) = self.live() {
                return Ok(live);
            }
            if matches!(&*self.0.state.borrow(), State::Over(_)) {
                return Err(Absent::Over);
            }
            timeout_at(until, changed).await.map_err(|_| Absent::Away)?;
        }
    }

    /// Waits for a change, until then at most.
    pub(super) async fn pause(&self, until: Instant) {
        // Time that has run out is as good a reason to look again.
        let _ = timeout_at(until, self.0.changed.notified()).await;
    }

    /// Units may have become others.
    pub(super) fn note(&self) {
        self.0.note();
    }

    /// The target has said what cannot be: nothing of it is to be believed.
    pub(super) fn give_up(&self, live: &Live, why: &str) {
        warn!("{self:?}: {why}; connecting again");
        live.close();
    }
}

impl Inner {
    fn set(&self, state: State) {
        *self.state.borrow_mut() = state;
        self.note();
    }

    /// Something is to be looked at again.
    fn note(&self) {
        self.generation.set(self.generation.get() + 1);
        self.changed.notify_waiters();
    }
}

/// Keeps a session logged in.
struct Keeper {
    connector: Rc<Connector>,
    inner: Weak<Inner>,
    /// Attempts since it was last up for a while.
    failures: u32,
}

impl Keeper {
    async fn run(mut self, mut live: Rc<Live>) {
        loop {
            let since = Instant::now();
            let end = self.keep(&live).await;
            live.close();
            let options = &self.connector.options;
            info!("{} at {}: {end}", options.target, options.address);
            // One that breaks as soon as it is up is no better than one that does not come up.
            if since.elapsed() >= options.backoff.longest {
                self.failures = 0;
            }
            drop(live);
            if !self.tell(State::Away) {
                return;
            }
            match self.again(self.connector.rest(end)).await {
                Ok(up) => live = up,
                Err(e) => {
                    let options = &self.connector.options;
                    warn!("{} at {} is given up: {e}", options.target, options.address);
                    self.tell(State::Over(Some(e)));
                    return;
                }
            }
            if !self.tell(State::Up(Rc::clone(&live))) {
                return live.close();
            }
        }
    }

    /// Listens to a session until it ends. Its machine keeps it alive.
    async fn keep(&self, live: &Rc<Live>) -> End {
        let listener = listen(Rc::clone(live), self.inner.clone());
        let _listener = AbortOnDropHandle::new(tokio::task::spawn_local(listener));
        live.ended().await
    }

    /// Logs in until that succeeds, or makes no sense any more; `rest`: after this time at the earliest.
    async fn again(&mut self, rest: Duration) -> Result<Rc<Live>, ConnectError> {
        sleep(rest).await;
        loop {
            let random = self.connector.core.random_u64();
            let pause = self.connector.options.backoff.pause(self.failures, random);
            self.failures = self.failures.saturating_add(1);
            sleep(pause).await;
            match self.connector.bring_up().await {
                Err(e) if !e.is_final() => debug!("connecting again: {e}"),
                end => return end,
            }
        }
    }

    /// Whether anybody wants to know.
    fn tell(&self, state: State) -> bool {
        let inner = self.inner.upgrade();
        inner.is_some_and(|inner| {
            inner.set(state);
            true
        })
    }
}

/// Takes what the target tells of by itself.
async fn listen(live: Rc<Live>, inner: Weak<Inner>) {
    loop {
        let notice = live.notice().await;
        let Some(inner) = inner.upgrade() else { return };
        match notice {
            Notice::Scsi { .. } => inner.note(),
            Notice::LogoutRequest { within_s } => {
                debug!("the target wants the session to end within {within_s} s");
            }
        }
    }
}
