use proptest::prelude::*;

use super::*;

fn ring() -> RingId {
    RingId { pool: Uuid::from_u128(1), member: Uuid::from_u128(2), generation: 3, number: 4 }
}

fn block(fill: u8) -> Buf {
    let mut page = BufMut::heap_page();
    page.fill(fill);
    page.freeze()
}

fn rows(row: u32, rows: u16, changed: &[u16]) -> LogEntry {
    let kind = EntryKind::RowsWritten { row, rows, changed: changed.iter().copied().collect() };
    entry(9, kind)
}

fn entry(slot: u32, kind: EntryKind) -> LogEntry {
    LogEntry { number: 6, extent: 7, slot, kind }
}

fn batch(entries: Vec<LogEntry>) -> LogBatch {
    let blocks: usize = entries.iter().map(LogEntry::payload_blocks).sum();
    LogBatch {
        sequence: 70,
        tail: 68,
        entries,
        blocks: (0..blocks).map(|n| block(n as u8)).collect(),
    }
}

fn bytes(batch: &LogBatch) -> Vec<u8> {
    batch.clone().into_bufs(&ring(), BufMut::heap_page()).to_vec()
}

/// Whether exactly this batch was parsed.
fn is_batch(parsed: Result<LogBatch, BatchError>, batch: &LogBatch) -> bool {
    parsed.is_ok_and(|parsed| bytes(&parsed) == bytes(batch))
}

fn parse(bytes: &[u8]) -> Result<LogBatch, BatchError> {
    let pages = bytes.chunks(BLOCK_BYTES).map(|chunk| {
        let mut page = BufMut::heap_page();
        page[..chunk.len()].copy_from_slice(chunk);
        page.freeze().slice(0..chunk.len())
    });
    LogBatch::parse(&pages.collect(), &ring())
}

fn sample_batch() -> LogBatch {
    let whole = entry(300, EntryKind::StripeMoved { stripe: 12 });
    let copies = entry(16, EntryKind::WriteIntent { stripes: 16, changed: StripSet::first(1) });
    batch(vec![rows(3, 1, &[2]), whole, rows(0, 2, &[0, 5, 63]), copies])
}

#[test]
fn a_batch_round_trips() {
    let batch = sample_batch();
    assert_eq!(batch.blocks.len(), 1 + 2 * 4);
    let mut bytes = bytes(&batch);
    assert_eq!(bytes.len(), 10 * BLOCK_BYTES);
    assert!(is_batch(parse(&bytes), &batch));
    // The rest of its place in the ring is from an older batch.
    bytes.resize(BATCH_BLOCKS * BLOCK_BYTES, 0xee);
    assert!(is_batch(parse(&bytes), &batch));
}

#[test]
fn torn_and_foreign_batches_are_detected() {
    let whole = bytes(&sample_batch());
    for block in 0..10 {
        let mut torn = whole.clone();
        torn[block * BLOCK_BYTES + 512..][..512].fill(0xee);
        assert_eq!(parse(&torn).unwrap_err(), BatchError::Torn, "block {block}");
    }
    assert_eq!(parse(&whole[..9 * BLOCK_BYTES]).unwrap_err(), BatchError::Torn);
    // A corrupt version is no unknown version (seed 222 of the simulator's pools: no pool with such
    // a disk could be opened any more).
    let mut rotten = whole.clone();
    rotten[16] ^= 1 << 4;
    assert_eq!(parse(&rotten).unwrap_err(), BatchError::Torn);
    assert_eq!(parse(&[0; BLOCK_BYTES]).unwrap_err(), BatchError::NoMagic);
    assert_eq!(parse(&[]).unwrap_err(), BatchError::NoMagic);
    let slot: Bufs = whole
        .chunks(BLOCK_BYTES)
        .map(|chunk| {
            let mut page = BufMut::heap_page();
            page.copy_from_slice(chunk);
            page.freeze()
        })
        .collect();
    for other in [
        RingId { pool: Uuid::nil(), ..ring() },
        RingId { member: Uuid::nil(), ..ring() },
        RingId { generation: 2, ..ring() },
        RingId { number: 5, ..ring() },
    ] {
        assert_eq!(LogBatch::parse(&slot, &other).unwrap_err(), BatchError::WrongRing, "{other:?}");
    }
}

/// The error after `change` of the header, with a valid checksum.
fn changed(change: impl FnOnce(&mut [u8])) -> Option<BatchError> {
    let mut bytes = bytes(&sample_batch());
    change(&mut bytes[..BLOCK_BYTES]);
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].fill(0);
    let sum = wire::crc32c(&bytes).to_le_bytes();
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum);
    parse(&bytes).err()
}

#[test]
fn inconsistent_batches_are_refused() {
    let contradiction = Some(BatchError::Inconsistent);
    assert_eq!(changed(|head| head[16] = 2), Some(BatchError::Version(2)));
    assert_eq!(changed(|head| head[72] = 71), contradiction, "a tail in the future");
    assert_eq!(
        changed(|head| head[84] = 200),
        contradiction,
        "more entries than there is room for"
    );
    assert_eq!(changed(|head| head[84] = 3), contradiction, "an entry that is not counted");
    assert_eq!(changed(|head| head[84] = 5), contradiction, "one that is not there");
    assert_eq!(changed(|head| head[88] = 1), contradiction, "a reserved byte");
    assert_eq!(changed(|head| head[4095] = 1), contradiction, "a byte behind the entries");
    assert_eq!(changed(|head| head[HEADER_BYTES + 36] = 0), contradiction, "no rows");
    assert_eq!(changed(|head| head[HEADER_BYTES + 36] = 2), contradiction, "more rows than blocks");
    assert_eq!(changed(|head| head[HEADER_BYTES + 16] = 0), contradiction, "nothing changes");
    assert_eq!(
        changed(|head| head[HEADER_BYTES + 38] = 4),
        contradiction,
        "a kind that is not known"
    );
    assert_eq!(changed(|head| head[HEADER_BYTES + 28] = 1), contradiction, "what the kind has not");
    let copies = HEADER_BYTES + 3 * ENTRY_BYTES;
    assert_eq!(changed(|head| head[copies + 28] = 0), contradiction, "no stripes");
    assert_eq!(changed(|_| {}), None);
}

#[test]
fn a_batch_fills_its_slot_at_most() {
    let mut batch = batch(vec![]);
    for n in 0..31 {
        let entry = rows(n, 1, &[1]);
        assert!(batch.has_space(&entry));
        batch.entries.push(entry);
        batch.blocks.push(block(1));
    }
    assert!(!batch.has_space(&rows(99, 1, &[1])));
    let whole = entry(2, EntryKind::StripeMoved { stripe: 3 });
    while batch.has_space(&whole) {
        batch.entries.push(whole);
    }
    assert_eq!((batch.entries.len(), MAX_BATCH_ENTRIES), (100, 100));
    assert!(is_batch(parse(&bytes(&batch)), &batch));
    assert_eq!(
        (LogBatch::ring_index(0), LogBatch::ring_index(63), LogBatch::ring_index(64)),
        (0, 63, 0)
    );
}

/// The bytes are as the format's page says.
#[test]
fn golden() {
    let bytes = bytes(&batch(vec![rows(3, 1, &[2])]));
    assert_eq!(&bytes[..20], b"WINDROSE PARITY\n\x01\x00\x02\x00");
    assert_eq!(bytes[39], 1, "the pool");
    assert_eq!(bytes[55], 2, "the member");
    assert_eq!(
        bytes[56..96],
        [
            3, 0, 0, 0, 0, 0, 0, 0, 70, 0, 0, 0, 0, 0, 0, 0, 68, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ]
    );
    assert_eq!(
        bytes[96..136],
        [
            6, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0,
            0, 0, 0, 3, 0, 0, 0, 1, 0, 1, 0,
        ]
    );
    assert_eq!(wire::crc32c(&bytes), 0xb010_7315, "all of it");
}

proptest! {
    #[test]
    fn arbitrary_bytes_parse_or_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..9000), sign in any::<bool>()) {
        if sign && bytes.len() >= BLOCK_BYTES {
            bytes[..20].copy_from_slice(b"WINDROSE PARITY\n\x01\x00\x01\x00");
            bytes[CHECKSUM_AT..CHECKSUM_AT + 4].fill(0);
            let sum = wire::crc32c(&bytes[..BLOCK_BYTES]).to_le_bytes();
            bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum);
        }
        let _ = parse(&bytes);
    }
}
