//! What a crash has left in the parity logs is mended before a pool serves.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{Account, Class, Dev, Error, Lba};
use checksum::Integrity;
use checksum::stored::Whose;
use disk::Raw;
use geometry::Shape;
use raid::batch::Ring;
use raid::{Answered, Array, Damage, Entries, Errors, Keeper, Kept, Member, OldRing};
use rt::Core;
use rt::disk::Disk;
use tokio::time::timeout;
use uuid::Uuid;

use super::ask::ExtentInfo;
use super::disk::MemberDisk;
use super::error::PoolError;
use super::layout::{BLOCK_BYTES, Layout};
use super::metadata::{Change, Extent, MemberId, Members, Metadata, Volume, VolumeId};
use super::writer::{LONG_PATIENCE, Writer};

/// How much longer than another disk one may take until its checksums are made anew: up to half a gigabyte for each core is read.
const MENDED_WITHIN: Duration = Duration::from_secs(300);

/// Writes down what mending finds out.
#[derive(Debug)]
struct Mending(Rc<Writer>, Cell<bool>);

impl Keeper for Mending {
    fn out(&self, member: u16) -> Kept<'_> {
        Box::pin(async move {
            let id = MemberId(member);
            let told = self.0.put_out(id).await;
            told.map(drop).map_err(|why| error_of(&why))
        })
    }

    fn changed(&self, extent: u64, regions: u32) -> Kept<'_> {
        Box::pin(async move {
            let found = {
                let (metadata, numbers) = (self.0.metadata(), BTreeSet::from([extent]));
                named(&metadata, &numbers).next().map(|(volume, _, index, _)| (volume, index))
            };
            let Some((volume, index)) = found else { return Ok(()) };
            let marked = self.0.commit(Change::Mark { volume, index, regions }).await;
            marked.map_err(|why| error_of(&why))
        })
    }

    fn gives_up(&self, member: u16, silent: u128) -> Answered<'_> {
        Box::pin(async move {
            let given_up = self.0.give_up_on(MemberId(member), Members(silent), || true).await;
            given_up.map(|news| news.is_some()).map_err(|why| error_of(&why))
        })
    }

    fn slow(&self, member: u16, is_slow: bool) {
        if is_slow {
            tracing::warn!(member, "a disk of the pool lags far behind the others");
        }
    }

    /// The pool is not open yet: of many blocks the first is named.
    fn damaged(&self, damage: Damage) {
        if !self.1.replace(true) {
            tracing::warn!(pool = %self.0.metadata().name, ?damage, "pool: blocks cannot be read while a crash is mended");
        }
    }
}

/// The extents of these numbers that there are.
fn named<'a>(
    metadata: &'a Metadata,
    numbers: &'a BTreeSet<u64>,
) -> impl Iterator<Item = (VolumeId, &'a Volume, u32, &'a Extent)> {
    metadata.volumes().flat_map(move |(id, volume)| {
        let all = volume.extents().filter(|(_, extent)| numbers.contains(&extent.number));
        all.map(move |(index, extent)| (id, volume, index, extent))
    })
}

/// What failing to write metadata means to the data path.
pub(super) fn error_of(why: &PoolError) -> Error {
    if why.is_no_space() { Error::NoSpace } else { Error::Gone }
}

/// A disk as an array uses it.
pub(super) fn raw(disk: Disk) -> Raw {
    Raw::new(disk, u32::try_from(BLOCK_BYTES).unwrap_or(u32::MAX))
}

/// A member with what lies in the units checked, if the pool has checksums.
///
/// # Errors
/// That what a crash has left of them cannot be mended.
pub(super) async fn checked(
    member: Member,
    layout: Layout,
    memory: &Account,
    path: &Path,
) -> Result<Member, PoolError> {
    let ring = u16::try_from(member.ring.number).unwrap_or(u16::MAX);
    let Some((place, list_at)) = layout.checked(ring) else { return Ok(member) };
    let whose = Whose { pool: member.ring.pool, member: member.ring.member, ring };
    let wrong = Arc::clone(&member.errors.checksums);
    let name = path.display().to_string();
    let made = Integrity::new(member.dev, place, (whose, &name), list_at, memory, wrong).await;
    let failed = |why: Error| PoolError::at(path, format!("its checksums: {why}"));
    let integrity = Rc::new(made.map_err(failed)?);
    let dev = Dev::shared(Rc::clone(&integrity));
    Ok(Member { dev, integrity: Some(integrity), ..member })
}

/// Whether a core could have the checksums of disks of these layouts in memory; waits a while if others have that.
///
/// # Errors
/// That it could not.
pub(super) async fn holds_checksums(
    memory: &Account,
    disks: impl IntoIterator<Item = Layout>,
) -> Result<(), PoolError> {
    let bytes = checksums_memory(disks);
    holds(memory, bytes).await.map_err(|more| too_little_memory(memory, more))
}

/// Whether a core could give so many bytes for good; waits a while if others have them. Gives them back
/// as an error if not.
async fn holds(memory: &Account, bytes: usize) -> Result<(), usize> {
    let held = timeout(LONG_PATIENCE, memory.credit(bytes, Class::Fixed)).await;
    held.ok().and_then(Result::ok).map(drop).ok_or(bytes)
}

/// Bytes that the checksums of disks of these layouts take.
pub(super) fn checksums_memory(disks: impl IntoIterator<Item = Layout>) -> usize {
    disks.into_iter().filter(|layout| layout.lists_at.is_some()).count() * Integrity::MEMORY
}

/// What is said where a core has not the `wanted` bytes that a pool of disks takes of it, with the setting
/// that suffices.
pub(super) fn too_little_memory(memory: &Account, wanted: usize) -> PoolError {
    let least = memory.pool().least_mib_for(wanted, false);
    PoolError::new(format!(
        "a core has too little buffer memory for a pool of disks: set cores.pool to \"{least}MiB\" or more \
         in the configuration, and restart the node"
    ))
}

/// Makes anew the checksums of what was being written to a disk when power failed: before anything of it is read.
///
/// # Errors
/// That they cannot be.
pub(super) async fn mend_checksums(core: &Core, disk: &MemberDisk) -> Result<(), PoolError> {
    let failed = |why: Error| PoolError::at(disk.path(), format!("its checksums: {why}"));
    let (label, memory) = (disk.label(), core.pool().account());
    if label.layout.lists_at.is_none() {
        return Ok(());
    }
    for ring in 0..label.rings {
        let (of, dev) = ((label.member, label.layout), Dev::new(disk.raw()));
        let member = member_of(dev, label.pool, of, (ring, 0), disk.errors());
        let member = checked(member, label.layout, &memory, disk.path()).await?;
        if let Some(integrity) = member.integrity {
            integrity.release_idle().await.map_err(failed)?;
        }
    }
    Ok(())
}

/// What an array uses of a member, by its ring of this number.
pub(super) fn member_of(
    dev: Dev,
    pool: Uuid,
    (member, layout): (Uuid, Layout),
    (ring, era): (u16, u64),
    errors: Arc<Errors>,
) -> Member {
    Member {
        dev,
        ring: Ring { pool, member, era, number: ring.into() },
        ring_at: Lba(layout.ring_at(ring)),
        is_out: false,
        errors,
        integrity: None,
    }
}

/// Marks what was being written when a member went out, by what its own rings hold of the era that it knew last: with a crash
/// then nobody has said that it lacks that, for where it alone has the parity it alone has the entry.
pub(super) async fn mark_under_way(
    core: &Core,
    writer: &Rc<Writer>,
    id: MemberId,
    disk: &MemberDisk,
    era: u64,
) -> Result<(), PoolError> {
    let failed = |why: Error| PoolError::at(disk.path(), format!("its parity log: {why}"));
    let (pool, rings) = (writer.metadata().pool, writer.metadata().rings);
    let (label, keeper) = (disk.label(), Rc::new(Mending(Rc::clone(writer), Cell::new(false))));
    let array = Array::new(era, keeper, core.pool()).await.map_err(failed)?;
    let member = |ring| {
        let of = (label.member, label.layout);
        let dev = Dev::new(disk.raw());
        member_of(dev, pool, of, (ring, era), disk.errors())
    };
    array.put(id.0, member(0)).map_err(|why| PoolError::at(disk.path(), why.to_string()))?;
    let rings =
        (0..rings).map(member).map(|m| OldRing { member: id.0, ring: m.ring, at: m.ring_at });
    let entries = Entries::read(&array, era, &rings.collect::<Vec<_>>()).await.map_err(failed)?;
    if array.is_out(id.0) {
        return Err(failed(Error::Gone));
    }
    if entries.missing().next().is_some() {
        return Err(PoolError::at(disk.path(), "it does not give back all of its parity log"));
    }
    let known: BTreeMap<u64, (VolumeId, u32, Shape)> =
        named(&writer.metadata(), &entries.extents())
            .map(|(id, volume, index, extent)| (extent.number, (id, index, volume.shape)))
            .collect();
    let mut regions: BTreeMap<(VolumeId, u32), u32> = BTreeMap::new();
    for (number, place) in entries.places() {
        let Some((volume, index, shape)) = known.get(&number) else { continue };
        *regions.entry((*volume, *index)).or_default() |= shape.region(place);
    }
    for ((volume, index), regions) in regions {
        writer.commit(Change::Mark { volume, index, regions }).await?;
    }
    Ok(())
}

/// Mends by all rings, one after the other.
pub(super) async fn mend(core: &Core, writer: &Rc<Writer>) -> Result<(), PoolError> {
    let (rings, era) = (writer.metadata().rings, writer.metadata().era());
    if era == 0 {
        return Ok(());
    }
    let layouts: Vec<_> = writer.disks().into_iter().map(|(_, disk)| disk.label().layout).collect();
    let memory = core.pool().account();
    if let Err(more) = holds(&memory, Array::MEMORY).await {
        return Err(too_little_memory(&memory, more + checksums_memory(layouts)));
    }
    holds_checksums(&memory, layouts).await?;
    let mended = writer.in_tasks(MENDED_WITHIN, |disk| {
        let core = core.clone();
        async move { mend_checksums(&core, &disk).await }
    });
    for (id, _, mended) in mended.await {
        or_out(writer, id, mended).await?;
    }
    for ring in 0..rings {
        mend_ring(core, writer, (ring, era)).await?;
    }
    Ok(())
}

/// What a disk was found to be; one that cannot be used is out.
async fn or_out<T>(
    writer: &Writer,
    id: MemberId,
    found: Result<T, PoolError>,
) -> Result<Option<T>, PoolError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(why) => {
            tracing::error!(error = %why, "a disk of the pool cannot be used");
            writer.put_out(id).await?;
            Ok(None)
        }
    }
}

async fn mend_ring(core: &Core, writer: &Rc<Writer>, ring: (u16, u64)) -> Result<(), PoolError> {
    let failed =
        |why: Error| PoolError::new(format!("the parity log cannot be gone through: {why}"));
    let (pool, keeper) =
        (writer.metadata().pool, Rc::new(Mending(Rc::clone(writer), Cell::new(false))));
    let array = Array::new(ring.1, keeper, core.pool()).await.map_err(failed)?;
    let mut rings = Vec::new();
    let members = writer.in_tasks(LONG_PATIENCE, |disk| {
        let (label, memory) = (disk.label(), core.pool().account());
        let of = (label.member, label.layout);
        let dev = Dev::new(disk.raw());
        let member = member_of(dev, pool, of, ring, disk.errors());
        async move { checked(member, label.layout, &memory, disk.path()).await }
    });
    for (id, disk, member) in members.await {
        let Some(member) = or_out(writer, id, member).await? else { continue };
        let old = OldRing { member: id.0, ring: member.ring, at: member.ring_at };
        let put = array.put(id.0, member);
        put.map_err(|why| PoolError::at(disk.path(), why.to_string()))?;
        rings.push(old);
    }
    let entries = Entries::read(&array, ring.1, &rings).await.map_err(failed)?;
    for (member, missing) in entries.missing() {
        let Some(disk) = writer.disk(MemberId(member)) else { continue };
        disk.errors().checksums.fetch_add(missing, Ordering::Relaxed);
        let path = disk.path().display();
        tracing::error!(%path, missing, "a disk of the pool does not give back its parity log: scrub the pool");
    }
    let found: Vec<_> = {
        let (metadata, numbers) = (writer.metadata(), entries.extents());
        let all = named(&metadata, &numbers).map(|(_, volume, index, extent)| {
            let info = ExtentInfo::of(&metadata, volume, index, extent);
            (volume.shape, info.in_use(volume.shape))
        });
        all.collect()
    };
    let mut extents = Vec::new();
    for (shape, extent) in found {
        extents.push((shape, Rc::new(extent.load(&array).await.map_err(failed)?)));
    }
    let mended = entries.mend(&array, &extents).await.map_err(failed)?;
    array.release_idle().await.map_err(failed)?;
    if mended.mended > 0 {
        tracing::info!(ring = ring.0, mended = mended.mended, "what was under way is mended");
    }
    if mended.lost > 0 {
        tracing::error!(ring = ring.0, lost = mended.lost, "rows are lost: too many disks are");
    }
    Ok(())
}
