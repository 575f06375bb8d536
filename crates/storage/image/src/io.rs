//! The data path of a flat image: from blocks to what its disk takes.

use block::{ASIDE, Blocks, Bufs, Ctx, Error, Layer, Lba, Op, Run, UnitLock, overlay};
use disk::{ASIDE_OFFSET, Failure, Part, Span};
use rt::disk::DiskErrorKind;

use super::{File, PAGE};

/// Most that one write of zeroes covers, in bytes.
const ZERO_STEP: u64 = 1 << 20;

/// Scratch memory for data whose memory the disk does not take, in bytes.
const BOUNCE: u64 = 4096;

/// What was being done when a disk failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Reading,
    Writing,
}

impl Layer for File {
    fn name(&self) -> &'static str {
        "file"
    }

    fn info(&self) -> block::Info {
        self.info.get()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        if self.dead.get() {
            return Err(Error::Gone);
        }
        let Some(range) = op.range(self.info.get().block_size) else {
            return self.flush(&ctx).await.map(|()| Bufs::new());
        };
        let span = self.span(range);
        match op {
            Op::Read { .. } => return self.read(span, &ctx).await,
            Op::Map { blocks, .. } => {
                return Ok(Box::pin(self.map(span, blocks, &ctx)).await?.into_bufs(&ctx));
            }
            Op::Write { data, .. } if span.widened(self.unit) == span && self.takes(&data) => {
                // Here, and not in `write_plain`: each future that data goes through has a place for it.
                let written = self.medium.write(span.at, data, &ctx).await;
                written.map_err(|e| self.failed(e, span, Doing::Writing))?;
            }
            rare => Box::pin(self.submit_rare(rare, span, &ctx)).await?,
        }
        Ok(Bufs::new())
    }
}

impl File {
    /// What is rare is in a box, so that the future of a plain read or write stays small.
    async fn submit_rare(&self, op: Op, span: Span, ctx: &Ctx) -> Result<(), Error> {
        match op {
            // What does not change contents never comes here.
            Op::Read { .. } | Op::Map { .. } | Op::Flush => Ok(()),
            Op::Write { data, .. } => self.write(span, &data, ctx).await,
            Op::Zero { unmap, .. } => self.zero(span, unmap && !self.keeps_space, ctx).await,
            Op::Unmap { .. } => self.zero(span, !self.keeps_space, ctx).await,
        }
    }

    fn span(&self, range: Blocks) -> Span {
        let block = u64::from(self.info.get().block_size);
        let at = match range.at.0.checked_sub(ASIDE.0) {
            None => self.data_offset + range.at.0 * block,
            Some(behind) => ASIDE_OFFSET + behind * block,
        };
        Span { at, end: at + range.count * block }
    }

    /// The block that holds the byte at `at` of the disk.
    fn block_at(&self, at: u64) -> Lba {
        let block = u64::from(self.info.get().block_size);
        match at.checked_sub(self.data_offset) {
            Some(behind) => Lba(behind / block),
            None => Lba(ASIDE.0 + at.saturating_sub(ASIDE_OFFSET) / block),
        }
    }

    async fn read(&self, span: Span, ctx: &Ctx) -> Result<Bufs, Error> {
        let wide = span.widened(self.unit);
        let _turns = if wide != span && self.medium.forbids_overlap() {
            Some(Box::pin(self.take_turns(span, wide)).await)
        } else {
            None
        };
        let read = self.medium.read(wide.at, len(wide), ctx).await;
        let data = read.map_err(|e| self.failed(e, span, Doing::Reading))?;
        if wide == span {
            return Ok(data);
        }
        Ok(cut(&data, wide, span))
    }

    /// Waits until nobody writes the rest of units of which `span` has parts, and keeps it so.
    async fn take_turns(&self, span: Span, wide: Span) -> Box<[UnitLock<'_>]> {
        let (first, last) = (wide.at / self.unit, wide.end / self.unit - 1);
        let mut turns = Vec::new();
        // In this order everywhere, so nobody waits for himself.
        if wide.at < span.at {
            turns.push(self.units.lock(first).await);
        }
        if wide.end > span.end && (turns.is_empty() || last > first) {
            turns.push(self.units.lock(last).await);
        }
        turns.into()
    }

    /// How `span`, which is `blocks` long, begins. A full image has its space, whatever the file system calls it.
    async fn map(&self, span: Span, blocks: u32, ctx: &Ctx) -> Result<Run, Error> {
        if self.keeps_space {
            return Ok(Run { blocks, mapped: true });
        }
        let stretch = self.medium.stretch(span.at, span.len(), ctx).await;
        let stretch = stretch.map_err(|e| self.failed(e, span, Doing::Reading))?;
        let block = u64::from(self.info.get().block_size);
        let whole = u32::try_from(stretch.bytes / block).unwrap_or(blocks);
        Ok(if stretch.hole && whole > 0 {
            Run { blocks: whole, mapped: false }
        } else {
            // A block that has a hole in a part of it has something in another.
            let touched = u32::try_from(stretch.bytes.div_ceil(block)).unwrap_or(blocks);
            Run { blocks: touched.min(blocks), mapped: true }
        })
    }

    async fn write(&self, span: Span, data: &Bufs, ctx: &Ctx) -> Result<(), Error> {
        for part in span.parts(self.unit) {
            match part {
                Part::Whole(p) if p == span => self.write_whole(p, data.clone(), ctx).await?,
                Part::Whole(p) => self.write_whole(p, cut(data, span, p), ctx).await?,
                Part::Partial(p) => self.patch(p, cut(data, span, p), ctx).await?,
            }
        }
        Ok(())
    }

    /// Writes whole units, from where the data are.
    async fn write_plain(&self, span: Span, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.failed(e, span, Doing::Writing);
        self.medium.write(span.at, data, ctx).await.map_err(failed)
    }

    /// Writes whole units, from scratch memory where the disk does not take the data's own.
    async fn write_whole(&self, span: Span, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        if self.takes(&data) {
            return self.write_plain(span, data, ctx).await;
        }
        let failed = |e| self.failed(e, span, Doing::Writing);
        for step in span.steps(BOUNCE.max(self.unit)) {
            let mut scratch = ctx.alloc(len(step));
            overlay(&mut scratch, 0, &cut(&data, span, step));
            self.medium.write(step.at, scratch.into(), ctx).await.map_err(failed)?;
        }
        Ok(())
    }

    /// Changes a part of one unit.
    async fn patch(&self, span: Span, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        let unit = span.widened(self.unit);
        let _lock = self.units.lock(unit.at / self.unit).await;
        let failed = |e| self.failed(e, span, Doing::Writing);
        let read = self.medium.read_to_change(unit.at, len(unit), ctx).await;
        let mut whole = read.map_err(failed)?;
        overlay(&mut whole, gap(unit, span), &data);
        self.medium.write(unit.at, whole.into(), ctx).await.map_err(failed)
    }

    /// Whether the disk takes data from this memory.
    fn takes(&self, data: &Bufs) -> bool {
        let (align, piece) = (self.memory_align, self.piece);
        let fits = |p: &[u8]| {
            (p.as_ptr().addr() as u64).is_multiple_of(align)
                && (p.len() as u64).is_multiple_of(piece)
        };
        data.iter().all(|p| fits(p))
    }

    /// Zeroes; frees the space if told to and where that is possible.
    pub(super) async fn zero(&self, span: Span, free: bool, ctx: &Ctx) -> Result<(), Error> {
        for part in span.parts(self.granule) {
            match part {
                Part::Whole(p) => self.clear(p, free, ctx).await?,
                Part::Partial(p) => match self.write(p, &Bufs::zeroes(len(p)), ctx).await {
                    // What frees space needs none: where it has nothing to free, as in a hole, nothing is to be done.
                    Err(Error::NoSpace) if free && self.is_zero(p, ctx).await => {}
                    written => written?,
                },
            }
        }
        Ok(())
    }

    /// Whether a piece, of a page at most, reads as zeroes already.
    async fn is_zero(&self, span: Span, ctx: &Ctx) -> bool {
        let wide = span.widened(self.unit);
        if wide.len() > PAGE || ctx.credit().left() < PAGE as usize {
            return false;
        }
        let found = self.read(span, ctx).await;
        found.is_ok_and(|data| data.iter().all(|piece| piece.iter().all(|byte| *byte == 0)))
    }

    /// Zeroes whole granules in the cheapest way there is.
    async fn clear(&self, span: Span, free: bool, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.failed(e, span, Doing::Writing);
        if free {
            match self.medium.punch(span.at, span.len(), ctx).await {
                Err(e) if e.is_unsupported() => {}
                result => return result.map_err(failed),
            }
        }
        match self.medium.zero(span.at, span.len(), ctx).await {
            Err(e) if e.is_unsupported() => {}
            result => return result.map_err(failed),
        }
        for step in span.steps(ZERO_STEP) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let failed = |e| self.failed(e, step, Doing::Writing);
            self.medium.write(step.at, Bufs::zeroes(len(step)), ctx).await.map_err(failed)?;
        }
        Ok(())
    }

    pub(super) async fn flush(&self, ctx: &Ctx) -> Result<(), Error> {
        let sync = || async {
            self.medium.sync(ctx).await.map_err(|_| {
                // The medium has said why. Nothing written since the last sync is known to be there.
                self.dead.set(true);
                Error::Gone
            })
        };
        self.flushes.flush(sync).await?;
        if self.dead.get() { Err(Error::Gone) } else { Ok(()) }
    }

    /// What a failure of the medium means to the caller; logs what it was.
    fn failed(&self, failure: Failure, span: Span, doing: Doing) -> Error {
        let (disk, at) = (self.medium.path().display(), span.at);
        let result = match failure {
            Failure::Disk(e) => self.of_disk(e.kind, span, doing),
            Failure::Dev(e) => self.of_dev(e, span, doing),
        };
        match result {
            Error::Gone if !self.dead.replace(true) => {
                tracing::error!(%disk, at, error = %failure, "the disk is given up");
            }
            // It was asked for.
            Error::Gone | Error::Aborted => {}
            _ => tracing::warn!(%disk, at, ?doing, error = %failure, "a disk operation failed"),
        }
        result
    }

    fn of_disk(&self, e: DiskErrorKind, span: Span, doing: Doing) -> Error {
        match e {
            DiskErrorKind::NoSpace => Error::NoSpace,
            DiskErrorKind::ReadOnly => Error::ReadOnly,
            // A file that somebody cut short has lost data for good.
            DiskErrorKind::Gone | DiskErrorKind::PastEnd => Error::Gone,
            DiskErrorKind::Media
            | DiskErrorKind::Misaligned
            | DiskErrorKind::Unsupported
            | DiskErrorKind::Other => match doing {
                Doing::Reading => Error::Unreadable { at: self.block_at(span.at) },
                Doing::Writing => Error::Unwritable { at: self.block_at(span.at) },
            },
        }
    }

    /// The same error with the volume's address. What is written back cannot be written if it cannot be read.
    fn of_dev(&self, e: Error, span: Span, doing: Doing) -> Error {
        let here =
            |at: Lba| self.block_at(at.0.saturating_mul(self.unit).clamp(span.at, span.end - 1));
        match (e, doing) {
            (Error::Corrupt { at }, Doing::Reading) => Error::Corrupt { at: here(at) },
            (Error::Unreadable { at } | Error::Unwritable { at }, Doing::Reading) => {
                Error::Unreadable { at: here(at) }
            }
            (
                Error::Unreadable { at } | Error::Corrupt { at } | Error::Unwritable { at },
                Doing::Writing,
            ) => Error::Unwritable { at: here(at) },
            (Error::OutOfRange | Error::Gone, _) => Error::Gone,
            (Error::NoSpace | Error::ReadOnly | Error::Fenced | Error::Aborted, _) => e,
        }
    }
}

fn len(span: Span) -> usize {
    usize::try_from(span.len()).expect("a transfer fits memory")
}

/// How far behind the beginning of `outer` that of `inner` is.
fn gap(outer: Span, inner: Span) -> usize {
    usize::try_from(inner.at - outer.at).expect("a transfer fits memory")
}

/// The part of `data`, which belongs to `span`, that belongs to `part`.
fn cut(data: &Bufs, span: Span, part: Span) -> Bufs {
    let skip = gap(span, part);
    data.slice(skip..skip + len(part))
}
