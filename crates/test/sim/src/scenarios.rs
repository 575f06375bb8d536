//! The scenarios, one module each.

mod clients;
pub(crate) mod file;
pub(crate) mod intent_log;
pub(crate) mod iscsi;
pub(crate) mod leaf;
pub(crate) mod mirror;
pub(crate) mod nvme;
pub(crate) mod pool;
pub(crate) mod shared_disks;
mod single_node;
pub(crate) mod storage;
pub(crate) mod volume;
mod workload_model;

use file::FlushBehaviour;
use intent_log::Mistake;

use crate::Scenario;

/// All of them.
#[must_use]
pub fn all() -> Vec<Scenario> {
    let others = [
        Scenario {
            name: "volume-on-leaf",
            description: "a volume on a bare disk: overlapping commands, aborts, crashes, disk faults",
            test_seeds: 200,
            run: |w| Box::pin(leaf::volume_on_leaf(w)),
        },
        Scenario {
            name: "file-volume",
            description: "a volume on a flat image: creation, growth, deletion, overlapping commands, \
                    crashes, torn labels, disk faults, full file systems",
            test_seeds: 200,
            run: |w| Box::pin(file::run(w, FlushBehaviour::Performed)),
        },
        Scenario {
            name: "shared-disk",
            description: "two machines that share the disks of one image or pool and take them over from each \
                    other: pauses, kills, power cuts, disks that are silent, drifting clocks",
            test_seeds: 40,
            run: |w| Box::pin(shared_disks::run(w, disk::claim::Mistake::None)),
        },
        Scenario {
            name: "intent-log",
            description: "the write-intent log of an image: writes, flushes, cleared dirty bits, adopted \
                    configurations, crashes, torn and corrupt pages",
            test_seeds: 200,
            run: |w| Box::pin(intent_log::run(w, Mistake::None)),
        },
        Scenario {
            name: "pool",
            description: "volumes of a pool at all levels, on one core or several: crashes, disks that fail, are removed, \
                    return, are rolled back, or are replaced, rebuilds",
            test_seeds: 20,
            run: |w| Box::pin(pool::run(w, ::pool::Mistake::None)),
        },
        Scenario {
            name: "iscsi-node",
            description: "a node and its iSCSI initiators: crashes, disk faults, cut and slow links",
            test_seeds: 100,
            run: |w| Box::pin(iscsi::run(w, FlushBehaviour::Performed)),
        },
        Scenario {
            name: "nvme-node",
            description: "a node and its NVMe/TCP hosts: crashes, disk faults, cut and slow links",
            test_seeds: 100,
            run: |w| Box::pin(nvme::run(w, FlushBehaviour::Performed)),
        },
    ];
    mirror_scenarios().into_iter().chain(others).collect()
}

/// The scenarios of a mirrored volume.
fn mirror_scenarios() -> [Scenario; 4] {
    [
        Scenario {
            name: "mirror",
            description: "a mirrored volume on two or three nodes, served by all: crashes, cuts, pauses, \
                    drifting clocks, an intermittent store, planned changes",
            test_seeds: 10,
            run: |w| Box::pin(mirror::run(w, mirror::ScenarioConfig::default())),
        },
        Scenario {
            name: "mirror-initiators",
            description: "the same volume, used by iSCSI and NVMe/TCP initiators that move between nodes",
            test_seeds: 15,
            run: |w| Box::pin(mirror::initiators::run(w, mirror::ScenarioConfig::default())),
        },
        Scenario {
            name: "mirror-full",
            description: "the same volume on hosts with little space: copies that are full, one alone or all of them",
            test_seeds: 6,
            run: |w| Box::pin(mirror::full::run(w, mirror::ScenarioConfig::default())),
        },
        Scenario {
            name: "mirror-reservations",
            description: "the same volume, and hosts that fence each other by persistent reservations",
            test_seeds: 8,
            run: |w| Box::pin(mirror::fencing::run(w, mirror::ScenarioConfig::default())),
        },
    ]
}
