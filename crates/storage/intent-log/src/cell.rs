//! Cells: the bits of 1280 regions for all slots in the 512 bytes that no disk tears, and pages of
//! eight of them.

use wire::seal::{is_sealed, seal};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{LogId, SLOTS};

/// Length of a cell in bytes.
pub const CELL_BYTES: usize = 512;

/// Length in bytes of a page, in which cells are read and written.
pub const PAGE_BYTES: usize = 4096;

/// How many cells a page holds.
pub const CELLS_PER_PAGE: usize = PAGE_BYTES / CELL_BYTES;

/// How many regions a cell holds the bits of.
pub const REGIONS_PER_CELL: u32 = 1280;

/// How many words of 64 bits these are, for one slot.
pub(super) const WORDS_PER_CELL: usize = 20;
const _: () = assert!(WORDS_PER_CELL * 64 == REGIONS_PER_CELL as usize);

const MAGIC: [u8; 4] = *b"WRIC";

/// The fields in their places.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Stored {
    magic: [u8; 4],
    checksum: U32,
    log: U64,
    index: U32,
    reserved: U32,
    generation: U64,
    slots: [[U64; WORDS_PER_CELL]; SLOTS],
}

const _: () = assert!(size_of::<Stored>() == CELL_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(Stored, checksum);

/// What a cell says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The log that it is part of.
    pub log: LogId,
    /// Which of the log's cells it is.
    pub index: u32,
    /// Counts the writes of this cell.
    pub generation: u64,
    /// For each slot, bit `n % 64` of word `n / 64`: whether region `1280 * index + n` is marked.
    pub slots: [[u64; WORDS_PER_CELL]; SLOTS],
}

/// Why bytes are not the cell that belongs there. All the regions of such a cell count as marked in
/// all slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCell {
    /// The disk does not give them. No parser says so; who reads the page does.
    #[error("an unreadable cell")]
    Unreadable,
    /// They do not begin like one.
    #[error("no cell")]
    NoMagic,
    /// They begin like one and the checksum does not fit.
    #[error("a damaged cell")]
    Damaged,
    /// A cell of an earlier making of the log, or of another image's.
    #[error("a cell of another log ({0:#018x})")]
    Log(u64),
    /// A cell that strayed.
    #[error("cell {0} in the place of another")]
    Index(u32),
    /// The checksum fits and a field makes no sense.
    #[error("a cell whose {0} makes no sense")]
    Field(&'static str),
}

impl Cell {
    /// The cell's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; CELL_BYTES] {
        let fields = Stored {
            magic: MAGIC,
            checksum: U32::ZERO,
            log: U64::new(self.log.0),
            index: U32::new(self.index),
            reserved: U32::ZERO,
            generation: U64::new(self.generation),
            slots: self.slots.map(|slot| slot.map(U64::new)),
        };
        let mut out: [u8; CELL_BYTES] = zerocopy::transmute!(fields);
        seal(&mut out, CHECKSUM_AT);
        out
    }

    /// Reads the place of cell number `index` of `log`.
    ///
    /// # Errors
    /// [`BadCell`]; whatever the bytes are.
    pub fn parse(bytes: &[u8; CELL_BYTES], log: LogId, index: u32) -> Result<Self, BadCell> {
        let fields: Stored = zerocopy::transmute!(*bytes);
        if fields.magic != MAGIC {
            return Err(BadCell::NoMagic);
        }
        if !is_sealed(bytes, CHECKSUM_AT) {
            return Err(BadCell::Damaged);
        }
        if fields.log.get() != log.0 {
            return Err(BadCell::Log(fields.log.get()));
        }
        if fields.index.get() != index {
            return Err(BadCell::Index(fields.index.get()));
        }
        if fields.reserved.get() != 0 {
            return Err(BadCell::Field("reserved part"));
        }
        if fields.generation.get() == 0 {
            return Err(BadCell::Field("generation"));
        }
        Ok(Self {
            log,
            index,
            generation: fields.generation.get(),
            slots: fields.slots.map(|slot| slot.map(U64::get)),
        })
    }
}

/// Reads the eight places of page number `page` of `log`, each for itself: a torn page has whole
/// cells of both writes. What stands in places behind the log's last cell means nothing.
pub fn parse_page(
    bytes: &[u8; PAGE_BYTES],
    log: LogId,
    page: u32,
) -> [Result<Cell, BadCell>; CELLS_PER_PAGE] {
    let cells: [[u8; CELL_BYTES]; CELLS_PER_PAGE] = zerocopy::transmute!(*bytes);
    let first = u64::from(page) * CELLS_PER_PAGE as u64;
    std::array::from_fn(|n| match u32::try_from(first + n as u64) {
        Ok(index) => Cell::parse(&cells[n], log, index),
        // No log has so many pages, and no cell such a number.
        Err(_) => Err(BadCell::NoMagic),
    })
}

/// The bytes of a page with `cells`, which are the first ones of it; places behind the log's last
/// cell are zeroes.
///
/// # Panics
/// If there are more than eight.
#[must_use]
pub fn page_to_bytes(cells: &[Cell]) -> [u8; PAGE_BYTES] {
    assert!(cells.len() <= CELLS_PER_PAGE, "a page holds eight cells");
    let mut out = [0; PAGE_BYTES];
    for (place, cell) in out.chunks_exact_mut(CELL_BYTES).zip(cells) {
        place.copy_from_slice(&cell.to_bytes());
    }
    out
}

#[cfg(test)]
mod tests;
