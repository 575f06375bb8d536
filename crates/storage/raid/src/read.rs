//! Reads: from where the data is, or made of the rest of its rows.

use std::ops::Range;

use block::{Buf, Bufs, Ctx, Error, Lba};
use futures_util::future::join_all;
use geometry::{Column, Level, Piece, ROW_BYTES, Role};
use smallvec::SmallVec;

use super::around::Unanswered;
use super::array::bit;
use super::mistake::Mistake;
use super::quiet::Reading;
use super::row::There;
use super::stripe::{Failure, Had, Pages, Stripe, Unread, key, pages};
use super::{Array, Raid};

/// Most rows that are made at once.
pub(super) const MOST_RESTORED: u32 = 16;

impl Raid {
    /// Reads these bytes of the extents, of which `lba` is the block to be named if they cannot be read.
    pub(super) async fn read(&self, bytes: Range<u64>, lba: Lba, ctx: &Ctx) -> Result<Bufs, Error> {
        let row = u64::from(ROW_BYTES);
        let rows = bytes.start / row..bytes.end.div_ceil(row);
        let data = self.read_rows(&rows, lba, ctx).await?;
        let skipped = usize::try_from(bytes.start - rows.start * row).unwrap_or(0);
        let len = usize::try_from(bytes.end - bytes.start).unwrap_or(0);
        Ok(if len == data.len() { data } else { data.slice(skipped..skipped + len) })
    }

    async fn read_rows(&self, rows: &Range<u64>, lba: Lba, ctx: &Ctx) -> Result<Bufs, Error> {
        let mut pieces = self.pieces(rows);
        let first = pieces.next().ok_or(Error::OutOfRange)?;
        let second = pieces.next();
        let Some(second) = second else {
            return self.read_piece(first, lba, ctx).await;
        };
        let all = [first, second].into_iter().chain(pieces);
        // In a list, as each is put into memory of its own where it is not known how many there are.
        let each: Vec<_> = all.map(|piece| self.read_piece(piece, lba, ctx)).collect();
        let mut data = Bufs::new();
        for found in join_all(each).await {
            data.append(found?);
        }
        Ok(data)
    }

    /// Rows of the extents, cut at extents and strips: with the index of the extent.
    pub(super) fn pieces(&self, rows: &Range<u64>) -> impl Iterator<Item = (u32, Piece)> + use<> {
        let (shape, rows) = (self.shape, rows.clone());
        let each = shape.rows();
        (rows.start / each..rows.end.div_ceil(each)).flat_map(move |n| {
            let (from, to) = (rows.start.max(n * each), rows.end.min((n + 1) * each));
            let index = u32::try_from(n).unwrap_or(u32::MAX);
            shape.pieces(from - n * each, to - from).map(move |piece| (index, piece))
        })
    }

    async fn read_piece(
        &self,
        (index, piece): (u32, Piece),
        lba: Lba,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let Some(extent) = self.extent(index) else {
            return Ok(Bufs::zeroes(piece.rows.len() * ROW_BYTES as usize));
        };
        if self.is_lost(&extent, &piece) {
            return Err(Error::Unreadable { at: lba });
        }
        drop(extent);
        let stripe = self.stripe(index, piece.stripe)?;
        let role = Role::Data(piece.strip);
        let reading = self.reads.begin(key(index, piece.stripe));
        let found = match reading {
            Some(_) => stripe.read_in_time(role, &piece.rows, ctx).await,
            None => {
                let _turn = self.turn(index, piece.stripe).await;
                // It may be elsewhere since, or lost.
                let stripe = self.stripe(index, piece.stripe)?;
                if self.is_lost(&stripe.extent, &piece) {
                    return Err(Error::Unreadable { at: lba });
                }
                stripe.read(role, &piece.rows, ctx).await.map_err(Unanswered::Unread)
            }
        };
        match found {
            Ok(data) => Ok(data),
            // What is rare is in a box, so that the future of a plain read stays small.
            Err(unanswered) => {
                let other = self.read_otherwise(index, &piece, unanswered, reading, ctx);
                Box::pin(other).await.map_err(|failure| match failure {
                    Failure::Lost => Error::Unreadable { at: lba },
                    Failure::Array(error) => error,
                })
            }
        }
    }

    /// Reads what its member did not give, or not in time.
    async fn read_otherwise(
        &self,
        index: u32,
        piece: &Piece,
        unanswered: Unanswered,
        reading: Option<Reading<'_>>,
        ctx: &Ctx,
    ) -> Result<Bufs, Failure> {
        // What does not answer keeps the memory that it was given.
        let apart = unanswered
            .keeps_memory()
            .then(|| self.array.apart(piece.rows.len() * ROW_BYTES as usize));
        let apart = apart.flatten();
        let ctx = apart.as_ref().unwrap_or(ctx);
        let unread = match unanswered {
            Unanswered::Unread(unread) => {
                drop(reading);
                unread
            }
            Unanswered::Lags(column, flying) => {
                match self.read_around((index, piece), (column, flying), reading, ctx).await {
                    Ok(data) => return Ok(data),
                    Err(unread) => unread,
                }
            }
        };
        self.stripe(index, piece.stripe)?.unread(unread).await?;
        self.read_lost(index, piece, unread, ctx).await
    }

    /// Makes of the others what cannot be read, and writes it back where its member is there.
    async fn read_lost(
        &self,
        index: u32,
        piece: &Piece,
        unread: Unread,
        ctx: &Ctx,
    ) -> Result<Bufs, Failure> {
        let _turn = match self.array.makes(Mistake::ReadsWithoutTurn) {
            true => None,
            false => Some(self.turn(index, piece.stripe).await),
        };
        let stripe = self.stripe(index, piece.stripe)?;
        if self.is_lost(&stripe.extent, piece) {
            return Err(Failure::Lost);
        }
        let mut data = Bufs::new();
        let most = (Array::MOST_PAGES / stripe.restoring_pages()).clamp(1, MOST_RESTORED);
        let mut start = piece.rows.start;
        while start < piece.rows.end {
            let rows = start..piece.rows.end.min(start + most);
            start = rows.end;
            data.append(stripe.made_again(piece.strip, &rows, unread, ctx).await?);
        }
        Ok(data)
    }
}

impl Stripe<'_> {
    /// Rows of one strip of data that could not be read, in memory of `ctx`. Whoever asks has the stripe's turn.
    pub(super) async fn made_again(
        &self,
        strip: u16,
        rows: &Range<u32>,
        unread: Unread,
        ctx: &Ctx,
    ) -> Result<Bufs, Failure> {
        let count = rows.end - rows.start;
        let _room = self.array.room(count * self.restoring_pages()).await;
        if let Level::Copies(_) = self.shape.level() {
            let copy = self.made_copy(strip, rows).await?;
            return Ok(copy.iter().map(|page| own(page, ctx)).collect());
        }
        let role = Role::Data(strip);
        let avoid = Some(role).filter(|_| unread.is_damage());
        let (had, lost) = self.restore(rows, There::of(avoid)).await?;
        self.write_back(rows, &had, lost).await?;
        Ok(had.pages(role).iter().map(|page| own(page, ctx)).collect())
    }

    /// Writes what could not be read to members that are there: a disk puts it elsewhere.
    async fn write_back(&self, rows: &Range<u32>, had: &Had, lost: There) -> Result<(), Failure> {
        let mendable = lost.data.and(self.there().data);
        if mendable.is_empty() {
            return Ok(());
        }
        let _quiet = self.quiet().await;
        for strip in mendable.iter() {
            let data = had.pages(Role::Data(strip)).iter().cloned().collect();
            self.write(Role::Data(strip), rows.start, data, false).await?;
            for column in self.columns_there(Role::Data(strip)) {
                self.array.count_repaired(column.member, rows.end - rows.start);
            }
        }
        Ok(())
    }

    /// Reads one copy after the other until one is given, and writes that where others were not.
    pub(super) async fn made_copy(&self, strip: u16, rows: &Range<u32>) -> Result<Pages, Failure> {
        let mut failed = SmallVec::<[Column; 2]>::new();
        let mut columns: SmallVec<[Column; 4]> = self.columns_there(Role::Data(strip)).collect();
        columns.sort_by_key(|column| self.array.slow() & bit(column.member) != 0);
        for column in columns {
            match self.read_at(column, rows, &self.array.scratch).await {
                Ok(data) => {
                    let _quiet = if failed.is_empty() { None } else { self.quiet().await };
                    for column in failed {
                        self.write_at(column, rows.start, data.clone(), false).await?;
                        self.array.count_repaired(column.member, rows.end - rows.start);
                    }
                    return Ok(pages(&data));
                }
                Err(error) => {
                    self.unread(Unread(Some((column, error)))).await?;
                    failed.push(column);
                }
            }
        }
        Err(Failure::Lost)
    }
}

/// The same in memory of `ctx`.
fn own(page: &Buf, ctx: &Ctx) -> Buf {
    let mut own = ctx.credit().alloc_page(page.len());
    own.copy_from_slice(page);
    own.freeze()
}
