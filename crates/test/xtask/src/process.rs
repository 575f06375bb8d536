//! Other programs: run to completion under a time limit, or kept running behind a guard. Each gets
//! its own process group, so that its children end with it.

use crate::{cleanup::ProcessGroup, display::Display};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

/// How often a running program is polled.
const POLL: Duration = Duration::from_millis(20);
/// How many bytes at the end of a program's output are searched for its last line.
const TAIL_BYTES: u64 = 16 << 10;
/// How many lines of output an error message includes.
const TAIL_LINES: usize = 60;
/// How long a daemon may take to end after SIGTERM: a node waits for lost initiators and for its
/// etcd member.
const STOP_TIMEOUT: Duration = Duration::from_secs(25);

/// How often a build is checked for progress.
const BUILD_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// How long a build may stand still: it may wait for another build in the same directory.
const BUILD_IDLE_LIMIT: Duration = Duration::from_secs(3600);

static SERIAL: AtomicU32 = AtomicU32::new(0);

/// A program that has ended.
pub(crate) struct FinishedProcess {
    pub(crate) name: String,
    pub(crate) status: ExitStatus,
    /// Standard output and error, interleaved.
    pub(crate) output: String,
}

impl FinishedProcess {
    /// Returns the output if the program succeeded; otherwise an error with its last lines.
    pub(crate) fn success_output(self) -> Result<String> {
        if !self.status.success() {
            bail!("{}: {}\n{}", self.name, self.status, tail(&self.output));
        }
        Ok(self.output)
    }
}

/// The last lines of `text`.
pub(crate) fn tail(text: &str) -> String {
    last_lines(text, TAIL_LINES)
}

/// The last `count` lines of `text`.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn log_file(logs: &Path, what: &str) -> Result<(File, PathBuf)> {
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let name: String =
        what.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
    let path = logs.join(format!("{serial:04}-{name}.log"));
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok((file, path))
}

fn start(logs: &Path, what: &str, command: &mut Command) -> Result<(Child, ProcessGroup, PathBuf)> {
    let (file, log) = log_file(logs, what)?;
    let child = command
        .stdin(Stdio::null())
        .stdout(file.try_clone().context("cannot share the log")?)
        .stderr(file)
        .process_group(0)
        .spawn()
        .with_context(|| format!("{what}: cannot start {}", command.get_program().display()))?;
    let group = ProcessGroup::of(&child);
    Ok((child, group, log))
}

/// Runs `command` to completion and returns its output; kills it after `limit`.
pub(crate) fn run(
    display: &Display,
    logs: &Path,
    what: &str,
    command: &mut Command,
    limit: Duration,
) -> Result<FinishedProcess> {
    let begun = Instant::now();
    let over = |_: u32| {
        let late = begun.elapsed() > limit;
        late.then(|| format!("not done after {} s, stopped", limit.as_secs()))
    };
    run_unless(display, logs, what, command, over)
}

/// Runs a build to completion, however long it takes, unless it hangs.
pub(crate) fn build(
    display: &Display,
    logs: &Path,
    what: &str,
    command: &mut Command,
) -> Result<FinishedProcess> {
    let mut progress = Progress {
        limit: BUILD_IDLE_LIMIT,
        looked: Instant::now(),
        time: 0,
        since: Instant::now(),
    };
    run_unless(display, logs, what, command, |group| progress.check_hang(group))
}

/// Whether a process group makes progress: it has used some processor time.
struct Progress {
    limit: Duration,
    looked: Instant,
    /// The processor time it has used, in ticks, and since when this is unchanged.
    time: u64,
    since: Instant,
}

impl Progress {
    fn check_hang(&mut self, group: u32) -> Option<String> {
        if self.looked.elapsed() < BUILD_CHECK_INTERVAL {
            return None;
        }
        self.looked = Instant::now();
        let time = ticks_of_group(group);
        if time != self.time {
            (self.time, self.since) = (time, Instant::now());
        }
        let hangs = self.since.elapsed() > self.limit;
        hangs.then(|| format!("has done nothing for {} s, stopped", self.limit.as_secs()))
    }
}

/// Processor time used by a group's processes and by the children they have reaped.
fn ticks_of_group(group: u32) -> u64 {
    let Ok(processes) = std::fs::read_dir("/proc") else { return 0 };
    let stats = processes.filter_map(|process| {
        let path = process.ok()?.path();
        path.file_name()?.to_str()?.parse::<u32>().ok()?;
        std::fs::read_to_string(path.join("stat")).ok()
    });
    stats.filter_map(|stat| ticks(&stat, group)).sum()
}

/// The ticks of one process, from its line in /proc, if it belongs to the group.
fn ticks(stat: &str, group: u32) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let own = fields.get(2)?.parse() == Ok(group);
    let times = fields.get(11..15)?.iter().filter_map(|field| field.parse::<u64>().ok());
    own.then(|| times.sum())
}

/// Runs `command` to completion and returns its output; kills it when `over` returns a reason.
fn run_unless(
    display: &Display,
    logs: &Path,
    what: &str,
    command: &mut Command,
    mut over: impl FnMut(u32) -> Option<String>,
) -> Result<FinishedProcess> {
    let (mut child, group, log) = start(logs, what, command)?;
    let mut shown = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("{what}: cannot wait"))? {
            break status;
        }
        if let Some(why) = over(child.id()) {
            drop(group);
            let _ = child.wait();
            let output = read_lossy(&log)?;
            bail!("{what}: {why}\n{}", tail(&output));
        }
        if shown.elapsed() > Duration::from_millis(200) {
            shown = Instant::now();
            display.detail(&last_line(&log));
        }
        std::thread::sleep(POLL);
    };
    drop(group);
    let output = read_lossy(&log)?;
    Ok(FinishedProcess { name: what.to_owned(), status, output })
}

/// Runs a short command that has to succeed.
pub(crate) fn run_checked(command: &mut Command) -> Result<()> {
    let out = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !out.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}

/// Reads a file that may hold any bytes.
pub(crate) fn read_lossy(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The last line of a growing file that is for people, without control characters. Cargo's messages
/// for programs are JSON; the beginning of what is read may lie within one.
fn last_line(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let is_text = |line: &&str| !line.trim().is_empty() && !line.ends_with('}');
    let line = text.lines().rev().find(is_text).unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).collect()
}

/// A program that runs until this guard is dropped.
pub(crate) struct Daemon {
    what: String,
    child: Child,
    group: ProcessGroup,
    log: PathBuf,
}

impl Daemon {
    pub(crate) fn start(logs: &Path, what: &str, command: &mut Command) -> Result<Self> {
        let (child, group, log) = start(logs, what, command)?;
        Ok(Self { what: what.to_owned(), child, group, log })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends `signal` to it and its children.
    pub(crate) fn signal(&self, signal: Signal) {
        self.group.signal(signal);
    }

    /// The output so far.
    pub(crate) fn output(&self) -> Result<String> {
        read_lossy(&self.log)
    }

    /// Fails if the program has ended by itself.
    pub(crate) fn alive(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => bail!("{} has ended: {status}\n{}", self.what, tail(&self.output()?)),
        }
    }

    /// The exit status, if the program has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot look after a program")
    }

    /// Waits until the program ends by itself; fails after `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if begun.elapsed() > limit {
                let (what, output) = (&self.what, tail(&self.output()?));
                bail!("{what}: not done after {} s\n{output}", limit.as_secs());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until `ready` returns true; fails if the program ends first or after `limit`.
    pub(crate) fn wait_until(
        &mut self,
        limit: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<()> {
        let begun = Instant::now();
        while !ready() {
            self.alive()?;
            if begun.elapsed() > limit {
                bail!(
                    "{}: not ready after {} s\n{}",
                    self.what,
                    limit.as_secs(),
                    tail(&self.output()?)
                );
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Stops the program (SIGTERM) and returns its exit status.
    pub(crate) fn stop(mut self) -> Result<ExitStatus> {
        let main = Pid::from_child(&self.child);
        kill_process(main, Signal::TERM).with_context(|| format!("{}: cannot stop", self.what))?;
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().context("cannot wait")? {
                return Ok(status);
            }
            if begun.elapsed() > STOP_TIMEOUT {
                bail!(
                    "{}: did not end within {} s of SIGTERM\n{}",
                    self.what,
                    STOP_TIMEOUT.as_secs(),
                    tail(&self.output()?)
                );
            }
            std::thread::sleep(POLL);
        }
    }

    /// Kills the program (SIGKILL), as a crash would.
    pub(crate) fn kill(mut self) -> Result<()> {
        self.group.signal(Signal::KILL);
        self.child.wait().context("cannot wait")?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.group.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_is_stopped_for_doing_nothing_and_not_for_taking_long() {
        let spin = |seconds: &str| {
            let mut command = Command::new("sh");
            command.args([
                "-c",
                &format!(
                    "end=$(($(date +%s) + {seconds})); while [ $(date +%s) -lt $end ]; do :; done"
                ),
            ]);
            command
        };
        let hangs = |command: &mut Command| {
            let mut child = command.process_group(0).spawn().unwrap();
            let _group = ProcessGroup::of(&child);
            let past = Instant::now().checked_sub(BUILD_CHECK_INTERVAL * 2).unwrap();
            let limit = Duration::from_millis(500);
            let mut progress = Progress { limit, looked: past, time: 0, since: Instant::now() };
            let mut hung = false;
            while !hung && child.try_wait().unwrap().is_none() {
                progress.looked = past;
                hung = progress.check_hang(child.id()).is_some();
                std::thread::sleep(Duration::from_millis(100));
            }
            let _ = child.kill();
            let _ = child.wait();
            hung
        };
        assert!(!hangs(&mut spin("3")), "it works all the time");
        assert!(hangs(Command::new("sleep").arg("60")), "it does nothing");
    }

    #[test]
    fn processor_time_is_counted_by_group() {
        let stat = "77 (a b) c) S 1 42 42 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0";
        assert_eq!((ticks(stat, 42), ticks(stat, 43), ticks("", 42)), (Some(100), None, None));
    }
}
