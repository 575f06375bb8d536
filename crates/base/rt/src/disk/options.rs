//! How a disk is opened, and why it was not.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// How to open a disk. The default: an existing file or block device, for reading and writing,
/// with direct I/O, held exclusively.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    pub(crate) read_only: bool,
    pub(crate) buffered: bool,
    pub(crate) create_bytes: Option<u64>,
    pub(crate) beside: bool,
}

impl OpenOptions {
    /// The default.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Open for reading only; others may do so at the same time, nobody may write.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Go through the system's page cache instead of demanding direct I/O: for file systems
    /// that have none. Syncs are as real as ever. Block devices always have direct I/O, and use it.
    #[must_use]
    pub fn buffered(mut self, buffered: bool) -> Self {
        self.buffered = buffered;
        self
    }

    /// Open beside an opening of this process that holds the disk, and is kept for as long as this one: it is neither
    /// locked nor claimed again. For a disk that several cores use; who opens it so keeps its users out of each
    /// other's way. Simulated disks are opened once, and refuse this as busy.
    #[must_use]
    pub fn beside(mut self, beside: bool) -> Self {
        self.beside = beside;
        self
    }

    /// Create a file of `bytes` bytes without space behind them; it must not exist. Its name is
    /// durable when it is open.
    #[must_use]
    pub fn create(mut self, bytes: u64) -> Self {
        self.create_bytes = Some(bytes);
        self
    }
}

/// A disk that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct OpenError {
    /// What was to be opened.
    pub path: PathBuf,
    /// Why it was not.
    pub reason: OpenReason,
}

/// Why a disk could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenReason {
    /// There is no such file or device.
    NotFound,
    /// The process may not open it.
    PermissionDenied,
    /// The file system has no direct I/O for this file; [`OpenOptions::buffered`] would do.
    NoDirectIo,
    /// Somebody else, or this process, has it open already.
    Busy,
    /// A directory, a pipe or the like.
    NotAFileOrBlockDevice,
    /// It was to be created and exists.
    Exists,
    /// It accepts no writes, and is to be written.
    ReadOnly,
    /// Its blocks have that many bytes, more than the 4096 that are understood.
    LargeBlocks(u32),
    /// What the system said (`errno`).
    Io(i32),
}

impl OpenError {
    pub(crate) fn new(path: &Path, reason: OpenReason) -> Self {
        Self { path: path.to_owned(), reason }
    }
}

impl OpenReason {
    pub(crate) fn of<T>(result: io::Result<T>) -> Result<T, Self> {
        result.map_err(|e| Self::from_io(&e))
    }

    pub(crate) fn from_io(e: &io::Error) -> Self {
        match e.raw_os_error() {
            Some(libc::ENOENT) => Self::NotFound,
            Some(libc::EACCES | libc::EPERM) => Self::PermissionDenied,
            Some(libc::EBUSY | libc::ETXTBSY) => Self::Busy,
            Some(libc::EEXIST) => Self::Exists,
            Some(libc::EROFS) => Self::ReadOnly,
            Some(libc::EISDIR) => Self::NotAFileOrBlockDevice,
            errno => Self::Io(errno.unwrap_or(libc::EIO)),
        }
    }
}

impl fmt::Display for OpenReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("no such file or device"),
            Self::PermissionDenied => f.write_str("permission denied"),
            Self::NoDirectIo => {
                f.write_str("the file system has no direct I/O (O_DIRECT); allow buffered I/O")
            }
            Self::Busy => f.write_str("in use: somebody else has it open"),
            Self::NotAFileOrBlockDevice => f.write_str("neither a file nor a block device"),
            Self::Exists => f.write_str("exists already"),
            Self::ReadOnly => f.write_str("read-only: it cannot be written"),
            Self::LargeBlocks(bytes) => {
                write!(f, "has blocks of {bytes} bytes; more than 4096 are not supported")
            }
            Self::Io(errno) => io::Error::from_raw_os_error(*errno).fmt(f),
        }
    }
}
