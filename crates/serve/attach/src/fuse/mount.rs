//! Mounting a file system, finding it, and unmounting it.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{getegid, geteuid};

/// Type of our file systems in `/proc/self/mountinfo`.
const FS_TYPE: &str = "fuse.windrose";

/// The device that connects to the kernel.
const DEVICE: &str = "/dev/fuse";

/// Why a volume cannot be mounted on a directory.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The directory cannot be used.
    #[error("{at}: {why}", at = at.display())]
    Directory {
        /// The directory.
        at: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// The directory is not empty: mounting would hide its contents.
    #[error("{} is not empty", .0.display())]
    NotEmpty(PathBuf),
    /// A volume is mounted there.
    #[error("{at}: another process has mounted volume {name} there", at = at.display())]
    InUse {
        /// The directory.
        at: PathBuf,
        /// Which volume.
        name: String,
    },
    /// Another file system is there whose server has ended.
    #[error("{} is a stale file system without a server: unmount it", .0.display())]
    Stale(PathBuf),
    /// FUSE is missing, or this process may not use it.
    #[error("{DEVICE}: {0}")]
    Device(io::Error),
    /// The kernel refused the mount.
    #[error("cannot mount at {at}: {why} (it needs CAP_SYS_ADMIN)", at = at.display())]
    Refused {
        /// The directory.
        at: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// The FUSE handshake failed.
    #[error("the kernel refused the file system: {0}")]
    Handshake(io::Error),
}

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MountEntry {
    /// Its mount ID, unique while it is mounted.
    id: u64,
    /// The device's minor number, which names the connection in the kernel.
    minor: u32,
    at: PathBuf,
    kind: OsString,
    source: OsString,
}

impl MountEntry {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ');
        let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
        let (_, minor) = std::str::from_utf8(words.nth(1)?).ok()?.split_once(':')?;
        let minor = minor.parse().ok()?;
        let at = PathBuf::from(unescaped(words.nth(1)?));
        // After the options come any number of fields and a hyphen.
        words.find(|word| *word == b"-")?;
        let (kind, source) = (unescaped(words.next()?), unescaped(words.next()?));
        Some(Self { id, minor, at, kind, source })
    }
}

/// Decodes the kernel's `\040` and the like.
fn unescaped(word: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if byte == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        out.push(octal.unwrap_or(byte));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(out)
}

/// The topmost mount at a path.
fn topmost(at: &Path) -> io::Result<Option<MountEntry>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mut entries = table.split(|byte| *byte == b'\n').filter_map(MountEntry::parse);
    Ok(entries.rfind(|entry| entry.at == at))
}

/// Whether a file system whose server has ended returns this error.
fn is_stale_error(error: &io::Error) -> bool {
    [Errno::NOTCONN, Errno::CONNABORTED]
        .iter()
        .any(|dead| error.raw_os_error() == Some(dead.raw_os_error()))
}

/// State of a directory.
#[derive(Debug)]
enum MountPoint {
    /// Empty, so it may be used. Its resolved path.
    Free(PathBuf),
    /// A killed process of ours had mounted the volume there.
    Stale(PathBuf),
}

/// The resolved path of a directory, which may be a mount whose server has ended.
fn resolve(at: &Path) -> io::Result<PathBuf> {
    match at.canonicalize() {
        // Some systems access the last component here, others do not.
        Err(error) if is_stale_error(&error) => by_parent(at),
        found => found,
    }
}

/// The state of a directory.
fn inspect(at: &Path, name: &str) -> Result<MountPoint, MountError> {
    let failed = |why| MountError::Directory { at: at.to_owned(), why };
    let place = resolve(at).map_err(failed)?;
    let dead = match place.symlink_metadata() {
        Err(error) if is_stale_error(&error) => true,
        Err(error) => return Err(failed(error)),
        Ok(_) => false,
    };
    let ours = topmost(&place).map_err(failed)?.filter(|entry| entry.kind == FS_TYPE);
    match ours {
        Some(entry) if !dead => {
            let name = entry.source.to_string_lossy().into_owned();
            Err(MountError::InUse { at: at.to_owned(), name })
        }
        Some(entry) if entry.source == name => Ok(MountPoint::Stale(place)),
        _ if dead => Err(MountError::Stale(at.to_owned())),
        _ => {
            let mut inside = std::fs::read_dir(&place).map_err(failed)?;
            if inside.next().is_some() {
                return Err(MountError::NotEmpty(at.to_owned()));
            }
            Ok(MountPoint::Free(place))
        }
    }
}

/// The resolved path of a directory that itself cannot be accessed.
fn by_parent(at: &Path) -> io::Result<PathBuf> {
    let name = at.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = at.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(parent.unwrap_or(Path::new(".")).canonicalize()?.join(name))
}

/// Serializes mounts on a directory. Locks its parent, as a file system whose server has ended
/// cannot be opened.
fn lock_parent(at: &Path) -> io::Result<File> {
    let place = resolve(at)?;
    let above = File::open(place.parent().unwrap_or(&place))?;
    above.lock()?;
    Ok(above)
}

/// Whether a process that had mounted the volume `name` at `at` was killed.
pub(super) fn is_stale(at: &Path, name: &str) -> bool {
    matches!(inspect(at, name), Ok(MountPoint::Stale(_)))
}

/// A mounted file system of ours.
#[derive(Debug)]
pub(super) struct Mounted {
    entry: MountEntry,
    /// Whether it replaced one that a killed process had left.
    pub(super) replaced: bool,
    /// User and group that own the directory.
    pub(super) owner: (u32, u32),
}

impl Mounted {
    /// Mounts the file system of volume `name`. Returns also the connection to the kernel.
    pub(super) fn new(
        at: &Path,
        name: &str,
        read_only: bool,
    ) -> Result<(Self, OwnedFd), MountError> {
        let failed = |why| MountError::Directory { at: at.to_owned(), why };
        // If two processes start at once, one mounts and the other sees the result.
        let _turn = lock_parent(at).map_err(failed)?;
        let found = inspect(at, name)?;
        let replaced = matches!(found, MountPoint::Stale(_));
        if let MountPoint::Stale(place) = found {
            tracing::info!(at = %place.display(), "unmounting the stale mount of a killed process");
            // Its open files have been failing since then.
            let taken = unmount(&*place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
            taken.map_err(|e| failed(e.into()))?;
        }
        let (MountPoint::Free(place) | MountPoint::Stale(place)) = inspect(at, name)?;
        let owner = std::fs::metadata(&place).map_err(failed)?;
        let device = OpenOptions::new().read(true).write(true).open(DEVICE);
        let device = OwnedFd::from(device.map_err(MountError::Device)?);
        let refused = |why| MountError::Refused { at: at.to_owned(), why };
        mount_fuse(&place, name, read_only, &device).map_err(refused)?;
        let entry = topmost(&place).map_err(refused)?.filter(|entry| entry.kind == FS_TYPE);
        let entry = entry.ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
        Ok((Self { entry, replaced, owner: (owner.uid(), owner.gid()) }, device))
    }

    pub(super) fn at(&self) -> &Path {
        &self.entry.at
    }

    /// Unmounts it if it is unused. Returns whether it is unmounted, by this process or another.
    pub(super) fn unmount_if_unused(&self) -> io::Result<bool> {
        match self.unmount(UnmountFlags::empty()) {
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Unmounts it. Waiting requests of its users fail: the kernel reports an aborted connection,
    /// then that there is none.
    pub(super) fn unmount_forced(&self) -> io::Result<()> {
        self.unmount(UnmountFlags::FORCE | UnmountFlags::DETACH)
    }

    /// Aborts the connection of an unmounted file system that is still in use. Only possible if the
    /// kernel's list of connections is mounted.
    pub(super) fn abort(&self) {
        let switch = format!("/sys/fs/fuse/connections/{}/abort", self.entry.minor);
        if let Err(error) = std::fs::write(&switch, "1") {
            tracing::info!(%error, "{switch}");
        }
    }

    fn unmount(&self, how: UnmountFlags) -> io::Result<()> {
        let now = topmost(self.at())?;
        match now {
            Some(entry) if entry == self.entry => {
                Ok(unmount(self.at(), how | UnmountFlags::NOFOLLOW)?)
            }
            // It was unmounted; what is there now is not ours.
            _ => Ok(()),
        }
    }
}

/// An abnormal end leaves no user waiting.
impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = self.unmount_forced() {
            tracing::warn!(at = %self.at().display(), %error, "unmounting the file system failed");
        }
    }
}

/// Mounts it in the kernel.
fn mount_fuse(at: &Path, name: &str, read_only: bool, device: &OwnedFd) -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    // The kernel checks the file's mode for all users alike.
    let data = format!(
        "fd={},rootmode=40000,user_id={user},group_id={group},allow_other,default_permissions",
        device.as_raw_fd()
    );
    let data = CString::new(data)?;
    let mut flags =
        MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
    flags.set(MountFlags::RDONLY, read_only);
    Ok(mount(OsStr::new(name), at, FS_TYPE, flags, Some(&*data))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_table_are_read() {
        let line = rb(
            r"712 28 0:46 / /mnt/a\040b\134c rw,nodev shared:9 master:2 - fuse.windrose web rw,user_id=0",
        );
        let entry = MountEntry::parse(line).unwrap();
        assert_eq!((entry.id, entry.minor), (712, 46));
        assert_eq!(entry.at, Path::new(r"/mnt/a b\c"));
        assert_eq!((entry.kind, entry.source), (FS_TYPE.into(), "web".into()));
        for broken in ["", "x 28 0:46 / /mnt rw - a b", "1 2 3:4 / /mnt rw", "1 2", "1 2 3 4 5 - a"]
        {
            assert_eq!(MountEntry::parse(rb(broken)), None, "{broken}");
        }
        assert_eq!(unescaped(rb(r"\04 \ \999\377")).into_vec(), b"\\04 \\ \\999\xff");
    }

    fn rb(text: &str) -> &[u8] {
        text.as_bytes()
    }
}
