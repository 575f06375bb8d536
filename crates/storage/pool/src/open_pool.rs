//! An open pool on its owner core: handles requests of the other cores, and sends them events.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use disk::{ClaimRequest, LostClaim};
use futures_util::future::join_all;
use geometry::{ALL_REGIONS, ROW_BYTES, RaidGeometry, Redundancy};
use pool_metadata::allocator::ReservedExtents;
use pool_metadata::{
    COLUMN_DATA_BYTES, Change, MAX_EXTENT_BYTES, MAX_LOG_RINGS, MemberId, Metadata, PhysicalExtent,
    PoolVolumeId, STRIP_BYTES,
};
use rt::Core;
use rt::disk::Disk;
use tokio::sync::{Mutex, RwLock, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;
use wire::ShortText;

use super::discovery::{DiscoveredDisks, NewDisk, RecoveredPool, ReturningMember, open_new};
use super::disk_admission::{AdmissionInput, ReturnId};
use super::disk_claims::{pool_claim_lost, release_all};
use super::error::PoolError;
use super::member_disk::{ClaimSettings, DISK_TIMEOUT, LONG_DISK_TIMEOUT, MemberDisk};
use super::member_label::{LabelState, MemberLabel};
use super::metadata_writer::MetadataWriter;
use super::report::PoolScrubReport;
use super::requests::{ColumnId, PoolEvent, PoolHandle, PoolInfo, PoolRequest};
use super::{Mistake, crash_recovery};

mod error_counts;
mod membership;
mod report;
mod scrub;
mod volumes;

use membership::{add_member_change, begin_return, initialize_member, new_member_disk};
use volumes::Allocation;

/// How often drained members are removed, and cores look for columns to rebuild.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(10);

/// How often the error counts of disks are recorded if they changed, and how often a version is
/// written while data are written: it tells a rolled-back disk by the versions that it lacks.
const PERIODIC_VERSION_INTERVAL: Duration = Duration::from_secs(10);

/// The pool to be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatePool {
    /// Its identity.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// The redundancy of its volumes.
    pub redundancy: Redundancy,
    /// Columns of an extent; by default as many as there are disks.
    pub columns: Option<u16>,
    /// Bytes of a strip: a power of two from 16 KiB to 128 KiB.
    pub strip_bytes: u32,
    /// How many cores may use it; cannot be changed later.
    pub max_cores: u16,
    /// Whether its data have checksums; cannot be changed later.
    pub has_checksums: bool,
    /// Its disks.
    pub disks: Vec<NewDisk>,
    /// Disks that wait for others to fail.
    pub spares: Vec<NewDisk>,
    /// Use the page cache where a file system has no direct I/O.
    pub buffered: bool,
    /// The node that claims its disks, where other machines may reach them; `None` if the caller
    /// keeps them out.
    pub claim: Option<ClaimRequest>,
}

/// The pool to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenPool {
    /// Its identity.
    pub id: Uuid,
    /// Where to look for its disks. Paths that are missing, or hold something else, are skipped.
    pub paths: Vec<PathBuf>,
    /// Disks that the operator declares lost: serial numbers, paths, or member numbers.
    pub missing_disks: Vec<String>,
    /// Use the page cache where a file system has no direct I/O.
    pub buffered: bool,
    /// The node that claims its disks, where other machines may reach them, and whether the
    /// operator lets it take them over from their last owner ([`ClaimRequest::take_over`]); `None`
    /// if the caller keeps other machines out.
    pub claim: Option<ClaimRequest>,
}

/// The volume to be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewPoolVolume {
    /// Its identity.
    pub id: Uuid,
    /// Its size in bytes.
    pub bytes: u64,
    /// Length of its blocks in bytes: 512 or 4096.
    pub block_size: u32,
    /// Whether all its extents are allocated from the beginning, and never freed.
    pub is_thick: bool,
}

/// An open pool, on its owner core.
#[derive(Debug)]
pub struct Pool {
    pub(super) core: Core,
    buffered: bool,
    /// For disks that join later.
    claim_settings: ClaimSettings,
    pub(super) writer: Rc<MetadataWriter>,
    handle: PoolHandle,
    /// Held exclusively to admit or remove a member; shared by those that need a consistent
    /// membership.
    membership_lock: RwLock<()>,
    /// Held to create a volume.
    create_lock: Mutex<()>,
    /// Read with [`Self::state`], changed with [`Self::state_mut`].
    state: RefCell<PoolState>,
    /// Planted by tests.
    #[cfg(feature = "testing")]
    mistake: Mistake,
}

/// What the owner of a pool knows besides the metadata: plain data, never borrowed across an
/// `await`.
#[derive(Debug, Default)]
struct PoolState {
    reserved: ReservedExtents,
    core_events: Vec<(u16, mpsc::UnboundedSender<PoolEvent>)>,
    /// Rings of attached cores, and of cores that left entries behind that need recovery.
    rings_in_use: BTreeSet<u16>,
    /// The ring that has the entries of each volume.
    volume_rings: BTreeMap<PoolVolumeId, u16>,
    /// How many ranges of entry numbers have been given out in this term.
    number_ranges: u64,
    /// Members that are slow, and unresponsive members that must be waited for, as far as they have
    /// been logged.
    slow_members: BTreeSet<MemberId>,
    awaited_members: BTreeSet<MemberId>,
    /// Columns that are being moved, and their targets.
    column_moves: BTreeMap<ColumnId, PhysicalExtent>,
    /// The path where each member was last opened.
    last_paths: BTreeMap<MemberId, PathBuf>,
    tasks: Vec<JoinHandle<()>>,
    /// The current or last scrub, and how many cores have not finished it.
    current_scrub: Option<(PoolScrubReport, usize)>,
    is_closed: bool,
}

/// Chooses the longest columns with which an extent has at most 64 MiB of data, and the geometry
/// with them.
fn choose_geometry(request: &CreatePool) -> Result<RaidGeometry, PoolError> {
    let count = u16::try_from(request.disks.len()).unwrap_or(u16::MAX);
    let usable_disks = match request.redundancy {
        Redundancy::Copies(copies) if copies > 0 => count / copies * copies,
        _ => count,
    };
    // Most data columns, with the shortest ones.
    let shortest_column = COLUMN_DATA_BYTES[0];
    let data = u16::try_from(MAX_EXTENT_BYTES / shortest_column).unwrap_or(u16::MAX);
    let max_columns = match request.redundancy {
        Redundancy::Copies(copies) => data.saturating_mul(copies),
        level => data + level.parity_strips(),
    };
    let columns = request.columns.unwrap_or_else(|| usable_disks.min(max_columns));
    if columns > count {
        let message = format!("{columns} columns need {columns} disks, but there are {count}");
        return Err(PoolError::new(message));
    }
    let strip_bytes = u64::from(request.strip_bytes);
    if !strip_bytes.is_power_of_two() || !STRIP_BYTES.contains(&strip_bytes) {
        return Err(PoolError::new("the size of a strip must be 16K, 32K, 64K or 128K"));
    }
    let strip_rows = u32::try_from(strip_bytes / u64::from(ROW_BYTES)).unwrap_or(0);
    let geometry_with = |column_bytes: u64| {
        let stripes = u32::try_from(column_bytes / strip_bytes).unwrap_or(0);
        RaidGeometry::new(request.redundancy, columns, strip_rows, stripes)
    };
    let shapes = COLUMN_DATA_BYTES
        .iter()
        .rev()
        .map(|column_bytes| (*column_bytes, geometry_with(*column_bytes)));
    for (column_bytes, geometry) in shapes {
        let geometry = geometry.map_err(|why| PoolError::new(why.to_string()))?;
        if column_bytes * u64::from(geometry.data_strips()) <= MAX_EXTENT_BYTES {
            return Ok(geometry);
        }
    }
    Err(PoolError::new(format!(
        "an extent cannot have {columns} columns: choose fewer with --columns"
    )))
}

impl Pool {
    /// Another machine has claimed a disk. If it was for this pool, nothing is read or written any
    /// more.
    fn on_claim_lost(&self, lost: &LostClaim) {
        let pool = self.writer.metadata().pool_id;
        // Otherwise the disk is being overwritten: only that disk fails.
        if lost.new_owner.as_ref().is_some_and(|by| by.subject.set_id == pool) {
            self.writer.fence(&pool_claim_lost(lost));
        }
    }

    /// Reads the state. The guard must not be kept while anything else of the pool is called that
    /// may change it.
    fn state(&self) -> Ref<'_, PoolState> {
        self.state.borrow()
    }

    /// Changes the state. The guard must not be kept while anything else of the pool is called.
    fn state_mut(&self) -> RefMut<'_, PoolState> {
        self.state.borrow_mut()
    }

    fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// Creates a pool of these disks, and opens it. On failure the labels of the disks say that
    /// they were not finished.
    ///
    /// # Errors
    /// Why it cannot be created.
    pub async fn create(core: &Core, request: &CreatePool) -> Result<Rc<Self>, PoolError> {
        let geometry = choose_geometry(request)?;
        if !(1..=MAX_LOG_RINGS).contains(&request.max_cores) {
            return Err(PoolError::new(format!("a pool has 1 to {MAX_LOG_RINGS} log rings")));
        }
        let name = ShortText::new(&request.name);
        let mut metadata = Metadata::new(request.id, name, geometry, request.max_cores);
        metadata.has_checksums = request.has_checksums;
        let mut disks = Vec::new();
        let all = request.disks.iter().chain(&request.spares);
        // All at once: disks that do not answer take a minute, however many they are.
        let opened = all.map(|new| open_new(core, new, request.buffered, request.claim));
        for disk in join_all(opened).await {
            let number = MemberId(u16::try_from(disks.len()).unwrap_or(u16::MAX));
            disks.push(new_member_disk(core, disk?, &metadata, number)?);
        }
        let mut changes = vec![Change::StartTerm { term_id: core.random_uuid(), is_forced: false }];
        let is_spare = |n: usize| n >= request.disks.len();
        changes.extend(
            disks.iter().enumerate().map(|(n, d)| add_member_change(&d.label(), is_spare(n))),
        );
        metadata.begin_version(0)?;
        changes.iter().try_for_each(|change| metadata.apply(change))?;
        let bytes = metadata.encode_snapshot();
        let claim = request.claim.map(|claim| ClaimRequest { take_over: true, ..claim });
        let claim_settings = ClaimSettings { claim, lost_sender: None };
        let initialized = join_all(disks.iter().map(|disk| {
            initialize_member(core, disk, &claim_settings, (&bytes, metadata.version_id()))
        }));
        initialized.await.into_iter().collect::<Result<Vec<()>, _>>()?;
        for disk in &disks {
            disk.set_label_state(LabelState::Ready).await?;
        }
        // Reopen them the way they will be opened from now on.
        join_all(disks.iter().map(MemberDisk::stop_heartbeat)).await;
        drop(disks);
        let paths = request.disks.iter().chain(&request.spares).map(|new| new.path.clone());
        let (paths, without) = (paths.collect(), Vec::new());
        let (buffered, claim) = (request.buffered, request.claim);
        let open = OpenPool { id: request.id, paths, missing_disks: without, buffered, claim };
        Self::open(core, &open).await
    }

    /// Opens a pool: finds its disks by their labels, at whatever paths, and recovers from a crash.
    ///
    /// # Errors
    /// Why it may not be opened: which disks are missing or have diverged, and what to do.
    pub async fn open(core: &Core, what: &OpenPool) -> Result<Rc<Self>, PoolError> {
        Self::open_impl(core, what, Mistake::None).await
    }

    /// The same with a planted mistake, which tests must find.
    ///
    /// # Errors
    /// As [`Self::open`].
    #[cfg(feature = "testing")]
    pub async fn open_with_mistake(
        core: &Core,
        request: &OpenPool,
        mistake: Mistake,
    ) -> Result<Rc<Self>, PoolError> {
        Self::open_impl(core, request, mistake).await
    }

    async fn open_impl(
        core: &Core,
        request: &OpenPool,
        mistake: Mistake,
    ) -> Result<Rc<Self>, PoolError> {
        let (lost_sender, lost) = mpsc::unbounded_channel();
        let claim_settings = ClaimSettings { claim: request.claim, lost_sender: Some(lost_sender) };
        let options = (request.buffered, request.missing_disks.as_slice());
        let disks =
            DiscoveredDisks::discover(core, request.id, &request.paths, options, &claim_settings)
                .await?;
        let recovered = match disks.recover_state(&request.missing_disks, mistake) {
            Ok(recovered) => recovered,
            Err(why) => {
                disks.release_claims().await;
                return Err(why);
            }
        };
        drop(disks);
        let recovered = recovered.with_supporters_updated().await;
        let missing = recovered.missing_voters();
        let RecoveredPool { metadata, supporters, returning, declared_lost, is_forced, .. } =
            recovered;
        let (failed_sender, failed) = mpsc::unbounded_channel();
        let writer = MetadataWriter::new(metadata, supporters, declared_lost, failed_sender);
        let writer_task = tokio::task::spawn_local(Rc::clone(&writer).run());
        let opened = Self::start_term(core, request, &writer, &missing, is_forced).await;
        if let Err(why) = opened {
            let disks = writer.disks().into_iter().map(|(_, disk)| disk);
            let disks: Vec<_> = disks.chain(returning.into_iter().map(|r| r.disk)).collect();
            writer.close().await;
            writer_task.abort();
            release_all(disks).await;
            return Err(why);
        }
        let (handle, requests) = PoolHandle::new();
        let opened = writer.disks().into_iter();
        let opened = opened.map(|(id, disk)| (id, disk.path().to_owned())).collect();
        writer.apply(AdmissionInput::Opened);
        let returning: Vec<_> =
            returning.into_iter().filter_map(|found| begin_return(&writer, found)).collect();
        let pool = Rc::new(Self {
            core: core.clone(),
            buffered: request.buffered,
            claim_settings: claim_settings.without_take_over(),
            writer,
            handle,
            membership_lock: RwLock::new(()),
            create_lock: Mutex::new(()),
            state: RefCell::new(PoolState {
                last_paths: opened,
                tasks: vec![writer_task],
                ..PoolState::default()
            }),
            #[cfg(feature = "testing")]
            mistake,
        });
        pool.start_tasks(requests, failed, returning);
        pool.watch_claims(lost);
        Ok(pool)
    }

    /// Writes the first version of a term, labels the disks with it, and recovers the parity logs.
    async fn start_term(
        core: &Core,
        what: &OpenPool,
        writer: &Rc<MetadataWriter>,
        missing: &[MemberId],
        is_forced: bool,
    ) -> Result<(), PoolError> {
        let mut changes = vec![Change::StartTerm { term_id: core.random_uuid(), is_forced }];
        changes.extend(missing.iter().map(|id| Change::Detach(*id)));
        for id in missing {
            let serial = writer.metadata().member(*id).map(|m| m.serial);
            let serial = serial.unwrap_or_else(|| ShortText::new(""));
            tracing::error!(member = id.0, %serial, pool = %what.id, "a disk of the pool is missing: it is detached");
        }
        writer.commit_all(changes).await?;
        // A label may not name a version that its disk does not hold, so the disks get the version
        // first.
        let (term_start, disks) = writer.durable_version().await?;
        let each = disks.iter().map(|(id, disk)| {
            (
                *id,
                disk.write_label(MemberLabel {
                    term_start,
                    state: LabelState::Ready,
                    ..disk.label()
                }),
            )
        });
        let relabelled = writer.for_each_member(DISK_TIMEOUT, each).await.into_iter().zip(&disks);
        for ((id, outcome), (_, disk)) in relabelled {
            if let Err(why) = outcome {
                tracing::error!(path = %disk.path().display(), error = %why, "a disk of the pool is detached");
                writer.detach(id).await?;
            }
        }
        crash_recovery::recover_parity_logs(core, writer).await?;
        writer.commit(Change::LogsRecovered).await
    }

    fn start_tasks(
        self: &Rc<Self>,
        mut requests: mpsc::Receiver<PoolRequest>,
        mut failed_members: mpsc::UnboundedReceiver<MemberId>,
        returning: Vec<(ReturningMember, ReturnId)>,
    ) {
        let weak = Rc::downgrade(self);
        let request_task = tokio::task::spawn_local(async move {
            while let Some(request) = requests.recv().await {
                let Some(pool) = weak.upgrade() else { return };
                tokio::task::spawn_local(async move { pool.handle_request(request).await });
            }
        });
        let weak = Rc::downgrade(self);
        let failure_task = tokio::task::spawn_local(async move {
            while let Some(member) = failed_members.recv().await {
                let Some(pool) = weak.upgrade() else { return };
                pool.broadcast(|| PoolEvent::MemberDetached(member));
                pool.activate_spares(true).await;
            }
        });
        let weak = Rc::downgrade(self);
        let reattach_task = tokio::task::spawn_local(async move {
            for (found, return_id) in returning {
                let Some(pool) = weak.upgrade() else { return };
                pool.start_reattach(found, return_id).await;
            }
        });
        let weak = Rc::downgrade(self);
        let maintenance_task = tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(MAINTENANCE_INTERVAL).await;
                let Some(pool) = weak.upgrade() else { return };
                pool.remove_drained().await;
                pool.broadcast(|| PoolEvent::MaintenanceDue);
            }
        });
        let weak = Rc::downgrade(self);
        let periodic_task = tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(PERIODIC_VERSION_INTERVAL).await;
                let Some(pool) = weak.upgrade() else { return };
                pool.record_errors().await;
                pool.write_periodic_version().await;
            }
        });
        self.state_mut().tasks.extend([
            request_task,
            failure_task,
            reattach_task,
            maintenance_task,
            periodic_task,
        ]);
    }

    /// Whether this mistake is planted; never outside tests.
    #[cfg(feature = "testing")]
    fn makes_mistake(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    #[cfg(not(feature = "testing"))]
    #[expect(clippy::unused_self, reason = "the same as in tests")]
    fn makes_mistake(&self, _: Mistake) -> bool {
        false
    }

    /// Writes a version, and one that records its commit, if data have been written since the last
    /// time.
    async fn write_periodic_version(&self) {
        let disks = self.writer.disks();
        let was_written =
            |disk: &MemberDisk| disk.counters().written_since_check.swap(false, Ordering::Relaxed);
        let was_written = disks.iter().filter(|(_, disk)| was_written(disk)).count() > 0;
        if was_written && !self.makes_mistake(Mistake::SkipsPeriodicVersions) {
            // The writer reports errors itself.
            let _ = self.writer.await_commit().await;
        }
    }

    fn watch_claims(self: &Rc<Self>, mut losses: mpsc::UnboundedReceiver<LostClaim>) {
        let weak = Rc::downgrade(self);
        let claim_task = tokio::task::spawn_local(async move {
            while let Some(lost) = losses.recv().await {
                let Some(pool) = weak.upgrade() else { return };
                pool.on_claim_lost(&lost);
            }
        });
        self.state_mut().tasks.push(claim_task);
    }

    /// Closes the pool. None of its volumes may be open any more.
    ///
    /// # Errors
    /// The last changes could not be written.
    pub async fn close(&self) -> Result<(), PoolError> {
        release_all(self.shut_down().await).await;
        self.writer.fatal_error().map_or(Ok(()), Err)
    }

    /// Ends all work, and returns the disks it had, which get no more writes; none if it has ended
    /// before.
    async fn shut_down(&self) -> Vec<Rc<MemberDisk>> {
        let was_closed = std::mem::replace(&mut self.state_mut().is_closed, true);
        if was_closed {
            return Vec::new();
        }
        // A copy of a disk that was made while the pool was open lacks this version. The writer
        // reports errors itself.
        if !self.makes_mistake(Mistake::SkipsVersionOnClose) {
            let _ = timeout(LONG_DISK_TIMEOUT, self.record_errors()).await;
            let _ = timeout(LONG_DISK_TIMEOUT, self.writer.await_commit()).await;
        }
        let disks = self.writer.disks().into_iter().map(|(_, disk)| disk).collect();
        self.writer.close().await;
        let tasks = std::mem::take(&mut self.state_mut().tasks);
        tasks.into_iter().for_each(|task| task.abort());
        disks
    }

    /// Invalidates the labels of its disks, and closes it. It may not have volumes.
    ///
    /// # Errors
    /// The pool has volumes, or a disk cannot be written.
    pub async fn destroy(&self) -> Result<(), PoolError> {
        let volumes = self.writer.metadata().volumes().count();
        if volumes > 0 {
            return Err(PoolError::new(format!(
                "the pool has {}",
                wire::plural(volumes, "volume")
            )));
        }
        let disks = self.shut_down().await;
        self.writer.fatal_error().map_or(Ok(()), Err)?;
        for disk in &disks {
            disk.set_label_state(LabelState::Removed).await?;
        }
        release_all(disks).await;
        Ok(())
    }

    /// The handle by which cores send it requests.
    #[must_use]
    pub fn handle(&self) -> PoolHandle {
        self.handle.clone()
    }

    /// The open disk of a member.
    pub(super) fn disk(&self, member: MemberId) -> Option<Disk> {
        self.writer.disk(member).map(|disk| disk.disk().clone())
    }

    fn broadcast(&self, event: impl Fn() -> PoolEvent) {
        self.state_mut().core_events.retain(|(_, core)| core.send(event()).is_ok());
    }

    async fn handle_request(self: Rc<Self>, request: PoolRequest) {
        // If the requester is gone, the request is carried out all the same.
        match request {
            PoolRequest::Attach { ring, events, reply } => {
                drop(reply.send(self.attach_core(ring, events).await));
            }
            PoolRequest::Detach { ring } => self.on_core_detached(ring),
            PoolRequest::OpenVolume { volume, ring, reply } => {
                drop(reply.send(self.volume_info(volume, ring).await));
            }
            PoolRequest::DetachMember { member, join_generation, reply } => {
                drop(reply.send(self.detach_member(member, join_generation).await));
            }
            PoolRequest::DetachUnresponsive { member, join_generation, unresponsive, reply } => {
                // The core stops waiting when the disk has answered.
                let is_still_silent = || !reply.is_closed();
                let detached = self
                    .detach_unresponsive(member, join_generation, unresponsive, is_still_silent)
                    .await;
                drop(reply.send(detached));
            }
            PoolRequest::SetSlow { member, is_slow } => self.set_slow(member, is_slow),
            PoolRequest::MarkStale { volume, index, regions, reply } => {
                let mark = Change::MarkStale { volume, index, regions };
                drop(reply.send(self.writer.commit(mark).await));
            }
            PoolRequest::AllocateExtent { volume, index, reply } => {
                let how = Allocation::AllowDegraded;
                drop(reply.send(self.allocate_extent(volume, index, how).await));
            }
            PoolRequest::FreeBytes { reply } => {
                let metadata = self.writer.metadata();
                let bytes = metadata.free_extents().saturating_mul(metadata.extent_bytes());
                drop(reply.send(Ok(bytes)));
            }
            PoolRequest::FreeExtent { volume, index, reply } => {
                let freed = self.writer.commit(Change::FreeExtent { volume, index }).await;
                if freed.is_ok() {
                    self.cancel_moves(|id| (id.volume, id.index) == (volume, index));
                }
                drop(reply.send(freed));
            }
            PoolRequest::ReserveColumnTarget { column: id, reply } => {
                drop(reply.send(self.reserve_column_target(id).await));
            }
            PoolRequest::CommitMove { column: id, to, reply } => {
                drop(reply.send(self.commit_move(id, to).await));
            }
            PoolRequest::CancelMove { column: id } => {
                self.cancel_moves(|other| *other == id);
            }
            PoolRequest::ScrubProgress { bytes, found } => self.add_scrub_progress(bytes, found),
            PoolRequest::ScrubEnded => self.on_core_scrub_ended().await,
            PoolRequest::RecordRows { volume, index, rows, damage, reply } => {
                drop(reply.send(self.record_row_damage((volume, index), rows, damage).await));
            }
            PoolRequest::ClearStale { column: id, reply } => {
                let ColumnId { volume, index, column } = id;
                let clear = Change::ClearStale { volume, index, column, regions: ALL_REGIONS };
                drop(reply.send(self.writer.commit(clear).await));
            }
        }
    }

    /// A core has detached in order: the moves of its volumes end.
    fn on_core_detached(&self, ring: u16) {
        let volumes: BTreeSet<PoolVolumeId> = {
            let state = &mut *self.state_mut();
            state.rings_in_use.remove(&ring);
            let of_ring = state.volume_rings.extract_if(.., |_, ring_of| *ring_of == ring);
            of_ring.map(|(id, _)| id).collect()
        };
        self.cancel_moves(|of| volumes.contains(&of.volume));
    }

    async fn attach_core(
        &self,
        ring: u16,
        events: mpsc::UnboundedSender<PoolEvent>,
    ) -> Result<PoolInfo, PoolError> {
        // A member that is admitted meanwhile would not be known to this core.
        let _guard = self.membership_lock.read().await;
        let metadata = self.writer.metadata();
        let log_rings = metadata.log_rings;
        if ring >= log_rings {
            let what = "the pool serves volumes on";
            let message = format!(
                "{what} {}, and this one is number {ring}",
                wire::plural(log_rings, "core")
            );
            return Err(PoolError::new(message));
        }
        let is_new = self.state_mut().rings_in_use.insert(ring);
        if !is_new {
            let message = format!(
                "core {ring} already uses the pool, or left it without completing its operations"
            );
            return Err(PoolError::new(message).with_hint("close the pool and open it again"));
        }
        self.state_mut().core_events.push((ring, events));
        let members = metadata.voters().iter().filter_map(|id| self.member_info(id)).collect();
        Ok(PoolInfo {
            pool: metadata.pool_id,
            name: metadata.name,
            log_generation: metadata.log_generation(),
            first_number: self.next_number_range(),
            buffered: self.buffered,
            members,
            draining: self.draining_members(),
        })
    }

    /// A number beyond those of all batches and entries of this term, with as much space after it
    /// as they need.
    fn next_number_range(&self) -> u64 {
        let number_ranges = &mut self.state_mut().number_ranges;
        *number_ranges += 1;
        *number_ranges << 32
    }
}
