use proptest::prelude::*;

use super::*;
use crate::change::Change;

fn iscsi(name: &str, session: u8, port: u16) -> ItNexus {
    let initiator = Initiator::Iscsi { name: name.into(), isid: [0x80, 0, 0, 0, 0, session] };
    ItNexus { initiator, port }
}

fn ask(table: &Table, by: &ItNexus, change: &Change) -> Table {
    table.with_change(by, 3, change).expect("not refused").expect("a change")
}

fn register(new_key: u64, persists: bool, ports: &[u16]) -> Change {
    let (key, also) = (0, vec![]);
    Change::Register {
        key,
        new_key,
        ignore_key: false,
        persist: persists,
        ports: ports.to_vec(),
        other_initiators: also,
    }
}

/// The table of the example in `docs/format/reservations.md`.
fn example() -> Table {
    let one = iscsi("iqn.2024-01.net.example:one", 1, 1);
    let two = iscsi("iqn.2024-01.net.example:two", 2, 2);
    let host = ItNexus { initiator: Initiator::Host([0x11; 16]), port: 0 };
    let mut table = Table::default().as_of(0x0102_0304_0506_0708, |_| true);
    (table.generation, table.pr_generation) = (5, 7);
    (table.mode_pages, table.reset_count) = (0x0a0b << 100 | 0x0e0f, 0x0c0d);
    table = ask(&table, &one, &register(0xabcd_ef01, true, &[1, 2]));
    table = ask(&table, &two, &register(0x2222, true, &[]));
    table = ask(&table, &host, &register(0x3333, true, &[]));
    let kind = ReservationType::WriteExclusiveRegistrantsOnly;
    table = ask(&table, &one, &Change::Reserve { key: 0xabcd_ef01, kind });
    let kind = Some(ReservationType::ExclusiveAccessRegistrantsOnly);
    let victim = 0xabcd_ef01;
    ask(&table, &host, &Change::Preempt { key: 0x3333, preempt_key: victim, kind, abort: true })
}

/// The one with an SPC-2 reservation.
fn reserved() -> Table {
    let one = iscsi("iqn.2024-01.net.example:one", 1, 1);
    let two = iscsi("iqn.2024-01.net.example:two", 2, 2);
    ask(&ask(&Table::default(), &one, &Change::Spc2Reserve), &two, &Change::ClearTaskSet)
}

/// The bytes of the example in `docs/format/reservations.md`: hexadecimal digits up to the first
/// two adjacent spaces of each line.
fn shown() -> Vec<u8> {
    let page = include_str!("../../../../../docs/format/reservations.md");
    let (_, example) = page.split_once("## Example").expect("an example");
    let lines = example.split("```").nth(1).expect("its bytes").lines().skip(1);
    let digits: String =
        lines.map(|line| line.split("  ").next().unwrap_or_default().replace(' ', "")).collect();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}

#[test]
fn the_golden_image() {
    let (bytes, golden) = (example().encode(), shown());
    assert_eq!(golden.len(), 239);
    assert_eq!(bytes[..golden.len()], golden);
    assert!(is_blank(&bytes[golden.len()..]));
    assert_eq!(bytes.len(), COPY_BYTES);
    assert_eq!(Table::parse(&bytes), Ok(example()));
}

/// Fields that the example leaves zero.
#[test]
fn the_holder_of_a_unit_reservation_is_kept() {
    let (table, bytes) = (reserved(), reserved().encode());
    assert_eq!(Table::parse(&bytes), Ok(table));
    assert_eq!(bytes[64..72], [0, 0, 8, 0, 0, 0, 2, 0]);
    assert_eq!(bytes[80..88], [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[88..100], [255, 255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[100..112], [0, 0, 1, 0, 0x80, 0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(bytes[112..124], [1, 0, 2, 0, 0x80, 0, 0, 0, 0, 2, 0, 0]);
}

#[test]
fn nothing_is_zeroes() {
    assert_eq!(Table::default().encode(), [0; COPY_BYTES]);
    assert_eq!(Table::parse(&[0; COPY_BYTES]), Ok(Table::default()));
    assert_eq!(Table::parse(&[0; COPY_BYTES - 1]), Err(TableError::Length(COPY_BYTES - 1)));
    assert_eq!(Table::parse(&[]), Err(TableError::Length(0)));
}

#[test]
fn every_bit_counts() {
    let good = example().encode();
    let tail = (COPY_BYTES - 4) * 8..COPY_BYTES * 8;
    for bit in (0..300 * 8).chain(tail) {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let expected = if bit < 128 { TableError::NoMagic } else { TableError::Checksum };
        assert_eq!(Table::parse(&bad), Err(expected), "bit {bit}");
    }
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[CHECKSUM_OFFSET..AFTER_CHECKSUM].fill(0);
    let checksum = crc32c(&bytes);
    bytes[CHECKSUM_OFFSET..AFTER_CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// A table with these bytes at `at`, and a correct checksum.
fn with(table: &Table, at: usize, bytes: &[u8]) -> Result<Table, TableError> {
    let mut all = table.encode();
    all[at..at + bytes.len()].copy_from_slice(bytes);
    Table::parse(&sealed(all))
}

/// Offsets of the first registration and the first name.
const FIRST: usize = TABLE_HEADER_LEN;
const NAME: usize = TABLE_HEADER_LEN + 2 * REGISTRANT_LEN;

#[test]
fn senseless_fields_are_refused() {
    let table = example();
    let cases: &[(usize, &[u8], &str)] = &[
        (18, &[1], "filling"),             // reserved
        (20, &[1], "filling"),             // length
        (32, &[0; 8], "generation"),       // never changed
        (32, &[9], "last abort"),          // older than the last abort
        (64, &[2], "filling"),             // an unknown flag
        (65, &[2], "type of reservation"), // an unknown type
        (65, &[0], "filling"),             // no reservation, and a holder
        (65, &[7], "holder"),              // of all registrants, and a holder
        (66, &[9], "last change"),         // an unknown change
        (66, &[0], "filling"),             // no change, and an author
        (66, &[1], "filling"),             // a victim of something else than PREEMPT
        (67, &[4], "filling"),             // an unknown flag of PREEMPT
        (68, &[1], "name"),                // a registration less
        (68, &[0xff, 0xff], "number of registrations"),
        (70, &[1], "number of a name"), // a name less
        (70, &[3], "name"),             // a name more
        (80, &[1], "filling"),          // an incarnation without a holder
        (88, &[0xff, 0xff], "holder"),  // no holder
        (88, &[0], "holder"),           // one that is not registered
        (88, &[2], "number of a name"),
        (92, &[1], "filling"),                  // an ISID of a host's
        (98, &[1], "filling"),                  // reserved
        (100, &[0, 0], "RESERVE"),              // RESERVEd with registrations
        (104, &[1], "filling"),                 // an ISID without an initiator
        (112, &[0xff, 0xff], "ok"),             // no author
        (124, &[1], "filling"),                 // reserved
        (FIRST, &[0xff, 0xff], "registration"), // without a host
        (FIRST, &[1], "order of registrations"),
        (FIRST + 10, &[1], "filling"), // reserved
        (FIRST + 12, &[2], "filling"), // an unknown flag
        (FIRST + 13, &[1], "filling"), // reserved
        (FIRST + 16, &[0; 2], "key"),
        (NAME, &[3], "name"),               // of an unknown sort
        (NAME + 1, &[0], "name"),           // an empty one
        (NAME + 2, &[0xff], "name"),        // not UTF-8
        (NAME + 2, b"\n", "name"),          // a control character
        (NAME + 2 + 27 + 1, &[15], "name"), // a host of 15 bytes
        (COPY_BYTES - 1, &[1], "filling"),  // behind the names
    ];
    for (at, bytes, field) in cases {
        let found = with(&table, *at, bytes);
        match *field {
            "ok" => assert!(found.is_ok(), "at {at}: {found:?}"),
            field => assert_eq!(found, Err(TableError::Field(field)), "at {at}"),
        }
    }
    assert_eq!(with(&table, 16, &[2]), Err(TableError::Version(2)));
    // There is no holder and cannot be one.
    assert_eq!(with(&reserved(), 65, &[7]), Err(TableError::Field("holder")));
    assert_eq!(
        with(&reserved(), 80, &[4]).map(|table| table.spc2_reservation.map(|s| s.incarnation)),
        Ok(Some(4))
    );
}

/// A table with no room except for registrations.
#[test]
fn a_table_that_is_too_full_is_refused() {
    let name = |n: usize| format!("{n:0>223}");
    let most = (COPY_BYTES - TABLE_HEADER_LEN - RESERVED_NAME_BYTES)
        / (REGISTRANT_LEN + NAME_HEADER + MAX_NAME);
    let registrant = |n| Registrant { nexus: iscsi(&name(n), 1, 1), key: 1, all_ports: false };
    let of = |n| Table {
        generation: 1,
        registrants: (0..n).map(registrant).collect(),
        ..Table::default()
    };
    assert_eq!(Table::parse(&of(most).encode()), Ok(of(most)));
    let full = Table::parse(&of(most + 1).encode());
    assert_eq!(full, Err(TableError::Field("number of registrations")));
}

/// Each name is stored once, in order, and is used.
#[test]
fn there_is_one_way_to_write_names() {
    let one = iscsi("iqn.a", 1, 1);
    let table = ask(&Table::default(), &one, &register(1, false, &[]));
    let names = TABLE_HEADER_LEN + REGISTRANT_LEN;
    let more = |count: u8, bytes: &[u8]| {
        let mut all = table.encode();
        all[70] = count;
        all[names..names + bytes.len()].copy_from_slice(bytes);
        Table::parse(&sealed(all))
    };
    assert_eq!(more(1, b"\x01\x05iqn.a"), Ok(table.clone()));
    assert_eq!(more(2, b"\x01\x05iqn.a\x01\x05iqn.b"), Err(TableError::Field("filling")));
    assert_eq!(more(2, b"\x01\x05iqn.a\x01\x05iqn.a"), Err(TableError::Field("filling")));
    assert_eq!(more(1, b"\x01\xe0iqn.a"), Err(TableError::Field("name")));
}

/// Possible contents of the disk while `new` is written over `old`: a crash may leave any subset of
/// the 512-byte sectors written.
fn crashes(old: &[u8], new: &[u8], seed: u64) -> Vec<Vec<u8>> {
    const SECTOR: usize = 512;
    let mixed = |is_new: &dyn Fn(usize) -> bool| {
        let sectors = old.chunks(SECTOR).zip(new.chunks(SECTOR)).enumerate();
        sectors.flat_map(|(n, (old, new))| if is_new(n) { new } else { old }).copied().collect()
    };
    let mut found: Vec<Vec<u8>> = (0..=3).map(|n| mixed(&|sector| sector < n)).collect();
    found.extend((0..=3).map(|n| mixed(&|sector| sector >= n)));
    found.push(mixed(&|sector| (seed.rotate_left(sector as u32)) & 1 != 0));
    found
}

/// After a crash the table before or after the change is current, and never an older one than the
/// last answered. Repairing a copy, and a crash while doing so, do not change that.
#[test]
fn a_crash_leaves_a_valid_table() {
    let mut long = example();
    for n in 0..40 {
        long = ask(
            &long,
            &iscsi(&format!("iqn.2024-01.net.example:{n}"), 1, 1),
            &register(1, true, &[]),
        );
    }
    let next = ask(&long, &iscsi("iqn.2024-01.net.example:7", 1, 1), &Change::SetModePages(1));
    for (old, new) in [(Table::default(), example()), (example(), long.clone()), (long, next)] {
        let (before, after) = (old.encode(), new.encode());
        for copy0 in crashes(&before, &after, 0x5bd1_e995_9b97_f4a7) {
            let is_new = copy0 == after;
            let expected = if is_new { &new } else { &old };
            mended(&[copy0, before.clone()], expected);
        }
        for copy1 in crashes(&before, &after, 0x2545_f491_4f6c_dd1d) {
            mended(&[after.clone(), copy1], &new);
        }
    }
}

/// `expected` is the current table of these copies, even after a crash during the repair.
fn mended(copies: &[Vec<u8>; 2], expected: &Table) {
    let (found, bad) = Table::recover(&copies[0], &copies[1]).expect("a table");
    assert_eq!(found, *expected);
    let Some(bad) = bad else { return assert_eq!(copies[0], copies[1]) };
    for torn in crashes(&copies[bad], &expected.encode(), 0x9e37_79b9_7f4a_7c15) {
        let mut copies = copies.clone();
        copies[bad] = torn;
        let chosen = Table::recover(&copies[0], &copies[1]).map(|(table, _)| table);
        assert_eq!(chosen.as_ref(), Ok(expected));
    }
}

#[test]
fn damage_not_explained_by_a_crash_fails_safe() {
    let (old, new) = (example(), ask(&example(), &iscsi("iqn.a", 1, 1), &Change::ClearTaskSet));
    let (zeroes, torn) = (vec![0; COPY_BYTES], vec![7; COPY_BYTES]);
    let choose = |a: &[u8], b: &[u8]| Table::recover(a, b);
    assert_eq!(choose(&zeroes, &zeroes), Ok((Table::default(), None)));
    assert_eq!(choose(&old.encode(), &new.encode()), Ok((new.clone(), Some(0))));
    assert_eq!(choose(&zeroes, &old.encode()), Ok((old.clone(), Some(0))));
    assert_eq!(choose(&old.encode(), &zeroes), Ok((old.clone(), Some(1))));
    assert_eq!(choose(&zeroes, &torn), Err(TableError::CopyMissing));
    assert_eq!(choose(&torn, &zeroes), Ok((Table::default(), Some(0))));
    assert_eq!(choose(&torn, &torn), Err(TableError::NoMagic));
    let mut other = old.clone();
    other.mode_pages = 0;
    assert_eq!(choose(&old.encode(), &other.encode()), Ok((old.clone(), Some(1))));
    let mut strange = old.encode();
    strange[16] = 2;
    let strange = sealed(strange);
    for other in [old.encode(), zeroes, torn, strange.clone()] {
        assert_eq!(choose(&strange, &other), Err(TableError::Version(2)));
        assert_eq!(choose(&other, &strange), Err(TableError::Version(2)));
    }
}

proptest! {
    /// An intact table with some bytes replaced is rejected; with a correct checksum it may be
    /// another table, which must encode to the same bytes.
    #[test]
    fn mutated_bytes(
        is_reserved: bool,
        front in prop::collection::vec((16..300usize, any::<u8>()), 0..5),
        anywhere in (0..COPY_BYTES, any::<u8>()),
    ) {
        let good = if is_reserved { reserved() } else { example() }.encode();
        let mut bytes = good.clone();
        for (at, byte) in front.into_iter().chain([anywhere]) {
            bytes[at] = byte;
        }
        prop_assert_eq!(Table::parse(&bytes).is_ok(), bytes == good);
        let bytes = sealed(bytes);
        if let Ok(table) = Table::parse(&bytes) {
            prop_assert_eq!(table.violated_invariant(), None);
            prop_assert_eq!(table.encode(), bytes);
        }
    }

    #[test]
    fn any_fields(fields in prop::collection::vec(any::<u8>(), 400)) {
        let mut bytes = example().encode();
        bytes[28..428].copy_from_slice(&fields);
        let bytes = sealed(bytes);
        if let Ok(table) = Table::parse(&bytes) {
            prop_assert_eq!(table.encode(), bytes);
        }
    }
}
