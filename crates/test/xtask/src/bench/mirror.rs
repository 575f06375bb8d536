//! `./run bench mirror`: the cost of mirroring a volume on two nodes.
//!
//! Node a has one processor, node b the other. The load runs on the processor of the node it does
//! not connect to, so both entry nodes have equal conditions.

use super::{
    BenchPlan, DISK_MIB, LOAD_CPU, SERVER_CPU,
    echo::NodeToNodeEcho,
    figures::{Load, Operation, Sample},
    fill,
    minimal_client::{self, CpuSetup},
    mirror_limits::{
        self, FILE, IntentLogWrites, LOADS, MIRRORED_VIA_A, MIRRORED_VIA_B, ONE_REPLICA, RAM,
        ResyncLatency, STANDALONE,
    },
    results_page,
};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    network::NodeNetwork,
    node::{Node, NodeOptions, Profile},
    run_context::RunContext,
    server::IscsiLun,
};
use anyhow::{Context, Result, ensure};
use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long a random load runs until the dirty regions it finds are its own: three sweeps.
const WARM_UP_S: u64 = 16;
/// How long the log is measured: four sweeps.
const LOG_MEASURE_S: u64 = 20;
/// How long node a has to continue alone and to report the changes to its initiators.
const FAILOVER_LIMIT: Duration = Duration::from_secs(6);
/// How long a resync may take here.
const RESYNC_LIMIT: Duration = Duration::from_secs(120);
/// Where the echo listens.
const ECHO_PORT: u16 = 7007;

/// A volume as used through one node.
#[derive(Clone)]
struct Contender {
    server: &'static str,
    backing: &'static str,
    unit: IscsiLun,
    /// All processes that serve it; the one the load connects to is first.
    servers: Vec<u32>,
    load_cpu: usize,
}

/// The running nodes, with volumes full of data.
struct MirrorBench {
    cluster: Cluster,
    volume: MirroredVolume,
    contenders: Vec<Contender>,
    echo: PathBuf,
    /// Keeps the node running.
    _alone: Node,
}

/// Measures and writes `bench/README.md` and `bench/results/mirror.json`.
pub(super) fn run(context: &RunContext, plan: BenchPlan) -> Result<()> {
    let mut samples = Vec::new();
    let mut scene = MirrorBench::new(context, &context.memory_directory()?, RAM)?;
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        context.display.begin_step(&format!("{turn}: bare echo"));
        samples.push(scene.echo(context, plan.seconds)?);
        samples.extend(scene.measure(context, &turn, plan.seconds)?);
    }
    let logs = [1, 32].map(|depth| scene.measure_intent_log(context, depth)).into_iter();
    let logs = logs.collect::<Result<Vec<_>>>()?.concat();
    let resync = scene.resync(context)?;
    drop(scene);
    let scene = MirrorBench::new(context, &context.build_directory()?, FILE)?;
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {} on disk", plan.repetitions);
        samples.extend(scene.measure(context, &turn, plan.seconds)?);
    }
    mirror_limits::write(context, plan, &samples, &logs, resync)
}

impl MirrorBench {
    fn new(context: &RunContext, directory: &Path, backing: &'static str) -> Result<Self> {
        context.display.begin_step("form a cluster");
        let processors = [Some(SERVER_CPU), Some(LOAD_CPU), None];
        let mut cluster = Cluster::pinned(context, directory, Profile::Dist, processors)?;
        cluster.form_cluster()?;
        let size = format!("{DISK_MIB}MiB");
        let one = cluster.nodes[NODE_A].create_with("one", &size, &["--on", "a"])?.unit;
        let volume = cluster.create("two", &size)?;
        cluster.make_primary(&volume, NODE_A)?;
        let mut alone = start_standalone_node(context, directory, cluster.network.add(context)?)?;
        alone.start()?;
        let unit = alone.create("alone", &size)?.unit;
        let at_a = volume.exported.unit.clone();
        let at_b = IscsiLun { portal: cluster.nodes[NODE_B].iscsi, ..at_a.clone() };
        let [a, b] = [cluster.nodes[NODE_A].process()?, cluster.nodes[NODE_B].process()?];
        for (server, unit) in [(STANDALONE, &unit), (ONE_REPLICA, &one), ("the mirror", &at_a)] {
            fill(context, server, unit)?;
        }
        let contender = |server, unit, servers, load_cpu| Contender {
            server,
            backing,
            unit,
            servers,
            load_cpu,
        };
        let contenders = vec![
            contender(STANDALONE, unit, vec![alone.process()?], LOAD_CPU),
            contender(ONE_REPLICA, one, vec![a], LOAD_CPU),
            contender(MIRRORED_VIA_A, at_a, vec![a, b], LOAD_CPU),
            contender(MIRRORED_VIA_B, at_b, vec![b, a], SERVER_CPU),
        ];
        let echo = Profile::Dist.example(context, "echo");
        Ok(Self { cluster, volume, contenders, echo, _alone: alone })
    }

    /// Measures every load with every contender in turn.
    fn measure(&self, context: &RunContext, turn: &str, seconds: u64) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (operation, depth) in LOADS {
            let load = Load { operation, depth, seconds };
            for contender in &self.contenders {
                let what = format!("{}, {operation}, depth {depth}", contender.server);
                context.display.begin_step(&format!("{turn}: {what}"));
                samples.push(contender.measure(&load).context(what)?);
            }
        }
        context.display.line(&format!("  {turn} done"));
        Ok(samples)
    }

    /// Measures the bare echo from node a to node b.
    fn echo(&self, context: &RunContext, seconds: u64) -> Result<Sample> {
        let places = [NODE_A, NODE_B].map(|node| &self.cluster.network.nodes[node]);
        let prefixes = places.map(NodeNetwork::prefix);
        NodeToNodeEcho {
            program: &self.echo,
            prefixes: prefixes.each_ref().map(Vec::as_slice),
            cpus: [SERVER_CPU, LOAD_CPU],
            server: SocketAddr::new(places[1].data.into(), ECHO_PORT),
        }
        .measure(context, seconds)
    }

    fn contender_at_a(&self) -> Result<&Contender> {
        self.contenders.iter().find(|c| c.server == MIRRORED_VIA_A).context("no mirror")
    }

    /// The latency of single writes at node a during a full resync of node b, and before it. Writes
    /// that end with the resync do not count.
    fn resync(&mut self, context: &RunContext) -> Result<ResyncLatency> {
        let load = |seconds| Load { operation: Operation::MinimalClientWrite, depth: 1, seconds };
        // Node b's process ends in this test.
        let mut servers = self.contender_at_a()?.servers.clone();
        servers.truncate(1);
        let writer = Contender { servers, ..self.contender_at_a()?.clone() };
        let quiet_us = writer.run(&load(3))?.figures().latency_us;
        self.cluster.nodes[NODE_B].kill()?;
        std::thread::sleep(FAILOVER_LIMIT);
        fill(context, "the mirror without node b", &writer.unit)?;
        context.display.begin_step("writes while node b is brought in sync");
        self.cluster.nodes[NODE_B].start()?;
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
        Ok(ResyncLatency { in_sync_us: quiet_us, resyncing_us: results_page::median(during) })
    }

    /// What the intent logs of both nodes write while random writes enter at node a, measured in
    /// the steady state.
    fn measure_intent_log(&self, context: &RunContext, depth: u32) -> Result<Vec<IntentLogWrites>> {
        let contender = self.contender_at_a()?;
        let load = |seconds| Load { operation: Operation::MinimalClientWrite, depth, seconds };
        context.display.begin_step(&format!("the intent log under random writes, depth {depth}"));
        contender.run(&load(WARM_UP_S))?;
        let before = self.cluster.log_writes(&self.volume)?;
        let writes = contender.run(&load(LOG_MEASURE_S))?.count() as u64;
        let after = self.cluster.log_writes(&self.volume)?;
        let nodes = ["a", "b"].into_iter().zip(before.into_iter().zip(after));
        let cost = |(node, (before, after))| IntentLogWrites {
            node,
            depth,
            writes,
            pages: after - before,
        };
        Ok(nodes.map(cost).collect())
    }
}

impl Contender {
    fn run(&self, load: &Load) -> Result<minimal_client::ClientRun> {
        let setting = CpuSetup { servers: &self.servers, load_cpu: self.load_cpu };
        minimal_client::run(setting, &self.unit, load)
    }

    fn measure(&self, load: &Load) -> Result<Sample> {
        Ok(Sample::new(self.server, self.backing, load, self.run(load)?.figures()))
    }
}

/// A standalone node, as far from the load as the others and on node a's processor.
fn start_standalone_node(
    context: &RunContext,
    parent: &Path,
    network: &NodeNetwork,
) -> Result<Node> {
    let at = network.is_separate().then_some(IpAddr::V4(network.data));
    let prefix = network.prefix_on(Some(SERVER_CPU));
    let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
    let wishes = NodeOptions {
        profile: Profile::Dist,
        cores: 1,
        prefix: &prefix,
        listen_address: at,
        ..NodeOptions::default()
    };
    Node::new(context, parent, "alone", &wishes)
}
