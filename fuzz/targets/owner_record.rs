//! Owner records of disks: any bytes parse or are refused, and what parses is written the same.

use disk::claim::{Copy, OWNER_BYTES, OwnerRecord};

/// Where the checksum is; the fuzzer would not guess it.
const CHECKSUM: std::ops::Range<usize> = 20..24;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u8, bool, &[u8])| {
        let (copy, sign, data) = input;
        let copy = [Copy::First, Copy::Second, Copy::Beat][usize::from(copy % 3)];
        let mut bytes = [0; OWNER_BYTES];
        let len = data.len().min(OWNER_BYTES);
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
