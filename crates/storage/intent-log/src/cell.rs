//! Cells: the bits of 1280 regions for all slots, in 512 bytes, which no disk tears; and pages of
//! eight cells.

use wire::embedded_checksum::{verify_checksum, write_checksum};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{LogId, SLOTS};

/// Length of a cell in bytes.
pub const CELL_BYTES: usize = 512;

/// Length in bytes of a page, the unit in which cells are read and written.
pub const PAGE_BYTES: usize = 4096;

/// Cells of a page.
pub const CELLS_PER_PAGE: usize = PAGE_BYTES / CELL_BYTES;

/// Regions whose bits a cell holds.
pub const REGIONS_PER_CELL: u32 = 1280;

/// Words of 64 bits for these regions, for one slot.
pub(super) const WORDS_PER_CELL: usize = 20;
const _: () = assert!(WORDS_PER_CELL * 64 == REGIONS_PER_CELL as usize);

const MAGIC: [u8; 4] = *b"WRIC";

/// The stored fields.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredCell {
    magic: [u8; 4],
    checksum: U32,
    log: U64,
    index: U32,
    reserved: U32,
    generation: U64,
    slots: [[U64; WORDS_PER_CELL]; SLOTS],
}

const _: () = assert!(size_of::<StoredCell>() == CELL_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(StoredCell, checksum);

/// The contents of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The log that it belongs to.
    pub log_id: LogId,
    /// Its number in the log.
    pub index: u32,
    /// Number of writes of this cell.
    pub generation: u64,
    /// For each slot, bit `n % 64` of word `n / 64`: whether region `1280 * index + n` is dirty.
    pub slots: [[u64; WORDS_PER_CELL]; SLOTS],
}

/// Why bytes are not the expected cell. All regions of such a cell count as dirty in all slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CellError {
    /// The disk does not return them. Reported by the reader, not by the parser.
    #[error("an unreadable cell")]
    Unreadable,
    /// They lack the magic.
    #[error("no cell")]
    NoMagic,
    /// The checksum does not match.
    #[error("a damaged cell")]
    Damaged,
    /// A cell of an earlier log, or of another image's.
    #[error("a cell of another log ({0:#018x})")]
    OtherLog(u64),
    /// A misplaced cell.
    #[error("cell {0} at the position of another cell")]
    WrongIndex(u32),
    /// The checksum matches, but a field is invalid.
    #[error("a cell with an invalid {0}")]
    InvalidField(&'static str),
}

impl Cell {
    /// The cell's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; CELL_BYTES] {
        let fields = StoredCell {
            magic: MAGIC,
            checksum: U32::ZERO,
            log: U64::new(self.log_id.0),
            index: U32::new(self.index),
            reserved: U32::ZERO,
            generation: U64::new(self.generation),
            slots: self.slots.map(|slot| slot.map(U64::new)),
        };
        let mut out: [u8; CELL_BYTES] = zerocopy::transmute!(fields);
        write_checksum(&mut out, CHECKSUM_AT);
        out
    }

    /// Parses cell number `index` of `log`.
    ///
    /// # Errors
    /// [`CellError`]; whatever the bytes are.
    pub fn parse(bytes: &[u8; CELL_BYTES], log: LogId, index: u32) -> Result<Self, CellError> {
        let fields: StoredCell = zerocopy::transmute!(*bytes);
        if fields.magic != MAGIC {
            return Err(CellError::NoMagic);
        }
        if !verify_checksum(bytes, CHECKSUM_AT) {
            return Err(CellError::Damaged);
        }
        if fields.log.get() != log.0 {
            return Err(CellError::OtherLog(fields.log.get()));
        }
        if fields.index.get() != index {
            return Err(CellError::WrongIndex(fields.index.get()));
        }
        if fields.reserved.get() != 0 {
            return Err(CellError::InvalidField("reserved part"));
        }
        if fields.generation.get() == 0 {
            return Err(CellError::InvalidField("generation"));
        }
        Ok(Self {
            log_id: log,
            index,
            generation: fields.generation.get(),
            slots: fields.slots.map(|slot| slot.map(U64::get)),
        })
    }
}

/// Parses the eight cells of page number `page` of `log` independently: a torn page has intact
/// cells of both writes. Results after the log's last cell are meaningless.
pub fn parse_page(
    bytes: &[u8; PAGE_BYTES],
    log: LogId,
    page: u32,
) -> [Result<Cell, CellError>; CELLS_PER_PAGE] {
    let cells: [[u8; CELL_BYTES]; CELLS_PER_PAGE] = zerocopy::transmute!(*bytes);
    let first = u64::from(page) * CELLS_PER_PAGE as u64;
    std::array::from_fn(|n| match u32::try_from(first + n as u64) {
        Ok(index) => Cell::parse(&cells[n], log, index),
        // No log has so many pages, nor cells with such a number.
        Err(_) => Err(CellError::NoMagic),
    })
}

/// Serializes a page that begins with `cells`; the space after the log's last cell is zeroed.
///
/// # Panics
/// If there are more than eight.
#[must_use]
pub fn page_to_bytes(cells: &[Cell]) -> [u8; PAGE_BYTES] {
    assert!(cells.len() <= CELLS_PER_PAGE, "a page holds eight cells");
    let mut out = [0; PAGE_BYTES];
    for (entry, cell) in out.chunks_exact_mut(CELL_BYTES).zip(cells) {
        entry.copy_from_slice(&cell.to_bytes());
    }
    out
}

#[cfg(test)]
mod tests;
