//! The peer link between the nodes, over the simulated network.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use mirror::member::Why;
use peer::{Endpoint, Identity, Line, NodeId, PeerAddresses, Secret, receive_greetings};
use rt::Core;
use rt::sim::{Host, Rng, World};
use tokio::sync::Notify;
use uuid::Uuid;

use super::VOLUME;
use super::store::Store;

/// Where nodes listen: two ports, so that leases have a path of their own.
const PORTS: [u16; 2] = [7001, 7002];

/// What the ports are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ports {
    /// Both are for everything.
    Alike,
    /// The second is for leases only.
    Apart,
}

impl Ports {
    fn addresses(self, of: IpAddr) -> PeerAddresses {
        let all = PORTS.map(|port| SocketAddr::new(of, port)).to_vec();
        match self {
            Self::Alike => PeerAddresses { data: all, heartbeat: Vec::new() },
            Self::Apart => PeerAddresses { data: all[..1].to_vec(), heartbeat: all[1..].to_vec() },
        }
    }
}

const CLUSTER: Uuid = Uuid::from_u128(0x2222_3333_4444_4555_8666_7777_8888_9999);

/// Where each node is, by the records of the nodes.
#[derive(Default)]
pub(super) struct Addresses {
    all: RefCell<BTreeMap<NodeId, IpAddr>>,
    changed: Notify,
}

impl Addresses {
    pub(super) fn new(all: impl Iterator<Item = (NodeId, IpAddr)>) -> Rc<Self> {
        Rc::new(Self { all: RefCell::new(all.collect()), changed: Notify::new() })
    }

    /// A process that is the node says where it is.
    pub(super) fn set(&self, node: NodeId, at: IpAddr) {
        if self.all.borrow_mut().insert(node, at) != Some(at) {
            self.changed.notify_waiters();
        }
    }
}

/// Pairs of nodes between which only leases get through.
pub(super) type Apart = Rc<RefCell<BTreeSet<(NodeId, NodeId)>>>;

/// Lets only leases through between two nodes from now on, or everything again.
pub(super) fn part(apart: &Apart, a: NodeId, b: NodeId, parted: bool) {
    for pair in [(a, b), (b, a)] {
        let mut apart = apart.borrow_mut();
        if parted {
            apart.insert(pair)
        } else {
            apart.remove(&pair)
        };
    }
}

/// Joins a node that has begun to run with all that are in its record.
pub(super) async fn join(
    core: &Core,
    me: NodeId,
    mirror: &Mirror,
    (addresses, ports): (Rc<Addresses>, Ports),
    apart: Apart,
    store: Rc<Store>,
) -> Result<(), String> {
    let identity = Identity::new(CLUSTER, Secret::new(&[7; 32]), me, VOLUME);
    let endpoint = Endpoint::new(core.clone(), identity, Rc::new(mirror.clone()));
    for port in PORTS {
        let at = SocketAddr::from(([0, 0, 0, 0], port));
        let listener = core.listen(at).await.map_err(|e| e.to_string())?;
        let (endpoint, apart) = (endpoint.clone(), Rc::clone(&apart));
        tokio::task::spawn_local(async move {
            receive_greetings(&listener, |greeting| {
                let from = greeting.hello().from;
                let parted = apart.borrow().contains(&(from, me));
                if !parted || greeting.hello().line == Line::Lease {
                    endpoint.accept(greeting);
                }
            })
            .await;
        });
    }
    mirror.set_paths(endpoint.paths_for_handler());
    tokio::task::spawn_local(follow(me, mirror.clone(), endpoint, addresses, ports, store));
    Ok(())
}

/// Keeps sessions with whoever the record lists.
async fn follow(
    me: NodeId,
    mirror: Mirror,
    endpoint: Endpoint<Mirror>,
    addresses: Rc<Addresses>,
    ports: Ports,
    store: Rc<Store>,
) {
    let mut known = BTreeMap::new();
    loop {
        let mut moved = std::pin::pin!(addresses.changed.notified());
        // From here on nothing that moves is missed.
        moved.as_mut().enable();
        let status = mirror.status();
        // A replica that refuses the record has sessions all the same: others are to hear of that.
        let refused = matches!(status.why, Some(Why::Refused(_)));
        if let Some(record) = status.record.or_else(|| refused.then(|| store.record())) {
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
            () = mirror.changed() => {}
            () = moved => {}
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Cuts the way from one host to another, or heals it.
pub(super) fn set_cut(world: &World, from: &Host, to: &Host, cut: bool) {
    world.note(format!("from {} to {} cut: {cut}", from.name(), to.name()));
    world.set_link(from, to, |link| link.cut = cut);
}

/// Cuts the way of the first port from one host to another, or heals it.
pub(super) fn set_port_cut(world: &World, from: &Host, to: &Host, cut: bool) {
    world.note(format!("from {} to {} data cut: {cut}", from.name(), to.name()));
    world.set_link(from, to, |link| link.cut_port = cut.then_some(PORTS[0]));
}

/// Draws what the network between two hosts is like.
pub(super) fn draw(world: &World, rng: &Rng, from: &Host, to: &Host) {
    let us = Duration::from_micros;
    let slow = rng.chance(0.2);
    world.set_link(from, to, |link| {
        link.min = us(rng.between(50, 500));
        link.max = link.min + us(rng.between(50, if slow { 50_000 } else { 2_000 }));
        link.loss = if rng.chance(0.3) { 0.01 } else { 0.0 };
        link.give_up = Duration::from_secs(10);
    });
}
