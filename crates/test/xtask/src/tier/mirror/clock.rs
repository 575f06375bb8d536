//! Wall clocks that are stepped by days, forward and back: nothing at all may come of it. The data nodes get another clock than the
//! rest of the machine by libfaketime, which leaves the clocks alone that leases are counted by.

use super::{
    TRIALS, blocks, describe, is_fit,
    load::{client, clients, under_load, verify},
    longest,
    scenarios::Pause,
};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
    ledger::skip,
};
use anyhow::{Context, Result, anyhow, ensure};
use probe::registers::Dice;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// How long each time lasts.
const WHILE: Duration = Duration::from_millis(2500);

/// The test; false when the cluster is not fit for more. The nodes keep these clocks, in the end the right time.
pub(super) fn run(house: &House, cluster: &mut Cluster, volume: &Mirrored, number: u64) -> bool {
    let mut figures = String::new();
    let passed = house.check("the clocks of both data nodes are stepped by days", || {
        for node in [A, B] {
            change_clock(cluster, node)?;
        }
        let blocks = blocks(number);
        let mut clients = clients(cluster, volume, &blocks, Instant::now())?;
        let happened = under_load(&mut clients, |_| {
            step(cluster, volume, B, "+2d")?;
            step(cluster, volume, A, "-3d")?;
            step(cluster, volume, B, "-5d")?;
            step(cluster, volume, A, "+4d")?;
            step(cluster, volume, A, "+0")?;
            step(cluster, volume, B, "+0")?;
            ensure!(cluster.is_safe()?, "not safe:\n{}", cluster.status(A)?);
            Ok(())
        });
        let (_, longest) = longest(&mut clients);
        figures = describe(Pause::None, longest, &clients);
        happened?;
        verify(&mut clients, &blocks)?;
        cluster.copies_are_equal(volume)?;
        Pause::None.check(longest)
    });
    super::show(house, &figures);
    is_fit(house, cluster, passed)
}

/// Where Debian puts the library, by architecture.
fn library() -> Result<PathBuf> {
    let below = |directory: PathBuf| directory.join("faketime/libfaketimeMT.so.1");
    let directories = fs::read_dir("/usr/lib").context("no /usr/lib")?.flatten();
    let found = directories.map(|entry| below(entry.path())).find(|path| path.exists());
    match found {
        Some(path) => Ok(path),
        None => skip("libfaketime is not where Debian puts it"),
    }
}

fn file(cluster: &Cluster, node: usize) -> PathBuf {
    cluster.nodes[node].directory.join("clock")
}

/// Starts a node again, with a wall clock of its own.
fn change_clock(cluster: &mut Cluster, node: usize) -> Result<()> {
    let file = file(cluster, node);
    set(&file, "+0")?;
    let environment = [
        ("LD_PRELOAD", library()?.display().to_string()),
        ("FAKETIME_TIMESTAMP_FILE", file.display().to_string()),
        ("FAKETIME_CACHE_DURATION", "1".to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ("NO_FAKE_STAT", "1".to_owned()),
    ];
    let environment = environment.map(|(name, value)| (name.to_owned(), value)).to_vec();
    cluster.nodes[node].set_environment(environment);
    let status = cluster.nodes[node].stop()?;
    ensure!(status.success(), "the node ended with {status}");
    cluster.nodes[node].start()?;
    cluster.await_safe()
}

fn set(file: &Path, offset: &str) -> Result<()> {
    fs::write(file, format!("{offset}\n")).context("cannot set a clock")
}

/// Steps the clock of a node, and sees in its log that the node has the new time.
fn step(cluster: &Cluster, volume: &Mirrored, node: usize, offset: &str) -> Result<()> {
    set(&file(cluster, node), offset)?;
    std::thread::sleep(WHILE);
    let lines = cluster.nodes[node].log()?.lines().count();
    // Whoever logs in is logged.
    log_in(cluster, volume, node)?;
    let log = cluster.nodes[node].log()?;
    let day = day(offset)?;
    let dated = log.lines().skip(lines).any(|line| line.starts_with(&day));
    ensure!(dated, "the clock is not stepped by {offset}: no line of {day} after\n{log}");
    Ok(())
}

/// Has a client log in at a node.
fn log_in(cluster: &Cluster, volume: &Mirrored, node: usize) -> Result<()> {
    let mut client = client(cluster, volume, 4, &blocks(TRIALS - 1), Instant::now())?;
    client.go_to(node);
    client.step(&mut Dice::new(1)).map_err(|why| anyhow!("a client at node {node}: {why}"))
}

/// The date that a clock shows which is off by that much.
fn day(offset: &str) -> Result<String> {
    let days = offset.trim_end_matches('d');
    let date = ["-u", "-d", &format!("{days} days"), "+%Y-%m-%d"];
    let out = Command::new("date").args(date).output().context("cannot run date")?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}
