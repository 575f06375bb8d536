//! RAID over the disks of a node ([RFD 0029](../../../../docs/rfd/0029-raid-without-a-write-hole.md)): levels 0, 1, 10, 5 and 6,
//! without a write hole.
//!
//! | module | subject |
//! |---|---|
//! | `geometry` | where blocks lie |
//! | `row` | how a row of a stripe is written |
//! | `band` | what is written of a stripe, cut into rows that are written alike |
//! | `sums` | the arithmetic of a row |
//! | `map`, `stored_map` | where the stripes of an extent lie, and how that lies on a member |
//! | `places` | a set of stripes |
//! | `lost` | rows that are lost until they are written again |
//! | `at_once` | runs several operations at once |
//! | `batch` | what the log holds, as it lies on a member |
//! | `recover` | what is done for a row after a crash |
//!
//! These decide, and do nothing. What carries it out:
//!
//! | module | subject |
//! |---|---|
//! | `array` | the members of a pool on one core, and who of them is still there |
//! | `extent` | a part of a volume: its columns, and what they lack |
//! | `log` | the log of one of them |
//! | `marks` | copies that are being written |
//! | `stripe` | one stripe: its turns, what is read of it, what is made of the rest |
//! | `quiet` | keeps reads away from what is written again |
//! | `watch` | how members answer: who lags behind the others, and who is given up |
//! | `read`, `write`, `part`, `whole` | the operations of a volume |
//! | `around` | reads that go around a member that lags |
//! | `rebuild`, `relocate` | fill what a column lacks, and move one that lacks nothing |
//! | `scrub` | reads and compares all of it |
//! | `unreadable` | gives up rows that no disk gives back |
//! | `open` | mends what a crash has left |

mod around;
mod array;
mod at_once;
mod band;
pub mod batch;
mod extent;
mod log;
mod lost;
mod map;
mod marks;
mod mistake;
mod open;
mod part;
mod quiet;
mod read;
mod rebuild;
pub mod recover;
mod relocate;
pub mod row;
mod scrub;
pub mod stored_map;
mod stripe;
mod sums;
mod unreadable;
mod watch;
mod whole;
mod write;

use geometry::Column;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;

use block::{Blocks, Bufs, Ctx, Error, Info, Layer, Lba, Op, Run};
use futures_util::future::join3;

pub use array::{Answered, Array, Damage, Keeper, Kept, Member, StillBusy};
pub use extent::Extent;
pub use log::RING_BLOCKS;
pub use map::{Map, Placed};
pub use mistake::Mistake;
pub use open::{Entries, Mended, OldRing};
pub use rebuild::{Pace, Rebuilt};
pub use unreadable::FAILING;
pub use watch::Errors;
pub use whole::by_runs;

use at_once::all_of;
use block::{UnitLock, UnitLocks};
use geometry::{ROW_BYTES, Shape};

/// Largest operation that carries data, in bytes.
const MAX_TRANSFER: u32 = 1 << 20;

/// Extents that one operation gives back at once.
const FREES_AT_ONCE: usize = 32;

/// What a volume of a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How its extents are laid out.
    pub shape: Shape,
    /// Size of its blocks in bytes: 512 or 4096.
    pub block_size: u32,
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether it keeps its extents, whatever is unmapped.
    pub thick: bool,
}

/// Whoever gives extents to a volume.
pub trait Room: fmt::Debug {
    /// The extent of this index, which there was none of: all of it is zeroes. Its place in the pool is durable.
    ///
    /// # Errors
    /// [`Error::NoSpace`], and whatever ends the pool.
    fn extent(&self, index: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>>;

    /// Takes the extent of this index back, which nobody uses any more. That is durable when it ends.
    fn free(&self, index: u32) -> Kept<'_>;

    /// Makes durable that rows of the data of an extent are lost: they read as errors from then on.
    ///
    /// # Errors
    /// That there are too many of them, and whatever ends the pool.
    fn lose(&self, index: u32, rows: Range<u32>) -> Kept<'_>;

    /// Makes durable that rows that were lost, or not repaired, have been written again.
    ///
    /// # Errors
    /// Those of [`Self::lose`].
    fn regain(&self, index: u32, rows: Range<u32>) -> Kept<'_>;

    /// Makes durable that rows of the data of an extent could not be repaired. They are read as before.
    ///
    /// # Errors
    /// Those of [`Self::lose`].
    fn not_repaired(&self, index: u32, rows: Range<u32>) -> Kept<'_>;
}

/// A volume that lies on the extents of a pool. See the [module](self).
pub struct Raid {
    array: Rc<Array>,
    room: Rc<dyn Room>,
    shape: Shape,
    block_size: u32,
    bytes: Cell<u64>,
    thick: bool,
    /// By index; where there is none it reads as zeroes.
    extents: RefCell<Vec<Option<Rc<Extent>>>>,
    /// Whoever asks for an extent, or gives it back, by index.
    allocating: UnitLocks,
    /// Whose turn it is to write a stripe, or to read more than data of it.
    turns: UnitLocks,
    /// Reads of data, which wait for no turn.
    reads: quiet::Reads,
    /// What is to be written with the next turn.
    waiting: write::Waiting,
    submitted: Cell<u64>,
    /// Whoever fills, moves or gives back an extent, by index.
    tending: UnitLocks,
    /// Whether nothing is filled, moved or compared any more.
    stops: Cell<bool>,
}

/// An extent that nobody else fills, moves or gives back meanwhile.
#[derive(Debug)]
pub struct Tending<'a> {
    _lock: UnitLock<'a>,
}

impl Raid {
    /// A volume on these extents, by index, which lie on members of `array`. It gets more from `room`.
    #[must_use]
    pub fn new(
        array: Rc<Array>,
        settings: Settings,
        extents: impl IntoIterator<Item = (u32, Extent)>,
        room: Rc<dyn Room>,
    ) -> Self {
        let Settings { shape, block_size, bytes, thick } = settings;
        let raid = Self {
            array,
            room,
            shape,
            block_size,
            bytes: Cell::new(bytes),
            thick,
            extents: RefCell::default(),
            allocating: UnitLocks::default(),
            turns: UnitLocks::default(),
            reads: quiet::Reads::default(),
            waiting: write::Waiting::default(),
            submitted: Cell::new(0),
            tending: UnitLocks::default(),
            stops: Cell::new(false),
        };
        extents.into_iter().for_each(|(index, extent)| raid.put(index, extent));
        raid
    }

    fn put(&self, index: u32, extent: Extent) {
        let mut extents = self.extents.borrow_mut();
        let count = extents.len().max(index as usize + 1);
        extents.resize_with(count, || None);
        extents[index as usize] = Some(Rc::new(extent));
    }

    /// From now on column number `column` of the extent at `index` lies elsewhere, and lacks all that it should have until that is
    /// [rebuilt](Self::rebuild). Where it was, its member has to be out.
    pub fn replace(&self, index: u32, column: u16, to: Column) {
        let mut extents = self.extents.borrow_mut();
        if let Some(Some(place)) = extents.get_mut(index as usize) {
            self.array.takes(&to);
            *place = Rc::new(place.moved_to(column, to));
            self.array.has_moved(place);
        }
    }

    /// Makes it so many bytes large, no less than before.
    pub fn grow(&self, bytes: u64) {
        self.bytes.set(self.bytes.get().max(bytes));
    }

    /// Whoever fills, moves or compares something ends it with the stripe that he is at. Clients go on.
    pub fn stop_tending(&self) {
        self.stops.set(true);
    }

    /// Takes [`Self::stop_tending`] back: the volume stays in use here.
    pub fn resume_maintenance(&self) {
        self.stops.set(false);
    }

    /// Whether [`Self::stop_tending`] was said.
    #[must_use]
    pub fn stops(&self) -> bool {
        self.stops.get()
    }

    /// Waits until nobody fills, moves or gives back the extent at `index`, and keeps others from it: what was found out of an
    /// extent may be said of it as long as this lasts.
    pub async fn tend(&self, index: u32) -> Tending<'_> {
        Tending { _lock: self.tending.lock(index.into()).await }
    }

    /// How many operations clients have submitted.
    fn operations(&self) -> u64 {
        self.submitted.get()
    }

    /// Bytes of data of an extent.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.shape.rows() * u64::from(ROW_BYTES)
    }

    /// The extent at `index`, if there is one.
    #[must_use]
    pub fn extent(&self, index: u32) -> Option<Rc<Extent>> {
        self.extents.borrow().get(index as usize).cloned().flatten()
    }

    /// The indices of all extents.
    #[must_use]
    pub fn indices(&self) -> Vec<u32> {
        let extents = self.extents.borrow();
        let there = (0..).zip(&*extents).filter(|(_, extent)| extent.is_some());
        there.map(|(index, _)| index).collect()
    }

    /// Makes sure that there is an extent at `index`.
    async fn ensure(&self, index: u32) -> Result<(), Error> {
        if self.extent(index).is_some() {
            return Ok(());
        }
        let _alone = self.allocating.lock(index.into()).await;
        if self.extent(index).is_none() {
            let extent = self.room.extent(index).await?;
            extent.columns.iter().for_each(|column| self.array.takes(column));
            self.put(index, extent);
        }
        Ok(())
    }

    /// Gives the extent at `index` back: it reads as zeroes from now on. Clients do nothing there meanwhile.
    async fn free(&self, index: u32) -> Result<(), Error> {
        let _alone = self.allocating.lock(index.into()).await;
        let Some(extent) = self.extent(index) else { return Ok(()) };
        self.extents.borrow_mut()[index as usize] = None;
        // Whoever tends it writes and tells of where its columns are until he has ended.
        let _tending = self.tend(index).await;
        // Whoever fills it, or compares it, has the turn of a stripe, and finds none with the next.
        for stripe in 0..self.shape.stripes() {
            drop(self.turn(index, stripe).await);
        }
        self.array.let_go(&extent).await?;
        self.room.free(index).await
    }

    /// `range` in bytes of the extents.
    fn bytes_of(&self, range: Blocks) -> Range<u64> {
        let block = u64::from(self.block_size);
        range.at.0 * block..(range.at.0 + range.count) * block
    }

    /// Whole extents are given back; what is left is made zero. All of it at once, so that it shares flushes, batches of the logs
    /// and versions of the pool.
    async fn unmap(&self, bytes: Range<u64>, fua: bool, lba: Lba, ctx: &Ctx) -> Result<(), Error> {
        let each = self.extent_bytes();
        let (first, last) = (bytes.start.div_ceil(each), bytes.end / each);
        if self.thick || first >= last {
            return self.zero(bytes, fua, lba, ctx).await;
        }
        let head = self.zero(bytes.start..first * each, fua, lba, ctx);
        let tail = self.zero(last * each..bytes.end, fua, lba, ctx);
        let frees = (first..last).filter_map(|index| u32::try_from(index).ok());
        let frees = all_of(frees.map(|index| self.free(index)), FREES_AT_ONCE);
        let (head, tail, frees) = join3(head, tail, frees).await;
        head.and(tail).and(frees)
    }

    /// Whether there is an extent at the beginning of these bytes, and for how many of them that stays so.
    fn run(&self, bytes: &Range<u64>) -> (u64, bool) {
        let each = self.extent_bytes();
        let is = |index: u64| u32::try_from(index).is_ok_and(|index| self.extent(index).is_some());
        let first = bytes.start / each;
        let mapped = is(first);
        let end = (first + 1..).find(|index| is(*index) != mapped || index * each >= bytes.end);
        let end = end.map_or(bytes.end, |index| (index * each).min(bytes.end));
        (end - bytes.start, mapped)
    }
}

impl Layer for Raid {
    fn name(&self) -> &'static str {
        "raid"
    }

    fn info(&self) -> Info {
        let block = self.block_size;
        let extent = u32::try_from(self.extent_bytes() / u64::from(block)).unwrap_or(0);
        Info {
            block_size: block,
            blocks: self.bytes.get() / u64::from(block),
            aside_blocks: 0,
            physical_block_size: ROW_BYTES,
            max_transfer_blocks: MAX_TRANSFER / block,
            unmap_granularity_blocks: if self.thick { 0 } else { extent },
            unmap_zeroes: true,
            volatile_cache: self.array.is_volatile(),
            native_fua: true,
            read_only: false,
            // A read that begins and ends within rows.
            overhead: if block < ROW_BYTES { ROW_BYTES } else { 0 },
        }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let Some(range) = op.range(self.block_size) else {
            return self.array.flush().await.map(|()| Bufs::new());
        };
        self.submitted.set(self.submitted.get() + 1);
        let bytes = self.bytes_of(range);
        match op {
            Op::Read { .. } => return self.read(bytes, range.at, &ctx).await,
            Op::Write { data, fua, .. } => self.write(bytes.start, data, fua, range.at).await?,
            // What is rare is in a box, so that the future of a read stays small.
            Op::Zero { unmap: false, fua, .. } => {
                Box::pin(self.zero(bytes, fua, range.at, &ctx)).await?;
            }
            Op::Zero { fua, .. } => Box::pin(self.unmap(bytes, fua, range.at, &ctx)).await?,
            Op::Unmap { .. } => Box::pin(self.unmap(bytes, false, range.at, &ctx)).await?,
            Op::Map { .. } => {
                let (bytes, mapped) = self.run(&bytes);
                let blocks = bytes / u64::from(self.block_size);
                let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
                return Ok(Run { blocks, mapped }.into_bufs(&ctx));
            }
            Op::Flush => {}
        }
        Ok(Bufs::new())
    }
}

impl fmt::Debug for Raid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Raid").field("shape", &self.shape).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests;
