//! Reservations: any bytes parse or are rejected, and what parses serialises to the same bytes. For
//! any commands on a parsed table, the table and the oracle agree; the tests of `reservation` share
//! the oracle.

use reservation::{COPY_BYTES, Change, Initiator, ItNexus, ReservationType, Table};

#[path = "../../crates/protocol/reservation/tests/conformance/oracle.rs"]
mod oracle;

/// Range of the checksum, which the fuzzer would not guess.
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
            oracle::run(table, script);
        }
    });
}

/// Changes single bytes at the start of a copy, where the fields are.
fn patch(bytes: &mut [u8], data: &[u8]) {
    for change in data.chunks_exact(3) {
        bytes[usize::from(u16::from_le_bytes([change[0], change[1]])) % 512] = change[2];
    }
}

/// A table with most fields set, or one of a unit reserved by RESERVE.
fn table(how: u8) -> Table {
    let one = |name: &str| {
        let initiator = Initiator::Iscsi { name: name.into(), isid: [2; 6] };
        ItNexus { initiator, port: 1 }
    };
    let register = Change::Register {
        key: 0,
        new_key: 1,
        ignore_key: false,
        persist: true,
        ports: vec![1, 2],
        other_initiators: vec![Initiator::Host([3; 16])],
    };
    let reserve = Change::Reserve { key: 1, kind: ReservationType::ALL[usize::from(how) % 6] };
    let all = [register, reserve, Change::SetModePages(7)];
    let changes = if how < 200 { &all[..] } else { &[Change::Spc2Reserve] };
    changes.iter().fold(Table::default(), |table, change| {
        table.with_change(&one("name"), 5, change).expect("not refused").expect("a change")
    })
}
