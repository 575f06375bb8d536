//! What a crash has left is mended before a pool takes operations: by the last entry of each row in the logs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;

use block::{Buf, BufMut, Bufs, Error, Lba};
use futures_util::{Stream, StreamExt, stream};
use geometry::{Column, Role, Shape};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::Extent;
use super::array::Array;
use super::batch::{BLOCK_BYTES, Batch, Entry, NoBatch, Ring, SLOT_BLOCKS, SLOTS, What};
use super::recover::{Found, Mend, mend};
use super::row::{Strips, There};
use super::stripe::{Failure, Stripe, Unread, pages};
use super::sums::{sum, sum_with};

/// How many rows are mended at once.
const AT_ONCE: usize = 16;

/// Rows of copies that are compared at once.
const ALIKE_ROWS: u32 = 16;

/// A ring of the era that a crash has ended.
#[derive(Clone, Copy, Debug)]
pub struct OldRing {
    /// Number of the member that it lies on.
    pub member: u16,
    /// Which it is.
    pub ring: Ring,
    /// Where it begins on the member.
    pub at: Lba,
}

/// What has been mended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Rows that entries named, and strips of copies.
    pub mended: u64,
    /// Those of them that could not be made whole: more is lost than their level bears.
    pub lost: u64,
}

/// A row by its extent, the place of its stripe, and its number in that.
type At = (u64, u32, u32);

/// The last entry of a row.
struct Last {
    number: u64,
    changed: Strips,
    /// Whether it is the last one: somebody has it who has had no later one that is missing.
    is_certain: bool,
    /// What the logs of these members hold for the row.
    blocks: SmallVec<[(u16, Vec<Buf>); 2]>,
}

/// What the rings of one number hold, on all members.
pub struct Entries {
    era: u64,
    last: BTreeMap<At, Last>,
    copies: BTreeSet<CopiesAt>,
    whole: Whole,
    missing: Vec<(u16, u64)>,
}

impl Entries {
    /// What these rings hold, of a log of this era. Members whose ring cannot be read are out.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a ring is of a release that is not known, or contradicts itself: nothing has been changed then. And what
    /// stops the array.
    pub async fn read(array: &Array, era: u64, rings: &[OldRing]) -> Result<Self, Error> {
        let (last, copies, whole) = (BTreeMap::new(), BTreeSet::new(), Whole::new());
        let mut all = Self { era, last, copies, whole, missing: Vec::new() };
        for ring in rings.iter().filter(|ring| !array.is_out(ring.member)) {
            match entries(array, ring).await {
                Ok((batches, missing)) => {
                    let certain = missing.last().copied();
                    for batch in batches {
                        let is_certain = certain.is_none_or(|missing| batch.sequence > missing);
                        all.add(ring.member, batch, is_certain);
                    }
                    let count = missing.len() as u64;
                    all.missing.extend((count > 0).then_some((ring.member, count)));
                }
                Err(error @ Error::Corrupt { .. }) => return Err(error),
                Err(error) => array.out(ring.member, error).await?,
            }
        }
        Ok(all)
    }

    fn add(&mut self, member: u16, batch: Batch, is_certain: bool) {
        let moved = batch.entries.iter().filter_map(whole_of);
        moved.for_each(|(place, moved)| note_whole(&mut self.whole, place, moved));
        self.copies.extend(batch.entries.iter().filter_map(copies_of).flatten());
        note(&mut self.last, member, batch, is_certain);
    }

    /// The numbers of the extents that they name. Some may have been freed since.
    #[must_use]
    pub fn extents(&self) -> BTreeSet<u64> {
        let rows = self.last.keys().map(|at| at.0);
        let copies = self.copies.iter().map(|at| at.0);
        rows.chain(copies).chain(self.whole.keys().map(|at| at.0)).collect()
    }

    /// The places of stripes that they name, by number of the extent.
    pub fn places(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        let rows = self.last.keys().map(|at| (at.0, at.1));
        let copies = self.copies.iter().map(|at| (at.0, at.1));
        rows.chain(copies).chain(self.whole.keys().copied())
    }

    /// Members that do not give back so many batches which they have had: rows that nothing else names may not fit their parity.
    pub fn missing(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        self.missing.iter().copied()
    }

    /// Mends what was under way in these extents, and makes it durable. `array` has logs of a new era, in which nothing has been
    /// written.
    ///
    /// # Errors
    /// What stops the array.
    pub async fn mend(
        mut self,
        array: &Array,
        extents: &[(Shape, Rc<Extent>)],
    ) -> Result<Mended, Error> {
        let by_number: FxHashMap<u64, &(Shape, Rc<Extent>)> =
            extents.iter().map(|known| (known.1.number, known)).collect();
        place(array, self.era, &self.whole, &by_number).await?;
        // What was written to a place before a whole stripe was is void.
        self.last.retain(|at: &At, last: &mut Last| {
            self.whole.get(&(at.0, at.1)).is_none_or(|found| found.number < last.number)
        });
        let rows = self.last.into_iter().filter_map(|(at, last)| {
            // An extent that has been freed since has no rows.
            let (shape, extent) = by_number.get(&at.0)?;
            let extent = Rc::clone(extent);
            let stripe = Stripe { array, shape: *shape, extent, place: at.1, reads: None };
            (at.1 < shape.places() && at.2 < shape.strip_rows()).then_some((stripe, at.2, last))
        });
        let mut mended = Mended::default();
        let rows = stream::iter(rows)
            .map(|(stripe, row, last)| async move { stripe.mend_row(row, &last).await });
        mended.add(rows.buffer_unordered(AT_ONCE)).await?;
        let regions = self.copies.into_iter().filter_map(|(number, place, strip)| {
            let (shape, extent) = by_number.get(&number)?;
            let (shape, extent) = (*shape, Rc::clone(extent));
            (place < shape.stripes())
                .then_some((Stripe { array, shape, extent, place, reads: None }, strip))
        });
        let regions = stream::iter(regions)
            .map(|(stripe, strip)| async move { stripe.make_alike(strip).await });
        mended.add(regions.buffer_unordered(AT_ONCE)).await?;
        array.flush().await?;
        Ok(mended)
    }
}

impl fmt::Debug for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entries").field("rows", &self.last.len()).finish_non_exhaustive()
    }
}

impl Mended {
    /// Counts what becomes of rows, or of strips of copies.
    async fn add(
        &mut self,
        outcomes: impl Stream<Item = Result<(), Failure>>,
    ) -> Result<(), Error> {
        let mut outcomes = pin!(outcomes);
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok(()) => self.mended += 1,
                Err(Failure::Lost) => self.lost += 1,
                Err(Failure::Array(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The last whole stripe of each place that was written one, by extent and place.
type Whole = BTreeMap<(u64, u32), Moved>;

/// That a stripe lies elsewhere.
struct Moved {
    number: u64,
    stripe: u32,
}

fn whole_of(entry: &Entry) -> Option<((u64, u32), Moved)> {
    let Entry { number, extent, place, what } = *entry;
    let What::Whole { stripe } = what else { return None };
    Some(((extent, place), Moved { number, stripe }))
}

fn note_whole(whole: &mut Whole, place: (u64, u32), moved: Moved) {
    match whole.get(&place) {
        Some(known) if known.number >= moved.number => {}
        _ => drop(whole.insert(place, moved)),
    }
}

/// Notes where stripes lie that have moved, and makes that durable.
async fn place(
    array: &Array,
    era: u64,
    whole: &Whole,
    by_number: &FxHashMap<u64, &(Shape, Rc<Extent>)>,
) -> Result<(), Error> {
    let mut all: Vec<_> = whole.iter().collect();
    all.sort_unstable_by_key(|(_, moved)| moved.number);
    let mut changed = BTreeMap::new();
    for ((number, place), moved) in all {
        let Some((shape, extent)) = by_number.get(number) else { continue };
        let is_news = *place < shape.places()
            && extent.placement.moves(era, moved.number, moved.stripe, *place);
        if is_news {
            changed.insert(*number, extent);
        }
    }
    for extent in changed.into_values() {
        array.save_map(extent).await?;
    }
    Ok(())
}

/// A strip by its extent, the place of its stripe, and its number in that.
type CopiesAt = (u64, u32, u16);

/// The strips whose copies an entry names.
fn copies_of(entry: &Entry) -> Option<impl Iterator<Item = CopiesAt> + use<>> {
    let Entry { extent, place, what, .. } = *entry;
    let What::Copies { stripes, changed } = what else { return None };
    let end = place.saturating_add(stripes);
    Some((place..end).flat_map(move |place| changed.iter().map(move |n| (extent, place, n))))
}

/// The batches of a ring from its tail on, and the numbers of those that are [`missing`].
async fn entries(array: &Array, old: &OldRing) -> Result<(Vec<Batch>, Vec<u64>), Error> {
    let mut batches = Vec::new();
    let blocks = u32::try_from(SLOT_BLOCKS).unwrap_or(u32::MAX);
    for slot in 0..SLOTS {
        let at = old.at.0 + u64::from(slot * blocks);
        let _room = array.room(blocks).await;
        let data = array.read(old.member, at, blocks, &array.scratch).await?;
        match Batch::parse(&data, &old.ring) {
            Ok(batch) if Batch::slot(batch.sequence) == slot => batches.push(kept(batch)),
            // It strayed there.
            Ok(_) => {}
            Err(NoBatch::Foreign | NoBatch::Torn | NoBatch::Other) => {}
            Err(why @ (NoBatch::Version(_) | NoBatch::Contradiction)) => {
                tracing::error!(member = old.member, slot, error = %why, "the parity log cannot be read");
                return Err(Error::Corrupt { at: Lba(at) });
            }
        }
    }
    let newest = batches.iter().max_by_key(|batch| batch.sequence);
    let (tail, newest) = newest.map_or((1, 0), |batch| (batch.tail, batch.sequence));
    batches.retain(|batch| batch.sequence >= tail);
    batches.sort_unstable_by_key(|batch| batch.sequence);
    let missing = missing(tail, newest, &batches);
    Ok((batches, missing))
}

/// Those of a ring that have been durable, as others came after them, and are not there. The one whose place the next would have had
/// may be torn by that, and is of no account then.
fn missing(tail: u64, newest: u64, there: &[Batch]) -> Vec<u64> {
    let from = tail.max(newest.saturating_add(2).saturating_sub(SLOTS.into()));
    let is_there = |sequence: &u64| there.binary_search_by_key(sequence, |b| b.sequence).is_ok();
    (from..=newest).filter(|sequence| !is_there(sequence)).collect()
}

/// The batch with blocks of its own: what it was read into is needed for the next.
fn kept(batch: Batch) -> Batch {
    let own = |block: &Buf| {
        let mut page = BufMut::lone_page();
        page.copy_from_slice(block);
        page.freeze()
    };
    Batch { blocks: batch.blocks.iter().map(own).collect(), ..batch }
}

/// Notes what a batch says of rows, if nothing later is known of them.
fn note(last: &mut BTreeMap<At, Last>, member: u16, batch: Batch, is_certain: bool) {
    let mut blocks = batch.blocks.into_iter();
    for entry in batch.entries {
        let Entry { number, extent, place, what } = entry;
        let What::Rows { row, rows, changed } = what else { continue };
        let each = entry.blocks() / usize::from(rows);
        for n in 0..u32::from(rows) {
            let of: Vec<Buf> = blocks.by_ref().take(each).collect();
            let at = (extent, place, row.saturating_add(n));
            let fresh = || Last { number, changed, is_certain: false, blocks: SmallVec::new() };
            let found = last.entry(at).or_insert_with(fresh);
            if found.number < number {
                *found = fresh();
            }
            if found.number == number {
                found.blocks.push((member, of));
                found.is_certain |= is_certain;
            }
        }
    }
}

impl Last {
    fn of(&self, column: Column) -> Option<&[Buf]> {
        self.blocks.iter().find(|(m, _)| *m == column.member).map(|(_, blocks)| &blocks[..])
    }
}

impl Stripe<'_> {
    /// Makes a row whole by the last entry that names it; columns that are out lack it then.
    async fn mend_row(&self, row: u32, last: &Last) -> Result<(), Failure> {
        let region = self.shape.region(self.place);
        self.array.announce(&self.extent, region).await?;
        let mended = self.mend(row, last).await;
        self.array.announce(&self.extent, region).await?;
        mended
    }

    async fn mend(&self, row: u32, last: &Last) -> Result<(), Failure> {
        if !last.is_certain {
            return self.sum_again(row).await;
        }
        let logged = |role| self.column(role).is_ok_and(|column| last.of(column).is_some());
        let found = Found { changed: last.changed, by_p: logged(Role::P), by_q: logged(Role::Q) };
        let (mut there, pages) = (self.there(), 2 * self.all().len());
        let _room = self.array.room(pages).await;
        loop {
            let tried = match mend(found, there) {
                Mend::Nothing => return Ok(()),
                Mend::Follow(strip) => self.follow(row, last, strip).await?,
                Mend::Answer(strip) => self.answer(row, last, strip).await?,
                Mend::Redo => return self.redo(row, last).await,
            };
            match tried {
                None => return Ok(()),
                Some(Role::Data(strip)) => {
                    there.data = there.data.without([strip].into_iter().collect());
                }
                Some(_) => return Err(Failure::Lost),
            }
        }
    }

    /// Parities are made of the data as it is: what the log says may be older than that, and must not come back.
    async fn sum_again(&self, row: u32) -> Result<(), Failure> {
        let there = self.there();
        if there.data.len() < self.data().into() {
            return Err(Failure::Lost);
        }
        let _room = self.array.room(2 * self.all().len()).await;
        let data = There { p: false, q: false, ..there };
        let Ok(had) = self.gather(&(row..row + 1), data).await? else {
            return Err(Failure::Lost);
        };
        let data: SmallVec<[&[u8]; 16]> =
            (0..self.data()).map(|n| &had.pages(Role::Data(n))[0][..]).collect();
        for role in (There { data: Strips::default(), ..there }).roles() {
            let mut page = self.array.scratch.credit().alloc_page(BLOCK_BYTES);
            sum(self.array.parity, role, &data, &mut page);
            self.write(role, row, page.into(), false).await?;
        }
        Ok(())
    }

    /// Makes the copies of a strip alike: as the first one is that can be read. Those that are out lack it then.
    async fn make_alike(&self, strip: u16) -> Result<(), Failure> {
        let region = self.shape.region(self.place);
        self.array.announce(&self.extent, region).await?;
        self.make_copies_alike(strip).await?;
        Ok(self.array.announce(&self.extent, region).await?)
    }

    async fn make_copies_alike(&self, strip: u16) -> Result<(), Failure> {
        if self.columns_there(Role::Data(strip)).count() < 2 {
            return Ok(());
        }
        let rows = self.shape.strip_rows();
        for start in (0..rows).step_by(ALIKE_ROWS as usize) {
            let rows = start..rows.min(start + ALIKE_ROWS);
            match self.make_rows_alike(strip, &rows).await {
                // One copy has some of them, and another one others.
                Err(Failure::Lost) => {
                    for row in rows {
                        self.make_rows_alike(strip, &(row..row + 1)).await?;
                    }
                }
                outcome => outcome?,
            }
        }
        Ok(())
    }

    async fn make_rows_alike(&self, strip: u16, rows: &Range<u32>) -> Result<(), Failure> {
        let columns: SmallVec<[Column; 4]> = self.columns_there(Role::Data(strip)).collect();
        let copies = u32::try_from(columns.len()).unwrap_or(u32::MAX);
        let _room = self.array.room((rows.end - rows.start).saturating_mul(copies)).await;
        let mut known: Option<Bufs> = None;
        let mut others = SmallVec::<[Column; 4]>::new();
        for column in columns {
            match (self.read_at(column, rows, &self.array.scratch).await, &known) {
                (Ok(data), None) => known = Some(data),
                (Ok(data), Some(first)) if data.same_bytes(first) => {}
                (Ok(_), Some(_)) => others.push(column),
                (Err(error), _) => {
                    self.unread(Unread(Some((column, error)))).await?;
                    others.push(column);
                }
            }
        }
        let known = known.ok_or(Failure::Lost)?;
        for column in others {
            self.write_at(column, rows.start, known.clone(), false).await?;
        }
        Ok(())
    }

    /// Parities follow from what a strip holds. If that cannot be read, it is told.
    async fn follow(&self, row: u32, last: &Last, strip: u16) -> Result<Option<Role>, Failure> {
        let role = Role::Data(strip);
        let Some(data) = self.row_of(role, row).await? else { return Ok(Some(role)) };
        self.write_sums(row, last, &[(strip, &data)]).await?;
        Ok(None)
    }

    /// P says what a strip is that is lost, and Q follows from that.
    async fn answer(&self, row: u32, last: &Last, strip: u16) -> Result<Option<Role>, Failure> {
        let Some(p) = self.row_of(Role::P, row).await? else { return Ok(Some(Role::P)) };
        let mut page = self.array.scratch.credit().alloc_page(BLOCK_BYTES);
        let kept = self.kept(last, Role::P)?;
        self.array.parity.xor(&[&p, kept], &mut page);
        self.write_sums(row, last, &[(strip, &page)]).await?;
        Ok(None)
    }

    /// What the log has of new data is written, and parities follow from it.
    async fn redo(&self, row: u32, last: &Last) -> Result<(), Failure> {
        let new = last.blocks.first().map_or(&[][..], |(_, blocks)| &blocks[1..]);
        let new: SmallVec<[(u16, &Buf); 4]> = last.changed.iter().zip(new).collect();
        for (strip, data) in &new {
            self.write(Role::Data(*strip), row, Bufs::from((*data).clone()), false).await?;
        }
        let new: SmallVec<[(u16, &[u8]); 4]> =
            new.iter().map(|(n, data)| (*n, &data[..])).collect();
        self.write_sums(row, last, &new).await
    }

    async fn write_sums(&self, row: u32, last: &Last, new: &[(u16, &[u8])]) -> Result<(), Failure> {
        let parities = There { data: Strips::default(), ..self.there() };
        for role in parities.roles() {
            let mut page = self.array.scratch.credit().alloc_page(BLOCK_BYTES);
            sum_with(self.array.parity, role, self.kept(last, role)?, new, &mut page);
            self.write(role, row, page.into(), false).await?;
        }
        Ok(())
    }

    /// The sum of kept strips that the log of a parity has.
    fn kept<'a>(&self, last: &'a Last, role: Role) -> Result<&'a [u8], Failure> {
        let blocks = last.of(self.column(role)?);
        blocks.and_then(<[Buf]>::first).map(|kept| &kept[..]).ok_or(Failure::Lost)
    }

    /// One row of a strip; none if it cannot be read.
    async fn row_of(&self, role: Role, row: u32) -> Result<Option<Buf>, Failure> {
        match self.read(role, &(row..row + 1), &self.array.scratch).await {
            Ok(data) => Ok(pages(&data).into_iter().next()),
            Err(unread) => {
                self.unread(unread).await?;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there(sequences: impl Iterator<Item = u64>) -> Vec<Batch> {
        let none = Batch { sequence: 0, tail: 0, entries: Vec::new(), blocks: Vec::new() };
        sequences.map(|sequence| Batch { sequence, ..none.clone() }).collect()
    }

    #[test]
    fn whoever_has_been_durable_is_missed_and_nobody_else() {
        assert!(missing(1, 0, &[]).is_empty());
        assert!(missing(5, 9, &there(5..10)).is_empty());
        assert_eq!(missing(5, 9, &there([5, 7, 9].into_iter())), [6, 8]);
        // All slots are in use, and the next batch is torn in the first one's.
        assert!(missing(70, 133, &there(71..134)).is_empty());
        assert_eq!(missing(70, 133, &there(72..134)), [71]);
        assert!(missing(0, u64::MAX, &there(u64::MAX - 62..=u64::MAX)).len() < 64);
    }
}
