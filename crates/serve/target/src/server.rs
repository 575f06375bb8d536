//! One core's share of the node: its volumes, its connections, and the doors to other cores.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use block::{Access, AccessState, Account, Pool};
use rt::net::Listener;
use rt::{Core, LogLimit, network};
use slab::Slab;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use volume::Volume;

use crate::catalog::{Catalog, VolumeId};
use crate::clones::{Clones, SharedName};
use crate::conn::Staging;
use crate::copying;
use crate::guesses::{Counts, Failing, Guesses, Method, Turn, Whence};
use crate::resident::{self, Resident};
use crate::tokens::Tokens;

/// Most data that one command moves, in bytes, with either protocol.
pub const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// Most buffer memory that one request waits for, in bytes: as much as its data, and at most as
/// much again for what the volume's layers need.
pub const MAX_REQUEST_BYTES: u64 = 2 * MAX_TRANSFER_BYTES as u64;

/// Requests of the largest size that a core's pool has to hold: so each class of work has its
/// share ([`Class`](block::Class)).
pub const MIN_POOL_REQUESTS: u64 = 8;

/// Bounds on what clients may do. All are configuration.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections per core, those that have not logged in included.
    pub connections: usize,
    /// Connections per core that have not logged in yet; one of them makes room for the next.
    pub logins: usize,
    /// Connections per core that only discover, for which nobody has to show who he is; one of
    /// them makes room for the next.
    pub discoveries: usize,
    /// Time for a login, from the first byte to full feature phase.
    pub login_timeout: Duration,
    /// Time in which a client must take something of what is sent to it.
    pub send_timeout: Duration,
    /// Time in which a client must send the rest of what it has begun.
    pub receive_timeout: Duration,
    /// Time that a command with part of its data here may wait for memory for the rest.
    pub admission_timeout: Duration,
    /// Time that any other command may wait for memory.
    pub memory_timeout: Duration,
    /// Silence after which the target asks whether the client lives.
    pub keep_alive: Duration,
    /// iSCSI commands in flight per session (the width of the CmdSN window).
    pub commands: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            logins: 512,
            discoveries: 256,
            login_timeout: Duration::from_secs(15),
            send_timeout: Duration::from_secs(30),
            receive_timeout: Duration::from_secs(30),
            admission_timeout: Duration::from_secs(1),
            memory_timeout: Duration::from_secs(5),
            keep_alive: Duration::from_secs(15),
            commands: 128,
        }
    }
}

/// The protocol spoken at a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Service {
    /// iSCSI.
    Iscsi,
    /// NVMe over TCP; discovery and I/O controllers alike.
    Nvme,
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Iscsi => "iSCSI",
            Self::Nvme => "NVMe/TCP",
        })
    }
}

/// A volume as front ends see it.
#[derive(Debug)]
pub struct Served {
    /// Its identity.
    pub id: VolumeId,
    /// Its name, unique in the node.
    pub name: String,
    /// Its owner.
    pub volume: Rc<Volume>,
    /// Whether space is allocated only as it is written.
    pub thin: bool,
    /// How it is to be used through this node, if other nodes serve it too: then it also stands
    /// in [`Catalog::shared`]. Whoever keeps the volume sets it at any time; initiators are told.
    pub access: Option<AccessState>,
}

impl Served {
    /// How it is to be used through this node; `None` if only this node serves it.
    pub(crate) fn access_in(&self, catalog: &Catalog) -> Option<Access> {
        let access = self.access.as_ref().filter(|_| catalog.shared.contains_key(&self.id))?;
        Some(access.get())
    }
}

/// Space that a thin volume takes and that is left for it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// What it takes.
    pub used: u64,
    /// What is left where it lies; other volumes may take it as well.
    pub available: u64,
}

/// A volume of this core, and what tells its initiators of its access state.
struct Kept {
    served: Rc<Served>,
    space: Cell<Option<Space>>,
    _watch: Option<AbortOnDropHandle<()>>,
}

/// What connections are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The catalog was replaced: what was allowed may not be any more, and the other way round.
    CatalogChanged,
    /// A volume has grown.
    VolumeResized(VolumeId),
    /// The node is about to stop: take leave of the client, finish what is in flight.
    Drain,
    /// Close now.
    Close,
}

/// A connection as `windrose sessions` shows it.
#[derive(Clone, Debug)]
pub struct Session {
    /// Its protocol.
    pub service: Service,
    /// Where the client is.
    pub peer: SocketAddr,
    /// The address it came to.
    pub local: SocketAddr,
    /// Initiator name or host NQN; `None` until it has logged in.
    pub initiator: Option<String>,
    /// Target name or subsystem NQN; `None` for discovery.
    pub target: Option<String>,
    /// Whether it is protected by TLS; known once it has logged in.
    pub tls: bool,
    /// NVMe: queue identifier. iSCSI: connection identifier.
    pub queue: u16,
    /// How long it has existed.
    pub age: Duration,
    /// The core that serves it.
    pub core: usize,
}

/// What is odd about the clients of a core.
#[derive(Clone, Debug, Default)]
pub struct Clients {
    /// Those that fail to prove who they are.
    pub failing: Vec<Failing>,
    /// Addresses from which somebody has proved it.
    pub proven: BTreeSet<IpAddr>,
    /// Attempts to do so.
    pub proofs: Counts,
    /// Names of initiators that two hosts have.
    pub shared_names: Vec<SharedName>,
    /// iSCSI sessions that another login of their initiator has ended.
    pub replaced: u64,
}

/// Work handed to another core.
pub(crate) type Parcel = Box<dyn FnOnce(&Rc<Server>) + Send>;

/// How a core's server reaches the others.
#[derive(Debug)]
pub struct Door {
    own: mpsc::Receiver<Parcel>,
    peers: Vec<mpsc::Sender<Parcel>>,
}

/// Parcels that may wait at a door; the sender waits beyond that.
const PARCELS: usize = 256;

/// Doors between `cores` servers; one for each, in order of core.
#[must_use]
pub fn doors(cores: usize) -> Vec<Door> {
    let (peers, own): (Vec<_>, Vec<_>) = (0..cores).map(|_| mpsc::channel(PARCELS)).unzip();
    own.into_iter().map(|own| Door { own, peers: peers.clone() }).collect()
}

/// One core's server.
pub struct Server {
    core: Core,
    limits: Limits,
    peers: Vec<mpsc::Sender<Parcel>>,
    catalog: RefCell<Arc<Catalog>>,
    served: RefCell<BTreeMap<VolumeId, Kept>>,
    connections: RefCell<Slab<Entry>>,
    /// Connections by [`Stage`].
    stages: Cell<[usize; 4]>,
    refused: Cell<u64>,
    draining: Cell<bool>,
    idle: RefCell<Vec<Waker>>,
    staging: Staging,
    /// Where what TLS decrypts is read to.
    ciphertext: Staging,
    /// Memory for third-party copies: together they are one client.
    copying: Account,
    copies: Rc<Semaphore>,
    tokens: Tokens,
    guesses: RefCell<Guesses>,
    clones: RefCell<Clones>,
    /// Lines about clients that are refused.
    refusals: RefCell<LogLimit>,
    pub(crate) iscsi: crate::iscsi::Shared,
    pub(crate) nvme: crate::nvme::Shared,
}

struct Entry {
    session: Session,
    since: Instant,
    stage: Stage,
    line: Rc<dyn Line>,
}

/// How far a connection has come, and so which limit it counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has not logged in.
    Login,
    /// It discovers.
    Discovery,
    /// It serves volumes.
    Full,
    /// It has made room for another, and is about to go.
    Evicted,
}

/// The way to a connection.
pub(crate) trait Line {
    /// Tells it something.
    fn notify(&self, notice: Notice);

    /// Ends it at once.
    fn evict(&self);
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("core", &self.core.id()).finish_non_exhaustive()
    }
}

impl Server {
    /// The server of `core`. Must be called in the core's `LocalSet`.
    #[must_use]
    pub fn new(core: Core, limits: Limits, door: Door) -> Rc<Self> {
        let server = Rc::new(Self {
            limits,
            peers: door.peers,
            catalog: RefCell::default(),
            served: RefCell::default(),
            connections: RefCell::default(),
            stages: Cell::default(),
            refused: Cell::new(0),
            draining: Cell::new(false),
            idle: RefCell::default(),
            staging: Staging::default(),
            ciphertext: Staging::default(),
            copying: core.pool().account(),
            copies: Rc::new(Semaphore::new(copying::AT_ONCE)),
            tokens: Tokens::default(),
            guesses: RefCell::default(),
            clones: RefCell::default(),
            refusals: RefCell::default(),
            iscsi: crate::iscsi::Shared::new(crate::iscsi::config(&limits)),
            nvme: crate::nvme::Shared::new(&core),
            core,
        });
        let (weak, mut own) = (Rc::downgrade(&server), door.own);
        tokio::task::spawn_local(async move {
            while let Some(parcel) = own.recv().await {
                let Some(server) = weak.upgrade() else { break };
                parcel(&server);
            }
        });
        server
    }

    /// The core it runs on.
    #[must_use]
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The bounds it enforces.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The core's buffer pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        self.core.pool()
    }

    pub(crate) fn account(&self) -> Account {
        self.core.pool().client_account(self.limits.memory_timeout)
    }

    /// What third-party copies take their memory from.
    pub(crate) fn copying(&self) -> Account {
        self.copying.clone()
    }

    /// Turns to copy.
    pub(crate) fn copies(&self) -> Rc<Semaphore> {
        Rc::clone(&self.copies)
    }

    /// What stands for blocks of its volumes.
    pub(crate) fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    pub(crate) fn staging(&self) -> Staging {
        self.staging.clone()
    }

    pub(crate) fn ciphertext(&self) -> Staging {
        self.ciphertext.clone()
    }

    /// What is served to whom.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.catalog.borrow())
    }

    /// Replaces the catalog and tells every connection. Volumes that it names on this core must
    /// have been added before, and those it no longer names are removed afterwards.
    pub fn set_catalog(&self, catalog: Arc<Catalog>) {
        self.nvme.set_node(&catalog);
        self.catalog.replace(catalog);
        self.notify(Notice::CatalogChanged);
    }

    /// Makes a volume of this core available to the catalog. Must be called in the core's
    /// `LocalSet`.
    pub fn add_volume(self: &Rc<Self>, served: Served) {
        let served = Rc::new(served);
        let watch = served.access.clone().map(|access| self.watch(served.id, access));
        let space = Cell::default();
        self.served.borrow_mut().insert(served.id, Kept { served, space, _watch: watch });
    }

    /// Tells initiators of a thin volume about its space. Whoever measures it does so now and then,
    /// and first before initiators come.
    pub fn set_space(&self, id: VolumeId, space: Space) {
        let known = match self.served.borrow().get(&id) {
            Some(kept) => kept.space.replace(Some(space)),
            None => return,
        };
        if known != Some(space) {
            self.iscsi.space_changed(id, space);
            self.nvme.space_changed(id, space);
        }
    }

    /// What is known of a volume's space.
    pub(crate) fn space(&self, id: VolumeId) -> Option<Space> {
        self.served.borrow().get(&id)?.space.get()
    }

    /// Tells the initiators of a volume of each change of its access state.
    fn watch(self: &Rc<Self>, id: VolumeId, access: AccessState) -> AbortOnDropHandle<()> {
        let server = Rc::downgrade(self);
        let mut seen = access.get();
        let task = tokio::task::spawn_local(async move {
            loop {
                seen = access.other_than(seen).await;
                let Some(server) = server.upgrade() else { return };
                tracing::debug!(?id, access = ?seen, "the access state of a volume has changed");
                server.iscsi.access_changed(id, seen);
                server.nvme.access_changed(id, seen);
            }
        });
        AbortOnDropHandle::new(task)
    }

    /// Takes a volume away; its owner closes it afterwards.
    pub fn remove_volume(&self, id: VolumeId) -> Option<Rc<Served>> {
        self.served.borrow_mut().remove(&id).map(|kept| kept.served)
    }

    /// The volume, if it lives on this core.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> Option<Rc<Served>> {
        self.served.borrow().get(&id).map(|kept| Rc::clone(&kept.served))
    }

    /// All volumes of this core.
    #[must_use]
    pub fn volumes(&self) -> Vec<Rc<Served>> {
        self.served.borrow().values().map(|kept| Rc::clone(&kept.served)).collect()
    }

    /// Tells connections that a volume has grown.
    pub fn volume_resized(&self, id: VolumeId) {
        self.notify(Notice::VolumeResized(id));
    }

    /// The connections of this core.
    #[must_use]
    pub fn sessions(&self) -> Vec<Session> {
        let age = |e: &Entry| Session { age: e.since.elapsed(), ..e.session.clone() };
        self.connections.borrow().iter().map(|(_, e)| age(e)).collect()
    }

    /// What is odd about its clients.
    #[must_use]
    pub fn clients(&self) -> Clients {
        let (now, guesses, clones) = (Instant::now(), self.guesses.borrow(), self.clones.borrow());
        Clients {
            failing: guesses.failing(now),
            proven: guesses.proven(),
            proofs: guesses.counts(),
            shared_names: clones.shared(now),
            replaced: clones.count(),
        }
    }

    /// Whether an initiator at `peer` has as many connections of this core as one may have, so that some stay for hosts of
    /// other volumes. `named` is whether a rule names it: else it can choose its names.
    pub(crate) fn has_its_share(&self, initiator: &str, named: bool, peer: IpAddr) -> bool {
        let has = {
            let book = self.connections.borrow();
            let full = book.iter().filter(|(_, e)| e.stage == Stage::Full);
            let of = full.map(|(_, e)| (e.session.initiator.as_deref(), e.session.peer.ip()));
            Holding::count(of, initiator, peer).is_share(self.limits.connections, named)
        };
        if has {
            self.refused.set(self.refused.get() + 1);
        }
        has
    }

    /// A client at this address is to prove who it is: when it may, or nothing if too many wait already.
    pub(crate) fn attempt(
        self: &Rc<Self>,
        whence: Whence<'_>,
    ) -> Option<(Option<Instant>, Attempt)> {
        let at = match self.guesses.borrow_mut().turn(Instant::now(), whence) {
            Turn::Now => None,
            Turn::At(at) => Some(at),
            Turn::Refused => return None,
        };
        let (address, method, target) = (whence.0, whence.1, whence.2.to_owned());
        Some((at, Attempt { server: Rc::clone(self), address, method, target, is_over: false }))
    }

    /// Whether there may be one more line about a client that is refused; then how many were left out before it.
    pub(crate) fn refusal_line(&self) -> Option<u64> {
        self.refusals.borrow_mut().line(Instant::now())
    }

    pub(crate) fn clones(&self) -> &RefCell<Clones> {
        &self.clones
    }

    /// Connections refused, or closed for another, because a limit was reached, since the start.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.get()
    }

    /// Serves `service` on `listener` for ever; stop by dropping the future. Connections live on.
    pub async fn serve(self: Rc<Self>, listener: Listener, service: Service) {
        match service {
            Service::Iscsi => self.accept::<crate::iscsi::Initiator>(listener).await,
            Service::Nvme => self.accept::<crate::nvme::Host>(listener).await,
        }
    }

    /// Accepts connections of protocol `P` for ever; stop by dropping the future. Connections
    /// live on.
    pub(crate) async fn accept<P: Resident>(self: Rc<Self>, listener: Listener) {
        let service = P::SERVICE;
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, or a connection that died in the queue: go on, slowly.
                    tracing::warn!(%service, %error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            if self.refuses(service, peer) {
                continue;
            }
            if let Ok(local) = stream.local_addr() {
                resident::begin::<P>(&self, stream, peer, local);
            }
        }
    }

    /// Whether there is no place for one more connection, be it new or from another core. Where
    /// only connections are in the way that have not shown who they are, one of them goes: else
    /// whoever opens enough of them keeps everybody out.
    pub(crate) fn refuses(&self, service: Service, peer: SocketAddr) -> bool {
        let full = || {
            let going = self.count(Stage::Evicted);
            self.connections.borrow().len() - going >= self.limits.connections
        };
        if full() && !self.evict(Stage::Login) {
            self.evict(Stage::Discovery);
        }
        let refuses = full() || self.draining.get();
        if refuses {
            self.refused.set(self.refused.get() + 1);
            tracing::debug!(%service, %peer, "refused: too many connections, or stopping");
        }
        refuses
    }

    /// Enters a connection into the book; it leaves when the result is dropped.
    pub(crate) fn register(
        self: &Rc<Self>,
        service: Service,
        peer: SocketAddr,
        local: SocketAddr,
        since: Instant,
        line: Rc<dyn Line>,
    ) -> Registration {
        self.make_room(Stage::Login, self.limits.logins);
        let session = Session {
            service,
            peer,
            local,
            initiator: None,
            target: None,
            tls: false,
            queue: 0,
            age: Duration::ZERO,
            core: self.core.id(),
        };
        let stage = Stage::Login;
        let key = self.connections.borrow_mut().insert(Entry { session, since, stage, line });
        self.adjust(stage, 1);
        Registration { server: Rc::clone(self), key }
    }

    fn count(&self, stage: Stage) -> usize {
        self.stages.get()[stage as usize]
    }

    fn adjust(&self, stage: Stage, by: isize) {
        let mut stages = self.stages.get();
        stages[stage as usize] = stages[stage as usize].saturating_add_signed(by);
        self.stages.set(stages);
    }

    fn promote(&self, key: usize, to: Stage) {
        let from = std::mem::replace(&mut self.connections.borrow_mut()[key].stage, to);
        self.adjust(from, -1);
        self.adjust(to, 1);
    }

    /// Makes sure that one more connection of a stage stays within its limit.
    fn make_room(&self, stage: Stage, limit: usize) {
        if self.count(stage) >= limit {
            self.evict(stage);
        }
    }

    /// Ends one connection of a stage, if there is any: [`longest_of_most`].
    fn evict(&self, stage: Stage) -> bool {
        let key = {
            let book = self.connections.borrow();
            let of_stage = book.iter().filter(|(_, e)| e.stage == stage);
            longest_of_most(of_stage.map(|(key, e)| (key, e.session.peer.ip(), e.since)))
        };
        let Some(key) = key else { return false };
        self.promote(key, Stage::Evicted);
        self.refused.set(self.refused.get() + 1);
        let (line, peer) = {
            let entry = &self.connections.borrow()[key];
            (Rc::clone(&entry.line), entry.session.peer)
        };
        tracing::debug!(%peer, ?stage, "closed: too many connections, a newcomer takes its place");
        line.evict();
        true
    }

    /// Hands work to another core's server, waiting while its door is full.
    pub(crate) async fn send(&self, core: usize, parcel: Parcel) {
        match self.peers.get(core) {
            Some(peer) => {
                if peer.send(parcel).await.is_err() {
                    tracing::debug!(core, "the core has stopped; a connection is dropped");
                }
            }
            None => tracing::error!(core, "the catalog names a core that does not exist"),
        }
    }

    /// Takes leave of all clients, waits until all connections are gone, at most until
    /// `deadline`, and then closes those that are left. Volumes stay open.
    pub async fn drain(&self, deadline: Instant) {
        self.draining.set(true);
        self.notify(Notice::Drain);
        let gone = poll_fn(|cx| {
            if self.connections.borrow().is_empty() {
                return Poll::Ready(());
            }
            self.idle.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        });
        if tokio::time::timeout_at(deadline, gone).await.is_err() {
            let left = self.connections.borrow().len();
            tracing::warn!(left, "connections outlived the shutdown timeout and are closed");
            self.notify(Notice::Close);
        }
    }

    fn notify(&self, notice: Notice) {
        // A connection may answer a notice by leaving: call without holding the book.
        let all: Vec<_> =
            self.connections.borrow().iter().map(|(_, e)| Rc::clone(&e.line)).collect();
        for line in all {
            line.notify(notice);
        }
    }
}

/// How many connections to volumes an initiator has on a core.
#[derive(Clone, Copy, Debug, Default)]
struct Holding {
    /// By its name, wherever they come from: one machine may have several addresses.
    by_name: usize,
    /// From its address, whatever their names: one machine has a name for iSCSI and one for NVMe.
    by_address: usize,
    /// From its network: one machine has as many addresses of IPv6 as it likes.
    by_network: usize,
}

impl Holding {
    fn count<'a>(
        all: impl Iterator<Item = (Option<&'a str>, IpAddr)>,
        initiator: &str,
        peer: IpAddr,
    ) -> Self {
        let (address, of) = (peer.to_canonical(), network(peer));
        all.fold(Self::default(), |mut has, (name, at)| {
            has.by_name += usize::from(name == Some(initiator));
            has.by_address += usize::from(at.to_canonical() == address);
            has.by_network += usize::from(network(at) == of);
            has
        })
    }

    /// Whether that is all that one may have: three quarters. An initiator whose name is allowed has a sixteenth also
    /// where others of its network of IPv6 have that many: they may be other machines.
    fn is_share(self, connections: usize, named: bool) -> bool {
        let most = connections - connections / 4;
        let has_little = named && self.by_name < connections / 16;
        (named && self.by_name >= most)
            || self.by_address >= most
            || (self.by_network >= most && !has_little)
    }
}

/// Of connections with their addresses and beginnings, the oldest of the network that has most, so that a flood takes
/// the place of its own connections first.
fn longest_of_most(all: impl Iterator<Item = (usize, IpAddr, Instant)>) -> Option<usize> {
    let mut by_network: BTreeMap<IpAddr, (usize, Instant, usize)> = BTreeMap::new();
    for (key, at, since) in all {
        let (count, oldest, victim) = by_network.entry(network(at)).or_insert((0, since, key));
        *count += 1;
        if since < *oldest {
            (*oldest, *victim) = (since, key);
        }
    }
    let most = by_network.into_values().max_by_key(|&(n, oldest, _)| (n, Reverse(oldest)));
    most.map(|(.., victim)| victim)
}

/// A client's attempt to prove who it is. Dropped, it has come to nothing, and counts for nothing.
#[derive(Debug)]
pub(crate) struct Attempt {
    server: Rc<Server>,
    address: IpAddr,
    method: Method,
    target: String,
    is_over: bool,
}

impl Attempt {
    fn whence(&self) -> Whence<'_> {
        (self.address, self.method, &self.target)
    }

    /// The client, which calls itself `name`, has not proved it, and knows that.
    pub(crate) fn failed(mut self, name: &str, why: &str) {
        self.is_over = true;
        let failed = &self.server.guesses;
        let line = failed.borrow_mut().failed(Instant::now(), self.whence(), name);
        if let Some(line) = line {
            tracing::warn!(
                address = %self.address, name, target = self.target, method = %self.method, why, times = line.times,
                others_not_logged = line.unlogged,
                "a client has not proved who it is; it waits longer and longer between attempts"
            );
        }
    }

    /// It has proved it.
    pub(crate) fn succeeded(mut self) {
        self.is_over = true;
        self.server.guesses.borrow_mut().succeeded(self.whence());
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.is_over {
            self.server.guesses.borrow_mut().abandoned(self.whence());
        }
    }
}

/// A connection's place in the book.
#[derive(Debug)]
pub(crate) struct Registration {
    server: Rc<Server>,
    key: usize,
}

impl Registration {
    /// Records who the client turned out to be. It no longer counts as a pending login.
    pub(crate) fn logged_in(&self, initiator: &str, target: Option<&str>, queue: u16) {
        let server = &self.server;
        let stage = {
            let mut book = server.connections.borrow_mut();
            let entry = &mut book[self.key];
            entry.session.initiator = Some(initiator.into());
            entry.session.target = target.map(Into::into);
            entry.session.queue = queue;
            entry.stage
        };
        if stage != Stage::Login {
            return;
        }
        if target.is_none() {
            server.make_room(Stage::Discovery, server.limits.discoveries);
        }
        server.promote(self.key, if target.is_some() { Stage::Full } else { Stage::Discovery });
    }

    /// Records whether the connection is protected by TLS.
    pub(crate) fn set_tls(&self, tls: bool) {
        self.server.connections.borrow_mut()[self.key].session.tls = tls;
    }

    /// Who the client is, once it has logged in.
    pub(crate) fn initiator(&self) -> Option<String> {
        self.server.connections.borrow()[self.key].session.initiator.clone()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let entry = self.server.connections.borrow_mut().remove(self.key);
        self.server.adjust(entry.stage, -1);
        if self.server.connections.borrow().is_empty() {
            self.server.idle.take().into_iter().for_each(Waker::wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONNECTIONS: usize = 64;

    fn at(address: &str) -> IpAddr {
        address.parse().unwrap()
    }

    /// Addresses of one network of IPv6.
    fn of_network(n: usize) -> IpAddr {
        let n = u16::try_from(n).unwrap();
        IpAddr::from([0x2001, 0xdb8, 0, 0, n, n, n, n])
    }

    /// Opens as many connections as an initiator of these names and addresses is let; how many those are.
    fn takes(
        held: &mut Vec<(&'static str, IpAddr)>,
        named: bool,
        way: impl Fn(usize) -> (&'static str, IpAddr),
    ) -> usize {
        let before = held.len();
        for n in 0..2 * CONNECTIONS {
            let (name, peer) = way(n);
            let all = held.iter().map(|(name, at)| (Some(*name), *at));
            if !Holding::count(all, name, peer).is_share(CONNECTIONS, named) {
                held.push((name, peer));
            }
        }
        held.len() - before
    }

    /// By its name for iSCSI and its name for NVMe one machine once took all connections of a core.
    #[test]
    fn two_allowed_names_of_one_address_have_one_share() {
        let host = at("192.0.2.1");
        for way in [
            &(|n: usize| (["iqn.a", "nqn.a"][n % 2], host)) as &dyn Fn(usize) -> _,
            &|n| (["iqn.a", "nqn.a"][n / CONNECTIONS], host),
            &|n| ("iqn.a", [host, at("::ffff:192.0.2.1")][n % 2]),
            // By several addresses, of one name.
            &|n| ("iqn.a", [host, at("198.51.100.1")][n % 2]),
        ] {
            let mut held = Vec::new();
            assert_eq!(takes(&mut held, true, way), 48);
            assert_eq!(takes(&mut held, true, |_| ("iqn.b", at("192.0.2.2"))), 48);
        }
    }

    #[test]
    fn many_addresses_of_one_network_of_ipv6_have_one_share() {
        let mut held = Vec::new();
        let chosen = ["iqn.a", "iqn.b", "iqn.c", "iqn.d"];
        assert_eq!(takes(&mut held, false, |n| (chosen[n % 4], of_network(n))), 48);
        // Of two allowed names both are used, and an allowed host beside them has room still.
        let mut held = Vec::new();
        let names = |n: usize| (["iqn.a", "nqn.a"][n / CONNECTIONS], of_network(n));
        assert_eq!(takes(&mut held, true, names), 48 + CONNECTIONS / 16);
        assert_eq!(takes(&mut held, true, |_| ("iqn.b", of_network(999))), CONNECTIONS / 16);
        assert_eq!(takes(&mut held, true, |_| ("iqn.c", at("2001:db8:0:1::1"))), 48);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_from_many_addresses_of_one_network_ends_its_own_connections_first() {
        let now = Instant::now();
        let second = |n: u64| now + Duration::from_secs(n);
        let host = [(0, at("192.0.2.1"), now), (1, at("192.0.2.1"), second(1))];
        let flood = (2..9).map(|n| (n, of_network(n), second(n as u64)));
        assert_eq!(longest_of_most(host.into_iter().chain(flood)), Some(2));
        assert_eq!(longest_of_most(host.into_iter()), Some(0));
        assert_eq!(longest_of_most(std::iter::empty()), None);
    }
}
