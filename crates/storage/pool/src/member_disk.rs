//! The metadata areas of one member: its label, its journal, its snapshots.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Account, MemoryClass};
use disk::{
    ClaimError, ClaimRequest, ClaimSubject, DiskClaim, DiskLease, LeaseGate, LostClaim, RawDevice,
    check_not_revoked, read_disk, wait_valid, zero_disk_range,
};
use pool_metadata::journal::{BLOCK_BYTES, BlockError, JournalBlock};
use pool_metadata::replay::{DamagedMetadata, replay_member};
use pool_metadata::snapshot::{self, SnapshotError};
use pool_metadata::{EXTENT_METADATA_BYTES, Metadata, PhysicalExtent};
use raid::DiskCounters;
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::error::{PoolError, metadata_io_error};
use super::member_label::{self, LABEL_BYTES, LABEL_OFFSETS, LabelError, LabelState, MemberLabel};

/// How long a member may take to write a version that others have written.
pub(super) const DISK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long it may take for more than a block, or when its disk may have to spin up first.
pub(super) const LONG_DISK_TIMEOUT: Duration = Duration::from_secs(60);

/// How long to wait for a disk when its claim is verified.
const VERIFY_TIMEOUT: Duration = Duration::from_secs(1);

/// Most bytes of one read or write.
const IO_CHUNK_BYTES: usize = 256 << 10;

/// A disk that is a member, or is to become one.
#[derive(Debug)]
pub(super) struct MemberDisk {
    disk: Disk,
    memory: Account,
    /// Error counts of all cores.
    counters: Arc<DiskCounters>,
    state: RefCell<MemberDiskState>,
}

/// What is known of the disk.
#[derive(Debug)]
struct MemberDiskState {
    label: MemberLabel,
    /// The versions of its two snapshots.
    snapshot_versions: [u64; 2],
    /// How many writes to its metadata areas have completed.
    completed_writes: u64,
    /// The claim that keeps other machines from it.
    claim: Option<Rc<DiskClaim>>,
}

/// The node that claims the disks of a pool, and who is notified when another machine takes one.
#[derive(Clone, Debug)]
pub(super) struct ClaimSettings {
    /// `None` if the caller keeps other machines out.
    pub(super) claim: Option<ClaimRequest>,
    pub(super) lost_sender: Option<mpsc::UnboundedSender<LostClaim>>,
}

impl ClaimSettings {
    /// The same without the operator's permission to take disks over, which holds for one opening.
    pub(super) fn without_take_over(&self) -> Self {
        let claim = self.claim.map(|claim| ClaimRequest { take_over: false, ..claim });
        Self { claim, lost_sender: self.lost_sender.clone() }
    }
}

/// A disk as an array uses it.
pub(super) fn raw_device(disk: Disk) -> RawDevice {
    RawDevice::new(disk, u32::try_from(BLOCK_BYTES).unwrap_or(u32::MAX))
}

/// The outcome of `work`, or [`DiskErrorKind::Gone`] if the disk does not answer in time. Requests
/// in flight go on, and keep the disk open.
pub(super) async fn with_disk_timeout<T>(
    patience: Duration,
    work: impl Future<Output = Result<T, DiskError>>,
) -> Result<T, DiskError> {
    let gone = Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 });
    timeout(patience, work).await.unwrap_or(gone)
}

/// Why the metadata of a member that is present cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LoadError {
    /// It cannot be read.
    #[error("{0}")]
    Disk(#[from] DiskError),
    /// It is damaged.
    #[error("{0}")]
    Damaged(#[from] DamagedMetadata),
    /// A snapshot has an unknown format, or is invalid.
    #[error("{0}")]
    Snapshot(#[from] SnapshotError),
    /// Likewise a journal block.
    #[error("{0}")]
    Block(#[from] BlockError),
}

/// The label of a disk; `None` if it has none.
pub(super) async fn read_label(
    disk: &Disk,
    memory: &Account,
) -> Result<Result<Option<MemberLabel>, LabelError>, DiskError> {
    let mut found = [Err(LabelError::NoMagic); 2];
    let (mut unread, mut read_any) = (None, false);
    for ((slot, at), found) in (0u16..).zip(LABEL_OFFSETS).zip(&mut found) {
        if at + LABEL_BYTES as u64 > disk.info().size {
            continue;
        }
        match read_disk(disk, memory, at, LABEL_BYTES).await {
            Ok(bytes) => {
                read_any = true;
                *found = as_block(&bytes)
                    .map_or(Err(LabelError::NoMagic), |b| MemberLabel::parse(b, slot));
            }
            Err(why) => (*found, unread) = (Err(LabelError::Damaged), Some(why)),
        }
    }
    match unread {
        Some(why) if !read_any => Err(why),
        _ => Ok(member_label::newest_label(found)),
    }
}

impl MemberDisk {
    /// The disk of the member that `label` describes.
    pub(super) fn new(disk: Disk, memory: Account, label: MemberLabel) -> Self {
        Self {
            disk,
            memory,
            counters: Arc::default(),
            state: RefCell::new(MemberDiskState {
                label,
                snapshot_versions: [0; 2],
                completed_writes: 0,
                claim: None,
            }),
        }
    }

    /// Claims the disk for this machine, if claims are in use.
    ///
    /// # Errors
    /// [`ClaimError`], with the owner.
    pub(super) async fn acquire_claim(
        &self,
        core: &Core,
        claim_settings: &ClaimSettings,
    ) -> Result<(), ClaimError> {
        let Some(claim) = claim_settings.claim else { return Ok(()) };
        let label = self.label();
        let subject = ClaimSubject { set_id: label.pool_id, part_id: label.member_uuid };
        let lost_sender = claim_settings.lost_sender.clone();
        let disk_claim =
            DiskClaim::acquire(core, &self.disk, &self.memory, (subject, &claim), lost_sender)
                .await?;
        self.state.borrow_mut().claim = Some(Rc::new(disk_claim));
        Ok(())
    }

    fn claim(&self) -> Option<Rc<DiskClaim>> {
        self.state.borrow().claim.clone()
    }

    fn take_claim(&self) -> Option<Rc<DiskClaim>> {
        self.state.borrow_mut().claim.take()
    }

    /// Until when this machine may use it.
    pub(super) fn lease(&self) -> Option<Arc<DiskLease>> {
        self.state.borrow().claim.as_ref().map(|claim| claim.lease())
    }

    fn gate(&self) -> Option<LeaseGate> {
        self.state.borrow().claim.as_ref().map(|claim| claim.gate())
    }

    /// Checks that this machine still has the claim.
    ///
    /// # Errors
    /// Another machine has it. If that cannot be determined the claim is not lost.
    pub(super) async fn verify_claim(&self) -> Result<(), LostClaim> {
        let Some(claim) = self.claim() else { return Ok(()) };
        match timeout(VERIFY_TIMEOUT, claim.verify()).await {
            Ok(Err(Some(lost))) => Err(lost),
            // Its lease prevents use of the disk beyond what is allowed.
            Ok(Ok(()) | Err(None)) | Err(_) => Ok(()),
        }
    }

    /// Releases the claim: other nodes may take the disk now. It must not be written any more.
    pub(super) async fn release_claim(&self) {
        let Some(claim) = self.take_claim() else { return };
        let path = self.path().display();
        match timeout(DISK_TIMEOUT, claim.release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%path, %error, "the disk was closed, but its owner record was not released: another node needs --take-over");
            }
            Err(_) => {
                tracing::warn!(%path, "the disk does not respond: its owner record was not released");
            }
        }
    }

    /// Ends its heartbeat, so that this node can reopen it at once.
    pub(super) async fn stop_heartbeat(&self) {
        if let Some(claim) = self.take_claim() {
            claim.stop_heartbeat().await;
        }
    }

    /// The disk as an array uses it.
    pub(super) fn raw_device(&self) -> RawDevice {
        raw_device(self.disk.clone()).with_gate(self.gate())
    }

    /// Changes whenever a write to its metadata areas completes.
    pub(super) fn completed_writes(&self) -> u64 {
        self.state.borrow().completed_writes
    }

    pub(super) fn label(&self) -> MemberLabel {
        self.state.borrow().label
    }

    pub(super) fn path(&self) -> &Path {
        self.disk.path()
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    pub(super) fn counters(&self) -> Arc<DiskCounters> {
        Arc::clone(&self.counters)
    }

    /// The version of the newer snapshot.
    pub(super) fn latest_snapshot_version(&self) -> u64 {
        let [a, b] = self.state.borrow().snapshot_versions;
        a.max(b)
    }

    /// Writes `label` with the next generation.
    pub(super) async fn write_label(&self, label: MemberLabel) -> Result<(), DiskError> {
        let label = MemberLabel { generation: self.label().generation + 1, ..label };
        // A failed attempt may leave one copy with this generation: the next attempt takes a higher
        // one.
        self.state.borrow_mut().label = label;
        for (slot, at) in [(1, LABEL_OFFSETS[1]), (0, LABEL_OFFSETS[0])] {
            self.write(at, &label.to_bytes(slot)).await?;
            self.sync().await?;
        }
        Ok(())
    }

    /// Writes the state into its label.
    ///
    /// # Errors
    /// It cannot be written in time.
    pub(super) async fn set_label_state(&self, state: LabelState) -> Result<(), PoolError> {
        let relabelled = self.write_label(MemberLabel { state, ..self.label() });
        with_disk_timeout(LONG_DISK_TIMEOUT, relabelled)
            .await
            .map_err(|why| metadata_io_error(self.path(), why))
    }

    /// Loads its metadata from its snapshots and its journal.
    pub(super) async fn load_metadata(&self) -> Result<Metadata, LoadError> {
        let (label, mut snapshots) = (self.label(), Vec::new());
        let mut versions = [0; 2];
        for (at, version) in label.layout.snapshots_at.into_iter().zip(&mut versions) {
            if let Some(found) = self.read_snapshot(at, &label).await? {
                *version = found.version_id().version;
                snapshots.push(found);
            }
        }
        self.state.borrow_mut().snapshot_versions = versions;
        let blocks = self.read_journal(&label).await?;
        Ok(replay_member(label.term_start, snapshots, blocks)?)
    }

    /// Completes when the disk answers, even with an error.
    pub(super) async fn wait_response(&self) {
        let _ = read_disk(&self.disk, &self.memory, 0, BLOCK_BYTES).await;
    }

    async fn read_snapshot(
        &self,
        at: u64,
        label: &MemberLabel,
    ) -> Result<Option<Metadata>, LoadError> {
        let first = read_disk(&self.disk, &self.memory, at, BLOCK_BYTES).await?;
        let length =
            as_block(&first).and_then(|first| snapshot::snapshot_len(first, label.pool_id));
        let max_bytes = u64::from(label.layout.snapshot_blocks) * BLOCK_BYTES as u64;
        let Some(length) = length.filter(|length| (1..=max_bytes).contains(length)) else {
            return Ok(None);
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes = read_disk(&self.disk, &self.memory, at, length).await?;
        match Metadata::decode_snapshot(&bytes, label.pool_id) {
            Ok(found) => Ok(Some(found)),
            Err(
                why @ (SnapshotError::UnknownVersion(_)
                | SnapshotError::InvariantViolated(_)
                | SnapshotError::Malformed),
            ) => Err(why.into()),
            Err(_) => Ok(None),
        }
    }

    async fn read_journal(&self, label: &MemberLabel) -> Result<Vec<JournalBlock>, LoadError> {
        let mut blocks = Vec::new();
        let (mut at, layout) = (label.layout.journal_at, label.layout);
        let end = layout.journal_block_at(layout.journal_blocks);
        while at < end {
            let len = IO_CHUNK_BYTES.min(usize::try_from(end - at).unwrap_or(IO_CHUNK_BYTES));
            let bytes = read_disk(&self.disk, &self.memory, at, len).await?;
            for block in bytes.chunks_exact(BLOCK_BYTES).filter_map(as_block) {
                match JournalBlock::parse(block, label.pool_id) {
                    Ok(block) => blocks.push(block),
                    Err(BlockError::NoMagic | BlockError::Torn | BlockError::OtherPool) => {}
                    Err(why @ (BlockError::UnknownVersion(_) | BlockError::Inconsistent)) => {
                        return Err(why.into());
                    }
                }
            }
            at += len as u64;
        }
        Ok(blocks)
    }

    /// Makes a journal block durable.
    pub(super) async fn write_block(&self, block: &JournalBlock) -> Result<(), DiskError> {
        let label = self.label();
        let slot =
            JournalBlock::journal_slot(block.version_id.version, label.layout.journal_blocks);
        let at = label.layout.journal_block_at(slot);
        self.write(at, &block.to_bytes(label.pool_id)).await?;
        self.sync().await
    }

    /// Makes a snapshot of this version durable, in place of the older one.
    pub(super) async fn write_snapshot(&self, bytes: &[u8], version: u64) -> Result<(), DiskError> {
        let layout = self.label().layout;
        let mut versions = self.state.borrow().snapshot_versions;
        let older = usize::from(versions[1] < versions[0]);
        if bytes.len() as u64 > u64::from(layout.snapshot_blocks) * BLOCK_BYTES as u64 {
            return Err(DiskError { kind: DiskErrorKind::PastEnd, errno: 0 });
        }
        let at = layout.snapshots_at[older];
        for (n, piece) in bytes.chunks(IO_CHUNK_BYTES).enumerate() {
            self.write(at + (n * IO_CHUNK_BYTES) as u64, piece).await?;
        }
        self.sync().await?;
        versions[older] = version;
        self.state.borrow_mut().snapshot_versions = versions;
        Ok(())
    }

    /// Erases its snapshots.
    pub(super) async fn erase_snapshots(&self) -> Result<(), DiskError> {
        let layout = self.label().layout;
        self.zero(layout.snapshots_at[0], layout.log_rings_at).await?;
        self.state.borrow_mut().snapshot_versions = [0; 2];
        self.sync().await
    }

    /// Erases its journal, its rings and its dirty lists: only its snapshot remains.
    pub(super) async fn erase_journal_and_logs(&self) -> Result<(), DiskError> {
        let layout = self.label().layout;
        self.zero(layout.journal_at, layout.journal_block_at(layout.journal_blocks)).await?;
        self.zero(layout.log_rings_at, layout.extents_at).await?;
        self.sync().await
    }

    /// Zeroes a physical extent, durably.
    pub(super) async fn zero_extent(&self, extent: PhysicalExtent) -> Result<(), DiskError> {
        let layout = self.label().layout;
        let at = layout.physical_extent_at(extent.index);
        self.zero(at, at + layout.physical_extent_bytes).await?;
        self.sync().await
    }

    /// Zeroes the metadata of a physical extent, durably: stripe maps and checksums of its former
    /// column.
    pub(super) async fn zero_extent_metadata(
        &self,
        extent: PhysicalExtent,
    ) -> Result<(), DiskError> {
        let layout = self.label().layout;
        let end = layout.physical_extent_at(extent.index) + layout.physical_extent_bytes;
        self.zero(end - EXTENT_METADATA_BYTES, end).await?;
        self.sync().await
    }

    async fn zero(&self, from: u64, to: u64) -> Result<(), DiskError> {
        wait_valid(self.gate().as_ref()).await?;
        let cleared = zero_disk_range(&self.disk, &self.memory, from, to).await;
        self.count_completion(cleared)
    }

    async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DiskError> {
        let credit = self.memory.credit(bytes.len(), MemoryClass::LocalIo).await;
        let credit = credit.map_err(|_| DiskError { kind: DiskErrorKind::Other, errno: 0 })?;
        let gate = self.gate();
        let written = async {
            wait_valid(gate.as_ref()).await?;
            self.disk.write(at, rt::buf::copy_in(&credit, bytes)).await?;
            wait_valid(gate.as_ref()).await
        };
        let written = written.await;
        self.count_completion(written)
    }

    async fn sync(&self) -> Result<(), DiskError> {
        check_not_revoked(self.gate().as_ref())?;
        let synced = self.disk.sync().await;
        self.count_completion(synced)
    }

    fn count_completion<T>(&self, ended: T) -> T {
        self.state.borrow_mut().completed_writes += 1;
        ended
    }
}

fn as_block(bytes: &[u8]) -> Option<&[u8; BLOCK_BYTES]> {
    bytes.get(..BLOCK_BYTES)?.try_into().ok()
}
