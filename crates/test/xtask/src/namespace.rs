//! Tests with real processes run in their own network and process namespaces: their ports cannot
//! collide with others, garbage packets stay on loopback, and all processes end with the namespace.
//!
//! The tool runs itself again inside (`unshare`) and reads the outcome from a file. Where
//! namespaces are not permitted, the tests run without; guests then use QEMU's user network.

use crate::run_context::RunContext;
use crate::{cleanup::ProcessGroup, display::Display, process, run_context};
use anyhow::{Context, Result, bail};
use rustix::io::FdFlags;
use std::os::{fd::AsRawFd, unix::process::CommandExt};
use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

/// Set inside the namespace.
const NAMESPACE_ENV: &str = "WINDROSE_NAMESPACE";

/// Whether this process has its own network namespace.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(NAMESPACE_ENV).is_some()
}

/// The `unshare` command with the namespaces this machine permits; `None` if it permits none.
fn unshare() -> Option<Vec<&'static str>> {
    let base = ["--net", "--pid", "--fork", "--kill-child=SIGTERM", "--mount-proc"];
    let as_root = rustix::process::geteuid().is_root();
    let candidates: [&[&'static str]; 2] = [&[], &["--user", "--map-root-user"]];
    let wanted = if as_root { &candidates[..] } else { &candidates[1..] };
    wanted.iter().find_map(|user| {
        let arguments: Vec<&str> = user.iter().copied().chain(base).collect();
        let tried = Command::new("unshare")
            .args(&arguments)
            .args(["ip", "link", "set", "lo", "up"])
            .output();
        tried.is_ok_and(|out| out.status.success()).then_some(arguments)
    })
}

/// Runs this tool again in namespaces of its own, as often as wanted and several at a time.
pub(crate) struct Launcher {
    unshare: Vec<&'static str>,
    /// An open file: a build may replace the program at its path meanwhile.
    program: File,
    scratch: PathBuf,
}

impl Launcher {
    /// `None` where namespaces are not permitted.
    pub(crate) fn new(context: &RunContext) -> Result<Option<Self>> {
        let Some(unshare) = unshare() else {
            context
                .display
                .line("  namespaces are not permitted here: tests share this machine's network");
            return Ok(None);
        };
        let program = File::open("/proc/self/exe").context("cannot open this program")?;
        rustix::io::fcntl_setfd(&program, FdFlags::empty())
            .context("cannot hand this program on")?;
        Ok(Some(Self { unshare, program, scratch: context.scratch().to_owned() }))
    }

    /// The command that runs this tool with `arguments`; it reports its checks to `report`.
    fn command<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S], report: &Path) -> Command {
        // The namespaces end with this process, even after SIGKILL: `setpriv` becomes `unshare`,
        // which kills its child with it.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare"]).args(&self.unshare).arg("--");
        command.arg(format!("/proc/self/fd/{}", self.program.as_raw_fd())).args(arguments);
        command
            .env(NAMESPACE_ENV, "1")
            .env(run_context::REPORT_ENV, report)
            .env(run_context::SCRATCH_ENV, &self.scratch)
            .process_group(0);
        command
    }

    /// Runs it to its end. Its lines are printed with `label` in front.
    pub(crate) fn run_labelled<S: AsRef<std::ffi::OsStr>>(
        &self,
        display: &Display,
        label: &str,
        arguments: &[S],
        report: &Path,
    ) -> Result<ExitStatus> {
        let mut command = self.command(arguments, report);
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start unshare")?;
        let _group = ProcessGroup::of(&child);
        let output = child.stdout.take().context("no standard output")?;
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("cannot read what the tests print")?;
            display.line(&format!("{label:<10} | {}", String::from_utf8_lossy(&line)));
        }
        child.wait().context("cannot wait")
    }

    /// Runs it to its end; it prints by itself.
    fn run(&self, display: &Display, arguments: &[&str], report: &Path) -> Result<ExitStatus> {
        display.suspend(|| {
            let mut child =
                self.command(arguments, report).spawn().context("cannot start unshare")?;
            let _group = ProcessGroup::of(&child);
            child.wait().context("cannot wait")
        })
    }
}

/// Runs this tool again with `arguments` in its own namespaces and records the results. False where
/// namespaces are not permitted: the caller then runs the same in this process.
pub(crate) fn run_inside(context: &RunContext, arguments: &[&str]) -> Result<bool> {
    let Some(launcher) = Launcher::new(context)? else { return Ok(false) };
    let report = context.scratch().join("report");
    let status = launcher.run(&context.display, arguments, &report)?;
    merge_report(context, &report, status)?;
    Ok(true)
}

/// Records what a run in a namespace has reported.
pub(crate) fn merge_report(context: &RunContext, report: &Path, status: ExitStatus) -> Result<()> {
    let failed = || context.with_report(|ledger| ledger.failed.len());
    let before = failed();
    context.with_report(|ledger| ledger.merge(report))?;
    if !status.success() && failed() == before {
        bail!("the tests in the namespace ended with {status}");
    }
    Ok(())
}

/// Brings up loopback; a new namespace starts with it down.
pub(crate) fn prepare() -> Result<()> {
    if is_inside() {
        ip(&["link", "set", "lo", "up"])?;
    }
    Ok(())
}

/// `ip` from iproute2.
pub(crate) fn ip(arguments: &[&str]) -> Result<()> {
    process::run_checked(Command::new("ip").args(arguments))
}
