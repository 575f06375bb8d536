//! The scenarios, one module each.

pub(crate) mod storage;

use crate::Scenario;

/// All of them.
#[must_use]
pub fn all() -> Vec<Scenario> {
    vec![]
}
