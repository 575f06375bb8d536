//! The simulator's scenarios, seed by seed: the real code in virtual time, with crashes, lost and
//! torn sectors, bad networks.

use super::unit;
use crate::{node::Profile, process::FinishedProcess, run_context::RunContext, test_report::skip};
use anyhow::{Context, Result};
use std::{process::Command, time::Duration};

/// How many parts the scenarios have when a sample is run.
const SAMPLE_PARTS: usize = 2;
/// The most seeds of each scenario in a test run; `./run sim` runs more.
const SEEDS: u64 = 5000;
/// Fewer prove little.
const SEEDS_AT_LEAST: u64 = 100;
/// The time of all scenarios together.
const BUDGET: Duration = Duration::from_secs(240);
const LIMIT: Duration = Duration::from_secs(300);

pub(super) fn run(context: &RunContext) -> Result<()> {
    if !context.is_product_built.get() {
        unit::build(context)?;
    }
    let program = Profile::Dev.workspace_program(context, "sim");
    let list = Command::new(&program).arg("--list").output().context("cannot run sim")?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    // The planted bugs are for the simulator's own tests.
    let scenarios = list.lines().filter(|line| !line.ends_with("(planted)"));
    let names = scenarios.filter_map(|line| line.split_whitespace().next());
    let names = names.filter(|name| weight(name) > 0);
    let names = context.sample("scenarios of the simulator", names, SAMPLE_PARTS);
    if names.is_empty() {
        return skip("there are no scenarios yet");
    }
    let all: u64 = names.iter().map(|name| weight(name)).sum();
    // Other seeds with each sample.
    let first = u64::from(context.selection.number()) * SEEDS;
    for name in names {
        let share = BUDGET.as_secs() * weight(name) / all;
        context.display.begin_step(&format!("sim {name}"));
        let mut command = Command::new(&program);
        command.args(["--scenario", name, "--seeds", &format!("{first}..{}", first + SEEDS)]);
        command.args(["--seconds", &share.to_string()]);
        match context.run("sim", &mut command, LIMIT).and_then(FinishedProcess::success_output) {
            Ok(output) => record_result(context, name, output.lines().last().unwrap_or_default()),
            Err(error) => context.record_error(&format!("sim {name}"), &error),
        }
    }
    Ok(())
}

/// A scenario's share of the time: worlds of several nodes or disks take longer. A slow scenario
/// whose worlds nearly equal another's is left to the simulator's own tests and `./run sim`.
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

/// Records a scenario's last line: `NAME: 1234 seeds, 0 failed; 50.0 s`.
fn record_result(context: &RunContext, name: &str, line: &str) {
    let seeds = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    if seeds < SEEDS_AT_LEAST {
        context
            .skip(&format!("sim {name}"), &format!("too few seeds in the time there was: {line}"));
    } else {
        context.pass(1, &format!("sim {line}"));
    }
}

/// Runs an optimised simulator with these arguments.
pub(crate) fn simulate(context: &RunContext, arguments: &[String]) -> Result<()> {
    Profile::Release.build(context, &["-p", "sim"])?;
    context.display.finish();
    let program = Profile::Release.workspace_program(context, "sim");
    let status = Command::new(program).args(arguments).status().context("cannot run sim")?;
    anyhow::ensure!(status.success(), "sim ended with {status}");
    Ok(())
}
