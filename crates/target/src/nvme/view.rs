//! What a host sees of the catalog: the namespaces of a subsystem, the discovery log.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use block::Access;
use nvme::fabrics::DISCOVERY_NQN;
use nvme::log::AnaState;
use nvme::{Discovery, DiscoveryEntry, DiscoveryKind, Namespace, Subsystem};

use crate::catalog::{self, Catalog, VolumeId};
use crate::server::Server;

/// How a controller of this node reaches a namespace (NVMe Base 2.0, 8.1).
pub(super) fn ana_state(access: Access) -> AnaState {
    match access {
        Access::Optimized => AnaState::Optimized,
        Access::Transitioning => AnaState::Change,
        Access::Unavailable => AnaState::Inaccessible,
    }
}

/// CHAP secrets of iSCSI say nothing about an NVMe host: no way to check them, no way in.
pub(super) fn admits(access: &catalog::Access, hostnqn: &str) -> bool {
    access.admission(hostnqn).is_some_and(|a| a.chap.is_none())
}

/// Who a subsystem is.
pub(super) fn subsystem(nqn: &str, serial: &str) -> Rc<Subsystem> {
    Rc::new(Subsystem {
        nqn: nqn.into(),
        serial: serial.into(),
        model: "Windrose volume".into(),
        firmware: env!("CARGO_PKG_VERSION").into(),
    })
}

/// Who the discovery subsystem is.
pub(super) fn discovery_subsystem() -> Rc<Subsystem> {
    subsystem(DISCOVERY_NQN, "discovery")
}

/// The namespaces of a subsystem that a host sees, as the catalog and the volumes of this core have
/// them; those that are not here for now as they were `before`.
pub(super) fn namespaces(
    server: &Server,
    catalog: &Catalog,
    (nqn, hostnqn): (&str, &str),
    before: &BTreeMap<u32, Namespace>,
) -> BTreeMap<u32, Namespace> {
    let Some(entry) = catalog.subsystems.get(nqn) else { return BTreeMap::new() };
    let namespace = |(nsid, id): (u32, VolumeId)| {
        let Some(served) = server.volume(id) else {
            let before = before.get(&nsid).filter(|before| before.uuid == id.0)?;
            return Some((nsid, *before));
        };
        let info = served.volume.info();
        let (uuid, nguid) = (id.0, id.0);
        let is_shared = served.access_in(catalog).is_some();
        let (thin, keeps_reservations) = (served.thin, served.volume.gate().is_some());
        let namespace =
            Namespace { info, uuid, nguid, eui64: None, thin, keeps_reservations, is_shared };
        Some((nsid, namespace))
    };
    entry.maps(hostnqn).filter_map(namespace).collect()
}

/// What discovery tells this host, who came to `local`: the subsystems that it may use, at every
/// portal of every node that serves their namespaces.
pub(super) fn discovery(catalog: &Catalog, hostnqn: &str, local: SocketAddr) -> Rc<Discovery> {
    let own = SocketAddr::new(local.ip().to_canonical(), local.port());
    let portals: Vec<SocketAddr> = match catalog.nvme_portals.as_slice() {
        [] => vec![own],
        portals => portals.to_vec(),
    };
    let mut entries = Vec::new();
    let admits = |(_, s): &(&String, &catalog::Subsystem)| s.serves() && admits(&s.access, hostnqn);
    for (nqn, entry) in catalog.subsystems.iter().filter(admits) {
        let seen: Vec<_> = entry.maps(hostnqn).map(|(_, id)| id).collect();
        let shared = catalog.shares_any(&seen);
        let here = (if shared { catalog.node.first_portal() } else { 1 }, &portals);
        let others = catalog.others_serving(&seen);
        let others = others.into_iter().map(|(node, at)| (node.first_portal(), &at.nvme));
        for (first, portals) in std::iter::once(here).chain(others) {
            for (port_id, &address) in (first..).zip(portals) {
                let kind = DiscoveryKind::Nvm;
                entries.push(DiscoveryEntry { kind, nqn: nqn.clone(), address, port_id });
            }
        }
    }
    Rc::new(Discovery { generation: catalog.generation, entries })
}
