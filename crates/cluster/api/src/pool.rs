//! Disk pools: requests and responses.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use crate::{InvalidValue, PoolName};

/// Most disks of a pool.
pub const MAX_DISKS: usize = 128;

/// A pool's RAID level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum RaidLevel {
    /// No redundancy: chunks striped over all disks.
    Raid0,
    /// Mirror copies.
    Raid1,
    /// Mirror copies, striped.
    Raid10,
    /// Single parity: one disk may fail.
    Raid5,
    /// Double parity: two disks may fail.
    Raid6,
}

impl From<RaidLevel> for u8 {
    fn from(raid: RaidLevel) -> Self {
        match raid {
            RaidLevel::Raid0 => 0,
            RaidLevel::Raid1 => 1,
            RaidLevel::Raid10 => 10,
            RaidLevel::Raid5 => 5,
            RaidLevel::Raid6 => 6,
        }
    }
}

impl TryFrom<u8> for RaidLevel {
    type Error = InvalidValue;

    fn try_from(level: u8) -> Result<Self, InvalidValue> {
        let all = [Self::Raid0, Self::Raid1, Self::Raid10, Self::Raid5, Self::Raid6];
        let found = all.into_iter().find(|raid| u8::from(*raid) == level);
        found.ok_or_else(|| InvalidValue::new("RAID level", &level.to_string(), ALLOWED_LEVELS))
    }
}

const ALLOWED_LEVELS: &str = "use 0, 1, 10, 5 or 6";

impl std::str::FromStr for RaidLevel {
    type Err = InvalidValue;

    fn from_str(s: &str) -> Result<Self, InvalidValue> {
        let level =
            s.parse::<u8>().map_err(|_| InvalidValue::new("RAID level", s, ALLOWED_LEVELS))?;
        Self::try_from(level)
    }
}

impl PartialSchema for RaidLevel {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::Integer)
            .description(Some("RAID level of a pool."))
            .enum_values(Some([0, 1, 10, 5, 6]))
            .into()
    }
}

impl ToSchema for RaidLevel {}

/// A pool to be created, of disks of the node that is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreatePoolRequest {
    /// Its name.
    pub name: PoolName,
    /// Its RAID level.
    pub raid: RaidLevel,
    /// How many copies there are of everything, of RAID 1 and 10: 2 (default) to 4.
    #[serde(default)]
    #[schema(minimum = 2, maximum = 4)]
    pub copies: Option<u8>,
    /// Over how many disks a stripe goes (default: over all; RAID 1: as many as there are copies).
    #[serde(default)]
    pub columns: Option<u16>,
    /// Chunk size: how many bytes of a stripe lie on one disk. 16, 32, 64 (default) or 128 KiB.
    #[serde(default = "default_chunk")]
    pub chunk_bytes: u32,
    /// Whether what lies in it has checksums: a disk that gives back what was not written is found
    /// out, and set right at every level but
    /// 0. It cannot be changed later.
    #[serde(default)]
    pub checksums: bool,
    /// The disks: absolute paths of block devices, or of files that have their size.
    #[schema(value_type = Vec<String>, min_items = 1, max_items = 128)]
    pub disks: Vec<PathBuf>,
    /// Disks that take the place of those that fail.
    #[serde(default)]
    #[schema(value_type = Vec<String>, max_items = 128)]
    pub spares: Vec<PathBuf>,
    /// Disks that are to be overwritten although they hold something: serial numbers, or the paths
    /// of those that have none.
    #[serde(default)]
    #[schema(max_items = 128)]
    pub overwrite: Vec<String>,
}

fn default_chunk() -> u32 {
    CreatePoolRequest::DEFAULT_CHUNK_BYTES
}

impl CreatePoolRequest {
    /// Default chunk size, in bytes.
    pub const DEFAULT_CHUNK_BYTES: u32 = 64 << 10;

    /// Checks that the request is consistent in itself.
    ///
    /// # Errors
    /// [`InvalidValue`] names the invalid part.
    pub fn check(&self) -> Result<(), InvalidValue> {
        check_chunk_size(self.chunk_bytes)?;
        let count = self.disks.len() + self.spares.len();
        if count > MAX_DISKS {
            let what = format!("a pool has at most {MAX_DISKS}");
            return Err(InvalidValue::new("number of disks", &count.to_string(), what));
        }
        let copied = matches!(self.raid, RaidLevel::Raid1 | RaidLevel::Raid10);
        if let Some(copies) = self.copies
            && !(copied && (2..=4).contains(&copies))
        {
            let what = "use 2 to 4 with RAID 1 and RAID 10, and none with other levels";
            return Err(InvalidValue::new("number of copies", &copies.to_string(), what));
        }
        self.check_columns()?;
        let (disks, least) = (self.disks.len(), usize::from(self.min_disks()));
        if disks < least {
            let raid = u8::from(self.raid);
            let what = format!("RAID {raid} needs at least {least} beside its spares");
            return Err(InvalidValue::new("number of disks", &disks.to_string(), what));
        }
        let all = || self.disks.iter().chain(&self.spares);
        let twice = all().enumerate().find(|(i, path)| all().skip(i + 1).any(|p| p == *path));
        if let Some((_, path)) = twice {
            let what = "name each disk once";
            return Err(InvalidValue::new("list of disks", &path.display().to_string(), what));
        }
        Ok(())
    }

    fn check_columns(&self) -> Result<(), InvalidValue> {
        let Some(columns) = self.columns else { return Ok(()) };
        let refuse =
            |what: String| Err(InvalidValue::new("number of columns", &columns.to_string(), what));
        let (least, copies) = (self.min_columns(), u16::from(self.mirror_copies()));
        if self.raid == RaidLevel::Raid1 && columns != copies {
            return refuse(format!(
                "RAID 1 has as many columns as copies, {copies}; RAID 10 has more"
            ));
        }
        if columns < least {
            return refuse(format!("RAID {} needs at least {least}", u8::from(self.raid)));
        }
        if self.raid == RaidLevel::Raid10 && columns % copies != 0 {
            return refuse(format!("use a multiple of {copies}, the number of copies"));
        }
        if usize::from(columns) > self.disks.len() {
            return refuse(format!(
                "use at most {}, the number of disks beside spares",
                self.disks.len()
            ));
        }
        Ok(())
    }

    /// The number of mirror copies: 1 for levels without mirroring.
    #[must_use]
    pub fn mirror_copies(&self) -> u8 {
        match self.raid {
            RaidLevel::Raid1 | RaidLevel::Raid10 => self.copies.unwrap_or(2),
            RaidLevel::Raid0 | RaidLevel::Raid5 | RaidLevel::Raid6 => 1,
        }
    }

    fn min_columns(&self) -> u16 {
        let copies = u16::from(self.mirror_copies());
        match self.raid {
            RaidLevel::Raid0 => 1,
            RaidLevel::Raid1 => copies,
            RaidLevel::Raid10 => 2 * copies,
            RaidLevel::Raid5 => 3,
            RaidLevel::Raid6 => 4,
        }
    }

    fn min_disks(&self) -> u16 {
        self.min_columns().max(self.columns.unwrap_or(0))
    }
}

/// Checks a chunk size.
///
/// # Errors
/// [`InvalidValue`] says what is allowed.
pub fn check_chunk_size(bytes: u32) -> Result<(), InvalidValue> {
    if bytes.is_power_of_two() && (16 << 10..=128 << 10).contains(&bytes) {
        return Ok(());
    }
    let given = crate::Size(bytes.into()).to_string();
    Err(InvalidValue::new("chunk size", &given, "use 16K, 32K, 64K or 128K"))
}

/// Disks to be added to a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddDisks {
    /// The disks: absolute paths.
    #[schema(value_type = Vec<String>, min_items = 1, max_items = 128)]
    pub disks: Vec<PathBuf>,
    /// Whether they are spares.
    #[serde(default)]
    pub spare: bool,
    /// Disks that are to be overwritten although they hold something: serial numbers, or the paths
    /// of those that have none.
    #[serde(default)]
    #[schema(max_items = 128)]
    pub overwrite: Vec<String>,
}

/// A disk to be taken out of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveDisk {
    /// Its serial number, its path, or its number in the pool.
    pub disk: String,
    /// Cancels a removal that is under way: the disk stays. What has been moved to other disks
    /// already stays there.
    #[serde(default)]
    pub cancel: bool,
}

/// What is to be forgotten of the errors of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClearErrors {
    /// The disk whose errors are counted anew: its serial number, its path, or its number in the
    /// pool. None: all disks; then which blocks scrubs could not repair is forgotten as well.
    #[serde(default)]
    pub disk: Option<String>,
}

/// A disk to be replaced by another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaceDisk {
    /// The old one: its serial number, its path, or its number in the pool.
    pub disk: String,
    /// The new one: an absolute path.
    #[schema(value_type = String)]
    pub with: PathBuf,
    /// The new one's serial number, or its path if it has none, if it is to be overwritten although
    /// it holds something.
    #[serde(default)]
    #[schema(max_items = 128)]
    pub overwrite: Vec<String>,
}

/// Open a pool without disks that are gone for good, or take it over from a node that is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenPoolRequest {
    /// Serial numbers, paths or numbers of the disks that are gone; none only if the pool is taken
    /// over.
    #[serde(default)]
    #[schema(max_items = 128)]
    pub without: Vec<String>,
    /// Take its disks from the node that had them last and will never use them again. Refused while
    /// that node uses them.
    #[serde(default)]
    pub take_over: bool,
    /// The pool's name once more: what only the disks hold that are gone is lost, and they never
    /// come back into it; and if another node should use a pool that is taken over, it stops
    /// serving there.
    pub confirm: PoolName,
}

/// What state a pool is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum PoolState {
    /// It serves, with the full fault tolerance of its level.
    Online,
    /// It serves, with less fault tolerance than its level provides.
    Degraded,
    /// It serves, and data of detached or draining disks is being written to other disks.
    Rebuilding,
    /// It does not serve.
    Offline {
        /// Why not.
        reason: String,
    },
    /// It is being created.
    Creating,
    /// It is being opened: the node is starting.
    Opening,
    /// It is being deleted.
    Deleting,
}

/// Bytes of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolCapacity {
    /// Of all disks that hold data.
    pub raw_bytes: u64,
    /// That volumes may have of them, at the pool's level.
    pub usable_bytes: u64,
    /// That volumes have.
    pub allocated_bytes: u64,
    /// That there is still room for.
    pub free_bytes: u64,
    /// What volumes may have, in percent of all that there is.
    pub efficiency_percent: u8,
}

/// What a disk is in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskState {
    /// Active: it holds data.
    Active,
    /// A spare: it replaces a disk that fails.
    Spare,
    /// Draining: its extents are being moved to other disks.
    Draining,
    /// Detached: it has failed or is missing.
    Detached,
    /// Unknown, because the pool is not open.
    Unknown,
}

/// A disk of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolDisk {
    /// Its number in the pool, while that is open.
    pub member: Option<u16>,
    /// Its serial number, where that is known.
    pub serial: Option<String>,
    /// Where it was found; none if it is not there.
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// What it is in the pool.
    pub state: DiskState,
    /// Its size in bytes, while the pool is open.
    pub size_bytes: Option<u64>,
    /// Extents of volumes on it.
    pub allocated_extents: u32,
    /// Extents that it has space for, including the allocated ones.
    pub total_extents: u32,
    /// Extents on it that must still be rebuilt, or moved to other disks.
    pub stale_extents: u64,
    /// Since when its errors are counted, over restarts of the node, in seconds since the Unix
    /// epoch.
    #[serde(default)]
    pub errors_since_s: Option<u64>,
    /// Wrong or unreadable blocks of it that were written again.
    #[serde(default)]
    pub repaired_blocks: u64,
    /// Unreadable blocks of it that were given up as lost.
    #[serde(default)]
    pub unrepairable_blocks: u64,
    /// Reads that have failed.
    pub read_errors: u64,
    /// Writes that have failed.
    pub write_errors: u64,
    /// Reads that gave what was not written, where the pool has checksums. Those that a
    /// request waited for are among those that have failed.
    pub checksum_errors: u64,
    /// Whether it is far slower than the other disks, so that reads avoid it.
    pub slow: bool,
    /// How often it became slow since the pool was opened.
    pub slow_episodes: u64,
    /// Reads that other disks answered because this disk was slow.
    pub redirected_reads: u64,
    /// The next step, where there is one.
    pub hint: Option<String>,
}

/// Progress of a rebuild, or of moving data off a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rebuild {
    /// Extents that remain.
    pub remaining_extents: u64,
    /// Extents in total.
    pub total_extents: u64,
    /// Seconds until it is done, where that can be told.
    pub eta_s: Option<u64>,
}

/// Progress of a scrub, which reads and compares all of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Scrub {
    /// Whether it is under way; else this is the last one.
    pub running: bool,
    /// Bytes read.
    pub done_bytes: u64,
    /// Bytes to read in total.
    pub total_bytes: u64,
    /// Rows (4 KiB of each disk of a stripe) that were wrong and have been repaired.
    pub repaired_rows: u64,
    /// Rows that cannot be repaired.
    pub unrecoverable_rows: u64,
    /// When it ended, in seconds since the Unix epoch.
    #[serde(default)]
    pub ended_s: Option<u64>,
}

/// Blocks of a volume that are lost, or could not be repaired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LostBlocks {
    /// Name of the volume, or its identity if the node does not know it.
    pub volume: String,
    /// Byte of the volume at which they begin. None where they are of the image's own label.
    pub start_bytes: Option<u64>,
    /// How many bytes there are.
    pub bytes: u64,
}

/// A pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// Its name.
    pub name: PoolName,
    /// Its identity, the same for as long as it exists.
    pub id: Uuid,
    /// State it is in.
    pub state: PoolState,
    /// Its level in words, such as "RAID 5"; none while it is not open.
    pub level: Option<String>,
    /// Over how many disks a stripe goes.
    pub columns: Option<u16>,
    /// Chunk size: how many bytes of a stripe lie on one disk.
    pub chunk_bytes: Option<u32>,
    /// Whether what lies in it has checksums.
    pub checksums: Option<bool>,
    /// Its capacity, while it is open.
    pub capacity: Option<PoolCapacity>,
    /// How many more disks may fail, whichever they are, without loss of data. None while the pool
    /// is not open, or if data is lost already.
    pub fault_tolerance: Option<u32>,
    /// Its disks. While it is not open: those that it had, as far as the node knows.
    pub disks: Vec<PoolDisk>,
    /// Names of the volumes that lie in it.
    pub volumes: Vec<String>,
    /// Names of the volumes in it that have lost data.
    pub damaged_volumes: Vec<String>,
    /// Blocks of volumes that cannot be read from any disk. Reads of them fail until they are
    /// rewritten.
    #[serde(default)]
    pub lost_blocks: Vec<LostBlocks>,
    /// Blocks of volumes that a scrub could not repair. They may be wrong until they are rewritten.
    #[serde(default)]
    pub unrepaired_blocks: Vec<LostBlocks>,
    /// How far a rebuild is, while there is one.
    pub rebuild: Option<Rebuild>,
    /// The scrub that is under way, or the last one.
    pub scrub: Option<Scrub>,
}

/// The pools of a node, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolList {
    /// The pools.
    pub pools: Vec<Pool>,
    /// Records of further pools that cannot be read, and why.
    #[serde(default)]
    pub unreadable_records: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(raid: u8, disks: usize) -> CreatePoolRequest {
        let disks = (0..disks).map(|n| format!("/dev/d{n}").into()).collect();
        CreatePoolRequest {
            name: "tank".parse().unwrap(),
            raid: raid.try_into().unwrap(),
            copies: None,
            columns: None,
            chunk_bytes: CreatePoolRequest::DEFAULT_CHUNK_BYTES,
            checksums: false,
            disks,
            spares: Vec::new(),
            overwrite: Vec::new(),
        }
    }

    #[test]
    fn a_name_a_level_and_disks_are_enough() {
        let json = r#"{"name":"tank","raid":5,"disks":["/dev/d0","/dev/d1","/dev/d2"]}"#;
        let read: CreatePoolRequest = serde_json::from_str(json).unwrap();
        assert_eq!(read, ask(5, 3));
        let again = serde_json::from_str(&serde_json::to_string(&read).unwrap()).unwrap();
        assert_eq!(read, again);
        for bad in [r#""raid":4"#, r#""raid":"5""#, r#""raid":5,"level":5"#] {
            let json = json.replace(r#""raid":5"#, bad);
            assert!(serde_json::from_str::<CreatePoolRequest>(&json).is_err(), "{json}");
        }
    }

    #[test]
    fn every_level_says_how_many_disks_it_takes() {
        for (raid, least) in [(0, 1), (1, 2), (10, 4), (5, 3), (6, 4)] {
            ask(raid, least).check().unwrap();
            let refused = ask(raid, least - 1).check().unwrap_err().to_string();
            assert!(refused.contains(&format!("at least {least}")), "{refused}");
        }
        let three = CreatePoolRequest { copies: Some(3), ..ask(10, 6) };
        three.check().unwrap();
        assert!(CreatePoolRequest { copies: Some(4), ..ask(10, 6) }.check().is_err());
        assert!(CreatePoolRequest { spares: vec!["/dev/s".into()], ..ask(5, 2) }.check().is_err());
    }

    #[test]
    fn inconsistent_requests_are_refused() {
        let refused = |request: CreatePoolRequest, what: &str| {
            let why = request.check().unwrap_err().to_string();
            assert!(why.contains(what), "{why}");
        };
        refused(CreatePoolRequest { copies: Some(2), ..ask(5, 3) }, "number of copies");
        refused(CreatePoolRequest { copies: Some(5), ..ask(1, 6) }, "number of copies");
        refused(CreatePoolRequest { columns: Some(3), ..ask(1, 6) }, "RAID 10");
        refused(CreatePoolRequest { columns: Some(2), ..ask(5, 6) }, "at least 3");
        refused(CreatePoolRequest { columns: Some(5), ..ask(10, 6) }, "a multiple of 2");
        refused(
            CreatePoolRequest { columns: Some(7), ..ask(6, 6) },
            "at most 6, the number of disks",
        );
        refused(CreatePoolRequest { chunk_bytes: 48 << 10, ..ask(5, 6) }, "64K");
        refused(CreatePoolRequest { chunk_bytes: 8 << 10, ..ask(5, 6) }, "64K");
        refused(
            CreatePoolRequest { spares: vec!["/dev/d1".into()], ..ask(5, 6) },
            "each disk once",
        );
        refused(ask(5, MAX_DISKS + 1), "at most 128");
        CreatePoolRequest { columns: Some(4), ..ask(10, 6) }.check().unwrap();
        CreatePoolRequest { columns: Some(2), ..ask(1, 6) }.check().unwrap();
    }
}
