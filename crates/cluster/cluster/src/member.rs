//! An etcd of our own: a member of the cluster's store as a child process of the node.
//!
//! [`Member`] says what it is and [`arguments`](Member::arguments) how etcd is told;
//! `Life` reads from its log and its end how it is; both are pure. [`Supervisor`]
//! starts it, starts it again when it dies, and stops it.
//!
//! What no restart mends is reported by name ([`Defect`]) and left alone: a member whose data is
//! lost or damaged must not come back under its old name with other data.

mod arguments;
mod clock;
mod life;
mod log;

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Split};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

pub use arguments::{Identity, Member, Origin};
pub use clock::Behind;
use clock::Clocks;
pub use life::{Defect, State};
use life::{End, Life, Record};

/// What starts etcd so that it does not outlive the node, where the system has it.
const SETPRIV: &str = "/usr/bin/setpriv";

/// How long the rest of the log of a process that has ended is waited for.
const LAST_LINES: Duration = Duration::from_secs(1);

/// A member's log, line by line.
type Log = Split<BufReader<ChildStderr>>;

/// Sees to it that a member runs.
#[derive(Debug)]
pub struct Supervisor {
    state: watch::Receiver<State>,
    clocks: Arc<Clocks>,
    record: watch::Receiver<Record>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Supervisor {
    /// Starts `program` (`etcd`, or its path) as `member`, in a task of the current runtime.
    ///
    /// The thread that runs the task should live as long as the process: where the system can, it
    /// ends the member when that thread ends, so that no member outlives a killed node.
    ///
    /// # Panics
    /// Outside of a runtime.
    #[must_use]
    pub fn start(program: PathBuf, member: Member) -> Self {
        let (report, state) = watch::channel(State::Starting);
        let (stop, stopped) = oneshot::channel();
        let (keep, record) = watch::channel(Record::default());
        let clocks = Arc::<Clocks>::default();
        let warnings = Mutex::default();
        let told = Told { report, clocks: Arc::clone(&clocks), record: keep, warnings };
        let task = tokio::spawn(supervise(program, member, told, stopped));
        Self { state, clocks, record, stop: Some(stop), task }
    }

    /// How it is, and how it will be.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Whether no restart helps.
    #[must_use]
    pub fn is_down(&self) -> bool {
        matches!(&*self.state.borrow(), State::Down(_))
    }

    /// Why it does not keep running: what is wrong with it, or what it ended with before it was started again, until it
    /// has run for a while.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        if let State::Down(defect) = &*self.state.borrow() {
            return Some(defect.to_string());
        }
        self.record.borrow().trouble(Instant::now())
    }

    /// The members whose clocks are behind this one's by more than a second.
    #[must_use]
    pub fn behind(&self) -> Vec<Behind> {
        self.clocks.behind()
    }

    /// Has it stop in order, and kills it if it has not within `patience`. Says whether it
    /// stopped by itself.
    pub async fn stop(mut self, patience: Duration) -> bool {
        if let Some(stop) = self.stop.take() {
            // Its task may have ended already.
            let _ = stop.send(());
        }
        let ended = timeout(patience, &mut self.task).await.is_ok();
        // Dropping the task drops the child, which kills it.
        self.task.abort();
        ended
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a member tells of itself and of the others.
struct Told {
    report: watch::Sender<State>,
    clocks: Arc<Clocks>,
    record: watch::Sender<Record>,
    /// What etcd has warned of lately.
    warnings: Mutex<log::Warnings>,
}

/// Keeps the member running until it is told to stop or a restart does not help.
async fn supervise(program: PathBuf, member: Member, told: Told, mut stop: oneshot::Receiver<()>) {
    let report = &told.report;
    loop {
        told.record.send_modify(|record| record.begins(Instant::now()));
        report.send_replace(State::Starting);
        let mut life = Life::default();
        let why = match spawn(&program, &member) {
            Ok((child, lines)) => {
                let End { stopped, why } = attend(child, lines, &mut life, &told, &mut stop).await;
                if stopped {
                    report.send_replace(State::Stopped);
                    return;
                }
                why
            }
            Err(e) => format!("{} cannot be started: {e}", program.display()),
        };
        if let Some(defect) = life.defect() {
            tracing::error!(member = member.name, %defect, "the store's member stays down");
            report.send_replace(State::Down(defect));
            return;
        }
        told.record.send_modify(|record| record.ended(Instant::now(), why.clone()));
        let pause = told.record.borrow().pause();
        tracing::warn!(
            member = member.name,
            why,
            ?pause,
            "the store's member ended; it is started again"
        );
        report.send_replace(State::Waiting { why });
        // Whoever owned the supervisor is gone as well: nobody wants the member.
        if timeout(pause, &mut stop).await.is_ok() {
            report.send_replace(State::Stopped);
            return;
        }
    }
}

fn spawn(program: &std::path::Path, member: &Member) -> std::io::Result<(Child, Log)> {
    let mut command = if std::path::Path::new(SETPRIV).exists() {
        let mut command = Command::new(SETPRIV);
        command.args(["--pdeathsig", "TERM", "--"]).arg(program);
        command
    } else {
        Command::new(program)
    };
    command.args(member.arguments());
    // etcd takes settings from the environment, too: only ours count.
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"ETCD_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn()?;
    let log = child.stderr.take().ok_or_else(|| std::io::Error::other("it has no log"))?;
    Ok((child, BufReader::new(log).split(b'\n')))
}

/// Passes on the log of a running member until it has ended, and has it end when told to.
async fn attend(
    mut child: Child,
    mut lines: Log,
    life: &mut Life,
    told: &Told,
    stop: &mut oneshot::Receiver<()>,
) -> End {
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
                Ok(Some(line)) => tell(life, &line, told),
                Ok(None) | Err(_) => log_ended = true,
            },
            status = child.wait() => break status,
        }
    };
    let rest = async {
        while let Ok(Some(line)) = lines.next_segment().await {
            tell(life, &line, told);
        }
    };
    // A grandchild could hold the pipe open.
    let _ = timeout(LAST_LINES, rest).await;
    let status = status.map_or_else(|e| e.to_string(), |status| status.to_string());
    End { stopped, why: life.why(&status) }
}

fn tell(life: &mut Life, line: &[u8], told: &Told) {
    let text = String::from_utf8_lossy(line);
    told.clocks.line(&text);
    let line = log::Line::parse(&text);
    let told_now =
        told.warnings.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now(), &line);
    told_now.into_iter().for_each(log::write);
    if let Some(state) = life.line(&line) {
        told.report.send_replace(state);
    }
}

fn terminate(child: &Child) {
    let pid = child.id().and_then(|id| i32::try_from(id).ok());
    if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
        // It has ended already if this fails.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
}
