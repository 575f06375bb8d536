//! What keeps a data directory from being taken for another one than it is.
//!
//! `node.json` in the data directory says which node it belongs to, and that it has records. An anchor outside of
//! it, one small file, says the same. So a directory whose file system is not mounted is not an empty node, nor is
//! another node's directory this one, nor an old copy of it the present one. A first start finds neither file and
//! makes both. What they hold: `docs/format/store.md`.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ::cluster::file::{self, ReadError};
use ::cluster::lives::Life;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::count;

/// Version of both files.
const FORMAT: u32 = 1;

/// Longest file that is read, in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The file in the data directory, and what it is sealed as.
const NODE: &str = "node.json";

/// The process that was the node when this one was started, in the data directory of the copy.
const OTHER: &str = "other-life.json";

/// What the anchor is sealed as.
const ANCHOR: &str = "anchor";

/// What the name of the directory of anchors ends with.
const SUFFIX: &str = ".anchor";

/// Where the records of a node are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Records {
    /// In a store of its own, which has to be there.
    Store,
    /// In its cluster's; `cluster.json` has to be there.
    Cluster,
    /// It has left its cluster: a new store may be made.
    None,
}

/// What both files hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mark {
    format: u32,
    /// Drawn when the node began.
    id: Uuid,
    /// How often it was started. The data directory's is written first, and is never behind.
    starts: u64,
    /// Where its records were.
    records: Records,
    /// The revision of its own store when it was last started; 0 without one.
    revision: u64,
}

/// Why a data directory is not used. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub enum AnchorError {
    /// There is less in it than there was, or something else.
    #[error(
        "data_dir {}: {what}\nIf its file system is not mounted, mount it and start again. If it was lost, restore it \
         (docs/guides/administration.md, section \"When the data directory is not what it was\"). To use the directory \
         as it is now: windrose node accept-data-dir",
        path.display()
    )]
    Mismatch {
        /// The data directory.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// One of the files cannot be believed.
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
    /// The system refuses something.
    #[error("{}: {why}", path.display())]
    Refused {
        /// Which file.
        path: PathBuf,
        /// What it said.
        why: io::Error,
    },
}

/// What a look at a data directory and its anchor has found.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    anchor: Option<Mark>,
    node: Option<Mark>,
    has_store: bool,
    has_cluster: bool,
}

/// A data directory that may be used.
#[derive(Debug)]
pub(crate) struct Anchor {
    data_dir: PathBuf,
    path: PathBuf,
    found: Found,
    mark: Mark,
}

/// The file that anchors the data directory at `data_dir`: in `anchor_dir`, or where the service manager says, or
/// beside it.
pub(crate) fn path(data_dir: &Path, anchor_dir: Option<&Path>) -> PathBuf {
    let told = std::env::var_os("STATE_DIRECTORY");
    path_in(data_dir, anchor_dir, told.as_deref().and_then(std::ffi::OsStr::to_str))
}

fn path_in(data_dir: &Path, anchor_dir: Option<&Path>, told: Option<&str>) -> PathBuf {
    let told = told.unwrap_or_default().split(':').find(|dir| dir.ends_with(SUFFIX));
    let beside = || {
        let mut beside: OsString = data_dir.as_os_str().to_owned();
        beside.push(SUFFIX);
        PathBuf::from(beside)
    };
    let directory = anchor_dir.map(Path::to_owned).or_else(|| told.map(PathBuf::from));
    let name = data_dir.to_string_lossy();
    let escaped: String = name.trim_matches('/').chars().fold(String::new(), |name, c| match c {
        '/' => name + "-",
        '-' => name + "%2d",
        '%' => name + "%25",
        c => name + &c.to_string(),
    });
    directory.unwrap_or_else(beside).join(format!("{escaped}.json"))
}

fn read(path: &Path, name: &str) -> Result<Option<Mark>, AnchorError> {
    let damaged = |why: String| AnchorError::Damaged { path: path.to_owned(), why };
    let bytes = match file::read(path, name, MAX_BYTES) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(None),
        Err(ReadError::Damaged(why)) => return Err(damaged(why)),
        // A path through what is no directory leads to nothing.
        Err(ReadError::Refused(e)) if e.kind() == io::ErrorKind::NotADirectory => return Ok(None),
        Err(ReadError::Refused(why)) => {
            return Err(AnchorError::Refused { path: path.to_owned(), why });
        }
    };
    let mark: Mark = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
    if mark.format != FORMAT {
        let found = mark.format;
        return Err(damaged(format!("it has format {found}, this version knows format {FORMAT}")));
    }
    Ok(Some(mark))
}

fn write(path: &Path, name: &str, mark: &Mark) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(mark).map_err(io::Error::other)?;
    bytes.push(b'\n');
    file::write(path, name, &bytes)
}

/// The mark that the next start continues from, or why there must be none.
fn decide(found: &Found) -> Result<Option<Mark>, String> {
    let Found { anchor, node, has_store, has_cluster } = *found;
    let mark = match (anchor, node) {
        (None, None) => return Ok(None),
        (None, Some(node)) => node,
        (Some(anchor), None) => {
            let id = anchor.id;
            return Err(if has_store || has_cluster {
                format!(
                    "it should be that of node {id}, and has records, but no {NODE} that says so"
                )
            } else {
                format!("it should be that of node {id}, and holds none of its records")
            });
        }
        (Some(anchor), Some(node)) if anchor.id != node.id => {
            return Err(format!(
                "it should be that of node {}, and is that of node {}",
                anchor.id, node.id
            ));
        }
        (Some(anchor), Some(node)) if node.starts < anchor.starts => {
            return Err(format!(
                "it is an older copy: its node had been started {}, and has been {} by now",
                count(node.starts, "time"),
                count(anchor.starts, "time")
            ));
        }
        (Some(_), Some(node)) => node,
    };
    match mark.records {
        Records::Store if !has_store && !has_cluster => {
            Err("its store.redb is missing: that holds what the node knows of its volumes"
                .to_owned())
        }
        Records::Cluster if !has_cluster => {
            Err("its cluster.json is missing: that says what the node is in its cluster".to_owned())
        }
        _ => Ok(Some(mark)),
    }
}

fn look(data_dir: &Path, anchor: &Path) -> Result<Found, AnchorError> {
    let is_there = |name: &str| {
        let path = data_dir.join(name);
        match fs::symlink_metadata(&path) {
            Ok(_) => Ok(true),
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                Ok(false)
            }
            Err(why) => Err(AnchorError::Refused { path, why }),
        }
    };
    Ok(Found {
        anchor: read(anchor, ANCHOR)?,
        node: read(&data_dir.join(NODE), NODE)?,
        has_store: is_there("store.redb")?,
        has_cluster: is_there("cluster.json")?,
    })
}

impl Anchor {
    /// Looks whether the data directory at `data_dir` is the one that was used before. Changes nothing.
    pub(crate) fn check(data_dir: &Path, anchor_dir: Option<&Path>) -> Result<Self, AnchorError> {
        let path = path(data_dir, anchor_dir);
        let found = look(data_dir, &path)?;
        let mismatch = |what| AnchorError::Mismatch { path: data_dir.to_owned(), what };
        let mark = decide(&found).map_err(mismatch)?.unwrap_or_else(|| Mark {
            format: FORMAT,
            id: Uuid::new_v4(),
            starts: 0,
            records: Records::None,
            revision: 0,
        });
        Ok(Self { data_dir: data_dir.to_owned(), path, found, mark })
    }

    /// Whether the node's own store has to be there already.
    pub(crate) fn has_store(&self) -> bool {
        self.mark.records == Records::Store
    }

    /// Refuses a store that is older than the one that was used last.
    pub(crate) fn check_revision(&self, revision: u64) -> Result<(), AnchorError> {
        if self.has_store() && revision < self.mark.revision {
            let what = format!(
                "its store.redb is an older copy: it is at revision {revision}, and was at revision {} before",
                self.mark.revision
            );
            return Err(AnchorError::Mismatch { path: self.data_dir.clone(), what });
        }
        Ok(())
    }

    /// Notes, in both places, a start with records of this kind. What is wrong with the anchor is told, and is no
    /// reason not to serve; nor is a full file system, once the files are there.
    pub(crate) fn begin(
        &self,
        records: Records,
        revision: u64,
    ) -> Result<Option<String>, AnchorError> {
        let starts = self.mark.starts.saturating_add(1);
        let mark = Mark { starts, records, revision, ..self.mark };
        let node = self.data_dir.join(NODE);
        match write(&node, NODE, &mark) {
            Ok(()) => {}
            Err(e) if self.found.node.is_some_and(|node| node.records == records) => {
                tracing::warn!(path = %node.display(), error = %e, "it is left as it was");
                return Ok(self.found.anchor.is_none().then(|| e.to_string()));
            }
            Err(why) => return Err(AnchorError::Refused { path: node, why }),
        }
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        let written = made.and_then(|()| write(&self.path, ANCHOR, &mark));
        Ok(written.err().map(|e| format!("{}: {e}", self.path.display())))
    }
}

/// Notes that the node in `data_dir` has no records any more: it leaves its cluster.
pub(crate) fn forget_records(data_dir: &Path) -> io::Result<()> {
    let path = data_dir.join(NODE);
    match read(&path, NODE) {
        Ok(Some(mark)) => write(&path, NODE, &Mark { records: Records::None, ..mark }),
        Ok(None) => Ok(()),
        Err(e) => Err(io::Error::other(e.to_string())),
    }
}

/// Notes that another process is the node: this data directory is a copy, and stays unused until somebody says otherwise.
pub(crate) fn note_other(data_dir: &Path, other: &Life) -> io::Result<()> {
    let bytes = serde_json::to_vec(other).map_err(io::Error::other)?;
    file::write(&data_dir.join(OTHER), OTHER, &bytes)
}

/// The process that was the node when this data directory was found to be a copy.
pub(crate) fn other(data_dir: &Path) -> Result<Option<Life>, AnchorError> {
    let path = data_dir.join(OTHER);
    let damaged = |why: String| AnchorError::Damaged { path: path.clone(), why };
    match file::read(&path, OTHER, MAX_BYTES) {
        Ok(None) => Ok(None),
        Ok(Some(bytes)) => {
            serde_json::from_slice(&bytes).map(Some).map_err(|e| damaged(e.to_string()))
        }
        Err(ReadError::Damaged(why)) => Err(damaged(why)),
        Err(ReadError::Refused(why)) => Err(AnchorError::Refused { path, why }),
    }
}

/// What is to be said of a data directory before it is accepted, `None` where there is nothing to accept.
///
/// # Errors
/// [`AnchorError`]: what cannot even be looked at.
pub fn mismatch(data_dir: &Path, anchor_dir: Option<&Path>) -> Result<Option<String>, AnchorError> {
    match Anchor::check(data_dir, anchor_dir) {
        Ok(_) => match other(data_dir) {
            Ok(other) => Ok(other.map(|other| {
                format!(
                    "it is a copy of that of a node that ran on {}; no two may run",
                    other.place()
                )
            })),
            Err(e) => Ok(Some(e.to_string())),
        },
        Err(AnchorError::Mismatch { what, .. }) => Ok(Some(what)),
        Err(AnchorError::Damaged { path, why }) => Ok(Some(format!("{}: {why}", path.display()))),
        Err(refused @ AnchorError::Refused { .. }) => Err(refused),
    }
}

/// Has the next start take the data directory as it is. No node uses it meanwhile.
///
/// # Errors
/// [`AnchorError::Refused`].
pub fn accept(data_dir: &Path, anchor_dir: Option<&Path>) -> Result<(), AnchorError> {
    for path in [path(data_dir, anchor_dir), data_dir.join(NODE), data_dir.join(OTHER)] {
        if path.parent().is_some_and(Path::is_dir) {
            file::remove(&path).map_err(|why| AnchorError::Refused { path, why })?;
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

    fn mark(id: u128, starts: u64, records: Records) -> Mark {
        Mark { format: FORMAT, id: Uuid::from_u128(id), starts, records, revision: 0 }
    }

    /// Starts as a node does; says what it has decided.
    fn start(data_dir: &Path, anchor_dir: &Path) -> Result<Anchor, String> {
        let anchor = Anchor::check(data_dir, Some(anchor_dir)).map_err(|e| e.to_string())?;
        fs::create_dir_all(data_dir).unwrap();
        if !anchor.has_store() {
            fs::write(data_dir.join("store.redb"), "a store").unwrap();
        }
        assert_eq!(anchor.begin(Records::Store, 3).unwrap(), None);
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
        // As an empty mount point, and as none.
        fs::remove_dir_all(&data).unwrap();
        assert!(refused(&data, &anchors).contains("holds none of its records"));
        assert!(!data.exists(), "nothing is made");
        fs::create_dir(&data).unwrap();
        assert!(refused(&data, &anchors).contains("holds none of its records"));
        assert_eq!(fs::read_dir(&data).unwrap().count(), 0, "nothing is made");
        // Only a statement begins anew.
        assert!(mismatch(&data, Some(&anchors)).unwrap().is_some());
        accept(&data, Some(&anchors)).unwrap();
        assert_eq!(mismatch(&data, Some(&anchors)).unwrap(), None);
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
        for (from, why) in [(&other, "and is that of node"), (&old, "it is an older copy")] {
            fs::remove_dir_all(&data).unwrap();
            copy(from, &data);
            let told = refused(&data, &anchors);
            assert!(told.contains(why), "{told}");
        }
        // A directory that has moved has no anchor at its new place, and gets one.
        start(&old, &anchors).unwrap();
        // Without what says whose it is, nobody knows.
        fs::remove_file(old.join(NODE)).unwrap();
        assert!(refused(&old, &anchors).contains("no node.json that says so"));
    }

    #[test]
    fn an_older_store_and_a_missing_cluster_file_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (data, anchors) = (dir.path().join("data"), dir.path().join("anchors"));
        start(&data, &anchors).unwrap();
        let anchor = Anchor::check(&data, Some(&anchors)).unwrap();
        assert!(anchor.check_revision(3).is_ok());
        let why = anchor.check_revision(2).unwrap_err().to_string();
        assert!(why.contains("revision 2, and was at revision 3"), "{why}");
        fs::write(data.join("cluster.json"), "").unwrap();
        anchor.begin(Records::Cluster, 0).unwrap();
        fs::remove_file(data.join("cluster.json")).unwrap();
        assert!(refused(&data, &anchors).contains("cluster.json is missing"));
        // Unless it has left.
        forget_records(&data).unwrap();
        assert!(!Anchor::check(&data, Some(&anchors)).unwrap().has_store());
    }

    #[test]
    fn what_is_decided_follows_from_what_is_found() {
        let store = mark(1, 5, Records::Store);
        let found =
            Found { anchor: Some(store), node: Some(store), has_store: true, has_cluster: false };
        assert_eq!(decide(&found), Ok(Some(store)));
        // A crash between the two files leaves the anchor one behind.
        let ahead = mark(1, 6, Records::Store);
        assert_eq!(decide(&Found { node: Some(ahead), ..found }), Ok(Some(ahead)));
        // A node that begins a cluster has both for a while.
        assert_eq!(decide(&Found { has_cluster: true, ..found }), Ok(Some(store)));
        let neither = Found { anchor: None, node: None, ..found };
        assert_eq!(decide(&neither), Ok(None), "a store from before is taken");
        assert_eq!(decide(&Found { has_store: false, ..neither }), Ok(None), "a first start");
    }

    #[test]
    fn no_bit_of_an_anchor_changes_unseen() {
        let dir = tempfile::tempdir().unwrap();
        let (data, anchors) = (dir.path().join("data"), dir.path().join("anchors"));
        start(&data, &anchors).unwrap();
        for file in [path(&data, Some(&anchors)), data.join(NODE)] {
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
        let at = |anchor_dir: Option<&str>, told: Option<&str>| {
            path_in(Path::new("/srv/a-b"), anchor_dir.map(Path::new), told)
        };
        assert_eq!(at(None, None), Path::new("/srv/a-b.anchor/srv-a%2db.json"));
        let told = Some("/var/lib/windrose:/var/lib/windrose.anchor");
        assert_eq!(at(None, told), Path::new("/var/lib/windrose.anchor/srv-a%2db.json"));
        assert_eq!(at(Some("/x"), told), Path::new("/x/srv-a%2db.json"));
    }

    #[test]
    fn an_anchor_that_cannot_be_made_is_told_and_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        let in_a_file = dir.path().join("file");
        fs::write(&in_a_file, "").unwrap();
        let anchor = Anchor::check(&data, Some(&in_a_file)).unwrap();
        let told = anchor.begin(Records::Store, 1).unwrap().unwrap();
        assert!(told.contains("file/"), "{told}");
    }
}
