//! Repairs: what a member does not return is reconstructed, or taken from another copy, and written
//! back, so that its disk remaps it.

use std::ops::Range;

use block::{Buf, Bufs, Ctx};
use geometry::{Column, Redundancy, StripRole};
use smallvec::SmallVec;

use super::member_bits::member_bit;
use super::row_plan::Available;
use super::stripe::{ReadFailure, ReadSet, RowPages, Stripe, StripeError, split_into_rows};

impl Stripe<'_> {
    /// Rows of a data strip that could not be read, in memory of `ctx`. The caller holds the stripe
    /// lock.
    pub(super) async fn reconstruct_and_repair(
        &self,
        strip: u16,
        rows: &Range<u32>,
        failure: ReadFailure,
        ctx: &Ctx,
    ) -> Result<Bufs, StripeError> {
        let count = rows.end - rows.start;
        let _scratch =
            self.array.memory.acquire_scratch(count * self.reconstruct_pages_per_row()).await;
        if let Redundancy::Copies(_) = self.geometry.redundancy() {
            let copy = self.read_and_repair_copies(strip, rows).await?;
            return Ok(copy.iter().map(|page| copy_page(page, ctx)).collect());
        }
        let role = StripRole::Data(strip);
        let avoid = Some(role).filter(|_| failure.is_damage());
        let (read_set, reconstructed) =
            self.reconstruct(rows, Available::from_roles(avoid)).await?;
        self.rewrite_repaired(rows, &read_set, reconstructed).await?;
        Ok(read_set.pages_of(role).iter().map(|page| copy_page(page, ctx)).collect())
    }

    /// Rewrites unreadable rows on available members, so that the disk remaps them.
    async fn rewrite_repaired(
        &self,
        rows: &Range<u32>,
        read_set: &ReadSet,
        reconstructed: Available,
    ) -> Result<(), StripeError> {
        let repairable = reconstructed.data.intersection(self.available().data);
        if repairable.is_empty() {
            return Ok(());
        }
        let _exclusion = self.exclude_reads().await;
        for strip in repairable.iter() {
            let data = read_set.pages_of(StripRole::Data(strip)).iter().cloned().collect();
            self.write(StripRole::Data(strip), rows.start, data, false).await?;
            for column in self.available_columns(StripRole::Data(strip)) {
                self.array.members.count_repaired(column.member, rows.end - rows.start);
            }
        }
        Ok(())
    }

    /// Reads copies until one can be read, and rewrites the unreadable ones from it.
    pub(super) async fn read_and_repair_copies(
        &self,
        strip: u16,
        rows: &Range<u32>,
    ) -> Result<RowPages, StripeError> {
        let mut failed = SmallVec::<[Column; 2]>::new();
        let mut columns: SmallVec<[Column; 4]> =
            self.available_columns(StripRole::Data(strip)).collect();
        columns.sort_by_key(|column| self.array.members.slow() & member_bit(column.member) != 0);
        for column in columns {
            match self.read_at(column, rows, &self.array.memory.scratch).await {
                Ok(data) => {
                    let _exclusion =
                        if failed.is_empty() { None } else { self.exclude_reads().await };
                    for column in failed {
                        self.write_at(column, rows.start, data.clone(), false).await?;
                        self.array.members.count_repaired(column.member, rows.end - rows.start);
                    }
                    return Ok(split_into_rows(&data));
                }
                Err(error) => {
                    self.handle_read_failure(ReadFailure(Some((column, error)))).await?;
                    failed.push(column);
                }
            }
        }
        Err(StripeError::Unrecoverable)
    }
}

/// Copies `page` to memory of `ctx`.
fn copy_page(page: &Buf, ctx: &Ctx) -> Buf {
    let mut copy = ctx.credit().alloc_page(page.len());
    copy.copy_from_slice(page);
    copy.freeze()
}
