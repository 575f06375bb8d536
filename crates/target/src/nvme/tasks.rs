//! The commands in flight of one connection, by tag.

use block::Failure;
use nvme::{IoCommand, Sqe, Tag};

use super::Asker;

/// Commands that have arrived and have not been completed.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_tag: Vec<Option<Task>>,
    /// Those that somebody waits for: all but event requests.
    busy: usize,
    /// Numbers the waits for memory: a tag may be another command's by the time it comes.
    waits: u64,
}

/// How far a command has come.
#[derive(Debug)]
pub(super) enum Task {
    /// Waits for Connect's data.
    Connect { sqe: Sqe, wait: u64 },
    /// An admin command that waits for its data.
    Consume { sqe: Sqe, wait: u64 },
    /// An admin command that waits for memory to return data in.
    Produce { sqe: Sqe, bytes: u32, wait: u64 },
    /// An event request.
    Held,
    /// An Abort command that waits for the end of another.
    Aborting,
    /// An I/O command that waits for memory or data.
    Planned { sqe: Sqe, command: IoCommand, wait: u64 },
    /// Volumes work on it.
    Running(Running),
    /// The host has its answer; the volumes' is to be awaited and dropped.
    Answered { left: usize },
}

/// A command that volumes work on.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) sqe: Sqe,
    /// Volumes that have not answered.
    pub(super) left: usize,
    /// The first failure.
    pub(super) failure: Option<Failure>,
    /// For aborts: one command, or one of each volume that a Flush of all goes to.
    pub(super) commands: Commands,
    /// Who wants it aborted.
    pub(super) asked_by: Option<Asker>,
}

/// Handles to the volumes' commands.
#[derive(Debug)]
pub(super) enum Commands {
    One(volume::Command),
    Many(Vec<volume::Command>),
}

impl Commands {
    pub(super) fn abort(&self) {
        match self {
            Self::One(command) => command.abort(),
            Self::Many(commands) => commands.iter().for_each(volume::Command::abort),
        }
    }
}

impl Task {
    fn is_busy(&self) -> bool {
        !matches!(self, Self::Held)
    }

    fn wait(&mut self) -> Option<&mut u64> {
        match self {
            Self::Connect { wait, .. }
            | Self::Consume { wait, .. }
            | Self::Produce { wait, .. }
            | Self::Planned { wait, .. } => Some(wait),
            Self::Held | Self::Aborting | Self::Running(_) | Self::Answered { .. } => None,
        }
    }
}

impl Tasks {
    /// Whether nobody waits for an answer.
    pub(super) fn is_idle(&self) -> bool {
        self.busy == 0
    }

    pub(super) fn set(&mut self, tag: Tag, task: Task) {
        self.remove(tag);
        let i = tag.index();
        if self.by_tag.len() <= i {
            self.by_tag.resize_with(i + 1, || None);
        }
        self.busy += usize::from(task.is_busy());
        self.by_tag[i] = Some(task);
    }

    pub(super) fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.by_tag.get_mut(tag.index())?.as_mut()
    }

    pub(super) fn remove(&mut self, tag: Tag) {
        self.take(tag);
    }

    pub(super) fn take(&mut self, tag: Tag) -> Option<Task> {
        let task = self.by_tag.get_mut(tag.index())?.take();
        self.busy -= usize::from(task.as_ref().is_some_and(Task::is_busy));
        task
    }

    /// The command begins to wait for memory: the number that what comes has to bear.
    pub(super) fn begin_wait(&mut self, tag: Tag) -> Option<u64> {
        self.waits += 1;
        let number = self.waits;
        *self.get(tag)?.wait()? = number;
        Some(number)
    }

    /// Whether this is what the command with this tag waits for.
    pub(super) fn is_waiting(&mut self, tag: Tag, number: u64) -> bool {
        self.get(tag).and_then(Task::wait).is_some_and(|w| *w == number)
    }

    /// Asks the volumes to abort everything; nobody waits for the answers any more.
    pub(super) fn abort_all(&mut self) {
        for task in self.by_tag.drain(..).flatten() {
            if let Task::Running(running) = task {
                running.commands.abort();
            }
        }
        self.busy = 0;
    }
}
