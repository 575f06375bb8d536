//! The life cycle of a connection in the node: begun on the core that accepted it, moved to the
//! core of its volumes, ended there.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;

use rt::net::Stream;
use tokio::time::Instant;

use crate::channel::{BoxedPskLookup, Channel, DetachedChannel, SharedTlsEndpoints};
use crate::connection::{ConnectionDriver, ConnectionEnd, Inbox, Protocol};
use crate::connection_notice::ConnectionNotice;
use crate::server::{ConnectionHandle, Registration, Server, Service};

/// A protocol whose connections belong to a [`Server`].
pub(crate) trait MigratableConnection: Protocol + Sized {
    /// Which protocol it is.
    const SERVICE: Service;

    /// The state of a connection that moves between cores: mostly the machine.
    type MigratingState: Send + 'static;

    /// The state of a connection that has just been accepted.
    fn begin(server: &Rc<Server>, peer: SocketAddr, local: SocketAddr) -> Self::MigratingState;

    /// The keys of clients, if the protocol has TLS.
    fn psk_lookup(server: &Rc<Server>) -> Option<BoxedPskLookup>;

    /// Attaches the connection to a core, at its beginning or after a move.
    fn attach(context: ConnectionContext<Self::Event>, conn_state: Self::MigratingState) -> Self;

    /// Detaches the connection for a move. Nothing is in flight then.
    fn detach(self) -> Self::MigratingState;

    /// The event for `notice`.
    fn notice_event(notice: ConnectionNotice) -> Self::Event;

    /// The connection has ended; commands in flight finish without it.
    fn on_end(&mut self, end: &ConnectionEnd);
}

/// A connection's environment on its core.
#[derive(Debug)]
pub(crate) struct ConnectionContext<E> {
    /// The core's server.
    pub(crate) server: Rc<Server>,
    /// Where events for the connection are delivered.
    pub(crate) inbox: Inbox<E>,
    /// Its entry in the connection table.
    pub(crate) registration: Registration,
    /// The client's address.
    pub(crate) peer: SocketAddr,
    /// The local address that the client connected to.
    pub(crate) local: SocketAddr,
    /// The parties of its TLS connection.
    pub(crate) protection: SharedTlsEndpoints,
}

/// A connection between two cores.
struct MigratingConnection<L> {
    channel: DetachedChannel,
    state: L,
    info: ConnectionInfo,
}

/// What stays the same on every core.
struct ConnectionInfo {
    unread: VecDeque<u8>,
    traffic: (u64, u64),
    began: Instant,
    peer: SocketAddr,
    local: SocketAddr,
}

/// The inbox of a connection of protocol `P`.
struct InboxHandle<P: MigratableConnection>(Inbox<P::Event>);

impl<P: MigratableConnection> ConnectionHandle for InboxHandle<P> {
    fn notify(&self, notice: ConnectionNotice) {
        self.0.push(P::notice_event(notice));
    }

    fn evict(&self) {
        self.0.evict();
    }
}

/// Begins a connection that was accepted on this core.
pub(crate) fn begin<P: MigratableConnection>(
    server: &Rc<Server>,
    stream: Stream,
    peer: SocketAddr,
    local: SocketAddr,
) {
    let conn_state = P::begin(server, peer, local);
    let channel = Channel::new(stream, P::psk_lookup(server), server.ciphertext());
    let (unread, began) = (VecDeque::new(), Instant::now());
    let route = ConnectionInfo { unread, traffic: (0, 0), began, peer, local };
    spawn_on_core::<P>(server, channel, conn_state, route);
}

fn spawn_on_core<P: MigratableConnection>(
    server: &Rc<Server>,
    channel: Channel,
    conn_state: P::MigratingState,
    route: ConnectionInfo,
) {
    let inbox = Inbox::default();
    let line: Rc<dyn ConnectionHandle> = Rc::new(InboxHandle::<P>(inbox.clone()));
    let (peer, local, began) = (route.peer, route.local, route.began);
    let registration = server.register(P::SERVICE, peer, local, began, line);
    let protection = channel.protection();
    let (at, own) = (Rc::clone(server), inbox.clone());
    let context =
        ConnectionContext { server: at, inbox: own, registration, peer, local, protection };
    let protocol = P::attach(context, conn_state);
    let timeout = server.limits().send_timeout;
    let mut conn =
        ConnectionDriver::new(channel, protocol, inbox, server.staging(), timeout, began);
    (conn.unread, conn.traffic) = (route.unread, route.traffic);
    let server = Rc::clone(server);
    tokio::task::spawn_local(async move {
        match conn.run().await {
            ConnectionEnd::Move(core) => migrate(&server, core, conn, peer, local).await,
            end => {
                tracing::debug!(service = %P::SERVICE, %peer, ?end, "a connection ended");
                conn.protocol.on_end(&end);
            }
        }
    });
}

async fn migrate<P: MigratableConnection>(
    server: &Server,
    core: usize,
    conn: ConnectionDriver<Channel, P>,
    peer: SocketAddr,
    local: SocketAddr,
) {
    let ConnectionDriver { stream, protocol, unread, began, traffic, .. } = conn;
    let conn_state = protocol.detach();
    let channel = match stream.detach() {
        Ok(channel) => channel,
        Err(error) => {
            tracing::warn!(%peer, %error, "a connection could not be moved");
            return;
        }
    };
    let route = ConnectionInfo { unread, traffic, began, peer, local };
    let migrating = MigratingConnection { channel, state: conn_state, info: route };
    server.send(core, Box::new(move |server| receive_migrated::<P>(server, migrating))).await;
}

fn receive_migrated<P: MigratableConnection>(
    server: &Rc<Server>,
    migrating: MigratingConnection<P::MigratingState>,
) {
    let MigratingConnection { channel, state: conn_state, info: route } = migrating;
    // The core it comes from has one connection less now: without this check its limits would bound
    // nothing. And this core's earlier notices have not reached the newcomer.
    if server.is_full(P::SERVICE, route.peer) {
        return;
    }
    let (stream, state) = channel.into_parts();
    match server.core().attach(stream) {
        Ok(stream) => {
            let channel = Channel::attach(stream, state, server.ciphertext());
            spawn_on_core::<P>(server, channel, conn_state, route);
        }
        Err(error) => {
            tracing::warn!(peer = %route.peer, %error, "a connection was lost while moving to another core");
        }
    }
}
