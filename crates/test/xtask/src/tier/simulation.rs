//! The simulator's scenarios, seed by seed: the real code in virtual time, with crashes, lost and torn sectors, bad networks.

use super::unit;
use crate::{house::House, ledger::skip, node::Profile, process::Ended};
use anyhow::{Context, Result};
use std::{process::Command, time::Duration};

/// Seeds of every scenario in every run of the tests at most; many more by `./run sim`.
const SEEDS: u64 = 5000;
/// Fewer say little.
const SEEDS_AT_LEAST: u64 = 100;
/// What all scenarios together may take.
const BUDGET: Duration = Duration::from_secs(200);
const LIMIT: Duration = Duration::from_secs(260);

pub(super) fn run(house: &House) -> Result<()> {
    build(house)?;
    let program = Profile::Dev.sibling(house, "sim");
    let list = Command::new(&program).arg("--list").output().context("cannot run sim")?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    // The planted mistakes are for the simulator's own tests.
    let scenarios = list.lines().filter(|line| !line.ends_with("(planted)"));
    let names = scenarios.filter_map(|line| line.split_whitespace().next());
    let names: Vec<&str> = names.filter(|name| weight(name) > 0).collect();
    if names.is_empty() {
        return skip("there are no scenarios yet");
    }
    let all: u64 = names.iter().map(|name| weight(name)).sum();
    for name in names {
        let share = BUDGET.as_secs() * weight(name) / all;
        house.display.working(&format!("sim {name}"));
        let mut command = Command::new(&program);
        command.args(["--scenario", name, "--seeds", &format!("0..{SEEDS}")]);
        command.args(["--seconds", &share.to_string()]);
        match house.run("sim", &mut command, LIMIT).and_then(Ended::ok) {
            Ok(output) => told(house, name, output.lines().last().unwrap_or_default()),
            Err(error) => house.enter_error(&format!("sim {name}"), &error),
        }
    }
    Ok(())
}

/// How much of the time a scenario gets, compared to others: worlds of several nodes or disks take longer. One that is
/// as long as another and has nearly the same worlds is left to the simulator's own tests and `./run sim`.
fn weight(name: &str) -> u64 {
    match name {
        "mirror" => 7,
        "mirror-full" => 0,
        "mirror-reservations" => 9,
        "mirror-initiators" => 2,
        "pool" => 4,
        _ => 1,
    }
}

/// Builds the simulator among the tests of the workspace, whose tier has done so by now: on its own its
/// dependencies have other features, and everything is compiled again.
fn build(house: &House) -> Result<()> {
    let mut command = house.cargo();
    command.args(["test", "--locked", "--no-run"]).args(unit::FEATURES);
    house.display.working("build the simulator");
    house.build("cargo test --no-run", &mut command)?.ok()?;
    Ok(())
}

/// Enters what a scenario said last: `NAME: 1234 seeds, 0 failed; 50.0 s`.
fn told(house: &House, name: &str, line: &str) {
    let seeds = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    if seeds < SEEDS_AT_LEAST {
        house.skip(&format!("sim {name}"), &format!("too few seeds in the time there was: {line}"));
    } else {
        house.pass(1, &format!("sim {line}"));
    }
}

/// The simulator with whatever it is told, as fast as it gets.
pub(crate) fn simulate(house: &House, arguments: &[String]) -> Result<()> {
    Profile::Release.build(house, &["-p", "sim"])?;
    house.display.finish();
    let program = Profile::Release.sibling(house, "sim");
    let status = Command::new(program).args(arguments).status().context("cannot run sim")?;
    anyhow::ensure!(status.success(), "sim ended with {status}");
    Ok(())
}
