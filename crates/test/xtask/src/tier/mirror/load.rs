//! Clients that write and read the same blocks during a fault, and the checks afterwards.

use crate::cluster::{Cluster, MirroredVolume, NODE_A, NODE_B};
use anyhow::{Result, anyhow, ensure};
use probe::{linearizability, multipath::MultipathClient, registers::SeededRng};
use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Half of them start at each node; half use iSCSI, the others NVMe/TCP.
const CLIENTS: u64 = 4;
/// Pause between two operations of a client: two cores also have to run the nodes.
const THINK_TIME: Duration = Duration::from_millis(2);
/// Load before the fault, and after all data is safe again.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// The volume id in every block.
const VOLUME: u64 = 0x6d69_7272_6f72;

/// Controls the clients while they work.
#[derive(Default)]
pub(super) struct LoadControl {
    stop: AtomicBool,
    home_requests: AtomicU64,
}

impl LoadControl {
    /// Each client returns to its first node as soon as its current operation completes.
    pub(super) fn send_clients_home(&self) {
        self.home_requests.fetch_add(1, Ordering::Relaxed);
    }
}

/// All clients of a trial, on the shared blocks, and the clock of their history.
pub(super) fn clients(
    cluster: &Cluster,
    volume: &MirroredVolume,
    blocks: &Range<u64>,
    clock: Instant,
) -> Result<Vec<MultipathClient>> {
    (0..CLIENTS).map(|number| client(cluster, volume, number, blocks, clock)).collect()
}

/// Client `number`.
pub(super) fn client(
    cluster: &Cluster,
    volume: &MirroredVolume,
    number: u64,
    blocks: &Range<u64>,
    clock: Instant,
) -> Result<MultipathClient> {
    let paths = cluster.paths(volume, number)?;
    Ok(MultipathClient::new(number, VOLUME, paths, blocks.clone(), clock))
}

/// Runs one more client, on other blocks; fails if it sees an error.
pub(super) fn run_extra_client(
    cluster: &Cluster,
    volume: &MirroredVolume,
    blocks: &Range<u64>,
    steps: usize,
) -> Result<()> {
    let mut client = client(cluster, volume, CLIENTS, blocks, Instant::now())?;
    let mut dice = SeededRng::new(blocks.start);
    for _ in 0..steps {
        client.step(&mut dice).map_err(|why| anyhow!("the application saw an error: {why}"))?;
    }
    Ok(())
}

/// Runs `body` while all clients work; fails if one of them saw an error.
pub(super) fn under_load(
    clients: &mut [MultipathClient],
    body: impl FnOnce(&LoadControl) -> Result<()>,
) -> Result<()> {
    let control = &LoadControl::default();
    std::thread::scope(|scope| {
        let work = |(client, seed)| scope.spawn(move || load(client, seed, control));
        let running: Vec<_> = clients.iter_mut().zip(0..).map(work).collect();
        std::thread::sleep(SETTLE_TIME);
        let outcome = body(control);
        std::thread::sleep(SETTLE_TIME);
        control.stop.store(true, Ordering::Relaxed);
        for client in running {
            let ended = client.join().map_err(|_| anyhow!("a client panicked"))?;
            ended.map_err(|error| anyhow!("the application saw an error: {error}"))?;
        }
        outcome
    })
}

fn load(client: &mut MultipathClient, seed: u64, control: &LoadControl) -> Result<(), String> {
    let mut dice = SeededRng::new(seed);
    let mut homecomings = 0;
    while !control.stop.load(Ordering::Relaxed) {
        if control.home_requests.load(Ordering::Relaxed) != homecomings {
            homecomings = control.home_requests.load(Ordering::Relaxed);
            client.return_to_home_path();
        }
        client.step(&mut dice)?;
        std::thread::sleep(THINK_TIME);
    }
    Ok(())
}

/// Reads every block through both nodes, then checks the history for linearizability.
pub(super) fn verify(clients: &mut [MultipathClient], blocks: &Range<u64>) -> Result<()> {
    for (client, path) in clients.iter_mut().zip([NODE_A, NODE_B]) {
        client.switch_path(path);
        client.read_all().map_err(|error| anyhow!("reading all at the end: {error}"))?;
    }
    let operations: Vec<_> =
        clients.iter().flat_map(MultipathClient::operations).copied().collect();
    let checked = linearizability::check_history(&operations).map_err(|why| anyhow!("{why}"))?;
    let count = usize::try_from(blocks.end - blocks.start)?;
    ensure!(checked.blocks == count, "only {checked:?}");
    Ok(())
}
