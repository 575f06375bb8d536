//! The commands in flight of one connection, by tag.

use std::cell::Cell;
use std::rc::Rc;

use block::Failure;
use nvme::{IoCommand, Sqe, Tag};
use reservation::Table;
use tokio::task::AbortHandle;

use super::Asker;
use super::fused::Half;
use crate::copying::Stopped;
use crate::server::Served;

/// Commands that have arrived and have not been completed.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_tag: Vec<Option<(Tag, Task)>>,
    /// Those that somebody waits for: all but event requests.
    busy: usize,
    /// Numbers what is waited for: a tag may be another command's by the time it comes.
    waits: u64,
}

/// How far a command has come.
#[derive(Debug)]
pub(super) enum Task {
    /// Waits for Connect's data.
    Connect { sqe: Sqe, wait: Wait },
    /// An admin command that waits for its data.
    Consume { sqe: Sqe, wait: Wait },
    /// An admin command that waits for memory to return data in.
    Produce { sqe: Sqe, bytes: u32, wait: Wait },
    /// A message of an authentication that waits for its data, and then is worked on.
    Sending { wait: Wait },
    /// A message of an authentication that is to be fetched waits for memory.
    Fetching { bytes: u32, wait: Wait },
    /// An event request.
    Held,
    /// An Abort command that waits for the end of another.
    Aborting,
    /// An admin command that ends as a flush of all namespaces does, before that begins.
    Flushing { sqe: Sqe },
    /// An admin command about reservations, before it begins.
    Consulting { sqe: Sqe, what: Consultation },
    /// It changes reservations, or looks them up: cannot be aborted. What is not `wanted` any more
    /// is not begun.
    Asking { sqe: Sqe, report: Option<u32>, wanted: Rc<Cell<bool>>, wait: Wait },
    /// A Reservation Report that waits for memory to return data in.
    Reporting { table: Box<Table>, wait: Wait },
    /// The first half of a fused operation that is not all there.
    Half(Box<Half>),
    /// The second half; what becomes of it is the first's.
    Joined { first: Tag },
    /// The last command of its queue, which waits for the others.
    Disconnecting,
    /// An I/O command that waits for memory or data.
    Planned { sqe: Sqe, command: IoCommand, whose: Whose, wait: Wait },
    /// Volumes work on it.
    Running(Running),
    /// The host has its answer; the volumes' is to be awaited and dropped.
    Answered { left: usize },
}

/// What an admin command wants of the reservations of a namespace, or of all.
#[derive(Clone, Copy, Debug)]
pub(super) enum Consultation {
    Persist { nsid: u32, persists: bool },
    TellPersistence { nsid: u32 },
}

/// Which volumes an I/O command was found good for. It goes to these whatever its namespace
/// identifier has come to mean by the time its data is here.
#[derive(Clone, Debug)]
pub(super) enum Whose {
    One(Rc<Served>),
    /// A Flush of all namespaces: those that the host sees when it runs.
    All,
}

/// A command's wait for memory, or for what is calculated; whoever waits on its behalf goes with it.
#[derive(Debug, Default)]
pub(super) struct Wait {
    number: u64,
    task: Option<AbortHandle>,
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// A command that volumes work on.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) sqe: Sqe,
    /// Volumes that have not answered.
    pub(super) left: usize,
    /// The first failure.
    pub(super) failure: Option<Failure>,
    /// Dwords 0 and 1 of the completion.
    pub(super) result: u64,
    /// For aborts: one command, or one of each volume that a Flush of all goes to.
    pub(super) commands: Commands,
    /// Who wants it aborted.
    pub(super) asked_by: Option<Asker>,
    /// It gives way to Preempt and Abort.
    pub(super) is_preempted: bool,
    /// The second half of a fused operation, which ends with it.
    pub(super) second: Option<Tag>,
}

/// Handles to the volumes' commands.
#[derive(Debug)]
pub(super) enum Commands {
    One(volume::Command),
    Many(Vec<volume::Command>),
    Copy(Stopped),
}

impl Commands {
    pub(super) fn abort(&self) {
        match self {
            Self::One(command) => command.abort(),
            Self::Many(commands) => commands.iter().for_each(volume::Command::abort),
            Self::Copy(stopped) => stopped.ask(),
        }
    }
}

impl Task {
    fn is_busy(&self) -> bool {
        !matches!(self, Self::Held | Self::Disconnecting)
    }

    /// The command, if it is one of a namespace that is not answered yet.
    pub(super) fn sqe(&self) -> Option<Sqe> {
        match self {
            Self::Planned { sqe, .. } | Self::Asking { sqe, .. } => Some(*sqe),
            Self::Running(running) => Some(running.sqe),
            Self::Half(half) => Some(half.sqe),
            _ => None,
        }
    }

    fn wait(&mut self) -> Option<&mut Wait> {
        match self {
            Self::Connect { wait, .. }
            | Self::Consume { wait, .. }
            | Self::Produce { wait, .. }
            | Self::Sending { wait }
            | Self::Fetching { wait, .. }
            | Self::Asking { wait, .. }
            | Self::Reporting { wait, .. }
            | Self::Planned { wait, .. } => Some(wait),
            Self::Half(half) => Some(&mut half.wait),
            Self::Held
            | Self::Joined { .. }
            | Self::Disconnecting
            | Self::Aborting
            | Self::Flushing { .. }
            | Self::Consulting { .. }
            | Self::Running(_)
            | Self::Answered { .. } => None,
        }
    }
}

impl Tasks {
    /// Whether nobody waits for an answer.
    pub(super) fn is_idle(&self) -> bool {
        self.busy == 0
    }

    pub(super) fn set(&mut self, tag: Tag, task: Task) {
        let i = tag.index();
        if self.by_tag.len() <= i {
            self.by_tag.resize_with(i + 1, || None);
        }
        let place = &mut self.by_tag[i];
        let was_busy = place.as_ref().is_some_and(|(_, before)| before.is_busy());
        self.busy = self.busy + usize::from(task.is_busy()) - usize::from(was_busy);
        *place = Some((tag, task));
    }

    pub(super) fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.by_tag.get_mut(tag.index())?.as_mut().map(|(_, task)| task)
    }

    pub(super) fn remove(&mut self, tag: Tag) {
        self.take(tag);
    }

    pub(super) fn take(&mut self, tag: Tag) -> Option<Task> {
        let (_, task) = self.by_tag.get_mut(tag.index())?.take()?;
        self.busy -= usize::from(task.is_busy());
        Some(task)
    }

    /// A number that nothing else has.
    pub(super) fn number(&mut self) -> u64 {
        self.waits += 1;
        self.waits
    }

    /// The command begins to wait for memory: the number that what comes has to bear.
    pub(super) fn begin_wait(&mut self, tag: Tag) -> Option<u64> {
        let number = self.number();
        *self.get(tag)?.wait()? = Wait { number, task: None };
        Some(number)
    }

    /// `task` brings what the command waits for; it ends with the wait.
    pub(super) fn waits_by(&mut self, tag: Tag, task: AbortHandle) {
        match self.get(tag).and_then(Task::wait) {
            Some(wait) => wait.task = Some(task),
            None => task.abort(),
        }
    }

    /// Whether this is what the command with this tag waits for.
    pub(super) fn is_waiting(&mut self, tag: Tag, number: u64) -> bool {
        self.get(tag).and_then(Task::wait).is_some_and(|w| w.number == number)
    }

    /// All commands.
    pub(super) fn tags(&self) -> Vec<Tag> {
        self.by_tag.iter().flatten().map(|(tag, _)| *tag).collect()
    }

    /// The commands for namespace `nsid` that wait for data, that volumes work on, or that change
    /// its reservations.
    pub(super) fn io_of(&self, nsid: u32) -> Vec<Tag> {
        let of = |(tag, task): &(Tag, Task)| {
            task.sqe().filter(|sqe| sqe.nsid.get() == nsid).map(|_| *tag)
        };
        self.by_tag.iter().flatten().filter_map(of).collect()
    }

    /// Asks the volumes to abort everything; nobody waits for the answers any more.
    pub(super) fn abort_all(&mut self) {
        for (_, task) in self.by_tag.drain(..).flatten() {
            if let Task::Running(running) = task {
                running.commands.abort();
            }
        }
        self.busy = 0;
    }
}
