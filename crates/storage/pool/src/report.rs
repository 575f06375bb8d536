//! What there is to be told of a pool.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use geometry::{Level, ROW_BYTES};
use raid::Errors;
use uuid::Uuid;

use super::metadata::{MAX_UNREPAIRED, Member, MemberId, Metadata, Standing, Volume};
use super::owner::Pool;

/// A pool, as of now.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolReport {
    /// Its identity.
    pub id: Uuid,
    /// What it is called.
    pub name: String,
    /// How volumes bear the loss of disks.
    pub level: Level,
    /// Columns of an extent.
    pub columns: u16,
    /// Bytes of a strip.
    pub strip_bytes: u32,
    /// Whether what lies in it has checksums.
    pub checksums: bool,
    /// Bytes of all disks that hold pieces,
    pub raw_bytes: u64,
    /// and of them what clients may use at its level.
    pub usable_bytes: u64,
    /// Bytes of clients that extents are allocated for,
    pub allocated_bytes: u64,
    /// and that there is room for beside.
    pub free_bytes: u64,
    /// How many more disks may fail, whichever they are, without a byte being lost; none if something is lost already.
    pub bears: Option<u32>,
    /// Its disks.
    pub disks: Vec<PoolDisk>,
    /// Its volumes.
    pub volumes: Vec<PoolVolumeReport>,
    /// Blocks of volumes that are lost: they read as errors until they are written again.
    pub lost: Vec<LostRange>,
    /// Blocks of volumes that a scrub could not repair: it is not known whether they are right, until they are written again.
    pub unrepaired: Vec<LostRange>,
    /// Whether there may be more of those than are remembered.
    pub forgets_unrepaired: bool,
    /// Pieces that are not what they should be, or have to be moved, as far as there is room to put them.
    pub behind_pieces: u64,
    /// The scrub that is under way, or the last one.
    pub scrub: Option<ScrubReport>,
    /// Why nothing more can be written, if so.
    pub broken: Option<String>,
}

/// Blocks of a volume that are lost, or could not be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostRange {
    /// The volume.
    pub volume: Uuid,
    /// Byte of it at which they begin,
    pub start: u64,
    /// and how many bytes there are.
    pub bytes: u64,
}

/// What a scrub has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Whether it goes on.
    pub running: bool,
    /// Bytes of clients that have been read and compared,
    pub done_bytes: u64,
    /// of so many.
    pub all_bytes: u64,
    /// Blocks of disks that were wrong, or could not be read, and are right now.
    pub repaired: u64,
    /// Blocks that do not fit together, and of which nobody knows what is right; or that no disk gives back.
    pub unrepairable: u64,
    /// When it ended, in seconds since the Unix epoch.
    pub ended_s: Option<u64>,
}

/// A disk of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolDisk {
    /// Its number in the pool.
    pub member: u16,
    /// Its identity there.
    pub id: Uuid,
    /// The serial number of the disk.
    pub serial: String,
    /// Where it is; none if it is not there.
    pub path: Option<PathBuf>,
    /// Bytes of it that hold pieces, or could.
    pub bytes: u64,
    /// Pieces that lie on it.
    pub pieces: u32,
    /// Pieces that it has room for in all.
    pub room: u32,
    /// What it is there for.
    pub state: PoolDiskState,
    /// Pieces on it that are not what they should be, or have to be moved.
    pub behind_pieces: u64,
    /// Whether these have no room elsewhere.
    pub is_stranded: bool,
    /// Since when its errors are counted, in seconds since the Unix epoch; none if that has not been written down yet.
    pub errors_since_s: Option<u64>,
    /// Reads that failed since then.
    pub read_errors: u64,
    /// Writes and flushes that failed since.
    pub write_errors: u64,
    /// Blocks that were wrong or could not be read, and were written again since.
    pub repaired_blocks: u64,
    /// Blocks that could not be read, and were given up as lost since.
    pub unrepairable_blocks: u64,
    /// Reads of it since that gave what was not written, where the pool has checksums; those that somebody waited for are among
    /// those that failed.
    pub checksum_errors: u64,
    /// Whether it lags far behind the others now, so that reads go around it,
    pub slow: bool,
    /// how often it began to since the pool was opened,
    pub slow_times: u64,
    /// and how many reads others have answered for it.
    pub slow_reads: u64,
}

/// What a disk of a pool is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolDiskState {
    /// It holds pieces.
    In,
    /// It waits for another to fail.
    Spare,
    /// What it holds is moved to others.
    Leaving,
    /// It failed, or is not there.
    Out,
}

/// A volume of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolVolumeReport {
    /// Its identity.
    pub id: Uuid,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes that extents are allocated for.
    pub allocated_bytes: u64,
    /// How many more disks may fail, whichever they are; none if something of it is lost already.
    pub bears: Option<u32>,
}

impl Pool {
    /// What there is to be told.
    #[must_use]
    pub fn report(&self) -> PoolReport {
        let metadata = self.writer.metadata();
        let there = metadata.voters();
        let extent_bytes = metadata.shape.rows() * u64::from(ROW_BYTES);
        let volumes: Vec<PoolVolumeReport> = (metadata.volumes())
            .map(|(_, volume)| PoolVolumeReport {
                id: volume.uuid,
                bytes: volume.bytes,
                allocated_bytes: volume.extents().count() as u64 * volume.extent_bytes(),
                bears: metadata.bears(volume, there),
            })
            .collect();
        let disks: Vec<PoolDisk> = metadata
            .members()
            .map(|(id, member)| self.disk_report(&metadata, id, member))
            .collect();
        let holding = disks.iter().filter(|disk| disk.state != PoolDiskState::Spare);
        let out = disks.iter().filter(|disk| disk.state == PoolDiskState::Out).count();
        let level = u32::from(metadata.shape.level().bears());
        let empty = level.checked_sub(u32::try_from(out).unwrap_or(u32::MAX));
        let bears: Vec<Option<u32>> = volumes.iter().map(|volume| volume.bears).collect();
        PoolReport {
            id: metadata.pool,
            name: metadata.name.to_string(),
            level: metadata.shape.level(),
            columns: metadata.shape.columns(),
            strip_bytes: metadata.shape.strip_rows() * ROW_BYTES,
            checksums: metadata.checksums,
            raw_bytes: holding.map(|disk| disk.bytes).sum(),
            usable_bytes: metadata.extents_in_all() * extent_bytes,
            allocated_bytes: volumes.iter().map(|volume| volume.allocated_bytes).sum(),
            free_bytes: metadata.extents_free() * extent_bytes,
            bears: match volumes.is_empty() {
                // What would be written now.
                true => Some(empty.unwrap_or(0)),
                false => bears.into_iter().try_fold(level, |least, bears| Some(least.min(bears?))),
            },
            lost: metadata.bytes_of_all(Volume::all_lost),
            unrepaired: metadata.bytes_of_all(Volume::all_unrepaired),
            forgets_unrepaired: metadata.unrepaired_ranges() >= MAX_UNREPAIRED,
            scrub: self.scrub_report(),
            behind_pieces: disks
                .iter()
                .filter(|disk| !disk.is_stranded)
                .map(|disk| disk.behind_pieces)
                .sum(),
            disks,
            volumes,
            broken: self.writer.broken().map(|why| why.to_string()),
        }
    }

    fn disk_report(&self, metadata: &Metadata, id: MemberId, member: &Member) -> PoolDisk {
        let state = match member.standing {
            Standing::In => PoolDiskState::In,
            Standing::Spare => PoolDiskState::Spare,
            Standing::Leaving => PoolDiskState::Leaving,
            Standing::Out { .. } => PoolDiskState::Out,
        };
        let moves = matches!(state, PoolDiskState::Out | PoolDiskState::Leaving);
        let behind = match moves {
            true => u64::from(member.taken()),
            false => metadata.behind_on(id),
        };
        let errors = self.writer.errors(id);
        let count = |of: fn(&Errors) -> &AtomicU64| {
            errors.as_deref().map_or(0, |errors| of(errors).load(Ordering::Relaxed))
        };
        let all = self.errors_of(id, member);
        PoolDisk {
            errors_since_s: Some(all.since_s).filter(|since| *since > 0),
            read_errors: all.reads,
            write_errors: all.writes,
            checksum_errors: all.checksums,
            repaired_blocks: all.repaired,
            unrepairable_blocks: all.unrepairable,
            slow: count(|errors| &errors.slow_now) > 0,
            slow_times: count(|errors| &errors.slow_times),
            slow_reads: count(|errors| &errors.slow_reads),
            member: id.0,
            id: member.uuid,
            serial: member.serial.to_string(),
            path: self.writer.disk(id).map(|disk| disk.path().to_owned()),
            bytes: u64::from(member.units) * metadata.piece_bytes(),
            pieces: member.taken(),
            room: member.units,
            state,
            behind_pieces: behind,
            is_stranded: moves && behind > 0 && !metadata.has_room_for(id, &self.reserved()),
        }
    }
}

impl Metadata {
    /// Blocks of volumes that are lost, or not repaired, in order; those that touch are one range.
    fn bytes_of_all<'a, R>(&'a self, rows: impl Fn(&'a Volume) -> R) -> Vec<LostRange>
    where
        R: Iterator<Item = (u32, Range<u32>)> + 'a,
    {
        let mut all: Vec<LostRange> = Vec::new();
        for (_, volume) in self.volumes() {
            for (index, rows) in rows(volume) {
                let at = |row| {
                    u64::from(index) * volume.extent_bytes() + u64::from(row) * u64::from(ROW_BYTES)
                };
                let (start, end) = (at(rows.start), at(rows.end));
                match all.last_mut() {
                    Some(last)
                        if last.volume == volume.uuid && last.start + last.bytes == start =>
                    {
                        last.bytes += end - start;
                    }
                    _ => all.push(LostRange { volume: volume.uuid, start, bytes: end - start }),
                }
            }
        }
        all
    }

    /// Pieces on a member that are not what they should be.
    fn behind_on(&self, id: MemberId) -> u64 {
        let of = self.volumes().map(|(_, volume)| {
            let behind = volume.all_marks().filter(|(index, column)| {
                let piece = volume.extent(*index).and_then(|e| e.pieces.get(usize::from(*column)));
                piece.is_some_and(|piece| piece.member == id)
            });
            behind.count() as u64
        });
        of.sum()
    }
}
