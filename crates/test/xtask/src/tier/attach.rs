//! A mirrored volume as a disk of a virtual machine: QEMU finds it at a socket of `windrose attach`, which reaches it by both
//! nodes; and at one of a node itself, from which it boots as well.

mod boot;

use super::{accidents, ublk};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    guest::{self, Kernel, Order, Signs},
    house::House,
    node::{Node, Profile},
    process::Daemon,
};
use anyhow::{Context, Result, ensure};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const VOLUME: &str = "guest";
/// The volume that node a serves itself.
const BESIDE: &str = "beside";
const SIZE: &str = "512MiB";
const QUEUES: u16 = 2;
/// How often what serves the disk is killed under load.
const DEATHS: usize = 2;
/// How often a node is: the first one and the other one in turn.
const NODE_DEATHS: usize = 2;
/// So much of a serial number a guest sees.
const SERIAL_BYTES: usize = 20;
const LIMIT: Duration = Duration::from_secs(200);
const START: Duration = Duration::from_secs(20);
/// How long the nodes stand still before a kill.
const STANDSTILL: Duration = Duration::from_millis(500);
/// What the next one says that has found requests in flight.
const AGAIN: &str = "doing again what was not answered";

pub(super) fn run(house: &House) -> Result<()> {
    if house.wants("ublk") {
        ublk::run(house)?;
    }
    if house.wants("vhost-user") { lent(house) } else { Ok(()) }
}

/// A disk that is lent to a virtual machine.
fn lent(house: &House) -> Result<()> {
    let kernel = Kernel::qemu(house)?;
    let directory = house.directory("attach")?;
    let mut cluster = Cluster::start(house, &directory, Profile::Dev)?;
    if !house.check("two data nodes and a witness form a cluster", || cluster.form()) {
        return Ok(());
    }
    let volumes = [cluster.create(VOLUME, SIZE)?, cluster.create(BESIDE, SIZE)?];
    let socket = directory.join("disk.sock");
    of_process(house, &kernel, &mut cluster, &socket)?;
    of_node(house, &kernel, &mut cluster)?;
    boot::run(house, &mut cluster, &directory)?;
    house.check("both copies hold the same bytes", || {
        volumes.iter().try_for_each(|volume: &Mirrored| cluster.copies_are_equal(volume))
    });
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// A guest at a socket of `windrose attach`.
fn of_process(house: &House, kernel: &Kernel, cluster: &mut Cluster, socket: &Path) -> Result<()> {
    let order = order("vhost-user", &serial(cluster, VOLUME)?, "ext4 xfs", NODE_DEATHS);
    let mut attached = Some(begin(&cluster.nodes[A], socket)?);
    house.display.working("a virtual machine with a lent disk");
    let kernel = kernel.clone().with_disk(socket, QUEUES);
    let ran = guest::run_beside(house, &kernel, &order, |signs| {
        for n in 1..=DEATHS {
            die(cluster, socket, &mut attached, signs, n)?;
        }
        accidents::of_nodes(cluster, signs, 1..=NODE_DEATHS)
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        cluster.show_logs(house);
        let said = attached.as_ref().map(Daemon::output).transpose()?.unwrap_or_default();
        house.fail("a disk of a virtual machine", &format!("{:?}\n{said}", ran.err()));
    }
    house.check("what serves the disk ends in order", || {
        let ended = attached.take().map(Daemon::stop).transpose()?;
        ensure!(ended.is_some_and(|status| status.success()), "it ended with {ended:?}");
        ensure!(!socket.exists(), "its socket is still there");
        Ok(())
    });
    Ok(())
}

/// A guest at node a's own socket: it waits when that node dies, and goes on with what was in flight.
fn of_node(house: &House, kernel: &Kernel, cluster: &mut Cluster) -> Result<()> {
    let socket = socket_of(cluster, BESIDE)?;
    let order = order("vhost-user of a node", &serial(cluster, BESIDE)?, "", 0);
    house.display.working("a virtual machine beside its node");
    let kernel = kernel.clone().with_disk(&socket, QUEUES);
    let ran = guest::run_beside(house, &kernel, &order, |signs| {
        (1..=DEATHS).try_for_each(|n| node_dies(cluster, signs, n))
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        cluster.show_logs(house);
        house.fail("a disk of a virtual machine beside its node", &format!("{:?}", ran.err()));
    }
    Ok(())
}

/// Has node a serve a volume at a socket of its own.
fn socket_of(cluster: &Cluster, volume: &str) -> Result<PathBuf> {
    let shown =
        cluster.nodes[A].query(&["volume", "export", volume, "--via", "both,vhost-user"])?;
    let socket = shown.pointer("/vhost_user/socket").and_then(|at| at.as_str());
    Ok(PathBuf::from(socket.context("node a names no socket")?))
}

/// Kills node a, which serves the guest, under load. The other node stands still for a moment before, so that there are
/// requests in flight.
fn node_dies(cluster: &mut Cluster, signs: &Signs<'_>, n: usize) -> Result<()> {
    signs.wait_for(&format!("loaded-{n}"))?;
    cluster.nodes[B].freeze()?;
    std::thread::sleep(STANDSTILL);
    let killed = cluster.nodes[A].kill();
    cluster.nodes[B].thaw()?;
    killed?;
    cluster.nodes[A].start()?;
    let begun = Instant::now();
    while !cluster.nodes[A].log()?.contains(AGAIN) {
        cluster.nodes[A].alive()?;
        ensure!(begun.elapsed() < START, "nothing was in flight: {}", cluster.nodes[A].log()?);
        std::thread::sleep(Duration::from_millis(20));
    }
    cluster.await_safe()?;
    signs.tell(&format!("again-{n}"))
}

/// What the guest sees as its disk's serial number: what the volume's identity begins with.
fn serial(cluster: &Cluster, volume: &str) -> Result<String> {
    let shown = cluster.nodes[A].query(&["volume", "show", volume])?;
    let id = shown.pointer("/id").and_then(|id| id.as_str()).unwrap_or_default();
    Ok(id.replace('-', "").chars().take(SERIAL_BYTES).collect())
}

fn order(door: &str, serial: &str, kinds: &str, node_deaths: usize) -> Order<'static> {
    Order {
        script: "attach.sh",
        variables: vec![
            ("DOOR", door.to_owned()),
            ("SERIAL", serial.to_owned()),
            ("QUEUES", QUEUES.to_string()),
            ("MEGABYTES", "8".to_owned()),
            ("KINDS", kinds.to_owned()),
            ("DEATHS", DEATHS.to_string()),
            ("NODE_DEATHS", node_deaths.to_string()),
        ],
        files: Vec::new(),
        kernel: &[],
        memory_mib: 768,
        limit: LIMIT,
    }
}

/// Serves the volume to a virtual machine at `socket`.
fn begin(node: &Node, socket: &Path) -> Result<Daemon> {
    let at = socket.display().to_string();
    lend(node, VOLUME, &["--vhost-user", &at, "--queues", &QUEUES.to_string()], socket)
}

/// Serves a volume as `door` says, until it can be reached at `socket`.
fn lend(node: &Node, volume: &str, door: &[&str], socket: &Path) -> Result<Daemon> {
    let host = ["--host-nqn", "nqn.2026-01.net.example:attach"];
    let id = ["--host-id", "00000000-0000-4000-8000-000000000005"];
    let mut attached = node.serve(&[&["attach", volume], door, &host, &id].concat())?;
    // A socket that was left behind is replaced: it is there before it is listened at.
    attached.wait_until(START, || std::os::unix::net::UnixStream::connect(socket).is_ok())?;
    Ok(attached)
}

/// Kills what serves the disk when the guest is under load, and starts it anew. The node that puts the volume's writes in order is
/// stopped for a moment before, so that there are requests in flight; who comes next has to do them again.
fn die(
    cluster: &Cluster,
    socket: &Path,
    attached: &mut Option<Daemon>,
    signs: &Signs<'_>,
    n: usize,
) -> Result<()> {
    signs.wait_for(&format!("loaded-{n}"))?;
    let nodes = &cluster.nodes[..2];
    nodes.iter().try_for_each(Node::freeze)?;
    std::thread::sleep(STANDSTILL);
    let killed = attached.take().map(Daemon::kill).transpose();
    nodes.iter().try_for_each(Node::thaw)?;
    killed?;
    let mut next = begin(&cluster.nodes[A], socket)?;
    let begun = Instant::now();
    while !next.output()?.contains(AGAIN) {
        next.alive()?;
        ensure!(begun.elapsed() < START, "nothing was in flight: {}", next.output()?);
        std::thread::sleep(Duration::from_millis(20));
    }
    *attached = Some(next);
    signs.tell(&format!("again-{n}"))
}
