//! The layout of a member's areas. Pure.

use checksum::format::DIRTY_LIST_BLOCKS;
use checksum::layout::ChecksumLayout;
use geometry::{ROW_BYTES, RaidGeometry};
use pool_metadata::{MAX_PHYSICAL_EXTENTS, physical_extent_bytes};
use raid::RING_BLOCKS;

/// Length of a block of all metadata areas, in bytes.
pub const BLOCK_BYTES: u64 = ROW_BYTES as u64;

/// The area of the labels, in bytes.
const LABEL_AREA_BYTES: u64 = 1 << 20;

/// The journal's share of the member; its length is kept within the bounds below.
const JOURNAL_FRACTION: u64 = 1024;
const JOURNAL_BYTES: std::ops::RangeInclusive<u64> = (4 << 20)..=(64 << 20);

/// Blocks of a snapshot area, before one more for each physical extent of the member.
const MIN_SNAPSHOT_BLOCKS: u64 = 32;

/// Alignment of the aligned areas, in bytes.
const AREA_ALIGNMENT: u64 = 64 << 10;

/// Offsets and sizes of a member's areas, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberLayout {
    /// Bytes of it that are used.
    pub used_bytes: u64,
    /// Offset of the journal.
    pub journal_at: u64,
    /// Length of the journal, in blocks.
    pub journal_blocks: u32,
    /// Offsets of the two snapshot areas.
    pub snapshots_at: [u64; 2],
    /// Size of each, in blocks.
    pub snapshot_blocks: u32,
    /// Offset of the rings.
    pub log_rings_at: u64,
    /// Offset of the dirty lists, if the pool has checksums.
    pub dirty_lists_at: Option<u64>,
    /// Offset of the first physical extent.
    pub extents_at: u64,
    /// Length of a physical extent, in bytes.
    pub physical_extent_bytes: u64,
    /// How many physical extents there are; at least one.
    pub physical_extents: u32,
}

impl MemberLayout {
    /// The layout of a member of `bytes` bytes in a pool of this geometry, with so many rings, with
    /// or without checksums; `None` if it is too small.
    #[must_use]
    pub fn compute(
        bytes: u64,
        geometry: &RaidGeometry,
        rings: u16,
        checksums: bool,
    ) -> Option<Self> {
        let extent_bytes = physical_extent_bytes(geometry);
        let (least, most) = (*JOURNAL_BYTES.start(), *JOURNAL_BYTES.end());
        let journal = (bytes / JOURNAL_FRACTION).clamp(least, most) / BLOCK_BYTES * BLOCK_BYTES;
        let fixed = fixed_area_bytes(journal, rings, checksums);
        let lists = dirty_lists_bytes(rings, checksums);
        let rings = log_rings_bytes(rings);
        let physical_extents = bytes.checked_sub(fixed)? / (extent_bytes + 2 * BLOCK_BYTES);
        let physical_extents = u32::try_from(physical_extents)
            .unwrap_or(MAX_PHYSICAL_EXTENTS)
            .min(MAX_PHYSICAL_EXTENTS);
        if physical_extents == 0 {
            return None;
        }
        let snapshot_blocks = u32::try_from(MIN_SNAPSHOT_BLOCKS).ok()? + physical_extents;
        let first = LABEL_AREA_BYTES + journal;
        let second = first + u64::from(snapshot_blocks) * BLOCK_BYTES;
        let rings_at =
            (second + u64::from(snapshot_blocks) * BLOCK_BYTES).next_multiple_of(AREA_ALIGNMENT);
        Some(Self {
            used_bytes: bytes,
            journal_at: LABEL_AREA_BYTES,
            journal_blocks: u32::try_from(journal / BLOCK_BYTES).ok()?,
            snapshots_at: [first, second],
            snapshot_blocks,
            log_rings_at: rings_at,
            dirty_lists_at: checksums.then_some(rings_at + rings),
            extents_at: (rings_at + rings + lists).next_multiple_of(AREA_ALIGNMENT),
            physical_extent_bytes: extent_bytes,
            physical_extents,
        })
    }

    /// The smallest size of a member in such a pool, in bytes.
    #[must_use]
    pub fn min_bytes(geometry: &RaidGeometry, rings: u16, checksums: bool) -> u64 {
        fixed_area_bytes(*JOURNAL_BYTES.start(), rings, checksums)
            + physical_extent_bytes(geometry)
            + 2 * BLOCK_BYTES
    }

    /// Offset of a journal block.
    #[must_use]
    pub fn journal_block_at(&self, block: u32) -> u64 {
        self.journal_at + u64::from(block) * BLOCK_BYTES
    }

    /// Offset of a physical extent.
    #[must_use]
    pub fn physical_extent_at(&self, index: u32) -> u64 {
        self.extents_at + u64::from(index) * self.physical_extent_bytes
    }

    /// The layout of the checksummed area, and the first block of a ring's dirty list, in blocks of
    /// 4 KiB; `None` without checksums.
    #[must_use]
    pub fn checksum_layout(&self, ring: u16) -> Option<(ChecksumLayout, u64)> {
        let lists_at = self.dirty_lists_at? / BLOCK_BYTES;
        let rows = u32::try_from(self.physical_extent_bytes / BLOCK_BYTES).ok()?;
        let checksum_layout = ChecksumLayout {
            first_row: self.extents_at / BLOCK_BYTES,
            unit_rows: rows,
            units: self.physical_extents,
        };
        Some((checksum_layout, lists_at + u64::from(ring) * DIRTY_LIST_BLOCKS))
    }

    /// First block of a ring, in blocks of 4 KiB.
    #[must_use]
    pub fn ring_first_block(&self, ring: u16) -> u64 {
        self.log_rings_at / BLOCK_BYTES + u64::from(ring) * RING_BLOCKS
    }
}

/// Bytes that a member needs apart from its physical extents.
fn fixed_area_bytes(journal: u64, rings: u16, checksums: bool) -> u64 {
    let rings_and_lists = log_rings_bytes(rings) + dirty_lists_bytes(rings, checksums);
    LABEL_AREA_BYTES
        + journal
        + rings_and_lists
        + 2 * (MIN_SNAPSHOT_BLOCKS * BLOCK_BYTES + AREA_ALIGNMENT)
}

fn log_rings_bytes(rings: u16) -> u64 {
    u64::from(rings) * RING_BLOCKS * BLOCK_BYTES
}

fn dirty_lists_bytes(rings: u16, checksums: bool) -> u64 {
    if checksums { u64::from(rings) * DIRTY_LIST_BLOCKS * BLOCK_BYTES } else { 0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use geometry::Redundancy;
    use pool_metadata::samples::raid5;
    use pool_metadata::{COLUMN_DATA_BYTES, STRIP_BYTES, column_bytes};
    use raid::stripe_map_format;

    proptest! {
        #[test]
        fn areas_do_not_overlap(bytes in 0u64..1 << 46, rings in 1u16..=16, checksums in any::<bool>()) {
            let Some(layout) = MemberLayout::compute(bytes, &raid5(5), rings, checksums) else {
                prop_assert!(bytes < MemberLayout::min_bytes(&raid5(5), rings, checksums));
                return Ok(());
            };
            let snapshot_bytes = u64::from(layout.snapshot_blocks) * BLOCK_BYTES;
            let journal = u64::from(layout.journal_blocks) * BLOCK_BYTES;
            prop_assert!(layout.journal_at + journal <= layout.snapshots_at[0]);
            prop_assert!(layout.snapshots_at[0] + snapshot_bytes <= layout.snapshots_at[1]);
            prop_assert!(layout.snapshots_at[1] + snapshot_bytes <= layout.log_rings_at);
            prop_assert!(layout.ring_first_block(rings) * BLOCK_BYTES <= layout.extents_at);
            if let Some((checksum_layout, list)) = layout.checksum_layout(rings - 1) {
                prop_assert!(list >= layout.ring_first_block(rings));
                prop_assert!(list + DIRTY_LIST_BLOCKS <= checksum_layout.first_row);
            }
            prop_assert!(layout.physical_extent_at(layout.physical_extents) <= bytes, "{layout:?}");
        }
    }

    /// After the strips of a column there is space for two stripe maps and all checksums.
    #[test]
    fn checksum_blocks_and_stripe_maps_do_not_overlap() {
        for level in [
            Redundancy::Copies(1),
            Redundancy::Copies(2),
            Redundancy::Parity,
            Redundancy::DoubleParity,
        ] {
            for (column, strip) in COLUMN_DATA_BYTES.into_iter().flat_map(|column| {
                let strips = [*STRIP_BYTES.start(), 64 << 10, *STRIP_BYTES.end()];
                strips.map(|strip| (column, strip))
            }) {
                let rows = u32::try_from(strip / BLOCK_BYTES).unwrap();
                let stripes = u32::try_from(column / strip).unwrap();
                let geometry = RaidGeometry::new(level, 6, rows, stripes).unwrap();
                let layout = MemberLayout::compute(1 << 40, &geometry, 1, true).unwrap();
                let (checksum_layout, _) = layout.checksum_layout(0).unwrap();
                let used = column_bytes(&geometry) / BLOCK_BYTES;
                let used = used + 2 * u64::from(stripe_map_format::map_rows(&geometry));
                assert!(
                    used <= checksum_layout.checked_rows().into(),
                    "{geometry:?}: {used} {checksum_layout:?}"
                );
            }
        }
    }

    #[test]
    fn the_smallest_member_has_one_extent() {
        for checksums in [false, true] {
            let least = MemberLayout::min_bytes(&raid5(5), 2, checksums);
            let of = |bytes| MemberLayout::compute(bytes, &raid5(5), 2, checksums);
            assert_eq!(of(least).map(|l| l.physical_extents), Some(1));
            assert_eq!(of(least - 1), None);
        }
    }
}
