//! The scenarios, one module each.

pub(crate) mod storage;
pub(crate) mod volume;

use crate::Scenario;
use crate::planted::leaf;

/// All of them.
#[must_use]
pub fn all() -> Vec<Scenario> {
    vec![Scenario {
        name: "volume-on-leaf",
        about: "a volume on a bare disk: overlapping commands, aborts, crashes, disk faults",
        test_seeds: 200,
        play: |w| Box::pin(leaf::volume_on_leaf(w)),
    }]
}
