//! What an administrator does first with pools: one of every level, on nodes with one, two and four cores, ten volumes in
//! each, thin and thick; and ten volumes that lie in a pool at each of two nodes. They are created, written and verified, a
//! disk is lost and replaced, nodes are killed, and in the end all is deleted. Then many mirrored volumes on two nodes with
//! the memory that a node has if nobody says otherwise; `./run crowd` does that with 1,000 of them.
//!
//! Disks are sparse files: nothing here wants loop devices or a guest. Disks that fail while they are used are in `scsi`.

mod alone;
mod crowd;
mod mirrored;

use crate::{house::House, node::Node};
use anyhow::{Context, Result, bail, ensure};
use probe::{Disk, iscsi::Session};
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
/// How long a node may take over what it does by itself, a rebuild included: debug builds on two busy cores.
const PATIENCE: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(200);
/// What is written in each place, in blocks of 512 bytes.
const BLOCKS: usize = 64;
const BLOCK: usize = 512;

pub(super) fn run(house: &House) -> Result<()> {
    if house.wants("levels") {
        alone::run(house)?;
    }
    if house.wants("mirrored") {
        mirrored::run(house)?;
    }
    if house.wants("crowd") {
        crowd::run(house, crowd::FEW)?;
    }
    Ok(())
}

/// As many mirrored volumes as wanted on two nodes: longer than a tier may take.
pub(crate) fn crowd(house: &House, volumes: usize) -> Result<()> {
    crowd::run(house, volumes)
}

/// A new disk: a file.
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

/// A volume, and which of what was written to it is the newest.
struct Written {
    name: String,
    target: String,
    lun: u8,
    /// What tells its blocks from those of others.
    number: u64,
    generation: u64,
}

impl Written {
    /// Creates a volume for everybody.
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

    /// The first place, some in the middle, and the last.
    fn places(disk: &dyn Disk) -> [u64; 5] {
        let last = disk.blocks() - BLOCKS as u64;
        [0, last / 4 + 3, last / 2 + 1, last / 4 * 3, last]
    }

    /// What lies in a place.
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

    /// Writes all places, durably.
    fn write(&mut self, portal: SocketAddr) -> Result<()> {
        let mut session = self.login(portal)?;
        self.generation += 1;
        for lba in Self::places(&session) {
            let written = session.write(lba, &self.content(lba), false);
            written.with_context(|| format!("{}: write at {lba}", self.name))?;
        }
        session.flush().with_context(|| format!("{}: flush", self.name))?;
        session.logout().with_context(|| format!("{}: logout", self.name))
    }

    /// Reads them again; and what nobody has written reads as zeroes.
    fn verify(&self, portal: SocketAddr) -> Result<()> {
        let mut session = self.login(portal)?;
        let mut read = vec![0; BLOCKS * BLOCK];
        for lba in Self::places(&session) {
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
        ensure!(read.iter().all(|&b| b == 0), "{}: there is what nobody has written", self.name);
        session.logout().with_context(|| format!("{}: logout", self.name))
    }
}

/// Waits until a pool is in this state, with all that its level bears if it is online; returns what is said of it.
fn await_pool(node: &Node, pool: &str, state: &str) -> Result<Value> {
    let begun = Instant::now();
    loop {
        let shown = node.query(&["pool", "show", pool])?;
        if shown.pointer("/state/is").and_then(Value::as_str) == Some(state) {
            return Ok(shown);
        }
        if begun.elapsed() > PATIENCE {
            bail!("pool {pool} is not {state}: {shown:#}");
        }
        std::thread::sleep(POLL);
    }
}

/// What the disk at `path` is called on a command line.
fn serial_of(shown: &Value, path: &Path) -> Result<String> {
    let disks = shown.pointer("/disks").and_then(Value::as_array).context("no disks")?;
    let is_it = |disk: &&Value| disk.get("path").and_then(Value::as_str) == Some(text(path));
    let disk = disks.iter().find(is_it).with_context(|| format!("no {}", path.display()))?;
    Ok(disk.get("serial").and_then(Value::as_str).context("no serial number")?.to_owned())
}

/// Waits until a node serves so many volumes.
fn await_online(node: &Node, count: usize) -> Result<()> {
    let begun = Instant::now();
    loop {
        let online = node.volumes_online()?;
        if online >= count {
            return Ok(());
        }
        ensure!(begun.elapsed() < PATIENCE, "{online} of {count} volumes are online");
        std::thread::sleep(POLL);
    }
}
