//! The data path of a flat image: from blocks to disk requests.

use block::{
    BlockStatus, Blocks, Bufs, Ctx, Error, KeyedLock, Layer, Lba, METADATA_LBA, Op, copy_into,
};
use disk::{ByteRange, METADATA_OFFSET, MediumError, RangePart};
use rt::disk::DiskErrorKind;

use super::{FlatImage, PAGE_BYTES};

/// Most bytes of one write of zeroes.
const ZERO_STEP_BYTES: u64 = 1 << 20;

/// Bounce buffer for data in memory that the disk does not take, in bytes.
const BOUNCE_BYTES: u64 = 4096;

/// The operation during which a disk failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IoDirection {
    Read,
    Write,
}

impl Layer for FlatImage {
    fn name(&self) -> &'static str {
        "image"
    }

    fn info(&self) -> block::Info {
        self.info.get()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        if self.is_failed.get() {
            return Err(Error::Gone);
        }
        let Some(range) = op.range(self.info.get().block_size) else {
            return self.flush(&ctx).await.map(|()| Bufs::new());
        };
        let span = self.byte_range(range);
        match op {
            Op::Read { .. } => return self.read(span, &ctx).await,
            Op::BlockStatus { blocks, .. } => {
                return Ok(Box::pin(self.block_status(span, blocks, &ctx)).await?.into_bufs(&ctx));
            }
            Op::Write { data, .. }
                if span.aligned_outward(self.io_unit) == span && self.accepts_memory(&data) =>
            {
                // Not by `write_aligned`: every future that the data pass through reserves space
                // for them.
                let written = self.medium.write(span.start, data, &ctx).await;
                written.map_err(|e| self.map_failure(e, span, IoDirection::Write))?;
            }
            rare => Box::pin(self.submit_slow_path(rare, span, &ctx)).await?,
        }
        Ok(Bufs::new())
    }
}

impl FlatImage {
    /// Rare operations are boxed, so that the future of a plain read or write stays small.
    async fn submit_slow_path(&self, op: Op, span: ByteRange, ctx: &Ctx) -> Result<(), Error> {
        match op {
            // Handled by the caller.
            Op::Read { .. } | Op::BlockStatus { .. } | Op::Flush => Ok(()),
            Op::Write { data, .. } => self.write(span, &data, ctx).await,
            Op::Zero { unmap, .. } => self.zero(span, unmap && !self.is_thick, ctx).await,
            Op::Unmap { .. } => self.zero(span, !self.is_thick, ctx).await,
        }
    }

    fn byte_range(&self, range: Blocks) -> ByteRange {
        let block = u64::from(self.info.get().block_size);
        let at = match range.at.0.checked_sub(METADATA_LBA.0) {
            None => self.data_offset + range.at.0 * block,
            Some(behind) => METADATA_OFFSET + behind * block,
        };
        ByteRange { start: at, end: at + range.count * block }
    }

    /// The block that contains byte `at` of the disk.
    fn block_at(&self, at: u64) -> Lba {
        let block = u64::from(self.info.get().block_size);
        match at.checked_sub(self.data_offset) {
            Some(behind) => Lba(behind / block),
            None => Lba(METADATA_LBA.0 + at.saturating_sub(METADATA_OFFSET) / block),
        }
    }

    async fn read(&self, span: ByteRange, ctx: &Ctx) -> Result<Bufs, Error> {
        let wide = span.aligned_outward(self.io_unit);
        let _locks = if wide != span && self.medium.forbids_overlap() {
            Some(Box::pin(self.lock_edge_units(span, wide)).await)
        } else {
            None
        };
        let read = self.medium.read(wide.start, range_len(wide), ctx).await;
        let data = read.map_err(|e| self.map_failure(e, span, IoDirection::Read))?;
        if wide == span {
            return Ok(data);
        }
        Ok(slice_of(&data, wide, span))
    }

    /// Locks the units that `span` covers partly, so that the rest of them is not written
    /// meanwhile.
    async fn lock_edge_units(&self, span: ByteRange, wide: ByteRange) -> Box<[KeyedLock<'_>]> {
        let (first, last) = (wide.start / self.io_unit, wide.end / self.io_unit - 1);
        let mut locks = Vec::new();
        // Always in this order, so that operations cannot deadlock.
        if wide.start < span.start {
            locks.push(self.keyed_locks.lock(first).await);
        }
        if wide.end > span.end && (locks.is_empty() || last > first) {
            locks.push(self.keyed_locks.lock(last).await);
        }
        locks.into()
    }

    /// How `span`, which is `blocks` long, begins. A thick image counts as allocated, whatever the
    /// file system says.
    async fn block_status(
        &self,
        span: ByteRange,
        blocks: u32,
        ctx: &Ctx,
    ) -> Result<BlockStatus, Error> {
        if self.is_thick {
            return Ok(BlockStatus { blocks, mapped: true });
        }
        let run = self.medium.allocation_run(span.start, span.len(), ctx).await;
        let run = run.map_err(|e| self.map_failure(e, span, IoDirection::Read))?;
        let block = u64::from(self.info.get().block_size);
        let whole = u32::try_from(run.bytes / block).unwrap_or(blocks);
        Ok(if run.is_hole && whole > 0 {
            BlockStatus { blocks: whole, mapped: false }
        } else {
            // A block that is partly a hole is partly allocated.
            let touched = u32::try_from(run.bytes.div_ceil(block)).unwrap_or(blocks);
            BlockStatus { blocks: touched.min(blocks), mapped: true }
        })
    }

    async fn write(&self, span: ByteRange, data: &Bufs, ctx: &Ctx) -> Result<(), Error> {
        for part in span.split_at_units(self.io_unit) {
            match part {
                RangePart::Whole(p) if p == span => {
                    self.write_whole_units(p, data.clone(), ctx).await?;
                }
                RangePart::Whole(p) => {
                    self.write_whole_units(p, slice_of(data, span, p), ctx).await?;
                }
                RangePart::Partial(p) => {
                    self.read_modify_write(p, slice_of(data, span, p), ctx).await?;
                }
            }
        }
        Ok(())
    }

    /// Writes whole units directly from the data's memory.
    async fn write_aligned(&self, span: ByteRange, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.map_failure(e, span, IoDirection::Write);
        self.medium.write(span.start, data, ctx).await.map_err(failed)
    }

    /// Writes whole units, through a bounce buffer where the disk does not take the data's memory.
    async fn write_whole_units(&self, span: ByteRange, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        if self.accepts_memory(&data) {
            return self.write_aligned(span, data, ctx).await;
        }
        let failed = |e| self.map_failure(e, span, IoDirection::Write);
        for step in span.chunks(BOUNCE_BYTES.max(self.io_unit)) {
            let mut scratch = ctx.alloc(range_len(step));
            copy_into(&mut scratch, 0, &slice_of(&data, span, step));
            self.medium.write(step.start, scratch.into(), ctx).await.map_err(failed)?;
        }
        Ok(())
    }

    /// Changes a part of one unit: read-modify-write.
    async fn read_modify_write(&self, span: ByteRange, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        let unit = span.aligned_outward(self.io_unit);
        let _lock = self.keyed_locks.lock(unit.start / self.io_unit).await;
        let failed = |e| self.map_failure(e, span, IoDirection::Write);
        let read = self.medium.read_mut(unit.start, range_len(unit), ctx).await;
        let mut whole = read.map_err(failed)?;
        copy_into(&mut whole, offset_in(unit, span), &data);
        self.medium.write(unit.start, whole.into(), ctx).await.map_err(failed)
    }

    /// Whether the disk takes data from this memory.
    fn accepts_memory(&self, data: &Bufs) -> bool {
        let (align, piece) = (self.memory_align, self.transfer_unit);
        let fits = |p: &[u8]| {
            (p.as_ptr().addr() as u64).is_multiple_of(align)
                && (p.len() as u64).is_multiple_of(piece)
        };
        data.iter().all(|p| fits(p))
    }

    /// Zeroes a range; with `free`, frees its space where possible.
    pub(super) async fn zero(&self, span: ByteRange, free: bool, ctx: &Ctx) -> Result<(), Error> {
        for part in span.split_at_units(self.discard_unit) {
            match part {
                RangePart::Whole(p) => self.zero_whole_units(p, free, ctx).await?,
                RangePart::Partial(p) => {
                    match self.write(p, &Bufs::zeroes(range_len(p)), ctx).await {
                        // Freeing must not fail for lack of space: if the range reads as zeroes
                        // already, nothing has to be done.
                        Err(Error::NoSpace) if free && self.reads_as_zero(p, ctx).await => {}
                        written => written?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a range, of a page at most, reads as zeroes already.
    async fn reads_as_zero(&self, span: ByteRange, ctx: &Ctx) -> bool {
        let wide = span.aligned_outward(self.io_unit);
        if wide.len() > PAGE_BYTES || ctx.credit().left() < PAGE_BYTES as usize {
            return false;
        }
        let found = self.read(span, ctx).await;
        found.is_ok_and(|data| data.iter().all(|piece| piece.iter().all(|byte| *byte == 0)))
    }

    /// Zeroes whole units in the cheapest way that the medium supports.
    async fn zero_whole_units(&self, span: ByteRange, free: bool, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.map_failure(e, span, IoDirection::Write);
        if free {
            match self.medium.punch(span.start, span.len(), ctx).await {
                Err(e) if e.is_unsupported() => {}
                result => return result.map_err(failed),
            }
        }
        match self.medium.zero(span.start, span.len(), ctx).await {
            Err(e) if e.is_unsupported() => {}
            result => return result.map_err(failed),
        }
        for step in span.chunks(ZERO_STEP_BYTES) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let failed = |e| self.map_failure(e, step, IoDirection::Write);
            self.medium
                .write(step.start, Bufs::zeroes(range_len(step)), ctx)
                .await
                .map_err(failed)?;
        }
        Ok(())
    }

    pub(super) async fn flush(&self, ctx: &Ctx) -> Result<(), Error> {
        let sync = || async {
            self.medium.sync(ctx).await.map_err(|_| {
                // The medium has logged why. Writes since the last sync may be lost.
                self.is_failed.set(true);
                Error::Gone
            })
        };
        self.flushes.flush(sync).await?;
        if self.is_failed.get() { Err(Error::Gone) } else { Ok(()) }
    }

    /// The error for a failure of the medium, which is logged.
    fn map_failure(&self, failure: MediumError, span: ByteRange, doing: IoDirection) -> Error {
        let (disk, at) = (self.medium.path().display(), span.start);
        let result = match failure {
            MediumError::Disk(e) => self.map_disk_error(e.kind, span, doing),
            MediumError::Dev(e) => self.map_dev_error(e, span, doing),
        };
        match result {
            Error::Gone if !self.is_failed.replace(true) => {
                tracing::error!(%disk, at, error = %failure, "the disk is given up");
            }
            // Expected by the caller.
            Error::Gone | Error::Aborted => {}
            _ => tracing::warn!(%disk, at, ?doing, error = %failure, "a disk operation failed"),
        }
        result
    }

    fn map_disk_error(&self, e: DiskErrorKind, span: ByteRange, doing: IoDirection) -> Error {
        match e {
            DiskErrorKind::NoSpace => Error::NoSpace,
            DiskErrorKind::ReadOnly => Error::ReadOnly,
            // The file was truncated: its data are lost for good.
            DiskErrorKind::Gone | DiskErrorKind::PastEnd => Error::Gone,
            DiskErrorKind::Media
            | DiskErrorKind::Misaligned
            | DiskErrorKind::Unsupported
            | DiskErrorKind::Other => match doing {
                IoDirection::Read => Error::Unreadable { at: self.block_at(span.start) },
                IoDirection::Write => Error::Unwritable { at: self.block_at(span.start) },
            },
        }
    }

    /// The same error with the volume's address. A partial write whose unit cannot be read cannot
    /// be written.
    fn map_dev_error(&self, e: Error, span: ByteRange, doing: IoDirection) -> Error {
        let here = |at: Lba| {
            self.block_at(at.0.saturating_mul(self.io_unit).clamp(span.start, span.end - 1))
        };
        match (e, doing) {
            (Error::Corrupt { at }, IoDirection::Read) => Error::Corrupt { at: here(at) },
            (Error::Unreadable { at } | Error::Unwritable { at }, IoDirection::Read) => {
                Error::Unreadable { at: here(at) }
            }
            (
                Error::Unreadable { at } | Error::Corrupt { at } | Error::Unwritable { at },
                IoDirection::Write,
            ) => Error::Unwritable { at: here(at) },
            (Error::OutOfRange | Error::Gone, _) => Error::Gone,
            (Error::NoSpace | Error::ReadOnly | Error::Fenced | Error::Aborted, _) => e,
        }
    }
}

fn range_len(span: ByteRange) -> usize {
    usize::try_from(span.len()).expect("a transfer fits memory")
}

/// Offset of `inner` within `outer`.
fn offset_in(outer: ByteRange, inner: ByteRange) -> usize {
    usize::try_from(inner.start - outer.start).expect("a transfer fits memory")
}

/// The part of `data`, which belongs to `span`, that belongs to `part`.
fn slice_of(data: &Bufs, span: ByteRange, part: ByteRange) -> Bufs {
    let skip = offset_in(span, part);
    data.slice(skip..skip + range_len(part))
}
