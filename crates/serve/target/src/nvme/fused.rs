//! Fused Compare and Write: two adjacent commands of a queue, executed atomically (NVMe Base 2.0,
//! 3.4.2; RFD 0019).
//!
//! The state of such a pair is kept with its first command ([`FusedFirst`]). Memory for the data of
//! both is allocated when the first needs it: otherwise a command that holds memory would wait for
//! more. As the second may block all data that its host sends, it is allocated in the class of
//! unsolicited data. When one command ends, so does the other.

use std::rc::Rc;

use block::{Bufs, Credit, MemoryClass, Request};
use nvme::entry::Fuse;
use nvme::{Completion, FusedError, IoCommand, Sqe, Status, Tag};
use rt::memory::PAGE;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use super::HostConnection;
use super::tasks::{Commands, FusedFirst, FusedSecond, Task, Wait};
use crate::nvme_controllers::Event;
use crate::served_volumes::ServedVolume;

/// The previous command of a queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum PreviousCommand {
    /// Not the first of a fused pair.
    #[default]
    Other,
    /// The first of a fused pair.
    First(Tag),
    /// The first of a fused pair, which failed with this status.
    Failed(Status),
}

/// The status of one command after the other has failed.
fn status_of_other_half(other: Status) -> Status {
    if other.is_do_not_retry() { Status::FAILED_FUSED.do_not_retry() } else { Status::FAILED_FUSED }
}

/// Memory for the data of both commands, of `bytes` each, and its class.
pub(super) fn memory_of_both(bytes: usize) -> (usize, MemoryClass) {
    (2 * bytes.next_multiple_of(PAGE), MemoryClass::UnsolicitedData)
}

impl HostConnection {
    /// A command has arrived. Fails an incomplete pair before it; false if the command itself
    /// failed, or was taken as the second of a pair.
    pub(super) fn check_fused_order(&mut self, tag: Tag, sqe: &Sqe) -> bool {
        let before = std::mem::take(&mut self.previous);
        match (sqe.fuse(), before) {
            (Fuse::Second, PreviousCommand::First(first)) => self.on_second(first, tag, sqe),
            (Fuse::Second, PreviousCommand::Failed(status)) => {
                self.complete_failed(tag, status_of_other_half(status));
            }
            (Fuse::Second, PreviousCommand::Other) => {
                let completion =
                    self.controller(|c, qid| c.fail_fused(qid, sqe, FusedError::Missing));
                self.complete(tag, completion, &Bufs::new());
            }
            (_, before) => {
                if let PreviousCommand::First(first) = before {
                    self.fail_fused(first, FusedError::Missing);
                }
                return true;
            }
        }
        false
    }

    /// A first command has failed before it could wait for the second.
    pub(super) fn record_failed_first(&mut self, fuse: Fuse, status: Status) {
        if fuse == Fuse::First {
            self.previous = PreviousCommand::Failed(status);
        }
    }

    /// The transport has rejected a command.
    pub(super) fn on_refused(&mut self, fuse: Fuse, status: Status) {
        match std::mem::take(&mut self.previous) {
            PreviousCommand::First(first) if fuse == Fuse::Second => {
                self.complete_failed(first, status_of_other_half(status));
            }
            PreviousCommand::First(first) => self.fail_fused(first, FusedError::Missing),
            PreviousCommand::Other | PreviousCommand::Failed(_) => {}
        }
        self.record_failed_first(fuse, status);
    }

    /// The second command did not arrive in time: fails the first and frees its memory.
    pub(super) fn on_fused_timeout(&mut self, first: Tag, number: u64) {
        if matches!(self.tasks.get(first), Some(Task::FusedFirst(h)) if h.number == number && h.second.is_none())
        {
            self.fail_fused(first, FusedError::Missing);
        }
    }

    /// Fails a first command that waits for the second.
    fn fail_fused(&mut self, first: Tag, why: FusedError) {
        let Some(Task::FusedFirst(half)) = self.tasks.get(first) else { return };
        let sqe = half.sqe;
        let completion = self.controller(|c, qid| c.fail_fused(qid, &sqe, why));
        self.complete(first, completion, &Bufs::new());
    }

    /// A first command is valid.
    pub(super) fn on_first(
        &mut self,
        tag: Tag,
        sqe: Sqe,
        command: IoCommand,
        served: Rc<ServedVolume>,
    ) {
        self.previous = PreviousCommand::First(tag);
        let (wait, data, spare, second) = (Wait::default(), None, None, None);
        let number = self.tasks.next_wait_number();
        let (inbox, patience) =
            (self.context.inbox.clone(), self.server().limits().receive_timeout);
        let patience = tokio::task::spawn_local(async move {
            sleep(patience).await;
            inbox.push(Event::FusedTimeout { first: tag, number });
        });
        let patience = AbortOnDropHandle::new(patience);
        let half = FusedFirst {
            sqe,
            command,
            served,
            wait,
            data,
            second_memory: spare,
            second,
            number,
            _timeout: patience,
        };
        self.tasks.set(tag, Task::FusedFirst(Box::new(half)));
        self.machine.admit(tag, command.data_out);
    }

    fn on_second(&mut self, first: Tag, tag: Tag, sqe: &Sqe) {
        let Some(queue) = self.queue else { return };
        let checked = self.server().nvme.with_controller(queue.cntlid, |c| c.io(queue.qid, sqe));
        let deleted = || Err(Completion::failed(Status::ABORTED_SQ_DELETED));
        let refused = match checked.unwrap_or_else(deleted) {
            Ok(command) if self.join_fused(first, tag, &command) => {
                return self.machine.admit(tag, command.data_out);
            }
            Ok(_) => {
                self.fail_fused(first, FusedError::Mismatched);
                self.controller(|c, qid| c.fail_fused(qid, sqe, FusedError::Mismatched))
            }
            Err(completion) => completion,
        };
        // It may have ended because of an error in both.
        if self.tasks.get(first).is_some() {
            self.complete_failed(first, status_of_other_half(refused.status));
        }
        self.complete(tag, refused, &Bufs::new());
    }

    /// Whether `command` matches the first command.
    fn join_fused(&mut self, first: Tag, tag: Tag, command: &IoCommand) -> bool {
        let Some(Task::FusedFirst(half)) = self.tasks.get(first) else { return false };
        let Some((at, fua)) = half.command.fused_with(command) else { return false };
        half.second = Some(FusedSecond { tag, at, fua, wants_memory: false, data: None });
        self.tasks.set(tag, Task::FusedSecond { first });
        true
    }

    /// There is memory for the data of both commands, of `bytes` each.
    pub(super) fn on_memory_of_both(&mut self, first: Tag, credit: &Credit, bytes: usize) {
        let Some(Task::FusedFirst(half)) = self.tasks.get(first) else { return };
        half.second_memory = Some(credit.alloc(bytes));
        let waits =
            half.second.as_ref().filter(|second| second.wants_memory).map(|second| second.tag);
        self.machine.grant(first, credit.alloc(bytes));
        if let Some(second) = waits {
            self.grant_second(first, second);
        }
    }

    /// The second command asks for its memory.
    pub(super) fn grant_second(&mut self, first: Tag, tag: Tag) {
        let Some(Task::FusedFirst(half)) = self.tasks.get(first) else { return };
        match half.second_memory.take() {
            Some(memory) => self.machine.grant(tag, memory),
            None => half.second.iter_mut().for_each(|second| second.wants_memory = true),
        }
    }

    /// The data of one command has arrived.
    pub(super) fn on_half(&mut self, first: Tag, data: Bufs, is_first: bool) {
        let Some(Task::FusedFirst(half)) = self.tasks.get(first) else { return };
        match &mut half.second {
            Some(second) if !is_first => second.data = Some(data),
            _ => half.data = Some(data),
        }
        let has_both =
            half.data.is_some() && half.second.as_ref().is_some_and(|s| s.data.is_some());
        if has_both {
            self.compare_and_write(first);
        }
    }

    fn compare_and_write(&mut self, first: Tag) {
        let Some(Task::FusedFirst(half)) = self.tasks.get(first) else { return };
        let (sqe, command, served) = (half.sqe, half.command, Rc::clone(&half.served));
        let compare = half.data.take();
        let second = half.second.as_mut().and_then(|s| Some((s.tag, s.at, s.fua, s.data.take()?)));
        let (Some(compare), Some((second, at, fua, write))) = (compare, second) else { return };
        if self.volume_id_of(command.nsid) != Some(served.id) {
            // The namespace was removed or remapped to another volume before the data arrived.
            return self.complete_failed(first, Status::INVALID_NAMESPACE.do_not_retry());
        }
        let request = Request::CompareAndWrite { at, compare, write, fua };
        let one = self.start(first, &served, request);
        self.set_running(first, sqe, 1, Commands::One(one));
        if let Some(Task::Running(running)) = self.tasks.get(first) {
            running.second = Some(second);
        }
    }

    /// Ends the other command of a pair; `ended` has already been removed.
    pub(super) fn end_other_half(&mut self, tag: Tag, ended: &Task, completion: Completion) {
        let other = match ended {
            Task::FusedFirst(half) => match &half.second {
                Some(second) => second.tag,
                None => {
                    if matches!(self.previous, PreviousCommand::First(first) if first == tag) {
                        self.previous = PreviousCommand::Failed(completion.status);
                    }
                    return;
                }
            },
            Task::Running(running) => match running.second {
                Some(second) => second,
                None => return,
            },
            Task::FusedSecond { first } => *first,
            _ => return,
        };
        self.tasks.remove(other);
        let completion = match completion.status {
            status if status.is_success() => Completion::OK,
            status => Completion::failed(status_of_other_half(status)),
        };
        self.machine.complete(other, completion, &Bufs::new());
    }
}
