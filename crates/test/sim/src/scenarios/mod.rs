//! The scenarios, one module each.

mod book;
mod clients;
pub(crate) mod file;
pub(crate) mod intent;
pub(crate) mod iscsi;
pub(crate) mod mirror;
mod node;
pub(crate) mod nvme;
pub(crate) mod pool;
pub(crate) mod shared;
pub(crate) mod storage;
pub(crate) mod volume;

use file::Flushes;
use intent::Mistake;

use crate::Scenario;
use crate::planted::leaf;

/// All of them.
#[must_use]
pub fn all() -> Vec<Scenario> {
    let others = [
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
            play: |w| Box::pin(file::play(w, Flushes::Honest)),
        },
        Scenario {
            name: "shared-disk",
            about: "two machines that reach the disks of one image or pool, and take them from each \
                    other: pauses, kills, power cuts, disks that are silent, drifting clocks",
            test_seeds: 40,
            play: |w| Box::pin(shared::play(w, disk::claim::Mistake::None)),
        },
        Scenario {
            name: "intent-log",
            about: "the write-intent log of an image: writes, flushes, cleared marks, adopted \
                    configurations, crashes, torn and rotten pages",
            test_seeds: 200,
            play: |w| Box::pin(intent::play(w, Mistake::None)),
        },
        Scenario {
            name: "pool",
            about: "volumes of a pool at all levels, on one core or several: crashes, disks that fail, are pulled out, \
                    come back, are set back, or are replaced, rebuilds",
            test_seeds: 20,
            play: |w| Box::pin(pool::play(w, ::pool::Mistake::None)),
        },
        Scenario {
            name: "iscsi-node",
            about: "a node and its iSCSI initiators: crashes, disk faults, cut and slow links",
            test_seeds: 100,
            play: |w| Box::pin(iscsi::play(w, Flushes::Honest)),
        },
        Scenario {
            name: "nvme-node",
            about: "a node and its NVMe/TCP hosts: crashes, disk faults, cut and slow links",
            test_seeds: 100,
            play: |w| Box::pin(nvme::play(w, Flushes::Honest)),
        },
    ];
    mirrored().into_iter().chain(others).collect()
}

/// Those of a mirrored volume.
fn mirrored() -> [Scenario; 4] {
    [
        Scenario {
            name: "mirror",
            about: "a mirrored volume on two or three nodes, served by all: crashes, cuts, pauses, \
                    drifting clocks, a store that comes and goes, planned changes",
            test_seeds: 10,
            play: |w| Box::pin(mirror::play(w, mirror::Plan::default())),
        },
        Scenario {
            name: "mirror-initiators",
            about: "the same volume, used by iSCSI and NVMe/TCP initiators that go from node to node",
            test_seeds: 15,
            play: |w| Box::pin(mirror::initiators::play(w, mirror::Plan::default())),
        },
        Scenario {
            name: "mirror-full",
            about: "the same volume on hosts with little space: copies that are full, one alone or all of them",
            test_seeds: 6,
            play: |w| Box::pin(mirror::full::play(w, mirror::Plan::default())),
        },
        Scenario {
            name: "mirror-reservations",
            about: "the same volume, and hosts that take it from each other by persistent reservations",
            test_seeds: 8,
            play: |w| Box::pin(mirror::fencing::play(w, mirror::Plan::default())),
        },
    ]
}
