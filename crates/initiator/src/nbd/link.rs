//! One connection: the task that drives it, and those who wait for their commands.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ::nbd::client::{self, Agreed, Config, Connection, Failed, Op, Reply};
use frame::Machine;
use rt::net::Stream;
use target::conn::{self, Conn, Inbox, Protocol, Staging};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use super::options::Options;

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its machine ended it.
    Machine(client::End),
    /// The server closed the connection.
    PeerClosed,
    /// The server did not take what was to be sent in time.
    SendStalled,
    /// The connection broke.
    Broken(io::ErrorKind),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(end) => write!(f, "{end}"),
            Self::PeerClosed => f.write_str("the server closed the connection"),
            Self::SendStalled => f.write_str("the server takes nothing any more"),
            Self::Broken(kind) => write!(f, "the connection broke: {kind}"),
        }
    }
}

type Answer = oneshot::Sender<Result<Reply, Failed>>;

/// What comes to a connection from this side.
pub(super) enum Event {
    Submit { op: Op, answer: Answer },
    Close,
}

/// What callers hold of a connection. It is closed when this is dropped.
pub(super) struct Link {
    inbox: Inbox<Event>,
    shared: Rc<Shared>,
}

struct Shared {
    /// A permit for each command that the machine takes.
    room: Semaphore,
    /// Who waits for what is agreed on.
    agreed: RefCell<Option<oneshot::Sender<Agreed>>>,
    end: Cell<Option<End>>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl Link {
    /// Drives a connection that has just been made; what is agreed on arrives once it is. `over` is called
    /// when the connection has ended. What is answered once `gone` is set is lost: nobody is told of a success
    /// behind a failure that is for ever.
    pub(super) fn start(
        stream: Stream,
        options: &Options,
        staging: Staging,
        gone: Rc<Cell<bool>>,
        over: impl FnOnce(End) + 'static,
    ) -> (Self, oneshot::Receiver<Agreed>) {
        let config = Config {
            in_flight: options.in_flight.clamp(1, client::MAX_IN_FLIGHT),
            handshake_timeout: options.connect_timeout,
            ..Config::new(&options.export)
        };
        let (agreed, told) = oneshot::channel();
        let shared = Rc::new(Shared {
            room: Semaphore::new(config.in_flight.into()),
            agreed: RefCell::new(Some(agreed)),
            end: Cell::new(None),
        });
        let peer = Peer {
            machine: Connection::new(config),
            waiting: Vec::new(),
            timeout: options.command_timeout,
            gone,
            shared: Rc::clone(&shared),
        };
        let (inbox, began) = (Inbox::default(), Instant::now());
        let conn = Conn::new(stream, peer, inbox.clone(), staging, options.send_timeout, began);
        tokio::task::spawn_local(drive(conn, Rc::clone(&shared), over));
        (Self { inbox, shared }, told)
    }

    /// Sends a command once there is room for it, and waits for its end. A caller that goes away does not
    /// take the command along.
    pub(super) async fn submit(&self, op: Op) -> Result<Reply, Failed> {
        let Ok(permit) = self.shared.room.acquire().await else { return Err(Failed::Lost) };
        permit.forget();
        let (answer, result) = oneshot::channel();
        self.inbox.push(Event::Submit { op, answer });
        result.await.unwrap_or(Err(Failed::Lost))
    }

    /// How many commands it would take now.
    pub(super) fn room(&self) -> usize {
        self.shared.room.available_permits()
    }

    /// Takes leave of the server; what is in flight is lost.
    pub(super) fn close(&self) {
        self.inbox.push(Event::Close);
    }

    /// What closes it, for others.
    pub(super) fn closer(&self) -> Inbox<Event> {
        self.inbox.clone()
    }

    /// Why it has ended; `None` while it has not.
    pub(super) fn end(&self) -> Option<End> {
        self.shared.end.get()
    }
}

/// Drives a connection to its end.
async fn drive(mut conn: Conn<Stream, Peer>, shared: Rc<Shared>, over: impl FnOnce(End)) {
    let ended = conn.run().await;
    let machine = conn.protocol.machine.end();
    let end = match (ended, machine) {
        (_, Some(end)) => End::Machine(end),
        (conn::End::PeerClosed, None) => End::PeerClosed,
        (conn::End::SendStalled, None) => End::SendStalled,
        (conn::End::Broken(e), None) => End::Broken(e.kind()),
        (_, None) => End::Machine(client::End::Closed),
    };
    shared.end.set(Some(end));
    // First those who would be next, then those who wait: nobody sees room on a connection that has ended.
    shared.room.close();
    shared.agreed.take();
    over(end);
    drop(conn);
}

/// The machine, and who waits for which of its commands.
struct Peer {
    machine: Connection,
    waiting: Vec<Option<Answer>>,
    timeout: Duration,
    gone: Rc<Cell<bool>>,
    shared: Rc<Shared>,
}

impl Protocol for Peer {
    type Machine = Connection;
    type Event = Event;

    fn machine(&mut self) -> &mut Connection {
        &mut self.machine
    }

    /// An answer is one, however late it is read.
    fn woken(&mut self, _: Instant) {}

    fn act(&mut self) {
        if let Some(agreed) = self.machine.agreed()
            && let Some(waits) = self.shared.agreed.take()
        {
            let _ = waits.send(*agreed);
        }
        let mut ended = 0;
        while let Some(done) = self.machine.poll_done() {
            ended += 1;
            let answer = self.waiting.get_mut(done.tag.index()).and_then(Option::take);
            if let Some(answer) = answer {
                // A caller that has gone away does not want to know.
                let lost = self.gone.get();
                let _ = answer.send(if lost { Err(Failed::Lost) } else { done.outcome });
            }
        }
        if ended > 0 && !self.machine.is_closing() {
            self.shared.room.add_permits(ended);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Close => self.machine.close(),
            Event::Submit { op, answer } => {
                // Without room it is dropped with its answer, and its caller knows that it is lost.
                let Some(tag) = self.machine.submit(op, Some(self.timeout)) else { return };
                if self.waiting.len() <= tag.index() {
                    self.waiting.resize_with(tag.index() + 1, || None);
                }
                self.waiting[tag.index()] = Some(answer);
            }
        }
    }
}
