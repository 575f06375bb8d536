//! What stands between consumers, who ask for anything at any time, and a layer, which relies on order.

use std::fmt;
use std::rc::Rc;

use block::{
    Account, Blocks, Bufs, Class, Ctx, Dev, Epoch, Error, FlushGate, Info, Lba, Op, RangeLocks, Run,
};

/// What memory comes in, in bytes.
const PAGE: usize = 4096;

/// Longest stretch that one operation without data covers, in bytes: keeps every single one short.
const STEP_BYTES: u64 = 1 << 30;

/// A device for consumers of one core: commands of any length within it, at any time.
///
/// It splits what is longer than the device takes, waits for memory before a command begins, shares flushes, and
/// has no two overlapping operations run at once if one of them writes (contract of [`block`]). Nobody else may
/// use the device.
///
/// A command is a future that is polled to its end. What is longer than the device takes at once is not done
/// as one: another command may see, or overwrite, a part of it.
pub struct Ordered {
    dev: Dev,
    locks: Rc<RangeLocks>,
    flushes: FlushGate,
}

impl fmt::Debug for Ordered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ordered").field("dev", &self.dev).finish_non_exhaustive()
    }
}

impl Ordered {
    /// For consumers of `dev`.
    #[must_use]
    pub fn new(dev: Dev) -> Rc<Self> {
        Rc::new(Self { dev, locks: Rc::default(), flushes: FlushGate::default() })
    }

    /// What the device is now.
    #[must_use]
    pub fn info(&self) -> Info {
        self.dev.info()
    }

    /// Returns the contents of a range.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the device, or needs more memory than there is; what the
    /// device reports.
    pub async fn read(&self, range: Blocks, account: &Account) -> Result<Bufs, Error> {
        self.check(range)?;
        let info = self.info();
        let most = u64::from(info.max_transfer_blocks);
        let memory = pieces(range, most).fold(0usize, |sum, (_, blocks)| {
            let bytes = blocks as usize * info.block_size as usize;
            sum.saturating_add(bytes.next_multiple_of(PAGE))
        });
        // All of it before it begins: what is read of the first pieces is held until the last has come.
        let ctx = self.ctx(memory, Class::Read, account).await?;
        let lock = self.locks.enter(range, false);
        lock.held().await;
        let mut out = Bufs::new();
        for (at, blocks) in pieces(range, most) {
            out.append(self.dev.submit(Op::Read { at, blocks }, &ctx).await?);
        }
        Ok(out)
    }

    /// Replaces contents by `data`, a whole number of blocks.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn write(
        &self,
        at: Lba,
        data: Bufs,
        fua: bool,
        account: &Account,
    ) -> Result<(), Error> {
        let info = self.info();
        let block_size = info.block_size as usize;
        if !data.len().is_multiple_of(block_size) {
            return Err(Error::OutOfRange);
        }
        let range = Blocks::new(at, (data.len() / block_size) as u64);
        self.check(range)?;
        let ctx = self.ctx(0, Class::Immediate, account).await?;
        let lock = self.locks.enter(range, true);
        lock.held().await;
        let most = info.max_transfer_blocks;
        if range.count <= u64::from(most) {
            return self.dev.submit(Op::Write { at, data, fua }, &ctx).await.map(drop);
        }
        let mut done = 0;
        for (at, blocks) in pieces(range, most.into()) {
            let end = done + blocks as usize * block_size;
            let data = data.slice(done..end);
            self.dev.submit(Op::Write { at, data, fua }, &ctx).await?;
            done = end;
        }
        Ok(())
    }

    /// Makes a range read as zeroes; see [`Op::Zero`].
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn zero(
        &self,
        range: Blocks,
        unmap: bool,
        fua: bool,
        account: &Account,
    ) -> Result<(), Error> {
        self.without_data(range, account, |at, blocks| Op::Zero { at, blocks, unmap, fua }).await
    }

    /// Nobody needs the contents of a range any more; see [`Op::Unmap`].
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn unmap(&self, range: Blocks, account: &Account) -> Result<(), Error> {
        self.without_data(range, account, |at, blocks| Op::Unmap { at, blocks }).await
    }

    /// Says what a range has space behind it, from its beginning on, in `looks` looks at most: runs in order, each other
    /// than the one before. They cover one block at least, and not always all.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn map(
        &self,
        range: Blocks,
        looks: usize,
        account: &Account,
    ) -> Result<Vec<Run>, Error> {
        self.check(range)?;
        let ctx = self.ctx(PAGE, Class::Read, account).await?;
        let mut runs: Vec<Run> = Vec::new();
        let (mut at, end) = (range.at.0, range.at.0 + range.count);
        for _ in 0..looks.max(1) {
            let blocks = u32::try_from(end - at).unwrap_or(u32::MAX);
            if blocks == 0 {
                break;
            }
            let found = self.dev.submit(Op::Map { at: Lba(at), blocks }, &ctx).await?;
            let Some(&run) = Run::all_of(&found).first() else { break };
            match runs.last_mut() {
                Some(last) if last.mapped == run.mapped => last.blocks += run.blocks,
                _ => runs.push(run),
            }
            at += u64::from(run.blocks);
        }
        Ok(runs)
    }

    /// Makes durable every write that has completed.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn flush(&self, account: &Account) -> Result<(), Error> {
        let ctx = self.ctx(0, Class::Immediate, account).await?;
        let flush = || async { self.dev.submit(Op::Flush, &ctx).await.map(drop) };
        self.flushes.flush(flush).await
    }

    async fn without_data(
        &self,
        range: Blocks,
        account: &Account,
        make: impl Fn(Lba, u32) -> Op,
    ) -> Result<(), Error> {
        self.check(range)?;
        let ctx = self.ctx(0, Class::Immediate, account).await?;
        let lock = self.locks.enter(range, true);
        lock.held().await;
        for (at, blocks) in pieces(range, STEP_BYTES / u64::from(self.info().block_size)) {
            self.dev.submit(make(at, blocks), &ctx).await?;
        }
        Ok(())
    }

    /// What lies beside the device is not for consumers.
    fn check(&self, range: Blocks) -> Result<(), Error> {
        let inside = range.end().is_some_and(|end| end <= self.info().blocks);
        if inside && range.count > 0 { Ok(()) } else { Err(Error::OutOfRange) }
    }

    /// Waits for `bytes` and what the device needs beside them.
    async fn ctx(&self, bytes: usize, class: Class, account: &Account) -> Result<Ctx, Error> {
        let bytes = bytes.saturating_add(self.info().overhead as usize).max(1);
        let credit = match account.try_credit(bytes, class) {
            Some(credit) => credit,
            None => account.credit(bytes, class).await.map_err(|too_large| {
                tracing::error!(%too_large, "a command can never begin");
                Error::OutOfRange
            })?,
        };
        Ok(Ctx::new(credit, Epoch::default()))
    }
}

/// `range` in pieces of at most `most` blocks.
fn pieces(range: Blocks, most: u64) -> impl Iterator<Item = (Lba, u32)> {
    let most = most.clamp(1, u32::MAX.into());
    (0..range.count.div_ceil(most)).map(move |i| {
        let done = i * most;
        let blocks = u32::try_from((range.count - done).min(most)).unwrap_or(u32::MAX);
        (Lba(range.at.0 + done), blocks)
    })
}
