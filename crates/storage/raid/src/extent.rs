//! An extent in use: its columns, their stale slots, and its stripe map.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::{BufMut, Bufs, Error};
use futures_util::future::join_all;
use geometry::{ALL_REGIONS, Column, MAP_REGION, ROW_BYTES, RaidGeometry, RowSet, SlotSet};

use super::array::Array;
use super::lost_rows::LostRows;
use super::mistake::Mistake;
use super::stripe_map::{LiveStripeMap, StripeMap};
use super::stripe_map_format::{self, MapOwner, ParsedMap};

const ROW: usize = ROW_BYTES as usize;

/// The unit that a pool allocates to a volume: one column on each of several members.
#[derive(Debug)]
pub struct Extent {
    pub(super) number: u64,
    geometry: RaidGeometry,
    pub(super) columns: Box<[Column]>,
    /// Stale slots, by column.
    pub(super) stale_slots: RefCell<Vec<(u16, SlotSet)>>,
    /// Shared by all versions of this extent with other columns.
    pub(super) stripe_map: Rc<LiveStripeMap>,
    /// Lost rows of its data; shared likewise.
    pub(super) lost_rows: Rc<LostRows>,
    /// Columns whose new position is not committed to the pool metadata yet, one bit each.
    uncommitted_columns: Cell<u64>,
    /// `membership_changes` of the array, and the regions recorded as stale on detached columns
    /// then.
    announced_stale: Cell<(u64, u32)>,
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

    /// The same, with the stripe map read from its columns.
    ///
    /// # Errors
    /// If no column can be read.
    pub async fn load_stripe_map(self, array: &Array) -> Result<Self, Error> {
        self.columns.iter().for_each(|column| array.adopt_column(column));
        let rows = stripe_map_format::map_rows(&self.geometry);
        if rows == 0 {
            return Ok(self);
        }
        // One current map is enough. One column more is read than may have lost an acknowledged
        // write.
        let mut needed = usize::from(self.geometry.redundancy().parity_strips()) + 1;
        let (mut newest, mut damaged, mut read_count) = (None, false, 0);
        for (_, column) in
            (0..).zip(&self.columns).filter(|(n, c)| self.has_current_map(array, *n, **c))
        {
            let _scratch = array.acquire_scratch(rows).await;
            let mut halves = Vec::new();
            for which in [0, 1] {
                let at = self.map_row(*column, which);
                let read = array.read(column.member, at, rows, &array.scratch).await;
                halves.extend(read.map(|data| data.to_vec()));
            }
            // The unreadable one may be the newer one, so another column is read.
            if halves.len() < 2 {
                damaged = true;
                needed = usize::MAX;
            }
            if halves.is_empty() {
                continue;
            }
            for half in &halves {
                match stripe_map_format::parse(half, &self.geometry, self.map_owner(array)) {
                    ParsedMap::Map { sequence, map } => {
                        let is_newer = newest.as_ref().is_none_or(|(known, _)| sequence > *known);
                        newest = if is_newer { Some((sequence, map)) } else { newest };
                    }
                    ParsedMap::Absent => {}
                    // Other columns may have the map that is damaged here, so all are read.
                    ParsedMap::Damaged => needed = usize::MAX,
                }
            }
            read_count += 1;
            if read_count >= needed {
                break;
            }
        }
        if read_count == 0 {
            tracing::error!(extent = self.number, damaged, "no disk has a readable stripe map");
            return Err(Error::Gone);
        }
        let (sequence, map) = newest.unwrap_or((0, self.map()));
        Ok(Self { stripe_map: Rc::new(LiveStripeMap::new(map, sequence)), ..self })
    }

    /// Whether the stripe map of a column is up to date.
    fn has_current_map(&self, array: &Array, number: u16, column: Column) -> bool {
        let is_stale = self.stale_slots.borrow().iter().any(|(stale, _)| *stale == number);
        !is_stale && !array.is_detached(column.member)
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

    /// Marks a slot current on all attached columns, after its contents were written to them. Does
    /// nothing and returns false if the membership has changed since it was `changes`: a member
    /// attached meanwhile may have got none or a part of the writes.
    pub(super) fn mark_current(&self, slot: u32, array: &Array, changes: u64) -> bool {
        if array.membership_changes() != changes {
            return false;
        }
        let is_attached = |column: u16| {
            let column = self.columns.get(usize::from(column));
            column.is_some_and(|column| !array.is_detached(column.member))
        };
        let mut stale = self.stale_slots.borrow_mut();
        let attached = stale.iter_mut().filter(|(column, _)| is_attached(*column));
        attached.for_each(|(_, slots)| slots.remove(slot));
        true
    }

    /// Columns with stale slots whose members are attached: these can be rebuilt.
    #[must_use]
    pub fn rebuildable_columns(&self, array: &Array) -> Vec<u16> {
        let stale = self.stale_slots.borrow();
        let columns = stale.iter().map(|(column, _)| *column);
        let is_attached = |column: &u16| {
            let column = self.columns.get(usize::from(*column));
            column.is_some_and(|column| !array.is_detached(column.member))
        };
        columns.filter(is_attached).collect()
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

    fn map_owner(&self, array: &Array) -> MapOwner {
        MapOwner { pool: array.pool_id(), extent: self.number }
    }

    /// The first row of one of the two maps of a column, on its member.
    fn map_row(&self, column: Column, which: u64) -> u64 {
        let data_rows = u64::from(self.geometry.slots()) * u64::from(self.geometry.strip_rows());
        column.first_row
            + data_rows
            + which * u64::from(stripe_map_format::map_rows(&self.geometry))
    }
}

impl Array {
    /// Records that detached columns are stale in these regions. Called before a write to them, and
    /// once more after it, for members that were detached meanwhile.
    pub(super) async fn mark_stale(&self, extent: &Extent, regions: u32) -> Result<(), Error> {
        if self.makes_mistake(Mistake::SkipsStaleRegions) {
            return Ok(());
        }
        let is_detached = |column: &Column| self.is_detached(column.member);
        // The position that a moved column had before misses these writes.
        while extent.uncommitted_columns.get() != 0 || extent.columns.iter().any(is_detached) {
            let changes = self.membership_changes();
            let known = |(at, regions)| if at == changes { regions } else { 0 };
            if known(extent.announced_stale.get()) & regions == regions {
                break;
            }
            // Members whose detach is not recorded yet would be missed.
            for column in extent.columns.iter().filter(|column| self.is_detached(column.member)) {
                self.detach_member(column.member, Error::Gone).await?;
            }
            self.persist_stale_regions(extent.number, regions).await?;
            if self.membership_changes() == changes {
                extent
                    .announced_stale
                    .set((changes, known(extent.announced_stale.get()) | regions));
            }
        }
        Ok(())
    }

    /// Makes the stripe map of an extent durable.
    pub(super) async fn save_stripe_map(&self, extent: &Extent) -> Result<(), Error> {
        if stripe_map_format::map_rows(&extent.geometry) == 0 {
            return Ok(());
        }
        // One save at a time: the older of the two maps must stay intact.
        let mut saved = extent.stripe_map.saved_sequence.lock().await;
        self.mark_stale(extent, MAP_REGION).await?;
        let sequence = *saved + 1;
        let bytes = stripe_map_format::to_bytes(&extent.map(), sequence, extent.map_owner(self));
        let data: Bufs = bytes.chunks_exact(ROW).map(copy_to_page).collect();
        let each = extent.columns.iter().map(|column| {
            let at = extent.map_row(*column, sequence % 2);
            self.write(column.member, at, data.clone(), true)
        });
        join_all(each).await.into_iter().collect::<Result<(), Error>>()?;
        *saved = sequence;
        self.mark_stale(extent, MAP_REGION).await
    }
}

/// Copies into heap memory: tasks that wait for maps to be saved may hold all of the array's
/// memory.
fn copy_to_page(bytes: &[u8]) -> block::Buf {
    let mut page = BufMut::heap_page();
    page.copy_from_slice(bytes);
    page.freeze()
}
