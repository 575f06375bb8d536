//! A controller that reconnects.

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

use super::active_association::{ActiveAssociation, Event};
use super::admin::AdminError;
use super::connect::{ConnectError, Connector};
use super::identity::{ControllerCapabilities, NamespaceDescription};
use super::options::{Backoff, Options};
use super::queue::{Queue, Staging};
use crate::reconnect::{ActiveConnection, ChangeNotifier, Connectable, ReconnectingClient};

/// Delay before the next event is requested: the controller coalesces events meanwhile, and a flood
/// of events does not occupy the core.
const EVENT_PAUSE: Duration = Duration::from_millis(10);

/// A controller of a subsystem, on this core. Cheap to clone; dropping the last clone drops its
/// connections and what is in flight.
#[derive(Clone)]
pub struct Controller(ReconnectingClient<Connector>);

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Controller({})", self.0.connector())
    }
}

impl Controller {
    /// Connects to a controller, and connects again whenever it is lost.
    ///
    /// # Errors
    /// Why the first attempt failed.
    pub async fn connect(
        core: &Core,
        options: Options,
        staging: Staging,
    ) -> Result<Self, ConnectError> {
        ReconnectingClient::connect(Connector::new(core, options, staging)).await.map(Self)
    }

    /// The same in the background, for a controller that may be unreachable now.
    #[must_use]
    pub fn connect_in_background(core: &Core, options: Options, staging: Staging) -> Self {
        Self(ReconnectingClient::connect_in_background(Connector::new(core, options, staging)))
    }

    /// Connects to a subsystem at all of these addresses; unreachable ones are retried in the
    /// background.
    ///
    /// # Errors
    /// Why the first address failed, if all did.
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
                Self::connect_in_background(core, at(address), staging.clone())
            }
        };
        Ok(all.into_iter().zip(addresses).map(expect).collect())
    }

    /// The options it was connected with.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.0.connector().options
    }

    /// Why it stopped reconnecting, unless it was closed.
    #[must_use]
    pub fn final_error(&self) -> Option<ConnectError> {
        self.0.final_error()
    }

    /// Whether it was closed or stopped reconnecting.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Its capabilities; `None` while disconnected.
    #[must_use]
    pub fn capabilities(&self) -> Option<ControllerCapabilities> {
        self.active().map(|live| live.capabilities)
    }

    /// Its I/O queues; none while disconnected.
    #[must_use]
    pub fn queues(&self) -> Vec<Queue> {
        self.active().map_or_else(Vec::new, |live| live.io.clone())
    }

    /// Incremented whenever its namespaces or their access states may have changed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation()
    }

    /// Waits until [`Self::generation`] differs from `known` and returns it; `None` once the
    /// controller is closed.
    pub async fn changed(&self, known: u64) -> Option<u64> {
        self.0.changed(known).await
    }

    /// The namespaces that this host may use, in order.
    ///
    /// # Errors
    /// [`AdminError`]; as if a queue had ended if the controller is unreachable.
    pub async fn namespaces(&self) -> Result<Vec<u32>, AdminError> {
        self.require_active()?.namespaces().await
    }

    /// Describes a namespace; `None` if it does not exist or cannot be used.
    ///
    /// # Errors
    /// [`AdminError`]; as if a queue had ended if the controller is unreachable.
    pub async fn describe(&self, nsid: u32) -> Result<Option<NamespaceDescription>, AdminError> {
        self.require_active()?.describe(nsid).await
    }

    /// The access state of a group of namespaces; `None` while disconnected. Optimized if the
    /// controller reports no states, or none of this group.
    #[must_use]
    pub fn ana_state(&self, group: u32) -> Option<AnaState> {
        let live = self.active()?;
        let ana = live.ana.borrow();
        Some(ana.get(&group).copied().unwrap_or(AnaState::Optimized))
    }

    /// Shuts the controller down, which makes all writes durable, and closes all clones.
    ///
    /// # Errors
    /// [`AdminError`] if the controller did not confirm it.
    pub async fn shut_down(&self) -> Result<(), AdminError> {
        let live = self.require_active()?;
        self.0.close();
        let done = live.shut_down().await;
        live.close();
        done
    }

    fn require_active(&self) -> Result<Rc<ActiveAssociation>, AdminError> {
        self.active().ok_or(AdminError::Lost(::nvme::host::LostCommand::Unsent))
    }

    /// The association, if it is up.
    pub(super) fn active(&self) -> Option<Rc<ActiveAssociation>> {
        self.0.active()
    }

    /// Waits for a change, at most until `until`.
    pub(super) async fn wait_change(&self, until: Instant) {
        self.0.wait_change(until).await;
    }

    /// Closes the connections of a controller that violated the protocol.
    pub(super) fn fail_connection(&self, live: &ActiveAssociation, why: &str) {
        self.0.fail_connection(live, why);
    }
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.options.subnqn, self.options.address)
    }
}

impl ActiveConnection for ActiveAssociation {
    fn is_up(&self) -> bool {
        Self::is_up(self)
    }

    fn close(&self) {
        Self::close(self);
    }
}

impl Connectable for Connector {
    type Connection = ActiveAssociation;
    type Error = ConnectError;

    async fn establish(&self) -> Result<Rc<ActiveAssociation>, ConnectError> {
        Self::establish(self).await
    }

    fn is_final(error: &ConnectError) -> bool {
        error.is_final()
    }

    /// Commands in doubt wait themselves before they are retried (RFD 0027).
    async fn run_until_end(
        &self,
        live: &Rc<ActiveAssociation>,
        news: ChangeNotifier<Self>,
    ) -> Duration {
        let tasks = [
            tokio::task::spawn_local(Rc::clone(live).keep_alive()),
            tokio::task::spawn_local(listen(Rc::clone(live), news)),
        ];
        let _tasks = tasks.map(AbortOnDropHandle::new);
        let end = live.wait_end().await;
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

/// Handles the controller's events.
async fn listen(live: Rc<ActiveAssociation>, notifier: ChangeNotifier<Connector>) {
    while let Some(event) = live.event().await {
        if live.read_event_log(event).await.is_err() {
            // An unreadable log re-arms no event; the next verification notices the change.
            debug!("{event:?} cannot be read");
        }
        if matches!(event, Event::Namespaces | Event::Ana) && !notifier.notify() {
            return;
        }
        sleep(EVENT_PAUSE).await;
    }
}
