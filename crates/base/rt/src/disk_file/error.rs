//! Errors of a disk, by kind.

use std::fmt;
use std::io;

/// A failed disk operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskError {
    /// The kind of failure.
    pub kind: DiskErrorKind,
    /// The system's `errno`; 0 if the error did not come from the system.
    pub errno: i32,
}

/// The kind of a failed disk operation, as far as it matters to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskErrorKind {
    /// The medium cannot read or write the data.
    Media,
    /// A sparse file or a thin device has run out of space.
    NoSpace,
    /// The disk does not accept writes.
    ReadOnly,
    /// The disk is lost: it vanished, or a sync failed and its contents are unknown.
    Gone,
    /// An address, a length or a buffer is not aligned as [`super::DiskInfo`] requires.
    Misaligned,
    /// The range ends behind the end of the disk (or the file was truncated by another process).
    PastEnd,
    /// This disk cannot do that operation (see [`super::DiskInfo::can_punch`]).
    Unsupported,
    /// Anything else; the caller treats it like [`Self::Media`].
    Other,
}

impl DiskError {
    /// An error that did not come from the system.
    #[must_use]
    pub const fn new(kind: DiskErrorKind) -> Self {
        Self { kind, errno: 0 }
    }

    /// The error for the system's `errno`.
    #[must_use]
    pub const fn from_errno(errno: i32) -> Self {
        let kind = match errno {
            libc::EIO
            | libc::EILSEQ
            | libc::ENODATA
            | libc::EREMOTEIO
            | libc::ETIMEDOUT
            | libc::EBADMSG
            | libc::EUCLEAN => DiskErrorKind::Media,
            libc::ENOSPC | libc::EDQUOT => DiskErrorKind::NoSpace,
            libc::EROFS | libc::EPERM => DiskErrorKind::ReadOnly,
            libc::ENODEV | libc::ENXIO | libc::ENOMEDIUM | libc::ESHUTDOWN | libc::ENOLINK => {
                DiskErrorKind::Gone
            }
            libc::EINVAL => DiskErrorKind::Misaligned,
            libc::EFBIG => DiskErrorKind::PastEnd,
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => DiskErrorKind::Unsupported,
            _ => DiskErrorKind::Other,
        };
        Self { kind, errno }
    }
}

impl From<io::Error> for DiskError {
    fn from(e: io::Error) -> Self {
        e.raw_os_error().map_or(Self::new(DiskErrorKind::Other), Self::from_errno)
    }
}

impl fmt::Display for DiskErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Media => "the medium failed",
            Self::NoSpace => "no space left",
            Self::ReadOnly => "the disk is read-only",
            Self::Gone => "the disk is gone",
            Self::Misaligned => "misaligned",
            Self::PastEnd => "past the end of the disk",
            Self::Unsupported => "not supported by this disk",
            Self::Other => "the disk failed",
        })
    }
}

impl fmt::Display for DiskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        if self.errno == 0 {
            return Ok(());
        }
        write!(f, ": {}", io::Error::from_raw_os_error(self.errno))
    }
}

impl std::error::Error for DiskError {}
