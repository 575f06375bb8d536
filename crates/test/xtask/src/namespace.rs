//! Tests with real processes run inside a network and a process namespace of their own: their ports meet nobody else's,
//! garbage goes no farther than loopback, and when the namespace's first process ends, everything in it ends.
//!
//! The tool runs itself again inside (`unshare`) and hears of the outcome through a file. Where namespaces are not
//! permitted the tests run without; the guests then sit behind QEMU's user network.

use crate::house::House;
use crate::{cleanup::Group, house, process};
use anyhow::{Context, Result, bail};
use rustix::io::FdFlags;
use std::os::{fd::AsRawFd, unix::process::CommandExt};
use std::{fs::File, process::Command};

/// Set inside.
const INSIDE: &str = "WINDROSE_NAMESPACE";

/// Whether this process has a network of its own.
pub(crate) fn inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// `unshare` with what this machine permits; nothing if it permits nothing.
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

/// Runs this tool again with `arguments` in namespaces of its own and enters what it reports. False where namespaces are
/// not permitted: the caller runs the same in this process.
pub(crate) fn run_inside(house: &House, arguments: &[&str]) -> Result<bool> {
    let Some(unshare) = unshare() else {
        house
            .display
            .line("  namespaces are not permitted here: tests share this machine's network");
        return Ok(false);
    };
    let report = house.scratch().join("report");
    // By an open file: what builds meanwhile may put another program in its place.
    let program = File::open("/proc/self/exe").context("cannot open this program")?;
    rustix::io::fcntl_setfd(&program, FdFlags::empty()).context("cannot hand this program on")?;
    let tool = format!("/proc/self/fd/{}", program.as_raw_fd());
    // The namespaces end with this process, even if it ends by SIGKILL: `setpriv` becomes `unshare`, which takes
    // its child along.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(unshare)
        .arg("--")
        .arg(tool)
        .args(arguments);
    command.env(INSIDE, "1").env(house::REPORT, &report).env(house::SCRATCH, house.scratch());
    let status = house.display.hidden(|| -> Result<_> {
        let mut child = command.process_group(0).spawn().context("cannot start unshare")?;
        let _group = Group::of(&child);
        child.wait().context("cannot wait")
    })?;
    house.with_ledger(|ledger| ledger.merge(&report))?;
    if !status.success() && house.with_ledger(|ledger| ledger.failed.is_empty()) {
        bail!("the tests in the namespace ended with {status}");
    }
    Ok(true)
}

/// Brings loopback up; a namespace starts without.
pub(crate) fn prepare() -> Result<()> {
    if inside() {
        ip(&["link", "set", "lo", "up"])?;
    }
    Ok(())
}

/// `ip` from iproute2.
pub(crate) fn ip(arguments: &[&str]) -> Result<()> {
    process::must(Command::new("ip").args(arguments))
}
