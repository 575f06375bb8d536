//! A file or block device as it is, or a part of it, without a label: what is measured byte for byte, or is a member of a pool.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};

use block::{Bufs, Ctx, Error, FlushGate, Info, Layer, Lba, Op, Run};
use rt::disk::{Disk, DiskError, DiskErrorKind, DiskInfo};

use crate::{Gate, check, pass};

/// Largest operation that carries data, in bytes.
const MAX_TRANSFER: u32 = 4 << 20;

/// Scratch memory for data whose memory the disk does not take, in bytes.
const BOUNCE: usize = 4096;

/// Most that one write of zeroes covers, in bytes.
const ZERO_STEP: u64 = 1 << 20;

/// A file or block device as a layer. What does not fill a block at its end is not reached.
#[derive(Debug)]
pub struct Raw {
    /// None any more once it is [let go](Self::let_go).
    disk: RefCell<Option<Disk>>,
    found: DiskInfo,
    /// Operations under way.
    under_way: Cell<u32>,
    /// What people call it.
    name: PathBuf,
    info: Info,
    /// Where its first block begins on the disk, in bytes.
    begin: u64,
    flushes: FlushGate,
    /// Whether a flush has failed or the disk is lost.
    dead: Cell<bool>,
    /// What keeps the disk from being used when another machine has it.
    gate: Option<Gate>,
}

impl Raw {
    /// The layer that the whole of `disk` is, in blocks of `block_size` bytes, 512 or 4096, or of what the disk reads and writes at
    /// least if that is more.
    #[must_use]
    pub fn new(disk: Disk, block_size: u32) -> Self {
        let found = disk.info();
        let block_size = block_size.max(found.logical_block);
        let info = Info {
            block_size,
            blocks: found.size / u64::from(block_size),
            aside_blocks: 0,
            physical_block_size: found.physical_block.max(block_size),
            max_transfer_blocks: MAX_TRANSFER / block_size,
            unmap_granularity_blocks: if found.can_punch { 1 } else { 0 },
            unmap_zeroes: true,
            volatile_cache: found.volatile_cache,
            native_fua: false,
            read_only: found.read_only,
            overhead: BOUNCE as u32,
        };
        let (name, flushes) = (disk.path().to_owned(), FlushGate::default());
        let (disk, under_way) = (RefCell::new(Some(disk)), Cell::new(0));
        let dead = Cell::new(false);
        Self { disk, found, under_way, name, info, begin: 0, flushes, dead, gate: None }
    }

    /// The same, but only the `bytes` from byte `at` of the disk on, as far as there are so many.
    ///
    /// # Panics
    /// If the disk reads and writes nothing that begins at `at`.
    #[must_use]
    pub fn within(mut self, at: u64, bytes: u64) -> Self {
        let found = self.found;
        assert!(at.is_multiple_of(u64::from(found.logical_block)), "a part that begins at {at}");
        let bytes = bytes.min(found.size.saturating_sub(at));
        self.info.blocks = bytes / u64::from(self.info.block_size);
        Self { begin: at, ..self }
    }

    /// The same, used only as long as this machine holds the disk.
    #[must_use]
    pub fn guarded(self, gate: Option<Gate>) -> Self {
        Self { gate, ..self }
    }

    /// The same, by the name that people gave it.
    #[must_use]
    pub fn called(self, name: &Path) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    /// Lets go of the disk: every operation from now on fails. It is closed when those that are under way have ended.
    pub fn let_go(&self) {
        self.dead.set(true);
        self.disk.take();
    }

    /// Whether nothing is under way any more.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.under_way.get() == 0
    }

    fn disk(&self) -> Result<Disk, Error> {
        self.disk.borrow().clone().ok_or(Error::Gone)
    }

    fn bytes(&self, at: Lba, blocks: u32) -> (u64, u64) {
        let size = u64::from(self.info.block_size);
        (self.begin + at.0 * size, u64::from(blocks) * size)
    }

    async fn write(&self, at: Lba, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.failed(e, at, true);
        let (disk, (mut place, _), found) = (self.disk()?, self.bytes(at, 0), self.found);
        if data.is_aligned(found.memory_align.max(found.logical_block) as usize) {
            pass(self.gate.as_ref()).await.map_err(failed)?;
            disk.write(place, data).await.map_err(failed)?;
            return pass(self.gate.as_ref()).await.map_err(failed);
        }
        for from in (0..data.len()).step_by(BOUNCE) {
            let piece = data.slice(from..data.len().min(from + BOUNCE));
            let mut scratch = ctx.alloc(piece.len());
            let mut done = 0;
            for part in &mut scratch {
                let n = part.len();
                piece.slice(done..done + n).copy_to(part);
                done += n;
            }
            pass(self.gate.as_ref()).await.map_err(failed)?;
            disk.write(place, scratch.into()).await.map_err(failed)?;
            place += piece.len() as u64;
        }
        pass(self.gate.as_ref()).await.map_err(failed)
    }

    /// Makes a range read as zeroes; frees its space if told to and where that is possible.
    async fn zero(&self, at: Lba, blocks: u32, free: bool, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.failed(e, at, true);
        let (disk, (place, bytes)) = (self.disk()?, self.bytes(at, blocks));
        pass(self.gate.as_ref()).await.map_err(failed)?;
        if free {
            match disk.punch(place, bytes).await {
                Err(e) if e.kind == DiskErrorKind::Unsupported => {}
                result => return result.map_err(failed),
            }
        }
        match disk.zero(place, bytes).await {
            Err(e) if e.kind == DiskErrorKind::Unsupported => {}
            result => return result.map_err(failed),
        }
        for from in (0..bytes).step_by(ZERO_STEP as usize) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let piece = Bufs::zeroes(ZERO_STEP.min(bytes - from) as usize);
            pass(self.gate.as_ref()).await.map_err(failed)?;
            disk.write(place + from, piece).await.map_err(failed)?;
        }
        Ok(())
    }

    async fn map(&self, at: Lba, blocks: u32) -> Result<Run, Error> {
        let (disk, (place, bytes)) = (self.disk()?, self.bytes(at, blocks));
        let stretch = disk.stretch(place, bytes).await;
        let stretch = stretch.map_err(|e| self.failed(e, at, false))?;
        let size = u64::from(self.info.block_size);
        let whole = u32::try_from(stretch.bytes / size).unwrap_or(blocks);
        if stretch.hole && whole > 0 {
            return Ok(Run { blocks: whole.min(blocks), mapped: false });
        }
        let touched = u32::try_from(stretch.bytes.div_ceil(size)).unwrap_or(blocks);
        Ok(Run { blocks: touched.min(blocks), mapped: true })
    }

    async fn flush(&self) -> Result<(), Error> {
        let sync = || async {
            if let Err(e) = check(self.gate.as_ref()) {
                return Err(self.failed(e, Lba(0), true));
            }
            self.disk()?.sync().await.map_err(|_| {
                self.dead.set(true);
                Error::Gone
            })
        };
        self.flushes.flush(sync).await?;
        if self.dead.get() { Err(Error::Gone) } else { Ok(()) }
    }

    /// What a failure of the disk means to the caller; logs what it was.
    fn failed(&self, e: DiskError, at: Lba, writing: bool) -> Error {
        tracing::warn!(disk = %self.name.display(), %at, error = %e, "a disk operation failed");
        match e.kind {
            DiskErrorKind::NoSpace => Error::NoSpace,
            DiskErrorKind::ReadOnly => Error::ReadOnly,
            DiskErrorKind::Gone | DiskErrorKind::PastEnd => {
                self.dead.set(true);
                Error::Gone
            }
            _ if writing => Error::Unwritable { at },
            _ => Error::Unreadable { at },
        }
    }
}

/// An operation that is under way.
struct UnderWay<'a>(&'a Cell<u32>);

impl<'a> UnderWay<'a> {
    fn new(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Layer for Raw {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn info(&self) -> Info {
        self.info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        if self.dead.get() {
            return Err(Error::Gone);
        }
        let _under_way = UnderWay::new(&self.under_way);
        match op {
            Op::Read { at, blocks } => {
                let (place, bytes) = self.bytes(at, blocks);
                let into = ctx.alloc(bytes as usize);
                let disk = self.disk()?;
                let failed = |e| self.failed(e, at, false);
                pass(self.gate.as_ref()).await.map_err(failed)?;
                let read = disk.read(place, into).await.map_err(failed)?;
                pass(self.gate.as_ref()).await.map_err(failed)?;
                return Ok(read.into());
            }
            Op::Map { at, blocks } => return Ok(self.map(at, blocks).await?.into_bufs(&ctx)),
            Op::Write { at, data, .. } => self.write(at, data, &ctx).await?,
            // What is rare is in a box, so that the future of a read stays small.
            Op::Zero { at, blocks, unmap, .. } => {
                Box::pin(self.zero(at, blocks, unmap, &ctx)).await?;
            }
            Op::Unmap { at, blocks } => Box::pin(self.zero(at, blocks, true, &ctx)).await?,
            Op::Flush => Box::pin(self.flush()).await?,
        }
        Ok(Bufs::new())
    }
}
