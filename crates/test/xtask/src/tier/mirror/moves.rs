//! Nodes that die on their way into a cluster and out of it, and while volumes are created and deleted (RFD 0012, 2.2 and 2.4).
//!
//! Whoever has died is started again, and nothing else is done for it: it must have come where it was going, or be as if
//! nobody had asked.

use crate::{
    cluster::{A, B, Cluster, Stage, images_of},
    house::House,
    process::Daemon,
};
use anyhow::{Context, Result, bail, ensure};
use std::time::{Duration, Instant};

/// How long a node may take to come to a point, or to what it was to become.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
const SIZE: &str = "8MiB";

const INIT: [&str; 5] = [
    "cluster.init.written",
    "cluster.init.begun",
    "cluster.init.copied",
    "cluster.init.entered",
    "cluster.member.written",
];
/// Before anything is written down: the node stays alone.
const DRAWN: &str = "cluster.join.drawn";
const JOIN: [&str; 5] = [
    DRAWN,
    "cluster.join.written",
    "cluster.join.room",
    "cluster.join.promoted",
    "cluster.join.entered",
];
const LEAVE: [&str; 3] = ["cluster.leave.written", "cluster.leave.struck", "cluster.leave.removed"];
/// Before anybody else knows of the rotation: it is as if nobody had asked for it.
const BEGUN: &str = "cluster.rotate.begun";
/// Who dies, where, while the secret and the authority are replaced; node b is asked for it.
const ROTATE: [(usize, &str); 5] = [
    (B, BEGUN),
    (A, "cluster.rotate.taken"),
    (B, "cluster.rotate.used"),
    (A, "cluster.rotate.used"),
    (A, "cluster.rotate.forgotten"),
];
/// Who dies, where, while volumes are created and deleted.
const VOLUMES: [(usize, &str); 4] =
    [(B, "volume.made"), (A, "volume.finishing"), (A, "volume.finished"), (B, "volume.erased")];

/// The points that are come to here.
pub(super) fn points() -> impl Iterator<Item = &'static str> {
    let volumes = VOLUMES.into_iter().map(|(_, point)| point);
    let rotate = ROTATE.into_iter().map(|(_, point)| point);
    INIT.into_iter().chain(JOIN).chain(LEAVE).chain(rotate).chain(volumes)
}

/// The tests, on nodes that are alone; if it is true, they are a cluster without volumes then.
pub(super) fn run(house: &House, cluster: &mut Cluster) -> bool {
    let mut reached = Vec::new();
    let tests: [(&str, Test); 4] = [
        ("moves: a node dies within cluster init", init),
        ("moves: a node dies within cluster join and leave", join_and_leave),
        ("moves: a node dies while the cluster's secret is replaced", rotate),
        ("moves: a node dies while a volume is created or deleted", volumes),
    ];
    let passed = tests.iter().all(|(name, test)| house.check(name, || test(cluster, &mut reached)));
    house.display.line(&format!("        died at {}", reached.join(", ")));
    if !passed {
        cluster.show_logs(house);
    }
    passed && house.check("moves: a witness joins them", || cluster.add_witness())
}

/// The points that were come to.
type Reached = Vec<&'static str>;
type Test = fn(&mut Cluster, &mut Reached) -> Result<()>;

fn init(cluster: &mut Cluster, reached: &mut Reached) -> Result<()> {
    for point in INIT {
        let volume = format!("v{}", reached.len());
        cluster.nodes[A].create(&volume, SIZE)?;
        let asked = die(cluster, A, A, point, &["cluster", "init"])?;
        reached.push(point);
        cluster.nodes[A].start()?;
        settle(asked)?;
        await_stage(cluster, A, Stage::Member).with_context(|| point.to_owned())?;
        await_online(cluster, A, 1).with_context(|| point.to_owned())?;
        if point == INIT[INIT.len() - 1] {
            cluster.nodes[A].command(&["volume", "delete", &volume, "--yes"])?;
        } else {
            // It forgets all of this, its volumes too: what they held stays until somebody says what is to become of it.
            cluster.nodes[A].command(&["cluster", "leave", "--force", "--yes"])?;
            discard_images(cluster, A, &volume).with_context(|| point.to_owned())?;
        }
    }
    Ok(())
}

fn join_and_leave(cluster: &mut Cluster, reached: &mut Reached) -> Result<()> {
    let token = cluster.nodes[A].command(&["cluster", "token", "create", "--unlimited"])?;
    let join = ["cluster", "join", "--token", token.trim()];
    for (turn, point) in JOIN.into_iter().enumerate() {
        let asked = die(cluster, B, B, point, &join)?;
        reached.push(point);
        cluster.nodes[B].start()?;
        settle(asked)?;
        if point == DRAWN {
            await_stage(cluster, B, Stage::Alone)?;
            cluster.nodes[B].command(&join)?;
        }
        await_stage(cluster, B, Stage::Member).with_context(|| point.to_owned())?;
        await_nodes(cluster, 2).with_context(|| point.to_owned())?;
        if let Some(&point) = LEAVE.get(turn) {
            let asked = die(cluster, B, B, point, &["cluster", "leave"])?;
            reached.push(point);
            cluster.nodes[B].start()?;
            settle(asked)?;
        } else if turn < JOIN.len() - 1 {
            cluster.nodes[B].command(&["cluster", "leave"])?;
        } else {
            break;
        }
        await_stage(cluster, B, Stage::Alone)?;
        await_nodes(cluster, 1)?;
    }
    Ok(())
}

fn rotate(cluster: &mut Cluster, reached: &mut Reached) -> Result<()> {
    for (node, point) in ROTATE {
        let asked = die(cluster, node, B, point, &["cluster", "rotate"])?;
        reached.push(point);
        cluster.nodes[node].start()?;
        settle(asked)?;
        await_that("the rotation is over, for both nodes", || {
            Ok([A, B].iter().map(|node| cluster.rotates(*node)).collect::<Result<Vec<_>>>()?
                == [false, false])
        })
        .with_context(|| point.to_owned())?;
        await_nodes(cluster, 2).with_context(|| point.to_owned())?;
    }
    Ok(())
}

fn volumes(cluster: &mut Cluster, reached: &mut Reached) -> Result<()> {
    let create = ["volume", "create", "v", "--size", SIZE, "--replicas", "2"];
    let delete = ["volume", "delete", "v", "--yes"];
    for (node, point) in VOLUMES {
        let deletes = point == "volume.erased";
        if deletes {
            cluster.nodes[A].command(&create)?;
            await_online(cluster, B, 1)?;
        }
        let words: &[&str] = if deletes { &delete } else { &create };
        let asked = die(cluster, node, A, point, words)?;
        reached.push(point);
        cluster.nodes[node].start()?;
        settle(asked)?;
        if !deletes {
            // It is there, or it is as if nobody had asked: the same request leads to the same volume.
            await_done(cluster, &create).with_context(|| point.to_owned())?;
            await_online(cluster, A, 1).with_context(|| point.to_owned())?;
            await_online(cluster, B, 1).with_context(|| point.to_owned())?;
            await_done(cluster, &delete)?;
        }
        for node in [A, B] {
            await_no_images(cluster, node).with_context(|| point.to_owned())?;
        }
    }
    Ok(())
}

/// Has `node` die at `point` while `words` are asked of node `asked`. The command line that asks is left running.
fn die(
    cluster: &mut Cluster,
    node: usize,
    asked: usize,
    point: &'static str,
    words: &[&str],
) -> Result<Daemon> {
    let status = cluster.nodes[node].stop()?;
    ensure!(status.success(), "the node ended with {status}");
    cluster.nodes[node].launch_to_die(point, 1)?;
    cluster.nodes[node].await_ready()?;
    if node != asked || words[0] != "cluster" || ["leave", "rotate"].contains(&words[1]) {
        await_stage(cluster, node, Stage::Member)?;
    }
    let mut command = cluster.nodes[asked].begin(words)?;
    let begun = Instant::now();
    while !cluster.nodes[node].has_died()? {
        ensure!(begun.elapsed() < PATIENCE, "{point} is never reached:\n{}", command.output()?);
        // A node that is not ready for it yet says so.
        if command.ended()?.is_some_and(|status| !status.success()) {
            std::thread::sleep(POLL * 5);
            if !cluster.nodes[node].has_died()? {
                command = cluster.nodes[asked].begin(words)?;
                continue;
            }
            return Ok(command);
        }
        std::thread::sleep(POLL);
    }
    Ok(command)
}

/// Waits for the end of a command line, however it ends: the node that it asked may have died.
fn settle(mut command: Daemon) -> Result<()> {
    command.wait(PATIENCE * 2).map(drop)
}

/// Waits until `look` is so.
fn await_that(what: &str, look: impl Fn() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    loop {
        let looked = look();
        if matches!(looked, Ok(true)) {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            match looked {
                Ok(_) => bail!("not so after {PATIENCE:?}: {what}"),
                Err(why) => return Err(why.context(format!("waiting: {what}"))),
            }
        }
        std::thread::sleep(POLL);
    }
}

fn await_stage(cluster: &Cluster, node: usize, stage: Stage) -> Result<()> {
    await_that(&format!("the node is {stage:?}"), || Ok(cluster.stage(node)? == stage))
}

/// Waits until node a sees so many nodes, and as many members of the store that have a vote.
fn await_nodes(cluster: &Cluster, count: usize) -> Result<()> {
    await_that(&format!("{count} nodes and members of the store"), || {
        Ok(cluster.counts(A)? == (count, count))
    })
}

fn await_online(cluster: &Cluster, node: usize, count: usize) -> Result<()> {
    await_that(&format!("{count} volumes are served"), || {
        Ok(cluster.nodes[node].volumes_online()? == count)
    })
}

/// Erases the images of a volume that the node has forgotten.
fn discard_images(cluster: &Cluster, node: usize, volume: &str) -> Result<()> {
    let images = images_of(&cluster.nodes[node].directory, volume)?;
    ensure!(images.len() == 1, "images of {volume}: {images:?}");
    for image in &images {
        let image = image.to_str().context("an odd path")?;
        let discard = ["volume", "discard", image, "--confirm", volume];
        await_that(&discard.join(" "), || cluster.nodes[node].command(&discard).map(|_| true))?;
    }
    Ok(())
}

/// Waits until nothing is left of the images of the volume.
fn await_no_images(cluster: &Cluster, node: usize) -> Result<()> {
    let directory = &cluster.nodes[node].directory;
    await_that("no images are left", || Ok(images_of(directory, "v")?.is_empty()))
}

fn await_done(cluster: &Cluster, words: &[&str]) -> Result<()> {
    await_that(&words.join(" "), || cluster.nodes[A].command(words).map(|_| true))
}
