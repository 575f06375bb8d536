//! A mirrored volume whose replicas lie in a pool of five disks at each node (RAID 5 under two
//! replicas, "RAID 51"), through dm-multipath in a guest: each pool loses a disk, a node dies, the
//! disks are replaced, then the other node dies. No data may be lost, no write may fail, and the
//! pools must report their fault tolerance at every step.

use super::{super::pools::detached_disks, order};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    guest::{self, GuestKernel, GuestSignals},
    process::run_checked,
    run_context::RunContext,
    test_report::skip,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    fs::{self, File, OpenOptions},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

const POOL: &str = "tank";
const VOLUME: &str = "pooled";
const SIZE: &str = "256MiB";
const DISKS: usize = 5;
const DISK_BYTES: u64 = 400 << 20;
/// The usable share of the raw capacity, in percent; and the replicas of a volume.
const EFFICIENCY: u64 = 80;
const COPIES: u64 = 2;
/// What the guest writes once, and then continuously behind it, in MiB; and its writes per second.
const COLD_MIB: u64 = 96;
const HOT_MIB: u64 = 4;
const RATE: u64 = 100;
/// The longest a write may take: a node dies, and the guest detects the dead path itself.
const PAUSE_MS: u64 = 8000;
/// How long a node may take to reach and report a state, a rebuild included.
const NODE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a node may take to learn of its peer's pool.
const PEER_POOL_LIMIT: Duration = Duration::from_secs(15);
/// How long in-flight writes of a node take to complete.
const WRITE_LANDING_TIME: Duration = Duration::from_millis(50);
/// How long a node keeps running before the next fault.
const SETTLE_TIME: Duration = Duration::from_secs(3);
/// What the guest waits for.
const GUEST_SIGNALS: [&str; 3] = ["mended", "alone", "back"];
const NAMES: [&str; 2] = ["a", "b"];

pub(super) fn run(context: &RunContext, kernel: &GuestKernel, cluster: &mut Cluster) -> Result<()> {
    let mut made = None;
    context.check(
        "a pool of five disks at each node (RAID 5), a volume with a copy in both",
        || {
            let bays = [DiskBay::fill(cluster, NODE_A)?, DiskBay::fill(cluster, NODE_B)?];
            made = Some((bays, create(cluster)?));
            Ok(())
        },
    );
    let Some((bays, volume)) = made else {
        cluster.show_logs(context);
        return Ok(());
    };
    let mut order = order("pools.sh", cluster, &volume);
    order.variables.extend([
        ("COLD_MIB", COLD_MIB.to_string()),
        ("LOAD_AT_MIB", COLD_MIB.to_string()),
        ("LOAD_MIB", HOT_MIB.to_string()),
        ("RATE", RATE.to_string()),
        ("PAUSE_MS", PAUSE_MS.to_string()),
    ]);
    context.display.begin_step(&format!("{}: pools that lose disks", kernel.name()));
    let mut reports = Vec::new();
    let ran = guest::run_beside(context, kernel, &order, |signs| {
        let lost = run_disk_and_node_losses(cluster, signs, &bays, &volume, &mut reports);
        // Otherwise the guest would keep waiting.
        if lost.is_err() {
            GUEST_SIGNALS.iter().try_for_each(|sign| signs.send(sign))?;
        }
        lost
    });
    for line in &reports {
        context.display.line(&format!("        {line}"));
    }
    let why = match ran {
        Ok((true, ())) => None,
        Ok((false, ())) => Some("the guest did not come to its end".to_owned()),
        Err(why) => Some(format!("{why:#}")),
    };
    if let Some(why) = why {
        cluster.show_logs(context);
        context.fail("pools that lose disks, under a guest", &why);
        return Ok(());
    }
    context.check("nothing in the pools has to be repaired, and both copies are equal", || {
        scrub(cluster, NODE_A)?;
        scrub(cluster, NODE_B)?;
        cluster.verify(&volume)
    });
    Ok(())
}

/// Creates a volume in the pools; nodes learn of each other's pools within seconds.
fn create(cluster: &Cluster) -> Result<MirroredVolume> {
    let begun = Instant::now();
    loop {
        match cluster.create_with(VOLUME, SIZE, &["--replicas", "2", "--pool", POOL]) {
            Err(why)
                if begun.elapsed() < PEER_POOL_LIMIT
                    && why.to_string().contains("no such pool") => {}
            done => return done,
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The disks of a node: files behind loop devices.
struct DiskBay {
    node: usize,
    files: Vec<PathBuf>,
    paths: Vec<String>,
    /// A loop device is detached when its last user closes it.
    held: Vec<File>,
}

impl DiskBay {
    /// Gives a node disks, one more than its pool needs, and creates the pool.
    fn fill(cluster: &Cluster, node: usize) -> Result<Self> {
        let directory = cluster.nodes[node].directory.join("disks");
        fs::create_dir_all(&directory).context("cannot create a directory")?;
        let mut bay = Self { node, files: Vec::new(), paths: Vec::new(), held: Vec::new() };
        for number in 0..=DISKS {
            let file = directory.join(number.to_string());
            let made = File::create(&file).and_then(|made| made.set_len(DISK_BYTES));
            made.context("cannot make a file")?;
            let (path, held) = loop_device(&file)?;
            bay.files.push(file);
            bay.paths.push(path);
            bay.held.push(held);
        }
        let mut create = vec!["pool", "create", POOL, "--raid", "5"];
        // Replicas need not have the same layout.
        create.extend((node == NODE_B).then_some("--checksums"));
        create.extend(bay.paths[..DISKS].iter().map(String::as_str));
        cluster.nodes[node].command(&create)?;
        Ok(bay)
    }

    /// Pulls a disk: it loses all its blocks. The node is frozen meanwhile: until the capacity is
    /// updated, writes would extend the file again and reads would return zeroes.
    fn pull(&self, cluster: &Cluster, disk: usize) -> Result<()> {
        let node = &cluster.nodes[self.node];
        node.freeze()?;
        std::thread::sleep(WRITE_LANDING_TIME);
        let file = OpenOptions::new().write(true).open(&self.files[disk]);
        let cut = file.and_then(|file| file.set_len(0)).context("cannot cut a file");
        let measured =
            run_checked(Command::new("losetup").args(["--set-capacity", &self.paths[disk]]));
        node.thaw()?;
        cut.and(measured)
    }
}

/// Attaches a file to a loop device until the returned handle is closed.
fn loop_device(file: &Path) -> Result<(String, File)> {
    let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
    let made = made.context("cannot run losetup")?;
    if !made.status.success() {
        return skip("there are no loop devices here");
    }
    let path = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    let held = File::open(&path).with_context(|| format!("cannot open {path}"))?;
    run_checked(Command::new("losetup").args(["--detach", &path]))?;
    Ok((path, held))
}

/// Injects the faults while the guest runs.
fn run_disk_and_node_losses(
    cluster: &mut Cluster,
    signs: &GuestSignals<'_>,
    bays: &[DiskBay; 2],
    volume: &MirroredVolume,
    reports: &mut Vec<String>,
) -> Result<()> {
    let [of_a, of_b] = bays;
    signs.wait_for("loaded")?;
    for bay in bays {
        reports.push(await_pool(cluster, bay, "online", None)?);
    }
    for (bay, disk) in [(of_a, 1), (of_b, 3)] {
        bay.pull(cluster, disk)?;
        reports.push(await_pool(cluster, bay, "degraded", Some(disk))?);
        std::thread::sleep(SETTLE_TIME);
    }
    cluster.nodes[NODE_A].kill()?;
    std::thread::sleep(SETTLE_TIME * 2);
    reports.push(await_pool(cluster, of_b, "degraded", Some(3))?);
    cluster.nodes[NODE_A].start()?;
    await_in_sync(cluster, volume)?;
    reports.push(await_pool(cluster, of_a, "degraded", Some(1))?);
    for (bay, disk) in [(of_a, 1), (of_b, 3)] {
        replace(cluster, bay, disk)?;
    }
    for bay in bays {
        reports.push(await_pool(cluster, bay, "online", None)?);
    }
    cluster.await_safe()?;
    signs.send("mended")?;
    signs.wait_for("rested")?;
    cluster.nodes[NODE_B].kill()?;
    signs.send("alone")?;
    signs.wait_for("checked")?;
    cluster.nodes[NODE_B].start()?;
    cluster.await_safe()?;
    signs.send("back")
}

/// Replaces the lost disk, given by its number in the pool, with the spare one.
fn replace(cluster: &Cluster, bay: &DiskBay, disk: usize) -> Result<()> {
    let new = &bay.paths[DISKS];
    let words = ["pool", "replace", POOL, &disk.to_string(), "--with", new];
    cluster.nodes[bay.node].command(&words).map(drop)
}

/// Waits until a pool has this state, with or without a lost disk, and its report is consistent;
/// returns the report.
fn await_pool(cluster: &Cluster, bay: &DiskBay, state: &str, out: Option<usize>) -> Result<String> {
    let node = bay.node;
    let begun = Instant::now();
    let pool = loop {
        let pool = cluster.nodes[node].query(&["pool", "show", POOL])?;
        // A disk that was replaced leaves the pool a moment after the pool is online.
        let detached = detached_disks(&pool)?.len();
        if text(&pool, "/state/kind") == state && detached == usize::from(out.is_some()) {
            break pool;
        }
        ensure!(
            begun.elapsed() < NODE_TIMEOUT,
            "{}: it is not {state}, or lists {detached} detached disks: {pool:#}",
            NAMES[node]
        );
        std::thread::sleep(Duration::from_millis(100));
    };
    let survives = u64::from(out.is_none());
    let number = |at: &str| pool.pointer(at).and_then(Value::as_u64);
    ensure!(
        number("/fault_tolerance") == Some(survives),
        "{} does not bear {survives}: {pool:#}",
        NAMES[node]
    );
    let efficiency = number("/capacity/efficiency_percent");
    let shown = cluster.nodes[node].command(&["pool", "show", POOL])?;
    if out.is_none() {
        ensure!(efficiency == Some(EFFICIENCY), "{efficiency:?} % are for volumes: {pool:#}");
        ensure!(shown.contains(&format!("{EFFICIENCY}% of")), "{shown}");
    }
    let may_fail = match out {
        None => "1 disk",
        Some(_) => "none: data is lost with the next disk",
    };
    ensure!(shown.contains(may_fail), "{shown}");
    if let Some(disk) = out {
        let detached = detached_disks(&pool)?;
        ensure!(detached[0].pointer("/member") == Some(&disk.into()), "{shown}");
        let called = text(detached[0], "/serial");
        ensure!(!called.is_empty(), "{shown}");
        let action = format!("windrose pool replace {POOL} {called} --with DISK");
        ensure!(shown.contains(&action), "{shown}");
        let finding = format!("disk {called} is out; data is lost if another disk fails");
        for words in [finding, action] {
            cluster.await_status_text(node, &words, NODE_TIMEOUT)?;
        }
    }
    let of_both = EFFICIENCY / COPIES;
    Ok(format!(
        "{:.1} s: pool of {} {state}, {} % for volumes ({of_both} % with {COPIES} copies), may fail: {may_fail}",
        begun.elapsed().as_secs_f64(),
        NAMES[node],
        efficiency.unwrap_or(0),
    ))
}

fn text<'a>(value: &'a Value, at: &str) -> &'a str {
    value.pointer(at).and_then(Value::as_str).unwrap_or_default()
}

/// Waits until node b reports that both replicas of a volume are in sync.
fn await_in_sync(cluster: &Cluster, volume: &MirroredVolume) -> Result<()> {
    let begun = Instant::now();
    loop {
        let shown = cluster.nodes[NODE_B].query(&["volume", "show", &volume.name])?;
        let copies = shown.pointer("/replicas").and_then(Value::as_array).context("no replicas")?;
        if copies.iter().filter(|copy| text(copy, "/state/kind") == "in_sync").count() == 2 {
            return Ok(());
        }
        ensure!(begun.elapsed() < NODE_TIMEOUT, "the copies are not in sync: {shown:#}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Scrubs a pool; fails if it finds an error.
fn scrub(cluster: &Cluster, node: usize) -> Result<()> {
    cluster.nodes[node].command(&["pool", "scrub", POOL])?;
    let begun = Instant::now();
    loop {
        let pool = cluster.nodes[node].query(&["pool", "show", POOL])?;
        let scrub = pool.pointer("/scrub").context("there is no scrub")?;
        if scrub.pointer("/running") == Some(&false.into()) {
            let wrong =
                ["repaired_rows", "unrecoverable_rows"].map(|what| scrub.get(what).cloned());
            ensure!(wrong.iter().all(|count| *count == Some(0.into())), "{scrub}");
            let disks = pool.pointer("/disks").and_then(Value::as_array).context("no disks")?;
            let wrong = disks.iter().map(|disk| disk.pointer("/checksum_errors"));
            let is_none = |count: Option<&Value>| count.and_then(Value::as_u64) == Some(0);
            ensure!(
                wrong.into_iter().all(is_none),
                "what lies there is not what was written: {pool:#}"
            );
            return Ok(());
        }
        ensure!(begun.elapsed() < NODE_TIMEOUT, "it does not end: {scrub}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
