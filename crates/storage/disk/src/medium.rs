//! The medium of an image: a disk or a block device.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use block::{
    Account, BlockStatus, Blocks, Bufs, BufsMut, Ctx, Dev, Epoch, Error, Info, Lba, MemoryClass,
    Op, copy_into,
};
use rt::disk::{Disk, DiskError, DiskErrorKind, DiskInfo, DiskKind, Signature, SparseRun};

use crate::{DiskClaim, LeaseGate, check_not_revoked, wait_valid};

/// Buffer memory comes in pieces of this size, in bytes.
pub const PAGE: u64 = 4096;

/// The medium of an image: a [`Disk`], or a [`Dev`] such as a volume of a pool.
///
/// Each operation gets a [`Ctx`] with memory for the data of a read and for the medium's overhead.
#[derive(Debug)]
pub struct Medium(MediumKind);

#[derive(Debug)]
enum MediumKind {
    /// With the gate that prevents its use once another machine has claimed it.
    Disk(Disk, Option<LeaseGate>),
    Dev(DevMedium),
}

/// A block device, addressed in bytes.
#[derive(Debug)]
struct DevMedium {
    dev: Dev,
    /// Its name for messages.
    name: PathBuf,
    /// Whether the image on it is read-only.
    read_only: bool,
    /// Whether a flush has failed: its contents are unknown then.
    is_failed: Cell<bool>,
}

/// A failure of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MediumError {
    /// A disk's.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A device's; addresses are the device's.
    #[error(transparent)]
    Dev(#[from] Error),
}

impl From<MediumError> for DiskError {
    fn from(failure: MediumError) -> Self {
        let kind = match failure {
            MediumError::Disk(e) => return e,
            MediumError::Dev(e) => match e {
                Error::Unreadable { .. } | Error::Corrupt { .. } | Error::Unwritable { .. } => {
                    DiskErrorKind::Media
                }
                Error::NoSpace => DiskErrorKind::NoSpace,
                Error::ReadOnly => DiskErrorKind::ReadOnly,
                Error::Gone | Error::Fenced => DiskErrorKind::Gone,
                Error::OutOfRange => DiskErrorKind::PastEnd,
                Error::Aborted => DiskErrorKind::Other,
            },
        };
        Self::new(kind)
    }
}

impl MediumError {
    /// Whether the medium does not support the operation.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Disk(e) if e.kind == DiskErrorKind::Unsupported)
    }
}

const UNSUPPORTED: MediumError = MediumError::Disk(DiskError::new(DiskErrorKind::Unsupported));

impl From<Disk> for Medium {
    fn from(disk: Disk) -> Self {
        Self(MediumKind::Disk(disk, None))
    }
}

impl Medium {
    /// The device `dev`, called `name` in messages; nothing else uses it.
    ///
    /// It must read as zeroes wherever nothing was written, as volumes of pools do: creating and
    /// growing an image do not zero it. Only if an image is forced over existing data, all of it is
    /// zeroed.
    #[must_use]
    pub fn from_dev(dev: Dev, name: &Path) -> Self {
        let name = name.to_owned();
        Self(MediumKind::Dev(DevMedium {
            dev,
            name,
            read_only: false,
            is_failed: Cell::new(false),
        }))
    }

    /// The disk, unless it is a device.
    pub fn disk(&self) -> Option<&Disk> {
        match &self.0 {
            MediumKind::Disk(disk, _) => Some(disk),
            MediumKind::Dev(_) => None,
        }
    }

    /// The same, used only while this machine has the claim.
    pub fn with_claim(self, claim: Option<&DiskClaim>) -> Self {
        match self.0 {
            MediumKind::Disk(disk, _) => Self(MediumKind::Disk(disk, claim.map(DiskClaim::gate))),
            kind @ MediumKind::Dev(_) => Self(kind),
        }
    }

    /// The same for a read-only image. A disk was opened accordingly.
    pub fn with_read_only(mut self, read_only: bool) -> Self {
        if let MediumKind::Dev(below) = &mut self.0 {
            below.read_only = read_only;
        }
        self
    }

    /// The file or device, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        match &self.0 {
            MediumKind::Disk(disk, _) => disk.path(),
            MediumKind::Dev(below) => &below.name,
        }
    }

    /// Its properties, as a disk.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        match &self.0 {
            MediumKind::Disk(disk, _) => disk.info(),
            MediumKind::Dev(below) => below.info(),
        }
    }

    /// Most bytes of memory that an operation takes besides its data.
    pub fn overhead_bytes(&self) -> u32 {
        match &self.0 {
            MediumKind::Disk(..) => 0,
            MediumKind::Dev(below) => below.dev.info().overhead_bytes,
        }
    }

    /// What libblkid finds on it, if it is a disk and the library is available.
    pub async fn signatures(&self) -> Vec<Signature> {
        match &self.0 {
            MediumKind::Disk(disk, _) => disk.signatures().await.unwrap_or_default(),
            MediumKind::Dev(_) => Vec::new(),
        }
    }

    /// Whether it reads as zeroes wherever no image has written.
    pub fn is_prezeroed(&self) -> bool {
        matches!(self.0, MediumKind::Dev(_))
    }

    /// Whether operations must not overlap, not even in blocks that they share.
    pub fn forbids_overlap(&self) -> bool {
        matches!(self.0, MediumKind::Dev(_))
    }

    /// Pieces of written data must be multiples of this, in bytes.
    pub fn transfer_unit(&self) -> u32 {
        match &self.0 {
            MediumKind::Disk(disk, _) => disk.info().logical_block,
            MediumKind::Dev(_) => 1,
        }
    }

    /// The smallest unit that it can free, in bytes.
    pub fn discard_unit(&self) -> u64 {
        match &self.0 {
            MediumKind::Disk(..) => PAGE,
            MediumKind::Dev(below) => {
                let info = below.dev.info();
                u64::from(info.unmap_granularity_blocks) * u64::from(info.block_size)
            }
        }
    }

    /// Reads `len` bytes, a multiple of the disk's blocks, into one buffer.
    pub async fn read_bytes(
        &self,
        memory: &Account,
        at: u64,
        len: usize,
    ) -> Result<Box<[u8]>, DiskError> {
        /// Most bytes of buffer memory held at once.
        const STEP: usize = 256 << 10;
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            let step = STEP.min(len - out.len());
            let ctx = self.ctx(memory, step).await;
            let read = self.read(at + out.len() as u64, step, &ctx).await?;
            read.iter().for_each(|piece| out.extend_from_slice(piece));
        }
        Ok(out.into_boxed_slice())
    }

    /// A context for sequential operations, each with at most `bytes` of data.
    ///
    /// # Panics
    /// If the buffer pool could never provide that much.
    pub async fn ctx(&self, memory: &Account, bytes: usize) -> Ctx {
        let credit =
            memory.credit(bytes + self.overhead_bytes() as usize, MemoryClass::LocalIo).await;
        Ctx::new(
            credit.expect("a buffer pool holds at least 256 KiB and the overhead"),
            Epoch::default(),
        )
    }

    /// Reads `len` bytes from byte `at` on.
    pub async fn read(&self, at: u64, len: usize, ctx: &Ctx) -> Result<Bufs, MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                wait_valid(gate.as_ref()).await?;
                let done = disk.read(at, ctx.alloc(len)).await?;
                wait_valid(gate.as_ref()).await?;
                Ok(done.into())
            }
            MediumKind::Dev(below) => below.read(at, len, ctx).await,
        }
    }

    /// The same, into mutable memory. Takes twice the memory if the medium is a device.
    pub async fn read_mut(&self, at: u64, len: usize, ctx: &Ctx) -> Result<BufsMut, MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                wait_valid(gate.as_ref()).await?;
                let done = disk.read(at, ctx.alloc(len)).await?;
                wait_valid(gate.as_ref()).await?;
                Ok(done)
            }
            MediumKind::Dev(below) => {
                let read = below.read(at, len, ctx).await?;
                let mut copy = ctx.alloc(len);
                copy_into(&mut copy, 0, &read);
                Ok(copy)
            }
        }
    }

    /// Writes `data` from byte `at` on.
    pub async fn write(&self, at: u64, data: Bufs, ctx: &Ctx) -> Result<(), MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                wait_valid(gate.as_ref()).await?;
                disk.write(at, data).await?;
                Ok(wait_valid(gate.as_ref()).await?)
            }
            MediumKind::Dev(below) => below.write(at, data, ctx).await,
        }
    }

    /// Makes all earlier writes durable. After a failure nothing is written any more.
    pub async fn sync(&self, ctx: &Ctx) -> Result<(), MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                check_not_revoked(gate.as_ref())?;
                Ok(disk.sync().await?)
            }
            MediumKind::Dev(below) => below.sync(ctx).await,
        }
    }

    /// Frees the space of a range, which then reads as zeroes.
    pub async fn punch(&self, at: u64, bytes: u64, ctx: &Ctx) -> Result<(), MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                wait_valid(gate.as_ref()).await?;
                disk.punch(at, bytes).await?;
                Ok(wait_valid(gate.as_ref()).await?)
            }
            MediumKind::Dev(below) => {
                if !below.info().can_punch {
                    return Err(UNSUPPORTED);
                }
                below.submit_range(at, bytes, ctx, |at, blocks| Op::Unmap { at, blocks }).await
            }
        }
    }

    /// Makes a range read as zeroes and keeps its space allocated.
    pub async fn zero(&self, at: u64, bytes: u64, ctx: &Ctx) -> Result<(), MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                wait_valid(gate.as_ref()).await?;
                disk.zero(at, bytes).await?;
                Ok(wait_valid(gate.as_ref()).await?)
            }
            MediumKind::Dev(below) => {
                let zero = |at, blocks| Op::Zero { at, blocks, unmap: false, fua: false };
                below.submit_range(at, bytes, ctx, zero).await
            }
        }
    }

    /// Allocates space for a range of a file.
    pub async fn allocate(&self, at: u64, bytes: u64) -> Result<(), MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                wait_valid(gate.as_ref()).await?;
                disk.allocate(at, bytes).await?;
                Ok(wait_valid(gate.as_ref()).await?)
            }
            MediumKind::Dev(_) => Ok(()),
        }
    }

    /// Makes a file longer or shorter.
    pub async fn set_len(&self, bytes: u64) -> Result<(), MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, gate) => {
                wait_valid(gate.as_ref()).await?;
                disk.set_len(bytes).await?;
                Ok(wait_valid(gate.as_ref()).await?)
            }
            MediumKind::Dev(_) => Err(UNSUPPORTED),
        }
    }

    /// Its current size in bytes.
    pub async fn current_size(&self) -> Result<u64, MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, _) => Ok(disk.refresh_size().await?),
            MediumKind::Dev(below) => Ok(below.dev.info().bytes()),
        }
    }

    /// Bytes of space that it takes.
    pub async fn allocated(&self) -> Result<u64, MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, _) => Ok(disk.allocated().await?),
            MediumKind::Dev(below) => Ok(below.dev.info().bytes()),
        }
    }

    /// How a range begins: with a hole or with data, and for how many bytes.
    pub async fn allocation_run(
        &self,
        at: u64,
        bytes: u64,
        ctx: &Ctx,
    ) -> Result<SparseRun, MediumError> {
        match &self.0 {
            MediumKind::Disk(disk, _) => Ok(disk.sparse_run(at, bytes).await?),
            MediumKind::Dev(below) => below.allocation_run(at, bytes, ctx).await,
        }
    }
}

impl DevMedium {
    fn info(&self) -> DiskInfo {
        let info = self.dev.info();
        DiskInfo {
            size: info.bytes(),
            logical_block: info.block_size,
            physical_block: info.physical_block_size,
            // A device takes data from any memory.
            memory_align: 1,
            kind: DiskKind::BlockDevice,
            can_punch: info.unmap_granularity_blocks > 0 && info.unmap_zeroes,
            can_zero: true,
            has_volatile_cache: info.volatile_cache,
            is_rotational: None,
            read_only: info.read_only || self.read_only,
            is_shareable: false,
            attachment_number: 0,
        }
    }

    async fn read(&self, at: u64, len: usize, ctx: &Ctx) -> Result<Bufs, MediumError> {
        let info = self.dev.info();
        let range = to_blocks(&info, at, len as u64)?;
        if range.count <= u64::from(info.max_transfer_blocks) {
            return self.read_piece(range, ctx).await;
        }
        Box::pin(async move {
            let mut read = Bufs::new();
            for piece in range.chunks(max_blocks_per_transfer(&info)) {
                read.append(self.read_piece(piece, ctx).await?);
            }
            Ok(read)
        })
        .await
    }

    async fn read_piece(&self, range: Blocks, ctx: &Ctx) -> Result<Bufs, MediumError> {
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        Ok(self.dev.submit(Op::Read { at: range.at, blocks }, ctx).await?)
    }

    async fn write(&self, at: u64, data: Bufs, ctx: &Ctx) -> Result<(), MediumError> {
        self.check_writable()?;
        let info = self.dev.info();
        let range = to_blocks(&info, at, data.len() as u64)?;
        if range.count <= u64::from(info.max_transfer_blocks) {
            self.dev.submit(Op::Write { at: range.at, data, fua: false }, ctx).await?;
            return Ok(());
        }
        Box::pin(async move {
            let block = info.block_size as usize;
            for piece in range.chunks(max_blocks_per_transfer(&info)) {
                let skip = (piece.at.0 - range.at.0) as usize * block;
                let data = data.slice(skip..skip + piece.count as usize * block);
                self.dev.submit(Op::Write { at: piece.at, data, fua: false }, ctx).await?;
            }
            Ok(())
        })
        .await
    }

    async fn sync(&self, ctx: &Ctx) -> Result<(), MediumError> {
        self.check_not_failed()?;
        // Other operations may share the flush, so it must not be aborted.
        let flushed = self.dev.submit(Op::Flush, &ctx.shielded()).await;
        flushed.map(drop).map_err(|e| {
            self.is_failed.set(true);
            let dev = self.name.display();
            tracing::error!(%dev, error = %e, "a flush failed; the device is used no longer");
            e.into()
        })
    }

    /// Submits `op`, which carries no data, for a range.
    async fn submit_range(
        &self,
        at: u64,
        bytes: u64,
        ctx: &Ctx,
        op: impl Fn(Lba, u32) -> Op,
    ) -> Result<(), MediumError> {
        self.check_writable()?;
        let range = to_blocks(&self.dev.info(), at, bytes)?;
        for piece in range.chunks(u64::from(u32::MAX)) {
            let blocks = u32::try_from(piece.count).map_err(|_| Error::OutOfRange)?;
            self.dev.submit(op(piece.at, blocks), ctx).await?;
        }
        Ok(())
    }

    async fn allocation_run(
        &self,
        at: u64,
        bytes: u64,
        ctx: &Ctx,
    ) -> Result<SparseRun, MediumError> {
        let block = u64::from(self.dev.info().block_size);
        let (first, end) = (at / block, (at + bytes).div_ceil(block));
        let blocks = u32::try_from(end - first).unwrap_or(u32::MAX);
        let answer = self.dev.submit(Op::BlockStatus { at: Lba(first), blocks }, ctx).await?;
        let run = BlockStatus::from_bufs(&answer).first().copied().ok_or(Error::Gone)?;
        let alike = (first + u64::from(run.blocks)) * block - at;
        Ok(SparseRun { bytes: alike.min(bytes), is_hole: !run.mapped })
    }

    fn check_writable(&self) -> Result<(), MediumError> {
        if self.read_only {
            return Err(Error::ReadOnly.into());
        }
        self.check_not_failed()
    }

    fn check_not_failed(&self) -> Result<(), MediumError> {
        if self.is_failed.get() { Err(Error::Gone.into()) } else { Ok(()) }
    }
}

/// The blocks of a byte range.
fn to_blocks(info: &Info, at: u64, bytes: u64) -> Result<Blocks, MediumError> {
    let block = u64::from(info.block_size);
    if !at.is_multiple_of(block) || !bytes.is_multiple_of(block) {
        return Err(DiskError::new(DiskErrorKind::Misaligned).into());
    }
    Ok(Blocks::new(Lba(at / block), bytes / block))
}

/// Most blocks per transfer when one is split: whole pages if a page fits, so that the pieces take
/// no more memory than the whole.
fn max_blocks_per_transfer(info: &Info) -> u64 {
    let most = u64::from(info.max_transfer_blocks);
    let page = PAGE / u64::from(info.block_size);
    if most < page { most } else { most / page * page }
}

#[cfg(test)]
mod tests;
