//! What a node knows of its pools before it opens them: one file for each, `pools/NAME.json` in the
//! data directory. The authority on a pool is its disks; the file says that it exists, and where
//! its disks were seen.
//!
//! A file is written before the operation that it records, and replaced as a whole. Contents:
//! `docs/format/pool-record.md`.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ::cluster::record_file;
use api::PoolName;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the files.
const FORMAT: u32 = 2;

/// Largest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Most cores that may serve volumes of one pool.
pub const MAX_POOL_CORES: u16 = 16;

/// Stage of a pool's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolStage {
    /// Requested, and not acknowledged. After a crash its disks show whether it exists.
    Creating,
    /// It exists.
    Ready,
    /// Being deleted, and empty. Continues after a crash.
    Deleting,
}

/// Where a disk of a pool was seen last.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownDisk {
    /// Its path.
    pub path: PathBuf,
    /// Its serial number, once the pool has reported it.
    #[serde(deserialize_with = "crate::record::required_option")]
    pub serial: Option<String>,
    /// Whether the pool had detached it: opening does not wait for it.
    #[serde(rename = "out")]
    pub is_out: bool,
}

impl KnownDisk {
    /// A disk that is to be added to a pool.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, serial: None, is_out: false }
    }
}

/// A node's record of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRecord {
    /// Its identity, as its disks have it.
    pub id: Uuid,
    /// Its name.
    pub name: PoolName,
    /// Its stage.
    pub stage: PoolStage,
    /// Only cores below this number may serve volumes of it.
    pub max_cores: u16,
    /// Its disks.
    pub disks: Vec<KnownDisk>,
}

/// A record as it is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolRecordJson {
    format: u32,
    id: Uuid,
    name: PoolName,
    stage: PoolStage,
    #[serde(rename = "rings")]
    max_cores: u16,
    disks: Vec<KnownDisk>,
}

/// The part that all formats share.
#[derive(Deserialize)]
struct FormatHeader {
    format: u32,
}

/// A file that holds no valid record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct DamagedPoolRecord {
    /// Which file.
    pub path: PathBuf,
    /// The pool that its name denotes.
    pub name: Option<PoolName>,
    /// What is wrong with it.
    pub why: String,
}

/// The pool records of a node. Calls block on the disk of the data directory.
#[derive(Clone, Debug)]
pub struct PoolRecordFiles {
    directory: PathBuf,
}

impl PoolRecord {
    /// The paths where its disks were seen.
    #[must_use]
    pub fn paths(&self) -> Vec<PathBuf> {
        self.disks.iter().map(|d| d.path.clone()).collect()
    }

    fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let Self { id, name, stage, max_cores, disks } = self.clone();
        let text = PoolRecordJson { format: FORMAT, id, name, stage, max_cores, disks };
        let mut bytes = serde_json::to_vec_pretty(&text)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Parses the contents of a file.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let head: FormatHeader = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if head.format != FORMAT {
            let found = head.format;
            return Err(format!("it has format {found}, this program supports format {FORMAT}"));
        }
        let text: PoolRecordJson = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let PoolRecordJson { format: _, id, name, stage, max_cores, disks } = text;
        if id.is_nil() {
            return Err("the pool has no identity".to_owned());
        }
        if !(1..=MAX_POOL_CORES).contains(&max_cores) {
            return Err(format!("rings: {max_cores} is not 1 to {MAX_POOL_CORES}"));
        }
        if let Some(disk) = disks.iter().find(|d| !d.path.is_absolute()) {
            return Err(format!("{}: it is not an absolute path", disk.path.display()));
        }
        Ok(Self { id, name, stage, max_cores, disks })
    }
}

impl PoolRecordFiles {
    /// The records in a data directory.
    #[must_use]
    pub fn in_data_dir(data_dir: &Path) -> Self {
        Self { directory: data_dir.join("pools") }
    }

    fn path(&self, name: &PoolName) -> PathBuf {
        self.directory.join(format!("{name}.json"))
    }

    /// All valid records, by name, and the files that cannot be read.
    ///
    /// # Errors
    /// The system's error for the directory.
    pub fn read(&self) -> io::Result<(Vec<PoolRecord>, Vec<DamagedPoolRecord>)> {
        let entries = match fs::read_dir(&self.directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
            entries => entries?,
        };
        let mut paths = entries.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>()?;
        // Skip temporary files that a crash has left.
        paths.retain(|path| path.extension().is_some_and(|e| e == "json"));
        paths.sort();
        let (mut records, mut damaged) = (Vec::new(), Vec::new());
        for path in paths {
            let name = path.file_stem().and_then(|s| s.to_str()).and_then(|s| s.parse().ok());
            match read_one(&path, name.as_ref()) {
                Ok(record) if Some(&record.name) == name.as_ref() => records.push(record),
                Ok(record) => {
                    let why = format!("it is the record of pool {}", record.name);
                    damaged.push(DamagedPoolRecord { path, name, why });
                }
                Err(why) => damaged.push(DamagedPoolRecord { path, name, why }),
            }
        }
        Ok((records, damaged))
    }

    /// Writes a record, durably.
    ///
    /// # Errors
    /// The system's error; the file is then either unchanged or complete.
    pub fn write(&self, record: &PoolRecord) -> io::Result<()> {
        let bytes = record.to_bytes().map_err(io::Error::other)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        record_file::write(&self.path(&record.name), &seal_name(&record.name), &bytes)?;
        // The directory itself may be new.
        self.directory.parent().map_or(Ok(()), sync)
    }

    /// Removes the record of a pool, durably. Succeeds if there is none.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(&self, name: &PoolName) -> io::Result<()> {
        record_file::remove(&self.path(name))
    }
}

/// The name of a pool's file in its seal.
fn seal_name(name: &PoolName) -> String {
    format!("pools/{name}.json")
}

fn read_one(path: &Path, name: Option<&PoolName>) -> Result<PoolRecord, String> {
    let name = name.ok_or("its name is not a pool name")?;
    match record_file::read(path, &seal_name(name), MAX_BYTES) {
        Ok(Some(bytes)) => PoolRecord::parse(&bytes),
        Ok(None) => Err("it no longer exists".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Directories of the system's block devices and of their device nodes.
const SYS: &str = "/sys/class/block";
const DEV: &str = "/dev";

/// The paths where disks of a pool may be that were seen at `seen`: these paths and every block
/// device, none of them twice.
#[must_use]
pub fn candidate_disk_paths(seen: &[PathBuf]) -> Vec<PathBuf> {
    candidate_disk_paths_in(seen, Path::new(SYS), Path::new(DEV))
}

fn candidate_disk_paths_in(seen: &[PathBuf], sys: &Path, dev: &Path) -> Vec<PathBuf> {
    let mut all = seen.to_vec();
    // A disk listed under two names would look like two disks with one identity.
    let mut known: BTreeSet<_> = seen.iter().filter_map(|p| fs::canonicalize(p).ok()).collect();
    let Ok(devices) = fs::read_dir(sys) else { return all };
    let mut devices: Vec<_> = devices.flatten().map(|d| d.file_name()).collect();
    devices.sort();
    for name in devices {
        // The kernel replaces a slash in device names by an exclamation mark.
        let path = dev.join(name.to_string_lossy().replace('!', "/"));
        if is_unused_device(&sys.join(&name)) && known.insert(path.clone()) {
            all.push(path);
        }
    }
    all
}

/// Whether a device has a size and no other device lies over it: one of several paths to a
/// multipath disk is not a disk itself.
fn is_unused_device(device: &Path) -> bool {
    let size = fs::read_to_string(device.join("size")).unwrap_or_default();
    let holders = fs::read_dir(device.join("holders")).map_or(0, Iterator::count);
    size.trim().parse::<u64>().is_ok_and(|size| size > 0) && holders == 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::samples::pool_record;

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let data_dir = tempfile::tempdir().unwrap();
        let records = PoolRecordFiles::in_data_dir(data_dir.path());
        assert_eq!(records.read().unwrap(), (vec![], vec![]));
        records.remove(&"tank".parse().unwrap()).unwrap();
        let (tank, zoo) = (pool_record("tank"), PoolRecord { disks: vec![], ..pool_record("zoo") });
        for record in [&zoo, &tank, &tank] {
            records.write(record).unwrap();
        }
        let directory = data_dir.path().join("pools");
        // A crash has left this.
        fs::write(directory.join("tank.json.new"), "{").unwrap();
        assert_eq!(
            PoolRecordFiles::in_data_dir(data_dir.path()).read().unwrap(),
            (vec![tank.clone(), zoo], vec![])
        );
        let mode = fs::metadata(directory.join("tank.json")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let deleting = PoolRecord { stage: PoolStage::Deleting, ..tank };
        records.write(&deleting).unwrap();
        records.remove(&"zoo".parse().unwrap()).unwrap();
        assert_eq!(records.read().unwrap(), (vec![deleting], vec![]));
    }

    /// Later versions must read what version 1 wrote.
    #[test]
    fn the_golden_record_reads() {
        let golden = br#"{"format":2,"id":"00000000-0000-0000-0000-000000000007","name":"tank","stage":"ready",
            "rings":4,"disks":[{"path":"/dev/sda","serial":"S1","out":false},
                {"path":"/dev/sdb","serial":null,"out":true}]}"#;
        assert_eq!(PoolRecord::parse(golden).unwrap(), pool_record("tank"));
    }

    #[test]
    fn what_is_no_record_is_named_and_left() {
        let data_dir = tempfile::tempdir().unwrap();
        let records = PoolRecordFiles::in_data_dir(data_dir.path());
        records.write(&pool_record("tank")).unwrap();
        let path = records.path(&"tank".parse().unwrap());
        let good = record_file::read(&path, "pools/tank.json", MAX_BYTES).unwrap().unwrap();
        let good = String::from_utf8(good).unwrap();
        for (from, to, why) in [
            ("\"format\": 2", "\"format\": 1", "it has format 1"),
            ("\"rings\": 4", "\"rings\": 17", "1 to 16"),
            ("\"rings\": 4", "\"rings\": 4, \"more\": 1", "more"),
            ("/dev/sda", "sda", "not an absolute path"),
            ("\"ready\"", "\"odd\"", "odd"),
            ("\"tank\"", "\"zoo\"", "it is the record of pool zoo"),
            ("\"out\": false", "\"more\": false", "more"),
            ("7\"", "0\"", "no identity"),
            ("{", "", "expected"),
        ] {
            assert!(good.contains(from), "{from}");
            record_file::write(&path, "pools/tank.json", good.replacen(from, to, 1).as_bytes())
                .unwrap();
            let (read, damaged) = records.read().unwrap();
            assert_eq!((read.len(), damaged.len()), (0, 1), "{to}");
            let text = damaged[0].to_string();
            assert!(text.contains("pools/tank.json") && text.contains(why), "{text}");
            assert_eq!(damaged[0].name, Some("tank".parse().unwrap()));
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = PoolRecord::parse(&bytes);
        }
    }

    #[test]
    fn disks_are_looked_for_at_every_block_device_once() {
        let dir = tempfile::tempdir().unwrap();
        let (sys, dev) = (dir.path().join("sys"), dir.path().join("dev"));
        fs::create_dir_all(&dev).unwrap();
        let dev = fs::canonicalize(dev).unwrap();
        let device = |name: &str, size: &str, holder: Option<&str>| {
            fs::create_dir_all(sys.join(name).join("holders").join(holder.unwrap_or(""))).unwrap();
            fs::write(sys.join(name).join("size"), format!("{size}\n")).unwrap();
            fs::write(dev.join(name), "").unwrap();
        };
        device("sda", "100", None);
        device("sdb", "100", None);
        device("loop0", "0", None);
        // Two paths to one disk.
        device("sdc", "100", Some("dm-0"));
        device("sdd", "100", Some("dm-0"));
        device("dm-0", "100", None);
        let link = dev.join("by-id");
        symlink(dev.join("sda"), &link).unwrap();
        let gone = dir.path().join("gone");
        let found = candidate_disk_paths_in(&[link.clone(), gone.clone()], &sys, &dev);
        assert_eq!(found, [link, gone.clone(), dev.join("dm-0"), dev.join("sdb")]);
        assert_eq!(
            candidate_disk_paths_in(std::slice::from_ref(&gone), Path::new("/nowhere"), &dev),
            [gone]
        );
    }
}
