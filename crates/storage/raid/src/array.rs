//! The members of a pool as one core uses them: which are available, their logs, and what is not
//! durable yet.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{
    Account, Buf, BufferPool, Bufs, Ctx, Dev, Epoch, Error, FlushCoalescer, Lba, MemoryClass, Op,
    reserve_memory,
};
use futures_util::future::join_all;
use geometry::{Column, DamageKind, MAX_MEMBERS, RowChecksums};
use parity::Parity;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tokio::sync::futures::Notified;
use tokio::sync::{Mutex, Notify, OnceCell, Semaphore, SemaphorePermit};
use uuid::Uuid;

use super::Extent;
use super::bounded_concurrency::run_bounded;
use super::health::{DiskCounters, HealthMonitor, MemberIo, MonitoredDisk};
use super::log_batch::{BLOCK_BYTES, EntryKind, LogEntry, RingId};
use super::mistake::Mistake;
use super::parity_log::ParityLog;
use super::row_plan::StripSet;
use super::write_intents::{self, IntentRegion, MemberBits, WriteIntents};

/// How often a member is probed while its checksums are written.
const REPLY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Scratch memory for reads and parity of stripes that are being written, in pages of 4 KiB.
const SCRATCH_PAGES: u32 = 1024;

/// Further memory, for partially written rows, in pages.
const PARTIAL_ROW_PAGES: u32 = 64;

/// Number of extents whose stripe maps are saved at a time.
const MAX_CONCURRENT_MAP_SAVES: usize = 16;

/// The number of no extent.
const NO_EXTENT: u64 = u64::MAX;

/// Most memory that a member's layers need for an operation, in bytes.
const MEMBER_OVERHEAD_BYTES: usize = 4096;

/// Makes durable what an array learns about its members.
pub trait PoolMetadata: fmt::Debug {
    /// Makes durable, on all attached members, that `member` is detached: it misses every write
    /// from now on. On failure the array stops writing.
    fn detach_member(&self, member: u16) -> MetadataFuture<'_>;

    /// Makes durable that the detached columns of an extent are stale in these
    /// [regions](geometry::REGIONS).
    fn mark_regions_stale(&self, extent: u64, regions: u32) -> MetadataFuture<'_>;

    /// Asks to detach a member that has been unresponsive for long; `silent` are all members that
    /// are unresponsive now, itself included. Detaches it as [`Self::detach_member`] does, unless
    /// data would be lost without all of `silent`. Returns whether it is detached.
    fn detach_unresponsive(&self, member: u16, silent: u128) -> DetachFuture<'_>;

    /// Reports that a member became slow, or recovered. Called once per change.
    fn set_slow(&self, member: u16, is_slow: bool);

    /// Reports damage, block by block; the implementation combines reports.
    fn report_damage(&self, damage: Damage);
}

/// Damaged blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// What is wrong with them.
    pub kind: DamageKind,
    /// The member concerned, if known.
    pub member: Option<u16>,
    /// Number of the extent.
    pub extent: u64,
    /// Rows of the extent's data that contain them, or whose parity they are.
    pub rows: std::ops::Range<u32>,
}

/// The future of a change to [`PoolMetadata`].
pub type MetadataFuture<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// The future of a request to [`PoolMetadata`]; true if it was done.
pub type DetachFuture<'a> = Pin<Box<dyn Future<Output = Result<bool, Error>> + 'a>>;

/// Operations on the member's earlier disk are in flight; their writes may land at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operations from before it was detached are still in flight")]
pub struct MemberBusy;

/// A disk of the pool, to be attached.
#[derive(Debug)]
pub struct ArrayMember {
    /// The disk, in blocks of 4 KiB.
    pub dev: Dev,
    /// This core's ring on it, unwritten in this log generation.
    pub ring: RingId,
    /// Where the ring begins.
    pub ring_lba: Lba,
    /// Whether it is detached already.
    pub is_detached: bool,
    /// Where its errors are counted.
    pub counters: Arc<DiskCounters>,
    /// The checksum layer of `dev`, if any.
    pub checksums: Option<Rc<dyn RowChecksums>>,
}

/// An attached member.
#[derive(Debug)]
struct AttachedMember {
    disk: Rc<MonitoredDisk>,
    log: ParityLog,
    checksums: Option<Rc<dyn RowChecksums>>,
    /// The result of recording that it is detached.
    detach_recorded: OnceCell<Result<(), Error>>,
}

/// An extent whose stripes have moved, and the log entries of those moves.
type MovedStripes = (Rc<Extent>, Vec<LogPositions>);

/// Where a stripe lies: extent number and slot.
pub(super) type SlotId = (u64, u32);

/// A log entry: members, and the sequence number of its batch on each.
pub(super) type LogPositions = SmallVec<[(u16, u64); 2]>;

/// Writes that have completed but may not be durable.
#[derive(Debug, Default)]
struct UnflushedWrites {
    /// Number of flushes of all members that have begun.
    flushes_begun: u64,
    /// The entries of the writes, with the value of `flushes_begun` then.
    entries: VecDeque<(u64, LogPositions)>,
    /// Slots with such an entry, likewise, and the region of each.
    slots: FxHashMap<SlotId, (u64, u32)>,
}

impl UnflushedWrites {
    /// What the entry covers has been written.
    fn insert(&mut self, slot: SlotId, region: u32, positions: LogPositions) {
        self.entries.push_back((self.flushes_begun, positions));
        self.slots.insert(slot, (self.flushes_begun, region));
    }

    /// A flush begins; returns its number.
    fn begin_flush(&mut self) -> u64 {
        self.flushes_begun += 1;
        self.flushes_begun
    }

    /// Everything that was written before this flush began is durable: returns its entries.
    fn take_before(&mut self, flush: u64) -> Vec<LogPositions> {
        self.slots.retain(|_, (begun, _)| *begun >= flush);
        let count = self.entries.partition_point(|(begun, _)| *begun < flush);
        self.entries.drain(..count).map(|(_, positions)| positions).collect()
    }
}

/// The members of a pool, on one core.
#[derive(Debug)]
pub struct Array {
    /// By number, with gaps.
    members: RefCell<Vec<Option<Rc<AttachedMember>>>>,
    /// The members that are not detached, one bit each: read several times for every operation.
    available_members: Cell<u128>,
    /// How often a member was attached or detached.
    membership_changes: Cell<u64>,
    metadata: Rc<dyn PoolMetadata>,
    pub(super) parity: Parity,
    /// Memory of stripes that are being written; `scratch_pages` counts its pages.
    pub(super) scratch: Ctx,
    scratch_pages: Arc<Semaphore>,
    /// Provides memory for hedged reads.
    account: Account,
    health: Rc<HealthMonitor>,
    /// Pages for partially written rows: whoever waits for these holds no scratch pages.
    partial_row_pages: Semaphore,
    /// Whether a completed write may be lost until it is flushed.
    is_volatile: Cell<bool>,
    /// Why writes have stopped: the entries of a failed write stay in the logs until the pool is
    /// reopened.
    write_error: Cell<Option<Error>>,
    /// Planted by tests.
    #[cfg(any(test, feature = "testing"))]
    mistake: Mistake,
    last_entry_number: Cell<u64>,
    /// Wakes those that wait for log space.
    log_space_freed: Notify,
    flush_coalescer: FlushCoalescer,
    unflushed: RefCell<UnflushedWrites>,
    /// Mirrored regions that are being written.
    write_intents: WriteIntents,
    /// Extents whose stripes have moved, by number, with the log entries of the moves.
    moved_stripes: RefCell<FxHashMap<u64, MovedStripes>>,
    /// Held while the maps of such extents are saved.
    map_save_lock: Mutex<()>,
    /// The generation of the logs.
    log_generation: u64,
    /// First number for batches and entries: above all numbers used before in this generation.
    first_number: u64,
}

impl Array {
    /// Bytes of its core's memory that an array takes: for stripes, partially written rows, and per
    /// member a batch header, the disk's overhead and a probe block.
    pub const MEMORY_BYTES: usize = (SCRATCH_PAGES + PARTIAL_ROW_PAGES) as usize * BLOCK_BYTES
        + MAX_MEMBERS as usize * (2 * BLOCK_BYTES + MEMBER_OVERHEAD_BYTES);

    /// An array without members, for a pool with this log generation. It reserves memory of `pool`
    /// until it is dropped.
    ///
    /// # Errors
    /// [`block::Error::NoSpace`] if the pool is too small.
    pub async fn new(
        generation: u64,
        metadata: Rc<dyn PoolMetadata>,
        pool: &BufferPool,
    ) -> Result<Self, Error> {
        let credit = reserve_memory(&pool.account(), Self::MEMORY_BYTES).await?;
        let scratch = Ctx::new(credit, Epoch::default());
        let scratch_pages = Arc::new(Semaphore::new(SCRATCH_PAGES as usize));
        let health =
            HealthMonitor::new(Rc::clone(&metadata), Arc::clone(&scratch_pages), scratch.clone());
        Ok(Self {
            members: RefCell::default(),
            available_members: Cell::new(0),
            membership_changes: Cell::new(0),
            metadata,
            parity: Parity::best(),
            scratch,
            scratch_pages,
            account: pool.account(),
            health,
            partial_row_pages: Semaphore::new(PARTIAL_ROW_PAGES as usize),
            is_volatile: Cell::new(false),
            write_error: Cell::new(None),
            #[cfg(any(test, feature = "testing"))]
            mistake: Mistake::None,
            last_entry_number: Cell::new(0),
            log_space_freed: Notify::new(),
            flush_coalescer: FlushCoalescer::default(),
            unflushed: RefCell::default(),
            write_intents: WriteIntents::default(),
            moved_stripes: RefCell::default(),
            map_save_lock: Mutex::new(()),
            log_generation: generation,
            first_number: 0,
        })
    }

    /// Numbers batches and entries from `first` on: the rings may hold lower numbers of this
    /// generation, of an array that was [closed](Self::close).
    #[must_use]
    pub fn with_first_number(mut self, first: u64) -> Self {
        self.first_number = first;
        self.advance_entry_number(first);
        self
    }

    /// Numbers entries from `first` on: extents that are added have maps with lower numbers.
    pub fn advance_entry_number(&self, first: u64) {
        self.last_entry_number.set(self.last_entry_number.get().max(first));
    }

    /// Attaches `member` under this number, below [`MAX_MEMBERS`]. An earlier member with the
    /// number must be detached.
    ///
    /// # Errors
    /// [`MemberBusy`], if the same disk still has operations in flight.
    pub fn set_member(&self, number: u16, member: ArrayMember) -> Result<(), MemberBusy> {
        let is_same =
            |previous: &Rc<AttachedMember>| previous.log.member_id() == member.ring.member;
        if self
            .attached_member(number)
            .filter(is_same)
            .is_some_and(|previous| previous.disk.is_busy())
        {
            return Err(MemberBusy);
        }
        if member.dev.info().volatile_cache {
            self.is_volatile.set(true);
        }
        let mut members = self.members.borrow_mut();
        let count = members.len().max(usize::from(number) + 1);
        members.resize_with(count, || None);
        let entry = &mut members[usize::from(number)];
        // Numbers of the earlier member's batches must not apply to this one.
        let first = entry
            .as_ref()
            .map_or(0, |previous| previous.log.next_sequence())
            .max(self.first_number);
        let is_detached = member.is_detached;
        *entry = Some(Rc::new(AttachedMember::new(&self.health, number, member, first)));
        self.write_intents.forget_member(member_bit(number));
        drop(members);
        self.set_available(number, !is_detached);
        Ok(())
    }

    fn set_available(&self, member: u16, is_available: bool) {
        let (bit, available) = (member_bit(member), self.available_members.get());
        self.available_members.set(if is_available { available | bit } else { available & !bit });
        self.membership_changes.set(self.membership_changes.get() + 1);
        self.attached_member(member)
            .into_iter()
            .for_each(|attached| attached.disk.set_detached(!is_available));
    }

    /// Plants a mistake.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn with_mistake(self, mistake: Mistake) -> Self {
        Self { mistake, ..self }
    }

    /// Whether this mistake is planted; never outside tests.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn makes_mistake(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    #[cfg(not(any(test, feature = "testing")))]
    #[expect(clippy::unused_self, reason = "the same as in tests")]
    pub(super) fn makes_mistake(&self, _: Mistake) -> bool {
        false
    }

    /// Whether `member` is detached or does not exist.
    #[must_use]
    pub fn is_detached(&self, member: u16) -> bool {
        self.available_members.get().checked_shr(member.into()).unwrap_or(0) & 1 == 0
    }

    /// The pool's id.
    pub(super) fn pool_id(&self) -> Uuid {
        let members = self.members.borrow();
        members.iter().flatten().next().map_or(Uuid::nil(), |member| member.log.pool_id())
    }

    /// Number of operations in flight on `member`.
    pub(super) fn in_flight(&self, member: u16) -> u64 {
        self.available_member(member).map_or(0, |used| used.disk.dev().stats().in_flight)
    }

    /// The slow members: reads avoid them if they can.
    pub(super) fn slow_members(&self) -> MemberBits {
        self.health.slow_members()
    }

    /// Whether to read from a slow member, to see whether it still is slow. True once per interval.
    pub(super) fn is_probe_due(&self, member: u16) -> bool {
        self.available_member(member).is_some_and(|used| used.disk.is_probe_due())
    }

    /// The counters of its members.
    #[cfg(test)]
    pub(super) fn counters(&self) -> impl Iterator<Item = Arc<DiskCounters>> {
        self.attached_members().into_iter().map(|(_, member)| Arc::clone(&member.disk.counters))
    }

    /// Counts a read of `member` that was served from others.
    pub(super) fn count_hedged_read(&self, member: u16) {
        let attached = self.attached_member(member);
        attached.into_iter().for_each(|attached| {
            attached.disk.counters.hedged_reads.fetch_add(1, Ordering::Relaxed);
        });
    }

    /// Memory for a hedged read, if available: the caller holds other memory, so it must not wait.
    pub(super) fn hedge_ctx(&self, bytes: usize) -> Option<Ctx> {
        let credit = self.account.try_credit(bytes, MemoryClass::LocalIo)?;
        Some(Ctx::new(credit, Epoch::default()))
    }

    /// Whether completed writes may be lost until they are flushed.
    pub(super) fn is_volatile(&self) -> bool {
        self.is_volatile.get()
    }

    /// A member, if it is not detached.
    fn available_member(&self, member: u16) -> Option<Rc<AttachedMember>> {
        if self.is_detached(member) { None } else { self.attached_member(member) }
    }

    fn attached_member(&self, member: u16) -> Option<Rc<AttachedMember>> {
        self.members.borrow().get(usize::from(member)).cloned().flatten()
    }

    /// All attached members, with their numbers.
    fn attached_members(&self) -> Vec<(u16, Rc<AttachedMember>)> {
        let members = self.members.borrow();
        (0..).zip(&*members).filter_map(|(n, member)| Some((n, member.clone()?))).collect()
    }

    /// How often a member was attached or detached: while this is unchanged, so are the available
    /// members.
    pub(super) fn membership_changes(&self) -> u64 {
        self.membership_changes.get()
    }

    /// Waits for this many pages of scratch memory. Whoever holds some must not wait for more.
    pub(super) async fn acquire_scratch(&self, pages: u32) -> SemaphorePermit<'_> {
        self.scratch_pages
            .acquire_many(pages.min(SCRATCH_PAGES))
            .await
            .expect("the semaphore is never closed")
    }

    /// As [`Self::acquire_scratch`], for partially written rows. Whoever waits for these must hold
    /// no scratch pages.
    pub(super) async fn acquire_partial_rows(&self, pages: u32) -> SemaphorePermit<'_> {
        self.partial_row_pages
            .acquire_many(pages.min(PARTIAL_ROW_PAGES))
            .await
            .expect("the semaphore is never closed")
    }

    /// Most pages that [`Self::acquire_scratch`] gives.
    pub(super) const MAX_SCRATCH_PAGES: u32 = SCRATCH_PAGES;

    /// Reads `rows` rows of a member, from row `at` on.
    pub(super) async fn read(
        &self,
        member: u16,
        at: u64,
        rows: u32,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let read = self.begin_read(member, at, rows, ctx)?.await;
        if read.is_err() {
            self.count_read_error(member);
        }
        read
    }

    /// Starts a read.
    pub(super) fn begin_read(
        &self,
        member: u16,
        at: u64,
        rows: u32,
        ctx: &Ctx,
    ) -> Result<MemberIo, Error> {
        let attached = self.available_member(member).ok_or(Error::Gone)?;
        let pages = if ctx.is_same_command(&self.scratch) { rows } else { 0 };
        let begun = attached.disk.begin(Op::Read { at: Lba(at), blocks: rows }, ctx, pages);
        begun.inspect_err(|_| self.count_read_error(member))
    }

    /// Reports damage to the pool metadata.
    pub(super) fn report_damage(&self, damage: Damage) {
        self.metadata.report_damage(damage);
    }

    /// Counts a failed read.
    pub(super) fn count_read_error(&self, member: u16) {
        let attached = self.attached_member(member);
        attached.into_iter().for_each(|attached| {
            attached.disk.counters.read_errors.fetch_add(1, Ordering::Relaxed);
        });
    }

    /// Counts rows of a member that were wrong or unreadable and have been rewritten.
    pub(super) fn count_repaired(&self, member: u16, rows: u32) {
        if let Some(attached) = self.attached_member(member) {
            attached.disk.counters.repaired_rows.fetch_add(rows.into(), Ordering::Relaxed);
        }
    }

    /// Counts a row of a member that could not be read and is recorded as lost.
    pub(super) fn count_unrecoverable(&self, member: u16) {
        if let Some(attached) = self.attached_member(member) {
            attached.disk.counters.unrecoverable_rows.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes rows of a member, from row `at` on. On failure the member is detached on return. An
    /// error means that this could not be recorded.
    pub(super) async fn write(
        &self,
        member: u16,
        at: u64,
        data: Bufs,
        fua: bool,
    ) -> Result<(), Error> {
        let Some(attached) = self.available_member(member) else {
            return self.detach_member(member, Error::Gone).await;
        };
        let op = Op::Write { at: Lba(at), data, fua };
        match attached.disk.submit(op, &self.scratch).await {
            Ok(_) => Ok(()),
            Err(why) => {
                attached.disk.counters.write_errors.fetch_add(1, Ordering::Relaxed);
                self.detach_member(member, why).await
            }
        }
    }

    /// Detaches a member. Returns when all other members have recorded it.
    pub(super) async fn detach_member(&self, member: u16, why: Error) -> Result<(), Error> {
        let Some(attached) = self.attached_member(member) else { return Ok(()) };
        if !self.is_detached(member) {
            self.set_available(member, false);
        }
        let record = async || {
            tracing::warn!(member, error = %why, "a disk of the pool is detached");
            if self.makes_mistake(Mistake::AcksBeforeDetachRecorded) {
                return Ok(());
            }
            self.metadata.detach_member(member).await?;
            self.mark_unflushed_stale().await
        };
        let recorded = *attached.detach_recorded.get_or_init(record).await;
        recorded.inspect_err(|why| self.stop_writes(*why))
    }

    /// Marks as stale what has completed but may not be durable: a detached member may have lost
    /// it.
    async fn mark_unflushed_stale(&self) -> Result<(), Error> {
        if self.makes_mistake(Mistake::SkipsUnflushedRegions) {
            return Ok(());
        }
        for (extent, regions) in self.unflushed_regions() {
            self.metadata.mark_regions_stale(extent, regions).await?;
        }
        Ok(())
    }

    /// Regions with writes that may not be durable, by extent.
    fn unflushed_regions(&self) -> FxHashMap<u64, u32> {
        let mut all: FxHashMap<u64, u32> = FxHashMap::default();
        let unflushed = self.unflushed.borrow();
        let regions = unflushed.slots.iter().map(|((extent, _), (_, region))| (*extent, *region));
        for (extent, regions) in regions.chain(self.write_intents.unflushed_regions()) {
            *all.entry(extent).or_default() |= regions;
        }
        all
    }

    /// Detaches `member`, which another core found to have failed. Returns when this core's writes
    /// that may be lost on it are recorded as stale too.
    ///
    /// # Errors
    /// If the detach could not be recorded.
    pub async fn on_member_detached(&self, member: u16) -> Result<(), Error> {
        self.detach_member(member, Error::Gone).await
    }

    /// Stops writes after a write failed, since its entry must stay in the logs: these have space
    /// for a limited number of such entries.
    pub(super) fn stop_writes(&self, why: Error) {
        self.write_error.set(self.write_error.get().or(Some(why)));
        self.log_space_freed.notify_waiters();
    }

    fn check_writable(&self) -> Result<(), Error> {
        self.write_error.get().map_or(Ok(()), Err)
    }

    /// Appends an entry to the logs of these members, each with blocks of its own. Returns when it
    /// is durable in all that are not detached then, with its number and positions.
    ///
    /// # Errors
    /// If the detach of a member could not be recorded, or writes have stopped.
    pub(super) async fn append_to_logs(
        &self,
        slot: SlotId,
        kind: EntryKind,
        to: SmallVec<[(u16, Vec<Buf>); 2]>,
    ) -> Result<(u64, LogPositions), Error> {
        self.reserve_log_space(&to).await?;
        let number = self.last_entry_number.get() + 1;
        self.last_entry_number.set(number);
        let entry = LogEntry { number, extent: slot.0, slot: slot.1, kind };
        let each = to.into_iter().map(|(member, blocks)| async move {
            let Some(attached) = self.attached_member(member) else {
                return (member, Err(Error::Gone));
            };
            (member, attached.log.append(entry, blocks, &self.scratch).await)
        });
        let mut positions = LogPositions::new();
        for (member, outcome) in join_all(each).await {
            match outcome {
                Ok(batch) => positions.push((member, batch)),
                Err(why) => self.detach_member(member, why).await?,
            }
        }
        Ok((number, positions))
    }

    /// The generation of the logs.
    pub(super) fn log_generation(&self) -> u64 {
        self.log_generation
    }

    /// Notes log positions of an entry that moved a stripe of this extent.
    pub(super) fn record_stripe_move(&self, extent: &Rc<Extent>, positions: LogPositions) {
        let mut moved = self.moved_stripes.borrow_mut();
        let known = moved.entry(extent.number()).or_insert_with(|| (Rc::clone(extent), Vec::new()));
        // Its columns may have been moved since.
        known.0 = Rc::clone(extent);
        known.1.push(positions);
        drop(moved);
        self.log_space_freed.notify_waiters();
    }

    /// Replaces an extent whose columns have changed: its map is saved to the new columns.
    pub(super) fn update_moved_extent(&self, extent: &Rc<Extent>) {
        let mut moved = self.moved_stripes.borrow_mut();
        moved.get_mut(&extent.number()).into_iter().for_each(|known| known.0 = Rc::clone(extent));
    }

    /// Saves the maps of all extents whose stripes have moved, and retires the entries of the
    /// moves. Whether there were any.
    async fn save_maps(&self) -> Result<bool, Error> {
        // Another caller may have taken the moves that this one waits for.
        let _lock = self.map_save_lock.lock().await;
        let moved = self.moved_stripes.take();
        self.save_moved_maps(moved).await
    }

    /// As [`Self::save_maps`], for these extents, which may be read from the disks afterwards.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn save_maps_of(&self, extents: &FxHashSet<u64>) -> Result<(), Error> {
        let _lock = self.map_save_lock.lock().await;
        let moved = self
            .moved_stripes
            .borrow_mut()
            .extract_if(|number, _| extents.contains(number))
            .collect();
        self.save_moved_maps(moved).await.map(drop)
    }

    async fn save_moved_maps(&self, moved: FxHashMap<u64, MovedStripes>) -> Result<bool, Error> {
        let any_moved = !moved.is_empty();
        let each = moved.into_values().map(|(extent, entries)| async move {
            let saved = self.save_stripe_map(&extent).await;
            saved.inspect_err(|why| self.stop_writes(*why))?;
            entries.iter().for_each(|positions| self.retire_entry(positions));
            self.log_space_freed.notify_waiters();
            Ok(())
        });
        run_bounded(each, MAX_CONCURRENT_MAP_SAVES).await?;
        Ok(any_moved)
    }

    /// Makes durable that the detached columns of an extent are stale in these regions.
    pub(super) async fn persist_stale_regions(
        &self,
        extent: u64,
        regions: u32,
    ) -> Result<(), Error> {
        let recorded = self.metadata.mark_regions_stale(extent, regions).await;
        recorded.inspect_err(|why| self.stop_writes(*why))
    }

    /// Ends all writing to an extent that is not used any more.
    pub(super) async fn quiesce_extent(&self, extent: &Extent) -> Result<(), Error> {
        self.flush().await?;
        self.save_maps().await?;
        // Another task may be saving its map.
        drop(extent.stripe_map.saved_sequence.lock().await);
        let each = extent.columns.iter().map(|column| self.release_column(*column));
        join_all(each).await.into_iter().collect()
    }

    /// Writes back and forgets the checksums of a column that is, or was to be, unused from now on.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn release_column(&self, column: Column) -> Result<(), Error> {
        let release = async move |checksums: Rc<dyn RowChecksums>| {
            checksums.release_unit(column.first_row).await
        };
        self.with_checksums(column.member, release).await
    }

    /// Forgets the cached checksums of a column that comes from another owner.
    pub(super) fn adopt_column(&self, column: &Column) {
        let attached = self.attached_member(column.member);
        let checksums = attached.and_then(|attached| attached.checksums.clone());
        checksums.into_iter().for_each(|checksums| checksums.forget_unit(column.first_row));
    }

    /// Runs `what` on the checksums of an attached member. On failure the member is detached; if it
    /// does not respond, this waits until it is detached.
    async fn with_checksums(
        &self,
        member: u16,
        operation: impl AsyncFnOnce(Rc<dyn RowChecksums>) -> Result<(), Error> + 'static,
    ) -> Result<(), Error> {
        let Some(attached) = self.attached_member(member).filter(|_| !self.is_detached(member))
        else {
            return Ok(());
        };
        let Some(checksums) = attached.checksums.clone() else { return Ok(()) };
        // An operation on a disk must not be dropped, so it runs as a task.
        let running = tokio::task::spawn_local(async move { operation(checksums).await });
        let detached = async {
            while !self.is_detached(member) {
                tokio::time::sleep(REPLY_CHECK_INTERVAL).await;
                // This lets the health monitor see whether it responds.
                if let Ok(probe) = attached.disk.begin(Op::Flush, &self.scratch, 0) {
                    let _ = probe.spawn_orphaned().await;
                }
            }
        };
        tokio::select! {
            biased;
            finished = running => match finished.unwrap_or(Err(Error::Gone)) {
                Ok(()) => Ok(()),
                Err(why) => self.detach_member(member, why).await,
            },
            () = detached => Ok(()),
        }
    }

    /// Writes back all checksums of areas without writes since the last call.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn write_back_cold_checksums(&self) -> Result<(), Error> {
        for (member, _) in self.attached_members() {
            let write_back =
                async |checksums: Rc<dyn RowChecksums>| checksums.write_back_cold().await;
            self.with_checksums(member, write_back).await?;
        }
        Ok(())
    }

    /// Writes back the checksums of all areas without writes in progress: another owner may write
    /// there from now on.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn release_idle_checksums(&self) -> Result<(), Error> {
        for (member, _) in self.attached_members() {
            let release = async |checksums: Rc<dyn RowChecksums>| checksums.release_idle().await;
            self.with_checksums(member, release).await?;
        }
        Ok(())
    }

    /// Waits until all these logs have space for an entry, and reserves it in all at once: a caller
    /// that holds space in one log never waits for another.
    async fn reserve_log_space(&self, to: &[(u16, Vec<Buf>)]) -> Result<(), Error> {
        loop {
            // Created before the check, so that no notification is missed.
            let freed = self.log_space_freed.notified();
            self.check_writable()?;
            let logs: SmallVec<[Rc<AttachedMember>; 2]> =
                to.iter().filter_map(|(member, _)| self.attached_member(*member)).collect();
            if logs.iter().all(|member| member.log.has_space()) {
                logs.iter().for_each(|member| member.log.reserve());
                return Ok(());
            }
            self.free_log_space(freed).await?;
        }
    }

    /// Retires entries if it can; else waits for `freed`.
    async fn free_log_space(&self, freed: Notified<'_>) -> Result<(), Error> {
        let is_unflushed = !self.unflushed.borrow().entries.is_empty();
        if is_unflushed || self.write_intents.has_intents_awaiting_flush() {
            self.flush().await?;
        } else if !self.clear_write_intents(true) && !self.save_maps().await? {
            freed.await;
        }
        Ok(())
    }

    /// Waits until no current log entry would be replayed after a crash, so that extents used here
    /// may be used elsewhere. Nothing may use those extents meanwhile.
    ///
    /// # Errors
    /// If entries must stay for log recovery, which runs when the pool is opened.
    pub async fn drain_logs(&self) -> Result<(), Error> {
        let members =
            self.attached_members().into_iter().filter(|(_, member)| !member.log.is_unwritten());
        let members: Vec<_> =
            members.map(|(n, member)| (n, member.log.next_sequence(), member)).collect();
        let is_drained = |(n, end, member): &(u16, u64, Rc<AttachedMember>)| {
            self.is_detached(*n) || member.log.tail() >= *end
        };
        loop {
            let freed = self.log_space_freed.notified();
            self.check_writable()?;
            if members.iter().all(is_drained) {
                break;
            }
            self.free_log_space(freed).await?;
        }
        let mut to = SmallVec::new();
        for (member, ..) in members {
            // The log of a member that is recorded as detached is never read.
            match self.is_detached(member) {
                true => self.detach_member(member, Error::Gone).await?,
                false => to.push((member, Vec::new())),
            }
        }
        if to.is_empty() {
            return Ok(());
        }
        // A batch header carries the tail; the entry itself is a dummy. It is written twice: the
        // next owner of the ring may tear one of the two with its first write.
        let kind = EntryKind::WriteIntent { stripes: 1, changed: StripSet::first(1) };
        for _ in 0..2 {
            let (_, positions) = self.append_to_logs((NO_EXTENT, 0), kind, to.clone()).await?;
            self.retire_entry(&positions);
        }
        self.log_space_freed.notify_waiters();
        Ok(())
    }

    /// Waits until the copies of these regions may be written on these members: an intent for each,
    /// made by `what`, is in the logs of all that are not detached. Pairs with
    /// [`Self::end_copy_write`].
    ///
    /// # Errors
    /// Those of [`Self::append_to_logs`].
    pub(super) async fn begin_copy_write(
        &self,
        regions: &[(IntentRegion, MemberBits)],
        intent: impl Fn(IntentRegion) -> EntryKind,
    ) -> Result<(), Error> {
        loop {
            let changed = self.log_space_freed.notified();
            self.check_writable()?;
            match self.write_intents.begin_write(regions) {
                write_intents::BeginOutcome::Begun => return Ok(()),
                write_intents::BeginOutcome::Wait => changed.await,
                write_intents::BeginOutcome::LogIntent(region, members) => {
                    let mut logging =
                        IntentLogging { array: self, region, members, positions: None };
                    let changes = self.membership_changes();
                    let numbers =
                        (0u16..).take(MAX_MEMBERS.into()).filter(|n| members >> n & 1 == 1);
                    let to = numbers.map(|member| (member, Vec::new())).collect();
                    let logged =
                        self.append_to_logs((region.0, region.1), intent(region), to).await?;
                    // A member attached meanwhile has a log without this entry.
                    logging.members = match self.membership_changes() == changes {
                        _ if self.makes_mistake(Mistake::SkipsIntentOfLaterCopies) => {
                            MemberBits::MAX
                        }
                        true => members,
                        false => 0,
                    };
                    logging.positions = Some(logged.1);
                }
            }
        }
    }

    /// Notes that the copies of these regions are written, in region `written` of the extent;
    /// `durable` if already durable.
    pub(super) async fn end_copy_write(
        &self,
        regions: &[IntentRegion],
        written: u32,
        durable: bool,
    ) -> Result<(), Error> {
        let is_unflushed = self.is_volatile() && !durable;
        self.write_intents.end_write(
            regions,
            written,
            is_unflushed.then(|| self.unflushed.borrow().flushes_begun),
        );
        self.clear_write_intents(false);
        self.log_space_freed.notify_waiters();
        if self.write_intents.is_flush_due() {
            self.flush().await?;
            self.clear_write_intents(false);
        }
        Ok(())
    }

    /// Retires intents that are no longer needed; whether there were any.
    fn clear_write_intents(&self, all: bool) -> bool {
        let cleared = self.write_intents.take_clearable(all);
        cleared.iter().for_each(|positions| self.retire_entry(positions));
        if !cleared.is_empty() {
            self.log_space_freed.notify_waiters();
        }
        !cleared.is_empty()
    }

    /// Notes that what the entry covers is written in this region, on all members that are not
    /// detached; `durable` if already durable.
    pub(super) fn note_entry_written(
        &self,
        slot: SlotId,
        region: u32,
        positions: LogPositions,
        durable: bool,
    ) {
        if durable || !self.is_volatile() {
            self.retire_entry(&positions);
        } else {
            self.unflushed.borrow_mut().insert(slot, region, positions);
        }
        self.log_space_freed.notify_waiters();
    }

    fn retire_entry(&self, positions: &LogPositions) {
        for (member, batch) in positions {
            self.attached_member(*member)
                .into_iter()
                .for_each(|attached| attached.log.retire_entry(*batch));
        }
    }

    /// Makes everything durable and leaves logs that need no recovery.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn close(&self) -> Result<(), Error> {
        self.flush().await?;
        self.save_maps().await?;
        self.drain_logs().await?;
        self.release_idle_checksums().await
    }

    /// Waits until no entry of the stripe may be needed for recovery.
    pub(super) async fn wait_durable(&self, slot: SlotId) -> Result<(), Error> {
        let waits = self.is_volatile() && !self.makes_mistake(Mistake::RewritesBeforeFlush);
        let unflushed = waits && self.unflushed.borrow().slots.contains_key(&slot);
        if unflushed { self.flush().await } else { Ok(()) }
    }

    /// Makes completed writes durable on all attached members. A member that fails is detached.
    ///
    /// # Errors
    /// If the detach could not be recorded.
    pub(super) async fn flush(&self) -> Result<(), Error> {
        if !self.is_volatile() {
            return Ok(());
        }
        self.flush_coalescer.flush(|| self.flush_all()).await
    }

    async fn flush_all(&self) -> Result<(), Error> {
        let number = self.unflushed.borrow_mut().begin_flush();
        let each = self.attached_members().into_iter().map(|(n, m)| async move {
            if self.is_detached(n) {
                // What it lost is recorded only once all know that it is detached.
                return match self.makes_mistake(Mistake::FlushesBeforeDetachRecorded) {
                    true => Ok(()),
                    false => self.detach_member(n, Error::Gone).await,
                };
            }
            match m.disk.submit(Op::Flush, &self.scratch).await {
                Ok(_) => Ok(()),
                Err(why) => {
                    m.disk.counters.write_errors.fetch_add(1, Ordering::Relaxed);
                    self.detach_member(n, why).await
                }
            }
        });
        join_all(each).await.into_iter().collect::<Result<(), _>>()?;
        let done = self.unflushed.borrow_mut().take_before(number);
        done.iter().for_each(|positions| self.retire_entry(positions));
        self.write_intents.on_flushed(number);
        self.log_space_freed.notify_waiters();
        Ok(())
    }
}

/// The bit of a member in a bit set of members.
pub(super) fn member_bit(member: u16) -> MemberBits {
    1u128.checked_shl(member.into()).unwrap_or(0)
}

/// A write intent that is being logged.
struct IntentLogging<'a> {
    array: &'a Array,
    region: IntentRegion,
    members: MemberBits,
    positions: Option<LogPositions>,
}

impl Drop for IntentLogging<'_> {
    fn drop(&mut self) {
        self.array.write_intents.record_logged(self.region, self.members, self.positions.take());
        self.array.log_space_freed.notify_waiters();
    }
}

impl AttachedMember {
    fn new(health: &Rc<HealthMonitor>, number: u16, member: ArrayMember, first: u64) -> Self {
        let ArrayMember { dev, ring, ring_lba, is_detached, counters, checksums } = member;
        let disk = health.set_member(number, (dev, ring_lba), counters);
        let log = ParityLog::new(ring, Rc::clone(&disk), ring_lba, first);
        let detach_recorded =
            if is_detached { OnceCell::new_with(Some(Ok(()))) } else { OnceCell::new() };
        Self { disk, log, checksums, detach_recorded }
    }
}
