//! Protects a data directory from being mistaken for another one.
//!
//! `node.json` in the data directory names its node and says that it has records. A small file
//! outside the directory, the anchor, says the same. So the node does not take an unmounted
//! directory for an empty node, another node's directory for its own, or an old copy for the
//! current one. The first start finds neither file and creates both. Contents:
//! `docs/format/store.md`.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use cluster::incarnations::ProcessIncarnation;
use cluster::record_file::{self, ReadError};
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::plural;

/// Version of both files.
const FORMAT: u32 = 1;

/// Largest file that is read, in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The file in the data directory, and its name in the seal.
const NODE_FILE: &str = "node.json";

/// The process that held the node when this one was started; in the data directory of the copy.
const ACTIVE_PROCESS_FILE: &str = "other-life.json";

/// The anchor's name in the seal.
const ANCHOR_SEAL_NAME: &str = "anchor";

/// Suffix of the name of an anchor directory.
const ANCHOR_DIR_SUFFIX: &str = ".anchor";

/// Where the records of a node are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordsLocation {
    /// In its own store, which must be there.
    #[serde(rename = "store")]
    OwnStore,
    /// In its cluster's store; `cluster.json` must be there.
    #[serde(rename = "cluster")]
    ClusterStore,
    /// Nowhere: it left its cluster, and a new store may be created.
    None,
}

/// The contents of both files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnchorRecord {
    format: u32,
    /// Random; chosen at the node's first start.
    #[serde(rename = "id")]
    node_id: Uuid,
    /// Number of starts. Written to the data directory first, so the anchor's is never ahead.
    starts: u64,
    /// Where its records were.
    #[serde(rename = "records")]
    records_location: RecordsLocation,
    /// The revision of its own store at the last start; 0 without one.
    revision: u64,
}

/// Why a data directory is refused. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum AnchorError {
    /// Something is missing from it, or it is another one.
    #[error(
        "data_dir {}: {what}\nIf its file system is not mounted, mount it and start again. If it \
         was lost, restore it (docs/guides/administration.md, section \"When the data directory is \
         not what it was\"). To use the directory as it is: windrose node accept-data-dir",
        path.display()
    )]
    Mismatch {
        /// The data directory.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// One of the files is damaged.
    #[error(
        "{}: {why}\nRestore it from a backup; or, if the data directory is the right one: windrose node accept-data-dir",
        path.display()
    )]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A system call failed.
    #[error("{}: {why}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
}

/// What was found in a data directory and its anchor.
#[derive(Clone, Copy, Debug, Default)]
struct FilesFound {
    anchor: Option<AnchorRecord>,
    node_record: Option<AnchorRecord>,
    has_store: bool,
    has_cluster: bool,
}

/// A data directory that passed the check.
#[derive(Debug)]
pub struct Anchor {
    data_dir: PathBuf,
    path: PathBuf,
    files: FilesFound,
    record: AnchorRecord,
}

/// The anchor file of the data directory at `data_dir`: in `anchor_dir`, else in the directory that
/// the service manager names, else beside the data directory.
pub fn anchor_path(data_dir: &Path, anchor_dir: Option<&Path>) -> PathBuf {
    let state_directory = std::env::var_os("STATE_DIRECTORY");
    anchor_path_in(
        data_dir,
        anchor_dir,
        state_directory.as_deref().and_then(std::ffi::OsStr::to_str),
    )
}

fn anchor_path_in(
    data_dir: &Path,
    anchor_dir: Option<&Path>,
    state_directory: Option<&str>,
) -> PathBuf {
    let state_directory =
        state_directory.unwrap_or_default().split(':').find(|dir| dir.ends_with(ANCHOR_DIR_SUFFIX));
    let beside = || {
        let mut beside: OsString = data_dir.as_os_str().to_owned();
        beside.push(ANCHOR_DIR_SUFFIX);
        PathBuf::from(beside)
    };
    let directory = anchor_dir.map(Path::to_owned).or_else(|| state_directory.map(PathBuf::from));
    let name = data_dir.to_string_lossy();
    let escaped: String = name.trim_matches('/').chars().fold(String::new(), |name, c| match c {
        '/' => name + "-",
        '-' => name + "%2d",
        '%' => name + "%25",
        c => name + &c.to_string(),
    });
    directory.unwrap_or_else(beside).join(format!("{escaped}.json"))
}

fn read(path: &Path, name: &str) -> Result<Option<AnchorRecord>, AnchorError> {
    let damaged = |why: String| AnchorError::Damaged { path: path.to_owned(), why };
    let bytes = match record_file::read(path, name, MAX_BYTES) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(None),
        Err(ReadError::Damaged(why)) => return Err(damaged(why)),
        // A component of the path is not a directory.
        Err(ReadError::Io(e)) if e.kind() == io::ErrorKind::NotADirectory => return Ok(None),
        Err(ReadError::Io(why)) => {
            return Err(AnchorError::Io { path: path.to_owned(), why });
        }
    };
    let record: AnchorRecord =
        serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
    if record.format != FORMAT {
        let found = record.format;
        return Err(damaged(format!(
            "it has format {found}, this version supports format {FORMAT}"
        )));
    }
    Ok(Some(record))
}

fn write(path: &Path, name: &str, record: &AnchorRecord) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(record).map_err(io::Error::other)?;
    bytes.push(b'\n');
    record_file::write(path, name, &bytes)
}

/// The record that the next start continues from; an error if the files contradict each other.
fn check_consistency(found: &FilesFound) -> Result<Option<AnchorRecord>, String> {
    let FilesFound { anchor, node_record: node, has_store, has_cluster } = *found;
    let record = match (anchor, node) {
        (None, None) => return Ok(None),
        (None, Some(node)) => node,
        (Some(anchor), None) => {
            let id = anchor.node_id;
            return Err(if has_store || has_cluster {
                format!(
                    "it should belong to node {id}, and has records, but its {NODE_FILE} is missing"
                )
            } else {
                format!("it should belong to node {id}, but contains none of its records")
            });
        }
        (Some(anchor), Some(node)) if anchor.node_id != node.node_id => {
            return Err(format!(
                "it should belong to node {}, but belongs to node {}",
                anchor.node_id, node.node_id
            ));
        }
        (Some(anchor), Some(node)) if node.starts < anchor.starts => {
            return Err(format!(
                "it is an older copy: it records that its node was started {}, but by now it was started {}",
                plural(node.starts, "time"),
                plural(anchor.starts, "time")
            ));
        }
        (Some(_), Some(node)) => node,
    };
    match record.records_location {
        RecordsLocation::OwnStore if !has_store && !has_cluster => {
            Err("its store.redb is missing, which contains the records of the node's volumes"
                .to_owned())
        }
        RecordsLocation::ClusterStore if !has_cluster => {
            Err("its cluster.json is missing, which contains the node's cluster membership"
                .to_owned())
        }
        _ => Ok(Some(record)),
    }
}

fn read_files(data_dir: &Path, anchor: &Path) -> Result<FilesFound, AnchorError> {
    let is_there = |name: &str| {
        let path = data_dir.join(name);
        match fs::symlink_metadata(&path) {
            Ok(_) => Ok(true),
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                Ok(false)
            }
            Err(why) => Err(AnchorError::Io { path, why }),
        }
    };
    Ok(FilesFound {
        anchor: read(anchor, ANCHOR_SEAL_NAME)?,
        node_record: read(&data_dir.join(NODE_FILE), NODE_FILE)?,
        has_store: is_there("store.redb")?,
        has_cluster: is_there("cluster.json")?,
    })
}

impl Anchor {
    /// Checks that the data directory at `data_dir` is the one used before. Changes nothing.
    pub fn check(data_dir: &Path, anchor_dir: Option<&Path>) -> Result<Self, AnchorError> {
        let path = anchor_path(data_dir, anchor_dir);
        let found = read_files(data_dir, &path)?;
        let mismatch = |what| AnchorError::Mismatch { path: data_dir.to_owned(), what };
        let record = check_consistency(&found).map_err(mismatch)?.unwrap_or_else(|| AnchorRecord {
            format: FORMAT,
            node_id: Uuid::new_v4(),
            starts: 0,
            records_location: RecordsLocation::None,
            revision: 0,
        });
        Ok(Self { data_dir: data_dir.to_owned(), path, files: found, record })
    }

    /// Whether the node's own store must already exist.
    pub fn requires_own_store(&self) -> bool {
        self.record.records_location == RecordsLocation::OwnStore
    }

    /// Refuses a store older than the one used last.
    pub fn check_revision(&self, revision: u64) -> Result<(), AnchorError> {
        if self.requires_own_store() && revision < self.record.revision {
            let what = format!(
                "its store.redb is an older copy: it is at revision {revision}, but was at \
                 revision {} before",
                self.record.revision
            );
            return Err(AnchorError::Mismatch { path: self.data_dir.clone(), what });
        }
        Ok(())
    }

    /// Records a start with records of this kind in both files. Returns what is wrong with the
    /// anchor, which does not stop the node; nor does a full file system, once the files exist.
    pub fn record_start(
        &self,
        records: RecordsLocation,
        revision: u64,
    ) -> Result<Option<String>, AnchorError> {
        let starts = self.record.starts.saturating_add(1);
        let record = AnchorRecord { starts, records_location: records, revision, ..self.record };
        let node = self.data_dir.join(NODE_FILE);
        match write(&node, NODE_FILE, &record) {
            Ok(()) => {}
            Err(e)
                if self.files.node_record.is_some_and(|node| node.records_location == records) =>
            {
                tracing::warn!(path = %node.display(), error = %e, "cannot update the node record; keeping the old one");
                return Ok(self.files.anchor.is_none().then(|| e.to_string()));
            }
            Err(why) => return Err(AnchorError::Io { path: node, why }),
        }
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        let written = created.and_then(|()| write(&self.path, ANCHOR_SEAL_NAME, &record));
        Ok(written.err().map(|e| format!("{}: {e}", self.path.display())))
    }
}

/// Records that the node in `data_dir` has no records any more, because it leaves its cluster.
pub(crate) fn clear_records_location(data_dir: &Path) -> io::Result<()> {
    let path = data_dir.join(NODE_FILE);
    match read(&path, NODE_FILE) {
        Ok(Some(record)) => write(
            &path,
            NODE_FILE,
            &AnchorRecord { records_location: RecordsLocation::None, ..record },
        ),
        Ok(None) => Ok(()),
        Err(e) => Err(io::Error::other(e.to_string())),
    }
}

/// Records that another process holds the node: this data directory is a copy, unusable until an
/// operator accepts it.
pub(crate) fn record_active_process(data_dir: &Path, other: &ProcessIncarnation) -> io::Result<()> {
    let bytes = serde_json::to_vec(other).map_err(io::Error::other)?;
    record_file::write(&data_dir.join(ACTIVE_PROCESS_FILE), ACTIVE_PROCESS_FILE, &bytes)
}

/// The process that held the node when this data directory was found to be a copy.
pub(crate) fn active_process(data_dir: &Path) -> Result<Option<ProcessIncarnation>, AnchorError> {
    let path = data_dir.join(ACTIVE_PROCESS_FILE);
    let damaged = |why: String| AnchorError::Damaged { path: path.clone(), why };
    match record_file::read(&path, ACTIVE_PROCESS_FILE, MAX_BYTES) {
        Ok(None) => Ok(None),
        Ok(Some(bytes)) => {
            serde_json::from_slice(&bytes).map(Some).map_err(|e| damaged(e.to_string()))
        }
        Err(ReadError::Damaged(why)) => Err(damaged(why)),
        Err(ReadError::Io(why)) => Err(AnchorError::Io { path, why }),
    }
}

/// What is wrong with a data directory that is to be accepted; `None` if nothing is.
///
/// # Errors
/// [`AnchorError`] if the files cannot be read at all.
pub fn describe_mismatch(
    data_dir: &Path,
    anchor_dir: Option<&Path>,
) -> Result<Option<String>, AnchorError> {
    match Anchor::check(data_dir, anchor_dir) {
        Ok(_) => match active_process(data_dir) {
            Ok(other) => Ok(other.map(|other| {
                format!(
                    "it is a copy of the data directory of a node that ran on {}; only one of them \
                     may run",
                    other.describe_location()
                )
            })),
            Err(e) => Ok(Some(e.to_string())),
        },
        Err(AnchorError::Mismatch { what, .. }) => Ok(Some(what)),
        Err(AnchorError::Damaged { path, why }) => Ok(Some(format!("{}: {why}", path.display()))),
        Err(refused @ AnchorError::Io { .. }) => Err(refused),
    }
}

/// Makes the next start accept the data directory as it is. No node may use it meanwhile.
///
/// # Errors
/// [`AnchorError::Io`].
pub fn accept_data_dir(data_dir: &Path, anchor_dir: Option<&Path>) -> Result<(), AnchorError> {
    for path in [
        anchor_path(data_dir, anchor_dir),
        data_dir.join(NODE_FILE),
        data_dir.join(ACTIVE_PROCESS_FILE),
    ] {
        if path.parent().is_some_and(Path::is_dir) {
            record_file::remove(&path).map_err(|why| AnchorError::Io { path, why })?;
        }
    }
    Ok(())
}

/// Whether a node uses the data directory now.
///
/// # Errors
/// What the system says.
pub fn is_in_use(data_dir: &Path) -> io::Result<bool> {
    let lock = match File::open(data_dir.join("lock")) {
        Ok(lock) => lock,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    match lock.try_lock() {
        Ok(()) => Ok(false),
        Err(fs::TryLockError::WouldBlock) => Ok(true),
        Err(fs::TryLockError::Error(e)) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(id: u128, starts: u64, records: RecordsLocation) -> AnchorRecord {
        AnchorRecord {
            format: FORMAT,
            node_id: Uuid::from_u128(id),
            starts,
            records_location: records,
            revision: 0,
        }
    }

    /// Starts as a node does; returns its decision.
    fn start(data_dir: &Path, anchor_dir: &Path) -> Result<Anchor, String> {
        let anchor = Anchor::check(data_dir, Some(anchor_dir)).map_err(|e| e.to_string())?;
        fs::create_dir_all(data_dir).unwrap();
        if !anchor.requires_own_store() {
            fs::write(data_dir.join("store.redb"), "a store").unwrap();
        }
        assert_eq!(anchor.record_start(RecordsLocation::OwnStore, 3).unwrap(), None);
        Ok(anchor)
    }

    fn refused(data_dir: &Path, anchor_dir: &Path) -> String {
        let why = start(data_dir, anchor_dir).unwrap_err();
        assert!(why.contains("windrose node accept-data-dir"), "{why}");
        why
    }

    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }

    #[test]
    fn a_data_directory_that_lacks_its_store_or_is_not_mounted_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (data, anchors) = (dir.path().join("data"), dir.path().join("anchors"));
        start(&data, &anchors).unwrap();
        start(&data, &anchors).unwrap();
        fs::remove_file(data.join("store.redb")).unwrap();
        assert!(refused(&data, &anchors).contains("store.redb is missing"));
        // First with an empty mount point, then without one.
        fs::remove_dir_all(&data).unwrap();
        assert!(refused(&data, &anchors).contains("contains none of its records"));
        assert!(!data.exists(), "nothing is made");
        fs::create_dir(&data).unwrap();
        assert!(refused(&data, &anchors).contains("contains none of its records"));
        assert_eq!(fs::read_dir(&data).unwrap().count(), 0, "nothing is made");
        // Only an explicit acceptance starts afresh.
        assert!(describe_mismatch(&data, Some(&anchors)).unwrap().is_some());
        accept_data_dir(&data, Some(&anchors)).unwrap();
        assert_eq!(describe_mismatch(&data, Some(&anchors)).unwrap(), None);
        start(&data, &anchors).unwrap();
        start(&data, &anchors).unwrap();
    }

    #[test]
    fn another_nodes_directory_and_an_older_copy_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (data, anchors) = (dir.path().join("data"), dir.path().join("anchors"));
        let (other, old) = (dir.path().join("other"), dir.path().join("old"));
        start(&data, &anchors).unwrap();
        copy(&data, &old);
        start(&data, &anchors).unwrap();
        start(&other, &dir.path().join("its anchors")).unwrap();
        for (from, why) in [(&other, "but belongs to node"), (&old, "it is an older copy")] {
            fs::remove_dir_all(&data).unwrap();
            copy(from, &data);
            let text = refused(&data, &anchors);
            assert!(text.contains(why), "{text}");
        }
        // A directory that was moved has no anchor for its new path, and gets one.
        start(&old, &anchors).unwrap();
        // Without node.json its owner is unknown.
        fs::remove_file(old.join(NODE_FILE)).unwrap();
        assert!(refused(&old, &anchors).contains("its node.json is missing"));
    }

    #[test]
    fn an_older_store_and_a_missing_cluster_file_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (data, anchors) = (dir.path().join("data"), dir.path().join("anchors"));
        start(&data, &anchors).unwrap();
        let anchor = Anchor::check(&data, Some(&anchors)).unwrap();
        assert!(anchor.check_revision(3).is_ok());
        let why = anchor.check_revision(2).unwrap_err().to_string();
        assert!(why.contains("revision 2, but was at revision 3"), "{why}");
        fs::write(data.join("cluster.json"), "").unwrap();
        anchor.record_start(RecordsLocation::ClusterStore, 0).unwrap();
        fs::remove_file(data.join("cluster.json")).unwrap();
        assert!(refused(&data, &anchors).contains("cluster.json is missing"));
        // Unless the node left its cluster.
        clear_records_location(&data).unwrap();
        assert!(!Anchor::check(&data, Some(&anchors)).unwrap().requires_own_store());
    }

    #[test]
    fn what_is_decided_follows_from_what_is_found() {
        let store = mark(1, 5, RecordsLocation::OwnStore);
        let found = FilesFound {
            anchor: Some(store),
            node_record: Some(store),
            has_store: true,
            has_cluster: false,
        };
        assert_eq!(check_consistency(&found), Ok(Some(store)));
        // A crash between the two writes leaves the anchor one start behind.
        let ahead = mark(1, 6, RecordsLocation::OwnStore);
        assert_eq!(
            check_consistency(&FilesFound { node_record: Some(ahead), ..found }),
            Ok(Some(ahead))
        );
        // A node that creates a cluster has both for a while.
        assert_eq!(check_consistency(&FilesFound { has_cluster: true, ..found }), Ok(Some(store)));
        let neither = FilesFound { anchor: None, node_record: None, ..found };
        assert_eq!(check_consistency(&neither), Ok(None), "a store from before is taken");
        assert_eq!(
            check_consistency(&FilesFound { has_store: false, ..neither }),
            Ok(None),
            "a first start"
        );
    }

    #[test]
    fn no_bit_of_an_anchor_changes_unseen() {
        let dir = tempfile::tempdir().unwrap();
        let (data, anchors) = (dir.path().join("data"), dir.path().join("anchors"));
        start(&data, &anchors).unwrap();
        for file in [anchor_path(&data, Some(&anchors)), data.join(NODE_FILE)] {
            let good = fs::read(&file).unwrap();
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                fs::write(&file, &bad).unwrap();
                refused(&data, &anchors);
            }
            fs::write(&file, good).unwrap();
        }
        start(&data, &anchors).unwrap();
    }

    #[test]
    fn an_anchor_lies_where_the_data_directory_is_not() {
        let at = |anchor_dir: Option<&str>, state_directory: Option<&str>| {
            anchor_path_in(Path::new("/srv/a-b"), anchor_dir.map(Path::new), state_directory)
        };
        assert_eq!(at(None, None), Path::new("/srv/a-b.anchor/srv-a%2db.json"));
        let state_directory = Some("/var/lib/windrose:/var/lib/windrose.anchor");
        assert_eq!(at(None, state_directory), Path::new("/var/lib/windrose.anchor/srv-a%2db.json"));
        assert_eq!(at(Some("/x"), state_directory), Path::new("/x/srv-a%2db.json"));
    }

    #[test]
    fn an_anchor_that_cannot_be_made_is_told_and_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        let in_a_file = dir.path().join("file");
        fs::write(&in_a_file, "").unwrap();
        let anchor = Anchor::check(&data, Some(&in_a_file)).unwrap();
        let warning = anchor.record_start(RecordsLocation::OwnStore, 1).unwrap().unwrap();
        assert!(warning.contains("file/"), "{warning}");
    }
}
