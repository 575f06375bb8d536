//! A command from its arrival to its completion.

use std::rc::Rc;
use std::slice;

use block::{Bufs, BufsMut, Credit, MemoryClass, Request, RequestError};
use nvme::auth::AuthCommand;
use nvme::entry::{FabricsType, Fuse};
use nvme::fabrics::CONNECT_BYTES;
use nvme::{AdminAction, Completion, Connect, CopyRequest, IoCommand, IoWork, Sqe, Status, Tag};

use reservation::{Initiator, ItNexus};
use volume::{ReservationGate, StartOutcome, VolumeClient};

use super::association::RETURN_DATA_CLASS;
use super::fused::memory_of_both;
use super::reservations::report;
use super::tasks::{CommandVolumes, Commands, PersistenceCommand, Running, Task, Wait};
use super::{HostConnection, copy};
use crate::catalog::VolumeId;
use crate::nvme_controllers::{AbortRequest, Event, QueueRef};
use crate::served_volumes::ServedVolume;
use crate::third_party_copy::{CancelToken, CompletionGuard};

impl HostConnection {
    pub(super) fn on_arrived(&mut self, tag: Tag, sqe: Sqe) {
        match self.queue {
            // Before the queue is connected only Connect is accepted.
            None if sqe.data_bytes() == CONNECT_BYTES => {
                self.tasks.set(tag, Task::Connect { sqe, wait: Wait::default() });
                self.machine.admit(tag, CONNECT_BYTES);
            }
            None => self.complete_failed(tag, Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
            Some(_) if !self.is_authenticated() && AuthCommand::parse(&sqe).is_none() => {
                // Linux authenticates and sends it again; with Do Not Retry it would give up.
                self.complete_failed(tag, Status::AUTHENTICATION_REQUIRED);
            }
            Some(queue) if queue.qid == 0 => self.on_admin(tag, &sqe, queue),
            Some(queue) => self.on_io(tag, sqe, queue),
        }
    }

    fn on_io(&mut self, tag: Tag, sqe: Sqe, queue: QueueRef) {
        if self.disconnecting.is_some() {
            return self.complete_failed(tag, Status::ABORTED_SQ_DELETED);
        }
        if !self.check_fused_order(tag, &sqe) {
            return;
        }
        if sqe.fabrics() == Some(FabricsType::Disconnect) {
            return self.on_disconnect(tag, &sqe);
        }
        if let Some(command) = self.parse_auth_command(&sqe) {
            return self.on_authentication(tag, command);
        }
        let shared = &self.context.server.nvme;
        match shared.with_controller(queue.cntlid, |c| c.io(queue.qid, &sqe)) {
            Some(Ok(command)) => self.plan(tag, sqe, command),
            Some(Err(completion)) => {
                self.record_failed_first(sqe.fuse(), completion.status);
                self.complete(tag, completion, &Bufs::new());
            }
            None => self.complete_failed(tag, Status::ABORTED_SQ_DELETED),
        }
    }

    fn plan(&mut self, tag: Tag, sqe: Sqe, command: IoCommand) {
        let whose = match command.is_broadcast() {
            true => CommandVolumes::All,
            false => match self.volume(command.nsid) {
                Some(served) => CommandVolumes::One(served),
                None => {
                    let status = self.unavailable_status(command.nsid);
                    self.record_failed_first(sqe.fuse(), status);
                    return self.complete_failed(tag, status);
                }
            },
        };
        if let CommandVolumes::One(served) = &whose {
            if command.data_out == 0 && sqe.fuse() == Fuse::None {
                self.machine.run(tag);
                return self.execute(tag, sqe, command, served, Bufs::new());
            }
            // Registers the caller, so that Preempt and Abort also reaches commands that wait for
            // data.
            self.caller(served);
            if sqe.fuse() == Fuse::First {
                return self.on_first(tag, sqe, command, Rc::clone(served));
            }
        }
        self.tasks.set(tag, Task::Planned { sqe, command, volumes: whose, wait: Wait::default() });
        self.machine.admit(tag, command.data_out);
    }

    /// The host disconnects the queue: its commands in flight end, and then the queue is removed
    /// (NVMe Base 2.0, 6.4).
    fn on_disconnect(&mut self, tag: Tag, sqe: &Sqe) {
        let with = |queue: QueueRef| {
            self.server().nvme.with_controller(queue.cntlid, |c| c.disconnect(queue.qid, sqe))
        };
        if let Some(Err(refused)) = self.queue.and_then(with) {
            return self.complete(tag, refused, &Bufs::new());
        }
        for other in self.tasks.tags() {
            match self.tasks.get(other) {
                Some(Task::Running(running)) => running.commands.abort(),
                Some(Task::AccessingReservations { is_wanted: wanted, .. }) => wanted.set(false),
                Some(Task::Planned { .. } | Task::FusedFirst(_) | Task::Reporting { .. }) => {
                    self.complete_failed(other, Status::ABORTED_SQ_DELETED);
                }
                _ => {}
            }
        }
        self.tasks.set(tag, Task::Disconnecting);
        self.disconnecting = Some(tag);
    }

    fn on_admin(&mut self, tag: Tag, sqe: &Sqe, queue: QueueRef) {
        if let Some(command) = self.parse_auth_command(sqe) {
            return self.on_authentication(tag, command);
        }
        let server = Rc::clone(self.server());
        let checked = server.nvme.with_controller(queue.cntlid, |c| {
            let timer = c.next_timer();
            let verdict = c.admin(tag, sqe);
            (verdict, c.next_timer() != timer)
        });
        let Some((verdict, timer_changed)) = checked else {
            return self.complete_failed(tag, Status::ABORTED_SQ_DELETED);
        };
        let sqe = *sqe;
        match verdict {
            AdminAction::Complete(completion) => self.complete(tag, completion, &Bufs::new()),
            AdminAction::Receive { bytes } => {
                self.tasks.set(tag, Task::Consume { sqe, wait: Wait::default() });
                self.machine.admit(tag, bytes);
            }
            AdminAction::Produce { bytes } => {
                self.tasks.set(tag, Task::Produce { sqe, bytes, wait: Wait::default() });
                self.machine.admit(tag, 0);
            }
            AdminAction::Hold => {
                self.tasks.set(tag, Task::Held);
                self.machine.admit(tag, 0);
            }
            AdminAction::Flush => {
                self.tasks.set(tag, Task::Flushing { sqe });
                self.machine.admit(tag, 0);
            }
            AdminAction::SetPersistence { nsid, persist: persists } => {
                let what = PersistenceCommand::Set { nsid, persist: persists };
                self.tasks.set(tag, Task::PersistencePending { sqe, command: what });
                self.machine.admit(tag, 0);
            }
            AdminAction::GetPersistence { nsid } => {
                let what = PersistenceCommand::Get { nsid };
                self.tasks.set(tag, Task::PersistencePending { sqe, command: what });
                self.machine.admit(tag, 0);
            }
            AdminAction::Abort { sqid, cid } => {
                self.tasks.set(tag, Task::Aborting);
                self.machine.admit(tag, 0);
                let asked_by = AbortRequest::new(self.context.inbox.clone(), tag);
                if let Some(inbox) = server.nvme.queue(QueueRef { qid: sqid, ..queue }) {
                    inbox.push(Event::Abort { cid, abort_request: asked_by });
                }
            }
        }
        if timer_changed {
            server.nvme.timer_changed(queue.cntlid);
        }
        self.on_controller();
    }

    /// Allocates memory for data, now or later. A command has either in-capsule data or data by
    /// R2T, so none waits for memory while it holds some.
    pub(super) fn on_grant(&mut self, tag: Tag, bytes: u32, class: MemoryClass) {
        let bytes = bytes as usize;
        let (wanted, class) = match self.tasks.get(tag) {
            Some(&mut Task::FusedSecond { first }) => return self.grant_second(first, tag),
            Some(Task::FusedFirst(_)) => memory_of_both(bytes),
            _ => (bytes, class),
        };
        let Some(wait) = self.tasks.begin_wait(tag) else { return };
        if let Some(credit) = self.account.try_credit(wanted, class) {
            return self.on_memory(tag, wait, &credit, bytes);
        }
        let (account, inbox) = (self.account.clone(), self.context.inbox.clone());
        let task = tokio::task::spawn_local(async move {
            let credit = account.credit(wanted, class);
            let credit = match account.max_wait() {
                Some(patience) => tokio::time::timeout(patience, credit).await.ok(),
                None => Some(credit.await),
            };
            inbox.push(match credit {
                Some(Ok(credit)) => Event::Memory { tag, wait, credit, bytes },
                Some(Err(_)) | None => Event::NoMemory { tag, wait },
            });
        });
        self.tasks.set_wait_task(tag, task.abort_handle());
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
            Some(Task::FusedFirst(_)) => self.on_memory_of_both(tag, credit, bytes),
            _ => self.machine.grant(tag, credit.alloc(bytes)),
        }
    }

    pub(super) fn on_no_memory(&mut self, tag: Tag, wait: u64) {
        if self.tasks.is_waiting(tag, wait) {
            // Neither sets Do Not Retry: the host retries.
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
                self.on_grant(tag, bytes, RETURN_DATA_CLASS);
            }
            Some(Task::Sending { .. }) => self.on_message(tag, &data),
            Some(Task::PersistencePending { sqe, command: what }) => {
                let (sqe, what) = (*sqe, *what);
                self.on_persistence_command(tag, sqe, what);
            }
            Some(Task::Flushing { sqe }) => {
                let sqe = *sqe;
                self.flush_all(tag, sqe);
            }
            Some(Task::Planned { sqe, command, volumes: whose, .. }) => {
                let (sqe, command, whose) = (*sqe, *command, whose.clone());
                self.on_planned(tag, sqe, command, whose, data);
            }
            Some(Task::FusedFirst(_)) => self.on_half(tag, data, true),
            Some(&mut Task::FusedSecond { first }) => self.on_half(first, data, false),
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

    /// The controller's answer to a command of this queue; the controller may have gone meanwhile.
    pub(super) fn controller(
        &self,
        f: impl FnOnce(&mut nvme::Controller, u16) -> Completion,
    ) -> Completion {
        let with =
            |queue: QueueRef| self.server().nvme.with_controller(queue.cntlid, |c| f(c, queue.qid));
        let answer = self.queue.and_then(with);
        answer.unwrap_or(Completion::failed(Status::ABORTED_SQ_DELETED))
    }

    fn on_planned(
        &mut self,
        tag: Tag,
        sqe: Sqe,
        command: IoCommand,
        whose: CommandVolumes,
        data: Bufs,
    ) {
        let CommandVolumes::One(served) = whose else { return self.flush_all(tag, sqe) };
        if self.volume_id_of(command.nsid) != Some(served.id) {
            // The namespace was removed or remapped to another volume before the data arrived.
            return self.complete_failed(tag, Status::INVALID_NAMESPACE.do_not_retry());
        }
        self.execute(tag, sqe, command, &served, data);
    }

    /// Executes a command whose data has arrived.
    fn execute(
        &mut self,
        tag: Tag,
        sqe: Sqe,
        command: IoCommand,
        served: &Rc<ServedVolume>,
        data: Bufs,
    ) {
        match command.into_work(data, &served.volume.info()) {
            Ok(IoWork::Volume(request)) => {
                let caller = self.caller(served);
                let done = self.completion_callback(tag);
                match served.volume.start_or_answer(&caller, request, &self.account, done) {
                    StartOutcome::Answered(result) => self.on_answer(tag, &sqe, result),
                    StartOutcome::Running(one) => self.set_running(tag, sqe, 1, Commands::One(one)),
                }
            }
            Ok(IoWork::Copy(work)) => self.copy(tag, sqe, Rc::clone(served), work),
            Ok(IoWork::ChangeReservations(change)) => {
                self.change_reservations(tag, sqe, slice::from_ref(served), change);
            }
            Ok(IoWork::ReservationReport { bytes }) => {
                self.read_reservations(tag, sqe, served, Some(bytes));
            }
            Ok(IoWork::Nothing) => self.complete(tag, Completion::OK, &Bufs::new()),
            Err(status) => self.complete_failed(tag, status),
        }
    }

    pub(super) fn set_running(&mut self, tag: Tag, sqe: Sqe, left: usize, commands: Commands) {
        let (failure, result, asked_by, is_preempted, second) = (None, 0, None, false, None);
        let running = Running {
            sqe,
            pending_volumes: left,
            failure,
            result,
            commands,
            abort_request: asked_by,
            is_preempted,
            second,
        };
        self.tasks.set(tag, Task::Running(running));
    }

    fn copy(&mut self, tag: Tag, sqe: Sqe, served: Rc<ServedVolume>, work: CopyRequest) {
        let Some(QueueRef { cntlid, .. }) = self.queue else { return };
        let (server, inbox) = (Rc::clone(self.server()), self.context.inbox.clone());
        let (caller, stopped) = (self.caller(&served), CancelToken::default());
        self.set_running(tag, sqe, 1, Commands::Copy(stopped.clone()));
        let tell = move |result| inbox.push(Event::CopyDone { tag, result });
        let promise = CompletionGuard::new(Err((0, copy::ABORTED)), tell);
        let end = copy::CopyContext { server, served, caller, cntlid, nsid: sqe.nsid.get() };
        tokio::task::spawn_local(async move {
            promise.complete(copy::run_copy(end, work, stopped).await);
        });
    }

    pub(super) fn on_copied(&mut self, tag: Tag, result: Result<(), (u64, RequestError)>) {
        if let (Err((number, _)), Some(Task::Running(running))) = (result, self.tasks.get(tag)) {
            running.result = number;
        }
        self.on_done(tag, result.map(|()| Bufs::new()).map_err(|(_, failure)| failure));
    }

    /// The volume of a namespace.
    pub(super) fn volume_id_of(&self, nsid: u32) -> Option<VolumeId> {
        let queue = self.queue?;
        let uuid = |c: &mut nvme::Controller| c.namespaces().get(&nsid).map(|ns| ns.uuid);
        self.server().nvme.with_controller(queue.cntlid, uuid)?.map(VolumeId)
    }

    /// The status for a namespace whose volume is not here, before the controller knows: the
    /// namespace was removed, or this node does not serve it for now.
    pub(super) fn unavailable_status(&self, nsid: u32) -> Status {
        let catalog = self.server().catalog();
        let listed = |id| catalog.subsystems.values().any(|s| s.namespaces.get(&nsid) == Some(&id));
        match self.volume_id_of(nsid) {
            Some(id) if listed(id) => Status::ANA_TRANSITION,
            _ => Status::INVALID_NAMESPACE.do_not_retry(),
        }
    }

    /// The served volume of a namespace.
    pub(super) fn volume(&self, nsid: u32) -> Option<Rc<ServedVolume>> {
        self.server().volume(self.volume_id_of(nsid)?)
    }

    /// The volumes of all namespaces that the host sees, if all are here: a command for all of them
    /// otherwise belongs to a node that has them.
    pub(super) fn all_volumes(&self) -> Result<Vec<Rc<ServedVolume>>, Status> {
        let count = |c: &mut nvme::Controller| c.namespaces().len();
        let seen =
            self.queue.and_then(|queue| self.server().nvme.with_controller(queue.cntlid, count));
        let volumes = self.volumes();
        if volumes.len() == seen.unwrap_or_default() {
            return Ok(volumes);
        }
        Err(Status::ANA_INACCESSIBLE)
    }

    /// The volumes of the namespaces that the host sees, as far as they are here.
    pub(super) fn volumes(&self) -> Vec<Rc<ServedVolume>> {
        let Some(queue) = self.queue else { return Vec::new() };
        let uuids = |c: &mut nvme::Controller| -> Vec<[u8; 16]> {
            c.namespaces().values().map(|ns| ns.uuid).collect()
        };
        let uuids = self.server().nvme.with_controller(queue.cntlid, uuids).unwrap_or_default();
        uuids.into_iter().filter_map(|id| self.server().volume(VolumeId(id))).collect()
    }

    pub(super) fn start(
        &self,
        tag: Tag,
        served: &ServedVolume,
        request: Request,
    ) -> volume::Command {
        served.volume.start_for(
            &self.caller(served),
            request,
            &self.account,
            self.completion_callback(tag),
        )
    }

    /// A callback that delivers a volume's answer to the inbox.
    fn completion_callback(&self, tag: Tag) -> impl FnOnce(Result<Bufs, RequestError>) + use<> {
        let inbox = self.context.inbox.clone();
        move |result| inbox.push(Event::Done { tag, result })
    }

    /// A volume has answered immediately.
    fn on_answer(&mut self, tag: Tag, sqe: &Sqe, result: Result<Bufs, RequestError>) {
        match result {
            Ok(data) => self.complete(tag, Completion::OK, &data),
            Err(failure) => {
                let completion = self.controller(|c, qid| c.fail(qid, sqe, failure));
                self.complete(tag, completion, &Bufs::new());
            }
        }
    }

    /// The host as a caller of this volume.
    pub(super) fn caller(&self, served: &ServedVolume) -> Rc<VolumeClient> {
        let Some(gate) = served.volume.reservation_gate() else {
            return ReservationGate::node_client();
        };
        let mut callers = self.callers.borrow_mut();
        if let Some(caller) = callers.get(&served.id).filter(|c| c.is_client_of(gate)) {
            return Rc::clone(caller);
        }
        let host_id = |c: &mut nvme::Controller| c.host_id();
        let host =
            self.queue.and_then(|queue| self.server().nvme.with_controller(queue.cntlid, host_id));
        let party = ItNexus { initiator: Initiator::Host(host.unwrap_or_default()), port: 0 };
        let (inbox, volume) = (self.context.inbox.clone(), served.id);
        let tell = move |notices| inbox.push(Event::ReservationNotifications { volume, notices });
        let caller = gate.attach_client(party, Box::new(tell));
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
        let start = |served: &Rc<ServedVolume>| self.start(tag, served, Request::Flush);
        let commands: Vec<_> = volumes.iter().map(start).collect();
        self.set_running(tag, sqe, commands.len(), Commands::Many(commands));
    }

    pub(super) fn on_done(&mut self, tag: Tag, result: Result<Bufs, RequestError>) {
        let running = match self.tasks.get(tag) {
            Some(Task::Running(running)) => running,
            Some(Task::Answered { pending_volumes: left }) => {
                *left -= 1;
                if *left == 0 {
                    self.complete(tag, Completion::OK, &Bufs::new());
                }
                return;
            }
            _ => return,
        };
        running.pending_volumes -= 1;
        let data = match result {
            Ok(data) => data,
            Err(failure) => {
                running.failure.get_or_insert(failure);
                Bufs::new()
            }
        };
        if running.pending_volumes > 0 {
            return;
        }
        let (sqe, failure, asked_by) = (running.sqe, running.failure, running.abort_request.take());
        let (is_preempted, result) = (running.is_preempted, running.result);
        let aborted = failure == Some(RequestError::Device(block::Error::Aborted));
        let completion = match failure {
            None => Completion::OK,
            Some(_) if aborted && is_preempted => {
                self.controller(|c, qid| c.fail_preempted(qid, &sqe))
            }
            Some(failure) => self.controller(|c, qid| c.fail(qid, &sqe, failure)),
        };
        self.complete(tag, Completion { result, ..completion }, &data);
        if let Some(asker) = asked_by {
            asker.answer(aborted);
        }
    }

    /// Asks for the abort of a command of this queue (NVMe Base 2.0, 5.1).
    pub(super) fn abort(&mut self, cid: u16, asked_by: AbortRequest) {
        let Some(tag) = self.machine.find(cid) else { return asked_by.answer(false) };
        let tag = match self.tasks.get(tag) {
            Some(&mut Task::FusedSecond { first }) => first,
            _ => tag,
        };
        match self.tasks.get(tag) {
            Some(Task::Running(running)) if running.abort_request.is_none() => {
                running.commands.abort();
                running.abort_request = Some(asked_by);
            }
            Some(Task::Planned { .. } | Task::FusedFirst(_)) => {
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

    /// The machine has completed the command by itself.
    pub(super) fn on_answered(&mut self, tag: Tag) {
        match self.tasks.get(tag) {
            Some(Task::Running(running)) => {
                let left = running.pending_volumes;
                self.tasks.set(tag, Task::Answered { pending_volumes: left });
            }
            // For the other command of a fused pair, if there is one.
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
