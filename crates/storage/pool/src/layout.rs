//! What of a member is where: arithmetic, and nothing else.

use checksum::place::Place;
use checksum::stored::LIST_BLOCKS;
use geometry::{ROW_BYTES, Shape};
use raid::RING_BLOCKS;

use super::metadata::{MAX_UNITS, unit_bytes};

/// Length in bytes of a block of everything that is no data.
pub const BLOCK_BYTES: u64 = ROW_BYTES as u64;

/// Where the labels lie, and nothing else.
const LABELS_BYTES: u64 = 1 << 20;

/// Length of the journal in bytes: a part of the member, and within these bounds.
const JOURNAL_PART: u64 = 1024;
const JOURNAL_BYTES: std::ops::RangeInclusive<u64> = (4 << 20)..=(64 << 20);

/// Room for a snapshot in blocks: so many, and one for each unit of the member.
const ROOM_BLOCKS: u64 = 32;

/// Everything that is aligned begins at a multiple of this.
const ALIGN: u64 = 64 << 10;

/// What of a member is where, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of it that are used.
    pub bytes: u64,
    /// Where the journal begins.
    pub journal_at: u64,
    /// Its length in blocks.
    pub journal_blocks: u32,
    /// Where the two snapshots begin.
    pub snapshots_at: [u64; 2],
    /// Room for each in blocks.
    pub room: u32,
    /// Where the rings begin.
    pub rings_at: u64,
    /// Where the lists of what is being written begin, if the pool has checksums.
    pub lists_at: Option<u64>,
    /// Where the units begin.
    pub units_at: u64,
    /// Length of a unit in bytes.
    pub unit_bytes: u64,
    /// How many units there are, one at least.
    pub units: u32,
}

impl Layout {
    /// That of a member of so many bytes in a pool of such extents and so many rings, with checksums or without; none if it is too
    /// small.
    #[must_use]
    pub fn of(bytes: u64, shape: &Shape, rings: u16, checksums: bool) -> Option<Self> {
        let unit_bytes = unit_bytes(shape);
        let (least, most) = (*JOURNAL_BYTES.start(), *JOURNAL_BYTES.end());
        let journal = (bytes / JOURNAL_PART).clamp(least, most) / BLOCK_BYTES * BLOCK_BYTES;
        let fixed = fixed_bytes(journal, rings, checksums);
        let lists = lists_bytes(rings, checksums);
        let rings = rings_bytes(rings);
        let units = bytes.checked_sub(fixed)? / (unit_bytes + 2 * BLOCK_BYTES);
        let units = u32::try_from(units).unwrap_or(MAX_UNITS).min(MAX_UNITS);
        if units == 0 {
            return None;
        }
        let room = u32::try_from(ROOM_BLOCKS).ok()? + units;
        let first = LABELS_BYTES + journal;
        let second = first + u64::from(room) * BLOCK_BYTES;
        let rings_at = (second + u64::from(room) * BLOCK_BYTES).next_multiple_of(ALIGN);
        Some(Self {
            bytes,
            journal_at: LABELS_BYTES,
            journal_blocks: u32::try_from(journal / BLOCK_BYTES).ok()?,
            snapshots_at: [first, second],
            room,
            rings_at,
            lists_at: checksums.then_some(rings_at + rings),
            units_at: (rings_at + rings + lists).next_multiple_of(ALIGN),
            unit_bytes,
            units,
        })
    }

    /// The fewest bytes of a member in such a pool.
    #[must_use]
    pub fn least_bytes(shape: &Shape, rings: u16, checksums: bool) -> u64 {
        fixed_bytes(*JOURNAL_BYTES.start(), rings, checksums) + unit_bytes(shape) + 2 * BLOCK_BYTES
    }

    /// Where a block of the journal lies.
    #[must_use]
    pub fn journal_block_at(&self, block: u32) -> u64 {
        self.journal_at + u64::from(block) * BLOCK_BYTES
    }

    /// Where a unit begins.
    #[must_use]
    pub fn unit_at(&self, unit: u32) -> u64 {
        self.units_at + u64::from(unit) * self.unit_bytes
    }

    /// What of it has checksums, and where the list of a ring lies, in blocks of 4 KiB; none if nothing has.
    #[must_use]
    pub fn checked(&self, ring: u16) -> Option<(Place, u64)> {
        let lists_at = self.lists_at? / BLOCK_BYTES;
        let rows = u32::try_from(self.unit_bytes / BLOCK_BYTES).ok()?;
        let place = Place { at: self.units_at / BLOCK_BYTES, rows, units: self.units };
        Some((place, lists_at + u64::from(ring) * LIST_BLOCKS))
    }

    /// Where a ring begins, in blocks of 4 KiB.
    #[must_use]
    pub fn ring_at(&self, ring: u16) -> u64 {
        self.rings_at / BLOCK_BYTES + u64::from(ring) * RING_BLOCKS
    }
}

/// What a member takes before it has a unit.
fn fixed_bytes(journal: u64, rings: u16, checksums: bool) -> u64 {
    let rings_and_lists = rings_bytes(rings) + lists_bytes(rings, checksums);
    LABELS_BYTES + journal + rings_and_lists + 2 * (ROOM_BLOCKS * BLOCK_BYTES + ALIGN)
}

fn rings_bytes(rings: u16) -> u64 {
    u64::from(rings) * RING_BLOCKS * BLOCK_BYTES
}

fn lists_bytes(rings: u16, checksums: bool) -> u64 {
    if checksums { u64::from(rings) * LIST_BLOCKS * BLOCK_BYTES } else { 0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metadata::tests::raid5;
    use crate::metadata::{PIECE_BYTES, STRIP_BYTES, placed_bytes};
    use geometry::Level;
    use raid::stored_map;

    proptest! {
        #[test]
        fn nothing_lies_in_anothers_place(bytes in 0u64..1 << 46, rings in 1u16..=16, checksums in any::<bool>()) {
            let Some(layout) = Layout::of(bytes, &raid5(5), rings, checksums) else {
                prop_assert!(bytes < Layout::least_bytes(&raid5(5), rings, checksums));
                return Ok(());
            };
            let room = u64::from(layout.room) * BLOCK_BYTES;
            let journal = u64::from(layout.journal_blocks) * BLOCK_BYTES;
            prop_assert!(layout.journal_at + journal <= layout.snapshots_at[0]);
            prop_assert!(layout.snapshots_at[0] + room <= layout.snapshots_at[1]);
            prop_assert!(layout.snapshots_at[1] + room <= layout.rings_at);
            prop_assert!(layout.ring_at(rings) * BLOCK_BYTES <= layout.units_at);
            if let Some((place, list)) = layout.checked(rings - 1) {
                prop_assert!(list >= layout.ring_at(rings));
                prop_assert!(list + LIST_BLOCKS <= place.at);
            }
            prop_assert!(layout.unit_at(layout.units) <= bytes, "{layout:?}");
        }
    }

    /// Behind the strips of a piece there is room for two maps and for the sums of all.
    #[test]
    fn sums_and_maps_do_not_meet() {
        for level in [Level::Copies(1), Level::Copies(2), Level::Parity, Level::DoubleParity] {
            for (piece, strip) in PIECE_BYTES.into_iter().flat_map(|piece| {
                let strips = [*STRIP_BYTES.start(), 64 << 10, *STRIP_BYTES.end()];
                strips.map(|strip| (piece, strip))
            }) {
                let rows = u32::try_from(strip / BLOCK_BYTES).unwrap();
                let stripes = u32::try_from(piece / strip).unwrap();
                let shape = Shape::new(level, 6, rows, stripes).unwrap();
                let layout = Layout::of(1 << 40, &shape, 1, true).unwrap();
                let (place, _) = layout.checked(0).unwrap();
                let used = placed_bytes(&shape) / BLOCK_BYTES;
                let used = used + 2 * u64::from(stored_map::rows(&shape));
                assert!(used <= place.summed().into(), "{shape:?}: {used} {place:?}");
            }
        }
    }

    #[test]
    fn the_smallest_member_has_a_unit() {
        for checksums in [false, true] {
            let least = Layout::least_bytes(&raid5(5), 2, checksums);
            let of = |bytes| Layout::of(bytes, &raid5(5), 2, checksums);
            assert_eq!(of(least).map(|l| l.units), Some(1));
            assert_eq!(of(least - 1), None);
        }
    }
}
