//! A replica's end of its sessions: dials those whose numbers are lower, accepts the others, and keeps
//! one session with each.

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

use crate::driver::{Connection, End, Handler, run};
use crate::frame::{HandshakeFrame, Hello, Rules};
use crate::greeting::{self, Greeting, HANDSHAKE, Unjoined, Whom};
use crate::refused::RefusedConnections;
use crate::session::{Agreed, Assembly, Backoff, Identity, Said};
use crate::tls::Wire;
use crate::unproven::{self, UnprovenConnections};
use crate::{Line, Link, NO_SESSION, NodeId};

/// Time in which a connection must take something of what is sent.
const STALL: Duration = Duration::from_secs(10);

/// Lease connections that one node may have with us; a further one takes the place of the oldest.
const MAX_PATHS: usize = 8;

/// Where another node is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerAddresses {
    /// For sessions, in the order in which they are tried.
    pub data: Vec<SocketAddr>,
    /// For leases alone.
    pub heartbeat: Vec<SocketAddr>,
}

impl PeerAddresses {
    /// Where leases have connections of their own: everywhere, for which of them the session uses
    /// is not known. With one address the session's control lane takes the same way.
    fn paths(&self) -> impl Iterator<Item = SocketAddr> {
        let many = self.data.len() + self.heartbeat.len() > 1;
        self.data.iter().chain(&self.heartbeat).copied().filter(move |_| many)
    }
}

/// A replica's end of its sessions. Cheap to clone; stays on its core.
///
/// [`Self::stop`] ends it. What is merely dropped goes on.
pub struct Endpoint<H>(Rc<Inner<H>>);

struct Inner<H> {
    core: Core,
    identity: Identity,
    handler: Rc<H>,
    began: Instant,
    peers: RefCell<BTreeMap<NodeId, Rc<Peer>>>,
    pending: RefCell<Assembly<Wire>>,
    /// Why nodes could not be dialled.
    said: RefCell<Said<Whom, String>>,
    refused: RefusedConnections,
    /// Number of the last session.
    sessions: Cell<u64>,
    unproven: UnprovenConnections,
}

/// Another replica.
struct Peer {
    node: NodeId,
    addresses: PeerAddresses,
    stop: Stop,
    /// The session, and whose turn it is to end it and begin the next.
    session: Mutex<Option<Running>>,
    /// Lease connections by the number that their dialler drew, oldest first.
    paths: RefCell<Vec<(u128, Link)>>,
    dialling: RefCell<Vec<JoinHandle<()>>>,
}

struct Running {
    link: Link,
    task: JoinHandle<()>,
}

/// A flag that can be waited for.
#[derive(Default)]
struct Stop {
    set: Cell<bool>,
    notify: Notify,
}

impl Stop {
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

    /// What `work` gives, unless the end comes first.
    async fn or<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.wait() => None,
            done = work => Some(done),
        }
    }
}

/// What is proven of a connection.
struct Proven {
    wire: Wire,
    agreed: Agreed,
    line: Line,
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

impl<H> Inner<H> {
    fn paths(&self, node: NodeId) -> Vec<Link> {
        let peers = self.peers.borrow();
        let Some(peer) = peers.get(&node) else { return Vec::new() };
        let paths = peer.paths.borrow();
        paths.iter().map(|(_, link)| link.clone()).filter(|link| !link.is_closed()).collect()
    }
}

impl<H: Handler> Endpoint<H> {
    /// The end of the replica `identity` on `core`, with nobody to talk to yet.
    #[must_use]
    pub fn new(core: Core, identity: Identity, handler: Rc<H>) -> Self {
        Self(Rc::new(Inner {
            core,
            identity,
            handler,
            began: Instant::now(),
            peers: RefCell::default(),
            pending: RefCell::default(),
            said: RefCell::default(),
            refused: RefusedConnections::default(),
            sessions: Cell::new(NO_SESSION),
            unproven: UnprovenConnections::new(unproven::GREETED),
        }))
    }

    /// From now on there are sessions with the replica on `node`: dialled for ever if the number is
    /// lower than ours, at its addresses for data in turn, else accepted. Leases travel by all
    /// addresses. Does nothing if the node is known.
    pub fn add(&self, node: NodeId, addresses: PeerAddresses) {
        if node == self.0.identity.node || self.0.peers.borrow().contains_key(&node) {
            return;
        }
        let peer = Rc::new(Peer {
            node,
            addresses,
            stop: Stop::default(),
            session: Mutex::new(None),
            paths: RefCell::default(),
            dialling: RefCell::default(),
        });
        self.0.peers.borrow_mut().insert(node, Rc::clone(&peer));
        if node > self.0.identity.node {
            return;
        }
        let mut dialling = peer.dialling.borrow_mut();
        let (this, of) = (self.clone(), Rc::clone(&peer));
        dialling.push(tokio::task::spawn_local(async move { this.dial_sessions(&of).await }));
        for path in peer.addresses.paths() {
            let (this, of) = (self.clone(), Rc::clone(&peer));
            let work = async move { this.dial_path(&of, path).await };
            dialling.push(tokio::task::spawn_local(work));
        }
    }

    /// No more sessions with `node`. When this returns, its session has ended and `down` was called.
    pub async fn remove(&self, node: NodeId) {
        let peer = self.0.peers.borrow_mut().remove(&node);
        let Some(peer) = peer else { return };
        peer.stop.set();
        self.0.pending.borrow_mut().forget(node);
        peer.paths.borrow().iter().for_each(|(_, link)| link.close());
        close(&mut *peer.session.lock().await).await;
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

    /// The lease connections with `node` that are up, besides its session. They carry
    /// [`crate::Message::Renew`], [`crate::Message::Promise`], [`crate::Message::Newer`],
    /// [`crate::Message::Yield`] and [`crate::Message::Yielded`] and nothing else: anything else ends
    /// them. The first copy to arrive counts.
    #[must_use]
    pub fn paths(&self, node: NodeId) -> Vec<Link> {
        self.0.paths(node)
    }

    /// [`Self::paths`] for its handler to keep, which the end has a share of: once the end is gone there are none.
    pub fn paths_for_handler(&self) -> impl Fn(NodeId) -> Vec<Link> + use<H> {
        let inner = Rc::downgrade(&self.0);
        move |node| inner.upgrade().map_or_else(Vec::new, |inner| inner.paths(node))
    }

    /// Takes over a connection that asks for this replica, on this core. It is refused by name if it
    /// is not wanted, and may have to make room for another one until it has proven who it is.
    pub fn accept(&self, greeting: Greeting) {
        let Ok(from) = greeting.stream.peer_addr() else { return };
        let slot = self.0.unproven.admit(from.ip(), Instant::now());
        let this = self.clone();
        tokio::task::spawn_local(async move {
            let node = greeting.hello.from;
            let Some(proven) = slot.unless_evicted(this.prove(greeting)).await else { return };
            match proven {
                Ok(proven) => this.join(node, proven).await,
                Err(why) => {
                    let known = this.0.peers.borrow().contains_key(&node);
                    this.0.refused.log(this.0.identity.volume, node, known, &why.to_string());
                }
            }
        });
    }

    /// Lets the other side of a connection prove who it is.
    async fn prove(&self, greeting: Greeting) -> Result<Proven, Unjoined> {
        let Hello { from: node, line, session: nonce, .. } = greeting.hello;
        let challenge = greeting::challenge(&self.0.core);
        let known = self.0.peers.borrow().contains_key(&node);
        let handshake = greeting::accept(greeting, &self.0.identity, known, challenge);
        let proven = timeout(HANDSHAKE, handshake).await.unwrap_or(Err(Unjoined::TimedOut));
        proven.map(|(wire, agreed)| Proven { wire, agreed, line, nonce })
    }

    /// Puts a connection where it belongs; a session begins when its last lane is there.
    async fn join(&self, node: NodeId, proven: Proven) {
        let Proven { wire, agreed, line, nonce } = proven;
        let peer = self.0.peers.borrow().get(&node).cloned();
        let Some(peer) = peer else { return };
        let Line::Lane(lane) = line else {
            let mut connection = connection(line, agreed, wire);
            connection.first.push_vec(HandshakeFrame::ready());
            drop(self.start_path(&peer, nonce, connection));
            return;
        };
        let of = (node, nonce, agreed);
        let lanes = self.0.pending.borrow_mut().add(self.0.began.elapsed(), of, lane, wire);
        let Some(lanes) = lanes else {
            tokio::time::sleep(HANDSHAKE).await;
            self.0.pending.borrow_mut().expire(self.0.began.elapsed(), HANDSHAKE);
            return;
        };
        let mut connections = all(lanes, agreed);
        for connection in &mut connections {
            connection.first.push_vec(HandshakeFrame::ready());
        }
        drop(self.begin(&peer, connections).await);
    }

    /// Begins a session, after the one before it is over. What is returned ends with it; `None` if
    /// there is to be none any more.
    async fn begin(
        &self,
        peer: &Rc<Peer>,
        connections: Vec<Connection<Wire>>,
    ) -> Option<oneshot::Receiver<()>> {
        // First come, first served: a session that was complete later ends this one.
        let mut slot = peer.session.lock().await;
        close(&mut slot).await;
        if peer.stop.set.get() {
            return None;
        }
        let node = peer.node;
        self.0.sessions.set(self.0.sessions.get() + 1);
        let session = self.0.sessions.get();
        let (link, outbox) = Link::new(node, session);
        let (handler, owned) = (Rc::clone(&self.0.handler), link.clone());
        let (ended, end) = oneshot::channel();
        self.0.said.borrow_mut().forget(&Whom { node, path: None });
        self.0.refused.forget(node);
        let volume = self.0.identity.volume;
        info!(%volume, %node, session, "a session is up");
        handler.up(owned);
        let task = tokio::task::spawn_local(async move {
            let end = run(Rc::clone(&handler), session, outbox, connections, STALL).await;
            handler.down(node, session);
            match end {
                End::Unsendable(_) | End::Failed => {
                    tracing::error!(%volume, %node, session, %end, "a session is down");
                }
                end => info!(%volume, %node, session, %end, "a session is down"),
            }
            drop(ended);
        });
        *slot = Some(Running { link, task });
        Some(end)
    }

    /// Runs a lease connection.
    fn start_path(
        &self,
        peer: &Rc<Peer>,
        nonce: u128,
        connection: Connection<Wire>,
    ) -> JoinHandle<()> {
        let (link, outbox) = Link::new(peer.node, NO_SESSION);
        let mut paths = peer.paths.borrow_mut();
        let forget = |(known, link): &(u128, Link)| {
            let old = *known == nonce;
            if old {
                link.close();
            }
            old || link.is_closed()
        };
        paths.retain(|path| !forget(path));
        if paths.len() >= MAX_PATHS {
            paths.remove(0).1.close();
        }
        if peer.stop.set.get() {
            link.close();
        }
        paths.push((nonce, link));
        let handler = Rc::clone(&self.0.handler);
        tokio::task::spawn_local(async move {
            run(handler, NO_SESSION, outbox, vec![connection], STALL).await;
        })
    }

    /// Dials `peer` for ever, one session after another.
    async fn dial_sessions(&self, peer: &Rc<Peer>) {
        let mut backoff = Backoff::default();
        for &at in peer.addresses.data.iter().cycle() {
            let Some(dialled) = peer.stop.or(self.dial_session(peer.node, at)).await else {
                return;
            };
            match dialled {
                Ok(connections) => {
                    backoff = Backoff::default();
                    let Some(ended) = self.begin(peer, connections).await else { return };
                    // The other end is dropped, with nothing sent.
                    let _ = ended.await;
                }
                Err(why) => self.say(Whom { node: peer.node, path: None }, &why),
            }
            let pause = backoff.next(self.0.core.random_u64());
            if peer.stop.or(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    /// All lanes of a new session with `node`.
    async fn dial_session(
        &self,
        node: NodeId,
        at: SocketAddr,
    ) -> Result<Vec<Connection<Wire>>, Unjoined> {
        let nonce = greeting::nonce(&self.0.core);
        let [control, down, up] = greeting::lanes().map(|line| self.dial(node, at, line, nonce));
        // Together: the other side is ready when it has all of them.
        let (control, down, up) = tokio::try_join!(control, down, up)?;
        Ok(vec![control, down, up])
    }

    /// Keeps a lease connection to `peer` at one of its addresses.
    async fn dial_path(&self, peer: &Rc<Peer>, at: SocketAddr) {
        let nonce = greeting::nonce(&self.0.core);
        let whom = Whom { node: peer.node, path: Some(at) };
        let mut backoff = Backoff::default();
        loop {
            let dial = self.dial(peer.node, at, Line::Lease, nonce);
            match peer.stop.or(dial).await {
                None => return,
                Some(Ok(connection)) => {
                    backoff = Backoff::default();
                    self.0.said.borrow_mut().forget(&whom);
                    let _ = self.start_path(peer, nonce, connection).await;
                }
                Some(Err(why)) => self.say(whom, &why),
            }
            let pause = backoff.next(self.0.core.random_u64());
            if peer.stop.or(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    async fn dial(
        &self,
        node: NodeId,
        at: SocketAddr,
        line: Line,
        nonce: u128,
    ) -> Result<Connection<Wire>, Unjoined> {
        let Inner { core, identity, .. } = &*self.0;
        let dial = async {
            let stream = core.dial(at).await?;
            let hello = identity.hello(node, line, nonce, greeting::challenge(core));
            let (wire, agreed) = greeting::dial(stream, identity, &hello).await?;
            Ok(connection(line, agreed, wire))
        };
        timeout(HANDSHAKE, dial).await.unwrap_or(Err(Unjoined::TimedOut))
    }

    /// Logs why there is no connection, once.
    fn say(&self, whom: Whom, why: &Unjoined) {
        let text = why.to_string();
        if self.0.said.borrow_mut().is_news(whom, text) {
            let volume = self.0.identity.volume;
            warn!(%volume, "no connection with {whom}: {why}");
        }
    }
}

/// Ends what runs; when this returns, its `down` was called.
async fn close(slot: &mut Option<Running>) {
    if let Some(Running { link, task }) = slot.take() {
        link.close();
        // If it panicked it is over as well.
        let _ = task.await;
    }
}

fn connection(line: Line, agreed: Agreed, stream: Wire) -> Connection<Wire> {
    let Agreed { version, max_data_bytes, .. } = agreed;
    let rules = Rules { line, version, max_data_bytes };
    Connection { rules, stream, first: SendQueue::default() }
}

fn all(lanes: [Wire; 3], agreed: Agreed) -> Vec<Connection<Wire>> {
    let with_lines = greeting::lanes().into_iter().zip(lanes);
    with_lines.map(|(line, stream)| connection(line, agreed, stream)).collect()
}
