//! iSCSI connections in the node: the machine of the `iscsi` crate, the logical units of the
//! `scsi` crate and the volumes, joined.
//!
//! | module | subject |
//! |---|---|
//! | `login` | who may log in, which targets are reported |
//! | `session` | sessions and logical units of one core |
//! | `task` | a command from its arrival to its status |
//! | `reset` | task management that reaches beyond one session |

mod login;
mod reset;
mod session;
mod task;

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use block::{Account, Bufs, BufsMut, Failure};
use iscsi::name::Name;
use iscsi::pdu::LoginStatus;
use iscsi::target::{Action, CloseReason, Config, Connection, LoginAttempt, RequestId};
use reservation::Table;
use scsi::{CopyOutcome, TokenOutcome};
use tokio::time::Instant;
use volume::Unaltered;

use crate::catalog::{Admission, Chap, VolumeId};
use crate::conn::{End, Protocol};
use crate::resident::{Place, Resident};
use crate::server::{Attempt, Limits, Notice, Server, Service};

pub(crate) use login::portal_group;
use reset::Barrier;
pub(crate) use session::Shared;
use session::{Member, Session};
use task::{Tasks, Ticket};

/// What comes to a connection from elsewhere.
#[derive(Debug)]
pub(crate) enum Event {
    /// The volume has answered.
    Done { ticket: Ticket, result: Result<Bufs, Failure> },
    /// A third-party copy has ended.
    Copied { ticket: Ticket, outcome: CopyOutcome },
    /// A token was made or used, or was not.
    Tokened { ticket: Ticket, outcome: TokenOutcome },
    /// Memory that a command waited for.
    Memory { ticket: Ticket, memory: BufsMut },
    /// Memory that a command waited for did not come in time.
    NoMemory { ticket: Ticket },
    /// Another session wants the commands for a unit, or for all, ended.
    Abort { unit: Option<VolumeId>, barrier: Option<Rc<Barrier>> },
    /// What all nodes know was changed, or was not.
    Altered { ticket: Ticket, result: Result<(), Unaltered> },
    /// What all nodes know.
    Consulted { ticket: Ticket, result: Result<Table, block::Error> },
    /// All that a task management request had to wait for has ended.
    TaskManagementDone { id: RequestId },
    /// The same initiator port has logged in again.
    Replaced,
    /// A login has waited for its turn.
    Decide(Box<LoginAttempt>),
    /// From the server.
    Notice(Notice),
}

/// One initiator's connection.
#[derive(Debug)]
pub(crate) struct Initiator {
    place: Place<Event>,
    machine: Connection,
    account: Account,
    /// A login that is decided on another core.
    moving: Option<(usize, Box<LoginAttempt>)>,
    /// What its login was asked to prove.
    asked: Option<Admission<Chap>>,
    /// Who tries to log in to what.
    tried: Option<Box<(Name, Name)>>,
    /// Its attempt to prove who it is, until that has come to an end.
    attempt: Option<Attempt>,
    session: Option<Rc<Session>>,
    member: Option<Member>,
    tasks: Tasks,
    draining: bool,
}

/// What travels between cores.
pub(crate) struct Luggage {
    machine: Connection,
    attempt: Option<Box<LoginAttempt>>,
}

/// The machine's settings for these limits.
pub(crate) fn config(limits: &Limits) -> Config {
    Config {
        window: limits.commands,
        login_timeout: limits.login_timeout,
        ping_after: limits.keep_alive,
        receive_timeout: limits.receive_timeout,
        data_timeout: limits.receive_timeout,
        ..Config::default()
    }
}

impl Resident for Initiator {
    const SERVICE: Service = Service::Iscsi;
    type Luggage = Luggage;

    fn begin(server: &Rc<Server>, _peer: SocketAddr, _local: SocketAddr) -> Luggage {
        Luggage { machine: Connection::new(Arc::clone(&server.iscsi.config)), attempt: None }
    }

    fn settle(place: Place<Event>, luggage: Luggage) -> Self {
        let account = place.server.account();
        let mut initiator = Self {
            account,
            machine: luggage.machine,
            moving: None,
            asked: None,
            tried: None,
            attempt: None,
            session: None,
            member: None,
            tasks: Tasks::default(),
            draining: false,
            place,
        };
        if let Some(attempt) = luggage.attempt {
            initiator.decide_login(attempt);
        }
        initiator
    }

    fn pack(self) -> Luggage {
        Luggage { attempt: self.moving.map(|(_, attempt)| attempt), machine: self.machine }
    }

    fn notice(notice: Notice) -> Event {
        Event::Notice(notice)
    }

    fn ended(&mut self, _end: &End) {
        // A client that has gone with its refusal has been refused.
        while let Some(action) = self.machine.poll_action() {
            if let Action::Close(reason) = action {
                self.on_close(reason);
            }
        }
        self.leave();
    }
}

impl Protocol for Initiator {
    type Machine = Connection;
    type Event = Event;

    fn machine(&mut self) -> &mut Connection {
        &mut self.machine
    }

    /// An iSCSI target is not told how long its initiator waits before it tries another path.
    fn woken(&mut self, _: Instant) {}

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Arrived(arrived) => self.on_arrived(&arrived),
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
        self.leave_if_drained();
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { ticket, result } => self.on_done(ticket, result),
            Event::Copied { ticket, outcome } => self.on_copied(ticket, outcome),
            Event::Tokened { ticket, outcome } => self.on_tokened(ticket, outcome),
            Event::Memory { ticket, memory } => self.on_memory(ticket, memory),
            Event::NoMemory { ticket } => self.on_no_memory(ticket),
            Event::Abort { unit, barrier } => self.abort_for(unit, barrier.as_ref()),
            Event::Altered { ticket, result } => self.on_altered(ticket, result),
            Event::Consulted { ticket, result } => self.on_consulted(ticket, result),
            Event::TaskManagementDone { id } => self.managed(id),
            Event::Decide(attempt) => self.decide_login(attempt),
            Event::Replaced => self.close("the initiator has logged in again"),
            Event::Notice(notice) => self.on_notice(notice),
        }
        self.leave_if_drained();
    }

    fn moves_to(&self) -> Option<usize> {
        self.moving.as_ref().map(|(core, _)| *core)
    }
}

impl Initiator {
    fn server(&self) -> &Rc<Server> {
        &self.place.server
    }

    /// Whether other hosts have the name of its initiator as well: what is done and undone then is not worth a line.
    fn is_shared_name(&self) -> bool {
        let is_shared = |who: &(Name, Name)| {
            let who = (who.0.as_str(), who.1.as_str());
            self.server().clones().borrow().is_shared(Instant::now(), who)
        };
        self.tried.as_deref().is_some_and(is_shared)
    }

    fn on_close(&mut self, reason: CloseReason) {
        if reason == CloseReason::LoginRefused(LoginStatus::AuthenticationFailure)
            && let (Some(attempt), Some(tried)) = (self.attempt.take(), &self.tried)
        {
            let why = "its CHAP name or secret is wrong, or it offers no CHAP";
            attempt.failed(tried.0.as_str(), why);
        }
        match reason {
            // Whatever was to be said of a refusal has been.
            CloseReason::Logout | CloseReason::Requested | CloseReason::LoginRefused(_) => {
                tracing::debug!(peer = %self.place.peer, %reason, "an iSCSI connection closes");
            }
            _ => {
                tracing::info!(peer = %self.place.peer, %reason, "an iSCSI connection is closed");
            }
        }
        self.leave();
    }

    /// Ends the connection, telling the initiator to come back.
    fn close(&mut self, why: &str) {
        if !self.is_shared_name() {
            tracing::info!(peer = %self.place.peer, why, "an iSCSI session is ended");
        }
        self.machine.notify(iscsi::target::Notice::Drop { time2wait_s: 0 });
        self.machine.close();
    }

    /// The session is over; commands in flight go on without it.
    fn leave(&mut self) {
        self.tasks.abort_all();
        (self.session, self.member) = (None, None);
    }

    fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Close => self.close("the node stops"),
            Notice::Drain => {
                self.draining = true;
                let within_s = 1;
                self.machine.notify(iscsi::target::Notice::LogoutRequest { within_s });
            }
            Notice::VolumeResized(id) => self.on_resized(id),
            Notice::CatalogChanged => self.on_catalog(),
        }
    }

    /// Once a stopping node owes this initiator no answer, it lets it go.
    fn leave_if_drained(&mut self) {
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

    /// Whose units are others now is told, and who has to log in anew leaves. A session that has lost its last unit stands:
    /// that the unit is gone for good is what its initiator has to hear (RFD 0017, 2).
    fn on_catalog(&mut self) {
        let Some(session) = self.session.clone().filter(|s| !s.has_ended()) else { return };
        let catalog = self.server().catalog();
        let Some(name) = &session.target else { return };
        let target = catalog.targets.get(name.as_str());
        let admitted =
            target.and_then(|t| Some((t, t.access.admission(session.initiator.as_str())?)));
        if let Some((target, admission)) = admitted {
            if *admission != session.admission {
                return self.close("it has to prove itself in another way");
            }
            if target.serves() && target.core != self.server().core().id() {
                return self.close("its target is on another core now");
            }
            if session.portal_group != portal_group(&catalog, target) {
                return self.close("its target is in another portal group now");
            }
        }
        let target = admitted.map(|(target, _)| target);
        let lost = self.server().iscsi.refresh(self.server(), &session, target);
        lost.iter().for_each(|unit| self.end_tasks_of(unit));
    }
}
