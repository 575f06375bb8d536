//! Why a flat image cannot be created, opened, grown or deleted.

use std::fmt;
use std::path::{Path, PathBuf};

use rt::disk::{DiskError, OpenError, OpenReason};
use uuid::Uuid;

use super::foreign::Foreign;
use super::label::BadLabel;

/// What went wrong with which file or device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct FileError {
    /// The file or device.
    pub path: PathBuf,
    /// Why.
    pub reason: Reason,
}

/// Why a flat image cannot be created, opened, grown or deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It does not open.
    Open(OpenReason),
    /// It failed.
    Disk(DiskError),
    /// It is to be overwritten and holds something else.
    Foreign(Foreign),
    /// It is to be used and holds something else.
    NotAVolume(Foreign),
    /// It holds a volume.
    Labelled {
        /// Which.
        volume: Uuid,
    },
    /// It holds no volume: there is no label, and nothing else either.
    NoLabel,
    /// Both copies of its label are damaged.
    TornLabel,
    /// It holds a volume, and something else was put over a copy of its label.
    Overwritten(Foreign),
    /// Its label is not for us.
    BadLabel(BadLabel),
    /// Its creation was never finished.
    Unfinished,
    /// It holds another volume.
    OtherVolume {
        /// Which it holds.
        found: Uuid,
        /// Which was wanted.
        wanted: Uuid,
    },
    /// It is older than what was last seen of it: a copy from the past.
    Outdated {
        /// The label's generation.
        found: u64,
        /// The generation it had at least.
        wanted: u64,
    },
    /// It has become smaller than its label says.
    Shrunk {
        /// Its size in bytes.
        bytes: u64,
        /// The size in bytes it needs.
        needed: u64,
    },
    /// The device is too small.
    TooSmall {
        /// Its size in bytes.
        bytes: u64,
        /// The size in bytes it needs.
        needed: u64,
    },
    /// No volume has such a size.
    Size(&'static str),
    /// Its new part could not be zeroed; the log has the cause.
    Failed(block::Error),
    /// It could not be removed: what the system said (`errno`).
    Remove(i32),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(OpenReason::NoDirectIo) => f.write_str(
                "its file system has no direct I/O (O_DIRECT); --buffered allows I/O through the \
                 page cache",
            ),
            Self::Open(reason) => reason.fmt(f),
            Self::Disk(e) => e.fmt(f),
            Self::Foreign(what) => write!(f, "{what}; --force overwrites it"),
            Self::NotAVolume(what) => write!(f, "holds no volume: it {what}"),
            Self::Labelled { volume } => {
                write!(f, "holds volume {volume}; --force overwrites it")
            }
            Self::NoLabel => f.write_str("holds no volume"),
            Self::TornLabel => f.write_str("both copies of its label are damaged"),
            Self::Overwritten(what) => write!(f, "holds what is left of a volume, and it {what}"),
            Self::BadLabel(e) => write!(f, "holds {e}"),
            Self::Unfinished => f.write_str("its creation was never finished; create it again"),
            Self::OtherVolume { found, wanted } => {
                write!(f, "holds volume {found}, not {wanted}")
            }
            Self::Outdated { found, wanted } => write!(
                f,
                "is an old copy: its label has generation {found}, and had {wanted} before"
            ),
            Self::Shrunk { bytes, needed } => {
                write!(f, "was cut short: it has {bytes} bytes and had {needed}")
            }
            Self::TooSmall { bytes, needed } => {
                write!(f, "is too small: it has {bytes} bytes and needs {needed}")
            }
            Self::Size(why) => f.write_str(why),
            Self::Failed(e) => e.fmt(f),
            Self::Remove(errno) => {
                write!(f, "cannot be deleted: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl From<DiskError> for Reason {
    fn from(e: DiskError) -> Self {
        Self::Disk(e)
    }
}

impl Reason {
    /// The reason with the path it is about.
    pub(crate) fn at(self, path: &Path) -> FileError {
        FileError { path: path.to_owned(), reason: self }
    }
}

impl From<OpenError> for FileError {
    fn from(e: OpenError) -> Self {
        Self { path: e.path, reason: Reason::Open(e.reason) }
    }
}
