//! A mirrored volume whose copies lie in a pool of five disks at each node (RAID 5 under two copies, "RAID 51"), through
//! dm-multipath in a guest: each pool loses a disk, a node dies, the disks are replaced, then the other node dies. Nothing may be
//! lost, no write may fail, and at every step the pools have to say what they still bear.

use super::order;
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    guest::{self, Kernel, Signs},
    house::House,
    ledger::skip,
    process::must,
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
/// Of all that the disks of a node have, in percent; and copies of a volume.
const EFFICIENCY: u64 = 80;
const COPIES: u64 = 2;
/// What the guest writes once, and behind it what it writes all the time, in MiB; and how many writes a second.
const COLD_MIB: u64 = 96;
const HOT_MIB: u64 = 4;
const RATE: u64 = 100;
/// The longest that a write may take: a node dies, and the guest finds out by itself that a path is dead.
const PAUSE_MS: u64 = 8000;
/// How long a node may take to say what is so, a rebuild included.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a node may take to hear of another one's pool.
const HEARD: Duration = Duration::from_secs(15);
/// How long what a node has begun to write takes to land.
const LANDS: Duration = Duration::from_millis(50);
/// How long a node works on with what it has before the next thing happens.
const CALM: Duration = Duration::from_secs(3);
/// What the guest waits for.
const WAITED_FOR: [&str; 3] = ["mended", "alone", "back"];
const NAMES: [&str; 2] = ["a", "b"];

pub(super) fn run(house: &House, kernel: &Kernel, cluster: &mut Cluster) -> Result<()> {
    let mut made = None;
    house.check("a pool of five disks at each node (RAID 5), a volume with a copy in both", || {
        let bays = [Bay::fill(cluster, A)?, Bay::fill(cluster, B)?];
        made = Some((bays, create(cluster)?));
        Ok(())
    });
    let Some((bays, volume)) = made else {
        cluster.show_logs(house);
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
    house.display.working(&format!("{}: pools that lose disks", kernel.name()));
    let mut told = Vec::new();
    let ran = guest::run_beside(house, kernel, &order, |signs| {
        let lost = lose(cluster, signs, &bays, &volume, &mut told);
        // Otherwise it waits.
        if lost.is_err() {
            WAITED_FOR.iter().try_for_each(|sign| signs.tell(sign))?;
        }
        lost
    });
    for line in &told {
        house.display.line(&format!("        {line}"));
    }
    let why = match ran {
        Ok((true, ())) => None,
        Ok((false, ())) => Some("the guest did not come to its end".to_owned()),
        Err(why) => Some(format!("{why:#}")),
    };
    if let Some(why) = why {
        cluster.show_logs(house);
        house.fail("pools that lose disks, under a guest", &why);
        return Ok(());
    }
    house.check("nothing in the pools has to be repaired, and both copies are equal", || {
        scrub(cluster, A)?;
        scrub(cluster, B)?;
        cluster.verify(&volume)
    });
    Ok(())
}

/// A volume in the pools; nodes hear of each other's within seconds.
fn create(cluster: &Cluster) -> Result<Mirrored> {
    let begun = Instant::now();
    loop {
        match cluster.create_with(VOLUME, SIZE, &["--replicas", "2", "--pool", POOL]) {
            Err(why) if begun.elapsed() < HEARD && why.to_string().contains("no such pool") => {}
            done => return done,
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The disks of a node: files behind loop devices.
struct Bay {
    node: usize,
    files: Vec<PathBuf>,
    paths: Vec<String>,
    /// A loop device goes when nobody has it open any more.
    held: Vec<File>,
}

impl Bay {
    /// A node gets disks, one more than its pool has, and a pool.
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
        // Copies need not lie alike.
        create.extend((node == B).then_some("--checksums"));
        create.extend(bay.paths[..DISKS].iter().map(String::as_str));
        cluster.nodes[node].command(&create)?;
        Ok(bay)
    }

    /// Pulls a disk: it has no blocks any more. The node does not see it on its way there, when what is written makes the file
    /// longer again, and reads as zeroes before.
    fn pull(&self, cluster: &Cluster, disk: usize) -> Result<()> {
        let node = &cluster.nodes[self.node];
        node.freeze()?;
        std::thread::sleep(LANDS);
        let file = OpenOptions::new().write(true).open(&self.files[disk]);
        let cut = file.and_then(|file| file.set_len(0)).context("cannot cut a file");
        let measured = must(Command::new("losetup").args(["--set-capacity", &self.paths[disk]]));
        node.thaw()?;
        cut.and(measured)
    }
}

/// A loop device on a file, for as long as it is held.
fn loop_device(file: &Path) -> Result<(String, File)> {
    let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
    let made = made.context("cannot run losetup")?;
    if !made.status.success() {
        return skip("there are no loop devices here");
    }
    let path = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    let held = File::open(&path).with_context(|| format!("cannot open {path}"))?;
    must(Command::new("losetup").args(["--detach", &path]))?;
    Ok((path, held))
}

/// What happens beside the guest.
fn lose(
    cluster: &mut Cluster,
    signs: &Signs<'_>,
    bays: &[Bay; 2],
    volume: &Mirrored,
    told: &mut Vec<String>,
) -> Result<()> {
    let [of_a, of_b] = bays;
    signs.wait_for("loaded")?;
    for bay in bays {
        told.push(await_pool(cluster, bay, "online", None)?);
    }
    for (bay, disk) in [(of_a, 1), (of_b, 3)] {
        bay.pull(cluster, disk)?;
        told.push(await_pool(cluster, bay, "degraded", Some(disk))?);
        std::thread::sleep(CALM);
    }
    cluster.nodes[A].kill()?;
    std::thread::sleep(CALM * 2);
    told.push(await_pool(cluster, of_b, "degraded", Some(3))?);
    cluster.nodes[A].start()?;
    await_in_sync(cluster, volume)?;
    told.push(await_pool(cluster, of_a, "degraded", Some(1))?);
    for (bay, disk) in [(of_a, 1), (of_b, 3)] {
        replace(cluster, bay, disk)?;
    }
    for bay in bays {
        told.push(await_pool(cluster, bay, "online", None)?);
    }
    cluster.await_safe()?;
    signs.tell("mended")?;
    signs.wait_for("rested")?;
    cluster.nodes[B].kill()?;
    signs.tell("alone")?;
    signs.wait_for("checked")?;
    cluster.nodes[B].start()?;
    cluster.await_safe()?;
    signs.tell("back")
}

/// Puts the disk that is left over in the place of one that is out, by its number in the pool.
fn replace(cluster: &Cluster, bay: &Bay, disk: usize) -> Result<()> {
    let new = &bay.paths[DISKS];
    let words = ["pool", "replace", POOL, &disk.to_string(), "--with", new];
    cluster.nodes[bay.node].command(&words).map(drop)
}

/// Waits until a pool is in this state, with or without a disk that is out; returns what it says. All has to fit.
fn await_pool(cluster: &Cluster, bay: &Bay, state: &str, out: Option<usize>) -> Result<String> {
    let node = bay.node;
    let begun = Instant::now();
    let pool = loop {
        let pool = cluster.nodes[node].query(&["pool", "show", POOL])?;
        if text(&pool, "/state/is") == state {
            break pool;
        }
        ensure!(begun.elapsed() < PATIENCE, "{}: it is not {state}: {pool:#}", NAMES[node]);
        std::thread::sleep(Duration::from_millis(100));
    };
    let bears = u64::from(out.is_none());
    let number = |at: &str| pool.pointer(at).and_then(Value::as_u64);
    ensure!(number("/survives") == Some(bears), "{} does not bear {bears}: {pool:#}", NAMES[node]);
    let efficiency = number("/capacity/efficiency_percent");
    let shown = cluster.nodes[node].command(&["pool", "show", POOL])?;
    if out.is_none() {
        ensure!(efficiency == Some(EFFICIENCY), "{efficiency:?} % are for volumes: {pool:#}");
        ensure!(shown.contains(&format!("{EFFICIENCY}% of")), "{shown}");
    }
    let disks = pool.pointer("/disks").and_then(Value::as_array).context("no disks")?;
    let all_out: Vec<_> = disks.iter().filter(|disk| text(disk, "/state") == "out").collect();
    ensure!(all_out.len() == usize::from(out.is_some()), "{shown}");
    let may_fail = match out {
        None => "1 disk",
        Some(_) => "none: data is lost with the next disk",
    };
    ensure!(shown.contains(may_fail), "{shown}");
    if let Some(disk) = out {
        ensure!(all_out[0].pointer("/member") == Some(&disk.into()), "{shown}");
        let called = text(all_out[0], "/serial");
        ensure!(!called.is_empty(), "{shown}");
        let action = format!("windrose pool replace {POOL} {called} --with DISK");
        ensure!(shown.contains(&action), "{shown}");
        let finding = format!("disk {called} is out; data is lost if another disk fails");
        for words in [finding, action] {
            cluster.await_words(node, &words, PATIENCE)?;
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

/// Waits until node b says that both copies of a volume hold everything.
fn await_in_sync(cluster: &Cluster, volume: &Mirrored) -> Result<()> {
    let begun = Instant::now();
    loop {
        let shown = cluster.nodes[B].query(&["volume", "show", &volume.name])?;
        let copies = shown.pointer("/copies").and_then(Value::as_array).context("no copies")?;
        if copies.iter().filter(|copy| text(copy, "/state/is") == "in_sync").count() == 2 {
            return Ok(());
        }
        ensure!(begun.elapsed() < PATIENCE, "the copies are not in sync: {shown:#}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Reads and compares all of a pool, and finds nothing.
fn scrub(cluster: &Cluster, node: usize) -> Result<()> {
    cluster.nodes[node].command(&["pool", "scrub", POOL])?;
    let begun = Instant::now();
    loop {
        let pool = cluster.nodes[node].query(&["pool", "show", POOL])?;
        let scrub = pool.pointer("/scrub").context("there is no scrub")?;
        if scrub.pointer("/running") == Some(&false.into()) {
            let wrong = ["repaired", "unrepairable"].map(|what| scrub.get(what).cloned());
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
        ensure!(begun.elapsed() < PATIENCE, "it does not end: {scrub}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
