//! What happens to the nodes of a cluster while a guest works on a volume of theirs, when it says so.

use crate::{
    cluster::{A, B, Cluster, WITNESS},
    guest::Signs,
    network::Cut,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// How long a killed node is away.
const AWAY: Duration = Duration::from_secs(1);
/// How long a node may take to let go of connections that are lost.
const LETS_GO: Duration = Duration::from_secs(30);

/// What happens to a node while a guest has it as one of its paths, and how it is mended.
struct Trouble {
    /// As the guest calls it.
    name: &'static str,
    node: usize,
    begin: fn(&mut Cluster, usize) -> Result<()>,
    end: fn(&mut Cluster, usize) -> Result<()>,
    /// The longest that a write may take: what fails a trial (RFD 0009, 9), and `GUEST_MS`.
    pause_ms: u32,
}

/// A guest shares two cores with the cluster, and finds out by itself that a path is dead.
const GUEST_MS: u32 = 2000;

const TROUBLES: [Trouble; 4] = [
    Trouble {
        name: "killed",
        node: A,
        begin: |cluster, node| cluster.nodes[node].kill(),
        end: |cluster, node| cluster.nodes[node].start(),
        pause_ms: 6000 + GUEST_MS,
    },
    Trouble {
        name: "cut-off",
        node: B,
        begin: |cluster, node| cluster.network.unplug(node),
        end: |cluster, _| cluster.network.heal(),
        pause_ms: 6000 + GUEST_MS,
    },
    Trouble {
        name: "isolated",
        node: A,
        begin: isolate,
        end: |cluster, _| cluster.network.heal(),
        pause_ms: 6000 + GUEST_MS,
    },
    Trouble {
        name: "drained",
        node: B,
        begin: |cluster, node| cluster.nodes[node].command(&["node", "drain"]).map(drop),
        end: |cluster, node| cluster.nodes[node].command(&["node", "resume"]).map(drop),
        pause_ms: 1500 + GUEST_MS,
    },
];

/// The names of all troubles, for a guest's order.
pub(super) fn troubles() -> String {
    TROUBLES.map(|trouble| trouble.name).join(" ")
}

/// Initiators reach the node, and no other node does.
fn isolate(cluster: &mut Cluster, node: usize) -> Result<()> {
    for other in [A, B, WITNESS].into_iter().filter(|other| *other != node) {
        for cut in [Cut::Data, Cut::Heartbeat] {
            cluster.network.cut(node, other, cut)?;
        }
    }
    Ok(())
}

/// Brings all troubles, one after the other, when the guest asks for them in this round (`under_trouble` in `lib.sh`). It is known to
/// the nodes as `initiator`.
pub(super) fn of_paths(
    cluster: &mut Cluster,
    signs: &Signs<'_>,
    round: &str,
    initiator: &str,
) -> Result<()> {
    for trouble in &TROUBLES {
        let sign = |what: &str| format!("{}-{round}-{what}", trouble.name);
        signs.wait_for(&sign("go"))?;
        let before = [sessions(cluster, A, initiator)?, sessions(cluster, B, initiator)?];
        // What leads the store goes with it: nothing takes longer.
        cluster.move_store_leader(trouble.node)?;
        (trouble.begin)(cluster, trouble.node)?;
        signs.tell_that(&sign("down"), &format!("{} {}\n", trouble.node, trouble.pause_ms))?;
        signs.wait_for(&sign("seen"))?;
        (trouble.end)(cluster, trouble.node)?;
        cluster.await_safe()?;
        signs.tell(&sign("up"))?;
        signs.wait_for(&sign("back"))?;
        await_sessions(cluster, initiator, &before)
            .with_context(|| format!("after a node was {}", trouble.name))?;
        signs.tell(&sign("over"))?;
    }
    Ok(())
}

/// The sessions, or controllers, that an initiator has at a node, by the number of their connections.
fn sessions(cluster: &Cluster, node: usize, initiator: &str) -> Result<Vec<u64>> {
    let told = cluster.nodes[node].query(&["sessions"])?;
    let told = told.get("sessions").and_then(Value::as_array).context("an odd answer")?;
    let own = told.iter().filter(|s| s.get("initiator").and_then(Value::as_str) == Some(initiator));
    Ok(own.filter_map(|s| s.get("connections")?.as_u64()).collect())
}

/// Waits until both nodes have what they had before: what was lost is gone, and nothing has come twice.
fn await_sessions(cluster: &Cluster, initiator: &str, before: &[Vec<u64>; 2]) -> Result<()> {
    let begun = Instant::now();
    loop {
        let now = [sessions(cluster, A, initiator)?, sessions(cluster, B, initiator)?];
        if now == *before && now.iter().all(|of_node| of_node.len() == 1) {
            return Ok(());
        }
        ensure!(begun.elapsed() < LETS_GO, "connections by session: {before:?}, now {now:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Kills a node at each of these steps that the guest begins, in turn.
pub(super) fn of_nodes(
    cluster: &mut Cluster,
    signs: &Signs<'_>,
    mut steps: RangeInclusive<usize>,
) -> Result<()> {
    steps.try_for_each(|step| of_node(cluster, signs, step, if step % 2 == 1 { A } else { B }))
}

/// Kills a node at this step that the guest begins.
pub(super) fn of_node(
    cluster: &mut Cluster,
    signs: &Signs<'_>,
    step: usize,
    node: usize,
) -> Result<()> {
    signs.wait_for(&format!("step-{step}"))?;
    // Another moment each time.
    std::thread::sleep(Duration::from_millis(17 * (step as u64 - 1)));
    cluster.nodes[node].kill()?;
    std::thread::sleep(AWAY);
    cluster.nodes[node].start()?;
    cluster.await_safe()?;
    signs.tell(&format!("back-{step}"))
}

/// Kills all nodes at once, so many times, when the guest wants that.
pub(super) fn of_power(cluster: &mut Cluster, signs: &Signs<'_>, times: usize) -> Result<()> {
    for time in 1..=times {
        signs.wait_for(&format!("dark-{time}"))?;
        cluster.blackout(|_| Ok(()))?;
        cluster.await_safe()?;
        signs.tell(&format!("light-{time}"))?;
    }
    Ok(())
}
