//! Intent logs: any bytes parse or are rejected, what parses serialises to the same bytes, and no
//! page clears a dirty region.

use intent_log::{
    CELL_BYTES, Geometry, LogId, PAGE_BYTES, SUPERBLOCK_BYTES, Slot, SlotBitmaps, Superblock,
    parse_page,
};

/// Ranges of the checksums, which the fuzzer would not guess.
const SUPERBLOCK_CHECKSUM: std::ops::Range<usize> = 24..28;
const CELL_CHECKSUM: std::ops::Range<usize> = 4..8;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (bool, bool, u16, u64, &[u8])| {
        let (is_page, sign, number, size, data) = input;
        let mut bytes = [0; PAGE_BYTES];
        let len = data.len().min(PAGE_BYTES);
        bytes[..len].copy_from_slice(&data[..len]);
        if is_page {
            page(bytes, sign, u32::from(number % 103), size);
        } else {
            superblock(bytes, sign, number, size);
        }
    });
}

fn superblock(mut bytes: [u8; SUPERBLOCK_BYTES], sign: bool, copy: u16, size: u64) {
    if sign {
        bytes[..16].copy_from_slice(b"WINDROSE INTENT\n");
        signed(&mut bytes, SUPERBLOCK_CHECKSUM);
    }
    if let Ok(superblock) = Superblock::parse(&bytes, copy) {
        assert_eq!(superblock.to_bytes(copy), bytes);
        if let Ok(geometry) = superblock.geometry(size) {
            assert!(geometry.cell_count() <= superblock.cells);
        }
    }
}

fn page(mut bytes: [u8; PAGE_BYTES], sign: bool, page: u32, size: u64) {
    let log = LogId(0);
    for (cell, index) in bytes.chunks_exact_mut(CELL_BYTES).zip(page * 8..).filter(|_| sign) {
        cell[..4].copy_from_slice(b"WRIC");
        cell[8..16].fill(0);
        cell[16..20].copy_from_slice(&index.to_le_bytes());
        signed(cell, CELL_CHECKSUM);
    }
    let found = parse_page(&bytes, log, page);
    for (cell, raw) in found.iter().zip(bytes.chunks_exact(CELL_BYTES)) {
        assert!(cell.as_ref().map_or(true, |cell| cell.to_bytes() == *raw));
    }
    let Ok(geometry) = Geometry::new(size) else { return };
    let mut marks = SlotBitmaps::none(geometry);
    let bad = marks.add_page(page, &found);
    for (index, _) in bad {
        let all = marks.cell(log, index, 1).expect("a cell of the log").slots;
        // The last cell has bits that belong to no region.
        assert!(index + 1 == geometry.cell_count() || all == [[u64::MAX; 20]; 3]);
    }
    for slot in Slot::ALL {
        assert_eq!(marks.dirty_regions(slot).count(), marks.count(slot) as usize);
        assert!(marks.dirty_regions(slot).all(|region| region.0 < geometry.region_count()));
    }
}

fn signed(bytes: &mut [u8], checksum: std::ops::Range<usize>) {
    bytes[checksum.clone()].fill(0);
    let sum = wire::crc32c(bytes);
    bytes[checksum].copy_from_slice(&sum.to_le_bytes());
}
