//! The report of an open pool.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use geometry::ROW_BYTES;
use pool_metadata::{
    MAX_UNREPAIRED_RANGES, MemberId, Metadata, PoolMember, PoolMemberState, PoolVolume,
};
use raid::DiskCounters;

use super::Pool;
use crate::report::{DamagedRange, PoolDiskReport, PoolDiskState, PoolReport, PoolVolumeReport};

impl Pool {
    /// The current state of the pool.
    #[must_use]
    pub fn report(&self) -> PoolReport {
        let metadata = self.writer.metadata();
        let present = metadata.voters();
        let extent_bytes = metadata.geometry.total_rows() * u64::from(ROW_BYTES);
        let volumes: Vec<PoolVolumeReport> = (metadata.volumes())
            .map(|(_, volume)| PoolVolumeReport {
                id: volume.uuid,
                bytes: volume.bytes,
                allocated_bytes: volume.extents().count() as u64 * volume.extent_bytes(),
                fault_tolerance: metadata.fault_tolerance(volume, present),
            })
            .collect();
        let disks: Vec<PoolDiskReport> = metadata
            .members()
            .map(|(id, member)| self.disk_report(&metadata, id, member))
            .collect();
        let holding = disks.iter().filter(|disk| disk.state != PoolDiskState::Spare);
        let detached = disks.iter().filter(|disk| disk.state == PoolDiskState::Detached).count();
        let level = u32::from(metadata.geometry.redundancy().fault_tolerance());
        let empty = level.checked_sub(u32::try_from(detached).unwrap_or(u32::MAX));
        let tolerances: Vec<Option<u32>> =
            volumes.iter().map(|volume| volume.fault_tolerance).collect();
        PoolReport {
            id: metadata.pool_id,
            name: metadata.name.to_string(),
            redundancy: metadata.geometry.redundancy(),
            columns: metadata.geometry.columns(),
            strip_bytes: metadata.geometry.strip_rows() * ROW_BYTES,
            has_checksums: metadata.has_checksums,
            raw_bytes: holding.map(|disk| disk.bytes).sum(),
            usable_bytes: metadata.total_extents() * extent_bytes,
            allocated_bytes: volumes.iter().map(|volume| volume.allocated_bytes).sum(),
            free_bytes: metadata.free_extents() * extent_bytes,
            fault_tolerance: match volumes.is_empty() {
                // New writes must be as redundant as the level allows.
                true => Some(empty.unwrap_or(0)),
                false => tolerances
                    .into_iter()
                    .try_fold(level, |least, tolerance| Some(least.min(tolerance?))),
            },
            lost_ranges: damaged_ranges(&metadata, PoolVolume::all_lost),
            unrepaired_ranges: damaged_ranges(&metadata, PoolVolume::all_unrepaired),
            unrepaired_truncated: metadata.unrepaired_range_count() >= MAX_UNREPAIRED_RANGES,
            scrub: self.scrub_report(),
            stale_extents: disks
                .iter()
                .filter(|disk| !disk.has_no_target)
                .map(|disk| disk.stale_extents)
                .sum(),
            disks,
            volumes,
            write_error: self.writer.fatal_error().map(|why| why.to_string()),
        }
    }

    fn disk_report(
        &self,
        metadata: &Metadata,
        id: MemberId,
        member: &PoolMember,
    ) -> PoolDiskReport {
        let state = match member.state {
            PoolMemberState::Active => PoolDiskState::Active,
            PoolMemberState::Spare => PoolDiskState::Spare,
            PoolMemberState::Draining => PoolDiskState::Draining,
            PoolMemberState::Detached { .. } => PoolDiskState::Detached,
        };
        let moves = matches!(state, PoolDiskState::Detached | PoolDiskState::Draining);
        let stale = match moves {
            true => u64::from(member.allocated_count()),
            false => stale_columns_on(metadata, id),
        };
        let counters = self.writer.counters(id);
        let count = |counter: fn(&DiskCounters) -> &AtomicU64| {
            counters.as_deref().map_or(0, |counters| counter(counters).load(Ordering::Relaxed))
        };
        let error_counts = self.error_counts_of(id, member);
        PoolDiskReport {
            errors_since_s: Some(error_counts.since_s).filter(|since| *since > 0),
            read_errors: error_counts.read_errors,
            write_errors: error_counts.write_errors,
            checksum_errors: error_counts.corrupt_reads,
            repaired_blocks: error_counts.repaired_rows,
            unrepairable_blocks: error_counts.unrecoverable_rows,
            is_slow: count(|counters| &counters.slow_on_cores) > 0,
            slow_episodes: count(|counters| &counters.slow_episodes),
            redirected_reads: count(|counters| &counters.hedged_reads),
            member_id: id.0,
            id: member.uuid,
            serial: member.serial.to_string(),
            path: self.writer.disk(id).map(|disk| disk.path().to_owned()),
            bytes: u64::from(member.physical_extents) * metadata.column_data_bytes(),
            extents: member.allocated_count(),
            extent_capacity: member.physical_extents,
            state,
            stale_extents: stale,
            has_no_target: moves
                && stale > 0
                && !metadata.can_relocate_from(id, &self.reserved_extents()),
        }
    }
}

/// Lost or unrepaired blocks of volumes, in order; adjacent ranges are merged.
fn damaged_ranges<'a, R>(
    metadata: &'a Metadata,
    rows: impl Fn(&'a PoolVolume) -> R,
) -> Vec<DamagedRange>
where
    R: Iterator<Item = (u32, Range<u32>)> + 'a,
{
    let mut all: Vec<DamagedRange> = Vec::new();
    for (_, volume) in metadata.volumes() {
        for (index, rows) in rows(volume) {
            let at = |row| {
                u64::from(index) * volume.extent_bytes() + u64::from(row) * u64::from(ROW_BYTES)
            };
            let (start, end) = (at(rows.start), at(rows.end));
            match all.last_mut() {
                Some(last)
                    if last.volume == volume.uuid
                        && last.offset_bytes + last.len_bytes == start =>
                {
                    last.len_bytes += end - start;
                }
                _ => all.push(DamagedRange {
                    volume: volume.uuid,
                    offset_bytes: start,
                    len_bytes: end - start,
                }),
            }
        }
    }
    all
}

/// Stale columns on a member.
fn stale_columns_on(metadata: &Metadata, id: MemberId) -> u64 {
    let counts = metadata.volumes().map(|(_, volume)| {
        let stale = volume.stale_columns().filter(|(index, column)| {
            let location = volume.extent(*index).and_then(|e| e.columns.get(usize::from(*column)));
            location.is_some_and(|location| location.member == id)
        });
        stale.count() as u64
    });
    counts.sum()
}
