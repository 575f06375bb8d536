//! A store that is restored from the past, with all nodes stopped (RFD 0010, attack 10): the mirrors refuse to act, say why, and
//! lose nothing; with the newest store they go on.

use super::{
    HOLD, blocks, is_fit,
    load::{clients, under_load, verify},
};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
    node::Node,
    process::must,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

/// How long the nodes may take to say what is wrong: they have to find each other, and read the store.
const SAYING: Duration = Duration::from_secs(40);
/// What they say (RFD 0010, 3.2).
const REFUSAL: &str = "restored?";

/// The test; false when the cluster is not fit for more.
pub(super) fn run(house: &House, cluster: &mut Cluster, volume: &Mirrored, number: u64) -> bool {
    let passed = house.check("a store from the past is refused, and nothing is lost", || {
        let blocks = blocks(number);
        let mut clients = clients(cluster, volume, &blocks, Instant::now())?;
        cluster.blackout(|cluster| each(cluster, |node| copy(node, "etcd", "etcd.past")))?;
        cluster.await_safe()?;
        // A configuration or two that the copy does not know, and writes in them.
        under_load(&mut clients, |_| {
            cluster.nodes[B].kill()?;
            std::thread::sleep(HOLD);
            cluster.nodes[B].start()?;
            cluster.await_safe()
        })?;
        cluster.blackout(|cluster| {
            each(cluster, |node| rename(node, "etcd", "etcd.newest"))?;
            each(cluster, |node| rename(node, "etcd.past", "etcd"))
        })?;
        let refused = [A, B].iter().try_for_each(|node| await_refusal(cluster, *node));
        cluster.blackout(|cluster| {
            each(cluster, |node| rename(node, "etcd", "etcd.refused"))?;
            each(cluster, |node| rename(node, "etcd.newest", "etcd"))
        })?;
        cluster.await_safe()?;
        refused?;
        verify(&mut clients, &blocks)?;
        cluster.copies_are_equal(volume)
    });
    is_fit(house, cluster, passed)
}

fn each(cluster: &Cluster, what: impl Fn(&Node) -> Result<()>) -> Result<()> {
    cluster.nodes.iter().try_for_each(what)
}

fn copy(node: &Node, from: &str, to: &str) -> Result<()> {
    let data = node.directory.join("data");
    must(Command::new("cp").arg("-a").arg(data.join(from)).arg(data.join(to)))
}

fn rename(node: &Node, from: &str, to: &str) -> Result<()> {
    let data = node.directory.join("data");
    fs::rename(data.join(from), data.join(to)).context("cannot rename a directory")
}

/// Waits until a node says that it refuses what the store says, and serves nothing.
fn await_refusal(cluster: &Cluster, node: usize) -> Result<()> {
    cluster.await_words(node, REFUSAL, SAYING)?;
    ensure!(cluster.nodes[node].volumes_online()? == 0, "it serves all the same");
    Ok(())
}
