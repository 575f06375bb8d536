//! The memory of an array, which it reserves when it is made.
//!
//! Waits are ordered, so that there is no deadlock: pages for partially written rows first, then
//! scratch pages. A holder of scratch pages waits for no more of them.

use std::sync::Arc;

use block::{Account, BufferPool, Ctx, Epoch, Error, MemoryClass, reserve_memory};
use geometry::MAX_MEMBERS;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::log_batch::BLOCK_BYTES;

/// Scratch memory for reads and parity of stripes that are being written, in pages of 4 KiB.
pub(super) const MAX_SCRATCH_PAGES: u32 = 1024;

/// Further memory, for partially written rows, in pages.
const PARTIAL_ROW_PAGES: u32 = 64;

/// Most memory that a member's layers need for an operation, in bytes.
const MEMBER_OVERHEAD_BYTES: usize = 4096;

/// Bytes that an array takes: for stripes, partially written rows, and per member a batch header,
/// the disk's overhead and a probe block.
pub(super) const MEMORY_BYTES: usize = (MAX_SCRATCH_PAGES + PARTIAL_ROW_PAGES) as usize
    * BLOCK_BYTES
    + MAX_MEMBERS as usize * (2 * BLOCK_BYTES + MEMBER_OVERHEAD_BYTES);

/// The memory of an array.
#[derive(Debug)]
pub(super) struct ArrayMemory {
    /// Memory of stripes that are being written; `scratch_pages` counts its pages.
    pub(super) scratch: Ctx,
    pub(super) scratch_pages: Arc<Semaphore>,
    partial_row_pages: Semaphore,
    /// Provides memory for hedged reads.
    account: Account,
}

impl ArrayMemory {
    /// Reserves memory of `pool`, until this is dropped.
    pub(super) async fn reserve(pool: &BufferPool) -> Result<Self, Error> {
        let credit = reserve_memory(&pool.account(), MEMORY_BYTES).await?;
        Ok(Self {
            scratch: Ctx::new(credit, Epoch::default()),
            scratch_pages: Arc::new(Semaphore::new(MAX_SCRATCH_PAGES as usize)),
            partial_row_pages: Semaphore::new(PARTIAL_ROW_PAGES as usize),
            account: pool.account(),
        })
    }

    /// Waits for this many pages of scratch memory. A holder of some must not wait for more.
    pub(super) async fn acquire_scratch(&self, pages: u32) -> SemaphorePermit<'_> {
        self.scratch_pages
            .acquire_many(pages.min(MAX_SCRATCH_PAGES))
            .await
            .expect("the semaphore is never closed")
    }

    /// As [`Self::acquire_scratch`], for partially written rows. A caller that waits for these must
    /// hold no scratch pages.
    pub(super) async fn acquire_partial_rows(&self, pages: u32) -> SemaphorePermit<'_> {
        self.partial_row_pages
            .acquire_many(pages.min(PARTIAL_ROW_PAGES))
            .await
            .expect("the semaphore is never closed")
    }

    /// Memory for a hedged read, if available: the caller holds other memory, so it must not wait.
    pub(super) fn hedge_ctx(&self, bytes: usize) -> Option<Ctx> {
        let credit = self.account.try_credit(bytes, MemoryClass::LocalIo)?;
        Some(Ctx::new(credit, Epoch::default()))
    }
}
