//! `windrose bench`: the load generator (crate `load`) at the command line.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use initiator::uri::Target;
use load::fleet::{Fleet, Now, Plan};
use load::job::{Job, KEYS, parse};
use load::open::{self, Before};
use load::report;

use crate::cli::HostKeyArgs;
use crate::exit::{FAILED, Failure, USAGE};
use crate::files::{self, HostKeys};
use crate::host::Host;
use crate::remote::{tell, write};
use wire::count;

const AFTER_HELP: &str = "\
Exit codes:
  0  done
  1  it could not be measured, an operation failed, or what was read is not what was written
  2  the command line or the job file is wrong, or nobody has said that data may be lost";

/// What is measured, and how.
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct BenchArgs {
    /// nvme://HOST[:4420]/SUBNQN[?nsid=N&hostnqn=NQN], iscsi://[USER%SECRET@]HOST[:3260]/IQN/LUN,
    /// nbd://HOST[:10809]/EXPORT, nbd+unix:///EXPORT?socket=PATH, or a file or block device; in place of filename=.
    #[arg(value_name = "URI|PATH")]
    target: Option<String>,
    /// A job file of fio. What else is given here goes before what it says, in every section.
    #[arg(long, value_name = "FILE")]
    job_file: Option<PathBuf>,
    #[command(flatten)]
    terms: Terms,
    #[command(flatten, next_help_heading = "NVMe hosts that prove who they are")]
    keys: HostKeyArgs,
    /// Write to what exists: what it holds is lost.
    #[arg(long)]
    yes: bool,
    /// Threads to measure with; one for each job, and no more than processors, if not given.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=1024))]
    cores: Option<u16>,
    /// Processors to bind them to, one thread each: 0,2,3.
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "cores")]
    cpus: Vec<usize>,
    /// How long a thread that waits looks for what comes, in µs, before it sleeps. fio does not look.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    poll: u32,
    /// Socket of the API of a node on this machine: tells what a command costs its processors.
    #[arg(long, value_name = "SOCKET")]
    node: Option<PathBuf>,
    /// The same of any process of this machine.
    #[arg(long, value_name = "PID", conflicts_with = "node")]
    server_pid: Option<u32>,
}

/// Keys of fio, in the order in which they were given.
#[derive(Clone, Debug, Default)]
struct Terms(Vec<(&'static str, String)>);

impl Args for Terms {
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
                arg = arg.alias(dashed(key.name));
            }
            if let Some(bare) = key.bare {
                arg = arg.num_args(0..=1).require_equals(true).default_missing_value(bare);
            }
            command.arg(arg)
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// `ramp_time` as our other options are written. Leaked: one for each key that there is.
fn dashed(name: &str) -> &'static str {
    Box::leak(name.replace('_', "-").into_boxed_str())
}

impl FromArgMatches for Terms {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found: Vec<(usize, &'static str, String)> = Vec::new();
        for key in KEYS {
            let (Some(values), Some(places)) =
                (matches.get_many::<String>(key.name), matches.indices_of(key.name))
            else {
                continue;
            };
            found.extend(places.zip(values).map(|(place, value)| (place, key.name, value.clone())));
        }
        found.sort_by_key(|(place, ..)| *place);
        Ok(Self(found.into_iter().map(|(_, name, value)| (name, value)).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Runs it. `json`: for programs.
pub(crate) fn run(args: &BenchArgs, json: bool) -> Result<ExitCode, Failure> {
    // What happens on the way to a target is told: a connection lost, a disk that fails.
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN);
    let _ = log.with_writer(std::io::stderr).log_internal_errors(false).try_init();
    let jobs = jobs(args)?;
    for note in jobs.iter().flat_map(|job| job.notes.iter().map(move |note| (&job.name, note))) {
        tell(&format!("windrose: {}: {}", note.0, note.1));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(FAILED, e.to_string()))?;
    runtime.block_on(measure(args, jobs, json))
}

fn jobs(args: &BenchArgs) -> Result<Vec<Job>, Failure> {
    let wrong = |why: String| Failure::new(USAGE, why);
    let mut jobs = match &args.job_file {
        None => vec![Job::default()],
        Some(path) => {
            let named = |why: String| wrong(format!("{}: {why}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|e| named(e.to_string()))?;
            parse(&text).map_err(|e| named(e.to_string()))?
        }
    };
    for job in &mut jobs {
        for (name, value) in &args.terms.0 {
            job.set(name, Some(value)).map_err(|e| wrong(e.to_string()))?;
        }
        if let Some(target) = &args.target {
            job.filename = Some(target.clone());
        }
    }
    Ok(jobs)
}

async fn measure(args: &BenchArgs, jobs: Vec<Job>, json: bool) -> Result<ExitCode, Failure> {
    let server = server(args).await?;
    let HostKeys { secrets, tls_key } = files::host_keys(&args.keys)?;
    let host = Host::of_this_machine(None, None).ok();
    let plan = Plan {
        cpus: cpus(args, &jobs),
        jobs,
        poll_window: Duration::from_micros(u64::from(args.poll)),
        server: server.as_ref().map(|(process, _)| *process),
        host: host.map(|Host { nqn, id }| open::Host {
            nqn,
            id: id.into_bytes(),
            secrets,
            tls_key,
        }),
    };
    let fleet = Fleet::start(plan).map_err(|why| Failure::new(USAGE, why))?;
    may_be_lost(&fleet, args.yes).await?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            flag.store(true, Ordering::Relaxed);
        }
    });
    let mut display = Display::new();
    let outcome = fleet.run(|now| {
        display.show(now);
        !interrupted.load(Ordering::Relaxed)
    });
    let outcome = outcome.await;
    display.bar.finish_and_clear();
    let outcome = outcome.map_err(|why| Failure::new(FAILED, why))?;
    let text = if json {
        serde_json::to_string_pretty(&report::json(&outcome))
            .map_err(|e| Failure::new(FAILED, e.to_string()))?
    } else {
        report::text(&outcome, server.as_ref().map(|(_, who)| who.as_str()))
    };
    write(text.trim_end())?;
    let failed = outcome.lines.iter().any(|line| line.measured.failed.is_some());
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// One thread for each job, and no more than there are processors, unless told otherwise.
fn cpus(args: &BenchArgs, jobs: &[Job]) -> Vec<Option<usize>> {
    if !args.cpus.is_empty() {
        return args.cpus.iter().copied().map(Some).collect();
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted: u64 = jobs.iter().map(|job| u64::from(job.numjobs)).sum();
    let wanted = usize::try_from(wanted).unwrap_or(processors).min(processors);
    vec![None; args.cores.map_or(wanted, usize::from).max(1)]
}

/// The process whose processor time counts as the server's, and how it was found.
async fn server(args: &BenchArgs) -> Result<Option<(u32, String)>, Failure> {
    let (process, who) = match (&args.node, args.server_pid) {
        (None, None) => return Ok(None),
        (None, Some(process)) => (process, format!("process {process}")),
        (Some(socket), _) => {
            let process = behind(socket).await.map_err(|e| {
                Failure::new(FAILED, format!("{}: {e}", socket.display()))
                    .hint("--node names the API's socket of a node of this machine")
            })?;
            (process, format!("the node at {}, process {process}", socket.display()))
        }
    };
    if load::fleet::time_of(process).is_none() {
        let why = format!("process {process} is not to be seen in /proc");
        return Err(Failure::new(FAILED, why));
    }
    Ok(Some((process, who)))
}

/// Who listens at a socket (unix(7), `SO_PEERCRED`).
async fn behind(socket: &Path) -> std::io::Result<u32> {
    let peer = tokio::net::UnixStream::connect(socket).await?.peer_cred()?;
    let process = peer.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
    process.ok_or_else(|| std::io::Error::other("the system does not say whose it is"))
}

/// Refuses to write to what must not be lost, or may not.
async fn may_be_lost(fleet: &Fleet, yes: bool) -> Result<(), Failure> {
    for (job, target) in fleet.jobs().filter(|(job, _)| job.rw.changes()) {
        let would = match target {
            Target::Path(path) => {
                let before = fleet.look(path.clone()).await;
                match before.map_err(|why| Failure::new(FAILED, why))? {
                    Before::Absent => continue,
                    Before::Image => {
                        let why = format!("{}: holds a volume of Windrose", path.display());
                        return Err(Failure::new(
                            FAILED,
                            format!("{why}, which is never written to"),
                        )
                        .hint("a volume is measured through the node that serves it"));
                    }
                    Before::Holds(what) => format!("{}: it {what}, which", path.display()),
                    Before::Nothing => format!("{}: what it holds", path.display()),
                }
            }
            uri => format!("{uri}: its data"),
        };
        if !yes {
            let why = format!("{would} would be lost to {}", kind(job));
            return Err(Failure::new(USAGE, why).hint("--yes writes to it"));
        }
        tell(&format!("windrose: {would} is lost to {}", kind(job)));
    }
    Ok(())
}

fn kind(job: &Job) -> &'static str {
    if job.rw.write { "writes" } else { "trims" }
}

/// Shows how things are, on a terminal.
struct Display {
    bar: ProgressBar,
    last: (Duration, u64, u64),
}

impl Display {
    fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:20} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, last: (Duration::ZERO, 0, 0) }
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn show(&mut self, now: &Now) {
        let (ops, bytes) = now.moved.iter().fold((0, 0), |sum, m| (sum.0 + m.0, sum.1 + m.1));
        let (then, ops_then, bytes_then) = self.last;
        let seconds = now.elapsed.saturating_sub(then).as_secs_f64();
        if seconds < 0.1 {
            return;
        }
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let mut message = format!(
            "{} s  {:.0} IOPS  {:.1} MiB/s",
            now.elapsed.as_secs(),
            rate(ops, ops_then),
            rate(bytes, bytes_then) / f64::from(1 << 20)
        );
        if now.verified > 0 {
            message += &format!("  {} read again", count(now.verified, "block"));
        }
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.bar.set_length(now.planned.map_or(0, millis));
        self.bar.set_position(now.planned.map_or(0, |planned| millis(now.elapsed.min(planned))));
        self.bar.set_message(message);
        self.last = (now.elapsed, ops, bytes);
    }
}
