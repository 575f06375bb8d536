//! Windrose: the node and its command line, one program.
#![cfg_attr(
    not(test),
    deny(
        clippy::print_stdout,
        clippy::print_stderr,
        reason = "they panic where nobody reads: see `remote`"
    )
)]

mod accept;
mod attach;
mod bench;
mod cli;
mod cluster;
mod connect;
mod daemon;
mod examples;
mod exit;
mod files;
mod host;
mod log;
mod manual;
mod pool;
mod recovery;
mod remote;
mod show;
mod volume;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use cli::{Cli, Command, NodeArgs, NodeCommand};
use exit::Failure;

/// The command line, whose help has examples; ends the process where it is wrong or asks for help.
fn parse() -> Cli {
    let matches = examples::in_help(Cli::command(), "").get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

#[global_allocator]
static HEAP: rt::Heap = rt::Heap;

fn main() -> ExitCode {
    let cli = parse();
    let done = match cli.command {
        Command::Node(NodeArgs {
            command: Some(NodeCommand::AcceptDataDir { config, confirm }),
            ..
        }) => accept::run(config.as_deref(), confirm.as_deref()),
        Command::Node(NodeArgs { command: Some(command), .. }) => {
            remote::run(&cli.remote, |r| cluster::service(r, command))
        }
        Command::Node(args) => daemon::run(&args),
        Command::Bench(args) => bench::run(&args, cli.remote.json),
        Command::Cluster { command } => remote::run(&cli.remote, |r| cluster::run(r, command)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "windrose", &mut script);
            remote::write_all(&script).map(|()| ExitCode::SUCCESS)
        }
        Command::Man { dir } => manual::write(&dir).map(|()| ExitCode::SUCCESS),
        Command::Pool { command } => remote::run(&cli.remote, |r| pool::run(r, command)),
        Command::Volume { command } => remote::run(&cli.remote, |r| volume::run(r, command)),
        Command::Attach(args) => remote::run(&cli.remote, |r| attach::run(r, *args)),
        Command::Status => remote::run(&cli.remote, show::status),
        Command::Sessions => remote::run(&cli.remote, show::sessions),
    };
    done.unwrap_or_else(|failure: Failure| failure.report())
}
