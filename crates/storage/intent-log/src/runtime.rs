//! The log in use: dirty bits are durable before anything changes, and are cleared when nothing can
//! differ any more.
//!
//! Whatever changes an image's data does this for every operation:
//!
//! 1. [`IntentLog::begin_op`]: hold its [`RegionGuard`] until the operation has ended;
//! 2. unless [`IntentLog::is_hot`], wait for [`IntentLog::mark`];
//! 3. the operation.
//!
//! To clear dirty bits: [`IntentLog::begin_flush`]; a flush of the image; when it and those of all
//! members in sync have succeeded, [`IntentLog::clear`] with the stamp of the first step.
//!
//! * `region_activity`: operations in flight in each region, and when the last one was;
//! * `dirty_bitmap`: the bits, in memory and on disk;
//! * `bitmap_writer`: writes pages to disk;
//! * `clear_budget`: limits how many bits are cleared, so that few are set again;
//! * `config_adoption`: changes of the superblock, and the assignment of slots;
//! * `open`: creating and opening a log.

mod bitmap_writer;
mod clear_budget;
mod config_adoption;
mod dirty_bitmap;
mod open;
mod page_set;
mod region_activity;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use block::Error;
use peer::{DataGeneration, PeerGenerations};
use rt::Core;
use rt::disk::DiskError;
use uuid::Uuid;

use super::{Geometry, LogGeometryError, Region, Slot, SlotBitmaps, Superblock};
use disk::LogArea;

pub use config_adoption::{
    AdoptError, AdoptedConfig, ConfigAdoption, GenerationUpdate, OtherImage,
};
pub use open::{LogDamage, LogError, LogOpenReport, read_superblock};
pub use region_activity::FlushStamp;

use bitmap_writer::{BitmapWriter, WriterState};
use clear_budget::ClearBudget;
use dirty_bitmap::DirtyBitmap;
use region_activity::RegionActivity;

/// Smallest hot limit, however small the volume.
const MIN_HOT_LIMIT: u32 = 4096;

/// The write-intent log of an image in use.
///
/// Lives on one core; clones share it. Ranges are in bytes of the volume.
#[derive(Clone)]
pub struct IntentLog(Rc<LogShared>);

struct LogShared {
    area: Rc<dyn LogArea>,
    writer: RefCell<BitmapWriter>,
    activity: RefCell<RegionActivity>,
    clear_budget: RefCell<ClearBudget>,
    superblock: Cell<Superblock>,
    /// Held while the superblock is changed.
    superblock_lock: tokio::sync::Mutex<()>,
    hot_limit: Cell<u32>,
}

/// Marks an operation as in flight while it lives.
#[must_use]
pub struct RegionGuard {
    log: Rc<LogShared>,
    regions: Range<u32>,
}

/// The dirty bits that one image keeps for another, to be sent to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedBitmap {
    /// Size of the volume in bytes, as the sender knows it.
    pub volume_bytes: u64,
    /// Size of a region in bytes, as a power of two.
    pub region_shift: u32,
    /// Bit `n % 8` of byte `n / 8`: whether region `n` is dirty. As many bytes as the regions need.
    pub bits: Vec<u8>,
}

/// Why another image's dirty bits are not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The log keeps no dirty bits for that image.
    #[error("the log has no slot for image {0}")]
    UnknownImage(Uuid),
    /// No volume has such regions.
    #[error("the bitmap of an incompatible log: {0}")]
    Geometry(#[from] LogGeometryError),
    /// The number of bits does not match the number of regions.
    #[error("a bitmap of {found} bytes instead of {wanted}")]
    Length {
        /// Bytes found.
        found: usize,
        /// Bytes expected.
        wanted: usize,
    },
    /// The log has failed or is closed.
    #[error("the intent log has failed or is closed")]
    Gone,
}

/// Why a log is not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseError {
    /// Operations are in flight.
    #[error("{0} operations are in flight")]
    InUse(u64),
    /// The log has failed, or is closed already.
    #[error("the intent log has failed or is closed")]
    Gone,
}

impl From<Error> for MergeError {
    fn from(_: Error) -> Self {
        Self::Gone
    }
}

impl From<Error> for CloseError {
    fn from(_: Error) -> Self {
        Self::Gone
    }
}

impl IntentLog {
    /// The regions of the volume.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.0.writer.borrow().bitmap.geometry()
    }

    /// [`LogArea::disk_session`] of its area.
    #[must_use]
    pub fn boot(&self, core: &Core) -> Uuid {
        self.0.area.disk_session(core)
    }

    /// The configuration that the image has adopted; `None` if none yet, or if that was lost.
    #[must_use]
    pub fn adopted(&self) -> Option<AdoptedConfig> {
        self.0.superblock.get().adopted()
    }

    /// Adopts a configuration, durably. Images that are not among the others any more lose their
    /// slots; one without a slot gets a free one. There, all regions are dirty if the image is new;
    /// else those that are dirty for any image, which include all that this image lacks if a slot
    /// was free all the time, or all regions if none was.
    ///
    /// # Errors
    /// [`AdoptError`]; unless it is [`AdoptError::Gone`], nothing has changed.
    pub async fn adopt_config(&self, next: ConfigAdoption) -> Result<(), AdoptError> {
        let work = tokio::task::spawn_local(Rc::clone(&self.0).adopt_config(next));
        work.await.unwrap_or(Err(AdoptError::Gone))
    }

    /// The latest data generation that the image has reached (RFD 0032).
    #[must_use]
    pub fn data_generation(&self) -> DataGeneration {
        self.0.superblock.get().data_generation
    }

    /// The generations recorded about the other images that have slots.
    #[must_use]
    pub fn generations(&self) -> Vec<(Uuid, PeerGenerations)> {
        let slots = self.0.superblock.get().slots;
        slots.iter().filter_map(|slot| Some((slot.image?, slot.generations))).collect()
    }

    /// The generations recorded about `image`; default ones if it has no slot.
    #[must_use]
    pub fn generations_with(&self, image: Uuid) -> PeerGenerations {
        let found = self.generations().into_iter().find(|(of_image, _)| *of_image == image);
        found.map(|(_, generations)| generations).unwrap_or_default()
    }

    /// Whether the generations recorded about `image` were lost with an earlier log, and none have
    /// been recorded since.
    #[must_use]
    pub fn is_history_lost(&self, image: Uuid) -> bool {
        let slots = self.0.superblock.get().slots;
        slots.iter().any(|slot| slot.image == Some(image) && slot.history_lost)
    }

    /// Whether the log was lost, and the image has not been in sync in any configuration since.
    #[must_use]
    pub fn was_lost(&self) -> bool {
        let superblock = self.0.superblock.get();
        superblock.data_generation == DataGeneration::default()
            && superblock.slots.iter().any(|s| s.history_lost)
    }

    /// Records data generations, durably: two writes and syncs, or none if they are recorded
    /// already.
    ///
    /// # Errors
    /// [`Error::Gone`] if the log has failed or is closed.
    pub async fn record_generation(&self, next: GenerationUpdate) -> Result<(), Error> {
        let work = tokio::task::spawn_local(Rc::clone(&self.0).record_generation(next));
        work.await.unwrap_or(Err(Error::Gone))
    }

    /// Marks all regions dirty for `image`, durably.
    ///
    /// # Errors
    /// [`MergeError::UnknownImage`], [`MergeError::Gone`].
    pub async fn mark_all_dirty(&self, image: Uuid) -> Result<(), MergeError> {
        self.0.check_open()?;
        let slot = self.0.slot_of(image).ok_or(MergeError::UnknownImage(image))?;
        let pages = self.0.writer.borrow_mut().bitmap.initialize_slot(slot, SlotBitmaps::set_all);
        self.0.persist(pages).await?;
        Ok(())
    }

    /// Whether all regions of `range` are durably dirty in every slot, so that it may be changed at
    /// once. False outside of the volume, and if the log has failed or is closed.
    #[must_use]
    pub fn is_hot(&self, range: Range<u64>) -> bool {
        let writer = self.0.writer.borrow();
        let regions = region_numbers(writer.bitmap.geometry(), &range);
        regions.is_some_and(|regions| writer.is_hot(regions.map(Region)))
    }

    /// Marks the regions of `range` dirty in every slot: at once in memory, and durably on return.
    /// Counts as an operation in flight until then. To go on and change the range, the caller must
    /// hold a [`RegionGuard`] of its own, so that the bits are not cleared in between.
    ///
    /// # Errors
    /// [`Error::Gone`] if the log has failed or is closed, [`Error::OutOfRange`].
    pub async fn mark(&self, range: Range<u64>) -> Result<(), Error> {
        self.0.check_open()?;
        let (regions, batch) = {
            let mut writer = self.0.writer.borrow_mut();
            let regions =
                region_numbers(writer.bitmap.geometry(), &range).ok_or(Error::OutOfRange)?;
            let batch = writer.mark(regions.clone().map(Region));
            (regions, batch)
        };
        let Some(batch) = batch else { return Ok(()) };
        regions
            .clone()
            .for_each(|region| self.0.clear_budget.borrow_mut().note_marked(Region(region)));
        let _guard = self.0.guard(regions);
        self.0.wait_batch(batch).await
    }

    /// Begins an operation that may change `range`; parts outside of the volume are ignored. Cheap:
    /// allocates nothing where operations were recent.
    pub fn begin_op(&self, range: Range<u64>) -> RegionGuard {
        let geometry = self.geometry();
        let inside =
            range.start.min(geometry.volume_bytes())..range.end.min(geometry.volume_bytes());
        self.0.clear_budget.borrow_mut().note_op();
        self.0.guard(region_numbers(geometry, &inside).unwrap_or_default())
    }

    /// Call before submitting a flush of the image. The stamp may be given to [`Self::clear`] once
    /// that flush has succeeded.
    #[must_use]
    pub fn begin_flush(&self) -> FlushStamp {
        self.0.activity.borrow_mut().begin_flush()
    }

    /// Whether no operation was active in the region since that flush began.
    #[must_use]
    pub fn is_quiet_since(&self, region: Region, flush: FlushStamp) -> bool {
        self.0.activity.borrow().is_quiet_since(region, flush)
    }

    /// Clears the dirty bits of `regions` in the slots of `images`, in memory; they are cleared on
    /// disk some time later. Skips regions with an operation in flight or active since `flush`
    /// began, regions outside of the volume, and images without a slot. Returns the number of bits
    /// cleared.
    ///
    /// The caller must know that *every* member in sync has successfully flushed all writes there,
    /// and that `images` are theirs.
    pub fn clear(
        &self,
        images: &[Uuid],
        regions: impl IntoIterator<Item = Region>,
        flush: FlushStamp,
    ) -> u32 {
        let slots: Vec<Slot> = images.iter().filter_map(|image| self.0.slot_of(*image)).collect();
        let (mut writer, activity) = (self.0.writer.borrow_mut(), self.0.activity.borrow());
        let mut budget = self.0.clear_budget.borrow_mut();
        let count = writer.bitmap.geometry().region_count();
        let mut cleared = 0;
        for region in regions {
            if region.0 >= count || !activity.is_quiet_since(region, flush) {
                continue;
            }
            let bits =
                slots.iter().map(|s| u32::from(writer.bitmap.clear(*s, region))).sum::<u32>();
            if bits > 0 {
                budget.note_cleared(region);
            }
            cleared += bits;
        }
        cleared
    }

    /// Writes the pages in which bits were cleared. They become durable some time later, for which
    /// nothing has to wait.
    ///
    /// # Errors
    /// [`Error::Gone`] if the log has failed.
    pub async fn write_back(&self) -> Result<(), Error> {
        self.0.write_back().await
    }

    /// Advances the clock: to be called every few seconds.
    pub fn tick(&self) {
        self.0.activity.borrow_mut().tick();
        self.0.clear_budget.borrow_mut().tick();
    }

    /// At most `limit` regions that are dirty for any of `images`, have nothing in flight and were
    /// idle for two ticks, the longest idle first. If more regions are dirty than the hot limit,
    /// the longest idle quarter of them is included in any case. Fewer if recently cleared bits had
    /// to be set again.
    #[must_use]
    pub fn idle_dirty_regions(&self, images: &[Uuid], limit: usize) -> Vec<Region> {
        let slots: Vec<Slot> = images.iter().filter_map(|image| self.0.slot_of(*image)).collect();
        let (writer, activity) = (self.0.writer.borrow(), self.0.activity.borrow());
        let mut dirty = 0;
        let mut idle: Vec<(u64, bool, Region)> = Vec::new();
        for region in writer.bitmap.bitmaps().dirty_in_any(&slots) {
            dirty += 1;
            idle.extend(
                activity.idle(region).map(|(last, is_long_idle)| (last, is_long_idle, region)),
            );
        }
        idle.sort_unstable();
        let above_limit = dirty > self.0.hot_limit.get() as usize;
        let recent = if above_limit { dirty.div_ceil(4) } else { 0 };
        let mut position = 0..;
        idle.retain(|(_, is_long_idle, _)| {
            position.next().is_some_and(|n| *is_long_idle || n < recent)
        });
        let limit = limit.min(self.0.clear_budget.borrow().allowance());
        idle.into_iter().take(limit).map(|(_, _, region)| region).collect()
    }

    /// Number of dirty regions above which [`Self::idle_dirty_regions`] includes recently used
    /// ones: a quarter of all, and at least 4096, unless set.
    #[must_use]
    pub fn hot_limit(&self) -> u32 {
        self.0.hot_limit.get()
    }

    /// Sets [`Self::hot_limit`].
    pub fn set_hot_limit(&self, regions: u32) {
        self.0.hot_limit.set(regions);
    }

    /// The dirty regions for `image`, in ascending order; none if it has no slot.
    #[must_use]
    pub fn dirty_regions(&self, image: Uuid) -> Vec<Region> {
        let writer = self.0.writer.borrow();
        let slot = self.0.slot_of(image);
        slot.into_iter().flat_map(|slot| writer.bitmap.bitmaps().dirty_regions(slot)).collect()
    }

    /// Number of dirty regions for `image`; `None` if it has no slot.
    #[must_use]
    pub fn dirty_count(&self, image: Uuid) -> Option<u32> {
        Some(self.0.writer.borrow().bitmap.bitmaps().count(self.0.slot_of(image)?))
    }

    /// Whether `region` is dirty for `image`; false if there is no such slot or region.
    #[must_use]
    pub fn is_dirty(&self, image: Uuid, region: Region) -> bool {
        let writer = self.0.writer.borrow();
        let inside = region.0 < writer.bitmap.geometry().region_count();
        self.0.slot_of(image).is_some_and(|s| inside && writer.bitmap.bitmaps().is_set(s, region))
    }

    /// The images that have slots.
    #[must_use]
    pub fn images(&self) -> Vec<Uuid> {
        self.0.superblock.get().slots.iter().filter_map(|slot| slot.image).collect()
    }

    /// Whether `images` certainly lack nothing: all have slots without a dirty bit, the log has not
    /// failed, and the adopted configuration is known.
    #[must_use]
    pub fn is_clean(&self, images: &[Uuid]) -> bool {
        let is_working =
            self.0.writer.borrow().state() != WriterState::Failed && self.adopted().is_some();
        is_working && images.iter().all(|image| self.dirty_count(*image) == Some(0))
    }

    /// The dirty bits for `image`, to be sent to it; `None` if it has no slot.
    #[must_use]
    pub fn export_bitmap(&self, image: Uuid) -> Option<ExportedBitmap> {
        let slot = self.0.slot_of(image)?;
        let writer = self.0.writer.borrow();
        let geometry = writer.bitmap.geometry();
        Some(ExportedBitmap {
            volume_bytes: geometry.volume_bytes(),
            region_shift: geometry.region_shift(),
            bits: writer.bitmap.bitmaps().to_bits(slot),
        })
    }

    /// Merges dirty bits that `image` keeps into those kept for it, durably. Its regions may have
    /// another size; `theirs` is not trusted.
    ///
    /// # Errors
    /// [`MergeError`]; unless it is [`MergeError::Gone`], nothing has changed.
    pub async fn merge_bitmap(
        &self,
        image: Uuid,
        theirs: &ExportedBitmap,
    ) -> Result<(), MergeError> {
        self.0.check_open()?;
        let slot = self.0.slot_of(image).ok_or(MergeError::UnknownImage(image))?;
        let geometry = Geometry::with_shift(theirs.volume_bytes, theirs.region_shift)?;
        let (found, expected) = (theirs.bits.len(), geometry.bitmap_bytes());
        let theirs = SlotBitmaps::from_bits(geometry, slot, &theirs.bits);
        let theirs = theirs.ok_or(MergeError::Length { found, wanted: expected })?;
        let pages = self.0.writer.borrow_mut().bitmap.merge(slot, &theirs);
        self.0.persist(pages).await?;
        Ok(())
    }

    /// Closes the log in order: writes all pages, makes everything in the image durable, and
    /// records in the superblock that the image was closed. Dirty bits stay as they are. The log
    /// cannot be marked afterwards.
    ///
    /// # Errors
    /// [`CloseError`]
    pub async fn close(&self) -> Result<(), CloseError> {
        let work = tokio::task::spawn_local(Rc::clone(&self.0).close());
        work.await.unwrap_or(Err(CloseError::Gone))
    }
}

impl LogShared {
    fn new(area: Rc<dyn LogArea>, bitmap: DirtyBitmap, superblock: Superblock) -> Rc<Self> {
        let regions = bitmap.geometry().region_count();
        Rc::new(Self {
            area,
            writer: RefCell::new(BitmapWriter::new(bitmap)),
            activity: RefCell::new(RegionActivity::new(regions)),
            clear_budget: RefCell::new(ClearBudget::new(regions)),
            superblock: Cell::new(superblock),
            superblock_lock: tokio::sync::Mutex::default(),
            hot_limit: Cell::new((regions / 4).max(MIN_HOT_LIMIT)),
        })
    }

    fn check_open(&self) -> Result<(), Error> {
        match self.writer.borrow().state() {
            WriterState::Open => Ok(()),
            WriterState::Closed | WriterState::Failed => Err(Error::Gone),
        }
    }

    fn slot_of(&self, image: Uuid) -> Option<Slot> {
        let slots = self.superblock.get().slots;
        Slot::ALL.into_iter().find(|slot| slots[slot.index()].image == Some(image))
    }

    fn guard(self: &Rc<Self>, regions: Range<u32>) -> RegionGuard {
        self.activity.borrow_mut().begin_op(regions.clone());
        RegionGuard { log: Rc::clone(self), regions }
    }

    /// Logs a failed write and returns its error.
    fn on_write_error(&self, error: DiskError) -> Error {
        let image = self.area.path().display();
        tracing::error!(%image, %error, "the intent log cannot be written");
        Error::Gone
    }

    async fn close(self: Rc<Self>) -> Result<(), CloseError> {
        let _lock = self.superblock_lock.lock().await;
        self.check_open()?;
        let in_flight = self.activity.borrow().in_flight();
        if in_flight > 0 {
            return Err(CloseError::InUse(in_flight));
        }
        self.writer.borrow_mut().close();
        self.write_back().await?;
        self.area.sync().await.inspect_err(|_| self.set_failed())?;
        let superblock = self.superblock.get();
        self.write_superblock(Superblock { in_use: false, ..superblock }, 0).await?;
        Ok(())
    }
}

/// The region numbers of a byte range. `None` if it exceeds the volume.
fn region_numbers(geometry: Geometry, range: &Range<u64>) -> Option<Range<u32>> {
    let len = range.end.checked_sub(range.start)?;
    geometry.regions_in(range.start, len).map(|regions| regions.0)
}

impl Drop for RegionGuard {
    fn drop(&mut self) {
        self.log.activity.borrow_mut().end_op(self.regions.clone());
    }
}

impl fmt::Debug for RegionGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RegionGuard").field(&self.regions).finish()
    }
}

impl fmt::Debug for IntentLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let superblock = self.0.superblock.get();
        f.debug_struct("IntentLog").field("superblock", &superblock).finish_non_exhaustive()
    }
}
