//! A command from its arrival to its completion.

use std::rc::Rc;
use std::slice;

use block::{Bufs, BufsMut, Class, Credit, Failure, Request};
use nvme::auth::AuthCommand;
use nvme::entry::{FabricsType, Fuse};
use nvme::fabrics::CONNECT_BYTES;
use nvme::{Completion, Connect, CopyWork, IoCommand, Sqe, Status, Tag, Verdict, Work};

use reservation::{Initiator, Party};
use volume::{Begun, Caller, Gate};

use super::association::{RETURNED, Seat};
use super::fused::of_both;
use super::reservations::report;
use super::tasks::{Commands, Consultation, Running, Task, Wait, Whose};
use super::{Asker, Event, Host, copy};
use crate::catalog::VolumeId;
use crate::copying::{Promise, Stopped};
use crate::server::Served;

impl Host {
    pub(super) fn on_arrived(&mut self, tag: Tag, sqe: Sqe) {
        match self.seat {
            // Nothing but Connect comes before the queue is connected.
            None if sqe.data_bytes() == CONNECT_BYTES => {
                self.tasks.set(tag, Task::Connect { sqe, wait: Wait::default() });
                self.machine.admit(tag, CONNECT_BYTES);
            }
            None => self.complete_failed(tag, Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
            Some(_) if !self.has_proved() && AuthCommand::parse(&sqe).is_none() => {
                // Linux authenticates and sends it again; with Do Not Retry it would give it up.
                self.complete_failed(tag, Status::AUTHENTICATION_REQUIRED);
            }
            Some(seat) if seat.qid == 0 => self.on_admin(tag, &sqe, seat),
            Some(seat) => self.on_io(tag, sqe, seat),
        }
    }

    fn on_io(&mut self, tag: Tag, sqe: Sqe, seat: Seat) {
        if self.disconnecting.is_some() {
            return self.complete_failed(tag, Status::ABORTED_SQ_DELETED);
        }
        if !self.begins(tag, &sqe) {
            return;
        }
        if sqe.fabrics() == Some(FabricsType::Disconnect) {
            return self.on_disconnect(tag, &sqe);
        }
        if let Some(command) = self.asked_for(&sqe) {
            return self.on_authentication(tag, command);
        }
        let shared = &self.place.server.nvme;
        match shared.with(seat.cntlid, |c| c.io(seat.qid, &sqe)) {
            Some(Ok(command)) => self.plan(tag, sqe, command),
            Some(Err(completion)) => {
                self.has_failed(sqe.fuse(), completion.status);
                self.complete(tag, completion, &Bufs::new());
            }
            None => self.complete_failed(tag, Status::ABORTED_SQ_DELETED),
        }
    }

    fn plan(&mut self, tag: Tag, sqe: Sqe, command: IoCommand) {
        let whose = match command.is_for_all() {
            true => Whose::All,
            false => match self.volume(command.nsid) {
                Some(served) => Whose::One(served),
                None => {
                    let status = self.not_here(command.nsid);
                    self.has_failed(sqe.fuse(), status);
                    return self.complete_failed(tag, status);
                }
            },
        };
        if let Whose::One(served) = &whose {
            if command.data_out == 0 && sqe.fuse() == Fuse::None {
                self.machine.run(tag);
                return self.carry_out(tag, sqe, command, served, Bufs::new());
            }
            // Who waits for data hears of Preempt and Abort as well.
            self.caller(served);
            if sqe.fuse() == Fuse::First {
                return self.on_first(tag, sqe, command, Rc::clone(served));
            }
        }
        self.tasks.set(tag, Task::Planned { sqe, command, whose, wait: Wait::default() });
        self.machine.admit(tag, command.data_out);
    }

    /// The host gives the queue up: commands that are under way end, one way or the other, and then
    /// it is gone (NVMe Base 2.0, 6.4).
    fn on_disconnect(&mut self, tag: Tag, sqe: &Sqe) {
        let with =
            |seat: Seat| self.server().nvme.with(seat.cntlid, |c| c.disconnect(seat.qid, sqe));
        if let Some(Err(refused)) = self.seat.and_then(with) {
            return self.complete(tag, refused, &Bufs::new());
        }
        for other in self.tasks.tags() {
            match self.tasks.get(other) {
                Some(Task::Running(running)) => running.commands.abort(),
                Some(Task::Asking { wanted, .. }) => wanted.set(false),
                Some(Task::Planned { .. } | Task::Half(_) | Task::Reporting { .. }) => {
                    self.complete_failed(other, Status::ABORTED_SQ_DELETED);
                }
                _ => {}
            }
        }
        self.tasks.set(tag, Task::Disconnecting);
        self.disconnecting = Some(tag);
    }

    fn on_admin(&mut self, tag: Tag, sqe: &Sqe, seat: Seat) {
        if let Some(command) = self.asked_for(sqe) {
            return self.on_authentication(tag, command);
        }
        let server = Rc::clone(self.server());
        let judged = server.nvme.with(seat.cntlid, |c| {
            let timer = c.next_timer();
            let verdict = c.admin(tag, sqe);
            (verdict, c.next_timer() != timer)
        });
        let Some((verdict, timer_changed)) = judged else {
            return self.complete_failed(tag, Status::ABORTED_SQ_DELETED);
        };
        let sqe = *sqe;
        match verdict {
            Verdict::Complete(completion) => self.complete(tag, completion, &Bufs::new()),
            Verdict::Receive { bytes } => {
                self.tasks.set(tag, Task::Consume { sqe, wait: Wait::default() });
                self.machine.admit(tag, bytes);
            }
            Verdict::Produce { bytes } => {
                self.tasks.set(tag, Task::Produce { sqe, bytes, wait: Wait::default() });
                self.machine.admit(tag, 0);
            }
            Verdict::Hold => {
                self.tasks.set(tag, Task::Held);
                self.machine.admit(tag, 0);
            }
            Verdict::Flush => {
                self.tasks.set(tag, Task::Flushing { sqe });
                self.machine.admit(tag, 0);
            }
            Verdict::Persist { nsid, persists } => {
                let what = Consultation::Persist { nsid, persists };
                self.tasks.set(tag, Task::Consulting { sqe, what });
                self.machine.admit(tag, 0);
            }
            Verdict::TellPersistence { nsid } => {
                let what = Consultation::TellPersistence { nsid };
                self.tasks.set(tag, Task::Consulting { sqe, what });
                self.machine.admit(tag, 0);
            }
            Verdict::Abort { sqid, cid } => {
                self.tasks.set(tag, Task::Aborting);
                self.machine.admit(tag, 0);
                let asked_by = Asker::new(self.place.inbox.clone(), tag);
                if let Some(inbox) = server.nvme.queue(Seat { qid: sqid, ..seat }) {
                    inbox.push(Event::Abort { cid, asked_by });
                }
            }
        }
        if timer_changed {
            server.nvme.timer_changed(seat.cntlid);
        }
        self.on_controller();
    }

    /// Gets memory for data, now or later. In-capsule data and data by R2T are never of one
    /// command, so no command waits for memory while it holds some.
    pub(super) fn on_grant(&mut self, tag: Tag, bytes: u32, class: Class) {
        let bytes = bytes as usize;
        let (wanted, class) = match self.tasks.get(tag) {
            Some(&mut Task::Joined { first }) => return self.grant_second(first, tag),
            Some(Task::Half(_)) => of_both(bytes),
            _ => (bytes, class),
        };
        let Some(wait) = self.tasks.begin_wait(tag) else { return };
        if let Some(credit) = self.account.try_credit(wanted, class) {
            return self.on_memory(tag, wait, &credit, bytes);
        }
        let (account, inbox) = (self.account.clone(), self.place.inbox.clone());
        let task = tokio::task::spawn_local(async move {
            let credit = account.credit(wanted, class);
            let credit = match account.patience() {
                Some(patience) => tokio::time::timeout(patience, credit).await.ok(),
                None => Some(credit.await),
            };
            inbox.push(match credit {
                Some(Ok(credit)) => Event::Memory { tag, wait, credit, bytes },
                Some(Err(_)) | None => Event::NoMemory { tag, wait },
            });
        });
        self.tasks.waits_by(tag, task.abort_handle());
    }

    pub(super) fn on_memory(&mut self, tag: Tag, wait: u64, credit: &Credit, bytes: usize) {
        if self.has_ended || !self.tasks.is_waiting(tag, wait) {
            return;
        }
        match self.tasks.get(tag) {
            Some(Task::Produce { sqe, .. }) => {
                let sqe = *sqe;
                self.produce(tag, &sqe, credit.alloc(bytes));
            }
            Some(Task::Reporting { table, .. }) => {
                let data = report(table, credit.alloc(bytes));
                self.complete(tag, Completion::OK, &data);
            }
            Some(Task::Fetching { .. }) => self.fetch(tag, credit.alloc(bytes)),
            Some(Task::Half(_)) => self.on_memory_of_both(tag, credit, bytes),
            _ => self.machine.grant(tag, credit.alloc(bytes)),
        }
    }

    pub(super) fn on_no_memory(&mut self, tag: Tag, wait: u64) {
        if self.tasks.is_waiting(tag, wait) {
            // Neither says "do not retry": the host tries again.
            let status = match self.tasks.get(tag) {
                Some(Task::Connect { .. }) => Status::CONNECT_BUSY,
                _ => Status::INTERRUPTED,
            };
            self.complete_failed(tag, status);
        }
    }

    pub(super) fn on_run(&mut self, tag: Tag, data: Bufs) {
        if self.has_ended {
            return self.complete_failed(tag, Status::ABORTED_SQ_DELETED);
        }
        match self.tasks.get(tag) {
            Some(Task::Connect { sqe, .. }) => {
                let sqe = *sqe;
                self.on_connect(tag, &sqe, &data);
            }
            Some(Task::Consume { sqe, .. }) => {
                let sqe = *sqe;
                self.consume(tag, &sqe, &data);
            }
            Some(Task::Produce { bytes, .. } | Task::Fetching { bytes, .. }) => {
                let bytes = *bytes;
                self.on_grant(tag, bytes, RETURNED);
            }
            Some(Task::Sending { .. }) => self.on_message(tag, &data),
            Some(Task::Consulting { sqe, what }) => {
                let (sqe, what) = (*sqe, *what);
                self.on_consultation(tag, sqe, what);
            }
            Some(Task::Flushing { sqe }) => {
                let sqe = *sqe;
                self.flush_all(tag, sqe);
            }
            Some(Task::Planned { sqe, command, whose, .. }) => {
                let (sqe, command, whose) = (*sqe, *command, whose.clone());
                self.on_planned(tag, sqe, command, whose, data);
            }
            Some(Task::Half(_)) => self.on_half(tag, data, true),
            Some(&mut Task::Joined { first }) => self.on_half(first, data, false),
            _ => {}
        }
    }

    fn on_connect(&mut self, tag: Tag, sqe: &Sqe, data: &Bufs) {
        match Connect::parse(sqe, &data.to_vec()) {
            Ok(connect) => self.decide(tag, Box::new(connect)),
            Err(completion) => self.complete(tag, completion, &Bufs::new()),
        }
    }

    fn consume(&mut self, tag: Tag, sqe: &Sqe, data: &Bufs) {
        let data = data.to_vec();
        let completion = self.controller(|c, _| c.consume(sqe, &data));
        self.complete(tag, completion, &Bufs::new());
    }

    fn produce(&mut self, tag: Tag, sqe: &Sqe, mut memory: BufsMut) {
        let completion = self.controller(|c, _| c.produce(sqe, &mut memory));
        self.complete(tag, completion, &memory.into());
        self.on_controller();
    }

    /// What the controller answers to a command of this queue; it may have gone meanwhile.
    pub(super) fn controller(
        &self,
        f: impl FnOnce(&mut nvme::Controller, u16) -> Completion,
    ) -> Completion {
        let with = |seat: Seat| self.server().nvme.with(seat.cntlid, |c| f(c, seat.qid));
        let answer = self.seat.and_then(with);
        answer.unwrap_or(Completion::failed(Status::ABORTED_SQ_DELETED))
    }

    fn on_planned(&mut self, tag: Tag, sqe: Sqe, command: IoCommand, whose: Whose, data: Bufs) {
        let Whose::One(served) = whose else { return self.flush_all(tag, sqe) };
        if self.behind(command.nsid) != Some(served.id) {
            // The namespace went, or became another volume's, while the data was on the way.
            return self.complete_failed(tag, Status::INVALID_NAMESPACE.do_not_retry());
        }
        self.carry_out(tag, sqe, command, &served, data);
    }

    /// Carries a command out whose data is here.
    fn carry_out(
        &mut self,
        tag: Tag,
        sqe: Sqe,
        command: IoCommand,
        served: &Rc<Served>,
        data: Bufs,
    ) {
        match command.work(data, &served.volume.info()) {
            Ok(Work::Volume(request)) => {
                let caller = self.caller(served);
                let done = self.done(tag);
                match served.volume.begin_for(&caller, request, &self.account, done) {
                    Begun::Answered(result) => self.on_answer(tag, &sqe, result),
                    Begun::Runs(one) => self.runs(tag, sqe, 1, Commands::One(one)),
                }
            }
            Ok(Work::Copy(work)) => self.copy(tag, sqe, Rc::clone(served), work),
            Ok(Work::Change(change)) => self.alter(tag, sqe, slice::from_ref(served), change),
            Ok(Work::Report { bytes }) => self.consult(tag, sqe, served, Some(bytes)),
            Ok(Work::Nothing) => self.complete(tag, Completion::OK, &Bufs::new()),
            Err(status) => self.complete_failed(tag, status),
        }
    }

    pub(super) fn runs(&mut self, tag: Tag, sqe: Sqe, left: usize, commands: Commands) {
        let (failure, result, asked_by, is_preempted, second) = (None, 0, None, false, None);
        let running =
            Running { sqe, left, failure, result, commands, asked_by, is_preempted, second };
        self.tasks.set(tag, Task::Running(running));
    }

    fn copy(&mut self, tag: Tag, sqe: Sqe, served: Rc<Served>, work: CopyWork) {
        let Some(Seat { cntlid, .. }) = self.seat else { return };
        let (server, inbox) = (Rc::clone(self.server()), self.place.inbox.clone());
        let (caller, stopped) = (self.caller(&served), Stopped::default());
        self.runs(tag, sqe, 1, Commands::Copy(stopped.clone()));
        let tell = move |result| inbox.push(Event::Copied { tag, result });
        let promise = Promise::new(Err((0, copy::ABORTED)), tell);
        let end = copy::End { server, served, caller, cntlid, nsid: sqe.nsid.get() };
        tokio::task::spawn_local(async move {
            promise.keep(copy::carry_out(end, work, stopped).await);
        });
    }

    pub(super) fn on_copied(&mut self, tag: Tag, result: Result<(), (u64, Failure)>) {
        if let (Err((number, _)), Some(Task::Running(running))) = (result, self.tasks.get(tag)) {
            running.result = number;
        }
        self.on_done(tag, result.map(|()| Bufs::new()).map_err(|(_, failure)| failure));
    }

    /// Whose namespace this is.
    pub(super) fn behind(&self, nsid: u32) -> Option<VolumeId> {
        let seat = self.seat?;
        let uuid = |c: &mut nvme::Controller| c.namespaces().get(&nsid).map(|ns| ns.uuid);
        self.server().nvme.with(seat.cntlid, uuid)?.map(VolumeId)
    }

    /// What is told of a namespace whose volume is not here, before the controller has heard of that:
    /// it was taken away, or this node does not serve it for now.
    pub(super) fn not_here(&self, nsid: u32) -> Status {
        let catalog = self.server().catalog();
        let listed = |id| catalog.subsystems.values().any(|s| s.namespaces.get(&nsid) == Some(&id));
        match self.behind(nsid) {
            Some(id) if listed(id) => Status::ANA_TRANSITION,
            _ => Status::INVALID_NAMESPACE.do_not_retry(),
        }
    }

    /// The volume behind a namespace.
    pub(super) fn volume(&self, nsid: u32) -> Option<Rc<Served>> {
        self.server().volume(self.behind(nsid)?)
    }

    /// The volumes behind all namespaces that the host sees, if all are here: what is asked of all of them
    /// is else for a node that has them.
    pub(super) fn all_volumes(&self) -> Result<Vec<Rc<Served>>, Status> {
        let count = |c: &mut nvme::Controller| c.namespaces().len();
        let seen = self.seat.and_then(|seat| self.server().nvme.with(seat.cntlid, count));
        let volumes = self.volumes();
        if volumes.len() == seen.unwrap_or_default() {
            return Ok(volumes);
        }
        Err(Status::ANA_INACCESSIBLE)
    }

    /// The volumes behind the namespaces that the host sees, as far as they are here.
    pub(super) fn volumes(&self) -> Vec<Rc<Served>> {
        let Some(seat) = self.seat else { return Vec::new() };
        let uuids = |c: &mut nvme::Controller| -> Vec<[u8; 16]> {
            c.namespaces().values().map(|ns| ns.uuid).collect()
        };
        let uuids = self.server().nvme.with(seat.cntlid, uuids).unwrap_or_default();
        uuids.into_iter().filter_map(|id| self.server().volume(VolumeId(id))).collect()
    }

    pub(super) fn start(&self, tag: Tag, served: &Served, request: Request) -> volume::Command {
        served.volume.start_for(&self.caller(served), request, &self.account, self.done(tag))
    }

    /// Leaves a volume's answer for later.
    fn done(&self, tag: Tag) -> impl FnOnce(Result<Bufs, Failure>) + use<> {
        let inbox = self.place.inbox.clone();
        move |result| inbox.push(Event::Done { tag, result })
    }

    /// A volume has answered at once.
    fn on_answer(&mut self, tag: Tag, sqe: &Sqe, result: Result<Bufs, Failure>) {
        match result {
            Ok(data) => self.complete(tag, Completion::OK, &data),
            Err(failure) => {
                let completion = self.controller(|c, qid| c.failed(qid, sqe, failure));
                self.complete(tag, completion, &Bufs::new());
            }
        }
    }

    /// The host as this volume knows it.
    pub(super) fn caller(&self, served: &Served) -> Rc<Caller> {
        let Some(gate) = served.volume.gate() else { return Gate::node() };
        let mut callers = self.callers.borrow_mut();
        if let Some(caller) = callers.get(&served.id).filter(|c| c.is_of(gate)) {
            return Rc::clone(caller);
        }
        let host_id = |c: &mut nvme::Controller| c.host_id();
        let host = self.seat.and_then(|seat| self.server().nvme.with(seat.cntlid, host_id));
        let party = Party { initiator: Initiator::Host(host.unwrap_or_default()), port: 0 };
        let (inbox, volume) = (self.place.inbox.clone(), served.id);
        let tell = move |notices| inbox.push(Event::Told { volume, notices });
        let caller = gate.enter(party, Box::new(tell));
        callers.insert(served.id, Rc::clone(&caller));
        caller
    }

    fn flush_all(&mut self, tag: Tag, sqe: Sqe) {
        let volumes = match self.all_volumes() {
            Ok(volumes) => volumes,
            Err(status) => return self.complete_failed(tag, status),
        };
        if volumes.is_empty() {
            return self.complete(tag, Completion::OK, &Bufs::new());
        }
        let start = |served: &Rc<Served>| self.start(tag, served, Request::Flush);
        let commands: Vec<_> = volumes.iter().map(start).collect();
        self.runs(tag, sqe, commands.len(), Commands::Many(commands));
    }

    pub(super) fn on_done(&mut self, tag: Tag, result: Result<Bufs, Failure>) {
        let running = match self.tasks.get(tag) {
            Some(Task::Running(running)) => running,
            Some(Task::Answered { left }) => {
                *left -= 1;
                if *left == 0 {
                    self.complete(tag, Completion::OK, &Bufs::new());
                }
                return;
            }
            _ => return,
        };
        running.left -= 1;
        let data = match result {
            Ok(data) => data,
            Err(failure) => {
                running.failure.get_or_insert(failure);
                Bufs::new()
            }
        };
        if running.left > 0 {
            return;
        }
        let (sqe, failure, asked_by) = (running.sqe, running.failure, running.asked_by.take());
        let (is_preempted, result) = (running.is_preempted, running.result);
        let aborted = failure == Some(Failure::Device(block::Error::Aborted));
        let completion = match failure {
            None => Completion::OK,
            Some(_) if aborted && is_preempted => self.controller(|c, qid| c.preempted(qid, &sqe)),
            Some(failure) => self.controller(|c, qid| c.failed(qid, &sqe, failure)),
        };
        self.complete(tag, Completion { result, ..completion }, &data);
        if let Some(asker) = asked_by {
            asker.answer(aborted);
        }
    }

    /// Asks for the abort of a command of this queue (NVMe Base 2.0, 5.1).
    pub(super) fn abort(&mut self, cid: u16, asked_by: Asker) {
        let Some(tag) = self.machine.find(cid) else { return asked_by.answer(false) };
        let tag = match self.tasks.get(tag) {
            Some(&mut Task::Joined { first }) => first,
            _ => tag,
        };
        match self.tasks.get(tag) {
            Some(Task::Running(running)) if running.asked_by.is_none() => {
                running.commands.abort();
                running.asked_by = Some(asked_by);
            }
            Some(Task::Planned { .. } | Task::Half(_)) => {
                self.complete_failed(tag, Status::ABORT_REQUESTED);
                asked_by.answer(true);
            }
            _ => asked_by.answer(false),
        }
    }

    pub(super) fn on_abort_answer(&mut self, tag: Tag, aborted: bool) {
        if matches!(self.tasks.get(tag), Some(Task::Aborting)) {
            let completion = self.controller(|c, _| c.abort_finished(aborted));
            self.complete(tag, completion, &Bufs::new());
        }
    }

    /// The machine has answered the command by itself.
    pub(super) fn on_answered(&mut self, tag: Tag) {
        match self.tasks.get(tag) {
            Some(Task::Running(running)) => {
                let left = running.left;
                self.tasks.set(tag, Task::Answered { left });
            }
            // For the other half of it, if it has one.
            _ => self.complete_failed(tag, Status::TRANSIENT_TRANSPORT),
        }
    }

    pub(super) fn complete_failed(&mut self, tag: Tag, status: Status) {
        self.complete(tag, Completion::failed(status), &Bufs::new());
    }

    pub(super) fn complete(&mut self, tag: Tag, completion: Completion, data: &Bufs) {
        let task = self.tasks.take(tag);
        self.machine.complete(tag, completion, data);
        if let Some(task) = task {
            self.end_other_half(tag, &task, completion);
        }
    }
}
