//! The volumes of a pool, and the space that is allocated to them.

use std::ops::Range;
use std::rc::Rc;

use pool_metadata::allocator::{
    ReservedExtents, place_column, place_columns, place_columns_on_active,
};
use pool_metadata::{Change, MemberId, MemberSet, PhysicalExtent, PoolVolumeId};
use rt::disk::DiskError;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{NewPoolVolume, Pool, PoolState};
use crate::error::PoolError;
use crate::member_disk::LONG_DISK_TIMEOUT;
use crate::requests::{ColumnId, ExtentInfo, PoolEvent, RowDamage, VolumeInfo};

/// The members on which a new extent may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocation {
    /// Only active members. No client waits for the extent, so it need not begin degraded.
    ActiveMembersOnly,
    /// Detached members as well, where there are not enough active ones: a client is writing.
    AllowDegraded,
}

impl Pool {
    pub(crate) fn reserved_extents(&self) -> std::cell::Ref<'_, ReservedExtents> {
        std::cell::Ref::map(self.state(), |state| &state.reserved)
    }

    pub(super) fn find_volume(&self, volume: Uuid) -> Result<PoolVolumeId, PoolError> {
        let metadata = self.writer.metadata();
        let found = metadata.volumes().find(|(_, v)| v.uuid == volume).map(|(id, _)| id);
        found.ok_or_else(|| PoolError::new(format!("the pool has no volume {volume}")))
    }

    /// Makes the core that last opened a volume write nothing of it any more, and drain its entries
    /// from that core's ring of the parity log. Does nothing if that ring is `except_ring`: a core
    /// that opens its own volume again keeps the entries. Fails if the volume is in use.
    pub(super) async fn release_volume(
        &self,
        id: PoolVolumeId,
        uuid: Uuid,
        except_ring: Option<u16>,
    ) -> Result<(), PoolError> {
        let ring = self.state().volume_rings.get(&id).copied();
        let Some(ring) = ring.filter(|ring| Some(*ring) != except_ring) else {
            return Ok(());
        };
        let (released, release) = oneshot::channel();
        {
            let state = self.state();
            let mut cores = state.core_events.iter();
            let core = cores.find(|(core_ring, events)| *core_ring == ring && !events.is_closed());
            // Moves the sender in any case, so that no reply is awaited if the core has gone.
            let asked =
                core.map(move |(_, events)| events.send(PoolEvent::ReleaseVolume(uuid, released)));
            drop(asked);
        }
        // Without a reply the volume is not released, unless the core has detached in order
        // meanwhile: that released all of its volumes.
        if release.await.is_err() && self.state().rings_in_use.contains(&ring) {
            let message = format!("core {ring} still uses volume {uuid}");
            return Err(PoolError::new(message).with_hint("close the pool and open it again"));
        }
        self.state_mut().volume_rings.remove(&id);
        Ok(())
    }

    /// Opens a volume on the core of this ring. From now on the volume's entries are in this ring.
    pub(super) async fn volume_info(&self, uuid: Uuid, ring: u16) -> Result<VolumeInfo, PoolError> {
        let id = self.find_volume(uuid)?;
        self.release_volume(id, uuid, Some(ring)).await?;
        self.state_mut().volume_rings.insert(id, ring);
        // No member is admitted meanwhile: this core would not learn which regions of its columns
        // are stale.
        let _guard = self.membership_lock.read().await;
        let metadata = self.writer.metadata();
        let gone = || PoolError::new(format!("the pool has no volume {uuid}"));
        let volume = metadata.volume(id).ok_or_else(gone)?;
        let extents = volume
            .extents()
            .map(|(index, extent)| ExtentInfo::from_metadata(&metadata, volume, index, extent));
        Ok(VolumeInfo {
            id,
            geometry: volume.geometry,
            size_bytes: volume.bytes,
            block_size: volume.block_size,
            is_thick: volume.is_thick,
            first_number: self.next_number_range(),
            extents: extents.collect(),
        })
    }

    /// Allocates a volume's extent at `index`, which holds zeroes then. Returns it if it is
    /// allocated already.
    pub(super) async fn allocate_extent(
        self: &Rc<Self>,
        volume: PoolVolumeId,
        index: u32,
        how: Allocation,
    ) -> Result<ExtentInfo, PoolError> {
        loop {
            // The requesting core may not know of the extent: when a thick volume grows, its
            // extents are allocated here.
            if let Ok(info) = self.extent_info(volume, index) {
                return Ok(info);
            }
            // Columns on detached members are not zeroed. The commit records them as stale, but
            // only if their members are still detached then. So no member is attached before that.
            let guard = self.membership_lock.read().await;
            let columns = {
                let metadata = self.writer.metadata();
                let deleted = || PoolError::new("the volume is gone");
                let geometry = metadata.volume(volume).ok_or_else(deleted)?.geometry;
                let reserved = self.reserved_extents();
                match how {
                    Allocation::ActiveMembersOnly => {
                        place_columns_on_active(&metadata, &reserved, &geometry)
                    }
                    Allocation::AllowDegraded => place_columns(&metadata, &reserved, &geometry),
                }
            };
            let columns = columns.ok_or_else(|| self.no_space_error())?;
            self.state_mut().reserved.reserve(&columns);
            let zeroed = self.zero_columns(&columns).await;
            let allocated = match &zeroed {
                Ok(()) => {
                    let columns = columns.clone();
                    self.writer.commit(Change::AllocateExtent { volume, index, columns }).await
                }
                Err(_) => Ok(()),
            };
            self.state_mut().reserved.release(&columns);
            drop(guard);
            match zeroed {
                // Detach the member that cannot be written, and choose columns again.
                Err(member) => self.detach_member(member, self.join_generation(member)).await?,
                Ok(()) => {
                    // The commit is also refused if another request has allocated the extent
                    // meanwhile.
                    return match (allocated, self.extent_info(volume, index)) {
                        (Err(why), Err(_)) => Err(why),
                        (_, info) => info,
                    };
                }
            }
        }
    }

    fn no_space_error(&self) -> PoolError {
        PoolError::no_space("there is no space for another extent")
            .with_hint("add disks to the pool, or delete volumes")
    }

    /// Checks that extents for so many bytes fit on the active members.
    ///
    /// # Errors
    /// How much space there is, and what to do.
    pub fn check_space(&self, bytes: u64) -> Result<(), PoolError> {
        let extent_bytes = self.writer.metadata().extent_bytes();
        self.check_space_for_extents(bytes.div_ceil(extent_bytes))
    }

    fn check_space_for_extents(&self, extents: u64) -> Result<(), PoolError> {
        let metadata = self.writer.metadata();
        // With nothing to move, this is the space that there is now.
        let nothing_moved = metadata.plan_evacuation(
            MemberSet::default(),
            metadata.active_members(),
            &self.state().reserved,
        );
        let free_extents = nothing_moved.free_extents_after;
        if extents <= free_extents {
            return Ok(());
        }
        let (needed_text, available_text) =
            (metadata.extents_size_text(extents), metadata.extents_size_text(free_extents));
        let short = format!(
            "{needed_text} are needed, but the disks in use have space for {available_text}"
        );
        let detached: Vec<String> = (metadata.members())
            .filter(|(_, member)| !member.state.is_voter())
            .map(|(id, member)| match member.serial.as_str() {
                "" => id.0.to_string(),
                serial => serial.to_owned(),
            })
            .collect();
        if detached.is_empty() {
            return Err(
                PoolError::no_space(short).with_hint("add disks to the pool, or delete volumes")
            );
        }
        let message = format!("{short}: disk {} is detached", detached.join(", "));
        let hint = "replace the detached disk first (windrose pool replace), or add one (windrose pool add)";
        Err(PoolError::no_space(message).with_hint(hint))
    }

    fn extent_info(&self, volume: PoolVolumeId, index: u32) -> Result<ExtentInfo, PoolError> {
        let metadata = self.writer.metadata();
        let found = metadata.volume(volume).and_then(|v| Some((v, v.extent(index)?)));
        let (volume, extent) = found.ok_or_else(|| PoolError::new("the extent is gone"))?;
        Ok(ExtentInfo::from_metadata(&metadata, volume, index, extent))
    }

    /// Zeroes the columns that lie on attached members. The error is a member that cannot be
    /// written.
    async fn zero_columns(&self, columns: &[PhysicalExtent]) -> Result<(), MemberId> {
        let disks = columns.iter().filter_map(|p| Some((*p, self.writer.disk(p.member)?)));
        let each = disks
            .map(|(extent, disk)| (extent.member, async move { disk.zero_extent(extent).await }));
        self.wait_zeroed(each).await
    }

    /// Waits for parts of disks to be zeroed. The error is a member that cannot be written.
    async fn wait_zeroed<F>(
        &self,
        each: impl IntoIterator<Item = (MemberId, F)>,
    ) -> Result<(), MemberId>
    where
        F: Future<Output = Result<(), DiskError>>,
    {
        let zeroed = self.writer.for_each_member(LONG_DISK_TIMEOUT, each).await;
        zeroed.into_iter().try_for_each(|(member, outcome)| {
            outcome.map_err(|why| {
                let path = self.serial_and_path(member).1;
                tracing::error!(%path, error = %why, "a disk cannot be written");
                member
            })
        })
    }

    /// Reserves a physical extent to which a column is to be moved, and zeroes its metadata: the
    /// stripe maps and checksums of its former column. Returns it with its first row; `None` if the
    /// column cannot be moved now.
    pub(super) async fn reserve_column_target(
        self: &Rc<Self>,
        id: ColumnId,
    ) -> Result<Option<(PhysicalExtent, u64)>, PoolError> {
        let target = {
            let metadata = self.writer.metadata();
            let extent = metadata.volume(id.volume).and_then(|v| v.extent(id.index));
            let Some(extent) = extent else { return Ok(None) };
            let source = extent.columns.get(usize::from(id.column)).map(|extent| extent.member);
            // Members that are about to be reattached keep their columns.
            let stays_on_source =
                source.is_none_or(|member| self.writer.admission().keeps_columns(member));
            if stays_on_source || self.state().column_moves.contains_key(&id) {
                return Ok(None);
            }
            let other_members = (0u16..).zip(&extent.columns).filter(|(n, _)| *n != id.column);
            let other_members = other_members.map(|(_, extent)| extent.member);
            // Two columns of an extent must not move to the same member.
            let state = self.state();
            let is_sibling = |other: &ColumnId| {
                (other.volume, other.index) == (id.volume, id.index) && *other != id
            };
            let move_targets = state
                .column_moves
                .iter()
                .filter(|(other, _)| is_sibling(other))
                .map(|(_, to)| to.member);
            let other_members: MemberSet = other_members.chain(move_targets).collect();
            place_column(&metadata, &state.reserved, other_members)
        };
        let Some(target) = target else { return Ok(None) };
        {
            let state = &mut *self.state_mut();
            state.reserved.reserve(&[target]);
            state.column_moves.insert(id, target);
        }
        let zeroing = self.writer.disk(target.member).map(|disk| {
            let zero = async move { disk.zero_extent_metadata(target).await };
            (target.member, zero)
        });
        if let Err(member) = self.wait_zeroed(zeroing).await {
            self.cancel_moves(|other| *other == id);
            self.detach_member(member, self.join_generation(member)).await?;
            return Ok(None);
        }
        let first_row = self.writer.metadata().first_row_of(target);
        Ok(Some((target, first_row)))
    }

    /// Cancels the moves of the columns that `is_cancelled` selects, and releases their targets.
    pub(super) fn cancel_moves(&self, is_cancelled: impl Fn(&ColumnId) -> bool) {
        let PoolState { column_moves, reserved, .. } = &mut *self.state_mut();
        let cancelled = column_moves.extract_if(.., |id, _| is_cancelled(id));
        let targets: Vec<PhysicalExtent> = cancelled.map(|(_, to)| to).collect();
        reserved.release(&targets);
    }

    /// Records that a column has moved: `to` holds a complete copy of it. Returns whether the move
    /// is committed; on an error that is unknown.
    pub(super) async fn commit_move(
        self: &Rc<Self>,
        id: ColumnId,
        to: PhysicalExtent,
    ) -> Result<bool, PoolError> {
        let ColumnId { volume, index, column } = id;
        let moved = self.writer.commit(Change::MoveColumn { volume, index, column, to }).await;
        if moved.is_ok() {
            {
                let state = &mut *self.state_mut();
                state.column_moves.remove(&id);
                state.reserved.release(&[to]);
            }
            self.remove_drained().await;
        }
        match moved {
            Ok(()) => Ok(true),
            Err(why) if self.writer.fatal_error().is_some() || self.is_closed() => Err(why),
            Err(why) => {
                tracing::warn!(volume = volume.0, index, column, error = %why, "moving a column failed");
                Ok(false)
            }
        }
    }

    /// Records that rows of an extent's data are lost, unrepaired or rewritten. Unrepaired rows are
    /// not recorded again if all of them are recorded as damaged already.
    pub(super) async fn record_row_damage(
        &self,
        (volume, index): (PoolVolumeId, u32),
        range: Range<u32>,
        damage: RowDamage,
    ) -> Result<(), PoolError> {
        let (first_row, row_count) = (range.start, range.end.saturating_sub(range.start));
        let change = match damage {
            RowDamage::Lost => Change::MarkLost { volume, index, first_row, row_count },
            RowDamage::Rewritten => Change::MarkRewritten { volume, index, first_row, row_count },
            RowDamage::Unrepaired if self.is_known_unrepaired(volume, index, &range) => {
                return Ok(());
            }
            RowDamage::Unrepaired => Change::MarkUnrepaired { volume, index, first_row, row_count },
        };
        self.writer.commit(change).await
    }

    /// Whether all of these rows are recorded as unrepaired or lost.
    fn is_known_unrepaired(&self, volume: PoolVolumeId, index: u32, rows: &Range<u32>) -> bool {
        let metadata = self.writer.metadata();
        let known = metadata.volume(volume).map_or(0, |volume| {
            let sets = [volume.unrepaired_rows(index), volume.lost_rows(index)];
            let within = sets.iter().flat_map(|set| set.intersection(rows));
            within.map(|rows| rows.len()).sum::<usize>()
        });
        known == rows.len()
    }

    /// Creates a volume. A thick one is allocated at once, on active members only.
    ///
    /// # Errors
    /// Why it cannot be created. If its extents cannot be allocated, it is deleted again.
    pub async fn create_volume(self: &Rc<Self>, request: &NewPoolVolume) -> Result<(), PoolError> {
        let NewPoolVolume { id: uuid, bytes, block_size, is_thick } = *request;
        let volume = {
            // Concurrent creations must not get the same volume number.
            let _guard = self.create_lock.lock().await;
            let (volume, geometry) = {
                let metadata = self.writer.metadata();
                (metadata.next_volume_id(), metadata.geometry)
            };
            if is_thick {
                self.check_space(bytes)?;
            }
            let change =
                Change::CreateVolume { volume, uuid, geometry, bytes, block_size, is_thick };
            self.writer.commit(change).await?;
            volume
        };
        let allocated = if is_thick { self.allocate_all(volume).await } else { Ok(()) };
        if allocated.is_err() {
            self.writer.commit(Change::DeleteVolume(volume)).await?;
        }
        allocated
    }

    /// Allocates all missing extents of a volume.
    async fn allocate_all(self: &Rc<Self>, id: PoolVolumeId) -> Result<(), PoolError> {
        let missing: Vec<u32> = {
            let metadata = self.writer.metadata();
            let Some(volume) = metadata.volume(id) else { return Ok(()) };
            (0..volume.extent_count_when_full())
                .filter(|index| volume.extent(*index).is_none())
                .collect()
        };
        for index in missing {
            self.allocate_extent(id, index, Allocation::ActiveMembersOnly).await?;
        }
        Ok(())
    }

    /// Grows a volume to `bytes`; does nothing if it is larger.
    ///
    /// # Errors
    /// Why it cannot be grown.
    pub async fn grow_volume(self: &Rc<Self>, uuid: Uuid, bytes: u64) -> Result<(), PoolError> {
        let id = self.find_volume(uuid)?;
        let (current_bytes, is_thick) = {
            let metadata = self.writer.metadata();
            // A volume that was deleted meanwhile is not grown.
            metadata.volume(id).map_or((u64::MAX, false), |v| (v.bytes, v.is_thick))
        };
        if bytes < current_bytes {
            return Ok(());
        }
        if is_thick {
            self.check_space_for_extents(self.missing_extents(id, bytes))?;
        }
        if bytes > current_bytes {
            self.writer.commit(Change::GrowVolume { volume: id, bytes }).await?;
        }
        // Even if its size stays the same: an earlier attempt may have grown it and failed to
        // allocate its extents.
        if is_thick {
            self.allocate_all(id).await?;
        }
        self.broadcast(|| PoolEvent::VolumeGrown(uuid, bytes));
        Ok(())
    }

    /// Extents that a volume of `bytes` bytes still lacks.
    fn missing_extents(&self, id: PoolVolumeId, bytes: u64) -> u64 {
        let metadata = self.writer.metadata();
        metadata.volume(id).map_or(0, |volume| {
            let full = bytes.div_ceil(volume.extent_bytes());
            full.saturating_sub(volume.extents().count() as u64)
        })
    }

    /// Deletes a volume that is not open. Does nothing if it does not exist.
    ///
    /// # Errors
    /// The core that last opened it cannot release it, or no metadata can be written any more.
    pub async fn delete_volume(&self, uuid: Uuid) -> Result<(), PoolError> {
        match self.find_volume(uuid) {
            Ok(id) => {
                // Otherwise the core that last opened it could still save stripe maps to its
                // physical extents, when these belong to another volume.
                self.release_volume(id, uuid, None).await?;
                self.writer.commit(Change::DeleteVolume(id)).await?;
                self.cancel_moves(|column| column.volume == id);
                Ok(())
            }
            Err(_) => Ok(()),
        }
    }
}
