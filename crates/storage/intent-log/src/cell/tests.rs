use proptest::prelude::*;
use wire::embedded_checksum::with_checksum;

use super::*;

const LOG: LogId = LogId(0x0123_4567_89ab_cdef);

fn cell(index: u32, generation: u64) -> Cell {
    let mut slots = [[0; WORDS_PER_CELL]; SLOTS];
    // Regions 0, 9 and 1279 of the cell in slot 0, 64 in slot 1, all in slot 2.
    slots[0][0] = 1 | 1 << 9;
    slots[0][19] = 1 << 63;
    slots[1][1] = 1;
    slots[2] = [u64::MAX; WORDS_PER_CELL];
    Cell { log_id: LOG, index, generation, slots }
}

/// The cell as `docs/format/intent.md` shows it.
#[test]
fn the_golden_image() {
    let golden = [
        "57524943",           // magic
        "c1a2d6a5",           // checksum
        "efcdab8967452301",   // log id
        "05000000",           // index
        "00000000",           // reserved
        "0700000000000000",   // generation
        "0102",               // slot 0: regions 0 and 9
        &"00".repeat(157),    //
        "80",                 // region 1279
        "000000000000000001", // slot 1: region 64
        &"00".repeat(151),    //
        &"ff".repeat(160),    // slot 2
    ]
    .concat();
    let bytes = cell(5, 7).to_bytes();
    let mut shown = String::new();
    for byte in bytes {
        shown += &format!("{byte:02x}");
    }
    assert_eq!(shown, golden);
    assert_eq!(Cell::parse(&bytes, LOG, 5), Ok(cell(5, 7)));
}

#[test]
fn every_bit_counts() {
    let good = cell(5, 7).to_bytes();
    for bit in 0..CELL_BYTES * 8 {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        let expected = if bit < 32 { CellError::NoMagic } else { CellError::Damaged };
        assert_eq!(Cell::parse(&bad, LOG, 5), Err(expected), "bit {bit}");
    }
}

#[test]
fn a_misplaced_cell_is_refused_with_a_reason() {
    let good = cell(5, 7).to_bytes();
    assert_eq!(Cell::parse(&good, LOG, 6), Err(CellError::WrongIndex(5)));
    assert_eq!(Cell::parse(&good, LogId(1), 5), Err(CellError::OtherLog(LOG.0)));
    assert_eq!(Cell::parse(&[0; CELL_BYTES], LOG, 5), Err(CellError::NoMagic));
    assert_eq!(Cell::parse(&[0xff; CELL_BYTES], LOG, 5), Err(CellError::NoMagic));
    let mut strange = good;
    strange[23] = 1;
    assert_eq!(
        Cell::parse(&with_checksum(strange, 4), LOG, 5),
        Err(CellError::InvalidField("reserved part"))
    );
    assert_eq!(
        Cell::parse(&cell(5, 0).to_bytes(), LOG, 5),
        Err(CellError::InvalidField("generation"))
    );
}

/// Eight cells of page 3; cell `n` has been written `generations[n]` times.
fn page(generations: [u64; CELLS_PER_PAGE]) -> Vec<Cell> {
    let mut cells: Vec<Cell> =
        (24..).zip(generations).map(|(index, generation)| cell(index, generation)).collect();
    // The writes of a cell differ in its dirty bits.
    cells.iter_mut().for_each(|cell| cell.slots[1][2] = cell.generation);
    cells
}

#[test]
fn a_torn_page_holds_old_and_new_cells() {
    let (old, new) = (page([7; 8]), page([8; 8]));
    let (before, after) = (page_to_bytes(&old), page_to_bytes(&new));
    for torn in 0..1u32 << CELLS_PER_PAGE {
        let is_new = |n: usize| torn >> n & 1 == 1;
        let mut bytes = before;
        for n in (0..CELLS_PER_PAGE).filter(|&n| is_new(n)) {
            let unit = n * CELL_BYTES..(n + 1) * CELL_BYTES;
            bytes[unit.clone()].copy_from_slice(&after[unit]);
        }
        for (n, found) in parse_page(&bytes, LOG, 3).into_iter().enumerate() {
            assert_eq!(found.as_ref(), Ok(if is_new(n) { &new[n] } else { &old[n] }));
        }
    }
}

#[test]
fn a_torn_cell_is_damaged_but_not_its_neighbours() {
    let (old, new) = (page([7; 8]), page([8; 8]));
    let (before, after) = (page_to_bytes(&old), page_to_bytes(&new));
    // The old and the new cell differ from its checksum to byte 208, in word 2 of slot 1.
    for cut in 8..=208 {
        let mut bytes = before;
        bytes[512..512 + cut].copy_from_slice(&after[512..512 + cut]);
        let found = parse_page(&bytes, LOG, 3);
        assert_eq!(found[1], Err(CellError::Damaged), "cut at {cut}");
        assert_eq!((found[0].as_ref(), found[2].as_ref()), (Ok(&old[0]), Ok(&old[2])));
    }
}

#[test]
fn a_misplaced_page_has_no_valid_cell() {
    let bytes = page_to_bytes(&page([7; 8]));
    for (n, found) in (24..).zip(parse_page(&bytes, LOG, 2)) {
        assert_eq!(found, Err(CellError::WrongIndex(n)));
    }
    assert!(parse_page(&bytes, LogId(0), 3).iter().all(|c| *c == Err(CellError::OtherLog(LOG.0))));
    assert!(parse_page(&bytes, LOG, u32::MAX).iter().all(Result::is_err));
    let short = parse_page(&page_to_bytes(&page([7; 8])[..3]), LOG, 3);
    assert!(short[..3].iter().all(Result::is_ok));
    assert!(short[3..].iter().all(|c| *c == Err(CellError::NoMagic)));
}

proptest! {
    #[test]
    fn it_round_trips(
        log: u64,
        index: u32,
        generation in 1u64..,
        slots: [[u64; WORDS_PER_CELL]; SLOTS],
    ) {
        let cell = Cell { log_id: LogId(log), index, generation, slots };
        prop_assert_eq!(Cell::parse(&cell.to_bytes(), LogId(log), index), Ok(cell));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        noise in proptest::collection::vec(any::<u8>(), CELL_BYTES),
        keep in 0usize..CELL_BYTES,
        sign: bool,
    ) {
        let mut bytes = cell(5, 7).to_bytes();
        bytes[keep..].copy_from_slice(&noise[keep..]);
        let bytes = if sign { with_checksum(bytes, 4) } else { bytes };
        if let Ok(parsed) = Cell::parse(&bytes, LOG, 5) {
            prop_assert_eq!(parsed.to_bytes(), bytes, "what is understood is written the same");
        }
    }
}
