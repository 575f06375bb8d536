//! What `./run` does. This tool only calls other programs, cargo and the product among them; the product does not know
//! it. See `docs/rfd/0009-how-we-prove-it.md` for why there are these tiers.
#![allow(
    clippy::disallowed_methods,
    reason = "runs on the machine of whoever builds, never under simulated time"
)]
#![allow(missing_docs, reason = "a tool, not a library")]

mod bench;
mod cleanup;
mod cluster;
mod demo;
mod display;
mod guest;
mod house;
mod install;
mod kernel;
mod ledger;
mod namespace;
mod network;
mod node;
mod process;
mod server;
mod soak;
mod tier;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use house::House;
use ledger::Failure;
use node::Profile;
use std::{process::ExitCode, time::Instant};
use tier::TIERS;

#[derive(Parser)]
#[command(
    name = "./run",
    about = "Windrose: show it, test it, measure it",
    disable_version_flag = true
)]
struct Arguments {
    #[command(subcommand)]
    command: What,
}

#[derive(Subcommand)]
enum What {
    /// Show the main job: a volume on two nodes, one of which dies while Linux uses both
    Demo,
    /// Everything that must hold, tier by tier; installs what it needs
    Test {
        /// Only these tiers
        #[arg(long = "tier", value_name = "NAME", value_delimiter = ',')]
        tiers: Vec<String>,
        /// Only checks whose name contains this; heeded by tiers mirror, scsi and nvme
        #[arg(long, default_value = "")]
        only: String,
        /// Say which tiers there are
        #[arg(long)]
        list: bool,
    },
    /// A cluster of real processes under random trouble, for as long as wanted
    Chaos {
        #[arg(long, default_value_t = 30)]
        rounds: u64,
        /// The same seed brings the same troubles in the same order
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Only scenarios whose name contains this
        #[arg(long, default_value = "")]
        only: String,
    },
    /// Connections that come and go, for as long as wanted: nothing may grow by it
    Soak {
        #[arg(long, default_value_t = 10)]
        minutes: u32,
        /// The same seed brings the same clients
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Mirrored volumes on two nodes, as many as wanted: created, used, idle, a node killed, deleted
    Crowd {
        #[arg(long, default_value_t = 1000)]
        volumes: usize,
    },
    /// Measure side by side, against the limits of this machine; writes bench/README.md
    Bench {
        /// What to measure
        what: bench::Subject,
        /// How often everything is measured
        #[arg(long, default_value_t = 5)]
        repetitions: usize,
        /// How long one measurement takes
        #[arg(long, default_value_t = 3)]
        seconds: u64,
    },
    /// The clients of the tests against other people's targets: shows whose fault a failure is
    Peers,
    /// rustfmt and clippy
    Lint,
    /// cargo-deny: licences and sources of dependencies, and published weaknesses; installs it
    Audit,
    /// The simulator, for as many seeds as wanted; its own arguments follow
    Sim {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// The fuzz targets, or one of them, for longer than the tests do
    Fuzz {
        target: Option<String>,
        /// How long each target runs
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
    let mut house = House::open()?;
    match arguments.command {
        What::Demo => demonstrate(&house)?,
        What::Test { list: true, .. } => {
            for tier in TIERS {
                println!("{:<12} {}", tier.name, tier.about);
            }
        }
        What::Test { tiers, only, .. } => {
            house.only = only;
            test(&house, &tiers)?;
        }
        What::Chaos { rounds, seed, only } => chaos(&house, &tier::Chaos { rounds, seed, only })?,
        What::Crowd { volumes } => crowd(&house, volumes)?,
        What::Soak { minutes, seed } => soak(&house, soak::Soak { minutes, seed })?,
        What::Bench { what, repetitions, seconds } => {
            bench::start(&house, what, bench::Plan { repetitions, seconds })?;
        }
        What::Peers => {
            install::packages(&house, &tier::peer_packages())?;
            if namespace::inside() || !namespace::run_inside(&house, &["peers"])? {
                tier::against_peers(&house)?;
            }
        }
        What::Lint => tier::lint(&house),
        What::Audit => tier::audit(&house)?,
        What::Sim { arguments } => tier::simulate(&house, &arguments)?,
        What::Fuzz { target, seconds } => tier::fuzz(&house, &tier::Fuzz { target, seconds })?,
    }
    house.display.finish();
    let failed = house.with_ledger(|ledger| !ledger.failed.is_empty());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The tiers named, or all of them; the verdict is the last line.
fn test(house: &House, only: &[String]) -> Result<()> {
    if let Some(unknown) = only.iter().find(|name| TIERS.iter().all(|tier| tier.name != **name)) {
        bail!("there is no tier {unknown}; ./run test --list names them");
    }
    let begun = Instant::now();
    let wanted = |name: &str| only.is_empty() || only.iter().any(|chosen| chosen == name);
    let chosen: Vec<_> = TIERS.iter().filter(|tier| wanted(tier.name)).collect();
    tier::run_all(house, &chosen)?;
    if namespace::inside() {
        return Ok(());
    }
    house.display.finish();
    println!("took {} s", begun.elapsed().as_secs());
    house.with_ledger(|ledger| {
        for Failure { name, why } in &ledger.failed {
            println!("failed: {name}");
            for line in why.lines() {
                println!("    {line}");
            }
        }
        println!("{}", ledger.verdict());
    });
    Ok(())
}

fn chaos(house: &House, plan: &tier::Chaos) -> Result<()> {
    let (rounds, seed) = (plan.rounds.to_string(), plan.seed.to_string());
    let again = ["chaos", "--rounds", &rounds, "--seed", &seed, "--only", &plan.only];
    at_length(house, Profile::Dev, &again, || tier::chaos(house, plan))
}

fn soak(house: &House, plan: soak::Soak) -> Result<()> {
    let (minutes, seed) = (plan.minutes.to_string(), plan.seed.to_string());
    let again = ["soak", "--minutes", &minutes, "--seed", &seed];
    at_length(house, Profile::Release, &again, || soak::soak(house, plan))
}

fn crowd(house: &House, volumes: usize) -> Result<()> {
    let again = ["crowd", "--volumes", &volumes.to_string()];
    at_length(house, Profile::Dev, &again, || tier::crowd(house, volumes))
}

/// A longer check of a cluster than the tests have time for, in namespaces of its own: `again` is what it is
/// called by inside.
fn at_length(
    house: &House,
    profile: Profile,
    again: &[&str],
    check: impl FnOnce() -> Result<()>,
) -> Result<()> {
    install::packages(house, &tier::mirror_packages())?;
    profile.build_product(house)?;
    if namespace::inside() || !namespace::run_inside(house, again)? {
        check()?;
    }
    if !namespace::inside() {
        house.display.finish();
        house.with_ledger(|ledger| println!("{}", ledger.verdict()));
    }
    Ok(())
}

fn demonstrate(house: &House) -> Result<()> {
    if namespace::inside() {
        return demo::show(house, Profile::Release);
    }
    install::packages(house, &demo::packages())?;
    Profile::Release.build_product(house)?;
    let begun = Instant::now();
    if !namespace::run_inside(house, &["demo"])? {
        demo::show(house, Profile::Release)?;
    }
    house.display.finish();
    if house.with_ledger(|ledger| ledger.failed.is_empty()) {
        demo::closing_words(house);
        println!("All of it as expected, in {} s after the build.", begun.elapsed().as_secs());
    }
    Ok(())
}
