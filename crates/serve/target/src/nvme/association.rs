//! Connect, shutdown, and changes of controllers while they exist.

use std::collections::BTreeMap;
use std::rc::Rc;

use block::{Bufs, MemoryClass, Request};
use nvme::auth::SharedConfig;
use nvme::fabrics::CONNECT_AUTHENTICATE;
use nvme::{Completion, Connect, ConnectedQueue, Controller, Role, Tag};
use tokio::time::Instant;

use super::HostConnection;
use super::authentication::{self, QueueAuthentication};
use crate::auth_throttle::AuthMethod;
use crate::catalog::{AccessRule, Catalog};
use crate::limits::{MAX_TRANSFER_BYTES, MIN_POOL_REQUESTS};
use crate::nvme_controllers::{Event, QueueRef, host_catalog};
use crate::server::Server;

/// Runs a controller's timer for as long as the controller exists (NVMe Base 2.0, 3.9).
async fn run_controller_timer(server: std::rc::Weak<Server>, cntlid: u16) {
    loop {
        let Some(this) = server.upgrade() else { return };
        let Some((next, changed)) = this.nvme.run_timer(cntlid) else { return };
        drop(this);
        match next {
            Some(at) => {
                // Either way the next round checks what is due.
                let _ = tokio::time::timeout_at(at, changed.notified()).await;
            }
            None => changed.notified().await,
        }
    }
}

/// The decision about a Connect.
enum Decision {
    /// Decided here; with the authentication that the host must complete, if any.
    Here(Result<(ConnectedQueue, Option<SharedConfig>), ConnectRefusal>),
    AtCore(usize),
    /// Here, at that time.
    Later(Instant),
}

/// A Connect that is refused.
struct ConnectRefusal {
    /// The answer to the host.
    completion: Completion,
    /// The actual reason, for the node's log: the host may not learn all of it.
    why: &'static str,
}

impl ConnectRefusal {
    fn new(answer: Completion, why: &'static str) -> Self {
        Self { completion: answer, why }
    }
}

impl From<Completion> for ConnectRefusal {
    fn from(answer: Completion) -> Self {
        Self::new(answer, "its parameters do not match its association")
    }
}

impl HostConnection {
    /// Decides about a Connect, or moves to the core where that must happen.
    pub(super) fn decide(&mut self, tag: Tag, connect: Box<Connect>) {
        self.context.registration.set_tls(self.is_protected());
        match self.decide_connect(&connect) {
            Decision::AtCore(core) => self.moving = Some((core, tag, connect)),
            Decision::Later(at) => {
                let inbox = self.context.inbox.clone();
                tokio::task::spawn_local(async move {
                    tokio::time::sleep_until(at).await;
                    inbox.push(Event::Decide { tag, connect });
                });
            }
            Decision::Here(Err(ConnectRefusal { completion: answer, why })) => {
                if let Some(left_out) = self.server().refusal_line() {
                    tracing::info!(
                        host = connect.hostnqn,
                        subsystem = connect.subnqn,
                        peer = %self.context.peer,
                        status = ?answer.status,
                        why,
                        others_not_logged = left_out,
                        "an NVMe connect was refused"
                    );
                }
                self.complete(tag, answer, &Bufs::new());
            }
            Decision::Here(Ok((connected, asked))) => {
                self.on_connected(tag, connect, &connected, asked);
            }
        }
    }

    fn on_connected(
        &mut self,
        tag: Tag,
        connect: Box<Connect>,
        connected: &ConnectedQueue,
        asked: Option<SharedConfig>,
    ) {
        let server = Rc::clone(self.server());
        server.nvme.add_queue(connected, &self.context.inbox, self.is_protected());
        if connect.qid == 0 {
            tokio::task::spawn_local(run_controller_timer(
                Rc::downgrade(&server),
                connected.cntlid,
            ));
        }
        self.queue = Some(QueueRef { cntlid: connected.cntlid, qid: connect.qid });
        self.tasks.remove(tag);
        let result = u64::from(connected.cntlid);
        let Some(config) = asked else {
            self.machine.queue_connected(tag, connected.queue, result);
            return self.on_admitted(&connect);
        };
        self.machine.queue_connected(tag, connected.queue, result | CONNECT_AUTHENTICATE);
        self.authentication = Some(Box::new(QueueAuthentication::new(connect, config)));
        self.start_auth_timeout();
    }

    /// The host has been admitted.
    pub(super) fn on_admitted(&mut self, connect: &Connect) {
        let target = (!connect.is_discovery()).then_some(connect.subnqn.as_str());
        self.context.registration.logged_in(&connect.hostnqn, target, connect.qid);
        self.record_traffic();
        if connect.qid == 0 {
            let (host, subsystem) = (&connect.hostnqn, &connect.subnqn);
            tracing::info!(host, subsystem, peer = %self.context.peer, "NVMe connect");
        }
        self.watch_reservations();
    }

    fn decide_connect(&mut self, connect: &Connect) -> Decision {
        let server = &Rc::clone(self.server());
        let catalog = server.catalog();
        let refuse = |answer, why| Decision::Here(Err(ConnectRefusal::new(answer, why)));
        if self.draining {
            return refuse(Connect::refuse_busy(), "the node stops");
        }
        if !self.matches_tls_endpoints(connect) {
            return refuse(Connect::refuse_host(), "its TLS key belongs to another host");
        }
        if connect.is_discovery() {
            let log = host_catalog::discovery(&catalog, &connect.hostnqn, self.context.local);
            let (subsystem, role) = (host_catalog::discovery_subsystem(), Role::Discovery(log));
            let connected = admin(server, connect, &subsystem, role);
            return Decision::Here(connected.map(|c| (c, None)).map_err(ConnectRefusal::from));
        }
        let admitted = catalog
            .subsystems
            .get(&connect.subnqn)
            .and_then(|entry| Some((entry, entry.access.rule_for(&connect.hostnqn)?)));
        let Some((entry, admission)) = admitted else {
            return Decision::Here(Err(unknown_subsystem(&catalog, connect)));
        };
        if entry.requires_tls(&connect.hostnqn) && !self.is_protected() {
            return refuse(Connect::refuse_host(), "the host must use TLS");
        }
        if !entry.serves_any(&connect.hostnqn) {
            // No namespace visible to the host is served here for now: the host is to retry.
            return refuse(Connect::refuse_busy(), "its volumes are not served at the moment");
        }
        if entry.core != server.core().id() {
            return Decision::AtCore(entry.core);
        }
        let asked = match admission {
            AccessRule::NameOnly => None,
            AccessRule::Proof(secrets) => match authentication::config(secrets, connect) {
                Some(config) => Some(config),
                // It may be readable soon.
                None => return refuse(Connect::refuse_busy(), "its secrets cannot be read"),
            },
        };
        let by_name = entry.access.named.contains_key(&connect.hostnqn);
        if server.is_at_share_limit(&connect.hostnqn, by_name, self.context.peer.ip()) {
            return refuse(Connect::refuse_busy(), "it has the largest number of connections");
        }
        if asked.is_some() && self.attempt.is_none() {
            let source = (self.context.peer.ip(), AuthMethod::Dhchap, connect.subnqn.as_str());
            let Some((at, begun)) = server.begin_auth_attempt(source) else {
                let why = "too many failed hosts from its address are being delayed";
                return refuse(Connect::refuse_busy(), why);
            };
            self.attempt = Some(begun);
            if let Some(at) = at {
                return Decision::Later(at);
            }
        }
        if connect.qid > 0 {
            if server.nvme.protection(connect.cntlid) == Some(!self.is_protected()) {
                let why = "its queues must all use TLS or none";
                return refuse(Connect::refuse_controller(), why);
            }
            let connected = server.nvme.connect_io(connect);
            return Decision::Here(connected.map(|c| (c, asked)).map_err(ConnectRefusal::from));
        }
        let subsystem = host_catalog::subsystem(&connect.subnqn, &entry.serial, catalog.quiesce_ms);
        let names = (connect.subnqn.as_str(), connect.hostnqn.as_str());
        let role =
            Role::Io(host_catalog::namespaces(server.served(), &catalog, names, &BTreeMap::new()));
        let connected = admin(server, connect, &subsystem, role);
        Decision::Here(connected.map(|c| (c, asked)).map_err(ConnectRefusal::from))
    }

    /// Traffic from the host restarts its keep alive.
    pub(super) fn record_traffic(&self) {
        if let Some(queue) = self.queue {
            self.server().nvme.with_controller(queue.cntlid, Controller::record_traffic);
        }
    }

    /// The catalog has changed: the admin queue's connection updates its controller.
    pub(super) fn on_catalog(&mut self) {
        let Some(queue) = self.queue else { return };
        let server = Rc::clone(self.server());
        let catalog = server.catalog();
        let names = |c: &mut Controller| {
            let nqn = (!c.is_discovery()).then(|| c.subsystem().nqn.clone());
            (c.hostnqn().to_owned(), nqn)
        };
        let Some((hostnqn, nqn)) = server.nvme.with_controller(queue.cntlid, names) else { return };
        let Some(nqn) = nqn else {
            let log = host_catalog::discovery(&catalog, &hostnqn, self.context.local);
            server.nvme.with_controller(queue.cntlid, |c| c.set_discovery(log));
            return self.on_controller();
        };
        if let Err(why) = self.check_still_allowed(&catalog, &nqn, &hostnqn) {
            // A different rule may have admitted an I/O queue than its admin queue.
            return if queue.qid == 0 {
                server.nvme.end(queue.cntlid, why);
            } else {
                self.close(why);
            };
        }
        if queue.qid > 0 {
            return;
        }
        let before = server.nvme.with_controller(queue.cntlid, |c| c.namespaces().clone());
        let names = (nqn.as_str(), hostnqn.as_str());
        let namespaces =
            host_catalog::namespaces(server.served(), &catalog, names, &before.unwrap_or_default());
        let is_shared = namespaces.values().any(|ns| ns.is_shared);
        if is_shared && !catalog.node.controller_ids().contains(&queue.cntlid) {
            return server
                .nvme
                .end(queue.cntlid, "another node may have assigned its controller identifier");
        }
        server.nvme.with_controller(queue.cntlid, |c| c.set_namespaces(namespaces));
        server.nvme.set_states(server.served(), queue.cntlid);
        if self.is_authenticated() {
            self.watch_reservations();
        }
        self.on_controller();
    }

    /// Whether the queue, and for an admin queue its association, is still allowed.
    fn check_still_allowed(
        &self,
        catalog: &Catalog,
        nqn: &str,
        hostnqn: &str,
    ) -> Result<(), &'static str> {
        let entry = catalog.subsystems.get(nqn);
        let entry = entry.filter(|entry| entry.core == self.server().core().id());
        let admitted = entry.and_then(|entry| Some((entry, entry.access.rule_for(hostnqn)?)));
        match admitted {
            None => Err("the host is no longer allowed to use this subsystem"),
            Some((_, AccessRule::Proof(_))) if self.authentication.is_none() => {
                Err("the host must authenticate")
            }
            Some((entry, _)) if entry.requires_tls(hostnqn) && !self.is_protected() => {
                Err("the host must use TLS")
            }
            // A host without multipathing waits for a connection, but not for a namespace.
            Some((entry, _)) if !entry.serves_any(hostnqn) => {
                Err("no volume of its subsystem is served at the moment")
            }
            Some(_) => Ok(()),
        }
    }

    /// Carries out the controller's requests; on the connection of the admin queue.
    pub(super) fn on_controller(&mut self) {
        let Some(queue) = self.queue.filter(|s| s.qid == 0) else { return };
        let server = Rc::clone(self.server());
        while let Some(Some(event)) =
            server.nvme.with_controller(queue.cntlid, Controller::poll_event)
        {
            match event {
                nvme::Event::Complete { tag, completion } => {
                    self.complete(tag, completion, &Bufs::new());
                }
                nvme::Event::Discard { tag } => {
                    self.tasks.remove(tag);
                    self.machine.discard(tag);
                }
                nvme::Event::Reset => server.nvme.close_io(queue.cntlid),
                nvme::Event::ShutDown => self.shut_down(queue.cntlid),
                nvme::Event::KeepAliveExpired => {
                    let host = self.context.registration.initiator();
                    tracing::warn!(host, "an NVMe host exceeded its keep alive timeout");
                    server.nvme.end(queue.cntlid, "keep alive timeout");
                }
            }
        }
    }

    /// Makes the writes of a controller durable before it reports that shutdown is complete (NVMe
    /// Base 2.0, 3.6.1).
    fn shut_down(&self, cntlid: u16) {
        let server = Rc::clone(self.server());
        let account = self.account.clone();
        let volumes = self.volumes();
        tokio::task::spawn_local(async move {
            for served in volumes {
                if let Err(failure) = served.volume.execute(Request::Flush, &account).await {
                    let volume = &served.name;
                    tracing::warn!(volume, %failure, "an NVMe shutdown could not flush");
                }
            }
            server.nvme.with_controller(cntlid, Controller::shut_down);
        });
    }
}

/// Why a host may not use a subsystem, and the answer to it. The answer is the same whether the
/// subsystem exists or not, so that names of volumes cannot be probed.
fn unknown_subsystem(catalog: &Catalog, connect: &Connect) -> ConnectRefusal {
    let (name, host) = (&connect.subnqn, &connect.hostnqn);
    let elsewhere = catalog.remote.subsystems.get(name);
    if elsewhere.is_some_and(|entry| entry.access.rule_for(host).is_some()) {
        return ConnectRefusal::new(
            Connect::refuse_subsystem(),
            "only other nodes have its volumes",
        );
    }
    let exists = elsewhere.is_some() || catalog.subsystems.contains_key(name);
    let why = if exists { "the host is not allowed" } else { "there is no such subsystem" };
    if catalog.is_incomplete {
        // Records that cannot be read for now are no reason for the host to give the path up.
        return ConnectRefusal::new(Connect::refuse_busy(), why);
    }
    ConnectRefusal::new(Connect::refuse_host(), why)
}

/// Connects an admin queue.
fn admin(
    server: &Server,
    connect: &Connect,
    subsystem: &Rc<nvme::Subsystem>,
    role: Role,
) -> Result<ConnectedQueue, Completion> {
    let max_transfer_bytes = max_transfer(server, &role);
    server.nvme.connect_admin(server.served(), connect, subsystem, role, max_transfer_bytes)
}

/// The largest transfer of one command: no more than any of the volumes supports, and no more than
/// the pool can give to one command.
fn max_transfer(server: &Server, role: &Role) -> u32 {
    let pool = server.pool().usage().total / MIN_POOL_REQUESTS;
    let volumes = match role {
        Role::Io(namespaces) => namespaces.values().map(|ns| &ns.info),
        Role::Discovery(_) => return MAX_TRANSFER_BYTES,
    };
    let most = volumes
        .map(|info| u64::from(info.max_transfer_blocks) * u64::from(info.block_size))
        .chain([pool, u64::from(MAX_TRANSFER_BYTES)])
        .min()
        .unwrap_or(0);
    1 << u32::try_from(most.max(4096)).unwrap_or(MAX_TRANSFER_BYTES).ilog2()
}

/// The memory class for data that an admin command returns: the command holds no memory before.
pub(super) const RETURN_DATA_CLASS: MemoryClass = MemoryClass::Read;
