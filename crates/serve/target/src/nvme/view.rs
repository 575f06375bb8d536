//! What a host sees of the catalog: the namespaces of a subsystem, the discovery log.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use block::{Access, Info};
use nvme::fabrics::DISCOVERY_NQN;
use nvme::log::AnaState;
use nvme::{Discovery, DiscoveryEntry, DiscoveryKind, Namespace, Subsystem, Tls};

use crate::catalog::{Absent, Catalog, VolumeId, by_name, dialled, in_common};
use crate::server::{MAX_TRANSFER_BYTES, Served, Server, Space};

/// How a controller of this node reaches a namespace (NVMe Base 2.0, 8.1).
pub(super) fn ana_state(access: Access) -> AnaState {
    match access {
        Access::Optimized => AnaState::Optimized,
        Access::Transitioning => AnaState::Change,
        Access::Unavailable => AnaState::Inaccessible,
    }
}

/// Who a subsystem is.
pub(super) fn subsystem(nqn: &str, serial: &str, quiesce_ms: u16) -> Rc<Subsystem> {
    Rc::new(Subsystem {
        nqn: nqn.into(),
        serial: serial.into(),
        model: "Windrose volume".into(),
        firmware: env!("CARGO_PKG_VERSION").into(),
        quiesce_ms,
    })
}

/// Who the discovery subsystem is.
pub(super) fn discovery_subsystem() -> Rc<Subsystem> {
    subsystem(DISCOVERY_NQN, "discovery", 0)
}

/// The namespaces of a subsystem that a host sees, as the catalog and the volumes of this core have
/// them; those that are not here for now as they were `before`, or as they are known to be. A host takes
/// one that is not listed for gone.
pub(super) fn namespaces(
    server: &Server,
    catalog: &Catalog,
    (nqn, hostnqn): (&str, &str),
    before: &BTreeMap<u32, Namespace>,
) -> BTreeMap<u32, Namespace> {
    let Some(entry) = catalog.subsystems.get(nqn) else { return BTreeMap::new() };
    let namespace = |(nsid, id): (u32, VolumeId)| {
        let served = server.volume(id).filter(|_| !entry.away.contains_key(&nsid));
        let before = before.get(&nsid).filter(|before| before.uuid == id.0);
        let namespace = match (served, before, entry.away.get(&nsid)) {
            (Some(served), ..) => present(&served, server.space(id), catalog),
            (None, Some(before), _) => *before,
            (None, None, Some(absent)) => absent_as(id, absent, catalog),
            (None, None, None) => return None,
        };
        Some((nsid, namespace))
    };
    entry.maps(hostnqn).filter_map(namespace).collect()
}

fn present(served: &Served, space: Option<Space>, catalog: &Catalog) -> Namespace {
    let (uuid, nguid) = (served.id.0, served.id.0);
    let info = served.volume.info();
    let is_shared = served.access_in(catalog).is_some();
    let (thin, keeps_reservations) = (served.thin, served.volume.gate().is_some());
    let used_blocks = space.map(|space| used_blocks(space, &info));
    Namespace { info, uuid, nguid, eui64: None, thin, used_blocks, keeps_reservations, is_shared }
}

/// A namespace whose volume is not open: what else there is to know of it the host hears when it is.
fn absent_as(id: VolumeId, absent: &Absent, catalog: &Catalog) -> Namespace {
    let Absent { block_size, blocks, thin } = *absent;
    let info = Info {
        block_size,
        blocks,
        aside_blocks: 0,
        physical_block_size: block_size,
        max_transfer_blocks: MAX_TRANSFER_BYTES / block_size.max(1),
        unmap_granularity_blocks: 0,
        unmap_zeroes: false,
        volatile_cache: true,
        native_fua: true,
        read_only: false,
        overhead: 0,
    };
    let is_shared = catalog.shared.contains_key(&id);
    let (uuid, nguid, keeps_reservations) = (id.0, id.0, true);
    let used_blocks = None;
    Namespace { info, uuid, nguid, eui64: None, thin, used_blocks, keeps_reservations, is_shared }
}

/// What is taken in part is taken.
pub(super) fn used_blocks(space: Space, info: &Info) -> u64 {
    space.used.div_ceil(info.block_size.into())
}

/// What discovery tells this host, who came to `local`: the subsystems that it may use, at every
/// portal of every node that serves their namespaces, and who else tells of them.
pub(super) fn discovery(catalog: &Catalog, hostnqn: &str, local: SocketAddr) -> Rc<Discovery> {
    let portals = dialled(&catalog.nvme_portals, local);
    let mut entries = Vec::new();
    for (nqn, doors) in by_name(&catalog.subsystems, &catalog.remote.subsystems) {
        let [here, remote] =
            doors.map(|door| door.filter(|s| s.access.admission(hostnqn).is_some()));
        let seen = here.into_iter().chain(remote).flat_map(|s| s.maps(hostnqn));
        let seen: Vec<_> = seen.map(|(_, id)| id).collect();
        let first = if catalog.shares_any(&seen) { catalog.node.first_portal() } else { 1 };
        let is_served = here.is_some_and(|s| s.serves(hostnqn));
        let own = if is_served { portals.as_slice() } else { &[] };
        let others = catalog.others_serving(&seen);
        let others = others.into_iter().map(|(node, at)| (node.first_portal(), at.nvme.as_slice()));
        let tls = here.into_iter().chain(remote).find_map(|s| s.tls.get(hostnqn));
        let tls = match tls {
            None => Tls::None,
            Some(tls) if tls.required => Tls::Required,
            Some(_) => Tls::Possible,
        };
        for (first, portals) in std::iter::once((first, own)).chain(others) {
            entries.extend(ports(DiscoveryKind::Nvm, nqn, tls, first, portals));
        }
    }
    // Who may use nothing is not told what nodes there are.
    if !entries.is_empty() {
        for (node, at) in &catalog.others {
            // One each: a host waits for those that it does not reach, one after the other.
            let nearest = at.discovery.iter().rev().max_by_key(|a| in_common(a.ip(), local.ip()));
            let (kind, first) = (DiscoveryKind::Referral, node.first_discovery());
            entries.extend(ports(kind, DISCOVERY_NQN, Tls::None, first, nearest));
        }
    }
    Rc::new(Discovery { generation: catalog.generation, entries })
}

/// An entry for each port of a subsystem at one node.
fn ports<'a>(
    kind: DiscoveryKind,
    nqn: &'a str,
    tls: Tls,
    first: u16,
    portals: impl IntoIterator<Item = &'a SocketAddr>,
) -> impl Iterator<Item = DiscoveryEntry> {
    let entry = move |(port_id, &address): (u16, &SocketAddr)| DiscoveryEntry {
        kind,
        nqn: nqn.to_owned(),
        address,
        port_id,
        tls,
    };
    (first..).zip(portals).map(entry)
}
