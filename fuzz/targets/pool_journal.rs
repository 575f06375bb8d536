//! The journal of a pool: any bytes parse as a block or are rejected; what parses serialises to the
//! same bytes.

use pool_metadata::journal::{BLOCK_BYTES, JournalBlock};
use uuid::Uuid;

/// Range of the checksum, which the fuzzer would not guess.
const CHECKSUM: std::ops::Range<usize> = 24..28;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (bool, &[u8])| {
        let (sign, data) = input;
        let mut bytes = [0; BLOCK_BYTES];
        let len = data.len().min(bytes.len());
        bytes[..len].copy_from_slice(&data[..len]);
        if sign {
            bytes[..16].copy_from_slice(b"WINDROSE CHANGE\n");
            bytes[CHECKSUM].fill(0);
            let sum = wire::crc32c(&bytes);
            bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
        }
        if let Ok(block) = JournalBlock::parse(&bytes, Uuid::nil()) {
            assert_eq!(block.to_bytes(Uuid::nil()), bytes);
        }
    });
}
