//! Why a flat image cannot be created, opened, grown or deleted.

use std::fmt;
use std::path::{Path, PathBuf};

use rt::disk::{DiskError, OpenError, OpenReason};
use uuid::Uuid;
use wire::ShortText;

use crate::descriptor::DescriptorError;
use crate::label::{ImageLabelError, LOG_AREA};
use crate::medium::MediumError;
use crate::signatures::ExistingData;
use crate::{ClaimError, ClaimRefusal, OwnerRecord, OwnerRecordError, format_utc};

/// An error with the file or device that it concerns.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct ImageError {
    /// The file or device.
    pub path: PathBuf,
    /// The reason.
    pub reason: ImageErrorReason,
}

/// The owner of a disk, in short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskOwner {
    /// The names of the node and its machine.
    pub name: ShortText,
    /// The node; nil if unknown.
    pub node: Uuid,
    /// When it last wrote its owner record, in seconds since the Unix epoch by its own clock.
    pub last_seen_s: u32,
    /// The state of the ownership.
    pub state: DiskOwnerState,
}

/// The state of a node's ownership of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOwnerState {
    /// The node has not released it.
    NotReleased,
    /// Its heartbeat moves.
    InUse,
    /// It has just claimed it.
    JustClaimed,
    /// Unknown: the owner record is damaged.
    RecordDamaged,
    /// Unknown: the owner record has a newer format version.
    RecordUnsupported,
}

impl From<&ClaimRefusal> for DiskOwner {
    fn from(refusal: &ClaimRefusal) -> Self {
        let (record, how) = match refusal {
            ClaimRefusal::OwnedByOther(record) => (Some(record), DiskOwnerState::NotReleased),
            ClaimRefusal::InUse(record) => (Some(record), DiskOwnerState::InUse),
            ClaimRefusal::ClaimedByOther(record) => (record.as_ref(), DiskOwnerState::JustClaimed),
            ClaimRefusal::OwnerUnknown(OwnerRecordError::Damaged | OwnerRecordError::NoMagic) => {
                (None, DiskOwnerState::RecordDamaged)
            }
            ClaimRefusal::OwnerUnknown(_) => (None, DiskOwnerState::RecordUnsupported),
        };
        let Some(record) = record else {
            return Self {
                name: ShortText::new(""),
                node: Uuid::nil(),
                last_seen_s: 0,
                state: how,
            };
        };
        let OwnerRecord { owner, written_wall_time: written, .. } = &**record;
        let who = match owner.name == owner.host || owner.name.is_empty() {
            true => format!("host {}", owner.host),
            false => format!("node {} on host {}", owner.name, owner.host),
        };
        let seen_s = u32::try_from(written.as_secs()).unwrap_or(u32::MAX);
        Self { name: ShortText::new(&who), node: owner.node_id, last_seen_s: seen_s, state: how }
    }
}

impl fmt::Display for DiskOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name: who, node, last_seen_s: seen_s, state: how } = self;
        match how {
            DiskOwnerState::NotReleased => {
                let seen = format_utc(u64::from(*seen_s));
                write!(
                    f,
                    "belongs to {who} ({node}), which has not released it; last seen {seen} by its clock"
                )
            }
            DiskOwnerState::InUse => {
                write!(f, "is in use by {who} ({node}): its heartbeat moves; stop that node first")
            }
            DiskOwnerState::JustClaimed => write!(f, "was taken by {who} ({node})"),
            DiskOwnerState::RecordDamaged => {
                f.write_str("has a damaged owner record: which node uses it is unknown")
            }
            DiskOwnerState::RecordUnsupported => {
                f.write_str("has an owner record that this release does not know")
            }
        }
    }
}

impl DiskOwner {
    /// Whether the operator may have it taken over.
    #[must_use]
    pub fn can_take_over(&self) -> bool {
        matches!(self.state, DiskOwnerState::NotReleased | DiskOwnerState::RecordDamaged)
    }
}

impl From<ClaimError> for ImageErrorReason {
    fn from(why: ClaimError) -> Self {
        match why {
            ClaimError::Refused(refusal) => Self::ClaimedElsewhere((&refusal).into()),
            ClaimError::DiskFailed(error) => Self::Disk(error),
        }
    }
}

/// Why a flat image cannot be created, opened, grown or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageErrorReason {
    /// It cannot be opened.
    Open(OpenReason),
    /// The disk failed.
    Disk(DiskError),
    /// It has not answered for a minute.
    NotResponding,
    /// It is to be overwritten, but holds something else.
    HoldsOtherData(ExistingData),
    /// It is to be used, but holds something else.
    NotAVolume(ExistingData),
    /// It holds a volume.
    HoldsVolume {
        /// The volume.
        volume: Uuid,
    },
    /// It holds no volume: no label, and nothing else either.
    NoLabel,
    /// Both copies of its label are damaged.
    BothLabelsDamaged,
    /// It holds a volume, but a copy of its label was overwritten by something else.
    Overwritten(ExistingData),
    /// Its label is unusable.
    InvalidLabel(ImageLabelError),
    /// Its descriptor is unusable.
    InvalidDescriptor(DescriptorError),
    /// Its creation was never finished.
    CreationUnfinished,
    /// It holds another volume.
    WrongVolume {
        /// The volume that it holds.
        found: Uuid,
        /// The volume that was wanted.
        wanted: Uuid,
    },
    /// It is older than when it was last seen: an old copy.
    StaleCopy {
        /// The label's generation.
        found: u64,
        /// The lowest generation allowed.
        wanted: u64,
    },
    /// It has become smaller than its label says.
    Truncated {
        /// Its size in bytes.
        bytes: u64,
        /// The size in bytes that it needs.
        needed: u64,
    },
    /// The device is too small.
    TooSmall {
        /// Its size in bytes.
        bytes: u64,
        /// The size in bytes that it needs.
        needed: u64,
    },
    /// It has no area for an intent log.
    NoLogArea {
        /// Offset of its data, in bytes.
        data_offset: u64,
    },
    /// Another machine has claimed its disk, or may have.
    ClaimedElsewhere(DiskOwner),
    /// The size is invalid.
    InvalidSize(&'static str),
    /// A new part of it could not be zeroed; the log has the cause.
    ZeroingFailed(block::Error),
    /// It could not be removed: the `errno`.
    RemoveFailed(i32),
}

impl fmt::Display for ImageErrorReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(OpenReason::NoDirectIo) => f.write_str(
                "its file system has no direct I/O (O_DIRECT); --buffered allows I/O through the \
                 page cache",
            ),
            Self::Open(reason) => reason.fmt(f),
            Self::Disk(e) => e.fmt(f),
            Self::NotResponding => f.write_str("it does not respond: check its cable and power"),
            Self::HoldsOtherData(what) => write!(f, "{what}; --force overwrites it"),
            Self::NotAVolume(what) => write!(f, "holds no volume: it {what}"),
            Self::HoldsVolume { volume } => {
                write!(f, "holds volume {volume}; --force overwrites it")
            }
            Self::NoLabel => f.write_str("holds no volume"),
            Self::BothLabelsDamaged => f.write_str("both copies of its label are damaged"),
            Self::Overwritten(what) => write!(f, "holds the remains of a volume, and it {what}"),
            Self::InvalidLabel(e) => write!(f, "holds {e}"),
            Self::InvalidDescriptor(e) => write!(f, "holds {e}"),
            Self::CreationUnfinished => {
                f.write_str("its creation was never finished; create it again")
            }
            Self::WrongVolume { found, wanted } => {
                write!(f, "holds volume {found}, not {wanted}")
            }
            Self::StaleCopy { found, wanted } => write!(
                f,
                "is an old copy: its label has generation {found}, but had generation {wanted} before"
            ),
            Self::Truncated { bytes, needed } => {
                write!(f, "was truncated: it has {bytes} bytes instead of {needed}")
            }
            Self::TooSmall { bytes, needed } => {
                write!(f, "is too small: it has {bytes} bytes and needs {needed}")
            }
            Self::NoLogArea { data_offset } => write!(
                f,
                "has no space for an intent log: its data begins at byte {data_offset}, but must not \
                 begin before byte {}",
                LOG_AREA.end
            ),
            Self::ClaimedElsewhere(by) => by.fmt(f),
            Self::InvalidSize(why) => f.write_str(why),
            Self::ZeroingFailed(e) => e.fmt(f),
            Self::RemoveFailed(errno) => {
                write!(f, "cannot be deleted: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl From<DiskError> for ImageErrorReason {
    fn from(e: DiskError) -> Self {
        Self::Disk(e)
    }
}

impl From<MediumError> for ImageErrorReason {
    fn from(failure: MediumError) -> Self {
        Self::Disk(failure.into())
    }
}

impl ImageErrorReason {
    /// Adds the path that the reason concerns.
    pub fn at_path(self, path: &Path) -> ImageError {
        ImageError { path: path.to_owned(), reason: self }
    }
}

impl From<OpenError> for ImageError {
    fn from(e: OpenError) -> Self {
        Self { path: e.path, reason: ImageErrorReason::Open(e.reason) }
    }
}

#[cfg(test)]
mod tests {
    use rt::disk::DiskErrorKind;

    use super::*;

    const VOLUME: Uuid = Uuid::from_u128(1);

    fn check(table: &[(ImageErrorReason, &str)]) {
        for (reason, text) in table {
            let error = reason.clone().at_path(Path::new("/images/mine"));
            assert_eq!(error.to_string(), format!("/images/mine: {text}"));
        }
    }

    #[test]
    fn system_errors_are_reported() {
        let no_space = DiskError { kind: DiskErrorKind::NoSpace, errno: 28 };
        check(&[
            (
                ImageErrorReason::Open(OpenReason::NoDirectIo),
                "its file system has no direct I/O (O_DIRECT); --buffered allows I/O through the \
                 page cache",
            ),
            (ImageErrorReason::Open(OpenReason::NotFound), "no such file or device"),
            (ImageErrorReason::Open(OpenReason::PermissionDenied), "permission denied"),
            (ImageErrorReason::Open(OpenReason::Busy), "in use: another process has it open"),
            (ImageErrorReason::Open(OpenReason::ReadOnly), "read-only: it cannot be written"),
            (
                ImageErrorReason::Open(OpenReason::NotAFileOrBlockDevice),
                "neither a file nor a block device",
            ),
            (
                ImageErrorReason::Open(OpenReason::BlocksTooLarge(16384)),
                "has blocks of 16384 bytes; more than 4096 are not supported",
            ),
            (ImageErrorReason::Open(OpenReason::Io(36)), "File name too long (os error 36)"),
            (ImageErrorReason::NotResponding, "it does not respond: check its cable and power"),
            (
                ImageErrorReason::Disk(no_space),
                "no space left: No space left on device (os error 28)",
            ),
            (
                ImageErrorReason::RemoveFailed(13),
                "cannot be deleted: Permission denied (os error 13)",
            ),
        ]);
    }

    #[test]
    fn existing_data_is_reported_with_the_remedy() {
        let foreign = ExistingData::KnownFormats(vec!["an XFS file system".to_owned()]);
        check(&[
            (
                ImageErrorReason::HoldsOtherData(foreign.clone()),
                "holds an XFS file system; --force overwrites it",
            ),
            (
                ImageErrorReason::HoldsOtherData(ExistingData::UnknownData { at: 512 }),
                "holds data of an unknown kind (at byte 512); --force overwrites it",
            ),
            (
                ImageErrorReason::HoldsOtherData(ExistingData::UnknownSpace { bytes: 512 }),
                "has 512 bytes of space with unknown data; --force overwrites it",
            ),
            (
                ImageErrorReason::NotAVolume(foreign.clone()),
                "holds no volume: it holds an XFS file system",
            ),
            (
                ImageErrorReason::HoldsVolume { volume: VOLUME },
                "holds volume 00000000-0000-0000-0000-000000000001; --force overwrites it",
            ),
            (ImageErrorReason::NoLabel, "holds no volume"),
            (ImageErrorReason::BothLabelsDamaged, "both copies of its label are damaged"),
            (
                ImageErrorReason::Overwritten(foreign),
                "holds the remains of a volume, and it holds an XFS file system",
            ),
            (
                ImageErrorReason::InvalidLabel(ImageLabelError::UnsupportedVersion(2)),
                "holds a label of version 2, which this release does not know",
            ),
            (
                ImageErrorReason::InvalidLabel(ImageLabelError::UnsupportedFeatures(0x10)),
                "holds a label with features (0x10) that this release does not know",
            ),
            (
                ImageErrorReason::InvalidLabel(ImageLabelError::InvalidField("generation")),
                "holds a label with an invalid generation",
            ),
        ]);
    }

    #[test]
    fn unsuitable_labels_and_sizes_are_reported() {
        let (bytes, needed) = (512, 4096);
        check(&[
            (
                ImageErrorReason::CreationUnfinished,
                "its creation was never finished; create it again",
            ),
            (
                ImageErrorReason::WrongVolume { found: VOLUME, wanted: Uuid::from_u128(2) },
                "holds volume 00000000-0000-0000-0000-000000000001, not \
                 00000000-0000-0000-0000-000000000002",
            ),
            (
                ImageErrorReason::StaleCopy { found: 3, wanted: 4 },
                "is an old copy: its label has generation 3, but had generation 4 before",
            ),
            (
                ImageErrorReason::Truncated { bytes, needed },
                "was truncated: it has 512 bytes instead of 4096",
            ),
            (
                ImageErrorReason::TooSmall { bytes, needed },
                "is too small: it has 512 bytes and needs 4096",
            ),
            (
                ImageErrorReason::NoLogArea { data_offset: 528_384 },
                "has no space for an intent log: its data begins at byte 528384, but must not begin \
                 before byte 958464",
            ),
            (
                ImageErrorReason::InvalidSize("the size is above 256 TiB"),
                "the size is above 256 TiB",
            ),
        ]);
    }
}
