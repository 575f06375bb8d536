//! Many mirrored volumes on two nodes with the default buffer memory: all are created, served by
//! both nodes, written and read, and again after a node was killed; in the end all are deleted. The
//! cost of idle volumes is measured meanwhile.
//!
//! The tier uses [`TIER_VOLUMES`] volumes, `./run crowd` any number.

use super::{NODE_TIMEOUT, TestVolume};
use crate::{
    cluster::{Cluster, NODE_A, NODE_B},
    node::{self, Node, NodeOptions},
    run_context::RunContext,
};
use anyhow::{Context, Result, anyhow, ensure};
use std::{
    fs,
    time::{Duration, Instant},
};

/// Volumes in the tier.
pub(super) const TIER_VOLUMES: usize = 60;
/// The default of `cores.memory`, in MiB.
const DEFAULT_POOL_MIB: u64 = 256;
/// How many are created or deleted concurrently, as by several people.
const CONCURRENT_REQUESTS: usize = 4;
/// How long each of them may take, on average.
const TIME_PER_VOLUME: Duration = Duration::from_secs(3);
/// How many of them are written and read.
const SAMPLED_VOLUMES: usize = 17;
/// How long a list of all volumes, or the status, may take.
const RESPONSE_LIMIT: Duration = Duration::from_secs(10);
/// How long idle nodes are watched.
const WATCH: Duration = Duration::from_secs(10);
/// The processor time each volume may cost an idle node: half a processor for a thousand, without
/// optimisation.
const IDLE_CPU_PER_VOLUME: Duration = Duration::from_millis(5);
/// The processor time of a node without volumes.
const IDLE_CPU_PER_NODE: Duration = Duration::from_secs(1);

pub(super) fn run(context: &RunContext, count: usize) -> Result<()> {
    let directory = context.directory("crowd")?;
    let wishes = NodeOptions { cores: 1, pool_mib: DEFAULT_POOL_MIB, ..NodeOptions::default() };
    let cluster = Cluster::start_with(context, &directory, [None; 3], &wishes)?;
    let mut crowd = ManyVolumesTest { context, cluster, volumes: Vec::new(), count };
    let steps: [(&str, Step<'_>); 5] = [
        ("mirrored volumes are created with the default memory, and served by both nodes", |c| {
            c.cluster.form_cluster()?;
            c.create()
        }),
        (
            "idle mirrored volumes: what is asked is answered, and nothing is busy",
            ManyVolumesTest::check_idle_cost,
        ),
        ("what is written at one node is read at the other", ManyVolumesTest::exercise_sample),
        ("a node is killed and comes back: all are in sync again", ManyVolumesTest::kill),
        ("all are deleted", ManyVolumesTest::delete),
    ];
    for (name, step) in steps {
        if !context.check(&format!("{count} volumes: {name}"), || step(&mut crowd)) {
            crowd.cluster.show_logs(context);
            return Ok(());
        }
    }
    context.check("all nodes end in order with many volumes", || crowd.cluster.stop());
    Ok(())
}

type Step<'a> = fn(&mut ManyVolumesTest<'a>) -> Result<()>;

struct ManyVolumesTest<'a> {
    context: &'a RunContext,
    cluster: Cluster,
    volumes: Vec<TestVolume>,
    count: usize,
}

impl ManyVolumesTest<'_> {
    fn report_step(&self, what: &str, since: Instant) {
        self.context.display.line(&format!("  {:>6.1} s  {what}", since.elapsed().as_secs_f64()));
    }

    fn create(&mut self) -> Result<()> {
        let begun = Instant::now();
        let nodes = &self.cluster.nodes;
        let mut all = run_concurrently((0..self.count).collect(), |n: usize| {
            let number = u64::try_from(n).unwrap_or(0) + 1;
            let node = &nodes[[NODE_A, NODE_B][n % 2]];
            TestVolume::create(node, &format!("many-{n}"), number, &["--replicas", "2"])
        })?;
        all.sort_by_key(|volume| volume.number);
        self.volumes = all;
        self.report_step("created", begun);
        self.await_in_sync()?;
        self.report_step("all in sync", begun);
        Ok(())
    }

    fn await_in_sync(&self) -> Result<()> {
        let begun = Instant::now();
        let limit = NODE_TIMEOUT + TIME_PER_VOLUME * u32::try_from(self.count).unwrap_or(0);
        while !self.cluster.is_safe()? {
            let late = begun.elapsed() >= limit;
            ensure!(!late, "not safe after {limit:?}\n{}", self.cluster.status(NODE_A)?);
            std::thread::sleep(Duration::from_millis(500));
        }
        for node in [NODE_A, NODE_B] {
            let online = self.cluster.nodes[node].volumes_online()?;
            ensure!(online == self.count, "{online} of {} volumes are online", self.count);
        }
        Ok(())
    }

    /// Measures the idle nodes' processor time and their response times.
    fn check_idle_cost(&mut self) -> Result<()> {
        let node = &self.cluster.nodes[NODE_A];
        for words in [&["volume", "list"][..], &["status"]] {
            let begun = Instant::now();
            node.command(words)?;
            self.report_step(&format!("windrose {}", words.join(" ")), begun);
            ensure!(
                begun.elapsed() < RESPONSE_LIMIT,
                "windrose {}: {:?}",
                words.join(" "),
                begun.elapsed()
            );
        }
        let nodes = [NODE_A, NODE_B].map(|n| &self.cluster.nodes[n]);
        let before = nodes.map(CpuTimes::of_node);
        let begun = Instant::now();
        std::thread::sleep(WATCH);
        let limit =
            IDLE_CPU_PER_NODE + IDLE_CPU_PER_VOLUME * u32::try_from(self.count).unwrap_or(u32::MAX);
        for (node, before) in nodes.into_iter().zip(before) {
            let (before, after) = (before?, CpuTimes::of_node(node)?);
            let busy = after.node.saturating_sub(before.node);
            let store = after.store.saturating_sub(before.store);
            let process = node.process()?;
            let memory = node::memory_kib(process, "VmRSS")? / 1024;
            let (files, threads) =
                (proc_entry_count(process, "fd")?, proc_entry_count(process, "task")?);
            let (busy_ms, store_ms) = (busy.as_millis(), store.as_millis());
            self.report_step(
                &format!(
                    "idle: {busy_ms} ms of processor time, its store {store_ms} ms; {memory} MiB, \
                     {files} files, {threads} threads"
                ),
                begun,
            );
            ensure!(busy < limit, "{busy_ms} ms of processor time in {WATCH:?} without work");
        }
        Ok(())
    }

    fn exercise_sample(&mut self) -> Result<()> {
        let [at_a, at_b] = [NODE_A, NODE_B].map(|node| self.cluster.nodes[node].iscsi);
        let every = self.count.div_ceil(SAMPLED_VOLUMES);
        for volume in self.volumes.iter_mut().step_by(every) {
            volume.write(at_a)?;
            volume.verify(at_b)?;
        }
        // Newest first: these have the least memory left.
        for volume in self.volumes.iter_mut().rev().take(SAMPLED_VOLUMES) {
            volume.write(at_b)?;
            volume.verify(at_a)?;
        }
        Ok(())
    }

    fn kill(&mut self) -> Result<()> {
        self.cluster.nodes[NODE_B].kill()?;
        let at_a = self.cluster.nodes[NODE_A].iscsi;
        let begun = Instant::now();
        let last = self.volumes.last_mut().context("there are no volumes")?;
        while let Err(why) = last.write(at_a) {
            ensure!(begun.elapsed() < NODE_TIMEOUT, "{why:#}");
            std::thread::sleep(super::POLL);
        }
        self.report_step("the other node goes on", begun);
        let begun = Instant::now();
        self.cluster.nodes[NODE_B].start()?;
        self.report_step("it answers again", begun);
        self.await_in_sync()?;
        self.report_step("all in sync", begun);
        let at_b = self.cluster.nodes[NODE_B].iscsi;
        let written = self.volumes.iter().filter(|volume| volume.generation > 0);
        written.into_iter().try_for_each(|volume| volume.verify(at_b))
    }

    fn delete(&mut self) -> Result<()> {
        let begun = Instant::now();
        let nodes = &self.cluster.nodes;
        run_concurrently(std::mem::take(&mut self.volumes), |volume: TestVolume| {
            let node = &nodes[[NODE_B, NODE_A][usize::from(volume.number.is_multiple_of(2))]];
            node.command(&["volume", "delete", &volume.name, "--yes"]).map(drop)
        })?;
        self.report_step("deleted", begun);
        for node in [NODE_A, NODE_B] {
            let online = self.cluster.nodes[node].volumes_online()?;
            ensure!(online == 0, "{online} volumes are still there");
        }
        Ok(())
    }
}

/// Processor time used by a node and by its etcd member.
struct CpuTimes {
    node: Duration,
    store: Duration,
}

impl CpuTimes {
    fn of_node(node: &Node) -> Result<Self> {
        let process = node.process()?;
        let mut store = Duration::ZERO;
        for child in node::children(process)? {
            store += node::processor_time(child)?;
        }
        Ok(Self { node: node::processor_time(process)?, store })
    }
}

/// How many files or threads a process has.
fn proc_entry_count(process: u32, what: &str) -> Result<usize> {
    let path = format!("/proc/{process}/{what}");
    Ok(fs::read_dir(&path).with_context(|| format!("cannot read {path}"))?.count())
}

/// Applies a function to each of `all`, several at a time.
fn run_concurrently<T: Send, R: Send>(
    all: Vec<T>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = std::sync::Mutex::new(all.into_iter());
    let take = || next.lock().ok()?.next();
    let hand = || std::iter::from_fn(|| take().map(&work)).collect::<Result<Vec<R>>>();
    let hands = std::thread::scope(|scope| {
        let running: Vec<_> = (0..CONCURRENT_REQUESTS).map(|_| scope.spawn(hand)).collect();
        let ended = running.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended
            .map(|end| end.map_err(|_| anyhow!("the test panicked")).flatten())
            .collect::<Result<Vec<_>>>()
    });
    Ok(hands?.into_iter().flatten().collect())
}
