//! The lease of a disk: how long this machine may use it, for all cores; and the gate that
//! operations pass.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rt::Core;
use rt::disk::{DiskError, DiskErrorKind};

/// How long an operation waits at most for a renewal of the heartbeat.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(30);

/// How often it checks.
const LEASE_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long this machine may use a disk.
#[derive(Debug)]
pub struct DiskLease {
    /// Nanoseconds of [`Core::now`].
    expires_at: AtomicU64,
    is_lost: AtomicBool,
}

fn as_nanos_u64(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl DiskLease {
    /// A lease until `until`; without it, it never expires.
    pub(super) fn new(until: Option<Duration>) -> Arc<Self> {
        let until = AtomicU64::new(until.map_or(u64::MAX, as_nanos_u64));
        Arc::new(Self { expires_at: until, is_lost: AtomicBool::new(false) })
    }

    /// Extends the lease until `until`.
    pub(super) fn extend(&self, until: Duration) {
        self.expires_at.fetch_max(as_nanos_u64(until), Ordering::Release);
    }

    /// Another machine has claimed the disk: nothing is read or written any more.
    pub fn revoke(&self) {
        self.is_lost.store(true, Ordering::Release);
    }

    /// Whether another machine has claimed the disk.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Whether it may be used now.
    #[must_use]
    pub fn is_valid(&self, core: &Core) -> bool {
        let until = self.expires_at.load(Ordering::Acquire);
        !self.is_revoked() && (until == u64::MAX || as_nanos_u64(core.now()) < until)
    }
}

/// The lease gate of a disk on one core.
#[derive(Clone)]
pub struct LeaseGate {
    core: Core,
    lease: Arc<DiskLease>,
}

impl fmt::Debug for LeaseGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGate").field("lease", &self.lease).finish_non_exhaustive()
    }
}

const GONE: DiskError = DiskError::new(DiskErrorKind::Gone);
const LEASE_EXPIRED: DiskError = DiskError::new(DiskErrorKind::Other);

impl LeaseGate {
    /// A gate on `core`.
    #[must_use]
    pub fn new(core: Core, lease: Arc<DiskLease>) -> Self {
        Self { core, lease }
    }

    /// Waits until the disk may be used: at once, or when its heartbeat has been renewed.
    ///
    /// # Errors
    /// [`DiskErrorKind::Gone`] if another machine has it; [`DiskErrorKind::Other`] if the heartbeat
    /// was not renewed in time.
    pub async fn wait_valid(&self) -> Result<(), DiskError> {
        if self.lease.is_valid(&self.core) {
            return Ok(());
        }
        // Rare, so boxed: the futures of operations stay small.
        Box::pin(self.wait_for_renewal()).await
    }

    async fn wait_for_renewal(&self) -> Result<(), DiskError> {
        let waits = async {
            while !self.lease.is_valid(&self.core) {
                if self.lease.is_revoked() {
                    return Err(GONE);
                }
                tokio::time::sleep(LEASE_POLL_INTERVAL).await;
            }
            Ok(())
        };
        tokio::time::timeout(RENEWAL_TIMEOUT, waits).await.unwrap_or(Err(LEASE_EXPIRED))
    }

    /// Checks that no other machine has claimed the disk.
    ///
    /// # Errors
    /// [`DiskErrorKind::Gone`] if one has.
    pub fn check_not_revoked(&self) -> Result<(), DiskError> {
        if self.lease.is_revoked() { Err(GONE) } else { Ok(()) }
    }
}

/// [`LeaseGate::wait_valid`], if there is a gate.
pub async fn wait_valid(gate: Option<&LeaseGate>) -> Result<(), DiskError> {
    match gate {
        Some(gate) => gate.wait_valid().await,
        None => Ok(()),
    }
}

/// [`LeaseGate::check_not_revoked`], if there is a gate.
pub fn check_not_revoked(gate: Option<&LeaseGate>) -> Result<(), DiskError> {
    gate.map_or(Ok(()), LeaseGate::check_not_revoked)
}
