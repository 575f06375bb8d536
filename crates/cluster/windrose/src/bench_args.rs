//! The command line of `windrose bench`.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use load::job::KEYS;

use crate::files::HostKeyArgs;

const AFTER_HELP: &str = "\
Exit codes:
  0  done
  1  the benchmark or an operation failed, or data read differs from data written
  2  the command line or the job file is wrong, or the confirmation for data loss is missing";

/// What is measured, and how.
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct BenchArgs {
    /// nvme://HOST[:4420]/SUBNQN[?nsid=N&hostnqn=NQN], iscsi://[USER%SECRET@]HOST[:3260]/IQN/LUN,
    /// nbd://HOST[:10809]/EXPORT, nbd+unix:///EXPORT?socket=PATH, or a file or block device;
    /// replaces filename=.
    #[arg(value_name = "URI|PATH")]
    #[allow(rustdoc::broken_intra_doc_links, reason = "brackets mean that a part may be left out")]
    pub(crate) target: Option<String>,
    /// A job file of fio. Other options on the command line override it, in every section.
    #[arg(long, value_name = "FILE")]
    pub(crate) job_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) fio_options: FioOptions,
    #[command(flatten, next_help_heading = "NVMe hosts that prove who they are")]
    pub(crate) keys: HostKeyArgs,
    /// Write to existing targets: their data is lost.
    #[arg(long)]
    pub(crate) yes: bool,
    /// Number of threads (default: one for each job, at most one per processor).
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) cores: Option<u16>,
    /// Processors for the threads, one each, such as 0,2,3.
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "cores")]
    pub(crate) cpus: Vec<usize>,
    /// How long a waiting thread polls before it sleeps, in µs. fio does not poll.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    pub(crate) poll: u32,
    /// API socket of a node on this machine: also report the processor time of that node per
    /// command.
    #[arg(long, value_name = "SOCKET")]
    pub(crate) node: Option<PathBuf>,
    /// Process on this machine: the same for any process.
    #[arg(long, value_name = "PID", conflicts_with = "node")]
    pub(crate) server_pid: Option<u32>,
}

/// Keys of fio, in the order in which they were given.
#[derive(Clone, Debug, Default)]
pub(crate) struct FioOptions(pub(crate) Vec<(&'static str, String)>);

impl Args for FioOptions {
    fn augment_args(command: Command) -> Command {
        KEYS.iter().fold(command, |command, key| {
            let mut arg = Arg::new(key.name)
                .long(key.name)
                .value_name(key.value)
                .help(key.help)
                .help_heading("fio's keys")
                .allow_hyphen_values(true);
            if let Some(alias) = key.alias {
                arg = arg.visible_alias(alias);
            }
            if key.name.contains('_') {
                arg = arg.alias(with_dashes(key.name));
            }
            if let Some(bare) = key.default_when_bare {
                arg = arg.num_args(0..=1).require_equals(true).default_missing_value(bare);
            }
            command.arg(arg)
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// An option's name with dashes, as our other options are written. Leaked: one string per key.
fn with_dashes(name: &str) -> &'static str {
    Box::leak(name.replace('_', "-").into_boxed_str())
}

impl FromArgMatches for FioOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found: Vec<(usize, &'static str, String)> = Vec::new();
        for key in KEYS {
            let (Some(values), Some(indices)) =
                (matches.get_many::<String>(key.name), matches.indices_of(key.name))
            else {
                continue;
            };
            found
                .extend(indices.zip(values).map(|(index, value)| (index, key.name, value.clone())));
        }
        found.sort_by_key(|(index, ..)| *index);
        Ok(Self(found.into_iter().map(|(_, name, value)| (name, value)).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
