//! NVMe/TCP connections of the node: joins the machine and the controllers of the `nvme` crate and
//! the volumes.
//!
//! | module | subject |
//! |---|---|
//! | `association` | Connect, keep alive, shutdown |
//! | `authentication` | hosts that must authenticate |
//! | `command` | a command from its arrival to its completion |
//! | `copy` | executes Copy |
//! | `fused` | Compare and Write |
//! | `tls_keys` | hosts that use TLS |
//! | `reservations` | commands that change or report reservations, and notifications of changes |
//! | `tasks` | the commands in flight of one connection |

mod association;
mod authentication;
mod command;
mod copy;
mod fused;
mod reservations;
mod tasks;
mod tls_keys;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use block::{Account, Bufs};
use nvme::{Action, Completion, Config, Connect, Connection, Tag};
use tokio::time::Instant;
use volume::VolumeClient;

use crate::catalog::VolumeId;
use crate::channel::BoxedPskLookup;
use crate::connection::{ConnectionEnd, Protocol};
use crate::connection_notice::ConnectionNotice;
use crate::limits::Limits;
use crate::migration::{ConnectionContext, MigratableConnection};
use crate::nvme_controllers::{Event, QueueRef};
use crate::server::{AuthAttempt, Server, Service};

use authentication::QueueAuthentication;
use fused::PreviousCommand;
use tasks::Tasks;

/// One connection of a host.
#[derive(Debug)]
pub(crate) struct HostConnection {
    context: ConnectionContext<Event>,
    machine: Connection,
    account: Account,
    /// A Connect to be decided on another core.
    moving: Option<(usize, Tag, Box<Connect>)>,
    /// The controller and the queue it serves, once it is connected.
    queue: Option<QueueRef>,
    /// The authentication required on this queue, if any.
    authentication: Option<Box<QueueAuthentication>>,
    /// Its authentication attempt, until that has ended.
    attempt: Option<AuthAttempt>,
    tasks: Tasks,
    /// The previous command, for fused pairs.
    previous: PreviousCommand,
    /// The Disconnect that waits for the end of the other commands.
    disconnecting: Option<Tag>,
    /// The host as a caller of the volumes that it has used.
    callers: RefCell<BTreeMap<VolumeId, Rc<VolumeClient>>>,
    draining: bool,
    has_ended: bool,
    /// Whether the connection exists, for work that is done on its behalf later.
    is_alive: Rc<Cell<bool>>,
}

/// The connection state that moves between cores.
pub(crate) struct MigratingState {
    machine: Connection,
    connect: Option<(Tag, Box<Connect>)>,
}

fn config(limits: &Limits) -> Config {
    Config {
        establish_timeout: limits.login_timeout,
        receive_timeout: limits.receive_timeout,
        ..Config::default()
    }
}

impl MigratableConnection for HostConnection {
    const SERVICE: Service = Service::Nvme;
    type MigratingState = MigratingState;

    fn begin(server: &Rc<Server>, _peer: SocketAddr, _local: SocketAddr) -> MigratingState {
        MigratingState { machine: Connection::new(config(server.limits())), connect: None }
    }

    fn psk_lookup(server: &Rc<Server>) -> Option<BoxedPskLookup> {
        Some(tls_keys::psk_lookup(server))
    }

    fn attach(context: ConnectionContext<Event>, state: MigratingState) -> Self {
        let account = context.server.account();
        let mut host = Self {
            account,
            machine: state.machine,
            moving: None,
            queue: None,
            authentication: None,
            attempt: None,
            tasks: Tasks::default(),
            previous: PreviousCommand::default(),
            disconnecting: None,
            callers: RefCell::default(),
            draining: false,
            has_ended: false,
            is_alive: Rc::new(Cell::new(true)),
            context,
        };
        if let Some((tag, connect)) = state.connect {
            host.decide(tag, connect);
        }
        host
    }

    fn detach(self) -> MigratingState {
        let connect = self.moving.map(|(_, tag, connect)| (tag, connect));
        MigratingState { connect, machine: self.machine }
    }

    fn notice_event(notice: ConnectionNotice) -> Event {
        Event::Notice(notice)
    }

    fn on_end(&mut self, _end: &ConnectionEnd) {
        if let Some(why) = self.machine.close_reason() {
            tracing::info!(peer = %self.context.peer, ?why, "an NVMe/TCP connection has ended");
        }
        self.end_queue();
    }
}

impl Protocol for HostConnection {
    type Machine = Connection;
    type Event = Event;

    fn machine(&mut self) -> &mut Connection {
        &mut self.machine
    }

    /// A host that was silent for too long may have sent its commands again on another path.
    /// Commands waiting in the socket must not be executed, even if the controller's timer task has
    /// not run yet.
    fn on_wake(&mut self, now: Instant) {
        if let Some(queue) = self.queue
            && self.server().nvme.is_keep_alive_overdue(queue.cntlid, now)
        {
            self.close("keep alive timeout");
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::CommandArrived { tag, sqe } => self.on_arrived(tag, sqe),
                Action::Grant { tag, bytes, class } => self.on_grant(tag, bytes, class),
                Action::Run { tag, data } => self.on_run(tag, data),
                Action::CommandRefused { fuse, status } => self.on_refused(fuse, status),
                Action::Abort { tag } => self.on_answered(tag),
            }
        }
        if frame::Machine::is_closing(&self.machine) {
            self.end_queue();
        }
        self.close_if_drained();
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Done { tag, result } => self.on_done(tag, result),
            Event::Computed { tag, wait, done } => self.on_computed(tag, wait, done),
            Event::Decide { tag, connect } if !self.has_ended => self.decide(tag, connect),
            Event::Decide { .. } => {}
            Event::AuthTimeout { number } => self.on_auth_timeout(number),
            Event::FusedTimeout { first, number } => self.on_fused_timeout(first, number),
            Event::CopyDone { tag, result } => self.on_copied(tag, result),
            Event::Memory { tag, wait, credit, bytes } => {
                self.on_memory(tag, wait, &credit, bytes);
            }
            Event::NoMemory { tag, wait } => self.on_no_memory(tag, wait),
            Event::ReservationsChanged { tag, wait, result } => {
                self.on_reservations_changed(tag, wait, result);
            }
            Event::ReservationsRead { tag, wait, result } => {
                self.on_reservations_read(tag, wait, result);
            }
            Event::ReservationNotifications { volume, notices } => {
                self.on_reservation_notifications(volume, notices);
            }
            Event::Abort { cid, abort_request: asked_by } => self.abort(cid, asked_by),
            Event::AbortAnswer { tag, aborted } => self.on_abort_answer(tag, aborted),
            Event::Controller => self.on_controller(),
            Event::QueueGone(why) => self.close(why),
            Event::Notice(notice) => self.on_notice(notice),
        }
        self.close_if_drained();
    }

    fn wanted_core(&self) -> Option<usize> {
        self.moving.as_ref().map(|(core, ..)| *core)
    }
}

impl HostConnection {
    fn server(&self) -> &Rc<Server> {
        &self.context.server
    }

    fn close(&mut self, why: &str) {
        tracing::info!(peer = %self.context.peer, why, "an NVMe/TCP connection is closed");
        self.machine.close();
        self.end_queue();
    }

    /// The queue is gone; commands in the volumes finish without it.
    fn end_queue(&mut self) {
        self.has_ended = true;
        self.is_alive.set(false);
        self.tasks.abort_all();
        if let Some(queue) = self.queue.take() {
            self.server().nvme.remove_queue(queue);
        }
    }

    fn on_notice(&mut self, notice: ConnectionNotice) {
        match notice {
            ConnectionNotice::Close => self.close("the node stops"),
            ConnectionNotice::Drain => self.draining = true,
            ConnectionNotice::VolumeResized(_) | ConnectionNotice::CatalogChanged => {
                self.on_catalog();
            }
        }
    }

    /// Closes a queue that its host disconnects once no answer is pending. On a stopping node,
    /// closes the connection once no answer to its host is pending: the admin queue last, because
    /// the controller and the I/O queues end with it.
    fn close_if_drained(&mut self) {
        if self.tasks.is_idle()
            && let Some(tag) = self.disconnecting.take()
        {
            self.complete(tag, Completion::OK, &Bufs::new());
            return self.close("its host has disconnected the queue");
        }
        let holds = |s: &QueueRef| s.qid == 0 && self.context.server.nvme.has_io_queues(s.cntlid);
        if self.draining && self.tasks.is_idle() && !self.queue.as_ref().is_some_and(holds) {
            self.draining = false;
            self.close("the node stops");
        }
    }
}
