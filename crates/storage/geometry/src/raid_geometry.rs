//! RAID geometry: where the blocks of an extent lie. Pure arithmetic.

use std::ops::Range;

use thiserror::Error;

use crate::SlotSet;

/// Bytes of a row in each strip: the unit of parity and of disk writes.
pub const ROW_BYTES: u32 = 4096;

/// Largest number of columns of an extent.
pub const MAX_COLUMNS: u16 = 64;

/// Largest number of copies of a block.
pub const MAX_COPIES: u16 = 4;

/// Smallest number of free slots of an extent with parity.
const MIN_FREE_SLOTS: u32 = 2;

/// One free slot for this many stripes: it limits how many full-stripe writes run at once.
const STRIPES_PER_FREE_SLOT: u32 = 32;

/// How an extent survives the loss of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Redundancy {
    /// This many copies of each block: one is RAID 0, as many as columns is RAID 1, else RAID 10.
    Copies(u16),
    /// One strip of parity in each stripe: RAID 5.
    Parity,
    /// Two strips of parity in each stripe: RAID 6.
    DoubleParity,
}

/// Why a geometry is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// Too few columns, or too many.
    #[error("{level:?} needs {least} to {MAX_COLUMNS} disks, not {columns}")]
    ColumnCount {
        /// The redundancy asked for.
        level: Redundancy,
        /// Smallest number of columns of that redundancy.
        least: u16,
        /// The number of columns given.
        columns: u16,
    },
    /// Too many copies, or none.
    #[error("a block can have 1 to {MAX_COPIES} copies, not {0}")]
    CopyCount(u16),
    /// The number of columns is not a multiple of the number of copies.
    #[error("{columns} disks are not a multiple of {copies} copies")]
    ColumnsNotMultipleOfCopies {
        /// Disks.
        columns: u16,
        /// Copies of each block.
        copies: u16,
    },
    /// No rows in a strip, or no stripes.
    #[error("an extent has no rows")]
    Empty,
}

/// How the blocks of an extent lie on its columns. Rows are numbered within their strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RaidGeometry {
    redundancy: Redundancy,
    columns: u16,
    strip_rows: u32,
    stripes: u32,
}

/// What a strip is within its stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StripRole {
    /// The data strip of this number.
    Data(u16),
    /// First parity: the XOR of all data.
    P,
    /// Second parity: the sum of all data strips, each times a power of the generator.
    Q,
}

/// The position of a row of data in its extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowAddress {
    /// Number of the stripe.
    pub stripe: u32,
    /// Number of the data strip.
    pub strip: u16,
    /// Number of the row in the strip.
    pub row: u32,
}

/// Consecutive rows of one data strip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripRun {
    /// Number of the stripe.
    pub stripe: u32,
    /// Number of the data strip.
    pub strip: u16,
    /// The rows of that strip.
    pub rows: Range<u32>,
}

impl Redundancy {
    /// Parity strips of a stripe.
    #[must_use]
    pub fn parity_strips(self) -> u16 {
        match self {
            Self::Copies(_) => 0,
            Self::Parity => 1,
            Self::DoubleParity => 2,
        }
    }

    /// How many columns of a stripe may be lost without loss of data, whichever they are.
    #[must_use]
    pub fn fault_tolerance(self) -> u16 {
        match self {
            Self::Copies(copies) => copies.saturating_sub(1),
            Self::Parity | Self::DoubleParity => self.parity_strips(),
        }
    }

    fn min_columns(self) -> u16 {
        match self {
            Self::Copies(copies) => copies,
            // With one data strip, parity is a copy, and copies are cheaper.
            Self::Parity => 3,
            Self::DoubleParity => 4,
        }
    }
}

impl RaidGeometry {
    /// `columns` members that each have `stripes` strips of `strip_rows` rows.
    ///
    /// # Errors
    /// Why this geometry is impossible.
    pub fn new(
        level: Redundancy,
        columns: u16,
        strip_rows: u32,
        stripes: u32,
    ) -> Result<Self, GeometryError> {
        if let Redundancy::Copies(copies) = level {
            if !(1..=MAX_COPIES).contains(&copies) {
                return Err(GeometryError::CopyCount(copies));
            }
            if !columns.is_multiple_of(copies) {
                return Err(GeometryError::ColumnsNotMultipleOfCopies { columns, copies });
            }
        }
        let least = level.min_columns();
        if !(least..=MAX_COLUMNS).contains(&columns) {
            return Err(GeometryError::ColumnCount { level, least, columns });
        }
        if strip_rows == 0 || stripes == 0 {
            return Err(GeometryError::Empty);
        }
        Ok(Self { redundancy: level, columns, strip_rows, stripes })
    }

    /// The redundancy.
    #[must_use]
    pub fn redundancy(&self) -> Redundancy {
        self.redundancy
    }

    /// Number of columns, which is the number of strips of a stripe.
    #[must_use]
    pub fn columns(&self) -> u16 {
        self.columns
    }

    /// Rows of a strip.
    #[must_use]
    pub fn strip_rows(&self) -> u32 {
        self.strip_rows
    }

    /// Number of stripes.
    #[must_use]
    pub fn stripes(&self) -> u32 {
        self.stripes
    }

    /// Number of slots for stripes. With parity there are more slots than stripes, so that
    /// full-stripe writes go to a free slot.
    #[must_use]
    pub fn slots(&self) -> u32 {
        let free = match self.redundancy.parity_strips() {
            0 => 0,
            _ => (self.stripes / STRIPES_PER_FREE_SLOT).max(MIN_FREE_SLOTS),
        };
        self.stripes.saturating_add(free)
    }

    /// Data strips of a stripe; copies count once.
    #[must_use]
    pub fn data_strips(&self) -> u16 {
        match self.redundancy {
            Redundancy::Copies(copies) => self.columns / copies,
            Redundancy::Parity | Redundancy::DoubleParity => {
                self.columns - self.redundancy.parity_strips()
            }
        }
    }

    /// Rows of data in a stripe.
    #[must_use]
    pub fn stripe_rows(&self) -> u64 {
        u64::from(self.data_strips()) * u64::from(self.strip_rows)
    }

    /// Rows of data of the extent.
    #[must_use]
    pub fn total_rows(&self) -> u64 {
        self.stripe_rows() * u64::from(self.stripes)
    }

    /// The position of data row `at`; none past the end.
    #[must_use]
    pub fn locate(&self, at: u64) -> Option<RowAddress> {
        let stripe = u32::try_from(at / self.stripe_rows()).ok().filter(|s| *s < self.stripes)?;
        let within = at % self.stripe_rows();
        let strip = u16::try_from(within / u64::from(self.strip_rows)).ok()?;
        let row = u32::try_from(within % u64::from(self.strip_rows)).ok()?;
        Some(RowAddress { stripe, strip, row })
    }

    /// The data row at this position.
    #[must_use]
    pub fn row_at(&self, address: RowAddress) -> u64 {
        u64::from(address.stripe) * self.stripe_rows()
            + u64::from(address.strip) * u64::from(self.strip_rows)
            + u64::from(address.row)
    }

    /// `count` rows from `at` on, split at strips and cut off at the end.
    pub fn strip_runs(&self, at: u64, count: u64) -> impl Iterator<Item = StripRun> + use<> {
        let (geometry, end) = (*self, at.saturating_add(count).min(self.total_rows()));
        let mut next = at;
        std::iter::from_fn(move || {
            let RowAddress { stripe, strip, row } = geometry.locate(next).filter(|_| next < end)?;
            let left = u32::try_from(end - next).unwrap_or(u32::MAX);
            let rows = row..row + left.min(geometry.strip_rows - row);
            next += u64::from(rows.end - rows.start);
            Some(StripRun { stripe, strip, rows })
        })
    }

    /// The columns that hold the strip `role` of a stripe, one for each copy; none if the level has
    /// no such strip.
    ///
    /// Parity moves one column to the left from stripe to stripe, Q is on its right, and data
    /// follows (left-symmetric): sequential data uses all columns in turn.
    pub fn columns_of(&self, stripe: u32, role: StripRole) -> impl Iterator<Item = u16> + use<> {
        let (first, count) = match (self.redundancy, role) {
            (Redundancy::Copies(copies), StripRole::Data(n)) if n < self.data_strips() => {
                (n * copies, copies)
            }
            (Redundancy::Copies(_), _) | (Redundancy::Parity, StripRole::Q) => (0, 0),
            (_, StripRole::P) => (self.column_after_p(stripe, 0), 1),
            (_, StripRole::Q) => (self.column_after_p(stripe, 1), 1),
            (_, StripRole::Data(n)) if n < self.data_strips() => {
                (self.column_after_p(stripe, self.redundancy.parity_strips() + n), 1)
            }
            (_, StripRole::Data(_)) => (0, 0),
        };
        first..first + count
    }

    /// The role of the strip that a stripe has in `column`.
    #[must_use]
    pub fn role_of(&self, stripe: u32, column: u16) -> StripRole {
        let distance = |first: u16| (column + self.columns - first) % self.columns;
        match self.redundancy {
            Redundancy::Copies(copies) => StripRole::Data(column / copies),
            _ => {
                match (distance(self.column_after_p(stripe, 0)), self.redundancy.parity_strips()) {
                    (0, _) => StripRole::P,
                    (1, 2) => StripRole::Q,
                    (n, parities) => StripRole::Data(n - parities),
                }
            }
        }
    }

    /// The column that is `columns` to the right of the one with P, wrapping around.
    fn column_after_p(&self, stripe: u32, columns: u16) -> u16 {
        let columns_total = u32::from(self.columns);
        let p = columns_total - 1 - stripe % columns_total;
        u16::try_from((p + u32::from(columns)) % columns_total).unwrap_or(0)
    }

    /// All strips of a stripe, data before parity.
    pub fn roles(&self) -> impl Iterator<Item = StripRole> + use<> {
        let parity =
            [StripRole::P, StripRole::Q].into_iter().take(self.redundancy.parity_strips().into());
        (0..self.data_strips()).map(StripRole::Data).chain(parity)
    }
}

/// Regions of an extent, by slot (see [`RaidGeometry::region_bit`]): the unit in which stale
/// columns are recorded.
pub const REGIONS: u32 = 16;

/// The region of the stripe map, beside those of the slots.
pub const MAP_REGION: u32 = 1 << REGIONS;

/// All regions, one bit each.
pub const ALL_REGIONS: u32 = (MAP_REGION << 1) - 1;

impl RaidGeometry {
    /// The region of a slot, as a bit.
    #[must_use]
    pub fn region_bit(&self, slot: u32) -> u32 {
        let slots = u64::from(self.slots().max(1));
        1 << (u64::from(slot) * u64::from(REGIONS) / slots).min(u64::from(REGIONS - 1))
    }

    /// The slots of these regions.
    #[must_use]
    pub fn slots_in_regions(&self, regions: u32) -> SlotSet {
        (0..self.slots()).filter(|slot| self.region_bit(*slot) & regions != 0).collect()
    }
}

impl RaidGeometry {
    /// Rows of the extent's data that these rows of a strip are.
    pub fn data_row_range(&self, stripe: u32, strip: u16, rows: &Range<u32>) -> Range<u32> {
        let at =
            |row| u32::try_from(self.row_at(RowAddress { stripe, strip, row })).unwrap_or(u32::MAX);
        at(rows.start)..at(rows.start).saturating_add(rows.end - rows.start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn geometries() -> impl Strategy<Value = RaidGeometry> {
        let level = prop_oneof![
            (1u16..=4).prop_map(Redundancy::Copies),
            Just(Redundancy::Parity),
            Just(Redundancy::DoubleParity)
        ];
        (level, 1u16..=16, 1u32..=20, 1u32..=40)
            .prop_filter_map("a possible geometry", |(level, n, rows, s)| {
                RaidGeometry::new(level, n, rows, s).ok()
            })
    }

    proptest! {
        #[test]
        fn each_column_of_a_stripe_has_one_role(geometry in geometries(), stripe in 0u32..40) {
            let mut all: Vec<_> = geometry.roles().flat_map(|role| {
                let of: Vec<_> = geometry.columns_of(stripe, role).collect();
                assert!(of.iter().all(|c| geometry.role_of(stripe, *c) == role), "{role:?} {of:?}");
                of
            }).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..geometry.columns()).collect::<Vec<_>>());
        }

        #[test]
        fn row_at_inverts_locate(geometry in geometries(), at in 0u64..20_000) {
            match geometry.locate(at) {
                Some(address) => prop_assert_eq!(geometry.row_at(address), at),
                None => prop_assert!(at >= geometry.total_rows()),
            }
        }

        #[test]
        fn strip_runs_cover_exactly_the_requested_rows(geometry in geometries(), at in 0u64..5000, count in 0u64..5000) {
            let rows: Vec<_> = geometry.strip_runs(at, count).flat_map(|StripRun { stripe, strip, rows }| {
                rows.map(move |row| geometry.row_at(RowAddress { stripe, strip, row }))
            }).collect();
            let end = (at + count).min(geometry.total_rows());
            prop_assert_eq!(rows, (at..end.max(at)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn parity_is_left_symmetric() {
        let raid5 = RaidGeometry::new(Redundancy::Parity, 4, 1, 4).unwrap();
        let row = |stripe| (0..4).map(|c| raid5.role_of(stripe, c)).collect::<Vec<_>>();
        let d = StripRole::Data;
        assert_eq!(row(0), [d(0), d(1), d(2), StripRole::P]);
        assert_eq!(row(1), [d(1), d(2), StripRole::P, d(0)]);
        assert_eq!(row(3), [StripRole::P, d(0), d(1), d(2)]);
        let raid6 = RaidGeometry::new(Redundancy::DoubleParity, 4, 1, 4).unwrap();
        let row = |stripe| (0..4).map(|c| raid6.role_of(stripe, c)).collect::<Vec<_>>();
        assert_eq!(row(0), [StripRole::Q, d(0), d(1), StripRole::P]);
        assert_eq!(row(1), [d(0), d(1), StripRole::P, StripRole::Q]);
    }

    #[test]
    fn impossible_geometries_are_refused_with_a_reason() {
        let of = |level, columns| RaidGeometry::new(level, columns, 16, 4).map(|_| ()).unwrap_err();
        assert_eq!(of(Redundancy::Parity, 2).to_string(), "Parity needs 3 to 64 disks, not 2");
        assert_eq!(
            of(Redundancy::Copies(2), 5).to_string(),
            "5 disks are not a multiple of 2 copies"
        );
        assert_eq!(of(Redundancy::Copies(0), 5), GeometryError::CopyCount(0));
        assert_eq!(of(Redundancy::Copies(5), 5), GeometryError::CopyCount(5));
        assert!(matches!(of(Redundancy::DoubleParity, 65), GeometryError::ColumnCount { .. }));
        assert_eq!(RaidGeometry::new(Redundancy::Parity, 5, 0, 4), Err(GeometryError::Empty));
        let raid10 = RaidGeometry::new(Redundancy::Copies(2), 6, 16, 4).unwrap();
        assert_eq!(
            (raid10.data_strips(), raid10.total_rows(), raid10.redundancy().fault_tolerance()),
            (3, 192, 1)
        );
    }
}
