//! NVMe/TCP connections in the node: the machine and the controllers of the `nvme` crate and the
//! volumes, joined.
//!
//! | module | subject |
//! |---|---|
//! | `association` | the controllers of one core, Connect, keep alive |
//! | `command` | a command from its arrival to its completion |

mod association;
mod command;

use std::net::SocketAddr;
use std::rc::Rc;

use block::{Account, Bufs, BufsMut, Failure};
use nvme::{Action, Config, Connect, Connection, Tag};

use crate::conn::{End, Inbox, Protocol};
use crate::resident::{Place, Resident};
use crate::server::{Limits, Notice, Server, Service};

use association::Association;
pub(crate) use association::Shared;
use command::Tasks;

/// What comes to a connection from elsewhere.
#[derive(Debug)]
pub(crate) enum Event {
    /// A volume has answered.
    Done { tag: Tag, result: Result<Bufs, Failure> },
    /// Memory that a command waited for.
    Memory { tag: Tag, memory: BufsMut },
    /// Memory that a command waited for can never come.
    NoMemory { tag: Tag },
    /// The admin queue wants a command of this queue aborted.
    Abort { cid: u16, asked_by: Inbox<Event>, tag: Tag },
    /// What became of it.
    AbortAnswer { tag: Tag, found: bool },
    /// The controller is no more.
    Gone(&'static str),
    /// From the server.
    Notice(Notice),
}

/// One connection of a host.
#[derive(Debug)]
pub(crate) struct Host {
    place: Place<Event>,
    machine: Connection,
    account: Account,
    /// A Connect that is decided on another core.
    moving: Option<(usize, Tag, Box<Connect>)>,
    association: Option<Rc<Association>>,
    tasks: Tasks,
    draining: bool,
    has_ended: bool,
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
            association: None,
            tasks: Tasks::default(),
            draining: false,
            has_ended: false,
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

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Arrived { tag, sqe } => self.on_arrived(tag, sqe),
                Action::Grant { tag, bytes, class } => self.on_grant(tag, bytes, class),
                Action::Run { tag, data } => self.on_run(tag, data),
                Action::Abort { tag } => self.on_answered(tag),
            }
        }
        if frame::Machine::is_closing(&self.machine) {
            self.leave();
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { tag, result } => self.on_done(tag, result),
            Event::Memory { tag, memory } => self.on_memory(tag, memory),
            Event::NoMemory { tag } => self.complete_failed(tag, nvme::Status::INTERRUPTED),
            Event::Abort { cid, asked_by, tag } => {
                let found = self.abort(cid);
                asked_by.push(Event::AbortAnswer { tag, found });
            }
            Event::AbortAnswer { tag, found } => self.abort_answered(tag, found),
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
        self.tasks.abort_all();
        if let Some(association) = self.association.take() {
            let inbox = &self.place.inbox;
            self.place.server.nvme.leave(&association, inbox);
        }
    }

    fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Close => self.close("the node stops"),
            Notice::Drain => self.draining = true,
            Notice::VolumeResized(_) | Notice::CatalogChanged => self.on_catalog(),
        }
    }

    /// Once a stopping node owes this host no answer, it lets it go.
    fn leave_if_drained(&mut self) {
        if self.draining && self.tasks.is_idle() {
            self.draining = false;
            self.close("the node stops");
        }
    }
}
