//! What happens to a cluster, and how long an operation may take because of it.

use crate::{
    cluster::{A, B, Cluster, WITNESS},
    network::{Cut, Network},
};
use anyhow::{Result, ensure};
use rustix::process::{Signal, kill_process};
use std::time::Duration;

/// How long an operation may take.
#[derive(Clone, Copy)]
pub(super) enum Pause {
    /// Nothing that serves has gone.
    None,
    /// A node leaves in order.
    Planned,
    /// A node that serves has gone, and its leases have to run out; or it lives and is not reached, and has to be told
    /// (RFD 0010, 4.8).
    Unplanned,
    /// All nodes were away: as long as that.
    Outage,
}

impl Pause {
    /// What is promised, and what is allowed on a machine that may build something at the same time. The first is what
    /// to compare with; the second only tells a slow machine from a mirror that waits for nothing.
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

    /// Fails if an operation took longer than is allowed.
    pub(super) fn check(self, longest: Duration) -> Result<()> {
        if let Some((promised, allowed)) = self.bounds() {
            ensure!(longest <= allowed, "an operation took {longest:?}, promised {promised:?}");
        }
        Ok(())
    }
}

/// Something that happens to a cluster under load.
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) pause: Pause,
    /// Brings the trouble, lets it last as long as told, takes it away.
    pub(super) happens: fn(&mut Cluster, Duration) -> Result<()>,
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "kill -9 of node a",
        pause: Pause::Unplanned,
        happens: |cluster, hold| kill(cluster, A, hold),
    },
    Scenario {
        name: "kill -9 of node b",
        pause: Pause::Unplanned,
        happens: |cluster, hold| kill(cluster, B, hold),
    },
    Scenario {
        name: "kill -9 of the witness",
        pause: Pause::None,
        happens: |cluster, hold| kill(cluster, WITNESS, hold),
    },
    Scenario {
        name: "node a stops for 10 s (SIGSTOP)",
        pause: Pause::Unplanned,
        happens: |cluster, hold| freeze(cluster, A, hold * 2),
    },
    Scenario {
        name: "no data between the data nodes",
        pause: Pause::Unplanned,
        happens: |cluster, hold| cut(cluster, hold, |network| network.cut(A, B, Cut::Data)),
    },
    Scenario {
        name: "no data from node a to node b, but back",
        pause: Pause::Unplanned,
        happens: |cluster, hold| cut(cluster, hold, |network| network.cut_one_way(A, B, Cut::Data)),
    },
    Scenario {
        name: "no heartbeats between the data nodes",
        pause: Pause::Unplanned,
        happens: |cluster, hold| cut(cluster, hold, |network| network.cut(A, B, Cut::Heartbeat)),
    },
    Scenario {
        name: "node a without the store",
        pause: Pause::None,
        happens: |cluster, hold| {
            cut(cluster, hold, |network| {
                network.cut(A, B, Cut::Store)?;
                network.cut(A, WITNESS, Cut::Store)
            })
        },
    },
    Scenario {
        name: "node b alone, without any cable",
        pause: Pause::Unplanned,
        happens: |cluster, hold| cut(cluster, hold, |network| network.unplug(B)),
    },
    Scenario { name: "node b drained and resumed", pause: Pause::Planned, happens: drain },
    Scenario {
        name: "node a stopped in order and started",
        pause: Pause::Planned,
        happens: restart,
    },
    Scenario {
        name: "no store at all for a minute",
        pause: Pause::None,
        happens: |cluster, hold| store_outage(cluster, hold * 12),
    },
    Scenario { name: "kill -9 of all three at once", pause: Pause::Outage, happens: blackout },
];

/// Troubles that come together, for [`chaos`]: the volume may be down until somebody is back.
pub(super) const WORSE: &[Scenario] = &[
    Scenario {
        name: "node b dies before node a, killed earlier, is in sync again",
        pause: Pause::Outage,
        happens: |cluster, hold| {
            kill(cluster, A, hold)?;
            kill(cluster, B, hold)
        },
    },
    Scenario {
        name: "node a dies while there is no store",
        pause: Pause::Outage,
        happens: |cluster, hold| {
            cluster.signal_store(Signal::STOP)?;
            cluster.nodes[A].kill()?;
            std::thread::sleep(hold);
            let others = cluster.store_members()?;
            others.iter().try_for_each(|member| kill_process(*member, Signal::CONT))?;
            cluster.nodes[A].start()
        },
    },
    Scenario {
        name: "both data nodes stop (SIGSTOP)",
        pause: Pause::Outage,
        happens: |cluster, hold| {
            cluster.nodes[A].freeze()?;
            freeze(cluster, B, hold)?;
            cluster.nodes[A].thaw()
        },
    },
    Scenario {
        name: "node b is killed while nothing comes from node a to it",
        pause: Pause::Outage,
        happens: |cluster, hold| {
            cluster.network.cut_one_way(A, B, Cut::Data)?;
            std::thread::sleep(hold / 4);
            cluster.nodes[B].kill()?;
            cluster.network.heal()?;
            std::thread::sleep(hold);
            cluster.nodes[B].start()
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
    cluster.nodes[B].command(&["node", "drain"])?;
    std::thread::sleep(hold);
    cluster.nodes[B].command(&["node", "resume"]).map(|_| ())
}

fn restart(cluster: &mut Cluster, hold: Duration) -> Result<()> {
    let status = cluster.nodes[A].stop()?;
    ensure!(status.success(), "the node ended with {status}");
    std::thread::sleep(hold);
    cluster.nodes[A].start()
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
