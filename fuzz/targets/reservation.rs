//! Reservations: any bytes parse or are refused, what parses is written the same, and whatever is
//! asked of what parsed, the table and the clauses agree; what must hold stands in the oracle, which
//! the tests of `reservation` share.

use reservation::{COPY_BYTES, Change, Initiator, Kind, Party, Table};

#[path = "../../crates/protocol/reservation/tests/conformance/oracle.rs"]
mod oracle;

/// Where the checksum is; the fuzzer would not guess it.
const CHECKSUM: std::ops::Range<usize> = 24..28;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u8, &[u8], &[u8])| {
        let (how, data, script) = input;
        let mut bytes = match how % 3 {
            0 => vec![0; COPY_BYTES],
            _ => table(how).encode(),
        };
        match how % 3 {
            2 => patch(&mut bytes, data),
            _ => {
                let len = data.len().min(COPY_BYTES - CHECKSUM.end);
                let at = if how % 3 == 0 { 0 } else { CHECKSUM.end };
                bytes[at..at + len].copy_from_slice(&data[..len]);
            }
        }
        if how % 3 != 0 {
            bytes[CHECKSUM].fill(0);
            let sum = wire::crc32c(&bytes);
            bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
        }
        if let Ok(table) = Table::parse(&bytes) {
            assert_eq!(table.encode(), bytes);
            oracle::play(table, script);
        }
    });
}

/// Single bytes among the first of a copy, where the fields are.
fn patch(bytes: &mut [u8], data: &[u8]) {
    for place in data.chunks_exact(3) {
        bytes[usize::from(u16::from_le_bytes([place[0], place[1]])) % 512] = place[2];
    }
}

/// A table with something in most fields, or one of a unit that is RESERVEd.
fn table(how: u8) -> Table {
    let one = |name: &str| {
        let initiator = Initiator::Iscsi { name: name.into(), isid: [2; 6] };
        Party { initiator, port: 1 }
    };
    let register = Change::Register {
        key: 0,
        new_key: 1,
        ignore_key: false,
        persists: true,
        ports: vec![1, 2],
        also: vec![Initiator::Host([3; 16])],
    };
    let reserve = Change::Reserve { key: 1, kind: Kind::ALL[usize::from(how) % 6] };
    let all = [register, reserve, Change::Modes(7)];
    let changes = if how < 200 { &all[..] } else { &[Change::ReserveUnit] };
    changes.iter().fold(Table::default(), |table, change| {
        table.change(&one("name"), 5, change).expect("not refused").expect("a change")
    })
}
