//! `windrose bench`: the load generator (crate `load`) at the command line.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use initiator::uri::Target;
use load::benchmark::{Benchmark, BenchmarkPlan, ProgressSnapshot};
use load::job::{Job, parse};
use load::open::{self, ExistingContents};
use load::report;

use crate::bench_args::BenchArgs;
use crate::exit::{CliError, FAILED, USAGE, print_error_line};
use crate::files::{self, HostKeys};
use crate::host::NvmeHost;
use crate::remote::print_line;
use wire::plural;

/// Runs the benchmark. `json`: print JSON, for programs.
pub(crate) fn run(args: &BenchArgs, json: bool) -> Result<ExitCode, CliError> {
    // Log problems with a target: a lost connection, a failing disk.
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN);
    let _ = log.with_writer(std::io::stderr).log_internal_errors(false).try_init();
    let jobs = load_jobs(args)?;
    for note in jobs.iter().flat_map(|job| job.notes.iter().map(move |note| (&job.name, note))) {
        print_error_line(&format!("windrose: {}: {}", note.0, note.1));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| CliError::new(FAILED, e.to_string()))?;
    runtime.block_on(measure(args, jobs, json))
}

fn load_jobs(args: &BenchArgs) -> Result<Vec<Job>, CliError> {
    let usage_error = |why: String| CliError::new(USAGE, why);
    let mut jobs = match &args.job_file {
        None => vec![Job::default()],
        Some(path) => {
            let in_file = |why: String| usage_error(format!("{}: {why}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|e| in_file(e.to_string()))?;
            parse(&text).map_err(|e| in_file(e.to_string()))?
        }
    };
    for job in &mut jobs {
        for (name, value) in &args.fio_options.0 {
            job.set(name, Some(value)).map_err(|e| usage_error(e.to_string()))?;
        }
        if let Some(target) = &args.target {
            job.filename = Some(target.clone());
        }
    }
    Ok(jobs)
}

async fn measure(args: &BenchArgs, jobs: Vec<Job>, json: bool) -> Result<ExitCode, CliError> {
    let server = server_process(args).await?;
    let HostKeys { secrets, tls_key } = files::read_host_keys(&args.keys)?;
    let host = NvmeHost::local(None, None).ok();
    let plan = BenchmarkPlan {
        cpus: select_cpus(args, &jobs),
        jobs,
        poll_window: Duration::from_micros(u64::from(args.poll)),
        server: server.as_ref().map(|(process, _)| *process),
        host: host.map(|NvmeHost { nqn, id }| open::HostIdentity {
            nqn,
            id: id.into_bytes(),
            secrets,
            tls_key,
        }),
    };
    let benchmark = Benchmark::start(plan).map_err(|why| CliError::new(USAGE, why))?;
    check_data_loss(&benchmark, args.yes).await?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            flag.store(true, Ordering::Relaxed);
        }
    });
    let mut display = ProgressDisplay::new();
    let outcome = benchmark.run(|now| {
        display.update(now);
        !interrupted.load(Ordering::Relaxed)
    });
    let outcome = outcome.await;
    display.bar.finish_and_clear();
    let outcome = outcome.map_err(|why| CliError::new(FAILED, why))?;
    let text = if json {
        serde_json::to_string_pretty(&report::json(&outcome))
            .map_err(|e| CliError::new(FAILED, e.to_string()))?
    } else {
        report::text(&outcome, server.as_ref().map(|(_, description)| description.as_str()))
    };
    print_line(text.trim_end())?;
    let failed = outcome.results.iter().any(|line| line.measurement.failure.is_some());
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// One thread per job, at most one per processor, unless set otherwise.
fn select_cpus(args: &BenchArgs, jobs: &[Job]) -> Vec<Option<usize>> {
    if !args.cpus.is_empty() {
        return args.cpus.iter().copied().map(Some).collect();
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted: u64 = jobs.iter().map(|job| u64::from(job.numjobs)).sum();
    let wanted = usize::try_from(wanted).unwrap_or(processors).min(processors);
    vec![None; args.cores.map_or(wanted, usize::from).max(1)]
}

/// The process whose processor time counts as the server's, and how it was found.
async fn server_process(args: &BenchArgs) -> Result<Option<(u32, String)>, CliError> {
    let (process, description) = match (&args.node, args.server_pid) {
        (None, None) => return Ok(None),
        (None, Some(process)) => (process, format!("process {process}")),
        (Some(socket), _) => {
            let process = socket_owner_pid(socket).await.map_err(|e| {
                CliError::new(FAILED, format!("{}: {e}", socket.display()))
                    .with_hint("give the API socket of a node of this machine: --node")
            })?;
            (process, format!("the node at {}, process {process}", socket.display()))
        }
    };
    if load::benchmark::process_cpu_time(process).is_none() {
        let why = format!("process {process} is not visible in /proc");
        return Err(CliError::new(FAILED, why));
    }
    Ok(Some((process, description)))
}

/// The process id of a socket's listener (unix(7), `SO_PEERCRED`).
async fn socket_owner_pid(socket: &Path) -> std::io::Result<u32> {
    let peer = tokio::net::UnixStream::connect(socket).await?.peer_cred()?;
    let process = peer.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
    process.ok_or_else(|| std::io::Error::other("the system does not report its process"))
}

/// Refuses writes that would destroy data: without `yes`, and always for a Windrose image.
async fn check_data_loss(benchmark: &Benchmark, yes: bool) -> Result<(), CliError> {
    for (job, target) in benchmark.jobs().filter(|(job, _)| job.rw.changes()) {
        let loss = match target {
            Target::Path(path) => {
                let contents = benchmark.inspect(path.clone()).await;
                match contents.map_err(|why| CliError::new(FAILED, why))? {
                    ExistingContents::Absent => continue,
                    ExistingContents::Image => {
                        let why = format!("{}: it contains a volume of Windrose", path.display());
                        return Err(CliError::new(
                            FAILED,
                            format!("{why}, which bench never overwrites"),
                        )
                        .with_hint("measure a volume through the node that serves it"));
                    }
                    ExistingContents::Foreign(what) => {
                        format!("{}: it {what}, which", path.display())
                    }
                    ExistingContents::Empty => format!("{}: its contents", path.display()),
                }
            }
            uri => format!("{uri}: its data"),
        };
        if !yes {
            let why = format!("{loss} would be lost to {}", operation_name(job));
            return Err(CliError::new(USAGE, why).with_hint("use --yes to write to it"));
        }
        print_error_line(&format!("windrose: {loss} is lost to {}", operation_name(job)));
    }
    Ok(())
}

fn operation_name(job: &Job) -> &'static str {
    if job.rw.write { "writes" } else { "trims" }
}

/// Shows progress on a terminal.
struct ProgressDisplay {
    bar: ProgressBar,
    last: (Duration, u64, u64),
}

impl ProgressDisplay {
    fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:20} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, last: (Duration::ZERO, 0, 0) }
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn update(&mut self, now: &ProgressSnapshot) {
        let (ops, bytes) =
            now.by_direction.iter().fold((0, 0), |sum, m| (sum.0 + m.0, sum.1 + m.1));
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
            message += &format!("  {} read again", plural(now.verified, "block"));
        }
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.bar.set_length(now.planned.map_or(0, millis));
        self.bar.set_position(now.planned.map_or(0, |planned| millis(now.elapsed.min(planned))));
        self.bar.set_message(message);
        self.last = (now.elapsed, ops, bytes);
    }
}
