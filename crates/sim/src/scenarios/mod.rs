//! The scenarios, one module each.

use crate::Scenario;

/// All of them.
#[must_use]
pub fn all() -> Vec<Scenario> {
    vec![]
}
