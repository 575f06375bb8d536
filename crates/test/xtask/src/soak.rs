//! `./run soak`: connections of both protocols come and go at both nodes of a mirrored volume, some in order, some by the death of
//! the client or in the midst of a word, for as long as wanted. What is written is verified, and the nodes end with as much memory,
//! as many open files and as many threads as they had when they had warmed up.

use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
    node::{self, Node, Profile},
    process::Daemon,
};
use anyhow::{Context, Result, ensure};
use probe::registers::Dice;
use std::{
    fs,
    io::Write,
    net::{SocketAddr, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

/// Clients of one round, each in a place of its own of the volume whose bytes are verified.
const CLIENTS: u64 = 5;
const PLACE_MIB: u64 = 16;
const SIZE: &str = "96MiB";
/// Connections of one round that never come to anything.
const STRANGERS: u64 = 10;
/// How often the nodes are looked at.
const LOOK: Duration = Duration::from_secs(60);
/// How long they rest before that: what belonged to connections is given back, and so is memory.
const REST: Duration = Duration::from_secs(5);
/// The part of the time in which they warm up.
const WARM_UP: u32 = 3;
const CLIENT_LIMIT: Duration = Duration::from_secs(60);
/// What counts as growth between two looks: much less than a KiB for each connection of ten minutes.
const GROWTH_KIB: u64 = 4096;
const GROWTH_FILES: usize = 4;

/// How long, and with which dice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Soak {
    pub(crate) minutes: u32,
    pub(crate) seed: u64,
}

/// What a node holds while nobody is connected.
#[derive(Clone, Copy, Debug)]
struct Look {
    memory_kib: u64,
    files: usize,
    threads: usize,
}

/// Who has come and gone.
#[derive(Default)]
struct Tally {
    connections: u64,
    in_order: u64,
    killed: u64,
    strangers: u64,
}

pub(crate) fn soak(house: &House, plan: Soak) -> Result<()> {
    let mut cluster = Cluster::start(house, &house.memory_directory()?, Profile::Release)?;
    if !house.check("two data nodes and a witness form a cluster", || cluster.form()) {
        return Ok(());
    }
    let [verified, loaded] = [cluster.create("verified", SIZE)?, cluster.create("loaded", SIZE)?];
    let mut tally = Tally::default();
    let mut looks: Vec<[Look; 2]> = Vec::new();
    let went = house.check("whoever comes is served, and reads what he wrote", || {
        let whole = Duration::from_secs(u64::from(plan.minutes) * 60);
        let mut dice = Dice::new(plan.seed);
        let begun = Instant::now();
        while begun.elapsed() < whole {
            let next = Instant::now() + LOOK;
            while Instant::now() < next {
                round(house, &cluster, [&verified, &loaded], &mut dice, &mut tally)?;
            }
            looks.push(look(&cluster)?);
            tell(house, begun.elapsed(), &tally, &looks);
        }
        Ok(())
    });
    if !went {
        cluster.show_logs(house);
    }
    for (number, name) in [(A, "a"), (B, "b")] {
        let seen: Vec<Look> = looks.iter().map(|both| both[number]).collect();
        house.check(&format!("node {name} has not grown"), || has_not_grown(&seen));
    }
    house.check("both copies hold the same bytes", || {
        [&verified, &loaded].iter().try_for_each(|volume| cluster.copies_are_equal(volume))
    });
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// Clients side by side, and what becomes of them.
fn round(
    house: &House,
    cluster: &Cluster,
    volumes: [&Mirrored; 2],
    dice: &mut Dice,
    tally: &mut Tally,
) -> Result<()> {
    let mut clients = Vec::new();
    for place in 0..CLIENTS {
        clients.push(client(house, cluster, volumes, place, dice, tally)?);
    }
    for _ in 0..STRANGERS {
        stranger(&cluster.nodes[node_by(dice)], dice);
        tally.strangers += 1;
    }
    for mut client in clients {
        if dice.below(3) == 0 {
            std::thread::sleep(Duration::from_millis(dice.below(1500)));
            client.kill()?;
            tally.killed += 1;
            continue;
        }
        let status = client.wait(CLIENT_LIMIT)?;
        ensure!(status.success(), "a client ended with {status}\n{}", client.output()?);
        tally.in_order += 1;
    }
    Ok(())
}

fn node_by(dice: &mut Dice) -> usize {
    if dice.below(2) == 0 { A } else { B }
}

fn one_of<T: Copy>(dice: &mut Dice, all: &[T]) -> T {
    all[usize::try_from(dice.below(all.len() as u64)).unwrap_or(0)]
}

/// Somebody with connections of his own: he verifies in his place, or loads another volume with whatever it takes.
fn client(
    house: &House,
    cluster: &Cluster,
    [verified, loaded]: [&Mirrored; 2],
    place: u64,
    dice: &mut Dice,
    tally: &mut Tally,
) -> Result<Daemon> {
    let jobs = one_of(dice, &[1, 2, 4, 8]);
    let depth = one_of(dice, &[1, 4, 32]);
    let kib = one_of(dice, &[4, 16, 128]);
    let (volume, mut words) = if dice.below(2) == 0 {
        let each = PLACE_MIB / jobs;
        let rw = one_of(dice, &["write", "randwrite"]);
        let words = vec![
            format!("--rw={rw}"),
            format!("--offset={}m", place * PLACE_MIB),
            format!("--size={each}m"),
            format!("--offset_increment={each}m"),
            "--verify=crc32c".to_owned(),
        ];
        (verified, words)
    } else {
        let rw = one_of(dice, &["randread", "randrw", "write"]);
        let seconds = 1 + dice.below(3);
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
    let mut command = Command::new(Profile::Release.program(house));
    command.args(["bench", &uri(&cluster.nodes[node_by(dice)], volume, dice), "--yes", "--json"]);
    Daemon::start(house.scratch(), "windrose bench", command.args(words))
}

/// A volume at a node, by one of the protocols.
fn uri(node: &Node, volume: &Mirrored, dice: &mut Dice) -> String {
    let exported = &volume.exported;
    if dice.below(2) == 0 {
        return format!("nvme://{}/{}", node.nvme, exported.subsystem.nqn);
    }
    format!("iscsi://{}/{}/{}", node.iscsi, exported.unit.target, exported.unit.lun)
}

/// A connection that says nothing, something, or nonsense, and is gone.
fn stranger(node: &Node, dice: &mut Dice) {
    let at: SocketAddr = if dice.below(2) == 0 { node.nvme } else { node.iscsi };
    // Nodes refuse whom they have no room for.
    let Ok(mut stream) = TcpStream::connect_timeout(&at, Duration::from_secs(5)) else { return };
    let words: Vec<u8> = (0..dice.below(200)).map(|_| dice.below(256) as u8).collect();
    let _ = stream.write_all(&words);
}

fn look(cluster: &Cluster) -> Result<[Look; 2]> {
    std::thread::sleep(REST);
    Ok([Look::at(&cluster.nodes[A])?, Look::at(&cluster.nodes[B])?])
}

impl Look {
    fn at(node: &Node) -> Result<Self> {
        let process = node.process()?;
        let count = |what: &str| -> Result<usize> {
            let path = format!("/proc/{process}/{what}");
            Ok(fs::read_dir(&path).with_context(|| format!("cannot read {path}"))?.count())
        };
        let memory_kib = node::memory_kib(process, "VmRSS")?;
        Ok(Self { memory_kib, files: count("fd")?, threads: count("task")? })
    }
}

fn tell(house: &House, elapsed: Duration, tally: &Tally, looks: &[[Look; 2]]) {
    let Some(now) = looks.last() else { return };
    let held =
        now.map(|l| format!("{} KiB, {} files, {} threads", l.memory_kib, l.files, l.threads));
    let Tally { connections, in_order, killed, strangers } = tally;
    house.display.line(&format!(
        "  {:>4} s  {connections} connections of clients ({in_order} ended in order, {killed} were killed), {strangers} strangers; \
         a: {}; b: {}",
        elapsed.as_secs(),
        held[0],
        held[1],
    ));
}

/// The last look against the least of those after the warm-up: what grows without end has grown since then.
fn has_not_grown(looks: &[Look]) -> Result<()> {
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

    fn look(memory_kib: u64, files: usize) -> Look {
        Look { memory_kib, files, threads: 7 }
    }

    #[test]
    fn what_grows_after_the_warm_up_is_seen() {
        let warm = [look(10_000, 20), look(50_000, 40)];
        let all = |last| {
            [&warm[..], &[look(51_000, 41), look(52_000, 41), look(52_000, 41), last]].concat()
        };
        assert!(has_not_grown(&all(look(53_000, 42))).is_ok());
        assert!(has_not_grown(&all(look(55_000, 42))).is_err());
        assert!(has_not_grown(&all(look(53_000, 45))).is_err());
        assert!(has_not_grown(&warm[..1]).is_err());
        assert!(has_not_grown(&[]).is_err());
    }
}
