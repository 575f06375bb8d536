//! Who can change the files that a node trusts: its data directory, its anchor, its configuration. Nobody but root and the
//! node's own user may, neither there nor in a directory above: who can rename one puts another in its place.

use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why files cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The system does not let them be looked at.
    #[error("{what}: {}: {why}", path.display())]
    Refused {
        /// What was looked at.
        what: Trusted,
        /// Which file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// Others can change it, or what is in it.
    #[error(
        "{what}: {path} can be changed by {who} (mode {mode:04o}): whoever can write there owns every volume and \
         secret of the node; stop what else uses it, then: chmod go-w {path}",
        path = path.display()
    )]
    Open {
        /// What was looked at.
        what: Trusted,
        /// The file or directory that is open.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// Who can write there.
        who: &'static str,
    },
    /// It belongs to another user.
    #[error(
        "{what}: {path} belongs to user {owner}, and the node runs as user {user}: that user owns every volume and secret \
         of the node; if it is the node's, then: chown -R {user} {path}",
        path = path.display()
    )]
    Foreign {
        /// What was looked at.
        what: Trusted,
        /// The file or directory.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// As whom the node runs.
        user: u32,
    },
    /// Others can change a directory above it.
    #[error(
        "{what}: the directory {path} above it can be changed by {who} (mode {mode:04o}): whoever can write there can put \
         something else in its place; chmod go-w {path}, or choose a place below directories that only root can change",
        path = path.display()
    )]
    OpenAbove {
        /// What was looked at.
        what: Trusted,
        /// The directory above.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// Who can write there.
        who: &'static str,
    },
    /// A directory above it, or a link on the way to it, belongs to another user.
    #[error(
        "{what}: {path} on the way to it belongs to user {owner}, and the node runs as user {user}: that user can put \
         something else in its place; chown -h {user} {path}, or choose a place below directories of root",
        path = path.display()
    )]
    ForeignAbove {
        /// What was looked at.
        what: Trusted,
        /// The directory or link.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// As whom the node runs.
        user: u32,
    },
}

/// What a node trusts, as errors call it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trusted {
    /// `data_dir`.
    DataDir(PathBuf),
    /// The directory of its anchor.
    AnchorDir(PathBuf),
    /// The configuration file.
    Configuration(PathBuf),
}

impl Trusted {
    fn path(&self) -> &Path {
        let (Self::DataDir(path) | Self::AnchorDir(path) | Self::Configuration(path)) = self;
        path
    }

    /// Refuses what others than root and the node's user can change. What is not there yet is no error.
    ///
    /// # Errors
    /// [`AccessError`].
    pub fn check(&self) -> Result<(), AccessError> {
        self.check_above()?;
        self.check_at(self.path())
    }

    /// Refuses one file or directory of it.
    pub(crate) fn check_at(&self, path: &Path) -> Result<(), AccessError> {
        let Some(metadata) = self.look(path, fs::metadata(path))? else { return Ok(()) };
        let (what, path) = (self.clone(), path.to_owned());
        if let Some((mode, who)) = writers(&metadata) {
            return Err(AccessError::Open { what, path, mode, who });
        }
        match foreign(&metadata) {
            Some((owner, user)) => Err(AccessError::Foreign { what, path, owner, user }),
            None => Ok(()),
        }
    }

    /// Refuses it for the directories above it, those of its name and those where links lead.
    fn check_above(&self) -> Result<(), AccessError> {
        let path = self.path();
        let refused = |why| AccessError::Refused { what: self.clone(), path: path.into(), why };
        let absolute = std::path::absolute(path).map_err(refused)?;
        for above in absolute.ancestors() {
            self.check_one_above(above, above == absolute)?;
        }
        let resolved =
            absolute.ancestors().find_map(|path| Some((path, fs::canonicalize(path).ok()?)));
        let Some((from, resolved)) = resolved else { return Ok(()) };
        for above in resolved.ancestors() {
            self.check_one_above(above, from == absolute && above == resolved)?;
        }
        Ok(())
    }

    /// `is_it`: this is not above it but itself, of which only a link is looked at here.
    fn check_one_above(&self, path: &Path, is_it: bool) -> Result<(), AccessError> {
        let Some(metadata) = self.look(path, fs::symlink_metadata(path))? else { return Ok(()) };
        if is_it && !metadata.is_symlink() {
            return Ok(());
        }
        let (what, path) = (self.clone(), path.to_owned());
        if let Some((owner, user)) = foreign(&metadata)
            && !is_unmapped(owner)
        {
            return Err(AccessError::ForeignAbove { what, path, owner, user });
        }
        match writers(&metadata) {
            // There nobody renames what belongs to others.
            Some((mode, _)) if mode & STICKY != 0 => Ok(()),
            Some((mode, who)) => Err(AccessError::OpenAbove { what, path, mode, who }),
            None => Ok(()),
        }
    }

    /// What is known of a file that may not be there.
    fn look(
        &self,
        path: &Path,
        found: io::Result<Metadata>,
    ) -> Result<Option<Metadata>, AccessError> {
        match found {
            Ok(metadata) => Ok(Some(metadata)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(why) => Err(AccessError::Refused { what: self.clone(), path: path.into(), why }),
        }
    }
}

impl fmt::Display for Trusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::DataDir(_) => "data_dir",
            Self::AnchorDir(_) => "anchor_dir",
            Self::Configuration(_) => "the configuration file",
        };
        write!(f, "{name} {}", self.path().display())
    }
}

/// Mode of directories in which only the owner of a file, or of the directory, renames and removes it.
const STICKY: u32 = 0o1000;

/// The mode of a file or directory that others than its owner can write to, and who they are.
fn writers(metadata: &Metadata) -> Option<(u32, &'static str)> {
    if !metadata.is_dir() && !metadata.is_file() {
        return None;
    }
    let mode = metadata.permissions().mode() & 0o7777;
    let who = match (mode & 0o020, mode & 0o002) {
        (0, 0) => return None,
        (0, _) => "everybody",
        (_, 0) => "its group",
        _ => "its group and everybody",
    };
    Some((mode, who))
}

/// Whose it is and who we are, where it belongs to another user than us and root.
fn foreign(metadata: &Metadata) -> Option<(u32, u32)> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    (owner != user && owner != 0).then_some((owner, user))
}

/// Whether this is what all users are called that a user namespace does not know, root of the machine among them: it
/// owns the directories above there.
fn is_unmapped(owner: u32) -> bool {
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

    fn refused(what: &Trusted) -> String {
        what.check().unwrap_err().to_string()
    }

    /// Another user once moved the data directory away from a parent with mode 0777, and the node began empty.
    #[test]
    fn a_directory_above_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (above, below) = (dir.path().join("a"), dir.path().join("a/b"));
        fs::create_dir_all(below.join("c")).unwrap();
        for path in ["a/b/c", "a/b/c/not/there"].map(|path| dir.path().join(path)) {
            for what in [Trusted::DataDir(path.clone()), Trusted::AnchorDir(path.clone())] {
                for at in [&above, &below] {
                    for (mode, who) in
                        [(0o777, "everybody"), (0o775, "its group"), (0o702, "everybody")]
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
            let what = Trusted::DataDir(path);
            what.check().unwrap();
            chmod(&open, 0o777);
            assert!(refused(&what).contains(&format!("chmod go-w {}", open.display())));
            chmod(&open, 0o755);
        }
        chmod(dir.path(), 0o1777);
        Trusted::DataDir(link.clone()).check().unwrap();
        if lchown(&link, Some(4242), None).is_ok() {
            let why = refused(&Trusted::DataDir(link.clone()));
            let way_out = format!("chown -h 0 {}", link.display());
            assert!(why.contains("user 4242") && why.contains(&way_out), "{why}");
        }
    }

    #[test]
    fn a_directory_above_of_another_user_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let above = dir.path().join("a");
        fs::create_dir_all(above.join("b")).unwrap();
        // Only root gives directories away.
        if std::os::unix::fs::chown(&above, Some(4242), None).is_ok() {
            let why = refused(&Trusted::AnchorDir(above.join("b")));
            let way_out = format!("chown -h 0 {}", above.display());
            assert!(why.contains("user 4242") && why.contains(&way_out), "{why}");
        }
    }

    #[test]
    fn a_configuration_file_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("windrose.toml");
        let what = Trusted::Configuration(path.clone());
        what.check().unwrap();
        fs::write(&path, "").unwrap();
        chmod(&path, 0o644);
        what.check().unwrap();
        for (mode, who) in [(0o666, "its group and everybody"), (0o664, "its group")] {
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
