//! The program behind `./run`. It only calls other programs, cargo and the product among them; the
//! product does not depend on it. `docs/rfd/0009-how-we-prove-it.md` explains the tiers.
#![allow(
    clippy::disallowed_methods,
    reason = "runs on developers' machines, never under simulated time"
)]
#![allow(missing_docs, reason = "a tool, not a library")]

mod bench;
mod cleanup;
mod cluster;
mod demo;
mod display;
mod guest;
mod install;
mod kernel;
mod namespace;
mod network;
mod node;
mod parallel;
mod process;
mod run_context;
mod selection;
mod server;
mod soak;
mod test_report;
mod tier;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use node::Profile;
use run_context::RunContext;
use selection::Selection;
use std::{process::ExitCode, time::Instant};
use test_report::Failure;
use tier::TIERS;

#[derive(Parser)]
#[command(
    name = "./run",
    about = "Windrose: show it, test it, measure it",
    disable_version_flag = true
)]
struct Arguments {
    #[command(subcommand)]
    command: RunCommand,
}

#[derive(Subcommand)]
enum RunCommand {
    /// Show the main job: a mirrored volume on two nodes, one of which dies while Linux uses both
    Demo,
    /// Run the tests, tier by tier; installs the packages they need
    Test {
        /// Run only these tiers
        #[arg(long = "tier", value_name = "NAME", value_delimiter = ',')]
        tiers: Vec<String>,
        /// Run only checks whose name contains this text (tiers mirror, scsi and nvme)
        #[arg(long, default_value = "")]
        only: String,
        /// Run everything; without this, tiers with many checks run a sample of them
        #[arg(long)]
        all: bool,
        /// Run the sample with this number, which a run prints; without this, the sample depends on
        /// the commit
        #[arg(long, value_name = "NUMBER", conflicts_with = "all")]
        sample: Option<String>,
        /// List the tiers
        #[arg(long)]
        list: bool,
    },
    /// Inject random faults into a cluster of real processes
    Chaos {
        #[arg(long, default_value_t = 30)]
        rounds: u64,
        /// Seed of the fault sequence; the same seed repeats it
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Run only scenarios whose name contains this text
        #[arg(long, default_value = "")]
        only: String,
    },
    /// Open and close connections for a long time and check that resource use does not grow
    Soak {
        #[arg(long, default_value_t = 10)]
        minutes: u32,
        /// Seed of the clients; the same seed repeats them
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Create, use, leave idle and delete many mirrored volumes on two nodes, and kill a node
    /// meanwhile
    Crowd {
        #[arg(long, default_value_t = 1000)]
        volumes: usize,
    },
    /// Benchmark against a reference and the limits of this machine; writes bench/README.md
    Bench {
        /// What to measure
        what: bench::BenchSubject,
        /// Number of repetitions of the whole benchmark
        #[arg(long, default_value_t = 5)]
        repetitions: usize,
        /// Seconds of one measurement
        #[arg(long, default_value_t = 3)]
        seconds: u64,
    },
    /// Run the test clients against other vendors' targets, to see whether a failure is ours
    Peers,
    /// Run rustfmt and clippy
    Lint,
    /// Check licences, sources and known vulnerabilities of dependencies with cargo-deny; installs
    /// it
    Audit,
    /// Run the simulator; further arguments are passed to it
    Sim {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run one fuzz target or all of them, for longer than the tests do
    Fuzz {
        target: Option<String>,
        /// Seconds for each target
        #[arg(long, default_value_t = 300)]
        seconds: u64,
    },
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("run: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    cleanup::install()?;
    namespace::prepare()?;
    let mut context = RunContext::open()?;
    match arguments.command {
        RunCommand::Demo => demo_command(&context)?,
        RunCommand::Test { list: true, .. } => {
            for tier in TIERS {
                println!("{:<12} {}", tier.name, tier.about);
            }
        }
        RunCommand::Test { tiers, only, all, sample, .. } => {
            context.name_filter = only;
            match sample {
                _ if all => context.selection = Selection::All,
                Some(number) => context.selection = Selection::parse(&number)?,
                None => {}
            }
            test(&context, &tiers)?;
        }
        RunCommand::Chaos { rounds, seed, only } => {
            chaos(&context, &tier::ChaosPlan { rounds, seed, only })?;
        }
        RunCommand::Crowd { volumes } => many_volumes(&context, volumes)?,
        RunCommand::Soak { minutes, seed } => soak(&context, soak::SoakPlan { minutes, seed })?,
        RunCommand::Bench { what, repetitions, seconds } => {
            bench::run_benchmark(&context, what, bench::BenchPlan { repetitions, seconds })?;
        }
        RunCommand::Peers => {
            install::packages(&context, &tier::peer_packages())?;
            if namespace::is_inside() || !namespace::run_inside(&context, &["peers"])? {
                tier::test_clients_against_other_targets(&context)?;
            }
        }
        RunCommand::Lint => tier::lint(&context),
        RunCommand::Audit => tier::audit(&context)?,
        RunCommand::Sim { arguments } => tier::simulate(&context, &arguments)?,
        RunCommand::Fuzz { target, seconds } => {
            tier::fuzz(&context, &tier::FuzzPlan { target, seconds })?;
        }
    }
    context.display.finish();
    let failed = context.with_report(|ledger| !ledger.failed.is_empty());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs the named tiers, or all of them. The last line printed is the verdict.
fn test(context: &RunContext, only: &[String]) -> Result<()> {
    if let Some(unknown) = only.iter().find(|name| TIERS.iter().all(|tier| tier.name != **name)) {
        bail!("there is no tier {unknown}; ./run test --list names them");
    }
    let begun = Instant::now();
    let wanted = |name: &str| only.is_empty() || only.iter().any(|chosen| chosen == name);
    let chosen: Vec<_> = TIERS.iter().filter(|tier| wanted(tier.name)).collect();
    if !namespace::is_inside() {
        let words = context.selection.arguments().join(" ");
        context.display.line(&format!("checks: ./run test {words}"));
    }
    tier::run_all(context, &chosen)?;
    if namespace::is_inside() {
        return Ok(());
    }
    context.display.finish();
    println!("took {} s", begun.elapsed().as_secs());
    context.with_report(|ledger| {
        println!("the slowest:");
        for line in ledger.slowest() {
            println!("  {line}");
        }
        for Failure { name, reason: why } in &ledger.failed {
            println!("failed: {name}");
            for line in why.lines() {
                println!("    {line}");
            }
        }
        println!("{}", ledger.verdict());
    });
    Ok(())
}

fn chaos(context: &RunContext, plan: &tier::ChaosPlan) -> Result<()> {
    let (rounds, seed) = (plan.rounds.to_string(), plan.seed.to_string());
    let again = ["chaos", "--rounds", &rounds, "--seed", &seed, "--only", &plan.only];
    run_long_check(context, Profile::Dev, &again, || tier::chaos(context, plan))
}

fn soak(context: &RunContext, plan: soak::SoakPlan) -> Result<()> {
    let (minutes, seed) = (plan.minutes.to_string(), plan.seed.to_string());
    let again = ["soak", "--minutes", &minutes, "--seed", &seed];
    run_long_check(context, Profile::Dist, &again, || soak::soak(context, plan))
}

fn many_volumes(context: &RunContext, volumes: usize) -> Result<()> {
    let again = ["crowd", "--volumes", &volumes.to_string()];
    run_long_check(context, Profile::Dev, &again, || tier::many_volumes(context, volumes))
}

/// Runs a long check of a cluster in its own namespaces. `again` are the arguments with which this
/// tool runs itself inside.
fn run_long_check(
    context: &RunContext,
    profile: Profile,
    again: &[&str],
    check: impl FnOnce() -> Result<()>,
) -> Result<()> {
    install::packages(context, &tier::mirror_packages())?;
    profile.build_product(context)?;
    if namespace::is_inside() || !namespace::run_inside(context, again)? {
        check()?;
    }
    if !namespace::is_inside() {
        context.display.finish();
        context.with_report(|ledger| println!("{}", ledger.verdict()));
    }
    Ok(())
}

fn demo_command(context: &RunContext) -> Result<()> {
    if namespace::is_inside() {
        return demo::run_demo(context, Profile::Release);
    }
    install::packages(context, &demo::packages())?;
    Profile::Release.build_product(context)?;
    let begun = Instant::now();
    if !namespace::run_inside(context, &["demo"])? {
        demo::run_demo(context, Profile::Release)?;
    }
    context.display.finish();
    if context.with_report(|ledger| ledger.failed.is_empty()) {
        demo::print_manual_steps(context);
        println!("All of it as expected, in {} s after the build.", begun.elapsed().as_secs());
    }
    Ok(())
}
