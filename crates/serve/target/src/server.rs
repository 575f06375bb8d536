//! One core's share of the node: its volumes, its connections, and its links to other cores.

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

use block::{AccessState, Account, BufferPool};
use rt::{Core, LogLimit, network_prefix};
use slab::Slab;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::auth_throttle::{
    AttemptCounts, AttemptDecision, AttemptSource, AuthMethod, AuthThrottle, FailingClient,
};
use crate::catalog::{Catalog, VolumeId};
use crate::connection::Staging;
use crate::connection_notice::ConnectionNotice;
use crate::duplicate_names::{DuplicateName, DuplicateNames};
use crate::iscsi_sessions::IscsiCore;
use crate::limits::Limits;
use crate::nvme_controllers::NvmeCore;
use crate::served_volumes::{ServedVolume, ServedVolumes, VolumeSpace};
use crate::tokens::Tokens;

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

/// A connection as `windrose sessions` shows it.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    /// Its protocol.
    pub service: Service,
    /// The client's address.
    pub peer: SocketAddr,
    /// The local address.
    pub local: SocketAddr,
    /// Initiator name or host NQN; `None` until it has logged in.
    pub initiator: Option<String>,
    /// Target name or subsystem NQN; `None` for discovery.
    pub target: Option<String>,
    /// Whether it uses TLS; known after login.
    pub tls: bool,
    /// NVMe: queue identifier. iSCSI: connection identifier.
    pub queue: u16,
    /// Its age.
    pub age: Duration,
    /// The core that serves it.
    pub core: usize,
}

/// Conspicuous clients of a core.
#[derive(Clone, Debug, Default)]
pub struct ClientReport {
    /// Clients that fail to authenticate.
    pub failing_clients: Vec<FailingClient>,
    /// Addresses from which a client has authenticated.
    pub proven: BTreeSet<IpAddr>,
    /// Counts of authentication attempts.
    pub attempt_counts: AttemptCounts,
    /// Initiator names shared by two hosts.
    pub duplicate_names: Vec<DuplicateName>,
    /// iSCSI sessions replaced by another login of their initiator.
    pub replaced: u64,
}

/// A task for another core.
pub(crate) type CoreTask = Box<dyn FnOnce(&Rc<Server>) + Send>;

/// A core's link to the others.
#[derive(Debug)]
pub struct CoreLink {
    inbox: mpsc::Receiver<CoreTask>,
    peers: Vec<mpsc::Sender<CoreTask>>,
}

/// Concurrent copies of a core; others wait.
const MAX_CONCURRENT_COPIES: usize = 4;

/// Length of a core's task queue; senders wait while it is full.
const CORE_QUEUE_LEN: usize = 256;

/// Links between `cores` servers; one for each, in order of core.
#[must_use]
pub fn core_links(cores: usize) -> Vec<CoreLink> {
    let (peers, own): (Vec<_>, Vec<_>) = (0..cores).map(|_| mpsc::channel(CORE_QUEUE_LEN)).unzip();
    own.into_iter().map(|own| CoreLink { inbox: own, peers: peers.clone() }).collect()
}

/// One core's server.
pub struct Server {
    core: Core,
    limits: Limits,
    peers: Vec<mpsc::Sender<CoreTask>>,
    served: ServedVolumes,
    connections: RefCell<Slab<ConnectionEntry>>,
    /// Connections by [`ConnectionStage`].
    stages: Cell<[usize; 4]>,
    refused: Cell<u64>,
    draining: Cell<bool>,
    idle: RefCell<Vec<Waker>>,
    staging: Staging,
    /// Buffer for received ciphertext of TLS.
    ciphertext: Staging,
    /// Memory account of third-party copies: together they count as one client.
    copy_account: Account,
    copy_permits: Rc<Semaphore>,
    tokens: Tokens,
    auth_throttle: RefCell<AuthThrottle>,
    duplicate_names: RefCell<DuplicateNames>,
    /// Limits log lines about refused clients.
    refusal_log: RefCell<LogLimit>,
    pub(crate) iscsi: IscsiCore,
    pub(crate) nvme: NvmeCore,
}

struct ConnectionEntry {
    session: SessionInfo,
    since: Instant,
    stage: ConnectionStage,
    handle: Rc<dyn ConnectionHandle>,
}

/// The stage of a connection, which decides the limit that it counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionStage {
    /// Not logged in.
    Login,
    /// Discovery.
    Discovery,
    /// Serves volumes.
    FullFeature,
    /// Evicted for another one, and about to close.
    Evicted,
}

/// Access to a connection from the server.
pub(crate) trait ConnectionHandle {
    /// Sends it a notice.
    fn notify(&self, notice: ConnectionNotice);

    /// Closes it immediately.
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
    pub fn new(core: Core, limits: Limits, link: CoreLink) -> Rc<Self> {
        let server = Rc::new(Self {
            limits,
            peers: link.peers,
            served: ServedVolumes::default(),
            connections: RefCell::default(),
            stages: Cell::default(),
            refused: Cell::new(0),
            draining: Cell::new(false),
            idle: RefCell::default(),
            staging: Staging::default(),
            ciphertext: Staging::default(),
            copy_account: core.buffer_pool().account(),
            copy_permits: Rc::new(Semaphore::new(MAX_CONCURRENT_COPIES)),
            tokens: Tokens::default(),
            auth_throttle: RefCell::default(),
            duplicate_names: RefCell::default(),
            refusal_log: RefCell::default(),
            iscsi: IscsiCore::new(&limits),
            nvme: NvmeCore::new(&core),
            core,
        });
        let (weak, mut own) = (Rc::downgrade(&server), link.inbox);
        tokio::task::spawn_local(async move {
            while let Some(job) = own.recv().await {
                let Some(server) = weak.upgrade() else { break };
                job(&server);
            }
        });
        server
    }

    /// The core it runs on.
    #[must_use]
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The limits that it enforces.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The core's buffer pool.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        self.core.buffer_pool()
    }

    pub(crate) fn account(&self) -> Account {
        self.core.buffer_pool().client_account(self.limits.memory_timeout)
    }

    /// The memory account of third-party copies.
    pub(crate) fn copy_account(&self) -> Account {
        self.copy_account.clone()
    }

    /// Permits for third-party copies.
    pub(crate) fn copy_permits(&self) -> Rc<Semaphore> {
        Rc::clone(&self.copy_permits)
    }

    /// The tokens of its volumes.
    pub(crate) fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    pub(crate) fn staging(&self) -> Staging {
        self.staging.clone()
    }

    pub(crate) fn ciphertext(&self) -> Staging {
        self.ciphertext.clone()
    }

    /// The current catalog.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        self.served.catalog()
    }

    /// Replaces the catalog and notifies every connection. Volumes of this core that it names must
    /// have been added before; those it no longer names are removed afterwards.
    pub fn set_catalog(&self, catalog: Arc<Catalog>) {
        self.nvme.set_node(&catalog);
        self.served.set_catalog(catalog);
        self.notify(ConnectionNotice::CatalogChanged);
    }

    /// Makes a volume of this core available to the catalog. Must be called in the core's
    /// `LocalSet`.
    pub fn add_volume(self: &Rc<Self>, served: ServedVolume) {
        let watch = served.access.clone().map(|access| self.watch(served.id, access));
        self.served.insert(served, watch);
    }

    /// Sets the space of a thin volume and reports it to initiators. The engine calls this
    /// periodically, and first before initiators connect.
    pub fn set_space(&self, id: VolumeId, space: VolumeSpace) {
        if self.served.set_space(id, space) {
            self.iscsi.space_changed(id, space);
            self.nvme.space_changed(id, space);
        }
    }

    /// The volumes of this core, and the catalog.
    pub(crate) fn served(&self) -> &ServedVolumes {
        &self.served
    }

    /// Tells the initiators of a volume of each change of its access state.
    fn watch(self: &Rc<Self>, id: VolumeId, access: AccessState) -> AbortOnDropHandle<()> {
        let server = Rc::downgrade(self);
        let mut seen = access.get();
        let task = tokio::task::spawn_local(async move {
            loop {
                seen = access.changed_from(seen).await;
                let Some(server) = server.upgrade() else { return };
                tracing::debug!(?id, access = ?seen, "the access state of a volume has changed");
                server.iscsi.access_changed(id, seen);
                server.nvme.access_changed(id, seen);
            }
        });
        AbortOnDropHandle::new(task)
    }

    /// Removes a volume; the caller closes it afterwards.
    pub fn remove_volume(&self, id: VolumeId) -> Option<Rc<ServedVolume>> {
        self.served.remove(id)
    }

    /// The volume, if it belongs to this core.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> Option<Rc<ServedVolume>> {
        self.served.get(id)
    }

    /// All volumes of this core.
    #[must_use]
    pub fn volumes(&self) -> Vec<Rc<ServedVolume>> {
        self.served.all()
    }

    /// Tells connections that a volume has grown.
    pub fn volume_resized(&self, id: VolumeId) {
        self.notify(ConnectionNotice::VolumeResized(id));
    }

    /// The connections of this core.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let age = |e: &ConnectionEntry| SessionInfo { age: e.since.elapsed(), ..e.session.clone() };
        self.connections.borrow().iter().map(|(_, e)| age(e)).collect()
    }

    /// Conspicuous clients of this core.
    #[must_use]
    pub fn clients(&self) -> ClientReport {
        let (now, guesses, clones) =
            (Instant::now(), self.auth_throttle.borrow(), self.duplicate_names.borrow());
        ClientReport {
            failing_clients: guesses.failing(now),
            proven: guesses.proven(),
            attempt_counts: guesses.counts(),
            duplicate_names: clones.duplicates(now),
            replaced: clones.replaced_count(),
        }
    }

    /// Whether an initiator at `peer` has as many connections of this core as one may have, which
    /// leaves some for hosts of other volumes. `named`: a rule names it; otherwise it can choose
    /// its names freely.
    pub(crate) fn is_at_share_limit(&self, initiator: &str, named: bool, peer: IpAddr) -> bool {
        let has = {
            let book = self.connections.borrow();
            let full = book.iter().filter(|(_, e)| e.stage == ConnectionStage::FullFeature);
            let of = full.map(|(_, e)| (e.session.initiator.as_deref(), e.session.peer.ip()));
            ConnectionCounts::count(of, initiator, peer)
                .is_at_share_limit(self.limits.connections, named)
        };
        if has {
            self.refused.set(self.refused.get() + 1);
        }
        has
    }

    /// A client at this address begins to authenticate: when it may, or nothing if too many are
    /// waiting.
    pub(crate) fn begin_auth_attempt(
        self: &Rc<Self>,
        source: AttemptSource<'_>,
    ) -> Option<(Option<Instant>, AuthAttempt)> {
        let at = match self.auth_throttle.borrow_mut().begin_attempt(Instant::now(), source) {
            AttemptDecision::Now => None,
            AttemptDecision::At(at) => Some(at),
            AttemptDecision::Refused => return None,
        };
        let (address, method, target) = (source.0, source.1, source.2.to_owned());
        Some((
            at,
            AuthAttempt { server: Rc::clone(self), address, method, target, is_recorded: false },
        ))
    }

    /// Whether one more refused client may be logged; if so, how many were not logged before it.
    pub(crate) fn refusal_line(&self) -> Option<u64> {
        self.refusal_log.borrow_mut().try_log(Instant::now())
    }

    pub(crate) fn duplicate_names(&self) -> &RefCell<DuplicateNames> {
        &self.duplicate_names
    }

    /// Connections refused or evicted because of a limit, since the start.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.get()
    }

    /// Whether there is no room for one more connection, new or from another core. If connections
    /// that have not logged in fill it, one of them is evicted: otherwise a client with enough of
    /// them would lock out all others.
    pub(crate) fn is_full(&self, service: Service, peer: SocketAddr) -> bool {
        let full = || {
            let going = self.count(ConnectionStage::Evicted);
            self.connections.borrow().len() - going >= self.limits.connections
        };
        if full() && !self.evict(ConnectionStage::Login) {
            self.evict(ConnectionStage::Discovery);
        }
        let refuses = full() || self.draining.get();
        if refuses {
            self.refused.set(self.refused.get() + 1);
            tracing::debug!(%service, %peer, "a connection was refused: too many connections, or stopping");
        }
        refuses
    }

    /// Adds a connection to the connection table; it is removed when the result is dropped.
    pub(crate) fn register(
        self: &Rc<Self>,
        service: Service,
        peer: SocketAddr,
        local: SocketAddr,
        since: Instant,
        line: Rc<dyn ConnectionHandle>,
    ) -> Registration {
        self.make_room(ConnectionStage::Login, self.limits.logins);
        let session = SessionInfo {
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
        let stage = ConnectionStage::Login;
        let key = self.connections.borrow_mut().insert(ConnectionEntry {
            session,
            since,
            stage,
            handle: line,
        });
        self.adjust(stage, 1);
        Registration { server: Rc::clone(self), key }
    }

    fn count(&self, stage: ConnectionStage) -> usize {
        self.stages.get()[stage as usize]
    }

    fn adjust(&self, stage: ConnectionStage, by: isize) {
        let mut stages = self.stages.get();
        stages[stage as usize] = stages[stage as usize].saturating_add_signed(by);
        self.stages.set(stages);
    }

    fn promote(&self, key: usize, to: ConnectionStage) {
        let from = std::mem::replace(&mut self.connections.borrow_mut()[key].stage, to);
        self.adjust(from, -1);
        self.adjust(to, 1);
    }

    /// Keeps a stage within its limit when one more connection is added.
    fn make_room(&self, stage: ConnectionStage, limit: usize) {
        if self.count(stage) >= limit {
            self.evict(stage);
        }
    }

    /// Evicts one connection of a stage, if there is any: [`eviction_candidate`].
    fn evict(&self, stage: ConnectionStage) -> bool {
        let key = {
            let book = self.connections.borrow();
            let of_stage = book.iter().filter(|(_, e)| e.stage == stage);
            eviction_candidate(of_stage.map(|(key, e)| (key, e.session.peer.ip(), e.since)))
        };
        let Some(key) = key else { return false };
        self.promote(key, ConnectionStage::Evicted);
        self.refused.set(self.refused.get() + 1);
        let (line, peer) = {
            let entry = &self.connections.borrow()[key];
            (Rc::clone(&entry.handle), entry.session.peer)
        };
        tracing::debug!(%peer, ?stage, "a connection was closed to make room for a new one: too many connections");
        line.evict();
        true
    }

    /// Sends a task to another core's server, waiting while its queue is full.
    pub(crate) async fn send(&self, core: usize, job: CoreTask) {
        match self.peers.get(core) {
            Some(peer) => {
                if peer.send(job).await.is_err() {
                    tracing::debug!(core, "the core has stopped; a connection is dropped");
                }
            }
            None => tracing::error!(core, "the catalog names a core that does not exist"),
        }
    }

    /// Drains all connections, waits until they are gone or `deadline` has passed, then closes
    /// those left. Volumes stay open.
    pub async fn drain(&self, deadline: Instant) {
        self.draining.set(true);
        self.notify(ConnectionNotice::Drain);
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
            self.notify(ConnectionNotice::Close);
        }
    }

    fn notify(&self, notice: ConnectionNotice) {
        // A connection may call back on a notice: do not hold the table.
        let all: Vec<_> =
            self.connections.borrow().iter().map(|(_, e)| Rc::clone(&e.handle)).collect();
        for line in all {
            line.notify(notice);
        }
    }
}

/// Number of connections to volumes of an initiator on a core.
#[derive(Clone, Copy, Debug, Default)]
struct ConnectionCounts {
    /// With its name, from any address: one machine may have several addresses.
    by_name: usize,
    /// From its address, with any name: one machine has a name for iSCSI and one for NVMe.
    by_address: usize,
    /// From its network: one machine has any number of IPv6 addresses.
    by_network: usize,
}

impl ConnectionCounts {
    fn count<'a>(
        all: impl Iterator<Item = (Option<&'a str>, IpAddr)>,
        initiator: &str,
        peer: IpAddr,
    ) -> Self {
        let (address, of) = (peer.to_canonical(), network_prefix(peer));
        all.fold(Self::default(), |mut has, (name, at)| {
            has.by_name += usize::from(name == Some(initiator));
            has.by_address += usize::from(at.to_canonical() == address);
            has.by_network += usize::from(network_prefix(at) == of);
            has
        })
    }

    /// Whether the limit of one initiator, three quarters, is reached. An initiator with an allowed
    /// name may always have a sixteenth, even if others of its IPv6 network use up the rest: they
    /// may be other machines.
    fn is_at_share_limit(self, connections: usize, named: bool) -> bool {
        let most = connections - connections / 4;
        let has_little = named && self.by_name < connections / 16;
        (named && self.by_name >= most)
            || self.by_address >= most
            || (self.by_network >= most && !has_little)
    }
}

/// Of connections with their addresses and start times, the oldest of the network with the most, so
/// that a flood evicts its own connections first.
fn eviction_candidate(all: impl Iterator<Item = (usize, IpAddr, Instant)>) -> Option<usize> {
    let mut by_network: BTreeMap<IpAddr, (usize, Instant, usize)> = BTreeMap::new();
    for (key, at, since) in all {
        let (count, oldest, victim) =
            by_network.entry(network_prefix(at)).or_insert((0, since, key));
        *count += 1;
        if since < *oldest {
            (*oldest, *victim) = (since, key);
        }
    }
    let most = by_network.into_values().max_by_key(|&(n, oldest, _)| (n, Reverse(oldest)));
    most.map(|(.., victim)| victim)
}

/// A client's authentication attempt. If dropped, it counts as abandoned.
#[derive(Debug)]
pub(crate) struct AuthAttempt {
    server: Rc<Server>,
    address: IpAddr,
    method: AuthMethod,
    target: String,
    is_recorded: bool,
}

impl AuthAttempt {
    fn source(&self) -> AttemptSource<'_> {
        (self.address, self.method, &self.target)
    }

    /// The client, which calls itself `name`, has failed to authenticate, and has been told.
    pub(crate) fn failed(mut self, name: &str, why: &str) {
        self.is_recorded = true;
        let failed = &self.server.auth_throttle;
        let line = failed.borrow_mut().record_failure(Instant::now(), self.source(), name);
        if let Some(line) = line {
            tracing::warn!(
                address = %self.address, name, target = self.target, method = %self.method, why, times = line.times,
                others_not_logged = line.unlogged,
                "a client failed to authenticate: its attempts are delayed increasingly"
            );
        }
    }

    /// The client has authenticated.
    pub(crate) fn succeeded(mut self) {
        self.is_recorded = true;
        self.server.auth_throttle.borrow_mut().record_success(self.source());
    }
}

impl Drop for AuthAttempt {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.server.auth_throttle.borrow_mut().record_abandoned(self.source());
        }
    }
}

/// A connection's entry in the connection table.
#[derive(Debug)]
pub(crate) struct Registration {
    server: Rc<Server>,
    key: usize,
}

impl Registration {
    /// Records the identity of the client. The connection no longer counts as a pending login.
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
        if stage != ConnectionStage::Login {
            return;
        }
        if target.is_none() {
            server.make_room(ConnectionStage::Discovery, server.limits.discoveries);
        }
        server.promote(
            self.key,
            if target.is_some() {
                ConnectionStage::FullFeature
            } else {
                ConnectionStage::Discovery
            },
        );
    }

    /// Records whether the connection uses TLS.
    pub(crate) fn set_tls(&self, tls: bool) {
        self.server.connections.borrow_mut()[self.key].session.tls = tls;
    }

    /// The client's name, once it has logged in.
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

    /// Addresses of one IPv6 network.
    fn of_network(n: usize) -> IpAddr {
        let n = u16::try_from(n).unwrap();
        IpAddr::from([0x2001, 0xdb8, 0, 0, n, n, n, n])
    }

    /// Opens as many connections as an initiator with these names and addresses may have; returns
    /// how many.
    fn takes(
        held: &mut Vec<(&'static str, IpAddr)>,
        named: bool,
        way: impl Fn(usize) -> (&'static str, IpAddr),
    ) -> usize {
        let before = held.len();
        for n in 0..2 * CONNECTIONS {
            let (name, peer) = way(n);
            let all = held.iter().map(|(name, at)| (Some(*name), *at));
            if !ConnectionCounts::count(all, name, peer).is_at_share_limit(CONNECTIONS, named) {
                held.push((name, peer));
            }
        }
        held.len() - before
    }

    /// Regression: with its names for iSCSI and NVMe one machine took all connections of a core.
    #[test]
    fn two_allowed_names_of_one_address_have_one_share() {
        let host = at("192.0.2.1");
        for way in [
            &(|n: usize| (["iqn.a", "nqn.a"][n % 2], host)) as &dyn Fn(usize) -> _,
            &|n| (["iqn.a", "nqn.a"][n / CONNECTIONS], host),
            &|n| ("iqn.a", [host, at("::ffff:192.0.2.1")][n % 2]),
            // From several addresses, with one name.
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
        // Both of two allowed names are used, and an allowed host beside them still has room.
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
        assert_eq!(eviction_candidate(host.into_iter().chain(flood)), Some(2));
        assert_eq!(eviction_candidate(host.into_iter()), Some(0));
        assert_eq!(eviction_candidate(std::iter::empty()), None);
    }
}
