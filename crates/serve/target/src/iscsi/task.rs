//! A SCSI command from its arrival to its status.

use std::rc::Rc;

use block::{Bufs, BufsMut, Class, Failure};
use iscsi::target::{Arrived, Direction, Outcome, Tag};
use reservation::{Change, Table};
use rt::buf::copy_in;
use scsi::{
    Address, Admission, Arrival, Command, CopyHandle, CopyOutcome, CopyPlan, Data, Known, Reply,
    Running, Status, Step, TokenOutcome, TokenPlan, Transfer,
};
use tokio_util::task::AbortOnDropHandle;
use volume::Unaltered;

use super::reset::Barrier;
use super::session::{Session, Unit};
use super::{Event, Initiator};
use crate::catalog::VolumeId;
use crate::copying::{self, Ended, Principal, Promise};
use crate::server::Server;
use crate::tokens;

/// A command for whoever answers later: tags come again, and what comes late for a command that
/// has ended must not meet the next one with its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    tag: Tag,
    serial: u64,
}

/// The commands that have arrived and have not been completed, by tag.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_tag: Vec<Option<Task>>,
    len: usize,
    /// Serial number of the latest.
    serial: u64,
}

#[derive(Debug)]
struct Task {
    serial: u64,
    unit: Rc<Unit>,
    stage: Stage,
    /// Waits for memory on its behalf, and goes with it.
    wait: Option<AbortOnDropHandle<()>>,
    /// Whether it holds memory with data in it.
    holds_memory: bool,
    /// Those who wait for its end.
    awaited: Vec<Rc<Barrier>>,
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.abort_all();
    }
}

#[derive(Debug)]
enum Stage {
    /// Waits for memory or data.
    Admitted(Command),
    /// The volume works on it.
    Running(Running, volume::Command),
    /// It changes what all nodes know, or looks it up: cannot be aborted.
    Asking(Running),
    /// It copies between volumes.
    Copying(Running, CopyHandle),
    /// Between two of its steps.
    Between,
}

impl Tasks {
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn insert(&mut self, tag: Tag, unit: Rc<Unit>, command: Command) {
        self.serial += 1;
        let task = Task {
            serial: self.serial,
            unit,
            stage: Stage::Admitted(command),
            wait: None,
            holds_memory: false,
            awaited: Vec::new(),
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

    fn of(&self, unit: Option<VolumeId>) -> Vec<Tag> {
        let concerns = |t: &Task| unit.is_none_or(|id| t.unit.served.id == id);
        let tagged = self.by_tag.iter().zip(0..);
        tagged.filter(|(t, _)| t.as_ref().is_some_and(concerns)).map(|(_, i)| Tag(i)).collect()
    }

    fn of_unit(&self, unit: &Rc<Unit>) -> Vec<Tag> {
        let tagged = self.by_tag.iter().zip(0..);
        let of = |t: &Option<Task>| t.as_ref().is_some_and(|t| Rc::ptr_eq(&t.unit, unit));
        tagged.filter(|(t, _)| of(t)).map(|(_, i)| Tag(i)).collect()
    }

    /// Asks the volumes to abort everything; nobody waits for the answers any more.
    pub(super) fn abort_all(&mut self) {
        for task in self.by_tag.drain(..).flatten() {
            match task.stage {
                Stage::Running(_, command) => command.abort(),
                Stage::Copying(_, copy) => copy.abort(),
                Stage::Admitted(_) | Stage::Asking(_) | Stage::Between => {}
            }
        }
        self.len = 0;
    }
}

fn window(arrived: &Arrived) -> Transfer {
    let bytes = u64::from(arrived.expected_len);
    match arrived.direction {
        Direction::None => Transfer::NONE,
        Direction::Read => Transfer::to_initiator(bytes),
        Direction::Write => Transfer::from_initiator(bytes),
    }
}

/// What a command hears that is for no unit, or for one that is away.
fn answer_without_unit(session: &Session, address: Address, arrival: &Arrival<'_>) -> Reply {
    let away = match address {
        Address::Unit(lun) => session.away(lun),
        Address::ReportLuns | Address::Nowhere => None,
    };
    match away {
        Some(away) => scsi::answer_away(away, arrival),
        None => scsi::answer_absent(address, arrival),
    }
}

impl Initiator {
    pub(super) fn on_arrived(&mut self, arrived: &Arrived) {
        let tag = arrived.tag;
        // Discovery sessions carry no commands; the machine sees to that.
        let Some(session) = self.session.as_ref().filter(|s| !s.has_ended()) else {
            return self.complete_with(tag, Status::TaskAborted);
        };
        let luns = session.luns();
        let mut arrival = Arrival {
            cdb: &arrived.cdb,
            window: window(arrived),
            luns: &luns,
            known: Known::NOTHING,
        };
        let address = Address::parse(arrived.lun);
        let unit = match address {
            Address::Unit(lun) => session.at(lun),
            Address::ReportLuns | Address::Nowhere => None,
        };
        let Some(unit) = unit else {
            let reply = answer_without_unit(session, address, &arrival);
            return self.complete(tag, &reply);
        };
        arrival.known = unit.known();
        let admission = unit.state.borrow_mut().admit(unit.nexus, &arrival);
        match admission {
            Admission::Reply(reply) => {
                // What a refused write would have taken shows in its residual count.
                self.machine.admit(tag, reply.wanted.data_out);
                self.complete(tag, &reply);
            }
            Admission::Accept(command) => {
                let bytes = command.wanted().data_out;
                self.tasks.insert(tag, unit, command);
                self.machine.admit(tag, bytes);
            }
        }
    }

    /// Gets memory for data, now or later.
    pub(super) fn on_grant(&mut self, tag: Tag, bytes: usize, class: Class) {
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        if let Some(credit) = self.account.try_credit(bytes, class) {
            return self.on_memory(ticket, credit.alloc(bytes));
        }
        let Some(task) = self.tasks.get(tag) else { return };
        // One that holds memory while it waits for more must not wait for ever: two such could
        // wait for each other. Nor must one whose data has arrived: behind it may be the data
        // that others, who hold memory, wait for.
        // All others are told to try again before their initiators think the path is lost.
        let patience = match task.holds_memory || class != Class::Solicited {
            true => Some(self.place.server.limits().admission_timeout),
            false => self.account.patience(),
        };
        let (account, inbox) = (self.account.clone(), self.place.inbox.clone());
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
            (Rc::clone(&task.unit), std::mem::replace(&mut task.stage, Stage::Between));
        let Stage::Admitted(command) = stage else {
            task.stage = stage;
            return;
        };
        let step = unit.state.borrow_mut().start(unit.nexus, command, data);
        self.step(tag, &unit, step);
    }

    pub(super) fn on_done(&mut self, ticket: Ticket, result: Result<Bufs, Failure>) {
        let Some(tag) = self.tasks.current(ticket) else { return };
        let Some(task) = self.tasks.get(tag) else { return };
        let (unit, stage) =
            (Rc::clone(&task.unit), std::mem::replace(&mut task.stage, Stage::Between));
        let Stage::Running(running, _) = stage else {
            task.stage = stage;
            return;
        };
        // Why it failed does not count where the unit has gone: that is what there is to say.
        if let Some(lost) = self.lost(&unit).filter(|_| result.is_err()) {
            return self.complete(tag, &lost);
        }
        let step = unit.state.borrow_mut().finish(running, result);
        self.step(tag, &unit, step);
    }

    /// What commands for a unit hear that the session has no more; `None` if it has it.
    fn lost(&self, unit: &Unit) -> Option<Reply> {
        let session = self.session.as_ref().filter(|s| !s.has_ended() && !s.has(unit))?;
        let luns = session.luns();
        let arrival =
            Arrival { cdb: &[], window: Transfer::NONE, luns: &luns, known: Known::NOTHING };
        Some(answer_without_unit(session, Address::Unit(unit.lun), &arrival))
    }

    /// Ends the commands for a unit that the session has no more: at once those that the volume does not have, the others when
    /// it says so. If the unit is only away, its volume finishes what it has begun.
    pub(super) fn end_tasks_of(&mut self, unit: &Rc<Unit>) {
        let Some(lost) = self.lost(unit) else { return };
        let is_away = self.session.as_ref().is_some_and(|s| s.away(unit.lun).is_some());
        for tag in self.tasks.of_unit(unit) {
            match self.tasks.get(tag).map(|t| &t.stage) {
                Some(Stage::Admitted(_)) => self.complete(tag, &lost),
                _ if is_away => {}
                _ => self.on_abort(tag),
            }
        }
    }

    fn step(&mut self, tag: Tag, unit: &Unit, step: Step) {
        let goes_on = !matches!(step, Step::Reply(_));
        if let Some(lost) = self.lost(unit).filter(|_| goes_on) {
            return self.complete(tag, &lost);
        }
        match step {
            Step::Run(..)
            | Step::Alter(..)
            | Step::Consult(_)
            | Step::Copy(..)
            | Step::Token(..)
                if self.session.as_ref().is_none_or(|s| s.has_ended()) =>
            {
                self.complete_with(tag, Status::TaskAborted);
            }
            Step::Reply(reply) => self.complete(tag, &reply),
            Step::Run(request, running) => {
                let Some(ticket) = self.tasks.ticket(tag) else { return };
                let inbox = self.place.inbox.clone();
                let done = move |result| inbox.push(Event::Done { ticket, result });
                let (volume, account) = (&unit.served.volume, &self.account);
                let command = volume.start_for(&unit.caller, request, account, done);
                if let Some(task) = self.tasks.get(tag) {
                    task.stage = Stage::Running(running, command);
                }
            }
            Step::Alter(change, running) => self.alter(tag, unit, change, running),
            Step::Consult(running) => self.consult(tag, unit, running),
            Step::Copy(plan, running) => self.copy(tag, unit, plan, running),
            Step::Token(plan, running) => self.token(tag, unit, plan, running),
        }
    }

    /// Has all nodes change what they know.
    fn alter(&mut self, tag: Tag, unit: &Unit, change: Change, running: Running) {
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        let Some(party) = unit.caller.party().cloned() else {
            // Units that keep no reservations have mode pages all the same.
            return self.complete_with(tag, Status::Busy);
        };
        // What its initiator has given up with its session must not happen later.
        let Some(wanted) = self.session.as_ref().map(|s| s.lives()) else { return };
        if let Some(task) = self.tasks.get(tag) {
            task.stage = Stage::Asking(running);
        }
        let inbox = self.place.inbox.clone();
        let done = move |result| inbox.push(Event::Altered { ticket, result });
        unit.served.volume.alter(party, change, wanted, done);
    }

    /// Looks up what all nodes know.
    fn consult(&mut self, tag: Tag, unit: &Unit, running: Running) {
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        if let Some(task) = self.tasks.get(tag) {
            task.stage = Stage::Asking(running);
        }
        let (inbox, volume) = (self.place.inbox.clone(), Rc::clone(&unit.served.volume));
        tokio::task::spawn_local(async move {
            let result = volume.reservations().await;
            inbox.push(Event::Consulted { ticket, result });
        });
    }

    pub(super) fn on_altered(&mut self, ticket: Ticket, result: Result<(), Unaltered>) {
        let Some((tag, unit, running)) = self.waiting(ticket) else { return };
        let step = match result {
            Ok(()) => unit.state.borrow_mut().finish(running, Ok(Bufs::new())),
            Err(Unaltered::Refused(why)) => unit.state.borrow_mut().refused(running, why),
            Err(Unaltered::Failed(e)) => unit.state.borrow_mut().finish(running, Err(e.into())),
        };
        self.step(tag, &unit, step);
    }

    pub(super) fn on_consulted(&mut self, ticket: Ticket, result: Result<Table, block::Error>) {
        let Some((tag, unit, running)) = self.waiting(ticket) else { return };
        let step = match result {
            Ok(table) => unit.state.borrow_mut().consulted(running, &table),
            Err(e) => unit.state.borrow_mut().finish(running, Err(e.into())),
        };
        self.step(tag, &unit, step);
    }

    /// Begins to copy between volumes, which tells when it has ended.
    fn copy(&mut self, tag: Tag, unit: &Unit, plan: CopyPlan, running: Running) {
        let (handle, of) = (plan.handle(), unit.served.id);
        let tell = |ticket, outcome| Event::Copied { ticket, outcome };
        self.offload(tag, (running, handle), CopyOutcome::Aborted, tell, |server, principal| {
            copying::carry_out(server, principal, of, plan)
        });
    }

    /// Begins `work`, whose end comes by `event`; it is `aborted` if its core ends before it.
    fn offload<T: 'static, Fut: Future<Output = T> + 'static>(
        &mut self,
        tag: Tag,
        (running, handle): (Running, CopyHandle),
        aborted: T,
        event: fn(Ticket, T) -> Event,
        work: impl FnOnce(Rc<Server>, (Principal, Ended)) -> Fut,
    ) {
        let Some(principal) = self.session.as_ref().map(|s| s.principal()) else { return };
        let Some(ticket) = self.tasks.ticket(tag) else { return };
        if let Some(task) = self.tasks.get(tag) {
            task.stage = Stage::Copying(running, handle);
        }
        let inbox = self.place.inbox.clone();
        let promise = Promise::new(aborted, move |outcome| inbox.push(event(ticket, outcome)));
        let work = work(Rc::clone(&self.place.server), principal);
        tokio::task::spawn_local(async move { promise.keep(work.await) });
    }

    pub(super) fn on_copied(&mut self, ticket: Ticket, outcome: CopyOutcome) {
        let Some((tag, unit, running)) = self.waiting(ticket) else { return };
        let reply = unit.state.borrow_mut().finish_copy(running, outcome);
        self.complete(tag, &reply);
    }

    /// Begins to make or to use a token, which tells when it has ended.
    fn token(&mut self, tag: Tag, unit: &Unit, plan: TokenPlan, running: Running) {
        let (handle, of) = (plan.handle(), unit.served.id);
        let tell = |ticket, outcome| Event::Tokened { ticket, outcome };
        self.offload(tag, (running, handle), TokenOutcome::Aborted, tell, |server, principal| {
            tokens::carry_out(server, principal, of, plan)
        });
    }

    pub(super) fn on_tokened(&mut self, ticket: Ticket, outcome: TokenOutcome) {
        let Some((tag, unit, running)) = self.waiting(ticket) else { return };
        let reply = unit.state.borrow_mut().finish_token(running, outcome);
        self.complete(tag, &reply);
    }

    /// The command that waits for what all nodes know, or for its copy.
    fn waiting(&mut self, ticket: Ticket) -> Option<(Tag, Rc<Unit>, Running)> {
        let tag = self.tasks.current(ticket)?;
        let task = self.tasks.get(tag)?;
        let unit = Rc::clone(&task.unit);
        match std::mem::replace(&mut task.stage, Stage::Between) {
            Stage::Asking(running) | Stage::Copying(running, _) => Some((tag, unit, running)),
            other => {
                task.stage = other;
                None
            }
        }
    }

    /// Ends a command as soon as it can be: at once before the volume has it, else when the
    /// volume says so.
    pub(super) fn on_abort(&mut self, tag: Tag) {
        match self.tasks.get(tag).map(|t| &t.stage) {
            Some(Stage::Running(_, command)) => command.abort(),
            Some(Stage::Asking(_)) => {}
            Some(Stage::Copying(_, copy)) => copy.abort(),
            Some(Stage::Admitted(_) | Stage::Between) | None => {
                self.complete_with(tag, Status::TaskAborted);
            }
        }
    }

    /// Ends the commands for a unit, or all, on behalf of another session.
    pub(super) fn abort_for(&mut self, unit: Option<VolumeId>, barrier: Option<&Rc<Barrier>>) {
        for tag in self.tasks.of(unit) {
            if let (Some(task), Some(barrier)) = (self.tasks.get(tag), barrier) {
                task.awaited.push(Rc::clone(barrier));
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
            Data::None => Some(Bufs::new()),
            Data::Bufs(bufs) => Some(bufs.clone()),
            Data::Bytes(bytes) if bytes.is_empty() => Some(Bufs::new()),
            Data::Bytes(bytes) => self
                .account
                .try_credit(bytes.len(), Class::Command)
                .map(|credit| copy_in(&credit, bytes)),
        };
        // No memory for an answer about the device: the initiator asks again.
        let Some(data) = data else {
            return self.machine.complete(tag, &Outcome::status(Status::Busy as u8, &[]));
        };
        let (status, sense, available) = (reply.status as u8, &reply.sense, reply.wanted.data_in);
        self.machine.complete(tag, &Outcome { status, sense, data, available });
    }
}
