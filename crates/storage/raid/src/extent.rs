//! An extent in use: where its columns are, what they lack, and where its stripes lie.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::{BufMut, Bufs, Error};
use futures_util::future::join_all;
use geometry::{ALL_REGIONS, Column, MAP_REGION, Places, ROW_BYTES, RowSet, Shape};

use super::array::Array;
use super::lost::Lost;
use super::map::{Map, Placement};
use super::mistake::Mistake;
use super::stored_map::{self, Found, Whose};

const ROW: usize = ROW_BYTES as usize;

/// What a pool gives to a volume at once: a column of each of so many members.
#[derive(Debug)]
pub struct Extent {
    pub(super) number: u64,
    shape: Shape,
    pub(super) columns: Box<[Column]>,
    /// Columns that lack what these places should have.
    pub(super) lacking: RefCell<Vec<(u16, Places)>>,
    /// Shared by all that this extent has been, with other columns.
    pub(super) placement: Rc<Placement>,
    /// Rows of its data that are lost; shared likewise.
    pub(super) lost: Rc<Lost>,
    /// Columns of which others do not know yet that they are here, a bit for each.
    unsettled: Cell<u64>,
    /// Regions that columns whose members are out are known to lack, and how often members had gone and come when they were.
    told: Cell<(u64, u32)>,
}

impl Extent {
    /// The extent of this number in the pool, on as many columns as its shape has. Each has room for a strip of each of the
    /// shape's [places](Shape::places), and behind them for two [maps](stored_map).
    #[must_use]
    pub fn new(number: u64, shape: Shape, columns: impl IntoIterator<Item = Column>) -> Self {
        let map = Map::new(shape.stripes(), shape.places());
        let (columns, placement) = (columns.into_iter().collect(), Rc::new(Placement::new(map, 0)));
        let told = Cell::new((0, 0));
        let (lacking, unsettled) = (RefCell::default(), Cell::new(0));
        let lost = Rc::default();
        Self { number, shape, columns, lacking, placement, lost, unsettled, told }
    }

    /// The same with these rows of its data lost.
    #[must_use]
    pub fn having_lost(self, rows: RowSet) -> Self {
        Self { lost: Rc::new(Lost::of(rows)), ..self }
    }

    /// The same, of which these rows of data could not be repaired.
    #[must_use]
    pub fn having_unrepaired(self, rows: &RowSet) -> Self {
        rows.iter().for_each(|rows| self.lost.note_unrepaired(rows));
        self
    }

    /// The same with its stripes where they are, as its columns say.
    ///
    /// # Errors
    /// That none of them can be read.
    pub async fn load(self, array: &Array) -> Result<Self, Error> {
        self.columns.iter().for_each(|column| array.takes(column));
        let rows = stored_map::rows(&self.shape);
        if rows == 0 {
            return Ok(self);
        }
        // One tells it; as many are asked as may have lost a write that they have confirmed, and one more.
        let mut wanted = usize::from(self.shape.level().parities()) + 1;
        let (mut newest, mut damaged, mut asked) = (None, false, 0);
        for (_, column) in (0..).zip(&self.columns).filter(|(n, c)| self.tells(array, *n, **c)) {
            let _room = array.room(rows).await;
            let mut halves = Vec::new();
            for which in [0, 1] {
                let at = self.map_at(*column, which);
                let read = array.read(column.member, at, rows, &array.scratch).await;
                halves.extend(read.map(|data| data.to_vec()));
            }
            // The one that cannot be read may be the newer one: another column tells.
            if halves.len() < 2 {
                damaged = true;
                wanted = usize::MAX;
            }
            if halves.is_empty() {
                continue;
            }
            for half in &halves {
                match stored_map::parse(half, &self.shape, self.whose(array)) {
                    Found::Map { sequence, map } => {
                        let is_newer = newest.as_ref().is_none_or(|(known, _)| sequence > *known);
                        newest = if is_newer { Some((sequence, map)) } else { newest };
                    }
                    Found::Nothing => {}
                    // The other columns may have the one that this was: all of them are asked.
                    Found::Damaged => wanted = usize::MAX,
                }
            }
            asked += 1;
            if asked >= wanted {
                break;
            }
        }
        if asked == 0 {
            tracing::error!(extent = self.number, damaged, "no disk tells where stripes lie");
            return Err(Error::Gone);
        }
        let (sequence, map) = newest.unwrap_or((0, self.map()));
        Ok(Self { placement: Rc::new(Placement::new(map, sequence)), ..self })
    }

    /// Whether what a column says of stripes can be believed.
    fn tells(&self, array: &Array, number: u16, column: Column) -> bool {
        let lacks = self.lacking.borrow().iter().any(|(lacking, _)| *lacking == number);
        !lacks && !array.is_out(column.member)
    }

    /// The same, but what its column number `column` should hold in these regions is not there: it is new, or comes back.
    #[must_use]
    pub fn behind(self, column: u16, regions: u32) -> Self {
        if regions & ALL_REGIONS != 0 {
            let places = self.shape.places_of(regions);
            self.lacking.borrow_mut().push((column, places));
        }
        self
    }

    /// The same with one column elsewhere, where all of it is.
    pub(super) fn with(&self, column: u16, to: Column) -> Self {
        let mut columns = self.columns.clone();
        columns.get_mut(usize::from(column)).into_iter().for_each(|place| *place = to);
        let (lacking, placement) = (self.lacking.clone(), Rc::clone(&self.placement));
        lacking.borrow_mut().retain(|(lacks, _)| *lacks != column);
        let (unsettled, told) = (self.unsettled.clone(), Cell::new((0, 0)));
        Self {
            number: self.number,
            shape: self.shape,
            columns,
            lacking,
            placement,
            lost: Rc::clone(&self.lost),
            unsettled,
            told,
        }
    }

    /// The same with one column elsewhere, where nothing is yet.
    pub(super) fn moved_to(&self, column: u16, to: Column) -> Self {
        let moved = self.with(column, to);
        moved.unsettled.set(moved.unsettled.get() | 1u64.checked_shl(column.into()).unwrap_or(0));
        moved.behind(column, ALL_REGIONS)
    }

    /// All know that a column is where it is.
    pub fn settled(&self, column: u16) {
        let bit = 1u64.checked_shl(column.into()).unwrap_or(0);
        self.unsettled.set(self.unsettled.get() & !bit);
    }

    /// From now on a column lacks these regions as well: its member is about to be in again.
    pub fn lacks_also(&self, column: u16, regions: u32) {
        let places = self.shape.places_of(regions);
        if regions & ALL_REGIONS == 0 {
            return;
        }
        let mut lacking = self.lacking.borrow_mut();
        let known = lacking.iter_mut().find(|(lacks, _)| *lacks == column);
        match known {
            Some((_, known)) => known.extend(&places),
            None => lacking.push((column, places)),
        }
    }

    /// Whether a row of a column lies in a place that no stripe has.
    pub(super) fn is_spare(&self, row: u64) -> bool {
        let place = u32::try_from(row / u64::from(self.shape.strip_rows())).unwrap_or(u32::MAX);
        self.placement.is_free(place)
    }

    /// Rows of a column, all that belongs to it.
    pub(super) fn rows(&self) -> u64 {
        self.map_at(Column { member: 0, at: 0 }, 2)
    }

    /// Its number in the pool.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Where its stripes lie now.
    #[must_use]
    pub fn map(&self) -> Map {
        self.placement.map()
    }

    /// Its columns.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// Whether some column lacks something.
    #[must_use]
    pub fn is_lacking(&self) -> bool {
        !self.lacking.borrow().is_empty()
    }

    pub(super) fn lacks(&self, column: u16, place: u32) -> bool {
        let lacking = self.lacking.borrow();
        !lacking.is_empty() && lacking.iter().any(|(c, places)| *c == column && places.has(place))
    }

    /// What belongs at `place` has been written, on all columns whose members are in, since nobody but these had gone and come so
    /// often. Says whether that is still so: one that has come meanwhile may have got none of it, or a part, and nobody lacks less
    /// than before.
    pub(super) fn has_now(&self, place: u32, array: &Array, changes: u64) -> bool {
        if array.changes() != changes {
            return false;
        }
        let is_in = |column: u16| {
            let column = self.columns.get(usize::from(column));
            column.is_some_and(|column| !array.is_out(column.member))
        };
        let mut lacking = self.lacking.borrow_mut();
        let there = lacking.iter_mut().filter(|(column, _)| is_in(*column));
        there.for_each(|(_, places)| places.remove(place));
        true
    }

    /// Columns that lack something and whose members are in: what can be filled.
    #[must_use]
    pub fn fillable(&self, array: &Array) -> Vec<u16> {
        let lacking = self.lacking.borrow();
        let columns = lacking.iter().map(|(column, _)| *column);
        let is_in = |column: &u16| {
            let column = self.columns.get(usize::from(*column));
            column.is_some_and(|column| !array.is_out(column.member))
        };
        columns.filter(is_in).collect()
    }

    /// The first stripes from `from` on of whose places one of these columns lacks what it should have, at most so many.
    pub(super) fn lacking_stripes(&self, from: u32, most: usize, columns: &[u16]) -> Vec<u32> {
        let lacking = self.lacking.borrow();
        let of = || lacking.iter().filter(|(column, _)| columns.contains(column));
        let lacks = |place| of().any(|(_, places)| places.has(place));
        let stripes = (from..).map_while(|n| Some((n, self.placement.place_of(n)?)));
        stripes.filter(|(_, place)| lacks(*place)).map(|(stripe, _)| stripe).take(most).collect()
    }

    /// These columns lack nothing any more.
    pub(super) fn have_all(&self, columns: &[u16]) {
        self.lacking.borrow_mut().retain(|(column, _)| !columns.contains(column));
    }

    fn whose(&self, array: &Array) -> Whose {
        Whose { pool: array.pool(), extent: self.number }
    }

    /// Where one of the two maps of a column begins on its member.
    fn map_at(&self, column: Column, which: u64) -> u64 {
        let behind = u64::from(self.shape.places()) * u64::from(self.shape.strip_rows());
        column.at + behind + which * u64::from(stored_map::rows(&self.shape))
    }
}

impl Array {
    /// Before this is over nothing of these regions of an extent may be written: columns that are out are known to lack them.
    /// Asked once more behind a write, for those that went out meanwhile.
    pub(super) async fn announce(&self, extent: &Extent, regions: u32) -> Result<(), Error> {
        if self.makes(Mistake::SkipsChanges) {
            return Ok(());
        }
        let is_out = |column: &Column| self.is_out(column.member);
        // What a column had before it was moved lacks what is written meanwhile.
        while extent.unsettled.get() != 0 || extent.columns.iter().any(is_out) {
            let changes = self.changes();
            let known = |(at, regions)| if at == changes { regions } else { 0 };
            if known(extent.told.get()) & regions == regions {
                break;
            }
            // Those of whom it is not known yet that they are out would be passed over.
            for column in extent.columns.iter().filter(|column| self.is_out(column.member)) {
                self.out(column.member, Error::Gone).await?;
            }
            self.tell_changed(extent.number, regions).await?;
            if self.changes() == changes {
                extent.told.set((changes, known(extent.told.get()) | regions));
            }
        }
        Ok(())
    }

    /// Makes durable where the stripes of an extent lie.
    pub(super) async fn save_map(&self, extent: &Extent) -> Result<(), Error> {
        if stored_map::rows(&extent.shape) == 0 {
            return Ok(());
        }
        // One after the other: the older one of the two must be whole.
        let mut saved = extent.placement.saved.lock().await;
        self.announce(extent, MAP_REGION).await?;
        let sequence = *saved + 1;
        let bytes = stored_map::to_bytes(&extent.map(), sequence, extent.whose(self));
        let data: Bufs = bytes.chunks_exact(ROW).map(page).collect();
        let each = extent.columns.iter().map(|column| {
            let at = extent.map_at(*column, sequence % 2);
            self.write(column.member, at, data.clone(), true)
        });
        join_all(each).await.into_iter().collect::<Result<(), Error>>()?;
        *saved = sequence;
        self.announce(extent, MAP_REGION).await
    }
}

/// Memory that is nobody's: whoever waits for maps to be saved may hold all of the array's.
fn page(bytes: &[u8]) -> block::Buf {
    let mut page = BufMut::lone_page();
    page.copy_from_slice(bytes);
    page.freeze()
}
