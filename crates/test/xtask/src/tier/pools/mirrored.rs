//! Volumes with a copy in a pool of each of two nodes, and some in files beside them.

use super::{PATIENCE, VOLUMES, Written, await_pool, disk, serial_of, text};
use crate::{
    cluster::{A, B, Cluster},
    house::House,
    node::{Node, Profile},
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{fs, net::SocketAddr, path::PathBuf, time::Instant};

const POOL: &str = "tank";
const DISKS: usize = 3;
/// The disk of node b that is lost.
const LOST: usize = 1;

pub(super) fn run(house: &House) -> Result<()> {
    let mut cluster = Cluster::start(house, &house.directory("mirrored")?, Profile::Dev)?;
    let name = "ten mirrored volumes, thin and thick, in a RAID 5 of each node: nodes killed, a disk lost and replaced, deleted";
    let passed = house.check(name, || {
        cluster.form()?;
        live(&mut cluster)
    });
    if !passed {
        cluster.show_logs(house);
        return Ok(());
    }
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

fn live(cluster: &mut Cluster) -> Result<()> {
    let of_a = fill(&cluster.nodes[A])?;
    let of_b = fill(&cluster.nodes[B])?;
    let mut volumes = create(cluster)?;
    let [at_a, at_b] = [A, B].map(|node| cluster.nodes[node].iscsi);
    write(&mut volumes, at_a)?;
    verify(&volumes, at_b)?;

    cluster.nodes[B].kill()?;
    let shown = cluster.nodes[A].query(&["pool", "show", POOL])?;
    serial_of(&shown, &of_a[LOST])?;
    fs::remove_file(&of_b[LOST]).context("cannot lose a disk")?;
    write(&mut volumes, at_a)?;
    cluster.nodes[B].start()?;
    let shown = await_pool(&cluster.nodes[B], POOL, "degraded")?;
    let disks = shown.pointer("/disks").and_then(Value::as_array).context("no disks")?;
    let out = disks.iter().find(|disk| disk.get("state") == Some(&"out".into()));
    let out = out.and_then(|disk| disk.get("serial")?.as_str()).context("no disk is out")?;
    let new = disk(&cluster.nodes[B].directory.join("disks"), "new")?;
    let begun = Instant::now();
    // The pool is open before the node has begun to serve.
    while let Err(why) =
        cluster.nodes[B].command(&["pool", "replace", POOL, out, "--with", text(&new)])
    {
        let is_starting = why.to_string().contains("starting");
        ensure!(is_starting && begun.elapsed() < PATIENCE, "{why:#}");
        std::thread::sleep(super::POLL);
    }
    await_pool(&cluster.nodes[B], POOL, "online")?;
    cluster.await_safe()?;

    cluster.nodes[A].kill()?;
    verify(&volumes, at_b)?;
    write(&mut volumes, at_b)?;
    cluster.nodes[A].start()?;
    cluster.await_safe()?;
    verify(&volumes, at_a)?;
    delete(cluster, &volumes)
}

/// A node gets disks and a pool.
fn fill(node: &Node) -> Result<Vec<PathBuf>> {
    let directory = node.directory.join("disks");
    let all: Vec<PathBuf> =
        (0..DISKS).map(|n| disk(&directory, &n.to_string())).collect::<Result<_>>()?;
    let paths: Vec<&str> = all.iter().map(|path| text(path)).collect();
    node.command(&[&["pool", "create", POOL, "--raid", "5"][..], &paths].concat())?;
    Ok(all)
}

/// Volumes with two copies: most of them in the pools.
fn create(cluster: &Cluster) -> Result<Vec<Written>> {
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
            match Written::create(&cluster.nodes[A], &format!("both-{n}"), number, &more) {
                // Nodes hear of each other's pools within seconds.
                Err(why)
                    if begun.elapsed() < PATIENCE && why.to_string().contains("no such pool") =>
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

/// Initiators try a node again that waits for another one to be given up.
fn write(volumes: &mut [Written], portal: SocketAddr) -> Result<()> {
    let begun = Instant::now();
    for volume in volumes {
        while let Err(why) = volume.write(portal) {
            ensure!(begun.elapsed() < PATIENCE, "{why:#}");
            std::thread::sleep(super::POLL);
        }
    }
    Ok(())
}

fn verify(volumes: &[Written], portal: SocketAddr) -> Result<()> {
    let begun = Instant::now();
    for volume in volumes {
        while let Err(why) = volume.verify(portal) {
            let is_wrong = why.to_string().contains("is not there");
            ensure!(!is_wrong && begun.elapsed() < PATIENCE, "{why:#}");
            std::thread::sleep(super::POLL);
        }
    }
    Ok(())
}

fn delete(cluster: &Cluster, volumes: &[Written]) -> Result<()> {
    for volume in volumes {
        cluster.nodes[B].command(&["volume", "delete", &volume.name, "--yes"])?;
    }
    for node in [A, B] {
        cluster.nodes[node].command(&["pool", "delete", POOL, "--yes"])?;
        let list = cluster.nodes[node].query(&["volume", "list"])?;
        let left = list.pointer("/volumes").and_then(Value::as_array).map_or(0, Vec::len);
        ensure!(left == 0, "{list:#}");
    }
    Ok(())
}
