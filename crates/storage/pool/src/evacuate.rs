//! What disks that leave, or are out, hold: whether it has room on the others, and what is left for volumes then.

use std::collections::BTreeMap;

use super::allocate::{Reserved, extents_that_fit};
use super::error::PoolError;
use super::metadata::{MemberId, Members, Metadata, Standing};

/// What comes of moving all that lies on some members to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evacuation {
    /// Pieces that lie on them,
    pub pieces: u64,
    /// and those for which there is no place: two pieces of one extent need different disks.
    pub stranded: u64,
    /// Extents that the others have room for afterwards.
    pub extents_left: u64,
}

impl Metadata {
    /// Members that hold data and stay.
    #[must_use]
    pub fn in_use(&self) -> Members {
        self.standing_as(|standing| standing == Standing::In)
    }

    /// Members of this standing.
    fn standing_as(&self, is: impl Fn(Standing) -> bool) -> Members {
        self.members().filter(|(_, m)| is(m.standing)).map(|(id, _)| id).collect()
    }

    /// What comes of moving all that lies on `from` to `onto`, piece by piece to where most room is, as it is done.
    #[must_use]
    pub fn evacuation(&self, from: Members, onto: Members, reserved: &Reserved) -> Evacuation {
        let onto = onto.without(from);
        let there = self.members().filter(|(id, _)| onto.has(*id));
        let mut free: BTreeMap<MemberId, u32> =
            there.map(|(id, member)| (id, reserved.free(id, member))).collect();
        let (mut pieces, mut stranded) = (0, 0);
        let volumes = self.volumes().filter(|_| !from.is_empty());
        for (_, extent) in volumes.flat_map(|(_, volume)| volume.extents()) {
            let here = || extent.pieces.iter().map(|piece| piece.member);
            let moving = here().filter(|member| from.has(*member)).count();
            let mut taken: Members = here().collect();
            for _ in 0..moving {
                pieces += 1;
                let fitting = free.iter_mut().filter(|(id, free)| **free > 0 && !taken.has(**id));
                match fitting.max_by_key(|(id, free)| (**free, std::cmp::Reverse(**id))) {
                    Some((id, free)) => {
                        *free -= 1;
                        taken = taken.with(*id);
                    }
                    None => stranded += 1,
                }
            }
        }
        let left: Vec<u32> = free.into_values().collect();
        Evacuation { pieces, stranded, extents_left: extents_that_fit(&left, self.shape.columns()) }
    }

    /// Extents that its volumes do not have and may still write, or are to keep.
    #[must_use]
    pub fn extents_promised(&self) -> u64 {
        let missing = |full: u32, has: usize| u64::from(full).saturating_sub(has as u64);
        self.volumes().map(|(_, v)| missing(v.full(), v.extents().count())).sum()
    }

    /// Whether a member may be taken out of the pool, and which spares have to take its place: none if the others are enough.
    ///
    /// # Errors
    /// What would not fit, in numbers, and what to do about it.
    pub fn may_leave(&self, id: MemberId, reserved: &Reserved) -> Result<Members, PoolError> {
        let Some(member) = self.member(id) else { return Ok(Members::default()) };
        let is_out = !member.standing.votes();
        if matches!(member.standing, Standing::Spare | Standing::Leaving)
            || is_out && member.taken() == 0
        {
            return Ok(Members::default());
        }
        let mut onto = self.in_use().but(id);
        let refused = match self.may_leave_to(id, onto, reserved) {
            Ok(()) => return Ok(Members::default()),
            Err(why) => why,
        };
        let (mut called, mut spares) = (Members::default(), self.spares());
        // The smallest one that is enough by itself; if none is, the largest, and one more.
        while let Some(last) = spares.pop() {
            let mut all = spares.iter().chain([&last]).copied();
            let enough =
                |spare: &MemberId| self.may_leave_to(id, onto.with(*spare), reserved).is_ok();
            if let Some(spare) = all.find(enough) {
                return Ok(called.with(spare));
            }
            (called, onto) = (called.with(last), onto.with(last));
        }
        Err(refused)
    }

    /// Spares, the smallest first.
    pub(super) fn spares(&self) -> Vec<MemberId> {
        let spares = self.members().filter(|(_, m)| m.standing == Standing::Spare);
        let mut spares: Vec<_> = spares.map(|(id, m)| (m.units, id)).collect();
        spares.sort_unstable();
        spares.into_iter().map(|(_, id)| id).collect()
    }

    fn may_leave_to(
        &self,
        id: MemberId,
        onto: Members,
        reserved: &Reserved,
    ) -> Result<(), PoolError> {
        let goes = self.evacuation(Members::default().with(id), onto, reserved);
        let columns = u32::from(self.shape.columns());
        let is_out = self.member(id).is_none_or(|member| !member.standing.votes());
        let (hint, disks) = ("add a disk first (windrose pool add)", onto.len());
        let refuse = |what: String| Err(PoolError::no_space(what).hinting(hint));
        // One that is out is missing already, whatever is said of it.
        if !is_out && disks < columns {
            return refuse(format!(
                "without it {} would hold data, and a stripe of this pool needs {columns} different ones",
                wire::count(disks, "disk")
            ));
        }
        if goes.stranded > 0 {
            let Evacuation { pieces, stranded, .. } = goes;
            return refuse(format!(
                "{} on it, and the other disks have no room for {stranded}: those of one stripe need different ones",
                wire::count(pieces, "piece")
            ));
        }
        let (before, promised) = (self.extents_free(), self.extents_promised());
        let fitted = before >= promised || goes.extents_left == 0 && before > 0;
        if !is_out && goes.extents_left < promised && fitted {
            let (promised, left) = (self.size_of(promised), self.size_of(goes.extents_left));
            return refuse(format!(
                "volumes of the pool may still write {promised}, and without it there is room for {left}"
            ));
        }
        Ok(())
    }

    /// How large so many extents are, for people.
    pub(super) fn size_of(&self, extents: u64) -> String {
        let mebibytes = (u128::from(extents) * u128::from(self.extent_bytes())) >> 20;
        match mebibytes {
            0..1024 => format!("{mebibytes} MiB"),
            _ => format!("{}.{} GiB", mebibytes / 1024, mebibytes % 1024 * 10 / 1024),
        }
    }

    /// The spare to take the place of members that are out. Unless that is `news`, none where what lies on them has room elsewhere.
    #[must_use]
    pub fn spare_to_call(&self, news: bool, reserved: &Reserved) -> Option<MemberId> {
        let out = self.standing_as(|standing| !standing.votes());
        let holds = |id: &MemberId| self.member(*id).is_some_and(|m| m.taken() > 0);
        let out: Members = out.iter().filter(holds).collect();
        let spares = self.spares();
        if out.is_empty() || spares.is_empty() {
            return None;
        }
        let stranded = |onto: Members| self.evacuation(out, onto, reserved).stranded;
        let now = stranded(self.in_use());
        if now == 0 && !news {
            return None;
        }
        let with = |spare: &MemberId| stranded(self.in_use().with(*spare));
        let fits = spares.iter().find(|spare| with(spare) == 0).copied();
        // Whichever takes most; none that takes nothing.
        fits.or_else(|| spares.last().copied().filter(|largest| with(largest) < now))
    }
}

#[cfg(test)]
mod tests;
