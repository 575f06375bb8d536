//! A batch of the parity log, as it lies in its slot on a member ([format](../../../../docs/format/parity-log.md)).

use block::{Buf, BufMut, Bufs};
use geometry::ROW_BYTES;
use uuid::Uuid;
use wire::seal;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::row::Strips;

/// Length in bytes of a block: the batch's head, and each row of what it holds.
pub const BLOCK_BYTES: usize = ROW_BYTES as usize;

/// Most blocks of a batch, its head counted: as many as its slot has.
pub const SLOT_BLOCKS: usize = 32;

/// Slots of a ring.
pub const SLOTS: u32 = 64;

/// Most entries of a batch.
pub const MAX_ENTRIES: usize = (BLOCK_BYTES - HEAD_BYTES) / ENTRY_BYTES;

const MAGIC: [u8; 16] = *b"WINDROSE PARITY\n";

/// The only version so far.
const VERSION: u16 = 1;

const HEAD_BYTES: usize = 96;
const ENTRY_BYTES: usize = 40;

wire::open_enum! {
    /// What an entry is about, as stored.
    enum Kind: u16 {
        Rows = 1,
        Whole = 2,
        Copies = 3,
    }
}

/// The head's fields in their places; entries follow, and then zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    magic: [u8; 16],
    version: U16,
    blocks: U16,
    checksum: U32,
    pool: [u8; 16],
    member: [u8; 16],
    era: U64,
    sequence: U64,
    tail: U64,
    ring: U32,
    entries: U32,
    reserved: [u8; 8],
}

const _: () = assert!(size_of::<Head>() == HEAD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(Head, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredEntry {
    number: U64,
    extent: U64,
    changed: U64,
    place: U32,
    stripe: U32,
    row: U32,
    rows: U16,
    kind: U16,
}

const _: () = assert!(size_of::<StoredEntry>() == ENTRY_BYTES);

/// Whose ring a batch belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// The pool.
    pub pool: Uuid,
    /// The member that it lies on.
    pub member: Uuid,
    /// The version of the pool's metadata with which it began.
    pub era: u64,
    /// Number of the ring on its member.
    pub number: u32,
}

/// What is about to be written, or was. Places are stripes by where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its number, the same in the logs of all members that have it. Later ones have greater numbers.
    pub number: u64,
    /// The extent.
    pub extent: u64,
    /// Where in it the stripe lies.
    pub place: u32,
    /// What is done there.
    pub what: What,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Rows of a stripe are written. The batch holds for each of them the sum of the kept strips for its member's parity, and
    /// where several strips change the new data of these, in ascending order.
    Rows {
        /// The first row.
        row: u32,
        /// How many: at least one.
        rows: u16,
        /// The strips that change: at least one.
        changed: Strips,
    },
    /// A whole stripe was written out of place.
    Whole {
        /// Number of the stripe.
        stripe: u32,
    },
    /// Copies are written, and are not alike meanwhile.
    Copies {
        /// How many stripes, that at the place being the first: at least one.
        stripes: u32,
        /// The strips of these whose copies are: at least one.
        changed: Strips,
    },
}

impl Entry {
    /// Blocks that a batch holds for it beside its head.
    #[must_use]
    pub fn blocks(&self) -> usize {
        match self.what {
            What::Rows { rows, changed, .. } => usize::from(rows) * blocks_of_row(changed),
            What::Whole { .. } | What::Copies { .. } => 0,
        }
    }

    fn stored(self) -> StoredEntry {
        let (kind, stripe, row, rows, changed) = match self.what {
            What::Rows { row, rows, changed } => (Kind::Rows, 0, row, rows, changed),
            What::Whole { stripe } => (Kind::Whole, stripe, 0, 0, Strips::default()),
            What::Copies { stripes, changed } => (Kind::Copies, stripes, 0, 0, changed),
        };
        StoredEntry {
            number: self.number.into(),
            extent: self.extent.into(),
            changed: changed.bits().into(),
            place: self.place.into(),
            stripe: stripe.into(),
            row: row.into(),
            rows: rows.into(),
            kind: kind.0.into(),
        }
    }

    fn parse(stored: &StoredEntry) -> Option<Self> {
        let changed = Strips::from_bits(stored.changed.get());
        let (rows, stripe) = (stored.rows.get(), stored.stripe.get());
        let what = match Kind(stored.kind.get()) {
            Kind::Rows if rows > 0 && !changed.is_empty() => {
                What::Rows { row: stored.row.get(), rows, changed }
            }
            Kind::Whole => What::Whole { stripe },
            Kind::Copies if stripe > 0 && !changed.is_empty() => {
                What::Copies { stripes: stripe, changed }
            }
            _ => return None,
        };
        let (number, extent) = (stored.number.get(), stored.extent.get());
        let entry = Self { number, extent, place: stored.place.get(), what };
        // What belongs to another kind is zero.
        (entry.stored().as_bytes() == stored.as_bytes()).then_some(entry)
    }
}

/// Blocks for one row: the sum of what is kept, and the data if several strips change.
pub(super) fn blocks_of_row(changed: Strips) -> usize {
    match changed.len() {
        0 | 1 => 1,
        several => 1 + several as usize,
    }
}

/// Why a slot holds no batch of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoBatch {
    /// Nothing was written there, or something else.
    #[error("no batch of a parity log")]
    Foreign,
    /// Of a release that is not known.
    #[error("version {0} of a parity log is not known")]
    Version(u16),
    /// Not all of it was written, or it has rotted.
    #[error("a torn batch of a parity log")]
    Torn,
    /// Of another pool, member, era or ring.
    #[error("a batch of another parity log")]
    Other,
    /// Its checksum holds, and it contradicts itself.
    #[error("a batch of a parity log that contradicts itself")]
    Contradiction,
}

/// A batch.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Its number: each has the next one.
    pub sequence: u64,
    /// The first batch of its ring whose entries are not all retired: at most its own.
    pub tail: u64,
    /// What was about to be written, or was.
    pub entries: Vec<Entry>,
    /// What it holds for these, one entry's blocks behind the other's.
    pub blocks: Vec<Buf>,
}

impl Batch {
    /// The slot that a batch of this number lies in.
    #[must_use]
    pub fn slot(sequence: u64) -> u32 {
        u32::try_from(sequence % u64::from(SLOTS)).unwrap_or(0)
    }

    /// Whether an entry fits beside those that it has.
    #[must_use]
    pub fn has_room(&self, entry: &Entry) -> bool {
        let blocks = 1 + self.blocks.len() + entry.blocks();
        self.entries.len() < MAX_ENTRIES && blocks <= SLOT_BLOCKS
    }

    /// The bytes of it, of which `head`, a block, is the first; the others are shared.
    ///
    /// # Panics
    /// If it does not fit its slot, if a block is not [`BLOCK_BYTES`] long, or if there are not as many as its entries say.
    #[must_use]
    pub fn into_bufs(self, ring: &Ring, mut head: BufMut) -> Bufs {
        let blocks: usize = self.entries.iter().map(Entry::blocks).sum();
        assert!(
            self.entries.len() <= MAX_ENTRIES && blocks < SLOT_BLOCKS,
            "a batch beyond its slot"
        );
        assert_eq!(blocks, self.blocks.len(), "blocks of a batch");
        let fields = Head {
            magic: MAGIC,
            version: VERSION.into(),
            blocks: u16::try_from(1 + blocks).unwrap_or(u16::MAX).into(),
            checksum: 0.into(),
            pool: ring.pool.into_bytes(),
            member: ring.member.into_bytes(),
            era: ring.era.into(),
            sequence: self.sequence.into(),
            tail: self.tail.into(),
            ring: ring.number.into(),
            entries: u32::try_from(self.entries.len()).unwrap_or(u32::MAX).into(),
            reserved: [0; 8],
        };
        assert_eq!(head.len(), BLOCK_BYTES, "the head of a batch");
        head.fill(0);
        head[..HEAD_BYTES].copy_from_slice(fields.as_bytes());
        for (place, entry) in head[HEAD_BYTES..].chunks_exact_mut(ENTRY_BYTES).zip(&self.entries) {
            place.copy_from_slice(entry.stored().as_bytes());
        }
        let first = seal::checksum(&head, CHECKSUM_AT);
        let checksum = self.blocks.iter().fold(first, |sum, block| {
            assert_eq!(block.len(), BLOCK_BYTES, "a block of a batch");
            sum.update(block)
        });
        head[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.value().to_le_bytes());
        std::iter::once(head.freeze()).chain(self.blocks).collect()
    }

    /// What a slot holds.
    ///
    /// # Errors
    /// Why that is no batch of this ring.
    pub fn parse(slot: &Bufs, ring: &Ring) -> Result<Self, NoBatch> {
        let first = slot.slice(0..slot.len().min(BLOCK_BYTES)).to_vec();
        let head = Head::read_from_prefix(&first).map_err(|_| NoBatch::Foreign)?.0;
        if head.magic != MAGIC {
            return Err(NoBatch::Foreign);
        }
        let blocks = usize::from(head.blocks.get());
        if !(1..=SLOT_BLOCKS).contains(&blocks) || slot.len() < blocks * BLOCK_BYTES {
            return Err(NoBatch::Torn);
        }
        let whole = slot.slice(0..blocks * BLOCK_BYTES);
        let rest = whole.slice(BLOCK_BYTES..whole.len());
        let sum = seal::checksum(&first, CHECKSUM_AT);
        let sum = rest.iter().fold(sum, |sum, piece| sum.update(piece));
        if sum.value() != head.checksum.get() {
            return Err(NoBatch::Torn);
        }
        if !head.is_of(ring) {
            return Err(NoBatch::Other);
        }
        if head.version.get() != VERSION {
            return Err(NoBatch::Version(head.version.get()));
        }
        let entries = entries(&head, &first).ok_or(NoBatch::Contradiction)?;
        let held: usize = entries.iter().map(Entry::blocks).sum();
        let (sequence, tail) = (head.sequence.get(), head.tail.get());
        if held + 1 != blocks || tail > sequence {
            return Err(NoBatch::Contradiction);
        }
        let at = |n: usize| whole.slice(n * BLOCK_BYTES..(n + 1) * BLOCK_BYTES);
        let blocks = (1..blocks).map(|n| one(&at(n))).collect();
        Ok(Self { sequence, tail, entries, blocks })
    }
}

impl Head {
    fn is_of(&self, ring: &Ring) -> bool {
        let Ring { pool, member, era, number } = ring;
        self.pool == pool.into_bytes()
            && self.member == member.into_bytes()
            && (self.era.get(), self.ring.get()) == (*era, *number)
    }
}

fn entries(head: &Head, first: &[u8]) -> Option<Vec<Entry>> {
    let count = usize::try_from(head.entries.get()).ok().filter(|n| *n <= MAX_ENTRIES)?;
    let (used, rest) = first[HEAD_BYTES..].split_at(count * ENTRY_BYTES);
    if head.reserved != [0; 8] || rest.iter().any(|b| *b != 0) {
        return None;
    }
    let stored = used.chunks_exact(ENTRY_BYTES).map(StoredEntry::read_from_bytes);
    stored.map(|entry| Entry::parse(&entry.ok()?)).collect()
}

/// A block in one piece.
pub(super) fn one(block: &Bufs) -> Buf {
    let mut pieces = block.iter();
    if let (Some(only), None) = (pieces.next(), pieces.next()) {
        return only.clone();
    }
    let mut copy = BufMut::lone_page();
    block.copy_to(&mut copy);
    copy.freeze()
}

#[cfg(test)]
mod tests;
