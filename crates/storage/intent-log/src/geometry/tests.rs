use proptest::prelude::*;

use super::*;

const KIB: u64 = 1 << 10;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Size of the volume, and what follows from it: shift, regions, cells, pages.
#[test]
fn volumes_at_the_boundaries() {
    let cases = [
        (512, 16, 1, 1, 1),
        (64 * KIB, 16, 1, 1, 1),
        (64 * KIB + 512, 16, 2, 1, 1),
        (1280 * 64 * KIB, 16, 1280, 1, 1),
        (1280 * 64 * KIB + 512, 16, 1281, 2, 1),
        (8 * 1280 * 64 * KIB, 16, 10240, 8, 1),
        (8 * 1280 * 64 * KIB + 4096, 16, 10241, 9, 2),
        (64 * GIB, 16, MAX_REGIONS, 820, 103),
        (64 * GIB + 512, 17, (1 << 19) + 1, 410, 52),
        (128 * GIB, 17, MAX_REGIONS, 820, 103),
        (128 * TIB + 4096, 28, (1 << 19) + 1, 410, 52),
        (256 * TIB, 28, MAX_REGIONS, 820, 103),
    ];
    for (bytes, shift, regions, cells, pages) in cases {
        let geometry = Geometry::new(bytes).unwrap();
        let found = (
            geometry.region_shift(),
            geometry.region_count(),
            geometry.cell_count(),
            geometry.page_count(),
        );
        assert_eq!(found, (shift, regions, cells, pages), "{bytes} bytes");
    }
}

#[test]
fn impossible_sizes_and_regions_are_refused() {
    for bytes in [0, 256 * TIB + 1, 256 * TIB + 512, 1 << 63, u64::MAX] {
        assert_eq!(Geometry::new(bytes), Err(LogGeometryError::Size(bytes)));
        assert_eq!(Geometry::with_shift(bytes, 28), Err(LogGeometryError::Size(bytes)));
    }
    for shift in [0, 15, 29, 63, 64, u32::MAX] {
        assert_eq!(Geometry::with_shift(GIB, shift), Err(LogGeometryError::Shift(shift)));
    }
    assert_eq!(Geometry::with_shift(64 * GIB + 512, 16), Err(LogGeometryError::Shift(16)));
    assert_eq!(Geometry::with_shift(256 * TIB, 27), Err(LogGeometryError::Shift(27)));
    // Larger regions than those of a new log.
    assert_eq!(Geometry::with_shift(64 * GIB, 17).unwrap().region_count(), MAX_REGIONS / 2);
    assert_eq!(Geometry::with_shift(512, 28).unwrap().region_count(), 1);
}

#[test]
fn pages_lie_between_the_superblocks_and_the_end_of_the_log() {
    let largest = Geometry::new(64 * GIB).unwrap();
    assert_eq!(largest.page_offset(0), Some(524 * KIB));
    assert_eq!(largest.page_offset(1), Some(528 * KIB));
    assert_eq!(largest.page_offset(102), Some(932 * KIB));
    assert_eq!(largest.page_offset(103), None);
    assert_eq!(largest.page_offset(u32::MAX), None);
    assert_eq!(LOG_END, 936 * KIB);
    let small = Geometry::new(512).unwrap();
    assert_eq!((small.page_offset(0), small.page_offset(1)), (Some(524 * KIB), None));
}

#[test]
fn spans_at_the_edges() {
    let geometry = Geometry::new(64 * KIB + 512).unwrap();
    let regions = |at, len| {
        let found = geometry.regions_in(at, len)?;
        Some(found.map(|region| region.0).collect::<Vec<_>>())
    };
    assert_eq!(regions(0, 1), Some(vec![0]));
    assert_eq!(regions(0, 64 * KIB), Some(vec![0]));
    assert_eq!(regions(64 * KIB - 1, 1), Some(vec![0]));
    assert_eq!(regions(64 * KIB - 1, 2), Some(vec![0, 1]));
    assert_eq!(regions(64 * KIB, 512), Some(vec![1]));
    assert_eq!(regions(0, 64 * KIB + 512), Some(vec![0, 1]));
    assert_eq!(regions(64 * KIB + 512, 0), Some(vec![]));
    assert_eq!(regions(0, 0), Some(vec![]));
    assert_eq!(regions(0, 64 * KIB + 513), None);
    assert_eq!(regions(64 * KIB + 513, 0), None);
    assert_eq!(regions(1, u64::MAX), None);
    assert_eq!(regions(u64::MAX, u64::MAX), None);
    assert_eq!(geometry.region_at(64 * KIB + 511), Some(Region(1)));
    assert_eq!(geometry.region_at(64 * KIB + 512), None);
    assert_eq!(geometry.region_at(u64::MAX), None);
    assert_eq!(geometry.region_range(Region(1)), Some(64 * KIB..64 * KIB + 512));
    assert_eq!(geometry.region_range(Region(2)), None);
    assert_eq!(geometry.region_range(Region(u32::MAX)), None);
    assert_eq!(geometry.bit_position(Region(2)), None);
}

proptest! {
    #[test]
    fn the_default_region_is_the_smallest_that_fits(bytes in sizes()) {
        let geometry = Geometry::new(bytes).unwrap();
        prop_assert!((1..=MAX_REGIONS).contains(&geometry.region_count()));
        prop_assert!(geometry.cell_count() <= MAX_CELLS);
        let covered = u64::from(geometry.region_count()) * geometry.region_bytes();
        prop_assert!(covered >= bytes && covered - bytes < geometry.region_bytes());
        prop_assert!(Geometry::with_shift(bytes, geometry.region_shift() - 1).is_err());
        let last = geometry.page_offset(geometry.page_count() - 1).unwrap();
        prop_assert!(last + PAGE_BYTES as u64 <= LOG_END);
    }

    #[test]
    fn a_byte_lies_in_its_region_and_a_span_in_its_regions(
        bytes in sizes(),
        at: u64,
        len in 1u64..(1 << 30),
    ) {
        let geometry = Geometry::new(bytes).unwrap();
        let at = at % bytes;
        let region = geometry.region_at(at).unwrap();
        prop_assert!(geometry.region_range(region).unwrap().contains(&at));
        let place = geometry.bit_position(region).unwrap();
        prop_assert!(place.cell < geometry.cell_count() && place.bit < REGIONS_PER_CELL);
        prop_assert_eq!(place.cell * REGIONS_PER_CELL + place.bit, region.0);

        let len = len.min(bytes - at);
        let regions = geometry.regions_in(at, len).unwrap();
        prop_assert_eq!(regions.clone().next(), Some(region));
        prop_assert_eq!(regions.clone().last(), geometry.region_at(at + len - 1));
        let first = geometry.region_range(region).unwrap();
        let expected = (at + len).div_ceil(geometry.region_bytes())
            - first.start / geometry.region_bytes();
        prop_assert_eq!(regions.len() as u64, expected);
    }

    #[test]
    fn arbitrary_numbers_do_not_panic(bytes: u64, shift: u32, at: u64, len: u64, region: u32) {
        let _ = Geometry::new(bytes);
        let made = Geometry::with_shift(bytes, shift).or_else(|_| Geometry::new(bytes % GIB + 1));
        let geometry = made.unwrap();
        prop_assert_eq!(geometry.region_at(at).is_some(), at < geometry.volume_bytes());
        let inside = at.checked_add(len).is_some_and(|end| end <= geometry.volume_bytes());
        prop_assert_eq!(geometry.regions_in(at, len).is_some(), inside);
        let known = region < geometry.region_count();
        prop_assert_eq!(geometry.region_range(Region(region)).is_some(), known);
        prop_assert_eq!(geometry.bit_position(Region(region)).is_some(), known);
    }
}

/// Sizes of every magnitude.
fn sizes() -> impl Strategy<Value = u64> {
    (0u32..48, any::<u64>()).prop_map(|(bits, low)| (1 << bits) + low % (1 << bits))
}
