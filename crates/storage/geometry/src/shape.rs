//! Where the blocks of an extent lie: arithmetic, and nothing else.

use std::ops::Range;

use thiserror::Error;

use crate::Places;

/// Bytes of a row in each strip: what parity is reckoned in, and what a disk writes at once.
pub const ROW_BYTES: u32 = 4096;

/// Most columns of an extent.
pub const MAX_COLUMNS: u16 = 64;

/// Most copies of a block.
pub const MAX_COPIES: u16 = 4;

/// Fewest places that no stripe has.
const LEAST_SPARE: u32 = 2;

/// So many stripes have one such place more: as many may be written whole at once.
const STRIPES_PER_SPARE: u32 = 32;

/// How an extent bears the loss of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// So many copies of everything: one is RAID 0, as many as there are columns RAID 1, else RAID 10.
    Copies(u16),
    /// One strip of parity in each stripe: RAID 5.
    Parity,
    /// Two: RAID 6.
    DoubleParity,
}

/// A shape that there is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// Too few columns, or too many.
    #[error("{level:?} wants from {least} to {MAX_COLUMNS} disks, and is given {columns}")]
    Columns {
        /// What was wanted.
        level: Level,
        /// The fewest that it can do with.
        least: u16,
        /// What it was given.
        columns: u16,
    },
    /// More copies than there may be, or none.
    #[error("a block has from 1 to {MAX_COPIES} copies, not {0}")]
    Copies(u16),
    /// Columns that copies do not come out even on.
    #[error("{columns} disks are no multiple of {copies} copies")]
    Uneven {
        /// Disks.
        columns: u16,
        /// Copies of each block.
        copies: u16,
    },
    /// No rows in a strip, or no stripes.
    #[error("an extent without a row")]
    Empty,
}

/// How the blocks of an extent lie on its columns. Rows are numbered within their strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    level: Level,
    columns: u16,
    strip_rows: u32,
    stripes: u32,
}

/// What a strip is within its stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The data strip of this number.
    Data(u16),
    /// The sum of all data.
    P,
    /// The sum of all data, each times its power of the generator.
    Q,
}

/// Where a row of data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of its stripe.
    pub stripe: u32,
    /// Number of its strip among those of data.
    pub strip: u16,
    /// Number of it in the strip.
    pub row: u32,
}

/// A run of rows in one strip of data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of its stripe.
    pub stripe: u32,
    /// Number of its strip among those of data.
    pub strip: u16,
    /// Rows of that.
    pub rows: Range<u32>,
}

impl Level {
    /// Strips of parity in a stripe.
    #[must_use]
    pub fn parities(self) -> u16 {
        match self {
            Self::Copies(_) => 0,
            Self::Parity => 1,
            Self::DoubleParity => 2,
        }
    }

    /// Columns that may be lost of each stripe, whichever they are.
    #[must_use]
    pub fn bears(self) -> u16 {
        match self {
            Self::Copies(copies) => copies.saturating_sub(1),
            Self::Parity | Self::DoubleParity => self.parities(),
        }
    }

    fn least(self) -> u16 {
        match self {
            Self::Copies(copies) => copies,
            // With one strip of data parity is a copy, which is cheaper kept as one.
            Self::Parity => 3,
            Self::DoubleParity => 4,
        }
    }
}

impl Shape {
    /// `columns` members that each have `stripes` strips of `strip_rows` rows.
    ///
    /// # Errors
    /// What there is not.
    pub fn new(
        level: Level,
        columns: u16,
        strip_rows: u32,
        stripes: u32,
    ) -> Result<Self, ShapeError> {
        if let Level::Copies(copies) = level {
            if !(1..=MAX_COPIES).contains(&copies) {
                return Err(ShapeError::Copies(copies));
            }
            if !columns.is_multiple_of(copies) {
                return Err(ShapeError::Uneven { columns, copies });
            }
        }
        let least = level.least();
        if !(least..=MAX_COLUMNS).contains(&columns) {
            return Err(ShapeError::Columns { level, least, columns });
        }
        if strip_rows == 0 || stripes == 0 {
            return Err(ShapeError::Empty);
        }
        Ok(Self { level, columns, strip_rows, stripes })
    }

    /// The level.
    #[must_use]
    pub fn level(&self) -> Level {
        self.level
    }

    /// Columns, which are strips of a stripe.
    #[must_use]
    pub fn columns(&self) -> u16 {
        self.columns
    }

    /// Rows of a strip.
    #[must_use]
    pub fn strip_rows(&self) -> u32 {
        self.strip_rows
    }

    /// Stripes.
    #[must_use]
    pub fn stripes(&self) -> u32 {
        self.stripes
    }

    /// Places for stripes: where there is parity, some more than there are stripes, so that whole ones are written elsewhere.
    #[must_use]
    pub fn places(&self) -> u32 {
        let spare = match self.level.parities() {
            0 => 0,
            _ => (self.stripes / STRIPES_PER_SPARE).max(LEAST_SPARE),
        };
        self.stripes.saturating_add(spare)
    }

    /// Strips of data in a stripe, each counted once.
    #[must_use]
    pub fn data(&self) -> u16 {
        match self.level {
            Level::Copies(copies) => self.columns / copies,
            Level::Parity | Level::DoubleParity => self.columns - self.level.parities(),
        }
    }

    /// Rows of data in a stripe.
    #[must_use]
    pub fn stripe_rows(&self) -> u64 {
        u64::from(self.data()) * u64::from(self.strip_rows)
    }

    /// Rows of data in all.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.stripe_rows() * u64::from(self.stripes)
    }

    /// Where row `at` of the data is; none behind the end.
    #[must_use]
    pub fn locate(&self, at: u64) -> Option<Place> {
        let stripe = u32::try_from(at / self.stripe_rows()).ok().filter(|s| *s < self.stripes)?;
        let within = at % self.stripe_rows();
        let strip = u16::try_from(within / u64::from(self.strip_rows)).ok()?;
        let row = u32::try_from(within % u64::from(self.strip_rows)).ok()?;
        Some(Place { stripe, strip, row })
    }

    /// The row of the data that is there.
    #[must_use]
    pub fn at(&self, place: Place) -> u64 {
        u64::from(place.stripe) * self.stripe_rows()
            + u64::from(place.strip) * u64::from(self.strip_rows)
            + u64::from(place.row)
    }

    /// `count` rows from `at` on, cut at strips; nothing of them behind the end.
    pub fn pieces(&self, at: u64, count: u64) -> impl Iterator<Item = Piece> + use<> {
        let (shape, end) = (*self, at.saturating_add(count).min(self.rows()));
        let mut next = at;
        std::iter::from_fn(move || {
            let Place { stripe, strip, row } = shape.locate(next).filter(|_| next < end)?;
            let left = u32::try_from(end - next).unwrap_or(u32::MAX);
            let rows = row..row + left.min(shape.strip_rows - row);
            next += u64::from(rows.end - rows.start);
            Some(Piece { stripe, strip, rows })
        })
    }

    /// The columns that have the strip `role` of a stripe, as many as there are copies of it; none if the level has no such strip.
    ///
    /// Parity moves one column to the left from stripe to stripe, Q is on its right, and data follows behind them
    /// (left-symmetric): what lies one behind the other is on all columns in turn.
    pub fn columns_of(&self, stripe: u32, role: Role) -> impl Iterator<Item = u16> + use<> {
        let (first, count) = match (self.level, role) {
            (Level::Copies(copies), Role::Data(n)) if n < self.data() => (n * copies, copies),
            (Level::Copies(_), _) | (Level::Parity, Role::Q) => (0, 0),
            (_, Role::P) => (self.behind_p(stripe, 0), 1),
            (_, Role::Q) => (self.behind_p(stripe, 1), 1),
            (_, Role::Data(n)) if n < self.data() => {
                (self.behind_p(stripe, self.level.parities() + n), 1)
            }
            (_, Role::Data(_)) => (0, 0),
        };
        first..first + count
    }

    /// What a stripe has in `column`.
    #[must_use]
    pub fn role(&self, stripe: u32, column: u16) -> Role {
        let behind = |first: u16| (column + self.columns - first) % self.columns;
        match self.level {
            Level::Copies(copies) => Role::Data(column / copies),
            _ => match (behind(self.behind_p(stripe, 0)), self.level.parities()) {
                (0, _) => Role::P,
                (1, 2) => Role::Q,
                (n, parities) => Role::Data(n - parities),
            },
        }
    }

    /// The column that is so many behind the one with P.
    fn behind_p(&self, stripe: u32, columns: u16) -> u16 {
        let all = u32::from(self.columns);
        let p = all - 1 - stripe % all;
        u16::try_from((p + u32::from(columns)) % all).unwrap_or(0)
    }

    /// All strips of a stripe, data before parity.
    pub fn roles(&self) -> impl Iterator<Item = Role> + use<> {
        let parity = [Role::P, Role::Q].into_iter().take(self.level.parities().into());
        (0..self.data()).map(Role::Data).chain(parity)
    }
}

/// Parts of an extent by where stripes lie, as [`Shape::region`] counts them: what is noted of columns that are out.
pub const REGIONS: u32 = 16;

/// The region of what is known of stripes beside them: where they lie.
pub const MAP_REGION: u32 = 1 << REGIONS;

/// All regions, a bit for each.
pub const ALL_REGIONS: u32 = (MAP_REGION << 1) - 1;

impl Shape {
    /// The region that `place` is in, as a bit.
    #[must_use]
    pub fn region(&self, place: u32) -> u32 {
        let all = u64::from(self.places().max(1));
        1 << (u64::from(place) * u64::from(REGIONS) / all).min(u64::from(REGIONS - 1))
    }

    /// The places of these regions.
    #[must_use]
    pub fn places_of(&self, regions: u32) -> Places {
        (0..self.places()).filter(|place| self.region(*place) & regions != 0).collect()
    }
}

impl Shape {
    /// Rows of the data of an extent.
    pub fn data_rows(&self, stripe: u32, strip: u16, rows: &Range<u32>) -> Range<u32> {
        let at = |row| u32::try_from(self.at(Place { stripe, strip, row })).unwrap_or(u32::MAX);
        at(rows.start)..at(rows.start).saturating_add(rows.end - rows.start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shapes() -> impl Strategy<Value = Shape> {
        let level = prop_oneof![
            (1u16..=4).prop_map(Level::Copies),
            Just(Level::Parity),
            Just(Level::DoubleParity)
        ];
        (level, 1u16..=16, 1u32..=20, 1u32..=40)
            .prop_filter_map("a shape", |(level, n, rows, s)| Shape::new(level, n, rows, s).ok())
    }

    proptest! {
        #[test]
        fn each_column_of_a_stripe_has_one_role(shape in shapes(), stripe in 0u32..40) {
            let mut all: Vec<_> = shape.roles().flat_map(|role| {
                let of: Vec<_> = shape.columns_of(stripe, role).collect();
                assert!(of.iter().all(|c| shape.role(stripe, *c) == role), "{role:?} {of:?}");
                of
            }).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..shape.columns()).collect::<Vec<_>>());
        }

        #[test]
        fn rows_are_found_where_they_were_put(shape in shapes(), at in 0u64..20_000) {
            match shape.locate(at) {
                Some(place) => prop_assert_eq!(shape.at(place), at),
                None => prop_assert!(at >= shape.rows()),
            }
        }

        #[test]
        fn pieces_are_all_there_is_and_no_more(shape in shapes(), at in 0u64..5000, count in 0u64..5000) {
            let rows: Vec<_> = shape.pieces(at, count).flat_map(|Piece { stripe, strip, rows }| {
                rows.map(move |row| shape.at(Place { stripe, strip, row }))
            }).collect();
            let end = (at + count).min(shape.rows());
            prop_assert_eq!(rows, (at..end.max(at)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn parity_is_left_symmetric() {
        let raid5 = Shape::new(Level::Parity, 4, 1, 4).unwrap();
        let row = |stripe| (0..4).map(|c| raid5.role(stripe, c)).collect::<Vec<_>>();
        let d = Role::Data;
        assert_eq!(row(0), [d(0), d(1), d(2), Role::P]);
        assert_eq!(row(1), [d(1), d(2), Role::P, d(0)]);
        assert_eq!(row(3), [Role::P, d(0), d(1), d(2)]);
        let raid6 = Shape::new(Level::DoubleParity, 4, 1, 4).unwrap();
        let row = |stripe| (0..4).map(|c| raid6.role(stripe, c)).collect::<Vec<_>>();
        assert_eq!(row(0), [Role::Q, d(0), d(1), Role::P]);
        assert_eq!(row(1), [d(0), d(1), Role::P, Role::Q]);
    }

    #[test]
    fn shapes_that_there_are_not_are_refused_by_name() {
        let of = |level, columns| Shape::new(level, columns, 16, 4).map(|_| ()).unwrap_err();
        assert_eq!(
            of(Level::Parity, 2).to_string(),
            "Parity wants from 3 to 64 disks, and is given 2"
        );
        assert_eq!(of(Level::Copies(2), 5).to_string(), "5 disks are no multiple of 2 copies");
        assert_eq!(of(Level::Copies(0), 5), ShapeError::Copies(0));
        assert_eq!(of(Level::Copies(5), 5), ShapeError::Copies(5));
        assert!(matches!(of(Level::DoubleParity, 65), ShapeError::Columns { .. }));
        assert_eq!(Shape::new(Level::Parity, 5, 0, 4), Err(ShapeError::Empty));
        let raid10 = Shape::new(Level::Copies(2), 6, 16, 4).unwrap();
        assert_eq!((raid10.data(), raid10.rows(), raid10.level().bears()), (3, 192, 1));
    }
}
