//! What a node knows of its pools of disks before it has opened them: a file for each, `pools/NAME.json` in the data
//! directory. The truth about a pool is on its disks; this says which pools there are, and where to look for them.
//!
//! A file is written before anything is done that it tells of, and replaced whole. What is in it: `docs/format/pool-record.md`.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ::cluster::file;
use api::PoolName;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the files.
const FORMAT: u32 = 2;

/// Longest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Most cores that may have volumes of one pool.
pub const MAX_RINGS: u16 = 16;

/// How far the life of a pool has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolStage {
    /// It was asked for, and nobody was told that it exists. After a crash its disks say whether it does.
    Creating,
    /// It exists.
    Ready,
    /// It is to vanish, and holds nothing. After a crash that goes on.
    Deleting,
}

/// Where a disk of a pool was seen last.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeenDisk {
    /// Its path.
    pub path: PathBuf,
    /// Its serial number, once the pool has told it.
    #[serde(deserialize_with = "crate::record::present")]
    pub serial: Option<String>,
    /// Whether it was out: nobody waits for it.
    pub out: bool,
}

impl SeenDisk {
    /// One that is to come into a pool.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, serial: None, out: false }
    }
}

/// What a node knows of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRecord {
    /// Its identity, as its disks have it.
    pub id: Uuid,
    /// Its name.
    pub name: PoolName,
    /// How far its life has come.
    pub stage: PoolStage,
    /// How many cores may have volumes of it, the first ones.
    pub rings: u16,
    /// Its disks.
    pub disks: Vec<SeenDisk>,
}

/// A record as it is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    format: u32,
    id: Uuid,
    name: PoolName,
    stage: PoolStage,
    rings: u16,
    disks: Vec<SeenDisk>,
}

/// Only what every format has.
#[derive(Deserialize)]
struct Head {
    format: u32,
}

/// A file that is not one of a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct DamagedPool {
    /// Which file.
    pub path: PathBuf,
    /// The pool that it should tell of, by its name.
    pub name: Option<PoolName>,
    /// What is wrong with it.
    pub why: String,
}

/// The records of a node's pools. Calls wait for the disk of the data directory.
#[derive(Clone, Debug)]
pub struct PoolRecords {
    directory: PathBuf,
}

impl PoolRecord {
    /// Where its disks were seen.
    #[must_use]
    pub fn paths(&self) -> Vec<PathBuf> {
        self.disks.iter().map(|d| d.path.clone()).collect()
    }

    fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let Self { id, name, stage, rings, disks } = self.clone();
        let text = Text { format: FORMAT, id, name, stage, rings, disks };
        let mut bytes = serde_json::to_vec_pretty(&text)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// What a file says.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let head: Head = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if head.format != FORMAT {
            let found = head.format;
            return Err(format!("it has format {found}, this program knows format {FORMAT}"));
        }
        let text: Text = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let Text { format: _, id, name, stage, rings, disks } = text;
        if id.is_nil() {
            return Err("the pool has no identity".to_owned());
        }
        if !(1..=MAX_RINGS).contains(&rings) {
            return Err(format!("rings: {rings} is not 1 to {MAX_RINGS}"));
        }
        if let Some(disk) = disks.iter().find(|d| !d.path.is_absolute()) {
            return Err(format!("{}: it is no absolute path", disk.path.display()));
        }
        Ok(Self { id, name, stage, rings, disks })
    }
}

impl PoolRecords {
    /// Those in a data directory.
    #[must_use]
    pub fn of(data_dir: &Path) -> Self {
        Self { directory: data_dir.join("pools") }
    }

    fn path(&self, name: &PoolName) -> PathBuf {
        self.directory.join(format!("{name}.json"))
    }

    /// All of them, by name, and the files that cannot be read.
    ///
    /// # Errors
    /// What the system says of the directory.
    pub fn read(&self) -> io::Result<(Vec<PoolRecord>, Vec<DamagedPool>)> {
        let entries = match fs::read_dir(&self.directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
            entries => entries?,
        };
        let mut paths = entries.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>()?;
        // What a crash has left of a file that was to take another's place is no record.
        paths.retain(|path| path.extension().is_some_and(|e| e == "json"));
        paths.sort();
        let (mut records, mut damaged) = (Vec::new(), Vec::new());
        for path in paths {
            let name = path.file_stem().and_then(|s| s.to_str()).and_then(|s| s.parse().ok());
            match read_one(&path, name.as_ref()) {
                Ok(record) if Some(&record.name) == name.as_ref() => records.push(record),
                Ok(record) => {
                    let why = format!("it tells of pool {}", record.name);
                    damaged.push(DamagedPool { path, name, why });
                }
                Err(why) => damaged.push(DamagedPool { path, name, why }),
            }
        }
        Ok((records, damaged))
    }

    /// Writes a record, durably.
    ///
    /// # Errors
    /// What the system says; then the file is as it was, or as it is to be.
    pub fn write(&self, record: &PoolRecord) -> io::Result<()> {
        let bytes = record.to_bytes().map_err(io::Error::other)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        file::write(&self.path(&record.name), &sealed_as(&record.name), &bytes)?;
        // The directory itself may be new.
        self.directory.parent().map_or(Ok(()), sync)
    }

    /// Removes the record of a pool, durably. It may be gone already.
    ///
    /// # Errors
    /// What the system says.
    pub fn remove(&self, name: &PoolName) -> io::Result<()> {
        file::remove(&self.path(name))
    }
}

/// What the file of a pool is sealed as.
fn sealed_as(name: &PoolName) -> String {
    format!("pools/{name}.json")
}

fn read_one(path: &Path, name: Option<&PoolName>) -> Result<PoolRecord, String> {
    let name = name.ok_or("it has no name of a pool")?;
    match file::read(path, &sealed_as(name), MAX_BYTES) {
        Ok(Some(bytes)) => PoolRecord::parse(&bytes),
        Ok(None) => Err("it is gone".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Where the system shows its block devices, and where their nodes are.
const SYS: &str = "/sys/class/block";
const DEV: &str = "/dev";

/// Where disks of a pool may be that were seen at these paths: there, and at every block device. None is named twice.
#[must_use]
pub fn candidates(seen: &[PathBuf]) -> Vec<PathBuf> {
    candidates_in(seen, Path::new(SYS), Path::new(DEV))
}

fn candidates_in(seen: &[PathBuf], sys: &Path, dev: &Path) -> Vec<PathBuf> {
    let mut all = seen.to_vec();
    // By another name it would be there twice, and two disks with one identity are none.
    let mut known: BTreeSet<_> = seen.iter().filter_map(|p| fs::canonicalize(p).ok()).collect();
    let Ok(devices) = fs::read_dir(sys) else { return all };
    let mut devices: Vec<_> = devices.flatten().map(|d| d.file_name()).collect();
    devices.sort();
    for name in devices {
        // What stands in for a slash in the names of some drivers' devices.
        let path = dev.join(name.to_string_lossy().replace('!', "/"));
        if holds_something(&sys.join(&name)) && known.insert(path.clone()) {
            all.push(path);
        }
    }
    all
}

/// Whether a device has a size, and nothing lies over it that shows the same bytes: a path of several to one disk is
/// not one of its own.
fn holds_something(device: &Path) -> bool {
    let size = fs::read_to_string(device.join("size")).unwrap_or_default();
    let holders = fs::read_dir(device.join("holders")).map_or(0, Iterator::count);
    size.trim().parse::<u64>().is_ok_and(|size| size > 0) && holders == 0
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    pub(crate) fn record(name: &str) -> PoolRecord {
        let disk = |path: &str, serial: Option<&str>, out| SeenDisk {
            path: path.into(),
            serial: serial.map(Into::into),
            out,
        };
        PoolRecord {
            id: Uuid::from_u128(7),
            name: name.parse().unwrap(),
            stage: PoolStage::Ready,
            rings: 4,
            disks: vec![disk("/dev/sda", Some("S1"), false), disk("/dev/sdb", None, true)],
        }
    }

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let data_dir = tempfile::tempdir().unwrap();
        let records = PoolRecords::of(data_dir.path());
        assert_eq!(records.read().unwrap(), (vec![], vec![]));
        records.remove(&"tank".parse().unwrap()).unwrap();
        let (tank, zoo) = (record("tank"), PoolRecord { disks: vec![], ..record("zoo") });
        for record in [&zoo, &tank, &tank] {
            records.write(record).unwrap();
        }
        let directory = data_dir.path().join("pools");
        // A crash has left this.
        fs::write(directory.join("tank.json.new"), "{").unwrap();
        assert_eq!(
            PoolRecords::of(data_dir.path()).read().unwrap(),
            (vec![tank.clone(), zoo], vec![])
        );
        let mode = fs::metadata(directory.join("tank.json")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let deleting = PoolRecord { stage: PoolStage::Deleting, ..tank };
        records.write(&deleting).unwrap();
        records.remove(&"zoo".parse().unwrap()).unwrap();
        assert_eq!(records.read().unwrap(), (vec![deleting], vec![]));
    }

    /// What version 1 wrote, every later one reads.
    #[test]
    fn the_golden_record_reads() {
        let golden = br#"{"format":2,"id":"00000000-0000-0000-0000-000000000007","name":"tank","stage":"ready",
            "rings":4,"disks":[{"path":"/dev/sda","serial":"S1","out":false},
                {"path":"/dev/sdb","serial":null,"out":true}]}"#;
        assert_eq!(PoolRecord::parse(golden).unwrap(), record("tank"));
    }

    #[test]
    fn what_is_no_record_is_named_and_left() {
        let data_dir = tempfile::tempdir().unwrap();
        let records = PoolRecords::of(data_dir.path());
        records.write(&record("tank")).unwrap();
        let path = records.path(&"tank".parse().unwrap());
        let good = file::read(&path, "pools/tank.json", MAX_BYTES).unwrap().unwrap();
        let good = String::from_utf8(good).unwrap();
        for (from, to, why) in [
            ("\"format\": 2", "\"format\": 1", "it has format 1"),
            ("\"rings\": 4", "\"rings\": 17", "1 to 16"),
            ("\"rings\": 4", "\"rings\": 4, \"more\": 1", "more"),
            ("/dev/sda", "sda", "no absolute path"),
            ("\"ready\"", "\"odd\"", "odd"),
            ("\"tank\"", "\"zoo\"", "it tells of pool zoo"),
            ("\"out\": false", "\"more\": false", "more"),
            ("7\"", "0\"", "no identity"),
            ("{", "", "expected"),
        ] {
            assert!(good.contains(from), "{from}");
            file::write(&path, "pools/tank.json", good.replacen(from, to, 1).as_bytes()).unwrap();
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
        let found = candidates_in(&[link.clone(), gone.clone()], &sys, &dev);
        assert_eq!(found, [link, gone.clone(), dev.join("dm-0"), dev.join("sdb")]);
        assert_eq!(candidates_in(std::slice::from_ref(&gone), Path::new("/nowhere"), &dev), [gone]);
    }
}
