//! How a volume is cut into regions, and where in the image their bits lie.

use std::ops::Range;

use disk::{LOG_AREA, MAX_BYTES};

use super::cell::{CELLS_PER_PAGE, PAGE_BYTES, REGIONS_PER_CELL};

/// Most regions that a volume is cut into.
pub const MAX_REGIONS: u32 = 1 << 20;

/// Most cells that there is room for.
pub const MAX_CELLS: u32 = 824;

/// Where the two copies of the superblock are, in bytes from the start of the image.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [516 << 10, 520 << 10];

/// Where page 0 begins, in bytes from the start of the image.
const PAGES_OFFSET: u64 = 524 << 10;

/// Where the room for pages ends, in bytes from the start of the image. An image whose data begins
/// before it has no room for a log.
pub const LOG_END: u64 =
    PAGES_OFFSET + MAX_CELLS as u64 / CELLS_PER_PAGE as u64 * PAGE_BYTES as u64;
const _: () = assert!(LOG_END == LOG_AREA.end && SUPERBLOCK_OFFSETS[0] == LOG_AREA.start);
const _: () = assert!(MAX_REGIONS.div_ceil(REGIONS_PER_CELL) <= MAX_CELLS);

/// The smallest and the largest region: 64 KiB and 256 MiB, as powers of two.
pub(super) const SHIFTS: std::ops::RangeInclusive<u32> = 16..=28;
const _: () = assert!(MAX_BYTES >> *SHIFTS.end() == MAX_REGIONS as u64);

/// A region of a volume, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region(pub u32);

/// Regions that follow each other.
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

/// Where the bit of a region lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The cell.
    pub cell: u32,
    /// The bit in each of the cell's slots.
    pub bit: u32,
}

/// Why there can be no such log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadGeometry {
    /// No volume is empty or larger than 256 TiB.
    #[error("no volume has {0} bytes")]
    Size(u64),
    /// The regions are smaller than 64 KiB, larger than 256 MiB, or too many for the volume.
    #[error("regions of 2^{0} bytes do not suit the volume")]
    Shift(u32),
}

/// How one volume is cut into regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    bytes: u64,
    shift: u32,
    regions: u32,
}

impl Geometry {
    /// That of a new log for a volume of `bytes` bytes: the smallest regions of which there are not
    /// too many.
    ///
    /// # Errors
    /// [`BadGeometry::Size`].
    pub fn new(bytes: u64) -> Result<Self, BadGeometry> {
        let finest = SHIFTS.map(|shift| Self::with_shift(bytes, shift)).find(Result::is_ok);
        finest.unwrap_or(Err(BadGeometry::Size(bytes)))
    }

    /// That of a log with regions of 2^`shift` bytes, for a volume of `bytes` bytes. The regions
    /// may be larger than a new log's: those of a volume that is about to grow are.
    ///
    /// # Errors
    /// [`BadGeometry`]
    pub fn with_shift(bytes: u64, shift: u32) -> Result<Self, BadGeometry> {
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(BadGeometry::Size(bytes));
        }
        if !SHIFTS.contains(&shift) {
            return Err(BadGeometry::Shift(shift));
        }
        match u32::try_from(bytes.div_ceil(1 << shift)) {
            Ok(regions) if regions <= MAX_REGIONS => Ok(Self { bytes, shift, regions }),
            _ => Err(BadGeometry::Shift(shift)),
        }
    }

    /// Size of the volume in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// Size of a region, as a power of two.
    #[must_use]
    pub fn shift(self) -> u32 {
        self.shift
    }

    /// Size of a region in bytes; the volume's last one may be shorter.
    #[must_use]
    pub fn region_bytes(self) -> u64 {
        1 << self.shift
    }

    /// How many regions there are: at least one.
    #[must_use]
    pub fn regions(self) -> u32 {
        self.regions
    }

    /// How many bytes hold one bit for each.
    #[must_use]
    pub fn bits_len(self) -> usize {
        self.regions.div_ceil(8) as usize
    }

    /// How many cells hold their bits.
    #[must_use]
    pub fn cells(self) -> u32 {
        self.regions.div_ceil(REGIONS_PER_CELL)
    }

    /// How many pages hold the cells.
    #[must_use]
    pub fn pages(self) -> u32 {
        self.cells().div_ceil(CELLS_PER_PAGE as u32)
    }

    /// Where page number `page` is, in bytes from the start of the image. `None` if the log has no
    /// such page.
    #[must_use]
    pub fn page_offset(self, page: u32) -> Option<u64> {
        (page < self.pages()).then(|| PAGES_OFFSET + u64::from(page) * PAGE_BYTES as u64)
    }

    /// The region in which byte number `at` of the volume lies. `None` behind the volume's end.
    #[must_use]
    pub fn region_of(self, at: u64) -> Option<Region> {
        let region = u32::try_from(at >> self.shift).ok()?;
        (at < self.bytes).then_some(Region(region))
    }

    /// The regions that `len` bytes from byte number `at` on touch; none if `len` is zero. `None`
    /// if they leave the volume.
    #[must_use]
    pub fn regions_of(self, at: u64, len: u64) -> Option<Regions> {
        let end = at.checked_add(len).filter(|end| *end <= self.bytes)?;
        if len == 0 {
            return Some(Regions(0..0));
        }
        let (first, last) = (self.region_of(at)?, self.region_of(end - 1)?);
        Some(Regions(first.0..last.0 + 1))
    }

    /// The volume's bytes in `region`. `None` if the volume has no such region.
    #[must_use]
    pub fn bytes_of(self, region: Region) -> Option<Range<u64>> {
        let start = u64::from(region.0) << self.shift;
        let end = self.bytes.min(start + self.region_bytes());
        (region.0 < self.regions).then_some(start..end)
    }

    /// Where the bit of `region` lies. `None` if the volume has no such region.
    #[must_use]
    pub fn place_of(self, region: Region) -> Option<Place> {
        (region.0 < self.regions).then_some(Place {
            cell: region.0 / REGIONS_PER_CELL,
            bit: region.0 % REGIONS_PER_CELL,
        })
    }
}

#[cfg(test)]
mod tests;
