//! What a member of a pool holds beside its journal: any bytes are a label, a snapshot, the map of an extent, checksums or a list of
//! what is being written, or are refused, and what is read is written as it was read.

use checksum::Area;
use checksum::place::Place;
use checksum::stored::{self, ROW};
use geometry::{Level, Shape};
use pool::label::{LABEL_BYTES, Label};
use pool::metadata::Metadata;
use raid::stored_map::{self, Found, Whose};
use uuid::Uuid;

const POOL: Uuid = Uuid::nil();

/// Seals `bytes` as a structure of this magic whose checksum is there; the fuzzer would not guess them.
fn sealed(mut bytes: Vec<u8>, magic: &[u8], checksum: usize) -> Vec<u8> {
    bytes[..magic.len()].copy_from_slice(magic);
    bytes[checksum..checksum + 4].fill(0);
    let sum = wire::crc32c(&bytes);
    bytes[checksum..checksum + 4].copy_from_slice(&sum.to_le_bytes());
    bytes
}

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u8, &[u8])| {
        let (kind, data) = input;
        let mut bytes = data.to_vec();
        bytes.resize(data.len().next_multiple_of(4096).max(4096), 0);
        match kind % 5 {
            0 => {
                bytes.truncate(LABEL_BYTES);
                let bytes = sealed(bytes, b"WINDROSE MEMBER\n", 20);
                let Ok(bytes) = <[u8; LABEL_BYTES]>::try_from(bytes) else { return };
                if let Ok(label) = Label::parse(&bytes, 0) {
                    assert_eq!(label.to_bytes(0), bytes);
                }
            }
            1 => {
                let bytes = sealed(bytes, b"WINDROSE POOL\r\n\n", 20);
                if let Ok(metadata) = Metadata::of_snapshot(&bytes, POOL) {
                    assert_eq!(metadata.snapshot(), bytes);
                }
            }
            2 => {
                bytes.truncate(ROW);
                let Ok(bytes) = sealed(bytes, b"WR SUMS\n", 12).try_into() else { return };
                let area = Area { unit: 0, number: 0 };
                if let Some(sums) = stored::parse_sums(&bytes, area, POOL) {
                    assert_eq!(stored::sums_to_bytes(&sums, area, POOL), bytes);
                }
            }
            3 => {
                bytes.truncate(ROW);
                let Ok(bytes) = sealed(bytes, b"WINDROSE WRITES\n", 20).try_into() else { return };
                let whose = stored::Whose { pool: POOL, member: POOL, ring: 0 };
                let place = Place { at: 16, rows: 4256, units: 1 << 20 };
                if let Ok(Some((sequence, areas))) = stored::parse_list(&bytes, &place, whose) {
                    assert_eq!(stored::list_to_bytes(&areas, sequence, whose), bytes);
                }
            }
            _ => {
                let Ok(shape) = Shape::new(Level::Parity, 3, 4, 256) else { return };
                let whose = Whose { pool: POOL, extent: 0 };
                let bytes = sealed(bytes, b"WINDROSE STRIPE\n", 20);
                if let Found::Map { sequence, map } = stored_map::parse(&bytes, &shape, whose) {
                    assert_eq!(stored_map::to_bytes(&map, sequence, whose), bytes);
                }
            }
        }
    });
}
