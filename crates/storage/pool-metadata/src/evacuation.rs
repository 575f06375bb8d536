//! Evacuation of disks that are draining or detached: whether their columns fit on the others, and
//! how much space is left.

use std::collections::BTreeMap;

use super::allocator::{ReservedExtents, max_extents};
use super::metadata::{MemberId, MemberSet, Metadata, PoolMemberState};

/// The effect of moving all columns of some members to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evacuation {
    /// Columns that lie on them.
    pub columns: u64,
    /// Columns that cannot be placed: two columns of one extent need different disks.
    pub unplaceable: u64,
    /// Extents that fit on the others afterwards.
    pub free_extents_after: u64,
}

/// Why the columns of a member do not fit on the others, in numbers: more disks are needed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RemovalRefused(String);

impl Metadata {
    /// Active members: they hold data and stay.
    #[must_use]
    pub fn active_members(&self) -> MemberSet {
        self.members_in_state(|state| state == PoolMemberState::Active)
    }

    /// Members in a state.
    fn members_in_state(&self, has_state: impl Fn(PoolMemberState) -> bool) -> MemberSet {
        self.members().filter(|(_, m)| has_state(m.state)).map(|(id, _)| id).collect()
    }

    /// Computes the effect of moving all columns from `from` to `onto`, one by one to the member
    /// with the most free space, as it is done.
    #[must_use]
    pub fn plan_evacuation(
        &self,
        from: MemberSet,
        onto: MemberSet,
        reserved: &ReservedExtents,
    ) -> Evacuation {
        let onto = onto.difference(from);
        let targets = self.members().filter(|(id, _)| onto.contains(*id));
        let mut free: BTreeMap<MemberId, u32> =
            targets.map(|(id, member)| (id, reserved.free_count(id, member))).collect();
        let (mut columns, mut unplaceable) = (0, 0);
        let volumes = self.volumes().filter(|_| !from.is_empty());
        for (_, extent) in volumes.flat_map(|(_, volume)| volume.extents()) {
            let members = || extent.columns.iter().map(|column| column.member);
            let moving = members().filter(|member| from.contains(*member)).count();
            let mut taken: MemberSet = members().collect();
            for _ in 0..moving {
                columns += 1;
                let fitting =
                    free.iter_mut().filter(|(id, free)| **free > 0 && !taken.contains(**id));
                match fitting.max_by_key(|(id, free)| (**free, std::cmp::Reverse(**id))) {
                    Some((id, free)) => {
                        *free -= 1;
                        taken = taken.with(*id);
                    }
                    None => unplaceable += 1,
                }
            }
        }
        let left: Vec<u32> = free.into_values().collect();
        Evacuation {
            columns,
            unplaceable,
            free_extents_after: max_extents(&left, self.geometry.columns()),
        }
    }

    /// Extents that the volumes have not allocated yet.
    #[must_use]
    pub fn unallocated_extents(&self) -> u64 {
        let missing = |full: u32, has: usize| u64::from(full).saturating_sub(has as u64);
        self.volumes().map(|(_, v)| missing(v.extent_count_when_full(), v.extents().count())).sum()
    }

    /// Checks whether a member may be removed, and returns the spares that must be activated for
    /// that; none if the active members suffice.
    ///
    /// # Errors
    /// What would not fit, in numbers.
    pub fn check_removal(
        &self,
        id: MemberId,
        reserved: &ReservedExtents,
    ) -> Result<MemberSet, RemovalRefused> {
        let Some(member) = self.member(id) else { return Ok(MemberSet::default()) };
        let is_detached = !member.state.is_voter();
        if matches!(member.state, PoolMemberState::Spare | PoolMemberState::Draining)
            || is_detached && member.allocated_count() == 0
        {
            return Ok(MemberSet::default());
        }
        let mut onto = self.active_members().without_member(id);
        let refused = match self.check_removal_onto(id, onto, reserved) {
            Ok(()) => return Ok(MemberSet::default()),
            Err(why) => why,
        };
        let (mut activated, mut spares) = (MemberSet::default(), self.spares());
        // The smallest spare that suffices by itself; if none does, the largest and one more.
        while let Some(last) = spares.pop() {
            let mut all = spares.iter().chain([&last]).copied();
            let enough =
                |spare: &MemberId| self.check_removal_onto(id, onto.with(*spare), reserved).is_ok();
            if let Some(spare) = all.find(enough) {
                return Ok(activated.with(spare));
            }
            (activated, onto) = (activated.with(last), onto.with(last));
        }
        Err(refused)
    }

    /// Spares, the smallest first.
    pub(super) fn spares(&self) -> Vec<MemberId> {
        let spares = self.members().filter(|(_, m)| m.state == PoolMemberState::Spare);
        let mut spares: Vec<_> = spares.map(|(id, m)| (m.physical_extents, id)).collect();
        spares.sort_unstable();
        spares.into_iter().map(|(_, id)| id).collect()
    }

    fn check_removal_onto(
        &self,
        id: MemberId,
        onto: MemberSet,
        reserved: &ReservedExtents,
    ) -> Result<(), RemovalRefused> {
        let plan = self.plan_evacuation(MemberSet::default().with(id), onto, reserved);
        let columns = u32::from(self.geometry.columns());
        let is_detached = self.member(id).is_none_or(|member| !member.state.is_voter());
        let disks = onto.len();
        let refuse = |what: String| Err(RemovalRefused(what));
        // A detached member is missing already, so removing it changes nothing here.
        if !is_detached && disks < columns {
            return refuse(format!(
                "without it {} would hold data, but a stripe of this pool needs {columns} different disks",
                wire::plural(disks, "disk")
            ));
        }
        if plan.unplaceable > 0 {
            let Evacuation { columns, unplaceable, .. } = plan;
            return refuse(format!(
                "it holds {}, and the other disks have no space for {unplaceable}: columns of one extent need different disks",
                wire::plural(columns, "column")
            ));
        }
        let (before, promised) = (self.free_extents(), self.unallocated_extents());
        let fitted = before >= promised || plan.free_extents_after == 0 && before > 0;
        if !is_detached && plan.free_extents_after < promised && fitted {
            let (promised, left) =
                (self.extents_size_text(promised), self.extents_size_text(plan.free_extents_after));
            return refuse(format!(
                "volumes of the pool may still write {promised}, but without it there is space for only {left}"
            ));
        }
        Ok(())
    }

    /// The size of so many extents, as text.
    #[must_use]
    pub fn extents_size_text(&self, extents: u64) -> String {
        let mebibytes = (u128::from(extents) * u128::from(self.extent_bytes())) >> 20;
        match mebibytes {
            0..1024 => format!("{mebibytes} MiB"),
            _ => format!("{}.{} GiB", mebibytes / 1024, mebibytes % 1024 * 10 / 1024),
        }
    }

    /// The spare to activate for detached members. Unless one has `just_detached`, none if their
    /// columns fit elsewhere.
    #[must_use]
    pub fn spare_to_activate(
        &self,
        just_detached: bool,
        reserved: &ReservedExtents,
    ) -> Option<MemberId> {
        let detached = self.members_in_state(|state| !state.is_voter());
        let holds = |id: &MemberId| self.member(*id).is_some_and(|m| m.allocated_count() > 0);
        let detached: MemberSet = detached.iter().filter(holds).collect();
        let spares = self.spares();
        if detached.is_empty() || spares.is_empty() {
            return None;
        }
        let unplaceable =
            |onto: MemberSet| self.plan_evacuation(detached, onto, reserved).unplaceable;
        let now = unplaceable(self.active_members());
        if now == 0 && !just_detached {
            return None;
        }
        let with = |spare: &MemberId| unplaceable(self.active_members().with(*spare));
        let fits = spares.iter().find(|spare| with(spare) == 0).copied();
        // Otherwise the largest, if it takes any columns at all.
        fits.or_else(|| spares.last().copied().filter(|largest| with(largest) < now))
    }
}

#[cfg(test)]
mod tests;
