//! A virtual machine that boots from a volume: an installed disk is copied there by NBD, the machine's firmware finds it at
//! the node's own socket, the node's peer dies under load, and both of its file systems are clean at the end.

use super::super::accidents;
use super::{QUEUES, lend, serial, socket_of};
use crate::{
    cluster::{A, B, Cluster},
    guest::{self, Kernel, Order},
    house::House,
};
use anyhow::{Result, ensure};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const VOLUME: &str = "boot";
const MIB: u32 = 768;
/// How often the peer dies.
const DEATHS: usize = 2;
const LIMIT: Duration = Duration::from_secs(60);
const COPYING: Duration = Duration::from_secs(120);
/// Where `mkbootdisk` has put ext4, and xfs behind it, in MiB.
const EXT4_MIB: u64 = 1;
const XFS_MIB: u64 = 401;

pub(super) fn run(house: &House, cluster: &mut Cluster, directory: &Path) -> Result<()> {
    let disk = guest::boot_disk(house, MIB)?;
    let volume = cluster.create(VOLUME, &format!("{MIB}MiB"))?;
    let copy = Copy { house, cluster, socket: directory.join("nbd.sock") };
    let installed = house.check("an installed disk is copied to a volume by NBD", || {
        copy.between(&disk.display().to_string(), &copy.export())
    });
    if !installed {
        return Ok(());
    }
    let socket = socket_of(cluster, VOLUME)?;
    let order = order(serial(cluster, VOLUME)?);
    house.display.working("a virtual machine boots from a volume");
    let ran = guest::run_beside(house, &Kernel::of_disk(&socket, QUEUES), &order, |signs| {
        (1..=DEATHS).try_for_each(|step| accidents::of_node(cluster, signs, step, B))
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        cluster.show_logs(house);
        house.fail("a virtual machine that boots from a volume", &format!("{:?}", ran.err()));
        return Ok(());
    }
    house.check("both file systems of the machine are clean", || {
        let copy = Copy { house, cluster, socket: directory.join("nbd.sock") };
        copy.between(&copy.export(), &disk.display().to_string())?;
        are_clean(house, &disk)
    });
    house
        .check("both copies of its disk hold the same bytes", || cluster.copies_are_equal(&volume));
    Ok(())
}

fn order(serial: String) -> Order<'static> {
    Order {
        script: "boot.sh",
        variables: vec![
            ("DOOR", "a disk to boot from".to_owned()),
            ("SERIAL", serial),
            ("MEGABYTES", "8".to_owned()),
        ],
        files: Vec::new(),
        kernel: &[],
        memory_mib: 512,
        limit: LIMIT,
    }
}

/// Copies the volume, as NBD shows it.
struct Copy<'a> {
    house: &'a House,
    cluster: &'a Cluster,
    socket: PathBuf,
}

impl Copy<'_> {
    fn export(&self) -> String {
        format!("nbd+unix:///{VOLUME}?socket={}", self.socket.display())
    }

    fn between(&self, from: &str, to: &str) -> Result<()> {
        let at = self.socket.display().to_string();
        let attached = lend(&self.cluster.nodes[A], VOLUME, &["--nbd", &at], &self.socket)?;
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-n", "-f", "raw", "-O", "raw", from, to]);
        let copied = self.house.run("qemu-img convert", &mut command, COPYING);
        let status = attached.stop()?;
        copied?.ok()?;
        ensure!(status.success(), "what served it ended with {status}");
        Ok(())
    }
}

/// Has the file systems' own tools judge a copy of the disk.
fn are_clean(house: &House, disk: &Path) -> Result<()> {
    let mut ext4 = Command::new("e2fsck");
    ext4.args(["-f", "-n"]).arg(format!("{}?offset={}", disk.display(), EXT4_MIB << 20));
    house.run("e2fsck", &mut ext4, COPYING)?.ok()?;
    let alone = disk.with_extension("xfs");
    let mut cut = Command::new("dd");
    cut.arg(format!("if={}", disk.display())).arg(format!("of={}", alone.display()));
    cut.args(["bs=1M", "conv=sparse", "status=none"]).arg(format!("skip={XFS_MIB}"));
    house.run("dd", &mut cut, COPYING)?.ok()?;
    let mut xfs = Command::new("xfs_repair");
    xfs.args(["-n", "-f"]).arg(&alone);
    house.run("xfs_repair", &mut xfs, COPYING)?.ok().map(|_| ())
}
