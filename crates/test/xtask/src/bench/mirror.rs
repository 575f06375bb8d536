//! `./run bench mirror`: what it costs that a volume is on two nodes.
//!
//! Node a has one processor, node b the other. The load runs on the processor of the node that it does not enter at, so that
//! both ways in are alike.

use super::{
    DISK_MIB, LOAD_CPU, Plan, SERVER_CPU,
    echo::Between,
    fill,
    lean::{self, Setting},
    measure::{Load, Operation, Sample},
    page,
    verdict::{self, LogCost, Resync},
};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
    network::Place,
    node::{Node, Profile, Wishes},
    server::Unit,
};
use anyhow::{Context, Result, ensure};
use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// What is compared: a volume of a node that is in no cluster; of node a of the cluster, with no other copy; on both nodes,
/// used through node a, which puts its writes in order, and through node b.
pub(super) const ALONE: &str = "a node by itself";
pub(super) const ONE_COPY: &str = "one copy";
pub(super) const AT_A: &str = "mirrored, at a";
pub(super) const AT_B: &str = "mirrored, at b";
/// Where the disks lie: in memory, where a disk costs next to nothing and everything else shows; and on a disk of this
/// machine.
pub(super) const RAM: &str = "RAM";
pub(super) const FILE: &str = "file";

/// What is measured, at which depth.
pub(super) const LOADS: [(Operation, u32); 4] = [
    (Operation::LeanWrite, 1),
    (Operation::LeanWrite, 32),
    (Operation::LeanRead, 1),
    (Operation::LeanRead, 32),
];

/// How long a random load runs until the marks it finds are its own: three sweeps.
const WARM_UP_S: u64 = 16;
/// How long the log is looked at: four sweeps.
const STEADY_S: u64 = 20;
/// How long node a has until it goes on alone, and all that initiators are told of it has been told.
const ALONE_AFTER: Duration = Duration::from_secs(6);
/// How long a resync may take here.
const RESYNC_LIMIT: Duration = Duration::from_secs(120);
/// Where the echo listens.
const ECHO_PORT: u16 = 7007;

/// A volume as it is used through one node.
#[derive(Clone)]
struct Contender {
    server: &'static str,
    backing: &'static str,
    unit: Unit,
    /// All who work for it, the one that it is used through first.
    servers: Vec<u32>,
    load_cpu: usize,
}

/// The nodes, running, with volumes full of data.
struct Scene {
    cluster: Cluster,
    volume: Mirrored,
    contenders: Vec<Contender>,
    echo: PathBuf,
    /// Keeps it running.
    _alone: Node,
}

/// Measures and writes `bench/README.md` and `bench/results/mirror.json`.
pub(super) fn run(house: &House, plan: Plan) -> Result<()> {
    let mut samples = Vec::new();
    let mut scene = Scene::new(house, &house.memory_directory()?, RAM)?;
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        house.display.working(&format!("{turn}: bare echo"));
        samples.push(scene.echo(house, plan.seconds)?);
        samples.extend(scene.measure(house, &turn, plan.seconds)?);
    }
    let logs = [1, 32].map(|depth| scene.log(house, depth)).into_iter();
    let logs = logs.collect::<Result<Vec<_>>>()?.concat();
    let resync = scene.resync(house)?;
    drop(scene);
    let scene = Scene::new(house, &house.build_directory()?, FILE)?;
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {} on disk", plan.repetitions);
        samples.extend(scene.measure(house, &turn, plan.seconds)?);
    }
    verdict::write(house, plan, &samples, &logs, resync)
}

impl Scene {
    fn new(house: &House, directory: &Path, backing: &'static str) -> Result<Self> {
        house.display.working("form a cluster");
        let processors = [Some(SERVER_CPU), Some(LOAD_CPU), None];
        let mut cluster = Cluster::pinned(house, directory, Profile::Release, processors)?;
        cluster.form()?;
        let size = format!("{DISK_MIB}MiB");
        let one = cluster.nodes[A].create_with("one", &size, &["--on", "a"])?.unit;
        let volume = cluster.create("two", &size)?;
        cluster.lead(&volume, A)?;
        let mut alone = alone(house, directory, cluster.network.add(house)?)?;
        alone.start()?;
        let unit = alone.create("alone", &size)?.unit;
        let at_a = volume.exported.unit.clone();
        let at_b = Unit { portal: cluster.nodes[B].iscsi, ..at_a.clone() };
        let [a, b] = [cluster.nodes[A].process()?, cluster.nodes[B].process()?];
        for (server, unit) in [(ALONE, &unit), (ONE_COPY, &one), ("the mirror", &at_a)] {
            fill(house, server, unit)?;
        }
        let contender = |server, unit, servers, load_cpu| Contender {
            server,
            backing,
            unit,
            servers,
            load_cpu,
        };
        let contenders = vec![
            contender(ALONE, unit, vec![alone.process()?], LOAD_CPU),
            contender(ONE_COPY, one, vec![a], LOAD_CPU),
            contender(AT_A, at_a, vec![a, b], LOAD_CPU),
            contender(AT_B, at_b, vec![b, a], SERVER_CPU),
        ];
        let echo = Profile::Release.example(house, "echo");
        Ok(Self { cluster, volume, contenders, echo, _alone: alone })
    }

    /// Every load, with every contender in turn.
    fn measure(&self, house: &House, turn: &str, seconds: u64) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (operation, depth) in LOADS {
            let load = Load { operation, depth, seconds };
            for contender in &self.contenders {
                let what = format!("{}, {operation}, depth {depth}", contender.server);
                house.display.working(&format!("{turn}: {what}"));
                samples.push(contender.measure(&load).context(what)?);
            }
        }
        house.display.line(&format!("  {turn} done"));
        Ok(samples)
    }

    /// The bare echo, from node a to node b.
    fn echo(&self, house: &House, seconds: u64) -> Result<Sample> {
        let places = [A, B].map(|node| &self.cluster.network.places[node]);
        let prefixes = places.map(Place::prefix);
        Between {
            program: &self.echo,
            prefixes: prefixes.each_ref().map(Vec::as_slice),
            cpus: [SERVER_CPU, LOAD_CPU],
            server: SocketAddr::new(places[1].data.into(), ECHO_PORT),
        }
        .measure(house, seconds)
    }

    fn at_a(&self) -> Result<&Contender> {
        self.contenders.iter().find(|c| c.server == AT_A).context("no mirror")
    }

    /// What one write at a time takes at node a while all of node b's copy is written anew, and before. What ends together
    /// with the resync is not counted.
    fn resync(&mut self, house: &House) -> Result<Resync> {
        let load = |seconds| Load { operation: Operation::LeanWrite, depth: 1, seconds };
        // Node b's process does not live through this.
        let mut servers = self.at_a()?.servers.clone();
        servers.truncate(1);
        let writer = Contender { servers, ..self.at_a()?.clone() };
        let quiet_us = writer.run(&load(3))?.figures().latency_us;
        self.cluster.nodes[B].kill()?;
        std::thread::sleep(ALONE_AFTER);
        fill(house, "the mirror without node b", &writer.unit)?;
        house.display.working("writes while node b is brought in sync");
        self.cluster.nodes[B].start()?;
        let (mut during, begun) = (Vec::new(), Instant::now());
        while begun.elapsed() < RESYNC_LIMIT {
            let run = writer.run(&load(1));
            if self.cluster.is_safe()? {
                break;
            }
            during.push(run?.figures().latency_us);
        }
        self.cluster.await_safe()?;
        ensure!(!during.is_empty(), "it was over before anything was measured");
        Ok(Resync { quiet_us, during_us: page::median(during) })
    }

    /// What the intent logs of both nodes write while random writes enter at node a, once what they write is their share and
    /// no more.
    fn log(&self, house: &House, depth: u32) -> Result<Vec<LogCost>> {
        let contender = self.at_a()?;
        let load = |seconds| Load { operation: Operation::LeanWrite, depth, seconds };
        house.display.working(&format!("the intent log under random writes, depth {depth}"));
        contender.run(&load(WARM_UP_S))?;
        let before = self.cluster.log_writes(&self.volume)?;
        let writes = contender.run(&load(STEADY_S))?.count() as u64;
        let after = self.cluster.log_writes(&self.volume)?;
        let nodes = ["a", "b"].into_iter().zip(before.into_iter().zip(after));
        let cost = |(node, (before, after))| LogCost { node, depth, writes, pages: after - before };
        Ok(nodes.map(cost).collect())
    }
}

impl Contender {
    fn run(&self, load: &Load) -> Result<lean::Run> {
        let setting = Setting { servers: &self.servers, load_cpu: self.load_cpu };
        lean::run(setting, &self.unit, load)
    }

    fn measure(&self, load: &Load) -> Result<Sample> {
        Ok(Sample::new(self.server, self.backing, load, self.run(load)?.figures()))
    }
}

/// A node that is in no cluster, as far from the load as the others and where node a is.
fn alone(house: &House, parent: &Path, place: &Place) -> Result<Node> {
    let at = place.is_separate().then_some(IpAddr::V4(place.data));
    let prefix = place.prefix_on(Some(SERVER_CPU));
    let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
    let wishes =
        Wishes { profile: Profile::Release, cores: 1, prefix: &prefix, at, ..Wishes::default() };
    Node::new(house, parent, "alone", &wishes)
}
