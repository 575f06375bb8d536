//! A volume on the extents of a pool: its extents, and the locks of its stripes. What it does is in
//! other files: `submit`, `read`, `write`, `unmap`, and the maintenance of `rebuild`, `relocate`
//! and `scrub`.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;

use block::{Blocks, Error, KeyedLock, KeyedLocks};
use geometry::{Column, ROW_BYTES, RaidGeometry};

use super::array::Array;
use super::extent::Extent;
use super::pool_metadata::MetadataFuture;
use super::read_locks::ReadLocks;
use super::stripe::Stripe;
use super::stripe_locks::{StripeId, StripeLock, StripeLocks, stripe_key};
use super::write_queues::WriteQueues;

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
    pub(super) array: Rc<Array>,
    pub(super) allocator: Rc<dyn ExtentAllocator>,
    pub(super) geometry: RaidGeometry,
    pub(super) block_size: u32,
    pub(super) bytes: Cell<u64>,
    pub(super) is_thick: bool,
    /// By index; an index without extent reads as zeroes.
    pub(super) extents: RefCell<Vec<Option<Rc<Extent>>>>,
    /// Serialises allocation and release of an extent, by index.
    pub(super) allocation_locks: KeyedLocks,
    /// For writes, and for reads of more than data.
    pub(super) stripe_locks: StripeLocks,
    /// For reads of data, which take no stripe lock.
    pub(super) read_locks: ReadLocks,
    /// Writes that wait for a stripe lock.
    pub(super) write_queues: WriteQueues,
    pub(super) submitted_ops: Cell<u64>,
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
            stripe_locks: StripeLocks::default(),
            read_locks: ReadLocks::default(),
            write_queues: WriteQueues::default(),
            submitted_ops: Cell::new(0),
            maintenance_locks: KeyedLocks::default(),
            maintenance_stopped: Cell::new(false),
        };
        extents.into_iter().for_each(|(index, extent)| raid.insert_extent(index, extent));
        raid
    }

    pub(super) fn insert_extent(&self, index: u32, extent: Extent) {
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
    pub(super) fn submitted_ops(&self) -> u64 {
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
    pub(super) async fn ensure_allocated(&self, index: u32) -> Result<(), Error> {
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

    /// A stripe where it lies now.
    pub(super) fn stripe(&self, stripe: StripeId) -> Result<Stripe<'_>, Error> {
        let extent = self.extent(stripe.0).ok_or(Error::OutOfRange)?;
        let (array, locks) = (&*self.array, Some((&self.read_locks, stripe_key(stripe))));
        let slot = extent.stripe_map.slot_of(stripe.1).ok_or(Error::OutOfRange)?;
        Ok(Stripe { array, geometry: self.geometry, extent, slot, read_locks: locks })
    }

    /// Waits for the stripe lock.
    pub(super) fn lock_stripe(&self, stripe: StripeId) -> impl Future<Output = StripeLock<'_>> {
        self.stripe_locks.lock(stripe)
    }

    /// `range` as bytes of the extents.
    pub(super) fn byte_range(&self, range: Blocks) -> Range<u64> {
        let block = u64::from(self.block_size);
        range.at.0 * block..(range.at.0 + range.count) * block
    }

    /// Length of the prefix of `bytes` that is mapped, or unmapped, throughout; and which of the
    /// two.
    pub(super) fn mapped_prefix(&self, bytes: &Range<u64>) -> (u64, bool) {
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

impl fmt::Debug for RaidVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RaidVolume").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}
