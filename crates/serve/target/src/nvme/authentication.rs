//! Queues whose host has to prove who it is (RFD 0020, 3): what it may do before, and the messages.

use std::rc::Rc;
use std::sync::Arc;

use block::{Bufs, BufsMut};
use nvme::auth::{
    AuthCommand, Config, Done, Policy, Responder, SharedConfig, TooShort, Work, write_message,
};
use nvme::{Completion, Connect, Sqe, Status, Tag};
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use super::tasks::{Task, Wait};
use super::{Event, Host};
use crate::catalog::{Admission, Catalog, HostSecrets};

/// The proof that is asked for on a queue.
#[derive(Debug)]
pub(super) struct Asked {
    connect: Box<Connect>,
    /// What is to be proved the next time.
    config: SharedConfig,
    responder: Responder,
    /// The command of the authentication that came last. There is one at a time.
    current: Option<Tag>,
    /// Whether the host has been let in.
    is_in: bool,
    /// Ends the connection of a host that leaves an authentication half done.
    patience: Option<Patience>,
}

#[derive(Debug)]
struct Patience {
    number: u64,
    _timer: AbortOnDropHandle<()>,
}

/// What a host that connects has to prove; `None` if that is not known.
pub(super) fn config(secrets: &HostSecrets, connect: &Connect) -> Option<SharedConfig> {
    let HostSecrets::Known { host, controller } = secrets else { return None };
    Some(Arc::new(Config {
        host_nqn: connect.hostnqn.clone(),
        subsystem_nqn: connect.subnqn.clone(),
        host_secret: host.clone(),
        controller_secret: controller.clone(),
        policy: Policy::default(),
    }))
}

impl Asked {
    pub(super) fn new(connect: Box<Connect>, config: SharedConfig) -> Self {
        let responder = Responder::default();
        Self { connect, config, responder, current: None, is_in: false, patience: None }
    }

    /// Takes a secret that has been set anew; where there is none to be had the old one stays.
    fn renew(&mut self, catalog: &Catalog) {
        let entry = catalog.subsystems.get(&self.connect.subnqn);
        let admission = entry.and_then(|entry| entry.access.admission(&self.connect.hostnqn));
        if let Some(Admission::Proof(secrets)) = admission
            && let Some(config) = config(secrets, &self.connect)
        {
            self.config = config;
        }
    }
}

impl Host {
    /// Whether the host has proved what it has to, if anything.
    pub(super) fn has_proved(&self) -> bool {
        self.asked.as_ref().is_none_or(|asked| asked.responder.is_authenticated())
    }

    /// The command of an authentication, on a queue where that is asked for.
    pub(super) fn asked_for(&self, sqe: &Sqe) -> Option<Result<AuthCommand, Status>> {
        self.asked.as_ref().and_then(|_| AuthCommand::parse(sqe))
    }

    /// A command of an authentication has arrived, on a queue where that is asked for.
    pub(super) fn on_authentication(&mut self, tag: Tag, command: Result<AuthCommand, Status>) {
        // A stranger's I/O queue does not keep alive what it has connected to.
        if self.has_proved() || self.seat.is_some_and(|seat| seat.qid == 0) {
            self.is_heard();
        }
        let Some(asked) = &mut self.asked else { return };
        let current = asked.current.and_then(|tag| self.tasks.get(tag));
        if matches!(current, Some(Task::Sending { .. } | Task::Fetching { .. })) {
            return self.complete_failed(tag, Status::COMMAND_SEQUENCE.do_not_retry());
        }
        let wait = Wait::default();
        let (task, data_out) = match command {
            Ok(AuthCommand::Send { bytes }) => (Task::Sending { wait }, bytes),
            Ok(AuthCommand::Receive { bytes }) => (Task::Fetching { bytes, wait }, 0),
            Err(status) => return self.complete_failed(tag, status),
        };
        asked.current = Some(tag);
        self.tasks.set(tag, task);
        self.machine.admit(tag, data_out);
    }

    /// A message of the host is here.
    pub(super) fn on_message(&mut self, tag: Tag, message: &Bufs) {
        let server = Rc::clone(self.server());
        let Some(asked) = &mut self.asked else { return };
        asked.renew(&server.catalog());
        let begin = || (SharedConfig::clone(&asked.config), server.nvme.fresh(server.core()));
        match asked.responder.send(&message.to_vec(), begin) {
            None => self.on_taken(tag),
            Some(work) => self.calculate(tag, work),
        }
    }

    /// Has powers raised beside the core, those of one connection at a time.
    fn calculate(&mut self, tag: Tag, work: Work) {
        let Some(wait) = self.tasks.begin_wait(tag) else { return };
        let (server, inbox) = (Rc::clone(self.server()), self.place.inbox.clone());
        let task = tokio::task::spawn_local(async move {
            let turn = server.nvme.turn().await;
            let raise = move || {
                let _turn = turn;
                work.run()
            };
            let done = server.core().offload(raise).await;
            inbox.push(Event::Calculated { tag, wait, done });
        });
        self.tasks.waits_by(tag, task.abort_handle());
    }

    pub(super) fn on_calculated(&mut self, tag: Tag, wait: u64, done: Option<Done>) {
        if !self.tasks.is_waiting(tag, wait) {
            return;
        }
        let Some(done) = done else { return self.close("its authentication cannot be calculated") };
        if let Some(asked) = &mut self.asked {
            asked.responder.done(done);
        }
        self.on_taken(tag);
    }

    /// What the host has sent was taken. Whatever was wrong with it, it hears when it asks.
    fn on_taken(&mut self, tag: Tag) {
        self.complete(tag, Completion::OK, &Bufs::new());
        self.on_step();
    }

    /// There is memory for the message that the host fetches.
    pub(super) fn fetch(&mut self, tag: Tag, mut room: BufsMut) {
        let bytes = room.iter().map(|buffer| buffer.len()).sum();
        let Some(asked) = &mut self.asked else { return };
        match asked.responder.receive(bytes) {
            Ok(message) => {
                write_message(&message, &mut room);
                self.complete(tag, Completion::OK, &room.into());
            }
            Err(TooShort { .. }) => self.complete_failed(tag, Status::INVALID_FIELD.do_not_retry()),
        }
        self.on_step();
    }

    /// A message has gone to and fro: lets the host in once it has proved itself, and go if it has not.
    fn on_step(&mut self) {
        let Some(asked) = &mut self.asked else { return };
        if let Some(end) = asked.responder.end() {
            if let Some(attempt) = self.attempt.take() {
                attempt.failed(&asked.connect.hostnqn, &format!("{end:?}"));
            }
            // That is all there is to be said of it.
            self.machine.close();
            return self.leave();
        }
        let is_done = asked.responder.is_authenticated() && asked.responder.is_idle();
        let enters = is_done && !asked.is_in;
        asked.is_in |= is_done;
        match (is_done, asked.patience.is_some()) {
            (true, _) => asked.patience = None,
            (false, true) => {}
            (false, false) => self.begin_patience(),
        }
        if enters && let Some(asked) = &self.asked {
            let connect = asked.connect.clone();
            if let Some(attempt) = self.attempt.take() {
                attempt.succeeded();
            }
            self.enters(&connect);
        }
    }

    /// The host has from now on as long as a login may take.
    pub(super) fn begin_patience(&mut self) {
        let number = self.tasks.number();
        let (inbox, time) = (self.place.inbox.clone(), self.server().limits().login_timeout);
        let timer = tokio::task::spawn_local(async move {
            sleep(time).await;
            inbox.push(Event::Unproved { number });
        });
        let _timer = AbortOnDropHandle::new(timer);
        if let Some(asked) = &mut self.asked {
            asked.patience = Some(Patience { number, _timer });
        }
    }

    pub(super) fn on_unproved(&mut self, number: u64) {
        let patience = self.asked.as_ref().and_then(|asked| asked.patience.as_ref());
        if patience.is_some_and(|patience| patience.number == number) {
            self.close("its host has not authenticated in time");
        }
    }
}
