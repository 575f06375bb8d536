//! The regions of a volume, and where in the image their bits lie.

use std::ops::Range;

use disk::{LOG_AREA, MAX_BYTES};

use super::cell::{CELLS_PER_PAGE, PAGE_BYTES, REGIONS_PER_CELL};

/// Largest number of regions of a volume.
pub const MAX_REGIONS: u32 = 1 << 20;

/// Largest number of cells.
pub const MAX_CELLS: u32 = 824;

/// The two copies of the superblock, in bytes from the start of the image.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [516 << 10, 520 << 10];

/// Page 0, in bytes from the start of the image.
const PAGES_OFFSET: u64 = 524 << 10;

/// End of the pages, in bytes from the start of the image. An image whose data begins before it has
/// no space for a log.
pub const LOG_END: u64 =
    PAGES_OFFSET + MAX_CELLS as u64 / CELLS_PER_PAGE as u64 * PAGE_BYTES as u64;
const _: () = assert!(LOG_END == LOG_AREA.end && SUPERBLOCK_OFFSETS[0] == LOG_AREA.start);
const _: () = assert!(MAX_REGIONS.div_ceil(REGIONS_PER_CELL) <= MAX_CELLS);

/// The smallest and the largest region: 64 KiB and 256 MiB, as powers of two.
pub(super) const REGION_SHIFTS: std::ops::RangeInclusive<u32> = 16..=28;
const _: () = assert!(MAX_BYTES >> *REGION_SHIFTS.end() == MAX_REGIONS as u64);

/// A region of a volume, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region(pub u32);

/// Consecutive regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regions(pub(super) Range<u32>);

impl Iterator for Regions {
    type Item = Region;

    fn next(&mut self) -> Option<Region> {
        self.0.next().map(Region)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for Regions {}

/// The position of a region's bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitPosition {
    /// The cell.
    pub cell: u32,
    /// The bit in each of the cell's slots.
    pub bit: u32,
}

/// Why there can be no such log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogGeometryError {
    /// No volume is empty or larger than 256 TiB.
    #[error("no volume has {0} bytes")]
    Size(u64),
    /// The regions are smaller than 64 KiB, larger than 256 MiB, or too many for the volume.
    #[error("regions of 2^{0} bytes do not suit the volume")]
    Shift(u32),
}

/// The regions of one volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    bytes: u64,
    shift: u32,
    regions: u32,
}

impl Geometry {
    /// The geometry of a new log for a volume of `bytes` bytes: with the smallest regions that are
    /// not too many.
    ///
    /// # Errors
    /// [`LogGeometryError::Size`].
    pub fn new(bytes: u64) -> Result<Self, LogGeometryError> {
        let finest = REGION_SHIFTS.map(|shift| Self::with_shift(bytes, shift)).find(Result::is_ok);
        finest.unwrap_or(Err(LogGeometryError::Size(bytes)))
    }

    /// The geometry of a log with regions of 2^`shift` bytes, for a volume of `bytes` bytes. The
    /// regions may be larger than those of a new log, as those of a volume that is about to grow
    /// are.
    ///
    /// # Errors
    /// [`LogGeometryError`]
    pub fn with_shift(bytes: u64, shift: u32) -> Result<Self, LogGeometryError> {
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(LogGeometryError::Size(bytes));
        }
        if !REGION_SHIFTS.contains(&shift) {
            return Err(LogGeometryError::Shift(shift));
        }
        match u32::try_from(bytes.div_ceil(1 << shift)) {
            Ok(regions) if regions <= MAX_REGIONS => Ok(Self { bytes, shift, regions }),
            _ => Err(LogGeometryError::Shift(shift)),
        }
    }

    /// Size of the volume in bytes.
    #[must_use]
    pub fn volume_bytes(self) -> u64 {
        self.bytes
    }

    /// Size of a region, as a power of two.
    #[must_use]
    pub fn region_shift(self) -> u32 {
        self.shift
    }

    /// Size of a region in bytes; the volume's last one may be shorter.
    #[must_use]
    pub fn region_bytes(self) -> u64 {
        1 << self.shift
    }

    /// Number of regions, at least one.
    #[must_use]
    pub fn region_count(self) -> u32 {
        self.regions
    }

    /// Number of bytes with one bit for each region.
    #[must_use]
    pub fn bitmap_bytes(self) -> usize {
        self.regions.div_ceil(8) as usize
    }

    /// Number of cells with their bits.
    #[must_use]
    pub fn cell_count(self) -> u32 {
        self.regions.div_ceil(REGIONS_PER_CELL)
    }

    /// Number of pages with the cells.
    #[must_use]
    pub fn page_count(self) -> u32 {
        self.cell_count().div_ceil(CELLS_PER_PAGE as u32)
    }

    /// Position of page number `page`, in bytes from the start of the image. `None` if there is no
    /// such page.
    #[must_use]
    pub fn page_offset(self, page: u32) -> Option<u64> {
        (page < self.page_count()).then(|| PAGES_OFFSET + u64::from(page) * PAGE_BYTES as u64)
    }

    /// The region of byte number `at` of the volume. `None` past the volume's end.
    #[must_use]
    pub fn region_at(self, at: u64) -> Option<Region> {
        let region = u32::try_from(at >> self.shift).ok()?;
        (at < self.bytes).then_some(Region(region))
    }

    /// The regions that `len` bytes from byte number `at` on touch; none if `len` is zero. `None`
    /// if they exceed the volume.
    #[must_use]
    pub fn regions_in(self, at: u64, len: u64) -> Option<Regions> {
        let end = at.checked_add(len).filter(|end| *end <= self.bytes)?;
        if len == 0 {
            return Some(Regions(0..0));
        }
        let (first, last) = (self.region_at(at)?, self.region_at(end - 1)?);
        Some(Regions(first.0..last.0 + 1))
    }

    /// The volume's bytes in `region`. `None` if the volume has no such region.
    #[must_use]
    pub fn region_range(self, region: Region) -> Option<Range<u64>> {
        let start = u64::from(region.0) << self.shift;
        let end = self.bytes.min(start + self.region_bytes());
        (region.0 < self.regions).then_some(start..end)
    }

    /// The position of the bit of `region`. `None` if the volume has no such region.
    #[must_use]
    pub fn bit_position(self, region: Region) -> Option<BitPosition> {
        (region.0 < self.regions).then_some(BitPosition {
            cell: region.0 / REGIONS_PER_CELL,
            bit: region.0 % REGIONS_PER_CELL,
        })
    }
}

#[cfg(test)]
mod tests;
