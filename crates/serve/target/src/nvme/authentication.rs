//! Queues whose host must authenticate (RFD 0020, 3): what it may do before that, and the messages.

use std::rc::Rc;
use std::sync::Arc;

use block::{Bufs, BufsMut};
use nvme::auth::{
    AuthCommand, AuthPolicy, BufferTooShort, Config, ControllerAuthenticator, DhComputation,
    DhResult, SharedConfig, write_message,
};
use nvme::{Completion, Connect, Sqe, Status, Tag};
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use super::HostConnection;
use super::tasks::{Task, Wait};
use crate::catalog::{AccessRule, Catalog, HostSecrets};
use crate::nvme_controllers::Event;

/// The authentication of a queue.
#[derive(Debug)]
pub(super) struct QueueAuthentication {
    connect: Box<Connect>,
    /// The settings for the next transaction.
    config: SharedConfig,
    authenticator: ControllerAuthenticator,
    /// The latest authentication command. There is one at a time.
    current: Option<Tag>,
    /// Whether the host has been admitted.
    is_admitted: bool,
    /// Closes the connection of a host that does not complete an authentication.
    timeout: Option<AuthTimeout>,
}

#[derive(Debug)]
struct AuthTimeout {
    number: u64,
    _timer: AbortOnDropHandle<()>,
}

/// The authentication settings of a host that connects; `None` if they are unknown.
pub(super) fn config(secrets: &HostSecrets, connect: &Connect) -> Option<SharedConfig> {
    let HostSecrets::Known { host, controller } = secrets else { return None };
    Some(Arc::new(Config {
        host_nqn: connect.hostnqn.clone(),
        subsystem_nqn: connect.subnqn.clone(),
        host_secret: host.clone(),
        controller_secret: controller.clone(),
        policy: AuthPolicy::default(),
    }))
}

impl QueueAuthentication {
    pub(super) fn new(connect: Box<Connect>, config: SharedConfig) -> Self {
        let responder = ControllerAuthenticator::default();
        Self {
            connect,
            config,
            authenticator: responder,
            current: None,
            is_admitted: false,
            timeout: None,
        }
    }

    /// Uses a changed secret; if it cannot be read, the old one stays.
    fn refresh_secret(&mut self, catalog: &Catalog) {
        let entry = catalog.subsystems.get(&self.connect.subnqn);
        let admission = entry.and_then(|entry| entry.access.rule_for(&self.connect.hostnqn));
        if let Some(AccessRule::Proof(secrets)) = admission
            && let Some(config) = config(secrets, &self.connect)
        {
            self.config = config;
        }
    }
}

impl HostConnection {
    /// Whether the host has authenticated, if it must.
    pub(super) fn is_authenticated(&self) -> bool {
        self.authentication.as_ref().is_none_or(|asked| asked.authenticator.is_authenticated())
    }

    /// Parses an authentication command, on a queue that requires authentication.
    pub(super) fn parse_auth_command(&self, sqe: &Sqe) -> Option<Result<AuthCommand, Status>> {
        self.authentication.as_ref().and_then(|_| AuthCommand::parse(sqe))
    }

    /// An authentication command has arrived, on a queue that requires authentication.
    pub(super) fn on_authentication(&mut self, tag: Tag, command: Result<AuthCommand, Status>) {
        // An I/O queue that has not authenticated must not keep the association alive.
        if self.is_authenticated() || self.queue.is_some_and(|queue| queue.qid == 0) {
            self.record_traffic();
        }
        let Some(asked) = &mut self.authentication else { return };
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

    /// A message of the host has arrived.
    pub(super) fn on_message(&mut self, tag: Tag, message: &Bufs) {
        let server = Rc::clone(self.server());
        let Some(asked) = &mut self.authentication else { return };
        asked.refresh_secret(&server.catalog());
        let begin = || (SharedConfig::clone(&asked.config), server.nvme.randomness(server.core()));
        match asked.authenticator.on_send(&message.to_vec(), begin) {
            None => self.on_message_processed(tag),
            Some(work) => self.start_computation(tag, work),
        }
    }

    /// Runs a Diffie-Hellman computation off the core, one connection at a time.
    fn start_computation(&mut self, tag: Tag, work: DhComputation) {
        let Some(wait) = self.tasks.begin_wait(tag) else { return };
        let (server, inbox) = (Rc::clone(self.server()), self.context.inbox.clone());
        let task = tokio::task::spawn_local(async move {
            let turn = server.nvme.dh_permit().await;
            let raise = move || {
                let _turn = turn;
                work.run()
            };
            let done = server.core().run_blocking(raise).await;
            inbox.push(Event::Computed { tag, wait, done });
        });
        self.tasks.set_wait_task(tag, task.abort_handle());
    }

    pub(super) fn on_computed(&mut self, tag: Tag, wait: u64, done: Option<DhResult>) {
        if !self.tasks.is_waiting(tag, wait) {
            return;
        }
        let Some(done) = done else { return self.close("computing its authentication failed") };
        if let Some(asked) = &mut self.authentication {
            asked.authenticator.on_computed(done);
        }
        self.on_message_processed(tag);
    }

    /// The host's message was accepted. If it was invalid, the host learns that with its next
    /// receive.
    fn on_message_processed(&mut self, tag: Tag) {
        self.complete(tag, Completion::OK, &Bufs::new());
        self.on_step();
    }

    /// There is memory for the message that the host receives.
    pub(super) fn fetch(&mut self, tag: Tag, mut room: BufsMut) {
        let bytes = room.iter().map(|buffer| buffer.len()).sum();
        let Some(asked) = &mut self.authentication else { return };
        match asked.authenticator.on_receive(bytes) {
            Ok(message) => {
                write_message(&message, &mut room);
                self.complete(tag, Completion::OK, &room.into());
            }
            Err(BufferTooShort { .. }) => {
                self.complete_failed(tag, Status::INVALID_FIELD.do_not_retry());
            }
        }
        self.on_step();
    }

    /// A message was exchanged: admits the host if it has authenticated, and closes if it has
    /// failed.
    fn on_step(&mut self) {
        let Some(asked) = &mut self.authentication else { return };
        if let Some(end) = asked.authenticator.failure() {
            if let Some(attempt) = self.attempt.take() {
                attempt.failed(&asked.connect.hostnqn, &format!("{end:?}"));
            }
            // There is nothing more to exchange.
            self.machine.close();
            return self.end_queue();
        }
        let is_done = asked.authenticator.is_authenticated() && asked.authenticator.is_idle();
        let enters = is_done && !asked.is_admitted;
        asked.is_admitted |= is_done;
        match (is_done, asked.timeout.is_some()) {
            (true, _) => asked.timeout = None,
            (false, true) => {}
            (false, false) => self.start_auth_timeout(),
        }
        if enters && let Some(asked) = &self.authentication {
            let connect = asked.connect.clone();
            if let Some(attempt) = self.attempt.take() {
                attempt.succeeded();
            }
            self.on_admitted(&connect);
        }
    }

    /// Starts the host's time limit, which is that of a login.
    pub(super) fn start_auth_timeout(&mut self) {
        let number = self.tasks.next_wait_number();
        let (inbox, time) = (self.context.inbox.clone(), self.server().limits().login_timeout);
        let timer = tokio::task::spawn_local(async move {
            sleep(time).await;
            inbox.push(Event::AuthTimeout { number });
        });
        let _timer = AbortOnDropHandle::new(timer);
        if let Some(asked) = &mut self.authentication {
            asked.timeout = Some(AuthTimeout { number, _timer });
        }
    }

    pub(super) fn on_auth_timeout(&mut self, number: u64) {
        let patience = self.authentication.as_ref().and_then(|asked| asked.timeout.as_ref());
        if patience.is_some_and(|patience| patience.number == number) {
            self.close("its host did not authenticate in time");
        }
    }
}
