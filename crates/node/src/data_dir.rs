//! The node's data directory: one node at a time, and for its owner only.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// The system refuses something.
    #[error("data_dir {}: {why}", path.display())]
    Refused {
        /// What it refuses it for.
        path: PathBuf,
        /// What it said.
        why: io::Error,
    },
    /// Another node uses it.
    #[error(
        "data_dir {}: another node uses it{}; stop that node or change data_dir",
        path.display(),
        pid.as_ref().map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The other node's process, as it says itself.
        pid: Option<String>,
    },
}

/// A data directory that this process holds; free again when it is dropped, or the process ends
/// in whatever way.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    lock: File,
}

/// How often is looked whether a directory is free, and how long is waited in between.
const BUSY_LOOKS: u32 = 10;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// Takes a lock that may be held for a moment yet: a process that is just being started has a copy of every open file until it
/// runs its program.
#[expect(clippy::disallowed_methods, reason = "a node that starts has no cores yet")]
fn lock_when_free(lock: &File) -> Result<(), TryLockError> {
    for _ in 0..BUSY_LOOKS {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(BUSY_PAUSE),
            outcome => return outcome,
        }
    }
    lock.try_lock()
}

impl DataDir {
    /// Makes the directory where it is missing, and takes hold of it.
    ///
    /// # Errors
    /// [`DataDirError`].
    pub fn hold(path: &Path) -> Result<Self, DataDirError> {
        let refused = |at: &Path, why| DataDirError::Refused { path: at.to_owned(), why };
        let volumes = path.join("volumes");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&volumes)
            .map_err(|e| refused(&volumes, e))?;
        let name = path.join("lock");
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&name)
            .map_err(|e| refused(&name, e))?;
        match lock_when_free(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let read = lock.take(20).read_to_string(&mut pid).is_ok();
                let pid = Some(pid.trim().to_owned()).filter(|p| read && !p.is_empty());
                return Err(DataDirError::InUse { path: path.to_owned(), pid });
            }
            Err(TryLockError::Error(e)) => return Err(refused(&name, e)),
        }
        // For messages only: a full file system is no reason not to start.
        let _ = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
        Ok(Self { path: fs::canonicalize(path).map_err(|e| refused(path, e))?, lock })
    }

    /// The directory, without links in its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is locked, for this machine: device and inode. Whoever has held it before has ended.
    #[must_use]
    pub fn lock_id(&self) -> (u64, u64) {
        self.lock.metadata().map(|m| (m.dev(), m.ino())).unwrap_or_default()
    }

    /// The file of the store.
    #[must_use]
    pub fn store(&self) -> PathBuf {
        self.path.join("store.redb")
    }

    /// The file that says what the node is in a cluster.
    #[must_use]
    pub fn identity(&self) -> PathBuf {
        identity(&self.path)
    }

    /// Where a member of the cluster's store keeps its data.
    #[must_use]
    pub fn member(&self) -> PathBuf {
        self.path.join("etcd")
    }

    /// Puts the store of a node by itself aside, once a cluster has all of it.
    ///
    /// # Errors
    /// [`DataDirError::Refused`].
    pub fn set_store_aside(&self) -> Result<(), DataDirError> {
        let store = self.store();
        match fs::rename(&store, self.path.join("store.redb.before-cluster")) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(DataDirError::Refused { path: store, why: e })
            }
            _ => Ok(()),
        }
    }

    /// Removes what a member of a store has left that this node runs no longer.
    ///
    /// # Errors
    /// [`DataDirError::Refused`].
    pub fn clear_member(&self) -> Result<(), DataDirError> {
        let path = self.member();
        match fs::remove_dir_all(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(DataDirError::Refused { path, why: e })
            }
            _ => Ok(()),
        }
    }
}

/// The file with the keys of the secrets in the store of a node by itself.
pub(crate) fn secrets(path: &Path) -> PathBuf {
    path.join("secrets.key")
}

/// The file that says what the node of the data directory at `path` is in a cluster.
pub(crate) fn identity(path: &Path) -> PathBuf {
    path.join("cluster.json")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn one_node_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let held = DataDir::hold(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(held.path().join("volumes").is_dir());
        let refused = DataDir::hold(&path).unwrap_err().to_string();
        let pid = std::process::id();
        assert!(refused.contains(&format!("another node uses it (process {pid})")), "{refused}");
        drop(held);
        DataDir::hold(&path).unwrap();
    }

    #[test]
    fn what_is_no_directory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let refused = DataDir::hold(&file).unwrap_err().to_string();
        assert!(refused.contains("data_dir") && refused.contains("file"), "{refused}");
    }
}
