//! Faults of a cluster's nodes while a guest works on their volume, at the guest's request.

use crate::{
    cluster::{Cluster, NODE_A, NODE_B, WITNESS},
    guest::GuestSignals,
    network::Cut,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// How long a killed node is down.
const NODE_DOWN_TIME: Duration = Duration::from_secs(1);
/// How long a node may take to drop lost connections.
const SESSION_CLEANUP_LIMIT: Duration = Duration::from_secs(30);

/// A fault of a node that is one of a guest's paths, and its repair.
struct NodeFault {
    /// The guest's name for it.
    name: &'static str,
    node: usize,
    begin: fn(&mut Cluster, usize) -> Result<()>,
    end: fn(&mut Cluster, usize) -> Result<()>,
    /// The longest a write may take: the limit of a trial (RFD 0009, 9) plus `GUEST_DETECTION_MS`.
    pause_ms: u32,
}

/// A guest shares two cores with the cluster and detects a dead path itself.
const GUEST_DETECTION_MS: u32 = 2000;

const NODE_FAULTS: [NodeFault; 4] = [
    NodeFault {
        name: "killed",
        node: NODE_A,
        begin: |cluster, node| cluster.nodes[node].kill(),
        end: |cluster, node| cluster.nodes[node].start(),
        pause_ms: 6000 + GUEST_DETECTION_MS,
    },
    NodeFault {
        name: "cut-off",
        node: NODE_B,
        begin: |cluster, node| cluster.network.unplug(node),
        end: |cluster, _| cluster.network.heal(),
        pause_ms: 6000 + GUEST_DETECTION_MS,
    },
    NodeFault {
        name: "isolated",
        node: NODE_A,
        begin: isolate,
        end: |cluster, _| cluster.network.heal(),
        pause_ms: 6000 + GUEST_DETECTION_MS,
    },
    NodeFault {
        name: "drained",
        node: NODE_B,
        begin: |cluster, node| cluster.nodes[node].command(&["node", "drain"]).map(drop),
        end: |cluster, node| cluster.nodes[node].command(&["node", "resume"]).map(drop),
        pause_ms: 1500 + GUEST_DETECTION_MS,
    },
];

/// The names of all faults, for a guest's variables.
pub(super) fn fault_names() -> String {
    NODE_FAULTS.map(|fault| fault.name).join(" ")
}

/// Only initiators reach the node, no other nodes.
fn isolate(cluster: &mut Cluster, node: usize) -> Result<()> {
    for other in [NODE_A, NODE_B, WITNESS].into_iter().filter(|other| *other != node) {
        for cut in [Cut::Data, Cut::Heartbeat] {
            cluster.network.cut(node, other, cut)?;
        }
    }
    Ok(())
}

/// Injects all faults in turn, when the guest asks for them in this round (`under_trouble` in
/// `lib.sh`). The nodes know the guest as `initiator`.
pub(super) fn inject_path_faults(
    cluster: &mut Cluster,
    signs: &GuestSignals<'_>,
    round: &str,
    initiator: &str,
) -> Result<()> {
    for fault in &NODE_FAULTS {
        let sign = |what: &str| format!("{}-{round}-{what}", fault.name);
        signs.wait_for(&sign("go"))?;
        let before = [sessions(cluster, NODE_A, initiator)?, sessions(cluster, NODE_B, initiator)?];
        // The node with etcd's leader fails: the slowest case.
        cluster.move_store_leader(fault.node)?;
        (fault.begin)(cluster, fault.node)?;
        signs.send_text(&sign("down"), &format!("{} {}\n", fault.node, fault.pause_ms))?;
        signs.wait_for(&sign("seen"))?;
        (fault.end)(cluster, fault.node)?;
        cluster.await_safe()?;
        signs.send(&sign("up"))?;
        signs.wait_for(&sign("back"))?;
        await_sessions(cluster, initiator, &before)
            .with_context(|| format!("after a node was {}", fault.name))?;
        signs.send(&sign("over"))?;
    }
    Ok(())
}

/// The sessions or controllers of an initiator at a node, by their number of connections.
fn sessions(cluster: &Cluster, node: usize, initiator: &str) -> Result<Vec<u64>> {
    let sessions = cluster.nodes[node].query(&["sessions"])?;
    let sessions = sessions.get("sessions").and_then(Value::as_array).context("an odd answer")?;
    let own =
        sessions.iter().filter(|s| s.get("initiator").and_then(Value::as_str) == Some(initiator));
    Ok(own.filter_map(|s| s.get("connections")?.as_u64()).collect())
}

/// Waits until both nodes have the sessions they had before: lost ones are gone and none is
/// duplicated.
fn await_sessions(cluster: &Cluster, initiator: &str, before: &[Vec<u64>; 2]) -> Result<()> {
    let begun = Instant::now();
    loop {
        let now = [sessions(cluster, NODE_A, initiator)?, sessions(cluster, NODE_B, initiator)?];
        if now == *before && now.iter().all(|of_node| of_node.len() == 1) {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < SESSION_CLEANUP_LIMIT,
            "connections by session: {before:?}, now {now:?}"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Kills a node at each of these steps of the guest, in turn.
pub(super) fn kill_nodes(
    cluster: &mut Cluster,
    signs: &GuestSignals<'_>,
    mut steps: RangeInclusive<usize>,
) -> Result<()> {
    steps.try_for_each(|step| {
        kill_node(cluster, signs, step, if step % 2 == 1 { NODE_A } else { NODE_B })
    })
}

/// Kills a node at this step of the guest.
pub(super) fn kill_node(
    cluster: &mut Cluster,
    signs: &GuestSignals<'_>,
    step: usize,
    node: usize,
) -> Result<()> {
    signs.wait_for(&format!("step-{step}"))?;
    // At a different moment each time.
    std::thread::sleep(Duration::from_millis(17 * (step as u64 - 1)));
    cluster.nodes[node].kill()?;
    std::thread::sleep(NODE_DOWN_TIME);
    cluster.nodes[node].start()?;
    cluster.await_safe()?;
    signs.send(&format!("back-{step}"))
}

/// Kills all nodes at once, as often as given, when the guest asks.
pub(super) fn power_cycle_all(
    cluster: &mut Cluster,
    signs: &GuestSignals<'_>,
    times: usize,
) -> Result<()> {
    for time in 1..=times {
        signs.wait_for(&format!("dark-{time}"))?;
        cluster.blackout(|_| Ok(()))?;
        cluster.await_safe()?;
        signs.send(&format!("light-{time}"))?;
    }
    Ok(())
}
