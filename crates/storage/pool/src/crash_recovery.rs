//! Crash recovery: repairs what the dirty lists and parity logs hold before a pool serves.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{Account, Dev, Error, Lba, MemoryClass};
use checksum::ChecksumLayer;
use checksum::format::ChecksumOwner;
use geometry::RaidGeometry;
use pool_metadata::{Change, MemberId, MemberSet, Metadata, PoolExtent, PoolVolume, PoolVolumeId};
use raid::log_batch::RingId;
use raid::{
    Array, ArrayMember, Damage, DetachFuture, DiskCounters, LogContents, MetadataFuture,
    PoolMetadata, PreviousRing,
};
use rt::Core;
use tokio::time::timeout;
use uuid::Uuid;

use super::error::PoolError;
use super::member_disk::{LONG_DISK_TIMEOUT, MemberDisk};
use super::member_layout::MemberLayout;
use super::metadata_writer::MetadataWriter;
use super::requests::ExtentInfo;

/// How much longer than the other disks one may take to recover its checksums: it reads up to half
/// a gigabyte for each core.
const CHECKSUM_RECOVERY_TIMEOUT: Duration = Duration::from_secs(300);

/// Commits the metadata changes that recovery makes. The flag says that damage has been logged.
#[derive(Debug)]
struct RecoveryPoolMetadata(Rc<MetadataWriter>, Cell<bool>);

impl PoolMetadata for RecoveryPoolMetadata {
    fn detach_member(&self, member: u16) -> MetadataFuture<'_> {
        Box::pin(async move {
            let id = MemberId(member);
            let detached = self.0.detach(id).await;
            detached.map(drop).map_err(|why| to_block_error(&why))
        })
    }

    fn mark_regions_stale(&self, extent: u64, regions: u32) -> MetadataFuture<'_> {
        Box::pin(async move {
            let found = {
                let (metadata, numbers) = (self.0.metadata(), BTreeSet::from([extent]));
                extents_by_number(&metadata, &numbers)
                    .next()
                    .map(|(volume, _, index, _)| (volume, index))
            };
            let Some((volume, index)) = found else { return Ok(()) };
            let marked = self.0.commit(Change::MarkStale { volume, index, regions }).await;
            marked.map_err(|why| to_block_error(&why))
        })
    }

    fn detach_unresponsive(&self, member: u16, unresponsive: u128) -> DetachFuture<'_> {
        Box::pin(async move {
            let detached = self
                .0
                .detach_unresponsive(MemberId(member), MemberSet(unresponsive), || true)
                .await;
            detached.map(|news| news.is_some()).map_err(|why| to_block_error(&why))
        })
    }

    fn set_slow(&self, member: u16, is_slow: bool) {
        if is_slow {
            tracing::warn!(member, "a disk of the pool lags far behind the others");
        }
    }

    /// The pool is not open yet: only the first damaged blocks are logged.
    fn report_damage(&self, damage: Damage) {
        if !self.1.replace(true) {
            tracing::warn!(pool = %self.0.metadata().name, ?damage, "pool: crash recovery cannot read blocks");
        }
    }
}

/// The extents that have one of these numbers.
fn extents_by_number<'a>(
    metadata: &'a Metadata,
    numbers: &'a BTreeSet<u64>,
) -> impl Iterator<Item = (PoolVolumeId, &'a PoolVolume, u32, &'a PoolExtent)> {
    metadata.volumes().flat_map(move |(id, volume)| {
        let all = volume.extents().filter(|(_, extent)| numbers.contains(&extent.number));
        all.map(move |(index, extent)| (id, volume, index, extent))
    })
}

/// The block error for a failed change of metadata.
pub(super) fn to_block_error(why: &PoolError) -> Error {
    if why.is_no_space() { Error::NoSpace } else { Error::Gone }
}

/// Puts the checksum layer on a member, if the pool has checksums.
///
/// # Errors
/// Its checksums cannot be recovered after a crash.
pub(super) async fn with_checksums(
    member: ArrayMember,
    layout: MemberLayout,
    memory: &Account,
    path: &Path,
) -> Result<ArrayMember, PoolError> {
    let ring = u16::try_from(member.ring.number).unwrap_or(u16::MAX);
    let Some((checksum_layout, list_at)) = layout.checksum_layout(ring) else { return Ok(member) };
    let owner = ChecksumOwner { pool: member.ring.pool, member: member.ring.member, ring };
    let corrupt_reads = Arc::clone(&member.counters.corrupt_reads);
    let name = path.display().to_string();
    let layer = ChecksumLayer::new(
        member.dev,
        checksum_layout,
        (owner, &name),
        list_at,
        memory,
        corrupt_reads,
    )
    .await;
    let failed = |why: Error| PoolError::on_disk(path, format!("its checksums: {why}"));
    let checksums = Rc::new(layer.map_err(failed)?);
    let dev = Dev::shared(Rc::clone(&checksums));
    Ok(ArrayMember { dev, checksums: Some(checksums), ..member })
}

/// Checks that a core has the memory for the checksums of disks of these layouts; waits a while for
/// memory that others hold.
///
/// # Errors
/// It does not have that memory.
pub(super) async fn check_checksum_memory(
    memory: &Account,
    disks: impl IntoIterator<Item = MemberLayout>,
) -> Result<(), PoolError> {
    let bytes = checksum_memory_bytes(disks);
    check_memory(memory, bytes)
        .await
        .map_err(|missing_bytes| insufficient_memory(memory, missing_bytes))
}

/// Checks that a core could pin so many bytes; waits a while for memory that others hold. On
/// failure the error is `bytes`.
async fn check_memory(memory: &Account, bytes: usize) -> Result<(), usize> {
    let held = timeout(LONG_DISK_TIMEOUT, memory.credit(bytes, MemoryClass::Pinned)).await;
    held.ok().and_then(Result::ok).map(drop).ok_or(bytes)
}

/// Bytes of memory that the checksums of disks of these layouts need.
pub(super) fn checksum_memory_bytes(disks: impl IntoIterator<Item = MemberLayout>) -> usize {
    disks.into_iter().filter(|layout| layout.dirty_lists_at.is_some()).count()
        * ChecksumLayer::MEMORY_BYTES
}

/// The error of a core that lacks the `needed` bytes of memory for a pool of disks, with the
/// setting that suffices.
pub(super) fn insufficient_memory(memory: &Account, needed: usize) -> PoolError {
    let min_mib = memory.buffer_pool().min_mib_for(needed, false);
    PoolError::new(format!(
        "a core has too little buffer memory for a pool of disks: set cores.memory to \"{min_mib}MiB\" or more \
         in the configuration, and restart the node"
    ))
}

/// Recovers the checksums of what was being written to a disk at a crash. Must come before any data
/// of it are read.
///
/// # Errors
/// They cannot be recovered.
pub(super) async fn recover_checksums(core: &Core, disk: &MemberDisk) -> Result<(), PoolError> {
    let failed = |why: Error| PoolError::on_disk(disk.path(), format!("its checksums: {why}"));
    let (label, memory) = (disk.label(), core.buffer_pool().account());
    if label.layout.dirty_lists_at.is_none() {
        return Ok(());
    }
    for ring in 0..label.log_rings {
        let (identity, dev) = ((label.member_uuid, label.layout), Dev::new(disk.raw_device()));
        let member = array_member(dev, label.pool_id, identity, (ring, 0), disk.counters());
        let member = with_checksums(member, label.layout, &memory, disk.path()).await?;
        if let Some(checksums) = member.checksums {
            checksums.release_idle().await.map_err(failed)?;
        }
    }
    Ok(())
}

/// A member as the array uses it, with its ring of this number.
pub(super) fn array_member(
    dev: Dev,
    pool: Uuid,
    (member, layout): (Uuid, MemberLayout),
    (ring, generation): (u16, u64),
    counters: Arc<DiskCounters>,
) -> ArrayMember {
    ArrayMember {
        dev,
        ring: RingId { pool, member, generation, number: ring.into() },
        ring_lba: Lba(layout.ring_first_block(ring)),
        is_detached: false,
        counters,
        checksums: None,
    }
}

/// Marks as stale what was being written when a member was detached, by the entries that its own
/// rings hold of its last log generation. After a crash nothing else has marked that: a row whose
/// parity lies on this member alone is logged on it alone.
pub(super) async fn mark_in_flight_writes(
    core: &Core,
    writer: &Rc<MetadataWriter>,
    id: MemberId,
    disk: &MemberDisk,
    log_generation: u64,
) -> Result<(), PoolError> {
    let failed = |why: Error| PoolError::on_disk(disk.path(), format!("its parity log: {why}"));
    let (pool, rings) = (writer.metadata().pool_id, writer.metadata().log_rings);
    let (label, metadata) =
        (disk.label(), Rc::new(RecoveryPoolMetadata(Rc::clone(writer), Cell::new(false))));
    let array = Array::new(log_generation, metadata, core.buffer_pool()).await.map_err(failed)?;
    let member = |ring| {
        let identity = (label.member_uuid, label.layout);
        let dev = Dev::new(disk.raw_device());
        array_member(dev, pool, identity, (ring, log_generation), disk.counters())
    };
    array
        .set_member(id.0, member(0))
        .map_err(|why| PoolError::on_disk(disk.path(), why.to_string()))?;
    let rings = (0..rings).map(member).map(|m| PreviousRing {
        member: id.0,
        ring: m.ring,
        first_block: m.ring_lba,
    });
    let entries = LogContents::read(&array, log_generation, &rings.collect::<Vec<_>>())
        .await
        .map_err(failed)?;
    if array.is_detached(id.0) {
        return Err(failed(Error::Gone));
    }
    if entries.missing_batches().next().is_some() {
        return Err(PoolError::on_disk(disk.path(), "part of its parity log cannot be read"));
    }
    let known: BTreeMap<u64, (PoolVolumeId, u32, RaidGeometry)> =
        extents_by_number(&writer.metadata(), &entries.extents())
            .map(|(id, volume, index, extent)| (extent.number, (id, index, volume.geometry)))
            .collect();
    let mut regions: BTreeMap<(PoolVolumeId, u32), u32> = BTreeMap::new();
    for (number, slot) in entries.slots() {
        let Some((volume, index, geometry)) = known.get(&number) else { continue };
        *regions.entry((*volume, *index)).or_default() |= geometry.region_bit(slot);
    }
    for ((volume, index), regions) in regions {
        writer.commit(Change::MarkStale { volume, index, regions }).await?;
    }
    Ok(())
}

/// Recovers all rings, one after the other.
pub(super) async fn recover_parity_logs(
    core: &Core,
    writer: &Rc<MetadataWriter>,
) -> Result<(), PoolError> {
    let (log_rings, log_generation) =
        (writer.metadata().log_rings, writer.metadata().log_generation());
    if log_generation == 0 {
        return Ok(());
    }
    let layouts: Vec<_> = writer.disks().into_iter().map(|(_, disk)| disk.label().layout).collect();
    let memory = core.buffer_pool().account();
    if let Err(missing_bytes) = check_memory(&memory, Array::MEMORY_BYTES).await {
        return Err(insufficient_memory(&memory, missing_bytes + checksum_memory_bytes(layouts)));
    }
    check_checksum_memory(&memory, layouts).await?;
    let recovered = writer.for_each_in_task(CHECKSUM_RECOVERY_TIMEOUT, |disk| {
        let core = core.clone();
        async move { recover_checksums(&core, &disk).await }
    });
    for (id, _, recovered) in recovered.await {
        or_detach(writer, id, recovered).await?;
    }
    for ring in 0..log_rings {
        recover_ring(core, writer, (ring, log_generation)).await?;
    }
    Ok(())
}

/// The result for a disk; a disk that cannot be used is detached.
async fn or_detach<T>(
    writer: &MetadataWriter,
    id: MemberId,
    found: Result<T, PoolError>,
) -> Result<Option<T>, PoolError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(why) => {
            tracing::error!(error = %why, "a disk of the pool cannot be used");
            writer.detach(id).await?;
            Ok(None)
        }
    }
}

async fn recover_ring(
    core: &Core,
    writer: &Rc<MetadataWriter>,
    ring: (u16, u64),
) -> Result<(), PoolError> {
    let failed =
        |why: Error| PoolError::new(format!("recovering from the parity log failed: {why}"));
    let (pool, metadata) = (
        writer.metadata().pool_id,
        Rc::new(RecoveryPoolMetadata(Rc::clone(writer), Cell::new(false))),
    );
    let array = Array::new(ring.1, metadata, core.buffer_pool()).await.map_err(failed)?;
    let mut rings = Vec::new();
    let members = writer.for_each_in_task(LONG_DISK_TIMEOUT, |disk| {
        let (label, memory) = (disk.label(), core.buffer_pool().account());
        let identity = (label.member_uuid, label.layout);
        let dev = Dev::new(disk.raw_device());
        let member = array_member(dev, pool, identity, ring, disk.counters());
        async move { with_checksums(member, label.layout, &memory, disk.path()).await }
    });
    for (id, disk, member) in members.await {
        let Some(member) = or_detach(writer, id, member).await? else { continue };
        let old = PreviousRing { member: id.0, ring: member.ring, first_block: member.ring_lba };
        let result = array.set_member(id.0, member);
        result.map_err(|why| PoolError::on_disk(disk.path(), why.to_string()))?;
        rings.push(old);
    }
    let entries = LogContents::read(&array, ring.1, &rings).await.map_err(failed)?;
    for (member, missing) in entries.missing_batches() {
        let Some(disk) = writer.disk(MemberId(member)) else { continue };
        disk.counters().corrupt_reads.fetch_add(missing, Ordering::Relaxed);
        let path = disk.path().display();
        tracing::error!(%path, missing, "the parity log of a disk cannot be read: scrub the pool");
    }
    let found: Vec<_> = {
        let (metadata, numbers) = (writer.metadata(), entries.extents());
        let all = extents_by_number(&metadata, &numbers).map(|(_, volume, index, extent)| {
            let info = ExtentInfo::from_metadata(&metadata, volume, index, extent);
            (volume.geometry, info.to_raid_extent(volume.geometry))
        });
        all.collect()
    };
    let mut extents = Vec::new();
    for (geometry, extent) in found {
        extents.push((geometry, Rc::new(extent.load_stripe_map(&array).await.map_err(failed)?)));
    }
    let outcome = entries.recover(&array, &extents).await.map_err(failed)?;
    array.release_idle_checksums().await.map_err(failed)?;
    if outcome.recovered > 0 {
        tracing::info!(ring = ring.0, mended = outcome.recovered, "recovered from the crash");
    }
    if outcome.unrecoverable > 0 {
        tracing::error!(
            ring = ring.0,
            lost = outcome.unrecoverable,
            "rows are lost: too many disks failed"
        );
    }
    Ok(())
}
