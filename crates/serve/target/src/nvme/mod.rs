//! NVMe/TCP connections in the node: the machine and the controllers of the `nvme` crate and the
//! volumes, joined.
//!
//! | module | subject |
//! |---|---|
//! | `association` | the controllers of one core, Connect, keep alive, shutdown |
//! | `authentication` | hosts that have to prove who they are |
//! | `command` | a command from its arrival to its completion |
//! | `copy` | Copy, carried out |
//! | `fused` | Compare and Write |
//! | `protection` | hosts that come by TLS |
//! | `reservations` | commands that change or tell reservations, and what hosts hear of changes |
//! | `tasks` | the commands in flight of one connection |
//! | `view` | what a host sees of the catalog |

mod association;
mod authentication;
mod command;
mod copy;
mod fused;
mod protection;
mod reservations;
mod tasks;
mod view;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use block::{Account, Bufs, Credit, Error, Failure};
use nvme::auth::Done;
use nvme::{Action, Completion, Config, Connect, Connection, Tag};
use reservation::{Notices, Table};
use tokio::time::Instant;
use volume::{Caller, Unaltered};

use crate::catalog::VolumeId;
use crate::conn::{End, Inbox, Protocol};
use crate::resident::{Place, Resident};
use crate::server::{Attempt, Limits, Notice, Server, Service};

use association::Seat;
pub(crate) use association::Shared;
use authentication::Asked;
use fused::Before;
pub(crate) use protection::keys;
use tasks::Tasks;

/// What comes to a connection from elsewhere.
#[derive(Debug)]
pub(crate) enum Event {
    /// A volume has answered.
    Done { tag: Tag, result: Result<Bufs, Failure> },
    /// What an authentication needed is calculated, or cannot be; `wait` says for which command.
    Calculated { tag: Tag, wait: u64, done: Option<Done> },
    /// A Connect has waited for its turn.
    Decide { tag: Tag, connect: Box<Connect> },
    /// The host has left an authentication half done for too long.
    Unproved { number: u64 },
    /// The second half of a fused operation has not come for too long.
    Alone { first: Tag, number: u64 },
    /// A copy has ended; with the number of the first range that is not copied.
    Copied { tag: Tag, result: Result<(), (u64, Failure)> },
    /// Memory of so many bytes that a command waited for; `wait` says which waiting this ends.
    Memory { tag: Tag, wait: u64, credit: Credit, bytes: usize },
    /// Memory that a command waited for can never come.
    NoMemory { tag: Tag, wait: u64 },
    /// Reservations were changed, or not; `wait` says for which command.
    Altered { tag: Tag, wait: u64, result: Result<(), Unaltered> },
    /// Reservations were looked up.
    Consulted { tag: Tag, wait: u64, result: Result<Table, Error> },
    /// What a change of a volume's reservations means to the host.
    Told { volume: VolumeId, notices: Notices },
    /// The admin queue wants a command of this queue aborted.
    Abort { cid: u16, asked_by: Asker },
    /// What became of it.
    AbortAnswer { tag: Tag, aborted: bool },
    /// The controller may want something; for the connection of its admin queue.
    Controller,
    /// The controller is no more, or this queue of it.
    Gone(&'static str),
    /// From the server.
    Notice(Notice),
}

/// An Abort command that waits for its answer. Dropped, it answers that nothing was aborted: the
/// queue that it was sent to may be gone.
#[derive(Debug)]
pub(crate) struct Asker {
    inbox: Inbox<Event>,
    tag: Tag,
    aborted: bool,
}

impl Asker {
    fn new(inbox: Inbox<Event>, tag: Tag) -> Self {
        Self { inbox, tag, aborted: false }
    }

    fn answer(mut self, aborted: bool) {
        self.aborted = aborted;
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.inbox.push(Event::AbortAnswer { tag: self.tag, aborted: self.aborted });
    }
}

/// One connection of a host.
#[derive(Debug)]
pub(crate) struct Host {
    place: Place<Event>,
    machine: Connection,
    account: Account,
    /// A Connect that is decided on another core.
    moving: Option<(usize, Tag, Box<Connect>)>,
    /// The controller and the queue it serves, once it is connected.
    seat: Option<Seat>,
    /// The proof that is asked for on this queue, if one is.
    asked: Option<Box<Asked>>,
    /// Its attempt to prove who it is, until that has come to an end.
    attempt: Option<Attempt>,
    tasks: Tasks,
    /// What came before the next command, for halves of fused operations.
    before: Before,
    /// The Disconnect that waits for the end of the other commands.
    disconnecting: Option<Tag>,
    /// The host, as the volumes know it that it has used.
    callers: RefCell<BTreeMap<VolumeId, Rc<Caller>>>,
    draining: bool,
    has_ended: bool,
    /// For what is done on its behalf later, if it still lives by then.
    lives: Rc<Cell<bool>>,
}

/// What travels between cores.
pub(crate) struct Luggage {
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

impl Resident for Host {
    const SERVICE: Service = Service::Nvme;
    type Luggage = Luggage;

    fn begin(server: &Rc<Server>, _peer: SocketAddr, _local: SocketAddr) -> Luggage {
        Luggage { machine: Connection::new(config(server.limits())), connect: None }
    }

    fn settle(place: Place<Event>, luggage: Luggage) -> Self {
        let account = place.server.account();
        let mut host = Self {
            account,
            machine: luggage.machine,
            moving: None,
            seat: None,
            asked: None,
            attempt: None,
            tasks: Tasks::default(),
            before: Before::default(),
            disconnecting: None,
            callers: RefCell::default(),
            draining: false,
            has_ended: false,
            lives: Rc::new(Cell::new(true)),
            place,
        };
        if let Some((tag, connect)) = luggage.connect {
            host.decide(tag, connect);
        }
        host
    }

    fn pack(self) -> Luggage {
        let connect = self.moving.map(|(_, tag, connect)| (tag, connect));
        Luggage { connect, machine: self.machine }
    }

    fn notice(notice: Notice) -> Event {
        Event::Notice(notice)
    }

    fn ended(&mut self, _end: &End) {
        if let Some(why) = self.machine.end() {
            tracing::info!(peer = %self.place.peer, ?why, "an NVMe/TCP connection has ended");
        }
        self.leave();
    }
}

impl Protocol for Host {
    type Machine = Connection;
    type Event = Event;

    fn machine(&mut self) -> &mut Connection {
        &mut self.machine
    }

    /// A host that has been silent for too long may have sent its commands again by another path. Those that
    /// wait in the socket are not carried out, though the controller's timer may not have had its turn yet.
    fn woken(&mut self, now: Instant) {
        if let Some(seat) = self.seat
            && self.server().nvme.is_overdue(seat.cntlid, now)
        {
            self.close("keep alive timeout");
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Arrived { tag, sqe } => self.on_arrived(tag, sqe),
                Action::Grant { tag, bytes, class } => self.on_grant(tag, bytes, class),
                Action::Run { tag, data } => self.on_run(tag, data),
                Action::Refused { fuse, status } => self.on_refused(fuse, status),
                Action::Abort { tag } => self.on_answered(tag),
            }
        }
        if frame::Machine::is_closing(&self.machine) {
            self.leave();
        }
        self.leave_if_drained();
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { tag, result } => self.on_done(tag, result),
            Event::Calculated { tag, wait, done } => self.on_calculated(tag, wait, done),
            Event::Decide { tag, connect } if !self.has_ended => self.decide(tag, connect),
            Event::Decide { .. } => {}
            Event::Unproved { number } => self.on_unproved(number),
            Event::Alone { first, number } => self.on_alone(first, number),
            Event::Copied { tag, result } => self.on_copied(tag, result),
            Event::Memory { tag, wait, credit, bytes } => {
                self.on_memory(tag, wait, &credit, bytes);
            }
            Event::NoMemory { tag, wait } => self.on_no_memory(tag, wait),
            Event::Altered { tag, wait, result } => self.on_altered(tag, wait, result),
            Event::Consulted { tag, wait, result } => self.on_consulted(tag, wait, result),
            Event::Told { volume, notices } => self.on_told(volume, notices),
            Event::Abort { cid, asked_by } => self.abort(cid, asked_by),
            Event::AbortAnswer { tag, aborted } => self.on_abort_answer(tag, aborted),
            Event::Controller => self.on_controller(),
            Event::Gone(why) => self.close(why),
            Event::Notice(notice) => self.on_notice(notice),
        }
        self.leave_if_drained();
    }

    fn moves_to(&self) -> Option<usize> {
        self.moving.as_ref().map(|(core, ..)| *core)
    }
}

impl Host {
    fn server(&self) -> &Rc<Server> {
        &self.place.server
    }

    fn close(&mut self, why: &str) {
        tracing::info!(peer = %self.place.peer, why, "an NVMe/TCP connection is closed");
        self.machine.close();
        self.leave();
    }

    /// The queue is gone; commands in the volumes go on without it.
    fn leave(&mut self) {
        self.has_ended = true;
        self.lives.set(false);
        self.tasks.abort_all();
        if let Some(seat) = self.seat.take() {
            self.server().nvme.leave(seat);
        }
    }

    fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Close => self.close("the node stops"),
            Notice::Drain => self.draining = true,
            Notice::VolumeResized(_) | Notice::CatalogChanged => self.on_catalog(),
        }
    }

    /// Once nothing is owed to a queue that its host disconnects, it goes. Once a stopping node owes this host no answer, it lets it go: the admin queue last, for
    /// with it the controller goes, and the I/O queues.
    fn leave_if_drained(&mut self) {
        if self.tasks.is_idle()
            && let Some(tag) = self.disconnecting.take()
        {
            self.complete(tag, Completion::OK, &Bufs::new());
            return self.close("its host has disconnected the queue");
        }
        let holds = |s: &Seat| s.qid == 0 && self.place.server.nvme.has_io_queues(s.cntlid);
        if self.draining && self.tasks.is_idle() && !self.seat.as_ref().is_some_and(holds) {
            self.draining = false;
            self.close("the node stops");
        }
    }
}
