//! All that is known about a pool at once, as it lies on a member ([format](../../../../docs/format/pool.md)).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use geometry::{MAX_MEMBERS, RowSet};
use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use wire::{TEXT_BYTES, Text};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::journal::{
    BLOCK_BYTES, StoredErrors, StoredPiece, StoredScrub, StoredShape, StoredStanding,
    stored_standing,
};
use super::metadata::{
    Broken, Extent, MAX_LOST_PARTS, MAX_OPENINGS, MAX_VOLUMES, MAX_WINDOW, Member, MemberId,
    Members, Metadata, Opening, Piece, Standing, Volume, VolumeId,
};
use super::units::Units;

const MAGIC: [u8; 16] = *b"WINDROSE POOL\r\n\n";

/// The version of the format.
const VERSION: u16 = 3;

/// That of a pool that has checksums.
const CHECKED: u16 = 4;

const HEAD_BYTES: usize = 256;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    magic: [u8; 16],
    version: U16,
    rings: U16,
    checksum: U32,
    length: U64,
    pool: [u8; 16],
    name: [u8; TEXT_BYTES],
    shape: StoredShape,
    next_volume: U32,
    made: U64,
    counted: U64,
    era: U64,
    next_extent: U64,
    openings: U32,
    window: U32,
    members: U32,
    volumes: U32,
    lost: U32,
    unrepaired: U32,
    scrubbed: StoredScrub,
    reserved: [u8; 40],
}

const _: () = assert!(size_of::<Head>() == HEAD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(Head, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredOpening {
    number: U64,
    id: [u8; 16],
    first: U64,
    forced: U32,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredVotes {
    version: U64,
    members: [u8; 16],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredMember {
    uuid: [u8; 16],
    serial: [u8; TEXT_BYTES],
    units: U32,
    room: U32,
    number: U16,
    standing: U16,
    reserved: U32,
    since: U64,
    knew: U64,
    units_at: U64,
    errors: StoredErrors,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredVolume {
    uuid: [u8; 16],
    number: U32,
    block_size: U32,
    bytes: U64,
    shape: StoredShape,
    thick: U32,
    extents: U32,
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
    row: U32,
    rows: U32,
}

/// A piece, and what of it is not what it should be.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredColumn {
    piece: StoredPiece,
    behind: U32,
    reserved: U32,
}

const _: () = assert!(
    (size_of::<StoredExtent>() + size_of::<StoredColumn>()) as u64
        == super::metadata::UNIT_SNAPSHOT_BYTES
);
const _: () = assert!(
    (HEAD_BYTES
        + MAX_OPENINGS * size_of::<StoredOpening>()
        + MAX_WINDOW * size_of::<StoredVotes>()
        + MAX_MEMBERS as usize * size_of::<StoredMember>()
        + MAX_VOLUMES * size_of::<StoredVolume>()
        + MAX_LOST_PARTS * size_of::<StoredRows>()
        + BLOCK_BYTES) as u64
        <= super::metadata::FIXED_SNAPSHOT_BYTES
);

/// Why bytes are no snapshot of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSnapshot {
    /// Nothing was written there, or something else.
    #[error("no snapshot of a pool")]
    Foreign,
    /// Of a release that is not known.
    #[error("version {0} of a pool's snapshot is not known")]
    Version(u16),
    /// Not all of it is there.
    #[error("a torn snapshot of a pool")]
    Torn,
    /// Another pool's.
    #[error("a snapshot of another pool")]
    Other,
    /// Sealed, and makes no sense.
    #[error("a snapshot of a pool that makes no sense")]
    Nonsense,
    /// Sealed, and its parts do not fit together.
    #[error("a snapshot of a pool: {0}")]
    Broken(#[from] Broken),
}

/// Length in bytes of the snapshot that begins with this block; none if it is none of this pool, as far as that can be told.
#[must_use]
pub fn length(first: &[u8; BLOCK_BYTES], pool: Uuid) -> Option<u64> {
    let head = Head::read_from_prefix(first).ok()?.0;
    let ours = head.magic == MAGIC && head.pool == pool.into_bytes();
    ours.then_some(head.length.get().next_multiple_of(BLOCK_BYTES as u64))
}

fn count(n: usize) -> U32 {
    u32::try_from(n).unwrap_or(u32::MAX).into()
}

impl Metadata {
    /// All of it, in whole blocks.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = vec![0; HEAD_BYTES];
        self.openings.iter().for_each(|opening| put_opening(&mut out, opening));
        for (version, members) in &self.window {
            let (version, members) = ((*version).into(), members.0.to_le_bytes());
            out.extend_from_slice(StoredVotes { version, members }.as_bytes());
        }
        self.members.iter().for_each(|(id, member)| put_member(&mut out, *id, member));
        self.volumes.iter().for_each(|(id, volume)| put_volume(&mut out, *id, volume));
        self.volumes.iter().for_each(|(id, v)| put_rows(&mut out, *id, v.all_lost()));
        self.volumes.iter().for_each(|(id, v)| put_rows(&mut out, *id, v.all_unrepaired()));
        let head = Head {
            magic: MAGIC,
            version: if self.checksums { CHECKED } else { VERSION }.into(),
            rings: self.rings.into(),
            checksum: 0.into(),
            length: (out.len() as u64).into(),
            pool: self.pool.into_bytes(),
            name: self.name.to_bytes(),
            shape: StoredShape::of(&self.shape),
            next_volume: self.next_volume.into(),
            made: self.version.into(),
            counted: self.counted.into(),
            era: self.era.into(),
            next_extent: self.next_extent.into(),
            openings: count(self.openings.len()),
            window: count(self.window.len()),
            members: count(self.members.len()),
            volumes: count(self.volumes.len()),
            lost: count(self.remembered_ranges() - self.unrepaired_ranges()),
            unrepaired: count(self.unrepaired_ranges()),
            scrubbed: StoredScrub::of(self.scrubbed),
            reserved: [0; 40],
        };
        out[..HEAD_BYTES].copy_from_slice(head.as_bytes());
        out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
        seal(&mut out, CHECKSUM_AT);
        out
    }

    /// What a snapshot says, of which these are all blocks.
    ///
    /// # Errors
    /// Why they are none of this pool.
    pub fn of_snapshot(bytes: &[u8], pool: Uuid) -> Result<Self, NoSnapshot> {
        let (head, rest) = Head::read_from_prefix(bytes).map_err(|_| NoSnapshot::Foreign)?;
        if head.magic != MAGIC {
            return Err(NoSnapshot::Foreign);
        }
        let length = usize::try_from(head.length.get()).unwrap_or(usize::MAX);
        let whole = length.checked_next_multiple_of(BLOCK_BYTES) == Some(bytes.len());
        if !whole || !is_sealed(bytes, CHECKSUM_AT) {
            return Err(NoSnapshot::Torn);
        }
        if !matches!(head.version.get(), VERSION | CHECKED) {
            return Err(NoSnapshot::Version(head.version.get()));
        }
        if head.pool != pool.into_bytes() {
            return Err(NoSnapshot::Other);
        }
        let body = length.checked_sub(HEAD_BYTES).and_then(|n| rest.split_at_checked(n));
        let (body, behind) = body.ok_or(NoSnapshot::Nonsense)?;
        let reserved = head.reserved == [0; 40] && behind.iter().all(|b| *b == 0);
        let all = reserved.then(|| Reader(body).metadata(&head)).flatten();
        let all = all.ok_or(NoSnapshot::Nonsense)?;
        all.check()?;
        Ok(all)
    }
}

fn put_opening(out: &mut Vec<u8>, opening: &Opening) {
    let Opening { number, id, first, forced } = *opening;
    let stored = StoredOpening {
        number: number.into(),
        id: id.into_bytes(),
        first: first.into(),
        forced: u32::from(forced).into(),
        reserved: 0.into(),
    };
    out.extend_from_slice(stored.as_bytes());
}

fn put_member(out: &mut Vec<u8>, id: MemberId, member: &Member) {
    let (since, knew) = match member.standing {
        Standing::Out { since, knew } => (since, knew),
        _ => (0, 0),
    };
    let stored = StoredMember {
        uuid: member.uuid.into_bytes(),
        serial: member.serial.to_bytes(),
        units: member.units.into(),
        room: member.room.into(),
        number: id.0.into(),
        standing: stored_standing(member.standing).0.into(),
        reserved: 0.into(),
        since: since.into(),
        knew: knew.into(),
        units_at: member.units_at.into(),
        errors: StoredErrors::of(member.errors),
    };
    out.extend_from_slice(stored.as_bytes());
}

fn put_volume(out: &mut Vec<u8>, id: VolumeId, volume: &Volume) {
    let stored = StoredVolume {
        uuid: volume.uuid.into_bytes(),
        number: id.0.into(),
        block_size: volume.block_size.into(),
        bytes: volume.bytes.into(),
        shape: StoredShape::of(&volume.shape),
        thick: u32::from(volume.thick).into(),
        extents: count(volume.extents.len()),
        reserved: 0.into(),
    };
    out.extend_from_slice(stored.as_bytes());
    for (index, extent) in &volume.extents {
        let (number, reserved) = (extent.number.into(), 0.into());
        let stored = StoredExtent { number, index: (*index).into(), reserved };
        out.extend_from_slice(stored.as_bytes());
        for (column, piece) in (0..).zip(&extent.pieces) {
            let behind = volume.behind(*index, column).into();
            let stored = StoredColumn { piece: StoredPiece::of(*piece), behind, reserved };
            out.extend_from_slice(stored.as_bytes());
        }
    }
}

fn put_rows(out: &mut Vec<u8>, id: VolumeId, all: impl Iterator<Item = (u32, Range<u32>)>) {
    for (index, rows) in all {
        let (volume, index) = (id.0.into(), index.into());
        let (row, rows) = (rows.start.into(), (rows.end - rows.start).into());
        out.extend_from_slice(StoredRows { volume, index, row, rows }.as_bytes());
    }
}

/// Takes one record after the other.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<T: FromBytes>(&mut self) -> Option<T> {
        let (record, rest) = T::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(record)
    }

    fn metadata(mut self, head: &Head) -> Option<Metadata> {
        let shape = head.shape.parse()?;
        let mut openings = VecDeque::new();
        for _ in 0..head.openings.get() {
            openings.push_back(self.opening()?);
        }
        let mut window = Vec::new();
        for _ in 0..head.window.get() {
            let votes: StoredVotes = self.take()?;
            window.push((votes.version.get(), Members(u128::from_le_bytes(votes.members))));
        }
        let mut members = BTreeMap::new();
        for _ in 0..head.members.get() {
            let (id, member) = self.member()?;
            is_behind_last(&members, &id)?;
            members.insert(id, member);
        }
        let mut volumes = BTreeMap::new();
        for _ in 0..head.volumes.get() {
            let (id, volume) = self.volume(&mut members)?;
            is_behind_last(&volumes, &id)?;
            volumes.insert(id, volume);
        }
        let mut last = None;
        for _ in 0..head.lost.get() {
            last = Some(self.rows(&mut volumes, last, |volume| &mut volume.lost)?);
        }
        last = None;
        for _ in 0..head.unrepaired.get() {
            last = Some(self.rows(&mut volumes, last, |volume| &mut volume.unrepaired)?);
        }
        self.0.is_empty().then_some(Metadata {
            pool: Uuid::from_bytes(head.pool),
            name: Text::parse(&head.name)?,
            shape,
            rings: head.rings.get(),
            checksums: head.version.get() == CHECKED,
            version: head.made.get(),
            counted: head.counted.get(),
            era: head.era.get(),
            next_volume: head.next_volume.get(),
            next_extent: head.next_extent.get(),
            openings,
            window,
            scrubbed: head.scrubbed.parse(),
            members,
            volumes,
        })
    }

    /// Takes rows of one of a volume's sets, which lie behind the `last` ones; tells where they end.
    fn rows(
        &mut self,
        volumes: &mut BTreeMap<VolumeId, Volume>,
        last: Option<(u32, u32, u32)>,
        set: fn(&mut Volume) -> &mut BTreeMap<u32, RowSet>,
    ) -> Option<(u32, u32, u32)> {
        let stored: StoredRows = self.take()?;
        let (volume, index, row) = (stored.volume.get(), stored.index.get(), stored.row.get());
        let end = row.checked_add(stored.rows.get()).filter(|end| row < *end)?;
        // Ranges that touch are one.
        let is_behind = last.is_none_or(|last| last < (volume, index, row));
        let rows = is_behind.then(|| volumes.get_mut(&VolumeId(volume)))??;
        set(rows).entry(index).or_default().insert(row..end);
        Some((volume, index, end))
    }

    fn opening(&mut self) -> Option<Opening> {
        let stored: StoredOpening = self.take()?;
        let forced = flag(stored.forced)?;
        let (number, first) = (stored.number.get(), stored.first.get());
        let opening = Opening { number, id: Uuid::from_bytes(stored.id), first, forced };
        (stored.reserved.get() == 0).then_some(opening)
    }

    fn member(&mut self) -> Option<(MemberId, Member)> {
        let stored: StoredMember = self.take()?;
        let (since, knew) = (stored.since.get(), stored.knew.get());
        let standing = match StoredStanding(stored.standing.get()) {
            StoredStanding::In => Standing::In,
            StoredStanding::Spare => Standing::Spare,
            StoredStanding::Leaving => Standing::Leaving,
            StoredStanding::Out => Standing::Out { since, knew },
            _ => return None,
        };
        let zeroes = standing.votes() && (since, knew) != (0, 0);
        let member = Member {
            uuid: Uuid::from_bytes(stored.uuid),
            serial: Text::parse(&stored.serial)?,
            units: stored.units.get(),
            room: stored.room.get(),
            standing,
            units_at: stored.units_at.get(),
            errors: stored.errors.parse(),
            taken: Units::default(),
        };
        let id = MemberId(stored.number.get());
        (stored.reserved.get() == 0 && !zeroes).then_some((id, member))
    }

    fn volume(&mut self, members: &mut BTreeMap<MemberId, Member>) -> Option<(VolumeId, Volume)> {
        let stored: StoredVolume = self.take()?;
        let mut volume = Volume {
            uuid: Uuid::from_bytes(stored.uuid),
            shape: stored.shape.parse()?,
            bytes: stored.bytes.get(),
            block_size: stored.block_size.get(),
            thick: flag(stored.thick)?,
            extents: BTreeMap::new(),
            behind: BTreeMap::new(),
            lost: BTreeMap::new(),
            unrepaired: BTreeMap::new(),
        };
        for _ in 0..stored.extents.get() {
            let (index, extent) = self.extent(&mut volume, members)?;
            is_behind_last(&volume.extents, &index)?;
            volume.extents.insert(index, extent);
        }
        let id = VolumeId(stored.number.get());
        (stored.reserved.get() == 0).then_some((id, volume))
    }

    fn extent(
        &mut self,
        volume: &mut Volume,
        members: &mut BTreeMap<MemberId, Member>,
    ) -> Option<(u32, Extent)> {
        let stored: StoredExtent = self.take()?;
        let index = stored.index.get();
        let mut pieces = Vec::new();
        for column in 0..volume.shape.columns() {
            let stored: StoredColumn = self.take()?;
            let piece: Piece = stored.piece.parse();
            let (zero, behind) = (stored.reserved.get() == 0, stored.behind.get());
            let member = members.get_mut(&piece.member).filter(|m| piece.unit < m.units)?;
            if !member.taken.take(piece.unit) || !zero || !stored.piece.is_clean() {
                return None;
            }
            if behind != 0 {
                volume.behind.insert((index, column), behind);
            }
            pieces.push(piece);
        }
        let number = stored.number.get();
        (stored.reserved.get() == 0).then_some((index, Extent { number, pieces: pieces.into() }))
    }
}

/// What is in order is there once.
fn is_behind_last<K: Ord, V>(map: &BTreeMap<K, V>, key: &K) -> Option<()> {
    map.last_key_value().is_none_or(|(last, _)| last < key).then_some(())
}

fn flag(stored: U32) -> Option<bool> {
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
    use crate::metadata::tests::{histories, pool};

    const POOL: Uuid = Uuid::from_u128(1);

    #[test]
    fn what_is_no_snapshot_is_named() {
        let bytes = pool(3).snapshot();
        assert_eq!(Metadata::of_snapshot(&[0; 4096], POOL), Err(NoSnapshot::Foreign));
        assert_eq!(Metadata::of_snapshot(&bytes, Uuid::from_u128(2)), Err(NoSnapshot::Other));
        assert_eq!(Metadata::of_snapshot(&bytes[..2048], POOL), Err(NoSnapshot::Torn));
        let with = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            seal(&mut bytes, CHECKSUM_AT);
            Metadata::of_snapshot(&bytes, POOL)
        };
        assert!(with(16, 4).unwrap().checksums);
        assert_eq!(with(16, 1), Err(NoSnapshot::Version(1)));
        assert_eq!(with(18, 17), Err(NoSnapshot::Broken(Broken("the number of rings"))));
        assert_eq!(with(255, 1), Err(NoSnapshot::Nonsense), "reserved");
        assert_eq!(with(4095, 1), Err(NoSnapshot::Nonsense), "behind the end");
        let mut torn = bytes.clone();
        torn[300] ^= 1;
        assert_eq!(Metadata::of_snapshot(&torn, POOL), Err(NoSnapshot::Torn));
    }

    #[test]
    fn its_length_is_told_by_its_first_block() {
        let bytes = pool(3).snapshot();
        let first = bytes[..BLOCK_BYTES].try_into().unwrap();
        assert_eq!(length(first, POOL), Some(bytes.len() as u64));
        assert_eq!(length(first, Uuid::nil()), None);
        assert_eq!(length(&[0; BLOCK_BYTES], POOL), None);
    }

    /// What lies on disks is read for ever.
    #[test]
    fn the_golden_snapshots_are_what_they_were() {
        let pools = [false, true].map(|checksums| Metadata { checksums, ..pool(3) });
        let sums = pools.map(|pool| wire::crc32c(&pool.snapshot()));
        assert_eq!(sums, GOLDEN);
    }

    /// Without and with checksums.
    const GOLDEN: [u32; 2] = [1_767_548_301, 1_519_563_409];

    proptest! {
        #[test]
        fn it_says_what_was_known(history in histories(), checksums: bool) {
            let mut pool = Metadata { checksums, ..pool(4) };
            for (counts, changes) in history {
                let counted = if counts { pool.stamp().version } else { pool.counted() };
                prop_assume!(pool.start(counted).is_ok());
                changes.iter().for_each(|change| {
                    let _ = pool.apply(change);
                });
            }
            let bytes = pool.snapshot();
            prop_assert!(bytes.len() as u64 <= crate::metadata::FIXED_SNAPSHOT_BYTES + 1024);
            prop_assert_eq!(Metadata::of_snapshot(&bytes, POOL), Ok(pool));
        }

        #[test]
        fn any_bytes_are_one_or_none(at in 0usize..4096, value in any::<u8>(), also in 16usize..4096, more in any::<u8>()) {
            let mut bytes = pool(3).snapshot();
            let len = bytes.len();
            bytes[at % len] = value;
            bytes[also % len] = more;
            seal(&mut bytes, CHECKSUM_AT);
            if let Ok(found) = Metadata::of_snapshot(&bytes, POOL) {
                prop_assert_eq!(found.snapshot(), bytes);
            }
        }
    }
}
