//! Reads: from the column that holds the data, or reconstructed from the rest of the row.

use std::ops::Range;

use block::{Bufs, Ctx, Error, Lba};
use futures_util::future::join_all;
use geometry::{ROW_BYTES, StripRole, StripRun};

use super::array_memory::MAX_SCRATCH_PAGES;
use super::fragments::strip_runs;
use super::hedged_read::NoDirectReply;
use super::mistake::Mistake;
use super::read_locks::SharedReadLock;
use super::stripe::{MAX_RECONSTRUCT_ROWS, ReadFailure, StripeError};
use super::stripe_locks::stripe_key;
use super::volume::RaidVolume;

impl RaidVolume {
    /// Reads these bytes of the extents; errors name block `lba`.
    pub(super) async fn read(&self, bytes: Range<u64>, lba: Lba, ctx: &Ctx) -> Result<Bufs, Error> {
        let row = u64::from(ROW_BYTES);
        let rows = bytes.start / row..bytes.end.div_ceil(row);
        let data = self.read_rows(&rows, lba, ctx).await?;
        let skipped = usize::try_from(bytes.start - rows.start * row).unwrap_or(0);
        let len = usize::try_from(bytes.end - bytes.start).unwrap_or(0);
        Ok(if len == data.len() { data } else { data.slice(skipped..skipped + len) })
    }

    async fn read_rows(&self, rows: &Range<u64>, lba: Lba, ctx: &Ctx) -> Result<Bufs, Error> {
        let mut runs = strip_runs(self.geometry, rows);
        let first = runs.next().ok_or(Error::OutOfRange)?;
        let second = runs.next();
        let Some(second) = second else {
            return self.read_run(first, lba, ctx).await;
        };
        let all = [first, second].into_iter().chain(runs);
        // Collected first: an iterator of unknown length would allocate each future separately.
        let each: Vec<_> = all.map(|run| self.read_run(run, lba, ctx)).collect();
        let mut data = Bufs::new();
        for found in join_all(each).await {
            data.append(found?);
        }
        Ok(data)
    }

    async fn read_run(
        &self,
        (index, run): (u32, StripRun),
        lba: Lba,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let Some(extent) = self.extent(index) else {
            return Ok(Bufs::zeroes(run.rows.len() * ROW_BYTES as usize));
        };
        if self.overlaps_lost_rows(&extent, &run) {
            return Err(Error::Unreadable { at: lba });
        }
        drop(extent);
        let stripe = self.stripe((index, run.stripe))?;
        let role = StripRole::Data(run.strip);
        let read_lock = self.read_locks.try_lock_shared(stripe_key((index, run.stripe)));
        let found = match read_lock {
            Some(_) => stripe.read_with_deadline(role, &run.rows, ctx).await,
            None => {
                let _lock = self.lock_stripe((index, run.stripe)).await;
                // The stripe may have moved since, or the rows may be lost.
                let stripe = self.stripe((index, run.stripe))?;
                if self.overlaps_lost_rows(&stripe.extent, &run) {
                    return Err(Error::Unreadable { at: lba });
                }
                stripe.read(role, &run.rows, ctx).await.map_err(NoDirectReply::Failed)
            }
        };
        match found {
            Ok(data) => Ok(data),
            // Rare cases are boxed, to keep the future of a plain read small.
            Err(no_reply) => {
                let fallback = self.read_fallback(index, &run, no_reply, read_lock, ctx);
                Box::pin(fallback).await.map_err(|failure| match failure {
                    StripeError::Unrecoverable => Error::Unreadable { at: lba },
                    StripeError::Array(error) => error,
                })
            }
        }
    }

    /// Reads a run that its member did not return, or not in time.
    async fn read_fallback(
        &self,
        index: u32,
        run: &StripRun,
        no_reply: NoDirectReply,
        read_lock: Option<SharedReadLock<'_>>,
        ctx: &Ctx,
    ) -> Result<Bufs, StripeError> {
        // An unanswered operation keeps the memory that it was given.
        let hedge_ctx = no_reply
            .may_hold_memory()
            .then(|| self.array.memory.hedge_ctx(run.rows.len() * ROW_BYTES as usize));
        let hedge_ctx = hedge_ctx.flatten();
        let ctx = hedge_ctx.as_ref().unwrap_or(ctx);
        let failure = match no_reply {
            NoDirectReply::Failed(failure) => {
                drop(read_lock);
                failure
            }
            NoDirectReply::Late(column, io) => {
                match self.hedged_read((index, run), (column, io), read_lock, ctx).await {
                    Ok(data) => return Ok(data),
                    Err(failure) => failure,
                }
            }
        };
        self.stripe((index, run.stripe))?.handle_read_failure(failure).await?;
        self.read_by_reconstruction(index, run, failure, ctx).await
    }

    /// Reconstructs what cannot be read, and writes it back if the member is attached.
    async fn read_by_reconstruction(
        &self,
        index: u32,
        run: &StripRun,
        failure: ReadFailure,
        ctx: &Ctx,
    ) -> Result<Bufs, StripeError> {
        let _lock = match self.array.makes_mistake(Mistake::ReconstructsWithoutStripeLock) {
            true => None,
            false => Some(self.lock_stripe((index, run.stripe)).await),
        };
        let stripe = self.stripe((index, run.stripe))?;
        if self.overlaps_lost_rows(&stripe.extent, run) {
            return Err(StripeError::Unrecoverable);
        }
        let mut data = Bufs::new();
        let most =
            (MAX_SCRATCH_PAGES / stripe.reconstruct_pages_per_row()).clamp(1, MAX_RECONSTRUCT_ROWS);
        let mut start = run.rows.start;
        while start < run.rows.end {
            let rows = start..run.rows.end.min(start + most);
            start = rows.end;
            data.append(stripe.reconstruct_and_repair(run.strip, &rows, failure, ctx).await?);
        }
        Ok(data)
    }
}
