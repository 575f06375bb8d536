//! Rows that no disk gives back and nothing makes: they are lost, and are given up so that all else can be made whole.
//!
//! First it is made durable that they are lost: they read as errors from then on. Then they are made zero, and their parities with
//! them: what is left of their row is protected again, and they can be written as any other. A row is given up only after
//! it could not be read again and again, with all disks of its extent there: what fails for a moment is not lost.

use std::ops::Range;
use std::time::Duration;

use block::{Bufs, Error};
use geometry::{Level, Piece, ROW_BYTES, Role, RowSet};

use super::band::Band;
use super::part::Fragment;
use super::rebuild::Pace;
use super::row::{Strips, There};
use super::scrub::Pass;
use super::stripe::{Failure, Stripe};
use super::{Extent, Raid};

/// How often in a row something could not be read of an extent before that is given up,
const FAILURES: u32 = 2;

/// and for how long.
pub const FAILING: Duration = Duration::from_secs(20);

const ROW: usize = ROW_BYTES as usize;

impl Raid {
    /// Whether something of a piece is lost.
    pub(super) fn is_lost(&self, extent: &Extent, piece: &Piece) -> bool {
        let rows = || self.shape.data_rows(piece.stripe, piece.strip, &piece.rows);
        !extent.lost.is_empty() && !extent.lost.within(&rows()).is_empty()
    }

    /// Whether a row that is lost would be written in part: nobody knows the rest.
    pub(super) fn is_part_of_lost(&self, key: (u32, u32), fragments: &[Fragment]) -> bool {
        let Some(extent) = self.extent(key.0).filter(|extent| !extent.lost.is_empty()) else {
            return false;
        };
        let mut rests =
            fragments.iter().flat_map(|f| f.rests().into_iter().map(|r| (f.strip, r.0)));
        rests.any(|(strip, at)| {
            let row = u32::try_from(at / ROW).unwrap_or(u32::MAX);
            let rows = row..row.saturating_add(1);
            !extent.lost.within(&self.shape.data_rows(key.1, strip, &rows)).is_empty()
        })
    }

    /// Whole rows of these have been written: those of them that were lost, or not repaired, are not any more.
    pub(super) async fn regain(
        &self,
        (index, stripe): (u32, u32),
        extent: &Extent,
        written: impl Iterator<Item = &Fragment>,
    ) -> Result<(), Failure> {
        let parts = written.filter_map(Fragment::part);
        let rows = parts.map(|part| self.shape.data_rows(stripe, part.strip, &part.rows));
        let regained = rows.flat_map(|rows| extent.lost.remembered_within(&rows));
        let regained: Vec<Range<u32>> = regained.collect();
        if regained.is_empty() {
            return Ok(());
        }
        // It may not be lost again, and read as what it was made.
        self.array.flush().await?;
        for rows in regained {
            self.room.regain(index, rows.clone()).await?;
            extent.lost.remove(rows);
        }
        Ok(())
    }

    /// Gives up what is lost of a row. Whoever asks has the turn of the stripe. Whether the row is whole now.
    pub(super) async fn give_up(
        &self,
        (index, number): (u32, u32),
        stripe: &Stripe<'_>,
        row: u32,
    ) -> Result<bool, Failure> {
        let extent = &stripe.extent;
        let is_out = extent.columns().iter().any(|column| self.array.is_out(column.member));
        // One that is out may come back with it.
        if is_out {
            return Ok(false);
        }
        if !extent.lost.is_failing(FAILURES, FAILING) {
            extent.lost.note_failure();
            return Ok(false);
        }
        let lost = stripe.unreadable(row).await?;
        for strip in lost.data.iter() {
            let rows = self.shape.data_rows(number, strip, &(row..row + 1));
            if let Err(why) = self.room.lose(index, rows.clone()).await {
                tracing::error!(extent = extent.number(), error = %why, "a row that cannot be read is not given up");
                return Ok(false);
            }
            extent.lost.insert(rows);
        }
        if !lost.data.is_empty() {
            stripe.count_given_up(lost);
            stripe.make_zero(row, lost).await?;
        }
        Ok(true)
    }

    /// Rows of an extent could not be repaired: that is remembered until they are written again.
    pub(super) async fn remember_unrepaired(
        &self,
        index: u32,
        extent: &Extent,
        rows: impl IntoIterator<Item = Range<u32>>,
    ) -> Result<(), Failure> {
        for rows in rows.into_iter().collect::<RowSet>().iter() {
            match self.room.not_repaired(index, rows.clone()).await {
                Ok(()) => extent.lost.note_unrepaired(rows),
                // There are too many: the log has all.
                Err(Error::NoSpace) => return Ok(()),
                Err(error) => return Err(Failure::Array(error)),
            }
        }
        Ok(())
    }

    /// Makes what cannot be read of the extent at `index` of the rest, and gives up what is lost of it: so it can be moved.
    ///
    /// # Errors
    /// What stops the array.
    pub async fn mend_unreadable(&self, index: u32, pace: Pace) -> Result<(), Error> {
        let Some(extent) = self.extent(index) else { return Ok(()) };
        self.compare(index, pace, Pass::First).await?;
        extent.lost.end_of_pass();
        // Where its stripes lie may be what cannot be read, in either place.
        for _ in 0..2 {
            self.array.save_map(&extent).await?;
        }
        Ok(())
    }
}

impl Stripe<'_> {
    /// What of a row no disk gives, and nothing makes: strips of data, and parities that cannot be read either.
    async fn unreadable(&self, row: u32) -> Result<There, Failure> {
        let rows = row..row + 1;
        let _room = self.array.room(self.restoring_pages() + self.all().len()).await;
        if let Level::Copies(_) = self.shape.level() {
            let mut lost = There::default();
            for strip in 0..self.data() {
                match self.made_copy(strip, &rows).await {
                    Ok(_) => {}
                    Err(Failure::Lost) => lost = lost.or(There::of([Role::Data(strip)])),
                    Err(failure) => return Err(failure),
                }
            }
            return Ok(lost);
        }
        let there = self.there();
        let failed = self.gather(&rows, there).await?.err().unwrap_or_default();
        let known = there.without(failed);
        let lost = Strips::first(self.data()).without(known.data);
        Ok(match lost.len() <= known.parities() {
            true => There::default(),
            false => There { data: lost, ..failed },
        })
    }

    /// What of a row could not be read has been given up: its disks count that.
    fn count_given_up(&self, lost: There) {
        for column in lost.roles().flat_map(|role| self.columns_there(role)) {
            self.array.count_unrepairable(column.member);
        }
    }

    /// Rows of data of the extent that nothing gives of a row.
    pub(super) async fn unreadable_data(&self, row: u32) -> Result<Vec<Range<u32>>, Failure> {
        let lost = self.unreadable(row).await?;
        Ok(lost.data.iter().map(|strip| self.data_of(strip, row..row + 1)).collect())
    }

    /// Makes strips of a row zero, with all that a write has.
    async fn make_zero(&self, row: u32, lost: There) -> Result<(), Failure> {
        let region = self.shape.region(self.place);
        self.array.announce(&self.extent, region).await?;
        self.array.settle(self.spot()).await?;
        // Who reads it has begun before it was lost.
        let _quiet = self.quiet().await;
        let data = lost.data.iter().map(|strip| (strip, Bufs::zeroes(ROW))).collect();
        self.write_band_without(&Band { rows: row..row + 1, data }, lost).await?;
        Ok(self.array.announce(&self.extent, region).await?)
    }
}
