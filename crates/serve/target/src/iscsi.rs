//! iSCSI connections of the node: joins the machine of the `iscsi` crate, the logical units of the
//! `scsi` crate and the volumes.
//!
//! | module | subject |
//! |---|---|
//! | `login` | which initiators may log in, which targets are reported |
//! | `task` | a command from its arrival to its status |
//! | `task_management` | task management that reaches beyond one session |

mod login;
mod task;
mod task_management;

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use block::Account;
use iscsi::name::Name;
use iscsi::pdu::LoginStatus;
use iscsi::target::{Action, CloseReason, Connection, LoginAttempt};
use tokio::time::Instant;

use crate::catalog::{AccessRule, ChapCredentials, VolumeId};
use crate::channel::BoxedPskLookup;
use crate::connection::{ConnectionEnd, Protocol};
use crate::connection_notice::ConnectionNotice;
use crate::iscsi_sessions::{Event, Session};
use crate::migration::{ConnectionContext, MigratableConnection};
use crate::server::{AuthAttempt, Server, Service};

use task::Tasks;

/// One initiator's connection.
#[derive(Debug)]
pub(crate) struct InitiatorConnection {
    context: ConnectionContext<Event>,
    machine: Connection,
    account: Account,
    /// A login to be decided on another core.
    moving: Option<(usize, Box<LoginAttempt>)>,
    /// The rule by which its login was authenticated.
    rule: Option<AccessRule<ChapCredentials>>,
    /// Initiator and target of a login in progress.
    login_names: Option<Box<(Name, Name)>>,
    /// Its authentication attempt, until that has ended.
    attempt: Option<AuthAttempt>,
    session: Option<Rc<Session>>,
    session_guard: Option<SessionGuard>,
    tasks: Tasks,
    draining: bool,
}

/// Ends a session when its connection goes, even by a panic: otherwise tasks waiting for the
/// session's commands would wait for ever.
#[derive(Debug)]
struct SessionGuard {
    server: Rc<Server>,
    session: Rc<Session>,
}

impl SessionGuard {
    fn new(server: &Rc<Server>, session: &Rc<Session>) -> Self {
        Self { server: Rc::clone(server), session: Rc::clone(session) }
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.server.iscsi.end(&self.session);
    }
}

/// The connection state that moves between cores.
pub(crate) struct MigratingState {
    machine: Connection,
    attempt: Option<Box<LoginAttempt>>,
}

impl MigratableConnection for InitiatorConnection {
    const SERVICE: Service = Service::Iscsi;
    type MigratingState = MigratingState;

    fn begin(server: &Rc<Server>, _peer: SocketAddr, _local: SocketAddr) -> MigratingState {
        MigratingState { machine: Connection::new(Arc::clone(&server.iscsi.config)), attempt: None }
    }

    fn psk_lookup(_server: &Rc<Server>) -> Option<BoxedPskLookup> {
        None
    }

    fn attach(context: ConnectionContext<Event>, state: MigratingState) -> Self {
        let account = context.server.account();
        let mut initiator = Self {
            account,
            machine: state.machine,
            moving: None,
            rule: None,
            login_names: None,
            attempt: None,
            session: None,
            session_guard: None,
            tasks: Tasks::default(),
            draining: false,
            context,
        };
        if let Some(attempt) = state.attempt {
            initiator.decide_login(attempt);
        }
        initiator
    }

    fn detach(self) -> MigratingState {
        MigratingState { attempt: self.moving.map(|(_, attempt)| attempt), machine: self.machine }
    }

    fn notice_event(notice: ConnectionNotice) -> Event {
        Event::Notice(notice)
    }

    fn on_end(&mut self, _end: &ConnectionEnd) {
        // A client that leaves after a refusal counts as refused.
        while let Some(action) = self.machine.poll_action() {
            if let Action::Close(reason) = action {
                self.on_close(reason);
            }
        }
        self.end_session();
    }
}

impl Protocol for InitiatorConnection {
    type Machine = Connection;
    type Event = Event;

    fn machine(&mut self) -> &mut Connection {
        &mut self.machine
    }

    /// An iSCSI target does not know how long its initiator waits before it tries another path.
    fn on_wake(&mut self, _: Instant) {}

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::CommandArrived(arrived) => self.on_arrived(&arrived),
                Action::Grant { tag, bytes, class } => self.on_grant(tag, bytes, class),
                Action::Run { tag, data } => self.on_run(tag, data),
                Action::Abort { tag } => self.on_abort(tag),
                Action::Login(attempt) => self.decide_login(attempt),
                Action::Establish(session) => self.establish(&session),
                Action::SendTargets(scope) => self.report_targets(&scope),
                Action::TaskManagement { id, function, lun } => {
                    self.manage_tasks(id, function, lun);
                }
                Action::Close(reason) => self.on_close(reason),
            }
        }
        self.close_if_drained();
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Done { ticket, result } => self.on_done(ticket, result),
            Event::CopyDone { ticket, outcome } => self.on_copied(ticket, outcome),
            Event::TokenDone { ticket, outcome } => self.on_token_done(ticket, outcome),
            Event::Memory { ticket, memory } => self.on_memory(ticket, memory),
            Event::NoMemory { ticket } => self.on_no_memory(ticket),
            Event::Abort { unit, barrier } => self.abort_for(unit, barrier.as_ref()),
            Event::SharedChanged { ticket, result } => self.on_shared_changed(ticket, result),
            Event::SharedRead { ticket, result } => self.on_shared_read(ticket, result),
            Event::TaskManagementDone { id } => self.finish_task_management(id),
            Event::Decide(attempt) => self.decide_login(attempt),
            Event::Replaced => self.close("the initiator logged in again: session reinstatement"),
            Event::Notice(notice) => self.on_notice(notice),
        }
        self.close_if_drained();
    }

    fn wanted_core(&self) -> Option<usize> {
        self.moving.as_ref().map(|(core, _)| *core)
    }
}

impl InitiatorConnection {
    fn server(&self) -> &Rc<Server> {
        &self.context.server
    }

    /// Whether other hosts share its initiator's name: then its logins and logouts are not logged.
    fn is_shared_name(&self) -> bool {
        let is_shared = |names: &(Name, Name)| {
            let names = (names.0.as_str(), names.1.as_str());
            self.server().duplicate_names().borrow().is_duplicate(Instant::now(), names)
        };
        self.login_names.as_deref().is_some_and(is_shared)
    }

    fn on_close(&mut self, reason: CloseReason) {
        if reason == CloseReason::LoginRefused(LoginStatus::AuthenticationFailure)
            && let (Some(attempt), Some(tried)) = (self.attempt.take(), &self.login_names)
        {
            let why = "its CHAP name or secret is wrong, or it offers no CHAP";
            attempt.failed(tried.0.as_str(), why);
        }
        match reason {
            // The refusal has already been logged.
            CloseReason::Logout | CloseReason::Requested | CloseReason::LoginRefused(_) => {
                tracing::debug!(peer = %self.context.peer, %reason, "an iSCSI connection closes");
            }
            _ => {
                tracing::info!(peer = %self.context.peer, %reason, "an iSCSI connection is closed");
            }
        }
        self.end_session();
    }

    /// Closes the connection and asks the initiator to log in again.
    fn close(&mut self, why: &str) {
        if !self.is_shared_name() {
            tracing::info!(peer = %self.context.peer, why, "an iSCSI session is ended");
        }
        self.machine.notify(iscsi::target::AsyncNotification::Drop { time2wait_s: 0 });
        self.machine.close();
    }

    /// Ends the session; commands in flight finish without it.
    fn end_session(&mut self) {
        self.tasks.abort_all();
        (self.session, self.session_guard) = (None, None);
    }

    fn on_notice(&mut self, notice: ConnectionNotice) {
        match notice {
            ConnectionNotice::Close => self.close("the node stops"),
            ConnectionNotice::Drain => {
                self.draining = true;
                let within_s = 1;
                self.machine.notify(iscsi::target::AsyncNotification::LogoutRequest { within_s });
            }
            ConnectionNotice::VolumeResized(id) => self.on_resized(id),
            ConnectionNotice::CatalogChanged => self.on_catalog(),
        }
    }

    /// On a stopping node, closes the connection once no answer to its initiator is pending.
    fn close_if_drained(&mut self) {
        if self.draining && self.machine.outstanding() == 0 && self.tasks.is_empty() {
            self.draining = false;
            self.close("the node stops");
        }
    }

    fn on_resized(&mut self, id: VolumeId) {
        let unit = self.session.as_ref().and_then(|s| s.unit(id));
        if let Some(unit) = unit {
            let info = unit.served.volume.info();
            unit.state.borrow_mut().set_info(info);
        }
    }

    /// Applies a new catalog: reports changed units, and closes sessions that must log in again. A
    /// session that has lost its last unit stays open, so that its initiator learns that the unit
    /// is gone for good (RFD 0017, 2).
    fn on_catalog(&mut self) {
        let Some(session) = self.session.clone().filter(|s| !s.has_ended()) else { return };
        let catalog = self.server().catalog();
        let Some(name) = &session.target else { return };
        let target = catalog.targets.get(name.as_str());
        let admitted =
            target.and_then(|t| Some((t, t.access.rule_for(session.initiator.as_str())?)));
        if let Some((target, admission)) = admitted {
            if *admission != session.rule {
                return self.close("its authentication settings have changed");
            }
            if target.serves_any() && target.core != self.server().core().id() {
                return self.close("its target has moved to another core");
            }
            if session.portal_group != catalog.portal_group(target) {
                return self.close("its target has moved to another portal group");
            }
        }
        let target = admitted.map(|(target, _)| target);
        let lost = self.server().iscsi.refresh(self.server().served(), &session, target);
        lost.iter().for_each(|unit| self.end_tasks_of(unit));
    }
}
