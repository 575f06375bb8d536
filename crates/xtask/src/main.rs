//! What `./run` does. This tool only calls other programs, cargo and the product among them; the product does not know
//! it. See `docs/rfd/0009-how-we-prove-it.md` for why there are these tiers.
#![allow(
    clippy::disallowed_methods,
    reason = "runs on the machine of whoever builds, never under simulated time"
)]
#![allow(missing_docs, reason = "a tool, not a library")]
#![allow(dead_code, reason = "the tiers that use the rest follow")]

mod cleanup;
mod display;
mod guest;
mod house;
mod install;
mod ledger;
mod namespace;
mod process;
mod server;
mod tier;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use house::House;
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
    /// Everything that must hold, tier by tier; installs what it needs
    Test {
        /// Only these tiers
        #[arg(long = "tier", value_name = "NAME", value_delimiter = ',')]
        tiers: Vec<String>,
        /// Say which tiers there are
        #[arg(long)]
        list: bool,
    },
    /// The clients of the tests against other people's targets: shows whose fault a failure is
    Peers,
    /// rustfmt and clippy
    Lint,
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
    let house = House::open()?;
    match arguments.command {
        What::Test { list: true, .. } => {
            for tier in TIERS {
                println!("{:<12} {}", tier.name, tier.about);
            }
        }
        What::Test { tiers, .. } => test(&house, &tiers)?,
        What::Peers => {
            install::packages(&house, &tier::client_packages())?;
            if namespace::inside() || !namespace::run_inside(&house, &["peers"])? {
                tier::against_peers(&house)?;
            }
        }
        What::Lint => tier::lint(&house),
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
    for tier in
        TIERS.iter().filter(|tier| only.is_empty() || only.iter().any(|name| name == tier.name))
    {
        match install::packages(house, tier.packages) {
            Ok(()) => tier::run(house, tier),
            Err(error) => house.enter_error(tier.name, &error),
        }
    }
    house.display.finish();
    println!("took {} s", begun.elapsed().as_secs());
    house.with_ledger(|ledger| {
        for name in &ledger.failed {
            println!("failed: {name}");
        }
        println!("{}", ledger.verdict());
    });
    Ok(())
}
