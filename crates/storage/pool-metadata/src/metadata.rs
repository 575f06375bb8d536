//! The metadata of a pool, and the changes that make one version of it the next.
//!
//! A version is made by [`Metadata::begin_version`] and the [`Change`]s that follow. Each change is
//! applied as a whole, or refused and then has no effect. The disks get the changes of each version
//! (`journal`), and from time to time all of the metadata (`snapshot`).

use std::collections::{BTreeMap, VecDeque};

use uuid::Uuid;

use super::extent_bitmap::ExtentBitmap;
pub use geometry::{ALL_REGIONS, MAX_MEMBERS, REGIONS};
use geometry::{ROW_BYTES, RaidGeometry, Redundancy, RowSet};
use wire::ShortText;

mod apply;
mod invariants;

pub use apply::{Change, ChangeError};
pub(super) use apply::{FIXED_SNAPSHOT_BYTES, SNAPSHOT_BYTES_PER_EXTENT};
pub use invariants::InvariantViolation;

/// Largest number of physical extents of a member.
pub const MAX_PHYSICAL_EXTENTS: u32 = 1 << 24;

/// Largest amount of data of an extent, in bytes.
pub const MAX_EXTENT_BYTES: u64 = 64 << 20;

/// Possible sizes of a column's data, in bytes.
pub const COLUMN_DATA_BYTES: [u64; 3] = [4 << 20, 8 << 20, 16 << 20];

/// Bytes at the end of a physical extent, after the slots of its column: stripe maps, and checksums
/// of its rows.
pub const EXTENT_METADATA_BYTES: u64 = 128 << 10;

/// Possible lengths of a strip, in bytes: the powers of two in this range.
pub const STRIP_BYTES: std::ops::RangeInclusive<u64> = (16 << 10)..=(128 << 10);

/// Largest number of rings of the parity log on a member. Each core that uses the pool has one.
pub const MAX_LOG_RINGS: u16 = 16;

/// Largest number of volumes of a pool.
pub const MAX_VOLUMES: usize = 1024;

/// Largest number of terms that are remembered; the oldest are forgotten first.
pub const MAX_TERMS: usize = 256;

/// Largest number of entries of the voter history. A version that might need more is refused until
/// an earlier version is known to be committed.
pub const MAX_VOTER_HISTORY: usize = 64;

/// Largest volume in bytes: 256 TiB.
pub const MAX_VOLUME_BYTES: u64 = 256 << 40;

/// Largest number of ranges of damaged rows that a pool records: rows that are lost or unrepaired.
/// Beyond that, no further row is recorded as lost or unrepaired.
pub const MAX_DAMAGED_RANGES: usize = 1024;

/// Largest number of ranges of damaged rows after rewrites: if the middle of a range is rewritten,
/// it becomes two.
pub const MAX_SPLIT_DAMAGED_RANGES: usize = 2 * MAX_DAMAGED_RANGES;

/// How many of the [`MAX_DAMAGED_RANGES`] may be unrepaired: the rest is kept for lost rows.
pub const MAX_UNREPAIRED_RANGES: usize = MAX_DAMAGED_RANGES / 4;

/// Number of a member, below [`MAX_MEMBERS`]. When a member has left the pool, its number may be
/// given to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u16);

/// Number of a volume; numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolVolumeId(pub u32);

/// A set of members, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberSet(pub u128);

/// The identity of a version of the metadata: its number and its term. Within one term a number
/// denotes one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VersionId {
    /// Number of the term.
    pub term: u64,
    /// Number of the version.
    pub version: u64,
    /// Random id of the term. Two terms may have the same number, if the pool was opened twice with
    /// different disks.
    pub term_id: Uuid,
}

/// The time from one opening of the pool to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// One more than that of the previous term.
    pub number: u64,
    /// Random.
    pub id: Uuid,
    /// Its first version.
    pub first_version: u64,
    /// Whether the pool could be opened only because the operator declared disks lost.
    pub is_forced: bool,
}

/// The role of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolMemberState {
    /// Holds columns, and gets new ones.
    Active,
    /// Holds no columns until another member is detached or removed: then it becomes active.
    Spare,
    /// Holds columns and gets no new ones: they are moved to other members.
    Draining,
    /// Gets neither versions nor writes: it failed, or was missing.
    Detached {
        /// The version that detached it.
        since: u64,
        /// The last version known to be committed when it was detached. Its disk has had that
        /// version: a disk that returns without it was rolled back.
        min_version: u64,
    },
}

/// Errors of a disk, counted over all terms of its pool since `since_s`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemberErrorCounts {
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes and flushes that failed.
    pub write_errors: u64,
    /// Reads that returned data other than what was written, as far as checksums show that, and
    /// unreadable batches of the parity log.
    pub corrupt_reads: u64,
    /// Rows (4 KiB) that were wrong or unreadable, and were rewritten.
    pub repaired_rows: u64,
    /// Rows that could not be read, and were recorded as lost.
    pub unrecoverable_rows: u64,
    /// Start of the count, in seconds since the Unix epoch; 0 if nothing has been recorded yet.
    pub since_s: u64,
}

/// A scrub that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScrubRecord {
    /// When it ended, in seconds since the Unix epoch; 0 if there was none.
    pub ended_s: u64,
    /// Bytes of client data that it read and compared.
    pub bytes: u64,
    /// Rows of strips that were wrong or unreadable, and that it repaired.
    pub repaired_rows: u64,
    /// Rows that it could not repair: they are unreadable, or it is unknown which strip is wrong.
    pub unrecoverable_rows: u64,
}

/// A member of the pool: a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolMember {
    /// Its identity, which is also in its label.
    pub uuid: Uuid,
    /// The serial number of its disk, which names it when it is missing.
    pub serial: ShortText,
    /// Its size in physical extents.
    pub physical_extents: u32,
    /// Size of each of its two snapshot areas, in blocks of 4 KiB.
    pub snapshot_blocks: u32,
    /// Offset of its first physical extent, in bytes.
    pub extents_at: u64,
    /// Its role.
    pub state: PoolMemberState,
    /// Its errors, as recorded last.
    pub error_counts: MemberErrorCounts,
    /// Which of its physical extents are allocated.
    pub(super) allocated: ExtentBitmap,
}

/// A physical extent: a slot of a member that can hold one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysicalExtent {
    /// The member.
    pub member: MemberId,
    /// Its index on the member.
    pub index: u32,
}

/// An extent of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolExtent {
    /// The number by which parity logs and stripe maps name it. It is never given to another extent
    /// of the pool.
    pub number: u64,
    /// Where its columns lie, by column number.
    pub columns: Box<[PhysicalExtent]>,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolVolume {
    /// Its identity outside of the pool.
    pub uuid: Uuid,
    /// The layout of its extents.
    pub geometry: RaidGeometry,
    /// Its size in bytes.
    pub bytes: u64,
    /// Length of a block in bytes.
    pub block_size: u32,
    /// Whether all its extents are allocated from the beginning, and never freed.
    pub is_thick: bool,
    /// The allocated extents, by their index in the volume.
    pub(super) extents: BTreeMap<u32, PoolExtent>,
    /// Stale regions of columns, by extent index and column number: one bit for each region. A
    /// column without stale regions has no entry.
    pub(super) stale_regions: BTreeMap<(u32, u16), u32>,
    /// Lost rows of data, by extent index; no set is empty.
    pub(super) lost_rows: BTreeMap<u32, RowSet>,
    /// Unrepaired rows of data, by extent index; no set is empty, and no row is also lost.
    pub(super) unrepaired_rows: BTreeMap<u32, RowSet>,
}

/// The metadata of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// The pool's identity.
    pub pool_id: Uuid,
    /// The pool's name.
    pub name: ShortText,
    /// The layout of the extents of new volumes.
    pub geometry: RaidGeometry,
    /// Number of rings of the parity log on each member.
    pub log_rings: u16,
    /// Whether its data have checksums.
    pub has_checksums: bool,
    /// Number of this version.
    pub(super) version: u64,
    /// Number of the last version known to be committed, that is durable on all of its voters.
    pub(super) committed: u64,
    /// The version with which all rings of the parity log last began anew: empty, with new entry
    /// numbers.
    pub(super) log_generation: u64,
    /// The number that the next volume gets.
    pub(super) next_volume: u32,
    /// The number that the next extent gets.
    pub(super) next_extent: u64,
    /// The remembered terms, oldest first; the last is the term of this version.
    pub(super) terms: VecDeque<Term>,
    /// See [`Self::voter_history()`].
    pub(super) voter_history: Vec<(u64, MemberSet)>,
    /// The last scrub that has ended.
    pub(super) last_scrub: ScrubRecord,
    pub(super) members: BTreeMap<MemberId, PoolMember>,
    pub(super) volumes: BTreeMap<PoolVolumeId, PoolVolume>,
}

impl MemberSet {
    /// With `member`.
    #[must_use]
    pub fn with(self, member: MemberId) -> Self {
        Self(self.0 | 1u128.checked_shl(member.0.into()).unwrap_or(0))
    }

    /// Without `member`.
    #[must_use]
    pub fn without_member(self, member: MemberId) -> Self {
        self.difference(Self::default().with(member))
    }

    /// Whether `member` is one of them.
    #[must_use]
    pub fn contains(self, member: MemberId) -> bool {
        self.0 & 1u128.checked_shl(member.0.into()).unwrap_or(0) != 0
    }

    /// Members of both sets.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Members of either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Members of this set that are not in `other`.
    #[must_use]
    pub fn difference(self, other: Self) -> Self {
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
        (0..MAX_MEMBERS).map(MemberId).filter(move |m| self.contains(*m))
    }
}

impl FromIterator<MemberId> for MemberSet {
    fn from_iter<I: IntoIterator<Item = MemberId>>(members: I) -> Self {
        members.into_iter().fold(Self::default(), Self::with)
    }
}

impl PoolMemberState {
    /// Whether a member in this state gets every version, and so is a voter.
    #[must_use]
    pub fn is_voter(self) -> bool {
        !matches!(self, Self::Detached { .. })
    }
}

impl PoolMember {
    /// Free physical extents.
    #[must_use]
    pub fn free_count(&self) -> u32 {
        self.physical_extents - self.allocated.count().min(self.physical_extents)
    }

    /// Allocated physical extents.
    #[must_use]
    pub fn allocated_count(&self) -> u32 {
        self.allocated.count()
    }

    /// Whether a physical extent is allocated.
    #[must_use]
    pub fn is_allocated(&self, index: u32) -> bool {
        self.allocated.is_allocated(index)
    }

    /// The lowest free physical extent.
    #[must_use]
    pub fn lowest_free(&self) -> Option<u32> {
        self.allocated.lowest_free(self.physical_extents)
    }
}

impl PoolVolume {
    /// Bytes of data of an extent.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.geometry.total_rows() * u64::from(ROW_BYTES)
    }

    /// Extents of the volume when all are allocated.
    #[must_use]
    pub fn extent_count_when_full(&self) -> u32 {
        u32::try_from(self.bytes.div_ceil(self.extent_bytes())).unwrap_or(u32::MAX)
    }

    /// Its extents, in order.
    pub fn extents(&self) -> impl Iterator<Item = (u32, &PoolExtent)> {
        self.extents.iter().map(|(index, extent)| (*index, extent))
    }

    /// An extent.
    #[must_use]
    pub fn extent(&self, index: u32) -> Option<&PoolExtent> {
        self.extents.get(&index)
    }

    /// The stale regions of a column, one bit each.
    #[must_use]
    pub fn stale_regions_of(&self, index: u32, column: u16) -> u32 {
        self.stale_regions.get(&(index, column)).copied().unwrap_or(0)
    }

    /// Lost rows of an extent's data: no disk returns them, and nothing can reconstruct them. Reads
    /// of them fail until they are rewritten.
    #[must_use]
    pub fn lost_rows(&self, index: u32) -> RowSet {
        self.lost_rows.get(&index).cloned().unwrap_or_default()
    }

    /// All rows that are lost, by extent.
    pub fn all_lost(&self) -> impl Iterator<Item = (u32, std::ops::Range<u32>)> + '_ {
        self.lost_rows.iter().flat_map(|(index, rows)| rows.iter().map(|rows| (*index, rows)))
    }

    /// Unrepaired rows of an extent's data: a scrub could not repair them. They read as before, and
    /// are recorded until they are rewritten.
    #[must_use]
    pub fn unrepaired_rows(&self, index: u32) -> RowSet {
        self.unrepaired_rows.get(&index).cloned().unwrap_or_default()
    }

    /// All rows that a scrub could not repair, by extent.
    pub fn all_unrepaired(&self) -> impl Iterator<Item = (u32, std::ops::Range<u32>)> + '_ {
        self.unrepaired_rows.iter().flat_map(|(index, rows)| rows.iter().map(|rows| (*index, rows)))
    }

    /// How many ranges of rows are recorded as lost or unrepaired.
    pub(super) fn damaged_range_count(&self) -> usize {
        self.lost_rows.values().map(RowSet::len).sum::<usize>() + self.unrepaired_range_count()
    }

    fn unrepaired_range_count(&self) -> usize {
        self.unrepaired_rows.values().map(RowSet::len).sum()
    }

    /// The columns with stale regions, by extent and column.
    pub fn stale_columns(&self) -> impl Iterator<Item = (u32, u16)> {
        self.stale_regions.keys().copied()
    }

    /// Whether all data of an extent survive the loss of the columns in `lost`, one bit each.
    #[must_use]
    pub fn survives_loss_of(&self, lost: u64) -> bool {
        match self.geometry.redundancy() {
            // The copies of data strip n are in the columns from n * copies on.
            Redundancy::Copies(copies) => {
                let copies_mask = (1u64 << copies) - 1;
                let is_left = |n: u16| !lost >> (n * copies) & copies_mask != 0;
                (0..self.geometry.data_strips()).all(is_left)
            }
            level => lost.count_ones() <= u32::from(level.parity_strips()),
        }
    }

    /// How many columns may be lost besides those in `lost`, whichever they are; `None` if data are
    /// lost already.
    #[must_use]
    pub fn fault_tolerance(&self, lost: u64) -> Option<u32> {
        if !self.survives_loss_of(lost) {
            return None;
        }
        Some(match self.geometry.redundancy() {
            Redundancy::Copies(copies) => {
                let copies_mask = (1u64 << copies) - 1;
                let copies_left = |n: u16| (!lost >> (n * copies) & copies_mask).count_ones();
                (0..self.geometry.data_strips()).map(copies_left).min().unwrap_or(1) - 1
            }
            level => u32::from(level.parity_strips()) - lost.count_ones(),
        })
    }

    /// The columns of an extent that cannot be used if only the members `present` are there, one
    /// bit each. The first set has the columns on absent members. A further set follows for each
    /// region that is stale in any column: it has these columns, and those where the region is
    /// stale.
    pub(super) fn unusable_columns(
        &self,
        index: u32,
        columns: &[PhysicalExtent],
        present: MemberSet,
    ) -> impl Iterator<Item = u64> {
        let bit = |column: u16| 1u64.checked_shl(column.into()).unwrap_or(0);
        let numbered = || (0u16..).zip(columns);
        let absent = numbered().filter(|(_, extent)| !present.contains(extent.member));
        let absent = absent.fold(0, |columns, (column, _)| columns | bit(column));
        let stale: Vec<(u16, u32)> = (self.stale_regions.range((index, 0)..=(index, u16::MAX)))
            .map(|((_, column), regions)| (*column, *regions))
            .collect();
        let stale_anywhere = stale.iter().fold(0, |all, (_, regions)| all | regions);
        // Region number REGIONS, after those of the slots, is that of the stripe maps.
        let regions = (0..=REGIONS).filter(move |region| stale_anywhere >> region & 1 != 0);
        let unusable_in = move |region: u32| {
            let stale = stale.iter().filter(|(_, regions)| regions >> region & 1 != 0);
            stale.fold(absent, |columns, (column, _)| columns | bit(*column))
        };
        std::iter::once(absent).chain(regions.map(unusable_in))
    }
}

/// Bytes of the stripes in a column of this geometry, data or parity, without free slots.
#[must_use]
pub fn column_data_bytes(geometry: &RaidGeometry) -> u64 {
    u64::from(geometry.strip_rows()) * u64::from(geometry.stripes()) * u64::from(ROW_BYTES)
}

/// Bytes of all slots of a column of this geometry: those that stripes occupy, and the free ones.
#[must_use]
pub fn column_bytes(geometry: &RaidGeometry) -> u64 {
    u64::from(geometry.strip_rows()) * u64::from(geometry.slots()) * u64::from(ROW_BYTES)
}

/// Length of a physical extent in a pool of this geometry, in bytes.
#[must_use]
pub fn physical_extent_bytes(geometry: &RaidGeometry) -> u64 {
    column_bytes(geometry) + EXTENT_METADATA_BYTES
}

impl Metadata {
    /// A pool without members: version 0, which is never written.
    #[must_use]
    pub fn new(pool: Uuid, name: ShortText, geometry: RaidGeometry, log_rings: u16) -> Self {
        Self {
            pool_id: pool,
            name,
            geometry,
            log_rings,
            has_checksums: false,
            version: 0,
            committed: 0,
            log_generation: 0,
            next_volume: 1,
            next_extent: 1,
            terms: VecDeque::new(),
            voter_history: vec![(0, MemberSet::default())],
            last_scrub: ScrubRecord::default(),
            members: BTreeMap::new(),
            volumes: BTreeMap::new(),
        }
    }

    /// The identity of this version.
    #[must_use]
    pub fn version_id(&self) -> VersionId {
        let term = self.terms.back();
        VersionId {
            term: term.map_or(0, |term| term.number),
            version: self.version,
            term_id: term.map_or(Uuid::nil(), |term| term.id),
        }
    }

    /// Bytes of the stripes in a column; the same for all volumes of the pool.
    #[must_use]
    pub fn column_data_bytes(&self) -> u64 {
        column_data_bytes(&self.geometry)
    }

    /// First row of a physical extent on its member, in rows of 4 KiB.
    #[must_use]
    pub fn first_row_of(&self, extent: PhysicalExtent) -> u64 {
        let extents_at = self.members.get(&extent.member).map_or(0, |member| member.extents_at);
        (extents_at + u64::from(extent.index) * physical_extent_bytes(&self.geometry))
            / u64::from(ROW_BYTES)
    }

    /// The version with which all rings of the parity log last began anew: empty, with new entry
    /// numbers. Entries of older generations are ignored.
    #[must_use]
    pub fn log_generation(&self) -> u64 {
        self.log_generation
    }

    /// The last version known to be committed.
    #[must_use]
    pub fn committed_version(&self) -> u64 {
        self.committed
    }

    /// The term of this version.
    #[must_use]
    pub fn current_term(&self) -> Option<&Term> {
        self.terms.back()
    }

    /// Whether `version_id` is this version or an ancestor of it; false if its term is no longer
    /// remembered.
    #[must_use]
    pub fn descends_from(&self, version_id: VersionId) -> bool {
        let mut newest_first = self.terms.iter().rev();
        let term = newest_first.find(|term| term.first_version <= version_id.version);
        let has_term_id = term.is_some_and(|term| term.id == version_id.term_id);
        version_id.version <= self.version && has_term_id
    }

    /// The ancestor with this number, or this version; `None` if its term is no longer remembered.
    #[must_use]
    pub fn version_id_of(&self, version: u64) -> Option<VersionId> {
        let term = self.terms.iter().rev().find(|term| term.first_version <= version)?;
        let version_id = VersionId { term: term.number, version, term_id: term.id };
        (version <= self.version).then_some(version_id)
    }

    /// The last version that this one proves to be committed; `None` before the first commit, and
    /// if its term is no longer remembered.
    #[must_use]
    pub fn last_committed(&self) -> Option<VersionId> {
        self.version_id_of(self.committed).filter(|id| id.version > 0)
    }

    /// Whether terms are remembered that reach back to a version with this number. If not, it is
    /// unknown whether `version_id` is an ancestor.
    #[must_use]
    pub fn remembers_term_of(&self, version_id: VersionId) -> bool {
        self.terms.front().is_some_and(|oldest| oldest.first_version <= version_id.version)
    }

    /// Versions and their voters. The first entry has the voters of the last version known to be
    /// committed. One entry follows for each later version that changed the voters.
    #[must_use]
    pub fn voter_history(&self) -> &[(u64, MemberSet)] {
        &self.voter_history
    }

    /// The members that get every version.
    #[must_use]
    pub fn voters(&self) -> MemberSet {
        let votes = self.members.iter().filter(|(_, m)| m.state.is_voter());
        votes.map(|(id, _)| *id).collect()
    }

    /// The members, in order.
    pub fn members(&self) -> impl Iterator<Item = (MemberId, &PoolMember)> {
        self.members.iter().map(|(id, member)| (*id, member))
    }

    /// A member.
    #[must_use]
    pub fn member(&self, id: MemberId) -> Option<&PoolMember> {
        self.members.get(&id)
    }

    /// The member with this identity.
    #[must_use]
    pub fn find_member(&self, uuid: Uuid) -> Option<(MemberId, &PoolMember)> {
        self.members().find(|(_, member)| member.uuid == uuid)
    }

    /// The volumes, in order.
    pub fn volumes(&self) -> impl Iterator<Item = (PoolVolumeId, &PoolVolume)> {
        self.volumes.iter().map(|(id, volume)| (*id, volume))
    }

    /// A volume.
    #[must_use]
    pub fn volume(&self, id: PoolVolumeId) -> Option<&PoolVolume> {
        self.volumes.get(&id)
    }

    /// The number that the next volume gets.
    #[must_use]
    pub fn next_volume_id(&self) -> PoolVolumeId {
        PoolVolumeId(self.next_volume)
    }

    /// The lowest number that no member has.
    #[must_use]
    pub fn next_member_id(&self) -> Option<MemberId> {
        (0..MAX_MEMBERS).map(MemberId).find(|id| !self.members.contains_key(id))
    }

    /// The last scrub that has ended.
    #[must_use]
    pub fn last_scrub(&self) -> ScrubRecord {
        self.last_scrub
    }

    /// How many ranges of rows are recorded as lost or unrepaired, in all volumes.
    pub(super) fn damaged_range_count(&self) -> usize {
        self.volumes.values().map(PoolVolume::damaged_range_count).sum()
    }

    /// How many ranges of rows are recorded as unrepaired, in all volumes.
    #[must_use]
    pub fn unrepaired_range_count(&self) -> usize {
        self.volumes.values().map(PoolVolume::unrepaired_range_count).sum()
    }

    /// Volumes of which data cannot be read if only the members `present` are there.
    pub fn lost_volumes(&self, present: MemberSet) -> impl Iterator<Item = PoolVolumeId> {
        let lacks_data = move |volume: &PoolVolume| {
            let mut extents = volume.extents();
            extents.any(|(index, extent)| {
                let mut unusable = volume.unusable_columns(index, &extent.columns, present);
                unusable.any(|columns| !volume.survives_loss_of(columns))
            })
        };
        self.volumes().filter(move |(_, volume)| lacks_data(volume)).map(|(id, _)| id)
    }
}

#[cfg(test)]
pub(super) mod tests;
