//! Why something cannot be done with a pool.

use std::fmt::Display;
use std::path::Path;

use rt::disk::{DiskError, DiskErrorKind, OpenError};

use super::metadata::Refused;

/// Why something cannot be done with a pool: what is wrong, with paths and serial numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PoolError {
    message: String,
    hint: Option<&'static str>,
    no_space: bool,
}

impl PoolError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, no_space: false }
    }

    /// About one disk.
    pub(super) fn at(path: &Path, what: impl Display) -> Self {
        Self::new(format!("{}: {what}", path.display()))
    }

    pub(super) fn hinting(self, hint: &'static str) -> Self {
        Self { hint: Some(hint), ..self }
    }

    pub(super) fn no_space(message: impl Into<String>) -> Self {
        Self { no_space: true, ..Self::new(message) }
    }

    /// Whether there is not enough room.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        self.no_space
    }

    /// The next step, where there is one.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        self.hint
    }
}

impl From<Refused> for PoolError {
    fn from(why: Refused) -> Self {
        let message = why.to_string();
        match why {
            Refused::TooManyLost | Refused::TooManyUnrepaired => Self::no_space(message),
            _ => Self::new(message),
        }
    }
}

impl From<OpenError> for PoolError {
    fn from(why: OpenError) -> Self {
        Self::new(why.to_string())
    }
}

/// What a failure of a disk means to a writer of metadata.
pub(super) fn failed(path: &Path, why: DiskError) -> PoolError {
    match why.kind {
        DiskErrorKind::NoSpace => PoolError::no_space(format!("{}: {why}", path.display())),
        _ => PoolError::at(path, why),
    }
}
