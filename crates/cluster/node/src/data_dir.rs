//! The node's data directory: one node at a time, and for its owner only.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

use crate::access::{AccessError, Trusted};

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
    /// Others than root and the node's user can change it.
    #[error(transparent)]
    Access(#[from] AccessError),
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
    node: Uuid,
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
        Self::check_access(path)?;
        let volumes = path.join("volumes");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&volumes)
            .map_err(|e| refused(&volumes, e))?;
        // Others may have made what was missing in a directory like /tmp, meanwhile.
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
        let path = fs::canonicalize(path).map_err(|e| refused(path, e))?;
        let node = node_id(&path).map_err(|e| refused(&path.join(NODE_ID), e))?;
        Ok(Self { path, lock, node })
    }

    /// Refuses a directory that others can write to, or that belongs to another user, and one below such a directory; a
    /// start, and `--check`, look at it.
    ///
    /// # Errors
    /// [`DataDirError`]; one that is not there yet is made as it has to be.
    pub fn check_access(path: &Path) -> Result<(), DataDirError> {
        let what = Trusted::DataDir(path.to_owned());
        what.check()?;
        let below = [path.join("volumes"), path.join("etcd"), tls(path)];
        below.iter().try_for_each(|directory| Ok(what.check_at(directory)?))
    }

    /// The node's own identity, drawn when the directory was made and lost with it: what its disks know it by.
    #[must_use]
    pub fn node(&self) -> Uuid {
        self.node
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

    /// Puts aside what a member of the store of `cluster` has, which a new store takes the place of.
    ///
    /// # Errors
    /// [`DataDirError::Refused`].
    pub fn set_member_aside(&self, cluster: Uuid) -> Result<(), DataDirError> {
        let before = "store.redb.before-cluster";
        let aside = [
            (self.member(), format!("etcd.lost-{cluster}")),
            // What the node had before it began that cluster is not written over.
            (self.path.join(before), format!("{before}.lost-{cluster}")),
        ];
        for (path, name) in aside {
            match fs::rename(&path, self.path.join(name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(DataDirError::Refused { path, why: e });
                }
                _ => {}
            }
        }
        Ok(())
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

/// Makes a directory where it is missing, with this mode, whatever the process's umask is: for sockets that others
/// than the node's user connect to.
///
/// # Errors
/// What the system says.
pub(crate) fn make_with_mode(directory: &Path, mode: u32) -> io::Result<()> {
    if directory.as_os_str().is_empty() || directory.is_dir() {
        return Ok(());
    }
    if let Some(above) = directory.parent() {
        make_with_mode(above, mode)?;
    }
    match fs::create_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
        Ok(()) => fs::set_permissions(directory, fs::Permissions::from_mode(mode)),
    }
}

/// The file with the node's identity.
const NODE_ID: &str = "node-id";

/// The identity that stands in the directory; a new one, durably, if there is none.
fn node_id(directory: &Path) -> io::Result<Uuid> {
    let path = directory.join(NODE_ID);
    match fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map_err(|_| {
            let what = "it is no node's identity: restore the file from a backup, or remove it and take over the node's disks";
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

/// The file with the keys of the secrets in the store of a node by itself.
pub(crate) fn secrets(path: &Path) -> PathBuf {
    path.join("secrets.key")
}

/// Where the certificates of a node lie whose cluster signs them itself, in the data directory at `path`.
pub(crate) fn tls(path: &Path) -> PathBuf {
    path.join("tls")
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
    fn a_directory_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let chmod = |at: &Path, mode| fs::set_permissions(at, fs::Permissions::from_mode(mode));
        drop(DataDir::hold(&path).unwrap());
        for (at, good) in
            [(path.clone(), 0o755), (path.join("volumes"), 0o750), (tls(&path), 0o700)]
        {
            fs::create_dir_all(&at).unwrap();
            for (bad, who) in [
                (0o777, "its group and everybody"),
                (0o1777, "its group and everybody"),
                (0o770, "its group (mode 0770)"),
                (0o702, "everybody (mode 0702)"),
            ] {
                chmod(&at, bad).unwrap();
                let refused = DataDir::hold(&path).unwrap_err().to_string();
                let way_out = format!("chmod go-w {}", at.display());
                assert!(refused.contains(who) && refused.contains(&way_out), "{refused}");
            }
            chmod(&at, good).unwrap();
            drop(DataDir::hold(&path).unwrap());
        }
    }

    /// A unit's `UMask=0077` would keep everybody else out; no umask lets all through.
    #[test]
    fn directories_of_sockets_have_their_mode_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("run/vhost");
        make_with_mode(&at, 0o777).unwrap();
        for at in [at.parent().unwrap(), &at] {
            assert_eq!(fs::metadata(at).unwrap().permissions().mode() & 0o777, 0o777);
        }
        fs::set_permissions(&at, fs::Permissions::from_mode(0o2750)).unwrap();
        make_with_mode(&at, 0o755).unwrap();
        assert_eq!(fs::metadata(&at).unwrap().permissions().mode() & 0o7777, 0o2750);
    }

    #[test]
    fn a_node_keeps_its_identity_and_a_copy_of_its_directory_is_another_place() {
        let dir = tempfile::tempdir().unwrap();
        let (path, copy) = (dir.path().join("a"), dir.path().join("b"));
        let held = DataDir::hold(&path).unwrap();
        let (node, key) = (held.node(), held.lock_id());
        drop(held);
        let again = DataDir::hold(&path).unwrap();
        assert_eq!((again.node(), again.lock_id()), (node, key));
        fs::create_dir_all(&copy).unwrap();
        fs::copy(path.join(NODE_ID), copy.join(NODE_ID)).unwrap();
        let copied = DataDir::hold(&copy).unwrap();
        assert_eq!(copied.node(), node);
        assert_ne!(copied.lock_id(), key);
        fs::write(copy.join(NODE_ID), "x").unwrap();
        drop(copied);
        let refused = DataDir::hold(&copy).unwrap_err().to_string();
        assert!(refused.contains("node-id") && refused.contains("restore"), "{refused}");
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
