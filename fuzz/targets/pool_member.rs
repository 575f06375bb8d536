//! A pool member's structures besides its journal: any bytes parse as a label, a snapshot, an
//! extent's map, checksums or a dirty list, or are rejected; what parses serialises to the same
//! bytes.

use checksum::ChecksumArea;
use checksum::format;
use checksum::layout::ChecksumLayout;
use checksum::layout::ROW;
use geometry::{RaidGeometry, Redundancy};
use pool::member_label::{LABEL_BYTES, MemberLabel};
use pool_metadata::Metadata;
use raid::stripe_map_format::{self, MapOwner, ParsedMap};
use uuid::Uuid;

const POOL: Uuid = Uuid::nil();

/// Makes `bytes` a structure with this magic and a valid checksum at `checksum`, which the fuzzer
/// would not guess.
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
                if let Ok(label) = MemberLabel::parse(&bytes, 0) {
                    assert_eq!(label.to_bytes(0), bytes);
                }
            }
            1 => {
                let bytes = sealed(bytes, b"WINDROSE POOL\r\n\n", 20);
                if let Ok(metadata) = Metadata::decode_snapshot(&bytes, POOL) {
                    assert_eq!(metadata.encode_snapshot(), bytes);
                }
            }
            2 => {
                bytes.truncate(ROW);
                let Ok(bytes) = sealed(bytes, b"WR SUMS\n", 12).try_into() else { return };
                let area = ChecksumArea { unit: 0, index: 0 };
                if let Some(sums) = format::parse_checksums(&bytes, area, POOL) {
                    assert_eq!(format::checksums_to_bytes(&sums, area, POOL), bytes);
                }
            }
            3 => {
                bytes.truncate(ROW);
                let Ok(bytes) = sealed(bytes, b"WINDROSE WRITES\n", 20).try_into() else { return };
                let owner = format::ChecksumOwner { pool: POOL, member: POOL, ring: 0 };
                let layout = ChecksumLayout { first_row: 16, unit_rows: 4256, units: 1 << 20 };
                if let Ok(Some((sequence, areas))) =
                    format::parse_dirty_list(&bytes, &layout, owner)
                {
                    assert_eq!(format::dirty_list_to_bytes(&areas, sequence, owner), bytes);
                }
            }
            _ => {
                let Ok(geometry) = RaidGeometry::new(Redundancy::Parity, 3, 4, 256) else { return };
                let owner = MapOwner { pool: POOL, extent: 0 };
                let bytes = sealed(bytes, b"WINDROSE STRIPE\n", 20);
                if let ParsedMap::Map { sequence, map } =
                    stripe_map_format::parse(&bytes, &geometry, owner)
                {
                    assert_eq!(stripe_map_format::to_bytes(&map, sequence, owner), bytes);
                }
            }
        }
    });
}
