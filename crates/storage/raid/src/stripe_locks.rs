//! Stripe locks: one writer of a stripe at a time.
//!
//! *What a lock protects*: the rows of a stripe with their parity or copies, where the stripe lies,
//! and its log entry: a row has at most one entry that is not retired. Its holder may write the
//! stripe, move it, and read more of it than a client's data. A plain read of data takes a shared
//! read lock instead (`read_locks`).
//!
//! *Order*, from the first to be taken to the last:
//! 1. the allocation lock of an extent, its maintenance lock,
//! 2. stripe locks; a caller that takes several takes them in ascending order,
//! 3. a free slot (`LiveStripeMap::reserve_slot`); pages for partially written rows,
//! 4. scratch pages (`ArrayMemory`),
//! 5. regions of copies (`intent_locks`), log space,
//! 6. the lock for saving stripe maps, and that of one map (`LiveStripeMap::saved_sequence`): its
//!    holder needs none of the above, so maps can be saved to free log space.
//!
//! The exclusive read lock of a stripe (`read_locks`) may be taken at any point after its stripe
//! lock: a task that waits for it waits for reads only, and these give up waiting for anything
//! else.
//!
//! *Who waits*: writes of the stripe, repairs, rebuild, scrub, relocation, the release of its
//! extent, and reads that must reconstruct, or whose stripe is locked against reads. A write queues
//! what it writes before it waits (`write_queues`): the holder of the lock may write it, too.

use block::{KeyedLock, KeyedLocks};

/// A stripe of a volume: the index of its extent, and its number in that.
pub(super) type StripeId = (u32, u32);

/// A held stripe lock.
pub(super) type StripeLock<'a> = KeyedLock<'a>;

/// The stripe locks of a volume.
#[derive(Debug, Default)]
pub(super) struct StripeLocks(KeyedLocks);

impl StripeLocks {
    /// Waits for the lock of a stripe.
    pub(super) fn lock(&self, stripe: StripeId) -> impl Future<Output = StripeLock<'_>> {
        self.0.lock(stripe_key(stripe))
    }
}

/// The key of a stripe: one number for extent and stripe.
pub(super) fn stripe_key((index, stripe): StripeId) -> u64 {
    u64::from(index) << 32 | u64::from(stripe)
}
