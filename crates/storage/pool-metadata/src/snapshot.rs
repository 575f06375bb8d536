//! Snapshots of a pool's metadata on a member ([format](../../../../docs/format/pool.md)).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use geometry::{MAX_MEMBERS, RowSet};
use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use wire::{SHORT_TEXT_BYTES, ShortText};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::extent_bitmap::ExtentBitmap;
use super::journal::{
    BLOCK_BYTES, StoredErrorCounts, StoredGeometry, StoredMemberState, StoredPhysicalExtent,
    StoredScrubRecord, stored_member_state,
};
use super::metadata::{
    InvariantViolation, MAX_SPLIT_DAMAGED_RANGES, MAX_TERMS, MAX_VOLUMES, MAX_VOTER_HISTORY,
    MemberId, MemberSet, Metadata, PhysicalExtent, PoolExtent, PoolMember, PoolMemberState,
    PoolVolume, PoolVolumeId, Term,
};

const MAGIC: [u8; 16] = *b"WINDROSE POOL\r\n\n";

/// The version of the format.
const VERSION: u16 = 3;

/// The version for a pool with checksums.
const VERSION_WITH_CHECKSUMS: u16 = 4;

const HEADER_BYTES: usize = 256;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SnapshotHeader {
    magic: [u8; 16],
    version: U16,
    log_rings: U16,
    checksum: U32,
    length: U64,
    pool: [u8; 16],
    name: [u8; SHORT_TEXT_BYTES],
    geometry: StoredGeometry,
    next_volume: U32,
    metadata_version: U64,
    committed: U64,
    log_generation: U64,
    next_extent: U64,
    term_count: U32,
    voter_history_count: U32,
    member_count: U32,
    volume_count: U32,
    lost_range_count: U32,
    unrepaired_range_count: U32,
    last_scrub: StoredScrubRecord,
    reserved: [u8; 40],
}

const _: () = assert!(size_of::<SnapshotHeader>() == HEADER_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(SnapshotHeader, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredTerm {
    number: U64,
    term_id: [u8; 16],
    first_version: U64,
    forced: U32,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredVoters {
    version: U64,
    members: [u8; 16],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredMember {
    uuid: [u8; 16],
    serial: [u8; SHORT_TEXT_BYTES],
    physical_extents: U32,
    snapshot_blocks: U32,
    member_id: U16,
    state: U16,
    reserved: U32,
    detached_since: U64,
    min_version: U64,
    extents_at: U64,
    errors: StoredErrorCounts,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredVolume {
    uuid: [u8; 16],
    volume_id: U32,
    block_size: U32,
    bytes: U64,
    geometry: StoredGeometry,
    is_thick: U32,
    extent_count: U32,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredExtent {
    number: U64,
    index: U32,
    reserved: U32,
}

/// Rows of an extent that are lost, or that a scrub could not repair.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredRows {
    volume: U32,
    index: U32,
    first_row: U32,
    row_count: U32,
}

/// A column, and its stale regions.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredColumn {
    location: StoredPhysicalExtent,
    stale_regions: U32,
    reserved: U32,
}

const _: () = assert!(
    (size_of::<StoredExtent>() + size_of::<StoredColumn>()) as u64
        == super::metadata::SNAPSHOT_BYTES_PER_EXTENT
);
const _: () = assert!(
    (HEADER_BYTES
        + MAX_TERMS * size_of::<StoredTerm>()
        + MAX_VOTER_HISTORY * size_of::<StoredVoters>()
        + MAX_MEMBERS as usize * size_of::<StoredMember>()
        + MAX_VOLUMES * size_of::<StoredVolume>()
        + MAX_SPLIT_DAMAGED_RANGES * size_of::<StoredRows>()
        + BLOCK_BYTES) as u64
        <= super::metadata::FIXED_SNAPSHOT_BYTES
);

/// Why a snapshot cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// It is empty, or holds something else.
    #[error("no metadata snapshot")]
    NoMagic,
    /// Of an unknown format version.
    #[error("a metadata snapshot of version {0}, which this release does not know")]
    UnknownVersion(u16),
    /// It is incomplete.
    #[error("a torn metadata snapshot")]
    Torn,
    /// It belongs to another pool.
    #[error("a metadata snapshot of another pool")]
    OtherPool,
    /// Its checksum is right, but its contents are invalid.
    #[error("an invalid metadata snapshot")]
    Malformed,
    /// Its checksum is right, but its contents contradict each other.
    #[error("a metadata snapshot: {0}")]
    InvariantViolated(#[from] InvariantViolation),
}

/// Length of the snapshot that begins with this block, in bytes; `None` if it is clearly none of
/// this pool.
#[must_use]
pub fn snapshot_len(first: &[u8; BLOCK_BYTES], pool: Uuid) -> Option<u64> {
    let head = SnapshotHeader::read_from_prefix(first).ok()?.0;
    let ours = head.magic == MAGIC && head.pool == pool.into_bytes();
    ours.then_some(head.length.get().next_multiple_of(BLOCK_BYTES as u64))
}

fn to_u32(n: usize) -> U32 {
    u32::try_from(n).unwrap_or(u32::MAX).into()
}

impl Metadata {
    /// Encodes the metadata, in whole blocks.
    #[must_use]
    pub fn encode_snapshot(&self) -> Vec<u8> {
        let mut out = vec![0; HEADER_BYTES];
        self.terms.iter().for_each(|term| encode_term(&mut out, term));
        for (version, members) in &self.voter_history {
            let (version, members) = ((*version).into(), members.0.to_le_bytes());
            out.extend_from_slice(StoredVoters { version, members }.as_bytes());
        }
        self.members.iter().for_each(|(id, member)| encode_member(&mut out, *id, member));
        self.volumes.iter().for_each(|(id, volume)| encode_volume(&mut out, *id, volume));
        self.volumes.iter().for_each(|(id, v)| encode_rows(&mut out, *id, v.all_lost()));
        self.volumes.iter().for_each(|(id, v)| encode_rows(&mut out, *id, v.all_unrepaired()));
        let head = SnapshotHeader {
            magic: MAGIC,
            version: if self.has_checksums { VERSION_WITH_CHECKSUMS } else { VERSION }.into(),
            log_rings: self.log_rings.into(),
            checksum: 0.into(),
            length: (out.len() as u64).into(),
            pool: self.pool_id.into_bytes(),
            name: self.name.to_bytes(),
            geometry: StoredGeometry::from_geometry(&self.geometry),
            next_volume: self.next_volume.into(),
            metadata_version: self.version.into(),
            committed: self.committed.into(),
            log_generation: self.log_generation.into(),
            next_extent: self.next_extent.into(),
            term_count: to_u32(self.terms.len()),
            voter_history_count: to_u32(self.voter_history.len()),
            member_count: to_u32(self.members.len()),
            volume_count: to_u32(self.volumes.len()),
            lost_range_count: to_u32(self.damaged_range_count() - self.unrepaired_range_count()),
            unrepaired_range_count: to_u32(self.unrepaired_range_count()),
            last_scrub: StoredScrubRecord::from_record(self.last_scrub),
            reserved: [0; 40],
        };
        out[..HEADER_BYTES].copy_from_slice(head.as_bytes());
        out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
        write_checksum(&mut out, CHECKSUM_AT);
        out
    }

    /// Decodes a snapshot from all of its blocks.
    ///
    /// # Errors
    /// Why it is no snapshot of this pool.
    pub fn decode_snapshot(bytes: &[u8], pool: Uuid) -> Result<Self, SnapshotError> {
        let (head, rest) =
            SnapshotHeader::read_from_prefix(bytes).map_err(|_| SnapshotError::NoMagic)?;
        if head.magic != MAGIC {
            return Err(SnapshotError::NoMagic);
        }
        let length = usize::try_from(head.length.get()).unwrap_or(usize::MAX);
        let whole = length.checked_next_multiple_of(BLOCK_BYTES) == Some(bytes.len());
        if !whole || !verify_checksum(bytes, CHECKSUM_AT) {
            return Err(SnapshotError::Torn);
        }
        if !matches!(head.version.get(), VERSION | VERSION_WITH_CHECKSUMS) {
            return Err(SnapshotError::UnknownVersion(head.version.get()));
        }
        if head.pool != pool.into_bytes() {
            return Err(SnapshotError::OtherPool);
        }
        let body = length.checked_sub(HEADER_BYTES).and_then(|n| rest.split_at_checked(n));
        let (body, behind) = body.ok_or(SnapshotError::Malformed)?;
        let reserved = head.reserved == [0; 40] && behind.iter().all(|b| *b == 0);
        let all = reserved.then(|| Reader(body).metadata(&head)).flatten();
        let all = all.ok_or(SnapshotError::Malformed)?;
        all.check()?;
        Ok(all)
    }
}

fn encode_term(out: &mut Vec<u8>, term: &Term) {
    let Term { number, id, first_version, is_forced: forced } = *term;
    let stored = StoredTerm {
        number: number.into(),
        term_id: id.into_bytes(),
        first_version: first_version.into(),
        forced: u32::from(forced).into(),
        reserved: 0.into(),
    };
    out.extend_from_slice(stored.as_bytes());
}

fn encode_member(out: &mut Vec<u8>, id: MemberId, member: &PoolMember) {
    let (since, min_version) = match member.state {
        PoolMemberState::Detached { since, min_version } => (since, min_version),
        _ => (0, 0),
    };
    let stored = StoredMember {
        uuid: member.uuid.into_bytes(),
        serial: member.serial.to_bytes(),
        physical_extents: member.physical_extents.into(),
        snapshot_blocks: member.snapshot_blocks.into(),
        member_id: id.0.into(),
        state: stored_member_state(member.state).0.into(),
        reserved: 0.into(),
        detached_since: since.into(),
        min_version: min_version.into(),
        extents_at: member.extents_at.into(),
        errors: StoredErrorCounts::from_counts(member.error_counts),
    };
    out.extend_from_slice(stored.as_bytes());
}

fn encode_volume(out: &mut Vec<u8>, id: PoolVolumeId, volume: &PoolVolume) {
    let stored = StoredVolume {
        uuid: volume.uuid.into_bytes(),
        volume_id: id.0.into(),
        block_size: volume.block_size.into(),
        bytes: volume.bytes.into(),
        geometry: StoredGeometry::from_geometry(&volume.geometry),
        is_thick: u32::from(volume.is_thick).into(),
        extent_count: to_u32(volume.extents.len()),
        reserved: 0.into(),
    };
    out.extend_from_slice(stored.as_bytes());
    for (index, extent) in &volume.extents {
        let (number, reserved) = (extent.number.into(), 0.into());
        let stored = StoredExtent { number, index: (*index).into(), reserved };
        out.extend_from_slice(stored.as_bytes());
        for (column, location) in (0..).zip(&extent.columns) {
            let stale_regions = volume.stale_regions_of(*index, column).into();
            let stored = StoredColumn {
                location: StoredPhysicalExtent::from_physical_extent(*location),
                stale_regions,
                reserved,
            };
            out.extend_from_slice(stored.as_bytes());
        }
    }
}

fn encode_rows(out: &mut Vec<u8>, id: PoolVolumeId, all: impl Iterator<Item = (u32, Range<u32>)>) {
    for (index, rows) in all {
        let (volume, index) = (id.0.into(), index.into());
        let (row, rows) = (rows.start.into(), (rows.end - rows.start).into());
        out.extend_from_slice(
            StoredRows { volume, index, first_row: row, row_count: rows }.as_bytes(),
        );
    }
}

/// Reads one record after the other.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<T: FromBytes>(&mut self) -> Option<T> {
        let (record, rest) = T::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(record)
    }

    fn metadata(mut self, head: &SnapshotHeader) -> Option<Metadata> {
        let geometry = head.geometry.parse()?;
        let mut terms = VecDeque::new();
        for _ in 0..head.term_count.get() {
            terms.push_back(self.term()?);
        }
        let mut voter_history = Vec::new();
        for _ in 0..head.voter_history_count.get() {
            let votes: StoredVoters = self.take()?;
            voter_history
                .push((votes.version.get(), MemberSet(u128::from_le_bytes(votes.members))));
        }
        let mut members = BTreeMap::new();
        for _ in 0..head.member_count.get() {
            let (id, member) = self.member()?;
            ensure_ascending(&members, &id)?;
            members.insert(id, member);
        }
        let mut volumes = BTreeMap::new();
        for _ in 0..head.volume_count.get() {
            let (id, volume) = self.volume(&mut members)?;
            ensure_ascending(&volumes, &id)?;
            volumes.insert(id, volume);
        }
        let mut last = None;
        for _ in 0..head.lost_range_count.get() {
            last = Some(self.rows(&mut volumes, last, |volume| &mut volume.lost_rows)?);
        }
        last = None;
        for _ in 0..head.unrepaired_range_count.get() {
            last = Some(self.rows(&mut volumes, last, |volume| &mut volume.unrepaired_rows)?);
        }
        self.0.is_empty().then_some(Metadata {
            pool_id: Uuid::from_bytes(head.pool),
            name: ShortText::parse(&head.name)?,
            geometry,
            log_rings: head.log_rings.get(),
            has_checksums: head.version.get() == VERSION_WITH_CHECKSUMS,
            version: head.metadata_version.get(),
            committed: head.committed.get(),
            log_generation: head.log_generation.get(),
            next_volume: head.next_volume.get(),
            next_extent: head.next_extent.get(),
            terms,
            voter_history,
            last_scrub: head.last_scrub.parse(),
            members,
            volumes,
        })
    }

    /// Reads a range of rows of one of a volume's sets, which must follow the `last` range; returns
    /// its end.
    fn rows(
        &mut self,
        volumes: &mut BTreeMap<PoolVolumeId, PoolVolume>,
        last: Option<(u32, u32, u32)>,
        set: fn(&mut PoolVolume) -> &mut BTreeMap<u32, RowSet>,
    ) -> Option<(u32, u32, u32)> {
        let stored: StoredRows = self.take()?;
        let (volume, index, row) =
            (stored.volume.get(), stored.index.get(), stored.first_row.get());
        let end = row.checked_add(stored.row_count.get()).filter(|end| row < *end)?;
        // Adjacent ranges must have been merged.
        let is_behind = last.is_none_or(|last| last < (volume, index, row));
        let rows = is_behind.then(|| volumes.get_mut(&PoolVolumeId(volume)))??;
        set(rows).entry(index).or_default().insert(row..end);
        Some((volume, index, end))
    }

    fn term(&mut self) -> Option<Term> {
        let stored: StoredTerm = self.take()?;
        let forced = parse_flag(stored.forced)?;
        let (number, first_version) = (stored.number.get(), stored.first_version.get());
        let term =
            Term { number, id: Uuid::from_bytes(stored.term_id), first_version, is_forced: forced };
        (stored.reserved.get() == 0).then_some(term)
    }

    fn member(&mut self) -> Option<(MemberId, PoolMember)> {
        let stored: StoredMember = self.take()?;
        let (since, min_version) = (stored.detached_since.get(), stored.min_version.get());
        let state = match StoredMemberState(stored.state.get()) {
            StoredMemberState::Active => PoolMemberState::Active,
            StoredMemberState::Spare => PoolMemberState::Spare,
            StoredMemberState::Draining => PoolMemberState::Draining,
            StoredMemberState::Detached => PoolMemberState::Detached { since, min_version },
            _ => return None,
        };
        let zeroes = state.is_voter() && (since, min_version) != (0, 0);
        let member = PoolMember {
            uuid: Uuid::from_bytes(stored.uuid),
            serial: ShortText::parse(&stored.serial)?,
            physical_extents: stored.physical_extents.get(),
            snapshot_blocks: stored.snapshot_blocks.get(),
            state,
            extents_at: stored.extents_at.get(),
            error_counts: stored.errors.parse(),
            allocated: ExtentBitmap::default(),
        };
        let id = MemberId(stored.member_id.get());
        (stored.reserved.get() == 0 && !zeroes).then_some((id, member))
    }

    fn volume(
        &mut self,
        members: &mut BTreeMap<MemberId, PoolMember>,
    ) -> Option<(PoolVolumeId, PoolVolume)> {
        let stored: StoredVolume = self.take()?;
        let mut volume = PoolVolume {
            uuid: Uuid::from_bytes(stored.uuid),
            geometry: stored.geometry.parse()?,
            bytes: stored.bytes.get(),
            block_size: stored.block_size.get(),
            is_thick: parse_flag(stored.is_thick)?,
            extents: BTreeMap::new(),
            stale_regions: BTreeMap::new(),
            lost_rows: BTreeMap::new(),
            unrepaired_rows: BTreeMap::new(),
        };
        for _ in 0..stored.extent_count.get() {
            let (index, extent) = self.extent(&mut volume, members)?;
            ensure_ascending(&volume.extents, &index)?;
            volume.extents.insert(index, extent);
        }
        let id = PoolVolumeId(stored.volume_id.get());
        (stored.reserved.get() == 0).then_some((id, volume))
    }

    fn extent(
        &mut self,
        volume: &mut PoolVolume,
        members: &mut BTreeMap<MemberId, PoolMember>,
    ) -> Option<(u32, PoolExtent)> {
        let stored: StoredExtent = self.take()?;
        let index = stored.index.get();
        let mut columns = Vec::new();
        for column in 0..volume.geometry.columns() {
            let stored: StoredColumn = self.take()?;
            let location: PhysicalExtent = stored.location.parse();
            let (zero, stale_regions) = (stored.reserved.get() == 0, stored.stale_regions.get());
            let member = members
                .get_mut(&location.member)
                .filter(|m| location.index < m.physical_extents)?;
            if !member.allocated.allocate(location.index)
                || !zero
                || !stored.location.is_reserved_zero()
            {
                return None;
            }
            if stale_regions != 0 {
                volume.stale_regions.insert((index, column), stale_regions);
            }
            columns.push(location);
        }
        let number = stored.number.get();
        (stored.reserved.get() == 0)
            .then_some((index, PoolExtent { number, columns: columns.into() }))
    }
}

/// Checks that keys are read in ascending order.
fn ensure_ascending<K: Ord, V>(map: &BTreeMap<K, V>, key: &K) -> Option<()> {
    map.last_key_value().is_none_or(|(last, _)| last < key).then_some(())
}

fn parse_flag(stored: U32) -> Option<bool> {
    match stored.get() {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metadata::tests::histories;
    use crate::samples::pool;

    const POOL: Uuid = Uuid::from_u128(1);

    #[test]
    fn invalid_snapshots_are_reported() {
        let bytes = pool(3).encode_snapshot();
        assert_eq!(Metadata::decode_snapshot(&[0; 4096], POOL), Err(SnapshotError::NoMagic));
        assert_eq!(
            Metadata::decode_snapshot(&bytes, Uuid::from_u128(2)),
            Err(SnapshotError::OtherPool)
        );
        assert_eq!(Metadata::decode_snapshot(&bytes[..2048], POOL), Err(SnapshotError::Torn));
        let with = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            write_checksum(&mut bytes, CHECKSUM_AT);
            Metadata::decode_snapshot(&bytes, POOL)
        };
        assert!(with(16, 4).unwrap().has_checksums);
        assert_eq!(with(16, 1), Err(SnapshotError::UnknownVersion(1)));
        assert_eq!(
            with(18, 17),
            Err(SnapshotError::InvariantViolated(InvariantViolation("the number of rings")))
        );
        assert_eq!(with(255, 1), Err(SnapshotError::Malformed), "reserved");
        assert_eq!(with(4095, 1), Err(SnapshotError::Malformed), "behind the end");
        let mut torn = bytes.clone();
        torn[300] ^= 1;
        assert_eq!(Metadata::decode_snapshot(&torn, POOL), Err(SnapshotError::Torn));
    }

    #[test]
    fn the_first_block_gives_the_length() {
        let bytes = pool(3).encode_snapshot();
        let first = bytes[..BLOCK_BYTES].try_into().unwrap();
        assert_eq!(snapshot_len(first, POOL), Some(bytes.len() as u64));
        assert_eq!(snapshot_len(first, Uuid::nil()), None);
        assert_eq!(snapshot_len(&[0; BLOCK_BYTES], POOL), None);
    }

    /// What lies on disks is read for ever.
    #[test]
    fn golden_snapshots() {
        let pools = [false, true].map(|checksums| Metadata { has_checksums: checksums, ..pool(3) });
        let sums = pools.map(|pool| wire::crc32c(&pool.encode_snapshot()));
        assert_eq!(sums, GOLDEN);
    }

    /// Without and with checksums.
    const GOLDEN: [u32; 2] = [1_767_548_301, 1_519_563_409];

    proptest! {
        #[test]
        fn a_snapshot_round_trips(history in histories(), checksums: bool) {
            let mut pool = Metadata { has_checksums: checksums, ..pool(4) };
            for (counts, changes) in history {
                let committed = if counts { pool.version_id().version } else { pool.committed_version() };
                prop_assume!(pool.begin_version(committed).is_ok());
                changes.iter().for_each(|change| {
                    let _ = pool.apply(change);
                });
            }
            let bytes = pool.encode_snapshot();
            prop_assert!(bytes.len() as u64 <= crate::metadata::FIXED_SNAPSHOT_BYTES + 1024);
            prop_assert_eq!(Metadata::decode_snapshot(&bytes, POOL), Ok(pool));
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(at in 0usize..4096, value in any::<u8>(), also in 16usize..4096, more in any::<u8>()) {
            let mut bytes = pool(3).encode_snapshot();
            let len = bytes.len();
            bytes[at % len] = value;
            bytes[also % len] = more;
            write_checksum(&mut bytes, CHECKSUM_AT);
            if let Ok(found) = Metadata::decode_snapshot(&bytes, POOL) {
                prop_assert_eq!(found.encode_snapshot(), bytes);
            }
        }
    }
}
