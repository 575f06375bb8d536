//! Pools of every level at one node, with one, two and four cores.

use super::{VOLUMES, Written, await_online, await_pool, disk, serial_of, text};
use crate::{
    house::House,
    node::{Node, Wishes},
};
use anyhow::{Result, anyhow, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A level, its disks, and what its pool is called.
struct Level {
    name: &'static str,
    raid: &'static str,
    disks: usize,
    bears: u64,
}

const LEVELS: [Level; 5] = [
    Level { name: "zero", raid: "0", disks: 2, bears: 0 },
    Level { name: "one", raid: "1", disks: 2, bears: 1 },
    Level { name: "ten", raid: "10", disks: 4, bears: 1 },
    Level { name: "five", raid: "5", disks: 3, bears: 1 },
    Level { name: "six", raid: "6", disks: 4, bears: 2 },
];
const CORES: [u32; 3] = [1, 2, 4];
/// The disk of each pool that is lost.
const LOST: usize = 1;

/// A pool, its disks, and its volumes.
struct Pool {
    level: &'static Level,
    disks: Vec<PathBuf>,
    /// Takes the place of the one that is lost.
    new: PathBuf,
    /// What the one that is lost is called.
    lost: String,
    volumes: Vec<Written>,
}

pub(super) fn run(house: &House) -> Result<()> {
    let mut nodes = Vec::new();
    for cores in CORES {
        let wishes = Wishes { cores, pool_mib: 48, ..Wishes::default() };
        let mut node = Node::new(house, house.scratch(), &format!("levels-{cores}"), &wishes)?;
        node.start()?;
        nodes.push(node);
    }
    // At once: most of the time each waits for its own commands.
    let outcomes = std::thread::scope(|scope| {
        let running: Vec<_> = nodes.iter_mut().map(|node| scope.spawn(|| live(node))).collect();
        let ended = running.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended.map(|end| end.map_err(|_| anyhow!("the test panicked")).flatten()).collect::<Vec<_>>()
    });
    for ((cores, outcome), node) in CORES.into_iter().zip(outcomes).zip(&nodes) {
        let name = format!(
            "levels 0, 1, 10, 5 and 6 with {cores} cores: ten volumes each, a disk lost and replaced, kill -9, deleted"
        );
        if !house.check(&name, || outcome) {
            house.display.line(&crate::process::tail(&node.log().unwrap_or_default()));
        }
    }
    Ok(())
}

/// All that happens at one node.
fn live(node: &mut Node) -> Result<()> {
    let mut pools = Vec::new();
    for level in &LEVELS {
        pools.push(Pool::create(node, level)?);
    }
    each(&mut pools, |volume| {
        volume.write(node.iscsi)?;
        volume.verify(node.iscsi)
    })?;
    node.kill()?;
    for pool in pools.iter().filter(|pool| pool.level.bears > 0) {
        fs::remove_file(&pool.disks[LOST])?;
    }
    node.start()?;
    pools.iter().try_for_each(|pool| pool.opens(node))?;
    await_online(node, LEVELS.len() * VOLUMES)?;
    // Without the disk, and while what was on it is made anew.
    each(&mut pools, |volume| {
        volume.verify(node.iscsi)?;
        volume.write(node.iscsi)
    })?;
    pools.iter().try_for_each(|pool| pool.replace(node))?;
    each(&mut pools, |volume| volume.verify(node.iscsi))?;
    pools.iter().try_for_each(|pool| pool.is_whole(node))?;
    node.kill()?;
    node.start()?;
    await_online(node, LEVELS.len() * VOLUMES)?;
    each(&mut pools, |volume| volume.verify(node.iscsi))?;
    pools.into_iter().try_for_each(|pool| pool.delete(node))?;
    let status = node.stop()?;
    ensure!(status.success(), "the node ended with {status}");
    Ok(())
}

fn each(pools: &mut [Pool], act: impl Fn(&mut Written) -> Result<()>) -> Result<()> {
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
        let lost = serial_of(&shown, &disks[LOST])?;
        // No two of them write the same.
        let first = level.raid.parse::<u64>().unwrap_or(0) * 100;
        let volumes = (0..VOLUMES).zip(first..).map(|(n, number)| {
            let thick: &[&str] = if n % 3 == 1 { &["--thick"] } else { &[] };
            let more = [&["--pool", name], thick].concat();
            Written::create(node, &format!("{name}-{n}"), number, &more)
        });
        let volumes = volumes.collect::<Result<_>>()?;
        Ok(Self { level, disks, new, lost, volumes })
    }

    fn has_lost_one(&self) -> bool {
        self.level.bears > 0
    }

    /// The node has it open without the disk, which of two disks a person has to say.
    fn opens(&self, node: &Node) -> Result<()> {
        let name = self.level.name;
        if !self.has_lost_one() {
            return await_pool(node, name, "online").map(drop);
        }
        if self.level.disks == 2 {
            let shown = await_pool(node, name, "offline")?;
            ensure!(shown.to_string().contains(&self.lost), "it does not name the disk: {shown:#}");
            let words = ["pool", "open", name, "--without", &self.lost, "--confirm", name];
            node.command(&words)?;
        }
        let shown = await_pool(node, name, "degraded")?;
        let bears = shown.pointer("/survives").and_then(serde_json::Value::as_u64);
        ensure!(bears == Some(self.level.bears - 1), "{shown:#}");
        Ok(())
    }

    fn replace(&self, node: &Node) -> Result<()> {
        if !self.has_lost_one() {
            return Ok(());
        }
        let words = ["pool", "replace", self.level.name, &self.lost, "--with", text(&self.new)];
        node.command(&words).map(drop)
    }

    fn is_whole(&self, node: &Node) -> Result<()> {
        let shown = await_pool(node, self.level.name, "online")?;
        let bears = shown.pointer("/survives").and_then(serde_json::Value::as_u64);
        ensure!(bears == Some(self.level.bears), "{shown:#}");
        let disks = shown.pointer("/disks").and_then(serde_json::Value::as_array);
        ensure!(disks.is_some_and(|all| all.len() == self.level.disks), "{shown:#}");
        Ok(())
    }

    /// Deletes it with its volumes; afterwards its disks can be used again without a question.
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
