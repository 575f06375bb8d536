//! One volume on two nodes, as real processes with a real store, while nodes are killed, stopped, cut off and drained.
//!
//! In each trial clients with a path to both nodes write and read the same blocks. None of them may see an error, some order
//! must explain all that they saw (`probe::history`), afterwards both copies hold the same bytes, and no operation may have taken
//! longer than the kind of trouble allows.

mod resync;
mod scenarios;

use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
    node::Profile,
};
use anyhow::{Result, anyhow, ensure};
use probe::{history, paths::Client, registers::Dice};
use scenarios::{Pause, SCENARIOS, Scenario, WORSE};
use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Half of them begin at either node, half of them speak iSCSI, the others NVMe/TCP.
const CLIENTS: u64 = 4;
/// Blocks that the clients of one trial share: few, so that they meet.
const SHARED: u64 = 64;
const SIZE: &str = "256MiB";
/// Trials that fit into a volume of that size, each with blocks that nobody has written before.
const TRIALS: u64 = (256 << 20) / 512 / SHARED;
/// Between two operations of a client: two cores also have to run the nodes.
const THINKING: Duration = Duration::from_millis(2);
/// Load before something happens, and after everything is safe again.
const CALM: Duration = Duration::from_secs(1);
/// How long a trouble lasts in the tier: long enough for a node to be voted out.
const HOLD: Duration = Duration::from_secs(5);
const VOLUME: u64 = 0x6d69_7272_6f72;

/// The tier: every scenario once.
pub(super) fn run(house: &House) -> Result<()> {
    let Some((mut cluster, volume)) = prepare(house)? else { return Ok(()) };
    for (scenario, number) in SCENARIOS.iter().zip(0..) {
        if !trial(house, &mut cluster, &volume, number, scenario, HOLD) {
            return Ok(());
        }
    }
    resync::run(house, &mut cluster);
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// How long [`chaos`] goes on, and with which dice.
#[derive(Clone, Debug)]
pub(crate) struct Chaos {
    pub(crate) rounds: u64,
    pub(crate) seed: u64,
    /// Only scenarios whose name contains this.
    pub(crate) only: String,
}

/// Scenarios at random, of random length, for as many rounds as wanted.
pub(crate) fn chaos(house: &House, chaos: &Chaos) -> Result<()> {
    let Chaos { rounds, seed, only } = chaos;
    let all: Vec<&Scenario> =
        SCENARIOS.iter().chain(WORSE).filter(|one| one.name.contains(only)).collect();
    ensure!(!all.is_empty(), "no scenario's name contains \"{only}\"");
    ensure!(*rounds <= TRIALS, "at most {TRIALS} rounds");
    house.display.line(&format!("chaos: {rounds} rounds, seed {seed}"));
    let Some((mut cluster, volume)) = prepare(house)? else { return Ok(()) };
    let mut dice = Dice::new(*seed);
    for number in 0..*rounds {
        let index = usize::try_from(dice.below(all.len() as u64)).unwrap_or(0);
        let hold = Duration::from_millis(200 + dice.below(8000));
        if !trial(house, &mut cluster, &volume, number, all[index], hold) {
            return Ok(());
        }
    }
    Ok(())
}

fn prepare(house: &House) -> Result<Option<(Cluster, Mirrored)>> {
    let cluster = Cluster::start(house, &house.directory("mirror")?, Profile::Dev)?;
    house.check("links are cut and mended", || cluster.network.prove_cuts());
    let formed = house.check("two data nodes and a witness form a cluster", || cluster.form());
    let mut volume = None;
    let created = formed
        && house.check("a volume with a copy on each data node", || {
            volume = Some(cluster.create("mirror", SIZE)?);
            Ok(())
        });
    if !created {
        cluster.show_logs(house);
    }
    Ok(volume.map(|volume| (cluster, volume)))
}

/// One scenario; false when the cluster is not fit for another one.
fn trial(
    house: &House,
    cluster: &mut Cluster,
    volume: &Mirrored,
    number: u64,
    scenario: &Scenario,
    hold: Duration,
) -> bool {
    let mut figures = String::new();
    let passed = house.check(scenario.name, || {
        let blocks = number * SHARED..(number + 1) * SHARED;
        let mut clients = clients(cluster, volume, &blocks)?;
        let happened = under_load(&mut clients, || {
            (scenario.happens)(cluster, hold)?;
            cluster.await_safe()
        });
        let longest = clients.iter_mut().map(|client| client.take_longest().1).max();
        let longest = longest.unwrap_or_default();
        figures = describe(scenario.pause, longest, &clients);
        happened?;
        verify(&mut clients)?;
        cluster.copies_are_equal(volume)?;
        if let Some((promised, allowed)) = scenario.pause.bounds() {
            ensure!(longest <= allowed, "an operation took {longest:?}, promised {promised:?}");
        }
        Ok(())
    });
    house.display.line(&format!("        {figures}"));
    if !passed {
        cluster.show_logs(house);
    }
    let again = cluster.network.heal().and_then(|()| cluster.await_safe());
    if let Err(why) = &again {
        house.display.line(&format!("        no further trial: {why:#}"));
    }
    again.is_ok()
}

fn describe(pause: Pause, longest: Duration, clients: &[Client]) -> String {
    let operations: u64 = clients.iter().map(Client::done).sum();
    let promise = match pause.bounds() {
        Some((promised, allowed)) => format!(
            "promised {:.1} s, allowed here {:.1} s",
            promised.as_secs_f64(),
            allowed.as_secs_f64()
        ),
        None => "as long as nobody was there".to_owned(),
    };
    format!("longest pause {:.2} s ({promise}); {operations} operations", longest.as_secs_f64())
}

fn clients(cluster: &Cluster, volume: &Mirrored, blocks: &Range<u64>) -> Result<Vec<Client>> {
    let clock = Instant::now();
    (0..CLIENTS)
        .map(|number| {
            let paths = cluster.paths(volume, number)?;
            Ok(Client::new(number, VOLUME, paths, blocks.clone(), clock))
        })
        .collect()
}

/// Runs `body` while all clients work; fails if one of them has seen an error.
fn under_load(clients: &mut [Client], body: impl FnOnce() -> Result<()>) -> Result<()> {
    let stop = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work = |(client, seed)| scope.spawn(move || load(client, seed, stop));
        let running: Vec<_> = clients.iter_mut().zip(0..).map(work).collect();
        std::thread::sleep(CALM);
        let outcome = body();
        std::thread::sleep(CALM);
        stop.store(true, Ordering::Relaxed);
        for client in running {
            let ended = client.join().map_err(|_| anyhow!("a client panicked"))?;
            ended.map_err(|error| anyhow!("the application saw an error: {error}"))?;
        }
        outcome
    })
}

fn load(client: &mut Client, seed: u64, stop: &AtomicBool) -> Result<(), String> {
    let mut dice = Dice::new(seed);
    while !stop.load(Ordering::Relaxed) {
        client.step(&mut dice)?;
        std::thread::sleep(THINKING);
    }
    Ok(())
}

/// Every block is read through both nodes, and then some order must explain everything.
fn verify(clients: &mut [Client]) -> Result<()> {
    for (client, path) in clients.iter_mut().zip([A, B]) {
        client.go_to(path);
        client.read_all().map_err(|error| anyhow!("reading all at the end: {error}"))?;
    }
    let operations: Vec<_> = clients.iter().flat_map(Client::operations).copied().collect();
    let checked = history::check(&operations).map_err(|why| anyhow!("{why}"))?;
    ensure!(checked.blocks == usize::try_from(SHARED)?, "only {checked:?}");
    Ok(())
}
