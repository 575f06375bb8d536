//! Limits of one command, as VPD page B0h reports them (SBC-3 6.5).

use block::Info;

/// Most descriptors of one UNMAP: so its parameter list fits a page of memory.
pub(crate) const MAX_UNMAP_DESCRIPTORS: u16 = 255;

/// Most blocks of one UNMAP in all.
pub(crate) const MAX_UNMAP_BLOCKS: u32 = 1 << 20;

/// Most blocks of one WRITE SAME. Not more than WRITE SAME(10) can name, and a power of two, so
/// that initiators that use it keep their alignment.
pub(crate) const MAX_WRITE_SAME_BLOCKS: u32 = 1 << 15;

/// Longest parameter list of any command, in bytes.
pub(crate) const MAX_PARAMETER_LIST: u32 = 4096;

/// Bytes that any medium writes atomically. Whether image files, and the other replicas of a
/// mirror, can write more is unknown.
const ATOMIC_SECTOR_BYTES: u32 = 512;

/// Limits in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) max_transfer: u32,
    /// COMPARE AND WRITE carries its blocks twice.
    pub(crate) max_compare_and_write: u8,
    /// Zero if the unit cannot unmap.
    pub(crate) max_unmap: u32,
    /// Zero if the unit cannot unmap.
    pub(crate) max_unmap_descriptors: u16,
    pub(crate) max_write_same: u32,
    /// Blocks that every medium below writes atomically: the length and the alignment of WRITE
    /// ATOMIC. Zero if that is less than a block.
    pub(crate) max_atomic: u32,
}

impl Limits {
    /// Of a unit that moves at most `max_transfer_blocks` with one command, on a device with these
    /// properties.
    pub(crate) fn new(max_transfer_blocks: u32, info: &Info) -> Self {
        let max_transfer = max_transfer_blocks.min(info.max_transfer_blocks).max(1);
        let can_unmap = info.unmap_granularity_blocks > 0;
        Self {
            max_transfer,
            max_compare_and_write: u8::try_from((max_transfer / 2).max(1)).unwrap_or(u8::MAX),
            max_unmap: if can_unmap { MAX_UNMAP_BLOCKS } else { 0 },
            max_unmap_descriptors: if can_unmap { MAX_UNMAP_DESCRIPTORS } else { 0 },
            max_write_same: MAX_WRITE_SAME_BLOCKS,
            max_atomic: ATOMIC_SECTOR_BYTES / info.block_size.max(1),
        }
    }
}
