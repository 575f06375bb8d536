//! Writes: each part of a stripe is written under its stripe lock, whose holder executes all writes
//! that are queued for the stripe as one.

use std::cell::Cell;
use std::rc::Rc;

use block::{Bufs, Error, Lba};
use futures_util::future::join_all;

use super::array::Array;
use super::fragments::{StripFragment, split_by_stripe};
use super::stripe::StripeError;
use super::stripe_locks::StripeId;
use super::volume::RaidVolume;
use super::write_queues::QueuedWrite;

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
