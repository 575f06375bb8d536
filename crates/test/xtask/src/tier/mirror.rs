//! One volume on two nodes, as real processes with a real etcd, while nodes are killed, stopped,
//! cut off and drained.
//!
//! In each trial, clients with a path to both nodes write and read the same blocks. No client may
//! see an error, the history must be linearizable (`probe::linearizability`), both replicas must
//! hold the same bytes afterwards, and no operation may take longer than the kind of fault allows.

mod clock_steps;
mod fault_points;
mod full;
mod full_disk;
mod load;
mod membership_faults;
mod resync;
mod scenarios;
mod small_fs;
mod store_rollback;

use crate::{
    cluster::{Cluster, MirroredVolume},
    node::Profile,
    run_context::RunContext,
};
use anyhow::{Result, ensure};
use load::{clients, under_load, verify};
use probe::{multipath::MultipathClient, registers::SeededRng};
use scenarios::{CHAOS_SCENARIOS, PauseClass, SCENARIOS, Scenario};
use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// Blocks the clients of one trial share: few, so that accesses conflict.
const SHARED_BLOCKS: u64 = 64;
const SIZE: &str = "256MiB";
/// Trials that fit into a volume of this size, each with its own unwritten blocks.
const TRIALS: u64 = (256 << 20) / 512 / SHARED_BLOCKS;
/// How long a fault lasts in this tier: long enough for a node to be voted out.
const FAULT_TIME: Duration = Duration::from_secs(5);

/// A run takes one of so many parts of the scenarios, of the fault points and of the rest.
const SAMPLE_PARTS: usize = 3;

/// A part of the tier besides the scenarios, on the same cluster; false if the cluster is unusable
/// afterwards. It owns the blocks from trial `number` on.
type TierPart = fn(&RunContext, &mut Cluster, &MirroredVolume, u64) -> bool;

/// The part that samples itself.
const FAULT_POINTS: &str = "fault points";

/// The parts: the name for `--only`, and how many trials' blocks each may use.
const PARTS: [(&str, TierPart, u64); 4] = [
    (FAULT_POINTS, fault_points::run, fault_points::TRIALS),
    ("a store from the past", store_rollback::run, 1),
    ("a clock that is stepped", clock_steps::run, 1),
    ("a minute away", resync::run, 0),
];

/// Runs the tier: scenarios, the other parts, then nodes that die while joining or leaving a
/// cluster.
pub(super) fn run(context: &RunContext) -> Result<()> {
    if !run_on_first_cluster(context)? {
        return Ok(());
    }
    run_on_second_cluster(context)
}

/// Runs the membership faults on a second cluster, and another kind of fault after them.
fn run_on_second_cluster(context: &RunContext) -> Result<()> {
    let (moves, space) = (context.matches_filter("moves"), context.matches_filter("a full disk"));
    if !moves && !space {
        return Ok(());
    }
    let mut cluster = Cluster::start(context, &context.directory("moves")?, Profile::Dev)?;
    let formed = match moves {
        true => membership_faults::run(context, &mut cluster),
        false => {
            context.check("two data nodes and a witness form a cluster", || cluster.form_cluster())
        }
    };
    if formed && space {
        full_disk::run(context, &mut cluster);
    }
    Ok(())
}

/// Returns whether a second cluster is worth testing.
fn run_on_first_cluster(context: &RunContext) -> Result<bool> {
    let wanted = |name: &&str| context.matches_filter(name);
    let scenarios = SCENARIOS.iter().map(|scenario| scenario.name);
    if !scenarios.chain(PARTS.iter().map(|(name, ..)| *name)).any(|name| wanted(&name)) {
        return Ok(true);
    }
    let Some((mut cluster, volume)) = prepare(context)? else { return Ok(false) };
    let mut number = 0;
    let scenarios = SCENARIOS.iter().map(|scenario| scenario.name).filter(wanted);
    let chosen = context.sample("scenarios", scenarios, SAMPLE_PARTS);
    for scenario in SCENARIOS.iter().filter(|scenario| chosen.contains(&scenario.name)) {
        if !trial(context, &mut cluster, &volume, number, scenario, FAULT_TIME) {
            return Ok(false);
        }
        number += 1;
    }
    let parts = PARTS.iter().map(|(name, ..)| *name).filter(wanted);
    let parts = parts.filter(|name| *name != FAULT_POINTS);
    let mut chosen = context.sample("other faults", parts, SAMPLE_PARTS);
    chosen.extend(wanted(&FAULT_POINTS).then_some(FAULT_POINTS));
    for (_, part, trials) in PARTS.iter().filter(|(name, ..)| chosen.contains(name)) {
        if !part(context, &mut cluster, &volume, number) {
            return Ok(false);
        }
        number += trials;
    }
    Ok(context.check("all nodes end in order", || cluster.stop()))
}

/// The blocks of trial `number`.
fn trial_blocks(number: u64) -> Range<u64> {
    number * SHARED_BLOCKS..(number + 1) * SHARED_BLOCKS
}

/// How many rounds [`chaos`] runs, and its random seed.
#[derive(Clone, Debug)]
pub(crate) struct ChaosPlan {
    pub(crate) rounds: u64,
    pub(crate) seed: u64,
    /// Only scenarios whose name contains this.
    pub(crate) only: String,
}

/// Runs random scenarios of random length.
pub(crate) fn chaos(context: &RunContext, chaos: &ChaosPlan) -> Result<()> {
    let ChaosPlan { rounds, seed, only } = chaos;
    let all: Vec<&Scenario> =
        SCENARIOS.iter().chain(CHAOS_SCENARIOS).filter(|one| one.name.contains(only)).collect();
    ensure!(!all.is_empty(), "no scenario's name contains \"{only}\"");
    ensure!(*rounds <= TRIALS, "at most {TRIALS} rounds");
    context.display.line(&format!("chaos: {rounds} rounds, seed {seed}"));
    let Some((mut cluster, volume)) = prepare(context)? else { return Ok(()) };
    let mut dice = SeededRng::new(*seed);
    for number in 0..*rounds {
        let index = usize::try_from(dice.next_below(all.len() as u64)).unwrap_or(0);
        let hold = Duration::from_millis(200 + dice.next_below(8000));
        if !trial(context, &mut cluster, &volume, number, all[index], hold) {
            return Ok(());
        }
    }
    Ok(())
}

fn prepare(context: &RunContext) -> Result<Option<(Cluster, MirroredVolume)>> {
    let cluster = Cluster::start(context, &context.directory("mirror")?, Profile::Dev)?;
    context.check("links are cut and mended", || cluster.network.check_cuts());
    let formed =
        context.check("two data nodes and a witness form a cluster", || cluster.form_cluster());
    let mut volume = None;
    let created = formed
        && context.check("a volume with a copy on each data node", || {
            volume = Some(cluster.create("mirror", SIZE)?);
            Ok(())
        });
    if !created {
        cluster.show_logs(context);
    }
    Ok(volume.map(|volume| (cluster, volume)))
}

/// Runs one scenario; false if the cluster is unusable afterwards.
fn trial(
    context: &RunContext,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
    number: u64,
    scenario: &Scenario,
    hold: Duration,
) -> bool {
    let mut figures = String::new();
    let passed = context.check(scenario.name, || {
        let blocks = trial_blocks(number);
        let mut clients = clients(cluster, volume, &blocks, Instant::now())?;
        let happened = under_load(&mut clients, |_| {
            (scenario.run)(cluster, hold)?;
            cluster.await_safe()
        });
        let (_, longest) = longest(&mut clients);
        figures = describe(scenario.pause, longest, &clients);
        happened?;
        verify(&mut clients, &blocks)?;
        cluster.check_replicas_equal(volume)?;
        scenario.pause.check(longest)
    });
    show(context, &figures);
    is_usable(context, cluster, passed)
}

/// Prints a trial's measurements, if there are any.
fn show(context: &RunContext, figures: &str) {
    if !figures.is_empty() {
        context.display.line(&format!("        {figures}"));
    }
}

/// Whether the cluster is usable for another trial.
fn is_usable(context: &RunContext, cluster: &Cluster, passed: bool) -> bool {
    if !passed {
        cluster.show_logs(context);
    }
    let again = cluster.network.heal().and_then(|()| cluster.await_safe());
    if let Err(why) = &again {
        context.display.line(&format!("        no further trial: {why:#}"));
    }
    again.is_ok()
}

/// The longest operation of all clients: when it began, and how long it took.
fn longest(clients: &mut [MultipathClient]) -> (Duration, Duration) {
    let all = clients.iter_mut().map(MultipathClient::take_slowest_operation);
    all.max_by_key(|(_, took)| *took).unwrap_or_default()
}

fn describe(pause: PauseClass, longest: Duration, clients: &[MultipathClient]) -> String {
    let operations: u64 = clients.iter().map(MultipathClient::completed_operations).sum();
    let promise = match pause.bounds() {
        Some((promised, allowed)) => format!(
            "promised {:.1} s, allowed here {:.1} s",
            promised.as_secs_f64(),
            allowed.as_secs_f64()
        ),
        None => "as long as no node was there".to_owned(),
    };
    format!("longest pause {:.2} s ({promise}); {operations} operations", longest.as_secs_f64())
}
