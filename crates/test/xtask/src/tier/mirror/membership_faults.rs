//! Nodes that die while they join or leave a cluster, and while volumes are created and deleted
//! (RFD 0012, 2.2 and 2.4).
//!
//! A node that died is only restarted. It must then have completed the operation, or be as if it
//! had never been requested.

use super::SAMPLE_PARTS;
use crate::{
    cluster::{Cluster, ClusterStage, NODE_A, NODE_B, images_of},
    process::Daemon,
    run_context::RunContext,
};
use anyhow::{Context, Result, bail, ensure};
use std::time::{Duration, Instant};

/// How long a node may take to reach a point, or to complete an operation.
const FAULT_POINT_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
const SIZE: &str = "8MiB";

const INIT_POINTS: [&str; 5] = [
    "cluster.init.written",
    "cluster.init.begun",
    "cluster.init.copied",
    "cluster.init.entered",
    "cluster.member.written",
];
/// Before anything is persisted: the node stays standalone.
const JOIN_FIRST_POINT: &str = "cluster.join.drawn";
const JOIN_POINTS: [&str; 5] = [
    JOIN_FIRST_POINT,
    "cluster.join.written",
    "cluster.join.room",
    "cluster.join.promoted",
    "cluster.join.entered",
];
const LEAVE_POINTS: [&str; 3] =
    ["cluster.leave.written", "cluster.leave.struck", "cluster.leave.removed"];
/// Before other nodes know of the rotation: as if it had never been requested.
const ROTATE_FIRST_POINT: &str = "cluster.rotate.begun";
/// The node that dies and its fault point, during a rotation of the secret and the authority; node
/// b is asked for it.
const ROTATE_POINTS: [(usize, &str); 5] = [
    (NODE_B, ROTATE_FIRST_POINT),
    (NODE_A, "cluster.rotate.taken"),
    (NODE_B, "cluster.rotate.used"),
    (NODE_A, "cluster.rotate.used"),
    (NODE_A, "cluster.rotate.forgotten"),
];
/// The node that dies and its fault point, while volumes are created and deleted.
const VOLUME_POINTS: [(usize, &str); 4] = [
    (NODE_B, "volume.made"),
    (NODE_A, "volume.finishing"),
    (NODE_A, "volume.finished"),
    (NODE_B, "volume.erased"),
];

/// The fault points covered here.
pub(super) fn fault_points() -> impl Iterator<Item = &'static str> {
    let volumes = VOLUME_POINTS.into_iter().map(|(_, point)| point);
    let rotate = ROTATE_POINTS.into_iter().map(|(_, point)| point);
    INIT_POINTS.into_iter().chain(JOIN_POINTS).chain(LEAVE_POINTS).chain(rotate).chain(volumes)
}

/// Runs the tests on standalone nodes; if true, they form a cluster without volumes afterwards.
pub(super) fn run(context: &RunContext, cluster: &mut Cluster) -> bool {
    let (mut reached, points) = (Vec::new(), Sample::choose(context));
    let tests: [(&str, MembershipTest); 4] = [
        ("moves: a node dies within cluster init", init),
        ("moves: a node dies within cluster join and leave", join_and_leave),
        ("moves: a node dies while the cluster's secret is replaced", rotate),
        ("moves: a node dies while a volume is created or deleted", volumes),
    ];
    let passed = tests
        .iter()
        .all(|(name, test)| context.check(name, || test(cluster, &points, &mut reached)));
    context.display.line(&format!("        died at {}", reached.join(", ")));
    if !passed {
        cluster.show_logs(context);
    }
    passed && context.check("moves: a witness joins them", || cluster.add_witness())
}

/// The fault points reached.
type ReachedPoints = Vec<&'static str>;
type MembershipTest = fn(&mut Cluster, &Sample, &mut ReachedPoints) -> Result<()>;

/// The fault points this run visits. The last ones of `init` and of `join` are always among them:
/// they leave the nodes in the cluster.
struct Sample {
    init: Vec<&'static str>,
    join: Vec<&'static str>,
    rotate: Vec<(usize, &'static str)>,
    volumes: Vec<(usize, &'static str)>,
}

impl Sample {
    fn choose(context: &RunContext) -> Self {
        let with_last = |what: &str, points: [&'static str; 5]| {
            let mut chosen = context.sample(what, points, SAMPLE_PARTS);
            chosen.extend(points.last().filter(|last| !chosen.contains(*last)));
            chosen
        };
        let of_nodes = |what: &str, points: &[(usize, &'static str)]| {
            let names = context.sample(what, points.iter().map(|(_, point)| *point), SAMPLE_PARTS);
            points.iter().filter(|(_, point)| names.contains(point)).copied().collect()
        };
        Self {
            init: with_last("fault points of cluster init", INIT_POINTS),
            join: with_last("fault points of cluster join and leave", JOIN_POINTS),
            rotate: of_nodes("fault points of a rotation", &ROTATE_POINTS),
            volumes: of_nodes("fault points of volumes", &VOLUME_POINTS),
        }
    }
}

fn init(cluster: &mut Cluster, points: &Sample, reached: &mut ReachedPoints) -> Result<()> {
    for &point in &points.init {
        let volume = format!("v{}", reached.len());
        cluster.nodes[NODE_A].create(&volume, SIZE)?;
        let asked = kill_at_point(cluster, NODE_A, NODE_A, point, &["cluster", "init"])?;
        reached.push(point);
        cluster.nodes[NODE_A].start()?;
        wait_command_end(asked)?;
        await_stage(cluster, NODE_A, ClusterStage::Member).with_context(|| point.to_owned())?;
        await_online(cluster, NODE_A, 1).with_context(|| point.to_owned())?;
        if point == INIT_POINTS[INIT_POINTS.len() - 1] {
            cluster.nodes[NODE_A].command(&["volume", "delete", &volume, "--yes"])?;
        } else {
            // It forgets the cluster and its volumes; their images stay until an administrator
            // decides.
            cluster.nodes[NODE_A].command(&["cluster", "leave", "--force", "--yes"])?;
            discard_images(cluster, NODE_A, &volume).with_context(|| point.to_owned())?;
        }
    }
    Ok(())
}

fn join_and_leave(
    cluster: &mut Cluster,
    points: &Sample,
    reached: &mut ReachedPoints,
) -> Result<()> {
    let token = cluster.nodes[NODE_A].command(&["cluster", "token", "create", "--unlimited"])?;
    let join = ["cluster", "join", "--token", token.trim()];
    for (turn, point) in JOIN_POINTS.into_iter().enumerate() {
        if !points.join.contains(&point) {
            continue;
        }
        let asked = kill_at_point(cluster, NODE_B, NODE_B, point, &join)?;
        reached.push(point);
        cluster.nodes[NODE_B].start()?;
        wait_command_end(asked)?;
        if point == JOIN_FIRST_POINT {
            await_stage(cluster, NODE_B, ClusterStage::Standalone)?;
            cluster.nodes[NODE_B].command(&join)?;
        }
        await_stage(cluster, NODE_B, ClusterStage::Member).with_context(|| point.to_owned())?;
        await_nodes(cluster, 2).with_context(|| point.to_owned())?;
        if let Some(&point) = LEAVE_POINTS.get(turn) {
            let asked = kill_at_point(cluster, NODE_B, NODE_B, point, &["cluster", "leave"])?;
            reached.push(point);
            cluster.nodes[NODE_B].start()?;
            wait_command_end(asked)?;
        } else if turn < JOIN_POINTS.len() - 1 {
            cluster.nodes[NODE_B].command(&["cluster", "leave"])?;
        } else {
            break;
        }
        await_stage(cluster, NODE_B, ClusterStage::Standalone)?;
        await_nodes(cluster, 1)?;
    }
    Ok(())
}

fn rotate(cluster: &mut Cluster, points: &Sample, reached: &mut ReachedPoints) -> Result<()> {
    for &(node, point) in &points.rotate {
        let asked = kill_at_point(cluster, node, NODE_B, point, &["cluster", "rotate"])?;
        reached.push(point);
        cluster.nodes[node].start()?;
        wait_command_end(asked)?;
        wait_for("the rotation is over, for both nodes", || {
            Ok([NODE_A, NODE_B]
                .iter()
                .map(|node| cluster.is_rotating(*node))
                .collect::<Result<Vec<_>>>()?
                == [false, false])
        })
        .with_context(|| point.to_owned())?;
        await_nodes(cluster, 2).with_context(|| point.to_owned())?;
    }
    Ok(())
}

fn volumes(cluster: &mut Cluster, points: &Sample, reached: &mut ReachedPoints) -> Result<()> {
    let create = ["volume", "create", "v", "--size", SIZE, "--replicas", "2"];
    let delete = ["volume", "delete", "v", "--yes"];
    for &(node, point) in &points.volumes {
        let deletes = point == "volume.erased";
        if deletes {
            cluster.nodes[NODE_A].command(&create)?;
            await_online(cluster, NODE_B, 1)?;
        }
        let words: &[&str] = if deletes { &delete } else { &create };
        let asked = kill_at_point(cluster, node, NODE_A, point, words)?;
        reached.push(point);
        cluster.nodes[node].start()?;
        wait_command_end(asked)?;
        if !deletes {
            // Either it exists, or it was never requested: repeating the request yields the same
            // volume.
            await_done(cluster, &create).with_context(|| point.to_owned())?;
            await_online(cluster, NODE_A, 1).with_context(|| point.to_owned())?;
            await_online(cluster, NODE_B, 1).with_context(|| point.to_owned())?;
            await_done(cluster, &delete)?;
        }
        for node in [NODE_A, NODE_B] {
            await_no_images(cluster, node).with_context(|| point.to_owned())?;
        }
    }
    Ok(())
}

/// Makes `node` die at `point` while node `asked` runs the command `words`. The command is left
/// running.
fn kill_at_point(
    cluster: &mut Cluster,
    node: usize,
    asked: usize,
    point: &'static str,
    words: &[&str],
) -> Result<Daemon> {
    let status = cluster.nodes[node].stop()?;
    ensure!(status.success(), "the node ended with {status}");
    cluster.nodes[node].start_with_fault_point(point, 1)?;
    cluster.nodes[node].await_ready()?;
    if node != asked || words[0] != "cluster" || ["leave", "rotate"].contains(&words[1]) {
        await_stage(cluster, node, ClusterStage::Member)?;
    }
    let mut command = cluster.nodes[asked].begin_command(words)?;
    let begun = Instant::now();
    while !cluster.nodes[node].was_killed_by_fault()? {
        ensure!(
            begun.elapsed() < FAULT_POINT_LIMIT,
            "{point} is never reached:\n{}",
            command.output()?
        );
        // A node that is not ready for it yet refuses.
        if command.ended()?.is_some_and(|status| !status.success()) {
            std::thread::sleep(POLL * 5);
            if !cluster.nodes[node].was_killed_by_fault()? {
                command = cluster.nodes[asked].begin_command(words)?;
                continue;
            }
            return Ok(command);
        }
        std::thread::sleep(POLL);
    }
    Ok(command)
}

/// Waits for the end of a command, whatever its status: the node it asked may have died.
fn wait_command_end(mut command: Daemon) -> Result<()> {
    command.wait(FAULT_POINT_LIMIT * 2).map(drop)
}

/// Waits until `look` returns true.
fn wait_for(what: &str, look: impl Fn() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    loop {
        let looked = look();
        if matches!(looked, Ok(true)) {
            return Ok(());
        }
        if begun.elapsed() > FAULT_POINT_LIMIT {
            match looked {
                Ok(_) => bail!("not so after {FAULT_POINT_LIMIT:?}: {what}"),
                Err(why) => return Err(why.context(format!("waiting: {what}"))),
            }
        }
        std::thread::sleep(POLL);
    }
}

fn await_stage(cluster: &Cluster, node: usize, stage: ClusterStage) -> Result<()> {
    wait_for(&format!("the node is {stage:?}"), || Ok(cluster.stage(node)? == stage))
}

/// Waits until node a sees `count` nodes and as many voting etcd members.
fn await_nodes(cluster: &Cluster, count: usize) -> Result<()> {
    wait_for(&format!("{count} nodes and members of the store"), || {
        Ok(cluster.counts(NODE_A)? == (count, count))
    })
}

fn await_online(cluster: &Cluster, node: usize, count: usize) -> Result<()> {
    wait_for(&format!("{count} volumes are served"), || {
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
        wait_for(&discard.join(" "), || cluster.nodes[node].command(&discard).map(|_| true))?;
    }
    Ok(())
}

/// Waits until no images of the volume are left.
fn await_no_images(cluster: &Cluster, node: usize) -> Result<()> {
    let directory = &cluster.nodes[node].directory;
    wait_for("no images are left", || Ok(images_of(directory, "v")?.is_empty()))
}

fn await_done(cluster: &Cluster, words: &[&str]) -> Result<()> {
    wait_for(&words.join(" "), || cluster.nodes[NODE_A].command(words).map(|_| true))
}
