//! One stripe: what of it is there, what is read of it, and what is made of the rest.

use std::ops::Range;
use std::rc::Rc;

use block::{Buf, BufMut, Bufs, BufsMut, Ctx, Error, UnitLock, overlay};
use futures_util::future::join_all;
use geometry::{Column, DamageKind, Level, ROW_BYTES, Role, Shape};
use smallvec::SmallVec;

use super::Extent;
use super::array::{Array, Damage, Spot, bit};
use super::batch::one;
use super::quiet::{Quiet, Reads};
use super::row::{Lost, Strips, There};
use super::sums::Row;

const ROW: usize = ROW_BYTES as usize;

/// A stripe, for whoever has its turn, or reads no more than data.
#[derive(Clone, Debug)]
pub(super) struct Stripe<'a> {
    pub(super) array: &'a Array,
    pub(super) shape: Shape,
    pub(super) extent: Rc<Extent>,
    /// Where in the extent it lies.
    pub(super) place: u32,
    /// Clients that read it, if there may be any, and by which number.
    pub(super) reads: Option<(&'a Reads, u64)>,
}

/// Why something could not be done with a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// More is lost than the level bears.
    Lost,
    /// The array can do nothing any more.
    Array(Error),
}

/// What could not be read where, or that it is nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unread(pub(super) Option<(Column, Error)>);

impl Unread {
    /// Whether the member has it, and does not give it. What is out or lacks it may be elsewhere by now, or filled.
    pub(super) fn is_damage(&self) -> bool {
        matches!(self.0, Some((_, error)) if error != Error::Gone)
    }
}

impl From<Lost> for Failure {
    fn from(Lost: Lost) -> Self {
        Self::Lost
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Array(error)
    }
}

/// Rows of some strips, each row in one piece.
#[derive(Debug, Default)]
pub(super) struct Had(SmallVec<[(Role, Pages); 4]>);

/// Rows of one strip, each in one piece.
pub(super) type Pages = SmallVec<[Buf; 1]>;

impl Had {
    /// What is known of row `n` of these, of `data` strips of data in all.
    pub(super) fn row(&self, data: u16, n: usize) -> Row<'_> {
        let mut row = Row::new(data);
        self.0.iter().for_each(|(role, pages)| row.know(*role, &pages[n]));
        row
    }

    /// The rows of one strip; none if they are not known.
    pub(super) fn pages(&self, role: Role) -> &[Buf] {
        self.0.iter().find(|(r, _)| *r == role).map_or(&[], |(_, pages)| pages)
    }

    pub(super) fn add(&mut self, role: Role, pages: Pages) {
        self.0.push((role, pages));
    }
}

impl Stripe<'_> {
    pub(super) fn spot(&self) -> Spot {
        (self.extent.number, self.place)
    }

    /// Waits until no client reads it.
    pub(super) async fn quiet(&self) -> Option<Quiet<'_>> {
        let (reads, key) = self.reads?;
        Some(reads.quiet(key).await)
    }

    /// Strips of data.
    pub(super) fn data(&self) -> u16 {
        self.shape.data()
    }

    pub(super) fn all(&self) -> There {
        There::all(self.data(), self.shape.level().parities())
    }

    /// Where the copies of a strip lie, and whether they lack it. Of what has parity there is one.
    fn copies(&self, role: Role) -> impl Iterator<Item = (Column, bool)> {
        let columns = self.shape.columns_of(self.place, role);
        columns.filter_map(|n| {
            let column = self.extent.columns.get(usize::from(n))?;
            Some((*column, self.extent.lacks(n, self.place)))
        })
    }

    /// Where those lie that are there: which lack nothing, and whose members are not out.
    pub(super) fn columns_there(&self, role: Role) -> impl Iterator<Item = Column> {
        let there = |(column, lacks): &(Column, bool)| !lacks && !self.array.is_out(column.member);
        self.copies(role).filter(there).map(|(column, _)| column)
    }

    /// Where those lie that are to be filled.
    pub(super) fn lacking_columns(&self, role: Role) -> impl Iterator<Item = Column> {
        let fillable =
            |(column, lacks): &(Column, bool)| *lacks && !self.array.is_out(column.member);
        self.copies(role).filter(fillable).map(|(column, _)| column)
    }

    /// Where a strip of a stripe with parity lies.
    pub(super) fn column(&self, role: Role) -> Result<Column, Error> {
        self.copies(role).next().map(|(column, _)| column).ok_or(Error::OutOfRange)
    }

    /// Where `row` of the strip in `column` is on its member.
    pub(super) fn at(&self, column: Column, row: u32) -> u64 {
        column.at + u64::from(self.place) * u64::from(self.shape.strip_rows()) + u64::from(row)
    }

    /// What is there: its member is not out.
    pub(super) fn there(&self) -> There {
        let is_there = |role: &Role| self.columns_there(*role).next().is_some();
        There::of(self.shape.roles().filter(is_there))
    }

    /// Reads rows of one strip, of copies from the member that has the least to do.
    pub(super) async fn read(
        &self,
        role: Role,
        rows: &Range<u32>,
        ctx: &Ctx,
    ) -> Result<Bufs, Unread> {
        let column = self.idlest(role).ok_or(Unread(None))?;
        let data = self.read_at(column, rows, ctx).await;
        data.map_err(|error| Unread(Some((column, error))))
    }

    /// Where to read a strip: from one that is not slow, if there is such a one, and has the least to do.
    pub(super) fn idlest(&self, role: Role) -> Option<Column> {
        let slow = self.array.slow();
        let order = |c: &Column| (slow & bit(c.member) != 0, self.array.in_flight(c.member));
        self.columns_there(role).min_by_key(order)
    }

    /// Reads rows of what lies in `column`.
    pub(super) async fn read_at(
        &self,
        column: Column,
        rows: &Range<u32>,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let at = self.at(column, rows.start);
        self.array.read(column.member, at, rows.end - rows.start, ctx).await
    }

    /// Writes rows of one strip, wherever it has copies that lack nothing. A member that fails it is out.
    pub(super) async fn write(
        &self,
        role: Role,
        row: u32,
        data: Bufs,
        fua: bool,
    ) -> Result<(), Error> {
        let mut columns = self.copies(role).filter(|(_, lacks)| !lacks).map(|(column, _)| column);
        match (columns.next(), columns.next()) {
            (None, _) => Ok(()),
            (Some(only), None) => self.write_at(only, row, data, fua).await,
            (first, second) => {
                let all = first.into_iter().chain(second).chain(columns);
                let each = all.map(|column| self.write_at(column, row, data.clone(), fua));
                join_all(each).await.into_iter().collect()
            }
        }
    }

    /// Writes rows of what lies in `column`.
    pub(super) async fn write_at(
        &self,
        column: Column,
        row: u32,
        data: Bufs,
        fua: bool,
    ) -> Result<(), Error> {
        self.array.write(column.member, self.at(column, row), data, fua).await
    }

    /// Rows of these strips. If some cannot be read: which. A member that is gone is out.
    pub(super) async fn gather(
        &self,
        rows: &Range<u32>,
        what: There,
    ) -> Result<Result<Had, There>, Error> {
        let each = what
            .roles()
            .map(|role| async move { (role, self.read(role, rows, &self.array.scratch).await) });
        let (mut had, mut failed) = (Had::default(), SmallVec::<[Role; 2]>::new());
        for (role, found) in join_all(each).await {
            match found {
                Ok(data) => had.add(role, pages(&data)),
                Err(unread) => {
                    self.unread(unread).await?;
                    failed.push(role);
                }
            }
        }
        Ok(if failed.is_empty() { Ok(had) } else { Err(There::of(failed)) })
    }

    /// Something could not be read: if its member is gone, all are told.
    pub(super) async fn unread(&self, unread: Unread) -> Result<(), Error> {
        match unread.0 {
            Some((column, error @ Error::Gone)) => self.array.out(column.member, error).await,
            Some((column, error)) => {
                self.array.tell_damaged(self.damage(column, error));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// What a member does not give back: somewhere in its strip.
    fn damage(&self, column: Column, error: Error) -> Damage {
        let number = (0u16..).zip(&self.extent.columns).find(|(_, c)| **c == column);
        let is_it = |role: &Role| {
            let mut columns = self.shape.columns_of(self.place, *role);
            number.is_some_and(|(number, _)| columns.any(|n| n == number))
        };
        let kind = match error {
            Error::Corrupt { .. } => DamageKind::Corrupt,
            _ => DamageKind::Unreadable,
        };
        let rows = match self.shape.roles().find(is_it) {
            Some(Role::Data(strip)) => self.data_of(strip, 0..self.shape.strip_rows()),
            _ => self.data_of(0, 0..u32::try_from(self.shape.stripe_rows()).unwrap_or(0)),
        };
        Damage { kind, member: Some(column.member), extent: self.extent.number, rows }
    }

    /// Rows of the extent's data that rows of one strip are.
    pub(super) fn data_of(&self, strip: u16, rows: Range<u32>) -> Range<u32> {
        let stripe = self.extent.placement.stripe_at(self.place).unwrap_or(0);
        self.shape.data_rows(stripe, strip, &rows)
    }

    /// Rows of all strips of data, those that `avoid` names made of the others; with what else could not be read and was made
    /// so. Takes scratch memory of [`Self::restoring_pages`].
    pub(super) async fn restore(
        &self,
        rows: &Range<u32>,
        mut avoid: There,
    ) -> Result<(Had, There), Failure> {
        loop {
            let readable = self.there().without(avoid);
            let lost = |readable: There| Strips::first(self.data()).without(readable.data);
            let is_enough = |readable: &There| lost(*readable).len() <= readable.parities();
            // Without those that are slow, if that is enough.
            let in_time = Some(readable.without(self.slow())).filter(is_enough);
            let readable = in_time.unwrap_or(readable);
            if !is_enough(&readable) {
                return Err(Failure::Lost);
            }
            match self.gather(rows, readable).await? {
                Ok(had) => {
                    let made = self.made(rows, lost(readable), had, &self.array.scratch);
                    return Ok((made?, avoid));
                }
                Err(failed) => avoid = avoid.or(failed),
            }
        }
    }

    /// Scratch memory that [`Self::restore`] takes for each row, in pages.
    pub(super) fn restoring_pages(&self) -> u32 {
        match self.shape.level() {
            Level::Copies(_) => 2,
            level => 1 + self.all().len() + u32::from(level.parities()),
        }
    }

    /// With what is lost of what there was, in memory of `ctx`.
    pub(super) fn made(
        &self,
        rows: &Range<u32>,
        lost: Strips,
        mut had: Had,
        ctx: &Ctx,
    ) -> Result<Had, Lost> {
        let count = rows.len();
        let page = |_| ctx.credit().alloc_page(ROW);
        let mut made: SmallVec<[Vec<BufMut>; 2]> =
            lost.iter().map(|_| (0..count).map(page).collect()).collect();
        for n in 0..count {
            let mut out: SmallVec<[&mut [u8]; 2]> =
                made.iter_mut().map(|pages| &mut pages[n][..]).collect();
            if !had.row(self.data(), n).restore(self.array.parity, &mut out) {
                return Err(Lost);
            }
        }
        for (strip, pages) in lost.iter().zip(made) {
            had.add(Role::Data(strip), pages.into_iter().map(BufMut::freeze).collect());
        }
        Ok(had)
    }

    /// Scratch memory, page by page.
    pub(super) fn scratch_pages(&self, count: usize) -> Vec<BufMut> {
        let credit = self.array.scratch.credit();
        (0..count).map(|_| credit.alloc_page(ROW)).collect()
    }
}

/// Whole rows, each in one piece.
pub(super) fn pages(data: &Bufs) -> Pages {
    (0..data.len() / ROW).map(|n| one(&data.slice(n * ROW..(n + 1) * ROW))).collect()
}

/// `data` in memory that begins and ends with pages, copied into `out` if it does not.
pub(super) fn in_pages(data: Bufs, out: impl FnOnce() -> BufsMut) -> Bufs {
    if data.is_aligned(ROW) {
        return data;
    }
    let mut copy = out();
    overlay(&mut copy, 0, &data);
    copy.into()
}

impl super::Raid {
    /// Stripe number `stripe` of the extent at `index`.
    pub(super) fn stripe(&self, index: u32, stripe: u32) -> Result<Stripe<'_>, Error> {
        let extent = self.extent(index).ok_or(Error::OutOfRange)?;
        let (array, reads) = (&*self.array, Some((&self.reads, key(index, stripe))));
        let place = extent.placement.place_of(stripe).ok_or(Error::OutOfRange)?;
        Ok(Stripe { array, shape: self.shape, extent, place, reads })
    }

    /// Waits for the turn of a stripe.
    pub(super) async fn turn(&self, index: u32, stripe: u32) -> UnitLock<'_> {
        self.turns.lock(key(index, stripe)).await
    }
}

/// One number for a stripe of an extent.
pub(super) fn key(index: u32, stripe: u32) -> u64 {
    u64::from(index) << 32 | u64::from(stripe)
}
