//! A file system full at one node: the volume continues at the other and resyncs once there is room
//! again. If both are full, both stay in sync ([`full`]).

use super::{
    FAULT_TIME, describe, full,
    load::{clients, run_extra_client, under_load, verify},
    longest,
    scenarios::PauseClass,
    small_fs::{FULL_STATUS_TIMEOUT, SMALL_FS_MIB, VOLUMES, fill, mount},
    trial_blocks,
};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    process::run_checked,
    run_context::RunContext,
};
use anyhow::{Context, Result};
use std::{
    fs::{self, File},
    process::Command,
    time::Instant,
};

/// Space beyond a node's own files: etcd preallocates two files of 64 MiB.
const ETCD_PREALLOCATION_MIB: u64 = 256;
const SIZE: &str = "64MiB";
/// The directory of a node's data.
const DATA: &str = "data";
/// Unallocated blocks; those of turn 0 begin here.
const UNALLOCATED_LBA: u64 = 65_536;
const UNALLOCATED_BLOCKS: u64 = 8192;
/// After the blocks of all turns.
const FILLER_LBA: u64 = UNALLOCATED_LBA + 3 * UNALLOCATED_BLOCKS;
const FILLER_BLOCKS: u64 = 2048;
const FILLER_WRITES: u64 = 16;
/// Runs the tests, on a cluster without a volume.
pub(super) fn run(context: &RunContext, cluster: &mut Cluster) {
    let mut volume = None;
    let prepared = context.check("a full disk: a copy on a small file system of node b", || {
        volume = Some(prepare(cluster)?);
        Ok(())
    });
    let mut passed = prepared;
    if let Some(volume) = volume.as_ref().filter(|_| passed) {
        let name = "a full disk at both nodes: initiators of either are told 7/27/07, and both copies stay in sync";
        passed = context.check(name, || full::test(cluster, volume));
    }
    let turns = [
        ("a full disk of a member, and one that has room again", VOLUMES, NODE_A),
        ("a full disk of the primary, and one that has room again", VOLUMES, NODE_B),
        ("a full disk with all that a node has, its member of the store too", DATA, NODE_B),
    ];
    for ((name, full, primary), turn) in turns.into_iter().zip(0..) {
        let Some(volume) = volume.as_ref().filter(|_| passed) else { break };
        let mut figures = String::new();
        passed = context.check(name, || {
            if full == DATA {
                move_to_small_fs(cluster)?;
            }
            cluster.request_primary_switch(volume, NODE_A, primary)?;
            test(cluster, volume, full, turn, &mut figures)
        });
        super::show(context, &figures);
    }
    if !passed {
        cluster.show_logs(context);
    }
}

/// Creates a volume whose replica at node b is on a small file system.
fn prepare(cluster: &mut Cluster) -> Result<MirroredVolume> {
    let room = cluster.nodes[NODE_B].directory.join(VOLUMES);
    cluster.nodes[NODE_B].stop()?;
    let mounted = mount(&room, SMALL_FS_MIB);
    cluster.nodes[NODE_B].start()?;
    mounted?;
    cluster.create("small", SIZE)
}

/// Moves all files of node b to one small file system.
fn move_to_small_fs(cluster: &mut Cluster) -> Result<()> {
    let node = &mut cluster.nodes[NODE_B];
    let (data, aside) = (node.directory.join(DATA), node.directory.join("aside"));
    let copy = || Command::new("cp");
    node.stop()?;
    run_checked(copy().args(["-a", "--sparse=always"]).args([&data, &aside]))?;
    run_checked(Command::new("umount").arg(data.join("volumes")))?;
    let used = Command::new("du").arg("-sm").arg(&aside).output().context("cannot run du")?;
    let used = String::from_utf8_lossy(&used.stdout);
    let used: u64 = used.split_whitespace().next().unwrap_or_default().parse()?;
    mount(&data, used + ETCD_PREALLOCATION_MIB)?;
    run_checked(copy().args(["-a", "--sparse=always"]).arg(aside.join(".")).arg(&data))?;
    fs::remove_dir_all(&aside).context("cannot remove a copy")?;
    node.start()?;
    cluster.await_safe()
}

fn test(
    cluster: &mut Cluster,
    volume: &MirroredVolume,
    full: &str,
    turn: u64,
    figures: &mut String,
) -> Result<()> {
    let room = cluster.nodes[NODE_B].directory.join(full);
    let shared = trial_blocks(turn);
    let fresh = UNALLOCATED_LBA + turn * UNALLOCATED_BLOCKS;
    let fresh = fresh..fresh + UNALLOCATED_BLOCKS;
    let mut clients = clients(cluster, volume, &shared, Instant::now())?;
    let happened = under_load(&mut clients, |_| {
        let mut filler = File::create(room.join("filler")).context("cannot make a file")?;
        fill(&mut filler)?;
        // Writes to unallocated blocks take space.
        run_extra_client(cluster, volume, &fresh, 60)?;
        cluster.await_status_text(NODE_B, "no space left", FULL_STATUS_TIMEOUT)?;
        cluster.await_status_text(NODE_A, "1 of 2 replicas are in sync", FULL_STATUS_TIMEOUT)?;
        if full == DATA {
            // etcd may have ended by itself, and cannot restart before there is room.
            cluster.kill_store_member(NODE_B)?;
            cluster.await_status_text(NODE_A, "metadata store: member", FULL_STATUS_TIMEOUT)?;
            // A full disk must not keep a node from starting either.
            cluster.nodes[NODE_B].kill()?;
            cluster.nodes[NODE_B].start()?;
            await_full_again(cluster, volume, &mut filler)?;
        }
        std::thread::sleep(FAULT_TIME);
        drop(filler);
        fs::remove_file(room.join("filler")).context("cannot make room")?;
        cluster.await_safe()
    });
    let (_, longest) = longest(&mut clients);
    *figures = describe(PauseClass::Planned, longest, &clients);
    happened?;
    verify(&mut clients, &shared)?;
    cluster.check_replicas_equal(volume)?;
    PauseClass::Planned.check(longest)
}

/// Waits until node b reports again that it is out of space. Its etcd may have freed preallocated
/// space, so that the replica found room and is in sync.
fn await_full_again(cluster: &Cluster, volume: &MirroredVolume, filler: &mut File) -> Result<()> {
    let mut said = Ok(());
    for piece in 0..FILLER_WRITES {
        fill(filler)?;
        said = cluster.await_status_text(NODE_B, "no space left", FULL_STATUS_TIMEOUT / 10);
        if said.is_ok() {
            break;
        }
        let begins = FILLER_LBA + piece * FILLER_BLOCKS;
        run_extra_client(cluster, volume, &(begins..begins + FILLER_BLOCKS), 20)?;
    }
    said
}
