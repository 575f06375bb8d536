//! What an image lies on: a disk, or a device of blocks.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use block::{
    Account, Blocks, Bufs, BufsMut, Class, Ctx, Dev, Epoch, Error, Info, Lba, Op, Run, overlay,
};
use rt::disk::{Disk, DiskError, DiskErrorKind, DiskInfo, DiskKind, Signature, Stretch};

use crate::{Gate, Hold, check, pass};

/// Memory comes in pieces of so many bytes.
pub const PAGE: u64 = 4096;

/// What an image lies on: a [`Disk`], or a [`Dev`] such as a volume of a pool.
///
/// Each operation is given its [`Ctx`], with memory for the data of a read and what the medium takes beside.
#[derive(Debug)]
pub struct Medium(Kind);

#[derive(Debug)]
enum Kind {
    /// And the gate that keeps it from being used when another machine has it.
    Disk(Disk, Option<Gate>),
    Dev(Below),
}

/// A device of blocks, in bytes.
#[derive(Debug)]
struct Below {
    dev: Dev,
    /// What people call it.
    name: PathBuf,
    /// Whether an image on it is only read.
    read_only: bool,
    /// Whether a flush has failed: what it holds is no longer known.
    is_lost: Cell<bool>,
}

/// A medium that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// As disks fail.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// As devices fail; addresses are the device's.
    #[error(transparent)]
    Dev(#[from] Error),
}

impl From<Failure> for DiskError {
    fn from(failure: Failure) -> Self {
        let kind = match failure {
            Failure::Disk(e) => return e,
            Failure::Dev(e) => match e {
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

impl Failure {
    /// Whether the medium cannot do what it was asked for.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Disk(e) if e.kind == DiskErrorKind::Unsupported)
    }
}

const UNSUPPORTED: Failure = Failure::Disk(DiskError::new(DiskErrorKind::Unsupported));

impl From<Disk> for Medium {
    fn from(disk: Disk) -> Self {
        Self(Kind::Disk(disk, None))
    }
}

impl Medium {
    /// The device `dev`, which people call `name`, and which nobody else uses.
    ///
    /// It is to read as zeroes wherever nothing was written since it was made, as volumes of pools do: a creation does not zero it, and
    /// neither does a growth. Only if an image is forced over something that is found there, all of it is zeroed.
    #[must_use]
    pub fn of(dev: Dev, name: &Path) -> Self {
        let name = name.to_owned();
        Self(Kind::Dev(Below { dev, name, read_only: false, is_lost: Cell::new(false) }))
    }

    /// The disk that it is, unless it is a device.
    pub fn disk(&self) -> Option<&Disk> {
        match &self.0 {
            Kind::Disk(disk, _) => Some(disk),
            Kind::Dev(_) => None,
        }
    }

    /// The same, used only as long as this machine holds the disk.
    pub fn guarded(self, hold: Option<&Hold>) -> Self {
        match self.0 {
            Kind::Disk(disk, _) => Self(Kind::Disk(disk, hold.map(Hold::gate))),
            kind @ Kind::Dev(_) => Self(kind),
        }
    }

    /// The same for an image that is only read. A disk was opened for one or the other.
    pub fn for_reading(mut self, read_only: bool) -> Self {
        if let Kind::Dev(below) = &mut self.0 {
            below.read_only = read_only;
        }
        self
    }

    /// The file or device, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        match &self.0 {
            Kind::Disk(disk, _) => disk.path(),
            Kind::Dev(below) => &below.name,
        }
    }

    /// What it is, as a disk.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        match &self.0 {
            Kind::Disk(disk, _) => disk.info(),
            Kind::Dev(below) => below.info(),
        }
    }

    /// Memory in bytes that each operation may take beside that of its data.
    pub fn overhead(&self) -> u32 {
        match &self.0 {
            Kind::Disk(..) => 0,
            Kind::Dev(below) => below.dev.info().overhead,
        }
    }

    /// What libblkid finds on it, if it is a disk and the library is there.
    pub async fn signatures(&self) -> Vec<Signature> {
        match &self.0 {
            Kind::Disk(disk, _) => disk.signatures().await.unwrap_or_default(),
            Kind::Dev(_) => Vec::new(),
        }
    }

    /// Whether nothing was ever written where nothing of an image is.
    pub fn is_clean(&self) -> bool {
        matches!(self.0, Kind::Dev(_))
    }

    /// Whether operations must not overlap, not even where blocks that are shared are concerned.
    pub fn forbids_overlap(&self) -> bool {
        matches!(self.0, Kind::Dev(_))
    }

    /// What pieces of data that is written have to be multiples of, in bytes.
    pub fn piece(&self) -> u32 {
        match &self.0 {
            Kind::Disk(disk, _) => disk.info().logical_block,
            Kind::Dev(_) => 1,
        }
    }

    /// What it frees at least, in bytes.
    pub fn freed_at_once(&self) -> u64 {
        match &self.0 {
            Kind::Disk(..) => PAGE,
            Kind::Dev(below) => {
                let info = below.dev.info();
                u64::from(info.unmap_granularity_blocks) * u64::from(info.block_size)
            }
        }
    }

    /// A context for operations that follow one another, each with at most `bytes` of data.
    ///
    /// # Panics
    /// If the pool could never give that much.
    pub async fn ctx(&self, memory: &Account, bytes: usize) -> Ctx {
        let credit = memory.credit(bytes + self.overhead() as usize, Class::Immediate).await;
        Ctx::new(credit.expect("a pool has room for 256 KiB and an overhead"), Epoch::default())
    }

    /// Reads `len` bytes from byte `at` on.
    pub async fn read(&self, at: u64, len: usize, ctx: &Ctx) -> Result<Bufs, Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                pass(gate.as_ref()).await?;
                let done = disk.read(at, ctx.alloc(len)).await?;
                pass(gate.as_ref()).await?;
                Ok(done.into())
            }
            Kind::Dev(below) => below.read(at, len, ctx).await,
        }
    }

    /// The same, into memory that can be changed. Takes twice the memory where the medium is a device.
    pub async fn read_to_change(&self, at: u64, len: usize, ctx: &Ctx) -> Result<BufsMut, Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                pass(gate.as_ref()).await?;
                let done = disk.read(at, ctx.alloc(len)).await?;
                pass(gate.as_ref()).await?;
                Ok(done)
            }
            Kind::Dev(below) => {
                let read = below.read(at, len, ctx).await?;
                let mut copy = ctx.alloc(len);
                overlay(&mut copy, 0, &read);
                Ok(copy)
            }
        }
    }

    /// Writes `data` from byte `at` on.
    pub async fn write(&self, at: u64, data: Bufs, ctx: &Ctx) -> Result<(), Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                pass(gate.as_ref()).await?;
                disk.write(at, data).await?;
                Ok(pass(gate.as_ref()).await?)
            }
            Kind::Dev(below) => below.write(at, data, ctx).await,
        }
    }

    /// Makes durable whatever was written before. After a failure nothing is written any more.
    pub async fn sync(&self, ctx: &Ctx) -> Result<(), Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                check(gate.as_ref())?;
                Ok(disk.sync().await?)
            }
            Kind::Dev(below) => below.sync(ctx).await,
        }
    }

    /// Frees the space of a range, which then reads as zeroes.
    pub async fn punch(&self, at: u64, bytes: u64, ctx: &Ctx) -> Result<(), Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                pass(gate.as_ref()).await?;
                disk.punch(at, bytes).await?;
                Ok(pass(gate.as_ref()).await?)
            }
            Kind::Dev(below) => {
                if !below.info().can_punch {
                    return Err(UNSUPPORTED);
                }
                below.clear(at, bytes, ctx, |at, blocks| Op::Unmap { at, blocks }).await
            }
        }
    }

    /// Makes a range read as zeroes and keeps its space.
    pub async fn zero(&self, at: u64, bytes: u64, ctx: &Ctx) -> Result<(), Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                pass(gate.as_ref()).await?;
                disk.zero(at, bytes).await?;
                Ok(pass(gate.as_ref()).await?)
            }
            Kind::Dev(below) => {
                let zero = |at, blocks| Op::Zero { at, blocks, unmap: false, fua: false };
                below.clear(at, bytes, ctx, zero).await
            }
        }
    }

    /// Puts space behind a range of a file.
    pub async fn allocate(&self, at: u64, bytes: u64) -> Result<(), Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                pass(gate.as_ref()).await?;
                disk.allocate(at, bytes).await?;
                Ok(pass(gate.as_ref()).await?)
            }
            Kind::Dev(_) => Ok(()),
        }
    }

    /// Makes a file longer or shorter.
    pub async fn set_len(&self, bytes: u64) -> Result<(), Failure> {
        match &self.0 {
            Kind::Disk(disk, gate) => {
                pass(gate.as_ref()).await?;
                disk.set_len(bytes).await?;
                Ok(pass(gate.as_ref()).await?)
            }
            Kind::Dev(_) => Err(UNSUPPORTED),
        }
    }

    /// Its size in bytes now.
    pub async fn measure(&self) -> Result<u64, Failure> {
        match &self.0 {
            Kind::Disk(disk, _) => Ok(disk.measure().await?),
            Kind::Dev(below) => Ok(below.dev.info().bytes()),
        }
    }

    /// Bytes of space it takes.
    pub async fn allocated(&self) -> Result<u64, Failure> {
        match &self.0 {
            Kind::Disk(disk, _) => Ok(disk.allocated().await?),
            Kind::Dev(below) => Ok(below.dev.info().bytes()),
        }
    }

    /// How a range begins: with a hole, or not, and for how long.
    pub async fn stretch(&self, at: u64, bytes: u64, ctx: &Ctx) -> Result<Stretch, Failure> {
        match &self.0 {
            Kind::Disk(disk, _) => Ok(disk.stretch(at, bytes).await?),
            Kind::Dev(below) => below.stretch(at, bytes, ctx).await,
        }
    }
}

impl Below {
    fn info(&self) -> DiskInfo {
        let info = self.dev.info();
        DiskInfo {
            size: info.bytes(),
            logical_block: info.block_size,
            physical_block: info.physical_block_size,
            // A layer takes data from wherever it is.
            memory_align: 1,
            kind: DiskKind::BlockDevice,
            can_punch: info.unmap_granularity_blocks > 0 && info.unmap_zeroes,
            can_zero: true,
            volatile_cache: info.volatile_cache,
            rotational: None,
            read_only: info.read_only || self.read_only,
            shared: false,
            attachment: 0,
        }
    }

    async fn read(&self, at: u64, len: usize, ctx: &Ctx) -> Result<Bufs, Failure> {
        let info = self.dev.info();
        let range = whole_blocks(&info, at, len as u64)?;
        if range.count <= u64::from(info.max_transfer_blocks) {
            return self.read_piece(range, ctx).await;
        }
        Box::pin(async move {
            let mut read = Bufs::new();
            for piece in range.pieces(at_once(&info)) {
                read.append(self.read_piece(piece, ctx).await?);
            }
            Ok(read)
        })
        .await
    }

    async fn read_piece(&self, range: Blocks, ctx: &Ctx) -> Result<Bufs, Failure> {
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        Ok(self.dev.submit(Op::Read { at: range.at, blocks }, ctx).await?)
    }

    async fn write(&self, at: u64, data: Bufs, ctx: &Ctx) -> Result<(), Failure> {
        self.check_writable()?;
        let info = self.dev.info();
        let range = whole_blocks(&info, at, data.len() as u64)?;
        if range.count <= u64::from(info.max_transfer_blocks) {
            self.dev.submit(Op::Write { at: range.at, data, fua: false }, ctx).await?;
            return Ok(());
        }
        Box::pin(async move {
            let block = info.block_size as usize;
            for piece in range.pieces(at_once(&info)) {
                let skip = (piece.at.0 - range.at.0) as usize * block;
                let data = data.slice(skip..skip + piece.count as usize * block);
                self.dev.submit(Op::Write { at: piece.at, data, fua: false }, ctx).await?;
            }
            Ok(())
        })
        .await
    }

    async fn sync(&self, ctx: &Ctx) -> Result<(), Failure> {
        self.check_alive()?;
        // Others may share it, who have asked for no abort.
        let flushed = self.dev.submit(Op::Flush, &ctx.shielded()).await;
        flushed.map(drop).map_err(|e| {
            self.is_lost.set(true);
            let dev = self.name.display();
            tracing::error!(%dev, error = %e, "a flush failed; the device is given up");
            e.into()
        })
    }

    /// Does `op`, which carries no data, for a range.
    async fn clear(
        &self,
        at: u64,
        bytes: u64,
        ctx: &Ctx,
        op: impl Fn(Lba, u32) -> Op,
    ) -> Result<(), Failure> {
        self.check_writable()?;
        let range = whole_blocks(&self.dev.info(), at, bytes)?;
        for piece in range.pieces(u64::from(u32::MAX)) {
            let blocks = u32::try_from(piece.count).map_err(|_| Error::OutOfRange)?;
            self.dev.submit(op(piece.at, blocks), ctx).await?;
        }
        Ok(())
    }

    async fn stretch(&self, at: u64, bytes: u64, ctx: &Ctx) -> Result<Stretch, Failure> {
        let block = u64::from(self.dev.info().block_size);
        let (first, end) = (at / block, (at + bytes).div_ceil(block));
        let blocks = u32::try_from(end - first).unwrap_or(u32::MAX);
        let answer = self.dev.submit(Op::Map { at: Lba(first), blocks }, ctx).await?;
        let run = Run::all_of(&answer).first().copied().ok_or(Error::Gone)?;
        let alike = (first + u64::from(run.blocks)) * block - at;
        Ok(Stretch { bytes: alike.min(bytes), hole: !run.mapped })
    }

    fn check_writable(&self) -> Result<(), Failure> {
        if self.read_only {
            return Err(Error::ReadOnly.into());
        }
        self.check_alive()
    }

    fn check_alive(&self) -> Result<(), Failure> {
        if self.is_lost.get() { Err(Error::Gone.into()) } else { Ok(()) }
    }
}

/// The blocks that these bytes are.
fn whole_blocks(info: &Info, at: u64, bytes: u64) -> Result<Blocks, Failure> {
    let block = u64::from(info.block_size);
    if !at.is_multiple_of(block) || !bytes.is_multiple_of(block) {
        return Err(DiskError::new(DiskErrorKind::Misaligned).into());
    }
    Ok(Blocks::new(Lba(at / block), bytes / block))
}

/// How many blocks are read or written at once where there are too many: whole pages if a page fits, so that pieces
/// take no more memory than the whole.
fn at_once(info: &Info) -> u64 {
    let most = u64::from(info.max_transfer_blocks);
    let page = PAGE / u64::from(info.block_size);
    if most < page { most } else { most / page * page }
}

#[cfg(test)]
mod tests;
