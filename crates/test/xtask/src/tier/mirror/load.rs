//! Clients that write and read the same blocks while something happens, and what has to hold afterwards.

use crate::cluster::{A, B, Cluster, Mirrored};
use anyhow::{Result, anyhow, ensure};
use probe::{history, paths::Client, registers::Dice};
use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Half of them begin at either node, half of them speak iSCSI, the others NVMe/TCP.
const CLIENTS: u64 = 4;
/// Between two operations of a client: two cores also have to run the nodes.
const THINKING: Duration = Duration::from_millis(2);
/// Load before something happens, and after everything is safe again.
const CALM: Duration = Duration::from_secs(1);
/// What every block names.
const VOLUME: u64 = 0x6d69_7272_6f72;

/// What clients are told while they work.
#[derive(Default)]
pub(super) struct Load {
    stop: AtomicBool,
    homecomings: AtomicU64,
}

impl Load {
    /// Each client goes back to the node where it began, as soon as its present operation is done.
    pub(super) fn go_home(&self) {
        self.homecomings.fetch_add(1, Ordering::Relaxed);
    }
}

/// All clients of a trial, on the blocks that they share; with the clock that their history is told by.
pub(super) fn clients(
    cluster: &Cluster,
    volume: &Mirrored,
    blocks: &Range<u64>,
    clock: Instant,
) -> Result<Vec<Client>> {
    (0..CLIENTS).map(|number| client(cluster, volume, number, blocks, clock)).collect()
}

/// Client `number`.
pub(super) fn client(
    cluster: &Cluster,
    volume: &Mirrored,
    number: u64,
    blocks: &Range<u64>,
    clock: Instant,
) -> Result<Client> {
    let paths = cluster.paths(volume, number)?;
    Ok(Client::new(number, VOLUME, paths, blocks.clone(), clock))
}

/// One more client, which writes and reads elsewhere; fails if it sees an error.
pub(super) fn touch(
    cluster: &Cluster,
    volume: &Mirrored,
    blocks: &Range<u64>,
    steps: usize,
) -> Result<()> {
    let mut client = client(cluster, volume, CLIENTS, blocks, Instant::now())?;
    let mut dice = Dice::new(blocks.start);
    for _ in 0..steps {
        client.step(&mut dice).map_err(|why| anyhow!("the application saw an error: {why}"))?;
    }
    Ok(())
}

/// Runs `body` while all clients work; fails if one of them has seen an error.
pub(super) fn under_load(
    clients: &mut [Client],
    body: impl FnOnce(&Load) -> Result<()>,
) -> Result<()> {
    let told = &Load::default();
    std::thread::scope(|scope| {
        let work = |(client, seed)| scope.spawn(move || load(client, seed, told));
        let running: Vec<_> = clients.iter_mut().zip(0..).map(work).collect();
        std::thread::sleep(CALM);
        let outcome = body(told);
        std::thread::sleep(CALM);
        told.stop.store(true, Ordering::Relaxed);
        for client in running {
            let ended = client.join().map_err(|_| anyhow!("a client panicked"))?;
            ended.map_err(|error| anyhow!("the application saw an error: {error}"))?;
        }
        outcome
    })
}

fn load(client: &mut Client, seed: u64, told: &Load) -> Result<(), String> {
    let mut dice = Dice::new(seed);
    let mut homecomings = 0;
    while !told.stop.load(Ordering::Relaxed) {
        if told.homecomings.load(Ordering::Relaxed) != homecomings {
            homecomings = told.homecomings.load(Ordering::Relaxed);
            client.go_home();
        }
        client.step(&mut dice)?;
        std::thread::sleep(THINKING);
    }
    Ok(())
}

/// Every block is read through both nodes, and then some order must explain everything.
pub(super) fn verify(clients: &mut [Client], blocks: &Range<u64>) -> Result<()> {
    for (client, path) in clients.iter_mut().zip([A, B]) {
        client.go_to(path);
        client.read_all().map_err(|error| anyhow!("reading all at the end: {error}"))?;
    }
    let operations: Vec<_> = clients.iter().flat_map(Client::operations).copied().collect();
    let checked = history::check(&operations).map_err(|why| anyhow!("{why}"))?;
    let count = usize::try_from(blocks.end - blocks.start)?;
    ensure!(checked.blocks == count, "only {checked:?}");
    Ok(())
}
