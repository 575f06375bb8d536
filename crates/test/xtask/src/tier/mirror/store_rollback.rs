//! etcd restored from an old backup, with all nodes stopped (RFD 0010, attack 10): the mirrors
//! refuse to act, say why and lose nothing; with the newest etcd data they continue.

use super::{
    FAULT_TIME, is_usable,
    load::{clients, under_load, verify},
    trial_blocks,
};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    node::Node,
    process::run_checked,
    run_context::RunContext,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

/// How long the nodes may take to report the problem: they have to connect and read etcd.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(40);
/// Part of what they report (RFD 0010, 3.2).
const REFUSAL: &str = "restored?";

/// Runs the test; false if the cluster is unusable afterwards.
pub(super) fn run(
    context: &RunContext,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
    number: u64,
) -> bool {
    let passed = context.check("a store from the past is refused, and nothing is lost", || {
        let blocks = trial_blocks(number);
        let mut clients = clients(cluster, volume, &blocks, Instant::now())?;
        cluster
            .blackout(|cluster| for_each_node(cluster, |node| copy(node, "etcd", "etcd.past")))?;
        cluster.await_safe()?;
        // Configurations the backup does not have, with writes in them.
        under_load(&mut clients, |_| {
            cluster.nodes[NODE_B].kill()?;
            std::thread::sleep(FAULT_TIME);
            cluster.nodes[NODE_B].start()?;
            cluster.await_safe()
        })?;
        cluster.blackout(|cluster| {
            for_each_node(cluster, |node| rename(node, "etcd", "etcd.newest"))?;
            for_each_node(cluster, |node| rename(node, "etcd.past", "etcd"))
        })?;
        let refused = [NODE_A, NODE_B].iter().try_for_each(|node| await_refusal(cluster, *node));
        cluster.blackout(|cluster| {
            for_each_node(cluster, |node| rename(node, "etcd", "etcd.refused"))?;
            for_each_node(cluster, |node| rename(node, "etcd.newest", "etcd"))
        })?;
        cluster.await_safe()?;
        refused?;
        verify(&mut clients, &blocks)?;
        cluster.check_replicas_equal(volume)
    });
    is_usable(context, cluster, passed)
}

fn for_each_node(cluster: &Cluster, what: impl Fn(&Node) -> Result<()>) -> Result<()> {
    cluster.nodes.iter().try_for_each(what)
}

fn copy(node: &Node, from: &str, to: &str) -> Result<()> {
    let data = node.directory.join("data");
    run_checked(Command::new("cp").arg("-a").arg(data.join(from)).arg(data.join(to)))
}

fn rename(node: &Node, from: &str, to: &str) -> Result<()> {
    let data = node.directory.join("data");
    fs::rename(data.join(from), data.join(to)).context("cannot rename a directory")
}

/// Waits until a node reports that it refuses etcd's state, and serves nothing.
fn await_refusal(cluster: &Cluster, node: usize) -> Result<()> {
    cluster.await_status_text(node, REFUSAL, REFUSAL_TIMEOUT)?;
    ensure!(cluster.nodes[node].volumes_online()? == 0, "it serves all the same");
    Ok(())
}
