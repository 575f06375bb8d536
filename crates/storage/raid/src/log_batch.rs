//! A batch of the parity log, as stored in its place in the ring
//! ([format](../../../../docs/format/parity-log.md)).

use block::{Buf, BufMut, Bufs};
use geometry::ROW_BYTES;
use uuid::Uuid;
use wire::embedded_checksum;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::row_plan::StripSet;

/// Length of a block in bytes: the header of a batch, or a row of its payload.
pub const BLOCK_BYTES: usize = ROW_BYTES as usize;

/// Most blocks of a batch, header included: as many as its place in the ring has.
pub const BATCH_BLOCKS: usize = 32;

/// Places for batches in a ring.
pub const RING_BATCHES: u32 = 64;

/// Most entries of a batch.
pub const MAX_BATCH_ENTRIES: usize = (BLOCK_BYTES - HEADER_BYTES) / ENTRY_BYTES;

const MAGIC: [u8; 16] = *b"WINDROSE PARITY\n";

/// The only version so far.
const VERSION: u16 = 1;

const HEADER_BYTES: usize = 96;
const ENTRY_BYTES: usize = 40;

wire::open_enum! {
    /// The kind of an entry, as stored.
    enum StoredEntryKind: u16 {
        RowsWritten = 1,
        StripeMoved = 2,
        WriteIntent = 3,
    }
}

/// The header fields; entries follow, then zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct BatchHeader {
    magic: [u8; 16],
    version: U16,
    blocks: U16,
    checksum: U32,
    pool: [u8; 16],
    member: [u8; 16],
    generation: U64,
    sequence: U64,
    tail: U64,
    ring: U32,
    entries: U32,
    reserved: [u8; 8],
}

const _: () = assert!(size_of::<BatchHeader>() == HEADER_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(BatchHeader, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredEntry {
    number: U64,
    extent: U64,
    changed: U64,
    slot: U32,
    stripe: U32,
    row: U32,
    rows: U16,
    kind: U16,
}

const _: () = assert!(size_of::<StoredEntry>() == ENTRY_BYTES);

/// The ring that a batch belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingId {
    /// The pool.
    pub pool: Uuid,
    /// The member that the ring lies on.
    pub member: Uuid,
    /// The version of the pool metadata with which the ring was begun.
    pub generation: u64,
    /// Number of the ring on its member.
    pub number: u32,
}

/// A write that is about to happen, or has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Its number, the same in the logs of all members that have it. Later entries have greater
    /// numbers.
    pub number: u64,
    /// The extent.
    pub extent: u64,
    /// The slot of the stripe.
    pub slot: u32,
    /// What is written there.
    pub kind: EntryKind,
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// Rows of a stripe. For each row, the batch holds the partial parity of its member's parity,
    /// and if several strips change their new data, in ascending order.
    RowsWritten {
        /// The first row.
        row: u32,
        /// Number of rows, at least one.
        rows: u16,
        /// The strips that change, at least one.
        changed: StripSet,
    },
    /// A full stripe was written out of place.
    StripeMoved {
        /// Number of the stripe.
        stripe: u32,
    },
    /// Copies are being written, and may differ meanwhile.
    WriteIntent {
        /// Number of stripes, beginning with that in the slot: at least one.
        stripes: u32,
        /// The strips whose copies are written: at least one.
        changed: StripSet,
    },
}

impl LogEntry {
    /// Payload blocks of the entry in a batch.
    #[must_use]
    pub fn payload_blocks(&self) -> usize {
        match self.kind {
            EntryKind::RowsWritten { rows, changed, .. } => {
                usize::from(rows) * payload_blocks_per_row(changed)
            }
            EntryKind::StripeMoved { .. } | EntryKind::WriteIntent { .. } => 0,
        }
    }

    fn to_stored(self) -> StoredEntry {
        let (kind, stripe, row, rows, changed) = match self.kind {
            EntryKind::RowsWritten { row, rows, changed } => {
                (StoredEntryKind::RowsWritten, 0, row, rows, changed)
            }
            EntryKind::StripeMoved { stripe } => {
                (StoredEntryKind::StripeMoved, stripe, 0, 0, StripSet::default())
            }
            EntryKind::WriteIntent { stripes, changed } => {
                (StoredEntryKind::WriteIntent, stripes, 0, 0, changed)
            }
        };
        StoredEntry {
            number: self.number.into(),
            extent: self.extent.into(),
            changed: changed.bits().into(),
            slot: self.slot.into(),
            stripe: stripe.into(),
            row: row.into(),
            rows: rows.into(),
            kind: kind.0.into(),
        }
    }

    fn parse(stored: &StoredEntry) -> Option<Self> {
        let changed = StripSet::from_bits(stored.changed.get());
        let (rows, stripe) = (stored.rows.get(), stored.stripe.get());
        let kind = match StoredEntryKind(stored.kind.get()) {
            StoredEntryKind::RowsWritten if rows > 0 && !changed.is_empty() => {
                EntryKind::RowsWritten { row: stored.row.get(), rows, changed }
            }
            StoredEntryKind::StripeMoved => EntryKind::StripeMoved { stripe },
            StoredEntryKind::WriteIntent if stripe > 0 && !changed.is_empty() => {
                EntryKind::WriteIntent { stripes: stripe, changed }
            }
            _ => return None,
        };
        let (number, extent) = (stored.number.get(), stored.extent.get());
        let entry = Self { number, extent, slot: stored.slot.get(), kind };
        // Fields of other kinds must be zero.
        (entry.to_stored().as_bytes() == stored.as_bytes()).then_some(entry)
    }
}

/// Payload blocks for one row: partial parity, and the data if several strips change.
pub(super) fn payload_blocks_per_row(changed: StripSet) -> usize {
    match changed.len() {
        0 | 1 => 1,
        several => 1 + several as usize,
    }
}

/// Why a place of a ring holds no batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// It is unwritten, or holds something else.
    #[error("no log batch")]
    NoMagic,
    /// Unknown format version.
    #[error("a log batch of version {0}, which this release does not know")]
    Version(u16),
    /// Partly written, or corrupt.
    #[error("a torn log batch")]
    Torn,
    /// Of another pool, member, generation or ring.
    #[error("a batch of another parity log")]
    WrongRing,
    /// The checksum is valid, but the contents are inconsistent.
    #[error("a log batch that contradicts itself")]
    Inconsistent,
}

/// A batch of entries, written at once.
#[derive(Clone, Debug)]
pub struct LogBatch {
    /// Its sequence number, consecutive in a ring.
    pub sequence: u64,
    /// The sequence number of the first batch in the ring with an unretired entry; at most its own.
    pub tail: u64,
    /// The entries.
    pub entries: Vec<LogEntry>,
    /// The payload blocks, entry by entry.
    pub blocks: Vec<Buf>,
}

impl LogBatch {
    /// The place in the ring of the batch with this sequence number.
    #[must_use]
    pub fn ring_index(sequence: u64) -> u32 {
        u32::try_from(sequence % u64::from(RING_BATCHES)).unwrap_or(0)
    }

    /// Whether a further entry fits.
    #[must_use]
    pub fn has_space(&self, entry: &LogEntry) -> bool {
        let blocks = 1 + self.blocks.len() + entry.payload_blocks();
        self.entries.len() < MAX_BATCH_ENTRIES && blocks <= BATCH_BLOCKS
    }

    /// The bytes of the batch. `head` becomes its first block; the others are shared.
    ///
    /// # Panics
    /// If it does not fit its place, if a block is not [`BLOCK_BYTES`] long, or if the number of
    /// blocks does not match the entries.
    #[must_use]
    pub fn into_bufs(self, ring: &RingId, mut head: BufMut) -> Bufs {
        let blocks: usize = self.entries.iter().map(LogEntry::payload_blocks).sum();
        assert!(
            self.entries.len() <= MAX_BATCH_ENTRIES && blocks < BATCH_BLOCKS,
            "a log batch larger than its slot"
        );
        assert_eq!(blocks, self.blocks.len(), "blocks of a batch");
        let fields = BatchHeader {
            magic: MAGIC,
            version: VERSION.into(),
            blocks: u16::try_from(1 + blocks).unwrap_or(u16::MAX).into(),
            checksum: 0.into(),
            pool: ring.pool.into_bytes(),
            member: ring.member.into_bytes(),
            generation: ring.generation.into(),
            sequence: self.sequence.into(),
            tail: self.tail.into(),
            ring: ring.number.into(),
            entries: u32::try_from(self.entries.len()).unwrap_or(u32::MAX).into(),
            reserved: [0; 8],
        };
        assert_eq!(head.len(), BLOCK_BYTES, "the header of a batch");
        head.fill(0);
        head[..HEADER_BYTES].copy_from_slice(fields.as_bytes());
        for (stored, entry) in head[HEADER_BYTES..].chunks_exact_mut(ENTRY_BYTES).zip(&self.entries)
        {
            stored.copy_from_slice(entry.to_stored().as_bytes());
        }
        let first = embedded_checksum::begin_checksum(&head, CHECKSUM_AT);
        let checksum = self.blocks.iter().fold(first, |sum, block| {
            assert_eq!(block.len(), BLOCK_BYTES, "a block of a batch");
            sum.update(block)
        });
        head[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.value().to_le_bytes());
        std::iter::once(head.freeze()).chain(self.blocks).collect()
    }

    /// Parses a place of the ring.
    ///
    /// # Errors
    /// Why it holds no batch of this ring.
    pub fn parse(slot: &Bufs, ring: &RingId) -> Result<Self, BatchError> {
        let first = slot.slice(0..slot.len().min(BLOCK_BYTES)).to_vec();
        let header = BatchHeader::read_from_prefix(&first).map_err(|_| BatchError::NoMagic)?.0;
        if header.magic != MAGIC {
            return Err(BatchError::NoMagic);
        }
        let blocks = usize::from(header.blocks.get());
        if !(1..=BATCH_BLOCKS).contains(&blocks) || slot.len() < blocks * BLOCK_BYTES {
            return Err(BatchError::Torn);
        }
        let whole = slot.slice(0..blocks * BLOCK_BYTES);
        let rest = whole.slice(BLOCK_BYTES..whole.len());
        let crc = embedded_checksum::begin_checksum(&first, CHECKSUM_AT);
        let crc = rest.iter().fold(crc, |crc, part| crc.update(part));
        if crc.value() != header.checksum.get() {
            return Err(BatchError::Torn);
        }
        if !header.is_of_ring(ring) {
            return Err(BatchError::WrongRing);
        }
        if header.version.get() != VERSION {
            return Err(BatchError::Version(header.version.get()));
        }
        let entries = parse_entries(&header, &first).ok_or(BatchError::Inconsistent)?;
        let payload: usize = entries.iter().map(LogEntry::payload_blocks).sum();
        let (sequence, tail) = (header.sequence.get(), header.tail.get());
        if payload + 1 != blocks || tail > sequence {
            return Err(BatchError::Inconsistent);
        }
        let at = |n: usize| whole.slice(n * BLOCK_BYTES..(n + 1) * BLOCK_BYTES);
        let blocks = (1..blocks).map(|n| contiguous(&at(n))).collect();
        Ok(Self { sequence, tail, entries, blocks })
    }
}

impl BatchHeader {
    fn is_of_ring(&self, ring: &RingId) -> bool {
        let RingId { pool, member, generation, number } = ring;
        self.pool == pool.into_bytes()
            && self.member == member.into_bytes()
            && (self.generation.get(), self.ring.get()) == (*generation, *number)
    }
}

fn parse_entries(header: &BatchHeader, first: &[u8]) -> Option<Vec<LogEntry>> {
    let count = usize::try_from(header.entries.get()).ok().filter(|n| *n <= MAX_BATCH_ENTRIES)?;
    let (used, rest) = first[HEADER_BYTES..].split_at(count * ENTRY_BYTES);
    if header.reserved != [0; 8] || rest.iter().any(|b| *b != 0) {
        return None;
    }
    let stored = used.chunks_exact(ENTRY_BYTES).map(StoredEntry::read_from_bytes);
    stored.map(|entry| LogEntry::parse(&entry.ok()?)).collect()
}

/// A block in contiguous memory.
pub(super) fn contiguous(block: &Bufs) -> Buf {
    let mut parts = block.iter();
    if let (Some(only), None) = (parts.next(), parts.next()) {
        return only.clone();
    }
    let mut copy = BufMut::heap_page();
    block.copy_to(&mut copy);
    copy.freeze()
}

#[cfg(test)]
mod tests;
