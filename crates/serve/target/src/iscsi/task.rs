//! A SCSI command from its arrival to its status.

use std::rc::Rc;

use block::{Bufs, BufsMut, MemoryClass, RequestError};
use iscsi::target::{ArrivedCommand, CommandOutcome, Direction, Tag};
use reservation::{Change, Table};
use rt::buf::copy_in;
use scsi::{
    Address, Admission, AdmittedCommand, CopyHandle, CopyOutcome, CopyPlan, DataIn,
    ReceivedCommand, Reply, RunningCommand, SharedUnitState, Status, Step, TokenPlan, TokenResult,
    TransferLengths,
};
use tokio_util::task::AbortOnDropHandle;
use volume::ReservationChangeError;

use super::InitiatorConnection;
use crate::catalog::VolumeId;
use crate::iscsi_sessions::{Event, Session, SessionUnit, TaskBarrier, Ticket};
use crate::offloaded_transfer;
use crate::principal::{Principal, SessionEnded};
use crate::server::Server;
use crate::third_party_copy::{self, CompletionGuard};

/// Commands that have arrived and are not complete, by tag.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_tag: Vec<Option<Task>>,
    len: usize,
    /// Serial number of the latest command.
    serial: u64,
}

#[derive(Debug)]
struct Task {
    serial: u64,
    unit: Rc<SessionUnit>,
    stage: TaskStage,
    /// The task that waits for memory; ends with the command.
    wait: Option<AbortOnDropHandle<()>>,
    /// Whether it holds memory with data in it.
    holds_memory: bool,
    /// Requests that wait for its end.
    barriers: Vec<Rc<TaskBarrier>>,
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.abort_all();
    }
}

#[derive(Debug)]
enum TaskStage {
    /// Waits for memory or data.
    Admitted(AdmittedCommand),
    /// The volume executes it.
    Running(RunningCommand, volume::Command),
    /// It changes or reads the shared unit state: cannot be aborted.
    AccessingShared(RunningCommand),
    /// It copies between volumes.
    Copying(RunningCommand, CopyHandle),
    /// Between two of its steps.
    BetweenSteps,
}

impl Tasks {
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn insert(&mut self, tag: Tag, unit: Rc<SessionUnit>, command: AdmittedCommand) {
        self.serial += 1;
        let task = Task {
            serial: self.serial,
            unit,
            stage: TaskStage::Admitted(command),
            wait: None,
            holds_memory: false,
            barriers: Vec::new(),
        };
        let i = tag.0 as usize;
        if self.by_tag.len() <= i {
            self.by_tag.resize_with(i + 1, || None);
        }
        self.len += usize::from(self.by_tag[i].is_none());
        self.by_tag[i] = Some(task);
    }

    fn ticket(&mut self, tag: Tag) -> Option<Ticket> {
        let serial = self.get(tag)?.serial;
        Some(Ticket { tag, serial })
    }

    /// The tag of a command that has not ended.
    fn current(&mut self, ticket: Ticket) -> Option<Tag> {
        (self.ticket(ticket.tag) == Some(ticket)).then_some(ticket.tag)
    }

    fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.by_tag.get_mut(tag.0 as usize)?.as_mut()
    }

    fn remove(&mut self, tag: Tag) -> Option<Task> {
        let task = self.by_tag.get_mut(tag.0 as usize)?.take();
        self.len -= usize::from(task.is_some());
        task
    }

    fn tags_of(&self, unit: Option<VolumeId>) -> Vec<Tag> {
        let concerns = |t: &Task| unit.is_none_or(|id| t.unit.served.id == id);
        let tagged = self.by_tag.iter().zip(0..);
        tagged.filter(|(t, _)| t.as_ref().is_some_and(concerns)).map(|(_, i)| Tag(i)).collect()
    }

    fn tags_of_unit(&self, unit: &Rc<SessionUnit>) -> Vec<Tag> {
        let tagged = self.by_tag.iter().zip(0..);
        let of = |t: &Option<Task>| t.as_ref().is_some_and(|t| Rc::ptr_eq(&t.unit, unit));
        tagged.filter(|(t, _)| of(t)).map(|(_, i)| Tag(i)).collect()
    }

    /// Asks the volumes to abort everything; the answers are ignored.
    pub(super) fn abort_all(&mut self) {
        for task in self.by_tag.drain(..).flatten() {
            match task.stage {
                TaskStage::Running(_, command) => command.abort(),
                TaskStage::Copying(_, copy) => copy.abort(),
                TaskStage::Admitted(_)
                | TaskStage::AccessingShared(_)
                | TaskStage::BetweenSteps => {}
            }
        }
        self.len = 0;
    }
}

fn expected_transfer(arrived: &ArrivedCommand) -> TransferLengths {
    let bytes = u64::from(arrived.expected_len);
    match arrived.direction {
        Direction::None => TransferLengths::NONE,
        Direction::Read => TransferLengths::to_initiator(bytes),
        Direction::Write => TransferLengths::from_initiator(bytes),
    }
}

/// Answers a command without a unit, or for a unit that is away.
fn answer_without_unit(
    session: &Session,
    address: Address,
    arrival: &ReceivedCommand<'_>,
) -> Reply {
    let away = match address {
        Address::Unit(lun) => session.unavailability(lun),
        Address::ReportLuns | Address::Unsupported => None,
    };
    match away {
        Some(away) => scsi::answer_unavailable(away, arrival),
        None => scsi::answer_absent(address, arrival),
    }
}

impl InitiatorConnection {
    pub(super) fn on_arrived(&mut self, arrived: &ArrivedCommand) {
        let tag = arrived.tag;
        // Discovery sessions carry no commands; the machine ensures that.
        let Some(session) = self.session.as_ref().filter(|s| !s.has_ended()) else {
            return self.complete_with(tag, Status::TaskAborted);
        };
        let luns = session.luns();
        let mut arrival = ReceivedCommand {
            cdb: &arrived.cdb,
            expected_transfer: expected_transfer(arrived),
            luns: &luns,
            shared: SharedUnitState::DEFAULT,
        };
        let address = Address::parse(arrived.lun);
        let unit = match address {
            Address::Unit(lun) => session.unit_at(lun),
            Address::ReportLuns | Address::Unsupported => None,
        };
        let Some(unit) = unit else {
            let reply = answer_without_unit(session, address, &arrival);
            return self.complete(tag, &reply);
        };
        arrival.shared = unit.shared_state();
        let admission = unit.state.borrow_mut().admit(unit.nexus, &arrival);
        match admission {
            Admission::Reply(reply) => {
                // The data of a refused write shows in its residual count.
                self.machine.admit(tag, reply.full_transfer.data_out);
                self.complete(tag, &reply);
            }
            Admission::Accept(command) => {
                let bytes = command.full_transfer().data_out;
                self.tasks.insert(tag, unit, command);
                self.machine.admit(tag, bytes);
            }
        }
    }

    /// Allocates memory for data, now or later.
    pub(super) fn on_grant(&mut self, tag: Tag, bytes: usize, class: MemoryClass) {
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        if let Some(credit) = self.account.try_credit(bytes, class) {
            return self.on_memory(ticket, credit.alloc(bytes));
        }
        let Some(task) = self.tasks.get(tag) else { return };
        // A command that holds memory while it waits for more must not wait for ever: two such
        // could wait for each other. Nor must one whose data has arrived: it may block the data
        // that others, which hold memory, wait for. All others are told to retry before their
        // initiators think the path is lost.
        let patience = match task.holds_memory || class != MemoryClass::SolicitedData {
            true => Some(self.context.server.limits().admission_timeout),
            false => self.account.max_wait(),
        };
        let (account, inbox) = (self.account.clone(), self.context.inbox.clone());
        let wait = tokio::task::spawn_local(async move {
            let credit = account.credit(bytes, class);
            let credit = match patience {
                Some(patience) => tokio::time::timeout(patience, credit).await.ok(),
                None => Some(credit.await),
            };
            inbox.push(match credit {
                Some(Ok(credit)) => Event::Memory { ticket, memory: credit.alloc(bytes) },
                Some(Err(_)) | None => Event::NoMemory { ticket },
            });
        });
        task.wait = Some(AbortOnDropHandle::new(wait));
    }

    pub(super) fn on_memory(&mut self, ticket: Ticket, memory: BufsMut) {
        let Some(tag) = self.tasks.current(ticket) else { return };
        if let Some(task) = self.tasks.get(tag) {
            task.holds_memory = true;
            task.wait = None;
            self.machine.grant(tag, memory);
        }
    }

    pub(super) fn on_no_memory(&mut self, ticket: Ticket) {
        if let Some(tag) = self.tasks.current(ticket) {
            self.complete_with(tag, Status::TaskSetFull);
        }
    }

    pub(super) fn on_run(&mut self, tag: Tag, data: Bufs) {
        if self.session.as_ref().is_none_or(|s| s.has_ended()) {
            return self.complete_with(tag, Status::TaskAborted);
        }
        let Some(task) = self.tasks.get(tag) else { return };
        let (unit, stage) =
            (Rc::clone(&task.unit), std::mem::replace(&mut task.stage, TaskStage::BetweenSteps));
        let TaskStage::Admitted(command) = stage else {
            task.stage = stage;
            return;
        };
        let step = unit.state.borrow_mut().start(unit.nexus, command, data);
        self.step(tag, &unit, step);
    }

    pub(super) fn on_done(&mut self, ticket: Ticket, result: Result<Bufs, RequestError>) {
        let Some(tag) = self.tasks.current(ticket) else { return };
        let Some(task) = self.tasks.get(tag) else { return };
        let (unit, stage) =
            (Rc::clone(&task.unit), std::mem::replace(&mut task.stage, TaskStage::BetweenSteps));
        let TaskStage::Running(running, _) = stage else {
            task.stage = stage;
            return;
        };
        // If the unit is gone, that is the answer, whatever the error.
        if let Some(lost) = self.removed_unit_reply(&unit).filter(|_| result.is_err()) {
            return self.complete(tag, &lost);
        }
        let step = unit.state.borrow_mut().finish(running, result);
        self.step(tag, &unit, step);
    }

    /// The reply to commands for a unit that the session no longer has; `None` if it has it.
    fn removed_unit_reply(&self, unit: &SessionUnit) -> Option<Reply> {
        let session = self.session.as_ref().filter(|s| !s.has_ended() && !s.contains(unit))?;
        let luns = session.luns();
        let arrival = ReceivedCommand {
            cdb: &[],
            expected_transfer: TransferLengths::NONE,
            luns: &luns,
            shared: SharedUnitState::DEFAULT,
        };
        Some(answer_without_unit(session, Address::Unit(unit.lun), &arrival))
    }

    /// Ends the commands for a unit that the session no longer has: at once those not yet in the
    /// volume, the others when the volume completes them. If the unit is only away, its volume
    /// finishes the started ones.
    pub(super) fn end_tasks_of(&mut self, unit: &Rc<SessionUnit>) {
        let Some(lost) = self.removed_unit_reply(unit) else { return };
        let is_away = self.session.as_ref().is_some_and(|s| s.unavailability(unit.lun).is_some());
        for tag in self.tasks.tags_of_unit(unit) {
            match self.tasks.get(tag).map(|t| &t.stage) {
                Some(TaskStage::Admitted(_)) => self.complete(tag, &lost),
                _ if is_away => {}
                _ => self.on_abort(tag),
            }
        }
    }

    fn step(&mut self, tag: Tag, unit: &SessionUnit, step: Step) {
        let goes_on = !matches!(step, Step::Reply(_));
        if let Some(lost) = self.removed_unit_reply(unit).filter(|_| goes_on) {
            return self.complete(tag, &lost);
        }
        match step {
            Step::Run(..)
            | Step::ChangeShared(..)
            | Step::ReadShared(_)
            | Step::Copy(..)
            | Step::Token(..)
                if self.session.as_ref().is_none_or(|s| s.has_ended()) =>
            {
                self.complete_with(tag, Status::TaskAborted);
            }
            Step::Reply(reply) => self.complete(tag, &reply),
            Step::Run(request, running) => {
                let Some(ticket) = self.tasks.ticket(tag) else { return };
                let inbox = self.context.inbox.clone();
                let done = move |result| inbox.push(Event::Done { ticket, result });
                let (volume, account) = (&unit.served.volume, &self.account);
                let command = volume.start_for(&unit.caller, request, account, done);
                if let Some(task) = self.tasks.get(tag) {
                    task.stage = TaskStage::Running(running, command);
                }
            }
            Step::ChangeShared(change, running) => self.change_shared(tag, unit, change, running),
            Step::ReadShared(running) => self.read_shared(tag, unit, running),
            Step::Copy(plan, running) => self.copy(tag, unit, plan, running),
            Step::Token(plan, running) => self.token(tag, unit, plan, running),
        }
    }

    /// Changes the shared state on all nodes.
    fn change_shared(
        &mut self,
        tag: Tag,
        unit: &SessionUnit,
        change: Change,
        running: RunningCommand,
    ) {
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        let Some(party) = unit.caller.nexus().cloned() else {
            // Units without reservations still have mode pages.
            return self.complete_with(tag, Status::Busy);
        };
        // A change that the initiator gave up with its session must not happen later.
        let Some(wanted) = self.session.as_ref().map(|s| s.liveness_check()) else { return };
        if let Some(task) = self.tasks.get(tag) {
            task.stage = TaskStage::AccessingShared(running);
        }
        let inbox = self.context.inbox.clone();
        let done = move |result| inbox.push(Event::SharedChanged { ticket, result });
        unit.served.volume.change_reservations(party, change, wanted, done);
    }

    /// Reads the shared state.
    fn read_shared(&mut self, tag: Tag, unit: &SessionUnit, running: RunningCommand) {
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        if let Some(task) = self.tasks.get(tag) {
            task.stage = TaskStage::AccessingShared(running);
        }
        let (inbox, volume) = (self.context.inbox.clone(), Rc::clone(&unit.served.volume));
        tokio::task::spawn_local(async move {
            let result = volume.read_reservations().await;
            inbox.push(Event::SharedRead { ticket, result });
        });
    }

    pub(super) fn on_shared_changed(
        &mut self,
        ticket: Ticket,
        result: Result<(), ReservationChangeError>,
    ) {
        let Some((tag, unit, running)) = self.take_waiting(ticket) else { return };
        let step = match result {
            Ok(()) => unit.state.borrow_mut().finish(running, Ok(Bufs::new())),
            Err(ReservationChangeError::Rejected(why)) => {
                unit.state.borrow_mut().finish_refused_change(running, why)
            }
            Err(ReservationChangeError::DeviceError(e)) => {
                unit.state.borrow_mut().finish(running, Err(e.into()))
            }
        };
        self.step(tag, &unit, step);
    }

    pub(super) fn on_shared_read(&mut self, ticket: Ticket, result: Result<Table, block::Error>) {
        let Some((tag, unit, running)) = self.take_waiting(ticket) else { return };
        let step = match result {
            Ok(table) => unit.state.borrow_mut().finish_shared_read(running, &table),
            Err(e) => unit.state.borrow_mut().finish(running, Err(e.into())),
        };
        self.step(tag, &unit, step);
    }

    /// Starts a copy between volumes, which reports its end.
    fn copy(&mut self, tag: Tag, unit: &SessionUnit, plan: CopyPlan, running: RunningCommand) {
        let (handle, of) = (plan.handle(), unit.served.id);
        let tell = |ticket, outcome| Event::CopyDone { ticket, outcome };
        self.offload(tag, (running, handle), CopyOutcome::Aborted, tell, |server, principal| {
            third_party_copy::run_copy(server, principal, of, plan)
        });
    }

    /// Starts `work`, which reports its end by `event`; if its core ends first, as `aborted`.
    fn offload<T: 'static, Fut: Future<Output = T> + 'static>(
        &mut self,
        tag: Tag,
        (running, handle): (RunningCommand, CopyHandle),
        aborted: T,
        event: fn(Ticket, T) -> Event,
        work: impl FnOnce(Rc<Server>, (Principal, SessionEnded)) -> Fut,
    ) {
        let Some(principal) = self.session.as_ref().map(|s| s.principal()) else { return };
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        if let Some(task) = self.tasks.get(tag) {
            task.stage = TaskStage::Copying(running, handle);
        }
        let inbox = self.context.inbox.clone();
        let promise =
            CompletionGuard::new(aborted, move |outcome| inbox.push(event(ticket, outcome)));
        let work = work(Rc::clone(&self.context.server), principal);
        tokio::task::spawn_local(async move { promise.complete(work.await) });
    }

    pub(super) fn on_copied(&mut self, ticket: Ticket, outcome: CopyOutcome) {
        let Some((tag, unit, running)) = self.take_waiting(ticket) else { return };
        let reply = unit.state.borrow_mut().finish_copy(running, outcome);
        self.complete(tag, &reply);
    }

    /// Starts to create or use a token, which reports its end.
    fn token(&mut self, tag: Tag, unit: &SessionUnit, plan: TokenPlan, running: RunningCommand) {
        let (handle, of) = (plan.handle(), unit.served.id);
        let tell = |ticket, outcome| Event::TokenDone { ticket, outcome };
        self.offload(tag, (running, handle), TokenResult::Aborted, tell, |server, principal| {
            offloaded_transfer::run_token(server, principal, of, plan)
        });
    }

    pub(super) fn on_token_done(&mut self, ticket: Ticket, outcome: TokenResult) {
        let Some((tag, unit, running)) = self.take_waiting(ticket) else { return };
        let reply = unit.state.borrow_mut().finish_token(running, outcome);
        self.complete(tag, &reply);
    }

    /// Takes the command that waits for shared state or for its copy.
    fn take_waiting(&mut self, ticket: Ticket) -> Option<(Tag, Rc<SessionUnit>, RunningCommand)> {
        let tag = self.tasks.current(ticket)?;
        let task = self.tasks.get(tag)?;
        let unit = Rc::clone(&task.unit);
        match std::mem::replace(&mut task.stage, TaskStage::BetweenSteps) {
            TaskStage::AccessingShared(running) | TaskStage::Copying(running, _) => {
                Some((tag, unit, running))
            }
            other => {
                task.stage = other;
                None
            }
        }
    }

    /// Ends a command as soon as possible: at once if the volume does not have it, else when the
    /// volume completes it.
    pub(super) fn on_abort(&mut self, tag: Tag) {
        match self.tasks.get(tag).map(|t| &t.stage) {
            Some(TaskStage::Running(_, command)) => command.abort(),
            Some(TaskStage::AccessingShared(_)) => {}
            Some(TaskStage::Copying(_, copy)) => copy.abort(),
            Some(TaskStage::Admitted(_) | TaskStage::BetweenSteps) | None => {
                self.complete_with(tag, Status::TaskAborted);
            }
        }
    }

    /// Aborts the commands for a unit, or all, on behalf of another session.
    pub(super) fn abort_for(&mut self, unit: Option<VolumeId>, barrier: Option<&Rc<TaskBarrier>>) {
        for tag in self.tasks.tags_of(unit) {
            if let (Some(task), Some(barrier)) = (self.tasks.get(tag), barrier) {
                task.barriers.push(Rc::clone(barrier));
            }
            self.on_abort(tag);
        }
    }

    pub(super) fn complete_with(&mut self, tag: Tag, status: Status) {
        self.complete(tag, &Reply::status(status));
    }

    fn complete(&mut self, tag: Tag, reply: &Reply) {
        self.tasks.remove(tag);
        let data = match &reply.data {
            DataIn::None => Some(Bufs::new()),
            DataIn::Bufs(bufs) => Some(bufs.clone()),
            DataIn::Bytes(bytes) if bytes.is_empty() => Some(Bufs::new()),
            DataIn::Bytes(bytes) => self
                .account
                .try_credit(bytes.len(), MemoryClass::Command)
                .map(|credit| copy_in(&credit, bytes)),
        };
        // No memory for an answer about the device: the initiator asks again.
        let Some(data) = data else {
            return self.machine.complete(tag, &CommandOutcome::status(Status::Busy as u8, &[]));
        };
        let (status, sense, available) =
            (reply.status as u8, &reply.sense, reply.full_transfer.data_in);
        self.machine.complete(tag, &CommandOutcome { status, sense, data, available });
    }
}
