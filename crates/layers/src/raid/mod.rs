//! RAID over the disks of a node ([RFD 0029](../../../../docs/rfd/0029-raid-without-a-write-hole.md)): levels 0, 1, 10, 5 and 6,
//! without a write hole.
//!
//! | module | subject |
//! |---|---|
//! | `geometry` | where blocks lie |
//! | `row` | how a row of a stripe is written |
//! | `band` | what is written of a stripe, cut into rows that are written alike |
//! | `sums` | the arithmetic of a row |
//! | `map` | where the stripes of an extent lie |
//! | `places` | a set of stripes |
//! | `batch` | what the log holds, as it lies on a member |
//! | `recover` | what is done for a row after a crash |
//!
//! These decide, and do nothing. What carries it out:
//!
//! | module | subject |
//! |---|---|
//! | `array` | the members of a pool on one core, and who of them is still there |
//! | `log` | the log of one of them |
//! | `marks` | copies that are being written |
//! | `stripe` | one stripe: its turns, what is read of it, what is made of the rest |
//! | `quiet` | keeps reads away from what is written again |
//! | `read`, `write`, `part`, `whole` | the operations of a volume |
//! | `rebuild` | fills what a column lacks |
//! | `open` | mends what a crash has left |

mod array;
mod band;
pub mod batch;
pub mod geometry;
mod log;
mod map;
mod marks;
mod mistake;
mod open;
mod part;
mod places;
mod quiet;
mod read;
mod rebuild;
pub mod recover;
pub mod row;
mod stripe;
mod sums;
mod whole;
mod write;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use block::{Blocks, Bufs, Ctx, Error, Info, Layer, Op, Run};

pub use array::{Array, Keeper, Member};
pub use log::RING_BLOCKS;
pub use map::{Map, Placed};
pub use mistake::Mistake;
pub use open::{Mended, OldRing, mend_rings};
pub use places::Places;
pub use rebuild::{Pace, Rebuilt};

use crate::units::UnitLocks;
use geometry::{ROW_BYTES, Shape};
use map::Placement;

/// Largest operation that carries data, in bytes.
const MAX_TRANSFER: u32 = 1 << 20;

/// A piece of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Number of the member in its array.
    pub member: u16,
    /// Where it begins on that, in rows of 4 KiB.
    pub at: u64,
}

/// What a pool gives to a volume at once: a column of each of so many members.
#[derive(Debug)]
pub struct Extent {
    number: u64,
    columns: Box<[Column]>,
    /// Columns that lack what these places should have.
    lacking: RefCell<Vec<(u16, Places)>>,
    /// Shared by all that this extent has been, with other columns.
    placement: Rc<Placement>,
}

impl Extent {
    /// The extent of this number in the pool, on as many columns as its shape has. Each has room for a strip of each of the
    /// shape's [places](Shape::places).
    #[must_use]
    pub fn new(number: u64, shape: Shape, columns: impl IntoIterator<Item = Column>) -> Self {
        let map = Map::new(shape.stripes(), shape.places());
        let (columns, placement) = (columns.into_iter().collect(), Rc::new(Placement::new(map)));
        Self { number, columns, lacking: RefCell::default(), placement }
    }

    /// The same with its stripes where `map` says.
    #[must_use]
    pub fn mapped(self, map: Map) -> Self {
        Self { placement: Rc::new(Placement::new(map)), ..self }
    }

    /// The same, but what its column number `column` should hold at these places is not there: it is new, or comes back.
    #[must_use]
    pub fn lacking(self, column: u16, places: Places) -> Self {
        self.lacking.borrow_mut().push((column, places));
        self
    }

    /// The same with one column elsewhere, where nothing is yet.
    fn moved_to(&self, column: u16, to: Column, shape: Shape) -> Self {
        let mut columns = self.columns.clone();
        columns.get_mut(usize::from(column)).into_iter().for_each(|place| *place = to);
        let (lacking, placement) = (self.lacking.clone(), Rc::clone(&self.placement));
        lacking.borrow_mut().retain(|(lacks, _)| *lacks != column);
        let moved = Self { number: self.number, columns, lacking, placement };
        moved.lacking(column, Places::all(shape.places()))
    }

    /// Its number in the pool.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Its columns.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn lacks(&self, column: u16, place: u32) -> bool {
        let lacking = self.lacking.borrow();
        !lacking.is_empty() && lacking.iter().any(|(c, places)| *c == column && places.has(place))
    }

    fn has_now(&self, place: u32) {
        let mut lacking = self.lacking.borrow_mut();
        lacking.iter_mut().for_each(|(_, places)| places.remove(place));
        lacking.retain(|(_, places)| !places.is_empty());
    }

    /// The first stripe from `from` on of whose place some column lacks what it should have.
    fn next_lacking(&self, from: u32) -> Option<u32> {
        let lacking = self.lacking.borrow();
        let lacks = |place| lacking.iter().any(|(_, places)| places.has(place));
        let mut stripes = (from..).map_while(|n| Some((n, self.placement.place_of(n)?)));
        stripes.find(|(_, place)| lacks(*place)).map(|(stripe, _)| stripe)
    }

    /// No stripe lies any more where something is lacking.
    fn lacks_nothing(&self) {
        self.lacking.borrow_mut().clear();
    }
}

/// What a volume of a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How its extents are laid out.
    pub shape: Shape,
    /// Size of its blocks in bytes: 512 or 4096.
    pub block_size: u32,
}

/// A volume that lies on the extents of a pool. See the [module](self).
pub struct Raid {
    array: Rc<Array>,
    shape: Shape,
    block_size: u32,
    extents: RefCell<Vec<Rc<Extent>>>,
    /// Whose turn it is to write a stripe, or to read more than data of it.
    turns: UnitLocks,
    /// Reads of data, which wait for no turn.
    reads: quiet::Reads,
    /// What is to be written with the next turn.
    waiting: write::Waiting,
    submitted: Cell<u64>,
}

impl Raid {
    /// A volume on these extents, one at least, which lie on members of `array`.
    #[must_use]
    pub fn new(array: Rc<Array>, settings: Settings, extents: Vec<Extent>) -> Self {
        let Settings { shape, block_size } = settings;
        let extents = RefCell::new(extents.into_iter().map(Rc::new).collect());
        Self {
            array,
            shape,
            block_size,
            extents,
            turns: UnitLocks::default(),
            reads: quiet::Reads::default(),
            waiting: write::Waiting::default(),
            submitted: Cell::new(0),
        }
    }

    /// From now on column number `column` of the extent at `index` lies elsewhere, and lacks all that it should have until that is
    /// [rebuilt](Self::rebuild). Where it was, its member has to be out.
    pub fn replace(&self, index: u32, column: u16, to: Column) {
        let mut extents = self.extents.borrow_mut();
        if let Some(place) = extents.get_mut(index as usize) {
            *place = Rc::new(place.moved_to(column, to, self.shape));
        }
    }

    /// Adds an extent at the end.
    pub fn grow(&self, extent: Extent) {
        self.extents.borrow_mut().push(Rc::new(extent));
    }

    /// How many operations clients have submitted.
    fn operations(&self) -> u64 {
        self.submitted.get()
    }

    fn extent(&self, index: u32) -> Result<Rc<Extent>, Error> {
        self.extents.borrow().get(index as usize).cloned().ok_or(Error::OutOfRange)
    }

    /// `range` in bytes of the extents.
    fn bytes_of(&self, range: Blocks) -> std::ops::Range<u64> {
        let block = u64::from(self.block_size);
        let start = range.at.0 * block;
        start..start + range.count * block
    }
}

impl Layer for Raid {
    fn name(&self) -> &'static str {
        "raid"
    }

    fn info(&self) -> Info {
        let block = self.block_size;
        let extents = self.extents.borrow().len() as u64;
        let rows = self.shape.rows() * extents;
        Info {
            block_size: block,
            blocks: rows * u64::from(ROW_BYTES / block),
            // The image that lies on it has its own.
            aside_blocks: 0,
            physical_block_size: ROW_BYTES,
            max_transfer_blocks: MAX_TRANSFER / block,
            unmap_granularity_blocks: 0,
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
            Op::Zero { fua, .. } => self.zero(bytes, fua, range.at, &ctx).await?,
            Op::Unmap { .. } => self.zero(bytes, false, range.at, &ctx).await?,
            Op::Map { blocks, .. } => {
                return Ok(Run { blocks, mapped: true }.into_bufs(&ctx));
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
mod tests;
