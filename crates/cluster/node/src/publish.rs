//! What initiators are told is there: the catalog, made from records.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use ::cluster::nodes::{NodePortals, NodeRecord, NodeView, Nodes};
use ::cluster::vault::Ring;
use api::Initiator;
use mirror::record::Record;
use peer::NodeId;
use target::catalog::{
    Absent, Admission, Away, Catalog, Chap, HostKey, HostSecrets, HostTls, IscsiTarget, NodeIndex,
    Portals, ServingNode, Subsystem, VolumeId,
};
use uuid::Uuid;

use crate::record::{OfHost, StoredTls, VolumeRecord};

/// Length of a serial number of an NVMe subsystem (NVMe Base 2.0, Identify Controller bytes 04 to
/// 23).
const SERIAL: usize = 20;

/// The identity of a volume, as front ends have it.
#[must_use]
pub fn volume_id(id: Uuid) -> VolumeId {
    VolumeId(*id.as_bytes())
}

/// Where a volume is, for this node's initiators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// Open, on this core.
    Open {
        /// Which.
        core: usize,
    },
    /// Its copy here is not open for now.
    Away(Away),
    /// No copy of it is kept here.
    Nowhere,
}

/// The catalog of these volumes. `ring` opens what initiators and hosts have to prove. A volume that is away keeps its place in
/// it: what the catalog does not have is gone for good, and initiators are told so.
pub fn catalog<'a>(
    volumes: impl Iterator<Item = (&'a VolumeRecord, Here)>,
    ring: &Ring,
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
    let owners = owners(&volumes);
    let (remote, here): (Vec<_>, Vec<_>) =
        volumes.into_iter().partition(|(_, here)| *here == Here::Nowhere);
    catalog.targets = targets(&here, &owners, ring);
    catalog.subsystems = subsystems(&here, &owners, ring);
    // Nobody proves anything there: no secret is opened for it. Who has to come by TLS is told all the same.
    catalog.remote.targets = targets(&remote, &owners, &Ring::default());
    catalog.remote.subsystems = subsystems(&remote, &owners, &Ring::default());
    catalog
}

/// Those whose targets and subsystems others may stand behind.
type Owners<'a> = BTreeMap<Uuid, &'a VolumeRecord>;

fn owners<'a>(volumes: &[(&'a VolumeRecord, Here)]) -> Owners<'a> {
    volumes.iter().map(|(record, _)| (record.id, *record)).collect()
}

/// The volumes behind one target, or one subsystem.
struct Door<'a> {
    /// The volume that it belongs to.
    owner: Uuid,
    /// Where the volumes are open, if any is.
    core: Option<usize>,
    /// By number; with why it is not served for now.
    units: BTreeMap<u16, (&'a VolumeRecord, Option<Away>)>,
}

/// The doors of the volumes that are exported (RFD 0017, 3).
fn doors<'a>(
    volumes: &[(&'a VolumeRecord, Here)],
    is_exported: impl Fn(&VolumeRecord) -> bool,
) -> Vec<Door<'a>> {
    let mut units: Vec<_> = volumes.iter().filter(|(record, _)| is_exported(record)).collect();
    // Sessions live on the core of the owner, or of the first unit that is open.
    units.sort_by_key(|(record, _)| (record.owner() != record.id, record.mapping.lun));
    let mut doors = BTreeMap::<Uuid, Door<'a>>::new();
    for &&(record, here) in &units {
        let (owner, lun) = (record.owner(), record.mapping.lun);
        let new = || Door { owner, core: None, units: BTreeMap::new() };
        let door = doors.entry(owner).or_insert_with(new);
        if door.units.contains_key(&lun) {
            // Records are read one after the other: one of the two is about to be read again.
            tracing::debug!(volume = %record.name, lun, "its number is taken, for the moment");
            continue;
        }
        let away = match here {
            Here::Nowhere => None,
            Here::Open { core } if *door.core.get_or_insert(core) == core => None,
            // It is about to move there.
            Here::Open { .. } => Some(Away::Returning),
            Here::Away(away) => Some(away),
        };
        door.units.insert(lun, (record, away));
    }
    doors.into_values().collect()
}

/// The iSCSI targets of these volumes.
fn targets(
    volumes: &[(&VolumeRecord, Here)],
    owners: &Owners<'_>,
    ring: &Ring,
) -> BTreeMap<String, IscsiTarget> {
    let mut targets = BTreeMap::new();
    for door in doors(volumes, |record| record.protocols.iscsi) {
        let Some((first, _)) = door.units.values().next() else { continue };
        let name = first.target().to_owned();
        let core = door.core.unwrap_or_default();
        let mut target = IscsiTarget { core, ..IscsiTarget::default() };
        for (lun, (record, away)) in door.units {
            target.luns.insert(lun, volume_id(record.id));
            target.away.extend(away.map(|away| (lun, away)));
            admit(&mut target, record, owners.get(&door.owner).copied(), ring);
        }
        targets.insert(name, target);
    }
    targets
}

/// The NVMe subsystems of these volumes. What the owner's record says of it is needed, so it is none where that cannot be read.
fn subsystems(
    volumes: &[(&VolumeRecord, Here)],
    owners: &Owners<'_>,
    ring: &Ring,
) -> BTreeMap<String, Subsystem> {
    let mut subsystems = BTreeMap::new();
    for door in doors(volumes, |record| record.protocols.nvme) {
        let Some(owner) = owners.get(&door.owner) else { continue };
        let mut serial = owner.id.simple().to_string();
        serial.truncate(SERIAL);
        let core = door.core.unwrap_or_default();
        let tls = tls(owner, ring);
        let mut subsystem = Subsystem { core, serial, tls, ..Subsystem::default() };
        for (record, away) in door.units.into_values() {
            let nsid = record.namespace();
            subsystem.namespaces.insert(nsid, volume_id(record.id));
            subsystem.away.extend(away.map(|_| (nsid, absent(record))));
            admit_hosts(&mut subsystem, record, owner, ring);
        }
        subsystems.insert(owner.nvme_subsystem.clone(), subsystem);
    }
    subsystems
}

/// Lets the initiators of a volume in to its target, by the proof that the owner asks for, and has nobody else see it.
fn admit(
    target: &mut IscsiTarget,
    record: &VolumeRecord,
    owner: Option<&VolumeRecord>,
    ring: &Ring,
) {
    let admission = |initiator: Option<&str>| match owner {
        Some(owner) => proof(owner, initiator, ring).map_or(Admission::ByName, Admission::Proof),
        // Nobody knows what has to be proved: nobody proves it.
        None => Admission::Proof(Chap { user: String::new(), secret: vec![], mutual: None }),
    };
    let mut named = BTreeSet::new();
    for initiator in &record.allow {
        match initiator {
            Initiator::Any => {
                target.access.any = Some(admission(None));
                for name in owner.into_iter().flat_map(|owner| owner.proofs.keys()) {
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

/// Adds to a catalog what initiators are told of the nodes of a cluster, of which this is `me`: where
/// they are reached, and how each of the volumes is to be used there. That stands in the volume's
/// mirror's record, if it has been read; of itself each node knows better.
pub fn share<'a>(
    catalog: &mut Catalog,
    me: NodeId,
    nodes: &Nodes,
    open: impl Iterator<Item = (&'a VolumeRecord, Option<&'a Record>)>,
) {
    let index = |node: NodeId| NodeIndex::new(nodes.get(&node)?.record.index.get());
    catalog.node = index(me).unwrap_or_default();
    let others = nodes.iter().filter(|(node, _)| **node != me);
    let others = others.filter_map(|(node, view)| Some((index(*node)?, reached(view))));
    catalog.others = others.collect();
    for (record, mirror) in open {
        let serving = record.places.iter().filter_map(|place| {
            let has_image = place.stage.has_image();
            let node = index(place.node).filter(|_| has_image)?;
            let in_sync = mirror.is_some_and(|m| m.member(place.node).is_some());
            let access =
                if in_sync { block::Access::Optimized } else { block::Access::Unavailable };
            Some(ServingNode { node, access })
        });
        catalog.shared.insert(volume_id(record.id), serving.collect());
    }
}

/// Where initiators can dial another node. One that listens everywhere is reached where the other nodes
/// reach it, if nowhere else.
pub(crate) fn portals(node: &NodeRecord) -> Portals {
    let dialled = |all: &[SocketAddr]| {
        let mut dialled = Vec::new();
        for at in all {
            let everywhere = at.ip().is_unspecified();
            let ips = node.data.iter().map(SocketAddr::ip).filter(|_| everywhere);
            // An IPv6 wildcard takes IPv4 as well.
            let ips = ips.filter(|ip| at.is_ipv6() || ip.is_ipv4());
            let own = (!everywhere).then_some(at.ip());
            for at in ips.chain(own).map(|ip| SocketAddr::new(ip, at.port())) {
                if !dialled.contains(&at) {
                    dialled.push(at);
                }
            }
        }
        dialled
    };
    let NodePortals { iscsi, nvme, discovery } = &node.portals;
    Portals { iscsi: dialled(iscsi), nvme: dialled(nvme), discovery: dialled(discovery) }
}

/// The same, as initiators are told: who waits for a node to answer that is down does not get to the next one.
fn reached(node: &NodeView) -> Portals {
    let mut portals = portals(&node.record);
    if !node.alive {
        portals.discovery.clear();
    }
    portals
}

/// What an initiator has to prove, or those that are not named. If that cannot be read, nobody proves it.
fn proof(record: &VolumeRecord, initiator: Option<&str>, ring: &Ring) -> Option<Chap> {
    let (of, held) = record.proof_of(initiator)?;
    Some(match held.open(of, ring) {
        Ok(chap) => Chap {
            user: chap.user.as_str().to_owned(),
            secret: chap.secret.expose().as_bytes().to_vec(),
            mutual: (chap.mutual.as_ref())
                .map(|m| (m.user.as_str().to_owned(), m.secret.expose().as_bytes().to_vec())),
        },
        Err(_) => Chap { user: held.user().as_str().to_owned(), secret: vec![], mutual: None },
    })
}

fn absent(record: &VolumeRecord) -> Absent {
    let block_size = record.block_size.bytes();
    let blocks = record.size_bytes / u64::from(block_size);
    Absent { block_size, blocks, thin: record.thin }
}

/// How the owner of a subsystem lets a host in. If what it has to prove cannot be read, it proves nothing.
fn admission(owner: &VolumeRecord, host: &str, ring: &Ring) -> Admission<HostSecrets> {
    let Some((of, held)) = owner.host_proof(host) else { return Admission::ByName };
    Admission::Proof(held.known(of, ring).unwrap_or(HostSecrets::Unknown))
}

/// Which hosts come to a subsystem by TLS, or may. If the key of one cannot be read, it does not come by TLS, and where it has
/// to not at all.
fn tls(owner: &VolumeRecord, ring: &Ring) -> BTreeMap<String, HostTls> {
    let host = |(of, held): (OfHost<'_>, &StoredTls)| {
        let key = held.known(of, ring).map_or(HostKey::Unknown, HostKey::Known);
        (of.host.to_owned(), HostTls { key, required: held.is_required() })
    };
    owner.all_tls().map(host).collect()
}

/// Lets the hosts of a volume in to its subsystem, by the proof that the owner asks for, and has nobody else see it. Where
/// somebody has to prove who he is, over whatever protocol, or to come by TLS, nobody comes in unnamed: he would do so by another
/// name, or without CHAP (RFD 0008, 6; RFD 0020, 2). It is refused to ask for both, by two records that may have changed at once.
fn admit_hosts(
    subsystem: &mut Subsystem,
    record: &VolumeRecord,
    owner: &VolumeRecord,
    ring: &Ring,
) {
    let guarded = record.guard().or(owner.guard()).is_some();
    let mut named = BTreeSet::new();
    for initiator in &record.allow {
        match initiator {
            Initiator::Any if guarded => {}
            Initiator::Any => subsystem.access.any = Some(Admission::ByName),
            Initiator::Nvme(name) => {
                let admission = admission(owner, name, ring);
                subsystem.access.named.insert(name.clone(), admission);
                named.insert(name.clone());
            }
            Initiator::Iscsi(_) => {}
        }
    }
    if guarded || !record.allow.contains(&Initiator::Any) {
        subsystem.masks.insert(record.namespace(), named);
    }
}

#[cfg(test)]
mod tests {
    use ::cluster::identity::{self, Role};
    use block::Epoch;
    use mirror::record::{History, Member, Replica};
    use peer::Incarnation;
    use target::catalog::Access;

    use super::*;
    use crate::record::PlaceStage;
    use crate::record::mapping::remap;
    use crate::record::tests::{
        HOST, KEYS, SECRETS, chap, dhchap, dhchap_of, place, record, ring, tls,
    };
    use crate::record::{Of, Place, StoredChap, StoredDhchap};

    /// What somebody who is let in has to prove.
    fn asked<'a, P>(access: &'a Access<P>, who: &str) -> Option<&'a P> {
        match access.admission(who).expect("it is let in") {
            Admission::Proof(proof) => Some(proof),
            Admission::ByName => None,
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
                data: [1, 2].map(|net| ([10, 0, net, n], 7480).into()).into(),
                heartbeat: vec![([10, 0, 3, n], 7480).into()],
                portals: NodePortals {
                    iscsi: vec![([192, 0, 2, n], 3260).into()],
                    nvme: vec![([0, 0, 0, 0], 4420).into()],
                    discovery: vec![([0, 0, 0, 0], 8009).into()],
                },
                join: None,
                failure_domain: String::new(),
                version: String::new(),
                drained: false,
            };
            (node, NodeView { record, alive: true })
        };
        (0..).zip(NODES).map(node).collect()
    }

    #[test]
    fn initiators_are_told_of_all_nodes_that_have_a_volume() {
        let [one, two, three, _] = NODES;
        let replica = |node| Replica { node, image: Uuid::nil(), new: false };
        let mirror = Record {
            epoch: Epoch(3),
            config: 1,
            replicas: [one, two].map(replica).into(),
            in_sync: vec![Member { node: one, incarnation: Incarnation(1) }],
            primary: one,
            born: Epoch::default(),
            history: History::default(),
        };
        let wanted = Place { stage: PlaceStage::Wanted { force: false }, ..place(three, "a") };
        let places = vec![place(one, "a"), place(two, "a"), wanted];
        let known = VolumeRecord { places: places.clone(), ..record("a") };
        let unknown = VolumeRecord { places, ..record("b") };
        let mut catalog = Catalog::default();
        let open = [(&known, Some(&mirror)), (&unknown, None)];
        share(&mut catalog, two, &nodes(), open.into_iter());

        let index = |n| NodeIndex::new(n).unwrap();
        let serving = |n, access| ServingNode { node: index(n), access };
        let (good, none) = (block::Access::Optimized, block::Access::Unavailable);
        assert_eq!(catalog.node, index(1));
        let told = |record: &VolumeRecord| &catalog.shared[&volume_id(record.id)];
        assert_eq!(*told(&known), [serving(0, good), serving(1, none)]);
        assert_eq!(*told(&unknown), [serving(0, none), serving(1, none)]);
        let others: Vec<_> = catalog.others.keys().copied().collect();
        assert_eq!(others, [index(0), index(2), index(3)]);
        let portals = &catalog.others[&index(2)];
        assert_eq!(portals.iscsi, [([192, 0, 2, 2], 3260).into()]);
        let reached = |port| [1, 2].map(|net| ([10, 0, net, 2], port).into());
        assert_eq!(portals.nvme, reached(4420), "nobody can dial a wildcard");
        assert_eq!(portals.discovery, reached(8009));
        let mut nodes = nodes();
        nodes.get_mut(&three).unwrap().alive = false;
        share(&mut catalog, two, &nodes, std::iter::empty());
        let portals = &catalog.others[&index(2)];
        assert!(portals.discovery.is_empty(), "nobody is referred to a dead node");
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
        let all = all.map(|(record, core)| (record, Here::Open { core }));
        let catalog = catalog(all.into_iter(), &ring(1), &[], &[], 3);

        let target = &catalog.targets[&named.iscsi_target];
        let chap = asked(&target.access, iqn).unwrap();
        assert_eq!((chap.user.as_str(), &chap.secret[..]), ("u", &b"0123456789ab"[..]));
        assert_eq!(chap.mutual, Some(("m".into(), b"ba9876543210".to_vec())));
        assert!(target.access.admission(nqn).is_none());
        assert_eq!(target.luns[&0], volume_id(named.id));
        let subsystem = &catalog.subsystems[&named.nvme_subsystem];
        assert_eq!(subsystem.access.admission(nqn), Some(&Admission::ByName));
        assert!(subsystem.access.admission(iqn).is_none());
        assert_eq!(subsystem.serial.len(), 20);

        assert!(!catalog.targets.contains_key(&open.iscsi_target));
        assert_eq!(catalog.subsystems[&open.nvme_subsystem].core, 1);
        assert!(catalog.subsystems[&open.nvme_subsystem].access.admission("x").is_some());
        assert!(catalog.targets[&closed.iscsi_target].access.admission(iqn).is_none());
        assert_eq!(catalog.generation, 3);
    }

    /// RFD 0017, 3: who may come in is for the volumes to say, what he proves for the owner.
    #[test]
    fn volumes_of_one_target_share_its_door_and_not_their_initiators() {
        let (one, two) = ("iqn.2026-01.com.example:one", "iqn.2026-01.com.example:two");
        let allow = |names: &[&str]| names.iter().map(|n| n.parse().unwrap()).collect();
        let mut records: BTreeMap<_, _> =
            ["a", "b", "c"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b, c] = ["a", "b", "c"].map(|name| record(name).id);
        remap(&mut records, b, a, Some(5)).unwrap();
        remap(&mut records, c, a, Some(6)).unwrap();
        let sealed = StoredChap::seal(&chap(), a, &ring(1)).unwrap();
        records.get_mut(&a).unwrap().chap = Some(sealed);
        records.get_mut(&a).unwrap().allow = allow(&[one]);
        records.get_mut(&b).unwrap().allow = allow(&[one, two]);
        let made = |a_here, b_here, c_here| {
            let here = [(&records[&a], a_here), (&records[&b], b_here), (&records[&c], c_here)];
            catalog(here.into_iter(), &ring(1), &[], &[], 1).targets
        };
        let open = |core| Here::Open { core };
        let targets = made(open(1), open(1), open(0));
        assert_eq!(targets.len(), 1);
        let target = &targets[&records[&a].iscsi_target];
        let luns: Vec<_> = target.luns.iter().map(|(lun, id)| (*lun, *id)).collect();
        assert_eq!(luns, [(0, volume_id(a)), (5, volume_id(b)), (6, volume_id(c))]);
        assert_eq!((target.core, &target.away), (1, &[(6, Away::Returning)].into()), "it moves");
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        assert_eq!(
            target.masks,
            [(0, names(&[one])), (5, names(&[one, two])), (6, names(&[]))].into()
        );
        for name in [one, two] {
            assert_eq!(asked(&target.access, name).unwrap().user, "u");
        }
        assert!(target.access.admission("iqn.2026-01.com.example:three").is_none());
        // The owner has no copy here: what it asks for counts all the same.
        let targets = made(Here::Nowhere, open(0), Here::Away(Away::Unavailable));
        let target = &targets[&records[&a].iscsi_target];
        assert_eq!(target.luns.keys().copied().collect::<Vec<_>>(), [5, 6]);
        assert_eq!((target.core, target.away.len()), (0, 1));
        assert_eq!(asked(&target.access, two).unwrap().user, "u");
        // Its record cannot be read: nobody proves what is not known.
        let alone = catalog([(&records[&b], open(0))].into_iter(), &ring(1), &[], &[], 1).targets;
        let target = &alone[&records[&a].iscsi_target];
        assert!(asked(&target.access, two).unwrap().secret.is_empty());
    }

    /// RFD 0019, 4: as behind a target, so behind a subsystem.
    #[test]
    fn volumes_of_one_target_share_its_subsystem() {
        let (one, two) = ("nqn.2026-01.com.example:one", "nqn.2026-01.com.example:two");
        let mut records: BTreeMap<_, _> =
            ["a", "b"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        remap(&mut records, b, a, Some(5)).unwrap();
        records.get_mut(&a).unwrap().allow = [one.parse().unwrap()].into();
        records.get_mut(&b).unwrap().allow = [two.parse().unwrap()].into();
        let made = |here: &[(Uuid, Here)]| {
            let all = here.iter().map(|(id, here)| (&records[id], *here));
            catalog(all, &ring(1), &[], &[], 1).subsystems
        };
        let open = |core| Here::Open { core };
        let subsystems = made(&[(a, open(1)), (b, open(0))]);
        assert_eq!(subsystems.len(), 1);
        let subsystem = &subsystems[&records[&a].nvme_subsystem];
        assert_eq!(subsystem.namespaces, [(1, volume_id(a)), (6, volume_id(b))].into());
        let away: Vec<_> = subsystem.away.keys().copied().collect();
        assert_eq!((subsystem.core, away), (1, vec![6]), "it moves");
        let names = |name: &str| [name.to_owned()].into();
        assert_eq!(subsystem.masks, [(1, names(one)), (6, names(two))].into());
        assert!([one, two].iter().all(|nqn| subsystem.access.admission(nqn).is_some()));
        assert_eq!(subsystem.serial, a.simple().to_string()[..20], "the owner's");
        // The owner has no copy here, or its record cannot be read.
        let subsystems = made(&[(a, Here::Nowhere), (b, open(0))]);
        let subsystem = &subsystems[&records[&a].nvme_subsystem];
        assert_eq!((subsystem.core, subsystem.namespaces.len()), (0, 1));
        assert!(subsystem.access.admission(one).is_none());
        assert!(made(&[(b, open(0))]).is_empty());
        // Two changes at once: the owner asks for CHAP, and its guest lets anybody in.
        let sealed = StoredChap::seal(&chap(), a, &ring(1)).unwrap();
        records.get_mut(&a).unwrap().chap = Some(sealed);
        records.get_mut(&b).unwrap().allow = ["any", two].map(|who| who.parse().unwrap()).into();
        let here = [(&records[&a], open(0)), (&records[&b], open(0))];
        let subsystems = catalog(here.into_iter(), &ring(1), &[], &[], 1).subsystems;
        let subsystem = &subsystems[&records[&a].nvme_subsystem];
        assert!(subsystem.access.any.is_none());
        assert_eq!(subsystem.masks[&6], names(two));
    }

    /// Has `record` ask its hosts for these secrets.
    fn ask_hosts(record: &mut VolumeRecord, all: &[(&str, api::Dhchap)]) {
        for (host, secrets) in all {
            let of = OfHost { volume: record.id, host };
            let sealed = StoredDhchap::seal(secrets, of, &ring(1)).unwrap();
            record.hosts.insert((*host).to_owned(), sealed);
        }
    }

    /// RFD 0020, 2: who has a secret has to prove it, the others come in by their names.
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
            |here, with: &Ring| catalog([(&record, here)].into_iter(), with, &[], &[], 1);
        let here = published(Here::Open { core: 0 }, &ring(1)).subsystems;
        let access = &here[&record.nvme_subsystem].access;
        let secret = |text| nvme::auth::Secret::parse(text).unwrap();
        let [first, second] = SECRETS.map(secret);
        let known = |host, controller| HostSecrets::Known { host, controller };
        assert_eq!(asked(access, HOST), Some(&known(first, Some(second.clone()))));
        assert_eq!(asked(access, &one_way), Some(&known(second, None)));
        assert_eq!(asked(access, &by_name), None);
        assert_eq!(asked(access, &bad), Some(&HostSecrets::Unknown), "what is no secret");
        assert!(access.admission("nqn.2026-01.com.example:not-allowed").is_none());
        // Nobody knows what they have to prove: nobody comes in by his name in its place.
        for (here, with) in [(Here::Open { core: 0 }, ring(2)), (Here::Nowhere, ring(1))] {
            let catalog = published(here, &with);
            let all = catalog.subsystems.values().chain(catalog.remote.subsystems.values());
            let [subsystem] = all.collect::<Vec<_>>()[..] else { panic!("{catalog:?}") };
            assert_eq!(asked(&subsystem.access, HOST), Some(&HostSecrets::Unknown));
            assert_eq!(asked(&subsystem.access, &by_name), None);
        }
    }

    /// RFD 0020, 2, and 4, attack 10: secrets are the subsystem's, those of its owner, and nobody comes in beside them.
    #[test]
    fn hosts_of_a_guest_prove_the_secrets_of_the_owner() {
        let other = "nqn.2026-01.com.example:other";
        let mut records: BTreeMap<_, _> =
            ["a", "b"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        remap(&mut records, b, a, Some(5)).unwrap();
        records.get_mut(&b).unwrap().allow =
            ["any", HOST, other].map(|h| h.parse().unwrap()).into();
        let made = |records: &BTreeMap<Uuid, VolumeRecord>| {
            let here =
                [(&records[&a], Here::Open { core: 0 }), (&records[&b], Here::Open { core: 0 })];
            let all = catalog(here.into_iter(), &ring(1), &[], &[], 1).subsystems;
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
        // Its own are set at the moment in which it joins: they count for nothing, and let nobody in unnamed.
        ask_hosts(records.get_mut(&b).unwrap(), &[(HOST, dhchap())]);
        let subsystem = made(&records);
        assert!(subsystem.access.any.is_none());
        assert_eq!(asked(&subsystem.access, HOST), None);
    }

    /// Has hosts come to `record` by these keys.
    fn by_tls(record: &mut VolumeRecord, all: &[(&str, &str, bool)]) {
        for (host, key, required) in all {
            let of = OfHost { volume: record.id, host };
            let sealed = StoredTls::seal(&tls(key, *required), of, &ring(1)).unwrap();
            record.tls.insert((*host).to_owned(), sealed);
        }
    }

    /// What is told of TLS: by host, the key and whether it has to be used.
    fn told(subsystem: &Subsystem) -> Vec<(&str, HostKey, bool)> {
        let tls = subsystem.tls.iter();
        tls.map(|(host, tls)| (host.as_str(), tls.key.clone(), tls.required)).collect()
    }

    /// RFD 0022, 3: whoever is told of it, and whether the key can be read or not.
    #[test]
    fn hosts_come_by_tls_as_the_record_says() {
        let [may, bad] = ["may", "bad"].map(|h| format!("nqn.2026-01.com.example:{h}"));
        let mut record = record("a");
        record.allow = [HOST, &may].map(|h| h.parse().unwrap()).into();
        by_tls(&mut record, &[(HOST, KEYS[0], true), (&may, KEYS[1], false)]);
        by_tls(&mut record, &[(&bad, SECRETS[0], true)]);
        let published = |here, with: &Ring| {
            let all = catalog([(&record, here)].into_iter(), with, &[], &[], 1);
            let (here, remote) = (all.subsystems, all.remote.subsystems);
            assert_eq!(here.len() + remote.len(), 1);
            here.into_values().chain(remote.into_values()).next().unwrap()
        };
        let open = Here::Open { core: 0 };
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
        assert!(here.access.admission(&bad).is_none(), "that is not for keys to say");
        assert_eq!(asked(&here.access, HOST), None);
        // What is required stays so where the key is not known, and discovery tells the same from every node.
        for (here, with) in [(open, ring(2)), (Here::Nowhere, ring(1))] {
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

    /// RFD 0022, 3: keys are the subsystem's, those of its owner, and nobody comes in beside those that have to be used.
    #[test]
    fn hosts_of_a_guest_come_by_the_keys_of_the_owner() {
        let other = "nqn.2026-01.com.example:other";
        let mut records: BTreeMap<_, _> =
            ["a", "b"].map(record).into_iter().map(|r| (r.id, r)).collect();
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        remap(&mut records, b, a, Some(5)).unwrap();
        records.get_mut(&b).unwrap().allow =
            ["any", HOST, other].map(|h| h.parse().unwrap()).into();
        let made = |records: &BTreeMap<Uuid, VolumeRecord>, a_here| {
            let here = [(&records[&a], a_here), (&records[&b], Here::Open { core: 0 })];
            let all = catalog(here.into_iter(), &ring(1), &[], &[], 1).subsystems;
            all[&records[&a].nvme_subsystem].clone()
        };
        let open = Here::Open { core: 0 };
        let mut guarded = records.clone();
        by_tls(guarded.get_mut(&a).unwrap(), &[(HOST, KEYS[0], false)]);
        let subsystem = made(&guarded, open);
        assert!(subsystem.access.any.is_some(), "nobody has to");
        assert_eq!(subsystem.tls.keys().collect::<Vec<_>>(), [HOST]);
        by_tls(guarded.get_mut(&a).unwrap(), &[(HOST, KEYS[0], true)]);
        // Also where the owner has no copy.
        for a_here in [open, Here::Nowhere] {
            let subsystem = made(&guarded, a_here);
            assert!(subsystem.access.any.is_none());
            assert_eq!(subsystem.masks[&6], [HOST, other].map(str::to_owned).into());
            let known = HostKey::Known(nvme::tls::TlsKey::parse(KEYS[0]).unwrap());
            assert_eq!(told(&subsystem), [(HOST, known, true)]);
        }
        // Its own are set at the moment in which it joins: they count for nothing, and let nobody in unnamed.
        by_tls(records.get_mut(&b).unwrap(), &[(HOST, KEYS[0], true)]);
        let subsystem = made(&records, open);
        assert!(subsystem.access.any.is_none() && subsystem.tls.is_empty());
    }

    /// RFD 0016, 6: its own goes before everybody's, also where anybody may come in.
    #[test]
    fn an_initiator_proves_its_own_secret() {
        let (own, other) = ("iqn.2026-01.com.example:own", "iqn.2026-01.com.example:other");
        let second = r#"{"user":"second","secret":"another-secret"}"#;
        let second: api::Chap = serde_json::from_str(second).unwrap();
        for allow in [vec![own, other], vec!["any"]] {
            let mut record = record("a");
            record.allow = allow.iter().map(|s| s.parse().unwrap()).collect();
            let of = Of { volume: record.id, initiator: Some(own) };
            let sealed = StoredChap::seal(&second, of, &ring(1)).unwrap();
            record.proofs.insert(own.to_owned(), sealed);
            let user = |record: &VolumeRecord, who: &str| {
                let here = Here::Open { core: 0 };
                let all = catalog([(record, here)].into_iter(), &ring(1), &[], &[], 1);
                let access = &all.targets[&record.iscsi_target].access;
                asked(access, who).map(|chap| chap.user.clone())
            };
            assert_eq!(user(&record, own).as_deref(), Some("second"));
            assert_eq!(user(&record, other), None, "nobody asks it for anything");
            record.chap = Some(StoredChap::seal(&chap(), record.id, &ring(1)).unwrap());
            assert_eq!(user(&record, own).as_deref(), Some("second"));
            assert_eq!(user(&record, other).as_deref(), Some("u"), "what all have to prove");
        }
    }

    /// RFD 0017, 2: only what is gone for good is left out.
    #[test]
    fn what_is_away_keeps_its_place() {
        let (away, elsewhere) = (record("a"), record("b"));
        let all = [(&away, Here::Away(Away::Returning)), (&elsewhere, Here::Nowhere)];
        let catalog = catalog(all.into_iter(), &Ring::default(), &[], &[], 1);
        let target = &catalog.targets[&away.iscsi_target];
        assert_eq!(target.luns[&0], volume_id(away.id));
        assert_eq!(target.away, [(0, Away::Returning)].into());
        let subsystem = &catalog.subsystems[&away.nvme_subsystem];
        assert_eq!(subsystem.namespaces, [(1, volume_id(away.id))].into());
        let absent = Absent { block_size: 512, blocks: (1 << 30) / 512, thin: true };
        assert_eq!(subsystem.away, [(1, absent)].into());
        assert_eq!((catalog.targets.len(), catalog.subsystems.len()), (1, 1));
        // Discovery tells of it.
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
        let catalog =
            catalog([(&locked, Here::Open { core: 0 })].into_iter(), &ring(2), &[], &[], 1);
        let access = &catalog.targets[&locked.iscsi_target].access;
        let chap = asked(access, "iqn.x").expect("it still asks for a proof");
        assert_eq!((chap.user.as_str(), chap.secret.len()), ("u", 0));
    }
}
