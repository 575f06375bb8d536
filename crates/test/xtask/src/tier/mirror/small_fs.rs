//! Small file systems for the data of a node.

use crate::{namespace, process::run_checked, test_report::skip};
use anyhow::{Context, Result};
use rustix::fs::OFlags;
use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::Command,
    time::Duration,
};

/// Size in MiB of a file system smaller than the volume.
pub(super) const SMALL_FS_MIB: u64 = 24;
/// The directory of the images of a node.
pub(super) const VOLUMES: &str = "data/volumes";
/// How long a node may take to report the problem.
pub(super) const FULL_STATUS_TIMEOUT: Duration = Duration::from_secs(20);

/// Mounts a small file system at `path`; it is unmounted with the namespace.
pub(super) fn mount(path: &Path, mib: u64) -> Result<()> {
    if !namespace::is_inside() {
        return skip("a file system can only be mounted in a namespace");
    }
    // The node refuses directories that others can write to.
    let size = format!("size={mib}m,mode=700");
    run_checked(Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(path))?;
    let probe = path.join("probe");
    let direct = i32::try_from(OFlags::DIRECT.bits()).context("an odd flag")?;
    let direct = OpenOptions::new().write(true).create_new(true).custom_flags(direct).open(&probe);
    fs::remove_file(&probe).context("cannot remove a file")?;
    match direct {
        Err(e) if e.kind() == ErrorKind::InvalidInput => {
            skip("tmpfs has no direct I/O before Linux 6.6")
        }
        other => other.map(drop).context("cannot make a file on a small file system"),
    }
}

/// Fills a file until the disk is full.
pub(super) fn fill(file: &mut File) -> Result<()> {
    let mut piece = &[1; 1 << 20][..];
    while !piece.is_empty() {
        match file.write(piece) {
            Ok(_) => {}
            // Less than `piece` is left.
            Err(e) if e.kind() == ErrorKind::StorageFull => piece = &piece[..piece.len() / 2],
            Err(e) => return Err(e).context("cannot fill a file system"),
        }
    }
    Ok(())
}
