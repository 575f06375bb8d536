//! The life of a connection in the node: begun on the core that accepted it, moved to the core
//! of its volumes, ended there.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;

use rt::net::Stream;
use tokio::time::Instant;

use crate::channel::{Channel, DetachedChannel, Protection};
use crate::conn::{Conn, End, Inbox, Protocol};
use crate::nvme;
use crate::server::{Line, Notice, Registration, Server, Service};

/// A protocol whose connections live in a [`Server`].
pub(crate) trait Resident: Protocol + Sized {
    /// Which protocol it is.
    const SERVICE: Service;

    /// What of the connection's state travels between cores: the machine, mostly.
    type Luggage: Send + 'static;

    /// The state of a connection that has just been accepted.
    fn begin(server: &Rc<Server>, peer: SocketAddr, local: SocketAddr) -> Self::Luggage;

    /// Settles the connection on a core, at its beginning or after a move.
    fn settle(place: Place<Self::Event>, luggage: Self::Luggage) -> Self;

    /// Packs up for a move. Nothing is in flight then.
    fn pack(self) -> Self::Luggage;

    /// The event that brings `notice`.
    fn notice(notice: Notice) -> Self::Event;

    /// The connection has ended; commands in flight go on without it.
    fn ended(&mut self, end: &End);
}

/// Where a connection lives.
#[derive(Debug)]
pub(crate) struct Place<E> {
    /// The core's server.
    pub(crate) server: Rc<Server>,
    /// Where events for the connection go.
    pub(crate) inbox: Inbox<E>,
    /// Its entry in the book of connections.
    pub(crate) registration: Registration,
    /// The client's address.
    pub(crate) peer: SocketAddr,
    /// The address the client came to.
    pub(crate) local: SocketAddr,
    /// Between whom the connection is protected.
    pub(crate) protection: Protection,
}

/// A connection between two cores.
struct Traveller<L> {
    channel: DetachedChannel,
    luggage: L,
    route: Route,
}

/// What stays the same wherever the connection lives.
struct Route {
    unread: VecDeque<u8>,
    traffic: (u64, u64),
    began: Instant,
    peer: SocketAddr,
    local: SocketAddr,
}

/// The inbox of a connection of protocol `P`.
struct InboxOf<P: Resident>(Inbox<P::Event>);

impl<P: Resident> Line for InboxOf<P> {
    fn notify(&self, notice: Notice) {
        self.0.push(P::notice(notice));
    }

    fn evict(&self) {
        self.0.evict();
    }
}

/// Begins a connection that was accepted on this core.
pub(crate) fn begin<P: Resident>(
    server: &Rc<Server>,
    stream: Stream,
    peer: SocketAddr,
    local: SocketAddr,
) {
    let luggage = P::begin(server, peer, local);
    let keys = match P::SERVICE {
        Service::Iscsi => None,
        Service::Nvme => Some(nvme::keys(server)),
    };
    let channel = Channel::new(stream, keys, server.ciphertext());
    let (unread, began) = (VecDeque::new(), Instant::now());
    let route = Route { unread, traffic: (0, 0), began, peer, local };
    settle::<P>(server, channel, luggage, route);
}

fn settle<P: Resident>(server: &Rc<Server>, channel: Channel, luggage: P::Luggage, route: Route) {
    let inbox = Inbox::default();
    let line: Rc<dyn Line> = Rc::new(InboxOf::<P>(inbox.clone()));
    let (peer, local, began) = (route.peer, route.local, route.began);
    let registration = server.register(P::SERVICE, peer, local, began, line);
    let protection = channel.protection();
    let (at, own) = (Rc::clone(server), inbox.clone());
    let place = Place { server: at, inbox: own, registration, peer, local, protection };
    let protocol = P::settle(place, luggage);
    let timeout = server.limits().send_timeout;
    let mut conn = Conn::new(channel, protocol, inbox, server.staging(), timeout, began);
    (conn.unread, conn.traffic) = (route.unread, route.traffic);
    let server = Rc::clone(server);
    tokio::task::spawn_local(async move {
        match conn.run().await {
            End::Moves(core) => move_to(&server, core, conn, peer, local).await,
            end => {
                tracing::debug!(service = %P::SERVICE, %peer, ?end, "a connection ended");
                conn.protocol.ended(&end);
            }
        }
    });
}

async fn move_to<P: Resident>(
    server: &Server,
    core: usize,
    conn: Conn<Channel, P>,
    peer: SocketAddr,
    local: SocketAddr,
) {
    let Conn { stream, protocol, unread, began, traffic, .. } = conn;
    let luggage = protocol.pack();
    let channel = match stream.detach() {
        Ok(channel) => channel,
        Err(error) => {
            tracing::warn!(%peer, %error, "a connection could not be moved");
            return;
        }
    };
    let route = Route { unread, traffic, began, peer, local };
    let traveller = Traveller { channel, luggage, route };
    server.send(core, Box::new(move |server| arrive::<P>(server, traveller))).await;
}

fn arrive<P: Resident>(server: &Rc<Server>, traveller: Traveller<P::Luggage>) {
    let Traveller { channel, luggage, route } = traveller;
    // The core it comes from has one connection less now: without this its limits bound nothing.
    // And what this one has told its connections, the newcomer has not heard.
    if server.refuses(P::SERVICE, route.peer) {
        return;
    }
    let (stream, state) = channel.into_parts();
    match server.core().attach(stream) {
        Ok(stream) => {
            let channel = Channel::attach(stream, state, server.ciphertext());
            settle::<P>(server, channel, luggage, route);
        }
        Err(error) => tracing::warn!(peer = %route.peer, %error, "a connection was lost moving"),
    }
}
