//! A file system that is full at one node: the volume goes on at the other, and the copy comes back when there is room again.

use super::{
    HOLD, blocks, describe,
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

/// Smaller than the volume whose copy is there.
const ROOM: &str = "size=24m";
const SIZE: &str = "64MiB";
/// Where a node keeps its images.
const VOLUMES: &str = "data/volumes";
/// Blocks where nobody has written before: those of turn 0 begin here.
const FRESH: u64 = 65_536;
const FRESH_BLOCKS: u64 = 8192;
/// How long the node may take to say what is wrong.
const SAYING: Duration = Duration::from_secs(20);

/// The tests, on a cluster without a volume.
pub(super) fn run(house: &House, cluster: &mut Cluster) {
    let mut volume = None;
    let prepared = house.check("a full disk: a copy on a small file system of node b", || {
        volume = Some(prepare(cluster)?);
        Ok(())
    });
    let turns = [
        ("a full disk of a member, and one that has room again", A),
        ("a full disk of the primary, and one that has room again", B),
    ];
    let mut passed = prepared;
    for ((name, primary), turn) in turns.into_iter().zip(0..) {
        let Some(volume) = volume.as_ref().filter(|_| passed) else { break };
        let mut figures = String::new();
        passed = house.check(name, || {
            let room = cluster.nodes[B].directory.join(VOLUMES);
            cluster.switch(volume, A, primary)?;
            test(cluster, volume, &room, turn, &mut figures)
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
    let mounted = mount(&room);
    cluster.nodes[B].start()?;
    mounted?;
    cluster.create("small", SIZE)
}

/// Puts a small file system at `path`; it goes with the namespace.
fn mount(path: &Path) -> Result<()> {
    if !namespace::inside() {
        return skip("a file system can only be mounted in a namespace");
    }
    must(Command::new("mount").args(["-t", "tmpfs", "-o", ROOM, "tmpfs"]).arg(path))?;
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
    room: &Path,
    turn: u64,
    figures: &mut String,
) -> Result<()> {
    let shared = blocks(turn);
    let fresh = FRESH + turn * FRESH_BLOCKS;
    let fresh = fresh..fresh + FRESH_BLOCKS;
    let mut clients = clients(cluster, volume, &shared, Instant::now())?;
    let happened = under_load(&mut clients, |_| {
        let filler = fill(&room.join("filler"))?;
        // Where nobody has written before: that takes space.
        touch(cluster, volume, &fresh, 60)?;
        cluster.await_words(B, "no space left", SAYING)?;
        cluster.await_words(A, "1 of 2 copies are in sync", SAYING)?;
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

/// Writes a file until nothing more fits.
fn fill(path: &Path) -> Result<File> {
    let mut file = File::create(path).context("cannot make a file")?;
    let mut piece = &[1; 1 << 20][..];
    while !piece.is_empty() {
        match file.write(piece) {
            Ok(_) => {}
            // What is left is less than that.
            Err(e) if e.kind() == ErrorKind::StorageFull => piece = &piece[..piece.len() / 2],
            Err(e) => return Err(e).context("cannot fill a file system"),
        }
    }
    Ok(file)
}
