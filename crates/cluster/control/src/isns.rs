//! Registration with an iSNS server (RFC 4171), where initiators find their targets. Failures are
//! logged, and nothing waits for it.
//!
//! A server knows each target name once, so all nodes that serve a target together register as one
//! entity: a standalone node, or the whole cluster, for which the first living data node registers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;
use std::time::Duration;

use cluster::identity::Role;
use cluster::nodes::{NodeView, Nodes};
use iscsi::isns::{
    Entity, HEADER_LEN, Portal, RegistrationMode, ResponseAssembler, ResponseError, Target,
};
use peer::NodeId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::{Instant, sleep, timeout};

use super::Control;
use records::catalog;
use records::record::{VolumeRecord, VolumeStage};

/// Requested lifetime of a registration, in seconds. The server may choose another.
const PERIOD_S: u32 = 600;

/// How often the registration is compared with the targets.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Pause after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// Time limit for connecting to the server, and for each answer.
const SERVER_TIMEOUT: Duration = Duration::from_secs(10);

/// The same while the node stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often the same failure is logged.
const WARN_INTERVAL: Duration = Duration::from_secs(3600);

/// Portal group of the targets of a standalone node.
const STANDALONE_PORTAL_GROUP: u16 = 1;

/// Why registration failed.
#[derive(Debug, thiserror::Error)]
enum IsnsError {
    #[error("{0}")]
    Unreachable(#[from] io::Error),
    #[error("no response in {} s", SERVER_TIMEOUT.as_secs())]
    TimedOut(#[from] tokio::time::error::Elapsed),
    #[error("{0}")]
    Answer(#[from] ResponseError),
}

/// The registration at the server.
#[derive(Clone, Debug)]
pub(super) struct IsnsRegistration {
    entity: Entity,
    /// The local address of the connection to the server: stands in for a wildcard portal.
    local: IpAddr,
    /// When to renew it; `None` while it is unknown whether the server has it.
    renew_at: Option<Instant>,
}

/// A connection to the server.
struct IsnsConnection {
    stream: TcpStream,
    local: IpAddr,
    transaction: u16,
}

impl IsnsConnection {
    async fn dial(at: &str) -> Result<Self, IsnsError> {
        let connecting = async {
            let mut last = io::Error::from(io::ErrorKind::NotFound);
            for address in lookup_host(at).await? {
                let socket =
                    if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
                match socket?.connect(address).await {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let stream = timeout(SERVER_TIMEOUT, connecting).await??;
        let local = stream.local_addr()?.ip().to_canonical();
        Ok(Self { stream, local, transaction: 1 })
    }

    /// Sends a message built for the next transaction, and reads the answer.
    async fn request(&mut self, message: &[u8]) -> Result<Option<u32>, IsnsError> {
        self.transaction = self.transaction.wrapping_add(1);
        timeout(SERVER_TIMEOUT, self.request_untimed(message)).await?
    }

    async fn request_untimed(&mut self, message: &[u8]) -> Result<Option<u32>, IsnsError> {
        self.stream.write_all(message).await?;
        let mut answer = ResponseAssembler::awaiting(message).ok_or(ResponseError::NotIsns)?;
        loop {
            let mut header = [0; HEADER_LEN];
            self.stream.read_exact(&mut header).await?;
            let (length, last) = answer.part(&header)?;
            let mut payload = vec![0; length];
            self.stream.read_exact(&mut payload).await?;
            answer.add(&payload);
            if last {
                return Ok(answer.outcome()?);
            }
        }
    }

    /// Registers an entity; returns for how long.
    async fn register(
        &mut self,
        entity: &Entity,
        mode: RegistrationMode,
    ) -> Result<Duration, IsnsError> {
        let mut period = None;
        for message in entity.register(mode, PERIOD_S, self.transaction) {
            period = self.request(&message).await?.or(period);
        }
        // Zero means no expiry. Less than ten seconds is not plausible.
        let period = period.filter(|s| *s > 0).unwrap_or(PERIOD_S).max(10);
        Ok(Duration::from_secs(period.into()))
    }

    async fn deregister(&mut self, entity: &Entity) -> Result<(), IsnsError> {
        let Some(source) = entity.source() else { return Ok(()) };
        let message = Entity::deregister(&entity.id, source, self.transaction);
        self.request(&message).await.map(drop)
    }
}

/// Whether `me` registers for the cluster: it is the first living data node.
fn is_registrar(nodes: &Nodes, me: NodeId) -> bool {
    let candidate = |view: &&NodeView| view.is_alive && view.record.role == Role::Data;
    nodes.values().find(candidate).is_some_and(|view| view.record.node == me)
}

/// Each target once, with the portals of all of its volumes.
fn merge_targets(targets: impl Iterator<Item = Target>) -> Vec<Target> {
    let mut merged = BTreeMap::<String, BTreeSet<Portal>>::new();
    for target in targets {
        merged.entry(target.name).or_default().extend(target.portals);
    }
    let target =
        |(name, portals): (_, BTreeSet<_>)| Target { name, portals: portals.into_iter().collect() };
    merged.into_iter().map(target).collect()
}

/// The targets of a cluster, each with the portals of all nodes that keep a replica.
fn shared_targets<'a>(
    records: impl Iterator<Item = &'a VolumeRecord>,
    nodes: &Nodes,
) -> Vec<Target> {
    let portals_of = |node: NodeId| {
        let record = &nodes.get(&node)?.record;
        let group = u16::from(record.index.get()) + 1;
        Some(
            catalog::reachable_portals(record)
                .iscsi
                .into_iter()
                .map(move |at| Portal { at, group }),
        )
    };
    let target = |record: &VolumeRecord| {
        let placements = record.placements.iter().filter(|p| p.stage.has_image());
        let portals = placements.filter_map(|p| portals_of(p.node)).flatten().collect();
        Target { name: record.target_name().to_owned(), portals }
    };
    merge_targets(records.map(target))
}

/// The targets of a standalone node. A wildcard portal becomes the address that faces the server.
fn own_targets<'a>(
    records: impl Iterator<Item = &'a VolumeRecord>,
    listens: &[SocketAddr],
    local: IpAddr,
) -> Vec<Target> {
    let portal_at = |at: &SocketAddr| {
        let ip = if at.ip().is_unspecified() { local } else { at.ip() };
        Portal { at: SocketAddr::new(ip, at.port()), group: STANDALONE_PORTAL_GROUP }
    };
    let mut portals: Vec<_> = listens.iter().map(portal_at).collect();
    portals.sort();
    portals.dedup();
    let target = |record: &VolumeRecord| Target {
        name: record.target_name().to_owned(),
        portals: portals.clone(),
    };
    merge_targets(records.map(target))
}

impl Control {
    /// The entity to register, seen from `local`; `None` if another node registers it.
    fn isns_entity(&self, local: IpAddr) -> Option<Entity> {
        let all = self.0.context.volumes.all();
        let exported = |r: &&VolumeRecord| r.stage == VolumeStage::Ready && r.protocols.iscsi;
        let records = all.iter().map(|(stored, _)| &stored.record).filter(exported);
        let settings = &self.0.context.settings;
        let Some(joined) = self.joined_cluster() else {
            let targets = own_targets(records, &settings.portals.iscsi, local);
            return Some(Entity { id: settings.name.clone(), targets });
        };
        let nodes = joined.nodes.borrow();
        let id = format!("windrose-{}", joined.cluster);
        let targets = shared_targets(records, &nodes);
        is_registrar(&nodes, joined.node).then_some(Entity { id, targets })
    }

    /// Keeps the registration at `server` current, for as long as the node serves.
    pub(super) async fn maintain_isns_registration(self, server: String) {
        let mut last_warning: Option<Instant> = None;
        while self.is_serving() {
            match self.register_isns_if_due(&server).await {
                Ok(()) if last_warning.take().is_some() => {
                    tracing::info!(server, "iSNS server accepts registrations again");
                }
                Ok(()) => {}
                Err(error) => {
                    if last_warning.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
                        tracing::warn!(server, %error, "iSNS registration failed");
                        last_warning = Some(Instant::now());
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    fn isns_registration(&self) -> std::sync::MutexGuard<'_, Option<IsnsRegistration>> {
        self.0.isns_registration.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn register_isns_if_due(&self, at: &str) -> Result<(), IsnsError> {
        let known = self.isns_registration().clone();
        if let Some(known) = &known {
            let wanted = self.isns_entity(known.local);
            let fresh = known.renew_at.is_some_and(|renew| Instant::now() < renew);
            if fresh && wanted.as_ref() == Some(&known.entity) {
                return Ok(());
            }
            if wanted.is_none() {
                // Another node registers for the cluster now.
                *self.isns_registration() = None;
                return Ok(());
            }
        } else if self.isns_entity(IpAddr::from([0, 0, 0, 0])).is_none_or(|e| e.targets.is_empty())
        {
            return Ok(());
        }
        let mut server = IsnsConnection::dial(at).await?;
        let Some(entity) = self.isns_entity(server.local) else { return Ok(()) };
        if entity.targets.is_empty() {
            if let Some(known) = known {
                server.deregister(&known.entity).await?;
            }
            *self.isns_registration() = None;
            return Ok(());
        }
        let same = known.is_some_and(|known| known.renew_at.is_some() && known.entity == entity);
        let local = server.local;
        // Recorded before the request is sent: if the node stops meanwhile, it deregisters.
        *self.isns_registration() =
            Some(IsnsRegistration { entity: entity.clone(), local, renew_at: None });
        let mode = if same { RegistrationMode::Refresh } else { RegistrationMode::Replace };
        let period = match server.register(&entity, mode).await {
            Ok(period) => period,
            Err(error) => {
                if matches!(error, IsnsError::Answer(ResponseError::Refused(_))) {
                    *self.isns_registration() = None;
                }
                return Err(error);
            }
        };
        tracing::debug!(targets = entity.targets.len(), ?period, "registered with the iSNS server");
        let renew = Some(Instant::now() + period / 2);
        *self.isns_registration() = Some(IsnsRegistration { entity, local, renew_at: renew });
        Ok(())
    }

    /// Deregisters a standalone node. In a cluster the other nodes go on serving, and the next
    /// registrar corrects the entry.
    pub(super) async fn deregister_isns(&self) {
        let known = self.isns_registration().take();
        let (Some(known), Some(at)) = (known, &self.0.context.settings.isns) else { return };
        if self.joined_cluster().is_some() {
            return;
        }
        let deregistration =
            async { IsnsConnection::dial(at).await?.deregister(&known.entity).await };
        let why = match timeout(SHUTDOWN_TIMEOUT, deregistration).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no response".to_owned(),
        };
        tracing::warn!(server = at, why, "iSNS deregistration failed");
    }
}

#[cfg(test)]
mod tests {
    use cluster::identity::NodeIndex;
    use cluster::nodes::{NodePortals, NodeRecord};

    use super::*;
    use records::record::PlacementStage;
    use records::record::ReplicaPlacement;
    use records::samples::{place, record};

    fn node(number: u16, role: Role, alive: bool) -> (NodeId, NodeView) {
        let record = NodeRecord {
            data_dir: "/v".into(),
            node: NodeId(number),
            index: NodeIndex::new(number as u8 - 1).unwrap(),
            name: format!("n{number}"),
            role,
            data_addresses: vec![([10, 0, 0, number as u8], 7480).into()],
            heartbeat_addresses: vec![],
            portals: NodePortals { iscsi: vec![([0, 0, 0, 0], 3260).into()], ..Default::default() },
            join_address: None,
            failure_domain: String::new(),
            version: String::new(),
            is_drained: false,
        };
        (NodeId(number), NodeView { record, is_alive: alive })
    }

    #[test]
    fn the_first_living_data_node_speaks() {
        use Role::{Data, Witness};
        let nodes: Nodes = [
            node(1, Witness, true),
            node(2, Data, false),
            node(3, Data, true),
            node(4, Data, true),
        ]
        .into();
        let speak: Vec<_> = nodes.keys().filter(|n| is_registrar(&nodes, **n)).collect();
        assert_eq!(speak, [&NodeId(3)]);
        assert!(!is_registrar(&Nodes::new(), NodeId(1)));
    }

    #[test]
    fn a_target_has_the_portals_of_all_nodes_with_a_copy() {
        let nodes: Nodes =
            [node(1, Role::Data, true), node(2, Role::Data, true), node(3, Role::Data, true)]
                .into();
        let wanted = ReplicaPlacement {
            stage: PlacementStage::Creating { force: false },
            ..place(NodeId(3), "a")
        };
        let places = vec![place(NodeId(1), "a"), place(NodeId(2), "a"), wanted];
        let record = VolumeRecord { placements: places, ..record("a") };
        let targets = shared_targets([&record].into_iter(), &nodes);
        let portal = |n: u8| Portal { at: ([10, 0, 0, n], 3260).into(), group: u16::from(n) };
        let name = record.iscsi_target.clone();
        assert_eq!(targets, [Target { name, portals: vec![portal(1), portal(2)] }]);
    }

    #[test]
    fn a_wildcard_is_reached_where_the_server_is_reached_from() {
        let listens = [([0, 0, 0, 0], 3260).into(), ([192, 0, 2, 7], 3261).into()];
        let local = IpAddr::from([198, 51, 100, 1]);
        let targets = own_targets([&record("a")].into_iter(), &listens, local);
        let at: Vec<_> = targets[0].portals.iter().map(|p| (p.at.to_string(), p.group)).collect();
        assert_eq!(at, [("192.0.2.7:3261".to_owned(), 1), ("198.51.100.1:3260".to_owned(), 1)]);
    }
}
