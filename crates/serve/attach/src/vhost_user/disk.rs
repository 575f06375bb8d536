//! What the rings of a disk share: the volume, the client it is used as, and what happens to
//! requests during an outage.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use block::{Access, AccessState, Account, Bufs, Error, Request, RequestError};
use reservation::ItNexus;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use volume::{ReservationGate, Volume, VolumeClient};

use super::request::{DiskLimits, ID_BYTES};
use crate::OutageSignal;
use crate::request_split::part_blocks;

/// Delay before a request that failed temporarily is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// What happens to requests while the volume is unavailable but intact.
#[derive(Clone, Debug)]
pub enum OutagePolicy {
    /// They fail: outages are not expected.
    Fail,
    /// They wait, on a node of a cluster that serves the volume: this state says when to continue.
    Wait(AccessState),
    /// They stay unanswered for the next process that serves the guest; for remote volumes.
    LeaveUnanswered(OutageSignal),
}

/// What to do with a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureAction {
    /// Report the failure.
    Fail,
    /// Retry it.
    Retry,
    /// Leave it unanswered.
    LeaveUnanswered,
}

/// Phase of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskPhase {
    Serving,
    /// Requests in flight are answered if the volume answers; none waits for an outage to end.
    Ending,
    /// The same, and the guest's memory is not accessed any more.
    Disconnected,
}

/// A disk.
pub(super) struct Disk {
    pub(super) volume: Rc<Volume>,
    pub(super) account: Account,
    pub(super) read_only: bool,
    pub(super) serial: [u8; ID_BYTES],
    pub(super) queues: u16,
    /// Longest part of a request that is executed at once, in blocks.
    pub(super) part_blocks: u64,
    /// The client to which the volume's reservations apply.
    caller: Rc<VolumeClient>,
    outage_policy: OutagePolicy,
    phase: Cell<DiskPhase>,
    ending: Notify,
    /// The earliest time of the next retry.
    retry_at: Cell<Instant>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("volume", &self.volume)
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}

impl Disk {
    pub(super) fn new(
        (volume, outage): (Rc<Volume>, OutagePolicy),
        account: Account,
        (rings, read_only): (u16, bool),
        serial: [u8; ID_BYTES],
    ) -> Self {
        let part_blocks = part_blocks(&volume.info(), account.buffer_pool());
        let caller = volume
            .reservation_gate()
            .map_or_else(ReservationGate::node_client, |g| g.client_on_behalf_of(ItNexus::GUEST));
        Self {
            volume,
            account,
            read_only,
            serial,
            queues: rings,
            part_blocks,
            caller,
            outage_policy: outage,
            phase: Cell::new(DiskPhase::Serving),
            ending: Notify::new(),
            retry_at: Cell::new(Instant::now()),
        }
    }

    pub(super) fn limits(&self) -> DiskLimits {
        let info = self.volume.info();
        DiskLimits {
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: self.read_only || info.read_only,
            can_discard: info.unmap_granularity_blocks > 0,
        }
    }

    /// Starts a request of the guest on the volume.
    pub(super) fn start(
        &self,
        request: Request,
        done: impl FnOnce(Result<Bufs, RequestError>) + 'static,
    ) {
        self.volume.start_for(&self.caller, request, &self.account, done);
    }

    /// [`Self::start`], and waits for the result.
    pub(super) async fn execute(&self, request: Request) -> Result<Bufs, RequestError> {
        self.volume.execute_for(&self.caller, request, &self.account).await
    }

    /// What to do with a failed request. If the volume is intact, the guest has no other path to
    /// try, so it is not told.
    pub(super) fn failure_action(&self, failure: &RequestError) -> FailureAction {
        let away = matches!(failure, RequestError::Device(Error::Fenced | Error::Gone));
        match &self.outage_policy {
            OutagePolicy::Wait(_) if away => FailureAction::Retry,
            OutagePolicy::LeaveUnanswered(absence) if absence.set_if_cause(failure) => {
                FailureAction::LeaveUnanswered
            }
            _ => FailureAction::Fail,
        }
    }

    /// Waits until requests are left for another process.
    pub(super) async fn wait_outage(&self) {
        match &self.outage_policy {
            OutagePolicy::LeaveUnanswered(absence) => absence.wait().await,
            OutagePolicy::Fail | OutagePolicy::Wait(_) => std::future::pending().await,
        }
    }

    /// Whether requests are left for another process.
    pub(super) fn is_out(&self) -> bool {
        matches!(&self.outage_policy, OutagePolicy::LeaveUnanswered(absence) if absence.is_set())
    }

    /// Schedules a retry.
    pub(super) fn schedule_retry(&self) {
        self.retry_at.set(Instant::now() + RETRY_PAUSE);
    }

    /// Waits until requests may be retried, or waiting ends.
    pub(super) async fn wait_retry(&self) {
        let served = async {
            sleep_until(self.retry_at.get()).await;
            if let OutagePolicy::Wait(access) = &self.outage_policy
                && access.get() == Access::Unavailable
            {
                access.changed_from(Access::Unavailable).await;
            }
        };
        let ending = self.ending.notified();
        if self.is_ending() {
            return;
        }
        tokio::select! {
            biased;
            () = ending => {}
            () = served => {}
        }
    }

    /// Begins to serve.
    pub(super) fn set_serving(&self) {
        self.phase.set(DiskPhase::Serving);
    }

    /// Ends all waiting for the volume.
    pub(super) fn set_ending(&self) {
        self.phase.set(DiskPhase::Ending);
        self.ending.notify_waiters();
    }

    /// The same, and the guest's memory is not accessed any more.
    pub(super) fn disconnect(&self) {
        self.phase.set(DiskPhase::Disconnected);
        self.ending.notify_waiters();
    }

    pub(super) fn is_ending(&self) -> bool {
        self.phase.get() != DiskPhase::Serving || self.is_out()
    }

    pub(super) fn is_disconnected(&self) -> bool {
        self.phase.get() == DiskPhase::Disconnected
    }
}
