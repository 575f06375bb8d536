//! A caller that gives every operation exactly the memory that the device declares.

use std::time::Duration;

use rt::buf::{Account, BufferPool, Bufs, MemoryClass, copy_in};

use crate::{BlockStatus, Ctx, Dev, Epoch, Error, Lba, Op};

/// Submits operations the way a volume does.
#[derive(Clone, Debug)]
pub struct TestClient {
    dev: Dev,
    account: Account,
}

impl TestClient {
    /// A client of `dev` with memory from `pool`.
    #[must_use]
    pub fn new(dev: &Dev, pool: &BufferPool) -> Self {
        Self { dev: dev.clone(), account: pool.account() }
    }

    /// The device.
    #[must_use]
    pub fn dev(&self) -> &Dev {
        &self.dev
    }

    /// A context with memory for `bytes` of data and the device's overhead.
    ///
    /// # Panics
    /// If the pool is too small for that, or has had no room for a minute.
    pub async fn ctx(&self, bytes: usize) -> Ctx {
        let bytes = bytes + self.dev.info().overhead_bytes as usize;
        let credit = self.account.credit(bytes, MemoryClass::LocalIo);
        let credit = tokio::time::timeout(Duration::from_secs(60), credit).await;
        let credit = credit.expect("the test's buffer pool stays empty: memory is leaked");
        Ctx::new(credit.expect("the test's pool is too small"), Epoch::default())
    }

    /// Reads.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn read(&self, at: u64, blocks: u32) -> Result<Bufs, Error> {
        let ctx = self.ctx(blocks as usize * self.dev.info().block_size as usize).await;
        self.dev.submit(Op::Read { at: Lba(at), blocks }, &ctx).await
    }

    /// Writes.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn write(&self, at: u64, bytes: &[u8], fua: bool) -> Result<(), Error> {
        let ctx = self.ctx(bytes.len()).await;
        let data = copy_in(ctx.credit(), bytes);
        self.dev.submit(Op::Write { at: Lba(at), data, fua }, &ctx).await.map(drop)
    }

    /// Performs an operation that carries no data and returns none.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn submit(&self, op: Op) -> Result<(), Error> {
        let ctx = self.ctx(0).await;
        self.dev.submit(op, &ctx).await.map(drop)
    }

    /// Zeroes.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn zero(&self, at: u64, blocks: u32, unmap: bool) -> Result<(), Error> {
        self.submit(Op::Zero { at: Lba(at), blocks, unmap, fua: false }).await
    }

    /// Unmaps.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn unmap(&self, at: u64, blocks: u32) -> Result<(), Error> {
        self.submit(Op::Unmap { at: Lba(at), blocks }).await
    }

    /// The status of the first run of a range.
    ///
    /// # Errors
    /// What the device reports.
    ///
    /// # Panics
    /// If the device breaks the contract.
    pub async fn block_status(&self, at: u64, blocks: u32) -> Result<BlockStatus, Error> {
        let ctx = self.ctx(BlockStatus::BYTES).await;
        let data = self.dev.submit(Op::BlockStatus { at: Lba(at), blocks }, &ctx).await?;
        let run = BlockStatus::from_bufs(&data)[0];
        assert!((1..=blocks).contains(&run.blocks), "{run:?} of {blocks} blocks");
        Ok(run)
    }

    /// Flushes.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn flush(&self) -> Result<(), Error> {
        self.submit(Op::Flush).await
    }
}
