//! The faults of a cluster, and how long an operation may take because of each.

use crate::{
    cluster::{Cluster, NODE_A, NODE_B, WITNESS},
    network::{Cut, Network},
};
use anyhow::{Result, ensure};
use rustix::process::{Signal, kill_process};
use std::time::Duration;

/// How long an operation may take.
#[derive(Clone, Copy)]
pub(super) enum PauseClass {
    /// No serving node is lost.
    None,
    /// A node stops in order.
    Planned,
    /// A serving node is lost and its leases have to expire; or it is alive but unreachable and
    /// must be fenced (RFD 0010, 4.8).
    Unplanned,
    /// All nodes were down; that time is added.
    Outage,
}

impl PauseClass {
    /// The promised bound, and the bound on a machine that may also run builds. Compare with the
    /// first; the second only distinguishes a slow machine from a mirror without timeouts.
    pub(super) fn bounds(self) -> Option<(Duration, Duration)> {
        let milliseconds = |promised, allowed| {
            Some((Duration::from_millis(promised), Duration::from_millis(allowed)))
        };
        match self {
            Self::None | Self::Planned => milliseconds(200, 1500),
            Self::Unplanned => milliseconds(4000, 6000),
            Self::Outage => None,
        }
    }

    /// Fails if an operation took longer than allowed.
    pub(super) fn check(self, longest: Duration) -> Result<()> {
        if let Some((promised, allowed)) = self.bounds() {
            ensure!(longest <= allowed, "an operation took {longest:?}, promised {promised:?}");
        }
        Ok(())
    }
}

/// A fault of a cluster under load.
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) pause: PauseClass,
    /// Injects the fault, keeps it for the given time, removes it.
    pub(super) run: fn(&mut Cluster, Duration) -> Result<()>,
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "kill -9 of node a",
        pause: PauseClass::Unplanned,
        run: |cluster, hold| kill(cluster, NODE_A, hold),
    },
    Scenario {
        name: "kill -9 of node b",
        pause: PauseClass::Unplanned,
        run: |cluster, hold| kill(cluster, NODE_B, hold),
    },
    Scenario {
        name: "kill -9 of the witness",
        pause: PauseClass::None,
        run: |cluster, hold| kill(cluster, WITNESS, hold),
    },
    Scenario {
        name: "node a stops for 10 s (SIGSTOP)",
        pause: PauseClass::Unplanned,
        run: |cluster, hold| freeze(cluster, NODE_A, hold * 2),
    },
    Scenario {
        name: "no data between the data nodes",
        pause: PauseClass::Unplanned,
        run: |cluster, hold| cut(cluster, hold, |network| network.cut(NODE_A, NODE_B, Cut::Data)),
    },
    Scenario {
        name: "no data from node a to node b, but back",
        pause: PauseClass::Unplanned,
        run: |cluster, hold| {
            cut(cluster, hold, |network| network.cut_one_way(NODE_A, NODE_B, Cut::Data))
        },
    },
    Scenario {
        name: "no heartbeats between the data nodes",
        pause: PauseClass::Unplanned,
        run: |cluster, hold| {
            cut(cluster, hold, |network| network.cut(NODE_A, NODE_B, Cut::Heartbeat))
        },
    },
    Scenario {
        name: "node a without the store",
        pause: PauseClass::None,
        run: |cluster, hold| {
            cut(cluster, hold, |network| {
                network.cut(NODE_A, NODE_B, Cut::Store)?;
                network.cut(NODE_A, WITNESS, Cut::Store)
            })
        },
    },
    Scenario {
        name: "node b alone, without any cable",
        pause: PauseClass::Unplanned,
        run: |cluster, hold| cut(cluster, hold, |network| network.unplug(NODE_B)),
    },
    Scenario { name: "node b drained and resumed", pause: PauseClass::Planned, run: drain },
    Scenario {
        name: "node a stopped in order and started",
        pause: PauseClass::Planned,
        run: restart,
    },
    Scenario {
        name: "no store at all for a minute",
        pause: PauseClass::None,
        run: |cluster, hold| store_outage(cluster, hold * 12),
    },
    Scenario { name: "kill -9 of all three at once", pause: PauseClass::Outage, run: blackout },
];

/// Combined faults, for [`chaos`](super::chaos): the volume may be down until a node returns.
pub(super) const CHAOS_SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "node b dies before node a, killed earlier, is in sync again",
        pause: PauseClass::Outage,
        run: |cluster, hold| {
            kill(cluster, NODE_A, hold)?;
            kill(cluster, NODE_B, hold)
        },
    },
    Scenario {
        name: "node a dies while there is no store",
        pause: PauseClass::Outage,
        run: |cluster, hold| {
            cluster.signal_store(Signal::STOP)?;
            cluster.nodes[NODE_A].kill()?;
            std::thread::sleep(hold);
            let others = cluster.store_members()?;
            others.iter().try_for_each(|member| kill_process(*member, Signal::CONT))?;
            cluster.nodes[NODE_A].start()
        },
    },
    Scenario {
        name: "both data nodes stop (SIGSTOP)",
        pause: PauseClass::Outage,
        run: |cluster, hold| {
            cluster.nodes[NODE_A].freeze()?;
            freeze(cluster, NODE_B, hold)?;
            cluster.nodes[NODE_A].thaw()
        },
    },
    Scenario {
        name: "node b is killed while nothing comes from node a to it",
        pause: PauseClass::Outage,
        run: |cluster, hold| {
            cluster.network.cut_one_way(NODE_A, NODE_B, Cut::Data)?;
            std::thread::sleep(hold / 4);
            cluster.nodes[NODE_B].kill()?;
            cluster.network.heal()?;
            std::thread::sleep(hold);
            cluster.nodes[NODE_B].start()
        },
    },
];

fn kill(cluster: &mut Cluster, node: usize, hold: Duration) -> Result<()> {
    cluster.nodes[node].kill()?;
    std::thread::sleep(hold);
    cluster.nodes[node].start()
}

fn freeze(cluster: &mut Cluster, node: usize, hold: Duration) -> Result<()> {
    cluster.nodes[node].freeze()?;
    std::thread::sleep(hold);
    cluster.nodes[node].thaw()
}

fn cut(cluster: &mut Cluster, hold: Duration, what: impl Fn(&Network) -> Result<()>) -> Result<()> {
    let done = what(&cluster.network);
    std::thread::sleep(hold);
    cluster.network.heal()?;
    done
}

fn drain(cluster: &mut Cluster, hold: Duration) -> Result<()> {
    cluster.nodes[NODE_B].command(&["node", "drain"])?;
    std::thread::sleep(hold);
    cluster.nodes[NODE_B].command(&["node", "resume"]).map(|_| ())
}

fn restart(cluster: &mut Cluster, hold: Duration) -> Result<()> {
    let status = cluster.nodes[NODE_A].stop()?;
    ensure!(status.success(), "the node ended with {status}");
    std::thread::sleep(hold);
    cluster.nodes[NODE_A].start()
}

fn store_outage(cluster: &mut Cluster, hold: Duration) -> Result<()> {
    cluster.signal_store(Signal::STOP)?;
    std::thread::sleep(hold);
    cluster.signal_store(Signal::CONT)
}

fn blackout(cluster: &mut Cluster, hold: Duration) -> Result<()> {
    cluster.blackout(|_| {
        std::thread::sleep(hold);
        Ok(())
    })
}
