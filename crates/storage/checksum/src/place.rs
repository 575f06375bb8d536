//! Where the rows of a disk that have checksums are, and where those: arithmetic, and nothing else.

use std::ops::Range;

use super::stored::SUMS;

/// Rows that one block of sums is for.
pub const AREA_ROWS: u32 = SUMS as u32;

/// Blocks with the same sums, one behind the other: a block that cannot be read costs none of them.
pub const COPIES: u32 = 2;

/// The rows of one unit that have their sums together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Area {
    /// Number of the unit.
    pub unit: u32,
    /// Which of its areas.
    pub number: u16,
}

/// The units of a disk, in rows of 4 KiB. The last rows of each are the sums of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where the first one begins.
    pub at: u64,
    /// Rows of each.
    pub rows: u32,
    /// How many there are.
    pub units: u32,
}

/// A part of a range of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Rows that have no sums: of no unit.
    Bare(u32),
    /// These rows of an area.
    Of(Area, Range<u32>),
    /// What holds sums itself.
    Sums(u32),
}

impl Part {
    /// How many rows it has.
    pub(super) fn rows(&self) -> u32 {
        match self {
            Self::Bare(rows) | Self::Sums(rows) => *rows,
            Self::Of(_, rows) => rows.end - rows.start,
        }
    }
}

impl Place {
    /// Areas of each unit.
    #[must_use]
    pub fn areas(&self) -> u32 {
        // So many that the rows before their sums have all of them there.
        self.rows.div_ceil(AREA_ROWS + COPIES)
    }

    /// Rows of a unit that have sums.
    #[must_use]
    pub fn summed(&self) -> u32 {
        self.rows.saturating_sub(self.areas() * COPIES)
    }

    fn unit_at(&self, unit: u32) -> u64 {
        self.at + u64::from(unit) * u64::from(self.rows)
    }

    /// Whether there is such an area.
    #[must_use]
    pub fn has(&self, area: Area) -> bool {
        area.unit < self.units && u32::from(area.number) < self.areas()
    }

    /// The rows of an area, on the disk.
    pub(super) fn rows_of(&self, area: Area) -> Range<u64> {
        let first = u32::from(area.number) * AREA_ROWS;
        let end = (first + AREA_ROWS).min(self.summed()).max(first);
        let unit = self.unit_at(area.unit);
        unit + u64::from(first)..unit + u64::from(end)
    }

    /// Where the first of the blocks with the sums of an area lies.
    pub(super) fn sums_at(&self, area: Area) -> u64 {
        let before = self.summed() + u32::from(area.number) * COPIES;
        self.unit_at(area.unit) + u64::from(before)
    }

    /// The unit that a row lies in.
    pub(super) fn unit_of(&self, row: u64) -> Option<u32> {
        let unit = row.checked_sub(self.at)? / u64::from(self.rows.max(1));
        u32::try_from(unit).ok().filter(|unit| *unit < self.units)
    }

    /// Cuts rows of the disk at areas.
    pub(super) fn parts(&self, at: u64, rows: u32) -> impl Iterator<Item = Part> + use<> {
        let (this, end) = (*self, at + u64::from(rows));
        let mut next = at;
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let part = this.part(next, u32::try_from(end - next).unwrap_or(u32::MAX));
                next += u64::from(part.rows());
                part
            })
        })
    }

    /// The first part of `rows` rows, one at least.
    fn part(&self, at: u64, rows: u32) -> Part {
        let Some(unit) = self.unit_of(at) else {
            let before = self.at.checked_sub(at).filter(|before| *before > 0);
            let before = before.and_then(|before| u32::try_from(before).ok());
            return Part::Bare(before.unwrap_or(rows).min(rows));
        };
        let within = u32::try_from(at - self.unit_at(unit)).unwrap_or(u32::MAX);
        if within >= self.summed() {
            return Part::Sums(rows.min(self.rows - within));
        }
        let first = within % AREA_ROWS;
        let end = (first + rows).min(AREA_ROWS).min(first + self.summed() - within);
        let number = u16::try_from(within / AREA_ROWS).unwrap_or(u16::MAX);
        Part::Of(Area { unit, number }, first..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_are_all_of_it(at in 0u64..40, rows in 3u32..9000, units in 1u32..4, from in 0u64..30_000, count in 1u32..5000) {
            let place = Place { at, rows, units };
            prop_assert!(place.summed() <= place.areas() * AREA_ROWS);
            let mut next = from;
            for part in place.parts(from, count) {
                prop_assert!(part.rows() > 0);
                match &part {
                    Part::Of(area, rows) => {
                        let of = place.rows_of(*area);
                        prop_assert!(place.has(*area));
                        prop_assert_eq!(of.start + u64::from(rows.start), next);
                        prop_assert!(of.start + u64::from(rows.end) <= of.end);
                        prop_assert_eq!(place.unit_of(next), Some(area.unit));
                        let sums = place.sums_at(*area);
                        prop_assert_eq!(place.parts(sums, COPIES).next(), Some(Part::Sums(COPIES)));
                    }
                    Part::Bare(rows) => {
                        for row in next..next + u64::from(*rows) {
                            prop_assert_eq!(place.unit_of(row), None);
                        }
                    }
                    Part::Sums(_) => {
                        let within = (next - at) % u64::from(rows);
                        prop_assert!(within >= u64::from(place.summed()));
                    }
                }
                next += u64::from(part.rows());
            }
            prop_assert_eq!(next, from + u64::from(count));
        }
    }
}
