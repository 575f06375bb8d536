//! The scenarios, one module each.

mod clients;
pub(crate) mod file;
pub(crate) mod storage;
pub(crate) mod volume;

use crate::Scenario;
use crate::planted::leaf;

/// All of them.
#[must_use]
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "volume-on-leaf",
            about: "a volume on a bare disk: overlapping commands, aborts, crashes, disk faults",
            test_seeds: 200,
            play: |w| Box::pin(leaf::volume_on_leaf(w)),
        },
        Scenario {
            name: "file-volume",
            about: "a volume on a flat image: creation, growth, deletion, overlapping commands, \
                    crashes, torn labels, disk faults, full file systems",
            test_seeds: 200,
            play: |w| Box::pin(file::play(w, file::Flushes::Honest)),
        },
    ]
}
