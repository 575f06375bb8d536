//! What is known about a pool, and how one change makes it the next version.
//!
//! A version is made by [`Metadata::start`] and the [`Change`]s that follow. Each leaves it whole, or is refused and leaves it as
//! it was. What is written of a version is its changes (`journal`); now and then all of it (`snapshot`).

use std::collections::{BTreeMap, VecDeque};

use uuid::Uuid;

use super::units::Units;
pub use geometry::{ALL_REGIONS, MAX_MEMBERS, REGIONS};
use geometry::{Level, ROW_BYTES, RowSet, Shape};
use wire::Text;

mod apply;
mod check;

pub use apply::{Change, Refused};
pub(super) use apply::{FIXED_SNAPSHOT_BYTES, UNIT_SNAPSHOT_BYTES};
pub use check::Broken;

/// Most units of a member.
pub const MAX_UNITS: u32 = 1 << 24;

/// Most bytes of data of an extent.
pub const MAX_EXTENT_BYTES: u64 = 64 << 20;

/// What a piece may hold, in bytes.
pub const PIECE_BYTES: [u64; 3] = [4 << 20, 8 << 20, 16 << 20];

/// Bytes of a unit behind its stripes: what is known of them.
pub const TAIL_BYTES: u64 = 128 << 10;

/// Length of a strip, in bytes.
pub const STRIP_BYTES: std::ops::RangeInclusive<u64> = (16 << 10)..=(128 << 10);

/// Most rings of the parity log on a member.
pub const MAX_RINGS: u16 = 16;

/// Most volumes of a pool.
pub const MAX_VOLUMES: usize = 1024;

/// Most openings that are remembered.
pub const MAX_OPENINGS: usize = 256;

/// Most versions that may be written before the first of them counts.
pub const MAX_WINDOW: usize = 64;

/// Largest volume in bytes: 256 TiB.
pub const MAX_BYTES: u64 = 256 << 40;

/// Most ranges of lost rows that a pool remembers; what would be one more is not given up as lost.
pub const MAX_LOST: usize = 1024;

/// Most that come of those where parts of them are written again.
pub const MAX_LOST_PARTS: usize = 2 * MAX_LOST;

/// Most ranges of rows that no scrub could repair that a pool remembers, among those.
pub const MAX_UNREPAIRED: usize = MAX_LOST / 4;

/// Number of a member, below [`MAX_MEMBERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u16);

/// Number of a volume; none has one that another had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub u32);

/// A set of members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Members(pub u128);

/// A version: its number, and the opening in which it was made. Within one opening a number means one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// Number of the opening.
    pub opening: u64,
    /// Number of the version.
    pub version: u64,
    /// The opening: drawn by chance, for two may have one number.
    pub id: Uuid,
}

/// A time from one opening of the pool to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// One more than that of the opening before it.
    pub number: u64,
    /// Drawn by chance.
    pub id: Uuid,
    /// Its first version.
    pub first: u64,
    /// Whether a person said that it may be without members that are needed otherwise.
    pub forced: bool,
}

/// What a member is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// Holds pieces, and gets new ones.
    In,
    /// Waits for a member to fail.
    Spare,
    /// Holds pieces and gets no new ones: what it has is moved.
    Leaving,
    /// Is not written: it failed, or was not there.
    Out {
        /// The version that says so.
        since: u64,
        /// The version that it has at least if it is what it was.
        knew: u64,
    },
}

/// Errors of a disk, counted over all openings of its pool since a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ErrorCounts {
    /// Reads that failed.
    pub reads: u64,
    /// Writes and flushes that failed.
    pub writes: u64,
    /// Reads that gave what was not written.
    pub checksums: u64,
    /// Blocks that were wrong or unreadable, and were written again.
    pub repaired: u64,
    /// Blocks that could not be read, and were given up as lost.
    pub unrepairable: u64,
    /// Since when, in seconds since the Unix epoch; 0 before the first opening.
    pub since_s: u64,
}

/// A scrub that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScrubRecord {
    /// When it ended, in seconds since the Unix epoch; 0 if there was none.
    pub ended_s: u64,
    /// Bytes that it read and compared.
    pub bytes: u64,
    /// Blocks that it repaired.
    pub repaired: u64,
    /// Blocks that it could not repair.
    pub unrepairable: u64,
}

/// A member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its identity, in its label.
    pub uuid: Uuid,
    /// The serial number of its disk, so that one that is gone has a name.
    pub serial: Text,
    /// Its size in units.
    pub units: u32,
    /// Room for a snapshot on it, in blocks.
    pub room: u32,
    /// Where its units begin, in bytes.
    pub units_at: u64,
    /// What it is there for.
    pub standing: Standing,
    /// Its errors, as they were written down last.
    pub errors: ErrorCounts,
    pub(super) taken: Units,
}

/// A piece of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece {
    /// The member that it lies on.
    pub member: MemberId,
    /// The unit of that.
    pub unit: u32,
}

/// A part of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its number in the pool's parity log; none has one that another had, in whatever place of whatever volume.
    pub number: u64,
    /// Where its columns are.
    pub pieces: Box<[Piece]>,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its identity everywhere else.
    pub uuid: Uuid,
    /// How its extents lie on their columns.
    pub shape: Shape,
    /// Its size in bytes.
    pub bytes: u64,
    /// Length of a block in bytes.
    pub block_size: u32,
    /// Whether it has all its extents from the beginning, and keeps them.
    pub thick: bool,
    pub(super) extents: BTreeMap<u32, Extent>,
    /// Regions of pieces that are not what they should be, by extent and column.
    pub(super) behind: BTreeMap<(u32, u16), u32>,
    /// Rows of data that are lost, by extent; none is empty.
    pub(super) lost: BTreeMap<u32, RowSet>,
    /// Rows of data that a scrub could not repair, by extent; none is empty, and none is lost.
    pub(super) unrepaired: BTreeMap<u32, RowSet>,
}

/// What is known about a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// The pool.
    pub pool: Uuid,
    /// What it is called.
    pub name: Text,
    /// How extents of new volumes lie on their columns.
    pub shape: Shape,
    /// Rings of the parity log on each member.
    pub rings: u16,
    /// Whether what lies in it has checksums.
    pub checksums: bool,
    pub(super) version: u64,
    pub(super) counted: u64,
    /// The version with which the rings of the parity log, and the numbers of its entries, began anew.
    pub(super) era: u64,
    pub(super) next_volume: u32,
    pub(super) next_extent: u64,
    pub(super) openings: VecDeque<Opening>,
    /// From which version on who has a vote: the last one that counts, and what was changed since.
    pub(super) window: Vec<(u64, Members)>,
    /// The last scrub that has ended.
    pub(super) scrubbed: ScrubRecord,
    pub(super) members: BTreeMap<MemberId, Member>,
    pub(super) volumes: BTreeMap<VolumeId, Volume>,
}

impl Members {
    /// With `member`.
    #[must_use]
    pub fn with(self, member: MemberId) -> Self {
        Self(self.0 | 1u128.checked_shl(member.0.into()).unwrap_or(0))
    }

    /// Without `member`.
    #[must_use]
    pub fn but(self, member: MemberId) -> Self {
        self.without(Self::default().with(member))
    }

    /// Whether `member` is one of them.
    #[must_use]
    pub fn has(self, member: MemberId) -> bool {
        self.0 & 1u128.checked_shl(member.0.into()).unwrap_or(0) != 0
    }

    /// Those that `other` has as well.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those of either.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those that `other` has not.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// How many.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// All of them, in order.
    pub fn iter(self) -> impl Iterator<Item = MemberId> + use<> {
        (0..MAX_MEMBERS).map(MemberId).filter(move |m| self.has(*m))
    }
}

impl FromIterator<MemberId> for Members {
    fn from_iter<I: IntoIterator<Item = MemberId>>(members: I) -> Self {
        members.into_iter().fold(Self::default(), Self::with)
    }
}

impl Standing {
    /// Whether a member of it gets every version, and so has a vote.
    #[must_use]
    pub fn votes(self) -> bool {
        !matches!(self, Self::Out { .. })
    }
}

impl Member {
    /// Units that nothing lies in.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.units - self.taken.taken().min(self.units)
    }

    /// Units that something lies in.
    #[must_use]
    pub fn taken(&self) -> u32 {
        self.taken.taken()
    }

    /// Whether something lies in a unit.
    #[must_use]
    pub fn has(&self, unit: u32) -> bool {
        self.taken.has(unit)
    }

    /// The lowest unit that nothing lies in.
    #[must_use]
    pub fn lowest_free(&self) -> Option<u32> {
        self.taken.lowest_free(self.units)
    }
}

impl Volume {
    /// Bytes of data of an extent.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.shape.rows() * u64::from(ROW_BYTES)
    }

    /// Extents that it has if it has all.
    #[must_use]
    pub fn full(&self) -> u32 {
        u32::try_from(self.bytes.div_ceil(self.extent_bytes())).unwrap_or(u32::MAX)
    }

    /// Its extents, in order.
    pub fn extents(&self) -> impl Iterator<Item = (u32, &Extent)> {
        self.extents.iter().map(|(index, extent)| (*index, extent))
    }

    /// An extent.
    #[must_use]
    pub fn extent(&self, index: u32) -> Option<&Extent> {
        self.extents.get(&index)
    }

    /// A bit for each region of a piece that is not what it should be.
    #[must_use]
    pub fn behind(&self, index: u32, column: u16) -> u32 {
        self.behind.get(&(index, column)).copied().unwrap_or(0)
    }

    /// Rows of the data of an extent that are lost: no disk gave them back, and they read as errors until they are written again.
    #[must_use]
    pub fn lost_rows(&self, index: u32) -> RowSet {
        self.lost.get(&index).cloned().unwrap_or_default()
    }

    /// All rows that are lost, by extent.
    pub fn all_lost(&self) -> impl Iterator<Item = (u32, std::ops::Range<u32>)> + '_ {
        self.lost.iter().flat_map(|(index, rows)| rows.iter().map(|rows| (*index, rows)))
    }

    /// Rows of the data of an extent that a scrub could not repair, until they are written again.
    #[must_use]
    pub fn unrepaired_rows(&self, index: u32) -> RowSet {
        self.unrepaired.get(&index).cloned().unwrap_or_default()
    }

    /// All rows that a scrub could not repair, by extent.
    pub fn all_unrepaired(&self) -> impl Iterator<Item = (u32, std::ops::Range<u32>)> + '_ {
        self.unrepaired.iter().flat_map(|(index, rows)| rows.iter().map(|rows| (*index, rows)))
    }

    /// How many ranges of rows are remembered as lost or not repaired.
    pub(super) fn remembered_ranges(&self) -> usize {
        self.lost.values().map(RowSet::len).sum::<usize>() + self.unrepaired_ranges()
    }

    fn unrepaired_ranges(&self) -> usize {
        self.unrepaired.values().map(RowSet::len).sum()
    }

    /// The pieces that are not what they should be, by extent and column.
    pub fn all_marks(&self) -> impl Iterator<Item = (u32, u16)> {
        self.behind.keys().copied()
    }

    /// Whether something of each block of an extent is left where `lost` columns are, a bit for each.
    #[must_use]
    pub fn survives(&self, lost: u64) -> bool {
        match self.shape.level() {
            Level::Copies(copies) => {
                let group = (1u64 << copies) - 1;
                (0..self.shape.data()).all(|n| !lost >> (n * copies) & group != 0)
            }
            level => lost.count_ones() <= u32::from(level.parities()),
        }
    }

    /// How many more columns may be lost, whichever they are; none where too many are.
    #[must_use]
    pub fn bears(&self, lost: u64) -> Option<u32> {
        if !self.survives(lost) {
            return None;
        }
        Some(match self.shape.level() {
            Level::Copies(copies) => {
                let group = (1u64 << copies) - 1;
                let left = (0..self.shape.data()).map(|n| !lost >> (n * copies) & group);
                left.map(u64::count_ones).min().unwrap_or(1) - 1
            }
            level => u32::from(level.parities()) - lost.count_ones(),
        })
    }

    /// The columns of which a region cannot be used where only `there` are: one set for each region that differs.
    pub(super) fn lost_columns(
        &self,
        index: u32,
        pieces: &[Piece],
        there: Members,
    ) -> impl Iterator<Item = u64> {
        let bit = |column: u16| 1u64.checked_shl(column.into()).unwrap_or(0);
        let columns = || (0u16..).zip(pieces);
        let gone = columns().filter(|(_, piece)| !there.has(piece.member));
        let gone = gone.fold(0, |lost, (column, _)| lost | bit(column));
        let behind: Vec<(u16, u32)> = (self.behind.range((index, 0)..=(index, u16::MAX)))
            .map(|((_, column), regions)| (*column, *regions))
            .collect();
        let marked = behind.iter().fold(0, |all, (_, regions)| all | regions);
        let regions = (0..=REGIONS).filter(move |region| marked >> region & 1 != 0);
        let of = move |region: u32| {
            let behind = behind.iter().filter(|(_, regions)| regions >> region & 1 != 0);
            behind.fold(gone, |lost, (column, _)| lost | bit(*column))
        };
        std::iter::once(gone).chain(regions.map(of))
    }
}

/// What a piece of an extent of this shape holds, in bytes.
#[must_use]
pub fn piece_bytes(shape: &Shape) -> u64 {
    u64::from(shape.strip_rows()) * u64::from(shape.stripes()) * u64::from(ROW_BYTES)
}

/// Bytes of a piece of an extent of this shape: its data, and the places that no stripe has.
#[must_use]
pub fn placed_bytes(shape: &Shape) -> u64 {
    u64::from(shape.strip_rows()) * u64::from(shape.places()) * u64::from(ROW_BYTES)
}

/// Length in bytes of a unit in a pool of such extents.
#[must_use]
pub fn unit_bytes(shape: &Shape) -> u64 {
    placed_bytes(shape) + TAIL_BYTES
}

impl Metadata {
    /// A pool of no members: version 0, of which nothing is written.
    #[must_use]
    pub fn new(pool: Uuid, name: Text, shape: Shape, rings: u16) -> Self {
        Self {
            pool,
            name,
            shape,
            rings,
            checksums: false,
            version: 0,
            counted: 0,
            era: 0,
            next_volume: 1,
            next_extent: 1,
            openings: VecDeque::new(),
            window: vec![(0, Members::default())],
            scrubbed: ScrubRecord::default(),
            members: BTreeMap::new(),
            volumes: BTreeMap::new(),
        }
    }

    /// Its version.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        let last = self.openings.back();
        Stamp {
            opening: last.map_or(0, |o| o.number),
            version: self.version,
            id: last.map_or(Uuid::nil(), |o| o.id),
        }
    }

    /// What a piece holds, in bytes.
    #[must_use]
    pub fn piece_bytes(&self) -> u64 {
        piece_bytes(&self.shape)
    }

    /// Where a piece begins on its member, in rows of 4 KiB.
    #[must_use]
    pub fn row_of(&self, piece: Piece) -> u64 {
        let units_at = self.members.get(&piece.member).map_or(0, |member| member.units_at);
        (units_at + u64::from(piece.unit) * unit_bytes(&self.shape)) / u64::from(ROW_BYTES)
    }

    /// The version with which the rings of the parity log, and the numbers of its entries, began anew.
    #[must_use]
    pub fn era(&self) -> u64 {
        self.era
    }

    /// The last version of which it is known that it counts.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// The opening that it is of.
    #[must_use]
    pub fn opening(&self) -> Option<&Opening> {
        self.openings.back()
    }

    /// Whether the version `stamp` is one of those that led here, or this one.
    #[must_use]
    pub fn follows(&self, stamp: Stamp) -> bool {
        let then = self.openings.iter().rev().find(|o| o.first <= stamp.version);
        stamp.version <= self.version && then.is_some_and(|o| o.id == stamp.id)
    }

    /// A version of this number that led here, or this one, if it is still known of which opening it was.
    #[must_use]
    pub fn stamp_of(&self, version: u64) -> Option<Stamp> {
        let opening = self.openings.iter().rev().find(|o| o.first <= version)?;
        let stamp = Stamp { opening: opening.number, version, id: opening.id };
        (version <= self.version).then_some(stamp)
    }

    /// The last version that it proves to be committed: durable on all that have a vote in it.
    #[must_use]
    pub fn committed(&self) -> Option<Stamp> {
        self.stamp_of(self.counted).filter(|stamp| stamp.version > 0)
    }

    /// Whether it is known of which opening a version of this number was that led here.
    #[must_use]
    pub fn remembers(&self, stamp: Stamp) -> bool {
        self.openings.front().is_some_and(|oldest| oldest.first <= stamp.version)
    }

    /// Who had a vote in the last version that is known to count, and in each since.
    #[must_use]
    pub fn window(&self) -> &[(u64, Members)] {
        &self.window
    }

    /// Who gets every version.
    #[must_use]
    pub fn voters(&self) -> Members {
        let votes = self.members.iter().filter(|(_, m)| m.standing.votes());
        votes.map(|(id, _)| *id).collect()
    }

    /// The members, in order.
    pub fn members(&self) -> impl Iterator<Item = (MemberId, &Member)> {
        self.members.iter().map(|(id, member)| (*id, member))
    }

    /// A member.
    #[must_use]
    pub fn member(&self, id: MemberId) -> Option<&Member> {
        self.members.get(&id)
    }

    /// The member with this identity.
    #[must_use]
    pub fn member_of(&self, uuid: Uuid) -> Option<(MemberId, &Member)> {
        self.members().find(|(_, member)| member.uuid == uuid)
    }

    /// The volumes, in order.
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, &Volume)> {
        self.volumes.iter().map(|(id, volume)| (*id, volume))
    }

    /// A volume.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> Option<&Volume> {
        self.volumes.get(&id)
    }

    /// The number that the next volume gets.
    #[must_use]
    pub fn next_volume(&self) -> VolumeId {
        VolumeId(self.next_volume)
    }

    /// The lowest number that no member has.
    #[must_use]
    pub fn next_member(&self) -> Option<MemberId> {
        (0..MAX_MEMBERS).map(MemberId).find(|id| !self.members.contains_key(id))
    }

    /// The last scrub that has ended.
    #[must_use]
    pub fn scrubbed(&self) -> ScrubRecord {
        self.scrubbed
    }

    /// How many ranges of rows are remembered of all volumes as lost or not repaired,
    pub(super) fn remembered_ranges(&self) -> usize {
        self.volumes.values().map(Volume::remembered_ranges).sum()
    }

    /// and how many of them as not repaired.
    pub(super) fn unrepaired_ranges(&self) -> usize {
        self.volumes.values().map(Volume::unrepaired_ranges).sum()
    }

    /// Volumes of which blocks are lost where only `there` are.
    pub fn lost(&self, there: Members) -> impl Iterator<Item = VolumeId> {
        let lost = move |volume: &Volume| {
            let mut extents = volume.extents();
            extents.any(|(index, extent)| {
                let mut lost = volume.lost_columns(index, &extent.pieces, there);
                lost.any(|lost| !volume.survives(lost))
            })
        };
        self.volumes().filter(move |(_, volume)| lost(volume)).map(|(id, _)| id)
    }
}

#[cfg(test)]
pub(super) mod tests;
