//! The seeds of a randomised test.

use std::ops::Range;

/// The seeds that the environment variable `variable` gives, as `FROM..TO` or as a count; else the
/// first `default_count`.
#[must_use]
pub fn seeds(variable: &str, default_count: u64) -> Range<u64> {
    let value = std::env::var(variable).unwrap_or_default();
    let (from, to) = value.split_once("..").unwrap_or(("0", &value));
    from.parse().unwrap_or(0)..to.parse().unwrap_or(default_count)
}
