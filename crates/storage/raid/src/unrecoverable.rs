//! Rows that no disk returns and that cannot be reconstructed are given up as lost, so that the
//! rest of the extent is redundant again.
//!
//! First it is made durable that they are lost, so they read as errors. Then they and their
//! parities are zeroed: the rest of the row is protected again, and lost rows can be rewritten like
//! others. A row is given up only after it was unreadable in several passes with all disks of its
//! extent attached, so a transient failure loses nothing.

use std::ops::Range;
use std::time::Duration;

use block::{Bufs, Error};
use geometry::{ROW_BYTES, Redundancy, RowSet, StripRole, StripRun};

use super::band::RowBand;
use super::extent::Extent;
use super::fragments::StripFragment;
use super::row_plan::{Available, StripSet};
use super::stripe::{Stripe, StripeError};
use super::volume::RaidVolume;

/// In how many successive passes a row must be unreadable before it is given up,
const MIN_FAILED_PASSES: u32 = 2;

/// and for how long.
pub const MIN_FAILING_TIME: Duration = Duration::from_secs(20);

const ROW: usize = ROW_BYTES as usize;

impl RaidVolume {
    /// Whether a run contains lost rows.
    pub(super) fn overlaps_lost_rows(&self, extent: &Extent, run: &StripRun) -> bool {
        let rows = || self.geometry.data_row_range(run.stripe, run.strip, &run.rows);
        !extent.lost_rows.is_empty() && !extent.lost_rows.lost_within(&rows()).is_empty()
    }

    /// Whether a write covers only a part of a lost row, whose rest is unknown.
    pub(super) fn partially_overwrites_lost_row(
        &self,
        key: (u32, u32),
        fragments: &[StripFragment],
    ) -> bool {
        let Some(extent) = self.extent(key.0).filter(|extent| !extent.lost_rows.is_empty()) else {
            return false;
        };
        let mut partial =
            fragments.iter().flat_map(|f| f.partial_rows().into_iter().map(|r| (f.strip, r.0)));
        partial.any(|(strip, byte)| {
            let row = u32::try_from(byte / ROW).unwrap_or(u32::MAX);
            let rows = row..row.saturating_add(1);
            !extent
                .lost_rows
                .lost_within(&self.geometry.data_row_range(key.1, strip, &rows))
                .is_empty()
        })
    }

    /// Clears lost and unrepaired rows that were completely rewritten.
    pub(super) async fn clear_rewritten_rows(
        &self,
        (index, stripe): (u32, u32),
        extent: &Extent,
        written: impl Iterator<Item = &StripFragment>,
    ) -> Result<(), StripeError> {
        let writes = written.filter_map(StripFragment::whole_rows);
        let rows =
            writes.map(|write| self.geometry.data_row_range(stripe, write.strip, &write.rows));
        let cleared = rows.flat_map(|rows| extent.lost_rows.lost_or_unrepaired_within(&rows));
        let cleared: Vec<Range<u32>> = cleared.collect();
        if cleared.is_empty() {
            return Ok(());
        }
        // The data must be durable first: if it were lost, the rows would read as zeroes.
        self.array.flush().await?;
        for rows in cleared {
            self.allocator.record_rewritten_rows(index, rows.clone()).await?;
            extent.lost_rows.remove(rows);
        }
        Ok(())
    }

    /// Gives up the lost strips of a row. The caller holds the stripe lock. Whether the row is
    /// consistent now.
    pub(super) async fn give_up_row(
        &self,
        (index, number): (u32, u32),
        stripe: &Stripe<'_>,
        row: u32,
    ) -> Result<bool, StripeError> {
        let extent = &stripe.extent;
        let any_detached =
            extent.columns().iter().any(|column| self.array.is_detached(column.member));
        // A detached member may still have it.
        if any_detached {
            return Ok(false);
        }
        if !extent.lost_rows.is_failing(MIN_FAILED_PASSES, MIN_FAILING_TIME) {
            extent.lost_rows.note_failure();
            return Ok(false);
        }
        let lost = stripe.unrecoverable_strips(row).await?;
        for strip in lost.data.iter() {
            let rows = self.geometry.data_row_range(number, strip, &(row..row + 1));
            if let Err(why) = self.allocator.record_lost_rows(index, rows.clone()).await {
                tracing::error!(extent = extent.number(), error = %why, "an unreadable row is not recorded as lost");
                return Ok(false);
            }
            extent.lost_rows.insert(rows);
        }
        if !lost.data.is_empty() {
            stripe.count_unrecoverable(lost);
            stripe.zero_strips(row, lost).await?;
        }
        Ok(true)
    }

    /// Records rows that could not be repaired, until they are rewritten.
    pub(super) async fn record_unrepaired_rows(
        &self,
        index: u32,
        extent: &Extent,
        rows: impl IntoIterator<Item = Range<u32>>,
    ) -> Result<(), StripeError> {
        for rows in rows.into_iter().collect::<RowSet>().iter() {
            match self.allocator.record_unrepaired_rows(index, rows.clone()).await {
                Ok(()) => extent.lost_rows.note_unrepaired(rows),
                // Too many to record; the log names them all.
                Err(Error::NoSpace) => return Ok(()),
                Err(error) => return Err(StripeError::Array(error)),
            }
        }
        Ok(())
    }
}

impl Stripe<'_> {
    /// The strips of a row that can be neither read nor reconstructed: data strips, and parities
    /// that cannot be read either.
    async fn unrecoverable_strips(&self, row: u32) -> Result<Available, StripeError> {
        let rows = row..row + 1;
        let _scratch = self
            .array
            .memory
            .acquire_scratch(self.reconstruct_pages_per_row() + self.all_strips().len())
            .await;
        if let Redundancy::Copies(_) = self.geometry.redundancy() {
            let mut lost = Available::default();
            for strip in 0..self.data_strips() {
                match self.read_and_repair_copies(strip, &rows).await {
                    Ok(_) => {}
                    Err(StripeError::Unrecoverable) => {
                        lost = lost.union(Available::from_roles([StripRole::Data(strip)]));
                    }
                    Err(failure) => return Err(failure),
                }
            }
            return Ok(lost);
        }
        let available = self.available();
        let failed = self.read_strips(&rows, available).await?.err().unwrap_or_default();
        let readable = available.difference(failed);
        let lost = StripSet::first(self.data_strips()).difference(readable.data);
        Ok(match lost.len() <= readable.parity_count() {
            true => Available::default(),
            false => Available { data: lost, ..failed },
        })
    }

    /// Counts strips that were given up for their disks.
    fn count_unrecoverable(&self, lost: Available) {
        for column in lost.roles().flat_map(|role| self.available_columns(role)) {
            self.array.members.count_unrecoverable(column.member);
        }
    }

    /// The rows of the extent's data that are unrecoverable in a row.
    pub(super) async fn unrecoverable_data_rows(
        &self,
        row: u32,
    ) -> Result<Vec<Range<u32>>, StripeError> {
        let lost = self.unrecoverable_strips(row).await?;
        Ok(lost.data.iter().map(|strip| self.data_rows_of(strip, row..row + 1)).collect())
    }

    /// Zeroes strips of a row, as a logged write.
    async fn zero_strips(&self, row: u32, lost: Available) -> Result<(), StripeError> {
        let region = self.geometry.region_bit(self.slot);
        self.array.mark_stale(&self.extent, region).await?;
        self.array.wait_durable(self.slot_id()).await?;
        // Excludes reads that began before the row was lost.
        let _exclusion = self.exclude_reads().await;
        let data = lost.data.iter().map(|strip| (strip, Bufs::zeroes(ROW))).collect();
        self.write_band(&RowBand { rows: row..row + 1, data }, lost, false).await?;
        Ok(self.array.mark_stale(&self.extent, region).await?)
    }
}
