//! An extent in use: its columns, their stale slots, and its stripe map.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use geometry::{ALL_REGIONS, Column, RaidGeometry, RowSet, SlotSet};

use super::lost_rows::LostRows;
use super::stripe_map::{LiveStripeMap, StripeMap};
use super::stripe_map_format;

/// Where a stripe lies: extent number and slot.
pub(super) type SlotId = (u64, u32);

/// The unit that a pool allocates to a volume: one column on each of several members.
#[derive(Debug)]
pub struct Extent {
    pub(super) number: u64,
    pub(super) geometry: RaidGeometry,
    pub(super) columns: Box<[Column]>,
    /// Stale slots, by column.
    pub(super) stale_slots: RefCell<Vec<(u16, SlotSet)>>,
    /// Shared by all versions of this extent with other columns.
    pub(super) stripe_map: Rc<LiveStripeMap>,
    /// Lost rows of its data; shared likewise.
    pub(super) lost_rows: Rc<LostRows>,
    /// Columns whose new position is not committed to the pool metadata yet, one bit each.
    pub(super) uncommitted_columns: Cell<u64>,
    /// How often members of the array had changed, and the regions recorded as stale on detached
    /// columns then.
    pub(super) announced_stale: Cell<(u64, u32)>,
}

impl Extent {
    /// The extent of this number, on as many columns as `geometry` has. Each column has room for a
    /// strip in each of the [slots](RaidGeometry::slots), followed by two [stripe
    /// maps](stripe_map_format).
    #[must_use]
    pub fn new(
        number: u64,
        geometry: RaidGeometry,
        columns: impl IntoIterator<Item = Column>,
    ) -> Self {
        let map = StripeMap::new(geometry.stripes(), geometry.slots());
        let (columns, stripe_map) =
            (columns.into_iter().collect(), Rc::new(LiveStripeMap::new(map, 0)));
        let announced_stale = Cell::new((0, 0));
        let (stale_slots, uncommitted_columns) = (RefCell::default(), Cell::new(0));
        let lost_rows = Rc::default();
        Self {
            number,
            geometry,
            columns,
            stale_slots,
            stripe_map,
            lost_rows,
            uncommitted_columns,
            announced_stale,
        }
    }

    /// The same, with these rows of its data lost.
    #[must_use]
    pub fn with_lost_rows(self, rows: RowSet) -> Self {
        Self { lost_rows: Rc::new(LostRows::new(rows)), ..self }
    }

    /// The same, with these rows of data unrepaired.
    #[must_use]
    pub fn with_unrepaired_rows(self, rows: &RowSet) -> Self {
        rows.iter().for_each(|rows| self.lost_rows.note_unrepaired(rows));
        self
    }

    /// The same, with column number `column` stale in these regions, because it is new or was
    /// reattached.
    #[must_use]
    pub fn with_stale_regions(self, column: u16, regions: u32) -> Self {
        if regions & ALL_REGIONS != 0 {
            let slots = self.geometry.slots_in_regions(regions);
            self.stale_slots.borrow_mut().push((column, slots));
        }
        self
    }

    /// The same, with one column moved; its contents are complete at the new position.
    pub(super) fn with_column(&self, column: u16, to: Column) -> Self {
        let mut columns = self.columns.clone();
        columns.get_mut(usize::from(column)).into_iter().for_each(|position| *position = to);
        let (stale_slots, stripe_map) = (self.stale_slots.clone(), Rc::clone(&self.stripe_map));
        stale_slots.borrow_mut().retain(|(stale, _)| *stale != column);
        let (uncommitted_columns, announced_stale) =
            (self.uncommitted_columns.clone(), Cell::new((0, 0)));
        Self {
            number: self.number,
            geometry: self.geometry,
            columns,
            stale_slots,
            stripe_map,
            lost_rows: Rc::clone(&self.lost_rows),
            uncommitted_columns,
            announced_stale,
        }
    }

    /// The same, with one column moved to a position where all of it is stale.
    pub(super) fn with_empty_column(&self, column: u16, to: Column) -> Self {
        let moved = self.with_column(column, to);
        moved
            .uncommitted_columns
            .set(moved.uncommitted_columns.get() | 1u64.checked_shl(column.into()).unwrap_or(0));
        moved.with_stale_regions(column, ALL_REGIONS)
    }

    /// Notes that the position of a column is committed to the pool metadata.
    pub fn mark_column_committed(&self, column: u16) {
        let bit = 1u64.checked_shl(column.into()).unwrap_or(0);
        self.uncommitted_columns.set(self.uncommitted_columns.get() & !bit);
    }

    /// Marks further regions of a column stale, before its member is reattached.
    pub fn add_stale_regions(&self, column: u16, regions: u32) {
        let slots = self.geometry.slots_in_regions(regions);
        if regions & ALL_REGIONS == 0 {
            return;
        }
        let mut stale = self.stale_slots.borrow_mut();
        let known = stale.iter_mut().find(|(stale_column, _)| *stale_column == column);
        match known {
            Some((_, known)) => known.extend(&slots),
            None => stale.push((column, slots)),
        }
    }

    /// Whether a row of a column lies in a free slot.
    pub(super) fn is_free_slot_row(&self, row: u64) -> bool {
        let slot = u32::try_from(row / u64::from(self.geometry.strip_rows())).unwrap_or(u32::MAX);
        self.stripe_map.is_free(slot)
    }

    /// Rows of a column, stripe maps included.
    pub(super) fn column_rows(&self) -> u64 {
        self.map_row(Column { member: 0, first_row: 0 }, 2)
    }

    /// Its number in the pool.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The current stripe map.
    #[must_use]
    pub fn map(&self) -> StripeMap {
        self.stripe_map.snapshot()
    }

    /// Its columns.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// Whether any column has stale slots.
    #[must_use]
    pub fn has_stale_columns(&self) -> bool {
        !self.stale_slots.borrow().is_empty()
    }

    pub(super) fn is_stale(&self, column: u16, slot: u32) -> bool {
        let stale = self.stale_slots.borrow();
        !stale.is_empty() && stale.iter().any(|(c, slots)| *c == column && slots.contains(slot))
    }

    /// The first `most` stripes from `from` on whose slot is stale in one of these columns.
    pub(super) fn stale_stripes(&self, from: u32, most: usize, columns: &[u16]) -> Vec<u32> {
        let stale = self.stale_slots.borrow();
        let of = || stale.iter().filter(|(column, _)| columns.contains(column));
        let is_stale = |slot| of().any(|(_, slots)| slots.contains(slot));
        let stripes = (from..).map_while(|n| Some((n, self.stripe_map.slot_of(n)?)));
        stripes.filter(|(_, slot)| is_stale(*slot)).map(|(stripe, _)| stripe).take(most).collect()
    }

    /// Forgets the stale slots of these columns.
    pub(super) fn clear_stale(&self, columns: &[u16]) {
        self.stale_slots.borrow_mut().retain(|(column, _)| !columns.contains(column));
    }

    /// The first row of one of the two maps of a column, on its member.
    pub(super) fn map_row(&self, column: Column, which: u64) -> u64 {
        let data_rows = u64::from(self.geometry.slots()) * u64::from(self.geometry.strip_rows());
        column.first_row
            + data_rows
            + which * u64::from(stripe_map_format::map_rows(&self.geometry))
    }
}
