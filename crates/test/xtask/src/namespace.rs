//! Tests with real processes run in their own network and process namespaces: their ports cannot
//! collide with others, garbage packets stay on loopback, and all processes end with the namespace.
//!
//! The tool runs itself again inside (`unshare`) and reads the outcome from a file. Where
//! namespaces are not permitted, the tests run without; guests then use QEMU's user network.

use crate::run_context::RunContext;
use crate::{cleanup::ProcessGroup, process, run_context};
use anyhow::{Context, Result, bail};
use rustix::io::FdFlags;
use std::os::{fd::AsRawFd, unix::process::CommandExt};
use std::{fs::File, process::Command};

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

/// Runs this tool again with `arguments` in its own namespaces and records the results. False where
/// namespaces are not permitted: the caller then runs the same in this process.
pub(crate) fn run_inside(context: &RunContext, arguments: &[&str]) -> Result<bool> {
    let Some(unshare) = unshare() else {
        context
            .display
            .line("  namespaces are not permitted here: tests share this machine's network");
        return Ok(false);
    };
    let report = context.scratch().join("report");
    // By an open file: a build may replace the program at its path meanwhile.
    let program = File::open("/proc/self/exe").context("cannot open this program")?;
    rustix::io::fcntl_setfd(&program, FdFlags::empty()).context("cannot hand this program on")?;
    let tool = format!("/proc/self/fd/{}", program.as_raw_fd());
    // The namespaces end with this process, even after SIGKILL: `setpriv` becomes `unshare`, which
    // kills its child with it.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(unshare)
        .arg("--")
        .arg(tool)
        .args(arguments);
    command
        .env(NAMESPACE_ENV, "1")
        .env(run_context::REPORT_ENV, &report)
        .env(run_context::SCRATCH_ENV, context.scratch());
    let status = context.display.suspend(|| -> Result<_> {
        let mut child = command.process_group(0).spawn().context("cannot start unshare")?;
        let _group = ProcessGroup::of(&child);
        child.wait().context("cannot wait")
    })?;
    context.with_report(|ledger| ledger.merge(&report))?;
    if !status.success() && context.with_report(|ledger| ledger.failed.is_empty()) {
        bail!("the tests in the namespace ended with {status}");
    }
    Ok(true)
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
