//! Many mirrored volumes on two nodes with the buffer memory that a node has if nobody says otherwise: all are created, served
//! by both nodes, written and read, and again after a node was killed.

use super::{PATIENCE, Written};
use crate::{
    cluster::{A, B, Cluster},
    house::House,
    node::Wishes,
};
use anyhow::{Result, anyhow, ensure};
use std::time::{Duration, Instant};

/// How many volumes.
const CROWD: usize = 60;
/// What `cores.pool` is without a setting, in MiB.
const DEFAULT_POOL_MIB: u64 = 256;
/// So many are created at a time, as by several people.
const HANDS: usize = 4;
/// How long each of them may take together with all others.
const EACH: Duration = Duration::from_secs(3);
/// Every so many of them is written and read.
const SAMPLE: usize = 5;

pub(super) fn run(house: &House) -> Result<()> {
    let directory = house.directory("crowd")?;
    let wishes = Wishes { cores: 1, pool_mib: DEFAULT_POOL_MIB, ..Wishes::default() };
    let mut cluster = Cluster::with(house, &directory, [None; 3], &wishes)?;
    let name = format!("{CROWD} mirrored volumes on two nodes with the default memory");
    let passed = house.check(&name, || {
        cluster.form()?;
        live(&mut cluster)
    });
    if !passed {
        cluster.show_logs(house);
        return Ok(());
    }
    house.check("all nodes end in order with many volumes", || cluster.stop());
    Ok(())
}

fn live(cluster: &mut Cluster) -> Result<()> {
    let mut volumes = create(cluster)?;
    await_in_sync(cluster)?;
    let [at_a, at_b] = [A, B].map(|node| cluster.nodes[node].iscsi);
    for volume in volumes.iter_mut().step_by(SAMPLE) {
        volume.write(at_a)?;
        volume.verify(at_b)?;
    }
    // The last ones too: they find what the others have left of the memory.
    for volume in volumes.iter_mut().rev().take(SAMPLE) {
        volume.write(at_b)?;
        volume.verify(at_a)?;
    }
    cluster.nodes[B].kill()?;
    cluster.nodes[B].start()?;
    await_in_sync(cluster)?;
    for volume in volumes.iter().filter(|volume| volume.generation > 0) {
        volume.verify(at_b)?;
    }
    Ok(())
}

fn await_in_sync(cluster: &Cluster) -> Result<()> {
    let begun = Instant::now();
    let limit = PATIENCE + EACH * u32::try_from(CROWD).unwrap_or(0);
    while !cluster.is_safe()? {
        ensure!(begun.elapsed() < limit, "not safe after {limit:?}\n{}", cluster.status(A)?);
        std::thread::sleep(Duration::from_secs(1));
    }
    for node in [A, B] {
        let online = cluster.nodes[node].volumes_online()?;
        ensure!(online == CROWD, "{online} of {CROWD} volumes are online");
    }
    Ok(())
}

fn create(cluster: &Cluster) -> Result<Vec<Written>> {
    let hand = |first: usize| -> Result<Vec<Written>> {
        let numbers = (first..CROWD).step_by(HANDS);
        let one = |n: usize| {
            let number = u64::try_from(n).unwrap_or(0) + 1;
            let node = &cluster.nodes[[A, B][n % 2]];
            Written::create(node, &format!("many-{n}"), number, &["--replicas", "2"])
        };
        numbers.map(one).collect()
    };
    let hands = std::thread::scope(|scope| {
        let running: Vec<_> = (0..HANDS).map(|first| scope.spawn(move || hand(first))).collect();
        let ended = running.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended
            .map(|end| end.map_err(|_| anyhow!("the test panicked")).flatten())
            .collect::<Result<Vec<_>>>()
    });
    let mut all: Vec<Written> = hands?.into_iter().flatten().collect();
    all.sort_by_key(|volume| volume.number);
    Ok(all)
}
