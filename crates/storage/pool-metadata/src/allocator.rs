//! Places new columns on members, and computes how many extents fit.

use std::collections::BTreeMap;

use geometry::{ROW_BYTES, RaidGeometry, Redundancy};

use super::extent_bitmap::ExtentBitmap;
use super::metadata::{
    MemberId, MemberSet, Metadata, PhysicalExtent, PoolExtent, PoolMember, PoolMemberState,
    PoolVolume,
};

/// Physical extents that have been chosen for columns, before the metadata records them.
#[derive(Debug, Default)]
pub struct ReservedExtents(BTreeMap<MemberId, ExtentBitmap>);

impl ReservedExtents {
    /// Reserves physical extents that [`place_columns`] or [`place_column`] chose.
    pub fn reserve(&mut self, extents: &[PhysicalExtent]) {
        for extent in extents {
            self.0.entry(extent.member).or_default().allocate(extent.index);
        }
    }

    /// Releases them: they have been recorded, or will not be used.
    pub fn release(&mut self, extents: &[PhysicalExtent]) {
        for extent in extents {
            self.0.entry(extent.member).or_default().free(extent.index);
        }
    }

    /// Physical extents of a member that are neither allocated nor reserved.
    pub(super) fn free_count(&self, id: MemberId, member: &PoolMember) -> u32 {
        member.free_count().saturating_sub(self.0.get(&id).map_or(0, ExtentBitmap::count))
    }

    fn lowest_free(&self, id: MemberId, member: &PoolMember) -> Option<PhysicalExtent> {
        let reserved = |index| self.0.get(&id).is_some_and(|indices| indices.is_allocated(index));
        let mut indices = member.lowest_free()?..member.physical_extents;
        let index = indices.find(|index| !member.is_allocated(*index) && !reserved(*index))?;
        Some(PhysicalExtent { member: id, index })
    }
}

/// Places the columns of a new extent: on the members with the most free space, and on detached
/// members only where there are not enough others. `None` if there is no space.
#[must_use]
pub fn place_columns(
    metadata: &Metadata,
    reserved: &ReservedExtents,
    geometry: &RaidGeometry,
) -> Option<Vec<PhysicalExtent>> {
    let columns = usize::from(geometry.columns());
    let active =
        members_by_free_space(metadata, reserved, |state| state == PoolMemberState::Active);
    let mut chosen: Vec<_> = active.into_iter().take(columns).collect();
    let missing = columns - chosen.len();
    let detached = members_by_free_space(metadata, reserved, |state| !state.is_voter());
    let detached: Vec<_> = detached.into_iter().take(missing).collect();
    if detached.len() < missing || missing > usize::from(geometry.redundancy().fault_tolerance()) {
        return None;
    }
    // Each copy must be in another group of columns.
    let step = match geometry.redundancy() {
        Redundancy::Copies(copies) => usize::from(copies),
        _ => 1,
    };
    for (n, id) in detached.into_iter().enumerate() {
        let at = (n * step).min(chosen.len());
        chosen.insert(at, id);
    }
    let place = |id: MemberId| reserved.lowest_free(id, metadata.member(id)?);
    chosen.into_iter().map(place).collect()
}

/// The same with attached members only, so that no column is stale from the beginning.
#[must_use]
pub fn place_columns_on_active(
    metadata: &Metadata,
    reserved: &ReservedExtents,
    geometry: &RaidGeometry,
) -> Option<Vec<PhysicalExtent>> {
    let columns = usize::from(geometry.columns());
    let active =
        members_by_free_space(metadata, reserved, |state| state == PoolMemberState::Active);
    let chosen = active.get(..columns)?.iter();
    chosen.map(|id| reserved.lowest_free(*id, metadata.member(*id)?)).collect()
}

/// Places one column of an extent that has its others on `others`: on the member with the most free
/// space.
#[must_use]
pub fn place_column(
    metadata: &Metadata,
    reserved: &ReservedExtents,
    others: MemberSet,
) -> Option<PhysicalExtent> {
    let target =
        members_by_free_space(metadata, reserved, |state| state == PoolMemberState::Active);
    let target = target.into_iter().find(|id| !others.contains(*id))?;
    reserved.lowest_free(target, metadata.member(target)?)
}

/// Members in a state that have free space, those with the most first.
fn members_by_free_space(
    metadata: &Metadata,
    reserved: &ReservedExtents,
    has_state: impl Fn(PoolMemberState) -> bool,
) -> Vec<MemberId> {
    let members = metadata.members().filter(|(_, member)| has_state(member.state));
    let free = members.map(|(id, member)| (reserved.free_count(id, member), id));
    let mut all: Vec<_> = free.filter(|(free, _)| *free > 0).collect();
    all.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    all.into_iter().map(|(_, id)| id).collect()
}

/// How many extents of so many columns fit on members with so much free space: the upper bound,
/// which [`place_columns`] reaches.
#[must_use]
pub fn max_extents(free: &[u32], columns: u16) -> u64 {
    let columns = u64::from(columns.max(1));
    let fits = |n: u64| free.iter().map(|f| u64::from(*f).min(n)).sum::<u64>() >= n * columns;
    let (mut low, mut high) = (0, free.iter().map(|f| u64::from(*f)).sum::<u64>() / columns);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

impl Metadata {
    /// Extents of new volumes that still fit on the active members.
    #[must_use]
    pub fn free_extents(&self) -> u64 {
        self.extents_fitting(PoolMember::free_count, |state| state == PoolMemberState::Active)
    }

    /// Extents of new volumes that would fit on the members if they were empty and none were
    /// detached.
    #[must_use]
    pub fn total_extents(&self) -> u64 {
        let holds_columns =
            |state| matches!(state, PoolMemberState::Active | PoolMemberState::Detached { .. });
        self.extents_fitting(|member| member.physical_extents, holds_columns)
    }

    /// Bytes of data of an extent of a new volume.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.geometry.total_rows() * u64::from(ROW_BYTES)
    }

    /// Whether columns of a member can be moved elsewhere; only the first extents of each volume
    /// are tried.
    #[must_use]
    pub fn can_relocate_from(&self, id: MemberId, reserved: &ReservedExtents) -> bool {
        const MAX_TRIED: usize = 16;
        let is_movable = |extent: &PoolExtent| {
            let others = extent.columns.iter().map(|column| column.member).filter(|m| *m != id);
            place_column(self, reserved, others.collect()).is_some()
        };
        self.volumes().any(|(_, volume)| {
            let extents = volume.extents().map(|(_, extent)| extent);
            let on_member = extents.filter(|extent| extent.columns.iter().any(|p| p.member == id));
            on_member.take(MAX_TRIED).any(is_movable)
        })
    }

    fn extents_fitting(
        &self,
        extents_of: impl Fn(&PoolMember) -> u32,
        holds_columns: impl Fn(PoolMemberState) -> bool,
    ) -> u64 {
        let members = self.members().filter(|(_, member)| holds_columns(member.state));
        let members: Vec<u32> = members.map(|(_, member)| extents_of(member)).collect();
        max_extents(&members, self.geometry.columns())
    }

    /// How many more members may fail, whichever they are, before data of a volume are lost, if
    /// only the members `present` are left. `None` if data are lost already.
    #[must_use]
    pub fn fault_tolerance(&self, volume: &PoolVolume, present: MemberSet) -> Option<u32> {
        let all = volume.extents().flat_map(|(index, extent)| {
            volume
                .unusable_columns(index, &extent.columns, present)
                .map(|lost| volume.fault_tolerance(lost))
        });
        let level = Some(u32::from(volume.geometry.redundancy().fault_tolerance()));
        all.fold(level, |least, tolerance| Some(least?.min(tolerance?)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metadata::Change;
    use crate::samples::{pool, raid5};

    proptest! {
        /// Allocating where most is free reaches the upper bound.
        #[test]
        fn greedy_allocation_from_the_emptiest_members_is_optimal(free in prop::collection::vec(0u32..12, 1..7), columns in 1u16..5) {
            let mut left = free.clone();
            let mut extents = 0;
            loop {
                left.sort_unstable_by(|a, b| b.cmp(a));
                let Some(taken) = left.get_mut(..columns.into()).filter(|l| l.iter().all(|f| *f > 0)) else { break };
                taken.iter_mut().for_each(|f| *f -= 1);
                extents += 1;
            }
            prop_assert_eq!(max_extents(&free, columns), extents);
        }
    }

    #[test]
    fn detached_members_are_used_if_too_few_are_attached() {
        let mut pool = pool(4);
        let members =
            |columns: Vec<PhysicalExtent>| columns.iter().map(|p| p.member.0).collect::<Vec<_>>();
        let none = ReservedExtents::default();
        assert_eq!(members(place_columns(&pool, &none, &raid5(4)).unwrap()), [0, 1, 2, 3]);
        pool.begin_version(0).unwrap();
        pool.apply(&Change::Detach(MemberId(1))).unwrap();
        assert_eq!(members(place_columns(&pool, &none, &raid5(3)).unwrap()), [0, 2, 3]);
        assert_eq!(members(place_columns(&pool, &none, &raid5(4)).unwrap()), [1, 0, 2, 3]);
        pool.apply(&Change::Detach(MemberId(2))).unwrap();
        assert_eq!(
            place_columns(&pool, &none, &raid5(4)),
            None,
            "two of them are more than it bears"
        );
        let pairs = RaidGeometry::new(Redundancy::Copies(2), 4, 16, 256).unwrap();
        assert_eq!(place_columns(&pool, &none, &pairs), None);
    }

    #[test]
    fn reserved_extents_are_not_allocated_again() {
        let (pool, mut reserved) = (pool(3), ReservedExtents::default());
        let mut seen = std::collections::BTreeSet::new();
        while let Some(columns) = place_columns(&pool, &reserved, &raid5(3)) {
            assert!(columns.iter().all(|column| seen.insert(*column)));
            reserved.reserve(&columns);
        }
        assert_eq!(seen.len(), 18);
        let column = PhysicalExtent { member: MemberId(1), index: 2 };
        reserved.release(&[column]);
        assert_eq!(place_column(&pool, &reserved, MemberSet(0b101)), Some(column));
        assert_eq!(place_column(&pool, &reserved, MemberSet(0b010)), None);
    }
}
