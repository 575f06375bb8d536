//! A command from its arrival to its completion.

use std::rc::Rc;

use block::{Bufs, BufsMut, Class, Failure, Request};
use nvme::controller::Plan;
use nvme::entry::{Completion, FabricsType, Sqe};
use nvme::{Admin, Connect, Status, Tag};
use rt::buf::copy_in;

use super::association::Association;
use super::{Event, Host};
use crate::server::Served;

/// Connect's data in bytes (NVMe Base 2.0, 6.3).
const CONNECT_BYTES: u32 = 1024;

/// The commands that have arrived and have not been completed, by tag.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_tag: Vec<Option<Task>>,
    /// Those that somebody waits for: all but event requests.
    busy: usize,
}

#[derive(Debug)]
enum Task {
    /// Waits for Connect's data.
    Connect(Box<Sqe>),
    /// An admin command.
    Admin(Box<Sqe>),
    /// An event request.
    Waits,
    /// Waits for memory or data.
    Planned(Plan),
    /// The volumes work on it: how many of them, and the first failure.
    Running { left: usize, failure: Option<Failure>, commands: Vec<volume::Command> },
    /// One volume works on it.
    RunningOne(volume::Command),
    /// The host has its answer; the volume's is to be awaited and dropped.
    Answered,
}

impl Task {
    fn is_busy(&self) -> bool {
        !matches!(self, Self::Waits)
    }
}

impl Tasks {
    /// Whether nobody waits for an answer.
    pub(super) fn is_idle(&self) -> bool {
        self.busy == 0
    }

    fn set(&mut self, tag: Tag, task: Task) {
        self.remove(tag);
        let i = tag.index();
        if self.by_tag.len() <= i {
            self.by_tag.resize_with(i + 1, || None);
        }
        self.busy += usize::from(task.is_busy());
        self.by_tag[i] = Some(task);
    }

    fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.by_tag.get_mut(tag.index())?.as_mut()
    }

    pub(super) fn remove(&mut self, tag: Tag) {
        self.take(tag);
    }

    fn take(&mut self, tag: Tag) -> Option<Task> {
        let task = self.by_tag.get_mut(tag.index())?.take();
        self.busy -= usize::from(task.as_ref().is_some_and(Task::is_busy));
        task
    }

    /// Asks the volumes to abort everything; nobody waits for the answers any more.
    pub(super) fn abort_all(&mut self) {
        for task in self.by_tag.drain(..).flatten() {
            match task {
                Task::Running { commands, .. } => {
                    commands.iter().for_each(volume::Command::abort);
                }
                Task::RunningOne(command) => command.abort(),
                _ => {}
            }
        }
        self.busy = 0;
    }
}

impl Host {
    pub(super) fn on_arrived(&mut self, tag: Tag, sqe: Sqe) {
        let Some(association) = self.association.clone() else {
            // Nothing but Connect comes before the queue is connected.
            return if sqe.fabrics() == Some(FabricsType::Connect) {
                self.tasks.set(tag, Task::Connect(Box::new(sqe)));
                self.machine.admit(tag, CONNECT_BYTES);
            } else {
                self.complete_failed(tag, Status::COMMAND_SEQUENCE.do_not_retry());
            };
        };
        association.hear();
        let admin = self.machine.queue().is_some_and(|q| q.id == 0);
        let planned = if admin {
            let data = association.controller.borrow().admin_data_out(&sqe);
            data.map(|bytes| (Task::Admin(Box::new(sqe)), bytes)).map_err(Status::do_not_retry)
        } else {
            let plan = association.controller.borrow().plan(&sqe);
            plan.map(|plan| (Task::Planned(plan), plan.data_out))
        };
        match planned {
            Ok((task, bytes)) => {
                self.tasks.set(tag, task);
                self.machine.admit(tag, bytes);
            }
            Err(status) => self.complete_failed(tag, status),
        }
    }

    /// Gets memory for data, now or later. In-capsule data and data by R2T are never of one
    /// command, so no command waits for memory while it holds some.
    pub(super) fn on_grant(&mut self, tag: Tag, bytes: u32, class: Class) {
        let bytes = bytes as usize;
        if let Some(credit) = self.account.try_credit(bytes, class) {
            return self.on_memory(tag, credit.alloc(bytes));
        }
        let (account, inbox) = (self.account.clone(), self.place.inbox.clone());
        tokio::task::spawn_local(async move {
            inbox.push(match account.credit(bytes, class).await {
                Ok(credit) => Event::Memory { tag, memory: credit.alloc(bytes) },
                Err(_) => Event::NoMemory { tag },
            });
        });
    }

    pub(super) fn on_memory(&mut self, tag: Tag, memory: BufsMut) {
        if !self.has_ended {
            self.machine.grant(tag, memory);
        }
    }

    pub(super) fn on_run(&mut self, tag: Tag, data: Bufs) {
        if self.has_ended {
            return self.complete_failed(tag, Status::ABORTED_SQ_DELETED);
        }
        match self.tasks.take(tag) {
            Some(Task::Connect(sqe)) => self.on_connect(tag, &sqe, &data),
            Some(Task::Admin(sqe)) => self.on_admin(tag, &sqe),
            Some(Task::Planned(plan)) => self.on_planned(tag, plan, data),
            Some(other) => self.tasks.set(tag, other),
            None => {}
        }
    }

    fn on_connect(&mut self, tag: Tag, sqe: &Sqe, data: &Bufs) {
        match Connect::parse(sqe, &data.to_vec()) {
            Ok(connect) => self.decide(tag, Box::new(connect)),
            Err(refusal) => self.complete(tag, refusal.completion(), &Bufs::new()),
        }
    }

    fn on_admin(&mut self, tag: Tag, sqe: &Sqe) {
        let Some(association) = self.association.clone() else { return };
        let answer = association.controller.borrow_mut().admin(tag, sqe);
        match answer {
            Admin::Waits => self.tasks.set(tag, Task::Waits),
            Admin::Abort { queue, cid } => self.on_abort_command(tag, &association, queue, cid),
            Admin::Done(completion, data) if data.is_empty() => {
                self.complete(tag, completion, &Bufs::new());
            }
            Admin::Done(completion, data) => {
                match self.account.try_credit(data.len(), Class::Immediate) {
                    Some(credit) => self.complete(tag, completion, &copy_in(&credit, &data)),
                    None => self.complete_failed(tag, Status::INTERRUPTED),
                }
            }
        }
        self.tell_events(&association);
    }

    /// NVMe Base 2.0, 5.1: bit 0 of the result tells that nothing was aborted.
    fn on_abort_command(&mut self, tag: Tag, of: &Association, queue: u16, cid: u16) {
        if queue == 0 {
            let found = self.abort_own(of, cid);
            return self.abort_answered(tag, found);
        }
        match of.queue(queue) {
            Some(inbox) => {
                let asked_by = self.place.inbox.clone();
                inbox.push(Event::Abort { cid, asked_by, tag });
            }
            None => self.abort_answered(tag, false),
        }
    }

    fn abort_own(&mut self, of: &Association, cid: u16) -> bool {
        let Some(other) = self.machine.find(cid) else { return false };
        let was_event_request = of.controller.borrow_mut().forget_event_request(other);
        if was_event_request {
            self.complete_failed(other, Status::ABORT_REQUESTED);
        }
        was_event_request
    }

    /// Asks for the abort of a command of this queue; whether it was there.
    pub(super) fn abort(&mut self, cid: u16) -> bool {
        let Some(tag) = self.machine.find(cid) else { return false };
        match self.tasks.get(tag) {
            Some(Task::Running { commands, .. }) => {
                commands.iter().for_each(volume::Command::abort);
                true
            }
            Some(Task::RunningOne(command)) => {
                command.abort();
                true
            }
            Some(Task::Planned(_)) => {
                self.complete_failed(tag, Status::ABORT_REQUESTED);
                true
            }
            _ => false,
        }
    }

    pub(super) fn abort_answered(&mut self, tag: Tag, found: bool) {
        self.complete(tag, Completion::ok(u64::from(!found)), &Bufs::new());
    }

    fn on_planned(&mut self, tag: Tag, plan: Plan, data: Bufs) {
        let Some(nsid) = plan.nsid else { return self.flush_all(tag) };
        let Some(served) = self.served(nsid) else {
            // The namespace went while the data was on the way.
            return self.complete_failed(tag, Status::INVALID_NAMESPACE.do_not_retry());
        };
        match plan.request(data, &served.volume.info()) {
            Ok(Some(request)) => {
                let command = self.start(tag, &served, request);
                self.tasks.set(tag, Task::RunningOne(command));
            }
            Ok(None) => self.complete(tag, Completion::OK, &Bufs::new()),
            Err(status) => self.complete_failed(tag, status),
        }
    }

    fn served(&self, nsid: u32) -> Option<Rc<Served>> {
        let association = self.association.as_ref()?;
        let controller = association.controller.borrow();
        let namespace = controller.subsystem.namespaces.get(&nsid)?;
        self.server().volume(crate::VolumeId(namespace.uuid))
    }

    fn start(&self, tag: Tag, served: &Served, request: Request) -> volume::Command {
        let inbox = self.place.inbox.clone();
        let done = move |result| inbox.push(Event::Done { tag, result });
        served.volume.start(request, &self.account, done)
    }

    fn flush_all(&mut self, tag: Tag) {
        let ids: Vec<u32> = self.association.as_ref().map_or_else(Vec::new, |a| {
            a.controller.borrow().subsystem.namespaces.keys().copied().collect()
        });
        let served: Vec<_> = ids.into_iter().filter_map(|id| self.served(id)).collect();
        if served.is_empty() {
            return self.complete(tag, Completion::OK, &Bufs::new());
        }
        let commands: Vec<_> = served.iter().map(|s| self.start(tag, s, Request::Flush)).collect();
        self.tasks.set(tag, Task::Running { left: commands.len(), failure: None, commands });
    }

    pub(super) fn on_done(&mut self, tag: Tag, result: Result<Bufs, Failure>) {
        let outcome = match self.tasks.get(tag) {
            Some(Task::Running { left, failure, .. }) => {
                *left -= 1;
                *failure = failure.or(result.err());
                if *left > 0 {
                    return;
                }
                failure.map_or_else(|| Ok(Bufs::new()), Err)
            }
            Some(Task::RunningOne(_) | Task::Answered) => result,
            _ => return,
        };
        match outcome {
            Ok(data) => self.complete(tag, Completion::OK, &data),
            Err(failure) => self.complete_failed(tag, failure.into()),
        }
    }

    /// The machine has answered the command by itself.
    pub(super) fn on_answered(&mut self, tag: Tag) {
        match self.tasks.get(tag) {
            Some(task @ (Task::Running { .. } | Task::RunningOne(_))) => *task = Task::Answered,
            _ => self.complete(tag, Completion::OK, &Bufs::new()),
        }
    }

    pub(super) fn complete_failed(&mut self, tag: Tag, status: Status) {
        self.complete(tag, Completion::failed(status), &Bufs::new());
    }

    pub(super) fn complete(&mut self, tag: Tag, completion: Completion, data: &Bufs) {
        self.tasks.remove(tag);
        self.machine.complete(tag, completion, data);
    }
}
