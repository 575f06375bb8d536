//! Registration with an iSNS server (RFC 4171), for initiators that find their targets there. It is a courtesy: whatever fails
//! of it is logged, and nothing waits for it.
//!
//! What is registered is one entity for whoever serves a target together, as the server knows a name of a target once: the node,
//! or the whole cluster, for which the first of its living data nodes speaks.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;
use std::time::Duration;

use ::cluster::identity::Role;
use ::cluster::nodes::{NodeView, Nodes};
use iscsi::isns::{Answer, BadAnswer, Entity, HEADER, Mode, Portal, Target};
use peer::NodeId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::{Instant, sleep, timeout};

use super::Control;
use crate::publish;
use crate::record::{Stage, VolumeRecord};

/// For how long a registration shall last without being renewed. The server may say otherwise.
const PERIOD_S: u32 = 600;

/// How often is looked whether there is something to register.
const LOOK: Duration = Duration::from_secs(2);

/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(30);

/// The server's time for a connection, and for each answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The same when the node stops.
const LAST_PATIENCE: Duration = Duration::from_secs(2);

/// How often is complained of the same.
const COMPLAIN: Duration = Duration::from_secs(3600);

/// Portal group of targets that only one node serves.
const ONLY_GROUP: u16 = 1;

/// Why nothing was registered.
#[derive(Debug, thiserror::Error)]
enum IsnsError {
    #[error("{0}")]
    Unreachable(#[from] io::Error),
    #[error("no answer in {} s", PATIENCE.as_secs())]
    Silent(#[from] tokio::time::error::Elapsed),
    #[error("{0}")]
    Answer(#[from] BadAnswer),
}

/// What the server has of us.
#[derive(Clone, Debug)]
pub(super) struct Registered {
    entity: Entity,
    /// The address from which it was registered: a wildcard portal is reached there.
    local: IpAddr,
    /// When it has to be renewed; `None` while nobody knows whether the server has it.
    renew: Option<Instant>,
}

/// A connection to the server.
struct Server {
    stream: TcpStream,
    local: IpAddr,
    transaction: u16,
}

impl Server {
    async fn dial(at: &str) -> Result<Self, IsnsError> {
        let dial = async {
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
        let stream = timeout(PATIENCE, dial).await??;
        let local = stream.local_addr()?.ip().to_canonical();
        Ok(Self { stream, local, transaction: 1 })
    }

    /// Sends a message that was made for the next transaction, and reads its answer.
    async fn ask(&mut self, message: &[u8]) -> Result<Option<u32>, IsnsError> {
        self.transaction = self.transaction.wrapping_add(1);
        timeout(PATIENCE, self.ask_patiently(message)).await?
    }

    async fn ask_patiently(&mut self, message: &[u8]) -> Result<Option<u32>, IsnsError> {
        self.stream.write_all(message).await?;
        let mut answer = Answer::to(message).ok_or(BadAnswer::NotIsns)?;
        loop {
            let mut header = [0; HEADER];
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

    /// Registers an entity; for how long.
    async fn register(&mut self, entity: &Entity, mode: Mode) -> Result<Duration, IsnsError> {
        let mut period = None;
        for message in entity.register(mode, PERIOD_S, self.transaction) {
            period = self.ask(&message).await?.or(period);
        }
        // Zero is for ever. Below ten seconds nobody means it.
        let period = period.filter(|s| *s > 0).unwrap_or(PERIOD_S).max(10);
        Ok(Duration::from_secs(period.into()))
    }

    async fn deregister(&mut self, entity: &Entity) -> Result<(), IsnsError> {
        let Some(source) = entity.source() else { return Ok(()) };
        let message = Entity::deregister(&entity.id, source, self.transaction);
        self.ask(&message).await.map(drop)
    }
}

/// Whether `me` speaks for the cluster: the first of the data nodes that are alive.
fn speaks(nodes: &Nodes, me: NodeId) -> bool {
    let candidate = |view: &&NodeView| view.alive && view.record.role == Role::Data;
    nodes.values().find(candidate).is_some_and(|view| view.record.node == me)
}

/// Each target once, with the portals of all of its volumes.
fn together(targets: impl Iterator<Item = Target>) -> Vec<Target> {
    let mut together = BTreeMap::<String, BTreeSet<Portal>>::new();
    for target in targets {
        together.entry(target.name).or_default().extend(target.portals);
    }
    let target =
        |(name, portals): (_, BTreeSet<_>)| Target { name, portals: portals.into_iter().collect() };
    together.into_iter().map(target).collect()
}

/// The targets of a cluster, each with the portals of all nodes that have a copy.
fn shared_targets<'a>(
    records: impl Iterator<Item = &'a VolumeRecord>,
    nodes: &Nodes,
) -> Vec<Target> {
    let of_place = |node: NodeId| {
        let record = &nodes.get(&node)?.record;
        let group = u16::from(record.index.get()) + 1;
        Some(publish::portals(record).iscsi.into_iter().map(move |at| Portal { at, group }))
    };
    let target = |record: &VolumeRecord| {
        let places = record.places.iter().filter(|p| p.stage.has_image());
        let portals = places.filter_map(|p| of_place(p.node)).flatten().collect();
        Target { name: record.target().to_owned(), portals }
    };
    together(records.map(target))
}

/// The targets of a node by itself. A wildcard is reached where the server is reached from.
fn own_targets<'a>(
    records: impl Iterator<Item = &'a VolumeRecord>,
    listens: &[SocketAddr],
    local: IpAddr,
) -> Vec<Target> {
    let dialled = |at: &SocketAddr| {
        let ip = if at.ip().is_unspecified() { local } else { at.ip() };
        Portal { at: SocketAddr::new(ip, at.port()), group: ONLY_GROUP }
    };
    let mut portals: Vec<_> = listens.iter().map(dialled).collect();
    portals.sort();
    portals.dedup();
    let target = |record: &VolumeRecord| Target {
        name: record.target().to_owned(),
        portals: portals.clone(),
    };
    together(records.map(target))
}

impl Control {
    /// What is to be registered, seen from `local`; `None` if that is another node's to do.
    fn entity(&self, local: IpAddr) -> Option<Entity> {
        let all = self.0.state.all();
        let exported = |r: &&VolumeRecord| r.stage == Stage::Ready && r.protocols.iscsi;
        let records = all.iter().map(|(stored, _)| &stored.record).filter(exported);
        let settings = &self.0.settings;
        let Some(membership) = self.membership() else {
            let targets = own_targets(records, &settings.portals.iscsi, local);
            return Some(Entity { id: settings.name.clone(), targets });
        };
        let nodes = membership.nodes.borrow();
        let id = format!("windrose-{}", membership.cluster);
        let targets = shared_targets(records, &nodes);
        speaks(&nodes, membership.node).then_some(Entity { id, targets })
    }

    /// Keeps the registration at `server` equal to what there is, for as long as the node serves.
    pub(super) async fn keep_registered(self, server: String) {
        let mut complained: Option<Instant> = None;
        while self.is_serving() {
            match self.register_if_due(&server).await {
                Ok(()) if complained.take().is_some() => {
                    tracing::info!(server, "the iSNS server takes registrations again");
                }
                Ok(()) => {}
                Err(error) => {
                    if complained.is_none_or(|at| at.elapsed() >= COMPLAIN) {
                        tracing::warn!(server, %error, "nothing is registered with the iSNS server");
                        complained = Some(Instant::now());
                    }
                    sleep(RETRY).await;
                }
            }
            sleep(LOOK).await;
        }
    }

    fn registered(&self) -> std::sync::MutexGuard<'_, Option<Registered>> {
        self.0.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn register_if_due(&self, at: &str) -> Result<(), IsnsError> {
        let known = self.registered().clone();
        if let Some(known) = &known {
            let wanted = self.entity(known.local);
            let fresh = known.renew.is_some_and(|renew| Instant::now() < renew);
            if fresh && wanted.as_ref() == Some(&known.entity) {
                return Ok(());
            }
            if wanted.is_none() {
                // Another node speaks for the cluster now.
                *self.registered() = None;
                return Ok(());
            }
        } else if self.entity(IpAddr::from([0, 0, 0, 0])).is_none_or(|e| e.targets.is_empty()) {
            return Ok(());
        }
        let mut server = Server::dial(at).await?;
        let Some(entity) = self.entity(server.local) else { return Ok(()) };
        if entity.targets.is_empty() {
            if let Some(known) = known {
                server.deregister(&known.entity).await?;
            }
            *self.registered() = None;
            return Ok(());
        }
        let same = known.is_some_and(|known| known.renew.is_some() && known.entity == entity);
        let local = server.local;
        // Before it is asked for: whoever stops meanwhile takes it back.
        *self.registered() = Some(Registered { entity: entity.clone(), local, renew: None });
        let mode = if same { Mode::Refresh } else { Mode::Replace };
        let period = match server.register(&entity, mode).await {
            Ok(period) => period,
            Err(error) => {
                if matches!(error, IsnsError::Answer(BadAnswer::Refused(_))) {
                    *self.registered() = None;
                }
                return Err(error);
            }
        };
        tracing::debug!(targets = entity.targets.len(), ?period, "registered with the iSNS server");
        let renew = Some(Instant::now() + period / 2);
        *self.registered() = Some(Registered { entity, local, renew });
        Ok(())
    }

    /// Takes back what a node by itself has registered. In a cluster the others go on serving: who speaks next corrects it.
    pub(super) async fn take_registration_back(&self) {
        let known = self.registered().take();
        let (Some(known), Some(at)) = (known, &self.0.settings.isns) else { return };
        if self.membership().is_some() {
            return;
        }
        let back = async { Server::dial(at).await?.deregister(&known.entity).await };
        let why = match timeout(LAST_PATIENCE, back).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        tracing::warn!(server = at, why, "the iSNS server still names this node");
    }
}

#[cfg(test)]
mod tests {
    use ::cluster::identity::NodeIndex;
    use ::cluster::nodes::{NodePortals, NodeRecord};

    use super::*;
    use crate::record::Place;
    use crate::record::PlaceStage;
    use crate::record::tests::{place, record};

    fn node(number: u16, role: Role, alive: bool) -> (NodeId, NodeView) {
        let record = NodeRecord {
            data_dir: "/v".into(),
            node: NodeId(number),
            index: NodeIndex::new(number as u8 - 1).unwrap(),
            name: format!("n{number}"),
            role,
            data: vec![([10, 0, 0, number as u8], 7480).into()],
            heartbeat: vec![],
            portals: NodePortals { iscsi: vec![([0, 0, 0, 0], 3260).into()], ..Default::default() },
            join: None,
            failure_domain: String::new(),
            version: String::new(),
            drained: false,
        };
        (NodeId(number), NodeView { record, alive })
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
        let speak: Vec<_> = nodes.keys().filter(|n| speaks(&nodes, **n)).collect();
        assert_eq!(speak, [&NodeId(3)]);
        assert!(!speaks(&Nodes::new(), NodeId(1)));
    }

    #[test]
    fn a_target_has_the_portals_of_all_nodes_with_a_copy() {
        let nodes: Nodes =
            [node(1, Role::Data, true), node(2, Role::Data, true), node(3, Role::Data, true)]
                .into();
        let wanted = Place { stage: PlaceStage::Wanted { force: false }, ..place(NodeId(3), "a") };
        let places = vec![place(NodeId(1), "a"), place(NodeId(2), "a"), wanted];
        let record = VolumeRecord { places, ..record("a") };
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
