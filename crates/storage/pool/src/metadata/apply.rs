//! Changes, and what they make of a pool's metadata.

use std::collections::BTreeMap;
use std::ops::Range;

use geometry::{ALL_REGIONS, MAX_MEMBERS, ROW_BYTES, RowSet, Shape};
use uuid::Uuid;
use wire::Text;

use super::{
    ErrorCounts, Extent, MAX_BYTES, MAX_EXTENT_BYTES, MAX_LOST, MAX_LOST_PARTS, MAX_OPENINGS,
    MAX_UNITS, MAX_UNREPAIRED, MAX_VOLUMES, MAX_WINDOW, Member, MemberId, Members, Metadata,
    Opening, PIECE_BYTES, Piece, STRIP_BYTES, ScrubRecord, Standing, Volume, VolumeId, piece_bytes,
    placed_bytes,
};
use crate::units::Units;

/// One change of a pool's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The pool was opened: the first change of its version, which is the first of its opening.
    Opened {
        /// Drawn by chance.
        id: Uuid,
        /// Whether a person said that it may be.
        forced: bool,
    },
    /// What the parity logs held has been dealt with, and all rings begin anew.
    Recovered,
    /// A disk is a member.
    Add {
        /// Its number, which no other member has.
        member: MemberId,
        /// Its identity, which no other has either.
        uuid: Uuid,
        /// The serial number of its disk.
        serial: Text,
        /// Its size in units.
        units: u32,
        /// Room for a snapshot on it, in blocks.
        room: u32,
        /// Where its units begin, in bytes.
        units_at: u64,
        /// Whether it waits for another to fail.
        spare: bool,
    },
    /// A member is not written any more.
    Out(MemberId),
    /// One that was out gets every version again, and all that is written.
    Back {
        /// Which.
        member: MemberId,
        /// Whether only what was marked is to be made again; else everything.
        marked: bool,
    },
    /// One that has a vote is there for something else: [`Standing::Out`] is not for this.
    Stand {
        /// Which.
        member: MemberId,
        /// What for.
        standing: Standing,
    },
    /// A member on which nothing lies is none any more.
    Remove(MemberId),
    /// There is a volume.
    CreateVolume {
        /// Its number: [`Metadata::next_volume`].
        volume: VolumeId,
        /// Its identity.
        uuid: Uuid,
        /// How its extents lie on their columns.
        shape: Shape,
        /// Its size in bytes.
        bytes: u64,
        /// Length of a block in bytes.
        block_size: u32,
        /// Whether it keeps all its extents.
        thick: bool,
    },
    /// A volume is larger.
    GrowVolume {
        /// Which.
        volume: VolumeId,
        /// Its new size in bytes.
        bytes: u64,
    },
    /// A volume is gone, with all its extents.
    DeleteVolume(VolumeId),
    /// A volume has an extent more. All of its pieces on members that are written hold zeroes already.
    Allocate {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
        /// Where its columns are.
        pieces: Vec<Piece>,
    },
    /// A volume has an extent less: it reads as zeroes there.
    Free {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
    },
    /// A column is elsewhere, where it is whole already.
    Move {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
        /// Number of the column.
        column: u16,
        /// Where it is.
        to: Piece,
    },
    /// Regions of an extent are written while members with pieces of it are out.
    Mark {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
        /// A bit for each region.
        regions: u32,
    },
    /// Regions of a piece are what they should be again.
    Caught {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
        /// Number of the column.
        column: u16,
        /// A bit for each region.
        regions: u32,
    },
    /// Rows of the data of an extent are lost: no disk gave them back, and nothing made them. They read as errors from now on.
    Lost {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
        /// The first of these rows,
        row: u32,
        /// and how many there are.
        rows: u32,
    },
    /// Rows that were lost, or not repaired, have been written again.
    Rewritten {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
        /// The first of these rows,
        row: u32,
        /// and how many there are.
        rows: u32,
    },
    /// A scrub could not repair rows of the data of an extent: nobody knows whether they are right, or no disk gives
    /// them back for now. They are read as before.
    Unrepaired {
        /// Which volume.
        volume: VolumeId,
        /// Number of the extent in it.
        index: u32,
        /// The first of these rows,
        row: u32,
        /// and how many there are.
        rows: u32,
    },
    /// So many errors of a member have been counted.
    Counted {
        /// Which.
        member: MemberId,
        /// How many.
        errors: ErrorCounts,
    },
    /// A scrub has ended.
    Scrubbed(ScrubRecord),
}

/// Why a change cannot be made; the metadata is what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such member.
    #[error("the pool has no member {}", .0.0)]
    NoMember(MemberId),
    /// There is one already.
    #[error("the pool has a member {} already, or one with its identity", .0.0)]
    MemberExists(MemberId),
    /// It does not have the standing that the change asks for.
    #[error("member {} is not in a state for that", .0.0)]
    Standing(MemberId),
    /// Pieces lie on it.
    #[error("member {} holds pieces ({taken}): they are to be moved first", .member.0)]
    Occupied {
        /// The member.
        member: MemberId,
        /// How many.
        taken: u32,
    },
    /// It has a vote in a version that may be opened.
    #[error("member {} has a vote: it is to be out first, and that is to count", .0.0)]
    Voter(MemberId),
    /// It is the last one that is written.
    #[error("member {} is the last one that is written", .0.0)]
    Last(MemberId),
    /// A snapshot of the pool would not fit a member.
    #[error("member {} has room to know of {room} units of the pool, which would have {units}", .member.0)]
    Room {
        /// The member.
        member: MemberId,
        /// How many units it can know of.
        room: u64,
        /// How many there would be.
        units: u64,
    },
    /// There is no such volume.
    #[error("the pool has no volume {}", .0.0)]
    NoVolume(VolumeId),
    /// It is not the one that is next.
    #[error("volume {} is not the next one", .0.0)]
    VolumeExists(VolumeId),
    /// It has no such extent.
    #[error("volume {} has no extent {index}", .volume.0)]
    NoExtent {
        /// The volume.
        volume: VolumeId,
        /// The extent.
        index: u32,
    },
    /// It has that extent already.
    #[error("volume {} has an extent {index} already", .volume.0)]
    ExtentExists {
        /// The volume.
        volume: VolumeId,
        /// The extent.
        index: u32,
    },
    /// Something lies there.
    #[error("unit {} of member {} is not free", .0.unit, .0.member.0)]
    Taken(Piece),
    /// Two columns of an extent would be lost with one member.
    #[error("member {} would have two columns of one extent", .0.0)]
    Twice(MemberId),
    /// So many ranges of lost rows are not remembered.
    #[error("the pool remembers at most {MAX_LOST} ranges of lost blocks")]
    TooManyLost,
    /// So many ranges of rows that could not be repaired are not remembered.
    #[error(
        "the pool remembers at most {MAX_UNREPAIRED} ranges of blocks that could not be repaired"
    )]
    TooManyUnrepaired,
    /// A value that nothing of the kind has.
    #[error("{0} makes no sense")]
    Senseless(&'static str),
}

/// Bytes of a snapshot that a unit of the pool takes at most, whatever lies in it.
pub(crate) const UNIT_SNAPSHOT_BYTES: u64 = 32;

/// Bytes of a snapshot that are not for units.
pub(crate) const FIXED_SNAPSHOT_BYTES: u64 = 128 << 10;

/// How many units of the pool a snapshot of so many blocks can tell of.
#[must_use]
pub(crate) fn units_told(room: u32) -> u64 {
    (u64::from(room) * 4096).saturating_sub(FIXED_SNAPSHOT_BYTES) / UNIT_SNAPSHOT_BYTES
}

const ROW: u64 = ROW_BYTES as u64;

fn sensible(is: bool, what: &'static str) -> Result<(), Refused> {
    if is { Ok(()) } else { Err(Refused::Senseless(what)) }
}

impl Metadata {
    /// Begins the next version. `counted` is the last one that is durable on all that have a vote in it; it may have been
    /// known before.
    ///
    /// # Errors
    /// If that is one that there is not yet, or too many versions do not count.
    pub fn start(&mut self, counted: u64) -> Result<(), Refused> {
        sensible(counted <= self.version, "a version that counts before it is made")?;
        sensible(self.version < u64::MAX, "a version behind the last")?;
        self.counted = self.counted.max(counted);
        let before = self.window.partition_point(|(version, _)| *version <= self.counted);
        sensible(self.window.len() - before.saturating_sub(1) < MAX_WINDOW, "such a window")?;
        self.window.drain(..before.saturating_sub(1));
        self.version += 1;
        self.forget_openings();
        Ok(())
    }

    /// Makes one change of the version that was begun.
    ///
    /// # Errors
    /// Why it cannot be made; nothing is changed then.
    pub fn apply(&mut self, change: &Change) -> Result<(), Refused> {
        match change {
            Change::Opened { id, forced } => self.opened(*id, *forced)?,
            Change::Recovered => self.recovered(),
            Change::Add { .. } => self.add(change)?,
            Change::Out(member) => self.out(*member)?,
            Change::Back { member, marked } => self.back(*member, *marked)?,
            Change::Stand { member, standing } => self.stand(*member, *standing)?,
            Change::Remove(member) => self.remove(*member)?,
            Change::CreateVolume { .. } => self.create_volume(change)?,
            Change::GrowVolume { volume, bytes } => self.grow_volume(*volume, *bytes)?,
            Change::DeleteVolume(volume) => self.delete_volume(*volume)?,
            Change::Allocate { volume, index, pieces } => self.allocate(*volume, *index, pieces)?,
            Change::Free { volume, index } => self.free(*volume, *index)?,
            Change::Move { volume, index, column, to } => {
                self.relocate(*volume, *index, *column, *to)?;
            }
            Change::Mark { volume, index, regions } => self.mark(*volume, *index, *regions)?,
            Change::Caught { volume, index, column, regions } => {
                self.caught(*volume, *index, *column, *regions)?;
            }
            Change::Lost { volume, index, row, rows } => {
                self.lose(*volume, *index, (*row, *rows))?;
            }
            Change::Rewritten { volume, index, row, rows } => {
                self.rewritten(*volume, *index, (*row, *rows))?;
            }
            Change::Unrepaired { volume, index, row, rows } => {
                self.not_repaired(*volume, *index, (*row, *rows))?;
            }
            Change::Counted { member, errors } => self.counted_errors(*member, *errors)?,
            Change::Scrubbed(scrub) => self.scrubbed = *scrub,
        }
        self.note_voters();
        Ok(())
    }

    /// Notes from which version on who has a vote, if that is others than before.
    pub(crate) fn note_voters(&mut self) {
        let voters = self.voters();
        match self.window.last_mut() {
            Some((version, last)) if *version == self.version => *last = voters,
            Some((_, last)) if *last == voters => {}
            _ => self.window.push((self.version, voters)),
        }
    }

    /// As many openings are remembered as may be: by them a disk that was set back is told from one of another history.
    fn forget_openings(&mut self) {
        while self.openings.len() > MAX_OPENINGS {
            self.openings.pop_front();
        }
    }

    fn opened(&mut self, id: Uuid, forced: bool) -> Result<(), Refused> {
        let (number, last) = self.openings.back().map_or((0, 0), |o| (o.number, o.first));
        sensible(last < self.version, "a second opening of one version")?;
        sensible(number < u64::MAX, "an opening behind the last")?;
        sensible(!self.openings.iter().any(|o| o.id == id), "an opening that was before")?;
        self.openings.push_back(Opening { number: number + 1, id, first: self.version, forced });
        Ok(())
    }

    fn recovered(&mut self) {
        self.era = self.version;
    }

    fn of(&self, id: MemberId) -> Result<&Member, Refused> {
        self.members.get(&id).ok_or(Refused::NoMember(id))
    }

    fn add(&mut self, change: &Change) -> Result<(), Refused> {
        let Change::Add { member: id, uuid, serial, units, room, units_at, spare } = change else {
            return Ok(());
        };
        sensible(id.0 < MAX_MEMBERS, "the number of a member")?;
        sensible((1..=MAX_UNITS).contains(units), "the size of a member")?;
        sensible(is_units_at(*units_at), "where the units of a member begin")?;
        if self.members.contains_key(id) || self.member_of(*uuid).is_some() {
            return Err(Refused::MemberExists(*id));
        }
        let all = self.members.values().map(|m| u64::from(m.units)).sum::<u64>();
        let all = all + u64::from(*units);
        let rooms = self.members().map(|(id, m)| (id, m.room)).chain([(*id, *room)]);
        let small = rooms.min_by_key(|(_, room)| *room).filter(|(_, room)| units_told(*room) < all);
        if let Some((member, room)) = small {
            return Err(Refused::Room { member, room: units_told(room), units: all });
        }
        let member = Member {
            uuid: *uuid,
            serial: *serial,
            units: *units,
            room: *room,
            units_at: *units_at,
            standing: if *spare { Standing::Spare } else { Standing::In },
            errors: ErrorCounts::default(),
            taken: Units::default(),
        };
        self.members.insert(*id, member);
        Ok(())
    }

    fn out(&mut self, id: MemberId) -> Result<(), Refused> {
        if !self.of(id)?.standing.votes() {
            return Err(Refused::Standing(id));
        }
        self.is_not_last(id)?;
        let out = Standing::Out { since: self.version, knew: self.counted };
        self.set_standing(id, out);
        Ok(())
    }

    fn is_not_last(&self, id: MemberId) -> Result<(), Refused> {
        let others = self.voters().without(Members::default().with(id));
        if others.is_empty() { Err(Refused::Last(id)) } else { Ok(()) }
    }

    fn set_standing(&mut self, id: MemberId, standing: Standing) {
        if let Some(member) = self.members.get_mut(&id) {
            member.standing = standing;
        }
    }

    fn back(&mut self, id: MemberId, marked: bool) -> Result<(), Refused> {
        if self.of(id)?.standing.votes() {
            return Err(Refused::Standing(id));
        }
        self.set_standing(id, Standing::In);
        if !marked {
            self.volumes.values_mut().for_each(|volume| volume.all_behind(id));
        }
        Ok(())
    }

    fn stand(&mut self, id: MemberId, standing: Standing) -> Result<(), Refused> {
        let now = self.of(id)?;
        if !now.standing.votes() || !standing.votes() {
            return Err(Refused::Standing(id));
        }
        let taken = now.taken.taken();
        if standing == Standing::Spare && taken > 0 {
            return Err(Refused::Occupied { member: id, taken });
        }
        self.set_standing(id, standing);
        Ok(())
    }

    fn remove(&mut self, id: MemberId) -> Result<(), Refused> {
        let member = self.of(id)?;
        let taken = member.taken.taken();
        if taken > 0 {
            return Err(Refused::Occupied { member: id, taken });
        }
        // As long as a version may be opened in which it has a vote, its number may not mean another disk.
        if self.window.iter().any(|(_, voters)| voters.has(id)) {
            return Err(Refused::Voter(id));
        }
        self.members.remove(&id);
        Ok(())
    }

    fn create_volume(&mut self, change: &Change) -> Result<(), Refused> {
        let Change::CreateVolume { volume: id, uuid, shape, bytes, block_size, thick } = change
        else {
            return Ok(());
        };
        if id.0 != self.next_volume {
            return Err(Refused::VolumeExists(*id));
        }
        let next = id.0.checked_add(1).ok_or(Refused::Senseless("a volume behind the last"))?;
        sensible(!self.volumes.values().any(|v| v.uuid == *uuid), "a volume that there is")?;
        sensible(matches!(block_size, 512 | 4096), "the length of a block")?;
        sensible(self.volumes.len() < MAX_VOLUMES, "so many volumes")?;
        self.is_shape(shape)?;
        is_size(*bytes, *block_size)?;
        self.next_volume = next;
        let volume = Volume {
            uuid: *uuid,
            shape: *shape,
            bytes: *bytes,
            block_size: *block_size,
            thick: *thick,
            extents: BTreeMap::new(),
            behind: BTreeMap::new(),
            lost: BTreeMap::new(),
            unrepaired: BTreeMap::new(),
        };
        self.volumes.insert(*id, volume);
        Ok(())
    }

    /// Whether extents of this pool's pieces may have it.
    pub(crate) fn is_shape(&self, shape: &Shape) -> Result<(), Refused> {
        let (piece, strip) = (piece_bytes(shape), u64::from(shape.strip_rows()) * ROW);
        sensible(PIECE_BYTES.contains(&piece), "the length of a piece")?;
        sensible(piece == self.piece_bytes(), "the length of a piece")?;
        let is_strip = strip.is_power_of_two() && STRIP_BYTES.contains(&strip);
        sensible(is_strip, "the length of a strip")?;
        sensible(placed_bytes(shape) <= placed_bytes(&self.shape), "so much beside the data")?;
        sensible(piece * u64::from(shape.data()) <= MAX_EXTENT_BYTES, "so many columns")
    }

    fn grow_volume(&mut self, id: VolumeId, bytes: u64) -> Result<(), Refused> {
        let volume = self.volumes.get_mut(&id).ok_or(Refused::NoVolume(id))?;
        is_size(bytes, volume.block_size)?;
        sensible(bytes >= volume.bytes, "a volume that becomes smaller")?;
        volume.bytes = bytes;
        Ok(())
    }

    fn delete_volume(&mut self, id: VolumeId) -> Result<(), Refused> {
        let volume = self.volumes.remove(&id).ok_or(Refused::NoVolume(id))?;
        let pieces = volume.extents.values().flat_map(|extent| &extent.pieces);
        pieces.for_each(|piece| self.give(*piece));
        Ok(())
    }

    /// That something may be put there.
    fn is_free(&self, piece: Piece) -> Result<(), Refused> {
        let member = self.of(piece.member)?;
        if matches!(member.standing, Standing::Leaving | Standing::Spare) {
            return Err(Refused::Standing(piece.member));
        }
        sensible(piece.unit < member.units, "a unit behind a member's end")?;
        if member.taken.has(piece.unit) { Err(Refused::Taken(piece)) } else { Ok(()) }
    }

    fn take(&mut self, piece: Piece) {
        if let Some(member) = self.members.get_mut(&piece.member) {
            member.taken.take(piece.unit);
        }
    }

    fn give(&mut self, piece: Piece) {
        if let Some(member) = self.members.get_mut(&piece.member) {
            member.taken.give(piece.unit);
        }
    }

    fn allocate(&mut self, id: VolumeId, index: u32, pieces: &[Piece]) -> Result<(), Refused> {
        let volume = self.volumes.get(&id).ok_or(Refused::NoVolume(id))?;
        sensible(index < volume.full(), "an extent behind a volume's end")?;
        sensible(pieces.len() == usize::from(volume.shape.columns()), "a number of columns")?;
        if volume.extents.contains_key(&index) {
            return Err(Refused::ExtentExists { volume: id, index });
        }
        let mut members = Members::default();
        for piece in pieces {
            self.is_free(*piece)?;
            if members.has(piece.member) {
                return Err(Refused::Twice(piece.member));
            }
            members = members.with(piece.member);
        }
        let lost = (0u32..).zip(pieces).filter(|(_, p)| !self.is_written(p.member));
        let lost = lost.fold(0u64, |lost, (column, _)| lost | 1 << column);
        sensible(volume.survives(lost), "an extent of which too much would be lost")?;
        let number = self.next_extent;
        let next = number.checked_add(1).ok_or(Refused::Senseless("an extent behind the last"))?;
        pieces.iter().for_each(|piece| self.take(*piece));
        let volume = self.volumes.get_mut(&id).ok_or(Refused::NoVolume(id))?;
        volume.extents.insert(index, Extent { number, pieces: pieces.into() });
        self.next_extent = next;
        for column in (0..volume.shape.columns()).filter(|column| lost >> column & 1 != 0) {
            volume.behind.insert((index, column), ALL_REGIONS);
        }
        Ok(())
    }

    fn is_written(&self, member: MemberId) -> bool {
        self.members.get(&member).is_some_and(|m| m.standing.votes())
    }

    fn free(&mut self, id: VolumeId, index: u32) -> Result<(), Refused> {
        let volume = self.volumes.get_mut(&id).ok_or(Refused::NoVolume(id))?;
        let none = Refused::NoExtent { volume: id, index };
        let extent = volume.extents.remove(&index).ok_or(none)?;
        volume.lost.remove(&index);
        volume.unrepaired.remove(&index);
        (0..volume.shape.columns()).for_each(|column| {
            volume.behind.remove(&(index, column));
        });
        extent.pieces.iter().for_each(|piece| self.give(*piece));
        Ok(())
    }

    fn piece(&self, id: VolumeId, index: u32, column: u16) -> Result<Piece, Refused> {
        let volume = self.volumes.get(&id).ok_or(Refused::NoVolume(id))?;
        let extent = volume.extents.get(&index).ok_or(Refused::NoExtent { volume: id, index })?;
        let piece = extent.pieces.get(usize::from(column)).copied();
        piece.ok_or(Refused::Senseless("a column"))
    }

    fn relocate(
        &mut self,
        id: VolumeId,
        index: u32,
        column: u16,
        to: Piece,
    ) -> Result<(), Refused> {
        let from = self.piece(id, index, column)?;
        self.is_free(to)?;
        if !self.is_written(to.member) {
            return Err(Refused::Standing(to.member));
        }
        let volume = self.volumes.get_mut(&id).ok_or(Refused::NoVolume(id))?;
        let extent = volume.extents.get_mut(&index);
        let pieces = &mut extent.ok_or(Refused::NoExtent { volume: id, index })?.pieces;
        let mut others = (0u16..).zip(pieces.iter()).filter(|(n, _)| *n != column);
        if others.any(|(_, piece)| piece.member == to.member) {
            return Err(Refused::Twice(to.member));
        }
        pieces[usize::from(column)] = to;
        volume.behind.remove(&(index, column));
        self.give(from);
        self.take(to);
        Ok(())
    }

    fn mark(&mut self, id: VolumeId, index: u32, regions: u32) -> Result<(), Refused> {
        sensible(regions != 0 && regions & !ALL_REGIONS == 0, "a region")?;
        self.piece(id, index, 0)?;
        let members = &self.members;
        let out = |p: &Piece| members.get(&p.member).is_some_and(|m| !m.standing.votes());
        let volume = self.volumes.get_mut(&id).ok_or(Refused::NoVolume(id))?;
        for (column, _) in (0..).zip(&volume.extents[&index].pieces).filter(|(_, piece)| out(piece))
        {
            *volume.behind.entry((index, column)).or_default() |= regions;
        }
        Ok(())
    }

    /// These rows of an extent that there is.
    fn rows_of(
        &self,
        id: VolumeId,
        index: u32,
        (row, rows): (u32, u32),
    ) -> Result<(&Volume, Range<u32>), Refused> {
        self.piece(id, index, 0)?;
        let volume = self.volumes.get(&id).ok_or(Refused::NoVolume(id))?;
        let end = row.checked_add(rows).filter(|_| rows > 0);
        let end = end.filter(|end| u64::from(*end) <= volume.shape.rows());
        let end = end.ok_or(Refused::Senseless("a range of rows"))?;
        Ok((volume, row..end))
    }

    /// Rows are lost. What is lost is not waited for to be repaired.
    fn lose(&mut self, id: VolumeId, index: u32, rows: (u32, u32)) -> Result<(), Refused> {
        let (volume, rows) = self.rows_of(id, index, rows)?;
        let (mut lost, mut unrepaired) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        let others = self.remembered_ranges() - lost.len() - unrepaired.len();
        lost.insert(rows.clone());
        unrepaired.remove(rows);
        if others + lost.len() + unrepaired.len() > MAX_LOST {
            return Err(Refused::TooManyLost);
        }
        self.remember(id, index, lost, unrepaired)
    }

    /// Rows could not be repaired: of those that are lost that is known.
    fn not_repaired(&mut self, id: VolumeId, index: u32, rows: (u32, u32)) -> Result<(), Refused> {
        let (volume, rows) = self.rows_of(id, index, rows)?;
        let (lost, before) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        let mut unrepaired = before.clone();
        unrepaired.insert(rows.clone());
        lost.within(&rows).into_iter().for_each(|lost| unrepaired.remove(lost));
        let all = self.remembered_ranges() - before.len() + unrepaired.len();
        let others = self.unrepaired_ranges() - before.len();
        if others + unrepaired.len() > MAX_UNREPAIRED || all > MAX_LOST {
            return Err(Refused::TooManyUnrepaired);
        }
        self.remember(id, index, lost, unrepaired)
    }

    /// Rows have been written again.
    fn rewritten(&mut self, id: VolumeId, index: u32, rows: (u32, u32)) -> Result<(), Refused> {
        let (volume, rows) = self.rows_of(id, index, rows)?;
        let (mut lost, before) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        let others = self.remembered_ranges() - lost.len() - before.len();
        let mut unrepaired = before.clone();
        lost.remove(rows.clone());
        unrepaired.remove(rows);
        if others + lost.len() + before.len() > MAX_LOST_PARTS {
            return Err(Refused::TooManyLost);
        }
        // A range that would come apart into too many is remembered whole: no write fails for that.
        if others + lost.len() + unrepaired.len() > MAX_LOST_PARTS {
            unrepaired = before;
        }
        self.remember(id, index, lost, unrepaired)
    }

    fn remember(
        &mut self,
        id: VolumeId,
        index: u32,
        lost: RowSet,
        unrepaired: RowSet,
    ) -> Result<(), Refused> {
        let volume = self.volumes.get_mut(&id).ok_or(Refused::NoVolume(id))?;
        volume.lost.insert(index, lost);
        volume.lost.retain(|_, rows| !rows.is_empty());
        volume.unrepaired.insert(index, unrepaired);
        volume.unrepaired.retain(|_, rows| !rows.is_empty());
        Ok(())
    }

    fn counted_errors(&mut self, id: MemberId, errors: ErrorCounts) -> Result<(), Refused> {
        let member = self.members.get_mut(&id).ok_or(Refused::NoMember(id))?;
        member.errors = errors;
        Ok(())
    }

    fn caught(
        &mut self,
        id: VolumeId,
        index: u32,
        column: u16,
        regions: u32,
    ) -> Result<(), Refused> {
        sensible(regions != 0 && regions & !ALL_REGIONS == 0, "a region")?;
        let piece = self.piece(id, index, column)?;
        if !self.is_written(piece.member) {
            return Err(Refused::Standing(piece.member));
        }
        let volume = self.volumes.get_mut(&id).ok_or(Refused::NoVolume(id))?;
        if let Some(behind) = volume.behind.get_mut(&(index, column)) {
            *behind &= !regions;
            if *behind == 0 {
                volume.behind.remove(&(index, column));
            }
        }
        Ok(())
    }
}

impl Volume {
    /// Nothing that lies on `member` is what it should be.
    fn all_behind(&mut self, member: MemberId) {
        for (index, extent) in &self.extents {
            let on_it = (0..).zip(&extent.pieces).filter(|(_, piece)| piece.member == member);
            self.behind.extend(on_it.map(|(column, _)| ((*index, column), ALL_REGIONS)));
        }
    }
}

/// Whether units of a member may begin there.
pub(super) fn is_units_at(bytes: u64) -> bool {
    bytes.is_multiple_of(ROW) && bytes <= MAX_BYTES
}

pub(super) fn is_size(bytes: u64, block_size: u32) -> Result<(), Refused> {
    let blocks = bytes.is_multiple_of(u64::from(block_size));
    sensible((1..=MAX_BYTES).contains(&bytes) && blocks, "the size of a volume")
}
