//! The write-intent log of an image: bits that say which regions may differ from the volume's
//! other images.
//!
//! A region is marked, durably, before anything in it changes, and the mark goes when all images in
//! sync hold it equal and durable. After a crash only marked regions are copied.
//!
//! * [`Geometry`]: how a volume is cut into regions, and where their bits lie.
//! * [`Superblock`]: whose log it is, kept in two copies; [`choose`] says which one counts.
//! * [`Cell`]: the bits of 1280 regions in 512 bytes; [`parse_page`] reads eight of them.
//! * [`Marks`]: all bits of a log in memory.
//! * [`IntentLog`]: the log at work.
//!
//! Nothing but the last does I/O, and what parses is total. The layout is `docs/format/intent.md`.

mod cell;
mod geometry;
mod marks;
mod superblock;
mod work;

pub use crate::geometry::{
    BadGeometry, Geometry, LOG_END, MAX_CELLS, MAX_REGIONS, Place, Region, Regions,
    SUPERBLOCK_OFFSETS,
};
pub use cell::{
    BadCell, CELL_BYTES, CELLS_PER_PAGE, Cell, PAGE_BYTES, REGIONS_PER_CELL, page_to_bytes,
    parse_page,
};
pub use marks::Marks;
pub use superblock::{
    BadSuperblock, BadSuperblocks, SUPERBLOCK_BYTES, SlotEntry, State, Superblock, choose,
};
pub use work::{
    AdoptError, Adopted, Adoption, Advance, Bitmap, CloseError, Damage, FlushStamp, Found,
    IntentLog, LogError, MergeError, Other, Touch, read_superblock,
};

/// How many other images a log keeps marks for.
pub const SLOTS: usize = 3;

/// The marks that are kept for one other image: 0 to 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u8);

impl Slot {
    /// All of them.
    pub const ALL: [Self; SLOTS] = [Self(0), Self(1), Self(2)];

    /// Slot number `index`.
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        Self::ALL.get(index).copied()
    }

    /// Its number, below [`SLOTS`].
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The name of one making of a log, random: cells that an earlier one left have another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogId(pub u64);
