//! Writes of a part of a stripe: its rows are split into bands, and each band is planned, read for,
//! logged and written.

use std::ops::Range;

use block::{Buf, Bufs, Error};
use futures_util::future::{OptionFuture, join_all};
use geometry::{ROW_BYTES, Redundancy, StripRole};
use smallvec::SmallVec;
use tokio::sync::SemaphorePermit;

use super::band::{RowBand, split_into_bands};
use super::fragments::{StripFragment, is_full_stripe};
use super::log_batch::EntryKind;
use super::mistake::Mistake;
use super::new_contents::{NewParity, NewStrip};
use super::parity_log::LogPositions;
use super::row_plan::{Available, AvoidedReads, RowPlan, plan_row_avoiding};
use super::stripe::{ReadSet, Stripe, StripeError};

const ROW: usize = ROW_BYTES as usize;

/// An entry, and the blocks of it that go to the log of each member.
type EntryToLog = (EntryKind, SmallVec<[(u16, Vec<Buf>); 2]>);

impl Stripe<'_> {
    /// Writes `fragments` of stripe `number`. The caller holds the stripe lock.
    pub(super) async fn write_fragments(
        &self,
        number: u32,
        fragments: &[StripFragment],
        fua: bool,
    ) -> Result<(), StripeError> {
        if is_full_stripe(&self.geometry, fragments) {
            return self.write_full_stripe(number, fragments).await;
        }
        let region = self.geometry.region_bit(self.slot);
        self.array.mark_stale(&self.extent, region).await?;
        let (writes, partial_pages) = self.complete_rows(fragments).await?;
        // Clients may read the unwritten parts of partially written rows.
        let _exclusion = if partial_pages.is_some() { self.exclude_reads().await } else { None };
        let none = Available::default();
        for bands in split_into_bands(&writes) {
            self.array.wait_durable(self.slot_id()).await?;
            match &bands[..] {
                [only] => self.write_band(only, none, fua).await?,
                several => {
                    let each = several.iter().map(|band| self.write_band(band, none, fua));
                    join_all(each).await.into_iter().collect::<Result<(), _>>()?;
                }
            }
        }
        Ok(self.array.mark_stale(&self.extent, region).await?)
    }

    /// Writes a band without reading the strips in `avoid`, which are right afterwards.
    pub(super) async fn write_band(
        &self,
        band: &RowBand,
        avoid: Available,
        fua: bool,
    ) -> Result<(), StripeError> {
        let (plan, read_set, _scratch) = self.read_for_band(band, avoid).await?;
        let new = self.new_contents(band);
        if let Redundancy::Copies(_) = self.geometry.redundancy() {
            return self.write_copies(band, &new, fua).await;
        }
        let parities = self.new_parities(&plan, band, read_set, &new)?;
        if self.array.makes_mistake(Mistake::WritesBeforeLog) {
            self.write_strips(band, &new, &parities, fua).await?;
        }
        let positions = if parities.is_empty() {
            LogPositions::new()
        } else {
            let (kind, to) = self.entry_to_log(band, &plan, &new, &parities)?;
            self.array.append_to_logs(self.slot_id(), kind, to).await?.1
        };
        let region = self.geometry.region_bit(self.slot);
        self.array.mark_stale_before_write(&self.extent, region).await?;
        let written = self.write_strips(band, &new, &parities, fua).await;
        self.check_written(band.changed(), written)?;
        if !positions.is_empty() {
            self.array.note_entry_written(self.slot_id(), region, positions, fua);
        }
        Ok(())
    }

    /// Plans a band and reads what its plan needs, again without the strips that cannot be read.
    /// Also the permit for the memory of the band.
    async fn read_for_band(
        &self,
        band: &RowBand,
        mut unreadable: Available,
    ) -> Result<(RowPlan, ReadSet, SemaphorePermit<'_>), StripeError> {
        let suspect = self.suspect_parities(&band.rows);
        loop {
            let avoided = AvoidedReads { unreadable, suspect, slow: self.strips_on_slow_members() };
            let (strips, available) = (self.data_strips(), self.available());
            let plan = plan_row_avoiding(strips, band.changed(), available, avoided)?;
            let pages = self.band_scratch_pages(&plan, band);
            let scratch = self.array.memory.acquire_scratch(pages).await;
            match self.read_strips(&band.rows, plan.reads).await? {
                Ok(read_set) => return Ok((plan, read_set, scratch)),
                Err(failed) => unreadable = unreadable.union(failed),
            }
        }
    }

    /// Parities that may not match the data of these rows: they are not read, but recomputed from
    /// all data.
    fn suspect_parities(&self, rows: &Range<u32>) -> Available {
        let lost = &self.extent.lost_rows;
        if lost.is_clean() {
            return Available::default();
        }
        let is_suspect = |strip| lost.is_unrepaired(&self.data_rows_of(strip, rows.clone()));
        let parities = self.geometry.roles().filter(|role| !matches!(role, StripRole::Data(_)));
        match (0..self.data_strips()).any(is_suspect) {
            true => Available::from_roles(parities),
            false => Available::default(),
        }
    }

    /// Scratch pages for a band: those of its plan, and copies of unaligned data.
    fn band_scratch_pages(&self, plan: &RowPlan, band: &RowBand) -> u32 {
        let parities = u32::from(self.geometry.redundancy().parity_strips());
        let copied = band.data.iter().filter(|(_, data)| !data.is_aligned(ROW)).count();
        band.row_count() * (plan.pages_per_row(parities) + u32::try_from(copied).unwrap_or(0))
    }

    /// The log entry of a band, for the parity members.
    fn entry_to_log(
        &self,
        band: &RowBand,
        plan: &RowPlan,
        new: &[NewStrip],
        parities: &[NewParity],
    ) -> Result<EntryToLog, Error> {
        let logged = if plan.logs_data { new } else { &[] };
        let each = parities.iter().map(|parity| {
            let blocks = |n: usize| {
                let data = logged.iter().map(move |new| new.pages[n].clone());
                std::iter::once(parity.partial[n].clone()).chain(data)
            };
            let member = self.column_of(parity.role)?.member;
            Ok((member, (0..band.rows.len()).flat_map(blocks).collect()))
        });
        let to = each.collect::<Result<_, Error>>()?;
        let rows = u16::try_from(band.row_count()).unwrap_or(u16::MAX);
        let kind = EntryKind::RowsWritten { row: band.rows.start, rows, changed: band.changed() };
        Ok((kind, to))
    }

    /// Writes data strips and parities to the members, except stale columns.
    async fn write_strips(
        &self,
        band: &RowBand,
        new: &[NewStrip],
        parities: &[NewParity],
        fua: bool,
    ) -> Result<(), Error> {
        let data = new.iter().map(|new| (StripRole::Data(new.strip), new.data.clone()));
        let parities =
            parities.iter().map(|parity| (parity.role, parity.full.iter().cloned().collect()));
        let each = data.chain(parities).map(|(role, data): (_, Bufs)| {
            let column = self.written_columns(role).next();
            let write = column.map(|column| self.write_at(column, band.rows.start, data, fua));
            OptionFuture::from(write)
        });
        join_all(each).await.into_iter().flatten().collect()
    }
}
