//! Until when this machine may use a disk, as every core sees it, and the gate that operations go through.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rt::Core;
use rt::disk::{DiskError, DiskErrorKind};

/// How long an operation waits at most until the heartbeat is renewed.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often it looks.
const LOOK: Duration = Duration::from_millis(20);

/// Until when this machine may use a disk.
#[derive(Debug)]
pub struct Lease {
    /// Nanoseconds of [`Core::now`].
    until: AtomicU64,
    is_lost: AtomicBool,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Lease {
    /// One that ends then; never if that is not said.
    pub(super) fn new(until: Option<Duration>) -> Arc<Self> {
        let until = AtomicU64::new(until.map_or(u64::MAX, nanoseconds));
        Arc::new(Self { until, is_lost: AtomicBool::new(false) })
    }

    /// It goes on until then.
    pub(super) fn extend(&self, until: Duration) {
        self.until.fetch_max(nanoseconds(until), Ordering::Release);
    }

    /// Another machine has the disk: nothing is read or written any more.
    pub fn lose(&self) {
        self.is_lost.store(true, Ordering::Release);
    }

    /// Whether another machine has the disk.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Whether it may be used now.
    #[must_use]
    pub fn is_valid(&self, core: &Core) -> bool {
        let until = self.until.load(Ordering::Acquire);
        !self.is_lost() && (until == u64::MAX || nanoseconds(core.now()) < until)
    }
}

/// The gate before a disk on one core.
#[derive(Clone)]
pub struct Gate {
    core: Core,
    lease: Arc<Lease>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("lease", &self.lease).finish_non_exhaustive()
    }
}

const GONE: DiskError = DiskError::new(DiskErrorKind::Gone);
const NOT_NOW: DiskError = DiskError::new(DiskErrorKind::Other);

impl Gate {
    /// One on `core`.
    #[must_use]
    pub fn new(core: Core, lease: Arc<Lease>) -> Self {
        Self { core, lease }
    }

    /// Ends when the disk may be used: at once, or when its heartbeat is renewed.
    ///
    /// # Errors
    /// [`DiskErrorKind::Gone`] if another machine has it; [`DiskErrorKind::Other`] if the heartbeat is not renewed for too long.
    pub async fn pass(&self) -> Result<(), DiskError> {
        if self.lease.is_valid(&self.core) {
            return Ok(());
        }
        // Rare: in a box, so that the future of what goes through stays small.
        Box::pin(self.wait()).await
    }

    async fn wait(&self) -> Result<(), DiskError> {
        let waits = async {
            while !self.lease.is_valid(&self.core) {
                if self.lease.is_lost() {
                    return Err(GONE);
                }
                tokio::time::sleep(LOOK).await;
            }
            Ok(())
        };
        tokio::time::timeout(PATIENCE, waits).await.unwrap_or(Err(NOT_NOW))
    }

    /// Whether another machine has the disk.
    ///
    /// # Errors
    /// [`DiskErrorKind::Gone`] then.
    pub fn check(&self) -> Result<(), DiskError> {
        if self.lease.is_lost() { Err(GONE) } else { Ok(()) }
    }
}

/// [`Gate::pass`], where there is one.
pub async fn pass(gate: Option<&Gate>) -> Result<(), DiskError> {
    match gate {
        Some(gate) => gate.pass().await,
        None => Ok(()),
    }
}

/// [`Gate::check`], where there is one.
pub fn check(gate: Option<&Gate>) -> Result<(), DiskError> {
    gate.map_or(Ok(()), Gate::check)
}
