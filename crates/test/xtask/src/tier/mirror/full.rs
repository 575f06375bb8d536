//! File systems that are full at both nodes: initiators of either are told so, in their protocol's own words, and nothing else
//! changes.

use super::space::{ROOM_MIB, SAYING, VOLUMES, fill, mount};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    process::must,
};
use anyhow::{Context, Result, bail, ensure};
use probe::{
    Disk,
    iscsi::{Refused, Session},
    nvme::{Controller, Failed},
    paths::Volume,
};
use std::{
    fs::{self, File},
    io,
    path::Path,
    process::Command,
};

/// Blocks that have their space before it is gone, and what comes behind them.
const HELD: u64 = 122_880;
const HELD_BLOCKS: u64 = 1024;
const FRESH: u64 = HELD + HELD_BLOCKS;
/// Blocks of a write.
const PIECE: u64 = 16;
/// The same in bytes.
const PIECE_BYTES: usize = 16 * 512;

/// SAM-5, DATA PROTECT; SPC-5, SPACE ALLOCATION FAILED WRITE PROTECT.
const SENSE: [u8; 3] = [0x07, 0x27, 0x07];
/// NVM command set, Capacity Exceeded.
const STATUS: (u8, u8) = (0, 0x81);

/// Initiators of both protocols at one node.
struct At {
    node: &'static str,
    session: Session,
    controller: Controller,
}

impl At {
    fn log_in(cluster: &Cluster, volume: &Mirrored, node: usize) -> Result<Self> {
        let (unit, subsystem) = (cluster.paths(volume, 0)?, cluster.paths(volume, 2)?);
        let number = u32::try_from(node)?;
        let Volume::Unit { initiator, target, lun } = &unit.volume else { bail!("no unit") };
        let Volume::Subsystem { host, subsystem: name } = &subsystem.volume else {
            bail!("no subsystem")
        };
        Ok(Self {
            node: if node == A { "node a" } else { "node b" },
            session: Session::login(unit.portals[node], initiator, target, *lun, number)?,
            controller: Controller::connect(subsystem.portals[node], host, name)?,
        })
    }

    fn disks(&mut self) -> [&mut dyn Disk; 2] {
        [&mut self.session, &mut self.controller]
    }

    /// What is asked for in vain, from block `at` on, by either protocol.
    fn is_refused(&mut self, at: u64) -> Result<()> {
        let node = self.node;
        let data = [7; PIECE_BYTES];
        let told = again(|| self.session.write(at, &data, false));
        let sense = told.as_ref().err().and_then(Refused::of).map(|refused| refused.sense);
        ensure!(sense == Some(SENSE), "{node}, iSCSI: {told:?}, not 7/27/07");
        let told = self.controller.write(at + PIECE, &data, false);
        let status = told.as_ref().err().and_then(Failed::of).map(Failed::code);
        ensure!(status == Some(STATUS), "{node}, NVMe: {told:?}, not Capacity Exceeded");
        Ok(())
    }

    /// Frees blocks (SBC-4 5.35).
    fn unmap(&mut self, at: u64, blocks: u32) -> io::Result<()> {
        let mut list = [0; 24];
        list[1] = 22;
        list[3] = 16;
        list[8..16].copy_from_slice(&at.to_be_bytes());
        list[16..20].copy_from_slice(&blocks.to_be_bytes());
        let mut cdb = [0; 16];
        cdb[0] = 0x42;
        cdb[8] = 24;
        again(|| self.session.good(&cdb, &list, &mut []))
    }

    /// Writes over iSCSI.
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        again(|| self.session.write(at, data, true))
    }
}

/// Asks again as long as something else is told: that space is short, for example (SAM-5 5.14).
fn again(mut ask: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match ask() {
            Err(e) if Refused::of(&e).is_some_and(|refused| refused.is_unit_attention()) => {}
            other => return other,
        }
    }
}

/// The test, on a volume whose copy of node b is on a small file system. That of node a is there for as long as this takes.
pub(super) fn test(cluster: &mut Cluster, volume: &Mirrored) -> Result<()> {
    shrink(cluster)?;
    let tested = with_fillers(cluster, volume);
    let back = unshrink(cluster);
    tested?;
    back?;
    cluster.copies_are_equal(volume)
}

fn with_fillers(cluster: &Cluster, volume: &Mirrored) -> Result<()> {
    let mut a = At::log_in(cluster, volume, A)?;
    let mut b = At::log_in(cluster, volume, B)?;
    for at in (HELD..FRESH).step_by(16) {
        a.write(at, &[1; PIECE_BYTES])?;
    }
    for node in [A, B] {
        let filler = cluster.nodes[node].directory.join(VOLUMES).join("filler");
        fill(&mut File::create(filler).context("cannot make a file")?)?;
    }
    refused(cluster, &mut a, &mut b)?;
    // What is freed in the volume can be written again, and no more than that.
    b.unmap(HELD, u32::try_from(HELD_BLOCKS / 2)?)?;
    for at in [&mut a, &mut b] {
        at.write(FRESH + 256 * PIECE, &[3; PIECE_BYTES])?;
    }
    for node in [A, B] {
        let filler = cluster.nodes[node].directory.join(VOLUMES).join("filler");
        fs::remove_file(filler).context("cannot make room")?;
    }
    b.controller.write(FRESH, &[4; PIECE_BYTES], true)?;
    cluster.await_safe()
}

/// Both copies have no space: what needs some is refused at either node, all else goes on, and both stay in sync.
fn refused(cluster: &Cluster, a: &mut At, b: &mut At) -> Result<()> {
    for turn in 0..2 {
        a.is_refused(FRESH + 8 * turn * PIECE)?;
        b.is_refused(FRESH + (8 * turn + 4) * PIECE)?;
    }
    let mut found = Vec::new();
    for at in [&mut *a, &mut *b] {
        for disk in at.disks() {
            let written = again(|| disk.write(HELD, &[2; PIECE_BYTES], true));
            written.context("what has its space")?;
            let mut data = vec![0; 16 * PIECE_BYTES];
            again(|| disk.read(FRESH, &mut data)).context("what was refused")?;
            found.push(data);
        }
    }
    ensure!(found.windows(2).all(|pair| pair[0] == pair[1]), "what was refused is not the same");
    for node in [A, B] {
        for name in ["the copy on a: ", "the copy on b: "] {
            cluster.await_words(node, name, SAYING)?;
        }
        cluster.await_words(node, "writes that need more space are refused", SAYING)?;
        let status = cluster.status(node)?;
        ensure!(!status.contains("1 of 2 copies"), "a copy has left:\n{status}");
    }
    Ok(())
}

/// Brings the images of node a to a small file system,
fn shrink(cluster: &mut Cluster) -> Result<()> {
    move_images(cluster, |room| mount(room, ROOM_MIB))
}

/// and back.
fn unshrink(cluster: &mut Cluster) -> Result<()> {
    move_images(cluster, |room| must(Command::new("umount").arg(room)))
}

fn move_images(cluster: &mut Cluster, change: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let node = &mut cluster.nodes[A];
    let (room, aside) = (node.directory.join(VOLUMES), node.directory.join("aside"));
    let copy = || Command::new("cp");
    node.stop()?;
    must(copy().args(["-a", "--sparse=always"]).args([&room, &aside]))?;
    change(&room)?;
    must(copy().args(["-a", "--sparse=always"]).arg(aside.join(".")).arg(&room))?;
    fs::remove_dir_all(&aside).context("cannot remove a copy")?;
    node.start()?;
    cluster.await_safe()
}
