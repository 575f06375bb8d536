//! Many mirrored volumes on two nodes with the buffer memory that a node has if nobody says otherwise: all are created, served
//! by both nodes, written and read, and again after a node was killed; in the end all are deleted. Nodes that have nothing to do
//! are looked at meanwhile: what many idle volumes cost.
//!
//! The tier does it with [`FEW`] volumes, `./run crowd` with as many as wanted.

use super::{PATIENCE, Written};
use crate::{
    cluster::{A, B, Cluster},
    house::House,
    node::{self, Node, Wishes},
};
use anyhow::{Context, Result, anyhow, ensure};
use std::{
    fs,
    time::{Duration, Instant},
};

/// How many volumes there are in the tier.
pub(super) const FEW: usize = 60;
/// What `cores.pool` is without a setting, in MiB.
const DEFAULT_POOL_MIB: u64 = 256;
/// So many are created or deleted at a time, as by several people.
const HANDS: usize = 4;
/// How long each of them may take together with all others.
const EACH: Duration = Duration::from_secs(3);
/// How many of them are written and read.
const SAMPLE: usize = 17;
/// How long a list of all may take, and the status.
const ANSWER: Duration = Duration::from_secs(10);
/// How long idle nodes are watched.
const WATCH: Duration = Duration::from_secs(10);
/// The processor time that each volume may cost a node meanwhile: a thousand of them half a processor, without optimisation.
const IDLE_EACH: Duration = Duration::from_millis(5);
/// What a node may use beside that.
const IDLE_NODE: Duration = Duration::from_secs(1);

pub(super) fn run(house: &House, count: usize) -> Result<()> {
    let directory = house.directory("crowd")?;
    let wishes = Wishes { cores: 1, pool_mib: DEFAULT_POOL_MIB, ..Wishes::default() };
    let cluster = Cluster::with(house, &directory, [None; 3], &wishes)?;
    let mut crowd = Crowd { house, cluster, volumes: Vec::new(), count };
    let steps: [(&str, Step<'_>); 5] = [
        ("mirrored volumes are created with the default memory, and served by both nodes", |c| {
            c.cluster.form()?;
            c.create()
        }),
        ("idle mirrored volumes: what is asked is answered, and nothing is busy", Crowd::rest),
        ("what is written at one node is read at the other", Crowd::use_some),
        ("a node is killed and comes back: all are in sync again", Crowd::kill),
        ("all are deleted", Crowd::delete),
    ];
    for (name, step) in steps {
        if !house.check(&format!("{count} volumes: {name}"), || step(&mut crowd)) {
            crowd.cluster.show_logs(house);
            return Ok(());
        }
    }
    house.check("all nodes end in order with many volumes", || crowd.cluster.stop());
    Ok(())
}

type Step<'a> = fn(&mut Crowd<'a>) -> Result<()>;

struct Crowd<'a> {
    house: &'a House,
    cluster: Cluster,
    volumes: Vec<Written>,
    count: usize,
}

impl Crowd<'_> {
    fn tell(&self, what: &str, since: Instant) {
        self.house.display.line(&format!("  {:>6.1} s  {what}", since.elapsed().as_secs_f64()));
    }

    fn create(&mut self) -> Result<()> {
        let begun = Instant::now();
        let nodes = &self.cluster.nodes;
        let mut all = by_hands((0..self.count).collect(), |n: usize| {
            let number = u64::try_from(n).unwrap_or(0) + 1;
            let node = &nodes[[A, B][n % 2]];
            Written::create(node, &format!("many-{n}"), number, &["--replicas", "2"])
        })?;
        all.sort_by_key(|volume| volume.number);
        self.volumes = all;
        self.tell("created", begun);
        self.await_in_sync()?;
        self.tell("all in sync", begun);
        Ok(())
    }

    fn await_in_sync(&self) -> Result<()> {
        let begun = Instant::now();
        let limit = PATIENCE + EACH * u32::try_from(self.count).unwrap_or(0);
        while !self.cluster.is_safe()? {
            let late = begun.elapsed() >= limit;
            ensure!(!late, "not safe after {limit:?}\n{}", self.cluster.status(A)?);
            std::thread::sleep(Duration::from_millis(500));
        }
        for node in [A, B] {
            let online = self.cluster.nodes[node].volumes_online()?;
            ensure!(online == self.count, "{online} of {} volumes are online", self.count);
        }
        Ok(())
    }

    /// Nothing is done for a while: what do nodes do then, and how long do answers take?
    fn rest(&mut self) -> Result<()> {
        let node = &self.cluster.nodes[A];
        for words in [&["volume", "list"][..], &["status"]] {
            let begun = Instant::now();
            node.command(words)?;
            self.tell(&format!("windrose {}", words.join(" ")), begun);
            ensure!(
                begun.elapsed() < ANSWER,
                "windrose {}: {:?}",
                words.join(" "),
                begun.elapsed()
            );
        }
        let nodes = [A, B].map(|n| &self.cluster.nodes[n]);
        let before = nodes.map(Spent::by);
        let begun = Instant::now();
        std::thread::sleep(WATCH);
        let limit = IDLE_NODE + IDLE_EACH * u32::try_from(self.count).unwrap_or(u32::MAX);
        for (node, before) in nodes.into_iter().zip(before) {
            let (before, after) = (before?, Spent::by(node)?);
            let busy = after.node.saturating_sub(before.node);
            let store = after.store.saturating_sub(before.store);
            let process = node.process()?;
            let memory = node::memory_kib(process, "VmRSS")? / 1024;
            let (files, threads) = (entries(process, "fd")?, entries(process, "task")?);
            let (busy_ms, store_ms) = (busy.as_millis(), store.as_millis());
            self.tell(
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

    fn use_some(&mut self) -> Result<()> {
        let [at_a, at_b] = [A, B].map(|node| self.cluster.nodes[node].iscsi);
        let every = self.count.div_ceil(SAMPLE);
        for volume in self.volumes.iter_mut().step_by(every) {
            volume.write(at_a)?;
            volume.verify(at_b)?;
        }
        // The last ones too: they find what the others have left of the memory.
        for volume in self.volumes.iter_mut().rev().take(SAMPLE) {
            volume.write(at_b)?;
            volume.verify(at_a)?;
        }
        Ok(())
    }

    fn kill(&mut self) -> Result<()> {
        self.cluster.nodes[B].kill()?;
        let at_a = self.cluster.nodes[A].iscsi;
        let begun = Instant::now();
        let last = self.volumes.last_mut().context("there are no volumes")?;
        while let Err(why) = last.write(at_a) {
            ensure!(begun.elapsed() < PATIENCE, "{why:#}");
            std::thread::sleep(super::POLL);
        }
        self.tell("the other node goes on", begun);
        let begun = Instant::now();
        self.cluster.nodes[B].start()?;
        self.tell("it answers again", begun);
        self.await_in_sync()?;
        self.tell("all in sync", begun);
        let at_b = self.cluster.nodes[B].iscsi;
        let written = self.volumes.iter().filter(|volume| volume.generation > 0);
        written.into_iter().try_for_each(|volume| volume.verify(at_b))
    }

    fn delete(&mut self) -> Result<()> {
        let begun = Instant::now();
        let nodes = &self.cluster.nodes;
        by_hands(std::mem::take(&mut self.volumes), |volume: Written| {
            let node = &nodes[[B, A][usize::from(volume.number.is_multiple_of(2))]];
            node.command(&["volume", "delete", &volume.name, "--yes"]).map(drop)
        })?;
        self.tell("deleted", begun);
        for node in [A, B] {
            let online = self.cluster.nodes[node].volumes_online()?;
            ensure!(online == 0, "{online} volumes are still there");
        }
        Ok(())
    }
}

/// Processor time that a node has used, and its member of the store.
struct Spent {
    node: Duration,
    store: Duration,
}

impl Spent {
    fn by(node: &Node) -> Result<Self> {
        let process = node.process()?;
        let mut store = Duration::ZERO;
        for child in node::children(process)? {
            store += node::processor_time(child)?;
        }
        Ok(Self { node: node::processor_time(process)?, store })
    }
}

/// How many files or threads a process has.
fn entries(process: u32, what: &str) -> Result<usize> {
    let path = format!("/proc/{process}/{what}");
    Ok(fs::read_dir(&path).with_context(|| format!("cannot read {path}"))?.count())
}

/// Does something with each of `all`, as several people do at the same time.
fn by_hands<T: Send, R: Send>(all: Vec<T>, work: impl Fn(T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let next = std::sync::Mutex::new(all.into_iter());
    let take = || next.lock().ok()?.next();
    let hand = || std::iter::from_fn(|| take().map(&work)).collect::<Result<Vec<R>>>();
    let hands = std::thread::scope(|scope| {
        let running: Vec<_> = (0..HANDS).map(|_| scope.spawn(hand)).collect();
        let ended = running.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended
            .map(|end| end.map_err(|_| anyhow!("the test panicked")).flatten())
            .collect::<Result<Vec<_>>>()
    });
    Ok(hands?.into_iter().flatten().collect())
}
