//! Composes requests from the operations of a device.

use std::cell::Cell;

use futures_util::{StreamExt, stream};

use block::{
    BlockStatus, Blocks, Buf, Bufs, Ctx, Error, Info, Lba, Op, RangeLock, Request, RequestError,
};

use crate::command::Command;
use crate::volume::Volume;

/// Longest range of one `Zero` or `Unmap`, in bytes: keeps each operation short, so that an abort
/// takes effect soon.
const ZERO_STEP_BYTES: u64 = 1 << 30;

/// Concurrent ranges of one UNMAP, so that a layer can make its metadata for them durable together.
const MAX_CONCURRENT_UNMAPS: usize = 64;

/// Concurrent writes of one WRITE SAME.
const MAX_CONCURRENT_REPEATS: usize = 8;

/// Most that VERIFY reads at once, and the longest repeated pattern of WRITE SAME, in bytes.
const STEP_BYTES: usize = 256 * 1024;

/// Most bytes covered, and most operations, of one block status request: a file system may have an
/// extent per page.
const MAX_MAP_BYTES: u64 = 4 << 30;
const MAX_MAP_CALLS: usize = 64;

/// Granularity of memory in bytes: matters where a command takes it in several portions.
const PAGE_BYTES: usize = 4096;

impl Volume {
    /// Rejects what the contract of [`Request`] forbids, before any memory is taken.
    pub(crate) fn check_request(&self, request: &Request, info: &Info) -> Result<(), Error> {
        let inside = |r: &Blocks| r.end().is_some_and(|end| end <= info.blocks);
        let carried = |at: Lba, data: &Bufs| {
            let whole = data.len().is_multiple_of(info.block_size as usize);
            let count = data.len() as u64 / u64::from(info.block_size);
            whole && count <= u64::from(info.max_transfer_blocks) && inside(&Blocks::new(at, count))
        };
        let fine = match request {
            Request::Read { range } => {
                range.count <= u64::from(info.max_transfer_blocks) && inside(range)
            }
            Request::Verify { range }
            | Request::Zero { range, .. }
            | Request::BlockStatus { range, .. } => inside(range),
            Request::WriteSame { range, pattern, .. } => {
                pattern.len() == info.block_size as usize && inside(range)
            }
            Request::Unmap { ranges } | Request::DrainWrites { ranges } => {
                ranges.iter().all(inside)
            }
            Request::Write { at, data, .. }
            | Request::Compare { at, data }
            | Request::OrWrite { at, data, .. } => carried(*at, data),
            Request::CompareAndWrite { at, compare, write, .. } => {
                compare.len() == write.len() && carried(*at, write)
            }
            Request::Flush => true,
        };
        if fine { Ok(()) } else { Err(Error::OutOfRange) }
    }

    /// Worst-case memory of `request` in bytes, in addition to the data it brings.
    pub(crate) fn memory_bytes_for(&self, request: &Request, info: &Info) -> usize {
        let bytes = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let data = match request {
            Request::Read { range } => bytes(range.count).saturating_mul(info.block_size as usize),
            Request::Verify { range } => {
                bytes(range.count).saturating_mul(info.block_size as usize).min(STEP_BYTES)
            }
            Request::Compare { data, .. } => data.len(),
            Request::CompareAndWrite { compare, .. } => compare.len(),
            Request::OrWrite { data, .. } => {
                let copy = data.len().min(self.or_step_bytes()).next_multiple_of(PAGE_BYTES);
                copy.saturating_mul(self.or_copies())
            }
            // The answer of one operation, and the combined one.
            Request::BlockStatus { .. } => 2 * PAGE_BYTES,
            Request::WriteSame { .. } => STEP_BYTES,
            Request::Write { .. }
            | Request::Zero { .. }
            | Request::Unmap { .. }
            | Request::DrainWrites { .. }
            | Request::Flush => 0,
        };
        let overheads =
            max_concurrent_ops(request, info).saturating_mul(info.overhead_bytes as usize);
        data.saturating_add(overheads).max(1)
    }

    /// Executes an admitted, checked request that is neither a read nor a write.
    pub(crate) async fn compose(
        &self,
        request: Request,
        ctx: &Ctx,
        command: &Command,
    ) -> Result<(), RequestError> {
        match request {
            Request::Read { .. } | Request::Write { .. } | Request::BlockStatus { .. } => {}
            Request::WriteSame { range, pattern, fua } => {
                if let Some(_lock) = self.lock(range, true, command).await? {
                    self.write_same(range, &pattern, fua, ctx).await?;
                }
            }
            Request::Zero { range, unmap, fua } => {
                if let Some(_lock) = self.lock(range, true, command).await? {
                    self.zero(range, unmap, fua, ctx).await?;
                }
            }
            Request::Unmap { ranges } => self.unmap(ranges, ctx, command).await?,
            Request::Compare { at, data } => {
                let range = self.blocks_of(at, &data);
                if let Some(_lock) = self.lock(range, false, command).await? {
                    self.compare(range, &data, ctx).await?;
                }
            }
            Request::Verify { range } => {
                if let Some(_lock) = self.lock(range, false, command).await? {
                    self.verify(range, ctx).await?;
                }
            }
            Request::CompareAndWrite { at, compare, write, fua } => {
                let range = self.blocks_of(at, &compare);
                if let Some(_lock) = self.lock(range, true, command).await? {
                    if let Some(compares) = &self.replicated {
                        return compares.compare_and_write(at, &compare, &write, fua, ctx).await;
                    }
                    self.compare(range, &compare, ctx).await?;
                    self.dev.submit(Op::Write { at, data: write, fua }, ctx).await?;
                }
            }
            Request::DrainWrites { ranges } => self.drain_writes(ranges, ctx, command).await?,
            Request::OrWrite { at, data, fua } => {
                let range = self.blocks_of(at, &data);
                if let Some(_lock) = self.lock(range, true, command).await? {
                    self.or_write(range, &data, fua, ctx).await?;
                }
            }
            Request::Flush => {
                // It also serves as the flush of other commands, which were not aborted.
                let ctx = &ctx.shielded();
                let flush = || async { self.dev.submit(Op::Flush, ctx).await.map(|_| ()) };
                self.flush_coalescer.flush(flush).await?;
            }
        }
        Ok(())
    }

    /// Waits for changes of each range in flight.
    async fn drain_writes(
        &self,
        ranges: Vec<Blocks>,
        ctx: &Ctx,
        command: &Command,
    ) -> Result<(), Error> {
        for range in ranges {
            let Some(_lock) = self.lock(range, false, command).await? else { continue };
            if let Some(compares) = &self.replicated {
                command.unless_aborted(compares.await_commit(range, ctx)).await??;
            }
        }
        Ok(())
    }

    /// Locks the range; `None` for an empty one, which needs no lock and no work.
    pub(crate) async fn lock(
        &self,
        range: Blocks,
        writes: bool,
        command: &Command,
    ) -> Result<Option<RangeLock>, Error> {
        if range.count == 0 {
            return Ok(None);
        }
        let lock = self.locks.enter(range, writes);
        if !lock.is_held() {
            self.counters.update(|s| s.range_waits += 1);
            Box::pin(command.unless_aborted(lock.acquired())).await?;
        }
        Ok(Some(lock))
    }

    pub(crate) fn blocks_of(&self, at: Lba, data: &Bufs) -> Blocks {
        Blocks::new(at, data.len() as u64 / u64::from(self.info().block_size))
    }

    pub(crate) async fn read(&self, range: Blocks, ctx: &Ctx) -> Result<Bufs, Error> {
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        self.dev.submit(Op::Read { at: range.at, blocks }, ctx).await
    }

    /// The status of the runs at the start of `range`. Takes no range lock: the result may be out
    /// of date at once anyway.
    pub(crate) async fn block_status(
        &self,
        range: Blocks,
        most: u16,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let step = MAX_MAP_BYTES / u64::from(self.info().block_size);
        let (mut at, end) = (range.at.0, range.at.0 + range.count.min(step));
        let mut runs: Vec<BlockStatus> = Vec::new();
        for _ in 0..MAX_MAP_CALLS {
            let blocks = u32::try_from(end - at).unwrap_or(u32::MAX);
            if blocks == 0 || ctx.is_aborted() {
                break;
            }
            let found = self.dev.submit(Op::BlockStatus { at: Lba(at), blocks }, ctx).await?;
            let Some(&run) = BlockStatus::from_bufs(&found).first() else { break };
            let full = runs.len() >= usize::from(most.max(1));
            match runs.last_mut() {
                Some(last) if last.mapped == run.mapped => last.blocks += run.blocks,
                _ if full => break,
                _ => runs.push(run),
            }
            at += u64::from(run.blocks);
        }
        if ctx.is_aborted() {
            return Err(Error::Aborted);
        }
        Ok(BlockStatus::to_bufs(&runs, ctx))
    }

    async fn compare(&self, range: Blocks, expect: &Bufs, ctx: &Ctx) -> Result<(), RequestError> {
        let found = self.read(range, ctx).await?;
        match expect.first_difference(&found) {
            None => Ok(()),
            Some(offset) => Err(RequestError::Miscompare { offset: offset as u64 }),
        }
    }

    /// Longest range of one read-modify-write, in bytes. Writes of other nodes may come between two
    /// of them, so with other nodes it is as long as a COMPARE AND WRITE may be, which carries its
    /// data twice.
    fn or_step_bytes(&self) -> usize {
        let info = self.info();
        let most = info.max_transfer_blocks as usize * info.block_size as usize;
        let step = if self.replicated.is_some() { most / 2 } else { most.min(STEP_BYTES) };
        step.next_multiple_of(info.block_size as usize)
    }

    /// Copies of a step of OR WRITE in memory: old and new contents; one more where they are
    /// compared again.
    fn or_copies(&self) -> usize {
        if self.replicated.is_some() { 3 } else { 2 }
    }

    /// Sets the bits of `data` in a locked range.
    async fn or_write(
        &self,
        range: Blocks,
        data: &Bufs,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), RequestError> {
        let block = self.info().block_size as usize;
        let mut from = 0;
        for piece in range.chunks((self.or_step_bytes() / block) as u64) {
            let bytes = usize::try_from(piece.count).map_err(|_| Error::OutOfRange)? * block;
            let bits = data.slice(from..from + bytes);
            self.or_write_chunk(piece, &bits, fua, ctx).await?;
            from += bytes;
        }
        Ok(())
    }

    async fn or_write_chunk(
        &self,
        piece: Blocks,
        bits: &Bufs,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), RequestError> {
        loop {
            let found = self.read(piece, ctx).await?;
            let write = or_bufs(&found, bits, ctx);
            let Some(compares) = &self.replicated else {
                self.dev.submit(Op::Write { at: piece.at, data: write, fua }, ctx).await?;
                return Ok(());
            };
            match compares.compare_and_write(piece.at, &found, &write, fua, ctx).await {
                // Another node has written meanwhile, so there is progress.
                Err(RequestError::Miscompare { .. }) if !ctx.is_aborted() => {}
                Err(RequestError::Miscompare { .. }) => return Err(Error::Aborted.into()),
                done => return done,
            }
        }
    }

    async fn verify(&self, range: Blocks, ctx: &Ctx) -> Result<(), Error> {
        let step = (STEP_BYTES as u64 / u64::from(self.info().block_size))
            .min(u64::from(self.info().max_transfer_blocks));
        for piece in range.chunks(step) {
            // The memory of one piece serves them all: freed memory returns to the credit.
            self.read(piece, ctx).await?;
        }
        Ok(())
    }

    async fn write_same(
        &self,
        range: Blocks,
        pattern: &Bufs,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        let block = self.info().block_size as usize;
        let step = (STEP_BYTES / block).min(self.info().max_transfer_blocks as usize);
        let first = usize::try_from(range.count).map_or(step, |count| step.min(count));
        let unit = &repeat_pattern(pattern, first, ctx);
        let each = range.chunks(step as u64).map(|piece| async move {
            let bytes = usize::try_from(piece.count).map_err(|_| Error::OutOfRange)? * block;
            let data = unit.slice(0..bytes);
            self.dev.submit(Op::Write { at: piece.at, data, fua }, ctx).await.map(drop)
        });
        run_concurrently(each, MAX_CONCURRENT_REPEATS).await
    }

    async fn zero(&self, range: Blocks, unmap: bool, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        for piece in range.chunks(ZERO_STEP_BYTES / u64::from(self.info().block_size)) {
            let blocks = u32::try_from(piece.count).map_err(|_| Error::OutOfRange)?;
            self.dev.submit(Op::Zero { at: piece.at, blocks, unmap, fua }, ctx).await?;
        }
        Ok(())
    }

    async fn unmap(
        &self,
        ranges: Vec<Blocks>,
        ctx: &Ctx,
        command: &Command,
    ) -> Result<(), RequestError> {
        let step = ZERO_STEP_BYTES / u64::from(self.info().block_size);
        let pieces = merge_ranges(ranges).into_iter().flat_map(|range| range.chunks(step));
        // Each holds its own range and waits for no other.
        let each = pieces.map(|piece| async move {
            let Some(_lock) = self.lock(piece, true, command).await? else { return Ok(()) };
            let blocks = u32::try_from(piece.count).map_err(|_| Error::OutOfRange)?;
            self.dev.submit(Op::Unmap { at: piece.at, blocks }, ctx).await.map(drop)
        });
        Ok(run_concurrently(each, MAX_CONCURRENT_UNMAPS).await?)
    }
}

/// Most concurrent operations of a request.
fn max_concurrent_ops(request: &Request, info: &Info) -> usize {
    match request {
        Request::Unmap { ranges } => {
            let step = ZERO_STEP_BYTES / u64::from(info.block_size);
            let pieces = ranges.iter().map(|range| range.count.div_ceil(step)).sum::<u64>();
            usize::try_from(pieces)
                .map_or(MAX_CONCURRENT_UNMAPS, |n| n.clamp(1, MAX_CONCURRENT_UNMAPS))
        }
        Request::WriteSame { .. } => MAX_CONCURRENT_REPEATS,
        _ => 1,
    }
}

/// Runs these, at most `most` at once. None starts after a failure; all that have started run to
/// their end.
async fn run_concurrently<F>(each: impl Iterator<Item = F>, most: usize) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let failed = &Cell::new(None);
    let each = each.take_while(|_| failed.get().is_none());
    let outcomes = stream::iter(each).buffer_unordered(most);
    outcomes.for_each(|outcome| async move { failed.set(failed.get().or(outcome.err())) }).await;
    failed.get().map_or(Ok(()), Err)
}

/// The same blocks in ascending order, as few ranges as possible: merges overlapping and adjacent
/// ones.
fn merge_ranges(mut ranges: Vec<Blocks>) -> Vec<Blocks> {
    ranges.retain(|range| range.count > 0);
    ranges.sort_unstable_by_key(|range| range.at);
    let mut all: Vec<Blocks> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if range.at.0 <= last.at.0 + last.count => {
                let end = (range.at.0 + range.count).max(last.at.0 + last.count);
                last.count = end - last.at.0;
            }
            _ => all.push(range),
        }
    }
    all
}

/// `found` with `bits` set, which is as long.
fn or_bufs(found: &Bufs, bits: &Bufs, ctx: &Ctx) -> Bufs {
    let mut runs = ctx.alloc(bits.len());
    let mut at = 0;
    for run in &mut runs {
        let span = at..at + run.len();
        at = span.end;
        found.slice(span.clone()).copy_to(run);
        let mut rest = &mut run[..];
        for bits in bits.slice(span).iter() {
            let (now, later) = rest.split_at_mut(bits.len());
            now.iter_mut().zip(bits.iter()).for_each(|(byte, bits)| *byte |= bits);
            rest = later;
        }
    }
    runs.into_iter().map(|run| -> Buf { run.freeze() }).collect()
}

/// `times` copies of one block, in whole runs so that disks can take them directly.
fn repeat_pattern(pattern: &Bufs, times: usize, ctx: &Ctx) -> Bufs {
    let block = pattern.to_vec();
    let mut runs = ctx.alloc(block.len() * times);
    let mut at = 0;
    for run in &mut runs {
        for byte in run.iter_mut() {
            *byte = block[at % block.len()];
            at += 1;
        }
    }
    runs.into_iter().map(|run| -> Buf { run.freeze() }).collect()
}
