//! Zeroes and unmaps: whole extents are freed, the rest is written.

use std::ops::Range;

use block::{Bufs, Ctx, Error, Lba};
use futures_util::future::join3;
use geometry::ROW_BYTES;

use super::bounded_concurrency::run_bounded;
use super::volume::RaidVolume;

/// Largest number of extents that one operation frees at a time.
const MAX_CONCURRENT_FREES: usize = 32;

/// Most bytes of a zeroing write, if a stripe is not longer.
const ZERO_STEP_BYTES: u64 = 1 << 20;

/// Zeroing writes of one operation that run at a time.
const MAX_CONCURRENT_ZEROES: usize = 8;

impl RaidVolume {
    /// Zeroes bytes of the extents.
    pub(super) async fn zero(
        &self,
        bytes: Range<u64>,
        fua: bool,
        lba: Lba,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        let each = self.mapped_zero_steps(bytes).map(|step| async move {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let data = Bufs::zeroes(usize::try_from(step.end - step.start).unwrap_or(0));
            self.write(step.start, data, fua, lba).await
        });
        run_bounded(each, MAX_CONCURRENT_ZEROES).await
    }

    /// The allocated parts of `bytes`, in steps that begin and end on stripe boundaries where
    /// `bytes` permits.
    fn mapped_zero_steps(&self, bytes: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let stripe = self.geometry.stripe_rows() * u64::from(ROW_BYTES);
        let step = (ZERO_STEP_BYTES / stripe).max(1) * stripe;
        let mut at = bytes.start;
        std::iter::from_fn(move || {
            while at < bytes.end {
                let (len, mapped) = self.mapped_prefix(&(at..bytes.end));
                let start = at;
                if mapped {
                    at = (start / step + 1).saturating_mul(step).min(start + len);
                    return Some(start..at);
                }
                at += len;
            }
            None
        })
    }

    /// Frees whole extents and zeroes the rest, all at once, so that flushes, log batches and pool
    /// metadata versions are shared.
    pub(super) async fn unmap(
        &self,
        bytes: Range<u64>,
        fua: bool,
        lba: Lba,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        let each = self.extent_bytes();
        let (first, last) = (bytes.start.div_ceil(each), bytes.end / each);
        if self.is_thick || first >= last {
            return self.zero(bytes, fua, lba, ctx).await;
        }
        let head = self.zero(bytes.start..first * each, fua, lba, ctx);
        let tail = self.zero(last * each..bytes.end, fua, lba, ctx);
        let frees = (first..last).filter_map(|index| u32::try_from(index).ok());
        let frees = run_bounded(frees.map(|index| self.free_extent(index)), MAX_CONCURRENT_FREES);
        let (head, tail, frees) = join3(head, tail, frees).await;
        head.and(tail).and(frees)
    }

    /// Frees the extent at `index`: it reads as zeroes from now on. Clients must not use it
    /// meanwhile.
    async fn free_extent(&self, index: u32) -> Result<(), Error> {
        let _lock = self.allocation_locks.lock(index.into()).await;
        let Some(extent) = self.extent(index) else { return Ok(()) };
        self.extents.borrow_mut()[index as usize] = None;
        // Maintenance writes to these columns, and records their place, until it ends.
        let _maintenance = self.lock_for_maintenance(index).await;
        // Rebuild and scrub hold a stripe lock; they do not find the extent for their next stripe.
        for stripe in 0..self.geometry.stripes() {
            drop(self.lock_stripe((index, stripe)).await);
        }
        self.array.quiesce_extent(&extent).await?;
        self.allocator.free(index).await
    }
}
