//! How each request is made of the six operations.

use std::cell::Cell;

use futures_util::{StreamExt, stream};

use block::{Blocks, Buf, Bufs, Ctx, Error, Failure, Info, Lba, Op, RangeLock, Request, Run};

use crate::command::Command;
use crate::volume::Volume;

/// Longest stretch that one `Zero` or `Unmap` covers, in bytes: keeps every single operation
/// short, so that an abort takes effect soon.
const ZERO_STEP_BYTES: u64 = 1 << 30;

/// Ranges of one UNMAP that are under way at once: what a layer has to make durable for them is then made so together.
const UNMAPS_AT_ONCE: usize = 64;

/// Writes of one WRITE SAME that are under way at once.
const REPEATS_AT_ONCE: usize = 8;

/// Most that VERIFY reads at once, and the longest repetition WRITE SAME builds, in bytes.
const STEP_BYTES: usize = 256 * 1024;

/// Most that one command looks for space in, in bytes, and most looks it takes: a file system may have an extent for
/// every page.
const MAP_BYTES: u64 = 4 << 30;
const MAP_LOOKS: usize = 64;

/// What memory comes in, in bytes: counts where a command takes it in several portions.
const PAGE: usize = 4096;

impl Volume {
    /// Refuses what the contract of [`Request`] forbids, before any memory is taken.
    pub(crate) fn check(&self, request: &Request, info: &Info) -> Result<(), Error> {
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
            | Request::Map { range, .. } => inside(range),
            Request::WriteSame { range, pattern, .. } => {
                pattern.len() == info.block_size as usize && inside(range)
            }
            Request::Unmap { ranges } | Request::Settle { ranges } => ranges.iter().all(inside),
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

    /// Memory in bytes that `request` may need at worst beyond the data it brings.
    pub(crate) fn memory_for(&self, request: &Request, info: &Info) -> usize {
        let bytes = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let data = match request {
            Request::Read { range } => bytes(range.count).saturating_mul(info.block_size as usize),
            Request::Verify { range } => {
                bytes(range.count).saturating_mul(info.block_size as usize).min(STEP_BYTES)
            }
            Request::Compare { data, .. } => data.len(),
            Request::CompareAndWrite { compare, .. } => compare.len(),
            Request::OrWrite { data, .. } => {
                let copy = data.len().min(self.or_step_bytes()).next_multiple_of(PAGE);
                copy.saturating_mul(self.or_copies())
            }
            // What a look finds, and what all have found.
            Request::Map { .. } => 2 * PAGE,
            Request::WriteSame { .. } => STEP_BYTES,
            Request::Write { .. }
            | Request::Zero { .. }
            | Request::Unmap { .. }
            | Request::Settle { .. }
            | Request::Flush => 0,
        };
        let overheads = at_once(request, info).saturating_mul(info.overhead as usize);
        data.saturating_add(overheads).max(1)
    }

    /// Carries out an admitted, checked request that is neither a read nor a write.
    pub(crate) async fn compose(
        &self,
        request: Request,
        ctx: &Ctx,
        command: &Command,
    ) -> Result<(), Failure> {
        match request {
            Request::Read { .. } | Request::Write { .. } | Request::Map { .. } => {}
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
                let range = self.covered(at, &data);
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
                let range = self.covered(at, &compare);
                if let Some(_lock) = self.lock(range, true, command).await? {
                    if let Some(compares) = &self.compares {
                        return compares.compare_and_write(at, &compare, &write, fua, ctx).await;
                    }
                    self.compare(range, &compare, ctx).await?;
                    self.dev.submit(Op::Write { at, data: write, fua }, ctx).await?;
                }
            }
            Request::Settle { ranges } => self.settle(ranges, ctx, command).await?,
            Request::OrWrite { at, data, fua } => {
                let range = self.covered(at, &data);
                if let Some(_lock) = self.lock(range, true, command).await? {
                    self.or_write(range, &data, fua, ctx).await?;
                }
            }
            Request::Flush => {
                // It stands in for flushes of others, who have not asked for any abort.
                let ctx = &ctx.shielded();
                let flush = || async { self.dev.submit(Op::Flush, ctx).await.map(|_| ()) };
                self.flushes.flush(flush).await?;
            }
        }
        Ok(())
    }

    /// Waits for the changes of each range that are under way.
    async fn settle(&self, ranges: Vec<Blocks>, ctx: &Ctx, command: &Command) -> Result<(), Error> {
        for range in ranges {
            let Some(_lock) = self.lock(range, false, command).await? else { continue };
            if let Some(compares) = &self.compares {
                command.unless_aborted(compares.settle(range, ctx)).await??;
            }
        }
        Ok(())
    }

    /// Waits for the range; `None` for an empty one, which needs no lock and no work.
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
            self.counters.update(|s| s.overlaps += 1);
            Box::pin(command.unless_aborted(lock.held())).await?;
        }
        Ok(Some(lock))
    }

    pub(crate) fn covered(&self, at: Lba, data: &Bufs) -> Blocks {
        Blocks::new(at, data.len() as u64 / u64::from(self.info().block_size))
    }

    pub(crate) async fn read(&self, range: Blocks, ctx: &Ctx) -> Result<Bufs, Error> {
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        self.dev.submit(Op::Read { at: range.at, blocks }, ctx).await
    }

    /// How `range` begins. It holds no range: nothing is lost if what it finds changes at once.
    pub(crate) async fn map(&self, range: Blocks, most: u16, ctx: &Ctx) -> Result<Bufs, Error> {
        let step = MAP_BYTES / u64::from(self.info().block_size);
        let (mut at, end) = (range.at.0, range.at.0 + range.count.min(step));
        let mut runs: Vec<Run> = Vec::new();
        for _ in 0..MAP_LOOKS {
            let blocks = u32::try_from(end - at).unwrap_or(u32::MAX);
            if blocks == 0 || ctx.is_aborted() {
                break;
            }
            let found = self.dev.submit(Op::Map { at: Lba(at), blocks }, ctx).await?;
            let Some(&run) = Run::all_of(&found).first() else { break };
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
        Ok(Run::all_into_bufs(&runs, ctx))
    }

    async fn compare(&self, range: Blocks, expect: &Bufs, ctx: &Ctx) -> Result<(), Failure> {
        let found = self.read(range, ctx).await?;
        match expect.first_difference(&found) {
            None => Ok(()),
            Some(offset) => Err(Failure::Miscompare { offset: offset as u64 }),
        }
    }

    /// Longest stretch that is read, changed and written at once, in bytes. One of another node's writes
    /// may come between two of them, so where there are other nodes they are as long as a COMPARE
    /// AND WRITE may be, which brings its data twice.
    fn or_step_bytes(&self) -> usize {
        let info = self.info();
        let most = info.max_transfer_blocks as usize * info.block_size as usize;
        let step = if self.compares.is_some() { most / 2 } else { most.min(STEP_BYTES) };
        step.next_multiple_of(info.block_size as usize)
    }

    /// How often a step of OR WRITE is in memory: as it was and as it shall be; and once more where
    /// it is compared again.
    fn or_copies(&self) -> usize {
        if self.compares.is_some() { 3 } else { 2 }
    }

    /// Sets the bits of `data` in a range that is held.
    async fn or_write(
        &self,
        range: Blocks,
        data: &Bufs,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), Failure> {
        let block = self.info().block_size as usize;
        let mut from = 0;
        for piece in range.pieces((self.or_step_bytes() / block) as u64) {
            let bytes = usize::try_from(piece.count).map_err(|_| Error::OutOfRange)? * block;
            let bits = data.slice(from..from + bytes);
            self.or_piece(piece, &bits, fua, ctx).await?;
            from += bytes;
        }
        Ok(())
    }

    async fn or_piece(
        &self,
        piece: Blocks,
        bits: &Bufs,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), Failure> {
        loop {
            let found = self.read(piece, ctx).await?;
            let write = or(&found, bits, ctx);
            let Some(compares) = &self.compares else {
                self.dev.submit(Op::Write { at: piece.at, data: write, fua }, ctx).await?;
                return Ok(());
            };
            match compares.compare_and_write(piece.at, &found, &write, fua, ctx).await {
                // Another node has written meanwhile, so somebody has got on.
                Err(Failure::Miscompare { .. }) if !ctx.is_aborted() => {}
                Err(Failure::Miscompare { .. }) => return Err(Error::Aborted.into()),
                done => return done,
            }
        }
    }

    async fn verify(&self, range: Blocks, ctx: &Ctx) -> Result<(), Error> {
        let step = (STEP_BYTES as u64 / u64::from(self.info().block_size))
            .min(u64::from(self.info().max_transfer_blocks));
        for piece in range.pieces(step) {
            // One piece's memory serves them all: a credit revolves.
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
        let unit = &repeat(pattern, first, ctx);
        let each = range.pieces(step as u64).map(|piece| async move {
            let bytes = usize::try_from(piece.count).map_err(|_| Error::OutOfRange)? * block;
            let data = unit.slice(0..bytes);
            self.dev.submit(Op::Write { at: piece.at, data, fua }, ctx).await.map(drop)
        });
        all_of(each, REPEATS_AT_ONCE).await
    }

    async fn zero(&self, range: Blocks, unmap: bool, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        for piece in range.pieces(ZERO_STEP_BYTES / u64::from(self.info().block_size)) {
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
    ) -> Result<(), Failure> {
        let step = ZERO_STEP_BYTES / u64::from(self.info().block_size);
        let pieces = merged(ranges).into_iter().flat_map(|range| range.pieces(step));
        // Each holds its own range and waits for no other.
        let each = pieces.map(|piece| async move {
            let Some(_lock) = self.lock(piece, true, command).await? else { return Ok(()) };
            let blocks = u32::try_from(piece.count).map_err(|_| Error::OutOfRange)?;
            self.dev.submit(Op::Unmap { at: piece.at, blocks }, ctx).await.map(drop)
        });
        Ok(all_of(each, UNMAPS_AT_ONCE).await?)
    }
}

/// How many operations of a request are under way at once, at most.
fn at_once(request: &Request, info: &Info) -> usize {
    match request {
        Request::Unmap { ranges } => {
            let step = ZERO_STEP_BYTES / u64::from(info.block_size);
            let pieces = ranges.iter().map(|range| range.count.div_ceil(step)).sum::<u64>();
            usize::try_from(pieces).map_or(UNMAPS_AT_ONCE, |n| n.clamp(1, UNMAPS_AT_ONCE))
        }
        Request::WriteSame { .. } => REPEATS_AT_ONCE,
        _ => 1,
    }
}

/// Runs these, at most `most` of them at once. None begins after one has failed; all that have begun come to their end.
async fn all_of<F>(each: impl Iterator<Item = F>, most: usize) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let failed = &Cell::new(None);
    let each = each.take_while(|_| failed.get().is_none());
    let outcomes = stream::iter(each).buffer_unordered(most);
    outcomes.for_each(|outcome| async move { failed.set(failed.get().or(outcome.err())) }).await;
    failed.get().map_or(Ok(()), Err)
}

/// The same blocks in order, as few ranges as possible: none overlaps another or begins where another ends.
fn merged(mut ranges: Vec<Blocks>) -> Vec<Blocks> {
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

/// `bits` set in `found`, which is as long.
fn or(found: &Bufs, bits: &Bufs, ctx: &Ctx) -> Bufs {
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
fn repeat(pattern: &Bufs, times: usize, ctx: &Ctx) -> Bufs {
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
