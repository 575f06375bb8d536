//! One stripe: which strips are available, reads, and reconstruction of missing strips.

use std::ops::Range;
use std::rc::Rc;

use block::{Buf, BufMut, Bufs, BufsMut, Ctx, Error, copy_into};
use futures_util::future::join_all;
use geometry::{Column, DamageKind, ROW_BYTES, RaidGeometry, Redundancy, StripRole};
use smallvec::SmallVec;

use super::array::Array;
use super::extent::{Extent, SlotId};
use super::log_batch::contiguous;
use super::member_bits::{MemberBits, member_bit};
use super::pool_metadata::Damage;
use super::read_locks::{ExclusiveReadLock, ReadLocks};
use super::row_parity::KnownRow;
use super::row_plan::{Available, StripSet, Unrecoverable};

const ROW: usize = ROW_BYTES as usize;

/// Most rows that are reconstructed at a time.
pub(super) const MAX_RECONSTRUCT_ROWS: u32 = 16;

/// A stripe, for the holder of its stripe lock, or for plain reads of data.
#[derive(Clone, Debug)]
pub(super) struct Stripe<'a> {
    pub(super) array: &'a Array,
    pub(super) geometry: RaidGeometry,
    pub(super) extent: Rc<Extent>,
    /// The slot where it lies.
    pub(super) slot: u32,
    /// Client reads of it, with its key there, if clients may read it.
    pub(super) read_locks: Option<(&'a ReadLocks, u64)>,
}

/// Why something could not be done with a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StripeError {
    /// More strips are missing than the redundancy tolerates.
    Unrecoverable,
    /// The array does not work any more.
    Array(Error),
}

/// What could not be read and why; none if no column has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadFailure(pub(super) Option<(Column, Error)>);

impl ReadFailure {
    /// Whether the member should have the data but does not return it. If it was detached or stale,
    /// the data may be elsewhere by now, or rebuilt.
    pub(super) fn is_damage(&self) -> bool {
        matches!(self.0, Some((_, error)) if error != Error::Gone)
    }
}

impl From<Unrecoverable> for StripeError {
    fn from(Unrecoverable: Unrecoverable) -> Self {
        Self::Unrecoverable
    }
}

impl From<Error> for StripeError {
    fn from(error: Error) -> Self {
        Self::Array(error)
    }
}

/// Rows of some strips, each row contiguous.
#[derive(Debug, Default)]
pub(super) struct ReadSet(SmallVec<[(StripRole, RowPages); 4]>);

/// Rows of one strip, each contiguous.
pub(super) type RowPages = SmallVec<[Buf; 1]>;

impl ReadSet {
    /// What is known of row `n`, of a stripe with `data` data strips.
    pub(super) fn known_row(&self, data: u16, n: usize) -> KnownRow<'_> {
        let mut row = KnownRow::new(data);
        self.0.iter().for_each(|(role, pages)| row.set(*role, &pages[n]));
        row
    }

    /// The rows of one strip; empty if unknown.
    pub(super) fn pages_of(&self, role: StripRole) -> &[Buf] {
        self.0.iter().find(|(r, _)| *r == role).map_or(&[], |(_, pages)| pages)
    }

    pub(super) fn insert(&mut self, role: StripRole, pages: RowPages) {
        self.0.push((role, pages));
    }
}

impl Stripe<'_> {
    pub(super) fn slot_id(&self) -> SlotId {
        (self.extent.number, self.slot)
    }

    /// Waits until no client reads the stripe, and keeps new reads away.
    pub(super) async fn exclude_reads(&self) -> Option<ExclusiveReadLock<'_>> {
        let (reads, key) = self.read_locks?;
        Some(reads.lock_exclusive(key).await)
    }

    /// Strips of data.
    pub(super) fn data_strips(&self) -> u16 {
        self.geometry.data_strips()
    }

    pub(super) fn all_strips(&self) -> Available {
        Available::all(self.data_strips(), self.geometry.redundancy().parity_strips())
    }

    /// The columns of a strip's copies, and whether each is stale. With parity there is one.
    fn copies(&self, role: StripRole) -> impl Iterator<Item = (Column, bool)> {
        let columns = self.geometry.columns_of(self.slot, role);
        columns.filter_map(|n| {
            let column = self.extent.columns.get(usize::from(n))?;
            Some((*column, self.extent.is_stale(n, self.slot)))
        })
    }

    /// The columns that hold a strip: not stale, and their members attached.
    pub(super) fn available_columns(&self, role: StripRole) -> impl Iterator<Item = Column> {
        let is_available = |(column, is_stale): &(Column, bool)| {
            !is_stale && !self.array.is_detached(column.member)
        };
        self.copies(role).filter(is_available).map(|(column, _)| column)
    }

    /// The columns of a strip that a write changes: all that are not stale. It detaches those whose
    /// members fail.
    pub(super) fn written_columns(&self, role: StripRole) -> impl Iterator<Item = Column> {
        self.copies(role).filter(|(_, is_stale)| !is_stale).map(|(column, _)| column)
    }

    /// The stale columns of a strip that can be rebuilt.
    pub(super) fn stale_columns(&self, role: StripRole) -> impl Iterator<Item = Column> {
        let is_rebuildable = |(column, is_stale): &(Column, bool)| {
            *is_stale && !self.array.is_detached(column.member)
        };
        self.copies(role).filter(is_rebuildable).map(|(column, _)| column)
    }

    /// The column of a strip, in a stripe with parity.
    pub(super) fn column_of(&self, role: StripRole) -> Result<Column, Error> {
        self.copies(role).next().map(|(column, _)| column).ok_or(Error::OutOfRange)
    }

    /// The row of the member that is `row` of the strip in `column`.
    pub(super) fn member_row(&self, column: Column, row: u32) -> u64 {
        column.first_row
            + u64::from(self.slot) * u64::from(self.geometry.strip_rows())
            + u64::from(row)
    }

    /// The strips that are available on some column.
    pub(super) fn available(&self) -> Available {
        let is_available = |role: &StripRole| self.available_columns(*role).next().is_some();
        Available::from_roles(self.geometry.roles().filter(is_available))
    }

    /// The strips that are available on slow members only.
    pub(super) fn strips_on_slow_members(&self) -> Available {
        match self.array.members.slow() {
            0 => Available::default(),
            slow => self.strips_only_on(slow),
        }
    }

    /// The strips that are available on these members only.
    pub(super) fn strips_only_on(&self, members: MemberBits) -> Available {
        let is_elsewhere = |role: &StripRole| {
            let mut others =
                self.available_columns(*role).filter(|c| members & member_bit(c.member) == 0);
            others.next().is_some()
        };
        self.all_strips()
            .difference(Available::from_roles(self.geometry.roles().filter(is_elsewhere)))
    }

    /// Reads rows of a strip; of copies, from the least busy member.
    pub(super) async fn read(
        &self,
        role: StripRole,
        rows: &Range<u32>,
        ctx: &Ctx,
    ) -> Result<Bufs, ReadFailure> {
        let column = self.least_busy_column(role).ok_or(ReadFailure(None))?;
        let data = self.read_at(column, rows, ctx).await;
        data.map_err(|error| ReadFailure(Some((column, error))))
    }

    /// The column to read a strip from: not slow if possible, then the least busy.
    pub(super) fn least_busy_column(&self, role: StripRole) -> Option<Column> {
        let slow = self.array.members.slow();
        let order =
            |c: &Column| (slow & member_bit(c.member) != 0, self.array.members.in_flight(c.member));
        self.available_columns(role).min_by_key(order)
    }

    /// Reads rows of the strip in `column`.
    pub(super) fn read_at(
        &self,
        column: Column,
        rows: &Range<u32>,
        ctx: &Ctx,
    ) -> impl Future<Output = Result<Bufs, Error>> {
        let at = self.member_row(column, rows.start);
        self.array.read_member(column.member, at, rows.end - rows.start, ctx)
    }

    /// Writes rows of a strip to all copies that are not stale. A member that fails is detached.
    pub(super) async fn write(
        &self,
        role: StripRole,
        row: u32,
        data: Bufs,
        fua: bool,
    ) -> Result<(), Error> {
        let mut columns = self.written_columns(role);
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

    /// Writes rows of the strip in `column`.
    pub(super) fn write_at(
        &self,
        column: Column,
        row: u32,
        data: Bufs,
        fua: bool,
    ) -> impl Future<Output = Result<(), Error>> {
        self.array.write_member(column.member, self.member_row(column, row), data, fua)
    }

    /// Reads rows of these strips, or returns the strips that cannot be read. A member that is gone
    /// is detached.
    pub(super) async fn read_strips(
        &self,
        rows: &Range<u32>,
        strips: Available,
    ) -> Result<Result<ReadSet, Available>, Error> {
        let each = strips.roles().map(|role| async move {
            (role, self.read(role, rows, &self.array.memory.scratch).await)
        });
        let (mut read_set, mut failed) = (ReadSet::default(), SmallVec::<[StripRole; 2]>::new());
        for (role, found) in join_all(each).await {
            match found {
                Ok(data) => read_set.insert(role, split_into_rows(&data)),
                Err(failure) => {
                    self.handle_read_failure(failure).await?;
                    failed.push(role);
                }
            }
        }
        Ok(if failed.is_empty() { Ok(read_set) } else { Err(Available::from_roles(failed)) })
    }

    /// Whether these strips can be read after they were written, despite failures meanwhile. If
    /// not, writes stop: the entry of the write must stay in the logs.
    pub(super) fn check_written(
        &self,
        changed: StripSet,
        written: Result<(), Error>,
    ) -> Result<(), StripeError> {
        let available = self.available();
        let missing = StripSet::first(self.data_strips()).difference(available.data);
        let is_readable = changed.difference(available.data).is_empty()
            || missing.len() <= available.parity_count();
        let failure = match written {
            Ok(()) if is_readable => return Ok(()),
            Ok(()) => StripeError::Unrecoverable,
            Err(error) => StripeError::Array(error),
        };
        self.array.stop_writes(Error::Gone);
        Err(failure)
    }

    /// Handles a failed read: detaches a member that is gone, else reports damage.
    pub(super) async fn handle_read_failure(&self, failure: ReadFailure) -> Result<(), Error> {
        match failure.0 {
            Some((column, error @ Error::Gone)) => {
                self.array.detach_member(column.member, error).await
            }
            Some((column, error)) => {
                self.array.metadata.report_damage(self.damage_of(column, error));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Damage somewhere in the strip that a member does not return.
    fn damage_of(&self, column: Column, error: Error) -> Damage {
        let number = (0u16..).zip(&self.extent.columns).find(|(_, c)| **c == column);
        let is_in_column = |role: &StripRole| {
            let mut columns = self.geometry.columns_of(self.slot, *role);
            number.is_some_and(|(number, _)| columns.any(|n| n == number))
        };
        let kind = match error {
            Error::Corrupt { .. } => DamageKind::Corrupt,
            _ => DamageKind::Unreadable,
        };
        let rows = match self.geometry.roles().find(is_in_column) {
            Some(StripRole::Data(strip)) => self.data_rows_of(strip, 0..self.geometry.strip_rows()),
            _ => self.data_rows_of(0, 0..u32::try_from(self.geometry.stripe_rows()).unwrap_or(0)),
        };
        Damage { kind, member: Some(column.member), extent: self.extent.number, rows }
    }

    /// The rows of the extent's data that rows of a strip are.
    pub(super) fn data_rows_of(&self, strip: u16, rows: Range<u32>) -> Range<u32> {
        let stripe = self.extent.stripe_map.stripe_at(self.slot).unwrap_or(0);
        self.geometry.data_row_range(stripe, strip, &rows)
    }

    /// Reads rows of all data strips, and reconstructs those in `avoid` and those that cannot be
    /// read; returns all of these too. Uses scratch memory of [`Self::reconstruct_pages_per_row`].
    pub(super) async fn reconstruct(
        &self,
        rows: &Range<u32>,
        mut avoid: Available,
    ) -> Result<(ReadSet, Available), StripeError> {
        loop {
            let readable = self.available().difference(avoid);
            let missing =
                |readable: Available| StripSet::first(self.data_strips()).difference(readable.data);
            let is_enough =
                |readable: &Available| missing(*readable).len() <= readable.parity_count();
            // Without slow members, if the others are enough.
            let without_slow =
                Some(readable.difference(self.strips_on_slow_members())).filter(is_enough);
            let readable = without_slow.unwrap_or(readable);
            if !is_enough(&readable) {
                return Err(StripeError::Unrecoverable);
            }
            match self.read_strips(rows, readable).await? {
                Ok(read_set) => {
                    let reconstructed = self.reconstruct_missing(
                        rows,
                        missing(readable),
                        read_set,
                        &self.array.memory.scratch,
                    );
                    return Ok((reconstructed?, avoid));
                }
                Err(failed) => avoid = avoid.union(failed),
            }
        }
    }

    /// Scratch pages that [`Self::reconstruct`] uses per row.
    pub(super) fn reconstruct_pages_per_row(&self) -> u32 {
        match self.geometry.redundancy() {
            Redundancy::Copies(_) => 2,
            level => 1 + self.all_strips().len() + u32::from(level.parity_strips()),
        }
    }

    /// Adds the strips in `lost` to `read_set`, reconstructed in memory of `ctx`.
    pub(super) fn reconstruct_missing(
        &self,
        rows: &Range<u32>,
        lost: StripSet,
        mut read_set: ReadSet,
        ctx: &Ctx,
    ) -> Result<ReadSet, Unrecoverable> {
        let count = rows.len();
        let page = |_| ctx.credit().alloc_page(ROW);
        let mut reconstructed: SmallVec<[Vec<BufMut>; 2]> =
            lost.iter().map(|_| (0..count).map(page).collect()).collect();
        for n in 0..count {
            let mut out: SmallVec<[&mut [u8]; 2]> =
                reconstructed.iter_mut().map(|pages| &mut pages[n][..]).collect();
            if !read_set.known_row(self.data_strips(), n).reconstruct(self.array.parity, &mut out) {
                return Err(Unrecoverable);
            }
        }
        for (strip, pages) in lost.iter().zip(reconstructed) {
            read_set
                .insert(StripRole::Data(strip), pages.into_iter().map(BufMut::freeze).collect());
        }
        Ok(read_set)
    }

    /// Scratch memory, page by page.
    pub(super) fn scratch_pages(&self, count: usize) -> Vec<BufMut> {
        let credit = self.array.memory.scratch.credit();
        (0..count).map(|_| credit.alloc_page(ROW)).collect()
    }
}

/// Splits whole rows, each contiguous.
pub(super) fn split_into_rows(data: &Bufs) -> RowPages {
    (0..data.len() / ROW).map(|n| contiguous(&data.slice(n * ROW..(n + 1) * ROW))).collect()
}

/// `data` in page-aligned memory, copied to `out` if it is not aligned.
pub(super) fn page_aligned(data: Bufs, out: impl FnOnce() -> BufsMut) -> Bufs {
    if data.is_aligned(ROW) {
        return data;
    }
    let mut copy = out();
    copy_into(&mut copy, 0, &data);
    copy.into()
}
