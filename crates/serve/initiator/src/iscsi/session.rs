//! A session, for as long as somebody wants it: logged in, and logged in again.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use ::iscsi::initiator::{Lost, Notice};
use rt::Core;
use scsi::Lun as Number;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info};

use super::connect::{ConnectError, Connector};
use super::identity::Described;
use super::live::{Failed, Live};
use super::options::{Backoff, Options};
use crate::drive::Staging;
use crate::kept::{Absent, Alive, Kept, News, Reach};

/// A session with a target, on this core. Cheap to clone; with the last clone its connection goes, and what is
/// in flight with it.
#[derive(Clone)]
pub struct Session(Kept<Connector>);

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.0.reach())
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
        Kept::connect(Connector::new(core, options, staging, false)?).await.map(Self)
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

    /// Whether it can be used now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.live().is_some()
    }

    /// Counts the moments at which its units may have changed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation()
    }

    /// Waits until [`Self::generation`] is another one, and gives it; `None` once the session is over.
    pub async fn changed(&self, known: u64) -> Option<u64> {
        self.0.changed(known).await
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
        self.0.let_go();
        let done = live.log_out().await;
        live.close();
        done
    }

    fn here(&self) -> Result<Rc<Live>, Failed> {
        self.live().ok_or(Failed::Lost(Lost::Unsent))
    }

    /// The session, if it is up.
    pub(super) fn live(&self) -> Option<Rc<Live>> {
        self.0.live()
    }

    /// Waits for the session to be up.
    pub(super) async fn up(&self, until: Instant) -> Result<Rc<Live>, Absent> {
        self.0.up(until).await
    }

    /// Waits for a change, until then at most.
    pub(super) async fn pause(&self, until: Instant) {
        self.0.pause(until).await;
    }

    /// Units may have become others.
    pub(super) fn note(&self) {
        self.0.note();
    }

    /// The target has said what cannot be: nothing of it is to be believed.
    pub(super) fn give_up(&self, live: &Live, why: &str) {
        self.0.give_up(live, why);
    }
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.options.target, self.options.address)
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

    /// Its machine keeps it alive.
    async fn keep(&self, live: &Rc<Live>, news: News<Self>) -> Duration {
        let listener = tokio::task::spawn_local(listen(Rc::clone(live), news));
        let _listener = AbortOnDropHandle::new(listener);
        let end = live.ended().await;
        info!("{self}: {end}");
        self.rest(end)
    }

    fn backoff(&self) -> Backoff {
        self.options.backoff
    }

    fn random(&self) -> u64 {
        self.core.random_u64()
    }
}

/// Takes what the target tells of by itself.
async fn listen(live: Rc<Live>, news: News<Connector>) {
    loop {
        match live.notice().await {
            Notice::Scsi { .. } if news.tell() => {}
            Notice::Scsi { .. } => return,
            Notice::LogoutRequest { within_s } => {
                debug!("the target wants the session to end within {within_s} s");
            }
        }
    }
}
