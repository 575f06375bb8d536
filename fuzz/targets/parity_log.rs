//! The parity log: any bytes parse as a batch or are rejected; what parses serialises to the same
//! bytes.

use block::{BufMut, Bufs};
use raid::log_batch::{BATCH_BLOCKS, BLOCK_BYTES, LogBatch, LogEntry, RingId};
use uuid::Uuid;

/// Range of the checksum, which the fuzzer would not guess.
const CHECKSUM: std::ops::Range<usize> = 20..24;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (bool, u8, &[u8])| {
        let (sign, blocks, data) = input;
        let mut bytes = vec![0; (1 + usize::from(blocks) % (BATCH_BLOCKS + 1)) * BLOCK_BYTES];
        let len = data.len().min(bytes.len());
        bytes[..len].copy_from_slice(&data[..len]);
        let ring = RingId { pool: Uuid::nil(), member: Uuid::nil(), generation: 0, number: 0 };
        if sign {
            signed(&mut bytes);
        }
        let pages: Bufs = bytes.chunks(BLOCK_BYTES).map(|chunk| page(chunk).freeze()).collect();
        let Ok(batch) = LogBatch::parse(&pages, &ring) else { return };
        let held: usize = batch.entries.iter().map(LogEntry::payload_blocks).sum();
        assert_eq!(held, batch.blocks.len());
        assert!(batch.tail <= batch.sequence);
        let again = batch.into_bufs(&ring, page(&[])).to_vec();
        assert_eq!(again, bytes[..again.len()]);
    });
}

fn page(bytes: &[u8]) -> BufMut {
    let mut page = BufMut::heap_page();
    page.fill(0);
    page[..bytes.len()].copy_from_slice(bytes);
    page
}

/// Sets the header fields and the checksum, as far as the fuzzer need not guess them.
fn signed(bytes: &mut [u8]) {
    let blocks = (bytes.len() / BLOCK_BYTES) as u16;
    bytes[..16].copy_from_slice(b"WINDROSE PARITY\n");
    bytes[16..18].copy_from_slice(&1u16.to_le_bytes());
    bytes[18..20].copy_from_slice(&blocks.to_le_bytes());
    bytes[24..64].fill(0);
    bytes[80..84].fill(0);
    bytes[CHECKSUM].fill(0);
    let sum = wire::crc32c(bytes);
    bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
}
