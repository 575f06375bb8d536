//! A mirrored volume as a virtual machine's disk: QEMU uses it at a socket of `windrose attach`,
//! which connects to both nodes, and at a node's own socket, from which it also boots.

mod boot;

use super::{node_faults, ublk};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    guest::{self, GuestJob, GuestKernel, GuestSignals},
    node::{Node, Profile},
    process::Daemon,
    run_context::RunContext,
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The parts, by the names for `--only`, and how many parts of them there are when a sample is run.
const UBLK: &str = "ublk";
const AT_PROCESS: &str = "vhost-user of a process";
const AT_NODE: &str = "vhost-user of a node";
const BOOT: &str = "vhost-user boot";
const PARTS: [&str; 4] = [UBLK, AT_PROCESS, AT_NODE, BOOT];
const SAMPLE_PARTS: usize = 2;

const VOLUME: &str = "guest";
/// The volume that node a serves itself.
const LOCAL_VOLUME: &str = "beside";
const SIZE: &str = "512MiB";
const QUEUES: u16 = 2;
/// How often the process that serves the disk is killed under load.
const PROCESS_KILLS: usize = 2;
/// How often a node is killed: the first and the second in turn.
const NODE_KILLS: usize = 2;
/// How many bytes of a serial number a guest sees.
const SERIAL_BYTES: usize = 20;
const LIMIT: Duration = Duration::from_secs(200);
const START_LIMIT: Duration = Duration::from_secs(20);
/// How long the nodes are frozen before a kill, in turn: a guest on a busy machine may have sent no
/// request meanwhile.
const FREEZE_TIMES: [Duration; 4] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
];
/// How long the next process may take to find requests in flight: QEMU connects again every second.
const RESUME_LIMIT: Duration = Duration::from_secs(5);
/// What the next process logs if it found requests in flight.
const RESUMED_MESSAGE: &str = "resubmitting requests that were not answered";

pub(super) fn run(context: &RunContext) -> Result<()> {
    let parts = PARTS.into_iter().filter(|name| context.matches_filter(name));
    let parts = context.sample("attached volumes", parts, SAMPLE_PARTS);
    if parts.contains(&UBLK) {
        ublk::run(context)?;
    }
    if parts.iter().any(|part| *part != UBLK) {
        vhost_user_disks(context, &parts)?;
    }
    Ok(())
}

/// Tests of vhost-user-blk disks.
fn vhost_user_disks(context: &RunContext, parts: &[&str]) -> Result<()> {
    let kernel = GuestKernel::qemu(context)?;
    let directory = context.directory("attach")?;
    let mut cluster = Cluster::start(context, &directory, Profile::Dev)?;
    if !context.check("two data nodes and a witness form a cluster", || cluster.form_cluster()) {
        return Ok(());
    }
    let volumes = [cluster.create(VOLUME, SIZE)?, cluster.create(LOCAL_VOLUME, SIZE)?];
    let socket = directory.join("disk.sock");
    if parts.contains(&AT_PROCESS) {
        guest_at_attach_process(context, &kernel, &mut cluster, &socket)?;
    }
    if parts.contains(&AT_NODE) {
        guest_at_node(context, &kernel, &mut cluster)?;
    }
    if parts.contains(&BOOT) {
        boot::run(context, &mut cluster, &directory)?;
    }
    context.check("both copies hold the same bytes", || {
        volumes.iter().try_for_each(|volume: &MirroredVolume| cluster.check_replicas_equal(volume))
    });
    context.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// A guest at a socket of `windrose attach`.
fn guest_at_attach_process(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    socket: &Path,
) -> Result<()> {
    let order = order("vhost-user", &serial(cluster, VOLUME)?, "ext4 xfs", NODE_KILLS);
    let mut attached = Some(start_attach(&cluster.nodes[NODE_A], socket)?);
    context.display.begin_step("a virtual machine with a lent disk");
    let kernel = kernel.clone().with_disk(socket, QUEUES);
    let ran = guest::run_beside(context, &kernel, &order, |signs| {
        for n in 1..=PROCESS_KILLS {
            kill_attach_process(cluster, socket, &mut attached, signs, n)?;
        }
        node_faults::kill_nodes(cluster, signs, 1..=NODE_KILLS)
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        cluster.show_logs(context);
        let said = attached.as_ref().map(Daemon::output).transpose()?.unwrap_or_default();
        context.fail("a disk of a virtual machine", &format!("{:?}\n{said}", ran.err()));
    }
    context.check("what serves the disk ends in order", || {
        let ended = attached.take().map(Daemon::stop).transpose()?;
        ensure!(ended.is_some_and(|status| status.success()), "it ended with {ended:?}");
        ensure!(!socket.exists(), "its socket is still there");
        Ok(())
    });
    Ok(())
}

/// A guest at node a's own socket: its I/O stalls when that node dies, then resumes with the
/// requests in flight.
fn guest_at_node(context: &RunContext, kernel: &GuestKernel, cluster: &mut Cluster) -> Result<()> {
    let socket = socket_of(cluster, LOCAL_VOLUME)?;
    let order = order("vhost-user of a node", &serial(cluster, LOCAL_VOLUME)?, "", 0);
    context.display.begin_step("a virtual machine beside its node");
    let kernel = kernel.clone().with_disk(&socket, QUEUES);
    let ran = guest::run_beside(context, &kernel, &order, |signs| {
        (1..=PROCESS_KILLS).try_for_each(|n| kill_serving_node(cluster, signs, n))
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        cluster.show_logs(context);
        context.fail("a disk of a virtual machine beside its node", &format!("{:?}", ran.err()));
    }
    Ok(())
}

/// Makes node a serve a volume at its own socket.
fn socket_of(cluster: &Cluster, volume: &str) -> Result<PathBuf> {
    let shown = cluster.nodes[NODE_A].query(&[
        "volume",
        "export",
        volume,
        "--protocols",
        "iscsi,nvme,vhost-user",
    ])?;
    let socket = shown.pointer("/vhost_user/socket").and_then(|at| at.as_str());
    Ok(PathBuf::from(socket.context("node a names no socket")?))
}

/// Kills node a, which serves the guest, under load. The other node is frozen first, so that
/// requests are in flight.
fn kill_serving_node(cluster: &mut Cluster, signs: &GuestSignals<'_>, n: usize) -> Result<()> {
    signs.wait_for(&format!("loaded-{n}"))?;
    for time in FREEZE_TIMES {
        cluster.nodes[NODE_B].freeze()?;
        std::thread::sleep(time);
        let killed = cluster.nodes[NODE_A].kill();
        cluster.nodes[NODE_B].thaw()?;
        killed?;
        cluster.nodes[NODE_A].start()?;
        let node = &mut cluster.nodes[NODE_A];
        let resumed = wait_for_message(|| {
            node.alive()?;
            node.log()
        })?;
        cluster.await_safe()?;
        if resumed {
            return signs.send(&format!("again-{n}"));
        }
    }
    bail!("nothing was in flight: {}", cluster.nodes[NODE_A].log()?)
}

/// Waits until a log says that requests in flight were found; returns whether it does.
fn wait_for_message(mut log: impl FnMut() -> Result<String>) -> Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < RESUME_LIMIT {
        if log()?.contains(RESUMED_MESSAGE) {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(false)
}

/// The serial number the guest sees: the start of the volume's identity.
fn serial(cluster: &Cluster, volume: &str) -> Result<String> {
    let shown = cluster.nodes[NODE_A].query(&["volume", "show", volume])?;
    let id = shown.pointer("/id").and_then(|id| id.as_str()).unwrap_or_default();
    Ok(id.replace('-', "").chars().take(SERIAL_BYTES).collect())
}

fn order(door: &str, serial: &str, kinds: &str, node_deaths: usize) -> GuestJob<'static> {
    GuestJob {
        script: "attach.sh",
        variables: vec![
            ("DOOR", door.to_owned()),
            ("SERIAL", serial.to_owned()),
            ("QUEUES", QUEUES.to_string()),
            ("MEGABYTES", "8".to_owned()),
            ("KINDS", kinds.to_owned()),
            ("DEATHS", PROCESS_KILLS.to_string()),
            ("NODE_DEATHS", node_deaths.to_string()),
        ],
        files: Vec::new(),
        kernel_options: &[],
        memory_mib: 768,
        limit: LIMIT,
    }
}

/// Serves the volume to a virtual machine at `socket`.
fn start_attach(node: &Node, socket: &Path) -> Result<Daemon> {
    let at = socket.display().to_string();
    serve_volume(node, VOLUME, &["--vhost-user", &at, "--queues", &QUEUES.to_string()], socket)
}

/// Runs `windrose attach` with the arguments `door` until `socket` accepts connections.
fn serve_volume(node: &Node, volume: &str, door: &[&str], socket: &Path) -> Result<Daemon> {
    let host = ["--host-nqn", "nqn.2026-01.net.example:attach"];
    let id = ["--host-id", "00000000-0000-4000-8000-000000000005"];
    let mut attached = node.serve(&[&["attach", volume], door, &host, &id].concat())?;
    // A stale socket is replaced: the new one exists before it accepts connections.
    attached.wait_until(START_LIMIT, || std::os::unix::net::UnixStream::connect(socket).is_ok())?;
    Ok(attached)
}

/// Kills the process that serves the disk while the guest is under load, and restarts it. The
/// volume's primary is frozen first, so that requests are in flight; the new process has to
/// resubmit them.
fn kill_attach_process(
    cluster: &Cluster,
    socket: &Path,
    attached: &mut Option<Daemon>,
    signs: &GuestSignals<'_>,
    n: usize,
) -> Result<()> {
    signs.wait_for(&format!("loaded-{n}"))?;
    let nodes = &cluster.nodes[..2];
    for time in FREEZE_TIMES {
        nodes.iter().try_for_each(Node::freeze)?;
        std::thread::sleep(time);
        let killed = attached.take().map(Daemon::kill).transpose();
        nodes.iter().try_for_each(Node::thaw)?;
        killed?;
        let next = attached.insert(start_attach(&cluster.nodes[NODE_A], socket)?);
        let resumed = wait_for_message(|| {
            next.alive()?;
            next.output()
        })?;
        if resumed {
            return signs.send(&format!("again-{n}"));
        }
    }
    let log = attached.as_ref().map(Daemon::output).transpose()?.unwrap_or_default();
    bail!("nothing was in flight: {log}")
}
