//! Pools of disks.

use api::Rebuild;

use super::*;
use crate::pool_status::{PoolFacts, PoolObserved};
use engine::{BackingError, DamagedRange};

/// With a pool that holds its volume, changed by `change`.
fn pool(change: impl FnOnce(&mut PoolFacts)) -> NodeFacts {
    let mut facts = pooled(|_| {});
    change(&mut facts.pools[0]);
    facts
}

fn range(facts: &NodeFacts) -> DamagedRange {
    let volume = facts.volumes[0].0.record.id;
    DamagedRange { volume, offset_bytes: disk::LABEL_AREA_BYTES + 4096, len_bytes: 8192 }
}

/// With a full pool.
fn full(lacks_disk: bool) -> NodeFacts {
    let mut facts = pooled(|_| {});
    let volumes = vec![facts.volumes[0].0.record.id];
    let name = "tank".parse().unwrap();
    let pool = PoolSpace { name, bytes: 100 << 30, free: 0, lacks_disk, volumes };
    facts.space.pools = vec![pool];
    facts.low_space_percent = 0;
    facts
}

pub(super) const POOLS: &[Row] = &[
    Row {
        case: "the pool cannot be opened",
        facts: || {
            let mut facts = pool(|pool| {
                let why = BackingError::refused("2 of 3 disks are not there");
                (pool.observed, pool.report) = (PoolObserved::OpenFailed(why), None);
            });
            facts.volumes[0].1 = Observed::OpenFailed { reason: "pool tank is not open".into() };
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            ("it is offline: 2 of 3 disks are not there", "windrose pool open tank --without DISK"),
            ("pool tank is not open", "the node retries every 30 seconds"),
        ],
    },
    Row {
        case: "more disks are out than the level bears",
        facts: || {
            pooled(|pool| {
                pool.fault_tolerance = None;
                pool.volumes.iter_mut().for_each(|volume| volume.fault_tolerance = None);
                pool.disks.iter_mut().take(2).for_each(|disk| disk.state = PoolDiskState::Detached);
            })
        },
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[
            (
                "is lost",
                "bring back the disks that are out, or restore those volumes from a backup",
            ),
            ("disk S0 at /dev/sd0 is out", "windrose pool replace tank S0 --with DISK"),
            ("disk S1 at /dev/sd1 is out", "windrose pool replace tank S1 --with DISK"),
        ],
    },
    Row {
        case: "blocks are lost",
        facts: || {
            let mut facts = pooled(|_| {});
            let lost = range(&facts);
            facts.pools[0].report.as_mut().unwrap().lost_ranges = vec![lost];
            facts
        },
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[("are lost: no disk can read them", "restore them from a backup")],
    },
    Row {
        case: "a scrub could not repair blocks",
        facts: || {
            let mut facts = pooled(|_| {});
            let wrong = range(&facts);
            facts.pools[0].report.as_mut().unwrap().unrepaired_ranges = vec![wrong];
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("could not be repaired by a scrub", "windrose pool clear tank")],
    },
    Row {
        case: "a scrub could not repair more than is remembered",
        facts: || pooled(|pool| pool.unrepaired_truncated = true),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("more unrepairable ranges than can be listed", "windrose pool scrub tank")],
    },
    Row {
        case: "a disk is being rebuilt",
        facts: || {
            pool(|pool| {
                pool.rebuild =
                    Some(Rebuild { remaining_extents: 3, total_extents: 9, eta_s: Some(61) });
            })
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("3 of 9 pieces left, about 2 min", "resolves itself")],
    },
    Row {
        case: "a disk that is to be removed has nowhere to go",
        facts: || {
            pooled(|pool| {
                (pool.disks[0].state, pool.disks[0].has_no_target) =
                    (PoolDiskState::Draining, true);
            })
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("the other disks have no room", "windrose pool")],
    },
    Row {
        case: "a disk fails reads",
        facts: || pooled(|pool| pool.disks[0].read_errors = 2),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("2 reads", "windrose pool replace tank S0")],
    },
    Row {
        case: "the file of a pool is damaged",
        facts: || NodeFacts {
            damaged_pools: vec!["/v/pools/zoo.json: torn".into()],
            ..alone(open())
        },
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[("/v/pools/zoo.json: torn", "repair the file, and restart the node")],
    },
    Row {
        case: "a pool is full",
        facts: || full(false),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("and writes that need space fail", "windrose pool add tank DISK")],
    },
    Row {
        case: "a disk of a pool is out, and the others have no room",
        facts: || full(true),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "are stored without the disk that is out, or",
            "replace the disk that is out",
        )],
    },
];
