//! One volume on two nodes, as real processes with a real store, while nodes are killed, stopped, cut off and drained.
//!
//! In each trial clients with a path to both nodes write and read the same blocks. None of them may see an error, some order
//! must explain all that they saw (`probe::history`), afterwards both copies hold the same bytes, and no operation may have taken
//! longer than the kind of trouble allows.

mod clock;
mod faults;
mod full;
mod load;
mod moves;
mod past;
mod resync;
mod scenarios;
mod space;

use crate::{
    cluster::{Cluster, Mirrored},
    house::House,
    node::Profile,
};
use anyhow::{Result, ensure};
use load::{clients, under_load, verify};
use probe::{paths::Client, registers::Dice};
use scenarios::{Pause, SCENARIOS, Scenario, WORSE};
use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// Blocks that the clients of one trial share: few, so that they meet.
const SHARED: u64 = 64;
const SIZE: &str = "256MiB";
/// Trials that fit into a volume of that size, each with blocks that nobody has written before.
const TRIALS: u64 = (256 << 20) / 512 / SHARED;
/// How long a trouble lasts in the tier: long enough for a node to be voted out.
const HOLD: Duration = Duration::from_secs(5);

/// A part of the tier beside the scenarios, on the same cluster: false when that is not fit for another one. It has the blocks
/// from those of trial `number` on to itself.
type Part = fn(&House, &mut Cluster, &Mirrored, u64) -> bool;

/// The parts, by what `--only` calls them, and how many trials' blocks each may use.
const PARTS: [(&str, Part, u64); 4] = [
    ("fault points", faults::run, faults::TRIALS),
    ("a store from the past", past::run, 1),
    ("a clock that is stepped", clock::run, 1),
    ("a minute away", resync::run, 0),
];

/// The tier: every scenario once, then the other parts, then nodes that die on their way into a cluster and out of it.
pub(super) fn run(house: &House) -> Result<()> {
    if !on_one_cluster(house)? {
        return Ok(());
    }
    on_another(house)
}

/// A cluster that is formed by nodes that die, and another kind of trouble for it.
fn on_another(house: &House) -> Result<()> {
    let (moves, space) = (house.wants("moves"), house.wants("a full disk"));
    if !moves && !space {
        return Ok(());
    }
    let mut cluster = Cluster::start(house, &house.directory("moves")?, Profile::Dev)?;
    let formed = match moves {
        true => moves::run(house, &mut cluster),
        false => house.check("two data nodes and a witness form a cluster", || cluster.form()),
    };
    if formed && space {
        space::run(house, &mut cluster);
    }
    Ok(())
}

/// Whether all went so far that another cluster is worth while.
fn on_one_cluster(house: &House) -> Result<bool> {
    let wanted = |name: &&str| house.wants(name);
    let scenarios = SCENARIOS.iter().map(|scenario| scenario.name);
    if !scenarios.chain(PARTS.iter().map(|(name, ..)| *name)).any(|name| wanted(&name)) {
        return Ok(true);
    }
    let Some((mut cluster, volume)) = prepare(house)? else { return Ok(false) };
    let mut number = 0;
    for scenario in SCENARIOS.iter().filter(|scenario| wanted(&scenario.name)) {
        if !trial(house, &mut cluster, &volume, number, scenario, HOLD) {
            return Ok(false);
        }
        number += 1;
    }
    for (_, part, trials) in PARTS.iter().filter(|(name, ..)| wanted(name)) {
        if !part(house, &mut cluster, &volume, number) {
            return Ok(false);
        }
        number += trials;
    }
    Ok(house.check("all nodes end in order", || cluster.stop()))
}

/// The blocks of trial `number`.
fn blocks(number: u64) -> Range<u64> {
    number * SHARED..(number + 1) * SHARED
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
        let blocks = blocks(number);
        let mut clients = clients(cluster, volume, &blocks, Instant::now())?;
        let happened = under_load(&mut clients, |_| {
            (scenario.happens)(cluster, hold)?;
            cluster.await_safe()
        });
        let (_, longest) = longest(&mut clients);
        figures = describe(scenario.pause, longest, &clients);
        happened?;
        verify(&mut clients, &blocks)?;
        cluster.copies_are_equal(volume)?;
        scenario.pause.check(longest)
    });
    show(house, &figures);
    is_fit(house, cluster, passed)
}

/// What a trial has measured, if it came so far.
fn show(house: &House, figures: &str) {
    if !figures.is_empty() {
        house.display.line(&format!("        {figures}"));
    }
}

/// Whether the cluster is fit for another trial after one that has passed, or not.
fn is_fit(house: &House, cluster: &Cluster, passed: bool) -> bool {
    if !passed {
        cluster.show_logs(house);
    }
    let again = cluster.network.heal().and_then(|()| cluster.await_safe());
    if let Err(why) = &again {
        house.display.line(&format!("        no further trial: {why:#}"));
    }
    again.is_ok()
}

/// The longest operation of all: when it began, and how long it took.
fn longest(clients: &mut [Client]) -> (Duration, Duration) {
    let all = clients.iter_mut().map(Client::take_longest);
    all.max_by_key(|(_, took)| *took).unwrap_or_default()
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
