//! The volumes of a pool: what they have of it, and where.

use std::ops::Range;
use std::rc::Rc;

use rt::disk::DiskError;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{NewPoolVolume, Pool};
use crate::allocate::{Reserved, choose, choose_one, choose_whole};
use crate::ask::{ColumnAt, Event, ExtentInfo, RowsAre, VolumeInfo};
use crate::error::PoolError;
use crate::metadata::{Change, MemberId, Members, Piece, VolumeId};
use crate::writer::LONG_PATIENCE;

/// Where a new extent may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocation {
    /// On disks that are in use only: nobody waits for it.
    Whole,
    /// Where there are not enough of these, on disks that are out as well: somebody is writing.
    MayBeDegraded,
}

impl Pool {
    pub(crate) fn reserved(&self) -> std::cell::Ref<'_, Reserved> {
        self.reserved.borrow()
    }

    pub(super) fn find(&self, volume: Uuid) -> Result<VolumeId, PoolError> {
        let metadata = self.writer.metadata();
        let found = metadata.volumes().find(|(_, v)| v.uuid == volume).map(|(id, _)| id);
        found.ok_or_else(|| PoolError::new(format!("the pool has no volume {volume}")))
    }

    /// What was under way of a volume is not looked for any more in the parity log of the core that had it open, and that core
    /// writes nothing of it. `but` is a ring where it may be looked for.
    pub(super) async fn leave(
        &self,
        id: VolumeId,
        uuid: Uuid,
        but: Option<u16>,
    ) -> Result<(), PoolError> {
        let home = self.homes.borrow().get(&id).copied();
        let Some(home) = home.filter(|home| Some(*home) != but) else { return Ok(()) };
        let (done, is_done) = oneshot::channel();
        {
            let seats = self.seats.borrow();
            let seat = seats.iter().find(|(ring, seat)| *ring == home && !seat.is_closed());
            if let Some((_, seat)) = seat {
                drop(seat.send(Event::Leave(uuid, done)));
            }
        }
        // Who has left the pool in order meanwhile has left the volume as well.
        if is_done.await.is_err() && self.seated.borrow().contains(&home) {
            let message = format!("core {home} has not let go of volume {uuid}");
            return Err(PoolError::new(message).hinting("close the pool, and open it again"));
        }
        self.homes.borrow_mut().remove(&id);
        Ok(())
    }

    pub(super) async fn volume_info(&self, uuid: Uuid, ring: u16) -> Result<VolumeInfo, PoolError> {
        let id = self.find(uuid)?;
        self.leave(id, uuid, Some(ring)).await?;
        self.homes.borrow_mut().insert(id, ring);
        // What one lacks that comes in is known when it is in.
        let _together = self.membership.read().await;
        let metadata = self.writer.metadata();
        let gone = || PoolError::new(format!("the pool has no volume {uuid}"));
        let volume = metadata.volume(id).ok_or_else(gone)?;
        let extents = volume
            .extents()
            .map(|(index, extent)| ExtentInfo::of(&metadata, volume, index, extent));
        Ok(VolumeInfo {
            id,
            shape: volume.shape,
            bytes: volume.bytes,
            block_size: volume.block_size,
            thick: volume.thick,
            first: self.beginning(),
            extents: extents.collect(),
        })
    }

    /// Gives a volume an extent at `index`.
    pub(super) async fn allocate(
        self: &Rc<Self>,
        volume: VolumeId,
        index: u32,
        how: Allocation,
    ) -> Result<ExtentInfo, PoolError> {
        loop {
            // It may have been given already: to a volume that has grown, or keeps all its room.
            if let Ok(info) = self.extent_info(volume, index) {
                return Ok(info);
            }
            // One that was out is not zeroed, and may not be in when the extent is.
            let together = self.membership.read().await;
            let pieces = {
                let metadata = self.writer.metadata();
                let gone = || PoolError::new("the volume is gone");
                let shape = metadata.volume(volume).ok_or_else(gone)?.shape;
                let reserved = self.reserved.borrow();
                match how {
                    Allocation::Whole => choose_whole(&metadata, &reserved, &shape),
                    Allocation::MayBeDegraded => choose(&metadata, &reserved, &shape),
                }
            };
            let pieces = pieces.ok_or_else(|| self.full())?;
            self.reserved.borrow_mut().take(&pieces);
            let cleared = self.clear(&pieces).await;
            let allocated = match &cleared {
                Ok(()) => {
                    let pieces = pieces.clone();
                    self.writer.commit(Change::Allocate { volume, index, pieces }).await
                }
                Err(_) => Ok(()),
            };
            self.reserved.borrow_mut().give(&pieces);
            drop(together);
            match cleared {
                // It is out now: there may be others.
                Err(member) => self.out(member, self.visit_of(member)).await?,
                Ok(()) => {
                    return match (allocated, self.extent_info(volume, index)) {
                        (Err(why), Err(_)) => Err(why),
                        (_, info) => info,
                    };
                }
            }
        }
    }

    fn full(&self) -> PoolError {
        PoolError::no_space("there is no room for another extent")
            .hinting("add disks to the pool, or delete something")
    }

    /// Whether so many extents have room on disks that are in use.
    ///
    /// # Errors
    /// How much there is, and what to do.
    pub fn has_room(&self, bytes: u64) -> Result<(), PoolError> {
        let extent_bytes = self.writer.metadata().extent_bytes();
        self.has_room_for(bytes.div_ceil(extent_bytes))
    }

    fn has_room_for(&self, extents: u64) -> Result<(), PoolError> {
        let metadata = self.writer.metadata();
        let free =
            metadata.evacuation(Members::default(), metadata.in_use(), &self.reserved.borrow());
        if extents <= free.extents_left {
            return Ok(());
        }
        let (wanted, there) = (metadata.size_of(extents), metadata.size_of(free.extents_left));
        let short = format!("{wanted} are needed, and the disks in use have room for {there}");
        let out: Vec<String> = (metadata.members())
            .filter(|(_, member)| !member.standing.votes())
            .map(|(id, member)| match member.serial.as_str() {
                "" => id.0.to_string(),
                serial => serial.to_owned(),
            })
            .collect();
        if out.is_empty() {
            return Err(
                PoolError::no_space(short).hinting("add disks to the pool, or delete something")
            );
        }
        let message = format!("{short}: disk {} is out", out.join(", "));
        let hint = "replace the disk that is out first (windrose pool replace), or add one (windrose pool add)";
        Err(PoolError::no_space(message).hinting(hint))
    }

    fn extent_info(&self, volume: VolumeId, index: u32) -> Result<ExtentInfo, PoolError> {
        let metadata = self.writer.metadata();
        let found = metadata.volume(volume).and_then(|v| Some((v, v.extent(index)?)));
        let (volume, extent) = found.ok_or_else(|| PoolError::new("the extent is gone"))?;
        Ok(ExtentInfo::of(&metadata, volume, index, extent))
    }

    /// Makes pieces zero, those on members that are written. The error is a member that cannot be.
    async fn clear(&self, pieces: &[Piece]) -> Result<(), MemberId> {
        let disks = pieces.iter().filter_map(|p| Some((*p, self.writer.disk(p.member)?)));
        let each =
            disks.map(|(piece, disk)| (piece.member, async move { disk.clear(piece).await }));
        self.all_cleared(each).await
    }

    /// Waits for parts of disks to be cleared. The error is a member that cannot be.
    async fn all_cleared<F>(
        &self,
        each: impl IntoIterator<Item = (MemberId, F)>,
    ) -> Result<(), MemberId>
    where
        F: Future<Output = Result<(), DiskError>>,
    {
        let cleared = self.writer.at_each(LONG_PATIENCE, each).await;
        cleared.into_iter().try_for_each(|(member, cleared)| {
            cleared.map_err(|why| {
                let path = self.identity(member).1;
                tracing::error!(%path, error = %why, "a disk cannot be written");
                member
            })
        })
    }

    /// Another place for a column.
    pub(super) async fn place(
        self: &Rc<Self>,
        of: ColumnAt,
    ) -> Result<Option<(Piece, u64)>, PoolError> {
        let piece = {
            let metadata = self.writer.metadata();
            let extent = metadata.volume(of.volume).and_then(|v| v.extent(of.index));
            let Some(extent) = extent else { return Ok(None) };
            let here = extent.pieces.get(usize::from(of.column)).map(|piece| piece.member);
            let stays = here.is_none_or(|member| self.returning.borrow().contains(&member));
            if stays || self.moving.borrow().contains_key(&of) {
                return Ok(None);
            }
            let others = (0u16..).zip(&extent.pieces).filter(|(n, _)| *n != of.column);
            let others = others.map(|(_, piece)| piece.member);
            // Two columns that move at once may not meet.
            let moving = self.moving.borrow();
            let is_sibling =
                |at: &ColumnAt| (at.volume, at.index) == (of.volume, of.index) && *at != of;
            let coming = moving.iter().filter(|(at, _)| is_sibling(at)).map(|(_, to)| to.member);
            let others: Members = others.chain(coming).collect();
            choose_one(&metadata, &self.reserved.borrow(), others)
        };
        let Some(piece) = piece else { return Ok(None) };
        self.reserved.borrow_mut().take(&[piece]);
        self.moving.borrow_mut().insert(of, piece);
        let disk = self.writer.disk(piece.member).map(|disk| {
            let clear = async move { disk.clear_tail(piece).await };
            (piece.member, clear)
        });
        if let Err(member) = self.all_cleared(disk).await {
            self.stay(|staying| *staying == of);
            self.out(member, self.visit_of(member)).await?;
            return Ok(None);
        }
        let at = self.writer.metadata().row_of(piece);
        Ok(Some((piece, at)))
    }

    /// These columns do not go where they were to go.
    pub(super) fn stay(&self, which: impl Fn(&ColumnAt) -> bool) {
        let mut moving = self.moving.borrow_mut();
        let staying = moving.extract_if(.., |of, _| which(of));
        let places: Vec<Piece> = staying.map(|(_, to)| to).collect();
        self.reserved.borrow_mut().give(&places);
    }

    pub(super) async fn moved(self: &Rc<Self>, of: ColumnAt, to: Piece) -> Result<bool, PoolError> {
        let ColumnAt { volume, index, column } = of;
        let moved = self.writer.commit(Change::Move { volume, index, column, to }).await;
        if moved.is_ok() {
            self.moving.borrow_mut().remove(&of);
            self.reserved.borrow_mut().give(&[to]);
            self.retire().await;
        }
        match moved {
            Ok(()) => Ok(true),
            Err(why) if self.writer.broken().is_some() || self.is_closed.get() => Err(why),
            Err(why) => {
                tracing::warn!(volume = volume.0, index, column, error = %why, "a piece is not moved");
                Ok(false)
            }
        }
    }

    /// What has become of rows of an extent is written down, unless it is known.
    pub(super) async fn rows_are(
        &self,
        (volume, index): (VolumeId, u32),
        range: Range<u32>,
        are: RowsAre,
    ) -> Result<(), PoolError> {
        let (row, rows) = (range.start, range.end.saturating_sub(range.start));
        let change = match are {
            RowsAre::Lost => Change::Lost { volume, index, row, rows },
            RowsAre::Rewritten => Change::Rewritten { volume, index, row, rows },
            RowsAre::Unrepaired if self.is_known_unrepaired(volume, index, &range) => return Ok(()),
            RowsAre::Unrepaired => Change::Unrepaired { volume, index, row, rows },
        };
        self.writer.commit(change).await
    }

    /// Whether all of these rows are remembered as not repaired, or as lost.
    fn is_known_unrepaired(&self, volume: VolumeId, index: u32, rows: &Range<u32>) -> bool {
        let metadata = self.writer.metadata();
        let known = metadata.volume(volume).map_or(0, |volume| {
            let sets = [volume.unrepaired_rows(index), volume.lost_rows(index)];
            let within = sets.iter().flat_map(|set| set.within(rows));
            within.map(|rows| rows.len()).sum::<usize>()
        });
        known == rows.len()
    }

    /// Makes a volume. One that gets all its room at once gets it on disks that are in use.
    ///
    /// # Errors
    /// What is in the way; nothing is left of it.
    pub async fn create_volume(self: &Rc<Self>, what: &NewPoolVolume) -> Result<(), PoolError> {
        let NewPoolVolume { id: uuid, bytes, block_size, thick } = *what;
        let volume = {
            // Two that read the next number before one is written down would take the same.
            let _alone = self.creating.lock().await;
            let (volume, shape) = {
                let metadata = self.writer.metadata();
                (metadata.next_volume(), metadata.shape)
            };
            if thick {
                self.has_room(bytes)?;
            }
            let change = Change::CreateVolume { volume, uuid, shape, bytes, block_size, thick };
            self.writer.commit(change).await?;
            volume
        };
        let filled = if thick { self.fill(volume).await } else { Ok(()) };
        if filled.is_err() {
            self.writer.commit(Change::DeleteVolume(volume)).await?;
        }
        filled
    }

    /// Gives a volume all extents that it does not have.
    async fn fill(self: &Rc<Self>, id: VolumeId) -> Result<(), PoolError> {
        let missing: Vec<u32> = {
            let metadata = self.writer.metadata();
            let Some(volume) = metadata.volume(id) else { return Ok(()) };
            (0..volume.full()).filter(|index| volume.extent(*index).is_none()).collect()
        };
        for index in missing {
            self.allocate(id, index, Allocation::Whole).await?;
        }
        Ok(())
    }

    /// Makes a volume so many bytes large, if it is smaller.
    ///
    /// # Errors
    /// What is in the way.
    pub async fn grow_volume(self: &Rc<Self>, uuid: Uuid, bytes: u64) -> Result<(), PoolError> {
        let id = self.find(uuid)?;
        let (had, thick) = {
            let metadata = self.writer.metadata();
            metadata.volume(id).map_or((u64::MAX, false), |v| (v.bytes, v.thick))
        };
        if bytes < had {
            return Ok(());
        }
        if thick {
            self.has_room_for(self.missing(id, bytes))?;
        }
        if bytes > had {
            self.writer.commit(Change::GrowVolume { volume: id, bytes }).await?;
        }
        // Also one that was made larger, and got no further.
        if thick {
            self.fill(id).await?;
        }
        self.tell(|| Event::Grown(uuid, bytes));
        Ok(())
    }

    /// Extents that a volume of so many bytes has not got.
    fn missing(&self, id: VolumeId, bytes: u64) -> u64 {
        let metadata = self.writer.metadata();
        metadata.volume(id).map_or(0, |volume| {
            let full = bytes.div_ceil(volume.extent_bytes());
            full.saturating_sub(volume.extents().count() as u64)
        })
    }

    /// Deletes a volume that is not open. Nothing happens if there is none.
    ///
    /// # Errors
    /// That nothing more can be written.
    pub async fn delete_volume(&self, uuid: Uuid) -> Result<(), PoolError> {
        match self.find(uuid) {
            Ok(id) => {
                // Maps of its extents would be written where others are by then.
                self.leave(id, uuid, None).await?;
                self.writer.commit(Change::DeleteVolume(id)).await?;
                self.stay(|of| of.volume == id);
                Ok(())
            }
            Err(_) => Ok(()),
        }
    }
}
