//! A store member: an etcd process that the node runs as a child.
//!
//! [`EtcdMemberConfig`] describes the member and [`arguments`](EtcdMemberConfig::arguments) builds
//! etcd's command line; `ProcessRun` derives the member's state from its log and exit. Both are
//! pure. [`EtcdSupervisor`] starts the process, restarts it when it dies, and stops it.
//!
//! A failure that no restart repairs is reported as a [`PermanentFailure`], without a restart: a
//! member whose data is lost or damaged must not return under its old name with other data.

mod arguments;
mod clock_lag;
mod etcd_log;
mod process_state;

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Split};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

pub use arguments::{EtcdMemberConfig, InitialClusterState, TlsFiles};
pub use clock_lag::ClockLag;
use clock_lag::ClockLags;
pub use process_state::{EtcdState, PermanentFailure};
use process_state::{ProcessExit, ProcessRun, RestartHistory};

/// Starts etcd so that it does not outlive the node, where installed.
const SETPRIV: &str = "/usr/bin/setpriv";

/// How long to wait for the rest of an exited process's log.
const LOG_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A member's log, line by line.
type LogLines = Split<BufReader<ChildStderr>>;

/// Keeps a store member running.
#[derive(Debug)]
pub struct EtcdSupervisor {
    state: watch::Receiver<EtcdState>,
    clock_lags: Arc<ClockLags>,
    restart_history: watch::Receiver<RestartHistory>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl EtcdSupervisor {
    /// Starts `program` (`etcd`, or its path) as `member`, in a task of the current runtime.
    ///
    /// The thread that runs the task should live as long as the process: where supported, the
    /// system kills the member when that thread ends, so that no member outlives a killed node.
    ///
    /// # Panics
    /// Outside of a runtime.
    #[must_use]
    pub fn start(program: PathBuf, member: EtcdMemberConfig) -> Self {
        let (report, state) = watch::channel(EtcdState::Starting);
        let (stop, stopped) = oneshot::channel();
        let (keep, record) = watch::channel(RestartHistory::default());
        let clocks = Arc::<ClockLags>::default();
        let warnings = Mutex::default();
        let reports = Reports {
            state: report,
            clock_lags: Arc::clone(&clocks),
            restart_history: keep,
            warnings,
        };
        let task = tokio::spawn(supervise(program, member, reports, stopped));
        Self { state, clock_lags: clocks, restart_history: record, stop: Some(stop), task }
    }

    /// The member's state, and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<EtcdState> {
        self.state.clone()
    }

    /// Whether the member has failed permanently.
    #[must_use]
    pub fn is_permanently_down(&self) -> bool {
        matches!(&*self.state.borrow(), EtcdState::PermanentlyDown(_))
    }

    /// Why the member does not stay up: its permanent failure, or its last exit reason until it has
    /// run for a while again.
    #[must_use]
    pub fn last_failure(&self) -> Option<String> {
        if let EtcdState::PermanentlyDown(defect) = &*self.state.borrow() {
            return Some(defect.to_string());
        }
        self.restart_history.borrow().last_failure(Instant::now())
    }

    /// The members whose clocks are behind this one's by more than a second.
    #[must_use]
    pub fn clock_lags(&self) -> Vec<ClockLag> {
        self.clock_lags.current()
    }

    /// Stops the member, and kills it if it has not exited within `grace_period`. Returns whether
    /// it exited by itself.
    pub async fn stop(mut self, grace_period: Duration) -> bool {
        if let Some(stop) = self.stop.take() {
            // Its task may have ended already.
            let _ = stop.send(());
        }
        let ended = timeout(grace_period, &mut self.task).await.is_ok();
        // Dropping the task drops the child, which kills it.
        self.task.abort();
        ended
    }
}

impl Drop for EtcdSupervisor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a member reports about itself and the other members.
struct Reports {
    state: watch::Sender<EtcdState>,
    clock_lags: Arc<ClockLags>,
    restart_history: watch::Sender<RestartHistory>,
    /// etcd's recent warnings.
    warnings: Mutex<etcd_log::WarningLimiter>,
}

/// Keeps the member running until it is told to stop or has failed permanently.
async fn supervise(
    program: PathBuf,
    member: EtcdMemberConfig,
    reports: Reports,
    mut stop: oneshot::Receiver<()>,
) {
    let state = &reports.state;
    loop {
        reports.restart_history.send_modify(|record| record.record_start(Instant::now()));
        state.send_replace(EtcdState::Starting);
        let mut run = ProcessRun::default();
        let why = match spawn(&program, &member) {
            Ok((child, lines)) => {
                let ProcessExit { was_requested, reason: why } =
                    run_until_exit(child, lines, &mut run, &reports, &mut stop).await;
                if was_requested {
                    state.send_replace(EtcdState::Stopped);
                    return;
                }
                why
            }
            Err(e) => format!("cannot start {}: {e}", program.display()),
        };
        if let Some(failure) = run.permanent_failure() {
            tracing::error!(member = member.name, defect = %failure, "store member failed permanently");
            state.send_replace(EtcdState::PermanentlyDown(failure));
            return;
        }
        reports
            .restart_history
            .send_modify(|record| record.record_exit(Instant::now(), why.clone()));
        let pause = reports.restart_history.borrow().backoff();
        tracing::warn!(member = member.name, why, ?pause, "store member exited; restarting it");
        state.send_replace(EtcdState::Restarting { why });
        // The supervisor was dropped: the member is no longer needed.
        if timeout(pause, &mut stop).await.is_ok() {
            state.send_replace(EtcdState::Stopped);
            return;
        }
    }
}

fn spawn(
    program: &std::path::Path,
    member: &EtcdMemberConfig,
) -> std::io::Result<(Child, LogLines)> {
    let mut command = if std::path::Path::new(SETPRIV).exists() {
        let mut command = Command::new(SETPRIV);
        command.args(["--pdeathsig", "TERM", "--"]).arg(program);
        command
    } else {
        Command::new(program)
    };
    command.args(member.arguments());
    // etcd also takes settings from the environment: remove them, so that only ours count.
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"ETCD_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn()?;
    let log =
        child.stderr.take().ok_or_else(|| std::io::Error::other("it has no standard error"))?;
    Ok((child, BufReader::new(log).split(b'\n')))
}

/// Forwards the log of a running member until it exits, and stops it when told to.
async fn run_until_exit(
    mut child: Child,
    mut lines: LogLines,
    run: &mut ProcessRun,
    reports: &Reports,
    stop: &mut oneshot::Receiver<()>,
) -> ProcessExit {
    let mut stopped = false;
    let mut log_ended = false;
    let status = loop {
        tokio::select! {
            biased;
            _ = &mut *stop, if !stopped => {
                stopped = true;
                terminate(&child);
            }
            line = lines.next_segment(), if !log_ended => match line {
                Ok(Some(line)) => process_log_line(run, &line, reports),
                Ok(None) | Err(_) => log_ended = true,
            },
            status = child.wait() => break status,
        }
    };
    let rest = async {
        while let Ok(Some(line)) = lines.next_segment().await {
            process_log_line(run, &line, reports);
        }
    };
    // A grandchild could hold the pipe open.
    let _ = timeout(LOG_DRAIN_TIMEOUT, rest).await;
    let status = status.map_or_else(|e| e.to_string(), |status| status.to_string());
    ProcessExit { was_requested: stopped, reason: run.exit_reason(&status) }
}

fn process_log_line(run: &mut ProcessRun, line: &[u8], reports: &Reports) {
    let text = String::from_utf8_lossy(line);
    reports.clock_lags.process_line(&text);
    let line = etcd_log::EtcdLogLine::parse(&text);
    let to_log = reports
        .warnings
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .filter(Instant::now(), &line);
    to_log.into_iter().for_each(etcd_log::emit);
    if let Some(state) = run.process_line(&line) {
        reports.state.send_replace(state);
    }
}

fn terminate(child: &Child) {
    let pid = child.id().and_then(|id| i32::try_from(id).ok());
    if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
        // If this fails, the process has exited already.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
}
