//! What a host sees of the catalog: the namespaces of a subsystem, the discovery log.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use nvme::fabrics::DISCOVERY_NQN;
use nvme::{Discovery, DiscoveryEntry, DiscoveryKind, Namespace, Subsystem};

use crate::Access;
use crate::catalog::Catalog;
use crate::server::Server;

/// The one group of namespaces: all are reached equally well.
const ANA_GROUP: u32 = 1;

/// CHAP secrets of iSCSI say nothing about an NVMe host: no way to check them, no way in.
pub(super) fn admits(access: &Access, hostnqn: &str) -> bool {
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
        let (thin, ana_group) = (served.thin, ANA_GROUP);
        Some((nsid, Namespace { info, uuid, nguid, eui64: None, thin, ana_group }))
    };
    entry.namespaces.iter().filter_map(namespace).collect()
}

/// What discovery tells this host, who came to `local`: the subsystems that it may use, at every
/// portal.
pub(super) fn discovery(catalog: &Catalog, hostnqn: &str, local: SocketAddr) -> Rc<Discovery> {
    let own = SocketAddr::new(local.ip().to_canonical(), local.port());
    let portals: Vec<SocketAddr> = match catalog.nvme_portals.as_slice() {
        [] => vec![own],
        portals => portals.to_vec(),
    };
    let mut entries = Vec::new();
    for (nqn, _) in catalog.subsystems.iter().filter(|(_, s)| admits(&s.access, hostnqn)) {
        for (port_id, &address) in (1..).zip(&portals) {
            let kind = DiscoveryKind::Nvm;
            entries.push(DiscoveryEntry { kind, nqn: nqn.clone(), address, port_id });
        }
    }
    Rc::new(Discovery { generation: catalog.generation, entries })
}
