//! An administrator's first steps with pools: one of every level, on nodes with one, two and four
//! cores, ten volumes in each, thin and thick; and ten mirrored volumes with a replica in a pool on
//! each of two nodes. They are created, written and verified, a disk is lost and replaced, nodes
//! are killed, and in the end all is deleted. Then many mirrored volumes on two nodes with the
//! default memory; `./run crowd` does that with 1,000.
//!
//! Disks are sparse files: no loop devices or guests are needed. Disks that fail in use are tested
//! in `scsi`.

mod many_volumes;
mod mirrored;
mod single_node;

use crate::{node::Node, run_context::RunContext};
use anyhow::{Context, Result, bail, ensure};
use probe::{BlockClient, iscsi::Session};
use serde_json::Value;
use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Volumes of a pool.
const VOLUMES: usize = 10;
const VOLUME_SIZE: &str = "20MiB";
const DISK_BYTES: u64 = 1 << 30;
/// How long a node may take for its own work, a rebuild included: debug builds on two busy cores.
const NODE_TIMEOUT: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(200);
/// 512-byte blocks written at each test LBA.
const BLOCKS: usize = 64;
const BLOCK: usize = 512;

pub(super) fn run(context: &RunContext) -> Result<()> {
    if context.matches_filter("levels") {
        single_node::run(context)?;
    }
    if context.matches_filter("mirrored") {
        mirrored::run(context)?;
    }
    if context.matches_filter("crowd") {
        many_volumes::run(context, many_volumes::TIER_VOLUMES)?;
    }
    Ok(())
}

/// Tests any number of mirrored volumes on two nodes: longer than a tier may take.
pub(crate) fn many_volumes(context: &RunContext, volumes: usize) -> Result<()> {
    many_volumes::run(context, volumes)
}

/// Creates a disk: a file.
fn disk(directory: &Path, name: &str) -> Result<PathBuf> {
    fs::create_dir_all(directory).context("cannot create a directory")?;
    let path = directory.join(name);
    let made = File::create(&path).and_then(|file| file.set_len(DISK_BYTES));
    made.with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// A volume and the version of the newest data written to it.
struct TestVolume {
    name: String,
    target: String,
    lun: u8,
    /// Distinguishes its blocks from those of other volumes.
    number: u64,
    generation: u64,
}

impl TestVolume {
    /// Creates a volume accessible to every initiator.
    fn create(node: &Node, name: &str, number: u64, more: &[&str]) -> Result<Self> {
        let unit = node.create_with(name, VOLUME_SIZE, more)?.unit;
        let lun = u8::try_from(unit.lun).context("an odd LUN")?;
        Ok(Self { name: name.to_owned(), target: unit.target, lun, number, generation: 0 })
    }

    fn login(&self, portal: SocketAddr) -> Result<Session> {
        let initiator = "iqn.2026-01.test:pools";
        let isid = u32::try_from(self.number).unwrap_or(0) + 1;
        let session = Session::login(portal, initiator, &self.target, self.lun, isid);
        session.with_context(|| format!("{}: login", self.name))
    }

    /// The first LBA, some in the middle, and the last.
    fn test_lbas(disk: &dyn BlockClient) -> [u64; 5] {
        let last = disk.blocks() - BLOCKS as u64;
        [0, last / 4 + 3, last / 2 + 1, last / 4 * 3, last]
    }

    /// The data at an LBA.
    fn content(&self, lba: u64) -> Vec<u8> {
        let mut all = vec![0; BLOCKS * BLOCK];
        for (block, at) in all.chunks_exact_mut(BLOCK).zip(lba..) {
            let says = [self.number, self.generation, at];
            for (word, value) in block.chunks_exact_mut(8).zip(says.into_iter().cycle()) {
                word.copy_from_slice(&value.to_le_bytes());
            }
        }
        all
    }

    /// Writes all test LBAs, durably.
    fn write(&mut self, portal: SocketAddr) -> Result<()> {
        let mut session = self.login(portal)?;
        self.generation += 1;
        for lba in Self::test_lbas(&session) {
            let written = session.write(lba, &self.content(lba), false);
            written.with_context(|| format!("{}: write at {lba}", self.name))?;
        }
        session.flush().with_context(|| format!("{}: flush", self.name))?;
        session.logout().with_context(|| format!("{}: logout", self.name))
    }

    /// Reads them back and checks that unwritten blocks read as zeroes.
    fn verify(&self, portal: SocketAddr) -> Result<()> {
        let mut session = self.login(portal)?;
        let mut read = vec![0; BLOCKS * BLOCK];
        for lba in Self::test_lbas(&session) {
            let done = session.read(lba, &mut read);
            done.with_context(|| format!("{}: read at {lba}", self.name))?;
            ensure!(
                read == self.content(lba),
                "{}: what was written at {lba} is not there",
                self.name
            );
        }
        let untouched = BLOCKS as u64 * 3;
        session.read(untouched, &mut read).with_context(|| format!("{}: read", self.name))?;
        ensure!(read.iter().all(|&b| b == 0), "{}: data that was never written", self.name);
        session.logout().with_context(|| format!("{}: logout", self.name))
    }
}

/// Waits until a pool has this state, and no detached disk if online; returns its status.
///
/// A pool is online as soon as all data has full redundancy: the disk that was replaced leaves it
/// a moment later.
fn await_pool(node: &Node, pool: &str, state: &str) -> Result<Value> {
    let begun = Instant::now();
    loop {
        let shown = node.query(&["pool", "show", pool])?;
        let is_in_state = shown.pointer("/state/kind").and_then(Value::as_str) == Some(state);
        if is_in_state && (state != "online" || detached_disks(&shown)?.is_empty()) {
            return Ok(shown);
        }
        if begun.elapsed() > NODE_TIMEOUT {
            bail!("pool {pool} is not {state}, or lists a disk that was replaced: {shown:#}");
        }
        std::thread::sleep(POLL);
    }
}

/// The disks of a pool that are out of service.
pub(super) fn detached_disks(shown: &Value) -> Result<Vec<&Value>> {
    let disks = shown.pointer("/disks").and_then(Value::as_array).context("no disks")?;
    let is_detached =
        |disk: &&Value| disk.pointer("/state").and_then(Value::as_str) == Some("detached");
    Ok(disks.iter().filter(is_detached).collect())
}

/// The name of the disk at `path` on the command line.
fn serial_of(shown: &Value, path: &Path) -> Result<String> {
    let disks = shown.pointer("/disks").and_then(Value::as_array).context("no disks")?;
    let is_it = |disk: &&Value| disk.get("path").and_then(Value::as_str) == Some(text(path));
    let disk = disks.iter().find(is_it).with_context(|| format!("no {}", path.display()))?;
    Ok(disk.get("serial").and_then(Value::as_str).context("no serial number")?.to_owned())
}

/// Waits until a node serves `count` volumes.
fn await_online(node: &Node, count: usize) -> Result<()> {
    let begun = Instant::now();
    loop {
        let online = node.volumes_online()?;
        if online >= count {
            return Ok(());
        }
        ensure!(begun.elapsed() < NODE_TIMEOUT, "{online} of {count} volumes are online");
        std::thread::sleep(POLL);
    }
}
