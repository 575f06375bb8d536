//! Errors of a pool.

use std::fmt::Display;
use std::path::Path;

use pool_metadata::ChangeError;
use pool_metadata::evacuation::RemovalRefused;
use rt::disk::{DiskError, DiskErrorKind, OpenError};

/// Why something cannot be done with a pool: what is wrong, with paths and serial numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PoolError {
    message: String,
    hint: Option<&'static str>,
    is_no_space: bool,
}

impl PoolError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, is_no_space: false }
    }

    /// An error of one disk.
    pub(super) fn on_disk(path: &Path, what: impl Display) -> Self {
        Self::new(format!("{}: {what}", path.display()))
    }

    pub(super) fn with_hint(self, hint: &'static str) -> Self {
        Self { hint: Some(hint), ..self }
    }

    pub(super) fn no_space(message: impl Into<String>) -> Self {
        Self { is_no_space: true, ..Self::new(message) }
    }

    /// Whether the cause is a lack of space.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        self.is_no_space
    }

    /// What to do next, if anything can be done.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        self.hint
    }
}

impl From<ChangeError> for PoolError {
    fn from(why: ChangeError) -> Self {
        let message = why.to_string();
        match why {
            ChangeError::TooManyDamagedRanges | ChangeError::TooManyUnrepairedRanges => {
                Self::no_space(message)
            }
            _ => Self::new(message),
        }
    }
}

impl From<RemovalRefused> for PoolError {
    fn from(why: RemovalRefused) -> Self {
        Self::no_space(why.to_string()).with_hint("add a disk first (windrose pool add)")
    }
}

impl From<OpenError> for PoolError {
    fn from(why: OpenError) -> Self {
        Self::new(why.to_string())
    }
}

/// The pool error for a failed write of metadata.
pub(super) fn metadata_io_error(path: &Path, why: DiskError) -> PoolError {
    match why.kind {
        DiskErrorKind::NoSpace => PoolError::no_space(format!("{}: {why}", path.display())),
        _ => PoolError::on_disk(path, why),
    }
}
