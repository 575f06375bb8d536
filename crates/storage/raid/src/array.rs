//! The members of a pool as one core uses them: reads, writes and detaches of members, and the
//! state that the array's other files work on.
//!
//! A write of a member that fails detaches it, and completes when that is recorded.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::{BufferPool, Bufs, Ctx, Error, FlushCoalescer, Lba, Op};
use parity::Parity;
use rustc_hash::FxHashMap;
use tokio::sync::{Mutex, Notify};

use super::array_memory::{self, ArrayMemory};
use super::extent::Extent;
use super::health::{HealthMonitor, MemberIo};
use super::intent_locks::IntentLocks;
use super::member_bits::member_bit;
use super::members::{ArrayMember, MemberBusy, Members};
use super::mistake::Mistake;
use super::parity_log::LogPositions;
use super::pool_metadata::PoolMetadata;
use super::unflushed_writes::UnflushedWrites;

/// Extents whose stripes have moved, by number, with the log entries of the moves.
pub(super) type MovedStripes = FxHashMap<u64, (Rc<Extent>, Vec<LogPositions>)>;

/// The members of a pool, on one core.
#[derive(Debug)]
pub struct Array {
    pub(super) members: Members,
    pub(super) memory: ArrayMemory,
    pub(super) metadata: Rc<dyn PoolMetadata>,
    pub(super) parity: Parity,
    /// Why writes have stopped: the entries of a failed write stay in the logs until the pool is
    /// reopened.
    write_error: Cell<Option<Error>>,
    /// Planted by tests.
    #[cfg(any(test, feature = "testing"))]
    mistake: Mistake,
    last_entry_number: Cell<u64>,
    /// Wakes those that wait for log space.
    pub(super) log_space_freed: Notify,
    pub(super) flush_coalescer: FlushCoalescer,
    pub(super) unflushed: RefCell<UnflushedWrites>,
    /// Locks of mirrored regions that are being written.
    pub(super) intent_locks: IntentLocks,
    pub(super) moved_stripes: RefCell<MovedStripes>,
    /// Held while the maps of extents in `moved_stripes` are saved.
    pub(super) map_save_lock: Mutex<()>,
    /// The generation of the logs.
    log_generation: u64,
    /// First number for batches and entries: above all numbers used before in this generation.
    first_number: u64,
}

impl Array {
    /// Bytes of its core's memory that an array takes.
    pub const MEMORY_BYTES: usize = array_memory::MEMORY_BYTES;

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
        let memory = ArrayMemory::reserve(pool).await?;
        let scratch_pages = Arc::clone(&memory.scratch_pages);
        let health =
            HealthMonitor::new(Rc::clone(&metadata), scratch_pages, memory.scratch.clone());
        Ok(Self {
            members: Members::new(health),
            memory,
            metadata,
            parity: Parity::best(),
            write_error: Cell::new(None),
            #[cfg(any(test, feature = "testing"))]
            mistake: Mistake::None,
            last_entry_number: Cell::new(0),
            log_space_freed: Notify::new(),
            flush_coalescer: FlushCoalescer::default(),
            unflushed: RefCell::default(),
            intent_locks: IntentLocks::default(),
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

    /// The number of the next entry.
    pub(super) fn take_entry_number(&self) -> u64 {
        let number = self.last_entry_number.get() + 1;
        self.last_entry_number.set(number);
        number
    }

    /// The generation of the logs.
    pub(super) fn log_generation(&self) -> u64 {
        self.log_generation
    }

    /// Attaches `member` under this number, below [`MAX_MEMBERS`](geometry::MAX_MEMBERS). An
    /// earlier member with the number must be detached.
    ///
    /// # Errors
    /// [`MemberBusy`], if the same disk still has operations in flight.
    pub fn set_member(&self, number: u16, member: ArrayMember) -> Result<(), MemberBusy> {
        self.members.attach(number, member, self.first_number)?;
        self.intent_locks.forget_member(member_bit(number));
        Ok(())
    }

    /// Whether `member` is detached or does not exist.
    #[must_use]
    pub fn is_detached(&self, member: u16) -> bool {
        self.members.is_detached(member)
    }

    /// Reads `rows` rows of a member, from row `at` on.
    pub(super) async fn read_member(
        &self,
        member: u16,
        at: u64,
        rows: u32,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let read = self.begin_read(member, at, rows, ctx)?.await;
        if read.is_err() {
            self.members.count_read_error(member);
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
        let attached = self.members.available(member).ok_or(Error::Gone)?;
        let pages = if ctx.is_same_command(&self.memory.scratch) { rows } else { 0 };
        let begun = attached.disk.begin(Op::Read { at: Lba(at), blocks: rows }, ctx, pages);
        begun.inspect_err(|_| self.members.count_read_error(member))
    }

    /// Writes rows of a member, from row `at` on. On failure the member is detached on return. An
    /// error means that this could not be recorded.
    pub(super) async fn write_member(
        &self,
        member: u16,
        at: u64,
        data: Bufs,
        fua: bool,
    ) -> Result<(), Error> {
        let Some(attached) = self.members.available(member) else {
            return self.detach_member(member, Error::Gone).await;
        };
        let op = Op::Write { at: Lba(at), data, fua };
        let written = match attached.disk.begin(op, &self.memory.scratch, 0) {
            Ok(io) => io.await,
            Err(why) => Err(why),
        };
        match written {
            Ok(_) => Ok(()),
            Err(why) => {
                attached.disk.counters.write_errors.fetch_add(1, Ordering::Relaxed);
                self.detach_member(member, why).await
            }
        }
    }

    /// Detaches a member. Returns when all other members have recorded it.
    pub(super) async fn detach_member(&self, member: u16, why: Error) -> Result<(), Error> {
        let Some(attached) = self.members.attached(member) else { return Ok(()) };
        if !self.is_detached(member) {
            self.members.set_available(member, false);
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
        for (extent, regions) in unflushed.regions().chain(self.intent_locks.unflushed_regions()) {
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

    pub(super) fn check_writable(&self) -> Result<(), Error> {
        self.write_error.get().map_or(Ok(()), Err)
    }

    /// Retires intents that are no longer needed; whether there were any.
    pub(super) fn clear_write_intents(&self, all: bool) -> bool {
        let cleared = self.intent_locks.take_clearable(all);
        cleared.iter().for_each(|positions| self.members.retire_entry(positions));
        if !cleared.is_empty() {
            self.log_space_freed.notify_waiters();
        }
        !cleared.is_empty()
    }
}
