//! Process groups and scratch directories of this tool are registered here. They are removed when
//! their guard is dropped or when a signal ends the tool.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

static GROUPS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
static DIRECTORIES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// How long registered programs may take to end after a signal to this tool.
const TERM_TIMEOUT: Duration = Duration::from_secs(3);

/// Set to keep the scratch directory (logs, disks) for inspection.
const KEEP_ENV: &str = "WINDROSE_KEEP";

fn lock<T>(of: &'static Mutex<T>) -> MutexGuard<'static, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes SIGINT, SIGTERM and SIGHUP end everything registered, then this process.
pub(crate) fn install() -> Result<()> {
    let wanted =
        [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
    let mut signals =
        signal_hook::iterator::Signals::new(wanted).context("cannot watch for signals")?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            end_everything();
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// Sends SIGTERM to every group, waits briefly, sends SIGKILL; then removes the scratch
/// directories.
fn end_everything() {
    let groups: Vec<i32> = lock(&GROUPS).iter().copied().collect();
    for group in &groups {
        signal_group(*group, Signal::TERM);
    }
    let begun = Instant::now();
    while begun.elapsed() < TERM_TIMEOUT && groups.iter().any(|group| group_exists(*group)) {
        std::thread::sleep(Duration::from_millis(20));
    }
    for group in groups {
        signal_group(group, Signal::KILL);
    }
    let directories = std::mem::take(&mut *lock(&DIRECTORIES));
    for directory in directories {
        remove(&directory);
    }
}

fn group_exists(group: i32) -> bool {
    Pid::from_raw(group).is_some_and(|group| test_kill_process_group(group).is_ok())
}

/// Sends `signal` to every process of `group`. Succeeds if the group no longer exists.
pub(crate) fn signal_group(group: i32, signal: Signal) {
    if let Some(group) = Pid::from_raw(group) {
        let _ = kill_process_group(group, signal);
    }
}

fn remove(directory: &Path) {
    if std::env::var_os(KEEP_ENV).is_some() {
        eprintln!("kept: {}", directory.display());
        return;
    }
    let _ = std::fs::remove_dir_all(directory);
}

/// A process group that is killed when this guard is dropped.
pub(crate) struct ProcessGroup(i32);

impl ProcessGroup {
    pub(crate) fn of(child: &std::process::Child) -> Self {
        let id = i32::try_from(child.id()).unwrap_or(0);
        lock(&GROUPS).insert(id);
        Self(id)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_group(self.0, signal);
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        signal_group(self.0, Signal::KILL);
        lock(&GROUPS).remove(&self.0);
    }
}

/// A directory that is removed when this guard is dropped.
pub(crate) struct ScratchDir(PathBuf);

impl ScratchDir {
    /// Creates a new directory in `parent`.
    pub(crate) fn new(parent: &Path) -> Result<Self> {
        let mut number = std::process::id();
        loop {
            let directory = parent.join(format!("windrose-{number}"));
            match std::fs::create_dir(&directory) {
                Ok(()) => {
                    lock(&DIRECTORIES).insert(directory.clone());
                    return Ok(Self(directory));
                }
                // Process ids in namespaces are small, so two runs can have the same.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot create {}", directory.display()));
                }
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        remove(&self.0);
        lock(&DIRECTORIES).remove(&self.0);
    }
}
