//! Errors about invalid values from outside.

/// Longest part of a refused value that a message repeats, in characters.
const MAX_SHOWN_CHARS: usize = 80;

/// Why a value was refused: what it should be, what was given, what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not a valid {expected_kind}: {allowed}")]
pub struct InvalidValue {
    /// What the value should be, such as "volume name".
    pub expected_kind: &'static str,
    /// The refused value, shortened.
    pub given: String,
    /// What would have been accepted.
    pub allowed: String,
}

impl InvalidValue {
    /// Creates the error for `given`.
    #[must_use]
    pub fn new(what: &'static str, given: &str, allowed: impl Into<String>) -> Self {
        let mut shown: String = given.chars().take(MAX_SHOWN_CHARS).collect();
        if shown.len() < given.len() {
            shown.push('…');
        }
        Self { expected_kind: what, given: shown, allowed: allowed.into() }
    }
}
