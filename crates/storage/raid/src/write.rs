//! Writes: the holder of a stripe lock executes all writes queued for the stripe, band by band.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use block::{Buf, BufMut, Bufs, Error, Lba};
use futures_util::future::join_all;
use geometry::{ROW_BYTES, Redundancy, StripRole};
use smallvec::SmallVec;

use super::array::Array;
use super::band::{RowBand, split_into_bands};
use super::fragments::{StripFragment, is_full_stripe, split_by_stripe};
use super::intent_locks::IntentRegion;
use super::log_batch::EntryKind;
use super::member_bits::{MemberBits, member_bit};
use super::mistake::Mistake;
use super::parity_log::LogPositions;
use super::row_parity::complete_parity;
use super::row_plan::{Available, RowPlan, StripSet, Unrecoverable, WriteMethod, plan_row};
use super::stripe::{ReadSet, RowPages, Stripe, StripeError, page_aligned, split_into_rows};
use super::stripe_locks::StripeId;
use super::volume::RaidVolume;
use super::write_queues::QueuedWrite;

const ROW: usize = ROW_BYTES as usize;

/// Rows of a strip's copies that one write intent covers: 1 MiB.
const INTENT_REGION_ROWS: u32 = 256;

/// Held while writes of a stripe are executed. It is dropped armed only in a crash; the contents of
/// the stripe are then unknown, so all writes stop.
struct StripeWriteGuard<'a>(Option<&'a Array>);

impl StripeWriteGuard<'_> {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for StripeWriteGuard<'_> {
    fn drop(&mut self) {
        self.0.into_iter().for_each(|array| array.stop_writes(Error::Gone));
    }
}

impl RaidVolume {
    /// Writes `data` from byte `at` of the extents on; errors name block `lba`.
    pub(super) async fn write(
        &self,
        at: u64,
        data: Bufs,
        fua: bool,
        lba: Lba,
    ) -> Result<(), Error> {
        let mut stripes = split_by_stripe(self.geometry, at, &data).into_iter();
        let outcome = match (stripes.next(), stripes.len()) {
            (None, _) => Ok(()),
            (Some((stripe, only)), 0) => self.write_stripe(stripe, only, fua).await,
            (Some(first), _) => {
                let all = std::iter::once(first).chain(stripes);
                let each = all.map(|(stripe, fragments)| self.write_stripe(stripe, fragments, fua));
                // All run to completion, even if one fails.
                join_all(each).await.into_iter().collect()
            }
        };
        outcome.map_err(|failure| match failure {
            StripeError::Unrecoverable => Error::Unwritable { at: lba },
            StripeError::Array(error) => error,
        })
    }

    /// Queues a write of one stripe, waits for the stripe lock, and executes what is queued, unless
    /// an earlier holder of the lock has executed this write.
    async fn write_stripe(
        &self,
        stripe: StripeId,
        fragments: Vec<StripFragment>,
        fua: bool,
    ) -> Result<(), StripeError> {
        self.ensure_allocated(stripe.0).await?;
        if self.partially_overwrites_lost_row(stripe, &fragments) {
            return Err(StripeError::Unrecoverable);
        }
        let own = Rc::new(QueuedWrite { fragments, fua, outcome: Cell::new(None) });
        self.write_queues.enqueue(stripe, &own);
        loop {
            let _lock = self.lock_stripe(stripe).await;
            if own.outcome.get().is_none() {
                let queued = self.write_queues.take_batch(stripe);
                let guard = StripeWriteGuard(Some(&self.array));
                let outcome = self.execute_writes(stripe, &queued).await;
                guard.disarm();
                queued.iter().for_each(|write| write.outcome.set(Some(outcome)));
            }
            if let Some(outcome) = own.outcome.get() {
                return outcome;
            }
        }
    }

    /// Executes writes of one stripe as one. The caller holds the stripe lock.
    async fn execute_writes(
        &self,
        id: StripeId,
        writes: &[Rc<QueuedWrite>],
    ) -> Result<(), StripeError> {
        let stripe = self.stripe(id)?;
        let fua = writes.iter().any(|write| write.fua);
        match writes {
            [only] => stripe.write_fragments(id.1, &only.fragments, fua).await?,
            _ => {
                let all = writes.iter().flat_map(|write| write.fragments.iter().cloned());
                stripe.write_fragments(id.1, &all.collect::<Vec<_>>(), fua).await?;
            }
        }
        if stripe.extent.lost_rows.is_clean() {
            return Ok(());
        }
        // Boxed because it is rare.
        let written = writes.iter().flat_map(|write| &write.fragments);
        Box::pin(self.clear_rewritten_rows(id, &stripe.extent, written)).await
    }
}

impl Stripe<'_> {
    /// Writes `fragments` of stripe `number`. The caller holds the stripe lock.
    async fn write_fragments(
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
        for bands in split_into_bands(&writes) {
            self.array.wait_durable(self.slot_id()).await?;
            match &bands[..] {
                [only] => self.write_band(only, fua).await?,
                several => {
                    let each = several.iter().map(|band| self.write_band(band, fua));
                    join_all(each).await.into_iter().collect::<Result<(), _>>()?;
                }
            }
        }
        Ok(self.array.mark_stale(&self.extent, region).await?)
    }

    async fn write_band(&self, band: &RowBand, fua: bool) -> Result<(), StripeError> {
        self.write_band_avoiding(band, Available::default(), fua).await
    }

    /// Writes a band without reading the strips in `wrong`, which are right afterwards.
    pub(super) async fn rewrite_band(
        &self,
        band: &RowBand,
        avoid: Available,
    ) -> Result<(), StripeError> {
        self.write_band_avoiding(band, avoid, false).await
    }

    async fn write_band_avoiding(
        &self,
        band: &RowBand,
        mut unreadable: Available,
        fua: bool,
    ) -> Result<(), StripeError> {
        let suspect = self.suspect_parities(&band.rows);
        loop {
            let (changed, available) = (band.changed(), self.available());
            // Avoids reads of slow members if possible.
            let plan_without =
                |unreadable| plan_row(self.data_strips(), changed, available, unreadable);
            let trusted = unreadable.union(suspect);
            let plan = plan_without(trusted.union(self.strips_on_slow_members()))
                .or_else(|Unrecoverable| plan_without(trusted));
            let plan = plan.or_else(|Unrecoverable| plan_without(unreadable))?;
            let _scratch =
                self.array.memory.acquire_scratch(self.band_scratch_pages(&plan, band)).await;
            match self.read_strips(&band.rows, plan.reads).await? {
                Ok(read_set) => return self.write_planned_band(band, &plan, read_set, fua).await,
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

    /// Scratch pages for a band: strips read and reconstructed, two parities for each parity strip,
    /// and copies of unaligned data.
    fn band_scratch_pages(&self, plan: &RowPlan, band: &RowBand) -> u32 {
        let parities = u32::from(self.geometry.redundancy().parity_strips());
        let copied = band.data.iter().filter(|(_, data)| !data.is_aligned(ROW)).count();
        let reconstructed = if plan.method == WriteMethod::ReconstructLost { parities } else { 0 };
        band.row_count()
            * (plan.reads.len() + reconstructed + 2 * parities + u32::try_from(copied).unwrap_or(0))
    }

    async fn write_planned_band(
        &self,
        band: &RowBand,
        plan: &RowPlan,
        read_set: ReadSet,
        fua: bool,
    ) -> Result<(), StripeError> {
        let read_set = match plan.method {
            WriteMethod::ReconstructLost => self.reconstruct_missing(
                &band.rows,
                self.unread_strips(plan.reads),
                read_set,
                &self.array.memory.scratch,
            )?,
            _ => read_set,
        };
        let new = self.new_contents(band);
        let parity_roles =
            self.available().roles().filter(|role| !matches!(role, StripRole::Data(_)));
        let parities: SmallVec<[NewParity; 2]> = parity_roles
            .map(|role| self.new_parity(role, plan.method, band, &read_set, &new))
            .collect();
        drop(read_set);
        if let Redundancy::Copies(_) = self.geometry.redundancy() {
            return self.write_copies(band, &new, fua).await;
        }
        if self.array.makes_mistake(Mistake::WritesBeforeLog) {
            self.write_strips(band, &new, &parities, fua).await?;
        }
        let positions = self.log_band(band, plan, &new, &parities).await?;
        self.mark_stale_before_write().await?;
        let written = self.write_strips(band, &new, &parities, fua).await;
        self.finish_band(band.changed(), positions, written, fua)
    }

    /// Writes strips without parity to all their copies.
    async fn write_copies(
        &self,
        band: &RowBand,
        new: &[NewStrip],
        fua: bool,
    ) -> Result<(), StripeError> {
        let is_single = self.geometry.redundancy().fault_tolerance() == 0;
        let regions: SmallVec<[(IntentRegion, MemberBits); 2]> =
            if is_single || self.array.makes_mistake(Mistake::SkipsWriteIntents) {
                SmallVec::new()
            } else {
                band.changed()
                    .iter()
                    .map(|strip| (self.intent_region(strip), self.members_with_copy(strip)))
                    .collect()
            };
        let intent = |(_, first, strip): IntentRegion| {
            let stripes = self.intent_region_stripes().min(self.geometry.stripes() - first);
            EntryKind::WriteIntent { stripes, changed: [strip].into_iter().collect() }
        };
        self.array.lock_copies(&regions, intent).await?;
        self.mark_stale_before_write().await?;
        let written = self.write_strips(band, new, &[], fua).await;
        let ended = self.finish_band(band.changed(), LogPositions::new(), written, fua);
        let regions: SmallVec<[IntentRegion; 2]> =
            regions.into_iter().map(|(region, _)| region).collect();
        self.array.unlock_copies(&regions, self.geometry.region_bit(self.slot), fua).await?;
        ended
    }

    /// Records stale regions again, because a member may have been detached meanwhile. The log of a
    /// detached parity member lacks this entry: without the record, log recovery would trust that
    /// parity once the member is reattached.
    async fn mark_stale_before_write(&self) -> Result<(), Error> {
        if self.array.makes_mistake(Mistake::MarksStaleOnce) {
            return Ok(());
        }
        self.array.mark_stale(&self.extent, self.geometry.region_bit(self.slot)).await
    }

    /// Members that have an available copy of a strip.
    fn members_with_copy(&self, strip: u16) -> MemberBits {
        let columns = self.available_columns(StripRole::Data(strip));
        columns.fold(0, |all, column| all | member_bit(column.member))
    }

    /// Stripes of an intent region.
    fn intent_region_stripes(&self) -> u32 {
        (INTENT_REGION_ROWS / self.geometry.strip_rows()).max(1)
    }

    fn intent_region(&self, strip: u16) -> IntentRegion {
        let first = self.slot / self.intent_region_stripes() * self.intent_region_stripes();
        (self.extent.number, first, strip)
    }

    /// Writes data strips and parities.
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
        let each = (data.chain(parities))
            .map(|(role, data): (_, Bufs)| self.write(role, band.rows.start, data, fua));
        join_all(each).await.into_iter().collect()
    }

    /// Data strips that were not read.
    fn unread_strips(&self, read: Available) -> StripSet {
        StripSet::first(self.data_strips()).difference(read.data)
    }

    fn new_contents(&self, band: &RowBand) -> SmallVec<[NewStrip; 2]> {
        let new = |(strip, data): &(u16, Bufs)| {
            let data = page_aligned(data.clone(), || self.array.memory.scratch.alloc(data.len()));
            NewStrip { strip: *strip, pages: split_into_rows(&data), data }
        };
        band.data.iter().map(new).collect()
    }

    fn new_parity(
        &self,
        role: StripRole,
        method: WriteMethod,
        band: &RowBand,
        read_set: &ReadSet,
        new: &[NewStrip],
    ) -> NewParity {
        let (changed, count) = (band.changed(), band.rows.len());
        let parity = self.array.parity;
        let offset = u16::from(self.array.makes_mistake(Mistake::WrongQCoefficient));
        let is_full_stripe = changed.len() == u32::from(self.data_strips());
        let partial: RowPages = if is_full_stripe {
            (0..count).map(|_| Buf::zeroes(ROW)).collect()
        } else {
            let mut pages = self.scratch_pages(count);
            for (n, page) in pages.iter_mut().enumerate() {
                read_set
                    .known_row(self.data_strips(), n)
                    .partial_parity(parity, role, method, changed, page);
            }
            pages.into_iter().map(BufMut::freeze).collect()
        };
        let mut all = self.scratch_pages(count);
        for (n, page) in all.iter_mut().enumerate() {
            let new: SmallVec<[(u16, &[u8]); 4]> =
                new.iter().map(|new| (new.strip + offset, &new.pages[n][..])).collect();
            complete_parity(parity, role, &partial[n], &new, page);
        }
        NewParity { role, partial, full: all.into_iter().map(BufMut::freeze).collect() }
    }

    /// Appends an entry to the logs of the parity members, if any.
    async fn log_band(
        &self,
        band: &RowBand,
        plan: &RowPlan,
        new: &[NewStrip],
        parities: &[NewParity],
    ) -> Result<LogPositions, StripeError> {
        if parities.is_empty() {
            return Ok(LogPositions::new());
        }
        let logged = if plan.logs_data { new } else { &[] };
        let each = parities.iter().map(|parity| {
            let blocks = |n: usize| {
                let data = logged.iter().map(move |new| new.pages[n].clone());
                std::iter::once(parity.partial[n].clone()).chain(data)
            };
            let member = self.column_of(parity.role)?.member;
            Ok((member, (0..band.rows.len()).flat_map(blocks).collect()))
        });
        let to = each.collect::<Result<SmallVec<[(u16, Vec<Buf>); 2]>, Error>>()?;
        let rows = u16::try_from(band.row_count()).unwrap_or(u16::MAX);
        let kind = EntryKind::RowsWritten { row: band.rows.start, rows, changed: band.changed() };
        Ok(self.array.append_to_logs(self.slot_id(), kind, to).await?.1)
    }

    /// Checks whether a written band can be read, despite failures meanwhile, and notes its log
    /// entry as written.
    fn finish_band(
        &self,
        changed: StripSet,
        positions: LogPositions,
        written: Result<(), Error>,
        fua: bool,
    ) -> Result<(), StripeError> {
        let available = self.available();
        let missing = self.unread_strips(available);
        let is_readable = changed.difference(available.data).is_empty()
            || missing.len() <= available.parity_count();
        let failure = match written {
            Ok(()) if is_readable => {
                if !positions.is_empty() {
                    let region = self.geometry.region_bit(self.slot);
                    self.array.note_entry_written(self.slot_id(), region, positions, fua);
                }
                return Ok(());
            }
            Ok(()) => StripeError::Unrecoverable,
            Err(error) => StripeError::Array(error),
        };
        self.array.stop_writes(Error::Gone);
        Err(failure)
    }
}

/// The new contents of a strip.
struct NewStrip {
    strip: u16,
    data: Bufs,
    /// The same, row by row.
    pages: RowPages,
}

/// The new contents of a parity strip.
struct NewParity {
    role: StripRole,
    /// The partial parity of the unchanged strips, row by row.
    partial: RowPages,
    /// The parity of all strips.
    full: RowPages,
}
