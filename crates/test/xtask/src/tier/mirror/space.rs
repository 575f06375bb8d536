//! A file system that is full at one node: the volume goes on at the other, and all comes back when there is room again. Where
//! that of the other node is full too, both stay in sync (`full`).

use super::{
    HOLD, blocks, describe, full,
    load::{clients, touch, under_load, verify},
    longest,
    scenarios::Pause,
};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
    ledger::skip,
    namespace,
    process::must,
};
use anyhow::{Context, Result};
use rustix::fs::OFlags;
use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

/// Smaller than the volume whose copy is there, in MiB.
pub(super) const ROOM_MIB: u64 = 24;
/// Beside what a node has: etcd makes two files of 64 MiB before it writes to them.
const MORE_ROOM_MIB: u64 = 256;
const SIZE: &str = "64MiB";
/// Where a node keeps everything, and where its images.
const DATA: &str = "data";
pub(super) const VOLUMES: &str = "data/volumes";
/// Blocks where nobody has written before: those of turn 0 begin here.
const FRESH: u64 = 65_536;
const FRESH_BLOCKS: u64 = 8192;
/// Behind those of all turns, in pieces.
const SPARE: u64 = FRESH + 3 * FRESH_BLOCKS;
const SPARE_BLOCKS: u64 = 2048;
const SPARES: u64 = 16;
/// How long the node may take to say what is wrong.
pub(super) const SAYING: Duration = Duration::from_secs(20);

/// The tests, on a cluster without a volume.
pub(super) fn run(house: &House, cluster: &mut Cluster) {
    let mut volume = None;
    let prepared = house.check("a full disk: a copy on a small file system of node b", || {
        volume = Some(prepare(cluster)?);
        Ok(())
    });
    let mut passed = prepared;
    if let Some(volume) = volume.as_ref().filter(|_| passed) {
        let name = "a full disk at both nodes: initiators of either are told 7/27/07, and both copies stay in sync";
        passed = house.check(name, || full::test(cluster, volume));
    }
    let turns = [
        ("a full disk of a member, and one that has room again", VOLUMES, A),
        ("a full disk of the primary, and one that has room again", VOLUMES, B),
        ("a full disk with all that a node has, its member of the store too", DATA, B),
    ];
    for ((name, full, primary), turn) in turns.into_iter().zip(0..) {
        let Some(volume) = volume.as_ref().filter(|_| passed) else { break };
        let mut figures = String::new();
        passed = house.check(name, || {
            if full == DATA {
                gather(cluster)?;
            }
            cluster.switch(volume, A, primary)?;
            test(cluster, volume, full, turn, &mut figures)
        });
        super::show(house, &figures);
    }
    if !passed {
        cluster.show_logs(house);
    }
}

/// A volume with its copy of node b on a small file system.
fn prepare(cluster: &mut Cluster) -> Result<Mirrored> {
    let room = cluster.nodes[B].directory.join(VOLUMES);
    cluster.nodes[B].stop()?;
    let mounted = mount(&room, ROOM_MIB);
    cluster.nodes[B].start()?;
    mounted?;
    cluster.create("small", SIZE)
}

/// Brings everything that node b has to one small file system.
fn gather(cluster: &mut Cluster) -> Result<()> {
    let node = &mut cluster.nodes[B];
    let (data, aside) = (node.directory.join(DATA), node.directory.join("aside"));
    let copy = || Command::new("cp");
    node.stop()?;
    must(copy().args(["-a", "--sparse=always"]).args([&data, &aside]))?;
    must(Command::new("umount").arg(data.join("volumes")))?;
    let used = Command::new("du").arg("-sm").arg(&aside).output().context("cannot run du")?;
    let used = String::from_utf8_lossy(&used.stdout);
    let used: u64 = used.split_whitespace().next().unwrap_or_default().parse()?;
    mount(&data, used + MORE_ROOM_MIB)?;
    must(copy().args(["-a", "--sparse=always"]).arg(aside.join(".")).arg(&data))?;
    fs::remove_dir_all(&aside).context("cannot remove a copy")?;
    node.start()?;
    cluster.await_safe()
}

/// Puts a small file system at `path`; it goes with the namespace.
pub(super) fn mount(path: &Path, mib: u64) -> Result<()> {
    if !namespace::inside() {
        return skip("a file system can only be mounted in a namespace");
    }
    // What others can write to is refused.
    let size = format!("size={mib}m,mode=700");
    must(Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(path))?;
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

fn test(
    cluster: &mut Cluster,
    volume: &Mirrored,
    full: &str,
    turn: u64,
    figures: &mut String,
) -> Result<()> {
    let room = cluster.nodes[B].directory.join(full);
    let shared = blocks(turn);
    let fresh = FRESH + turn * FRESH_BLOCKS;
    let fresh = fresh..fresh + FRESH_BLOCKS;
    let mut clients = clients(cluster, volume, &shared, Instant::now())?;
    let happened = under_load(&mut clients, |_| {
        let mut filler = File::create(room.join("filler")).context("cannot make a file")?;
        fill(&mut filler)?;
        // Where nobody has written before: that takes space.
        touch(cluster, volume, &fresh, 60)?;
        cluster.await_words(B, "no space left", SAYING)?;
        cluster.await_words(A, "1 of 2 copies are in sync", SAYING)?;
        if full == DATA {
            // It may have ended by itself, and cannot come back before there is room.
            cluster.kill_store_member(B)?;
            cluster.await_words(A, "metadata store: member", SAYING)?;
            // Nor is a node kept from beginning by it.
            cluster.nodes[B].kill()?;
            cluster.nodes[B].start()?;
            await_full_again(cluster, volume, &mut filler)?;
        }
        std::thread::sleep(HOLD);
        drop(filler);
        fs::remove_file(room.join("filler")).context("cannot make room")?;
        cluster.await_safe()
    });
    let (_, longest) = longest(&mut clients);
    *figures = describe(Pause::Planned, longest, &clients);
    happened?;
    verify(&mut clients, &shared)?;
    cluster.copies_are_equal(volume)?;
    Pause::Planned.check(longest)
}

/// Waits until node b says again that there is no space. Its member of the store may have given back
/// what it had reserved, so that the copy has found room and is in sync.
fn await_full_again(cluster: &Cluster, volume: &Mirrored, filler: &mut File) -> Result<()> {
    let mut said = Ok(());
    for piece in 0..SPARES {
        fill(filler)?;
        said = cluster.await_words(B, "no space left", SAYING / 10);
        if said.is_ok() {
            break;
        }
        let begins = SPARE + piece * SPARE_BLOCKS;
        touch(cluster, volume, &(begins..begins + SPARE_BLOCKS), 20)?;
    }
    said
}

/// Writes to a file until nothing more fits.
pub(super) fn fill(file: &mut File) -> Result<()> {
    let mut piece = &[1; 1 << 20][..];
    while !piece.is_empty() {
        match file.write(piece) {
            Ok(_) => {}
            // What is left is less than that.
            Err(e) if e.kind() == ErrorKind::StorageFull => piece = &piece[..piece.len() / 2],
            Err(e) => return Err(e).context("cannot fill a file system"),
        }
    }
    Ok(())
}
