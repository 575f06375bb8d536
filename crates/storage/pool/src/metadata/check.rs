//! What holds of a pool's metadata after every change.

use std::collections::BTreeMap;

use geometry::{ALL_REGIONS, MAX_MEMBERS};
use rustc_hash::FxHashSet;

use super::apply::{is_size, is_units_at, units_told};
use super::{
    Extent, MAX_LOST_PARTS, MAX_OPENINGS, MAX_RINGS, MAX_UNITS, MAX_VOLUMES, MAX_WINDOW, MemberId,
    Members, Metadata, Volume,
};
use crate::units::Units;

/// What does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it contradicts itself: {0}")]
pub struct Broken(pub &'static str);

fn holds(is: bool, what: &'static str) -> Result<(), Broken> {
    if is { Ok(()) } else { Err(Broken(what)) }
}

impl Metadata {
    /// Whether all of it fits together. It looks at every extent: for what was read, and for tests.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn check(&self) -> Result<(), Broken> {
        self.check_history()?;
        self.check_members()?;
        let mut taken: BTreeMap<MemberId, Units> = BTreeMap::new();
        let mut numbers = FxHashSet::default();
        holds(self.volumes.len() <= MAX_VOLUMES, "the number of volumes")?;
        for (id, volume) in &self.volumes {
            holds(id.0 < self.next_volume, "the number of a volume")?;
            self.check_volume(volume, &mut taken, &mut numbers)?;
        }
        holds(self.remembered_ranges() <= MAX_LOST_PARTS, "the number of lost ranges")?;
        let none = Units::default();
        let same = |id, member: &super::Member| *taken.get(id).unwrap_or(&none) == member.taken;
        holds(self.members.iter().all(|(id, m)| same(id, m)), "the units that are taken")
    }

    fn check_history(&self) -> Result<(), Broken> {
        self.is_shape(&self.shape).map_err(|_| Broken("the shape of new volumes"))?;
        holds((1..=MAX_RINGS).contains(&self.rings), "the number of rings")?;
        holds(self.era <= self.version, "the era")?;
        holds(self.counted <= self.version, "the version that counts")?;
        holds(self.openings.len() <= MAX_OPENINGS, "the number of openings")?;
        let pairs = self.openings.iter().zip(self.openings.iter().skip(1));
        let rising = |(a, b): (&super::Opening, &super::Opening)| {
            a.number.checked_add(1) == Some(b.number) && a.first < b.first
        };
        holds({ pairs }.all(rising), "the order of openings")?;
        let last = self.openings.back();
        holds(last.is_none_or(|o| o.first <= self.version), "the last opening")?;
        holds(self.window.len() <= MAX_WINDOW, "the length of the window")?;
        holds(self.window.is_sorted_by(|a, b| a.0 < b.0), "the order of the window")?;
        let ends = self.window.first().zip(self.window.last());
        let (first, last) = ends.ok_or(Broken("the window"))?;
        holds(first.0 <= self.counted && last.0 <= self.version, "the ends of the window")?;
        let voters = self.window.iter().flat_map(|(_, voters)| voters.iter());
        let mut unknown = voters.filter(|id| !self.members.contains_key(id));
        holds(unknown.next().is_none(), "a vote of no member")?;
        holds(last.1 == self.voters(), "who has a vote")
    }

    fn check_members(&self) -> Result<(), Broken> {
        let all: u64 = self.members.values().map(|m| u64::from(m.units)).sum();
        let mut uuids: Vec<_> = self.members.values().map(|m| m.uuid).collect();
        uuids.sort_unstable();
        holds(uuids.is_sorted_by(|a, b| a < b), "the identity of members")?;
        for (id, member) in &self.members {
            holds(id.0 < MAX_MEMBERS, "the number of a member")?;
            holds((1..=MAX_UNITS).contains(&member.units), "the size of a member")?;
            holds(is_units_at(member.units_at), "where the units of a member begin")?;
            holds(units_told(member.room) >= all, "the room of a member")?;
        }
        Ok(())
    }

    fn check_volume(
        &self,
        volume: &Volume,
        taken: &mut BTreeMap<MemberId, Units>,
        numbers: &mut FxHashSet<u64>,
    ) -> Result<(), Broken> {
        self.is_shape(&volume.shape).map_err(|_| Broken("the shape of a volume"))?;
        is_size(volume.bytes, volume.block_size).map_err(|_| Broken("the size of a volume"))?;
        holds(matches!(volume.block_size, 512 | 4096), "the length of a block")?;
        for (index, Extent { number, pieces }) in volume.extents() {
            holds(index < volume.full(), "an extent behind a volume's end")?;
            let once = *number < self.next_extent && numbers.insert(*number);
            holds(once, "the number of an extent")?;
            holds(pieces.len() == usize::from(volume.shape.columns()), "a number of columns")?;
            let members: Members = pieces.iter().map(|piece| piece.member).collect();
            holds(members.len() as usize == pieces.len(), "two columns on one member")?;
            for piece in pieces.iter() {
                let member = self.members.get(&piece.member);
                let member = member.ok_or(Broken("a piece on no member"))?;
                holds(piece.unit < member.units, "a piece behind a member's end")?;
                let free = taken.entry(piece.member).or_default().take(piece.unit);
                holds(free, "two pieces in one unit")?;
            }
        }
        let marks = |((index, column), regions): (&(u32, u16), &u32)| {
            let there =
                volume.extent(*index).is_some_and(|p| usize::from(*column) < p.pieces.len());
            there && *regions != 0 && regions & !ALL_REGIONS == 0
        };
        holds(volume.behind.iter().all(marks), "a mark")?;
        let is_there = |(index, rows): (&u32, &geometry::RowSet)| {
            let inside = |rows: std::ops::Range<u32>| u64::from(rows.end) <= volume.shape.rows();
            volume.extent(*index).is_some() && !rows.is_empty() && rows.iter().all(inside)
        };
        holds(volume.lost.iter().all(is_there), "a range of lost rows")?;
        let is_lost = |(index, rows): (&u32, &geometry::RowSet)| {
            let lost = volume.lost_rows(*index);
            rows.iter().any(|rows| !lost.within(&rows).is_empty())
        };
        let unrepaired = volume.unrepaired.iter();
        holds(
            { unrepaired }.all(|at| is_there(at) && !is_lost(at)),
            "a range of rows that were not repaired",
        )
    }
}
