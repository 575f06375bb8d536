//! `./run soak`: connections of both protocols open and close at both nodes of a mirrored volume.
//! Some log out, some clients die, some stop in the middle of a message. Written data is verified,
//! and the nodes must end with as much memory, open files and threads as after the warm-up.

use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    node::{self, Node, Profile},
    process::Daemon,
    run_context::RunContext,
};
use anyhow::{Context, Result, ensure};
use probe::registers::SeededRng;
use std::{
    fs,
    io::Write,
    net::{SocketAddr, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

/// Clients of one round, each with its own verified range of the volume.
const CLIENTS: u64 = 5;
const CLIENT_RANGE_MIB: u64 = 16;
const SIZE: &str = "96MiB";
/// Connections of one round that never log in.
const GARBAGE_CONNECTIONS: u64 = 10;
/// How often the nodes are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How long the nodes idle before a check: they free connections and their memory.
const IDLE_BEFORE_CHECK: Duration = Duration::from_secs(5);
/// The part of the run that is the warm-up.
const WARM_UP: u32 = 3;
const CLIENT_LIMIT: Duration = Duration::from_secs(60);
/// Memory growth that fails a check: far below one KiB for each connection of ten minutes.
const GROWTH_KIB: u64 = 4096;
const GROWTH_FILES: usize = 4;

/// The length and the random seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoakPlan {
    pub(crate) minutes: u32,
    pub(crate) seed: u64,
}

/// What a node holds while no client is connected.
#[derive(Clone, Copy, Debug)]
struct ResourceUsage {
    memory_kib: u64,
    files: usize,
    threads: usize,
}

/// Counts of connections so far.
#[derive(Default)]
struct SoakCounts {
    connections: u64,
    orderly: u64,
    killed: u64,
    garbage: u64,
}

pub(crate) fn soak(context: &RunContext, plan: SoakPlan) -> Result<()> {
    let mut cluster = Cluster::start(context, &context.memory_directory()?, Profile::Dist)?;
    if !context.check("two data nodes and a witness form a cluster", || cluster.form_cluster()) {
        return Ok(());
    }
    let [verified, loaded] = [cluster.create("verified", SIZE)?, cluster.create("loaded", SIZE)?];
    let mut tally = SoakCounts::default();
    let mut looks: Vec<[ResourceUsage; 2]> = Vec::new();
    let went = context.check("a new client is served, and reads what it wrote", || {
        let whole = Duration::from_secs(u64::from(plan.minutes) * 60);
        let mut dice = SeededRng::new(plan.seed);
        let begun = Instant::now();
        while begun.elapsed() < whole {
            let next = Instant::now() + CHECK_INTERVAL;
            while Instant::now() < next {
                run_round(context, &cluster, [&verified, &loaded], &mut dice, &mut tally)?;
            }
            looks.push(measure_nodes(&cluster)?);
            report_progress(context, begun.elapsed(), &tally, &looks);
        }
        Ok(())
    });
    if !went {
        cluster.show_logs(context);
    }
    for (number, name) in [(NODE_A, "a"), (NODE_B, "b")] {
        let seen: Vec<ResourceUsage> = looks.iter().map(|both| both[number]).collect();
        context.check(&format!("node {name} has not grown"), || check_no_growth(&seen));
    }
    context.check("both copies hold the same bytes", || {
        [&verified, &loaded].iter().try_for_each(|volume| cluster.check_replicas_equal(volume))
    });
    context.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// Runs several clients side by side and records how each ended.
fn run_round(
    context: &RunContext,
    cluster: &Cluster,
    volumes: [&MirroredVolume; 2],
    dice: &mut SeededRng,
    tally: &mut SoakCounts,
) -> Result<()> {
    let mut clients = Vec::new();
    for index in 0..CLIENTS {
        clients.push(client(context, cluster, volumes, index, dice, tally)?);
    }
    for _ in 0..GARBAGE_CONNECTIONS {
        garbage_connection(&cluster.nodes[node_by(dice)], dice);
        tally.garbage += 1;
    }
    for mut client in clients {
        if dice.next_below(3) == 0 {
            std::thread::sleep(Duration::from_millis(dice.next_below(1500)));
            client.kill()?;
            tally.killed += 1;
            continue;
        }
        let status = client.wait(CLIENT_LIMIT)?;
        ensure!(status.success(), "a client ended with {status}\n{}", client.output()?);
        tally.orderly += 1;
    }
    Ok(())
}

fn node_by(dice: &mut SeededRng) -> usize {
    if dice.next_below(2) == 0 { NODE_A } else { NODE_B }
}

fn one_of<T: Copy>(dice: &mut SeededRng, all: &[T]) -> T {
    all[usize::try_from(dice.next_below(all.len() as u64)).unwrap_or(0)]
}

/// One client: verifies its range, or loads another volume with random parameters.
fn client(
    context: &RunContext,
    cluster: &Cluster,
    [verified, loaded]: [&MirroredVolume; 2],
    index: u64,
    dice: &mut SeededRng,
    tally: &mut SoakCounts,
) -> Result<Daemon> {
    let jobs = one_of(dice, &[1, 2, 4, 8]);
    let depth = one_of(dice, &[1, 4, 32]);
    let kib = one_of(dice, &[4, 16, 128]);
    let (volume, mut words) = if dice.next_below(2) == 0 {
        let each = CLIENT_RANGE_MIB / jobs;
        let rw = one_of(dice, &["write", "randwrite"]);
        let words = vec![
            format!("--rw={rw}"),
            format!("--offset={}m", index * CLIENT_RANGE_MIB),
            format!("--size={each}m"),
            format!("--offset_increment={each}m"),
            "--verify=crc32c".to_owned(),
        ];
        (verified, words)
    } else {
        let rw = one_of(dice, &["randread", "randrw", "write"]);
        let seconds = 1 + dice.next_below(3);
        let words =
            vec![format!("--rw={rw}"), "--time_based".to_owned(), format!("--runtime={seconds}")];
        (loaded, words)
    };
    words.extend([
        format!("--numjobs={jobs}"),
        format!("--iodepth={depth}"),
        format!("--bs={kib}k"),
        "--cores=1".to_owned(),
    ]);
    tally.connections += jobs;
    let mut command = Command::new(Profile::Dist.program(context));
    command.args(["bench", &uri(&cluster.nodes[node_by(dice)], volume, dice), "--yes", "--json"]);
    Daemon::start(context.scratch(), "windrose bench", command.args(words))
}

/// The URI of a volume at a node, for a random protocol.
fn uri(node: &Node, volume: &MirroredVolume, dice: &mut SeededRng) -> String {
    let exported = &volume.exported;
    if dice.next_below(2) == 0 {
        return format!("nvme://{}/{}", node.nvme, exported.subsystem.nqn);
    }
    format!("iscsi://{}/{}/{}", node.iscsi, exported.unit.target, exported.unit.lun)
}

/// A connection that sends nothing, a message or garbage, and closes.
fn garbage_connection(node: &Node, dice: &mut SeededRng) {
    let at: SocketAddr = if dice.next_below(2) == 0 { node.nvme } else { node.iscsi };
    // Nodes refuse connections beyond their limit.
    let Ok(mut stream) = TcpStream::connect_timeout(&at, Duration::from_secs(5)) else { return };
    let words: Vec<u8> = (0..dice.next_below(200)).map(|_| dice.next_below(256) as u8).collect();
    let _ = stream.write_all(&words);
}

fn measure_nodes(cluster: &Cluster) -> Result<[ResourceUsage; 2]> {
    std::thread::sleep(IDLE_BEFORE_CHECK);
    Ok([
        ResourceUsage::of_node(&cluster.nodes[NODE_A])?,
        ResourceUsage::of_node(&cluster.nodes[NODE_B])?,
    ])
}

impl ResourceUsage {
    fn of_node(node: &Node) -> Result<Self> {
        let process = node.process()?;
        let count = |what: &str| -> Result<usize> {
            let path = format!("/proc/{process}/{what}");
            Ok(fs::read_dir(&path).with_context(|| format!("cannot read {path}"))?.count())
        };
        let memory_kib = node::memory_kib(process, "VmRSS")?;
        Ok(Self { memory_kib, files: count("fd")?, threads: count("task")? })
    }
}

fn report_progress(
    context: &RunContext,
    elapsed: Duration,
    tally: &SoakCounts,
    looks: &[[ResourceUsage; 2]],
) {
    let Some(now) = looks.last() else { return };
    let held =
        now.map(|l| format!("{} KiB, {} files, {} threads", l.memory_kib, l.files, l.threads));
    let SoakCounts { connections, orderly: in_order, killed, garbage: strangers } = tally;
    context.display.line(&format!(
        "  {:>4} s  {connections} connections of clients ({in_order} ended in order, {killed} were killed), {strangers} strangers; \
         a: {}; b: {}",
        elapsed.as_secs(),
        held[0],
        held[1],
    ));
}

/// Compares the last check with the lowest one after the warm-up: a leak has grown since then.
fn check_no_growth(looks: &[ResourceUsage]) -> Result<()> {
    let warm = looks.len().div_ceil(WARM_UP as usize);
    let (before, after) = looks.split_at_checked(warm).context("nothing was looked at")?;
    let (Some(before), Some(after)) = (before.last(), after.last()) else {
        anyhow::bail!("two looks are needed, one of them after the warm-up: give it more minutes");
    };
    ensure!(
        after.memory_kib <= before.memory_kib + GROWTH_KIB,
        "{} KiB of memory after the warm-up, {} KiB at the end",
        before.memory_kib,
        after.memory_kib
    );
    ensure!(
        after.files <= before.files + GROWTH_FILES,
        "{} open files after the warm-up, {} at the end",
        before.files,
        after.files
    );
    ensure!(
        after.threads <= before.threads,
        "{} threads after the warm-up, {} at the end",
        before.threads,
        after.threads
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure_nodes(memory_kib: u64, files: usize) -> ResourceUsage {
        ResourceUsage { memory_kib, files, threads: 7 }
    }

    #[test]
    fn what_grows_after_the_warm_up_is_seen() {
        let warm = [measure_nodes(10_000, 20), measure_nodes(50_000, 40)];
        let all = |last| {
            [
                &warm[..],
                &[
                    measure_nodes(51_000, 41),
                    measure_nodes(52_000, 41),
                    measure_nodes(52_000, 41),
                    last,
                ],
            ]
            .concat()
        };
        assert!(check_no_growth(&all(measure_nodes(53_000, 42))).is_ok());
        assert!(check_no_growth(&all(measure_nodes(55_000, 42))).is_err());
        assert!(check_no_growth(&all(measure_nodes(53_000, 45))).is_err());
        assert!(check_no_growth(&warm[..1]).is_err());
        assert!(check_no_growth(&[]).is_err());
    }
}
