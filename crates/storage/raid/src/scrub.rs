//! Scrub: reads and compares all of an extent while clients use it, and repairs what is wrong if it
//! is known what is right.
//!
//! With two parities or three copies, the wrong strip of a row can be identified; with one parity
//! or two copies it is only known that one of them is wrong. Unreadable strips are reconstructed at
//! any level.

use std::ops::Range;

use block::{Bufs, Error};
use geometry::{Column, DamageKind, Redundancy, ScrubResult, StripRole};
use parity::SyndromeVerdict;
use smallvec::{SmallVec, smallvec};

use super::array_memory::MAX_SCRATCH_PAGES;
use super::band::RowBand;
use super::pool_metadata::Damage;
use super::rebuild::MaintenancePace;
use super::row_plan::Available;
use super::stripe::{ReadFailure, ReadSet, RowPages, Stripe, StripeError, split_into_rows};
use super::volume::RaidVolume;

/// Most rows that are compared at a time.
const MAX_COMPARE_ROWS: u32 = 16;

/// What a pass over an extent does with rows that are unreadable, but not for long enough to be
/// recorded as lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScrubPass {
    /// They are left to a later pass.
    Provisional,
    /// They are recorded as unrepaired.
    Final,
}

/// The result of comparing a stripe.
#[derive(Debug, Default)]
struct StripeComparison {
    totals: ScrubResult,
    /// Rows of the stripe that can be neither read nor reconstructed.
    unreadable_rows: Vec<u32>,
    /// Rows of the extent's data that are to be recorded as unrepaired.
    unrepaired_rows: Vec<Range<u32>>,
}

impl RaidVolume {
    /// Reads and compares all of the extent at `index`, yielding to clients as a rebuild does.
    /// Records inconsistent rows as unrepaired; unreadable rows are left to
    /// [`Self::retry_unreadable`].
    ///
    /// # Errors
    /// Errors that stop the array.
    pub async fn scrub(&self, index: u32, pace: MaintenancePace) -> Result<ScrubResult, Error> {
        let scrubbed = self.run_scrub_pass(index, pace, ScrubPass::Provisional).await?;
        self.extent(index).iter().for_each(|extent| extent.lost_rows.end_pass());
        Ok(scrubbed)
    }

    /// Whether some row of the extent at `index` was unreadable in the last scrub.
    #[must_use]
    pub fn has_unreadable(&self, index: u32) -> bool {
        self.extent(index).is_some_and(|extent| extent.lost_rows.has_unreadable())
    }

    /// Tries the unreadable rows of the extent at `index` again,
    /// [`MIN_FAILING_TIME`](super::MIN_FAILING_TIME) after the scrub. Rows that still fail are
    /// recorded as lost, or as unrepaired if a detached disk may have them.
    ///
    /// # Errors
    /// Errors that stop the array.
    pub async fn retry_unreadable(&self, index: u32, pace: MaintenancePace) -> Result<(), Error> {
        for pass in [ScrubPass::Provisional, ScrubPass::Final] {
            let Some(extent) = self.extent(index).filter(|e| e.lost_rows.has_unreadable()) else {
                return Ok(());
            };
            self.run_scrub_pass(index, pace, pass).await?;
            extent.lost_rows.end_pass();
        }
        Ok(())
    }

    /// Reconstructs the unreadable rows of the extent at `index`, and records rows as lost that
    /// have been unreadable for long, so that its columns can be moved.
    ///
    /// # Errors
    /// Errors that stop the array.
    pub async fn repair_unreadable(&self, index: u32, pace: MaintenancePace) -> Result<(), Error> {
        let Some(extent) = self.extent(index) else { return Ok(()) };
        self.run_scrub_pass(index, pace, ScrubPass::Provisional).await?;
        extent.lost_rows.end_pass();
        // Either of the two stored stripe maps may be unreadable.
        for _ in 0..2 {
            self.array.save_stripe_map(&extent).await?;
        }
        Ok(())
    }

    async fn run_scrub_pass(
        &self,
        index: u32,
        pace: MaintenancePace,
        pass: ScrubPass,
    ) -> Result<ScrubResult, Error> {
        let mut totals = ScrubResult::default();
        self.extent(index).iter().for_each(|extent| extent.lost_rows.set_has_unreadable(false));
        for number in 0..self.geometry.stripes() {
            let (begun, busy) = (tokio::time::Instant::now(), self.submitted_ops());
            let lock = self.lock_stripe((index, number)).await;
            if self.extent(index).is_none() || self.is_maintenance_stopped() {
                break;
            }
            match self.scrub_stripe((index, number), pass, &mut totals).await {
                Ok(()) => {}
                Err(StripeError::Unrecoverable) => totals.unrecoverable += 1,
                Err(StripeError::Array(error)) => return Err(error),
            }
            drop(lock);
            self.yield_to_clients(begun, busy, pace).await;
        }
        Ok(totals)
    }

    /// Compares a stripe; the caller holds its lock.
    async fn scrub_stripe(
        &self,
        key: (u32, u32),
        pass: ScrubPass,
        totals: &mut ScrubResult,
    ) -> Result<(), StripeError> {
        let stripe = self.stripe(key)?;
        let mut found = StripeComparison::default();
        let compared = stripe.compare(&mut found).await;
        totals.repaired += found.totals.repaired;
        totals.unrecoverable += found.totals.unrecoverable + found.unreadable_rows.len() as u64;
        for row in found.unreadable_rows {
            let is_lost = match self.give_up_row(key, &stripe, row).await {
                Err(StripeError::Unrecoverable) => false,
                is_lost => is_lost?,
            };
            if is_lost {
                continue;
            }
            stripe.extent.lost_rows.set_has_unreadable(true);
            if pass == ScrubPass::Final {
                found.unrepaired_rows.extend(stripe.unrecoverable_data_rows(row).await?);
            }
        }
        self.record_unrepaired_rows(key.0, &stripe.extent, found.unrepaired_rows).await?;
        compared
    }
}

impl Stripe<'_> {
    /// Reads and compares the stripe.
    async fn compare(&self, found: &mut StripeComparison) -> Result<(), StripeError> {
        let most = (MAX_SCRATCH_PAGES / self.compare_pages_per_row()).clamp(1, MAX_COMPARE_ROWS);
        let end = self.geometry.strip_rows();
        for start in (0..end).step_by(most as usize) {
            let rows = start..end.min(start + most);
            match self.geometry.redundancy() {
                Redundancy::Copies(_) => self.compare_copies(&rows, found).await?,
                _ => self.compare_parity(&rows, found).await?,
            }
        }
        Ok(())
    }

    /// Scratch pages per row: strips read, and parities computed.
    fn compare_pages_per_row(&self) -> u32 {
        u32::from(self.geometry.columns()) + u32::from(self.geometry.redundancy().parity_strips())
    }

    async fn compare_parity(
        &self,
        rows: &Range<u32>,
        found: &mut StripeComparison,
    ) -> Result<(), StripeError> {
        let available = self.available();
        let result = {
            let _scratch = self
                .array
                .memory
                .acquire_scratch((rows.end - rows.start) * self.compare_pages_per_row())
                .await;
            match self.read_strips(rows, available).await? {
                Ok(read_set) => Ok(self.inconsistent_rows(&read_set, available, rows)),
                Err(failed) => Err(failed),
            }
        };
        match result {
            // Row by row: a disk that does not return one row may return the others.
            Err(_) if rows.len() > 1 => {
                for row in rows.clone() {
                    Box::pin(self.compare_parity(&(row..row + 1), found)).await?;
                }
            }
            Err(failed) => {
                for role in failed.roles() {
                    match self.rewrite_strip(rows, role).await {
                        Ok(()) => found.totals.repaired += 1,
                        Err(StripeError::Unrecoverable) => {
                            found.unreadable_rows.extend(rows.clone());
                            break;
                        }
                        Err(failure) => return Err(failure),
                    }
                }
            }
            Ok(inconsistent) => {
                for (row, role) in inconsistent {
                    match role {
                        Some(role) => {
                            self.rewrite_strip(&(row..row + 1), role).await?;
                            found.totals.repaired += 1;
                        }
                        None => self.report_inconsistent(None, row, found),
                    }
                }
            }
        }
        Ok(())
    }

    /// Rows whose parities do not match, and the wrong strip if known. Empty if a strip is missing.
    fn inconsistent_rows(
        &self,
        read_set: &ReadSet,
        available: Available,
        rows: &Range<u32>,
    ) -> Vec<(u32, Option<StripRole>)> {
        if available != self.all_strips() {
            return Vec::new();
        }
        let strips: Vec<&[block::Buf]> =
            (0..self.data_strips()).map(|n| read_set.pages_of(StripRole::Data(n))).collect();
        let (p, q) = (read_set.pages_of(StripRole::P), read_set.pages_of(StripRole::Q));
        let wrong = (0usize..).zip(rows.clone()).filter_map(|(n, row)| {
            let data: SmallVec<[&[u8]; 16]> = strips.iter().map(|pages| &pages[n][..]).collect();
            let verdict = match (p.get(n), q.get(n)) {
                (Some(p), Some(q)) => self.array.parity.check_pq(&data, p, q),
                (Some(p), None) if !self.array.parity.check_p(&data, p) => {
                    SyndromeVerdict::Ambiguous
                }
                _ => SyndromeVerdict::Consistent,
            };
            match verdict {
                SyndromeVerdict::Consistent => None,
                SyndromeVerdict::P => Some((row, Some(StripRole::P))),
                SyndromeVerdict::Q => Some((row, Some(StripRole::Q))),
                SyndromeVerdict::Data(n) => Some((row, u16::try_from(n).ok().map(StripRole::Data))),
                SyndromeVerdict::Ambiguous => Some((row, None)),
            }
        });
        wrong.collect()
    }

    /// Rewrites rows of a strip, reconstructed from the others. That is a logged write: otherwise
    /// an older log entry for the rows could be replayed over them after a crash.
    async fn rewrite_strip(&self, rows: &Range<u32>, role: StripRole) -> Result<(), StripeError> {
        let wrong = Available::from_roles([role]);
        // A parity is rewritten by writing a data strip as it is.
        let strip = if let StripRole::Data(strip) = role { strip } else { 0 };
        let data: Bufs = {
            let _scratch = self
                .array
                .memory
                .acquire_scratch((rows.end - rows.start) * self.reconstruct_pages_per_row())
                .await;
            let (read_set, _) = self.reconstruct(rows, wrong).await?;
            let copies = read_set.pages_of(StripRole::Data(strip)).iter().map(|page| {
                let mut copy = block::BufMut::heap_page();
                copy.copy_from_slice(page);
                copy.freeze()
            });
            copies.collect()
        };
        self.array.wait_durable(self.slot_id()).await?;
        let _exclusion = self.exclude_reads().await;
        let band = RowBand { rows: rows.clone(), data: smallvec![(strip, data)] };
        self.write_band(&band, wrong, false).await?;
        self.array.mark_stale(&self.extent, self.geometry.region_bit(self.slot)).await?;
        for column in self.available_columns(role) {
            self.array.members.count_repaired(column.member, rows.end - rows.start);
        }
        Ok(())
    }

    /// Reports a row as inconsistent: one strip of it if strips have copies, else the whole stripe.
    fn report_inconsistent(&self, strip: Option<u16>, row: u32, found: &mut StripeComparison) {
        found.totals.unrecoverable += 1;
        let strips = strip.map_or(0..self.data_strips(), |strip| strip..strip + 1);
        found.unrepaired_rows.extend(strips.map(|strip| self.data_rows_of(strip, row..row + 1)));
        let rows = match strip {
            Some(strip) => self.data_rows_of(strip, row..row + 1),
            None => {
                self.data_rows_of(0, 0..u32::try_from(self.geometry.stripe_rows()).unwrap_or(0))
            }
        };
        let (kind, extent) = (DamageKind::Inconsistent, self.extent.number);
        self.array.metadata.report_damage(Damage { kind, member: None, extent, rows });
    }

    async fn compare_copies(
        &self,
        rows: &Range<u32>,
        found: &mut StripeComparison,
    ) -> Result<(), StripeError> {
        for strip in 0..self.data_strips() {
            self.compare_strip_copies(strip, rows, found).await?;
        }
        found.unreadable_rows.dedup();
        Ok(())
    }

    async fn compare_strip_copies(
        &self,
        strip: u16,
        rows: &Range<u32>,
        found: &mut StripeComparison,
    ) -> Result<(), StripeError> {
        let columns: SmallVec<[Column; 4]> =
            self.available_columns(StripRole::Data(strip)).collect();
        let count = rows.end - rows.start;
        let copy_count = u32::try_from(columns.len()).unwrap_or(u32::MAX);
        let _scratch = self.array.memory.acquire_scratch(count.saturating_mul(copy_count)).await;
        let mut read: SmallVec<[(Column, Option<RowPages>); 4]> = SmallVec::new();
        for column in columns {
            match self.read_at(column, rows, &self.array.memory.scratch).await {
                Ok(data) => read.push((column, Some(split_into_rows(&data)))),
                Err(error) => {
                    self.handle_read_failure(ReadFailure(Some((column, error)))).await?;
                    read.push((column, None));
                }
            }
        }
        for (n, row) in (0usize..).zip(rows.clone()) {
            let of = |pages: &Option<RowPages>| pages.as_ref().map(|pages| pages[n].clone());
            let copies: SmallVec<[_; 4]> = read.iter().map(|(c, pages)| (*c, of(pages))).collect();
            let Some(right) = majority(&copies) else {
                if copies.iter().any(|(_, page)| page.is_some()) {
                    self.report_inconsistent(Some(strip), row, found);
                } else {
                    found.unreadable_rows.push(row);
                }
                continue;
            };
            let wrong =
                copies.iter().filter(|(_, page)| page.as_ref().is_none_or(|p| p[..] != right[..]));
            for (column, _) in wrong {
                let _exclusion = self.exclude_reads().await;
                self.write_at(*column, row, right.clone().into(), false).await?;
                self.array.members.count_repaired(column.member, 1);
                found.totals.repaired += 1;
            }
        }
        Ok(())
    }
}

/// The contents that more than half of the readable copies have, if any.
fn majority(copies: &[(Column, Option<block::Buf>)]) -> Option<block::Buf> {
    let readable: SmallVec<[&block::Buf; 4]> =
        copies.iter().filter_map(|(_, page)| page.as_ref()).collect();
    let equal = |page: &block::Buf| readable.iter().filter(|other| other[..] == page[..]).count();
    readable.iter().find(|page| equal(page) * 2 > readable.len()).map(|page| (*page).clone())
}
