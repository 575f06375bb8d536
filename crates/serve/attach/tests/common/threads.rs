//! Which threads count as such that serve disks.
#![allow(clippy::unwrap_used, dead_code)]

use std::path::{Path, PathBuf};

use testkit::skipped;

/// Whether a thread is marked (`PF_MEMALLOC_NOIO` of `linux/sched.h`, which PR_SET_IO_FLUSHER
/// sets), by its directory in `/proc`.
pub(crate) fn serves_disks(thread: &Path) -> bool {
    const NO_IO: u64 = 0x0008_0000;
    let stat = std::fs::read_to_string(thread.join("stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').nth(6));
    fields.flatten().and_then(|flags| flags.parse::<u64>().ok()).is_some_and(|f| f & NO_IO != 0)
}

/// The thread that asks.
pub(crate) fn this() -> PathBuf {
    "/proc/thread-self".into()
}

/// Whether a thread may be marked here.
pub(crate) fn may_be_marked() -> bool {
    const SYS_RESOURCE: u32 = 24;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let able = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let may = u64::from_str_radix(able.trim(), 16).unwrap() >> SYS_RESOURCE & 1 != 0;
    if !may {
        skipped("no thread may be marked as one that serves disks: it takes CAP_SYS_RESOURCE");
    }
    may
}

/// Threads of this process that wait for a device.
pub(crate) fn waiting_for(device: &str) -> Vec<PathBuf> {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|t| t.path());
    let waits = |thread: &PathBuf| {
        let call = std::fs::read_to_string(thread.join("syscall")).unwrap_or_default();
        let first = call.split(' ').nth(1).and_then(|arg| arg.strip_prefix("0x"));
        let file = first.and_then(|arg| u32::from_str_radix(arg, 16).ok());
        let file = file.and_then(|n| std::fs::read_link(format!("/proc/self/fd/{n}")).ok());
        file.is_some_and(|file| file == Path::new(device))
    };
    threads.filter(waits).collect()
}
