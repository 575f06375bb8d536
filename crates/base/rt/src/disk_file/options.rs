//! How to open a disk, and why that failed.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// How to open a disk. The default: an existing file or block device, for reading and writing, with
/// direct I/O, exclusively.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    pub(crate) read_only: bool,
    pub(crate) buffered: bool,
    pub(crate) create_bytes: Option<u64>,
    pub(crate) shared: bool,
}

impl OpenOptions {
    /// The default.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Open for reading only; others may do so at the same time, but not write.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Use the system's page cache instead of requiring direct I/O: for file systems without it.
    /// Syncs still reach the disk. Block devices always use direct I/O.
    #[must_use]
    pub fn buffered(mut self, buffered: bool) -> Self {
        self.buffered = buffered;
        self
    }

    /// Open in addition to an exclusive open of this process, which must be kept for as long as
    /// this one: the disk is not locked or claimed again. For a disk that several cores use; the
    /// caller coordinates them. Simulated disks refuse this as busy.
    #[must_use]
    pub fn shared(mut self, beside: bool) -> Self {
        self.shared = beside;
        self
    }

    /// Create a sparse file of `bytes` bytes; it must not exist. Its name is durable once it is
    /// open.
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
    /// The path.
    pub path: PathBuf,
    /// Why it could not be opened.
    pub reason: OpenReason,
}

/// Why a disk could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenReason {
    /// There is no such file or device.
    NotFound,
    /// The process may not open it.
    PermissionDenied,
    /// The file system has no direct I/O for this file; [`OpenOptions::buffered`] would work.
    NoDirectIo,
    /// Another process, or this one, has it open already.
    Busy,
    /// A directory, a pipe or the like.
    NotAFileOrBlockDevice,
    /// It was to be created but exists.
    Exists,
    /// It accepts no writes, but was to be written.
    ReadOnly,
    /// Its blocks have this many bytes; at most 4096 are supported.
    BlocksTooLarge(u32),
    /// The system's `errno`.
    Io(i32),
}

impl OpenError {
    pub(crate) fn new(path: &Path, reason: OpenReason) -> Self {
        Self { path: path.to_owned(), reason }
    }
}

impl OpenReason {
    pub(crate) fn from_result<T>(result: io::Result<T>) -> Result<T, Self> {
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
            Self::Busy => f.write_str("in use: another process has it open"),
            Self::NotAFileOrBlockDevice => f.write_str("neither a file nor a block device"),
            Self::Exists => f.write_str("exists already"),
            Self::ReadOnly => f.write_str("read-only: it cannot be written"),
            Self::BlocksTooLarge(bytes) => {
                write!(f, "has blocks of {bytes} bytes; more than 4096 are not supported")
            }
            Self::Io(errno) => io::Error::from_raw_os_error(*errno).fmt(f),
        }
    }
}
