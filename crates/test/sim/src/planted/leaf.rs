//! A block device straight on a disk, sound or with one of the mistakes that leaves make.

use std::path::Path;

use block::{Bufs, Ctx, Dev, Error, Info, Layer, Lba, Op};
use rt::Core;
use rt::buf::copy_in;
use rt::disk::{Disk, OpenOptions};
use rt::sim::{Host, World};

use super::Variant;
use crate::scenarios::storage::{self, DISK, Shape, Stack};
use crate::scenarios::volume;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// A flush is answered and not done.
    NoFlush,
    /// A write is said to be durable and is not.
    NoFua,
    /// Part of a block is replaced by reading, changing and writing all of what the disk writes
    /// at once; a neighbour may do the same at the same time.
    SharedSector,
    /// Zeroing takes along the block behind.
    ZeroTooFar,
}

macro_rules! leaf {
    ($name:ident, $mistake:ident) => {
        pub(super) async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Wrong;
            storage::play(world, Leaf(if wrong { Mistake::$mistake } else { Mistake::None })).await
        }
    };
}

leaf!(no_flush, NoFlush);
leaf!(no_fua, NoFua);
leaf!(shared_sector, SharedSector);
leaf!(zero_too_far, ZeroTooFar);

/// The sound leaf, for scenarios of what stands on it.
pub(crate) async fn volume_on_leaf(world: World) -> Result<(), String> {
    volume::play(world, Leaf(Mistake::None)).await
}

#[derive(Clone, Copy, Debug)]
struct Leaf(Mistake);

impl Stack for Leaf {
    async fn prepare(&self, _host: &Host, _shape: Shape) -> Result<(), String> {
        Ok(())
    }

    async fn open(&self, core: Core, shape: Shape) -> Result<Dev, String> {
        let disk = core.open_disk(Path::new(DISK), OpenOptions::new()).await;
        let disk = disk.map_err(|e| e.to_string())?;
        Ok(Dev::new(Bare { disk, shape, mistake: self.0 }))
    }
}

struct Bare {
    disk: Disk,
    shape: Shape,
    mistake: Mistake,
}

impl Layer for Bare {
    fn name(&self) -> &'static str {
        "bare"
    }

    fn info(&self) -> Info {
        Info {
            block_size: self.shape.block_size,
            blocks: self.shape.bytes / u64::from(self.shape.block_size),
            aside_blocks: 0,
            physical_block_size: self.shape.disk.1.max(self.shape.block_size),
            max_transfer_blocks: (1 << 20) / self.shape.block_size,
            unmap_granularity_blocks: 1,
            unmap_zeroes: true,
            volatile_cache: true,
            native_fua: self.mistake == Mistake::NoFua,
            read_only: false,
            // Writes of odd pieces are copied, and so is what shares a sector with a write.
            overhead: (1 << 20) + (16 << 10),
        }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let size = u64::from(self.shape.block_size);
        match op {
            Op::Read { at, blocks } => {
                let into = ctx.alloc(blocks as usize * self.shape.block_size as usize);
                let read = self.disk.read(at.0 * size, into).await;
                return read.map(Bufs::from).map_err(|_| Error::Unreadable { at });
            }
            Op::Write { at, data, .. } => self.write(at, &data, &ctx).await?,
            Op::Zero { at, blocks, .. } | Op::Unmap { at, blocks } => {
                let end = at.0 + u64::from(blocks);
                let too_far = self.mistake == Mistake::ZeroTooFar && end < self.info().blocks;
                let end = end + u64::from(too_far);
                let zero = self.disk.zero(at.0 * size, (end - at.0) * size).await;
                zero.map_err(|_| Error::Unwritable { at })?;
            }
            Op::Map { blocks, .. } => {
                return Ok(block::Run { blocks, mapped: true }.into_bufs(&ctx));
            }
            Op::Flush if self.mistake == Mistake::NoFlush => {}
            Op::Flush => self.disk.sync().await.map_err(|_| Error::Gone)?,
        }
        Ok(Bufs::new())
    }
}

impl Bare {
    async fn write(&self, at: Lba, data: &Bufs, ctx: &Ctx) -> Result<(), Error> {
        let start = at.0 * u64::from(self.shape.block_size);
        let result = if self.mistake == Mistake::SharedSector {
            self.write_sectors(start, data, ctx).await
        } else {
            let fits = data.is_aligned(self.shape.disk.0 as usize);
            let data = if fits { data.clone() } else { copied(ctx, data) };
            self.disk.write(start, data).await.ok()
        };
        result.ok_or(Error::Unwritable { at })
    }

    /// The same in whole sectors of 4 KiB.
    async fn write_sectors(&self, start: u64, data: &Bufs, ctx: &Ctx) -> Option<()> {
        const SECTOR: u64 = 4096;
        let first = start / SECTOR * SECTOR;
        let end = (start + data.len() as u64).next_multiple_of(SECTOR);
        let len = usize::try_from(end - first).ok()?;
        let old = self.disk.read(first, ctx.alloc(len)).await.ok()?;
        let mut bytes = Bufs::from(old).to_vec();
        let from = usize::try_from(start - first).ok()?;
        data.copy_to(&mut bytes[from..from + data.len()]);
        self.disk.write(first, copy_in(ctx.credit(), &bytes)).await.ok()
    }
}

/// The same bytes in memory that a disk takes.
fn copied(ctx: &Ctx, data: &Bufs) -> Bufs {
    copy_in(ctx.credit(), &data.to_vec())
}
