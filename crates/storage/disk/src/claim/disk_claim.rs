//! Claims a disk, renews its heartbeat, and releases the claim.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::{Account, MemoryClass};
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::sync::{Mutex, mpsc};
use uuid::Uuid;

use super::decision::{CONTENTION_WAIT, ClaimRefusal, ClaimStep, ObservedOwner, next_step};
use super::lease::{DiskLease, LeaseGate};
use super::record::{
    NodeIdentity, OWNER_RECORD_BYTES, OwnerRecord, OwnerRecordError, OwnerRecordKind, OwnerState,
};
use super::{
    CLAIM_COPY_OFFSET, CLAIM_OFFSET, ClaimRequest, ClaimSubject, HEARTBEAT_INTERVAL,
    HEARTBEAT_OFFSET, LEASE_DURATION,
};
use crate::{read_disk, zero_disk_range};

/// How often a watched heartbeat is read.
const HEARTBEAT_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Pause before a failed renewal is retried.
const RENEWAL_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// How often in a row an unreadable claim counts as torn by chance; after that it is rewritten.
const MAX_TORN_READS: u32 = 2;

/// Why a disk could not be claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimError {
    /// It belongs to another node, or its owner is unknown.
    Refused(ClaimRefusal),
    /// The disk failed.
    DiskFailed(DiskError),
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::DiskFailed(error) => error.fmt(f),
        }
    }
}

impl From<DiskError> for ClaimError {
    fn from(error: DiskError) -> Self {
        Self::DiskFailed(error)
    }
}

/// A disk that another machine has claimed from this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostClaim {
    /// What the disk belongs to.
    pub subject: ClaimSubject,
    /// Its owner now; `None` if the record was overwritten by something else.
    pub new_owner: Option<Box<OwnerRecord>>,
}

/// This machine's claim of a disk. Dropping it ends the heartbeat without a release: the same node
/// may claim the disk again.
pub struct DiskClaim {
    inner: Rc<Inner>,
}

impl fmt::Debug for DiskClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskClaim").field("record", &self.inner.record).finish_non_exhaustive()
    }
}

struct Inner {
    core: Core,
    disk: Disk,
    memory: Account,
    lease: Arc<DiskLease>,
    /// The newest record that may be on the disk.
    record: Cell<OwnerRecord>,
    /// Held while records are read or written.
    record_lock: Mutex<()>,
    /// How often in a row the claim was unreadable.
    torn_reads: Cell<u32>,
    lost: RefCell<Option<LostClaim>>,
    lost_sender: RefCell<Option<mpsc::UnboundedSender<LostClaim>>>,
    has_ended: Cell<bool>,
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// Reads one record; the inner error says why its bytes are unusable.
async fn read_record(
    disk: &Disk,
    memory: &Account,
    at: u64,
    copy: OwnerRecordKind,
) -> Result<Result<OwnerRecord, OwnerRecordError>, DiskError> {
    let bytes = read_disk(disk, memory, at, OWNER_RECORD_BYTES).await?;
    Ok(parse_record(&bytes, copy))
}

fn parse_record(bytes: &[u8], copy: OwnerRecordKind) -> Result<OwnerRecord, OwnerRecordError> {
    let bytes = bytes.try_into().map_err(|_| OwnerRecordError::NoMagic)?;
    OwnerRecord::parse(bytes, copy)
}

/// Reads the disk's owner.
async fn read_owner(disk: &Disk, memory: &Account) -> Result<ObservedOwner, DiskError> {
    let first = read_record(disk, memory, CLAIM_OFFSET, OwnerRecordKind::Claim).await;
    let second = read_record(disk, memory, CLAIM_COPY_OFFSET, OwnerRecordKind::ClaimCopy).await;
    let beat = read_record(disk, memory, HEARTBEAT_OFFSET, OwnerRecordKind::Heartbeat).await;
    let unread = Err(OwnerRecordError::Damaged);
    match (first, second) {
        (Err(why), Err(_)) => Err(why),
        (first, second) => {
            let (first, second) = (first.unwrap_or(unread), second.unwrap_or(unread));
            Ok(ObservedOwner::from_records(first, second, beat.unwrap_or(unread)))
        }
    }
}

/// Whether a disk has space for owner records: a smaller one is never used.
fn has_record_area(disk: &Disk) -> bool {
    disk.info().size >= CLAIM_COPY_OFFSET + OWNER_RECORD_BYTES as u64
}

/// Watches the heartbeat until it has not moved for as long as required. Returns what was read,
/// when it was read, and the wait after claiming.
async fn watch_heartbeat(
    core: &Core,
    disk: &Disk,
    memory: &Account,
    claim: &ClaimRequest,
) -> Result<(ObservedOwner, Duration, Duration), ClaimError> {
    let is_shareable = disk.info().is_shareable;
    let mut read_at = core.now();
    let mut observed = read_owner(disk, memory).await?;
    let mut has_watched = false;
    if claim.ignores_heartbeat() {
        return Ok((observed, read_at, Duration::ZERO));
    }
    loop {
        match next_step(&observed, &claim.node, claim.take_over, is_shareable, has_watched) {
            ClaimStep::Refuse(refusal) => return Err(ClaimError::Refused(refusal)),
            ClaimStep::ClaimAndWait(wait) => return Ok((observed, read_at, wait)),
            ClaimStep::WatchHeartbeat(time) => {
                let path = disk.path().display();
                tracing::info!(%path, seconds = time.as_secs(), "multihost: watching whether another machine uses the disk");
                let deadline = core.now().saturating_add(time);
                while core.now() < deadline {
                    core.sleep(HEARTBEAT_POLL_INTERVAL).await;
                    read_at = core.now();
                    let latest = read_owner(disk, memory).await?;
                    if !latest.is_unchanged_since(&observed) {
                        match latest.claim {
                            Some(record) if record.state == OwnerState::Held => {
                                return Err(ClaimError::Refused(ClaimRefusal::InUse(Box::new(
                                    record,
                                ))));
                            }
                            // It was released or wiped meanwhile: decide anew.
                            _ => {
                                observed = latest;
                                break;
                            }
                        }
                    }
                    observed = latest;
                    has_watched = core.now() >= deadline;
                }
            }
        }
    }
}

/// Checks that no other node uses a disk that is to be overwritten, watching its heartbeat if
/// needed. An intended overwrite is requested by [`ClaimRequest::take_over`].
///
/// # Errors
/// [`ClaimError`], with the owner.
pub async fn check_unclaimed(
    core: &Core,
    disk: &Disk,
    memory: &Account,
    claim: &ClaimRequest,
) -> Result<(), ClaimError> {
    if !has_record_area(disk) {
        return Ok(());
    }
    watch_heartbeat(core, disk, memory, claim).await.map(drop)
}

impl DiskClaim {
    /// Claims a disk, after all necessary waits, and renews its heartbeat from then on.
    /// `lost_sender` is notified if another machine claims it.
    ///
    /// # Errors
    /// [`ClaimError`], with the owner or the failure.
    pub async fn acquire(
        core: &Core,
        disk: &Disk,
        memory: &Account,
        (subject, claim): (ClaimSubject, &ClaimRequest),
        lost_sender: Option<mpsc::UnboundedSender<LostClaim>>,
    ) -> Result<Self, ClaimError> {
        let (observed, read_at, wait) = watch_heartbeat(core, disk, memory, claim).await?;
        let is_shareable = disk.info().is_shareable;
        let millis_if_shared = |time: Duration| if is_shareable { millis(time) } else { 0 };
        let record = OwnerRecord {
            claim_generation: observed
                .claim
                .map_or(0, |before| before.claim_generation)
                .saturating_add(1),
            heartbeat: 0,
            nonce: core.random_u64(),
            claim_id: core.random_uuid(),
            subject,
            owner: claim.node,
            written_wall_time: core.wall_clock(),
            heartbeat_interval_ms: millis_if_shared(HEARTBEAT_INTERVAL),
            lease_ms: millis_if_shared(LEASE_DURATION),
            state: OwnerState::Held,
        };
        let lease = DiskLease::new(is_shareable.then(|| read_at.saturating_add(LEASE_DURATION)));
        let inner = Inner {
            core: core.clone(),
            disk: disk.clone(),
            memory: memory.clone(),
            lease,
            record: Cell::new(record),
            record_lock: Mutex::new(()),
            torn_reads: Cell::new(0),
            lost: RefCell::default(),
            lost_sender: RefCell::new(lost_sender),
            has_ended: Cell::new(false),
        };
        inner.claim_and_wait(read_at, wait).await?;
        let inner = Rc::new(inner);
        if is_shareable {
            tokio::task::spawn_local(renew_heartbeat(Rc::downgrade(&inner)));
        }
        Ok(Self { inner })
    }

    /// How long this machine may use the disk.
    #[must_use]
    pub fn lease(&self) -> Arc<DiskLease> {
        Arc::clone(&self.inner.lease)
    }

    /// The gate for operations of this core.
    #[must_use]
    pub fn gate(&self) -> LeaseGate {
        LeaseGate::new(self.inner.core.clone(), self.lease())
    }

    /// Another machine's claim, if one has taken the disk.
    #[must_use]
    pub fn lost_claim(&self) -> Option<LostClaim> {
        self.inner.lost.borrow().clone()
    }

    /// Checks that this machine still has the claim.
    ///
    /// # Errors
    /// The new owner; `None` if that cannot be determined.
    pub async fn verify(&self) -> Result<(), Option<LostClaim>> {
        // A disk that no other machine reaches cannot be lost.
        if self.inner.record.get().heartbeat_interval_ms == 0 {
            return Ok(());
        }
        let _guard = self.inner.record_lock.lock().await;
        let checked = self.inner.check_claim().await;
        match self.lost_claim() {
            Some(lost) => Err(Some(lost)),
            None => checked.map(drop).map_err(|_| None),
        }
    }

    /// Releases the claim: any node may take the disk from now on. It must not be written any more.
    ///
    /// # Errors
    /// The release could not be written; the disk still belongs to this node then.
    pub async fn release(&self) -> Result<(), DiskError> {
        self.inner.has_ended.set(true);
        let _guard = self.inner.record_lock.lock().await;
        if self.inner.check_claim().await.is_err() || self.inner.lease.is_revoked() {
            return Ok(());
        }
        let record = OwnerRecord { state: OwnerState::Released, ..self.inner.next_record() };
        self.inner.write_claim(&record).await
    }

    /// Ends the heartbeat, and waits for a write of it in progress: the disk can be reopened at
    /// once.
    pub async fn stop_heartbeat(&self) {
        self.inner.has_ended.set(true);
        drop(self.inner.record_lock.lock().await);
    }
}

/// Renews the heartbeat as long as the claim is held.
async fn renew_heartbeat(claim: Weak<Inner>) {
    let mut pause = HEARTBEAT_INTERVAL;
    loop {
        tokio::time::sleep(pause).await;
        // Upgraded only while renewing: dropping the claim closes the disk.
        let Some(claim) = claim.upgrade().filter(|claim| !claim.has_ended.get()) else { return };
        let _guard = claim.record_lock.lock().await;
        if claim.has_ended.get() || claim.lease.is_revoked() {
            return;
        }
        pause = match claim.renew_lease().await {
            Ok(()) if claim.lease.is_valid(&claim.core) => HEARTBEAT_INTERVAL,
            Ok(()) => RENEWAL_RETRY_INTERVAL,
            Err(error) => {
                let path = claim.disk.path().display();
                tracing::warn!(%path, %error, "multihost: renewing the heartbeat failed");
                RENEWAL_RETRY_INTERVAL
            }
        };
    }
}

impl Inner {
    async fn write_record(
        &self,
        at: u64,
        record: &OwnerRecord,
        copy: OwnerRecordKind,
    ) -> Result<(), DiskError> {
        let bytes = record.to_bytes(copy);
        let credit = self.memory.credit(bytes.len(), MemoryClass::LocalIo).await;
        let credit = credit.map_err(|_| DiskError::new(DiskErrorKind::Other))?;
        self.disk.write(at, rt::buf::copy_in(&credit, &bytes)).await
    }

    /// Writes both copies of the claim, one after the other, durably.
    async fn write_claim(&self, record: &OwnerRecord) -> Result<(), DiskError> {
        self.write_record(CLAIM_OFFSET, record, OwnerRecordKind::Claim).await?;
        self.disk.sync().await?;
        self.write_record(CLAIM_COPY_OFFSET, record, OwnerRecordKind::ClaimCopy).await?;
        self.disk.sync().await
    }

    /// Writes the claim, of which was decided on what was read at `read_at`; waits, and checks that
    /// the claim is still there.
    async fn claim_and_wait(&self, read_at: Duration, wait: Duration) -> Result<(), ClaimError> {
        let record = self.record.get();
        self.write_record(CLAIM_OFFSET, &record, OwnerRecordKind::Claim).await?;
        self.disk.sync().await?;
        let elapsed = self.core.now().saturating_sub(read_at);
        // Another node that read the disk before this claim was written may have finished its wait,
        // and use the disk.
        let wait = match self.disk.info().is_shareable && elapsed > CONTENTION_WAIT / 2 {
            true => wait.max(LEASE_DURATION + LEASE_DURATION / 4),
            false => wait,
        };
        if !wait.is_zero() {
            self.core.sleep(wait).await;
            let checked_at = self.core.now();
            let observed = read_owner(&self.disk, &self.memory).await?;
            if observed.claim.map(|claim| claim.claim_id) != Some(record.claim_id) {
                return Err(ClaimError::Refused(ClaimRefusal::ClaimedByOther(
                    observed.claim.map(Box::new),
                )));
            }
            self.lease.extend(checked_at.saturating_add(LEASE_DURATION));
        }
        self.write_record(CLAIM_COPY_OFFSET, &record, OwnerRecordKind::ClaimCopy).await?;
        self.disk.sync().await?;
        Ok(())
    }

    /// The record to be written next.
    fn next_record(&self) -> OwnerRecord {
        let current = self.record.get();
        let (nonce, written_wall_time) = (self.core.random_u64(), self.core.wall_clock());
        OwnerRecord { heartbeat: current.heartbeat + 1, nonce, written_wall_time, ..current }
    }

    fn note_lost(&self, new_owner: Option<OwnerRecord>) {
        self.lease.revoke();
        let new_owner = new_owner.map(Box::new);
        let lost = LostClaim { subject: self.record.get().subject, new_owner: new_owner.clone() };
        *self.lost.borrow_mut() = Some(lost.clone());
        let (path, why) = (self.disk.path().display(), ClaimRefusal::ClaimedByOther(new_owner));
        tracing::error!(%path, "multihost: this node stops using the disk: it {why}");
        if let Some(sender) = self.lost_sender.take() {
            // The receiver may be gone.
            let _ = sender.send(lost);
        }
    }

    /// Checks that this machine still has the claim, and returns when that was read. If it has not,
    /// the claim is marked as lost; an error means that it cannot be determined.
    async fn check_claim(&self) -> Result<Duration, DiskError> {
        let own = self.record.get();
        let read_at = self.core.now();
        let both = read_disk(&self.disk, &self.memory, CLAIM_OFFSET, 2 * OWNER_RECORD_BYTES).await;
        let (first, heartbeat) = match &both {
            Ok(bytes) => {
                let (first, heartbeat) = bytes.split_at(OWNER_RECORD_BYTES);
                (
                    parse_record(first, OwnerRecordKind::Claim),
                    parse_record(heartbeat, OwnerRecordKind::Heartbeat),
                )
            }
            Err(_) => (Err(OwnerRecordError::Damaged), Err(OwnerRecordError::Damaged)),
        };
        let is_own = |record: &OwnerRecord| {
            (record.claim_generation, record.claim_id, record.state)
                == (own.claim_generation, own.claim_id, OwnerState::Held)
        };
        match first {
            Ok(record) if is_own(&record) => self.torn_reads.set(0),
            Ok(record) => self.note_lost(Some(record)),
            Err(_) => self.check_claim_copy(is_own, both.is_ok()).await?,
        }
        // A process with a copy of this one's memory renews the same claim.
        let is_ahead = |heartbeat: &OwnerRecord| {
            heartbeat.heartbeat > own.heartbeat
                || (heartbeat.heartbeat == own.heartbeat && heartbeat.nonce != own.nonce)
        };
        let is_same_claim = |heartbeat: &OwnerRecord| {
            (heartbeat.claim_generation, heartbeat.claim_id) == (own.claim_generation, own.claim_id)
        };
        if let Some(other) =
            heartbeat.ok().filter(|heartbeat| is_same_claim(heartbeat) && is_ahead(heartbeat))
        {
            self.note_lost(Some(other));
        }
        Ok(read_at)
    }

    /// The first copy is unusable, so the second one decides.
    async fn check_claim_copy(
        &self,
        is_own: impl Fn(&OwnerRecord) -> bool,
        was_read: bool,
    ) -> Result<(), DiskError> {
        let second =
            read_record(&self.disk, &self.memory, CLAIM_COPY_OFFSET, OwnerRecordKind::ClaimCopy)
                .await?;
        self.torn_reads.set(self.torn_reads.get() + 1);
        match second {
            // It may just be in the middle of a write.
            _ if was_read && self.torn_reads.get() <= MAX_TORN_READS => {
                Err(DiskError::new(DiskErrorKind::Other))
            }
            Ok(record) if is_own(&record) => {
                let claim = OwnerRecord { heartbeat: 0, ..self.record.get() };
                self.write_record(CLAIM_OFFSET, &claim, OwnerRecordKind::Claim).await?;
                self.disk.sync().await
            }
            Ok(record) => {
                self.note_lost(Some(record));
                Ok(())
            }
            Err(_) => {
                self.note_lost(None);
                Ok(())
            }
        }
    }

    /// Checks that this machine still has the claim, and renews its heartbeat then.
    async fn renew_lease(&self) -> Result<(), DiskError> {
        let checked_at = self.check_claim().await?;
        if self.lease.is_revoked() {
            return Ok(());
        }
        let next = self.next_record();
        // The write may reach the disk even if it fails.
        self.record.set(next);
        self.write_record(HEARTBEAT_OFFSET, &next, OwnerRecordKind::Heartbeat).await?;
        self.lease.extend(checked_at.saturating_add(LEASE_DURATION));
        Ok(())
    }
}

/// Erases the owner records of a disk that this machine has claimed.
///
/// # Errors
/// The disk fails.
pub async fn clear_records(disk: &Disk, memory: &Account) -> Result<(), DiskError> {
    zero_disk_range(disk, memory, CLAIM_OFFSET, HEARTBEAT_OFFSET + OWNER_RECORD_BYTES as u64)
        .await?;
    zero_disk_range(disk, memory, CLAIM_COPY_OFFSET, CLAIM_COPY_OFFSET + OWNER_RECORD_BYTES as u64)
        .await
}

/// A node identity for tests and tools that keep none: the node `id`, on this boot of this machine.
impl NodeIdentity {
    /// The node with this id and name on the machine of `core`; its data directory must not be
    /// shared with another process.
    #[must_use]
    pub fn ephemeral(core: &Core, id: Uuid, name: &str, host: &str) -> Self {
        Self {
            node_id: id,
            boot_instance: Uuid::from_u128(core.boot_id() ^ id.as_u128()),
            cluster_id: None,
            node_number: 0,
            name: wire::ShortText::new(name),
            host: wire::ShortText::new(host),
        }
    }
}
