//! A file, a block device or a part of one without a label, as a layer: for volumes that are used
//! byte for byte, and for members of pools.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};

use block::{BlockStatus, Bufs, Ctx, Error, FlushCoalescer, Info, Layer, Lba, Op};
use rt::disk::{Disk, DiskError, DiskErrorKind, DiskInfo};

use crate::{LeaseGate, check_not_revoked, wait_valid};

/// Largest operation that carries data, in bytes.
const MAX_TRANSFER_BYTES: u32 = 4 << 20;

/// Scratch memory for data whose memory the disk does not take, in bytes.
const BOUNCE_BYTES: usize = 4096;

/// Most that one write of zeroes covers, in bytes.
const ZERO_STEP_BYTES: u64 = 1 << 20;

/// A file or block device as a layer. An incomplete block at its end is not accessible.
#[derive(Debug)]
pub struct RawDevice {
    /// `None` once it was [closed](Self::close_when_idle).
    disk: RefCell<Option<Disk>>,
    disk_info: DiskInfo,
    /// Operations in flight.
    in_flight: Cell<u32>,
    /// Its name for messages.
    name: PathBuf,
    info: Info,
    /// Offset of its first block on the disk, in bytes.
    start_offset: u64,
    flushes: FlushCoalescer,
    /// Whether a flush has failed or the disk is lost.
    is_failed: Cell<bool>,
    /// Prevents use of the disk once another machine has claimed it.
    gate: Option<LeaseGate>,
}

impl RawDevice {
    /// The whole of `disk` as a layer, with blocks of `block_size` bytes, 512 or 4096, or of the
    /// disk's logical blocks if these are larger.
    #[must_use]
    pub fn new(disk: Disk, block_size: u32) -> Self {
        let found = disk.info();
        let block_size = block_size.max(found.logical_block);
        let info = Info {
            block_size,
            blocks: found.size / u64::from(block_size),
            metadata_blocks: 0,
            physical_block_size: found.physical_block.max(block_size),
            max_transfer_blocks: MAX_TRANSFER_BYTES / block_size,
            unmap_granularity_blocks: if found.can_punch { 1 } else { 0 },
            unmap_zeroes: true,
            volatile_cache: found.has_volatile_cache,
            native_fua: false,
            read_only: found.read_only,
            overhead_bytes: BOUNCE_BYTES as u32,
        };
        let (name, flushes) = (disk.path().to_owned(), FlushCoalescer::default());
        let (disk, in_flight) = (RefCell::new(Some(disk)), Cell::new(0));
        let is_failed = Cell::new(false);
        Self {
            disk,
            disk_info: found,
            in_flight,
            name,
            info,
            start_offset: 0,
            flushes,
            is_failed,
            gate: None,
        }
    }

    /// The same, limited to `bytes` bytes of the disk from byte `at` on, or fewer if it ends
    /// before.
    ///
    /// # Panics
    /// If `at` is not a multiple of the disk's logical block.
    #[must_use]
    pub fn with_range(mut self, at: u64, bytes: u64) -> Self {
        let found = self.disk_info;
        assert!(at.is_multiple_of(u64::from(found.logical_block)), "a part that begins at {at}");
        let bytes = bytes.min(found.size.saturating_sub(at));
        self.info.blocks = bytes / u64::from(self.info.block_size);
        Self { start_offset: at, ..self }
    }

    /// The same, used only while this machine has the claim.
    #[must_use]
    pub fn with_gate(self, gate: Option<LeaseGate>) -> Self {
        Self { gate, ..self }
    }

    /// The same, with this name for messages.
    #[must_use]
    pub fn with_name(self, name: &Path) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    /// Closes the disk: every operation from now on fails. The disk is closed once the operations
    /// in flight have ended.
    pub fn close_when_idle(&self) {
        self.is_failed.set(true);
        self.disk.take();
    }

    /// Whether no operation is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.get() == 0
    }

    fn disk(&self) -> Result<Disk, Error> {
        self.disk.borrow().clone().ok_or(Error::Gone)
    }

    fn byte_range(&self, at: Lba, blocks: u32) -> (u64, u64) {
        let size = u64::from(self.info.block_size);
        (self.start_offset + at.0 * size, u64::from(blocks) * size)
    }

    async fn write(&self, at: Lba, data: Bufs, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.map_disk_error(e, at, true);
        let (disk, (mut offset, _), found) = (self.disk()?, self.byte_range(at, 0), self.disk_info);
        if data.is_aligned(found.memory_align.max(found.logical_block) as usize) {
            wait_valid(self.gate.as_ref()).await.map_err(failed)?;
            disk.write(offset, data).await.map_err(failed)?;
            return wait_valid(self.gate.as_ref()).await.map_err(failed);
        }
        for from in (0..data.len()).step_by(BOUNCE_BYTES) {
            let piece = data.slice(from..data.len().min(from + BOUNCE_BYTES));
            let mut scratch = ctx.alloc(piece.len());
            let mut done = 0;
            for part in &mut scratch {
                let n = part.len();
                piece.slice(done..done + n).copy_to(part);
                done += n;
            }
            wait_valid(self.gate.as_ref()).await.map_err(failed)?;
            disk.write(offset, scratch.into()).await.map_err(failed)?;
            offset += piece.len() as u64;
        }
        wait_valid(self.gate.as_ref()).await.map_err(failed)
    }

    /// Makes a range read as zeroes; with `free`, frees its space where possible.
    async fn zero(&self, at: Lba, blocks: u32, free: bool, ctx: &Ctx) -> Result<(), Error> {
        let failed = |e| self.map_disk_error(e, at, true);
        let (disk, (offset, bytes)) = (self.disk()?, self.byte_range(at, blocks));
        wait_valid(self.gate.as_ref()).await.map_err(failed)?;
        if free {
            match disk.punch(offset, bytes).await {
                Err(e) if e.kind == DiskErrorKind::Unsupported => {}
                result => return result.map_err(failed),
            }
        }
        match disk.zero(offset, bytes).await {
            Err(e) if e.kind == DiskErrorKind::Unsupported => {}
            result => return result.map_err(failed),
        }
        for from in (0..bytes).step_by(ZERO_STEP_BYTES as usize) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let piece = Bufs::zeroes(ZERO_STEP_BYTES.min(bytes - from) as usize);
            wait_valid(self.gate.as_ref()).await.map_err(failed)?;
            disk.write(offset + from, piece).await.map_err(failed)?;
        }
        Ok(())
    }

    async fn block_status(&self, at: Lba, blocks: u32) -> Result<BlockStatus, Error> {
        let (disk, (offset, bytes)) = (self.disk()?, self.byte_range(at, blocks));
        let run = disk.sparse_run(offset, bytes).await;
        let run = run.map_err(|e| self.map_disk_error(e, at, false))?;
        let size = u64::from(self.info.block_size);
        let whole = u32::try_from(run.bytes / size).unwrap_or(blocks);
        if run.is_hole && whole > 0 {
            return Ok(BlockStatus { blocks: whole.min(blocks), mapped: false });
        }
        let touched = u32::try_from(run.bytes.div_ceil(size)).unwrap_or(blocks);
        Ok(BlockStatus { blocks: touched.min(blocks), mapped: true })
    }

    async fn flush(&self) -> Result<(), Error> {
        let sync = || async {
            if let Err(e) = check_not_revoked(self.gate.as_ref()) {
                return Err(self.map_disk_error(e, Lba(0), true));
            }
            self.disk()?.sync().await.map_err(|_| {
                self.is_failed.set(true);
                Error::Gone
            })
        };
        self.flushes.flush(sync).await?;
        if self.is_failed.get() { Err(Error::Gone) } else { Ok(()) }
    }

    /// The error for a failure of the disk, which is logged.
    fn map_disk_error(&self, e: DiskError, at: Lba, writing: bool) -> Error {
        tracing::warn!(disk = %self.name.display(), %at, error = %e, "a disk operation failed");
        match e.kind {
            DiskErrorKind::NoSpace => Error::NoSpace,
            DiskErrorKind::ReadOnly => Error::ReadOnly,
            DiskErrorKind::Gone | DiskErrorKind::PastEnd => {
                self.is_failed.set(true);
                Error::Gone
            }
            _ if writing => Error::Unwritable { at },
            _ => Error::Unreadable { at },
        }
    }
}

/// Counts an operation in flight.
struct InFlightGuard<'a>(&'a Cell<u32>);

impl<'a> InFlightGuard<'a> {
    fn new(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Layer for RawDevice {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn info(&self) -> Info {
        self.info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        if self.is_failed.get() {
            return Err(Error::Gone);
        }
        let _in_flight = InFlightGuard::new(&self.in_flight);
        match op {
            Op::Read { at, blocks } => {
                let (offset, bytes) = self.byte_range(at, blocks);
                let into = ctx.alloc(bytes as usize);
                let disk = self.disk()?;
                let failed = |e| self.map_disk_error(e, at, false);
                wait_valid(self.gate.as_ref()).await.map_err(failed)?;
                let read = disk.read(offset, into).await.map_err(failed)?;
                wait_valid(self.gate.as_ref()).await.map_err(failed)?;
                return Ok(read.into());
            }
            Op::BlockStatus { at, blocks } => {
                return Ok(self.block_status(at, blocks).await?.into_bufs(&ctx));
            }
            Op::Write { at, data, .. } => self.write(at, data, &ctx).await?,
            // Rare operations are boxed, so that the future of a read stays small.
            Op::Zero { at, blocks, unmap, .. } => {
                Box::pin(self.zero(at, blocks, unmap, &ctx)).await?;
            }
            Op::Unmap { at, blocks } => Box::pin(self.zero(at, blocks, true, &ctx)).await?,
            Op::Flush => Box::pin(self.flush()).await?,
        }
        Ok(Bufs::new())
    }
}
