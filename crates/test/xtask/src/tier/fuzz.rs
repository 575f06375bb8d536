//! Runs every fuzz target for a short while: with libFuzzer's coverage guidance, on the pinned
//! stable toolchain, without a sanitizer. The code is safe Rust except for SIMD, whose slices are
//! bounds-checked, so the bugs to find are panics, overflows, endless loops and wrong results.
//!
//! The targets are one program, an example of the package `fuzz`. Only our own crates are built
//! with coverage: the dependencies, which take most of the time, are shared with the workspace's
//! tests.

use super::unit;
use crate::{node::Profile, parallel, process, run_context::RunContext};
use anyhow::{Context, Result};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// How long each target runs as part of the tests.
const SMOKE_SECONDS: u64 = 5;
/// How many parts the targets have when a sample is run.
const SAMPLE_PARTS: usize = 2;
/// The program, and the variable that selects its target.
const PROGRAM: &str = "fuzz";
const TARGET: &str = "WINDROSE_FUZZ_TARGET";

/// What to fuzz and for how long.
pub(crate) struct FuzzPlan {
    pub(crate) target: Option<String>,
    pub(crate) seconds: u64,
}

pub(super) fn run(context: &RunContext) -> Result<()> {
    let targets = targets(context)?;
    let chosen = context.sample("fuzz targets", targets.iter().map(String::as_str), SAMPLE_PARTS);
    run_targets(context, &chosen, SMOKE_SECONDS)
}

/// Runs one target or all of them.
pub(crate) fn fuzz(context: &RunContext, plan: &FuzzPlan) -> Result<()> {
    let targets = targets(context)?;
    let is_chosen = |name: &&str| plan.target.as_ref().is_none_or(|only| only == *name);
    let chosen: Vec<&str> = targets.iter().map(String::as_str).filter(is_chosen).collect();
    anyhow::ensure!(!chosen.is_empty(), "no such fuzz target; there are: {}", targets.join(", "));
    run_targets(context, &chosen, plan.seconds)
}

/// Builds the targets and runs those chosen, one on each core at a time.
fn run_targets(context: &RunContext, chosen: &[&str], seconds: u64) -> Result<()> {
    let program = build(context)?;
    context.display.begin_step(&format!("{} fuzz targets, {seconds} s each", chosen.len()));
    let outcomes = in_parallel(context, &program, chosen, seconds);
    for (name, outcome) in chosen.iter().zip(outcomes) {
        let name = format!("fuzz {name}");
        match outcome {
            Ok(line) => context.pass(1, &format!("{name}  {line}")),
            Err(error) => context.record_error(&name, &error),
        }
    }
    Ok(())
}

/// Builds the program with coverage and copies it to where no other build overwrites it.
fn build(context: &RunContext) -> Result<PathBuf> {
    context.display.begin_step("build the fuzz targets");
    let mut build = context.cargo();
    build.args(["build", "--locked"]).args(unit::FEATURES).args(["--example", PROGRAM]);
    build.env("RUSTC_WORKSPACE_WRAPPER", context.root.join("fuzz/coverage.sh"));
    build.env("CARGO_INCREMENTAL", "0");
    context.build("cargo build of the fuzz targets", &mut build)?.success_output()?;
    let program = context.scratch().join(PROGRAM);
    std::fs::copy(Profile::Dev.example(context, PROGRAM), &program)
        .context("cannot copy the fuzz targets")?;
    Ok(program)
}

/// The names of all targets, from their file names.
fn targets(context: &RunContext) -> Result<Vec<String>> {
    let directory = context.root.join("fuzz/targets");
    let files = std::fs::read_dir(&directory)
        .with_context(|| format!("cannot read {}", directory.display()))?;
    let names = files.filter_map(|file| Some(file.ok()?.path().file_stem()?.to_str()?.to_owned()));
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    Ok(names)
}

/// Runs the targets on all cores; returns their outcomes in the targets' order.
fn in_parallel(
    context: &RunContext,
    program: &Path,
    targets: &[&str],
    seconds: u64,
) -> Vec<Result<String>> {
    let (display, logs) = (&context.display, context.scratch());
    let limit = Duration::from_secs(seconds * 2 + 60);
    parallel::map(targets, parallel::processors(), |name| {
        let mut command = command(program, logs, name, seconds);
        process::run(display, logs, name, &mut command, limit)
            .and_then(process::FinishedProcess::success_output)
            .map(|output| summary(&output))
    })
}

/// The command of one target; its findings go to the scratch directory.
fn command(program: &Path, scratch: &Path, name: &str, seconds: u64) -> Command {
    let corpus = scratch.join("corpus").join(name);
    let artifacts = scratch.join("artifacts").join(name);
    for directory in [&corpus, &artifacts] {
        let _ = std::fs::create_dir_all(directory);
    }
    let mut command = Command::new(program);
    command.env(TARGET, name).arg(&corpus);
    command.args(["-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1"]);
    command.arg(format!("-max_total_time={seconds}"));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command
}

/// How many inputs were tried, from libFuzzer's final statistics.
fn summary(output: &str) -> String {
    let executed =
        output.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    format!("{} inputs", executed.map_or("?", str::trim))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_the_inputs_tried() {
        let output = "#2 INITED\nstat::number_of_executed_units: 81234\nstat::peak_rss_mb: 44\n";
        assert_eq!(summary(output), "81234 inputs");
    }
}
