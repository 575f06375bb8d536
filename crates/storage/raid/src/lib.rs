//! RAID levels 0, 1, 10, 5 and 6 over the disks of a node, without a write hole ([RFD
//! 0029](../../../../docs/rfd/0029-raid-without-a-write-hole.md)). The layout of an extent is in
//! the crate `geometry`.
//!
//! Modules that decide and do no I/O:
//!
//! | module | subject |
//! |---|---|
//! | `row_plan` | how to write a row of a stripe |
//! | `band` | splits a stripe write into rows that are written the same way |
//! | `row_parity` | the parity arithmetic of a row |
//! | `stripe_map`, `stripe_map_format` | the slots of stripes, and how they are stored |
//! | `lost` | rows that are lost until they are rewritten |
//! | `bounded_concurrency` | runs a bounded number of operations at a time |
//! | `log_batch` | the format of the parity log on a member |
//! | `row_recovery` | how to recover a row after a crash |
//!
//! Modules that do the I/O:
//!
//! | module | subject |
//! |---|---|
//! | `array` | the members of a pool on one core, and which of them are available |
//! | `extent` | a part of a volume: its columns, and their stale slots |
//! | `parity_log` | the parity log of one member |
//! | `write_intents` | mirrored regions that are being written |
//! | `stripe` | one stripe: its lock, reads, and reconstruction |
//! | `read_exclusion` | keeps reads away from blocks that are being rewritten |
//! | `health` | response times of members: which are slow, which are detached |
//! | `read`, `write`, `partial_rows`, `full_stripe` | the operations of a volume |
//! | `hedged_read` | reads that are redirected from a late member |
//! | `rebuild`, `relocate` | rebuild the stale slots of a column, and move a current column |
//! | `scrub` | reads and compares all of an extent |
//! | `unrecoverable` | gives up rows that no disk returns |
//! | `log_recovery` | recovers the array after a crash |

mod array;
mod array_memory;
mod band;
mod bounded_concurrency;
mod column_checksums;
mod copy_intents;
mod extent;
mod flush;
mod full_stripe;
mod health;
mod hedged_read;
mod intent_locks;
pub mod log_batch;
mod log_recovery;
mod logs;
mod lost_rows;
mod member_bits;
mod members;
mod mistake;
mod parity_log;
mod partial_rows;
mod pool_metadata;
mod quiesce;
mod read;
mod read_exclusion;
mod rebuild;
mod relocate;
mod row_parity;
pub mod row_plan;
pub mod row_recovery;
mod scrub;
mod stale_regions;
mod stripe;
mod stripe_map;
pub mod stripe_map_format;
mod stripe_map_io;
mod unflushed_writes;
mod unrecoverable;
mod write;

use geometry::Column;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;

use block::{BlockStatus, Blocks, Bufs, Ctx, Error, Info, Layer, Lba, Op};
use futures_util::future::join3;

pub use array::Array;
pub use extent::Extent;
pub use full_stripe::for_contiguous_runs;
pub use health::DiskCounters;
pub use log_recovery::{LogContents, PreviousRing, RecoveryReport};
pub use members::{ArrayMember, MemberBusy};
pub use mistake::Mistake;
pub use parity_log::RING_BLOCKS;
pub use pool_metadata::{Damage, DetachFuture, MetadataFuture, PoolMetadata};
pub use rebuild::{MaintenancePace, RebuildReport};
pub use stripe_map::{StripeLocation, StripeMap};
pub use unrecoverable::MIN_FAILING_TIME;

use block::{KeyedLock, KeyedLocks};
use bounded_concurrency::run_bounded;
use geometry::{ROW_BYTES, RaidGeometry};

/// Largest data operation, in bytes.
const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// Largest number of extents that one operation frees at a time.
const MAX_CONCURRENT_FREES: usize = 32;

/// The settings of a volume of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaidSettings {
    /// Layout of its extents.
    pub geometry: RaidGeometry,
    /// Size of its blocks in bytes: 512 or 4096.
    pub block_size: u32,
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether it keeps its extents when they are unmapped.
    pub is_thick: bool,
}

/// Gives extents to a volume and takes them back.
pub trait ExtentAllocator: fmt::Debug {
    /// Allocates the extent at `index`, which reads as zeroes. The allocation is durable on return.
    ///
    /// # Errors
    /// [`Error::NoSpace`], and errors that stop the pool.
    fn allocate(&self, index: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>>;

    /// Frees the extent at `index`, which is unused. Durable on return.
    fn free(&self, index: u32) -> MetadataFuture<'_>;

    /// Makes durable that rows of an extent's data are lost: they read as errors from then on.
    ///
    /// # Errors
    /// If there are too many lost rows, and errors that stop the pool.
    fn record_lost_rows(&self, index: u32, rows: Range<u32>) -> MetadataFuture<'_>;

    /// Makes durable that lost or unrepaired rows have been rewritten.
    ///
    /// # Errors
    /// Those of [`Self::record_lost_rows`].
    fn record_rewritten_rows(&self, index: u32, rows: Range<u32>) -> MetadataFuture<'_>;

    /// Makes durable that rows of an extent's data could not be repaired. They still read as
    /// before.
    ///
    /// # Errors
    /// Those of [`Self::record_lost_rows`].
    fn record_unrepaired_rows(&self, index: u32, rows: Range<u32>) -> MetadataFuture<'_>;
}

/// A volume on the extents of a pool. See the [module](self).
pub struct RaidVolume {
    array: Rc<Array>,
    allocator: Rc<dyn ExtentAllocator>,
    geometry: RaidGeometry,
    block_size: u32,
    bytes: Cell<u64>,
    is_thick: bool,
    /// By index; an index without extent reads as zeroes.
    extents: RefCell<Vec<Option<Rc<Extent>>>>,
    /// Serialises allocation and release of an extent, by index.
    allocation_locks: KeyedLocks,
    /// Stripe locks: for writes, and for reads of more than data.
    stripe_locks: KeyedLocks,
    /// Reads of data, which take no stripe lock.
    stripe_reads: read_exclusion::StripeReads,
    /// Writes that wait for a stripe lock.
    write_queues: write::WriteQueues,
    submitted_ops: Cell<u64>,
    /// Serialises rebuild, relocation and release of an extent, by index.
    maintenance_locks: KeyedLocks,
    /// Whether rebuild, relocation and scrub must stop.
    maintenance_stopped: Cell<bool>,
}

/// While it lives, nothing else rebuilds, moves or frees the extent.
#[derive(Debug)]
pub struct MaintenanceGuard<'a> {
    _lock: KeyedLock<'a>,
}

impl RaidVolume {
    /// A volume on these extents, by index, which lie on members of `array`. It allocates more from
    /// `allocator`.
    #[must_use]
    pub fn new(
        array: Rc<Array>,
        settings: RaidSettings,
        extents: impl IntoIterator<Item = (u32, Extent)>,
        allocator: Rc<dyn ExtentAllocator>,
    ) -> Self {
        let RaidSettings { geometry, block_size, bytes, is_thick } = settings;
        let raid = Self {
            array,
            allocator,
            geometry,
            block_size,
            bytes: Cell::new(bytes),
            is_thick,
            extents: RefCell::default(),
            allocation_locks: KeyedLocks::default(),
            stripe_locks: KeyedLocks::default(),
            stripe_reads: read_exclusion::StripeReads::default(),
            write_queues: write::WriteQueues::default(),
            submitted_ops: Cell::new(0),
            maintenance_locks: KeyedLocks::default(),
            maintenance_stopped: Cell::new(false),
        };
        extents.into_iter().for_each(|(index, extent)| raid.insert_extent(index, extent));
        raid
    }

    fn insert_extent(&self, index: u32, extent: Extent) {
        let mut extents = self.extents.borrow_mut();
        let count = extents.len().max(index as usize + 1);
        extents.resize_with(count, || None);
        extents[index as usize] = Some(Rc::new(extent));
    }

    /// Moves column number `column` of the extent at `index` to `to`, where all of it is stale
    /// until [rebuilt](Self::rebuild). The member of the old column must be detached.
    pub fn replace_column(&self, index: u32, column: u16, to: Column) {
        let mut extents = self.extents.borrow_mut();
        if let Some(Some(extent)) = extents.get_mut(index as usize) {
            self.array.adopt_column(&to);
            *extent = Rc::new(extent.with_empty_column(column, to));
            self.array.update_moved_extent(extent);
        }
    }

    /// Grows the volume to `bytes`; never shrinks it.
    pub fn grow(&self, bytes: u64) {
        self.bytes.set(self.bytes.get().max(bytes));
    }

    /// Makes rebuild, relocation and scrub stop after their current stripe. Client I/O continues.
    pub fn stop_maintenance(&self) {
        self.maintenance_stopped.set(true);
    }

    /// Undoes [`Self::stop_maintenance`]: the volume stays in use here.
    pub fn resume_maintenance(&self) {
        self.maintenance_stopped.set(false);
    }

    /// Whether [`Self::stop_maintenance`] is in effect.
    #[must_use]
    pub fn is_maintenance_stopped(&self) -> bool {
        self.maintenance_stopped.get()
    }

    /// Waits until nothing rebuilds, moves or frees the extent at `index`, and locks it: what the
    /// caller learns about the extent stays true while the guard lives.
    pub async fn lock_for_maintenance(&self, index: u32) -> MaintenanceGuard<'_> {
        MaintenanceGuard { _lock: self.maintenance_locks.lock(index.into()).await }
    }

    /// Number of operations that clients have submitted.
    fn submitted_ops(&self) -> u64 {
        self.submitted_ops.get()
    }

    /// Bytes of data in an extent.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.geometry.total_rows() * u64::from(ROW_BYTES)
    }

    /// The extent at `index`, if allocated.
    #[must_use]
    pub fn extent(&self, index: u32) -> Option<Rc<Extent>> {
        self.extents.borrow().get(index as usize).cloned().flatten()
    }

    /// The indices of all allocated extents.
    #[must_use]
    pub fn extent_indices(&self) -> Vec<u32> {
        let extents = self.extents.borrow();
        let allocated = (0..).zip(&*extents).filter(|(_, extent)| extent.is_some());
        allocated.map(|(index, _)| index).collect()
    }

    /// Allocates the extent at `index` if there is none.
    async fn ensure_allocated(&self, index: u32) -> Result<(), Error> {
        if self.extent(index).is_some() {
            return Ok(());
        }
        let _lock = self.allocation_locks.lock(index.into()).await;
        if self.extent(index).is_none() {
            let extent = self.allocator.allocate(index).await?;
            extent.columns.iter().for_each(|column| self.array.adopt_column(column));
            self.insert_extent(index, extent);
        }
        Ok(())
    }

    /// Frees the extent at `index`: it reads as zeroes from now on. Clients must not use it
    /// meanwhile.
    async fn free_extent(&self, index: u32) -> Result<(), Error> {
        let _lock = self.allocation_locks.lock(index.into()).await;
        let Some(extent) = self.extent(index) else { return Ok(()) };
        self.extents.borrow_mut()[index as usize] = None;
        // Maintenance writes to these columns, and records their place, until it ends.
        let _maintenance = self.lock_for_maintenance(index).await;
        // Rebuild and scrub hold a stripe lock; they do not find the extent for their next stripe.
        for stripe in 0..self.geometry.stripes() {
            drop(self.lock_stripe(index, stripe).await);
        }
        self.array.quiesce_extent(&extent).await?;
        self.allocator.free(index).await
    }

    /// `range` as bytes of the extents.
    fn byte_range(&self, range: Blocks) -> Range<u64> {
        let block = u64::from(self.block_size);
        range.at.0 * block..(range.at.0 + range.count) * block
    }

    /// Frees whole extents and zeroes the rest, all at once, so that flushes, log batches and pool
    /// metadata versions are shared.
    async fn unmap(&self, bytes: Range<u64>, fua: bool, lba: Lba, ctx: &Ctx) -> Result<(), Error> {
        let each = self.extent_bytes();
        let (first, last) = (bytes.start.div_ceil(each), bytes.end / each);
        if self.is_thick || first >= last {
            return self.zero(bytes, fua, lba, ctx).await;
        }
        let head = self.zero(bytes.start..first * each, fua, lba, ctx);
        let tail = self.zero(last * each..bytes.end, fua, lba, ctx);
        let frees = (first..last).filter_map(|index| u32::try_from(index).ok());
        let frees = run_bounded(frees.map(|index| self.free_extent(index)), MAX_CONCURRENT_FREES);
        let (head, tail, frees) = join3(head, tail, frees).await;
        head.and(tail).and(frees)
    }

    /// Length of the prefix of `bytes` that is mapped, or unmapped, throughout; and which of the
    /// two.
    fn mapped_prefix(&self, bytes: &Range<u64>) -> (u64, bool) {
        let each = self.extent_bytes();
        let is_allocated =
            |index: u64| u32::try_from(index).is_ok_and(|index| self.extent(index).is_some());
        let first = bytes.start / each;
        let mapped = is_allocated(first);
        let end =
            (first + 1..).find(|index| is_allocated(*index) != mapped || index * each >= bytes.end);
        let end = end.map_or(bytes.end, |index| (index * each).min(bytes.end));
        (end - bytes.start, mapped)
    }
}

impl Layer for RaidVolume {
    fn name(&self) -> &'static str {
        "raid"
    }

    fn info(&self) -> Info {
        let block = self.block_size;
        let extent = u32::try_from(self.extent_bytes() / u64::from(block)).unwrap_or(0);
        Info {
            block_size: block,
            blocks: self.bytes.get() / u64::from(block),
            metadata_blocks: 0,
            physical_block_size: ROW_BYTES,
            max_transfer_blocks: MAX_TRANSFER_BYTES / block,
            unmap_granularity_blocks: if self.is_thick { 0 } else { extent },
            unmap_zeroes: true,
            volatile_cache: self.array.members.is_volatile(),
            native_fua: true,
            read_only: false,
            // A read that does not begin and end on row boundaries.
            overhead_bytes: if block < ROW_BYTES { ROW_BYTES } else { 0 },
        }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let Some(range) = op.range(self.block_size) else {
            return self.array.flush().await.map(|()| Bufs::new());
        };
        self.submitted_ops.set(self.submitted_ops.get() + 1);
        let bytes = self.byte_range(range);
        match op {
            Op::Read { .. } => return self.read(bytes, range.at, &ctx).await,
            Op::Write { data, fua, .. } => self.write(bytes.start, data, fua, range.at).await?,
            // Rare operations are boxed, to keep the future of a read small.
            Op::Zero { unmap: false, fua, .. } => {
                Box::pin(self.zero(bytes, fua, range.at, &ctx)).await?;
            }
            Op::Zero { fua, .. } => Box::pin(self.unmap(bytes, fua, range.at, &ctx)).await?,
            Op::Unmap { .. } => Box::pin(self.unmap(bytes, false, range.at, &ctx)).await?,
            Op::BlockStatus { .. } => {
                let (bytes, mapped) = self.mapped_prefix(&bytes);
                let blocks = bytes / u64::from(self.block_size);
                let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
                return Ok(BlockStatus { blocks, mapped }.into_bufs(&ctx));
            }
            Op::Flush => {}
        }
        Ok(Bufs::new())
    }
}

impl fmt::Debug for RaidVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RaidVolume").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests;
