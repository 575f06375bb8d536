//! What a host sees of the catalog: the namespaces of a subsystem, the discovery log.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use block::Access;
use nvme::fabrics::DISCOVERY_NQN;
use nvme::log::AnaState;
use nvme::{Discovery, DiscoveryEntry, DiscoveryKind, Limits, Namespace, Subsystem};

use crate::catalog::{self, Catalog};
use crate::server::Server;

/// The group of all namespaces that only this node serves.
pub(super) const OWN_GROUP: u32 = 1;

/// The group of a namespace that several nodes serve: its own, for its state is, and the same on
/// every node.
fn shared_group(nsid: u32) -> u32 {
    nsid.saturating_add(OWN_GROUP)
}

/// Groups that a controller announces with these namespaces: as many as there may be, or the
/// one.
pub(super) fn ana_groups(namespaces: &BTreeMap<u32, Namespace>) -> u32 {
    let shared = namespaces.values().any(|ns| ns.ana_group != OWN_GROUP);
    if shared { shared_group(Limits::default().namespaces) } else { OWN_GROUP }
}

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

/// The namespaces of a subsystem, as the catalog and the volumes of this core have them.
pub(super) fn namespaces(
    server: &Server,
    catalog: &Catalog,
    nqn: &str,
) -> BTreeMap<u32, Namespace> {
    let Some(entry) = catalog.subsystems.get(nqn) else { return BTreeMap::new() };
    let namespace = |(&nsid, &id)| {
        let served = server.volume(id)?;
        let info = served.volume.info();
        let (uuid, nguid) = (id.0, id.0);
        let shared = served.access_in(catalog).is_some();
        let ana_group = if shared { shared_group(nsid) } else { OWN_GROUP };
        let (thin, keeps_reservations) = (served.thin, served.volume.gate().is_some());
        let namespace =
            Namespace { info, uuid, nguid, eui64: None, thin, keeps_reservations, ana_group };
        Some((nsid, namespace))
    };
    entry.namespaces.iter().filter_map(namespace).collect()
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
    for (nqn, entry) in catalog.subsystems.iter().filter(|(_, s)| admits(&s.access, hostnqn)) {
        let shared = catalog.shares_any(entry.namespaces.values());
        let here = (if shared { catalog.node.first_portal() } else { 1 }, &portals);
        let others = catalog.others_serving(entry.namespaces.values());
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
