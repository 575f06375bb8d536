//! Owner records of disks: any bytes parse or are rejected; what parses serialises to the same
//! bytes.

use disk::claim::{OWNER_RECORD_BYTES, OwnerRecord, OwnerRecordKind};

/// Range of the checksum, which the fuzzer would not guess.
const CHECKSUM: std::ops::Range<usize> = 20..24;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u8, bool, &[u8])| {
        let (copy, sign, data) = input;
        let copy = [OwnerRecordKind::Claim, OwnerRecordKind::ClaimCopy, OwnerRecordKind::Heartbeat]
            [usize::from(copy % 3)];
        let mut bytes = [0; OWNER_RECORD_BYTES];
        let len = data.len().min(OWNER_RECORD_BYTES);
        bytes[..len].copy_from_slice(&data[..len]);
        if sign {
            bytes[..16].copy_from_slice(b"WINDROSE OWNER\r\n");
            bytes[CHECKSUM].fill(0);
            let checksum = wire::crc32c(&bytes);
            bytes[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Ok(record) = OwnerRecord::parse(&bytes, copy) {
            assert_eq!(record.to_bytes(copy), bytes);
        }
    });
}
