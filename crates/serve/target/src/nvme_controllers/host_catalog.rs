//! The host's view of the catalog: the namespaces of a subsystem, the discovery log.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use block::{Access, Info};
use nvme::fabrics::DISCOVERY_NQN;
use nvme::log::AnaState;
use nvme::{DiscoveryEntry, DiscoveryKind, DiscoveryLog, Namespace, Subsystem, TlsRequirement};

use crate::catalog::{
    Catalog, UnavailableNamespace, VolumeId, common_prefix_bits, pair_by_name, reachable_addresses,
};
use crate::limits::MAX_TRANSFER_BYTES;
use crate::served_volumes::{ServedVolume, ServedVolumes, VolumeSpace};

/// The ANA state of a namespace on this node's controllers (NVMe Base 2.0, 8.1).
pub(crate) fn ana_state(access: Access) -> AnaState {
    match access {
        Access::Optimized => AnaState::Optimized,
        Access::Transitioning => AnaState::Change,
        Access::Unavailable => AnaState::Inaccessible,
    }
}

/// The identity of a subsystem.
pub(crate) fn subsystem(nqn: &str, serial: &str, quiesce_ms: u16) -> Rc<Subsystem> {
    Rc::new(Subsystem {
        nqn: nqn.into(),
        serial: serial.into(),
        model: "Windrose volume".into(),
        firmware: env!("CARGO_PKG_VERSION").into(),
        quiesce_ms,
    })
}

/// The identity of the discovery subsystem.
pub(crate) fn discovery_subsystem() -> Rc<Subsystem> {
    subsystem(DISCOVERY_NQN, "discovery", 0)
}

/// The namespaces of a subsystem that a host sees, from the catalog and the volumes of this core;
/// those that are not here for now as they were `before`, or as the catalog knows them. A host
/// treats an unlisted one as deleted.
pub(crate) fn namespaces(
    volumes: &ServedVolumes,
    catalog: &Catalog,
    (nqn, hostnqn): (&str, &str),
    before: &BTreeMap<u32, Namespace>,
) -> BTreeMap<u32, Namespace> {
    let Some(entry) = catalog.subsystems.get(nqn) else { return BTreeMap::new() };
    let namespace = |(nsid, id): (u32, VolumeId)| {
        let served = volumes.get(id).filter(|_| !entry.unavailable.contains_key(&nsid));
        let before = before.get(&nsid).filter(|before| before.uuid == id.0);
        let namespace = match (served, before, entry.unavailable.get(&nsid)) {
            (Some(served), ..) => available_namespace(&served, volumes.space(id), catalog),
            (None, Some(before), _) => *before,
            (None, None, Some(absent)) => unavailable_namespace(id, absent, catalog),
            (None, None, None) => return None,
        };
        Some((nsid, namespace))
    };
    entry.visible_volumes(hostnqn).filter_map(namespace).collect()
}

fn available_namespace(
    served: &ServedVolume,
    space: Option<VolumeSpace>,
    catalog: &Catalog,
) -> Namespace {
    let (uuid, nguid) = (served.id.0, served.id.0);
    let info = served.volume.info();
    let is_shared = served.access_state(catalog).is_some();
    let (thin, keeps_reservations) = (served.thin, served.volume.reservation_gate().is_some());
    let used_blocks = space.map(|space| used_blocks(space, &info));
    Namespace { info, uuid, nguid, eui64: None, thin, used_blocks, keeps_reservations, is_shared }
}

/// A namespace whose volume is not open: the host learns the rest once it is.
fn unavailable_namespace(
    id: VolumeId,
    absent: &UnavailableNamespace,
    catalog: &Catalog,
) -> Namespace {
    let UnavailableNamespace { block_size, blocks, thin } = *absent;
    let info = Info {
        block_size,
        blocks,
        metadata_blocks: 0,
        physical_block_size: block_size,
        max_transfer_blocks: MAX_TRANSFER_BYTES / block_size.max(1),
        unmap_granularity_blocks: 0,
        unmap_zeroes: false,
        volatile_cache: true,
        native_fua: true,
        read_only: false,
        overhead_bytes: 0,
    };
    let is_shared = catalog.shared.contains_key(&id);
    let (uuid, nguid, keeps_reservations) = (id.0, id.0, true);
    let used_blocks = None;
    Namespace { info, uuid, nguid, eui64: None, thin, used_blocks, keeps_reservations, is_shared }
}

/// A partly used block counts as used.
pub(crate) fn used_blocks(space: VolumeSpace, info: &Info) -> u64 {
    space.used.div_ceil(info.block_size.into())
}

/// The discovery log for this host, which connected to `local`: the subsystems that it may use, at
/// every portal of every node that serves their namespaces, and the other discovery services.
pub(crate) fn discovery(catalog: &Catalog, hostnqn: &str, local: SocketAddr) -> Rc<DiscoveryLog> {
    let portals = reachable_addresses(&catalog.nvme_portals, local);
    let mut entries = Vec::new();
    for (nqn, groups) in pair_by_name(&catalog.subsystems, &catalog.remote.subsystems) {
        let [here, remote] =
            groups.map(|group| group.filter(|s| s.access.rule_for(hostnqn).is_some()));
        let seen = here.into_iter().chain(remote).flat_map(|s| s.visible_volumes(hostnqn));
        let seen: Vec<_> = seen.map(|(_, id)| id).collect();
        let first = if catalog.shares_any(&seen) { catalog.node.first_portal_id() } else { 1 };
        let is_served = here.is_some_and(|s| s.serves_any(hostnqn));
        let own = if is_served { portals.as_slice() } else { &[] };
        let others = catalog.others_serving(&seen);
        let others =
            others.into_iter().map(|(node, at)| (node.first_portal_id(), at.nvme.as_slice()));
        let tls = here.into_iter().chain(remote).find_map(|s| s.tls.get(hostnqn));
        let tls = match tls {
            None => TlsRequirement::None,
            Some(tls) if tls.required => TlsRequirement::Required,
            Some(_) => TlsRequirement::Possible,
        };
        for (first, portals) in std::iter::once((first, own)).chain(others) {
            entries.extend(ports(DiscoveryKind::Nvm, nqn, tls, first, portals));
        }
    }
    // A host without access does not learn which nodes exist.
    if !entries.is_empty() {
        for (node, at) in &catalog.peer_portals {
            // One per node: a host tries unreachable ones one after the other.
            let nearest =
                at.discovery.iter().rev().max_by_key(|a| common_prefix_bits(a.ip(), local.ip()));
            let (kind, first) = (DiscoveryKind::Referral, node.first_discovery_port_id());
            entries.extend(ports(kind, DISCOVERY_NQN, TlsRequirement::None, first, nearest));
        }
    }
    Rc::new(DiscoveryLog { generation: catalog.generation, entries })
}

/// An entry for each port of a subsystem on one node.
fn ports<'a>(
    kind: DiscoveryKind,
    nqn: &'a str,
    tls: TlsRequirement,
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
