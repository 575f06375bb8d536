//! Pools of every level on one node, with one, two and four cores.

use super::{TestVolume, VOLUMES, await_online, await_pool, disk, serial_of, text};
use crate::{
    node::{Node, NodeOptions},
    run_context::RunContext,
};
use anyhow::{Result, anyhow, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A RAID level, its disks and the name of its pool.
struct Level {
    name: &'static str,
    raid: &'static str,
    disks: usize,
    fault_tolerance: u64,
}

const LEVELS: [Level; 5] = [
    Level { name: "zero", raid: "0", disks: 2, fault_tolerance: 0 },
    Level { name: "one", raid: "1", disks: 2, fault_tolerance: 1 },
    Level { name: "ten", raid: "10", disks: 4, fault_tolerance: 1 },
    Level { name: "five", raid: "5", disks: 3, fault_tolerance: 1 },
    Level { name: "six", raid: "6", disks: 4, fault_tolerance: 2 },
];
const CORES: [u32; 3] = [1, 2, 4];
/// The disk of each pool that is lost.
const LOST_DISK: usize = 1;

/// A pool, its disks, and its volumes.
struct Pool {
    level: &'static Level,
    disks: Vec<PathBuf>,
    /// Replaces the lost disk.
    replacement_disk: PathBuf,
    /// The name of the lost disk.
    lost_disk_name: String,
    volumes: Vec<TestVolume>,
}

pub(super) fn run(context: &RunContext) -> Result<()> {
    let mut nodes = Vec::new();
    for cores in CORES {
        let wishes = NodeOptions { cores, pool_mib: 48, ..NodeOptions::default() };
        let mut node = Node::new(context, context.scratch(), &format!("levels-{cores}"), &wishes)?;
        node.start()?;
        nodes.push(node);
    }
    // Concurrently: each mostly waits for its own commands.
    let outcomes = std::thread::scope(|scope| {
        let running: Vec<_> =
            nodes.iter_mut().map(|node| scope.spawn(|| run_node_test(node))).collect();
        let ended = running.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended.map(|end| end.map_err(|_| anyhow!("the test panicked")).flatten()).collect::<Vec<_>>()
    });
    for ((cores, outcome), node) in CORES.into_iter().zip(outcomes).zip(&nodes) {
        let name = format!(
            "levels 0, 1, 10, 5 and 6 with {cores} cores: ten volumes each, a disk lost and replaced, kill -9, deleted"
        );
        if !context.check(&name, || outcome) {
            context.display.line(&crate::process::tail(&node.log().unwrap_or_default()));
        }
    }
    Ok(())
}

/// Runs all tests on one node.
fn run_node_test(node: &mut Node) -> Result<()> {
    let mut pools = Vec::new();
    for level in &LEVELS {
        pools.push(Pool::create(node, level)?);
    }
    for_each_volume(&mut pools, |volume| {
        volume.write(node.iscsi)?;
        volume.verify(node.iscsi)
    })?;
    node.kill()?;
    for pool in pools.iter().filter(|pool| pool.level.fault_tolerance > 0) {
        fs::remove_file(&pool.disks[LOST_DISK])?;
    }
    node.start()?;
    pools.iter().try_for_each(|pool| pool.open_degraded(node))?;
    await_online(node, LEVELS.len() * VOLUMES)?;
    // First degraded, then during the rebuild.
    for_each_volume(&mut pools, |volume| {
        volume.verify(node.iscsi)?;
        volume.write(node.iscsi)
    })?;
    pools.iter().try_for_each(|pool| pool.replace(node))?;
    for_each_volume(&mut pools, |volume| volume.verify(node.iscsi))?;
    pools.iter().try_for_each(|pool| pool.check_fault_tolerance(node))?;
    node.kill()?;
    node.start()?;
    await_online(node, LEVELS.len() * VOLUMES)?;
    for_each_volume(&mut pools, |volume| volume.verify(node.iscsi))?;
    pools.into_iter().try_for_each(|pool| pool.delete(node))?;
    let status = node.stop()?;
    ensure!(status.success(), "the node ended with {status}");
    Ok(())
}

fn for_each_volume(pools: &mut [Pool], act: impl Fn(&mut TestVolume) -> Result<()>) -> Result<()> {
    pools.iter_mut().flat_map(|pool| &mut pool.volumes).try_for_each(act)
}

impl Pool {
    fn create(node: &Node, level: &'static Level) -> Result<Self> {
        let directory = node.directory.join("disks");
        let name = level.name;
        let disks: Vec<PathBuf> = (0..level.disks)
            .map(|n| disk(&directory, &format!("{name}-{n}")))
            .collect::<Result<_>>()?;
        let new = disk(&directory, &format!("{name}-new"))?;
        let paths: Vec<&str> = disks.iter().map(|path| text(path)).collect();
        let words = [&["pool", "create", name, "--raid", level.raid][..], &paths].concat();
        let shown = node.query(&words)?;
        let lost = serial_of(&shown, &disks[LOST_DISK])?;
        // No two volumes have the same data.
        let first = level.raid.parse::<u64>().unwrap_or(0) * 100;
        let volumes = (0..VOLUMES).zip(first..).map(|(n, number)| {
            let thick: &[&str] = if n % 3 == 1 { &["--thick"] } else { &[] };
            let more = [&["--pool", name], thick].concat();
            TestVolume::create(node, &format!("{name}-{n}"), number, &more)
        });
        let volumes = volumes.collect::<Result<_>>()?;
        Ok(Self { level, disks, replacement_disk: new, lost_disk_name: lost, volumes })
    }

    fn has_lost_one(&self) -> bool {
        self.level.fault_tolerance > 0
    }

    /// Opens the pool without the disk; with two disks, the administrator has to confirm it.
    fn open_degraded(&self, node: &Node) -> Result<()> {
        let name = self.level.name;
        if !self.has_lost_one() {
            return await_pool(node, name, "online").map(drop);
        }
        if self.level.disks == 2 {
            let shown = await_pool(node, name, "offline")?;
            ensure!(
                shown.to_string().contains(&self.lost_disk_name),
                "it does not name the disk: {shown:#}"
            );
            let words =
                ["pool", "open", name, "--without", &self.lost_disk_name, "--confirm", name];
            node.command(&words)?;
        }
        let shown = await_pool(node, name, "degraded")?;
        let bears = shown.pointer("/fault_tolerance").and_then(serde_json::Value::as_u64);
        ensure!(bears == Some(self.level.fault_tolerance - 1), "{shown:#}");
        Ok(())
    }

    fn replace(&self, node: &Node) -> Result<()> {
        if !self.has_lost_one() {
            return Ok(());
        }
        let words = [
            "pool",
            "replace",
            self.level.name,
            &self.lost_disk_name,
            "--with",
            text(&self.replacement_disk),
        ];
        node.command(&words).map(drop)
    }

    fn check_fault_tolerance(&self, node: &Node) -> Result<()> {
        let shown = await_pool(node, self.level.name, "online")?;
        let bears = shown.pointer("/fault_tolerance").and_then(serde_json::Value::as_u64);
        ensure!(bears == Some(self.level.fault_tolerance), "{shown:#}");
        let disks = shown.pointer("/disks").and_then(serde_json::Value::as_array);
        ensure!(disks.is_some_and(|all| all.len() == self.level.disks), "{shown:#}");
        Ok(())
    }

    /// Deletes the pool and its volumes; its disks can then be reused without confirmation.
    fn delete(self, node: &Node) -> Result<()> {
        let name = self.level.name;
        for volume in &self.volumes {
            node.command(&["volume", "delete", &volume.name, "--yes"])?;
        }
        node.command(&["pool", "delete", name, "--yes"])?;
        let left: Vec<&Path> = self.disks.iter().map(PathBuf::as_path).collect();
        let left = left.into_iter().find(|path| path.exists()).map(text).unwrap_or_default();
        node.command(&["pool", "create", name, "--raid", "0", left])?;
        node.command(&["pool", "delete", name, "--yes"]).map(drop)
    }
}
