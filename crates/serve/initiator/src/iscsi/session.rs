//! A session that reconnects.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use ::iscsi::initiator::{AsyncNotification, LostRequest};
use rt::Core;
use scsi::Lun as Number;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info};

use super::active_session::{ActiveSession, SessionError};
use super::connect::{ConnectError, Connector};
use super::identity::UnitDescription;
use super::options::{Backoff, Options};
use crate::connection::Staging;
use crate::reconnect::{
    ActiveConnection, ChangeNotifier, Connectable, ReconnectingClient, Unreachable,
};

/// A session with a target, on this core. Cheap to clone; dropping the last clone drops its
/// connection and what is in flight.
#[derive(Clone)]
pub struct Session(ReconnectingClient<Connector>);

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.0.connector())
    }
}

impl Session {
    /// Logs in to a target, and logs in again whenever the connection is lost.
    ///
    /// # Errors
    /// Why the first login failed.
    pub async fn connect(
        core: &Core,
        options: Options,
        staging: Staging,
    ) -> Result<Self, ConnectError> {
        ReconnectingClient::connect(Connector::new(core, options, staging, false)?).await.map(Self)
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

    /// Whether it is connected.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.active().is_some()
    }

    /// Incremented whenever the units may have changed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation()
    }

    /// Waits until [`Self::generation`] differs from `known` and returns it; `None` once the
    /// session is closed.
    pub async fn changed(&self, known: u64) -> Option<u64> {
        self.0.changed(known).await
    }

    /// The numbers of the units that this initiator may use, in order.
    ///
    /// # Errors
    /// [`SessionError`]; as if a connection had ended if the target is unreachable.
    pub async fn luns(&self) -> Result<Vec<u16>, SessionError> {
        self.require_active()?.luns().await
    }

    /// Describes a unit; `None` if it does not exist or cannot be used.
    ///
    /// # Errors
    /// [`SessionError`]; as if a connection had ended if the target is unreachable.
    pub async fn describe(&self, unit: u16) -> Result<Option<UnitDescription>, SessionError> {
        let Some(unit) = Number::new(unit) else { return Ok(None) };
        self.require_active()?.describe(unit).await
    }

    /// LOGICAL UNIT RESET (SAM-5 7.7): aborts all commands of all initiators at the unit.
    ///
    /// # Errors
    /// [`SessionError`] if the target did not confirm it.
    pub async fn reset(&self, unit: u16) -> Result<(), SessionError> {
        let unit = Number::new(unit)
            .ok_or(SessionError::InvalidResponse("the logical unit does not exist"))?;
        self.require_active()?.reset(unit).await
    }

    /// Logs out and closes all clones. Unflushed writes stay in the target's cache.
    ///
    /// # Errors
    /// [`SessionError`] if the target did not confirm it.
    pub async fn shut_down(&self) -> Result<(), SessionError> {
        let live = self.require_active()?;
        self.0.close();
        let done = live.log_out().await;
        live.close();
        done
    }

    fn require_active(&self) -> Result<Rc<ActiveSession>, SessionError> {
        self.active().ok_or(SessionError::Lost(LostRequest::Unsent))
    }

    /// The session, if it is up.
    pub(super) fn active(&self) -> Option<Rc<ActiveSession>> {
        self.0.active()
    }

    /// Waits until the session is connected.
    pub(super) async fn wait_up(&self, until: Instant) -> Result<Rc<ActiveSession>, Unreachable> {
        self.0.wait_up(until).await
    }

    /// Waits for a change, at most until `until`.
    pub(super) async fn wait_change(&self, until: Instant) {
        self.0.wait_change(until).await;
    }

    /// Records that units may have changed.
    pub(super) fn bump_generation(&self) {
        self.0.bump_generation();
    }

    /// Closes the connection of a target that violated the protocol.
    pub(super) fn fail_connection(&self, live: &ActiveSession, why: &str) {
        self.0.fail_connection(live, why);
    }
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.options.target, self.options.address)
    }
}

impl ActiveConnection for ActiveSession {
    fn is_up(&self) -> bool {
        Self::is_up(self)
    }

    fn close(&self) {
        Self::close(self);
    }
}

impl Connectable for Connector {
    type Connection = ActiveSession;
    type Error = ConnectError;

    async fn establish(&self) -> Result<Rc<ActiveSession>, ConnectError> {
        Self::establish(self).await
    }

    fn is_final(error: &ConnectError) -> bool {
        error.is_final()
    }

    /// The machine sends the keep-alives.
    async fn run_until_end(
        &self,
        live: &Rc<ActiveSession>,
        news: ChangeNotifier<Self>,
    ) -> Duration {
        let listener = tokio::task::spawn_local(listen(Rc::clone(live), news));
        let _listener = AbortOnDropHandle::new(listener);
        let end = live.wait_end().await;
        info!("{self}: {end}");
        self.reconnect_delay(end)
    }

    fn backoff(&self) -> Backoff {
        self.options.backoff
    }

    fn random(&self) -> u64 {
        self.core.random_u64()
    }
}

/// Handles the target's notifications.
async fn listen(live: Rc<ActiveSession>, notifier: ChangeNotifier<Connector>) {
    loop {
        match live.next_notification().await {
            AsyncNotification::Scsi { .. } if notifier.notify() => {}
            AsyncNotification::Scsi { .. } => return,
            AsyncNotification::LogoutRequest { within_s } => {
                debug!("the target requests logout within {within_s} s");
            }
        }
    }
}
