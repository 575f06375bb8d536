//! What a pool reports about itself.

use std::path::PathBuf;

use geometry::Redundancy;
use uuid::Uuid;

/// The state of a pool, as of now.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolReport {
    /// Its identity.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// The redundancy of its volumes.
    pub redundancy: Redundancy,
    /// Columns of an extent.
    pub columns: u16,
    /// Bytes of a strip.
    pub strip_bytes: u32,
    /// Whether its data have checksums.
    pub has_checksums: bool,
    /// Bytes of all disks that hold columns.
    pub raw_bytes: u64,
    /// How many of them clients may use at its redundancy.
    pub usable_bytes: u64,
    /// Bytes of clients that extents are allocated for.
    pub allocated_bytes: u64,
    /// Bytes of clients that can still be allocated.
    pub free_bytes: u64,
    /// How many more disks may fail, whichever they are, without data loss; `None` if data are lost
    /// already.
    pub fault_tolerance: Option<u32>,
    /// Its disks.
    pub disks: Vec<PoolDiskReport>,
    /// Its volumes.
    pub volumes: Vec<PoolVolumeReport>,
    /// Lost blocks of volumes: they read as errors until they are rewritten.
    pub lost_ranges: Vec<DamagedRange>,
    /// Blocks of volumes that a scrub could not repair: until they are rewritten it is unknown
    /// whether they are right.
    pub unrepaired_ranges: Vec<DamagedRange>,
    /// Whether there may be more of those than are recorded.
    pub unrepaired_truncated: bool,
    /// Columns that have to be rebuilt or moved, as far as there is space for them.
    pub stale_extents: u64,
    /// The current or last scrub.
    pub scrub: Option<PoolScrubReport>,
    /// Why nothing more can be written, if so.
    pub write_error: Option<String>,
}

/// Blocks of a volume that are lost, or could not be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedRange {
    /// The volume.
    pub volume: Uuid,
    /// Offset of the first of them in the volume.
    pub offset_bytes: u64,
    /// How many bytes there are.
    pub len_bytes: u64,
}

/// Progress or result of a scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolScrubReport {
    /// Whether it is still running.
    pub is_running: bool,
    /// Bytes of clients that have been read and compared.
    pub done_bytes: u64,
    /// How many there are in all.
    pub total_bytes: u64,
    /// Blocks of disks that were wrong or unreadable, and have been repaired.
    pub repaired_rows: u64,
    /// Blocks that disagree, so that it is unknown which are right; or that no disk returns.
    pub unrecoverable_rows: u64,
    /// When it ended, in seconds since the Unix epoch.
    pub ended_s: Option<u64>,
}

/// A disk of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolDiskReport {
    /// Its number in the pool.
    pub member_id: u16,
    /// Its identity in the pool.
    pub id: Uuid,
    /// The serial number of the disk.
    pub serial: String,
    /// Where it is; `None` if it is missing.
    pub path: Option<PathBuf>,
    /// Bytes of its physical extents.
    pub bytes: u64,
    /// Columns that lie on it.
    pub extents: u32,
    /// Columns that it can hold in all.
    pub extent_capacity: u32,
    /// Its role.
    pub state: PoolDiskState,
    /// Columns on it that have to be rebuilt or moved.
    pub stale_extents: u64,
    /// Whether there is no space for these elsewhere.
    pub has_no_target: bool,
    /// Since when its errors are counted, in seconds since the Unix epoch; `None` if that has not
    /// been recorded yet.
    pub errors_since_s: Option<u64>,
    /// Reads that failed since then.
    pub read_errors: u64,
    /// Writes and flushes that failed since.
    pub write_errors: u64,
    /// Blocks that were wrong or unreadable, and were rewritten since.
    pub repaired_blocks: u64,
    /// Blocks that could not be read, and were given up as lost since.
    pub unrepairable_blocks: u64,
    /// Reads since then that returned data other than what was written, where the pool has
    /// checksums; those that a client waited for also count as failed.
    pub checksum_errors: u64,
    /// Whether it lags far behind the others now, so that reads avoid it.
    pub is_slow: bool,
    /// How often it began to lag since the pool was opened.
    pub slow_episodes: u64,
    /// How many reads other disks have answered for it.
    pub redirected_reads: u64,
}

/// The role of a disk in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolDiskState {
    /// It holds columns.
    Active,
    /// It waits for another to fail.
    Spare,
    /// Its columns are moved to other disks.
    Draining,
    /// It failed, or is missing.
    Detached,
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
    /// How many more disks may fail, whichever they are; `None` if data of it are lost already.
    pub fault_tolerance: Option<u32>,
}
