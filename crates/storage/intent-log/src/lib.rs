//! The write-intent log of an image: a bitmap of the regions that may differ from the volume's
//! other images.
//!
//! A region is durably marked dirty before anything in it changes. Its dirty bit is cleared when
//! all images in sync hold the same durable data. After a crash only dirty regions are copied.
//!
//! * [`Geometry`]: the regions of a volume, and the positions of their bits.
//! * [`Superblock`]: header of the log, kept twice; [`choose_superblock`] selects the valid copy.
//! * [`Cell`]: the bits of 1280 regions in 512 bytes; [`parse_page`] parses eight of them.
//! * [`SlotBitmaps`]: all bits of a log in memory.
//! * [`IntentLog`]: the log in use.
//!
//! Only the last one does I/O, and parsing is total. The layout is `docs/format/intent.md`.

mod cell;
mod geometry;
mod runtime;
mod slot_bitmaps;
mod superblock;

pub use crate::geometry::{
    BitPosition, Geometry, LOG_END, LogGeometryError, MAX_CELLS, MAX_REGIONS, Region, Regions,
    SUPERBLOCK_OFFSETS,
};
pub use cell::{
    CELL_BYTES, CELLS_PER_PAGE, Cell, CellError, PAGE_BYTES, REGIONS_PER_CELL, page_to_bytes,
    parse_page,
};
pub use runtime::{
    AdoptError, AdoptedConfig, CloseError, ConfigAdoption, ExportedBitmap, FlushStamp,
    GenerationUpdate, IntentLog, LogDamage, LogError, LogOpenReport, MergeError, OtherImage,
    RegionGuard, read_superblock,
};
pub use slot_bitmaps::SlotBitmaps;
pub use superblock::{
    LogState, NoUsableSuperblock, SUPERBLOCK_BYTES, SlotEntry, Superblock, SuperblockError,
    choose_superblock,
};

/// Number of other images for which a log keeps dirty bits.
pub const SLOTS: usize = 3;

/// The dirty bits that are kept for one other image: 0 to 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u8);

impl Slot {
    /// All slots.
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

/// Random id of a log, drawn whenever a log is created: cells left by an earlier log have another
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogId(pub u64);
