//! Windrose: the node and its command line, one program.
#![cfg_attr(
    not(test),
    deny(
        clippy::print_stdout,
        clippy::print_stderr,
        reason = "they panic if the reader has gone: see `remote`"
    )
)]

mod accept_data_dir;
mod attach;
mod bench;
mod bench_args;
mod cli;
mod cluster;
mod connect_help;
mod daemon;
mod examples;
mod exit;
mod files;
mod host;
mod log;
mod manual;
mod output;
mod pool;
mod recovery;
mod remote;
mod volume;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use cli::{Cli, Command, NodeArgs, NodeCommand};
use exit::CliError;

/// Parses the command line, with examples in its help; exits on errors and on `--help`.
fn parse_cli() -> Cli {
    let matches = examples::add_to_help(Cli::command(), "").get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

#[global_allocator]
static HEAP: rt::MiMalloc = rt::MiMalloc;

fn main() -> ExitCode {
    let cli = parse_cli();
    let done = match cli.command {
        Command::Node(NodeArgs {
            command: Some(NodeCommand::AcceptDataDir { config, confirm }),
            ..
        }) => accept_data_dir::run(config.as_deref(), confirm.as_deref()),
        Command::Node(NodeArgs { command: Some(command), .. }) => {
            remote::run(&cli.remote, |r| cluster::drain_or_resume(r, command))
        }
        Command::Node(args) => daemon::run(&args),
        Command::Bench(args) => bench::run(&args, cli.remote.json),
        Command::Cluster { command } => remote::run(&cli.remote, |r| cluster::run(r, command)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "windrose", &mut script);
            remote::print_bytes(&script).map(|()| ExitCode::SUCCESS)
        }
        Command::Man { dir } => manual::write_pages(&dir).map(|()| ExitCode::SUCCESS),
        Command::Pool { command } => remote::run(&cli.remote, |r| pool::run(r, command)),
        Command::Volume { command } => remote::run(&cli.remote, |r| volume::run(r, command)),
        Command::Attach(args) => remote::run(&cli.remote, |r| attach::run(r, *args)),
        Command::Status => remote::run(&cli.remote, output::status),
        Command::Sessions => remote::run(&cli.remote, output::sessions),
    };
    done.unwrap_or_else(|failure: CliError| failure.report())
}
