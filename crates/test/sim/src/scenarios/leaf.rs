//! A block device directly on a disk, correct or with one of the typical mistakes of leaf devices.

use std::path::Path;

use block::{Bufs, Ctx, Dev, Error, Info, Layer, Lba, Op};
use rt::Core;
use rt::buf::copy_in;
use rt::disk::{Disk, OpenOptions};
use rt::sim::{Host, World};

use super::storage::{DISK, StackGeometry, StorageStack};
use super::volume;

/// A mistake of the leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// It is correct.
    None,
    /// Acknowledges a flush without doing it.
    NoFlush,
    /// Reports a write as durable that is not.
    NoFua,
    /// Replaces part of a block by read-modify-write of the disk's atomic write unit; a neighbour
    /// may do the same at the same time.
    SharedSector,
    /// Zeroing also clears the next block.
    ZeroTooFar,
}

/// The correct leaf, for scenarios of layers above it.
pub(super) async fn volume_on_leaf(world: World) -> Result<(), String> {
    volume::run(world, LeafStack(Mistake::None)).await
}

/// A stack of nothing but the leaf.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafStack(pub(crate) Mistake);

impl StorageStack for LeafStack {
    async fn prepare(&self, _host: &Host, _shape: StackGeometry) -> Result<(), String> {
        Ok(())
    }

    async fn open(&self, core: Core, geometry: StackGeometry) -> Result<Dev, String> {
        let disk = core.open_disk(Path::new(DISK), OpenOptions::new()).await;
        let disk = disk.map_err(|e| e.to_string())?;
        Ok(Dev::new(BareDisk { disk, geometry, mistake: self.0 }))
    }
}

struct BareDisk {
    disk: Disk,
    geometry: StackGeometry,
    mistake: Mistake,
}

impl Layer for BareDisk {
    fn name(&self) -> &'static str {
        "bare"
    }

    fn info(&self) -> Info {
        Info {
            block_size: self.geometry.block_size,
            blocks: self.geometry.bytes / u64::from(self.geometry.block_size),
            metadata_blocks: 0,
            physical_block_size: self.geometry.disk.1.max(self.geometry.block_size),
            max_transfer_blocks: (1 << 20) / self.geometry.block_size,
            unmap_granularity_blocks: 1,
            unmap_zeroes: true,
            volatile_cache: true,
            native_fua: self.mistake == Mistake::NoFua,
            read_only: false,
            // Writes of odd pieces are copied, and so is data that shares a sector with a write.
            overhead_bytes: (1 << 20) + (16 << 10),
        }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let size = u64::from(self.geometry.block_size);
        match op {
            Op::Read { at, blocks } => {
                let into = ctx.alloc(blocks as usize * self.geometry.block_size as usize);
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
            Op::BlockStatus { blocks, .. } => {
                return Ok(block::BlockStatus { blocks, mapped: true }.into_bufs(&ctx));
            }
            Op::Flush if self.mistake == Mistake::NoFlush => {}
            Op::Flush => self.disk.sync().await.map_err(|_| Error::Gone)?,
        }
        Ok(Bufs::new())
    }
}

impl BareDisk {
    async fn write(&self, at: Lba, data: &Bufs, ctx: &Ctx) -> Result<(), Error> {
        let start = at.0 * u64::from(self.geometry.block_size);
        let result = if self.mistake == Mistake::SharedSector {
            self.write_sectors(start, data, ctx).await
        } else {
            let fits = data.is_aligned(self.geometry.disk.0 as usize);
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

/// The same bytes in memory that the disk can transfer.
fn copied(ctx: &Ctx, data: &Bufs) -> Bufs {
    copy_in(ctx.credit(), &data.to_vec())
}
