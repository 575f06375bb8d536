//! The peer link between the nodes, over the simulated network.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use mirror::membership::NotServingReason;
use peer::{
    ConnectionPurpose, Endpoint, NodeId, PeerAddresses, PeerIdentity, PeerSecret,
    accept_connections,
};
use rt::Core;
use rt::sim::{Host, Rng, World};
use tokio::sync::Notify;
use uuid::Uuid;

use super::VOLUME;
use super::store::Store;

/// Ports that nodes listen on. Leases have a port of their own.
const PORTS: [u16; 2] = [7001, 7002];

/// What each port carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ports {
    /// Both ports carry everything.
    Shared,
    /// The second port carries leases only.
    SeparateLeases,
}

impl Ports {
    fn addresses(self, of: IpAddr) -> PeerAddresses {
        let all = PORTS.map(|port| SocketAddr::new(of, port)).to_vec();
        match self {
            Self::Shared => PeerAddresses { data: all, heartbeat: Vec::new() },
            Self::SeparateLeases => {
                PeerAddresses { data: all[..1].to_vec(), heartbeat: all[1..].to_vec() }
            }
        }
    }
}

const CLUSTER: Uuid = Uuid::from_u128(0x2222_3333_4444_4555_8666_7777_8888_9999);

/// The address of each node, as published by the nodes.
#[derive(Default)]
pub(super) struct NodeAddresses {
    all: RefCell<BTreeMap<NodeId, IpAddr>>,
    changed: Notify,
}

impl NodeAddresses {
    pub(super) fn new(all: impl Iterator<Item = (NodeId, IpAddr)>) -> Rc<Self> {
        Rc::new(Self { all: RefCell::new(all.collect()), changed: Notify::new() })
    }

    /// A process that is the node publishes its address.
    pub(super) fn set(&self, node: NodeId, at: IpAddr) {
        if self.all.borrow_mut().insert(node, at) != Some(at) {
            self.changed.notify_waiters();
        }
    }
}

/// Pairs of nodes between which only leases pass.
pub(super) type DataPartitions = Rc<RefCell<BTreeSet<(NodeId, NodeId)>>>;

/// Drops everything but leases between two nodes from now on, or restores the link.
pub(super) fn set_data_partition(partitions: &DataPartitions, a: NodeId, b: NodeId, parted: bool) {
    for pair in [(a, b), (b, a)] {
        let mut partitions = partitions.borrow_mut();
        if parted {
            partitions.insert(pair)
        } else {
            partitions.remove(&pair)
        };
    }
}

/// Connects a node that has started to all nodes in its record.
pub(super) async fn connect_peers(
    core: &Core,
    me: NodeId,
    mirror: &Mirror,
    (addresses, ports): (Rc<NodeAddresses>, Ports),
    partitions: DataPartitions,
    store: Rc<Store>,
) -> Result<(), String> {
    let identity = PeerIdentity::new(CLUSTER, PeerSecret::new(&[7; 32]), me, VOLUME);
    let endpoint = Endpoint::new(core.clone(), identity, Rc::new(mirror.clone()));
    for port in PORTS {
        let at = SocketAddr::from(([0, 0, 0, 0], port));
        let listener = core.listen(at).await.map_err(|e| e.to_string())?;
        let (endpoint, partitions) = (endpoint.clone(), Rc::clone(&partitions));
        tokio::task::spawn_local(async move {
            accept_connections(&listener, |greeting| {
                let from = greeting.hello().sender;
                let parted = partitions.borrow().contains(&(from, me));
                if !parted || greeting.hello().purpose == ConnectionPurpose::Lease {
                    endpoint.accept(greeting);
                }
            })
            .await;
        });
    }
    mirror.set_lease_paths(endpoint.lease_paths_for_handler());
    tokio::task::spawn_local(follow_record(me, mirror.clone(), endpoint, addresses, ports, store));
    Ok(())
}

/// Keeps sessions with all nodes in the record.
async fn follow_record(
    me: NodeId,
    mirror: Mirror,
    endpoint: Endpoint<Mirror>,
    addresses: Rc<NodeAddresses>,
    ports: Ports,
    store: Rc<Store>,
) {
    let mut known = BTreeMap::new();
    loop {
        let mut moved = std::pin::pin!(addresses.changed.notified());
        // No later change is missed.
        moved.as_mut().enable();
        let status = mirror.status();
        // A replica that rejects the record still keeps its sessions, so that it can tell others.
        let refused = matches!(status.not_serving, Some(NotServingReason::Refused(_)));
        if let Some(record) = status.config.or_else(|| refused.then(|| store.record())) {
            let all = addresses.all.borrow().clone();
            let others = record.replicas.iter().map(|r| r.node).filter(|node| *node != me);
            let listed: BTreeMap<_, _> = others.map(|node| (node, all[&node])).collect();
            for (&node, _) in known.iter().filter(|(node, at)| listed.get(node) != Some(at)) {
                endpoint.remove(node).await;
            }
            for (&node, &at) in listed.iter().filter(|(node, at)| known.get(node) != Some(at)) {
                endpoint.add(node, ports.addresses(at));
            }
            known = listed;
        }
        tokio::select! {
            biased;
            () = mirror.wait_status_change() => {}
            () = moved => {}
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Cuts the link from one host to another, or heals it.
pub(super) fn set_cut(world: &World, from: &Host, to: &Host, cut: bool) {
    world.note(format!("from {} to {} cut: {cut}", from.name(), to.name()));
    world.set_link(from, to, |link| link.is_cut = cut);
}

/// Cuts the first port's link from one host to another, or heals it.
pub(super) fn set_port_cut(world: &World, from: &Host, to: &Host, cut: bool) {
    world.note(format!("from {} to {} data cut: {cut}", from.name(), to.name()));
    world.set_link(from, to, |link| link.cut_port = cut.then_some(PORTS[0]));
}

/// Draws the properties of the network between two hosts.
pub(super) fn draw_link(world: &World, rng: &Rng, from: &Host, to: &Host) {
    let us = Duration::from_micros;
    let slow = rng.chance(0.2);
    world.set_link(from, to, |link| {
        link.min_delay = us(rng.between(50, 500));
        link.max_delay = link.min_delay + us(rng.between(50, if slow { 50_000 } else { 2_000 }));
        link.loss = if rng.chance(0.3) { 0.01 } else { 0.0 };
        link.retransmit_timeout = Duration::from_secs(10);
    });
}
