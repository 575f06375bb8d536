//! Invariants of a pool's metadata, which hold after every change.

use std::collections::BTreeMap;

use geometry::{ALL_REGIONS, MAX_MEMBERS};
use rustc_hash::FxHashSet;

use super::apply::{check_volume_size, is_extents_offset, snapshot_capacity};
use super::{
    MAX_LOG_RINGS, MAX_PHYSICAL_EXTENTS, MAX_SPLIT_DAMAGED_RANGES, MAX_TERMS, MAX_VOLUMES,
    MAX_VOTER_HISTORY, MemberId, MemberSet, Metadata, PoolExtent, PoolVolume,
};
use crate::extent_bitmap::ExtentBitmap;

/// The invariant that is violated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it contradicts itself: {0}")]
pub struct InvariantViolation(pub &'static str);

fn ensure(holds: bool, what: &'static str) -> Result<(), InvariantViolation> {
    if holds { Ok(()) } else { Err(InvariantViolation(what)) }
}

impl Metadata {
    /// Checks all invariants. It visits every extent, so it is for metadata that was read, and for
    /// tests.
    ///
    /// # Errors
    /// The first invariant that is violated.
    pub fn check(&self) -> Result<(), InvariantViolation> {
        self.check_history()?;
        self.check_members()?;
        let mut allocated: BTreeMap<MemberId, ExtentBitmap> = BTreeMap::new();
        let mut numbers = FxHashSet::default();
        ensure(self.volumes.len() <= MAX_VOLUMES, "the number of volumes")?;
        for (id, volume) in &self.volumes {
            ensure(id.0 < self.next_volume, "the number of a volume")?;
            self.check_volume(volume, &mut allocated, &mut numbers)?;
        }
        ensure(
            self.damaged_range_count() <= MAX_SPLIT_DAMAGED_RANGES,
            "the number of lost ranges",
        )?;
        let none = ExtentBitmap::default();
        let same = |id, member: &super::PoolMember| {
            *allocated.get(id).unwrap_or(&none) == member.allocated
        };
        ensure(self.members.iter().all(|(id, m)| same(id, m)), "the allocated extents")
    }

    fn check_history(&self) -> Result<(), InvariantViolation> {
        self.check_geometry(&self.geometry)
            .map_err(|_| InvariantViolation("the geometry of new volumes"))?;
        ensure((1..=MAX_LOG_RINGS).contains(&self.log_rings), "the number of rings")?;
        ensure(self.log_generation <= self.version, "the log generation")?;
        ensure(self.committed <= self.version, "the committed version")?;
        ensure(self.terms.len() <= MAX_TERMS, "the number of terms")?;
        let pairs = self.terms.iter().zip(self.terms.iter().skip(1));
        let rising = |(a, b): (&super::Term, &super::Term)| {
            a.number.checked_add(1) == Some(b.number) && a.first_version < b.first_version
        };
        ensure({ pairs }.all(rising), "the order of terms")?;
        let last = self.terms.back();
        ensure(last.is_none_or(|o| o.first_version <= self.version), "the last term")?;
        ensure(self.voter_history.len() <= MAX_VOTER_HISTORY, "the length of the voter history")?;
        ensure(
            self.voter_history.is_sorted_by(|a, b| a.0 < b.0),
            "the order of the voter history",
        )?;
        let ends = self.voter_history.first().zip(self.voter_history.last());
        let (first, last) = ends.ok_or(InvariantViolation("the voter history"))?;
        ensure(
            first.0 <= self.committed && last.0 <= self.version,
            "the ends of the voter history",
        )?;
        let voters = self.voter_history.iter().flat_map(|(_, voters)| voters.iter());
        let mut unknown = voters.filter(|id| !self.members.contains_key(id));
        ensure(unknown.next().is_none(), "a voter that is no member")?;
        ensure(last.1 == self.voters(), "the voters of the last version")
    }

    fn check_members(&self) -> Result<(), InvariantViolation> {
        let all: u64 = self.members.values().map(|m| u64::from(m.physical_extents)).sum();
        let mut uuids: Vec<_> = self.members.values().map(|m| m.uuid).collect();
        uuids.sort_unstable();
        ensure(uuids.is_sorted_by(|a, b| a < b), "the identity of members")?;
        for (id, member) in &self.members {
            ensure(id.0 < MAX_MEMBERS, "the number of a member")?;
            ensure(
                (1..=MAX_PHYSICAL_EXTENTS).contains(&member.physical_extents),
                "the size of a member",
            )?;
            ensure(is_extents_offset(member.extents_at), "the offset of a member's extents")?;
            ensure(
                snapshot_capacity(member.snapshot_blocks) >= all,
                "the snapshot area of a member",
            )?;
        }
        Ok(())
    }

    fn check_volume(
        &self,
        volume: &PoolVolume,
        allocated: &mut BTreeMap<MemberId, ExtentBitmap>,
        numbers: &mut FxHashSet<u64>,
    ) -> Result<(), InvariantViolation> {
        self.check_geometry(&volume.geometry)
            .map_err(|_| InvariantViolation("the geometry of a volume"))?;
        check_volume_size(volume.bytes, volume.block_size)
            .map_err(|_| InvariantViolation("the size of a volume"))?;
        ensure(matches!(volume.block_size, 512 | 4096), "the block size")?;
        for (index, PoolExtent { number, columns }) in volume.extents() {
            ensure(index < volume.extent_count_when_full(), "an extent past a volume's end")?;
            let once = *number < self.next_extent && numbers.insert(*number);
            ensure(once, "the number of an extent")?;
            ensure(columns.len() == usize::from(volume.geometry.columns()), "a number of columns")?;
            let members: MemberSet = columns.iter().map(|column| column.member).collect();
            ensure(members.len() as usize == columns.len(), "two columns on one member")?;
            for column in columns.iter() {
                let member = self.members.get(&column.member);
                let member = member.ok_or(InvariantViolation("a column on no member"))?;
                ensure(column.index < member.physical_extents, "a column past a member's end")?;
                let free = allocated.entry(column.member).or_default().allocate(column.index);
                ensure(free, "two columns in one physical extent")?;
            }
        }
        let is_valid_mark = |((index, column), regions): (&(u32, u16), &u32)| {
            let exists =
                volume.extent(*index).is_some_and(|p| usize::from(*column) < p.columns.len());
            exists && *regions != 0 && regions & !ALL_REGIONS == 0
        };
        ensure(volume.stale_regions.iter().all(is_valid_mark), "stale regions")?;
        let is_there = |(index, rows): (&u32, &geometry::RowSet)| {
            let inside =
                |rows: std::ops::Range<u32>| u64::from(rows.end) <= volume.geometry.total_rows();
            volume.extent(*index).is_some() && !rows.is_empty() && rows.iter().all(inside)
        };
        ensure(volume.lost_rows.iter().all(is_there), "a range of lost rows")?;
        let is_lost = |(index, rows): (&u32, &geometry::RowSet)| {
            let lost = volume.lost_rows(*index);
            rows.iter().any(|rows| !lost.intersection(&rows).is_empty())
        };
        let unrepaired = volume.unrepaired_rows.iter();
        ensure(
            { unrepaired }.all(|at| is_there(at) && !is_lost(at)),
            "a range of rows that were not repaired",
        )
    }
}
