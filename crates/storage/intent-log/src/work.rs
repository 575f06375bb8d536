//! The log at work: marks that are durable before anything changes, and go when nothing can differ any
//! more.
//!
//! Who changes an image's data does this, for every operation, whatever it is for:
//!
//! 1. [`IntentLog::begin`]: from here until the operation has ended, its [`Touch`] is held;
//! 2. unless [`IntentLog::is_hot`], wait for [`IntentLog::mark`];
//! 3. the operation.
//!
//! And who takes marks away: [`IntentLog::flush_begins`]; a flush of the image; when that and those of all
//! members in sync have succeeded, [`IntentLog::clear`] with what the first step gave.
//!
//! * `activity`: what is in flight in which region, and when it was last;
//! * `book`: the bits, in memory and on the disk;
//! * `rounds`: how pages get to the disk;
//! * `thrift`: how many marks may be taken, so that few come back;
//! * `adoption`: changes of the superblock, and who has which slot;
//! * `opening`: making and opening.

mod activity;
mod adoption;
mod book;
mod opening;
mod pages;
mod rounds;
mod thrift;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use block::Error;
use peer::{Lineage, SharedLineage};
use rt::Core;
use rt::disk::DiskError;
use uuid::Uuid;

use super::{BadGeometry, Geometry, Marks, Region, Slot, Superblock};
use disk::LogArea;

pub use activity::FlushStamp;
pub use adoption::{AdoptError, Adopted, Adoption, Advance, Other};
pub use opening::{Damage, Found, LogError, read_superblock};

use activity::Activity;
use book::Book;
use rounds::{Life, Rounds};
use thrift::Thrift;

/// Fewest regions that the hot limit is for, however small the volume.
const LEAST_HOT_LIMIT: u32 = 4096;

/// The write-intent log of an image in use. See the [module](self).
///
/// Lives on one core; clones share it. Ranges are in bytes of the volume.
#[derive(Clone)]
pub struct IntentLog(Rc<Inner>);

struct Inner {
    area: Rc<dyn LogArea>,
    rounds: RefCell<Rounds>,
    activity: RefCell<Activity>,
    thrift: RefCell<Thrift>,
    superblock: Cell<Superblock>,
    /// Held by who changes the superblock.
    changing: tokio::sync::Mutex<()>,
    hot_limit: Cell<u32>,
}

/// An operation is in flight, from when this is made until it is dropped.
#[must_use]
pub struct Touch {
    log: Rc<Inner>,
    regions: Range<u32>,
}

/// The marks that one image keeps for another, to be sent there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Size of the volume, in bytes, as its sender has it.
    pub volume_bytes: u64,
    /// Size of a region in bytes, as a power of two.
    pub region_shift: u32,
    /// Bit `n % 8` of byte `n / 8`: whether region `n` is marked. As many bytes as the regions need.
    pub bits: Vec<u8>,
}

/// Why another image's marks are not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The log keeps no marks for that image.
    #[error("no marks are kept for image {0}")]
    Unknown(Uuid),
    /// No volume is cut into regions like that.
    #[error("marks of a strange log: {0}")]
    Geometry(#[from] BadGeometry),
    /// There are more or fewer bits than regions.
    #[error("marks in {found} bytes instead of {wanted}")]
    Length {
        /// Bytes there are.
        found: usize,
        /// Bytes there should be.
        wanted: usize,
    },
    /// The log is dead or closed.
    #[error("the intent log is gone")]
    Gone,
}

/// Why a log is not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseError {
    /// There are operations in flight.
    #[error("{0} operations are in flight")]
    InUse(u64),
    /// The log is dead, or closed already.
    #[error("the intent log is gone")]
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
    /// How the volume is cut into regions.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.0.rounds.borrow().book.geometry()
    }

    /// [`LogArea::boot`] of its area.
    #[must_use]
    pub fn boot(&self, core: &Core) -> Uuid {
        self.0.area.boot(core)
    }

    /// What the image has adopted; `None` if nothing yet, or if that was lost.
    #[must_use]
    pub fn adopted(&self) -> Option<Adopted> {
        self.0.superblock.get().adopted()
    }

    /// Adopts a configuration, durably. Images that are not among the others any more lose their slots;
    /// one that had none gets a free one. It begins with all regions marked if the image is new, else
    /// with what is marked for anybody: what the image lacks is among that, as long as a slot was free
    /// all the time. Where none was, everything is marked for it, too.
    ///
    /// # Errors
    /// [`AdoptError`]; unless it is [`AdoptError::Gone`], nothing has changed.
    pub async fn adopt(&self, next: Adoption) -> Result<(), AdoptError> {
        let work = tokio::task::spawn_local(Rc::clone(&self.0).adopt(next));
        work.await.unwrap_or(Err(AdoptError::Gone))
    }

    /// The last lineage that the image has reached (RFD 0032).
    #[must_use]
    pub fn lineage(&self) -> Lineage {
        self.0.superblock.get().lineage
    }

    /// What has been recorded about the other images: of those that have slots.
    #[must_use]
    pub fn shared(&self) -> Vec<(Uuid, SharedLineage)> {
        let slots = self.0.superblock.get().slots;
        slots.iter().filter_map(|slot| Some((slot.image?, slot.shared))).collect()
    }

    /// What has been recorded about `image`; nothing if it has no slot.
    #[must_use]
    pub fn shared_with(&self, image: Uuid) -> SharedLineage {
        let found = self.shared().into_iter().find(|(of, _)| *of == image);
        found.map(|(_, shared)| shared).unwrap_or_default()
    }

    /// Whether what had been recorded about `image` was lost with an earlier log, and nothing has been
    /// recorded since.
    #[must_use]
    pub fn has_forgotten(&self, image: Uuid) -> bool {
        let slots = self.0.superblock.get().slots;
        slots.iter().any(|slot| slot.image == Some(image) && slot.forgotten)
    }

    /// Whether the log was lost, and the image has been in sync in no configuration since.
    #[must_use]
    pub fn was_lost(&self) -> bool {
        let superblock = self.0.superblock.get();
        superblock.lineage == Lineage::default() && superblock.slots.iter().any(|s| s.forgotten)
    }

    /// Records what is said about lineages, durably: two writes and syncs, and none if it has been
    /// recorded before.
    ///
    /// # Errors
    /// [`Error::Gone`] when the log is dead or closed.
    pub async fn advance(&self, next: Advance) -> Result<(), Error> {
        let work = tokio::task::spawn_local(Rc::clone(&self.0).advance(next));
        work.await.unwrap_or(Err(Error::Gone))
    }

    /// Marks all regions for `image`, durably.
    ///
    /// # Errors
    /// [`MergeError::Unknown`], [`MergeError::Gone`].
    pub async fn mark_all(&self, image: Uuid) -> Result<(), MergeError> {
        self.0.check_open()?;
        let slot = self.0.slot_of(image).ok_or(MergeError::Unknown(image))?;
        let pages = self.0.rounds.borrow_mut().book.begin(slot, Marks::set_all);
        self.0.persist(pages).await?;
        Ok(())
    }

    /// Whether all regions of `range` are durably marked in every slot, so that it may be changed at
    /// once. Not so outside of the volume, nor when the log is dead or closed.
    #[must_use]
    pub fn is_hot(&self, range: Range<u64>) -> bool {
        let rounds = self.0.rounds.borrow();
        let regions = regions_of(rounds.book.geometry(), &range);
        regions.is_some_and(|regions| rounds.is_hot(regions.map(Region)))
    }

    /// Marks the regions of `range` in every slot: at once in memory, and durably when this returns.
    /// Counts as an operation in flight until then; who goes on to change the range holds a [`Touch`]
    /// of his own, so that the marks cannot be taken away in between.
    ///
    /// # Errors
    /// [`Error::Gone`] when the log is dead or closed, [`Error::OutOfRange`].
    pub async fn mark(&self, range: Range<u64>) -> Result<(), Error> {
        self.0.check_open()?;
        let (regions, round) = {
            let mut rounds = self.0.rounds.borrow_mut();
            let regions = regions_of(rounds.book.geometry(), &range).ok_or(Error::OutOfRange)?;
            let round = rounds.mark(regions.clone().map(Region));
            (regions, round)
        };
        let Some(round) = round else { return Ok(()) };
        regions.clone().for_each(|region| self.0.thrift.borrow_mut().set(Region(region)));
        let _touch = self.0.touch(regions);
        self.0.until(round).await
    }

    /// An operation that may change `range` begins; what of it lies outside of the volume is ignored.
    /// Cheap: takes no memory where something went on of late.
    pub fn begin(&self, range: Range<u64>) -> Touch {
        let geometry = self.geometry();
        let inside = range.start.min(geometry.bytes())..range.end.min(geometry.bytes());
        self.0.thrift.borrow_mut().operates();
        self.0.touch(regions_of(geometry, &inside).unwrap_or_default())
    }

    /// A flush of the image is about to be submitted. What this gives is good for [`Self::clear`] when
    /// that flush has succeeded.
    #[must_use]
    pub fn flush_begins(&self) -> FlushStamp {
        self.0.activity.borrow_mut().flush_begins()
    }

    /// Whether nothing in the region has been in use since that flush began.
    #[must_use]
    pub fn is_quiet_since(&self, region: Region, flush: FlushStamp) -> bool {
        self.0.activity.borrow().is_quiet_since(region, flush)
    }

    /// Takes the marks of `regions` from the slots of `images`, in memory; they leave the disk some time
    /// later. Regions with an operation in flight, or touched since `flush` began, keep theirs; so do
    /// those the volume does not have, and images that have no slot are passed over. Gives the number
    /// of marks taken.
    ///
    /// The caller knows that *every* member in sync has flushed, successfully, all that was written
    /// there, and that `images` are theirs.
    pub fn clear(
        &self,
        images: &[Uuid],
        regions: impl IntoIterator<Item = Region>,
        flush: FlushStamp,
    ) -> u32 {
        let slots: Vec<Slot> = images.iter().filter_map(|image| self.0.slot_of(*image)).collect();
        let (mut rounds, activity) = (self.0.rounds.borrow_mut(), self.0.activity.borrow());
        let mut thrift = self.0.thrift.borrow_mut();
        let count = rounds.book.geometry().regions();
        let mut cleared = 0;
        for region in regions {
            if region.0 >= count || !activity.is_quiet_since(region, flush) {
                continue;
            }
            let marks = slots.iter().map(|s| u32::from(rounds.book.clear(*s, region))).sum::<u32>();
            if marks > 0 {
                thrift.taken(region);
            }
            cleared += marks;
        }
        cleared
    }

    /// Writes the pages from which marks were taken. They are durable some time later; nobody needs to
    /// wait for that.
    ///
    /// # Errors
    /// [`Error::Gone`] when the log is dead.
    pub async fn write_back(&self) -> Result<(), Error> {
        self.0.write_back().await
    }

    /// Time passes: to be called every few seconds.
    pub fn tick(&self) {
        self.0.activity.borrow_mut().tick();
        self.0.thrift.borrow_mut().tick();
    }

    /// At most `limit` regions that are marked for any of `images`, have nothing in flight, and were not
    /// touched for two ticks, those first that were left alone for longest. If more are marked than the hot
    /// limit, the quarter of them that was not touched for longest is included, however short that is.
    /// Fewer where marks that were taken of late had to be set again.
    #[must_use]
    pub fn sweepable(&self, images: &[Uuid], limit: usize) -> Vec<Region> {
        let slots: Vec<Slot> = images.iter().filter_map(|image| self.0.slot_of(*image)).collect();
        let (rounds, activity) = (self.0.rounds.borrow(), self.0.activity.borrow());
        let mut marked = 0;
        let mut idle: Vec<(u64, bool, Region)> = Vec::new();
        for region in rounds.book.marks().marked_in_any(&slots) {
            marked += 1;
            idle.extend(activity.idle(region).map(|(last, long)| (last, long, region)));
        }
        idle.sort_unstable();
        let crowded = marked > self.0.hot_limit.get() as usize;
        let recent = if crowded { marked.div_ceil(4) } else { 0 };
        let mut place = 0..;
        idle.retain(|(_, long, _)| place.next().is_some_and(|n| *long || n < recent));
        let limit = limit.min(self.0.thrift.borrow().allowance());
        idle.into_iter().take(limit).map(|(_, _, region)| region).collect()
    }

    /// How many regions may be marked before [`Self::sweepable`] gives recent ones: a quarter of all, and
    /// at least 4096, unless it was set.
    #[must_use]
    pub fn hot_limit(&self) -> u32 {
        self.0.hot_limit.get()
    }

    /// Sets [`Self::hot_limit`].
    pub fn set_hot_limit(&self, regions: u32) {
        self.0.hot_limit.set(regions);
    }

    /// The regions that are marked for `image`, in ascending order; none if it has no slot.
    #[must_use]
    pub fn marked(&self, image: Uuid) -> Vec<Region> {
        let rounds = self.0.rounds.borrow();
        let slot = self.0.slot_of(image);
        slot.into_iter().flat_map(|slot| rounds.book.marks().marked(slot)).collect()
    }

    /// How many regions are marked for `image`; `None` if it has no slot.
    #[must_use]
    pub fn marked_count(&self, image: Uuid) -> Option<u32> {
        Some(self.0.rounds.borrow().book.marks().count(self.0.slot_of(image)?))
    }

    /// Whether `region` is marked for `image`; no if that has no slot, or the volume no such region.
    #[must_use]
    pub fn is_marked(&self, image: Uuid, region: Region) -> bool {
        let rounds = self.0.rounds.borrow();
        let inside = region.0 < rounds.book.geometry().regions();
        self.0.slot_of(image).is_some_and(|s| inside && rounds.book.marks().is_set(s, region))
    }

    /// The images that have slots.
    #[must_use]
    pub fn images(&self) -> Vec<Uuid> {
        self.0.superblock.get().slots.iter().filter_map(|slot| slot.image).collect()
    }

    /// Whether it is certain that none of `images` lacks anything: all have slots without a mark, the
    /// log works, and what the image has adopted is known.
    #[must_use]
    pub fn is_clean(&self, images: &[Uuid]) -> bool {
        let works = self.0.rounds.borrow().life() != Life::Dead && self.adopted().is_some();
        works && images.iter().all(|image| self.marked_count(*image) == Some(0))
    }

    /// The marks for `image`, to be sent to it; `None` if it has no slot.
    #[must_use]
    pub fn export(&self, image: Uuid) -> Option<Bitmap> {
        let slot = self.0.slot_of(image)?;
        let rounds = self.0.rounds.borrow();
        let geometry = rounds.book.geometry();
        Some(Bitmap {
            volume_bytes: geometry.bytes(),
            region_shift: geometry.shift(),
            bits: rounds.book.marks().to_bits(slot),
        })
    }

    /// Adds marks that `image` keeps to those kept for it, durably. Its regions may have another size,
    /// and nothing about `theirs` is taken for granted.
    ///
    /// # Errors
    /// [`MergeError`]; unless it is [`MergeError::Gone`], nothing has changed.
    pub async fn merge(&self, image: Uuid, theirs: &Bitmap) -> Result<(), MergeError> {
        self.0.check_open()?;
        let slot = self.0.slot_of(image).ok_or(MergeError::Unknown(image))?;
        let geometry = Geometry::with_shift(theirs.volume_bytes, theirs.region_shift)?;
        let (found, wanted) = (theirs.bits.len(), geometry.bits_len());
        let theirs = Marks::of_bits(geometry, slot, &theirs.bits);
        let theirs = theirs.ok_or(MergeError::Length { found, wanted })?;
        let pages = self.0.rounds.borrow_mut().book.merge(slot, &theirs);
        self.0.persist(pages).await?;
        Ok(())
    }

    /// Ends the log in order: all pages are written, everything in the image is made durable, and the
    /// superblock says that the image was closed. Marks stay as they are. Afterwards the log takes
    /// none any more.
    ///
    /// # Errors
    /// [`CloseError`]
    pub async fn close(&self) -> Result<(), CloseError> {
        let work = tokio::task::spawn_local(Rc::clone(&self.0).close());
        work.await.unwrap_or(Err(CloseError::Gone))
    }
}

impl Inner {
    fn new(area: Rc<dyn LogArea>, book: Book, superblock: Superblock) -> Rc<Self> {
        let regions = book.geometry().regions();
        Rc::new(Self {
            area,
            rounds: RefCell::new(Rounds::new(book)),
            activity: RefCell::new(Activity::new(regions)),
            thrift: RefCell::new(Thrift::new(regions)),
            superblock: Cell::new(superblock),
            changing: tokio::sync::Mutex::default(),
            hot_limit: Cell::new((regions / 4).max(LEAST_HOT_LIMIT)),
        })
    }

    fn check_open(&self) -> Result<(), Error> {
        match self.rounds.borrow().life() {
            Life::Open => Ok(()),
            Life::Closed | Life::Dead => Err(Error::Gone),
        }
    }

    fn slot_of(&self, image: Uuid) -> Option<Slot> {
        let slots = self.superblock.get().slots;
        Slot::ALL.into_iter().find(|slot| slots[slot.index()].image == Some(image))
    }

    fn touch(self: &Rc<Self>, regions: Range<u32>) -> Touch {
        self.activity.borrow_mut().begin(regions.clone());
        Touch { log: Rc::clone(self), regions }
    }

    /// What a failed write means; says what it was.
    fn failed(&self, error: DiskError) -> Error {
        let image = self.area.path().display();
        tracing::error!(%image, %error, "the intent log cannot be written");
        Error::Gone
    }

    async fn close(self: Rc<Self>) -> Result<(), CloseError> {
        let _alone = self.changing.lock().await;
        self.check_open()?;
        let in_flight = self.activity.borrow().in_flight();
        if in_flight > 0 {
            return Err(CloseError::InUse(in_flight));
        }
        self.rounds.borrow_mut().close();
        self.write_back().await?;
        self.area.sync().await.inspect_err(|_| self.die())?;
        let superblock = self.superblock.get();
        self.replace(Superblock { opened: false, ..superblock }, 0).await?;
        Ok(())
    }
}

/// The regions of a range of bytes, by number. `None` if it leaves the volume.
fn regions_of(geometry: Geometry, range: &Range<u64>) -> Option<Range<u32>> {
    let len = range.end.checked_sub(range.start)?;
    geometry.regions_of(range.start, len).map(|regions| regions.0)
}

impl Drop for Touch {
    fn drop(&mut self) {
        self.log.activity.borrow_mut().end(self.regions.clone());
    }
}

impl fmt::Debug for Touch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Touch").field(&self.regions).finish()
    }
}

impl fmt::Debug for IntentLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let superblock = self.0.superblock.get();
        f.debug_struct("IntentLog").field("superblock", &superblock).finish_non_exhaustive()
    }
}
