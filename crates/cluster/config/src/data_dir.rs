//! The node's data directory: locked by one node, accessible to its owner only.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

use crate::file_permissions::{PermissionError, TrustedPath};

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// A system call failed.
    #[error("data_dir {}: {why}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// Users other than root and the node's user can change it.
    #[error(transparent)]
    Permissions(#[from] PermissionError),
    /// Another node uses it.
    #[error(
        "data_dir {}: another node uses it{}; stop that node or change data_dir",
        path.display(),
        pid.as_ref().map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The other node's process, as its lock file says.
        pid: Option<String>,
    },
}

/// A data directory locked by this process, until the value is dropped or the process ends.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    lock: File,
    node_id: Uuid,
}

/// How often locking a directory is tried, and the pause in between.
const LOCK_ATTEMPTS: u32 = 10;
const LOCK_RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Takes a lock that may still be held for a moment: a process being started has a copy of every
/// open file until it executes its program.
#[expect(clippy::disallowed_methods, reason = "a node that starts has no cores yet")]
fn lock_with_retry(lock: &File) -> Result<(), TryLockError> {
    for _ in 0..LOCK_ATTEMPTS {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY_PAUSE),
            outcome => return outcome,
        }
    }
    lock.try_lock()
}

impl DataDir {
    /// Creates the directory if it is missing, and locks it.
    ///
    /// # Errors
    /// [`DataDirError`].
    pub fn acquire(path: &Path) -> Result<Self, DataDirError> {
        let refused = |at: &Path, why| DataDirError::Io { path: at.to_owned(), why };
        Self::check_access(path)?;
        let volumes = path.join("volumes");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&volumes)
            .map_err(|e| refused(&volumes, e))?;
        // Another user may have created a missing part meanwhile, in a directory such as /tmp.
        Self::check_access(path)?;
        let name = path.join("lock");
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&name)
            .map_err(|e| refused(&name, e))?;
        match lock_with_retry(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let read = lock.take(20).read_to_string(&mut pid).is_ok();
                let pid = Some(pid.trim().to_owned()).filter(|p| read && !p.is_empty());
                return Err(DataDirError::InUse { path: path.to_owned(), pid });
            }
            Err(TryLockError::Error(e)) => return Err(refused(&name, e)),
        }
        // For messages only: a full file system does not keep the node from starting.
        let _ = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
        let path = fs::canonicalize(path).map_err(|e| refused(path, e))?;
        let node =
            read_or_create_node_id(&path).map_err(|e| refused(&path.join(NODE_ID_FILE), e))?;
        Ok(Self { path, lock, node_id: node })
    }

    /// Refuses a directory that other users can write to or own, and one below such a directory.
    ///
    /// # Errors
    /// [`DataDirError`]. A missing directory is no error.
    pub fn check_access(path: &Path) -> Result<(), DataDirError> {
        let what = TrustedPath::DataDir(path.to_owned());
        what.check()?;
        let below = [path.join("volumes"), path.join("etcd"), tls_dir(path)];
        below.iter().try_for_each(|directory| Ok(what.check_at(directory)?))
    }

    /// The node's own id, chosen when the directory was created and lost with it; the owner on its
    /// disks.
    #[must_use]
    pub fn node_id(&self) -> Uuid {
        self.node_id
    }

    /// The directory's canonical path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode of the lock file. Any earlier process that held that lock has ended.
    #[must_use]
    pub fn lock_id(&self) -> (u64, u64) {
        self.lock.metadata().map(|m| (m.dev(), m.ino())).unwrap_or_default()
    }

    /// The file of the store.
    #[must_use]
    pub fn store_path(&self) -> PathBuf {
        self.path.join("store.redb")
    }

    /// The file with the node's identity in a cluster.
    #[must_use]
    pub fn identity_path(&self) -> PathBuf {
        identity_path_in(&self.path)
    }

    /// The data directory of the node's store member.
    #[must_use]
    pub fn store_member_dir(&self) -> PathBuf {
        self.path.join("etcd")
    }

    /// Archives the store of a standalone node, once the cluster's store has all records.
    ///
    /// # Errors
    /// [`DataDirError::Io`].
    pub fn archive_own_store(&self) -> Result<(), DataDirError> {
        let store = self.store_path();
        match fs::rename(&store, self.path.join("store.redb.before-cluster")) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(DataDirError::Io { path: store, why: e })
            }
            _ => Ok(()),
        }
    }

    /// Archives the data of the store member of `cluster`, which a new store replaces.
    ///
    /// # Errors
    /// [`DataDirError::Io`].
    pub fn archive_store_member(&self, cluster: Uuid) -> Result<(), DataDirError> {
        let before = "store.redb.before-cluster";
        let renames = [
            (self.store_member_dir(), format!("etcd.lost-{cluster}")),
            // Keep the older archive, from before the node created that cluster.
            (self.path.join(before), format!("{before}.lost-{cluster}")),
        ];
        for (path, name) in renames {
            match fs::rename(&path, self.path.join(name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(DataDirError::Io { path, why: e });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the data of a store member that this node runs no longer.
    ///
    /// # Errors
    /// [`DataDirError::Io`].
    pub fn remove_store_member(&self) -> Result<(), DataDirError> {
        let path = self.store_member_dir();
        match fs::remove_dir_all(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(DataDirError::Io { path, why: e }),
            _ => Ok(()),
        }
    }
}

/// Creates a missing directory with this mode, regardless of the process's umask: for sockets that
/// other users connect to.
///
/// # Errors
/// The system's error.
pub fn create_dir_with_mode(directory: &Path, mode: u32) -> io::Result<()> {
    if directory.as_os_str().is_empty() || directory.is_dir() {
        return Ok(());
    }
    if let Some(above) = directory.parent() {
        create_dir_with_mode(above, mode)?;
    }
    match fs::create_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
        Ok(()) => fs::set_permissions(directory, fs::Permissions::from_mode(mode)),
    }
}

/// The file with the node's id.
const NODE_ID_FILE: &str = "node-id";

/// The id in the directory; if there is none, writes a new one, durably.
fn read_or_create_node_id(directory: &Path) -> io::Result<Uuid> {
    let path = directory.join(NODE_ID_FILE);
    match fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map_err(|_| {
            let what = "it is not a valid node identity: restore the file from a backup, or remove \
                it and take over the node's disks";
            io::Error::new(io::ErrorKind::InvalidData, what)
        }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let (node, new) = (Uuid::new_v4(), directory.join("node-id.new"));
            let mut how = OpenOptions::new();
            how.write(true).create(true).truncate(true).mode(0o600);
            let mut file = how.open(&new)?;
            writeln!(file, "{node}")?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(directory)?.sync_all()?;
            Ok(node)
        }
        Err(e) => Err(e),
    }
}

/// The file with the keys that seal secrets in the store of a standalone node.
#[must_use]
pub fn secrets_path(path: &Path) -> PathBuf {
    path.join("secrets.key")
}

/// Directory of the certificates that the cluster's own authority issues, in the data directory
/// `path`.
#[must_use]
pub fn tls_dir(path: &Path) -> PathBuf {
    path.join("tls")
}

/// The file with the node's identity in a cluster, in the data directory `path`.
#[must_use]
pub fn identity_path_in(path: &Path) -> PathBuf {
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
        let held = DataDir::acquire(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(held.path().join("volumes").is_dir());
        let refused = DataDir::acquire(&path).unwrap_err().to_string();
        let pid = std::process::id();
        assert!(refused.contains(&format!("another node uses it (process {pid})")), "{refused}");
        drop(held);
        DataDir::acquire(&path).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let chmod = |at: &Path, mode| fs::set_permissions(at, fs::Permissions::from_mode(mode));
        drop(DataDir::acquire(&path).unwrap());
        for (at, good) in
            [(path.clone(), 0o755), (path.join("volumes"), 0o750), (tls_dir(&path), 0o700)]
        {
            fs::create_dir_all(&at).unwrap();
            for (bad, who) in [
                (0o777, "its group and all users"),
                (0o1777, "its group and all users"),
                (0o770, "its group (mode 0770)"),
                (0o702, "all users (mode 0702)"),
            ] {
                chmod(&at, bad).unwrap();
                let refused = DataDir::acquire(&path).unwrap_err().to_string();
                let way_out = format!("chmod go-w {}", at.display());
                assert!(refused.contains(who) && refused.contains(&way_out), "{refused}");
            }
            chmod(&at, good).unwrap();
            drop(DataDir::acquire(&path).unwrap());
        }
    }

    /// A unit's `UMask=0077` would keep other users out; no umask grants access to all.
    #[test]
    fn directories_of_sockets_have_their_mode_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("run/vhost");
        create_dir_with_mode(&at, 0o777).unwrap();
        for at in [at.parent().unwrap(), &at] {
            assert_eq!(fs::metadata(at).unwrap().permissions().mode() & 0o777, 0o777);
        }
        fs::set_permissions(&at, fs::Permissions::from_mode(0o2750)).unwrap();
        create_dir_with_mode(&at, 0o755).unwrap();
        assert_eq!(fs::metadata(&at).unwrap().permissions().mode() & 0o7777, 0o2750);
    }

    #[test]
    fn a_node_keeps_its_identity_and_a_copy_of_its_directory_is_another_place() {
        let dir = tempfile::tempdir().unwrap();
        let (path, copy) = (dir.path().join("a"), dir.path().join("b"));
        let held = DataDir::acquire(&path).unwrap();
        let (node, key) = (held.node_id(), held.lock_id());
        drop(held);
        let again = DataDir::acquire(&path).unwrap();
        assert_eq!((again.node_id(), again.lock_id()), (node, key));
        fs::create_dir_all(&copy).unwrap();
        fs::copy(path.join(NODE_ID_FILE), copy.join(NODE_ID_FILE)).unwrap();
        let copied = DataDir::acquire(&copy).unwrap();
        assert_eq!(copied.node_id(), node);
        assert_ne!(copied.lock_id(), key);
        fs::write(copy.join(NODE_ID_FILE), "x").unwrap();
        drop(copied);
        let refused = DataDir::acquire(&copy).unwrap_err().to_string();
        assert!(refused.contains("node-id") && refused.contains("restore"), "{refused}");
    }

    #[test]
    fn what_is_no_directory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let refused = DataDir::acquire(&file).unwrap_err().to_string();
        assert!(refused.contains("data_dir") && refused.contains("file"), "{refused}");
    }
}
