//! The parity log: any bytes are a batch or are refused, and a batch is written as it was read.

use block::{BufMut, Bufs};
use raid::batch::{BLOCK_BYTES, Batch, Entry, Ring, SLOT_BLOCKS};
use uuid::Uuid;

/// Where the checksum is; the fuzzer would not guess it.
const CHECKSUM: std::ops::Range<usize> = 20..24;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (bool, u8, &[u8])| {
        let (sign, blocks, data) = input;
        let mut bytes = vec![0; (1 + usize::from(blocks) % (SLOT_BLOCKS + 1)) * BLOCK_BYTES];
        let len = data.len().min(bytes.len());
        bytes[..len].copy_from_slice(&data[..len]);
        let ring = Ring { pool: Uuid::nil(), member: Uuid::nil(), era: 0, number: 0 };
        if sign {
            signed(&mut bytes);
        }
        let pages: Bufs = bytes.chunks(BLOCK_BYTES).map(|chunk| page(chunk).freeze()).collect();
        let Ok(batch) = Batch::parse(&pages, &ring) else { return };
        let held: usize = batch.entries.iter().map(Entry::blocks).sum();
        assert_eq!(held, batch.blocks.len());
        assert!(batch.tail <= batch.sequence);
        let again = batch.into_bufs(&ring, page(&[])).to_vec();
        assert_eq!(again, bytes[..again.len()]);
    });
}

fn page(bytes: &[u8]) -> BufMut {
    let mut page = BufMut::lone_page();
    page.fill(0);
    page[..bytes.len()].copy_from_slice(bytes);
    page
}

/// Makes a batch of this ring of it, as far as that is not what the fuzzer is to find.
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
