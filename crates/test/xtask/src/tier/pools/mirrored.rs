//! Volumes with replicas in pools on two nodes, and some in files beside them.

use super::{NODE_TIMEOUT, TestVolume, VOLUMES, await_pool, detached_disks, disk, serial_of, text};
use crate::{
    cluster::{Cluster, NODE_A, NODE_B},
    node::{Node, Profile},
    run_context::RunContext,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{fs, net::SocketAddr, path::PathBuf, time::Instant};

const POOL: &str = "tank";
const DISKS: usize = 3;
/// The disk of node b that is lost.
const LOST_DISK: usize = 1;

pub(super) fn run(context: &RunContext) -> Result<()> {
    let mut cluster = Cluster::start(context, &context.directory("mirrored")?, Profile::Dev)?;
    let name = "ten mirrored volumes, thin and thick, in a RAID 5 of each node: nodes killed, a disk lost and replaced, deleted";
    let passed = context.check(name, || {
        cluster.form_cluster()?;
        run_cluster_test(&mut cluster)
    });
    if !passed {
        cluster.show_logs(context);
        return Ok(());
    }
    context.check("all nodes end in order", || cluster.stop());
    Ok(())
}

fn run_cluster_test(cluster: &mut Cluster) -> Result<()> {
    let of_a = create_pool(&cluster.nodes[NODE_A])?;
    let of_b = create_pool(&cluster.nodes[NODE_B])?;
    let mut volumes = create(cluster)?;
    let [at_a, at_b] = [NODE_A, NODE_B].map(|node| cluster.nodes[node].iscsi);
    write(&mut volumes, at_a)?;
    verify(&volumes, at_b)?;

    cluster.nodes[NODE_B].kill()?;
    let shown = cluster.nodes[NODE_A].query(&["pool", "show", POOL])?;
    serial_of(&shown, &of_a[LOST_DISK])?;
    fs::remove_file(&of_b[LOST_DISK]).context("cannot lose a disk")?;
    write(&mut volumes, at_a)?;
    cluster.nodes[NODE_B].start()?;
    let shown = await_pool(&cluster.nodes[NODE_B], POOL, "degraded")?;
    let out = detached_disks(&shown)?;
    let out =
        out.first().and_then(|disk| disk.get("serial")?.as_str()).context("no disk is out")?;
    let new = disk(&cluster.nodes[NODE_B].directory.join("disks"), "new")?;
    let begun = Instant::now();
    // The node opens its pool before it serves.
    while let Err(why) =
        cluster.nodes[NODE_B].command(&["pool", "replace", POOL, out, "--with", text(&new)])
    {
        let is_starting = why.to_string().contains("starting");
        ensure!(is_starting && begun.elapsed() < NODE_TIMEOUT, "{why:#}");
        std::thread::sleep(super::POLL);
    }
    await_pool(&cluster.nodes[NODE_B], POOL, "online")?;
    cluster.await_safe()?;

    cluster.nodes[NODE_A].kill()?;
    verify(&volumes, at_b)?;
    write(&mut volumes, at_b)?;
    cluster.nodes[NODE_A].start()?;
    cluster.await_safe()?;
    verify(&volumes, at_a)?;
    delete(cluster, &volumes)
}

/// Adds disks to a node and creates a pool on them.
fn create_pool(node: &Node) -> Result<Vec<PathBuf>> {
    let directory = node.directory.join("disks");
    let all: Vec<PathBuf> =
        (0..DISKS).map(|n| disk(&directory, &n.to_string())).collect::<Result<_>>()?;
    let paths: Vec<&str> = all.iter().map(|path| text(path)).collect();
    node.command(&[&["pool", "create", POOL, "--raid", "5"][..], &paths].concat())?;
    Ok(all)
}

/// Creates volumes with two replicas, most of them in the pools.
fn create(cluster: &Cluster) -> Result<Vec<TestVolume>> {
    let begun = Instant::now();
    let mut all = Vec::new();
    for (n, number) in (0..VOLUMES).zip(1u64..) {
        let (pool, thick): (&[&str], &[&str]) = match n % 5 {
            4 => (&[], &[]),
            1 => (&["--pool", POOL], &["--thick"]),
            _ => (&["--pool", POOL], &[]),
        };
        let more = [&["--replicas", "2"], pool, thick].concat();
        loop {
            match TestVolume::create(&cluster.nodes[NODE_A], &format!("both-{n}"), number, &more) {
                // Nodes learn of each other's pools within seconds.
                Err(why)
                    if begun.elapsed() < NODE_TIMEOUT
                        && why.to_string().contains("no such pool") =>
                {
                    std::thread::sleep(super::POLL);
                }
                made => break all.push(made?),
            }
        }
    }
    cluster.await_safe()?;
    Ok(all)
}

/// Writes all volumes, with retries while a node waits for the failure detection of its peer.
fn write(volumes: &mut [TestVolume], portal: SocketAddr) -> Result<()> {
    let begun = Instant::now();
    for volume in volumes {
        while let Err(why) = volume.write(portal) {
            ensure!(begun.elapsed() < NODE_TIMEOUT, "{why:#}");
            std::thread::sleep(super::POLL);
        }
    }
    Ok(())
}

fn verify(volumes: &[TestVolume], portal: SocketAddr) -> Result<()> {
    let begun = Instant::now();
    for volume in volumes {
        while let Err(why) = volume.verify(portal) {
            let is_wrong = why.to_string().contains("is not there");
            ensure!(!is_wrong && begun.elapsed() < NODE_TIMEOUT, "{why:#}");
            std::thread::sleep(super::POLL);
        }
    }
    Ok(())
}

fn delete(cluster: &Cluster, volumes: &[TestVolume]) -> Result<()> {
    for volume in volumes {
        cluster.nodes[NODE_B].command(&["volume", "delete", &volume.name, "--yes"])?;
    }
    for node in [NODE_A, NODE_B] {
        cluster.nodes[node].command(&["pool", "delete", POOL, "--yes"])?;
        let list = cluster.nodes[node].query(&["volume", "list"])?;
        let left = list.pointer("/volumes").and_then(Value::as_array).map_or(0, Vec::len);
        ensure!(left == 0, "{list:#}");
    }
    Ok(())
}
