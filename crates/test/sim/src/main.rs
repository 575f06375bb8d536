//! `sim`: runs scenarios seed by seed and prints the seeds that fail.

use std::io::Write;
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use sim::{Batch, FailedSeed, Scenario, planted, run_batch, scenarios};

/// Runs scenarios in simulated worlds, seed by seed, and prints the seeds that fail.
#[derive(Debug, Parser)]
#[command(name = "sim")]
struct Args {
    /// Scenario to run; all of them where none is given
    #[arg(long, short)]
    scenario: Vec<String>,
    /// Seeds to run: FROM..TO, or one number
    #[arg(long, default_value = "0..100", value_parser = parse_seeds)]
    seeds: Range<u64>,
    /// Threads; as many as the machine has processors where none is given
    #[arg(long, short)]
    jobs: Option<usize>,
    /// Run every seed twice and compare the traces
    #[arg(long)]
    twice: bool,
    /// Print every event, and what the product logs
    #[arg(long, short)]
    verbose: bool,
    /// Stop after so many failures
    #[arg(long, default_value_t = 5)]
    stop_after: usize,
    /// Begin no seed after so many seconds of each scenario
    #[arg(long)]
    seconds: Option<u64>,
    /// List the scenarios
    #[arg(long)]
    list: bool,
}

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let number = |t: &str| t.parse::<u64>().map_err(|e| format!("{t:?}: {e}"));
    match text.split_once("..") {
        Some((from, to)) => Ok(number(from)?..number(to)?),
        None => number(text).map(|seed| seed..seed.saturating_add(1)),
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        scenarios::all().iter().for_each(|s| println!("{:24} {}", s.name, s.description));
        planted::all().iter().for_each(|s| println!("{:24} {} (planted)", s.name, s.description));
        return ExitCode::SUCCESS;
    }
    let mut chosen = Vec::new();
    for name in &args.scenario {
        let Some(scenario) = sim::find(name) else {
            eprintln!("there is no scenario {name:?}; --list shows them");
            return ExitCode::from(2);
        };
        chosen.push(scenario);
    }
    if chosen.is_empty() {
        chosen = scenarios::all();
    }
    if args.verbose {
        init_logging();
    }
    let failures: usize = chosen.into_iter().map(|s| run_scenario(&args, s)).sum();
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints the product's log among the events, without its timestamps: they are not simulated time.
fn init_logging() {
    tracing_subscriber::fmt().without_time().with_ansi(false).with_target(false).init();
}

#[expect(clippy::disallowed_methods, reason = "how fast the runner is, in real time")]
fn run_scenario(args: &Args, scenario: Scenario) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, Into::into);
    let batch = Batch {
        scenario,
        seeds: args.seeds.clone(),
        jobs: args.jobs.unwrap_or(if args.verbose { 1 } else { processors }),
        twice: args.twice,
        verbose: args.verbose,
        stop_after: args.stop_after,
        time: args.seconds.map(Duration::from_secs),
    };
    let start = Instant::now();
    let report = run_batch(&batch, |failed| print_failure(scenario, failed));
    let seconds = start.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    let (seeds_run, events, virtual_s) =
        (report.seeds_run as f64, report.events as f64, report.virtual_ms as f64 / 1e3);
    println!(
        "{}: {} seeds, {} failed; {seconds:.1} s, {:.0} seeds/min, {:.0} events/s, {:.0} virtual s/s",
        scenario.name,
        report.seeds_run,
        report.failed.len(),
        seeds_run * 60.0 / seconds,
        events / seconds,
        virtual_s / seconds,
    );
    report.failed.len()
}

fn print_failure(scenario: Scenario, failed: &FailedSeed) {
    let text = format!(
        "FAILED {} seed {}: {}    replay: {}\n",
        scenario.name,
        failed.seed,
        failed.failure,
        scenario.replay_command(failed.seed)
    );
    // The reader of our output has gone: nothing is left to do.
    let _ = std::io::stdout().write_all(text.as_bytes());
}
