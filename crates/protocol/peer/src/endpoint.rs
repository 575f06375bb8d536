//! The sessions of a replica: dials nodes with lower numbers, accepts the others, and keeps one
//! session with each.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ::frame::SendQueue;
use rt::Core;
use tokio::sync::{Mutex, Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use crate::frame::{ConnectionParams, HandshakeFrame, Hello};
use crate::handshake::{self, DialTarget, HANDSHAKE_TIMEOUT, HandshakeError, IncomingConnection};
use crate::refusal_log::RefusalLog;
use crate::session::{DialBackoff, LogDedup, NegotiatedParams, PeerIdentity, SessionAssembly};
use crate::session_driver::{PeerSessionEnd, ReadyConnection, SessionHandler, run_session};
use crate::tls::PeerStream;
use crate::unauthenticated::{self, UnauthenticatedConnections};
use crate::{ConnectionPurpose, Link, NO_SESSION, NodeId};

/// How long the peer may receive nothing while there is something to send.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Most lease connections of one node; a further one replaces the oldest.
const MAX_LEASE_CONNECTIONS: usize = 8;

/// The addresses of another node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerAddresses {
    /// For sessions, in the order in which to try them.
    pub data: Vec<SocketAddr>,
    /// For lease messages only.
    pub heartbeat: Vec<SocketAddr>,
}

impl PeerAddresses {
    /// The addresses with lease connections: all, because it is not known which one the session
    /// uses. With a single address the control lane of the session suffices.
    fn lease_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let has_several = self.data.len() + self.heartbeat.len() > 1;
        self.data.iter().chain(&self.heartbeat).copied().filter(move |_| has_several)
    }
}

/// The sessions of a replica. Cheap to clone; stays on its core.
///
/// [`Self::stop`] ends it; dropping it does not.
pub struct Endpoint<H>(Rc<EndpointShared<H>>);

struct EndpointShared<H> {
    core: Core,
    identity: PeerIdentity,
    handler: Rc<H>,
    started_at: Instant,
    peers: RefCell<BTreeMap<NodeId, Rc<PeerNode>>>,
    assembly: RefCell<SessionAssembly<PeerStream>>,
    /// The last dial errors.
    dial_errors: RefCell<LogDedup<DialTarget, String>>,
    refusal_log: RefusalLog,
    /// Number of the last session.
    last_session: Cell<u64>,
    unauthenticated: UnauthenticatedConnections,
}

/// A peer.
struct PeerNode {
    node: NodeId,
    addresses: PeerAddresses,
    stop_flag: StopFlag,
    /// The running session; the lock serializes ending it and beginning the next.
    session: Mutex<Option<RunningSession>>,
    /// Lease connections by the nonce of their dialler, oldest first.
    lease_paths: RefCell<Vec<(u128, Link)>>,
    dialling: RefCell<Vec<JoinHandle<()>>>,
}

struct RunningSession {
    link: Link,
    task: JoinHandle<()>,
}

/// A flag to wait for.
#[derive(Default)]
struct StopFlag {
    set: Cell<bool>,
    notify: Notify,
}

impl StopFlag {
    fn set(&self) {
        self.set.set(true);
        self.notify.notify_waiters();
    }

    async fn wait(&self) {
        let notified = self.notify.notified();
        if !self.set.get() {
            notified.await;
        }
    }

    /// The result of `work`, unless the flag is set first.
    async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.wait() => None,
            result = work => Some(result),
        }
    }
}

/// A connection whose peer has authenticated.
struct AuthenticatedConnection {
    stream: PeerStream,
    negotiated: NegotiatedParams,
    purpose: ConnectionPurpose,
    nonce: u128,
}

impl<H> Clone for Endpoint<H> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<H> fmt::Debug for Endpoint<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("identity", &self.0.identity).finish_non_exhaustive()
    }
}

impl<H> EndpointShared<H> {
    fn lease_paths(&self, node: NodeId) -> Vec<Link> {
        let peers = self.peers.borrow();
        let Some(peer) = peers.get(&node) else { return Vec::new() };
        let paths = peer.lease_paths.borrow();
        paths.iter().map(|(_, link)| link.clone()).filter(|link| !link.is_closed()).collect()
    }
}

impl<H: SessionHandler> Endpoint<H> {
    /// The endpoint of the replica `identity` on `core`, without peers yet.
    #[must_use]
    pub fn new(core: Core, identity: PeerIdentity, handler: Rc<H>) -> Self {
        Self(Rc::new(EndpointShared {
            core,
            identity,
            handler,
            started_at: Instant::now(),
            peers: RefCell::default(),
            assembly: RefCell::default(),
            dial_errors: RefCell::default(),
            refusal_log: RefusalLog::default(),
            last_session: Cell::new(NO_SESSION),
            unauthenticated: UnauthenticatedConnections::new(unauthenticated::AFTER_HELLO),
        }))
    }

    /// Maintains sessions with the replica on `node`: dials for ever, at its data addresses in
    /// turn, if its number is lower than ours; otherwise accepts. Lease connections use all
    /// addresses. Does nothing if the node is known.
    pub fn add(&self, node: NodeId, addresses: PeerAddresses) {
        if node == self.0.identity.node || self.0.peers.borrow().contains_key(&node) {
            return;
        }
        let peer = Rc::new(PeerNode {
            node,
            addresses,
            stop_flag: StopFlag::default(),
            session: Mutex::new(None),
            lease_paths: RefCell::default(),
            dialling: RefCell::default(),
        });
        self.0.peers.borrow_mut().insert(node, Rc::clone(&peer));
        if node > self.0.identity.node {
            return;
        }
        let mut dialling = peer.dialling.borrow_mut();
        let (this, peer_node) = (self.clone(), Rc::clone(&peer));
        dialling
            .push(tokio::task::spawn_local(async move { this.dial_sessions(&peer_node).await }));
        for address in peer.addresses.lease_addresses() {
            let (this, peer_node) = (self.clone(), Rc::clone(&peer));
            let work = async move { this.dial_lease_path(&peer_node, address).await };
            dialling.push(tokio::task::spawn_local(work));
        }
    }

    /// Ends the sessions with `node`. When this returns, the session has ended and `session_down`
    /// was called.
    pub async fn remove(&self, node: NodeId) {
        let peer = self.0.peers.borrow_mut().remove(&node);
        let Some(peer) = peer else { return };
        peer.stop_flag.set();
        self.0.assembly.borrow_mut().forget(node);
        peer.lease_paths.borrow().iter().for_each(|(_, link)| link.close());
        close_session(&mut *peer.session.lock().await).await;
        let dialling = peer.dialling.take();
        for task in dialling {
            let _ = task.await;
        }
    }

    /// [`Self::remove`] for all nodes.
    pub async fn stop(&self) {
        loop {
            let node = self.0.peers.borrow().keys().next().copied();
            let Some(node) = node else { return };
            self.remove(node).await;
        }
    }

    /// The open lease connections with `node`, besides its session. They carry
    /// [`crate::Message::LeaseRequest`], [`crate::Message::LeaseGrant`],
    /// [`crate::Message::NewerEpoch`], [`crate::Message::RevokeLease`] and
    /// [`crate::Message::LeaseRevoked`]; any other message ends them. The first copy to arrive
    /// counts.
    #[must_use]
    pub fn lease_paths(&self, node: NodeId) -> Vec<Link> {
        self.0.lease_paths(node)
    }

    /// [`Self::lease_paths`] for the handler to keep: it does not keep the endpoint alive, and
    /// returns none after its end.
    pub fn lease_paths_for_handler(&self) -> impl Fn(NodeId) -> Vec<Link> + use<H> {
        let inner = Rc::downgrade(&self.0);
        move |node| inner.upgrade().map_or_else(Vec::new, |inner| inner.lease_paths(node))
    }

    /// Takes a connection that asks for this replica, on this core. Refuses it with a reason if it
    /// is not wanted; until it has authenticated, it may be evicted for another one.
    pub fn accept(&self, connection: IncomingConnection) {
        let Ok(from) = connection.stream.peer_addr() else { return };
        let slot = self.0.unauthenticated.admit(from.ip(), Instant::now());
        let this = self.clone();
        tokio::task::spawn_local(async move {
            let node = connection.hello.sender;
            let Some(result) = slot.unless_evicted(this.authenticate(connection)).await else {
                return;
            };
            match result {
                Ok(connection) => this.attach_connection(node, connection).await,
                Err(error) => {
                    let is_known = this.0.peers.borrow().contains_key(&node);
                    this.0.refusal_log.log(
                        this.0.identity.volume,
                        node,
                        is_known,
                        &error.to_string(),
                    );
                }
            }
        });
    }

    /// Runs the handshake of an accepted connection.
    async fn authenticate(
        &self,
        connection: IncomingConnection,
    ) -> Result<AuthenticatedConnection, HandshakeError> {
        let Hello { sender: node, purpose, session: nonce, .. } = connection.hello;
        let challenge = handshake::challenge(&self.0.core);
        let is_known = self.0.peers.borrow().contains_key(&node);
        let handshake = handshake::accept(connection, &self.0.identity, is_known, challenge);
        let result =
            timeout(HANDSHAKE_TIMEOUT, handshake).await.unwrap_or(Err(HandshakeError::TimedOut));
        result.map(|(stream, negotiated)| AuthenticatedConnection {
            stream,
            negotiated,
            purpose,
            nonce,
        })
    }

    /// Adds a connection to its session, which begins with its last lane; or runs a lease
    /// connection.
    async fn attach_connection(&self, node: NodeId, connection: AuthenticatedConnection) {
        let AuthenticatedConnection { stream, negotiated, purpose, nonce } = connection;
        let peer = self.0.peers.borrow().get(&node).cloned();
        let Some(peer) = peer else { return };
        let ConnectionPurpose::Lane(lane) = purpose else {
            let mut connection = ready_connection(purpose, negotiated, stream);
            connection.preamble.push_vec(HandshakeFrame::ready());
            drop(self.run_lease_path(&peer, nonce, connection));
            return;
        };
        let attempt = (node, nonce, negotiated);
        let lanes =
            self.0.assembly.borrow_mut().add(self.0.started_at.elapsed(), attempt, lane, stream);
        let Some(lanes) = lanes else {
            tokio::time::sleep(HANDSHAKE_TIMEOUT).await;
            self.0.assembly.borrow_mut().expire(self.0.started_at.elapsed(), HANDSHAKE_TIMEOUT);
            return;
        };
        let mut connections = ready_lanes(lanes, negotiated);
        for connection in &mut connections {
            connection.preamble.push_vec(HandshakeFrame::ready());
        }
        drop(self.begin_session(&peer, connections).await);
    }

    /// Begins a session after the previous one has ended. The returned receiver ends with the
    /// session; `None` if the peer was removed.
    async fn begin_session(
        &self,
        peer: &Rc<PeerNode>,
        connections: Vec<ReadyConnection<PeerStream>>,
    ) -> Option<oneshot::Receiver<()>> {
        // In the order of the lock: a session that is complete later ends this one.
        let mut slot = peer.session.lock().await;
        close_session(&mut slot).await;
        if peer.stop_flag.set.get() {
            return None;
        }
        let node = peer.node;
        self.0.last_session.set(self.0.last_session.get() + 1);
        let session = self.0.last_session.get();
        let (link, outbox) = Link::new(node, session);
        let (handler, handler_link) = (Rc::clone(&self.0.handler), link.clone());
        let (ended, end) = oneshot::channel();
        self.0.dial_errors.borrow_mut().forget(&DialTarget { node, address: None });
        self.0.refusal_log.forget(node);
        let volume = self.0.identity.volume;
        info!(%volume, %node, session, "a session is up");
        handler.session_up(handler_link);
        let task = tokio::task::spawn_local(async move {
            let end =
                run_session(Rc::clone(&handler), session, outbox, connections, STALL_TIMEOUT).await;
            handler.session_down(node, session);
            match end {
                PeerSessionEnd::InvalidMessage(_) | PeerSessionEnd::Panicked => {
                    tracing::error!(%volume, %node, session, %end, "a session is down");
                }
                end => info!(%volume, %node, session, %end, "a session is down"),
            }
            drop(ended);
        });
        *slot = Some(RunningSession { link, task });
        Some(end)
    }

    /// Runs a lease connection.
    fn run_lease_path(
        &self,
        peer: &Rc<PeerNode>,
        nonce: u128,
        connection: ReadyConnection<PeerStream>,
    ) -> JoinHandle<()> {
        let (link, outbox) = Link::new(peer.node, NO_SESSION);
        let mut paths = peer.lease_paths.borrow_mut();
        let is_stale = |(other, link): &(u128, Link)| {
            let is_replaced = *other == nonce;
            if is_replaced {
                link.close();
            }
            is_replaced || link.is_closed()
        };
        paths.retain(|path| !is_stale(path));
        if paths.len() >= MAX_LEASE_CONNECTIONS {
            paths.remove(0).1.close();
        }
        if peer.stop_flag.set.get() {
            link.close();
        }
        paths.push((nonce, link));
        let handler = Rc::clone(&self.0.handler);
        tokio::task::spawn_local(async move {
            run_session(handler, NO_SESSION, outbox, vec![connection], STALL_TIMEOUT).await;
        })
    }

    /// Dials sessions with `peer` for ever, one after another.
    async fn dial_sessions(&self, peer: &Rc<PeerNode>) {
        let mut backoff = DialBackoff::default();
        for &address in peer.addresses.data.iter().cycle() {
            let Some(result) =
                peer.stop_flag.unless_stopped(self.dial_session(peer.node, address)).await
            else {
                return;
            };
            match result {
                Ok(connections) => {
                    backoff = DialBackoff::default();
                    let Some(ended) = self.begin_session(peer, connections).await else { return };
                    // The sender is dropped without sending.
                    let _ = ended.await;
                }
                Err(error) => {
                    self.log_dial_error(DialTarget { node: peer.node, address: None }, &error);
                }
            }
            let pause = backoff.next(self.0.core.random_u64());
            if peer.stop_flag.unless_stopped(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    /// Dials all lanes of a new session with `node`.
    async fn dial_session(
        &self,
        node: NodeId,
        address: SocketAddr,
    ) -> Result<Vec<ReadyConnection<PeerStream>>, HandshakeError> {
        let nonce = handshake::nonce(&self.0.core);
        let [control, replication, requests] =
            handshake::lane_purposes().map(|purpose| self.dial(node, address, purpose, nonce));
        // Concurrently: the acceptor sends READY when it has all of them.
        let (control, replication, requests) = tokio::try_join!(control, replication, requests)?;
        Ok(vec![control, replication, requests])
    }

    /// Maintains a lease connection to `peer` at one of its addresses.
    async fn dial_lease_path(&self, peer: &Rc<PeerNode>, address: SocketAddr) {
        let nonce = handshake::nonce(&self.0.core);
        let target = DialTarget { node: peer.node, address: Some(address) };
        let mut backoff = DialBackoff::default();
        loop {
            let dial = self.dial(peer.node, address, ConnectionPurpose::Lease, nonce);
            match peer.stop_flag.unless_stopped(dial).await {
                None => return,
                Some(Ok(connection)) => {
                    backoff = DialBackoff::default();
                    self.0.dial_errors.borrow_mut().forget(&target);
                    let _ = self.run_lease_path(peer, nonce, connection).await;
                }
                Some(Err(error)) => self.log_dial_error(target, &error),
            }
            let pause = backoff.next(self.0.core.random_u64());
            if peer.stop_flag.unless_stopped(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    async fn dial(
        &self,
        node: NodeId,
        address: SocketAddr,
        purpose: ConnectionPurpose,
        nonce: u128,
    ) -> Result<ReadyConnection<PeerStream>, HandshakeError> {
        let EndpointShared { core, identity, .. } = &*self.0;
        let dial = async {
            let stream = core.dial(address).await?;
            let hello = identity.hello(node, purpose, nonce, handshake::challenge(core));
            let (stream, negotiated) = handshake::dial(stream, identity, &hello).await?;
            Ok(ready_connection(purpose, negotiated, stream))
        };
        timeout(HANDSHAKE_TIMEOUT, dial).await.unwrap_or(Err(HandshakeError::TimedOut))
    }

    /// Logs a dial error, unless it repeats the last one.
    fn log_dial_error(&self, target: DialTarget, error: &HandshakeError) {
        let text = error.to_string();
        if self.0.dial_errors.borrow_mut().is_news(target, text) {
            let volume = self.0.identity.volume;
            warn!(%volume, "no connection with {target}: {error}");
        }
    }
}

/// Ends the running session; when this returns, `session_down` was called.
async fn close_session(slot: &mut Option<RunningSession>) {
    if let Some(RunningSession { link, task }) = slot.take() {
        link.close();
        // A panicked task has ended as well.
        let _ = task.await;
    }
}

fn ready_connection(
    purpose: ConnectionPurpose,
    negotiated: NegotiatedParams,
    stream: PeerStream,
) -> ReadyConnection<PeerStream> {
    let NegotiatedParams { version, max_data_bytes, .. } = negotiated;
    let params = ConnectionParams { purpose, version, max_data_bytes };
    ReadyConnection { params, stream, preamble: SendQueue::default() }
}

fn ready_lanes(
    lanes: [PeerStream; 3],
    negotiated: NegotiatedParams,
) -> Vec<ReadyConnection<PeerStream>> {
    let with_purposes = handshake::lane_purposes().into_iter().zip(lanes);
    with_purposes.map(|(purpose, stream)| ready_connection(purpose, negotiated, stream)).collect()
}
