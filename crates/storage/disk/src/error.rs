//! Why a flat image cannot be created, opened, grown or deleted.

use std::fmt;
use std::path::{Path, PathBuf};

use rt::disk::{DiskError, OpenError, OpenReason};
use uuid::Uuid;
use wire::Text;

use crate::descriptor::BadDescriptor;
use crate::foreign::Foreign;
use crate::label::{BadLabel, LOG_AREA};
use crate::medium::Failure;
use crate::{BadRecord, NotTaken, OwnerRecord, Refusal, utc};

/// What went wrong with which file or device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct FileError {
    /// The file or device.
    pub path: PathBuf,
    /// Why.
    pub reason: Reason,
}

/// Who has a disk, in short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBy {
    /// What the node and its machine are called.
    pub who: Text,
    /// The node; nil if that is not known.
    pub node: Uuid,
    /// When it was last seen there, in seconds since the Unix epoch by its own clock.
    pub seen_s: u32,
    /// How it has the disk.
    pub how: Holding,
}

/// How a node has a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// It has not given it back.
    Owned,
    /// Its heartbeat moves.
    InUse,
    /// It has just taken it.
    Taken,
    /// Nobody knows: the owner record is damaged.
    Damaged,
    /// Nobody knows: the owner record is a newer release's.
    Unknown,
}

impl From<&Refusal> for HeldBy {
    fn from(refusal: &Refusal) -> Self {
        let (record, how) = match refusal {
            Refusal::Owned(record) => (Some(record), Holding::Owned),
            Refusal::InUse(record) => (Some(record), Holding::InUse),
            Refusal::Lost(record) => (record.as_ref(), Holding::Taken),
            Refusal::Unclear(BadRecord::Damaged | BadRecord::NoMagic) => (None, Holding::Damaged),
            Refusal::Unclear(_) => (None, Holding::Unknown),
        };
        let Some(record) = record else {
            return Self { who: Text::new(""), node: Uuid::nil(), seen_s: 0, how };
        };
        let OwnerRecord { owner, written, .. } = &**record;
        let who = match owner.name == owner.host || owner.name.is_empty() {
            true => format!("host {}", owner.host),
            false => format!("node {} on host {}", owner.name, owner.host),
        };
        let seen_s = u32::try_from(written.as_secs()).unwrap_or(u32::MAX);
        Self { who: Text::new(&who), node: owner.node, seen_s, how }
    }
}

impl fmt::Display for HeldBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, node, seen_s, how } = self;
        match how {
            Holding::Owned => {
                let seen = utc(u64::from(*seen_s));
                write!(
                    f,
                    "belongs to {who} ({node}), which has not released it; last seen {seen} by its clock"
                )
            }
            Holding::InUse => {
                write!(f, "is in use by {who} ({node}): its heartbeat moves; stop that node first")
            }
            Holding::Taken => write!(f, "was taken by {who} ({node})"),
            Holding::Damaged => {
                f.write_str("has a damaged owner record: which node uses it is not known")
            }
            Holding::Unknown => f.write_str("has an owner record that this release does not know"),
        }
    }
}

impl HeldBy {
    /// Whether a person may say that it is to be taken all the same.
    #[must_use]
    pub fn may_take_over(&self) -> bool {
        matches!(self.how, Holding::Owned | Holding::Damaged)
    }
}

impl From<NotTaken> for Reason {
    fn from(why: NotTaken) -> Self {
        match why {
            NotTaken::Refused(refusal) => Self::Held((&refusal).into()),
            NotTaken::Disk(error) => Self::Disk(error),
        }
    }
}

/// Why a flat image cannot be created, opened, grown or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It does not open.
    Open(OpenReason),
    /// It failed.
    Disk(DiskError),
    /// It has not answered for a minute.
    Silent,
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
    /// What it tells of its volume is not for us.
    BadDescriptor(BadDescriptor),
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
    /// It has no room for an intent log.
    NoRoomForLog {
        /// Where its data begins, in bytes from the start.
        data_offset: u64,
    },
    /// Another machine has its disk, or may have it.
    Held(HeldBy),
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
            Self::Silent => f.write_str("it does not answer: see to its cable and power"),
            Self::Foreign(what) => write!(f, "{what}; --force overwrites it"),
            Self::NotAVolume(what) => write!(f, "holds no volume: it {what}"),
            Self::Labelled { volume } => {
                write!(f, "holds volume {volume}; --force overwrites it")
            }
            Self::NoLabel => f.write_str("holds no volume"),
            Self::TornLabel => f.write_str("both copies of its label are damaged"),
            Self::Overwritten(what) => write!(f, "holds what is left of a volume, and it {what}"),
            Self::BadLabel(e) => write!(f, "holds {e}"),
            Self::BadDescriptor(e) => write!(f, "holds {e}"),
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
            Self::NoRoomForLog { data_offset } => write!(
                f,
                "has no room for an intent log: its data begins at byte {data_offset}, and must not \
                 before {}",
                LOG_AREA.end
            ),
            Self::Held(by) => by.fmt(f),
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

impl From<Failure> for Reason {
    fn from(failure: Failure) -> Self {
        Self::Disk(failure.into())
    }
}

impl Reason {
    /// The reason with the path it is about.
    pub fn at(self, path: &Path) -> FileError {
        FileError { path: path.to_owned(), reason: self }
    }
}

impl From<OpenError> for FileError {
    fn from(e: OpenError) -> Self {
        Self { path: e.path, reason: Reason::Open(e.reason) }
    }
}

#[cfg(test)]
mod tests {
    use rt::disk::DiskErrorKind;

    use super::*;

    const VOLUME: Uuid = Uuid::from_u128(1);

    fn check(table: &[(Reason, &str)]) {
        for (reason, text) in table {
            let error = reason.clone().at(Path::new("/images/mine"));
            assert_eq!(error.to_string(), format!("/images/mine: {text}"));
        }
    }

    #[test]
    fn what_the_system_refuses_is_said() {
        let no_space = DiskError { kind: DiskErrorKind::NoSpace, errno: 28 };
        check(&[
            (
                Reason::Open(OpenReason::NoDirectIo),
                "its file system has no direct I/O (O_DIRECT); --buffered allows I/O through the \
                 page cache",
            ),
            (Reason::Open(OpenReason::NotFound), "no such file or device"),
            (Reason::Open(OpenReason::PermissionDenied), "permission denied"),
            (Reason::Open(OpenReason::Busy), "in use: somebody else has it open"),
            (Reason::Open(OpenReason::ReadOnly), "read-only: it cannot be written"),
            (Reason::Open(OpenReason::NotAFileOrBlockDevice), "neither a file nor a block device"),
            (
                Reason::Open(OpenReason::LargeBlocks(16384)),
                "has blocks of 16384 bytes; more than 4096 are not supported",
            ),
            (Reason::Open(OpenReason::Io(36)), "File name too long (os error 36)"),
            (Reason::Silent, "it does not answer: see to its cable and power"),
            (Reason::Disk(no_space), "no space left: No space left on device (os error 28)"),
            (Reason::Remove(13), "cannot be deleted: Permission denied (os error 13)"),
        ]);
    }

    #[test]
    fn what_is_in_the_way_is_said_and_what_helps() {
        let foreign = Foreign::Known(vec!["an XFS file system".to_owned()]);
        check(&[
            (Reason::Foreign(foreign.clone()), "holds an XFS file system; --force overwrites it"),
            (
                Reason::Foreign(Foreign::Unknown { at: 512 }),
                "holds data of an unknown kind (at byte 512); --force overwrites it",
            ),
            (
                Reason::Foreign(Foreign::Space { bytes: 512 }),
                "has 512 bytes of space with unknown data; --force overwrites it",
            ),
            (Reason::NotAVolume(foreign.clone()), "holds no volume: it holds an XFS file system"),
            (
                Reason::Labelled { volume: VOLUME },
                "holds volume 00000000-0000-0000-0000-000000000001; --force overwrites it",
            ),
            (Reason::NoLabel, "holds no volume"),
            (Reason::TornLabel, "both copies of its label are damaged"),
            (
                Reason::Overwritten(foreign),
                "holds what is left of a volume, and it holds an XFS file system",
            ),
            (
                Reason::BadLabel(BadLabel::Version(2)),
                "holds a label of version 2, which this release does not know",
            ),
            (
                Reason::BadLabel(BadLabel::Features(0x10)),
                "holds a label with features (0x10) that this release does not know",
            ),
            (
                Reason::BadLabel(BadLabel::Field("generation")),
                "holds a label whose generation makes no sense",
            ),
        ]);
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let (bytes, needed) = (512, 4096);
        check(&[
            (Reason::Unfinished, "its creation was never finished; create it again"),
            (
                Reason::OtherVolume { found: VOLUME, wanted: Uuid::from_u128(2) },
                "holds volume 00000000-0000-0000-0000-000000000001, not \
                 00000000-0000-0000-0000-000000000002",
            ),
            (
                Reason::Outdated { found: 3, wanted: 4 },
                "is an old copy: its label has generation 3, and had 4 before",
            ),
            (Reason::Shrunk { bytes, needed }, "was cut short: it has 512 bytes and had 4096"),
            (Reason::TooSmall { bytes, needed }, "is too small: it has 512 bytes and needs 4096"),
            (
                Reason::NoRoomForLog { data_offset: 528_384 },
                "has no room for an intent log: its data begins at byte 528384, and must not before \
                 958464",
            ),
            (Reason::Size("the size is above 256 TiB"), "the size is above 256 TiB"),
        ]);
    }
}
