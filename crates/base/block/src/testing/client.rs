//! A caller that gives every operation exactly the memory that the device declares.

use std::time::Duration;

use rt::buf::{Account, Bufs, Class, Pool, copy_in};

use crate::{Ctx, Dev, Epoch, Error, Lba, Op, Run};

/// Submits operations the way a volume does.
#[derive(Clone, Debug)]
pub struct Client {
    dev: Dev,
    account: Account,
}

impl Client {
    /// A client of `dev` with memory from `pool`.
    #[must_use]
    pub fn new(dev: &Dev, pool: &Pool) -> Self {
        Self { dev: dev.clone(), account: pool.account() }
    }

    /// The device.
    #[must_use]
    pub fn dev(&self) -> &Dev {
        &self.dev
    }

    /// A context with memory for `bytes` of data and what the device needs beside.
    ///
    /// # Panics
    /// If the pool is too small for that, or has not got it for a minute.
    pub async fn ctx(&self, bytes: usize) -> Ctx {
        let bytes = bytes + self.dev.info().overhead as usize;
        let credit = self.account.credit(bytes, Class::Immediate);
        let credit = tokio::time::timeout(Duration::from_secs(60), credit).await;
        let credit = credit.expect("the test's pool stays empty: somebody keeps memory");
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

    /// Does an operation that brings no data and returns none.
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

    /// How a range begins.
    ///
    /// # Errors
    /// What the device reports.
    ///
    /// # Panics
    /// If the device breaks the contract.
    pub async fn map(&self, at: u64, blocks: u32) -> Result<Run, Error> {
        let ctx = self.ctx(Run::BYTES).await;
        let data = self.dev.submit(Op::Map { at: Lba(at), blocks }, &ctx).await?;
        let run = Run::all_of(&data)[0];
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
