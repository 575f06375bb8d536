//! Wall clocks stepped by days, forward and back, must have no effect. libfaketime gives the data
//! nodes a different wall clock; the clocks that leases use stay unchanged.

use super::{
    TRIALS, describe, is_usable,
    load::{client, clients, under_load, verify},
    longest,
    scenarios::PauseClass,
    trial_blocks,
};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    run_context::RunContext,
    test_report::skip,
};
use anyhow::{Context, Result, anyhow, ensure};
use probe::registers::SeededRng;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// How long each clock setting lasts.
const STEP_TIME: Duration = Duration::from_millis(2500);

/// Runs the test; false if the cluster is unusable afterwards. The nodes keep these clocks, which
/// show the right time in the end.
pub(super) fn run(
    context: &RunContext,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
    number: u64,
) -> bool {
    let mut figures = String::new();
    let passed = context.check("the clocks of both data nodes are stepped by days", || {
        for node in [NODE_A, NODE_B] {
            change_clock(cluster, node)?;
        }
        let blocks = trial_blocks(number);
        let mut clients = clients(cluster, volume, &blocks, Instant::now())?;
        let happened = under_load(&mut clients, |_| {
            step_clock(cluster, volume, NODE_B, "+2d")?;
            step_clock(cluster, volume, NODE_A, "-3d")?;
            step_clock(cluster, volume, NODE_B, "-5d")?;
            step_clock(cluster, volume, NODE_A, "+4d")?;
            step_clock(cluster, volume, NODE_A, "+0")?;
            step_clock(cluster, volume, NODE_B, "+0")?;
            ensure!(cluster.is_safe()?, "not safe:\n{}", cluster.status(NODE_A)?);
            Ok(())
        });
        let (_, longest) = longest(&mut clients);
        figures = describe(PauseClass::None, longest, &clients);
        happened?;
        verify(&mut clients, &blocks)?;
        cluster.check_replicas_equal(volume)?;
        PauseClass::None.check(longest)
    });
    super::show(context, &figures);
    is_usable(context, cluster, passed)
}

/// Where Debian installs the library, by architecture.
fn faketime_library() -> Result<PathBuf> {
    let below = |directory: PathBuf| directory.join("faketime/libfaketimeMT.so.1");
    let directories = fs::read_dir("/usr/lib").context("no /usr/lib")?.flatten();
    let found = directories.map(|entry| below(entry.path())).find(|path| path.exists());
    match found {
        Some(path) => Ok(path),
        None => skip("libfaketime is not where Debian puts it"),
    }
}

fn clock_file(cluster: &Cluster, node: usize) -> PathBuf {
    cluster.nodes[node].directory.join("clock")
}

/// Restarts a node with its own wall clock.
fn change_clock(cluster: &mut Cluster, node: usize) -> Result<()> {
    let file = clock_file(cluster, node);
    set_clock_offset(&file, "+0")?;
    let environment = [
        ("LD_PRELOAD", faketime_library()?.display().to_string()),
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

fn set_clock_offset(file: &Path, offset: &str) -> Result<()> {
    fs::write(file, format!("{offset}\n")).context("cannot set a clock")
}

/// Steps a node's clock and checks in its log that the node sees the new time.
fn step_clock(cluster: &Cluster, volume: &MirroredVolume, node: usize, offset: &str) -> Result<()> {
    set_clock_offset(&clock_file(cluster, node), offset)?;
    std::thread::sleep(STEP_TIME);
    let lines = cluster.nodes[node].log()?.lines().count();
    // Logins are logged, with the time.
    log_in(cluster, volume, node)?;
    let log = cluster.nodes[node].log()?;
    let day = date_at_offset(offset)?;
    let dated = log.lines().skip(lines).any(|line| line.starts_with(&day));
    ensure!(dated, "the clock is not stepped by {offset}: no line of {day} after\n{log}");
    Ok(())
}

/// Logs a client in at a node.
fn log_in(cluster: &Cluster, volume: &MirroredVolume, node: usize) -> Result<()> {
    let mut client = client(cluster, volume, 4, &trial_blocks(TRIALS - 1), Instant::now())?;
    client.switch_path(node);
    client.step(&mut SeededRng::new(1)).map_err(|why| anyhow!("a client at node {node}: {why}"))
}

/// The date on a clock with this offset.
fn date_at_offset(offset: &str) -> Result<String> {
    let days = offset.trim_end_matches('d');
    let date = ["-u", "-d", &format!("{days} days"), "+%Y-%m-%d"];
    let out = Command::new("date").args(date).output().context("cannot run date")?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}
