//! A value from outside that is not what it has to be.

/// Longest part of a refused value that a message repeats, in characters.
const SHOWN: usize = 80;

/// Why a value was refused: what it was meant to be, what was given, what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not a valid {what}: {allowed}")]
pub struct Invalid {
    /// What the value was meant to be, such as "volume name".
    pub what: &'static str,
    /// The refused value, shortened.
    pub given: String,
    /// What would have been accepted.
    pub allowed: String,
}

impl Invalid {
    /// A refusal of `given`.
    #[must_use]
    pub fn new(what: &'static str, given: &str, allowed: impl Into<String>) -> Self {
        let mut shown: String = given.chars().take(SHOWN).collect();
        if shown.len() < given.len() {
            shown.push('…');
        }
        Self { what, given: shown, allowed: allowed.into() }
    }
}
