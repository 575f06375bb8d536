//! Checks who can change the files that a node trusts: data directory, anchor, configuration. Only
//! root and the node's own user may, there and in all directories above: a user who can
//! rename a directory can replace it.

use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why files cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum PermissionError {
    /// They cannot be read.
    #[error("{what}: {}: {why}", path.display())]
    Io {
        /// The trusted path.
        what: TrustedPath,
        /// Which file.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// Others can change it or its contents.
    #[error(
        "{what}: {path} can be changed by {who} (mode {mode:04o}): write access there gives \
         control of every volume and secret of the node; stop other users of it, then: chmod go-w \
         {path}",
        path = path.display()
    )]
    Writable {
        /// The trusted path.
        what: TrustedPath,
        /// The file or directory that others can write to.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// Who can write there.
        who: &'static str,
    },
    /// It belongs to another user.
    #[error(
        "{what}: {path} belongs to user {owner}, but the node runs as user {user}: that user \
         controls every volume and secret of the node; if the files are the node's: chown -R \
         {user} {path}",
        path = path.display()
    )]
    WrongOwner {
        /// The trusted path.
        what: TrustedPath,
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of the node.
        user: u32,
    },
    /// Others can change a directory above it.
    #[error(
        "{what}: the directory {path} above it can be changed by {who} (mode {mode:04o}): write \
         access there allows replacing it; chmod go-w {path}, or choose a place below directories \
         that only root can change",
        path = path.display()
    )]
    ParentWritable {
        /// The trusted path.
        what: TrustedPath,
        /// The directory above.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// Who can write there.
        who: &'static str,
    },
    /// A directory above it, or a link on the way to it, belongs to another user.
    #[error(
        "{what}: {path} on the way to it belongs to user {owner}, but the node runs as user \
         {user}: that user can replace it; chown -h {user} {path}, or choose a place below \
         directories of root",
        path = path.display()
    )]
    ParentWrongOwner {
        /// The trusted path.
        what: TrustedPath,
        /// The directory or link.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of the node.
        user: u32,
    },
}

/// A trusted path, as errors name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrustedPath {
    /// `data_dir`.
    DataDir(PathBuf),
    /// The directory of its anchor.
    AnchorDir(PathBuf),
    /// The configuration file.
    Configuration(PathBuf),
}

impl TrustedPath {
    fn path(&self) -> &Path {
        let (Self::DataDir(path) | Self::AnchorDir(path) | Self::Configuration(path)) = self;
        path
    }

    /// Refuses a path that users other than root and the node's user can change. A missing path is
    /// no error.
    ///
    /// # Errors
    /// [`PermissionError`].
    pub fn check(&self) -> Result<(), PermissionError> {
        self.check_parents()?;
        self.check_at(self.path())
    }

    /// Refuses a path that is itself unsafe: the trusted path, or one inside it.
    pub fn check_at(&self, path: &Path) -> Result<(), PermissionError> {
        let Some(metadata) = self.if_present(path, fs::metadata(path))? else { return Ok(()) };
        let (what, path) = (self.clone(), path.to_owned());
        if let Some((mode, who)) = other_writers(&metadata) {
            return Err(PermissionError::Writable { what, path, mode, who });
        }
        match foreign_owner(&metadata) {
            Some((owner, user)) => Err(PermissionError::WrongOwner { what, path, owner, user }),
            None => Ok(()),
        }
    }

    /// Refuses a path with an unsafe directory above it, by its name or by the links in it.
    fn check_parents(&self) -> Result<(), PermissionError> {
        let path = self.path();
        let refused = |why| PermissionError::Io { what: self.clone(), path: path.into(), why };
        let absolute = std::path::absolute(path).map_err(refused)?;
        for above in absolute.ancestors() {
            self.check_parent(above, above == absolute)?;
        }
        let resolved =
            absolute.ancestors().find_map(|path| Some((path, fs::canonicalize(path).ok()?)));
        let Some((from, resolved)) = resolved else { return Ok(()) };
        for above in resolved.ancestors() {
            self.check_parent(above, from == absolute && above == resolved)?;
        }
        Ok(())
    }

    /// `is_it`: `path` is the trusted path itself, of which only a link is checked here.
    fn check_parent(&self, path: &Path, is_it: bool) -> Result<(), PermissionError> {
        let Some(metadata) = self.if_present(path, fs::symlink_metadata(path))? else {
            return Ok(());
        };
        if is_it && !metadata.is_symlink() {
            return Ok(());
        }
        let (what, path) = (self.clone(), path.to_owned());
        if let Some((owner, user)) = foreign_owner(&metadata)
            && !is_unmapped_uid(owner)
        {
            return Err(PermissionError::ParentWrongOwner { what, path, owner, user });
        }
        match other_writers(&metadata) {
            // In a sticky directory only the owner can rename a file.
            Some((mode, _)) if mode & STICKY_BIT != 0 => Ok(()),
            Some((mode, who)) => Err(PermissionError::ParentWritable { what, path, mode, who }),
            None => Ok(()),
        }
    }

    /// The metadata of a file; `None` if it does not exist.
    fn if_present(
        &self,
        path: &Path,
        found: io::Result<Metadata>,
    ) -> Result<Option<Metadata>, PermissionError> {
        match found {
            Ok(metadata) => Ok(Some(metadata)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(why) => Err(PermissionError::Io { what: self.clone(), path: path.into(), why }),
        }
    }
}

impl fmt::Display for TrustedPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::DataDir(_) => "data_dir",
            Self::AnchorDir(_) => "anchor_dir",
            Self::Configuration(_) => "the configuration file",
        };
        write!(f, "{name} {}", self.path().display())
    }
}

/// Mode bit of directories in which only the owner of a file, or of the directory, renames and
/// removes it.
const STICKY_BIT: u32 = 0o1000;

/// The mode of a file or directory that users other than its owner can write to, and who they are.
fn other_writers(metadata: &Metadata) -> Option<(u32, &'static str)> {
    if !metadata.is_dir() && !metadata.is_file() {
        return None;
    }
    let mode = metadata.permissions().mode() & 0o7777;
    let who = match (mode & 0o020, mode & 0o002) {
        (0, 0) => return None,
        (0, _) => "all users",
        (_, 0) => "its group",
        _ => "its group and all users",
    };
    Some((mode, who))
}

/// The owner and the node's user, if the owner is neither that user nor root.
fn foreign_owner(metadata: &Metadata) -> Option<(u32, u32)> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    (owner != user && owner != 0).then_some((owner, user))
}

/// Whether this is the overflow id of a user namespace, which stands for all users that it does not
/// map, including the machine's root, who owns the directories above.
fn is_unmapped_uid(owner: u32) -> bool {
    const UNKNOWN: u32 = 65534;
    let has_all = |map: String| map.split_whitespace().eq(["0", "0", "4294967295"]);
    owner == UNKNOWN && fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !has_all(map))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{lchown, symlink};

    use super::*;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn refused(what: &TrustedPath) -> String {
        what.check().unwrap_err().to_string()
    }

    /// Another user once renamed the data directory, whose parent had mode 0777, and the node began
    /// empty.
    #[test]
    fn a_directory_above_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (above, below) = (dir.path().join("a"), dir.path().join("a/b"));
        fs::create_dir_all(below.join("c")).unwrap();
        for path in ["a/b/c", "a/b/c/not/there"].map(|path| dir.path().join(path)) {
            for what in [TrustedPath::DataDir(path.clone()), TrustedPath::AnchorDir(path.clone())] {
                for at in [&above, &below] {
                    for (mode, who) in
                        [(0o777, "all users"), (0o775, "its group"), (0o702, "all users")]
                    {
                        chmod(at, mode);
                        let why = refused(&what);
                        let way_out = format!("chmod go-w {},", at.display());
                        assert!(why.contains(&way_out) && why.contains(who), "{why}");
                    }
                    chmod(at, 0o1777);
                    what.check().unwrap();
                    chmod(at, 0o755);
                }
            }
        }
    }

    #[test]
    fn a_link_to_a_place_that_others_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (open, link) = (dir.path().join("open"), dir.path().join("link"));
        fs::create_dir_all(open.join("data")).unwrap();
        symlink(open.join("data"), &link).unwrap();
        for path in [link.clone(), link.join("below")] {
            let what = TrustedPath::DataDir(path);
            what.check().unwrap();
            chmod(&open, 0o777);
            assert!(refused(&what).contains(&format!("chmod go-w {}", open.display())));
            chmod(&open, 0o755);
        }
        chmod(dir.path(), 0o1777);
        TrustedPath::DataDir(link.clone()).check().unwrap();
        if lchown(&link, Some(4242), None).is_ok() {
            let why = refused(&TrustedPath::DataDir(link.clone()));
            let way_out = format!("chown -h 0 {}", link.display());
            assert!(why.contains("user 4242") && why.contains(&way_out), "{why}");
        }
    }

    #[test]
    fn a_directory_above_of_another_user_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let above = dir.path().join("a");
        fs::create_dir_all(above.join("b")).unwrap();
        // Only root can change an owner.
        if std::os::unix::fs::chown(&above, Some(4242), None).is_ok() {
            let why = refused(&TrustedPath::AnchorDir(above.join("b")));
            let way_out = format!("chown -h 0 {}", above.display());
            assert!(why.contains("user 4242") && why.contains(&way_out), "{why}");
        }
    }

    #[test]
    fn a_configuration_file_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("windrose.toml");
        let what = TrustedPath::Configuration(path.clone());
        what.check().unwrap();
        fs::write(&path, "").unwrap();
        chmod(&path, 0o644);
        what.check().unwrap();
        for (mode, who) in [(0o666, "its group and all users"), (0o664, "its group")] {
            chmod(&path, mode);
            let why = refused(&what);
            let way_out = format!("chmod go-w {}", path.display());
            assert!(why.contains(who) && why.ends_with(&way_out), "{why}");
            assert!(why.starts_with("the configuration file "), "{why}");
        }
        chmod(&path, 0o600);
        chmod(dir.path(), 0o777);
        assert!(refused(&what).contains(&format!("chmod go-w {}", dir.path().display())));
    }
}
