//! A controller, for as long as somebody wants it: connected, and connected again.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

use ::nvme::log::AnaState;
use futures_util::future::join_all;
use rt::Core;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info, warn};

use super::admin::Failed;
use super::connect::{ConnectError, Connector};
use super::identity::{Abilities, Described};
use super::live::{Event, Live};
use super::options::Options;
use super::queue::{Queue, Staging};

/// Pause before the next event is asked for: meanwhile the controller gathers what it has to tell, and one that always
/// has something keeps no core at work.
const BETWEEN_EVENTS: Duration = Duration::from_millis(10);

/// A controller of a subsystem, on this core. Cheap to clone; with the last clone its connections go, and
/// what is in flight with them.
#[derive(Clone)]
pub struct Controller(Rc<Inner>);

struct Inner {
    connector: Rc<Connector>,
    state: RefCell<State>,
    /// Counts the moments at which namespaces may have become others.
    generation: Cell<u64>,
    changed: Notify,
    keeper: RefCell<Option<AbortOnDropHandle<()>>>,
}

#[derive(Clone, Debug)]
enum State {
    /// It can be used.
    Up(Rc<Live>),
    /// It is being connected again.
    Away,
    /// It does not come back: by choice, or for this reason.
    Over(Option<ConnectError>),
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = &self.0.connector.options;
        write!(f, "Controller({} at {})", options.subnqn, options.address)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let State::Up(live) = &*self.state.borrow() {
            live.close();
        }
    }
}

impl Controller {
    /// Connects to a controller, and from then on connects again whenever it is lost.
    ///
    /// # Errors
    /// Why the first time has failed.
    pub async fn connect(
        core: &Core,
        options: Options,
        staging: Staging,
    ) -> Result<Self, ConnectError> {
        let connector = Rc::new(Connector::new(core, options, staging));
        let live = connector.bring_up().await?;
        Ok(Self::kept(connector, Some(live)))
    }

    /// The same for a controller that may be away now: it is connected as soon as it is there.
    #[must_use]
    pub fn expect(core: &Core, options: Options, staging: Staging) -> Self {
        Self::kept(Rc::new(Connector::new(core, options, staging)), None)
    }

    /// Connects to a subsystem at all of these addresses. Those that are away are expected.
    ///
    /// # Errors
    /// Why the first of them has failed, if all have.
    pub async fn connect_all(
        core: &Core,
        options: &Options,
        addresses: &[SocketAddr],
        staging: &Staging,
    ) -> Result<Vec<Self>, ConnectError> {
        let at = |address: &SocketAddr| Options { address: *address, ..options.clone() };
        let connect = |address| Self::connect(core, at(address), staging.clone());
        let all = join_all(addresses.iter().map(connect)).await;
        if let (Some(Err(first)), false) = (all.first(), all.iter().any(Result::is_ok)) {
            return Err(*first);
        }
        let expect = |(one, address): (Result<Self, _>, _)| match one {
            Ok(controller) => controller,
            Err(why) => {
                warn!("{} at {address} is expected: {why}", options.subnqn);
                Self::expect(core, at(address), staging.clone())
            }
        };
        Ok(all.into_iter().zip(addresses).map(expect).collect())
    }

    fn kept(connector: Rc<Connector>, live: Option<Rc<Live>>) -> Self {
        let state = live.as_ref().map_or(State::Away, |live| State::Up(Rc::clone(live)));
        let inner = Rc::new(Inner {
            connector: Rc::clone(&connector),
            state: RefCell::new(state),
            generation: Cell::new(1),
            changed: Notify::new(),
            keeper: RefCell::new(None),
        });
        let keeper = Keeper { connector, inner: Rc::downgrade(&inner), failures: 0 };
        let task = tokio::task::spawn_local(keeper.run(live));
        *inner.keeper.borrow_mut() = Some(AbortOnDropHandle::new(task));
        Self(inner)
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

    /// Whether it does not come back, by choice or not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(&*self.0.state.borrow(), State::Over(_))
    }

    /// What it can do; `None` while it is away.
    #[must_use]
    pub fn abilities(&self) -> Option<Abilities> {
        self.live().map(|live| live.abilities)
    }

    /// Its I/O queues; none while it is away.
    #[must_use]
    pub fn queues(&self) -> Vec<Queue> {
        self.live().map_or_else(Vec::new, |live| live.io.clone())
    }

    /// Counts the moments at which its namespaces, or how they are reached, may have changed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation.get()
    }

    /// Waits until [`Self::generation`] is another one, and gives it; `None` once the controller is over.
    pub async fn changed(&self, known: u64) -> Option<u64> {
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

    /// The namespaces that this host may use, in order.
    ///
    /// # Errors
    /// [`Failed`]; as if a queue had ended where the controller is away.
    pub async fn namespaces(&self) -> Result<Vec<u32>, Failed> {
        self.here()?.namespaces().await
    }

    /// What a namespace is; `None` for one that there is not, or that cannot be used.
    ///
    /// # Errors
    /// [`Failed`]; as if a queue had ended where the controller is away.
    pub async fn describe(&self, nsid: u32) -> Result<Option<Described>, Failed> {
        self.here()?.describe(nsid).await
    }

    /// How a group of namespaces is reached; `None` while the controller is away. Where there are no such
    /// states, or none of this group, well.
    #[must_use]
    pub fn access(&self, group: u32) -> Option<AnaState> {
        let live = self.live()?;
        let ana = live.ana.borrow();
        Some(ana.get(&group).copied().unwrap_or(AnaState::Optimized))
    }

    /// Takes leave of the controller: what was written is durable then. It is over for all clones.
    ///
    /// # Errors
    /// [`Failed`] where the controller did not confirm it.
    pub async fn shut_down(&self) -> Result<(), Failed> {
        let live = self.here()?;
        drop(self.0.keeper.borrow_mut().take());
        self.0.set(State::Over(None));
        let done = live.shut_down().await;
        live.close();
        done
    }

    fn here(&self) -> Result<Rc<Live>, Failed> {
        self.live().ok_or(Failed::Lost(::nvme::host::Lost::Unsent))
    }

    /// The association, if it is up.
    pub(super) fn live(&self) -> Option<Rc<Live>> {
        match &*self.0.state.borrow() {
            State::Up(live) if live.is_up() => Some(Rc::clone(live)),
            _ => None,
        }
    }

    /// Waits for a change, until then at most.
    pub(super) async fn pause(&self, until: Instant) {
        // Time that has run out is as good a reason to look again.
        let _ = timeout_at(until, self.0.changed.notified()).await;
    }

    /// The controller has said what cannot be: nothing of it is to be believed.
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

/// Keeps a controller connected.
struct Keeper {
    connector: Rc<Connector>,
    inner: Weak<Inner>,
    /// Attempts since it was last up for a while.
    failures: u32,
}

impl Keeper {
    async fn run(mut self, mut live: Option<Rc<Live>>) {
        loop {
            if let Some(live) = live.take() {
                self.keep_until_lost(&live).await;
                if !self.tell(State::Away) {
                    return;
                }
            }
            let up = match self.again().await {
                Ok(up) => up,
                Err(e) => {
                    let options = &self.connector.options;
                    warn!("{} at {} is given up: {e}", options.subnqn, options.address);
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

    async fn keep_until_lost(&mut self, live: &Rc<Live>) {
        let since = Instant::now();
        let end = self.keep(live).await;
        live.close();
        let options = &self.connector.options;
        info!("{} at {}: {end}", options.subnqn, options.address);
        // One that breaks as soon as it is up is no better than one that does not come up.
        if since.elapsed() >= options.backoff.longest {
            self.failures = 0;
        }
    }

    /// Keeps an association alive and listens to it, until it ends.
    async fn keep(&self, live: &Rc<Live>) -> super::queue::End {
        let tasks = [
            tokio::task::spawn_local(Rc::clone(live).keep_alive()),
            tokio::task::spawn_local(listen(Rc::clone(live), self.inner.clone())),
        ];
        let _tasks = tasks.map(AbortOnDropHandle::new);
        live.ended().await
    }

    /// Connects until that succeeds, or makes no sense any more.
    async fn again(&mut self) -> Result<Rc<Live>, ConnectError> {
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

/// Takes what the controller tells of by itself.
async fn listen(live: Rc<Live>, inner: Weak<Inner>) {
    while let Some(event) = live.event().await {
        if live.look_into(event).await.is_err() {
            // A log that cannot be read is no event any more; the next look finds out.
            debug!("{event:?} cannot be read");
        }
        if matches!(event, Event::Namespaces | Event::Ana)
            && let Some(inner) = inner.upgrade()
        {
            inner.note();
        }
        sleep(BETWEEN_EVENTS).await;
    }
}
