//! A volume as a disk of a virtual machine beside it: QEMU finds it at a socket of `windrose attach`.

use crate::{
    guest::{self, Kernel, Order, Signs},
    house::House,
    node::{Node, Wishes},
    process::Daemon,
};
use anyhow::{Result, ensure};
use std::{
    path::Path,
    time::{Duration, Instant},
};

const VOLUME: &str = "guest";
const SIZE: &str = "512MiB";
const QUEUES: u16 = 2;
/// How often what serves the disk is killed under load.
const DEATHS: usize = 2;
const LIMIT: Duration = Duration::from_secs(120);
const START: Duration = Duration::from_secs(20);
/// How long the node stands still before a kill.
const STANDSTILL: Duration = Duration::from_millis(500);
/// What the next one says that has found requests in flight.
const AGAIN: &str = "doing again what was not answered";

pub(super) fn run(house: &House) -> Result<()> {
    let kernel = Kernel::qemu(house)?;
    let mut node = Node::new(house, house.scratch(), "attach", &Wishes::default())?;
    node.start()?;
    node.create(VOLUME, SIZE)?;
    let socket = node.directory.join("disk.sock");
    let serial = node.query(&["volume", "show", VOLUME])?;
    let serial = serial.pointer("/id").and_then(|id| id.as_str()).unwrap_or_default().to_owned();
    let mut attached = Some(begin(&node, &socket)?);
    let order = Order {
        script: "attach.sh",
        variables: vec![
            // Of a serial number a guest sees 20 bytes.
            ("SERIAL", serial.replace('-', "").chars().take(20).collect()),
            ("QUEUES", QUEUES.to_string()),
            ("MEGABYTES", "8".to_owned()),
            ("KINDS", "ext4 xfs".to_owned()),
            ("DEATHS", DEATHS.to_string()),
        ],
        files: Vec::new(),
        kernel: &[],
        memory_mib: 768,
        limit: LIMIT,
    };
    house.display.working("a virtual machine with a lent disk");
    let kernel = kernel.with_disk(&socket, QUEUES);
    let ran = guest::run_beside(house, &kernel, &order, |signs| {
        (1..=DEATHS).try_for_each(|n| die(&node, &socket, &mut attached, signs, n))
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        let said = attached.as_ref().map(Daemon::output).transpose()?.unwrap_or_default();
        house.fail("a disk of a virtual machine", &format!("{:?}\n{said}", ran.err()));
    }
    house.check("what serves the disk ends in order", || {
        let ended = attached.take().map(Daemon::stop).transpose()?;
        ensure!(ended.is_some_and(|status| status.success()), "it ended with {ended:?}");
        ensure!(!socket.exists(), "its socket is still there");
        Ok(())
    });
    house.check("and the node", || {
        let status = node.stop()?;
        ensure!(status.success(), "the node ended with {status}");
        Ok(())
    });
    Ok(())
}

/// Serves the volume at `socket`.
fn begin(node: &Node, socket: &Path) -> Result<Daemon> {
    let at = socket.display().to_string();
    let queues = QUEUES.to_string();
    let host = "nqn.2026-01.net.example:attach";
    let words = ["attach", VOLUME, "--vhost-user", &at, "--queues", &queues, "--host-nqn", host];
    let id = ["--host-id", "00000000-0000-4000-8000-000000000005"];
    let mut attached = node.serve(&[&words[..], &id].concat())?;
    // A socket that was left behind is replaced: it is there before it is listened at.
    attached.wait_until(START, || std::os::unix::net::UnixStream::connect(socket).is_ok())?;
    Ok(attached)
}

/// Kills what serves the disk when the guest is under load, and starts it anew. The node is stopped for a moment before, so that
/// there are requests in flight; who comes next has to do them again.
fn die(
    node: &Node,
    socket: &Path,
    attached: &mut Option<Daemon>,
    signs: &Signs<'_>,
    n: usize,
) -> Result<()> {
    signs.wait_for(&format!("loaded-{n}"))?;
    node.freeze()?;
    std::thread::sleep(STANDSTILL);
    let killed = attached.take().map(Daemon::kill).transpose();
    node.thaw()?;
    killed?;
    let mut next = begin(node, socket)?;
    let begun = Instant::now();
    while !next.output()?.contains(AGAIN) {
        next.alive()?;
        ensure!(begun.elapsed() < START, "nothing was in flight: {}", next.output()?);
        std::thread::sleep(Duration::from_millis(20));
    }
    *attached = Some(next);
    signs.tell(&format!("back-{n}"))
}
