//! Fused Compare and Write: two commands next to each other on a queue, carried out as one
//! (NVMe Base 2.0, 3.4.2; RFD 0019).
//!
//! What has come of such a pair is kept with its first half ([`Half`]). Memory for the data of both
//! is got when the first half needs it: a half that holds some would else wait for more; and as the
//! second may stand in front of all that its host sends, it is got as such data's. However one half
//! ends, it takes the other along.

use std::rc::Rc;

use block::{Bufs, BufsMut, Class, Credit, Lba, Request};
use nvme::entry::Fuse;
use nvme::{Completion, IoCommand, Sqe, Status, Tag, Unfused};
use rt::memory::PAGE;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use super::tasks::{Commands, Task, Wait};
use super::{Event, Host};
use crate::server::Served;

/// What the command was that came last on a queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Before {
    /// No first half.
    #[default]
    Other,
    /// A first half.
    First(Tag),
    /// A first half that has failed so.
    Failed(Status),
}

/// A first half, and what has come of the second.
#[derive(Debug)]
pub(super) struct Half {
    pub(super) sqe: Sqe,
    command: IoCommand,
    served: Rc<Served>,
    pub(super) wait: Wait,
    data: Option<Bufs>,
    /// Memory for the data of the second.
    spare: Option<BufsMut>,
    second: Option<Second>,
    /// Tells when the second has not come for too long.
    number: u64,
    _patience: AbortOnDropHandle<()>,
}

/// The second half.
#[derive(Debug)]
struct Second {
    tag: Tag,
    /// Where both begin.
    at: Lba,
    fua: bool,
    /// Its data may come as soon as there is memory.
    waits: bool,
    data: Option<Bufs>,
}

/// How a half ends because the other one has failed.
fn along(other: Status) -> Status {
    if other.is_final() { Status::FAILED_FUSED.do_not_retry() } else { Status::FAILED_FUSED }
}

/// Memory for the data of both halves, of `bytes` each, and for which use it is.
pub(super) fn of_both(bytes: usize) -> (usize, Class) {
    (2 * bytes.next_multiple_of(PAGE), Class::Arriving)
}

impl Host {
    /// A command has arrived. Ends what it has no part in; false if it is ended itself, or has been
    /// taken as the second half.
    pub(super) fn begins(&mut self, tag: Tag, sqe: &Sqe) -> bool {
        let before = std::mem::take(&mut self.before);
        match (sqe.fuse(), before) {
            (Fuse::Second, Before::First(first)) => self.on_second(first, tag, sqe),
            (Fuse::Second, Before::Failed(status)) => self.complete_failed(tag, along(status)),
            (Fuse::Second, Before::Other) => {
                let completion = self.controller(|c, qid| c.unfused(qid, sqe, Unfused::Missing));
                self.complete(tag, completion, &Bufs::new());
            }
            (_, before) => {
                if let Before::First(first) = before {
                    self.unfused(first, Unfused::Missing);
                }
                return true;
            }
        }
        false
    }

    /// A command that came next has failed before it could wait for another one.
    pub(super) fn has_failed(&mut self, fuse: Fuse, status: Status) {
        if fuse == Fuse::First {
            self.before = Before::Failed(status);
        }
    }

    /// A command has come that the transport has refused.
    pub(super) fn on_refused(&mut self, fuse: Fuse, status: Status) {
        match std::mem::take(&mut self.before) {
            Before::First(first) if fuse == Fuse::Second => {
                self.complete_failed(first, along(status));
            }
            Before::First(first) => self.unfused(first, Unfused::Missing),
            Before::Other | Before::Failed(_) => {}
        }
        self.has_failed(fuse, status);
    }

    /// The host has sent a first half, and nothing after it: what that holds is for others.
    pub(super) fn on_alone(&mut self, first: Tag, number: u64) {
        if matches!(self.tasks.get(first), Some(Task::Half(h)) if h.number == number && h.second.is_none())
        {
            self.unfused(first, Unfused::Missing);
        }
    }

    /// Ends a first half that is waiting for the second.
    fn unfused(&mut self, first: Tag, why: Unfused) {
        let Some(Task::Half(half)) = self.tasks.get(first) else { return };
        let sqe = half.sqe;
        let completion = self.controller(|c, qid| c.unfused(qid, &sqe, why));
        self.complete(first, completion, &Bufs::new());
    }

    /// A first half was found good.
    pub(super) fn on_first(&mut self, tag: Tag, sqe: Sqe, command: IoCommand, served: Rc<Served>) {
        self.before = Before::First(tag);
        let (wait, data, spare, second) = (Wait::default(), None, None, None);
        let number = self.tasks.number();
        let (inbox, patience) = (self.place.inbox.clone(), self.server().limits().receive_timeout);
        let patience = tokio::task::spawn_local(async move {
            sleep(patience).await;
            inbox.push(Event::Alone { first: tag, number });
        });
        let _patience = AbortOnDropHandle::new(patience);
        let half = Half { sqe, command, served, wait, data, spare, second, number, _patience };
        self.tasks.set(tag, Task::Half(Box::new(half)));
        self.machine.admit(tag, command.data_out);
    }

    fn on_second(&mut self, first: Tag, tag: Tag, sqe: &Sqe) {
        let Some(seat) = self.seat else { return };
        let judged = self.server().nvme.with(seat.cntlid, |c| c.io(seat.qid, sqe));
        let gone = || Err(Completion::failed(Status::ABORTED_SQ_DELETED));
        let refused = match judged.unwrap_or_else(gone) {
            Ok(command) if self.join(first, tag, &command) => {
                return self.machine.admit(tag, command.data_out);
            }
            Ok(_) => {
                self.unfused(first, Unfused::Unlike);
                self.controller(|c, qid| c.unfused(qid, sqe, Unfused::Unlike))
            }
            Err(completion) => completion,
        };
        // It may have ended with what was wrong with both.
        if self.tasks.get(first).is_some() {
            self.complete_failed(first, along(refused.status));
        }
        self.complete(tag, refused, &Bufs::new());
    }

    /// Whether `command` is what the first half needs.
    fn join(&mut self, first: Tag, tag: Tag, command: &IoCommand) -> bool {
        let Some(Task::Half(half)) = self.tasks.get(first) else { return false };
        let Some((at, fua)) = half.command.fused_with(command) else { return false };
        half.second = Some(Second { tag, at, fua, waits: false, data: None });
        self.tasks.set(tag, Task::Joined { first });
        true
    }

    /// There is memory for the data of both halves, of `bytes` each.
    pub(super) fn on_memory_of_both(&mut self, first: Tag, credit: &Credit, bytes: usize) {
        let Some(Task::Half(half)) = self.tasks.get(first) else { return };
        half.spare = Some(credit.alloc(bytes));
        let waits = half.second.as_ref().filter(|second| second.waits).map(|second| second.tag);
        self.machine.grant(first, credit.alloc(bytes));
        if let Some(second) = waits {
            self.grant_second(first, second);
        }
    }

    /// The second half wants its memory.
    pub(super) fn grant_second(&mut self, first: Tag, tag: Tag) {
        let Some(Task::Half(half)) = self.tasks.get(first) else { return };
        match half.spare.take() {
            Some(memory) => self.machine.grant(tag, memory),
            None => half.second.iter_mut().for_each(|second| second.waits = true),
        }
    }

    /// The data of a half has come.
    pub(super) fn on_half(&mut self, first: Tag, data: Bufs, is_first: bool) {
        let Some(Task::Half(half)) = self.tasks.get(first) else { return };
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
        let Some(Task::Half(half)) = self.tasks.get(first) else { return };
        let (sqe, command, served) = (half.sqe, half.command, Rc::clone(&half.served));
        let compare = half.data.take();
        let second = half.second.as_mut().and_then(|s| Some((s.tag, s.at, s.fua, s.data.take()?)));
        let (Some(compare), Some((second, at, fua, write))) = (compare, second) else { return };
        if self.behind(command.nsid) != Some(served.id) {
            // The namespace went, or became another volume's, while the data was on the way.
            return self.complete_failed(first, Status::INVALID_NAMESPACE.do_not_retry());
        }
        let request = Request::CompareAndWrite { at, compare, write, fua };
        let one = self.start(first, &served, request);
        self.runs(first, sqe, 1, Commands::One(one));
        if let Some(Task::Running(running)) = self.tasks.get(first) {
            running.second = Some(second);
        }
    }

    /// The other half of the command that ended so, which has been forgotten already.
    pub(super) fn end_other_half(&mut self, tag: Tag, ended: &Task, completion: Completion) {
        let other = match ended {
            Task::Half(half) => match &half.second {
                Some(second) => second.tag,
                None => {
                    if matches!(self.before, Before::First(first) if first == tag) {
                        self.before = Before::Failed(completion.status);
                    }
                    return;
                }
            },
            Task::Running(running) => match running.second {
                Some(second) => second,
                None => return,
            },
            Task::Joined { first } => *first,
            _ => return,
        };
        self.tasks.remove(other);
        let completion = match completion.status {
            status if status.is_success() => Completion::OK,
            status => Completion::failed(along(status)),
        };
        self.machine.complete(other, completion, &Bufs::new());
    }
}
