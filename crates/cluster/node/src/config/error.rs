//! What is wrong with a configuration, told so that it can be put right.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// A configuration that was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}: {message}", file.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1, where one is to blame.
    pub line: Option<usize>,
    /// What is wrong: names the setting and what is allowed.
    pub message: String,
}

impl ConfigError {
    pub(super) fn file(file: &Path, message: String) -> Self {
        Self { file: file.to_owned(), line: None, message }
    }
}

/// Something wrong at a place in the text.
#[derive(Debug)]
pub(super) struct Flaw {
    /// Bytes of the text it concerns.
    pub(super) at: Option<Range<usize>>,
    /// What is wrong.
    pub(super) message: String,
}

impl Flaw {
    pub(super) fn new(at: Range<usize>, message: impl Into<String>) -> Self {
        Self { at: Some(at), message: message.into() }
    }

    /// Something wrong with the whole, not with a line.
    pub(super) fn whole(message: impl Into<String>) -> Self {
        Self { at: None, message: message.into() }
    }

    pub(super) fn locate(self, path: &Path, text: &str) -> ConfigError {
        let line = self.at.map(|at| {
            let before = text.as_bytes().get(..at.start).unwrap_or(text.as_bytes());
            1 + before.iter().filter(|&&b| b == b'\n').count()
        });
        ConfigError { file: path.to_owned(), line, message: self.message }
    }
}
