//! Errors in a configuration.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// An invalid configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}: {message}", file.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1, if one is at fault.
    pub line: Option<usize>,
    /// The error; names the setting and the allowed values.
    pub message: String,
}

impl ConfigError {
    pub(super) fn file(file: &Path, message: String) -> Self {
        Self { file: file.to_owned(), line: None, message }
    }
}

/// An error in the text of a configuration.
#[derive(Debug)]
pub(super) struct SettingError {
    /// The bytes of the text at fault.
    pub(super) span: Option<Range<usize>>,
    /// The error.
    pub(super) message: String,
}

impl SettingError {
    pub(super) fn at(at: Range<usize>, message: impl Into<String>) -> Self {
        Self { span: Some(at), message: message.into() }
    }

    /// An error of the whole, not of a line.
    pub(super) fn without_location(message: impl Into<String>) -> Self {
        Self { span: None, message: message.into() }
    }

    pub(super) fn with_location(self, path: &Path, text: &str) -> ConfigError {
        let line = self.span.map(|at| {
            let before = text.as_bytes().get(..at.start).unwrap_or(text.as_bytes());
            1 + before.iter().filter(|&&b| b == b'\n').count()
        });
        ConfigError { file: path.to_owned(), line, message: self.message }
    }
}
