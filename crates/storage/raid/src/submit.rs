//! Operations of clients: which rows they concern, and which file carries them out.

use block::{BlockStatus, Bufs, Ctx, Error, Info, Layer, Op};
use geometry::ROW_BYTES;

use super::volume::RaidVolume;

/// Largest data operation, in bytes.
const MAX_TRANSFER_BYTES: u32 = 1 << 20;

impl Layer for RaidVolume {
    fn name(&self) -> &'static str {
        "raid"
    }

    fn info(&self) -> Info {
        let block = self.block_size;
        let extent = u32::try_from(self.extent_bytes() / u64::from(block)).unwrap_or(0);
        Info {
            block_size: block,
            blocks: self.bytes.get() / u64::from(block),
            metadata_blocks: 0,
            physical_block_size: ROW_BYTES,
            max_transfer_blocks: MAX_TRANSFER_BYTES / block,
            unmap_granularity_blocks: if self.is_thick { 0 } else { extent },
            unmap_zeroes: true,
            volatile_cache: self.array.members.is_volatile(),
            native_fua: true,
            read_only: false,
            // A read that does not begin and end on row boundaries.
            overhead_bytes: if block < ROW_BYTES { ROW_BYTES } else { 0 },
        }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let Some(range) = op.range(self.block_size) else {
            return self.array.flush().await.map(|()| Bufs::new());
        };
        self.submitted_ops.set(self.submitted_ops.get() + 1);
        let bytes = self.byte_range(range);
        match op {
            Op::Read { .. } => return self.read(bytes, range.at, &ctx).await,
            Op::Write { data, fua, .. } => self.write(bytes.start, data, fua, range.at).await?,
            // Rare operations are boxed, to keep the future of a read small.
            Op::Zero { unmap: false, fua, .. } => {
                Box::pin(self.zero(bytes, fua, range.at, &ctx)).await?;
            }
            Op::Zero { fua, .. } => Box::pin(self.unmap(bytes, fua, range.at, &ctx)).await?,
            Op::Unmap { .. } => Box::pin(self.unmap(bytes, false, range.at, &ctx)).await?,
            Op::BlockStatus { .. } => {
                let (bytes, mapped) = self.mapped_prefix(&bytes);
                let blocks = bytes / u64::from(self.block_size);
                let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
                return Ok(BlockStatus { blocks, mapped }.into_bufs(&ctx));
            }
            Op::Flush => {}
        }
        Ok(Bufs::new())
    }
}
