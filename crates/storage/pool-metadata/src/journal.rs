//! The journal of a pool's metadata on a member ([format](../../../../docs/format/pool.md)).
//!
//! A block holds the changes of one version. Version `v` lies in block `v mod n` of a journal of
//! `n` blocks.

use geometry::{RaidGeometry, Redundancy};
use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use wire::{SHORT_TEXT_BYTES, ShortText};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::metadata::{
    Change, ChangeError, MemberErrorCounts, MemberId, Metadata, PhysicalExtent, PoolMemberState,
    PoolVolumeId, ScrubRecord, VersionId,
};

/// Length in bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

const MAGIC: [u8; 16] = *b"WINDROSE CHANGE\n";

/// The version of the format.
const VERSION: u16 = 2;

const HEADER_BYTES: usize = 112;
const RECORD_HEADER_BYTES: usize = 8;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct BlockHeader {
    magic: [u8; 16],
    version: U16,
    records: U16,
    length: U32,
    checksum: U32,
    reserved: U32,
    pool: [u8; 16],
    term_id: [u8; 16],
    previous_term_id: [u8; 16],
    term: U64,
    new_version: U64,
    committed: U64,
    reserved_b: U64,
}

const _: () = assert!(size_of::<BlockHeader>() == HEADER_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(BlockHeader, checksum);

wire::open_enum! {
    /// The kind of a record, as stored.
    enum RecordKind: u16 {
        StartTerm = 1,
        LogsRecovered = 2,
        AddMember = 3,
        Detach = 4,
        Reattach = 5,
        SetMemberState = 6,
        RemoveMember = 7,
        CreateVolume = 8,
        GrowVolume = 9,
        DeleteVolume = 10,
        AllocateExtent = 11,
        FreeExtent = 12,
        MoveColumn = 13,
        MarkStale = 14,
        ClearStale = 15,
        MarkLost = 16,
        MarkRewritten = 17,
        MarkUnrepaired = 18,
        RecordErrors = 19,
        RecordScrub = 20,
    }
}

wire::open_enum! {
    /// The state of a member, as stored.
    pub(super) enum StoredMemberState: u16 {
        Active = 1,
        Spare = 2,
        Draining = 3,
        Detached = 4,
    }
}

wire::open_enum! {
    /// A redundancy, as stored: values below these are a number of copies.
    enum StoredRedundancy: u16 {
        Parity = 0x100,
        DoubleParity = 0x200,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RecordHeader {
    kind: U16,
    record_bytes: U16,
    subject: U32,
}

const _: () = assert!(size_of::<RecordHeader>() == RECORD_HEADER_BYTES);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StartTermBody {
    term_id: [u8; 16],
    forced: U32,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct AddMemberBody {
    uuid: [u8; 16],
    serial: [u8; SHORT_TEXT_BYTES],
    physical_extents: U32,
    snapshot_blocks: U32,
    extents_at: U64,
    is_spare: U32,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct CreateVolumeBody {
    uuid: [u8; 16],
    bytes: U64,
    block_size: U32,
    geometry: StoredGeometry,
    is_thick: U32,
    reserved: U32,
}

/// A geometry, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StoredGeometry {
    redundancy: U16,
    columns: U16,
    strip_rows: U32,
    stripes: U32,
}

const _: () = assert!(size_of::<StoredGeometry>() == 12);

/// A physical extent, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StoredPhysicalExtent {
    index: U32,
    member: U16,
    reserved: U16,
}

/// Length of a stored physical extent, in bytes.
pub(super) const STORED_PHYSICAL_EXTENT_BYTES: usize = 8;
const _: () = assert!(size_of::<StoredPhysicalExtent>() == STORED_PHYSICAL_EXTENT_BYTES);

/// Two numbers, used by several kinds of records; the format page says what they mean.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ExtentRecordBody {
    index: U32,
    operand: U32,
}

/// Errors of a member, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StoredErrorCounts {
    read_errors: U64,
    write_errors: U64,
    corrupt_reads: U64,
    repaired_rows: U64,
    unrecoverable_rows: U64,
    since_s: U64,
}

const _: () = assert!(size_of::<StoredErrorCounts>() == 48);

/// A scrub that has ended, as stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StoredScrubRecord {
    ended_s: U64,
    bytes: U64,
    repaired_rows: U64,
    unrecoverable_rows: U64,
}

const _: () = assert!(size_of::<StoredScrubRecord>() == 32);

impl StoredErrorCounts {
    pub(super) fn from_counts(errors: MemberErrorCounts) -> Self {
        let MemberErrorCounts {
            read_errors: reads,
            write_errors: writes,
            corrupt_reads: checksums,
            repaired_rows: repaired,
            unrecoverable_rows: unrepairable,
            since_s,
        } = errors;
        Self {
            read_errors: reads.into(),
            write_errors: writes.into(),
            corrupt_reads: checksums.into(),
            repaired_rows: repaired.into(),
            unrecoverable_rows: unrepairable.into(),
            since_s: since_s.into(),
        }
    }

    pub(super) fn parse(self) -> MemberErrorCounts {
        MemberErrorCounts {
            read_errors: self.read_errors.get(),
            write_errors: self.write_errors.get(),
            corrupt_reads: self.corrupt_reads.get(),
            repaired_rows: self.repaired_rows.get(),
            unrecoverable_rows: self.unrecoverable_rows.get(),
            since_s: self.since_s.get(),
        }
    }
}

impl StoredScrubRecord {
    pub(super) fn from_record(scrub: ScrubRecord) -> Self {
        let ScrubRecord {
            ended_s,
            bytes,
            repaired_rows: repaired,
            unrecoverable_rows: unrepairable,
        } = scrub;
        let (ended_s, bytes) = (ended_s.into(), bytes.into());
        Self {
            ended_s,
            bytes,
            repaired_rows: repaired.into(),
            unrecoverable_rows: unrepairable.into(),
        }
    }

    pub(super) fn parse(self) -> ScrubRecord {
        ScrubRecord {
            ended_s: self.ended_s.get(),
            bytes: self.bytes.get(),
            repaired_rows: self.repaired_rows.get(),
            unrecoverable_rows: self.unrecoverable_rows.get(),
        }
    }
}

impl StoredGeometry {
    /// As it is stored.
    #[must_use]
    pub fn from_geometry(geometry: &RaidGeometry) -> Self {
        let level = match geometry.redundancy() {
            Redundancy::Copies(copies) => copies,
            Redundancy::Parity => StoredRedundancy::Parity.0,
            Redundancy::DoubleParity => StoredRedundancy::DoubleParity.0,
        };
        Self {
            redundancy: level.into(),
            columns: geometry.columns().into(),
            strip_rows: geometry.strip_rows().into(),
            stripes: geometry.stripes().into(),
        }
    }

    /// The geometry; `None` if there is no such geometry.
    #[must_use]
    pub fn parse(self) -> Option<RaidGeometry> {
        let level = match StoredRedundancy(self.redundancy.get()) {
            StoredRedundancy::Parity => Redundancy::Parity,
            StoredRedundancy::DoubleParity => Redundancy::DoubleParity,
            copies => Redundancy::Copies(copies.0),
        };
        RaidGeometry::new(level, self.columns.get(), self.strip_rows.get(), self.stripes.get()).ok()
    }
}

impl StoredPhysicalExtent {
    pub(super) fn from_physical_extent(extent: PhysicalExtent) -> Self {
        let PhysicalExtent { member, index } = extent;
        Self { index: index.into(), member: member.0.into(), reserved: 0.into() }
    }

    /// Whether the reserved field is zero.
    pub(super) fn is_reserved_zero(self) -> bool {
        self.reserved.get() == 0
    }

    pub(super) fn parse(self) -> PhysicalExtent {
        PhysicalExtent { member: MemberId(self.member.get()), index: self.index.get() }
    }
}

/// The changes of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalBlock {
    /// The version.
    pub version_id: VersionId,
    /// The term of the previous version.
    pub previous_term: Uuid,
    /// The last version that was durable on all of its voters.
    pub committed: u64,
    /// The changes; none, if the block only records a commit.
    pub changes: Vec<Change>,
}

/// Why a block is not one of a pool's journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// It is empty, or holds something else.
    #[error("no journal block")]
    NoMagic,
    /// Of an unknown format version.
    #[error("a journal block of version {0}, which this release does not know")]
    UnknownVersion(u16),
    /// It is incomplete.
    #[error("a torn journal block")]
    Torn,
    /// It belongs to another pool.
    #[error("a journal block of another pool")]
    OtherPool,
    /// Its checksum is right, but its contents are invalid.
    #[error("a journal block that contradicts itself")]
    Inconsistent,
}

/// Why a block cannot be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// It is not the next version, or belongs to another history.
    #[error("it does not follow the version before it")]
    NotSuccessor,
    /// A change cannot be applied.
    #[error("{0}")]
    ChangeRejected(#[from] ChangeError),
}

impl Change {
    fn kind(&self) -> RecordKind {
        match self {
            Self::StartTerm { .. } => RecordKind::StartTerm,
            Self::LogsRecovered => RecordKind::LogsRecovered,
            Self::AddMember { .. } => RecordKind::AddMember,
            Self::Detach(_) => RecordKind::Detach,
            Self::Reattach { .. } => RecordKind::Reattach,
            Self::SetMemberState { .. } => RecordKind::SetMemberState,
            Self::RemoveMember(_) => RecordKind::RemoveMember,
            Self::CreateVolume { .. } => RecordKind::CreateVolume,
            Self::GrowVolume { .. } => RecordKind::GrowVolume,
            Self::DeleteVolume(_) => RecordKind::DeleteVolume,
            Self::AllocateExtent { .. } => RecordKind::AllocateExtent,
            Self::FreeExtent { .. } => RecordKind::FreeExtent,
            Self::MoveColumn { .. } => RecordKind::MoveColumn,
            Self::MarkStale { .. } => RecordKind::MarkStale,
            Self::ClearStale { .. } => RecordKind::ClearStale,
            Self::MarkLost { .. } => RecordKind::MarkLost,
            Self::MarkRewritten { .. } => RecordKind::MarkRewritten,
            Self::MarkUnrepaired { .. } => RecordKind::MarkUnrepaired,
            Self::RecordErrors { .. } => RecordKind::RecordErrors,
            Self::RecordScrub(_) => RecordKind::RecordScrub,
        }
    }

    /// The member or volume that it changes.
    fn subject(&self) -> u32 {
        match self {
            Self::StartTerm { .. } | Self::LogsRecovered | Self::RecordScrub(_) => 0,
            Self::AddMember { member, .. }
            | Self::Detach(member)
            | Self::Reattach { member, .. }
            | Self::SetMemberState { member, .. }
            | Self::RecordErrors { member, .. }
            | Self::RemoveMember(member) => member.0.into(),
            Self::CreateVolume { volume, .. }
            | Self::GrowVolume { volume, .. }
            | Self::DeleteVolume(volume)
            | Self::AllocateExtent { volume, .. }
            | Self::FreeExtent { volume, .. }
            | Self::MoveColumn { volume, .. }
            | Self::MarkStale { volume, .. }
            | Self::ClearStale { volume, .. }
            | Self::MarkLost { volume, .. }
            | Self::MarkRewritten { volume, .. }
            | Self::MarkUnrepaired { volume, .. } => volume.0,
        }
    }

    /// Appends the body of its record.
    #[expect(clippy::too_many_lines, reason = "one arm for each kind of record")]
    fn encode_body(&self, out: &mut Vec<u8>) {
        let extent = |out: &mut Vec<u8>, index: u32, column: u32| {
            let body = ExtentRecordBody { index: index.into(), operand: column.into() };
            out.extend_from_slice(body.as_bytes());
        };
        let number = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_le_bytes());
        match self {
            Self::LogsRecovered
            | Self::Detach(_)
            | Self::RemoveMember(_)
            | Self::DeleteVolume(_) => {}
            Self::StartTerm { term_id: id, is_forced: forced } => {
                let (id, forced) = (id.into_bytes(), u32::from(*forced).into());
                out.extend_from_slice(
                    StartTermBody { term_id: id, forced, reserved: 0.into() }.as_bytes(),
                );
            }
            Self::AddMember {
                uuid,
                serial,
                physical_extents: units,
                snapshot_blocks: room,
                extents_at: units_at,
                is_spare: spare,
                ..
            } => {
                let body = AddMemberBody {
                    uuid: uuid.into_bytes(),
                    serial: serial.to_bytes(),
                    physical_extents: (*units).into(),
                    snapshot_blocks: (*room).into(),
                    extents_at: (*units_at).into(),
                    is_spare: u32::from(*spare).into(),
                    reserved: 0.into(),
                };
                out.extend_from_slice(body.as_bytes());
            }
            Self::Reattach { only_stale_regions: marked, .. } => number(out, u64::from(*marked)),
            Self::SetMemberState { state, .. } => number(out, stored_member_state(*state).0.into()),
            Self::CreateVolume {
                uuid,
                geometry: shape,
                bytes,
                block_size,
                is_thick: thick,
                ..
            } => {
                let body = CreateVolumeBody {
                    uuid: uuid.into_bytes(),
                    bytes: (*bytes).into(),
                    block_size: (*block_size).into(),
                    geometry: StoredGeometry::from_geometry(shape),
                    is_thick: u32::from(*thick).into(),
                    reserved: 0.into(),
                };
                out.extend_from_slice(body.as_bytes());
            }
            Self::GrowVolume { bytes, .. } => number(out, *bytes),
            Self::FreeExtent { index, .. } => extent(out, *index, 0),
            Self::AllocateExtent { index, columns, .. } => {
                extent(out, *index, u32::try_from(columns.len()).unwrap_or(u32::MAX));
                let columns = columns
                    .iter()
                    .map(|column| StoredPhysicalExtent::from_physical_extent(*column));
                columns.for_each(|column| out.extend_from_slice(column.as_bytes()));
            }
            Self::MoveColumn { index, column, to, .. } => {
                extent(out, *index, (*column).into());
                out.extend_from_slice(StoredPhysicalExtent::from_physical_extent(*to).as_bytes());
            }
            Self::MarkStale { index, regions, .. } => extent(out, *index, *regions),
            Self::ClearStale { index, column, regions, .. } => {
                extent(out, *index, (*column).into());
                number(out, (*regions).into());
            }
            Self::MarkLost { index, first_row: row, row_count: rows, .. }
            | Self::MarkRewritten { index, first_row: row, row_count: rows, .. }
            | Self::MarkUnrepaired { index, first_row: row, row_count: rows, .. } => {
                extent(out, *index, *row);
                number(out, (*rows).into());
            }
            Self::RecordErrors { errors, .. } => {
                out.extend_from_slice(StoredErrorCounts::from_counts(*errors).as_bytes());
            }
            Self::RecordScrub(scrub) => {
                out.extend_from_slice(StoredScrubRecord::from_record(*scrub).as_bytes());
            }
        }
    }

    /// Appends its record.
    fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; RECORD_HEADER_BYTES]);
        self.encode_body(out);
        let bytes = u16::try_from(out.len() - start).unwrap_or(u16::MAX);
        let subject = self.subject().into();
        let record =
            RecordHeader { kind: self.kind().0.into(), record_bytes: bytes.into(), subject };
        out[start..start + RECORD_HEADER_BYTES].copy_from_slice(record.as_bytes());
    }

    /// Length of its record, in bytes.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        let mut out = Vec::new();
        self.encode(&mut out);
        out.len()
    }

    /// The first record of `bytes`, and the rest.
    fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let record = RecordHeader::read_from_prefix(bytes).ok()?.0;
        let (whole, rest) = bytes.split_at_checked(record.record_bytes.get().into())?;
        let subject = record.subject.get();
        let body = whole.get(RECORD_HEADER_BYTES..)?;
        let kind = RecordKind(record.kind.get());
        let change = match kind {
            RecordKind::StartTerm | RecordKind::LogsRecovered | RecordKind::RecordScrub => {
                Self::parse_general(kind, body)
            }
            RecordKind::AddMember
            | RecordKind::Detach
            | RecordKind::Reattach
            | RecordKind::SetMemberState
            | RecordKind::RemoveMember
            | RecordKind::RecordErrors => {
                Self::parse_member(kind, MemberId(u16::try_from(subject).ok()?), body)
            }
            RecordKind::CreateVolume | RecordKind::GrowVolume | RecordKind::DeleteVolume => {
                Self::parse_volume(kind, PoolVolumeId(subject), body)
            }
            _ => Self::parse_extent(kind, PoolVolumeId(subject), body),
        }?;
        // Encoding it again checks that reserved fields are zero and flags are 0 or 1.
        let mut again = Vec::with_capacity(whole.len());
        change.encode(&mut again);
        (again == whole).then_some((change, rest))
    }

    fn parse_general(kind: RecordKind, body: &[u8]) -> Option<Self> {
        if kind == RecordKind::LogsRecovered {
            return Some(Self::LogsRecovered);
        }
        if kind == RecordKind::RecordScrub {
            return Some(Self::RecordScrub(StoredScrubRecord::read_from_bytes(body).ok()?.parse()));
        }
        let body = StartTermBody::read_from_bytes(body).ok()?;
        Some(Self::StartTerm {
            term_id: Uuid::from_bytes(body.term_id),
            is_forced: body.forced.get() == 1,
        })
    }

    fn parse_member(kind: RecordKind, member: MemberId, body: &[u8]) -> Option<Self> {
        let number = || U64::read_from_bytes(body).ok().map(U64::get);
        Some(match kind {
            RecordKind::AddMember => {
                let body = AddMemberBody::read_from_bytes(body).ok()?;
                Self::AddMember {
                    member,
                    uuid: Uuid::from_bytes(body.uuid),
                    serial: ShortText::parse(&body.serial)?,
                    physical_extents: body.physical_extents.get(),
                    snapshot_blocks: body.snapshot_blocks.get(),
                    extents_at: body.extents_at.get(),
                    is_spare: body.is_spare.get() == 1,
                }
            }
            RecordKind::Detach => Self::Detach(member),
            RecordKind::Reattach => Self::Reattach { member, only_stale_regions: number()? == 1 },
            RecordKind::SetMemberState => {
                let state = match StoredMemberState(u16::try_from(number()?).ok()?) {
                    StoredMemberState::Active => PoolMemberState::Active,
                    StoredMemberState::Spare => PoolMemberState::Spare,
                    StoredMemberState::Draining => PoolMemberState::Draining,
                    _ => return None,
                };
                Self::SetMemberState { member, state }
            }
            RecordKind::RecordErrors => {
                let errors = StoredErrorCounts::read_from_bytes(body).ok()?.parse();
                Self::RecordErrors { member, errors }
            }
            _ => Self::RemoveMember(member),
        })
    }

    fn parse_volume(kind: RecordKind, volume: PoolVolumeId, body: &[u8]) -> Option<Self> {
        Some(match kind {
            RecordKind::CreateVolume => {
                let body = CreateVolumeBody::read_from_bytes(body).ok()?;
                Self::CreateVolume {
                    volume,
                    uuid: Uuid::from_bytes(body.uuid),
                    geometry: body.geometry.parse()?,
                    bytes: body.bytes.get(),
                    block_size: body.block_size.get(),
                    is_thick: body.is_thick.get() == 1,
                }
            }
            RecordKind::GrowVolume => {
                Self::GrowVolume { volume, bytes: U64::read_from_bytes(body).ok()?.get() }
            }
            _ => Self::DeleteVolume(volume),
        })
    }

    fn parse_extent(kind: RecordKind, volume: PoolVolumeId, body: &[u8]) -> Option<Self> {
        let (extent, rest) = ExtentRecordBody::read_from_prefix(body).ok()?;
        let (index, number) = (extent.index.get(), extent.operand.get());
        let column = || u16::try_from(number).ok();
        let more = || u32::try_from(U64::read_from_bytes(rest).ok()?.get()).ok();
        Some(match kind {
            RecordKind::AllocateExtent => {
                let columns = rest.chunks_exact(STORED_PHYSICAL_EXTENT_BYTES);
                let columns =
                    columns.map(|p| Some(StoredPhysicalExtent::read_from_bytes(p).ok()?.parse()));
                Self::AllocateExtent { volume, index, columns: columns.collect::<Option<_>>()? }
            }
            RecordKind::FreeExtent => Self::FreeExtent { volume, index },
            RecordKind::MoveColumn => {
                let to = StoredPhysicalExtent::read_from_bytes(rest).ok()?.parse();
                Self::MoveColumn { volume, index, column: column()?, to }
            }
            RecordKind::MarkStale => Self::MarkStale { volume, index, regions: number },
            RecordKind::ClearStale => {
                Self::ClearStale { volume, index, column: column()?, regions: more()? }
            }
            RecordKind::MarkLost => {
                Self::MarkLost { volume, index, first_row: number, row_count: more()? }
            }
            RecordKind::MarkRewritten => {
                Self::MarkRewritten { volume, index, first_row: number, row_count: more()? }
            }
            RecordKind::MarkUnrepaired => {
                Self::MarkUnrepaired { volume, index, first_row: number, row_count: more()? }
            }
            _ => return None,
        })
    }
}

/// The stored form of a member state.
pub(super) fn stored_member_state(state: PoolMemberState) -> StoredMemberState {
    match state {
        PoolMemberState::Active => StoredMemberState::Active,
        PoolMemberState::Spare => StoredMemberState::Spare,
        PoolMemberState::Draining => StoredMemberState::Draining,
        PoolMemberState::Detached { .. } => StoredMemberState::Detached,
    }
}

impl JournalBlock {
    /// The block of a journal of `blocks` blocks that holds a version.
    #[must_use]
    pub fn journal_slot(version: u64, blocks: u32) -> u32 {
        u32::try_from(version % u64::from(blocks.max(1))).unwrap_or(0)
    }

    /// Bytes that the changes of one version may take together.
    #[must_use]
    pub fn capacity_bytes() -> usize {
        BLOCK_BYTES - HEADER_BYTES
    }

    /// The bytes of the block.
    ///
    /// # Panics
    /// If its changes do not fit: see [`JournalBlock::capacity_bytes`] and
    /// [`Change::encoded_bytes`].
    #[must_use]
    pub fn to_bytes(&self, pool: Uuid) -> [u8; BLOCK_BYTES] {
        let mut records = Vec::new();
        self.changes.iter().for_each(|change| change.encode(&mut records));
        assert!(records.len() <= Self::capacity_bytes(), "changes beyond a block");
        let head = BlockHeader {
            magic: MAGIC,
            version: VERSION.into(),
            records: u16::try_from(self.changes.len()).unwrap_or(u16::MAX).into(),
            length: u32::try_from(records.len()).unwrap_or(u32::MAX).into(),
            checksum: 0.into(),
            reserved: 0.into(),
            pool: pool.into_bytes(),
            term_id: self.version_id.term_id.into_bytes(),
            previous_term_id: self.previous_term.into_bytes(),
            term: self.version_id.term.into(),
            new_version: self.version_id.version.into(),
            committed: self.committed.into(),
            reserved_b: 0.into(),
        };
        let mut out = [0; BLOCK_BYTES];
        out[..HEADER_BYTES].copy_from_slice(head.as_bytes());
        out[HEADER_BYTES..HEADER_BYTES + records.len()].copy_from_slice(&records);
        write_checksum(&mut out, CHECKSUM_AT);
        out
    }

    /// Parses a block.
    ///
    /// # Errors
    /// Why it is no block of this pool.
    pub fn parse(bytes: &[u8; BLOCK_BYTES], pool: Uuid) -> Result<Self, BlockError> {
        let (head, rest) = BlockHeader::read_from_prefix(bytes).map_err(|_| BlockError::NoMagic)?;
        if head.magic != MAGIC {
            return Err(BlockError::NoMagic);
        }
        if !verify_checksum(bytes, CHECKSUM_AT) {
            return Err(BlockError::Torn);
        }
        if head.version.get() != VERSION {
            return Err(BlockError::UnknownVersion(head.version.get()));
        }
        if head.pool != pool.into_bytes() {
            return Err(BlockError::OtherPool);
        }
        let changes = decode_changes(&head, rest).ok_or(BlockError::Inconsistent)?;
        let version_id = VersionId {
            term: head.term.get(),
            version: head.new_version.get(),
            term_id: Uuid::from_bytes(head.term_id),
        };
        let committed = head.committed.get();
        if committed >= version_id.version {
            return Err(BlockError::Inconsistent);
        }
        Ok(Self {
            version_id,
            previous_term: Uuid::from_bytes(head.previous_term_id),
            committed,
            changes,
        })
    }
}

fn decode_changes(head: &BlockHeader, rest: &[u8]) -> Option<Vec<Change>> {
    let length = usize::try_from(head.length.get()).ok()?;
    let (mut records, behind) = rest.split_at_checked(length)?;
    let reserved = head.reserved.get() == 0 && head.reserved_b.get() == 0;
    if !reserved || behind.iter().any(|b| *b != 0) {
        return None;
    }
    let mut changes = Vec::new();
    while !records.is_empty() {
        let (change, rest) = Change::decode(records)?;
        changes.push(change);
        records = rest;
    }
    (changes.len() == usize::from(head.records.get())).then_some(changes)
}

impl Metadata {
    /// Applies the block that follows this version.
    ///
    /// # Errors
    /// It does not follow, and nothing is changed; or one of its changes cannot be applied, and
    /// then this metadata must be discarded.
    pub fn replay(&mut self, block: &JournalBlock) -> Result<(), ReplayError> {
        let current = self.version_id();
        if current.term_id != block.previous_term
            || current.version.checked_add(1) != Some(block.version_id.version)
        {
            return Err(ReplayError::NotSuccessor);
        }
        self.begin_version(block.committed)?;
        for change in &block.changes {
            self.apply(change)?;
        }
        if self.version_id() == block.version_id {
            Ok(())
        } else {
            Err(ReplayError::ChangeRejected(ChangeError::InvalidValue("a version of another term")))
        }
    }
}

#[cfg(test)]
mod tests;
