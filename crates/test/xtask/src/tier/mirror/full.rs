//! File systems full at both nodes: initiators of either node get their protocol's out-of-space
//! status, and nothing else changes.

use super::small_fs::{FULL_STATUS_TIMEOUT, SMALL_FS_MIB, VOLUMES, fill, mount};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    process::run_checked,
};
use anyhow::{Context, Result, bail, ensure};
use probe::{
    BlockClient,
    iscsi::{ScsiFailure, Session},
    multipath::VolumeAddress,
    nvme::{Controller, NvmeFailure},
};
use std::{
    fs::{self, File},
    io,
    path::Path,
    process::Command,
};

/// The start of the blocks allocated before space runs out, and of the blocks after them.
const ALLOCATED_LBA: u64 = 122_880;
const ALLOCATED_BLOCKS: u64 = 1024;
const UNALLOCATED_LBA: u64 = ALLOCATED_LBA + ALLOCATED_BLOCKS;
/// Blocks of a write.
const WRITE_BLOCKS: u64 = 16;
/// The same in bytes.
const WRITE_BYTES: usize = 16 * 512;

/// SAM-5, DATA PROTECT; SPC-5, SPACE ALLOCATION FAILED WRITE PROTECT.
const SENSE: [u8; 3] = [0x07, 0x27, 0x07];
/// NVM command set, Capacity Exceeded.
const STATUS: (u8, u8) = (0, 0x81);

/// Initiators of both protocols at one node.
struct NodeInitiators {
    node: &'static str,
    session: Session,
    controller: Controller,
}

impl NodeInitiators {
    fn log_in(cluster: &Cluster, volume: &MirroredVolume, node: usize) -> Result<Self> {
        let (unit, subsystem) = (cluster.paths(volume, 0)?, cluster.paths(volume, 2)?);
        let number = u32::try_from(node)?;
        let VolumeAddress::Iscsi { initiator, target, lun } = &unit.volume else {
            bail!("no unit")
        };
        let VolumeAddress::Nvme { host, subsystem: name } = &subsystem.volume else {
            bail!("no subsystem")
        };
        Ok(Self {
            node: if node == NODE_A { "node a" } else { "node b" },
            session: Session::login(unit.portals[node], initiator, target, *lun, number)?,
            controller: Controller::connect(subsystem.portals[node], host, name)?,
        })
    }

    fn disks(&mut self) -> [&mut dyn BlockClient; 2] {
        [&mut self.session, &mut self.controller]
    }

    /// Checks that writes at block `at` are refused over both protocols.
    fn is_refused(&mut self, at: u64) -> Result<()> {
        let node = self.node;
        let data = [7; WRITE_BYTES];
        let outcome = retry_unit_attention(|| self.session.write(at, &data, false));
        let sense = outcome
            .as_ref()
            .err()
            .and_then(ScsiFailure::from_io_error)
            .map(|refused| refused.sense);
        ensure!(sense == Some(SENSE), "{node}, iSCSI: {outcome:?}, not 7/27/07");
        let outcome = self.controller.write(at + WRITE_BLOCKS, &data, false);
        let status =
            outcome.as_ref().err().and_then(NvmeFailure::from_io_error).map(NvmeFailure::code);
        ensure!(status == Some(STATUS), "{node}, NVMe: {outcome:?}, not Capacity Exceeded");
        Ok(())
    }

    /// Unmaps blocks (SBC-4 5.35).
    fn unmap(&mut self, at: u64, blocks: u32) -> io::Result<()> {
        let mut list = [0; 24];
        list[1] = 22;
        list[3] = 16;
        list[8..16].copy_from_slice(&at.to_be_bytes());
        list[16..20].copy_from_slice(&blocks.to_be_bytes());
        let mut cdb = [0; 16];
        cdb[0] = 0x42;
        cdb[8] = 24;
        retry_unit_attention(|| self.session.execute(&cdb, &list, &mut []))
    }

    /// Writes over iSCSI.
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        retry_unit_attention(|| self.session.write(at, data, true))
    }
}

/// Retries while the target reports a unit attention, for example that space is low (SAM-5 5.14).
fn retry_unit_attention(mut ask: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match ask() {
            Err(e)
                if ScsiFailure::from_io_error(&e)
                    .is_some_and(|refused| refused.is_unit_attention()) => {}
            other => return other,
        }
    }
}

/// Runs the test on a volume whose replica at node b is on a small file system. Node a gets one for
/// the duration of the test.
pub(super) fn test(cluster: &mut Cluster, volume: &MirroredVolume) -> Result<()> {
    shrink(cluster)?;
    let tested = with_fillers(cluster, volume);
    let back = unshrink(cluster);
    tested?;
    back?;
    cluster.check_replicas_equal(volume)
}

fn with_fillers(cluster: &Cluster, volume: &MirroredVolume) -> Result<()> {
    let mut a = NodeInitiators::log_in(cluster, volume, NODE_A)?;
    let mut b = NodeInitiators::log_in(cluster, volume, NODE_B)?;
    for at in (ALLOCATED_LBA..UNALLOCATED_LBA).step_by(16) {
        a.write(at, &[1; WRITE_BYTES])?;
    }
    for node in [NODE_A, NODE_B] {
        let filler = cluster.nodes[node].directory.join(VOLUMES).join("filler");
        fill(&mut File::create(filler).context("cannot make a file")?)?;
    }
    check_refused(cluster, &mut a, &mut b)?;
    // As many blocks as were unmapped can be written again, and no more.
    b.unmap(ALLOCATED_LBA, u32::try_from(ALLOCATED_BLOCKS / 2)?)?;
    for at in [&mut a, &mut b] {
        at.write(UNALLOCATED_LBA + 256 * WRITE_BLOCKS, &[3; WRITE_BYTES])?;
    }
    for node in [NODE_A, NODE_B] {
        let filler = cluster.nodes[node].directory.join(VOLUMES).join("filler");
        fs::remove_file(filler).context("cannot make room")?;
    }
    b.controller.write(UNALLOCATED_LBA, &[4; WRITE_BYTES], true)?;
    cluster.await_safe()
}

/// Both replicas are out of space: each node refuses writes that need space, all else works, and
/// both replicas stay in sync.
fn check_refused(cluster: &Cluster, a: &mut NodeInitiators, b: &mut NodeInitiators) -> Result<()> {
    for turn in 0..2 {
        a.is_refused(UNALLOCATED_LBA + 8 * turn * WRITE_BLOCKS)?;
        b.is_refused(UNALLOCATED_LBA + (8 * turn + 4) * WRITE_BLOCKS)?;
    }
    let mut found = Vec::new();
    for at in [&mut *a, &mut *b] {
        for disk in at.disks() {
            let written =
                retry_unit_attention(|| disk.write(ALLOCATED_LBA, &[2; WRITE_BYTES], true));
            written.context("what has its space")?;
            let mut data = vec![0; 16 * WRITE_BYTES];
            retry_unit_attention(|| disk.read(UNALLOCATED_LBA, &mut data))
                .context("what was refused")?;
            found.push(data);
        }
    }
    ensure!(found.windows(2).all(|pair| pair[0] == pair[1]), "what was refused is not the same");
    for node in [NODE_A, NODE_B] {
        for name in ["the replica on a: ", "the replica on b: "] {
            cluster.await_status_text(node, name, FULL_STATUS_TIMEOUT)?;
        }
        cluster.await_status_text(
            node,
            "writes that need more space are refused",
            FULL_STATUS_TIMEOUT,
        )?;
        let status = cluster.status(node)?;
        ensure!(!status.contains("1 of 2 replicas"), "a copy has left:\n{status}");
    }
    Ok(())
}

/// Moves the images of node a to a small file system.
fn shrink(cluster: &mut Cluster) -> Result<()> {
    move_images(cluster, |room| mount(room, SMALL_FS_MIB))
}

/// Moves them back.
fn unshrink(cluster: &mut Cluster) -> Result<()> {
    move_images(cluster, |room| run_checked(Command::new("umount").arg(room)))
}

fn move_images(cluster: &mut Cluster, change: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let node = &mut cluster.nodes[NODE_A];
    let (room, aside) = (node.directory.join(VOLUMES), node.directory.join("aside"));
    let copy = || Command::new("cp");
    node.stop()?;
    run_checked(copy().args(["-a", "--sparse=always"]).args([&room, &aside]))?;
    change(&room)?;
    run_checked(copy().args(["-a", "--sparse=always"]).arg(aside.join(".")).arg(&room))?;
    fs::remove_dir_all(&aside).context("cannot remove a copy")?;
    node.start()?;
    cluster.await_safe()
}
