//! A virtual machine boots from a volume: an installed disk is copied to it over NBD, the firmware
//! finds it at the node's own socket, the node's peer dies under load, and both file systems must
//! be clean at the end.

use super::super::node_faults;
use super::{QUEUES, serial, serve_volume, socket_of};
use crate::{
    cluster::{Cluster, NODE_A, NODE_B},
    guest::{self, GuestJob, GuestKernel},
    run_context::RunContext,
};
use anyhow::{Result, ensure};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const VOLUME: &str = "boot";
const MIB: u32 = 768;
/// How often the peer is killed.
const PEER_KILLS: usize = 2;
const LIMIT: Duration = Duration::from_secs(60);
const COPY_LIMIT: Duration = Duration::from_secs(120);
/// Where `mkbootdisk` puts ext4, followed by xfs, in MiB.
const EXT4_MIB: u64 = 1;
const XFS_MIB: u64 = 401;

pub(super) fn run(context: &RunContext, cluster: &mut Cluster, directory: &Path) -> Result<()> {
    let disk = guest::boot_disk(context, MIB)?;
    let volume = cluster.create(VOLUME, &format!("{MIB}MiB"))?;
    let copy = NbdCopy { context, cluster, socket: directory.join("nbd.sock") };
    let installed = context.check("an installed disk is copied to a volume by NBD", || {
        copy.copy_between(&disk.display().to_string(), &copy.export())
    });
    if !installed {
        return Ok(());
    }
    let socket = socket_of(cluster, VOLUME)?;
    let order = order(serial(cluster, VOLUME)?);
    context.display.begin_step("a virtual machine boots from a volume");
    let ran = guest::run_beside(context, &GuestKernel::of_disk(&socket, QUEUES), &order, |signs| {
        (1..=PEER_KILLS).try_for_each(|step| node_faults::kill_node(cluster, signs, step, NODE_B))
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        cluster.show_logs(context);
        context.fail("a virtual machine that boots from a volume", &format!("{:?}", ran.err()));
        return Ok(());
    }
    context.check("both file systems of the machine are clean", || {
        let copy = NbdCopy { context, cluster, socket: directory.join("nbd.sock") };
        copy.copy_between(&copy.export(), &disk.display().to_string())?;
        check_file_systems(context, &disk)
    });
    context.check("both copies of its disk hold the same bytes", || {
        cluster.check_replicas_equal(&volume)
    });
    Ok(())
}

fn order(serial: String) -> GuestJob<'static> {
    GuestJob {
        script: "boot.sh",
        variables: vec![
            ("DOOR", "a disk to boot from".to_owned()),
            ("SERIAL", serial),
            ("MEGABYTES", "8".to_owned()),
        ],
        files: Vec::new(),
        kernel_options: &[],
        memory_mib: 512,
        limit: LIMIT,
    }
}

/// Copies the volume over NBD.
struct NbdCopy<'a> {
    context: &'a RunContext,
    cluster: &'a Cluster,
    socket: PathBuf,
}

impl NbdCopy<'_> {
    fn export(&self) -> String {
        format!("nbd+unix:///{VOLUME}?socket={}", self.socket.display())
    }

    fn copy_between(&self, from: &str, to: &str) -> Result<()> {
        let at = self.socket.display().to_string();
        let attached =
            serve_volume(&self.cluster.nodes[NODE_A], VOLUME, &["--nbd", &at], &self.socket)?;
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-n", "-f", "raw", "-O", "raw", from, to]);
        let copied = self.context.run("qemu-img convert", &mut command, COPY_LIMIT);
        let status = attached.stop()?;
        copied?.success_output()?;
        ensure!(status.success(), "what served it ended with {status}");
        Ok(())
    }
}

/// Runs fsck on both file systems of a copy of the disk.
fn check_file_systems(context: &RunContext, disk: &Path) -> Result<()> {
    let mut ext4 = Command::new("e2fsck");
    ext4.args(["-f", "-n"]).arg(format!("{}?offset={}", disk.display(), EXT4_MIB << 20));
    context.run("e2fsck", &mut ext4, COPY_LIMIT)?.success_output()?;
    let alone = disk.with_extension("xfs");
    let mut cut = Command::new("dd");
    cut.arg(format!("if={}", disk.display())).arg(format!("of={}", alone.display()));
    cut.args(["bs=1M", "conv=sparse", "status=none"]).arg(format!("skip={XFS_MIB}"));
    context.run("dd", &mut cut, COPY_LIMIT)?.success_output()?;
    let mut xfs = Command::new("xfs_repair");
    xfs.args(["-n", "-f"]).arg(&alone);
    context.run("xfs_repair", &mut xfs, COPY_LIMIT)?.success_output().map(|_| ())
}
