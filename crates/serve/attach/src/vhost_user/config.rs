//! A disk as its guest sees it: features and configuration space (Virtio 1.2, 5.2.3 and 5.2.4).

use block::Info;
use virtio_bindings::bindings::virtio_blk as blk;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes, KnownLayout};

/// Unit of all addresses and lengths in virtio-blk, in bytes, whatever the disk's block size.
pub const SECTOR_BYTES: u32 = 512;

/// Most data descriptors of a request, and most bytes in one, that drivers are asked to respect.
/// They limit nothing here: a request is executed in pieces, each with its own memory.
pub const SEG_MAX: u32 = 126;
/// See [`SEG_MAX`].
pub const SIZE_MAX: u32 = 1 << 20;

/// Most ranges of one discard.
pub const MAX_DISCARD_RANGES: u32 = 64;

/// Longest range of a discard or write-zeroes, in sectors: 4 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 23;

/// Features, as a set of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// VHOST_USER_F_PROTOCOL_FEATURES: the monitor negotiates protocol features.
    pub const PROTOCOL: u32 = 30;

    /// Features that a disk offers.
    #[must_use]
    pub fn of(info: &Info, read_only: bool, rings: u16) -> Self {
        let mut all = Self(0);
        for bit in [
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
            Self::PROTOCOL,
            blk::VIRTIO_BLK_F_SIZE_MAX,
            blk::VIRTIO_BLK_F_SEG_MAX,
            blk::VIRTIO_BLK_F_BLK_SIZE,
            blk::VIRTIO_BLK_F_TOPOLOGY,
            blk::VIRTIO_BLK_F_FLUSH,
        ] {
            all = all.with(bit);
        }
        if rings > 1 {
            all = all.with(blk::VIRTIO_BLK_F_MQ);
        }
        if read_only {
            return all.with(blk::VIRTIO_BLK_F_RO);
        }
        if info.unmap_granularity_blocks > 0 {
            all = all.with(blk::VIRTIO_BLK_F_DISCARD);
        }
        all.with(blk::VIRTIO_BLK_F_WRITE_ZEROES).with(blk::VIRTIO_BLK_F_CONFIG_WCE)
    }

    /// With the feature of this number.
    #[must_use]
    pub fn with(self, bit: u32) -> Self {
        Self(self.0 | 1 << bit)
    }

    /// Whether it has the feature of this number.
    #[must_use]
    pub fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Whether `other` has all features of this set.
    #[must_use]
    pub fn is_subset_of(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// Whether completed writes are durable while the driver does not enable a cache: a driver
    /// without flush support relies on it (5.2.5.2).
    #[must_use]
    pub fn is_write_through(self) -> bool {
        !self.has(blk::VIRTIO_BLK_F_FLUSH)
    }

    /// Whether both sides suppress notifications by event index (2.7.10).
    #[must_use]
    pub fn has_event_index(self) -> bool {
        self.has(VIRTIO_RING_F_EVENT_IDX)
    }
}

/// The part of the configuration space (5.2.4) that is used.
///
/// ```text
///  0 capacity (8) | 8 size_max (4) | 12 seg_max (4) | 16 geometry (4) | 20 blk_size (4)
/// 24 physical_block_exp | 25 alignment_offset | 26 min_io_size (2) | 28 opt_io_size (4)
/// 32 writeback | 33 unused | 34 num_queues (2)
/// 36 max_discard_sectors (4) | 40 max_discard_seg (4) | 44 discard_sector_alignment (4)
/// 48 max_write_zeroes_sectors (4) | 52 max_write_zeroes_seg (4) | 56 write_zeroes_may_unmap | 57 unused (3)
/// ```
#[derive(Clone, Copy, Debug, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    geometry: [u8; 4],
    blk_size: U32,
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: U16,
    opt_io_size: U32,
    writeback: u8,
    unused: u8,
    num_queues: U16,
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused_too: [u8; 3],
}

const _: () = assert!(size_of::<Config>() == 60);

impl Config {
    /// Offset of the one field that a driver may write, a byte.
    pub const WRITEBACK: u32 = 32;

    /// Length of the whole space in bytes; unused fields are zero.
    pub const SPACE: u32 = 256;

    /// The configuration of a disk. `writeback`: whether the driver has enabled a cache, which it
    /// flushes.
    #[must_use]
    pub fn of(info: &Info, writeback: bool, rings: u16) -> Self {
        let sectors_per_block = info.block_size / SECTOR_BYTES;
        let physical = (info.physical_block_size / info.block_size).max(1);
        let granularity = info.unmap_granularity_blocks;
        let discards = |n: u32| if granularity > 0 { n } else { 0 };
        Self {
            capacity: info.blocks.saturating_mul(sectors_per_block.into()).into(),
            size_max: SIZE_MAX.into(),
            seg_max: SEG_MAX.into(),
            geometry: [0; 4],
            blk_size: info.block_size.into(),
            physical_block_exp: u8::try_from(physical.ilog2()).unwrap_or(0),
            alignment_offset: 0,
            min_io_size: u16::try_from(physical).unwrap_or(1).into(),
            opt_io_size: 0.into(),
            writeback: writeback.into(),
            unused: 0,
            num_queues: rings.into(),
            max_discard_sectors: discards(MAX_RANGE_SECTORS).into(),
            max_discard_seg: discards(MAX_DISCARD_RANGES).into(),
            discard_sector_alignment: granularity.saturating_mul(sectors_per_block).into(),
            max_write_zeroes_sectors: MAX_RANGE_SECTORS.into(),
            max_write_zeroes_seg: 1.into(),
            write_zeroes_may_unmap: u8::from(granularity > 0),
            unused_too: [0; 3],
        }
    }

    /// A part of the space; `None` outside it.
    #[must_use]
    pub fn part(&self, offset: u32, size: u32) -> Option<Vec<u8>> {
        let end = offset.checked_add(size).filter(|end| *end <= Self::SPACE)?;
        let mut space = self.as_bytes().to_vec();
        space.resize(Self::SPACE as usize, 0);
        Some(space[offset as usize..end as usize].to_vec())
    }
}

#[cfg(test)]
mod tests {
    use block::{Dev, Mem, MemOptions};

    use super::*;

    fn info(block_size: u32) -> Info {
        Dev::new(Mem::new(MemOptions::new(block_size, 1000))).info()
    }

    #[test]
    fn sizes_are_in_sectors_whatever_the_block() {
        let (small, large) = (Config::of(&info(512), true, 1), Config::of(&info(4096), true, 4));
        assert_eq!((small.capacity.get(), large.capacity.get()), (1000, 8000));
        assert_eq!((small.physical_block_exp, large.physical_block_exp), (3, 0));
        assert_eq!((small.min_io_size.get(), large.min_io_size.get()), (8, 1));
        assert_eq!(small.discard_sector_alignment, large.discard_sector_alignment);
        assert_eq!(large.part(34, 2).unwrap(), [4, 0]);
        assert_eq!(large.part(Config::WRITEBACK, 1).unwrap(), [1]);
        assert_eq!(large.part(250, 6).unwrap(), [0; 6]);
        assert_eq!((large.part(250, 7), large.part(u32::MAX, 2)), (None, None));
    }

    #[test]
    fn unsupported_features_are_not_offered() {
        let info = info(512);
        let all = Features::of(&info, false, 2);
        let reads = Features::of(&info, true, 1);
        let rigid = Info { unmap_granularity_blocks: 0, ..info };
        assert!(all.has(blk::VIRTIO_BLK_F_DISCARD) && all.has(blk::VIRTIO_BLK_F_MQ));
        assert!(!Features::of(&rigid, false, 2).has(blk::VIRTIO_BLK_F_DISCARD));
        assert!(reads.has(blk::VIRTIO_BLK_F_RO) && !reads.has(blk::VIRTIO_BLK_F_WRITE_ZEROES));
        assert!(!reads.is_subset_of(all) && !all.is_write_through());
        assert_eq!(Config::of(&rigid, false, 1).part(36, 8).unwrap(), [0; 8]);
    }
}
