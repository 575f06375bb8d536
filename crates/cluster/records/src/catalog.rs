//! The catalog of targets and subsystems that initiators see, built from records.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use ::cluster::nodes::{NodePortals, NodeRecord, NodeView, Nodes};
use ::cluster::secrets::Keyring;
use api::Initiator;
use mirror::config::MirrorConfig;
use peer::NodeId;
use target::catalog::{
    AccessRule, Catalog, ChapCredentials, HostKey, HostSecrets, HostTls, IscsiTarget, NodeIndex,
    Portals, ServingNode, Subsystem, Unavailability, UnavailableNamespace, VolumeId,
};
use uuid::Uuid;

use crate::record::{HostSecretContext, StoredTls, VolumeRecord};

/// Length of a serial number of an NVMe subsystem (NVMe Base 2.0, Identify Controller bytes 04 to
/// 23).
const SERIAL_LEN: usize = 20;

/// The id of a volume in the catalog.
#[must_use]
pub fn volume_id(id: Uuid) -> VolumeId {
    VolumeId(*id.as_bytes())
}

/// The state of a volume on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalState {
    /// Open, on this core.
    Open {
        /// The core.
        core: usize,
    },
    /// This node's replica of it is not open at present.
    Unavailable(Unavailability),
    /// This node has no replica of it.
    NotLocal,
}

/// The catalog of these volumes; `ring` decrypts the secrets of initiators and hosts. Unavailable
/// volumes stay in it, because initiators take a volume missing from the catalog for deleted.
pub fn build_catalog<'a>(
    volumes: impl Iterator<Item = (&'a VolumeRecord, LocalState)>,
    ring: &Keyring,
    iscsi_portals: &[SocketAddr],
    nvme_portals: &[SocketAddr],
    generation: u64,
) -> Catalog {
    let mut catalog = Catalog {
        iscsi_portals: iscsi_portals.to_vec(),
        nvme_portals: nvme_portals.to_vec(),
        generation,
        ..Catalog::default()
    };
    let volumes: Vec<_> = volumes.collect();
    let owners = records_by_id(&volumes);
    let (remote, local): (Vec<_>, Vec<_>) =
        volumes.into_iter().partition(|(_, local)| *local == LocalState::NotLocal);
    catalog.targets = iscsi_targets(&local, &owners, ring);
    catalog.subsystems = nvme_subsystems(&local, &owners, ring);
    // Initiators do not log in there, so no secret is decrypted. The TLS requirement is shown all
    // the same.
    catalog.remote.targets = iscsi_targets(&remote, &owners, &Keyring::default());
    catalog.remote.subsystems = nvme_subsystems(&remote, &owners, &Keyring::default());
    catalog
}

/// All records by id, to find the owner of a target or subsystem.
type RecordsById<'a> = BTreeMap<Uuid, &'a VolumeRecord>;

fn records_by_id<'a>(volumes: &[(&'a VolumeRecord, LocalState)]) -> RecordsById<'a> {
    volumes.iter().map(|(record, _)| (record.id, *record)).collect()
}

/// The volumes of one target or subsystem.
struct ExportGroup<'a> {
    /// The volume that owns it.
    owner: Uuid,
    /// The core of those that are open, if any is.
    core: Option<usize>,
    /// The volumes by LUN, with the reason for those unavailable now.
    luns: BTreeMap<u16, (&'a VolumeRecord, Option<Unavailability>)>,
}

/// The targets or subsystems of the exported volumes (RFD 0017, 3).
fn export_groups<'a>(
    volumes: &[(&'a VolumeRecord, LocalState)],
    is_exported: impl Fn(&VolumeRecord) -> bool,
) -> Vec<ExportGroup<'a>> {
    let mut units: Vec<_> = volumes.iter().filter(|(record, _)| is_exported(record)).collect();
    // Sessions run on the owner's core, or on that of the first open unit.
    units.sort_by_key(|(record, _)| (record.target_owner() != record.id, record.mapping.lun));
    let mut groups = BTreeMap::<Uuid, ExportGroup<'a>>::new();
    for &&(record, state) in &units {
        let (owner, lun) = (record.target_owner(), record.mapping.lun);
        let new = || ExportGroup { owner, core: None, luns: BTreeMap::new() };
        let group = groups.entry(owner).or_insert_with(new);
        if group.luns.contains_key(&lun) {
            // Records are not read atomically: one of the two is out of date and will be read
            // again.
            tracing::debug!(volume = %record.name, lun, "LUN is temporarily in use by another volume");
            continue;
        }
        let reason = match state {
            LocalState::NotLocal => None,
            LocalState::Open { core } if *group.core.get_or_insert(core) == core => None,
            // It is about to move to that core.
            LocalState::Open { .. } => Some(Unavailability::BecomingReady),
            LocalState::Unavailable(reason) => Some(reason),
        };
        group.luns.insert(lun, (record, reason));
    }
    groups.into_values().collect()
}

/// The iSCSI targets of these volumes.
fn iscsi_targets(
    volumes: &[(&VolumeRecord, LocalState)],
    owners: &RecordsById<'_>,
    ring: &Keyring,
) -> BTreeMap<String, IscsiTarget> {
    let mut targets = BTreeMap::new();
    for group in export_groups(volumes, |record| record.protocols.iscsi) {
        let Some((first, _)) = group.luns.values().next() else { continue };
        let name = first.target_name().to_owned();
        let core = group.core.unwrap_or_default();
        let mut target = IscsiTarget { core, ..IscsiTarget::default() };
        for (lun, (record, reason)) in group.luns {
            target.luns.insert(lun, volume_id(record.id));
            target.unavailable.extend(reason.map(|reason| (lun, reason)));
            grant_initiators(&mut target, record, owners.get(&group.owner).copied(), ring);
        }
        targets.insert(name, target);
    }
    targets
}

/// The NVMe subsystems of these volumes. Each needs its owner's record, and is left out if that
/// cannot be read.
fn nvme_subsystems(
    volumes: &[(&VolumeRecord, LocalState)],
    owners: &RecordsById<'_>,
    ring: &Keyring,
) -> BTreeMap<String, Subsystem> {
    let mut subsystems = BTreeMap::new();
    for group in export_groups(volumes, |record| record.protocols.nvme) {
        let Some(owner) = owners.get(&group.owner) else { continue };
        let mut serial = owner.id.simple().to_string();
        serial.truncate(SERIAL_LEN);
        let core = group.core.unwrap_or_default();
        let tls = host_tls(owner, ring);
        let mut subsystem = Subsystem { core, serial, tls, ..Subsystem::default() };
        for (record, reason) in group.luns.into_values() {
            let nsid = record.nsid();
            subsystem.namespaces.insert(nsid, volume_id(record.id));
            subsystem.unavailable.extend(reason.map(|_| (nsid, placeholder_namespace(record))));
            grant_hosts(&mut subsystem, record, owner, ring);
        }
        subsystems.insert(owner.nvme_subsystem.clone(), subsystem);
    }
    subsystems
}

/// Lets the initiators of a volume log in to its target, authenticated as the owner's record
/// requires, and hides the volume's LUN from all others.
fn grant_initiators(
    target: &mut IscsiTarget,
    record: &VolumeRecord,
    owner: Option<&VolumeRecord>,
    ring: &Keyring,
) {
    let admission = |initiator: Option<&str>| match owner {
        Some(owner) => {
            chap_requirement(owner, initiator, ring).map_or(AccessRule::NameOnly, AccessRule::Proof)
        }
        // The requirement is unknown: no proof can succeed.
        None => {
            AccessRule::Proof(ChapCredentials { user: String::new(), secret: vec![], mutual: None })
        }
    };
    let mut named = BTreeSet::new();
    for initiator in &record.allow {
        match initiator {
            Initiator::Any => {
                target.access.any = Some(admission(None));
                for name in owner.into_iter().flat_map(|owner| owner.chap_by_initiator.keys()) {
                    target.access.named.insert(name.clone(), admission(Some(name)));
                }
            }
            Initiator::Iscsi(name) => {
                target.access.named.insert(name.clone(), admission(Some(name)));
                named.insert(name.clone());
            }
            Initiator::Nvme(_) => {}
        }
    }
    if !record.allow.contains(&Initiator::Any) {
        target.masks.insert(record.mapping.lun, named);
    }
}

/// Adds the nodes of a cluster to a catalog, of which this is `me`: their portals, and the access
/// state of each volume there. The latter comes from the volume's mirror configuration, if it has
/// been read; each node knows its own state better.
pub fn add_cluster_paths<'a>(
    catalog: &mut Catalog,
    me: NodeId,
    nodes: &Nodes,
    open: impl Iterator<Item = (&'a VolumeRecord, Option<&'a MirrorConfig>)>,
) {
    let index = |node: NodeId| NodeIndex::new(nodes.get(&node)?.record.index.get());
    catalog.node = index(me).unwrap_or_default();
    let others = nodes.iter().filter(|(node, _)| **node != me);
    let others = others.filter_map(|(node, view)| Some((index(*node)?, advertised_portals(view))));
    catalog.peer_portals = others.collect();
    for (record, mirror) in open {
        let serving = record.placements.iter().filter_map(|placement| {
            let has_image = placement.stage.has_image();
            let node = index(placement.node).filter(|_| has_image)?;
            let in_sync = mirror.is_some_and(|m| m.member(placement.node).is_some());
            let access =
                if in_sync { block::Access::Optimized } else { block::Access::Unavailable };
            Some(ServingNode { node, access })
        });
        catalog.shared.insert(volume_id(record.id), serving.collect());
    }
}

/// The portals of another node that initiators can connect to. A node that listens at a wildcard
/// address is reached at the addresses that other nodes use for it.
pub fn reachable_portals(node: &NodeRecord) -> Portals {
    let reachable = |all: &[SocketAddr]| {
        let mut reachable = Vec::new();
        for at in all {
            let everywhere = at.ip().is_unspecified();
            let ips = node.data_addresses.iter().map(SocketAddr::ip).filter(|_| everywhere);
            // An IPv6 wildcard accepts IPv4 too.
            let ips = ips.filter(|ip| at.is_ipv6() || ip.is_ipv4());
            let own = (!everywhere).then_some(at.ip());
            for at in ips.chain(own).map(|ip| SocketAddr::new(ip, at.port())) {
                if !reachable.contains(&at) {
                    reachable.push(at);
                }
            }
        }
        reachable
    };
    let NodePortals { iscsi, nvme, discovery } = &node.portals;
    Portals { iscsi: reachable(iscsi), nvme: reachable(nvme), discovery: reachable(discovery) }
}

/// The portals advertised to initiators. Without discovery portals of dead nodes, which would delay
/// an initiator that tries them.
fn advertised_portals(node: &NodeView) -> Portals {
    let mut portals = reachable_portals(&node.record);
    if !node.is_alive {
        portals.discovery.clear();
    }
    portals
}

/// What this initiator, or any that is not named, must prove by CHAP. A secret that cannot be read
/// yields a proof that cannot succeed.
fn chap_requirement(
    record: &VolumeRecord,
    initiator: Option<&str>,
    ring: &Keyring,
) -> Option<ChapCredentials> {
    let (context, stored) = record.chap_for(initiator)?;
    Some(match stored.open(context, ring) {
        Ok(chap) => ChapCredentials {
            user: chap.user.as_str().to_owned(),
            secret: chap.secret.expose().as_bytes().to_vec(),
            mutual: (chap.mutual.as_ref())
                .map(|m| (m.user.as_str().to_owned(), m.secret.expose().as_bytes().to_vec())),
        },
        Err(_) => ChapCredentials {
            user: stored.user().as_str().to_owned(),
            secret: vec![],
            mutual: None,
        },
    })
}

fn placeholder_namespace(record: &VolumeRecord) -> UnavailableNamespace {
    let block_size = record.block_size.bytes();
    let blocks = record.size_bytes / u64::from(block_size);
    UnavailableNamespace { block_size, blocks, thin: record.thin }
}

/// How the owner of a subsystem admits a host. If the secret cannot be read, the host cannot log
/// in.
fn host_admission(owner: &VolumeRecord, host: &str, ring: &Keyring) -> AccessRule<HostSecrets> {
    let Some((context, stored)) = owner.dhchap_for(host) else { return AccessRule::NameOnly };
    AccessRule::Proof(stored.open_for_target(context, ring).unwrap_or(HostSecrets::Unknown))
}

/// The hosts that may or must use TLS with a subsystem. A host whose key cannot be read cannot use
/// TLS, and cannot connect at all if it must.
fn host_tls(owner: &VolumeRecord, ring: &Keyring) -> BTreeMap<String, HostTls> {
    let host = |(context, stored): (HostSecretContext<'_>, &StoredTls)| {
        let key = stored.open_for_target(context, ring).map_or(HostKey::Unknown, HostKey::Known);
        (context.host.to_owned(), HostTls { key, required: stored.is_required() })
    };
    owner.tls_keys().map(host).collect()
}

/// Lets the hosts of a volume connect to its subsystem, authenticated as the owner's record
/// requires, and hides the namespace from all others. If any host must authenticate, over either
/// protocol, or use TLS, no unnamed host is admitted: a host could avoid the requirement under
/// another name, or without CHAP (RFD 0008, 6; RFD 0020, 2). Requests for both are refused, but two
/// records may have changed at once.
fn grant_hosts(
    subsystem: &mut Subsystem,
    record: &VolumeRecord,
    owner: &VolumeRecord,
    ring: &Keyring,
) {
    let guarded = record.required_auth().or(owner.required_auth()).is_some();
    let mut named = BTreeSet::new();
    for initiator in &record.allow {
        match initiator {
            Initiator::Any if guarded => {}
            Initiator::Any => subsystem.access.any = Some(AccessRule::NameOnly),
            Initiator::Nvme(name) => {
                let admission = host_admission(owner, name, ring);
                subsystem.access.named.insert(name.clone(), admission);
                named.insert(name.clone());
            }
            Initiator::Iscsi(_) => {}
        }
    }
    if guarded || !record.allow.contains(&Initiator::Any) {
        subsystem.masks.insert(record.nsid(), named);
    }
}

#[cfg(test)]
mod tests {
    use ::cluster::identity::{self, Role};
    use block::Epoch;
    use mirror::config::{ConfigReplica, CopyHistory, InSyncMember};
    use peer::Incarnation;
    use target::catalog::AccessList;

    use super::*;
    use crate::record::PlacementStage;
    use crate::record::lun_mapping::assign_lun;
    use crate::record::{ChapContext, ReplicaPlacement, StoredChap, StoredDhchap};
    use crate::samples::{HOST, KEYS, SECRETS, chap, dhchap, dhchap_of, place, record, ring, tls};

    /// The proof that an admitted initiator must give.
    fn asked<'a, P>(access: &'a AccessList<P>, who: &str) -> Option<&'a P> {
        match access.rule_for(who).expect("it is let in") {
            AccessRule::Proof(proof) => Some(proof),
            AccessRule::NameOnly => None,
        }
    }

    const NODES: [NodeId; 4] = [NodeId(1), NodeId(4), NodeId(5), NodeId(9)];

    /// Four nodes, whose indices are not their numbers.
    fn nodes() -> Nodes {
        let node = |(n, node): (u8, NodeId)| {
            let record = NodeRecord {
                data_dir: "/v".into(),
                node,
                index: identity::NodeIndex::new(n).unwrap(),
                name: format!("node{node}"),
                role: Role::Data,
                data_addresses: [1, 2].map(|net| ([10, 0, net, n], 7480).into()).into(),
                heartbeat_addresses: vec![([10, 0, 3, n], 7480).into()],
                portals: NodePortals {
                    iscsi: vec![([192, 0, 2, n], 3260).into()],
                    nvme: vec![([0, 0, 0, 0], 4420).into()],
                    discovery: vec![([0, 0, 0, 0], 8009).into()],
                },
                join_address: None,
                failure_domain: String::new(),
                version: String::new(),
                is_drained: false,
            };
            (node, NodeView { record, is_alive: true })
        };
        (0..).zip(NODES).map(node).collect()
    }

    #[test]
    fn initiators_are_told_of_all_nodes_that_have_a_volume() {
        let [one, two, three, _] = NODES;
        let replica = |node| ConfigReplica { node, image: Uuid::nil(), is_new: false };
        let mirror = MirrorConfig {
            epoch: Epoch(3),
            config_id: 1,
            replicas: [one, two].map(replica).into(),
            in_sync: vec![InSyncMember { node: one, incarnation: Incarnation(1) }],
            primary: one,
            cold_start_epoch: Epoch::default(),
            history: CopyHistory::default(),
        };
        let creating = ReplicaPlacement {
            stage: PlacementStage::Creating { force: false },
            ..place(three, "a")
        };
        let places = vec![place(one, "a"), place(two, "a"), creating];
        let known = VolumeRecord { placements: places.clone(), ..record("a") };
        let unknown = VolumeRecord { placements: places, ..record("b") };
        let mut catalog = Catalog::default();
        let open = [(&known, Some(&mirror)), (&unknown, None)];
        add_cluster_paths(&mut catalog, two, &nodes(), open.into_iter());

        let index = |n| NodeIndex::new(n).unwrap();
        let serving = |n, access| ServingNode { node: index(n), access };
        let (good, none) = (block::Access::Optimized, block::Access::Unavailable);
        assert_eq!(catalog.node, index(1));
        let shared = |record: &VolumeRecord| &catalog.shared[&volume_id(record.id)];
        assert_eq!(*shared(&known), [serving(0, good), serving(1, none)]);
        assert_eq!(*shared(&unknown), [serving(0, none), serving(1, none)]);
        let others: Vec<_> = catalog.peer_portals.keys().copied().collect();
        assert_eq!(others, [index(0), index(2), index(3)]);
        let portals = &catalog.peer_portals[&index(2)];
        assert_eq!(portals.iscsi, [([192, 0, 2, 2], 3260).into()]);
        let reached = |port| [1, 2].map(|net| ([10, 0, net, 2], port).into());
        assert_eq!(portals.nvme, reached(4420), "a wildcard cannot be dialled");
        assert_eq!(portals.discovery, reached(8009));
        let mut nodes = nodes();
        nodes.get_mut(&three).unwrap().is_alive = false;
        add_cluster_paths(&mut catalog, two, &nodes, std::iter::empty());
        let portals = &catalog.peer_portals[&index(2)];
        assert!(portals.discovery.is_empty(), "no host is referred to a dead node");
        assert_eq!(portals.nvme, reached(4420), "which is a path all the same");
    }

    #[test]
    fn a_volume_is_told_to_those_it_is_exported_to() {
        let iqn = "iqn.1993-08.org.debian:01:a";
        let nqn = "nqn.2014-08.org.nvmexpress:h";
        let named = VolumeRecord {
            allow: [iqn, nqn].map(|s| s.parse().unwrap()).into(),
            chap: Some(StoredChap::seal(&chap(), record("a").id, &ring(1)).unwrap()),
            ..record("a")
        };
        let open = VolumeRecord {
            allow: ["any".parse().unwrap()].into(),
            protocols: api::Protocols { iscsi: false, ..api::Protocols::default() },
            ..record("b")
        };
        let closed = record("c");
        let all = [(&named, 0), (&open, 1), (&closed, 0)];
        let all = all.map(|(record, core)| (record, LocalState::Open { core }));
        let catalog = build_catalog(all.into_iter(), &ring(1), &[], &[], 3);

        let target = &catalog.targets[&named.iscsi_target];
        let chap = asked(&target.access, iqn).unwrap();
        assert_eq!((chap.user.as_str(), &chap.secret[..]), ("u", &b"0123456789ab"[..]));
        assert_eq!(chap.mutual, Some(("m".into(), b"ba9876543210".to_vec())));
        assert!(target.access.rule_for(nqn).is_none());
        assert_eq!(target.luns[&0], volume_id(named.id));
        let subsystem = &catalog.subsystems[&named.nvme_subsystem];
        assert_eq!(subsystem.access.rule_for(nqn), Some(&AccessRule::NameOnly));
        assert!(subsystem.access.rule_for(iqn).is_none());
        assert_eq!(subsystem.serial.len(), 20);

        assert!(!catalog.targets.contains_key(&open.iscsi_target));
        assert_eq!(catalog.subsystems[&open.nvme_subsystem].core, 1);
        assert!(catalog.subsystems[&open.nvme_subsystem].access.rule_for("x").is_some());
        assert!(catalog.targets[&closed.iscsi_target].access.rule_for(iqn).is_none());
        assert_eq!(catalog.generation, 3);
    }

    /// RFD 0017, 3: the volumes decide who may log in, the owner decides by which proof.
    #[test]
    fn volumes_of_one_target_share_its_door_and_not_their_initiators() {
        let (one, two) = ("iqn.2026-01.com.example:one", "iqn.2026-01.com.example:two");
        let allow = |names: &[&str]| names.iter().map(|n| n.parse().unwrap()).collect();
        let mut records: BTreeMap<_, _> =
            ["a", "b", "c"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b, c] = ["a", "b", "c"].map(|name| record(name).id);
        assign_lun(&mut records, b, a, Some(5)).unwrap();
        assign_lun(&mut records, c, a, Some(6)).unwrap();
        let sealed = StoredChap::seal(&chap(), a, &ring(1)).unwrap();
        records.get_mut(&a).unwrap().chap = Some(sealed);
        records.get_mut(&a).unwrap().allow = allow(&[one]);
        records.get_mut(&b).unwrap().allow = allow(&[one, two]);
        let made = |a_here, b_here, c_here| {
            let here = [(&records[&a], a_here), (&records[&b], b_here), (&records[&c], c_here)];
            build_catalog(here.into_iter(), &ring(1), &[], &[], 1).targets
        };
        let open = |core| LocalState::Open { core };
        let targets = made(open(1), open(1), open(0));
        assert_eq!(targets.len(), 1);
        let target = &targets[&records[&a].iscsi_target];
        let luns: Vec<_> = target.luns.iter().map(|(lun, id)| (*lun, *id)).collect();
        assert_eq!(luns, [(0, volume_id(a)), (5, volume_id(b)), (6, volume_id(c))]);
        assert_eq!(
            (target.core, &target.unavailable),
            (1, &[(6, Unavailability::BecomingReady)].into()),
            "it moves"
        );
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        assert_eq!(
            target.masks,
            [(0, names(&[one])), (5, names(&[one, two])), (6, names(&[]))].into()
        );
        for name in [one, two] {
            assert_eq!(asked(&target.access, name).unwrap().user, "u");
        }
        assert!(target.access.rule_for("iqn.2026-01.com.example:three").is_none());
        // The owner has no replica here: its requirements apply all the same.
        let targets = made(
            LocalState::NotLocal,
            open(0),
            LocalState::Unavailable(Unavailability::Unavailable),
        );
        let target = &targets[&records[&a].iscsi_target];
        assert_eq!(target.luns.keys().copied().collect::<Vec<_>>(), [5, 6]);
        assert_eq!((target.core, target.unavailable.len()), (0, 1));
        assert_eq!(asked(&target.access, two).unwrap().user, "u");
        // The owner's record cannot be read: no proof succeeds.
        let alone =
            build_catalog([(&records[&b], open(0))].into_iter(), &ring(1), &[], &[], 1).targets;
        let target = &alone[&records[&a].iscsi_target];
        assert!(asked(&target.access, two).unwrap().secret.is_empty());
    }

    /// RFD 0019, 4: a subsystem is shared like a target.
    #[test]
    fn volumes_of_one_target_share_its_subsystem() {
        let (one, two) = ("nqn.2026-01.com.example:one", "nqn.2026-01.com.example:two");
        let mut records: BTreeMap<_, _> =
            ["a", "b"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        assign_lun(&mut records, b, a, Some(5)).unwrap();
        records.get_mut(&a).unwrap().allow = [one.parse().unwrap()].into();
        records.get_mut(&b).unwrap().allow = [two.parse().unwrap()].into();
        let made = |here: &[(Uuid, LocalState)]| {
            let all = here.iter().map(|(id, here)| (&records[id], *here));
            build_catalog(all, &ring(1), &[], &[], 1).subsystems
        };
        let open = |core| LocalState::Open { core };
        let subsystems = made(&[(a, open(1)), (b, open(0))]);
        assert_eq!(subsystems.len(), 1);
        let subsystem = &subsystems[&records[&a].nvme_subsystem];
        assert_eq!(subsystem.namespaces, [(1, volume_id(a)), (6, volume_id(b))].into());
        let unavailable: Vec<_> = subsystem.unavailable.keys().copied().collect();
        assert_eq!((subsystem.core, unavailable), (1, vec![6]), "it moves");
        let names = |name: &str| [name.to_owned()].into();
        assert_eq!(subsystem.masks, [(1, names(one)), (6, names(two))].into());
        assert!([one, two].iter().all(|nqn| subsystem.access.rule_for(nqn).is_some()));
        assert_eq!(subsystem.serial, a.simple().to_string()[..20], "the owner's");
        // The owner has no replica here, or its record cannot be read.
        let subsystems = made(&[(a, LocalState::NotLocal), (b, open(0))]);
        let subsystem = &subsystems[&records[&a].nvme_subsystem];
        assert_eq!((subsystem.core, subsystem.namespaces.len()), (0, 1));
        assert!(subsystem.access.rule_for(one).is_none());
        assert!(made(&[(b, open(0))]).is_empty());
        // Two changes at once: the owner requires CHAP, and the volume at its LUN admits any
        // initiator.
        let sealed = StoredChap::seal(&chap(), a, &ring(1)).unwrap();
        records.get_mut(&a).unwrap().chap = Some(sealed);
        records.get_mut(&b).unwrap().allow = ["any", two].map(|who| who.parse().unwrap()).into();
        let here = [(&records[&a], open(0)), (&records[&b], open(0))];
        let subsystems = build_catalog(here.into_iter(), &ring(1), &[], &[], 1).subsystems;
        let subsystem = &subsystems[&records[&a].nvme_subsystem];
        assert!(subsystem.access.any.is_none());
        assert_eq!(subsystem.masks[&6], names(two));
    }

    /// Makes `record` require these secrets of its hosts.
    fn ask_hosts(record: &mut VolumeRecord, all: &[(&str, api::Dhchap)]) {
        for (host, secrets) in all {
            let context = HostSecretContext { volume: record.id, host };
            let sealed = StoredDhchap::seal(secrets, context, &ring(1)).unwrap();
            record.dhchap_by_host.insert((*host).to_owned(), sealed);
        }
    }

    /// RFD 0020, 2: a host with a secret must prove it; the others are admitted by name.
    #[test]
    fn a_host_proves_its_own_secret() {
        let [one_way, by_name, bad] =
            ["one-way", "by-name", "bad"].map(|h| format!("nqn.2026-01.com.example:{h}"));
        let mut record = record("a");
        record.allow = [HOST, &one_way, &by_name, &bad].map(|h| h.parse().unwrap()).into();
        let secrets = [
            (HOST, dhchap()),
            (&*one_way, dhchap_of(SECRETS[1], None)),
            (&*bad, dhchap_of("x", None)),
        ];
        ask_hosts(&mut record, &secrets);
        ask_hosts(&mut record, &[("nqn.2026-01.com.example:not-allowed", dhchap())]);
        let published =
            |here, with: &Keyring| build_catalog([(&record, here)].into_iter(), with, &[], &[], 1);
        let here = published(LocalState::Open { core: 0 }, &ring(1)).subsystems;
        let access = &here[&record.nvme_subsystem].access;
        let secret = |text| nvme::auth::Secret::parse(text).unwrap();
        let [first, second] = SECRETS.map(secret);
        let known = |host, controller| HostSecrets::Known { host, controller };
        assert_eq!(asked(access, HOST), Some(&known(first, Some(second.clone()))));
        assert_eq!(asked(access, &one_way), Some(&known(second, None)));
        assert_eq!(asked(access, &by_name), None);
        assert_eq!(asked(access, &bad), Some(&HostSecrets::Unknown), "what is no secret");
        assert!(access.rule_for("nqn.2026-01.com.example:not-allowed").is_none());
        // The secret cannot be read: a host that has one is not admitted by name instead.
        for (here, with) in
            [(LocalState::Open { core: 0 }, ring(2)), (LocalState::NotLocal, ring(1))]
        {
            let catalog = published(here, &with);
            let all = catalog.subsystems.values().chain(catalog.remote.subsystems.values());
            let [subsystem] = all.collect::<Vec<_>>()[..] else { panic!("{catalog:?}") };
            assert_eq!(asked(&subsystem.access, HOST), Some(&HostSecrets::Unknown));
            assert_eq!(asked(&subsystem.access, &by_name), None);
        }
    }

    /// RFD 0020, 2, and 4, attack 10: the secrets of the subsystem are its owner's, and no host is
    /// admitted without them.
    #[test]
    fn hosts_of_a_guest_prove_the_secrets_of_the_owner() {
        let other = "nqn.2026-01.com.example:other";
        let mut records: BTreeMap<_, _> =
            ["a", "b"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        assign_lun(&mut records, b, a, Some(5)).unwrap();
        records.get_mut(&b).unwrap().allow =
            ["any", HOST, other].map(|h| h.parse().unwrap()).into();
        let made = |records: &BTreeMap<Uuid, VolumeRecord>| {
            let here = [
                (&records[&a], LocalState::Open { core: 0 }),
                (&records[&b], LocalState::Open { core: 0 }),
            ];
            let all = build_catalog(here.into_iter(), &ring(1), &[], &[], 1).subsystems;
            all[&records[&a].nvme_subsystem].clone()
        };
        assert!(made(&records).access.any.is_some());
        let mut guarded = records.clone();
        ask_hosts(guarded.get_mut(&a).unwrap(), &[(HOST, dhchap())]);
        let subsystem = made(&guarded);
        assert!(subsystem.access.any.is_none());
        assert_eq!(subsystem.masks[&6], [HOST, other].map(str::to_owned).into());
        assert!(matches!(asked(&subsystem.access, HOST), Some(HostSecrets::Known { .. })));
        assert_eq!(asked(&subsystem.access, other), None);
        // Secrets set on it at the moment when it joins have no effect, and no unnamed host is
        // admitted.
        ask_hosts(records.get_mut(&b).unwrap(), &[(HOST, dhchap())]);
        let subsystem = made(&records);
        assert!(subsystem.access.any.is_none());
        assert_eq!(asked(&subsystem.access, HOST), None);
    }

    /// Gives hosts of `record` these TLS keys.
    fn by_tls(record: &mut VolumeRecord, all: &[(&str, &str, bool)]) {
        for (host, key, required) in all {
            let context = HostSecretContext { volume: record.id, host };
            let sealed = StoredTls::seal(&tls(key, *required), context, &ring(1)).unwrap();
            record.tls_by_host.insert((*host).to_owned(), sealed);
        }
    }

    /// The TLS settings of a subsystem: host, key, and whether TLS is required.
    fn told(subsystem: &Subsystem) -> Vec<(&str, HostKey, bool)> {
        let tls = subsystem.tls.iter();
        tls.map(|(host, tls)| (host.as_str(), tls.key.clone(), tls.required)).collect()
    }

    /// RFD 0022, 3: on every node, and whether or not the key can be read.
    #[test]
    fn hosts_come_by_tls_as_the_record_says() {
        let [may, bad] = ["may", "bad"].map(|h| format!("nqn.2026-01.com.example:{h}"));
        let mut record = record("a");
        record.allow = [HOST, &may].map(|h| h.parse().unwrap()).into();
        by_tls(&mut record, &[(HOST, KEYS[0], true), (&may, KEYS[1], false)]);
        by_tls(&mut record, &[(&bad, SECRETS[0], true)]);
        let published = |here, with: &Keyring| {
            let all = build_catalog([(&record, here)].into_iter(), with, &[], &[], 1);
            let (here, remote) = (all.subsystems, all.remote.subsystems);
            assert_eq!(here.len() + remote.len(), 1);
            here.into_values().chain(remote.into_values()).next().unwrap()
        };
        let open = LocalState::Open { core: 0 };
        let known = |text| HostKey::Known(nvme::tls::TlsKey::parse(text).unwrap());
        let here = published(open, &ring(1));
        let unknown = HostKey::Unknown;
        assert_eq!(
            told(&here),
            [
                (HOST, known(KEYS[0]), true),
                (&*bad, unknown.clone(), true),
                (&*may, known(KEYS[1]), false)
            ]
        );
        assert!(here.access.rule_for(&bad).is_none(), "that is not for keys to say");
        assert_eq!(asked(&here.access, HOST), None);
        // TLS stays required if the key cannot be read, and discovery is the same on every node.
        for (here, with) in [(open, ring(2)), (LocalState::NotLocal, ring(1))] {
            let subsystem = published(here, &with);
            assert_eq!(
                told(&subsystem),
                [
                    (HOST, unknown.clone(), true),
                    (&*bad, unknown.clone(), true),
                    (&*may, unknown.clone(), false)
                ]
            );
        }
    }

    /// RFD 0022, 3: the keys of the subsystem are its owner's, and a host that must use TLS cannot
    /// avoid it.
    #[test]
    fn hosts_of_a_guest_come_by_the_keys_of_the_owner() {
        let other = "nqn.2026-01.com.example:other";
        let mut records: BTreeMap<_, _> =
            ["a", "b"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        assign_lun(&mut records, b, a, Some(5)).unwrap();
        records.get_mut(&b).unwrap().allow =
            ["any", HOST, other].map(|h| h.parse().unwrap()).into();
        let made = |records: &BTreeMap<Uuid, VolumeRecord>, a_here| {
            let here = [(&records[&a], a_here), (&records[&b], LocalState::Open { core: 0 })];
            let all = build_catalog(here.into_iter(), &ring(1), &[], &[], 1).subsystems;
            all[&records[&a].nvme_subsystem].clone()
        };
        let open = LocalState::Open { core: 0 };
        let mut guarded = records.clone();
        by_tls(guarded.get_mut(&a).unwrap(), &[(HOST, KEYS[0], false)]);
        let subsystem = made(&guarded, open);
        assert!(subsystem.access.any.is_some(), "no host has to");
        assert_eq!(subsystem.tls.keys().collect::<Vec<_>>(), [HOST]);
        by_tls(guarded.get_mut(&a).unwrap(), &[(HOST, KEYS[0], true)]);
        // Also where the owner has no replica.
        for a_here in [open, LocalState::NotLocal] {
            let subsystem = made(&guarded, a_here);
            assert!(subsystem.access.any.is_none());
            assert_eq!(subsystem.masks[&6], [HOST, other].map(str::to_owned).into());
            let known = HostKey::Known(nvme::tls::TlsKey::parse(KEYS[0]).unwrap());
            assert_eq!(told(&subsystem), [(HOST, known, true)]);
        }
        // Keys set on it at the moment when it joins have no effect, and no unnamed host is
        // admitted.
        by_tls(records.get_mut(&b).unwrap(), &[(HOST, KEYS[0], true)]);
        let subsystem = made(&records, open);
        assert!(subsystem.access.any.is_none() && subsystem.tls.is_empty());
    }

    /// RFD 0016, 6: an initiator's own secret takes precedence, also if any initiator is admitted.
    #[test]
    fn an_initiator_proves_its_own_secret() {
        let (own, other) = ("iqn.2026-01.com.example:own", "iqn.2026-01.com.example:other");
        let second = r#"{"user":"second","secret":"another-secret"}"#;
        let second: api::Chap = serde_json::from_str(second).unwrap();
        for allow in [vec![own, other], vec!["any"]] {
            let mut record = record("a");
            record.allow = allow.iter().map(|s| s.parse().unwrap()).collect();
            let context = ChapContext { volume: record.id, initiator: Some(own) };
            let sealed = StoredChap::seal(&second, context, &ring(1)).unwrap();
            record.chap_by_initiator.insert(own.to_owned(), sealed);
            let user = |record: &VolumeRecord, who: &str| {
                let here = LocalState::Open { core: 0 };
                let all = build_catalog([(record, here)].into_iter(), &ring(1), &[], &[], 1);
                let access = &all.targets[&record.iscsi_target].access;
                asked(access, who).map(|chap| chap.user.clone())
            };
            assert_eq!(user(&record, own).as_deref(), Some("second"));
            assert_eq!(user(&record, other), None, "it is not asked for a secret");
            record.chap = Some(StoredChap::seal(&chap(), record.id, &ring(1)).unwrap());
            assert_eq!(user(&record, own).as_deref(), Some("second"));
            assert_eq!(user(&record, other).as_deref(), Some("u"), "what all have to prove");
        }
    }

    /// RFD 0017, 2: only deleted volumes are left out.
    #[test]
    fn what_is_away_keeps_its_place() {
        let (unavailable, elsewhere) = (record("a"), record("b"));
        let all = [
            (&unavailable, LocalState::Unavailable(Unavailability::BecomingReady)),
            (&elsewhere, LocalState::NotLocal),
        ];
        let catalog = build_catalog(all.into_iter(), &Keyring::default(), &[], &[], 1);
        let target = &catalog.targets[&unavailable.iscsi_target];
        assert_eq!(target.luns[&0], volume_id(unavailable.id));
        assert_eq!(target.unavailable, [(0, Unavailability::BecomingReady)].into());
        let subsystem = &catalog.subsystems[&unavailable.nvme_subsystem];
        assert_eq!(subsystem.namespaces, [(1, volume_id(unavailable.id))].into());
        let absent = UnavailableNamespace { block_size: 512, blocks: (1 << 30) / 512, thin: true };
        assert_eq!(subsystem.unavailable, [(1, absent)].into());
        assert_eq!((catalog.targets.len(), catalog.subsystems.len()), (1, 1));
        // Discovery shows it.
        let id = volume_id(elsewhere.id);
        assert_eq!(catalog.remote.targets[&elsewhere.iscsi_target].luns, [(0, id)].into());
        let subsystem = &catalog.remote.subsystems[&elsewhere.nvme_subsystem];
        assert_eq!(subsystem.namespaces, [(1, id)].into());
    }

    #[test]
    fn nobody_proves_what_cannot_be_read() {
        let locked = VolumeRecord {
            allow: ["any".parse().unwrap()].into(),
            chap: Some(StoredChap::seal(&chap(), record("a").id, &ring(1)).unwrap()),
            ..record("a")
        };
        let catalog = build_catalog(
            [(&locked, LocalState::Open { core: 0 })].into_iter(),
            &ring(2),
            &[],
            &[],
            1,
        );
        let access = &catalog.targets[&locked.iscsi_target].access;
        let chap = asked(access, "iqn.x").expect("it still asks for a proof");
        assert_eq!((chap.user.as_str(), chap.secret.len()), ("u", 0));
    }
}
