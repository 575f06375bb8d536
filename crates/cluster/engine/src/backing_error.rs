//! Why an operation on an image was refused or failed.

use std::fmt::Display;
use std::path::Path;

use api::{ErrorCode, PoolName};
use disk::{ImageError, ImageErrorReason};
use pool::PoolError;
use records::record::VolumeRecord;
use rt::disk::{DiskErrorKind, OpenReason};

/// Why an operation on an image was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BackingError {
    code: ErrorCode,
    message: String,
    /// The next step for the user, if there is one.
    pub hint: Option<&'static str>,
    /// Whether the disk may have lost completed writes: a sync failed, or the disk is gone.
    pub(super) device_lost: bool,
    /// Whether another node owns the image, and an operator may take it over from that node.
    can_take_over: bool,
    /// Whether an image that cannot be read may be there.
    pub is_unreadable: bool,
}

impl BackingError {
    /// The backing cannot be used, for the reason that `message` gives.
    pub fn refused(message: impl Into<String>) -> Self {
        Self {
            code: ErrorCode::Backing,
            message: message.into(),
            hint: None,
            device_lost: false,
            can_take_over: false,
            is_unreadable: false,
        }
    }

    /// The same error with this next step.
    pub fn with_hint(self, hint: Option<&'static str>) -> Self {
        Self { hint, ..self }
    }

    /// The disk of the image at `path` was lost while the image was opened.
    pub(super) fn device_lost(path: &Path, why: &impl Display) -> Self {
        Self { device_lost: true, ..Self::refused(format!("{}: {why}", path.display())) }
    }

    /// An error of a pool.
    pub(super) fn from_pool_error(pool: &PoolName, e: &PoolError) -> Self {
        let code = if e.is_no_space() { ErrorCode::NoSpace } else { ErrorCode::Backing };
        Self { code, hint: e.hint(), ..Self::refused(format!("pool {pool}: {e}")) }
    }

    /// The message without the name of the pool, for callers that name it themselves.
    pub fn message_without_pool(&self, pool: &PoolName) -> &str {
        let named = format!("pool {pool}: ");
        self.message.strip_prefix(&named).unwrap_or(&self.message)
    }

    /// The same error, naming the command that takes over the image if another node owns it.
    pub(super) fn with_takeover_hint(self, record: &VolumeRecord) -> Self {
        if !self.can_take_over {
            return self;
        }
        let (message, name) = (self.message, &record.name);
        let message = format!(
            "{message}; if that node will never use it again: windrose volume take-over {name}"
        );
        Self { message, ..self }
    }

    /// The error code in the API.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.code
    }
}

impl From<ImageError> for BackingError {
    fn from(e: ImageError) -> Self {
        let path = e.path.display();
        match e.reason {
            // The lower layer names a flag; here it is a setting of the node.
            ImageErrorReason::Open(OpenReason::NoDirectIo) => Self {
                hint: Some("set disks.buffered = true in the node's configuration to allow it"),
                ..Self::refused(format!("{path}: its file system has no direct I/O (O_DIRECT)"))
            },
            ImageErrorReason::Disk(error) if error.kind == DiskErrorKind::Gone => {
                Self { device_lost: true, ..Self::refused(e.to_string()) }
            }
            ImageErrorReason::Disk(error) if error.kind == DiskErrorKind::NoSpace => Self {
                code: ErrorCode::NoSpace,
                hint: Some("free some space, or create a smaller or a thin volume"),
                ..Self::refused(format!("{path}: there is not enough space"))
            },
            ImageErrorReason::Open(OpenReason::PermissionDenied) => Self {
                hint: Some("give the node's user permission to read and write it"),
                ..Self::refused(e.to_string())
            },
            ImageErrorReason::ClaimedElsewhere(by) => {
                Self { can_take_over: by.can_take_over(), ..Self::refused(e.to_string()) }
            }
            ImageErrorReason::Disk(_)
            | ImageErrorReason::BothLabelsDamaged
            | ImageErrorReason::Overwritten(_)
            | ImageErrorReason::InvalidLabel(_) => {
                Self { is_unreadable: true, ..Self::refused(e.to_string()) }
            }
            _ => Self::refused(e.to_string()),
        }
    }
}
