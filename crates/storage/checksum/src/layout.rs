//! Where the checked rows of a disk and their checksums lie. Pure arithmetic.

use std::ops::Range;

/// Length in bytes of a row, and of every block of this format.
pub const ROW: usize = 4096;

/// Bytes before the checksums in a block.
pub const HEADER_BYTES: usize = 32;

/// Checksums in a block.
pub const CHECKSUMS_PER_BLOCK: usize = (ROW - HEADER_BYTES) / 4;

/// Rows whose checksums share one block.
pub const AREA_ROWS: u32 = CHECKSUMS_PER_BLOCK as u32;

/// Copies of each block of checksums, one after the other: an unreadable block costs nothing.
pub const COPIES: u32 = 2;

/// The rows of a unit whose checksums share a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChecksumArea {
    /// Number of the unit.
    pub unit: u32,
    /// Index of the area in its unit.
    pub index: u16,
}

/// The units of a disk, in rows of 4 KiB. The last rows of each unit hold the checksums of the
/// others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumLayout {
    /// First row of the first unit.
    pub first_row: u64,
    /// Rows of a unit.
    pub unit_rows: u32,
    /// Number of units.
    pub units: u32,
}

/// A part of a range of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RowRun {
    /// Rows outside of all units, without checksums.
    Unchecked(u32),
    /// Rows of an area, numbered within it.
    Checked(ChecksumArea, Range<u32>),
    /// Blocks that hold checksums.
    ChecksumBlocks(u32),
}

impl RowRun {
    /// Number of rows.
    pub(super) fn rows(&self) -> u32 {
        match self {
            Self::Unchecked(rows) | Self::ChecksumBlocks(rows) => *rows,
            Self::Checked(_, rows) => rows.end - rows.start,
        }
    }
}

impl ChecksumLayout {
    /// Areas of a unit.
    #[must_use]
    pub fn areas_per_unit(&self) -> u32 {
        // Enough that every row before the checksums belongs to an area.
        self.unit_rows.div_ceil(AREA_ROWS + COPIES)
    }

    /// Rows of a unit that have checksums.
    #[must_use]
    pub fn checked_rows(&self) -> u32 {
        self.unit_rows.saturating_sub(self.areas_per_unit() * COPIES)
    }

    fn unit_start(&self, unit: u32) -> u64 {
        self.first_row + u64::from(unit) * u64::from(self.unit_rows)
    }

    /// Whether the area exists.
    #[must_use]
    pub fn contains(&self, area: ChecksumArea) -> bool {
        area.unit < self.units && u32::from(area.index) < self.areas_per_unit()
    }

    /// The rows of an area, on the disk.
    pub(super) fn area_rows(&self, area: ChecksumArea) -> Range<u64> {
        let first = u32::from(area.index) * AREA_ROWS;
        let end = (first + AREA_ROWS).min(self.checked_rows()).max(first);
        let unit = self.unit_start(area.unit);
        unit + u64::from(first)..unit + u64::from(end)
    }

    /// The first block with the checksums of an area.
    pub(super) fn checksum_block(&self, area: ChecksumArea) -> u64 {
        let offset = self.checked_rows() + u32::from(area.index) * COPIES;
        self.unit_start(area.unit) + u64::from(offset)
    }

    /// The unit that contains a row.
    pub(super) fn unit_of(&self, row: u64) -> Option<u32> {
        let unit = row.checked_sub(self.first_row)? / u64::from(self.unit_rows.max(1));
        u32::try_from(unit).ok().filter(|unit| *unit < self.units)
    }

    /// Splits rows of the disk at areas.
    pub(super) fn runs(&self, at: u64, rows: u32) -> impl Iterator<Item = RowRun> + use<> {
        let (layout, end) = (*self, at + u64::from(rows));
        let mut next = at;
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let run = layout.first_run(next, u32::try_from(end - next).unwrap_or(u32::MAX));
                next += u64::from(run.rows());
                run
            })
        })
    }

    /// The first run of `rows` rows, at least one row long.
    fn first_run(&self, at: u64, rows: u32) -> RowRun {
        let Some(unit) = self.unit_of(at) else {
            let gap = self.first_row.checked_sub(at).filter(|gap| *gap > 0);
            let gap = gap.and_then(|gap| u32::try_from(gap).ok());
            return RowRun::Unchecked(gap.unwrap_or(rows).min(rows));
        };
        let within = u32::try_from(at - self.unit_start(unit)).unwrap_or(u32::MAX);
        if within >= self.checked_rows() {
            return RowRun::ChecksumBlocks(rows.min(self.unit_rows - within));
        }
        let first = within % AREA_ROWS;
        let end = (first + rows).min(AREA_ROWS).min(first + self.checked_rows() - within);
        let index = u16::try_from(within / AREA_ROWS).unwrap_or(u16::MAX);
        RowRun::Checked(ChecksumArea { unit, index }, first..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_cover_the_whole_range(at in 0u64..40, rows in 3u32..9000, units in 1u32..4, from in 0u64..30_000, count in 1u32..5000) {
            let layout = ChecksumLayout { first_row: at, unit_rows: rows, units };
            prop_assert!(layout.checked_rows() <= layout.areas_per_unit() * AREA_ROWS);
            let mut next = from;
            for run in layout.runs(from, count) {
                prop_assert!(run.rows() > 0);
                match &run {
                    RowRun::Checked(area, rows) => {
                        let of = layout.area_rows(*area);
                        prop_assert!(layout.contains(*area));
                        prop_assert_eq!(of.start + u64::from(rows.start), next);
                        prop_assert!(of.start + u64::from(rows.end) <= of.end);
                        prop_assert_eq!(layout.unit_of(next), Some(area.unit));
                        let checksums = layout.checksum_block(*area);
                        prop_assert_eq!(layout.runs(checksums, COPIES).next(), Some(RowRun::ChecksumBlocks(COPIES)));
                    }
                    RowRun::Unchecked(rows) => {
                        for row in next..next + u64::from(*rows) {
                            prop_assert_eq!(layout.unit_of(row), None);
                        }
                    }
                    RowRun::ChecksumBlocks(_) => {
                        let within = (next - at) % u64::from(rows);
                        prop_assert!(within >= u64::from(layout.checked_rows()));
                    }
                }
                next += u64::from(run.rows());
            }
            prop_assert_eq!(next, from + u64::from(count));
        }
    }
}
