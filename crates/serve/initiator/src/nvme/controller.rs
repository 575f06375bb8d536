//! A controller, for as long as somebody wants it: connected, and connected again.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ::nvme::log::AnaState;
use futures_util::future::join_all;
use rt::Core;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info, warn};

use super::admin::Failed;
use super::connect::{ConnectError, Connector};
use super::identity::{Abilities, Described};
use super::live::{Event, Live};
use super::options::{Backoff, Options};
use super::queue::{Queue, Staging};
use crate::kept::{Alive, Kept, News, Reach};

/// Pause before the next event is asked for: meanwhile the controller gathers what it has to tell, and one that always
/// has something keeps no core at work.
const BETWEEN_EVENTS: Duration = Duration::from_millis(10);

/// A controller of a subsystem, on this core. Cheap to clone; with the last clone its connections go, and
/// what is in flight with them.
#[derive(Clone)]
pub struct Controller(Kept<Connector>);

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Controller({})", self.0.reach())
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
        Kept::connect(Connector::new(core, options, staging)).await.map(Self)
    }

    /// The same for a controller that may be away now: it is connected as soon as it is there.
    #[must_use]
    pub fn expect(core: &Core, options: Options, staging: Staging) -> Self {
        Self(Kept::expect(Connector::new(core, options, staging)))
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

    /// What it was told when it was connected.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.0.reach().options
    }

    /// Why it does not come back, if it does not, and not by choice.
    #[must_use]
    pub fn over(&self) -> Option<ConnectError> {
        self.0.over()
    }

    /// Whether it does not come back, by choice or not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_over()
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
        self.0.generation()
    }

    /// Waits until [`Self::generation`] is another one, and gives it; `None` once the controller is over.
    pub async fn changed(&self, known: u64) -> Option<u64> {
        self.0.changed(known).await
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
        self.0.let_go();
        let done = live.shut_down().await;
        live.close();
        done
    }

    fn here(&self) -> Result<Rc<Live>, Failed> {
        self.live().ok_or(Failed::Lost(::nvme::host::Lost::Unsent))
    }

    /// The association, if it is up.
    pub(super) fn live(&self) -> Option<Rc<Live>> {
        self.0.live()
    }

    /// Waits for a change, until then at most.
    pub(super) async fn pause(&self, until: Instant) {
        self.0.pause(until).await;
    }

    /// The controller has said what cannot be: nothing of it is to be believed.
    pub(super) fn give_up(&self, live: &Live, why: &str) {
        self.0.give_up(live, why);
    }
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.options.subnqn, self.options.address)
    }
}

impl Alive for Live {
    fn is_up(&self) -> bool {
        Self::is_up(self)
    }

    fn close(&self) {
        Self::close(self);
    }
}

impl Reach for Connector {
    type Live = Live;
    type Error = ConnectError;

    async fn bring_up(&self) -> Result<Rc<Live>, ConnectError> {
        Self::bring_up(self).await
    }

    fn is_final(error: &ConnectError) -> bool {
        error.is_final()
    }

    /// What is in doubt when it ends waits by itself, where it is sent again (RFD 0027).
    async fn keep(&self, live: &Rc<Live>, news: News<Self>) -> Duration {
        let tasks = [
            tokio::task::spawn_local(Rc::clone(live).keep_alive()),
            tokio::task::spawn_local(listen(Rc::clone(live), news)),
        ];
        let _tasks = tasks.map(AbortOnDropHandle::new);
        let end = live.ended().await;
        info!("{self}: {end}");
        Duration::ZERO
    }

    fn backoff(&self) -> Backoff {
        self.options.backoff
    }

    fn random(&self) -> u64 {
        self.core.random_u64()
    }
}

/// Takes what the controller tells of by itself.
async fn listen(live: Rc<Live>, news: News<Connector>) {
    while let Some(event) = live.event().await {
        if live.look_into(event).await.is_err() {
            // A log that cannot be read is no event any more; the next look finds out.
            debug!("{event:?} cannot be read");
        }
        if matches!(event, Event::Namespaces | Event::Ana) && !news.tell() {
            return;
        }
        sleep(BETWEEN_EVENTS).await;
    }
}
