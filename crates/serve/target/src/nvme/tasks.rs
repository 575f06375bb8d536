//! The commands in flight of one connection, by tag.

use std::cell::Cell;
use std::rc::Rc;

use block::{Bufs, BufsMut, Lba, RequestError};
use nvme::{IoCommand, Sqe, Tag};
use reservation::Table;
use tokio::task::AbortHandle;
use tokio_util::task::AbortOnDropHandle;

use crate::nvme_controllers::AbortRequest;
use crate::served_volumes::ServedVolume;
use crate::third_party_copy::CancelToken;

/// Commands that have arrived and have not been completed.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_tag: Vec<Option<(Tag, Task)>>,
    /// Commands that will end by themselves: all but event requests.
    busy_count: usize,
    /// Numbers waits: a tag may belong to another command when the awaited event arrives.
    wait_count: u64,
}

/// The state of a command.
#[derive(Debug)]
pub(super) enum Task {
    /// Waits for Connect's data.
    Connect { sqe: Sqe, wait: Wait },
    /// An admin command that waits for its data.
    Consume { sqe: Sqe, wait: Wait },
    /// An admin command that waits for memory to return data in.
    Produce { sqe: Sqe, bytes: u32, wait: Wait },
    /// An authentication message that waits for its data, and then is processed.
    Sending { wait: Wait },
    /// An authentication message to be received by the host waits for memory.
    Fetching { bytes: u32, wait: Wait },
    /// An event request.
    Held,
    /// An Abort command that waits for the answer of another queue.
    Aborting,
    /// An admin command that ends as a flush of all namespaces does, before that begins.
    Flushing { sqe: Sqe },
    /// An admin command about reservations, before it begins.
    PersistencePending { sqe: Sqe, command: PersistenceCommand },
    /// It changes or reads reservations: cannot be aborted. If `is_wanted` is cleared, a change
    /// that has not begun never does.
    AccessingReservations { sqe: Sqe, report: Option<u32>, is_wanted: Rc<Cell<bool>>, wait: Wait },
    /// A Reservation Report that waits for memory to return data in.
    Reporting { table: Box<Table>, wait: Wait },
    /// The first command of an incomplete fused pair.
    FusedFirst(Box<FusedFirst>),
    /// The second command; its state is kept with the first.
    FusedSecond { first: Tag },
    /// The last command of its queue, which waits for the others.
    Disconnecting,
    /// An I/O command that waits for memory or data.
    Planned { sqe: Sqe, command: IoCommand, volumes: CommandVolumes, wait: Wait },
    /// Volumes work on it.
    Running(Running),
    /// The host has its answer; those of the volumes are awaited and discarded.
    Answered { pending_volumes: usize },
}

/// What an admin command does with the reservations of a namespace, or of all.
#[derive(Clone, Copy, Debug)]
pub(super) enum PersistenceCommand {
    Set { nsid: u32, persist: bool },
    Get { nsid: u32 },
}

/// The volumes for which an I/O command was checked. It goes to these whatever its namespace
/// identifier means by the time its data has arrived.
#[derive(Clone, Debug)]
pub(super) enum CommandVolumes {
    One(Rc<ServedVolume>),
    /// A Flush of all namespaces: those that the host sees when it is executed.
    All,
}

/// A command's wait for memory, or for a computation; its waiting task ends with it.
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

/// The first command of a fused pair, and the state of the second.
#[derive(Debug)]
pub(super) struct FusedFirst {
    pub(super) sqe: Sqe,
    pub(super) command: IoCommand,
    pub(super) served: Rc<ServedVolume>,
    pub(super) wait: Wait,
    pub(super) data: Option<Bufs>,
    /// Memory for the data of the second.
    pub(super) second_memory: Option<BufsMut>,
    pub(super) second: Option<FusedSecond>,
    /// Identifies the timeout for the arrival of the second.
    pub(super) number: u64,
    pub(super) _timeout: AbortOnDropHandle<()>,
}

/// The second command of a fused pair.
#[derive(Debug)]
pub(super) struct FusedSecond {
    pub(super) tag: Tag,
    /// Start of both.
    pub(super) at: Lba,
    pub(super) fua: bool,
    /// It may receive its data as soon as there is memory.
    pub(super) wants_memory: bool,
    pub(super) data: Option<Bufs>,
}

/// A command that volumes execute.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) sqe: Sqe,
    /// Volumes that have not answered.
    pub(super) pending_volumes: usize,
    /// The first failure.
    pub(super) failure: Option<RequestError>,
    /// Dwords 0 and 1 of the completion.
    pub(super) result: u64,
    /// For aborts: one command, or one per volume for a Flush of all.
    pub(super) commands: Commands,
    /// The Abort command for it.
    pub(super) abort_request: Option<AbortRequest>,
    /// Preempt and Abort has ended it.
    pub(super) is_preempted: bool,
    /// The second command of a fused pair, which ends with it.
    pub(super) second: Option<Tag>,
}

/// Handles to the volumes' commands.
#[derive(Debug)]
pub(super) enum Commands {
    One(volume::Command),
    Many(Vec<volume::Command>),
    Copy(CancelToken),
}

impl Commands {
    pub(super) fn abort(&self) {
        match self {
            Self::One(command) => command.abort(),
            Self::Many(commands) => commands.iter().for_each(volume::Command::abort),
            Self::Copy(stopped) => stopped.cancel(),
        }
    }
}

impl Task {
    fn is_busy(&self) -> bool {
        !matches!(self, Self::Held | Self::Disconnecting)
    }

    /// The command, if it has a namespace and is not answered yet.
    pub(super) fn sqe(&self) -> Option<Sqe> {
        match self {
            Self::Planned { sqe, .. } | Self::AccessingReservations { sqe, .. } => Some(*sqe),
            Self::Running(running) => Some(running.sqe),
            Self::FusedFirst(half) => Some(half.sqe),
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
            | Self::AccessingReservations { wait, .. }
            | Self::Reporting { wait, .. }
            | Self::Planned { wait, .. } => Some(wait),
            Self::FusedFirst(half) => Some(&mut half.wait),
            Self::Held
            | Self::FusedSecond { .. }
            | Self::Disconnecting
            | Self::Aborting
            | Self::Flushing { .. }
            | Self::PersistencePending { .. }
            | Self::Running(_)
            | Self::Answered { .. } => None,
        }
    }
}

impl Tasks {
    /// Whether no command waits for an answer.
    pub(super) fn is_idle(&self) -> bool {
        self.busy_count == 0
    }

    pub(super) fn set(&mut self, tag: Tag, task: Task) {
        let i = tag.index();
        if self.by_tag.len() <= i {
            self.by_tag.resize_with(i + 1, || None);
        }
        let slot = &mut self.by_tag[i];
        let was_busy = slot.as_ref().is_some_and(|(_, before)| before.is_busy());
        self.busy_count = self.busy_count + usize::from(task.is_busy()) - usize::from(was_busy);
        *slot = Some((tag, task));
    }

    pub(super) fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.by_tag.get_mut(tag.index())?.as_mut().map(|(_, task)| task)
    }

    pub(super) fn remove(&mut self, tag: Tag) {
        self.take(tag);
    }

    pub(super) fn take(&mut self, tag: Tag) -> Option<Task> {
        let (_, task) = self.by_tag.get_mut(tag.index())?.take()?;
        self.busy_count -= usize::from(task.is_busy());
        Some(task)
    }

    /// A unique number.
    pub(super) fn next_wait_number(&mut self) -> u64 {
        self.wait_count += 1;
        self.wait_count
    }

    /// Starts the command's wait for memory: returns the number of the wait.
    pub(super) fn begin_wait(&mut self, tag: Tag) -> Option<u64> {
        let number = self.next_wait_number();
        *self.get(tag)?.wait()? = Wait { number, task: None };
        Some(number)
    }

    /// `task` delivers what the command waits for; it ends with the wait.
    pub(super) fn set_wait_task(&mut self, tag: Tag, task: AbortHandle) {
        match self.get(tag).and_then(Task::wait) {
            Some(wait) => wait.task = Some(task),
            None => task.abort(),
        }
    }

    /// Whether the command with this tag is in this wait.
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

    /// Asks the volumes to abort everything; the answers are ignored.
    pub(super) fn abort_all(&mut self) {
        for (_, task) in self.by_tag.drain(..).flatten() {
            if let Task::Running(running) = task {
                running.commands.abort();
            }
        }
        self.busy_count = 0;
    }
}
