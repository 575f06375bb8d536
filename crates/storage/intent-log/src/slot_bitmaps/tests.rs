use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{REGIONS_PER_CELL, page_to_bytes, parse_page};

const LOG: LogId = LogId(42);
const A: Slot = Slot::ALL[0];
const B: Slot = Slot::ALL[1];
const C: Slot = Slot::ALL[2];

/// A volume of `regions` regions of 64 KiB, the last of which is shorter.
fn geometry(regions: u64) -> Geometry {
    Geometry::new(regions * (64 << 10) - 512).unwrap()
}

fn regions(marks: &SlotBitmaps, slot: Slot) -> Vec<u32> {
    marks.dirty_regions(slot).map(|region| region.0).collect()
}

/// The bytes of all pages.
fn pages(marks: &SlotBitmaps) -> Vec<[u8; 4096]> {
    let cells: Vec<Cell> = (0..).map_while(|index| marks.cell(LOG, index, 1)).collect();
    assert_eq!(cells.len(), marks.geometry().cell_count() as usize);
    cells.chunks(CELLS_PER_PAGE).map(page_to_bytes).collect()
}

#[test]
fn bits_are_set_and_cleared_in_one_slot() {
    let mut marks = SlotBitmaps::none(geometry(1281));
    for region in [0, 63, 64, 1279, 1280] {
        marks.set(B, Region(region));
    }
    assert_eq!(regions(&marks, B), [0, 63, 64, 1279, 1280]);
    assert_eq!((marks.count(A), marks.count(B), marks.count(C)), (0, 5, 0));
    marks.clear(B, Region(64));
    assert!(!marks.is_set(B, Region(64)) && marks.is_set(B, Region(63)));
    assert!(!marks.is_set(A, Region(63)));
    assert_eq!(regions(&marks, B), [0, 63, 1279, 1280]);
}

#[test]
fn marking_all_marks_exactly_the_regions_of_the_volume() {
    for count in [1, 63, 64, 65, 1279, 1280, 1281, 10240] {
        let all = SlotBitmaps::all(geometry(count));
        for slot in Slot::ALL {
            assert_eq!(u64::from(all.count(slot)), count);
            assert_eq!(all.dirty_regions(slot).count() as u64, count);
        }
    }
}

#[test]
#[should_panic(expected = "a region of the volume")]
fn a_region_past_the_end_panics() {
    SlotBitmaps::none(geometry(5)).set(A, Region(5));
}

#[test]
fn a_bad_cell_marks_all_its_regions_in_all_slots() {
    let geometry = geometry(3 * u64::from(REGIONS_PER_CELL) - 7);
    let mut written = SlotBitmaps::none(geometry);
    written.set(A, Region(3));
    written.set(C, Region(2600));
    let mut bytes = pages(&written)[0];
    bytes[512 + 100] ^= 1;
    let mut read = SlotBitmaps::none(geometry);
    let bad = read.add_page(0, &parse_page(&bytes, LOG, 0));
    assert_eq!(bad, [(1, CellError::Damaged)]);
    let whole_cell: Vec<u32> = (1280..2560).collect();
    assert_eq!(regions(&read, A), [vec![3], whole_cell.clone()].concat());
    assert_eq!(regions(&read, B), whole_cell);
    assert_eq!(regions(&read, C), [whole_cell, vec![2600]].concat());

    let unreadable = std::array::from_fn(|_| Err(CellError::Unreadable));
    assert_eq!(read.add_page(0, &unreadable).len(), 3, "places behind the last cell mean nothing");
    assert_eq!(read, SlotBitmaps::all(geometry));
    assert_eq!(read.add_page(1, &unreadable), []);
    assert_eq!(read.add_page(u32::MAX, &unreadable), []);
}

#[test]
fn bits_past_the_last_region_are_dropped() {
    let geometry = geometry(5);
    let mut cell = SlotBitmaps::none(geometry).cell(LOG, 0, 1).unwrap();
    cell.slots[0][0] = 0b110_0001;
    cell.slots[0][7] = 1;
    let mut marks = SlotBitmaps::none(geometry);
    let found = parse_page(&page_to_bytes(&[cell]), LOG, 0);
    assert_eq!(marks.add_page(0, &found), []);
    assert_eq!(regions(&marks, A), [0]);
}

#[test]
fn a_union_of_regions_of_other_sizes_covers_their_bytes() {
    let bytes = (256 << 10) + 512;
    let mut fine = SlotBitmaps::none(Geometry::with_shift(bytes, 16).unwrap());
    let mut coarse = SlotBitmaps::none(Geometry::with_shift(bytes, 17).unwrap());
    fine.set(A, Region(1));
    fine.set(A, Region(4));
    coarse.union(B, &fine, A);
    assert_eq!(regions(&coarse, B), [0, 2]);
    fine.union(C, &coarse, B);
    assert_eq!(regions(&fine, C), [0, 1, 4]);
    // A smaller volume has no region for what lies past its end.
    let mut small = SlotBitmaps::none(Geometry::new(65 << 10).unwrap());
    small.union(A, &SlotBitmaps::all(fine.geometry()), A);
    assert_eq!(regions(&small, A), [0, 1]);
    assert_eq!(regions(&fine, B), [0u32; 0]);
}

proptest! {
    #[test]
    fn bitmaps_behave_like_sets(
        count in 1u64..4000,
        changes in proptest::collection::vec((0usize..3, any::<u32>(), any::<bool>()), 0..200),
    ) {
        let mut marks = SlotBitmaps::none(geometry(count));
        let mut sets: [BTreeSet<u32>; SLOTS] = Default::default();
        for (slot, region, set) in changes {
            let region = region % count as u32;
            if set {
                marks.set(Slot::ALL[slot], Region(region));
                sets[slot].insert(region);
            } else {
                marks.clear(Slot::ALL[slot], Region(region));
                sets[slot].remove(&region);
            }
        }
        for slot in Slot::ALL {
            let set = &sets[slot.index()];
            prop_assert_eq!(regions(&marks, slot), set.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(marks.count(slot) as usize, set.len());
        }
        let mut read = SlotBitmaps::none(marks.geometry());
        for (page, bytes) in (0..).zip(pages(&marks)) {
            prop_assert_eq!(read.add_page(page, &parse_page(&bytes, LOG, page)), []);
        }
        prop_assert_eq!(&read, &marks, "what is written is read");

        let mut joined = marks.clone();
        joined.union(A, &marks, B);
        let both: Vec<u32> = sets[0].union(&sets[1]).copied().collect();
        prop_assert_eq!(regions(&joined, A), both);
        joined.union_of_all(C);
        let any: BTreeSet<u32> = sets.iter().flatten().copied().collect();
        prop_assert_eq!(regions(&joined, C), any.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn loading_a_page_only_adds_bits(
        count in 1u64..12000,
        noise in proptest::collection::vec(any::<u8>(), 4096),
        noisy: u8,
        region: u32,
    ) {
        let mut marks = SlotBitmaps::none(geometry(count));
        let region = Region(region % count as u32);
        marks.set(B, region);
        let mut bytes = pages(&marks)[0];
        for n in (0..CELLS_PER_PAGE).filter(|n| noisy >> n & 1 == 1) {
            bytes[n * 512..(n + 1) * 512].copy_from_slice(&noise[n * 512..(n + 1) * 512]);
        }
        let mut read = SlotBitmaps::none(marks.geometry());
        read.set(A, Region(0));
        read.add_page(0, &parse_page(&bytes, LOG, 0));
        prop_assert!(read.is_set(A, Region(0)));
        prop_assert!(read.is_set(B, region) || region.0 >= 8 * REGIONS_PER_CELL);
    }
}
