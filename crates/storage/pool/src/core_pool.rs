//! A core's access to a pool: its own open disks, its own parity log, and its open volumes.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::{Account, Dev, Error};
use disk::{LeaseGate, RawDevice};
use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt, stream};
use geometry::{Column, DamageKind, ROW_BYTES, RaidGeometry};
use pool_metadata::{MemberId, MemberSet, PhysicalExtent, PoolVolumeId};
use raid::{
    Array, ArrayMember, Damage, DetachFuture, Extent, ExtentAllocator, MIN_FAILING_TIME,
    MaintenancePace, MetadataFuture, PoolMetadata, RaidSettings, RaidVolume,
};
use rt::Core;
use rt::disk::{Disk, OpenOptions};
use rustc_hash::FxHashMap;
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;
use wire::ShortText;

use super::crash_recovery::{
    array_member, check_checksum_memory, checksum_memory_bytes, insufficient_memory,
    to_block_error, with_checksums,
};
use super::damage_log::{DamageKey, DamageLog, DamageReport, REPORT_INTERVAL};
use super::error::PoolError;
use super::member_disk::{DISK_TIMEOUT, raw_device};
use super::open_pool::Pool;
use super::requests::{
    Admission, ColumnId, ExtentInfo, MemberInfo, PoolEvent, PoolHandle, PoolInfo, PoolRequest,
    RowDamage, VolumeInfo,
};
use super::response_tracker::ResponseTracker;

/// Stripe maps of a volume that are loaded concurrently when it is opened.
const LOAD_CONCURRENCY: usize = 32;

/// A rebuild rests half as long as it works, which leaves a third of the time to clients alone.
const REBUILD_PACE: MaintenancePace = MaintenancePace { rest_factor: 0.5 };

/// How often the checksums of idle data are written.
const CHECKSUM_WRITE_BACK_INTERVAL: Duration = Duration::from_secs(10);

/// A core's access to a pool. See the [module](self).
#[derive(Debug)]
pub struct CorePool {
    core: Core,
    disk_opener: DiskOpener,
    handle: PoolHandle,
    pool_id: Uuid,
    ring: (u16, u64),
    array: Rc<Array>,
    /// Memory for checksums.
    memory: Account,
    metadata: Rc<CorePoolMetadata>,
    maintenance_due: Rc<Notify>,
    stop_signal: Rc<Notify>,
    /// Read with [`Self::state`], changed with [`Self::state_mut`].
    state: RefCell<CorePoolState>,
}

/// What a core knows of a pool: plain data, never borrowed across an `await`.
#[derive(Debug, Default)]
struct CorePoolState {
    /// The open disks of its members; they are closed when a member is detached.
    disks: BTreeMap<MemberId, Rc<RawDevice>>,
    open_volumes: BTreeMap<Uuid, OpenVolume>,
    /// Names of volumes for the log.
    volume_names: BTreeMap<Uuid, String>,
    draining: MemberSet,
    /// Columns that are being moved, before the move is committed.
    column_moves: BTreeMap<ColumnId, ColumnMove>,
    /// Whether a scrub is to be started.
    scrub_requested: bool,
    /// Counts admissions of members and growths of volumes: a volume that is being opened meanwhile
    /// is loaded anew.
    change_generation: u64,
    /// Whether it is being closed: nothing is rebuilt or scrubbed any more.
    is_stopping: bool,
    tasks: Vec<JoinHandle<()>>,
}

/// The target of a column, and the number of its extent.
#[derive(Clone, Copy, Debug)]
struct ColumnMove {
    to: PhysicalExtent,
    address: Column,
    extent_number: u64,
}

/// A volume that is open, or was.
#[derive(Clone, Debug)]
struct OpenVolume {
    id: PoolVolumeId,
    raid: Weak<RaidVolume>,
    /// Held while the volume is rebuilt or scrubbed.
    maintenance_lock: Rc<Mutex<()>>,
}

/// How a core gets the disks of a pool.
#[derive(Debug)]
enum DiskOpener {
    /// It opens them itself; the owner core has them locked.
    SharedOpen { core: Core, buffered: bool },
    /// It is the owner core, and uses the same open disks.
    OwnerDisks(Weak<Pool>),
}

impl DiskOpener {
    async fn open(&self, member: &MemberInfo) -> Result<Disk, PoolError> {
        match self {
            Self::SharedOpen { core, buffered } => {
                let how = OpenOptions::new().buffered(*buffered).shared(true);
                Ok(core.open_disk(&member.path, how).await?)
            }
            Self::OwnerDisks(pool) => {
                let disk = pool.upgrade().and_then(|pool| pool.disk(member.id));
                disk.ok_or_else(|| {
                    PoolError::on_disk(&member.path, "it is no longer a disk of the pool")
                })
            }
        }
    }
}

/// Sends changes of metadata to the owner core.
#[derive(Debug)]
struct CorePoolMetadata {
    handle: PoolHandle,
    /// Name of the pool, for the log.
    pool_name: ShortText,
    damage_log: DamageLog,
    known: RefCell<KnownMetadata>,
}

/// What a core has seen of the metadata.
#[derive(Debug, Default)]
struct KnownMetadata {
    /// Volume and index of extents, by their numbers.
    extent_locations: FxHashMap<u64, (PoolVolumeId, u32)>,
    /// All regions of extents that were ever reported as stale.
    dirty_regions: FxHashMap<u64, u32>,
    /// Join generations of the members in use.
    join_generations: FxHashMap<MemberId, u64>,
    /// Serial numbers of the disks, for the log.
    serials: FxHashMap<MemberId, ShortText>,
    /// Names of the volumes for the log, and the length of their extents.
    volume_names: FxHashMap<PoolVolumeId, (String, u64)>,
}

impl CorePoolMetadata {
    fn join_generation(&self, member: MemberId) -> u64 {
        self.known.borrow().join_generations.get(&member).copied().unwrap_or(0)
    }

    fn log_damage(&self, report: &DamageReport) {
        let DamageReport { key, count: times, byte_range: bytes } = report;
        let pool = &self.pool_name;
        let serial =
            key.member.and_then(|member| self.known.borrow().serials.get(&member).copied());
        let serial = serial.unwrap_or_else(|| ShortText::new(""));
        let volume =
            self.known.borrow().volume_names.get(&key.volume).map(|(name, _)| name.clone());
        let volume = volume.unwrap_or_default();
        let (member, from, to) = (key.member.map(|member| member.0), bytes.start, bytes.end);
        match key.kind {
            DamageKind::Unreadable => {
                tracing::warn!(%pool, member, %serial, %volume, times, from, to, "pool: a disk cannot read blocks");
            }
            DamageKind::Corrupt => {
                tracing::error!(%pool, member, %serial, %volume, times, from, to, "pool: a disk returned data that was not written");
            }
            DamageKind::Inconsistent => {
                tracing::error!(%pool, %volume, times, from, to, "pool: data and parity (or copies) disagree, and which are right is unknown");
            }
        }
    }

    /// Logs collected damage that is due.
    fn log_due_damage(&self) {
        self.damage_log.take_due().iter().for_each(|report| self.log_damage(report));
    }
}

impl PoolMetadata for CorePoolMetadata {
    fn detach_member(&self, member: u16) -> MetadataFuture<'_> {
        Box::pin(async move {
            let member = MemberId(member);
            let join_generation = self.join_generation(member);
            let outcome = self
                .handle
                .request(|reply| PoolRequest::DetachMember { member, join_generation, reply })
                .await;
            outcome.map_err(|why| to_block_error(&why))
        })
    }

    fn mark_regions_stale(&self, extent: u64, regions: u32) -> MetadataFuture<'_> {
        Box::pin(async move {
            *self.known.borrow_mut().dirty_regions.entry(extent).or_default() |= regions;
            let found = self.known.borrow().extent_locations.get(&extent).copied();
            // A freed extent has nothing that could be stale.
            let Some((volume, index)) = found else { return Ok(()) };
            let request = |reply| PoolRequest::MarkStale { volume, index, regions, reply };
            self.handle.request(request).await.map_err(|why| to_block_error(&why))
        })
    }

    fn detach_unresponsive(&self, member: u16, unresponsive: u128) -> DetachFuture<'_> {
        Box::pin(async move {
            let (member, unresponsive) = (MemberId(member), MemberSet(unresponsive));
            let join_generation = self.join_generation(member);
            let request = |reply| PoolRequest::DetachUnresponsive {
                member,
                join_generation,
                unresponsive,
                reply,
            };
            let outcome = self.handle.request(request).await;
            outcome.map_err(|why| to_block_error(&why))
        })
    }

    fn set_slow(&self, member: u16, is_slow: bool) {
        let (handle, member) = (self.handle.clone(), MemberId(member));
        tokio::task::spawn_local(async move {
            handle.notify(PoolRequest::SetSlow { member, is_slow }).await;
        });
    }

    fn report_damage(&self, damage: Damage) {
        let found = self.known.borrow().extent_locations.get(&damage.extent).copied();
        let Some((volume, index)) = found else { return };
        let extent_bytes =
            self.known.borrow().volume_names.get(&volume).map_or(0, |(_, bytes)| *bytes);
        let at = |row| u64::from(index) * extent_bytes + u64::from(row) * u64::from(ROW_BYTES);
        let key = DamageKey { kind: damage.kind, member: damage.member.map(MemberId), volume };
        let reports = self.damage_log.record(key, at(damage.rows.start)..at(damage.rows.end));
        reports.iter().for_each(|report| self.log_damage(report));
    }
}

/// Allocates the extents of a volume.
#[derive(Debug)]
struct VolumeAllocator {
    metadata: Rc<CorePoolMetadata>,
    volume: PoolVolumeId,
    geometry: RaidGeometry,
}

impl VolumeAllocator {
    /// The extent in use; from now on its number is known.
    fn register_extent(&self, info: &ExtentInfo) -> Extent {
        let location = (self.volume, info.index);
        self.metadata.known.borrow_mut().extent_locations.insert(info.extent_number, location);
        info.to_raid_extent(self.geometry)
    }
}

impl ExtentAllocator for VolumeAllocator {
    fn allocate(&self, index: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>> {
        Box::pin(async move {
            let volume = self.volume;
            let request = |reply| PoolRequest::AllocateExtent { volume, index, reply };
            let allocated = self.metadata.handle.request(request).await;
            allocated.map(|info| self.register_extent(&info)).map_err(|why| {
                tracing::error!(volume = self.volume.0, error = %why, "allocating an extent failed");
                to_block_error(&why)
            })
        })
    }

    fn free(&self, index: u32) -> MetadataFuture<'_> {
        Box::pin(async move {
            let volume = self.volume;
            self.metadata
                .known
                .borrow_mut()
                .extent_locations
                .retain(|_, location| *location != (volume, index));
            let request = |reply| PoolRequest::FreeExtent { volume, index, reply };
            self.metadata.handle.request(request).await.map_err(|why| to_block_error(&why))
        })
    }

    fn record_lost_rows(&self, index: u32, rows: Range<u32>) -> MetadataFuture<'_> {
        Box::pin(self.record_rows(index, rows, RowDamage::Lost))
    }

    fn record_rewritten_rows(&self, index: u32, rows: Range<u32>) -> MetadataFuture<'_> {
        Box::pin(self.record_rows(index, rows, RowDamage::Rewritten))
    }

    fn record_unrepaired_rows(&self, index: u32, rows: Range<u32>) -> MetadataFuture<'_> {
        Box::pin(self.record_rows(index, rows, RowDamage::Unrepaired))
    }
}

impl VolumeAllocator {
    async fn record_rows(
        &self,
        index: u32,
        rows: Range<u32>,
        damage: RowDamage,
    ) -> Result<(), Error> {
        let volume = self.volume;
        let request = |reply| PoolRequest::RecordRows { volume, index, rows, damage, reply };
        self.metadata.handle.request(request).await.map_err(|why| to_block_error(&why))
    }
}

impl CorePool {
    /// Reads the state. The guard must not be kept while anything else of the pool is called that
    /// may change it.
    fn state(&self) -> Ref<'_, CorePoolState> {
        self.state.borrow()
    }

    /// Changes the state. The guard must not be kept while anything else of the pool is called.
    fn state_mut(&self) -> RefMut<'_, CorePoolState> {
        self.state.borrow_mut()
    }

    fn is_stopping(&self) -> bool {
        self.state().is_stopping
    }

    /// Attaches this core to a pool whose metadata another core may own. `ring` is the number of
    /// this core's parity log, below [`CreatePool::max_cores`](super::CreatePool::max_cores).
    ///
    /// # Errors
    /// The pool has fewer rings, or a disk cannot be opened here.
    pub async fn attach(core: &Core, handle: PoolHandle, ring: u16) -> Result<Rc<Self>, PoolError> {
        Self::attach_by(core, handle, ring, None).await
    }

    /// The same on the owner core, with the disks that it has open.
    ///
    /// # Errors
    /// The pool has fewer rings.
    pub async fn attach_on_owner_core(
        core: &Core,
        pool: &Rc<Pool>,
        ring: u16,
    ) -> Result<Rc<Self>, PoolError> {
        Self::attach_by(core, pool.handle(), ring, Some(Rc::downgrade(pool))).await
    }

    async fn attach_by(
        core: &Core,
        handle: PoolHandle,
        ring: u16,
        owner: Option<Weak<Pool>>,
    ) -> Result<Rc<Self>, PoolError> {
        let (sender, events) = mpsc::unbounded_channel();
        let info =
            handle.request(|reply| PoolRequest::Attach { ring, events: sender, reply }).await?;
        let core_pool = Self::build(core, handle.clone(), (ring, info), owner, events).await;
        if core_pool.is_err() {
            // It has written nothing.
            handle.notify(PoolRequest::Detach { ring }).await;
        }
        core_pool
    }

    async fn build(
        core: &Core,
        handle: PoolHandle,
        (ring, info): (u16, PoolInfo),
        owner: Option<Weak<Pool>>,
        events: mpsc::UnboundedReceiver<PoolEvent>,
    ) -> Result<Rc<Self>, PoolError> {
        let disk_opener = match owner {
            Some(pool) => DiskOpener::OwnerDisks(pool),
            None => DiskOpener::SharedOpen { core: core.clone(), buffered: info.buffered },
        };
        let metadata = Rc::new(CorePoolMetadata {
            handle: handle.clone(),
            pool_name: info.name,
            damage_log: DamageLog::default(),
            known: RefCell::default(),
        });
        let shared_metadata: Rc<dyn PoolMetadata> = Rc::<CorePoolMetadata>::clone(&metadata);
        let array = Array::new(info.log_generation, shared_metadata, core.buffer_pool()).await;
        let layouts = || info.members.iter().map(|member| member.layout);
        let array = array.map_err(|_| {
            let needed = Array::MEMORY_BYTES + checksum_memory_bytes(layouts());
            insufficient_memory(&core.buffer_pool().account(), needed)
        })?;
        let array = array.with_first_number(info.first_number);
        let core_pool = Rc::new(Self {
            core: core.clone(),
            disk_opener,
            handle,
            pool_id: info.pool,
            ring: (ring, info.log_generation),
            array: Rc::new(array),
            memory: core.buffer_pool().account(),
            metadata,
            maintenance_due: Rc::default(),
            stop_signal: Rc::default(),
            state: RefCell::new(CorePoolState {
                draining: info.draining,
                ..CorePoolState::default()
            }),
        });
        check_checksum_memory(&core_pool.memory, layouts()).await?;
        core_pool.attach_members(&info.members).await?;
        core_pool.start_tasks(events);
        if info.members.iter().any(|member| member.layout.dirty_lists_at.is_some()) {
            core_pool.start_checksum_write_back();
        }
        Ok(core_pool)
    }

    /// Starts using all members, each when its disk answers, and detaches those that cannot be
    /// used.
    async fn attach_members(&self, members: &[MemberInfo]) -> Result<(), PoolError> {
        let mut disks = Vec::new();
        for member in members {
            disks.push(self.disk_opener.open(member).await?);
        }
        let tracker = ResponseTracker::default();
        members.iter().for_each(|member| tracker.sent(member.id));
        let each = members.iter().zip(disks).map(|(member, disk)| async {
            let prepared = self.prepare_member_or_detach(member, disk, &tracker).await;
            tracker.answered(member.id);
            let Err(why) = prepared.and_then(|prepared| self.set_member(member, prepared)) else {
                return Ok(());
            };
            tracing::error!(error = %why, "a disk of the pool cannot be used on this core");
            let MemberInfo { id: member, join_generation, .. } = *member;
            self.handle
                .request(|reply| PoolRequest::DetachMember { member, join_generation, reply })
                .await
        });
        // Waits for all of them: no request may be in flight at a member that the array does not
        // have.
        join_all(each).await.into_iter().collect()
    }

    /// Prepares a member for the array, with I/O through `disk`.
    fn prepare_member(
        &self,
        member: &MemberInfo,
        disk: Disk,
    ) -> impl Future<Output = Result<(ArrayMember, Rc<RawDevice>), PoolError>> + use<> {
        let (identity, counters) = ((member.uuid, member.layout), Arc::clone(&member.counters));
        let gate = member.lease.clone().map(|lease| LeaseGate::new(self.core.clone(), lease));
        let disk = Rc::new(raw_device(disk).with_gate(gate));
        let prepared = array_member(
            Dev::shared(Rc::clone(&disk)),
            self.pool_id,
            identity,
            self.ring,
            counters,
        );
        let (layout, path, memory) = (member.layout, member.path.clone(), self.memory.clone());
        async move { Ok((with_checksums(prepared, layout, &memory, &path).await?, disk)) }
    }

    /// The same, unless the disk does not answer and the pool can do without all disks that are
    /// unresponsive. Requests in flight at it go on then.
    async fn prepare_member_or_detach(
        &self,
        member: &MemberInfo,
        disk: Disk,
        tracker: &ResponseTracker,
    ) -> Result<(ArrayMember, Rc<RawDevice>), PoolError> {
        let mut prepared = tokio::task::spawn_local(self.prepare_member(member, disk));
        let abandoned = async {
            loop {
                let unresponsive = tracker.wait_unresponsive(DISK_TIMEOUT, |_| true).await;
                let (id, join_generation) = (member.id, member.join_generation);
                let request = |reply| PoolRequest::DetachUnresponsive {
                    member: id,
                    join_generation,
                    unresponsive,
                    reply,
                };
                if self.handle.request(request).await? {
                    return Err(PoolError::on_disk(&member.path, "it does not respond"));
                }
            }
        };
        // A member that answers before it is abandoned is used.
        tokio::select! {
            biased;
            done = &mut prepared => {
                done.unwrap_or_else(|why| Err(PoolError::on_disk(&member.path, why)))
            }
            result = abandoned => result,
        }
    }

    /// From now on a member gets writes.
    fn set_member(
        &self,
        member: &MemberInfo,
        (array_member, disk): (ArrayMember, Rc<RawDevice>),
    ) -> Result<(), PoolError> {
        self.metadata.known.borrow_mut().join_generations.insert(member.id, member.join_generation);
        self.metadata.known.borrow_mut().serials.insert(member.id, member.serial);
        let result = self.array.set_member(member.id.0, array_member);
        result.map_err(|why| PoolError::on_disk(&member.path, why.to_string()))?;
        self.state_mut().disks.insert(member.id, disk);
        Ok(())
    }

    fn start_tasks(self: &Rc<Self>, mut events: mpsc::UnboundedReceiver<PoolEvent>) {
        let (weak, stop) = (Rc::downgrade(self), Rc::clone(&self.stop_signal));
        let event_task = tokio::task::spawn_local(async move {
            loop {
                let event = tokio::select! {
                    biased;
                    () = stop.notified() => return,
                    event = events.recv() => event,
                };
                let (Some(event), Some(core_pool)) = (event, weak.upgrade()) else { return };
                core_pool.handle_event(event).await;
            }
        });
        let (weak, maintenance_due) = (Rc::downgrade(self), Rc::clone(&self.maintenance_due));
        let maintenance_task = tokio::task::spawn_local(async move {
            loop {
                maintenance_due.notified().await;
                let Some(core_pool) = weak.upgrade().filter(|core_pool| !core_pool.is_stopping())
                else {
                    return;
                };
                core_pool.maintain().await;
                let scrub_requested = std::mem::take(&mut core_pool.state_mut().scrub_requested);
                if scrub_requested {
                    core_pool.scrub().await;
                }
            }
        });
        self.state_mut().tasks.extend([event_task, maintenance_task]);
        let weak = Rc::downgrade(self);
        tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(REPORT_INTERVAL).await;
                let Some(core_pool) = weak.upgrade().filter(|core_pool| !core_pool.is_stopping())
                else {
                    return;
                };
                core_pool.metadata.log_due_damage();
            }
        });
    }

    /// Writes the checksums of idle data from time to time.
    fn start_checksum_write_back(self: &Rc<Self>) {
        let weak = Rc::downgrade(self);
        tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(CHECKSUM_WRITE_BACK_INTERVAL).await;
                let Some(core_pool) = weak.upgrade().filter(|core_pool| !core_pool.is_stopping())
                else {
                    return;
                };
                if let Err(why) = core_pool.array.write_back_cold_checksums().await {
                    tracing::error!(error = %why, "writing back checksums failed");
                }
            }
        });
    }

    async fn handle_event(self: &Rc<Self>, event: PoolEvent) {
        match event {
            PoolEvent::MemberDetached(member) => {
                if let Err(why) = self.array.on_member_detached(member.0).await {
                    tracing::error!(member = member.0, error = %why, "recording the stale regions of a detached disk failed");
                }
                // Other processes may use it, and it may return.
                self.state().disks.get(&member).into_iter().for_each(|disk| disk.close_when_idle());
            }
            PoolEvent::AdmitMember(admission) => self.on_admission(*admission).await,
            PoolEvent::DrainingChanged(members) => self.state_mut().draining = members,
            PoolEvent::MaintenanceDue => {}
            PoolEvent::ReleaseVolume(volume, done) => {
                let core_pool = Rc::clone(self);
                let release_task = tokio::task::spawn_local(async move {
                    if core_pool.release_volume(volume).await {
                        let _ = done.send(());
                    }
                });
                let tasks = &mut self.state_mut().tasks;
                tasks.retain(|task| !task.is_finished());
                tasks.push(release_task);
            }
            PoolEvent::StartScrub => self.state_mut().scrub_requested = true,
            PoolEvent::VolumeGrown(volume, bytes) => {
                let raid =
                    self.state().open_volumes.get(&volume).and_then(|open| open.raid.upgrade());
                raid.into_iter().for_each(|raid| raid.grow(bytes));
                self.state_mut().change_generation += 1;
            }
        }
        self.maintenance_due.notify_one();
    }

    async fn on_admission(&self, admission: Admission) {
        let Admission { member, stale_regions, done } = admission;
        match self.admit(&member, stale_regions).await {
            // If no task waits for it, the pool is closed.
            Ok(()) => drop(done.send(())),
            Err(why) => {
                tracing::error!(member = member.id.0, error = %why, "a disk of the pool cannot be used on this core");
            }
        }
    }

    /// From now on a member gets writes. What it misses is in `stale_regions` and in what this core
    /// reported.
    async fn admit(
        &self,
        member: &MemberInfo,
        stale_regions: Vec<(u64, u16, u32)>,
    ) -> Result<(), PoolError> {
        // Its requests in flight would overwrite later writes.
        if self.state().disks.get(&member.id).is_some_and(|before| !before.is_idle()) {
            let what = "operations from before it was detached are still in flight";
            return Err(PoolError::on_disk(&member.path, what));
        }
        let disk = self.disk_opener.open(member).await?;
        let prepared = self
            .prepare_member_or_detach(member, disk, &ResponseTracker::single(member.id))
            .await?;
        // No await from here on: writes before the array uses it would be missing from it,
        // unrecorded.
        let stale_regions: FxHashMap<(u64, u16), u32> = stale_regions
            .into_iter()
            .map(|(extent, column, regions)| ((extent, column), regions))
            .collect();
        self.state_mut().change_generation += 1;
        for raid in self.open_raids() {
            for extent in raid.extent_indices().into_iter().filter_map(|index| raid.extent(index)) {
                let own = self
                    .metadata
                    .known
                    .borrow()
                    .dirty_regions
                    .get(&extent.number())
                    .copied()
                    .unwrap_or(0);
                let on_member =
                    (0u16..).zip(extent.columns()).filter(|(_, c)| c.member == member.id.0);
                for (column, _) in on_member {
                    let others =
                        stale_regions.get(&(extent.number(), column)).copied().unwrap_or(0);
                    extent.add_stale_regions(column, own | others);
                }
            }
        }
        self.set_member(member, prepared)
    }

    fn open_volumes(&self) -> Vec<OpenVolume> {
        let volumes = &mut self.state_mut().open_volumes;
        volumes.retain(|_, open| open.raid.strong_count() > 0);
        volumes.values().cloned().collect()
    }

    fn open_raids(&self) -> Vec<Rc<RaidVolume>> {
        self.open_volumes().into_iter().filter_map(|open| open.raid.upgrade()).collect()
    }

    /// Waits until nothing of a volume that was open here is written any more, and the parity log
    /// has no entries of it. Returns whether that succeeded.
    async fn release_volume(&self, volume: Uuid) -> bool {
        self.stop_maintenance(volume).await;
        let open = self.state().open_volumes.get(&volume).cloned();
        if let Some(raid) = open.as_ref().and_then(|open| open.raid.upgrade()) {
            tracing::error!(%volume, "a volume that is open here cannot be moved or deleted");
            raid.resume_maintenance();
            return false;
        }
        if let Some(open) = open
            && let Err(why) = self.cancel_moves(open.id).await
        {
            tracing::error!(%volume, error = %why, "cancelling the moves of columns failed");
            return false;
        }
        let drained = async {
            // The log may want stripe maps saved, which lie in the volume's extents: their
            // checksums are written after that.
            self.array.drain_logs().await?;
            self.array.release_idle_checksums().await
        };
        match drained.await {
            Ok(()) => true,
            Err(why) => {
                tracing::error!(%volume, error = %why, "writing back checksums or the parity log failed");
                false
            }
        }
    }

    /// Waits until a volume that was open here is neither rebuilt nor scrubbed.
    async fn stop_maintenance(&self, volume: Uuid) {
        let open = self.state().open_volumes.get(&volume).cloned();
        let Some(open) = open else { return };
        open.raid.upgrade().into_iter().for_each(|raid| raid.stop_maintenance());
        drop(open.maintenance_lock.lock().await);
    }

    /// Opens a volume of the pool as a device; it reads as zeroes where nothing was written. At
    /// most one core has a volume open; opening it again on this core shares the device.
    ///
    /// # Errors
    /// The pool has no such volume, or its layout cannot be read.
    pub async fn open_volume(&self, volume: Uuid) -> Result<Dev, PoolError> {
        if let Some(raid) = self.open_raid(volume) {
            let info = self.claim_volume(volume).await?;
            raid.grow(info.size_bytes);
            raid.resume_maintenance();
            self.maintenance_due.notify_one();
            return Ok(Dev::shared(raid));
        }
        // It may still be rebuilt from an earlier opening here, with its old layout.
        self.stop_maintenance(volume).await;
        loop {
            let generation = self.state().change_generation;
            let (id, raid) = self.load_volume(volume).await?;
            if self.state().change_generation != generation {
                continue;
            }
            // Another caller may have opened it meanwhile.
            if let Some(raid) = self.open_raid(volume) {
                return Ok(Dev::shared(raid));
            }
            let open =
                OpenVolume { id, raid: Rc::downgrade(&raid), maintenance_lock: Rc::default() };
            self.state_mut().open_volumes.insert(volume, open);
            self.maintenance_due.notify_one();
            return Ok(Dev::shared(raid));
        }
    }

    /// Bytes that can still be allocated to its volumes.
    ///
    /// # Errors
    /// The pool is closed.
    pub async fn free_bytes(&self) -> Result<u64, PoolError> {
        self.handle.request(|answer| PoolRequest::FreeBytes { reply: answer }).await
    }

    /// The volume, if it is open here.
    fn open_raid(&self, volume: Uuid) -> Option<Rc<RaidVolume>> {
        self.state().open_volumes.get(&volume).and_then(|open| open.raid.upgrade())
    }

    /// Metadata of a volume; from now on it belongs to this core.
    async fn claim_volume(&self, volume: Uuid) -> Result<VolumeInfo, PoolError> {
        let ring = self.ring.0;
        let info = self
            .handle
            .request(|answer| PoolRequest::OpenVolume { volume, ring, reply: answer })
            .await?;
        self.array.advance_entry_number(info.first_number);
        Ok(info)
    }

    /// Sets a volume's name for the log; it is used when the volume is next opened.
    pub fn set_volume_name(&self, volume: Uuid, name: &str) {
        self.state_mut().volume_names.insert(volume, name.to_owned());
    }

    async fn load_volume(&self, volume: Uuid) -> Result<(PoolVolumeId, Rc<RaidVolume>), PoolError> {
        let info = self.claim_volume(volume).await?;
        let VolumeInfo {
            id,
            geometry,
            size_bytes: bytes,
            block_size,
            is_thick: thick,
            extents,
            ..
        } = info;
        let name = self.state().volume_names.get(&volume).cloned();
        let named = (
            name.unwrap_or_else(|| volume.to_string()),
            geometry.total_rows() * u64::from(ROW_BYTES),
        );
        self.metadata.known.borrow_mut().volume_names.insert(id, named);
        let failed = |why: Error| PoolError::new(format!("volume {volume}: {why}"));
        // Its stripe maps may be in memory only, from an earlier opening here.
        let numbers = extents.iter().map(|extent| extent.extent_number).collect();
        self.array.save_maps_of(&numbers).await.map_err(failed)?;
        self.cancel_moves(id).await?;
        let allocator =
            Rc::new(VolumeAllocator { metadata: Rc::clone(&self.metadata), volume: id, geometry });
        let load = |info: ExtentInfo| {
            let extent = allocator.register_extent(&info);
            async move { Ok((info.index, extent.load_stripe_map(&self.array).await?)) }
        };
        let loaded = stream::iter(extents).map(load).buffer_unordered(LOAD_CONCURRENCY);
        let loaded: Result<Vec<(u32, Extent)>, Error> = loaded.try_collect().await;
        let unknown =
            |why| PoolError::new(format!("volume {volume}: its stripe maps cannot be read: {why}"));
        let extents = loaded.map_err(unknown)?;
        let settings = RaidSettings { geometry, block_size, bytes, is_thick: thick };
        let raid = Rc::new(RaidVolume::new(Rc::clone(&self.array), settings, extents, allocator));
        Ok((id, raid))
    }

    /// Detaches the core from the pool, once none of its volumes is in use any more.
    ///
    /// # Errors
    /// Writes may not be durable.
    pub async fn close(&self) -> Result<(), PoolError> {
        // Disk operations must not be cancelled, so wait for what is in progress.
        let is_first = !std::mem::replace(&mut self.state_mut().is_stopping, true);
        self.open_raids().iter().for_each(|raid| raid.stop_maintenance());
        self.maintenance_due.notify_one();
        self.stop_signal.notify_one();
        let tasks = std::mem::take(&mut self.state_mut().tasks);
        for task in tasks {
            let _ = task.await;
        }
        self.array
            .close()
            .await
            .map_err(|why| PoolError::new(format!("the last flush failed: {why}")))?;
        if is_first {
            self.handle.notify(PoolRequest::Detach { ring: self.ring.0 }).await;
        }
        Ok(())
    }

    /// Rebuilds columns whose disk is detached, is draining or has stale regions.
    async fn maintain(&self) {
        for open in self.open_volumes() {
            let _guard = open.maintenance_lock.lock().await;
            let Some(raid) = open.raid.upgrade() else { continue };
            for index in raid.extent_indices() {
                if raid.is_maintenance_stopped() {
                    break;
                }
                if let Err(why) = self.maintain_extent(open.id, &raid, index).await {
                    tracing::warn!(volume = open.id.0, index, error = %why, "rebuilding an extent failed");
                    return;
                }
            }
        }
    }

    async fn maintain_extent(
        &self,
        volume: PoolVolumeId,
        raid: &RaidVolume,
        index: u32,
    ) -> Result<(), PoolError> {
        // The extent is not freed before the results have been sent.
        let _guard = raid.lock_for_maintenance(index).await;
        let Some(extent) = raid.extent(index) else { return Ok(()) };
        self.cancel_moves_of_freed_extent(volume, index, extent.number()).await?;
        let draining = self.state().draining;
        for (column, location) in (0u16..).zip(extent.columns()) {
            let id = ColumnId { volume, index, column };
            if self.array.is_detached(location.member) {
                self.rebuild_elsewhere(id, raid).await?;
            } else if draining.contains(MemberId(location.member)) && !extent.has_stale_columns() {
                self.move_off_draining_member(id, raid).await?;
            }
        }
        let Some(extent) = raid.extent(index) else { return Ok(()) };
        let failed = |why: Error| PoolError::new(why.to_string());
        let rebuilt = raid.rebuild(index, REBUILD_PACE).await.map_err(failed)?;
        for column in rebuilt.complete_columns {
            let id = ColumnId { volume, index, column };
            let to = self.state().column_moves.get(&id).map(|column_move| column_move.to);
            match to {
                Some(to) => {
                    if self
                        .handle
                        .request(|reply| PoolRequest::CommitMove { column: id, to, reply })
                        .await?
                    {
                        self.state_mut().column_moves.remove(&id);
                        extent.mark_column_committed(column);
                    }
                }
                None => {
                    self.handle
                        .request(|reply| PoolRequest::ClearStale { column: id, reply })
                        .await?;
                }
            }
        }
        Ok(())
    }

    /// Reads and compares all volumes that are open here. Each volume is rebuilt before and after.
    async fn scrub(&self) {
        let mut unreadable = Vec::new();
        for open in self.open_volumes() {
            let guard = open.maintenance_lock.lock().await;
            let Some(raid) = open.raid.upgrade() else { continue };
            let volume = open.id;
            for index in raid.extent_indices() {
                if raid.is_maintenance_stopped() {
                    break;
                }
                match raid.scrub(index, REBUILD_PACE).await {
                    Ok(found) => {
                        let bytes = raid.extent_bytes();
                        self.handle.notify(PoolRequest::ScrubProgress { bytes, found }).await;
                        if raid.has_unreadable(index) {
                            unreadable.push((open.clone(), index));
                        }
                    }
                    Err(why) => {
                        tracing::warn!(volume = volume.0, index, error = %why, "scrubbing an extent failed");
                    }
                }
            }
            drop((raid, guard));
            self.maintain().await;
        }
        self.retry_unreadable(unreadable).await;
        self.handle.notify(PoolRequest::ScrubEnded).await;
    }

    /// Retries unreadable blocks after a while: they are not lost if the error was temporary.
    async fn retry_unreadable(&self, unreadable: Vec<(OpenVolume, u32)>) {
        let deadline = Instant::now() + MIN_FAILING_TIME;
        while !unreadable.is_empty() && Instant::now() <= deadline {
            if self.is_stopping() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        for (open, index) in unreadable {
            let _guard = open.maintenance_lock.lock().await;
            let Some(raid) = open.raid.upgrade().filter(|raid| !raid.is_maintenance_stopped())
            else {
                continue;
            };
            if let Err(why) = raid.retry_unreadable(index, REBUILD_PACE).await {
                tracing::warn!(volume = open.id.0, index, error = %why, "scrubbing an extent failed");
            }
        }
    }

    async fn reserve_column_target(
        &self,
        id: ColumnId,
    ) -> Result<Option<(PhysicalExtent, Column)>, PoolError> {
        let target = self
            .handle
            .request(|answer| PoolRequest::ReserveColumnTarget { column: id, reply: answer })
            .await?;
        Ok(target
            .map(|(extent, first_row)| (extent, Column { member: extent.member.0, first_row })))
    }

    /// Rebuilds a column whose disk is detached on another disk, if there is space.
    async fn rebuild_elsewhere(&self, id: ColumnId, raid: &RaidVolume) -> Result<(), PoolError> {
        let before = self.state_mut().column_moves.remove(&id);
        if let Some(ColumnMove { address, .. }) = before {
            self.cancel_move(id, address).await?;
        }
        let Some((extent_to, to)) = self.reserve_column_target(id).await? else { return Ok(()) };
        let is_detached = |extent: &Rc<Extent>| {
            let location = extent.columns().get(usize::from(id.column));
            location.is_some_and(|column| self.array.is_detached(column.member))
        };
        // The disk may have returned meanwhile.
        match raid.extent(id.index).filter(is_detached) {
            Some(extent) => {
                let column_move =
                    ColumnMove { to: extent_to, address: to, extent_number: extent.number() };
                self.state_mut().column_moves.insert(id, column_move);
                raid.replace_column(id.index, id.column, to);
            }
            None => self.cancel_move(id, to).await?,
        }
        Ok(())
    }

    /// Cancels the move of a column. Nothing more is written to the target, which may be allocated
    /// again.
    async fn cancel_move(&self, id: ColumnId, target: Column) -> Result<(), PoolError> {
        let released = self.array.release_column(target).await;
        released.map_err(|why| PoolError::new(why.to_string()))?;
        self.handle.notify(PoolRequest::CancelMove { column: id }).await;
        Ok(())
    }

    /// Cancels moves of the columns of a freed extent that was at `index` before this one.
    async fn cancel_moves_of_freed_extent(
        &self,
        volume: PoolVolumeId,
        index: u32,
        number: u64,
    ) -> Result<(), PoolError> {
        let is_stale = |id: &ColumnId, column_move: &mut ColumnMove| {
            (id.volume, id.index) == (volume, index) && column_move.extent_number != number
        };
        let stale: Vec<_> = self.state_mut().column_moves.extract_if(.., is_stale).collect();
        for (id, ColumnMove { address, .. }) in stale {
            self.cancel_move(id, address).await?;
        }
        Ok(())
    }

    /// Cancels the moves of a volume that is not open here.
    async fn cancel_moves(&self, volume: PoolVolumeId) -> Result<(), PoolError> {
        let is_of_volume = |id: &ColumnId, _: &mut ColumnMove| id.volume == volume;
        let moving: Vec<_> = self.state_mut().column_moves.extract_if(.., is_of_volume).collect();
        for (id, ColumnMove { address, .. }) in moving {
            self.cancel_move(id, address).await?;
        }
        Ok(())
    }

    /// Moves a column off a draining disk.
    async fn move_off_draining_member(
        &self,
        id: ColumnId,
        raid: &RaidVolume,
    ) -> Result<(), PoolError> {
        let Some((extent_to, to)) = self.reserve_column_target(id).await? else { return Ok(()) };
        let stuck = |moved: &Result<bool, Error>| {
            matches!(moved, Ok(false)) && !raid.is_maintenance_stopped()
        };
        let commit = async || {
            let moved = self
                .handle
                .request(|answer| PoolRequest::CommitMove {
                    column: id,
                    to: extent_to,
                    reply: answer,
                })
                .await;
            moved.map_err(|why| to_block_error(&why))
        };
        let moved = raid.relocate_column(id.index, id.column, to, commit).await;
        if !matches!(moved, Ok(true)) {
            self.cancel_move(id, to).await?;
        }
        if stuck(&moved) {
            // Unreadable blocks block the move, if nothing else of the column is missing.
            let repaired = raid.repair_unreadable(id.index, REBUILD_PACE).await;
            repaired.map_err(|why| PoolError::new(why.to_string()))?;
        }
        moved.map(drop).map_err(|why: Error| PoolError::new(why.to_string()))
    }
}
