//! Where new pieces go, and how many there is room for.

use std::collections::BTreeMap;

use geometry::{Level, ROW_BYTES, Shape};

use super::metadata::{Extent, Member, MemberId, Members, Metadata, Piece, Standing, Volume};
use super::units::Units;

/// Units that somebody has chosen, and that nothing is recorded of yet.
#[derive(Debug, Default)]
pub struct Reserved(BTreeMap<MemberId, Units>);

impl Reserved {
    /// Takes units that [`choose`] or [`choose_one`] has given.
    pub fn take(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            self.0.entry(piece.member).or_default().take(piece.unit);
        }
    }

    /// Gives them back: something lies there now, or never will.
    pub fn give(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            self.0.entry(piece.member).or_default().give(piece.unit);
        }
    }

    /// Units of a member that nothing lies in, and that nobody has chosen.
    pub(super) fn free(&self, id: MemberId, member: &Member) -> u32 {
        member.free().saturating_sub(self.0.get(&id).map_or(0, Units::taken))
    }

    fn lowest_free(&self, id: MemberId, member: &Member) -> Option<Piece> {
        let reserved = |unit| self.0.get(&id).is_some_and(|units| units.has(unit));
        let mut units = member.lowest_free()?..member.units;
        let unit = units.find(|unit| !member.has(*unit) && !reserved(*unit))?;
        Some(Piece { member: id, unit })
    }
}

/// Where the columns of a new extent go: to the members with the most room, and to those that are out only where there are not
/// enough others. None if there is no room.
#[must_use]
pub fn choose(metadata: &Metadata, reserved: &Reserved, shape: &Shape) -> Option<Vec<Piece>> {
    let columns = usize::from(shape.columns());
    let there = by_room(metadata, reserved, |standing| standing == Standing::In);
    let mut chosen: Vec<_> = there.into_iter().take(columns).collect();
    let missing = columns - chosen.len();
    let out = by_room(metadata, reserved, |standing| !standing.votes());
    let out: Vec<_> = out.into_iter().take(missing).collect();
    if out.len() < missing || missing > usize::from(shape.level().bears()) {
        return None;
    }
    // Of copies each has to be on another group of columns.
    let step = match shape.level() {
        Level::Copies(copies) => usize::from(copies),
        _ => 1,
    };
    for (n, id) in out.into_iter().enumerate() {
        let at = (n * step).min(chosen.len());
        chosen.insert(at, id);
    }
    let piece = |id: MemberId| reserved.lowest_free(id, metadata.member(id)?);
    chosen.into_iter().map(piece).collect()
}

/// The same with members only that are written: what would be behind from the beginning is not begun.
#[must_use]
pub fn choose_whole(metadata: &Metadata, reserved: &Reserved, shape: &Shape) -> Option<Vec<Piece>> {
    let columns = usize::from(shape.columns());
    let there = by_room(metadata, reserved, |standing| standing == Standing::In);
    let chosen = there.get(..columns)?.iter();
    chosen.map(|id| reserved.lowest_free(*id, metadata.member(*id)?)).collect()
}

/// Where one column goes of an extent that has its others on `others`: to the member with the most room. Spare ones come last.
#[must_use]
pub fn choose_one(metadata: &Metadata, reserved: &Reserved, others: Members) -> Option<Piece> {
    let there = by_room(metadata, reserved, |standing| standing == Standing::In);
    let there = there.into_iter().find(|id| !others.has(*id))?;
    reserved.lowest_free(there, metadata.member(there)?)
}

/// Members of a standing that have room, those with the most first.
fn by_room(
    metadata: &Metadata,
    reserved: &Reserved,
    is: impl Fn(Standing) -> bool,
) -> Vec<MemberId> {
    let of = metadata.members().filter(|(_, member)| is(member.standing));
    let free = of.map(|(id, member)| (reserved.free(id, member), id));
    let mut all: Vec<_> = free.filter(|(free, _)| *free > 0).collect();
    all.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    all.into_iter().map(|(_, id)| id).collect()
}

/// How many extents of so many columns fit members with this many free units: the most there can be, and what [`choose`]
/// comes to.
#[must_use]
pub fn extents_that_fit(free: &[u32], columns: u16) -> u64 {
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
    /// Extents of new volumes that there is still room for, on members that are written.
    #[must_use]
    pub fn extents_free(&self) -> u64 {
        self.fitting(Member::free, |standing| standing == Standing::In)
    }

    /// Extents of new volumes that its members could hold if nothing else did, and none were out.
    #[must_use]
    pub fn extents_in_all(&self) -> u64 {
        let holds = |standing| matches!(standing, Standing::In | Standing::Out { .. });
        self.fitting(|member| member.units, holds)
    }

    /// Bytes of data of an extent of a new volume.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.shape.rows() * u64::from(ROW_BYTES)
    }

    /// Whether there is another place for pieces of a member; the first ones of each volume tell.
    #[must_use]
    pub fn has_room_for(&self, id: MemberId, reserved: &Reserved) -> bool {
        const ASKED: usize = 16;
        let is_movable = |extent: &Extent| {
            let others = extent.pieces.iter().map(|piece| piece.member).filter(|m| *m != id);
            choose_one(self, reserved, others.collect()).is_some()
        };
        self.volumes().any(|(_, volume)| {
            let extents = volume.extents().map(|(_, extent)| extent);
            let on_it = extents.filter(|extent| extent.pieces.iter().any(|p| p.member == id));
            on_it.take(ASKED).any(is_movable)
        })
    }

    fn fitting(&self, units: impl Fn(&Member) -> u32, holds: impl Fn(Standing) -> bool) -> u64 {
        let of = self.members().filter(|(_, member)| holds(member.standing));
        let of: Vec<u32> = of.map(|(_, member)| units(member)).collect();
        extents_that_fit(&of, self.shape.columns())
    }

    /// How many more members may fail, whichever they are, until something of a volume is lost where only `there` are. None if
    /// something is.
    #[must_use]
    pub fn bears(&self, volume: &Volume, there: Members) -> Option<u32> {
        let all = volume.extents().flat_map(|(index, extent)| {
            volume.lost_columns(index, &extent.pieces, there).map(|lost| volume.bears(lost))
        });
        let most = Some(u32::from(volume.shape.level().bears()));
        all.fold(most, |least, bears| Some(least?.min(bears?)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metadata::Change;
    use crate::metadata::tests::{pool, raid5};

    proptest! {
        /// Taking from where there is most comes to the most that there can be.
        #[test]
        fn the_fullest_first_is_the_best(free in prop::collection::vec(0u32..12, 1..7), columns in 1u16..5) {
            let mut left = free.clone();
            let mut extents = 0;
            loop {
                left.sort_unstable_by(|a, b| b.cmp(a));
                let Some(taken) = left.get_mut(..columns.into()).filter(|l| l.iter().all(|f| *f > 0)) else { break };
                taken.iter_mut().for_each(|f| *f -= 1);
                extents += 1;
            }
            prop_assert_eq!(extents_that_fit(&free, columns), extents);
        }
    }

    #[test]
    fn those_that_are_out_are_taken_where_there_are_not_enough_others() {
        let mut pool = pool(4);
        let members = |pieces: Vec<Piece>| pieces.iter().map(|p| p.member.0).collect::<Vec<_>>();
        let none = Reserved::default();
        assert_eq!(members(choose(&pool, &none, &raid5(4)).unwrap()), [0, 1, 2, 3]);
        pool.start(0).unwrap();
        pool.apply(&Change::Out(MemberId(1))).unwrap();
        assert_eq!(members(choose(&pool, &none, &raid5(3)).unwrap()), [0, 2, 3]);
        assert_eq!(members(choose(&pool, &none, &raid5(4)).unwrap()), [1, 0, 2, 3]);
        pool.apply(&Change::Out(MemberId(2))).unwrap();
        assert_eq!(choose(&pool, &none, &raid5(4)), None, "two of them are more than it bears");
        let pairs = Shape::new(Level::Copies(2), 4, 16, 256).unwrap();
        assert_eq!(choose(&pool, &none, &pairs), None);
    }

    #[test]
    fn what_is_reserved_is_not_given_again() {
        let (pool, mut reserved) = (pool(3), Reserved::default());
        let mut seen = std::collections::BTreeSet::new();
        while let Some(pieces) = choose(&pool, &reserved, &raid5(3)) {
            assert!(pieces.iter().all(|piece| seen.insert(*piece)));
            reserved.take(&pieces);
        }
        assert_eq!(seen.len(), 18);
        let piece = Piece { member: MemberId(1), unit: 2 };
        reserved.give(&[piece]);
        assert_eq!(choose_one(&pool, &reserved, Members(0b101)), Some(piece));
        assert_eq!(choose_one(&pool, &reserved, Members(0b010)), None);
    }
}
