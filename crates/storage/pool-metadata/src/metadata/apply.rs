//! Changes of a pool's metadata, and how they are applied.

use std::collections::BTreeMap;
use std::ops::Range;

use geometry::{ALL_REGIONS, MAX_MEMBERS, ROW_BYTES, RaidGeometry, RowSet};
use uuid::Uuid;
use wire::ShortText;

use super::{
    COLUMN_DATA_BYTES, MAX_DAMAGED_RANGES, MAX_EXTENT_BYTES, MAX_PHYSICAL_EXTENTS,
    MAX_SPLIT_DAMAGED_RANGES, MAX_TERMS, MAX_UNREPAIRED_RANGES, MAX_VOLUME_BYTES, MAX_VOLUMES,
    MAX_VOTER_HISTORY, MemberErrorCounts, MemberId, MemberSet, Metadata, PhysicalExtent,
    PoolExtent, PoolMember, PoolMemberState, PoolVolume, PoolVolumeId, STRIP_BYTES, ScrubRecord,
    Term, column_bytes, column_data_bytes,
};
use crate::extent_bitmap::ExtentBitmap;

/// One change of a pool's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The pool was opened: the first change of the first version of a term.
    StartTerm {
        /// Random.
        term_id: Uuid,
        /// Whether the operator declared disks lost that are needed otherwise.
        is_forced: bool,
    },
    /// Recovery of the parity logs has ended, and all rings start empty.
    LogsRecovered,
    /// A disk becomes a member.
    AddMember {
        /// Its number, which is not in use.
        member: MemberId,
        /// Its identity, which is not in use either.
        uuid: Uuid,
        /// The serial number of its disk.
        serial: ShortText,
        /// Its size in physical extents.
        physical_extents: u32,
        /// Size of its snapshot area, in blocks.
        snapshot_blocks: u32,
        /// Offset of its first physical extent, in bytes.
        extents_at: u64,
        /// Whether it is a spare.
        is_spare: bool,
    },
    /// A member gets no more writes.
    Detach(MemberId),
    /// A detached member gets every version and every write again.
    Reattach {
        /// Which.
        member: MemberId,
        /// Whether only its stale regions are resynced; otherwise everything.
        only_stale_regions: bool,
    },
    /// A voter gets another role; [`PoolMemberState::Detached`] is not allowed here.
    SetMemberState {
        /// Which.
        member: MemberId,
        /// Its new role.
        state: PoolMemberState,
    },
    /// A member that holds no columns leaves the pool.
    RemoveMember(MemberId),
    /// A volume is created.
    CreateVolume {
        /// Its number: [`Metadata::next_volume_id`].
        volume: PoolVolumeId,
        /// Its identity.
        uuid: Uuid,
        /// The layout of its extents.
        geometry: RaidGeometry,
        /// Its size in bytes.
        bytes: u64,
        /// Length of a block in bytes.
        block_size: u32,
        /// Whether all its extents stay allocated.
        is_thick: bool,
    },
    /// A volume grows.
    GrowVolume {
        /// Which.
        volume: PoolVolumeId,
        /// Its new size in bytes.
        bytes: u64,
    },
    /// A volume is deleted, with all its extents.
    DeleteVolume(PoolVolumeId),
    /// A volume gets an extent. All of its columns on attached members hold zeroes already.
    AllocateExtent {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
        /// Where its columns lie.
        columns: Vec<PhysicalExtent>,
    },
    /// A volume loses an extent: it reads as zeroes there.
    FreeExtent {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
    },
    /// A column moves to where a complete copy of it is already.
    MoveColumn {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
        /// Number of the column.
        column: u16,
        /// The new physical extent.
        to: PhysicalExtent,
    },
    /// Regions of an extent are written while members with columns of it are detached.
    MarkStale {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
        /// A bit for each region.
        regions: u32,
    },
    /// Regions of a column are up to date again.
    ClearStale {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
        /// Number of the column.
        column: u16,
        /// A bit for each region.
        regions: u32,
    },
    /// Rows of an extent's data are lost: no disk returns them, and nothing can reconstruct them.
    /// They read as errors from now on.
    MarkLost {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
        /// The first of these rows.
        first_row: u32,
        /// How many there are.
        row_count: u32,
    },
    /// Rows that were lost, or not repaired, have been rewritten.
    MarkRewritten {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
        /// The first of these rows.
        first_row: u32,
        /// How many there are.
        row_count: u32,
    },
    /// A scrub could not repair rows of an extent's data: it is unknown whether they are right, or
    /// no disk returns them for now. They read as before.
    MarkUnrepaired {
        /// Which volume.
        volume: PoolVolumeId,
        /// Index of the extent in it.
        index: u32,
        /// The first of these rows.
        first_row: u32,
        /// How many there are.
        row_count: u32,
    },
    /// The error counts of a member are recorded.
    RecordErrors {
        /// Which.
        member: MemberId,
        /// The counts.
        errors: MemberErrorCounts,
    },
    /// A scrub has ended.
    RecordScrub(ScrubRecord),
}

/// Why a change is refused; the metadata is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// There is no such member.
    #[error("the pool has no member {}", .0.0)]
    NoMember(MemberId),
    /// There is one already.
    #[error("the pool already has a member {} or one with its identity", .0.0)]
    MemberExists(MemberId),
    /// Its state does not allow the change.
    #[error("the state of member {} does not allow that", .0.0)]
    WrongMemberState(MemberId),
    /// It holds columns.
    #[error("member {} holds {allocated} columns: move them first", .member.0)]
    Occupied {
        /// The member.
        member: MemberId,
        /// How many.
        allocated: u32,
    },
    /// It is a voter of a version that may be opened.
    #[error("member {} has a vote: detach it and wait for the commit first", .0.0)]
    StillVoter(MemberId),
    /// It is the last voter.
    #[error("member {} is the last attached one", .0.0)]
    LastVoter(MemberId),
    /// A snapshot of the pool would not fit a member.
    #[error("the snapshot area of member {} holds {max_extents} extents, but the pool would have {needed_extents}", .member.0)]
    SnapshotTooLarge {
        /// The member.
        member: MemberId,
        /// How many physical extents of the pool a snapshot on it can describe.
        max_extents: u64,
        /// How many there would be.
        needed_extents: u64,
    },
    /// There is no such volume.
    #[error("the pool has no volume {}", .0.0)]
    NoVolume(PoolVolumeId),
    /// It is not the next volume number.
    #[error("volume {} is not the next number", .0.0)]
    WrongVolumeId(PoolVolumeId),
    /// It has no such extent.
    #[error("volume {} has no extent {index}", .volume.0)]
    NoExtent {
        /// The volume.
        volume: PoolVolumeId,
        /// The extent.
        index: u32,
    },
    /// It has that extent already.
    #[error("volume {} has an extent {index} already", .volume.0)]
    ExtentExists {
        /// The volume.
        volume: PoolVolumeId,
        /// The extent.
        index: u32,
    },
    /// The physical extent is not free.
    #[error("physical extent {} of member {} is not free", .0.index, .0.member.0)]
    ExtentInUse(PhysicalExtent),
    /// One member would hold two columns of an extent.
    #[error("member {} would have two columns of one extent", .0.0)]
    MemberUsedTwice(MemberId),
    /// The limit of ranges of lost rows is reached.
    #[error("the pool records at most {MAX_DAMAGED_RANGES} ranges of lost blocks")]
    TooManyDamagedRanges,
    /// The limit of ranges of unrepaired rows is reached.
    #[error(
        "the pool records at most {MAX_UNREPAIRED_RANGES} ranges of blocks that could not be repaired"
    )]
    TooManyUnrepairedRanges,
    /// A value is out of range.
    #[error("invalid: {0}")]
    InvalidValue(&'static str),
}

/// Most bytes of a snapshot for each physical extent of the pool.
pub(crate) const SNAPSHOT_BYTES_PER_EXTENT: u64 = 32;

/// Bytes of a snapshot that do not depend on the number of physical extents.
pub(crate) const FIXED_SNAPSHOT_BYTES: u64 = 128 << 10;

/// How many physical extents of the pool a snapshot of `blocks` blocks can describe.
#[must_use]
pub(crate) fn snapshot_capacity(blocks: u32) -> u64 {
    (u64::from(blocks) * 4096).saturating_sub(FIXED_SNAPSHOT_BYTES) / SNAPSHOT_BYTES_PER_EXTENT
}

const ROW: u64 = ROW_BYTES as u64;

fn ensure_valid(valid: bool, what: &'static str) -> Result<(), ChangeError> {
    if valid { Ok(()) } else { Err(ChangeError::InvalidValue(what)) }
}

impl Metadata {
    /// Begins the next version. `committed` is the last version that is durable on all of its
    /// voters; it may have been known before.
    ///
    /// # Errors
    /// If that version does not exist yet, or too many versions are not committed.
    pub fn begin_version(&mut self, committed: u64) -> Result<(), ChangeError> {
        ensure_valid(
            committed <= self.version,
            "a version that is committed before it is written",
        )?;
        ensure_valid(self.version < u64::MAX, "a version after the last")?;
        self.committed = self.committed.max(committed);
        let obsolete =
            self.voter_history.partition_point(|(version, _)| *version <= self.committed);
        ensure_valid(
            self.voter_history.len() - obsolete.saturating_sub(1) < MAX_VOTER_HISTORY,
            "a voter history of this length",
        )?;
        self.voter_history.drain(..obsolete.saturating_sub(1));
        self.version += 1;
        self.prune_terms();
        Ok(())
    }

    /// Applies one change to the version that was begun.
    ///
    /// # Errors
    /// Why it is refused; nothing is changed then.
    pub fn apply(&mut self, change: &Change) -> Result<(), ChangeError> {
        match change {
            Change::StartTerm { term_id: id, is_forced: forced } => {
                self.start_term(*id, *forced)?;
            }
            Change::LogsRecovered => self.start_log_generation(),
            Change::AddMember { .. } => self.add_member(change)?,
            Change::Detach(member) => self.detach_member(*member)?,
            Change::Reattach { member, only_stale_regions: marked } => {
                self.reattach_member(*member, *marked)?;
            }
            Change::SetMemberState { member, state } => self.set_member_state(*member, *state)?,
            Change::RemoveMember(member) => self.remove_member(*member)?,
            Change::CreateVolume { .. } => self.create_volume(change)?,
            Change::GrowVolume { volume, bytes } => self.grow_volume(*volume, *bytes)?,
            Change::DeleteVolume(volume) => self.delete_volume(*volume)?,
            Change::AllocateExtent { volume, index, columns } => {
                self.allocate_extent(*volume, *index, columns)?;
            }
            Change::FreeExtent { volume, index } => self.free_extent(*volume, *index)?,
            Change::MoveColumn { volume, index, column, to } => {
                self.move_column(*volume, *index, *column, *to)?;
            }
            Change::MarkStale { volume, index, regions } => {
                self.mark_stale(*volume, *index, *regions)?;
            }
            Change::ClearStale { volume, index, column, regions } => {
                self.clear_stale(*volume, *index, *column, *regions)?;
            }
            Change::MarkLost { volume, index, first_row: row, row_count: rows } => {
                self.mark_lost(*volume, *index, (*row, *rows))?;
            }
            Change::MarkRewritten { volume, index, first_row: row, row_count: rows } => {
                self.mark_rewritten(*volume, *index, (*row, *rows))?;
            }
            Change::MarkUnrepaired { volume, index, first_row: row, row_count: rows } => {
                self.mark_unrepaired(*volume, *index, (*row, *rows))?;
            }
            Change::RecordErrors { member, errors } => self.record_errors(*member, *errors)?,
            Change::RecordScrub(scrub) => self.last_scrub = *scrub,
        }
        self.record_voters();
        Ok(())
    }

    /// Records the voters of this version, if they differ from those before.
    pub(crate) fn record_voters(&mut self) {
        let voters = self.voters();
        match self.voter_history.last_mut() {
            Some((version, last)) if *version == self.version => *last = voters,
            Some((_, last)) if *last == voters => {}
            _ => self.voter_history.push((self.version, voters)),
        }
    }

    /// Forgets the oldest terms. The remembered ones tell a rolled-back disk from one of another
    /// history.
    fn prune_terms(&mut self) {
        while self.terms.len() > MAX_TERMS {
            self.terms.pop_front();
        }
    }

    fn start_term(&mut self, id: Uuid, forced: bool) -> Result<(), ChangeError> {
        let (number, last) = self.terms.back().map_or((0, 0), |o| (o.number, o.first_version));
        ensure_valid(last < self.version, "two terms that begin with one version")?;
        ensure_valid(number < u64::MAX, "a term after the last version")?;
        ensure_valid(!self.terms.iter().any(|o| o.id == id), "a term that has been used before")?;
        self.terms.push_back(Term {
            number: number + 1,
            id,
            first_version: self.version,
            is_forced: forced,
        });
        Ok(())
    }

    fn start_log_generation(&mut self) {
        self.log_generation = self.version;
    }

    fn get_member(&self, id: MemberId) -> Result<&PoolMember, ChangeError> {
        self.members.get(&id).ok_or(ChangeError::NoMember(id))
    }

    fn add_member(&mut self, change: &Change) -> Result<(), ChangeError> {
        let Change::AddMember {
            member: id,
            uuid,
            serial,
            physical_extents,
            snapshot_blocks,
            extents_at,
            is_spare: spare,
        } = change
        else {
            return Ok(());
        };
        ensure_valid(id.0 < MAX_MEMBERS, "the number of a member")?;
        ensure_valid(
            (1..=MAX_PHYSICAL_EXTENTS).contains(physical_extents),
            "the size of a member",
        )?;
        ensure_valid(is_extents_offset(*extents_at), "the offset of a member's extents")?;
        if self.members.contains_key(id) || self.find_member(*uuid).is_some() {
            return Err(ChangeError::MemberExists(*id));
        }
        let all = self.members.values().map(|m| u64::from(m.physical_extents)).sum::<u64>();
        let all = all + u64::from(*physical_extents);
        let areas =
            self.members().map(|(id, m)| (id, m.snapshot_blocks)).chain([(*id, *snapshot_blocks)]);
        let small = areas
            .min_by_key(|(_, snapshot_blocks)| *snapshot_blocks)
            .filter(|(_, snapshot_blocks)| snapshot_capacity(*snapshot_blocks) < all);
        if let Some((member, snapshot_blocks)) = small {
            return Err(ChangeError::SnapshotTooLarge {
                member,
                max_extents: snapshot_capacity(snapshot_blocks),
                needed_extents: all,
            });
        }
        let member = PoolMember {
            uuid: *uuid,
            serial: *serial,
            physical_extents: *physical_extents,
            snapshot_blocks: *snapshot_blocks,
            extents_at: *extents_at,
            state: if *spare { PoolMemberState::Spare } else { PoolMemberState::Active },
            error_counts: MemberErrorCounts::default(),
            allocated: ExtentBitmap::default(),
        };
        self.members.insert(*id, member);
        Ok(())
    }

    fn detach_member(&mut self, id: MemberId) -> Result<(), ChangeError> {
        if !self.get_member(id)?.state.is_voter() {
            return Err(ChangeError::WrongMemberState(id));
        }
        self.ensure_other_voter(id)?;
        let detached =
            PoolMemberState::Detached { since: self.version, min_version: self.committed };
        self.write_member_state(id, detached);
        Ok(())
    }

    fn ensure_other_voter(&self, id: MemberId) -> Result<(), ChangeError> {
        let others = self.voters().difference(MemberSet::default().with(id));
        if others.is_empty() { Err(ChangeError::LastVoter(id)) } else { Ok(()) }
    }

    fn write_member_state(&mut self, id: MemberId, state: PoolMemberState) {
        if let Some(member) = self.members.get_mut(&id) {
            member.state = state;
        }
    }

    fn reattach_member(&mut self, id: MemberId, marked: bool) -> Result<(), ChangeError> {
        if self.get_member(id)?.state.is_voter() {
            return Err(ChangeError::WrongMemberState(id));
        }
        self.write_member_state(id, PoolMemberState::Active);
        if !marked {
            self.volumes.values_mut().for_each(|volume| volume.mark_all_stale(id));
        }
        Ok(())
    }

    fn set_member_state(
        &mut self,
        id: MemberId,
        state: PoolMemberState,
    ) -> Result<(), ChangeError> {
        let current = self.get_member(id)?;
        if !current.state.is_voter() || !state.is_voter() {
            return Err(ChangeError::WrongMemberState(id));
        }
        let allocated = current.allocated.count();
        if state == PoolMemberState::Spare && allocated > 0 {
            return Err(ChangeError::Occupied { member: id, allocated });
        }
        self.write_member_state(id, state);
        Ok(())
    }

    fn remove_member(&mut self, id: MemberId) -> Result<(), ChangeError> {
        let member = self.get_member(id)?;
        let allocated = member.allocated.count();
        if allocated > 0 {
            return Err(ChangeError::Occupied { member: id, allocated });
        }
        // The number may not mean another disk as long as a version may be opened in which the
        // member is a voter.
        if self.voter_history.iter().any(|(_, voters)| voters.contains(id)) {
            return Err(ChangeError::StillVoter(id));
        }
        self.members.remove(&id);
        Ok(())
    }

    fn create_volume(&mut self, change: &Change) -> Result<(), ChangeError> {
        let Change::CreateVolume {
            volume: id,
            uuid,
            geometry: shape,
            bytes,
            block_size,
            is_thick: thick,
        } = change
        else {
            return Ok(());
        };
        if id.0 != self.next_volume {
            return Err(ChangeError::WrongVolumeId(*id));
        }
        let next =
            id.0.checked_add(1)
                .ok_or(ChangeError::InvalidValue("a volume number above the last"))?;
        ensure_valid(!self.volumes.values().any(|v| v.uuid == *uuid), "a volume number in use")?;
        ensure_valid(matches!(block_size, 512 | 4096), "the block size")?;
        ensure_valid(self.volumes.len() < MAX_VOLUMES, "the number of volumes")?;
        self.check_geometry(shape)?;
        check_volume_size(*bytes, *block_size)?;
        self.next_volume = next;
        let volume = PoolVolume {
            uuid: *uuid,
            geometry: *shape,
            bytes: *bytes,
            block_size: *block_size,
            is_thick: *thick,
            extents: BTreeMap::new(),
            stale_regions: BTreeMap::new(),
            lost_rows: BTreeMap::new(),
            unrepaired_rows: BTreeMap::new(),
        };
        self.volumes.insert(*id, volume);
        Ok(())
    }

    /// Checks that volumes of this pool may have this geometry.
    ///
    /// # Errors
    /// What is out of range.
    pub fn check_geometry(&self, geometry: &RaidGeometry) -> Result<(), ChangeError> {
        let (column, strip) = (column_data_bytes(geometry), u64::from(geometry.strip_rows()) * ROW);
        ensure_valid(COLUMN_DATA_BYTES.contains(&column), "the size of a column")?;
        ensure_valid(column == self.column_data_bytes(), "the size of a column")?;
        let is_strip = strip.is_power_of_two() && STRIP_BYTES.contains(&strip);
        ensure_valid(is_strip, "the size of a strip")?;
        ensure_valid(
            column_bytes(geometry) <= column_bytes(&self.geometry),
            "the size of the metadata",
        )?;
        ensure_valid(
            column * u64::from(geometry.data_strips()) <= MAX_EXTENT_BYTES,
            "the number of columns",
        )
    }

    fn grow_volume(&mut self, id: PoolVolumeId, bytes: u64) -> Result<(), ChangeError> {
        let volume = self.volumes.get_mut(&id).ok_or(ChangeError::NoVolume(id))?;
        check_volume_size(bytes, volume.block_size)?;
        ensure_valid(bytes >= volume.bytes, "a smaller volume size")?;
        volume.bytes = bytes;
        Ok(())
    }

    fn delete_volume(&mut self, id: PoolVolumeId) -> Result<(), ChangeError> {
        let volume = self.volumes.remove(&id).ok_or(ChangeError::NoVolume(id))?;
        let columns = volume.extents.values().flat_map(|extent| &extent.columns);
        columns.for_each(|column| self.mark_free(*column));
        Ok(())
    }

    /// Checks that a column may be allocated there.
    fn ensure_free(&self, extent: PhysicalExtent) -> Result<(), ChangeError> {
        let member = self.get_member(extent.member)?;
        if matches!(member.state, PoolMemberState::Draining | PoolMemberState::Spare) {
            return Err(ChangeError::WrongMemberState(extent.member));
        }
        ensure_valid(
            extent.index < member.physical_extents,
            "a physical extent past a member's end",
        )?;
        if member.allocated.is_allocated(extent.index) {
            Err(ChangeError::ExtentInUse(extent))
        } else {
            Ok(())
        }
    }

    fn mark_allocated(&mut self, extent: PhysicalExtent) {
        if let Some(member) = self.members.get_mut(&extent.member) {
            member.allocated.allocate(extent.index);
        }
    }

    fn mark_free(&mut self, extent: PhysicalExtent) {
        if let Some(member) = self.members.get_mut(&extent.member) {
            member.allocated.free(extent.index);
        }
    }

    fn allocate_extent(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        columns: &[PhysicalExtent],
    ) -> Result<(), ChangeError> {
        let volume = self.volumes.get(&id).ok_or(ChangeError::NoVolume(id))?;
        ensure_valid(index < volume.extent_count_when_full(), "an extent past a volume's end")?;
        ensure_valid(
            columns.len() == usize::from(volume.geometry.columns()),
            "a number of columns",
        )?;
        if volume.extents.contains_key(&index) {
            return Err(ChangeError::ExtentExists { volume: id, index });
        }
        let mut members = MemberSet::default();
        for column in columns {
            self.ensure_free(*column)?;
            if members.contains(column.member) {
                return Err(ChangeError::MemberUsedTwice(column.member));
            }
            members = members.with(column.member);
        }
        let lost = (0u32..).zip(columns).filter(|(_, p)| !self.is_attached(p.member));
        let lost = lost.fold(0u64, |lost, (column, _)| lost | 1 << column);
        ensure_valid(
            volume.survives_loss_of(lost),
            "an extent with more columns lost than its redundancy tolerates",
        )?;
        let number = self.next_extent;
        let next = number
            .checked_add(1)
            .ok_or(ChangeError::InvalidValue("an extent number above the last"))?;
        columns.iter().for_each(|column| self.mark_allocated(*column));
        let volume = self.volumes.get_mut(&id).ok_or(ChangeError::NoVolume(id))?;
        volume.extents.insert(index, PoolExtent { number, columns: columns.into() });
        self.next_extent = next;
        for column in (0..volume.geometry.columns()).filter(|column| lost >> column & 1 != 0) {
            volume.stale_regions.insert((index, column), ALL_REGIONS);
        }
        Ok(())
    }

    fn is_attached(&self, member: MemberId) -> bool {
        self.members.get(&member).is_some_and(|m| m.state.is_voter())
    }

    fn free_extent(&mut self, id: PoolVolumeId, index: u32) -> Result<(), ChangeError> {
        let volume = self.volumes.get_mut(&id).ok_or(ChangeError::NoVolume(id))?;
        let none = ChangeError::NoExtent { volume: id, index };
        let extent = volume.extents.remove(&index).ok_or(none)?;
        volume.lost_rows.remove(&index);
        volume.unrepaired_rows.remove(&index);
        (0..volume.geometry.columns()).for_each(|column| {
            volume.stale_regions.remove(&(index, column));
        });
        extent.columns.iter().for_each(|column| self.mark_free(*column));
        Ok(())
    }

    fn column_location(
        &self,
        id: PoolVolumeId,
        index: u32,
        column: u16,
    ) -> Result<PhysicalExtent, ChangeError> {
        let volume = self.volumes.get(&id).ok_or(ChangeError::NoVolume(id))?;
        let extent =
            volume.extents.get(&index).ok_or(ChangeError::NoExtent { volume: id, index })?;
        let location = extent.columns.get(usize::from(column)).copied();
        location.ok_or(ChangeError::InvalidValue("a column"))
    }

    fn move_column(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        column: u16,
        to: PhysicalExtent,
    ) -> Result<(), ChangeError> {
        let from = self.column_location(id, index, column)?;
        self.ensure_free(to)?;
        if !self.is_attached(to.member) {
            return Err(ChangeError::WrongMemberState(to.member));
        }
        let volume = self.volumes.get_mut(&id).ok_or(ChangeError::NoVolume(id))?;
        let extent = volume.extents.get_mut(&index);
        let columns = &mut extent.ok_or(ChangeError::NoExtent { volume: id, index })?.columns;
        let mut others = (0u16..).zip(columns.iter()).filter(|(n, _)| *n != column);
        if others.any(|(_, at)| at.member == to.member) {
            return Err(ChangeError::MemberUsedTwice(to.member));
        }
        columns[usize::from(column)] = to;
        volume.stale_regions.remove(&(index, column));
        self.mark_free(from);
        self.mark_allocated(to);
        Ok(())
    }

    fn mark_stale(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        regions: u32,
    ) -> Result<(), ChangeError> {
        ensure_valid(regions != 0 && regions & !ALL_REGIONS == 0, "a region")?;
        self.column_location(id, index, 0)?;
        let members = &self.members;
        let is_detached =
            |p: &PhysicalExtent| members.get(&p.member).is_some_and(|m| !m.state.is_voter());
        let volume = self.volumes.get_mut(&id).ok_or(ChangeError::NoVolume(id))?;
        for (column, _) in
            (0..).zip(&volume.extents[&index].columns).filter(|(_, at)| is_detached(at))
        {
            *volume.stale_regions.entry((index, column)).or_default() |= regions;
        }
        Ok(())
    }

    /// Checks that the extent exists and contains these rows.
    fn check_rows(
        &self,
        id: PoolVolumeId,
        index: u32,
        (row, rows): (u32, u32),
    ) -> Result<(&PoolVolume, Range<u32>), ChangeError> {
        self.column_location(id, index, 0)?;
        let volume = self.volumes.get(&id).ok_or(ChangeError::NoVolume(id))?;
        let end = row.checked_add(rows).filter(|_| rows > 0);
        let end = end.filter(|end| u64::from(*end) <= volume.geometry.total_rows());
        let end = end.ok_or(ChangeError::InvalidValue("a range of rows"))?;
        Ok((volume, row..end))
    }

    /// Rows are lost. They no longer count as unrepaired.
    fn mark_lost(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        rows: (u32, u32),
    ) -> Result<(), ChangeError> {
        let (volume, rows) = self.check_rows(id, index, rows)?;
        let (mut lost, mut unrepaired) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        let others = self.damaged_range_count() - lost.len() - unrepaired.len();
        lost.insert(rows.clone());
        unrepaired.remove(rows);
        if others + lost.len() + unrepaired.len() > MAX_DAMAGED_RANGES {
            return Err(ChangeError::TooManyDamagedRanges);
        }
        self.set_damaged_rows(id, index, lost, unrepaired)
    }

    /// Rows could not be repaired, but for those that are lost.
    fn mark_unrepaired(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        rows: (u32, u32),
    ) -> Result<(), ChangeError> {
        let (volume, rows) = self.check_rows(id, index, rows)?;
        let (lost, before) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        let mut unrepaired = before.clone();
        unrepaired.insert(rows.clone());
        lost.intersection(&rows).into_iter().for_each(|lost| unrepaired.remove(lost));
        let all = self.damaged_range_count() - before.len() + unrepaired.len();
        let others = self.unrepaired_range_count() - before.len();
        if others + unrepaired.len() > MAX_UNREPAIRED_RANGES || all > MAX_DAMAGED_RANGES {
            return Err(ChangeError::TooManyUnrepairedRanges);
        }
        self.set_damaged_rows(id, index, lost, unrepaired)
    }

    /// Rows have been rewritten.
    fn mark_rewritten(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        rows: (u32, u32),
    ) -> Result<(), ChangeError> {
        let (volume, rows) = self.check_rows(id, index, rows)?;
        let (mut lost, before) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        let others = self.damaged_range_count() - lost.len() - before.len();
        let mut unrepaired = before.clone();
        lost.remove(rows.clone());
        unrepaired.remove(rows);
        if others + lost.len() + before.len() > MAX_SPLIT_DAMAGED_RANGES {
            return Err(ChangeError::TooManyDamagedRanges);
        }
        // A range that would split into too many is recorded unsplit, so that no write fails for
        // that.
        if others + lost.len() + unrepaired.len() > MAX_SPLIT_DAMAGED_RANGES {
            unrepaired = before;
        }
        self.set_damaged_rows(id, index, lost, unrepaired)
    }

    fn set_damaged_rows(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        lost: RowSet,
        unrepaired: RowSet,
    ) -> Result<(), ChangeError> {
        let volume = self.volumes.get_mut(&id).ok_or(ChangeError::NoVolume(id))?;
        volume.lost_rows.insert(index, lost);
        volume.lost_rows.retain(|_, rows| !rows.is_empty());
        volume.unrepaired_rows.insert(index, unrepaired);
        volume.unrepaired_rows.retain(|_, rows| !rows.is_empty());
        Ok(())
    }

    fn record_errors(
        &mut self,
        id: MemberId,
        errors: MemberErrorCounts,
    ) -> Result<(), ChangeError> {
        let member = self.members.get_mut(&id).ok_or(ChangeError::NoMember(id))?;
        member.error_counts = errors;
        Ok(())
    }

    fn clear_stale(
        &mut self,
        id: PoolVolumeId,
        index: u32,
        column: u16,
        regions: u32,
    ) -> Result<(), ChangeError> {
        ensure_valid(regions != 0 && regions & !ALL_REGIONS == 0, "a region")?;
        let location = self.column_location(id, index, column)?;
        if !self.is_attached(location.member) {
            return Err(ChangeError::WrongMemberState(location.member));
        }
        let volume = self.volumes.get_mut(&id).ok_or(ChangeError::NoVolume(id))?;
        if let Some(stale) = volume.stale_regions.get_mut(&(index, column)) {
            *stale &= !regions;
            if *stale == 0 {
                volume.stale_regions.remove(&(index, column));
            }
        }
        Ok(())
    }
}

impl PoolVolume {
    /// All that `member` holds is stale.
    fn mark_all_stale(&mut self, member: MemberId) {
        for (index, extent) in &self.extents {
            let on_member = (0..).zip(&extent.columns).filter(|(_, at)| at.member == member);
            self.stale_regions.extend(on_member.map(|(column, _)| ((*index, column), ALL_REGIONS)));
        }
    }
}

/// Whether the physical extents of a member may begin there.
pub(super) fn is_extents_offset(bytes: u64) -> bool {
    bytes.is_multiple_of(ROW) && bytes <= MAX_VOLUME_BYTES
}

pub(super) fn check_volume_size(bytes: u64, block_size: u32) -> Result<(), ChangeError> {
    let blocks = bytes.is_multiple_of(u64::from(block_size));
    ensure_valid((1..=MAX_VOLUME_BYTES).contains(&bytes) && blocks, "the size of a volume")
}
