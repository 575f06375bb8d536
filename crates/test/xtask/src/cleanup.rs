//! Nothing this tool starts or writes outlives it: process groups and scratch directories are registered here and go
//! when their guard is dropped, or when a signal ends the tool.

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

/// How long programs may take to end when a signal ends this one.
const GRACE: Duration = Duration::from_secs(3);

/// Set to keep the scratch directory (logs, disks) for a look afterwards.
const KEEP: &str = "WINDROSE_KEEP";

fn locked<T>(of: &'static Mutex<T>) -> MutexGuard<'static, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on SIGINT, SIGTERM and SIGHUP end everything that is registered and then this process.
pub(crate) fn install() -> Result<()> {
    let wanted =
        [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
    let mut signals =
        signal_hook::iterator::Signals::new(wanted).context("cannot watch for signals")?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            everything();
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// Asks every group to end, waits a little, insists; then removes what was written.
fn everything() {
    let groups: Vec<i32> = locked(&GROUPS).iter().copied().collect();
    for group in &groups {
        signal_group(*group, Signal::TERM);
    }
    let begun = Instant::now();
    while begun.elapsed() < GRACE && groups.iter().any(|group| is_there(*group)) {
        std::thread::sleep(Duration::from_millis(20));
    }
    for group in groups {
        signal_group(group, Signal::KILL);
    }
    let directories = std::mem::take(&mut *locked(&DIRECTORIES));
    for directory in directories {
        remove(&directory);
    }
}

fn is_there(group: i32) -> bool {
    Pid::from_raw(group).is_some_and(|group| test_kill_process_group(group).is_ok())
}

/// Sends `signal` to every process of `group`; a group that has gone is fine.
pub(crate) fn signal_group(group: i32, signal: Signal) {
    if let Some(group) = Pid::from_raw(group) {
        let _ = kill_process_group(group, signal);
    }
}

fn remove(directory: &Path) {
    if std::env::var_os(KEEP).is_some() {
        eprintln!("kept: {}", directory.display());
        return;
    }
    let _ = std::fs::remove_dir_all(directory);
}

/// A process group that is killed when the guard goes.
pub(crate) struct Group(i32);

impl Group {
    pub(crate) fn of(child: &std::process::Child) -> Self {
        let id = i32::try_from(child.id()).unwrap_or(0);
        locked(&GROUPS).insert(id);
        Self(id)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_group(self.0, signal);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        signal_group(self.0, Signal::KILL);
        locked(&GROUPS).remove(&self.0);
    }
}

/// A directory that is removed when the guard goes.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// A new directory in `parent`.
    pub(crate) fn new(parent: &Path) -> Result<Self> {
        let mut number = std::process::id();
        loop {
            let directory = parent.join(format!("windrose-{number}"));
            match std::fs::create_dir(&directory) {
                Ok(()) => {
                    locked(&DIRECTORIES).insert(directory.clone());
                    return Ok(Self(directory));
                }
                // Process ids of namespaces are small and meet each other.
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

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.0);
        locked(&DIRECTORIES).remove(&self.0);
    }
}
