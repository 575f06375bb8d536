//! The place of a file system: it is put there, found there, and taken away.

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

/// What `/proc/self/mountinfo` calls file systems of ours.
const KIND: &str = "fuse.windrose";

/// Where the kernel is spoken with.
const DEVICE: &str = "/dev/fuse";

/// Why a volume cannot be shown in a directory.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The directory cannot be used.
    #[error("{at}: {why}", at = at.display())]
    Place {
        /// The directory.
        at: PathBuf,
        /// What the system reports.
        why: io::Error,
    },
    /// Something is in it that would be hidden.
    #[error("{} is not empty", .0.display())]
    NotEmpty(PathBuf),
    /// A volume is shown there.
    #[error("{at}: another process shows volume {name} there", at = at.display())]
    InUse {
        /// The directory.
        at: PathBuf,
        /// Which volume.
        name: String,
    },
    /// Somebody else's file system is there, and nobody serves it any more.
    #[error("{} is a file system that nobody serves: unmount it", .0.display())]
    Dead(PathBuf),
    /// There is no FUSE, or this process may not use it.
    #[error("{DEVICE}: {0}")]
    Device(io::Error),
    /// The kernel does not mount it.
    #[error("cannot mount at {at}: {why} (it takes CAP_SYS_ADMIN)", at = at.display())]
    Refused {
        /// The directory.
        at: PathBuf,
        /// What the system reports.
        why: io::Error,
    },
    /// The kernel and we do not come to terms.
    #[error("the kernel does not take the file system: {0}")]
    Handshake(io::Error),
}

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// Its number: nobody else has it as long as it is there.
    id: u64,
    /// The device's minor number, by which the kernel calls the connection.
    minor: u32,
    at: PathBuf,
    kind: OsString,
    source: OsString,
}

impl Entry {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ');
        let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
        let (_, minor) = std::str::from_utf8(words.nth(1)?).ok()?.split_once(':')?;
        let minor = minor.parse().ok()?;
        let at = PathBuf::from(unescaped(words.nth(1)?));
        // Behind the options come fields of any number, and a hyphen.
        words.find(|word| *word == b"-")?;
        let (kind, source) = (unescaped(words.next()?), unescaped(words.next()?));
        Some(Self { id, minor, at, kind, source })
    }
}

/// Without the kernel's `\040` and the like.
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

/// What is mounted at a place, the topmost.
fn topmost(at: &Path) -> io::Result<Option<Entry>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mut entries = table.split(|byte| *byte == b'\n').filter_map(Entry::parse);
    Ok(entries.rfind(|entry| entry.at == at))
}

/// Whether this is what a file system answers whose server has ended.
fn is_dead(error: &io::Error) -> bool {
    [Errno::NOTCONN, Errno::CONNABORTED]
        .iter()
        .any(|dead| error.raw_os_error() == Some(dead.raw_os_error()))
}

/// A directory.
#[derive(Debug)]
enum Found {
    /// It is empty, and so it may be used. Here is its path.
    Free(PathBuf),
    /// A process of ours has shown the volume there, and has been killed.
    Left(PathBuf),
}

/// The path of a directory, which may be that of a file system that nobody serves.
fn place(at: &Path) -> io::Result<PathBuf> {
    match at.canonicalize() {
        // There are systems that look at the last name of a path for that, and others that do not.
        Err(error) if is_dead(&error) => by_parent(at),
        found => found,
    }
}

/// What is at a place.
fn look(at: &Path, name: &str) -> Result<Found, MountError> {
    let failed = |why| MountError::Place { at: at.to_owned(), why };
    let place = place(at).map_err(failed)?;
    let dead = match place.symlink_metadata() {
        Err(error) if is_dead(&error) => true,
        Err(error) => return Err(failed(error)),
        Ok(_) => false,
    };
    let ours = topmost(&place).map_err(failed)?.filter(|entry| entry.kind == KIND);
    match ours {
        Some(entry) if !dead => {
            let name = entry.source.to_string_lossy().into_owned();
            Err(MountError::InUse { at: at.to_owned(), name })
        }
        Some(entry) if entry.source == name => Ok(Found::Left(place)),
        _ if dead => Err(MountError::Dead(at.to_owned())),
        _ => {
            let mut inside = std::fs::read_dir(&place).map_err(failed)?;
            if inside.next().is_some() {
                return Err(MountError::NotEmpty(at.to_owned()));
            }
            Ok(Found::Free(place))
        }
    }
}

/// The path of a directory that itself cannot be looked at.
fn by_parent(at: &Path) -> io::Result<PathBuf> {
    let name = at.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = at.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(parent.unwrap_or(Path::new(".")).canonicalize()?.join(name))
}

/// Waits until nobody else looks at the directory in order to mount something there. It is the one above that is locked: a
/// file system that nobody serves cannot be opened.
fn turn(at: &Path) -> io::Result<File> {
    let place = place(at)?;
    let above = File::open(place.parent().unwrap_or(&place))?;
    above.lock()?;
    Ok(above)
}

/// Whether a process that showed the volume `name` at `at` has been killed.
pub(super) fn is_left(at: &Path, name: &str) -> bool {
    matches!(look(at, name), Ok(Found::Left(_)))
}

/// A file system of ours in its place.
#[derive(Debug)]
pub(super) struct Mounted {
    entry: Entry,
    /// Whether it is in the place of one that a killed process had left.
    pub(super) replaced: bool,
    /// To whom the directory belongs, by user and group.
    pub(super) owner: (u32, u32),
}

impl Mounted {
    /// Mounts the file system of volume `name`; and how to speak with the kernel about it.
    pub(super) fn new(
        at: &Path,
        name: &str,
        read_only: bool,
    ) -> Result<(Self, OwnedFd), MountError> {
        let failed = |why| MountError::Place { at: at.to_owned(), why };
        // Of two processes that come at once one goes on, and the other sees what it has done.
        let _turn = turn(at).map_err(failed)?;
        let found = look(at, name)?;
        let replaced = matches!(found, Found::Left(_));
        if let Found::Left(place) = found {
            tracing::info!(at = %place.display(), "taking away what a killed process has left");
            // Whoever has its file open has had it in vain since then.
            let taken = unmount(&*place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
            taken.map_err(|e| failed(e.into()))?;
        }
        let (Found::Free(place) | Found::Left(place)) = look(at, name)?;
        let owner = std::fs::metadata(&place).map_err(failed)?;
        let device = OpenOptions::new().read(true).write(true).open(DEVICE);
        let device = OwnedFd::from(device.map_err(MountError::Device)?);
        let refused = |why| MountError::Refused { at: at.to_owned(), why };
        enter(&place, name, read_only, &device).map_err(refused)?;
        let entry = topmost(&place).map_err(refused)?.filter(|entry| entry.kind == KIND);
        let entry = entry.ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
        Ok((Self { entry, replaced, owner: (owner.uid(), owner.gid()) }, device))
    }

    pub(super) fn at(&self) -> &Path {
        &self.entry.at
    }

    /// Takes it away, if nobody uses it; whether it is away, by whomever.
    pub(super) fn leave(&self) -> io::Result<bool> {
        match self.unmount(UnmountFlags::empty()) {
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Takes it away. What its users wait for fails: the kernel tells them that the connection was aborted, and then
    /// that there is none.
    pub(super) fn cut(&self) -> io::Result<()> {
        self.unmount(UnmountFlags::FORCE | UnmountFlags::DETACH)
    }

    /// Cuts off who uses what is not mounted any more. Only where the kernel's list of connections is mounted.
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
            // Somebody has taken it away; what is there is his.
            _ => Ok(()),
        }
    }
}

/// Who does not end in order leaves nothing behind that waits for him.
impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = self.cut() {
            tracing::warn!(at = %self.at().display(), %error, "a file system is left behind");
        }
    }
}

/// Has the kernel mount it.
fn enter(at: &Path, name: &str, read_only: bool, device: &OwnedFd) -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    // Who may do what is what the file's mode says, for all users alike; the kernel sees to that.
    let data = format!(
        "fd={},rootmode=40000,user_id={user},group_id={group},allow_other,default_permissions",
        device.as_raw_fd()
    );
    let data = CString::new(data)?;
    let mut flags =
        MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
    flags.set(MountFlags::RDONLY, read_only);
    Ok(mount(OsStr::new(name), at, KIND, flags, Some(&*data))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_table_are_read() {
        let line = rb(
            r"712 28 0:46 / /mnt/a\040b\134c rw,nodev shared:9 master:2 - fuse.windrose web rw,user_id=0",
        );
        let entry = Entry::parse(line).unwrap();
        assert_eq!((entry.id, entry.minor), (712, 46));
        assert_eq!(entry.at, Path::new(r"/mnt/a b\c"));
        assert_eq!((entry.kind, entry.source), (KIND.into(), "web".into()));
        for broken in ["", "x 28 0:46 / /mnt rw - a b", "1 2 3:4 / /mnt rw", "1 2", "1 2 3 4 5 - a"]
        {
            assert_eq!(Entry::parse(rb(broken)), None, "{broken}");
        }
        assert_eq!(unescaped(rb(r"\04 \ \999\377")).into_vec(), b"\\04 \\ \\999\xff");
    }

    fn rb(text: &str) -> &[u8] {
        text.as_bytes()
    }
}
