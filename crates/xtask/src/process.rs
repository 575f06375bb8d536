//! Other programs: run to their end under a time limit, or kept running behind a guard. Every one gets a process group of
//! its own, so that it ends with all its children.

use crate::{cleanup::Group, display::Display};
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

/// How often a running program is looked at.
const POLL: Duration = Duration::from_millis(20);
/// How much of a program's output an error message carries.
const TAIL_LINES: usize = 60;
/// How long a daemon may take to end after SIGTERM: a node waits for initiators that are gone, and for its member of the store.
const GRACE: Duration = Duration::from_secs(25);

static SERIAL: AtomicU32 = AtomicU32::new(0);

/// A program that has ended.
pub(crate) struct Ended {
    pub(crate) what: String,
    pub(crate) status: ExitStatus,
    /// Standard output and error together.
    pub(crate) output: String,
}

impl Ended {
    /// The output of a program that succeeded; the end of it as an error otherwise.
    pub(crate) fn ok(self) -> Result<String> {
        if !self.status.success() {
            bail!("{}: {}\n{}", self.what, self.status, tail(&self.output));
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

fn start(logs: &Path, what: &str, command: &mut Command) -> Result<(Child, Group, PathBuf)> {
    let (file, log) = log_file(logs, what)?;
    let child = command
        .stdin(Stdio::null())
        .stdout(file.try_clone().context("cannot share the log")?)
        .stderr(file)
        .process_group(0)
        .spawn()
        .with_context(|| format!("{what}: cannot start {}", command.get_program().display()))?;
    let group = Group::of(&child);
    Ok((child, group, log))
}

/// Runs `command` to its end and returns its output; ends it after `limit`.
pub(crate) fn run(
    display: &Display,
    logs: &Path,
    what: &str,
    command: &mut Command,
    limit: Duration,
) -> Result<Ended> {
    let (mut child, group, log) = start(logs, what, command)?;
    let begun = Instant::now();
    let mut shown = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("{what}: cannot wait"))? {
            break status;
        }
        if begun.elapsed() > limit {
            drop(group);
            let _ = child.wait();
            let output = read_lossy(&log)?;
            bail!("{what}: not done after {} s, stopped\n{}", limit.as_secs(), tail(&output));
        }
        if shown.elapsed() > Duration::from_millis(200) {
            shown = Instant::now();
            display.detail(&last_line(&log));
        }
        std::thread::sleep(POLL);
    };
    drop(group);
    let output = read_lossy(&log)?;
    Ok(Ended { what: what.to_owned(), status, output })
}

/// Runs a short command that has to succeed.
pub(crate) fn must(command: &mut Command) -> Result<()> {
    let out = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !out.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}

/// The content of a file that may hold anything.
pub(crate) fn read_lossy(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The last line of a growing file, without control characters.
fn last_line(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(512)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).collect()
}

/// A program that runs until its guard goes.
pub(crate) struct Daemon {
    what: String,
    child: Child,
    group: Group,
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

    /// What it has printed so far.
    pub(crate) fn output(&self) -> Result<String> {
        read_lossy(&self.log)
    }

    /// Fails when the program has ended by itself.
    pub(crate) fn alive(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => bail!("{} has ended: {status}\n{}", self.what, tail(&self.output()?)),
        }
    }

    /// How the program has ended, if it has.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot look after a program")
    }

    /// Waits until the program has ended by itself; fails when `limit` passes.
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

    /// Waits until `ready` says so; fails when the program ends first or `limit` passes.
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

    /// Asks the program to end (SIGTERM) and returns how it ended.
    pub(crate) fn stop(mut self) -> Result<ExitStatus> {
        let main = Pid::from_child(&self.child);
        kill_process(main, Signal::TERM).with_context(|| format!("{}: cannot stop", self.what))?;
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().context("cannot wait")? {
                return Ok(status);
            }
            if begun.elapsed() > GRACE {
                bail!(
                    "{}: did not end within {} s of SIGTERM\n{}",
                    self.what,
                    GRACE.as_secs(),
                    tail(&self.output()?)
                );
            }
            std::thread::sleep(POLL);
        }
    }

    /// Ends the program at once (SIGKILL), as a crash would.
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
