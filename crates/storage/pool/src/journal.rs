//! Changes of a pool's metadata, as they lie on a member ([format](../../../../docs/format/pool.md)).
//!
//! A block is what one version changes. Version `v` lies in block `v mod n` of a journal of `n` blocks.

use geometry::{Level, Shape};
use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use wire::{TEXT_BYTES, Text};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::metadata::{
    Change, ErrorCounts, MemberId, Metadata, Piece, Refused, ScrubRecord, Stamp, Standing, VolumeId,
};

/// Length in bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

const MAGIC: [u8; 16] = *b"WINDROSE CHANGE\n";

/// The version of the format.
const VERSION: u16 = 2;

const HEAD_BYTES: usize = 112;
const RECORD_BYTES: usize = 8;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    magic: [u8; 16],
    version: U16,
    records: U16,
    length: U32,
    checksum: U32,
    reserved: U32,
    pool: [u8; 16],
    id: [u8; 16],
    previous: [u8; 16],
    opening: U64,
    made: U64,
    counted: U64,
    reserved_b: U64,
}

const _: () = assert!(size_of::<Head>() == HEAD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(Head, checksum);

wire::open_enum! {
    /// What a record is about, as stored.
    enum Kind: u16 {
        Opened = 1,
        Recovered = 2,
        Add = 3,
        Out = 4,
        Back = 5,
        Stand = 6,
        Remove = 7,
        CreateVolume = 8,
        GrowVolume = 9,
        DeleteVolume = 10,
        Allocate = 11,
        Free = 12,
        Move = 13,
        Mark = 14,
        Caught = 15,
        Lost = 16,
        Rewritten = 17,
        Unrepaired = 18,
        Counted = 19,
        Scrubbed = 20,
    }
}

wire::open_enum! {
    /// What a member is there for, as stored.
    pub(super) enum StoredStanding: u16 {
        In = 1,
        Spare = 2,
        Leaving = 3,
        Out = 4,
    }
}

wire::open_enum! {
    /// A level, as stored: below these it is a number of copies.
    enum StoredLevel: u16 {
        Parity = 0x100,
        DoubleParity = 0x200,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Record {
    kind: U16,
    bytes: U16,
    subject: U32,
}

const _: () = assert!(size_of::<Record>() == RECORD_BYTES);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct OpenedBody {
    id: [u8; 16],
    forced: U32,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct AddBody {
    uuid: [u8; 16],
    serial: [u8; TEXT_BYTES],
    units: U32,
    room: U32,
    units_at: U64,
    spare: U32,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct CreateBody {
    uuid: [u8; 16],
    bytes: U64,
    block_size: U32,
    shape: StoredShape,
    thick: U32,
    reserved: U32,
}

/// A shape, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StoredShape {
    level: U16,
    columns: U16,
    strip_rows: U32,
    stripes: U32,
}

const _: () = assert!(size_of::<StoredShape>() == 12);

/// A piece, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StoredPiece {
    unit: U32,
    member: U16,
    reserved: U16,
}

/// Length in bytes of a piece, as stored.
pub(super) const PIECE_RECORD_BYTES: usize = 8;
const _: () = assert!(size_of::<StoredPiece>() == PIECE_RECORD_BYTES);

/// Numbers, as several kinds have them: what they are is said in the format's page.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ExtentBody {
    index: U32,
    column: U32,
}

/// Errors of a member, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StoredErrors {
    reads: U64,
    writes: U64,
    checksums: U64,
    repaired: U64,
    unrepairable: U64,
    since_s: U64,
}

const _: () = assert!(size_of::<StoredErrors>() == 48);

/// A scrub that has ended, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StoredScrub {
    ended_s: U64,
    bytes: U64,
    repaired: U64,
    unrepairable: U64,
}

const _: () = assert!(size_of::<StoredScrub>() == 32);

impl StoredErrors {
    pub(super) fn of(errors: ErrorCounts) -> Self {
        let ErrorCounts { reads, writes, checksums, repaired, unrepairable, since_s } = errors;
        Self {
            reads: reads.into(),
            writes: writes.into(),
            checksums: checksums.into(),
            repaired: repaired.into(),
            unrepairable: unrepairable.into(),
            since_s: since_s.into(),
        }
    }

    pub(super) fn parse(self) -> ErrorCounts {
        ErrorCounts {
            reads: self.reads.get(),
            writes: self.writes.get(),
            checksums: self.checksums.get(),
            repaired: self.repaired.get(),
            unrepairable: self.unrepairable.get(),
            since_s: self.since_s.get(),
        }
    }
}

impl StoredScrub {
    pub(super) fn of(scrub: ScrubRecord) -> Self {
        let ScrubRecord { ended_s, bytes, repaired, unrepairable } = scrub;
        let (ended_s, bytes) = (ended_s.into(), bytes.into());
        Self { ended_s, bytes, repaired: repaired.into(), unrepairable: unrepairable.into() }
    }

    pub(super) fn parse(self) -> ScrubRecord {
        ScrubRecord {
            ended_s: self.ended_s.get(),
            bytes: self.bytes.get(),
            repaired: self.repaired.get(),
            unrepairable: self.unrepairable.get(),
        }
    }
}

impl StoredShape {
    pub(super) fn of(shape: &Shape) -> Self {
        let level = match shape.level() {
            Level::Copies(copies) => copies,
            Level::Parity => StoredLevel::Parity.0,
            Level::DoubleParity => StoredLevel::DoubleParity.0,
        };
        Self {
            level: level.into(),
            columns: shape.columns().into(),
            strip_rows: shape.strip_rows().into(),
            stripes: shape.stripes().into(),
        }
    }

    pub(super) fn parse(self) -> Option<Shape> {
        let level = match StoredLevel(self.level.get()) {
            StoredLevel::Parity => Level::Parity,
            StoredLevel::DoubleParity => Level::DoubleParity,
            copies => Level::Copies(copies.0),
        };
        Shape::new(level, self.columns.get(), self.strip_rows.get(), self.stripes.get()).ok()
    }
}

impl StoredPiece {
    pub(super) fn of(piece: Piece) -> Self {
        let Piece { member, unit } = piece;
        Self { unit: unit.into(), member: member.0.into(), reserved: 0.into() }
    }

    /// Whether what is reserved is zero.
    pub(super) fn is_clean(self) -> bool {
        self.reserved.get() == 0
    }

    pub(super) fn parse(self) -> Piece {
        Piece { member: MemberId(self.member.get()), unit: self.unit.get() }
    }
}

/// What one version changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The version that it makes.
    pub stamp: Stamp,
    /// The opening that the version before it is of.
    pub previous: Uuid,
    /// The last version that was durable on all that had a vote in it.
    pub counted: u64,
    /// What it changes: nothing, if it is only to say what counts.
    pub changes: Vec<Change>,
}

/// Why a place holds no block of a pool's journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoBlock {
    /// Nothing was written there, or something else.
    #[error("no change of a pool")]
    Foreign,
    /// Of a release that is not known.
    #[error("version {0} of a pool's changes is not known")]
    Version(u16),
    /// Not all of it is there.
    #[error("a torn change of a pool")]
    Torn,
    /// Another pool's.
    #[error("a change of another pool")]
    Other,
    /// Sealed, and makes no sense.
    #[error("a change of a pool that contradicts itself")]
    Contradiction,
}

/// Why a block does not follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSuccessor {
    /// It is not the next version, or of another history.
    #[error("it does not follow what is known")]
    Elsewhere,
    /// It cannot be made of what is known.
    #[error("{0}")]
    Refused(#[from] Refused),
}

impl Change {
    fn kind(&self) -> Kind {
        match self {
            Self::Opened { .. } => Kind::Opened,
            Self::Recovered => Kind::Recovered,
            Self::Add { .. } => Kind::Add,
            Self::Out(_) => Kind::Out,
            Self::Back { .. } => Kind::Back,
            Self::Stand { .. } => Kind::Stand,
            Self::Remove(_) => Kind::Remove,
            Self::CreateVolume { .. } => Kind::CreateVolume,
            Self::GrowVolume { .. } => Kind::GrowVolume,
            Self::DeleteVolume(_) => Kind::DeleteVolume,
            Self::Allocate { .. } => Kind::Allocate,
            Self::Free { .. } => Kind::Free,
            Self::Move { .. } => Kind::Move,
            Self::Mark { .. } => Kind::Mark,
            Self::Caught { .. } => Kind::Caught,
            Self::Lost { .. } => Kind::Lost,
            Self::Rewritten { .. } => Kind::Rewritten,
            Self::Unrepaired { .. } => Kind::Unrepaired,
            Self::Counted { .. } => Kind::Counted,
            Self::Scrubbed(_) => Kind::Scrubbed,
        }
    }

    /// The member or volume that it is about.
    fn subject(&self) -> u32 {
        match self {
            Self::Opened { .. } | Self::Recovered | Self::Scrubbed(_) => 0,
            Self::Add { member, .. }
            | Self::Out(member)
            | Self::Back { member, .. }
            | Self::Stand { member, .. }
            | Self::Counted { member, .. }
            | Self::Remove(member) => member.0.into(),
            Self::CreateVolume { volume, .. }
            | Self::GrowVolume { volume, .. }
            | Self::DeleteVolume(volume)
            | Self::Allocate { volume, .. }
            | Self::Free { volume, .. }
            | Self::Move { volume, .. }
            | Self::Mark { volume, .. }
            | Self::Caught { volume, .. }
            | Self::Lost { volume, .. }
            | Self::Rewritten { volume, .. }
            | Self::Unrepaired { volume, .. } => volume.0,
        }
    }

    /// Appends what belongs to it alone.
    fn put_body(&self, out: &mut Vec<u8>) {
        let extent = |out: &mut Vec<u8>, index: u32, column: u32| {
            let body = ExtentBody { index: index.into(), column: column.into() };
            out.extend_from_slice(body.as_bytes());
        };
        let number = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_le_bytes());
        match self {
            Self::Recovered | Self::Out(_) | Self::Remove(_) | Self::DeleteVolume(_) => {}
            Self::Opened { id, forced } => {
                let (id, forced) = (id.into_bytes(), u32::from(*forced).into());
                out.extend_from_slice(OpenedBody { id, forced, reserved: 0.into() }.as_bytes());
            }
            Self::Add { uuid, serial, units, room, units_at, spare, .. } => {
                let body = AddBody {
                    uuid: uuid.into_bytes(),
                    serial: serial.to_bytes(),
                    units: (*units).into(),
                    room: (*room).into(),
                    units_at: (*units_at).into(),
                    spare: u32::from(*spare).into(),
                    reserved: 0.into(),
                };
                out.extend_from_slice(body.as_bytes());
            }
            Self::Back { marked, .. } => number(out, u64::from(*marked)),
            Self::Stand { standing, .. } => number(out, stored_standing(*standing).0.into()),
            Self::CreateVolume { uuid, shape, bytes, block_size, thick, .. } => {
                let body = CreateBody {
                    uuid: uuid.into_bytes(),
                    bytes: (*bytes).into(),
                    block_size: (*block_size).into(),
                    shape: StoredShape::of(shape),
                    thick: u32::from(*thick).into(),
                    reserved: 0.into(),
                };
                out.extend_from_slice(body.as_bytes());
            }
            Self::GrowVolume { bytes, .. } => number(out, *bytes),
            Self::Free { index, .. } => extent(out, *index, 0),
            Self::Allocate { index, pieces, .. } => {
                extent(out, *index, u32::try_from(pieces.len()).unwrap_or(u32::MAX));
                let pieces = pieces.iter().map(|piece| StoredPiece::of(*piece));
                pieces.for_each(|piece| out.extend_from_slice(piece.as_bytes()));
            }
            Self::Move { index, column, to, .. } => {
                extent(out, *index, (*column).into());
                out.extend_from_slice(StoredPiece::of(*to).as_bytes());
            }
            Self::Mark { index, regions, .. } => extent(out, *index, *regions),
            Self::Caught { index, column, regions, .. } => {
                extent(out, *index, (*column).into());
                number(out, (*regions).into());
            }
            Self::Lost { index, row, rows, .. }
            | Self::Rewritten { index, row, rows, .. }
            | Self::Unrepaired { index, row, rows, .. } => {
                extent(out, *index, *row);
                number(out, (*rows).into());
            }
            Self::Counted { errors, .. } => {
                out.extend_from_slice(StoredErrors::of(*errors).as_bytes());
            }
            Self::Scrubbed(scrub) => out.extend_from_slice(StoredScrub::of(*scrub).as_bytes()),
        }
    }

    /// Appends it as a record.
    fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; RECORD_BYTES]);
        self.put_body(out);
        let bytes = u16::try_from(out.len() - start).unwrap_or(u16::MAX);
        let subject = self.subject().into();
        let record = Record { kind: self.kind().0.into(), bytes: bytes.into(), subject };
        out[start..start + RECORD_BYTES].copy_from_slice(record.as_bytes());
    }

    /// Length in bytes of its record.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        let mut out = Vec::new();
        self.put(&mut out);
        out.len()
    }

    /// The record at the beginning of `bytes`, and what lies behind it.
    fn take(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let record = Record::read_from_prefix(bytes).ok()?.0;
        let (whole, rest) = bytes.split_at_checked(record.bytes.get().into())?;
        let subject = record.subject.get();
        let body = whole.get(RECORD_BYTES..)?;
        let kind = Kind(record.kind.get());
        let change = match kind {
            Kind::Opened | Kind::Recovered | Kind::Scrubbed => Self::parse_general(kind, body),
            Kind::Add | Kind::Out | Kind::Back | Kind::Stand | Kind::Remove | Kind::Counted => {
                Self::parse_member(kind, MemberId(u16::try_from(subject).ok()?), body)
            }
            Kind::CreateVolume | Kind::GrowVolume | Kind::DeleteVolume => {
                Self::parse_volume(kind, VolumeId(subject), body)
            }
            _ => Self::parse_extent(kind, VolumeId(subject), body),
        }?;
        // What is reserved is zero, and every flag is one of two.
        let mut again = Vec::with_capacity(whole.len());
        change.put(&mut again);
        (again == whole).then_some((change, rest))
    }

    fn parse_general(kind: Kind, body: &[u8]) -> Option<Self> {
        if kind == Kind::Recovered {
            return Some(Self::Recovered);
        }
        if kind == Kind::Scrubbed {
            return Some(Self::Scrubbed(StoredScrub::read_from_bytes(body).ok()?.parse()));
        }
        let body = OpenedBody::read_from_bytes(body).ok()?;
        Some(Self::Opened { id: Uuid::from_bytes(body.id), forced: body.forced.get() == 1 })
    }

    fn parse_member(kind: Kind, member: MemberId, body: &[u8]) -> Option<Self> {
        let number = || U64::read_from_bytes(body).ok().map(U64::get);
        Some(match kind {
            Kind::Add => {
                let body = AddBody::read_from_bytes(body).ok()?;
                Self::Add {
                    member,
                    uuid: Uuid::from_bytes(body.uuid),
                    serial: Text::parse(&body.serial)?,
                    units: body.units.get(),
                    room: body.room.get(),
                    units_at: body.units_at.get(),
                    spare: body.spare.get() == 1,
                }
            }
            Kind::Out => Self::Out(member),
            Kind::Back => Self::Back { member, marked: number()? == 1 },
            Kind::Stand => {
                let standing = match StoredStanding(u16::try_from(number()?).ok()?) {
                    StoredStanding::In => Standing::In,
                    StoredStanding::Spare => Standing::Spare,
                    StoredStanding::Leaving => Standing::Leaving,
                    _ => return None,
                };
                Self::Stand { member, standing }
            }
            Kind::Counted => {
                let errors = StoredErrors::read_from_bytes(body).ok()?.parse();
                Self::Counted { member, errors }
            }
            _ => Self::Remove(member),
        })
    }

    fn parse_volume(kind: Kind, volume: VolumeId, body: &[u8]) -> Option<Self> {
        Some(match kind {
            Kind::CreateVolume => {
                let body = CreateBody::read_from_bytes(body).ok()?;
                Self::CreateVolume {
                    volume,
                    uuid: Uuid::from_bytes(body.uuid),
                    shape: body.shape.parse()?,
                    bytes: body.bytes.get(),
                    block_size: body.block_size.get(),
                    thick: body.thick.get() == 1,
                }
            }
            Kind::GrowVolume => {
                Self::GrowVolume { volume, bytes: U64::read_from_bytes(body).ok()?.get() }
            }
            _ => Self::DeleteVolume(volume),
        })
    }

    fn parse_extent(kind: Kind, volume: VolumeId, body: &[u8]) -> Option<Self> {
        let (extent, rest) = ExtentBody::read_from_prefix(body).ok()?;
        let (index, number) = (extent.index.get(), extent.column.get());
        let column = || u16::try_from(number).ok();
        let more = || u32::try_from(U64::read_from_bytes(rest).ok()?.get()).ok();
        Some(match kind {
            Kind::Allocate => {
                let pieces = rest.chunks_exact(PIECE_RECORD_BYTES);
                let pieces = pieces.map(|p| Some(StoredPiece::read_from_bytes(p).ok()?.parse()));
                Self::Allocate { volume, index, pieces: pieces.collect::<Option<_>>()? }
            }
            Kind::Free => Self::Free { volume, index },
            Kind::Move => {
                let to = StoredPiece::read_from_bytes(rest).ok()?.parse();
                Self::Move { volume, index, column: column()?, to }
            }
            Kind::Mark => Self::Mark { volume, index, regions: number },
            Kind::Caught => Self::Caught { volume, index, column: column()?, regions: more()? },
            Kind::Lost => Self::Lost { volume, index, row: number, rows: more()? },
            Kind::Rewritten => Self::Rewritten { volume, index, row: number, rows: more()? },
            Kind::Unrepaired => Self::Unrepaired { volume, index, row: number, rows: more()? },
            _ => return None,
        })
    }
}

/// What a standing is called on disk.
pub(super) fn stored_standing(standing: Standing) -> StoredStanding {
    match standing {
        Standing::In => StoredStanding::In,
        Standing::Spare => StoredStanding::Spare,
        Standing::Leaving => StoredStanding::Leaving,
        Standing::Out { .. } => StoredStanding::Out,
    }
}

impl Block {
    /// The block of the journal, of so many, that a version lies in.
    #[must_use]
    pub fn place(version: u64, blocks: u32) -> u32 {
        u32::try_from(version % u64::from(blocks.max(1))).unwrap_or(0)
    }

    /// Bytes that changes may take together.
    #[must_use]
    pub fn room() -> usize {
        BLOCK_BYTES - HEAD_BYTES
    }

    /// Its bytes.
    ///
    /// # Panics
    /// If its changes do not fit: see [`Block::room`] and [`Change::record_bytes`].
    #[must_use]
    pub fn to_bytes(&self, pool: Uuid) -> [u8; BLOCK_BYTES] {
        let mut records = Vec::new();
        self.changes.iter().for_each(|change| change.put(&mut records));
        assert!(records.len() <= Self::room(), "changes beyond a block");
        let head = Head {
            magic: MAGIC,
            version: VERSION.into(),
            records: u16::try_from(self.changes.len()).unwrap_or(u16::MAX).into(),
            length: u32::try_from(records.len()).unwrap_or(u32::MAX).into(),
            checksum: 0.into(),
            reserved: 0.into(),
            pool: pool.into_bytes(),
            id: self.stamp.id.into_bytes(),
            previous: self.previous.into_bytes(),
            opening: self.stamp.opening.into(),
            made: self.stamp.version.into(),
            counted: self.counted.into(),
            reserved_b: 0.into(),
        };
        let mut out = [0; BLOCK_BYTES];
        out[..HEAD_BYTES].copy_from_slice(head.as_bytes());
        out[HEAD_BYTES..HEAD_BYTES + records.len()].copy_from_slice(&records);
        seal(&mut out, CHECKSUM_AT);
        out
    }

    /// The block that these bytes are.
    ///
    /// # Errors
    /// Why they are none of this pool.
    pub fn parse(bytes: &[u8; BLOCK_BYTES], pool: Uuid) -> Result<Self, NoBlock> {
        let (head, rest) = Head::read_from_prefix(bytes).map_err(|_| NoBlock::Foreign)?;
        if head.magic != MAGIC {
            return Err(NoBlock::Foreign);
        }
        if !is_sealed(bytes, CHECKSUM_AT) {
            return Err(NoBlock::Torn);
        }
        if head.version.get() != VERSION {
            return Err(NoBlock::Version(head.version.get()));
        }
        if head.pool != pool.into_bytes() {
            return Err(NoBlock::Other);
        }
        let changes = changes(&head, rest).ok_or(NoBlock::Contradiction)?;
        let stamp = Stamp {
            opening: head.opening.get(),
            version: head.made.get(),
            id: Uuid::from_bytes(head.id),
        };
        let counted = head.counted.get();
        if counted >= stamp.version {
            return Err(NoBlock::Contradiction);
        }
        Ok(Self { stamp, previous: Uuid::from_bytes(head.previous), counted, changes })
    }
}

fn changes(head: &Head, rest: &[u8]) -> Option<Vec<Change>> {
    let length = usize::try_from(head.length.get()).ok()?;
    let (mut records, behind) = rest.split_at_checked(length)?;
    let reserved = head.reserved.get() == 0 && head.reserved_b.get() == 0;
    if !reserved || behind.iter().any(|b| *b != 0) {
        return None;
    }
    let mut changes = Vec::new();
    while !records.is_empty() {
        let (change, rest) = Change::take(records)?;
        changes.push(change);
        records = rest;
    }
    (changes.len() == usize::from(head.records.get())).then_some(changes)
}

impl Metadata {
    /// Makes the version of a block that follows this one.
    ///
    /// # Errors
    /// That it does not follow, and nothing is changed; or that it cannot be made of this, and then what was made of it is of
    /// no use any more.
    pub fn replay(&mut self, block: &Block) -> Result<(), NoSuccessor> {
        let here = self.stamp();
        if here.id != block.previous || here.version.checked_add(1) != Some(block.stamp.version) {
            return Err(NoSuccessor::Elsewhere);
        }
        self.start(block.counted)?;
        for change in &block.changes {
            self.apply(change)?;
        }
        if self.stamp() == block.stamp {
            Ok(())
        } else {
            Err(NoSuccessor::Refused(Refused::Senseless("a version of another opening")))
        }
    }
}

#[cfg(test)]
mod tests;
