//! What initiators are told is there: the catalog, made from records.

use std::net::SocketAddr;

use ::cluster::nodes::{NodePortals, NodeRecord, Nodes};
use ::cluster::vault::Ring;
use api::Initiator;
use layers::mirror::record::Record;
use peer::NodeId;
use target::catalog::{
    Access, Admission, Away, Catalog, Chap, IscsiTarget, NodeIndex, Portals, ServingNode,
    Subsystem, VolumeId,
};
use uuid::Uuid;

use crate::record::{PlaceStage, VolumeRecord};

/// Logical unit number of a volume's one LUN.
pub const LUN: u16 = 0;

/// Namespace identifier of a volume's one namespace.
pub const NAMESPACE: u32 = 1;

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

/// The catalog of these volumes. `ring` opens what initiators have to prove. A volume that is away keeps its place in it: what
/// the catalog does not have is gone for good, and initiators are told so.
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
    for (record, here) in volumes {
        let id = volume_id(record.id);
        if record.protocols.iscsi && here != Here::Nowhere {
            let access = iscsi_access(record, ring);
            let target = IscsiTarget { luns: [(LUN, id)].into(), access, ..IscsiTarget::default() };
            let target = catalog.targets.entry(record.iscsi_target.clone()).or_insert(target);
            match here {
                Here::Open { core } => target.core = core,
                Here::Away(away) => drop(target.away.insert(LUN, away)),
                Here::Nowhere => {}
            }
        }
        if let Here::Open { core } = here
            && record.protocols.nvme
        {
            let mut serial = record.id.simple().to_string();
            serial.truncate(SERIAL);
            let (namespaces, access) = ([(NAMESPACE, id)].into(), nvme_access(record));
            let subsystem = Subsystem { core, namespaces, serial, access };
            catalog.subsystems.insert(record.nvme_subsystem.clone(), subsystem);
        }
    }
    catalog
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
    let others = others.filter_map(|(node, view)| Some((index(*node)?, portals(&view.record))));
    catalog.others = others.collect();
    for (record, mirror) in open {
        let serving = record.places.iter().filter_map(|place| {
            let has_image = matches!(place.stage, PlaceStage::Made | PlaceStage::Leaving { .. });
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
            let own = (!everywhere).then_some(at.ip());
            dialled.extend(ips.chain(own).map(|ip| SocketAddr::new(ip, at.port())));
        }
        dialled.dedup();
        dialled
    };
    let NodePortals { iscsi, nvme, .. } = &node.portals;
    Portals { iscsi: dialled(iscsi), nvme: dialled(nvme) }
}

/// What an initiator has to prove. If that cannot be read, nobody proves it.
fn proof(record: &VolumeRecord, ring: &Ring) -> Option<Chap> {
    let held = record.chap.as_ref()?;
    Some(match held.open(record.id, ring) {
        Ok(chap) => Chap {
            user: chap.user.as_str().to_owned(),
            secret: chap.secret.expose().as_bytes().to_vec(),
            mutual: (chap.mutual.as_ref())
                .map(|m| (m.user.as_str().to_owned(), m.secret.expose().as_bytes().to_vec())),
        },
        Err(_) => Chap { user: held.user().as_str().to_owned(), secret: vec![], mutual: None },
    })
}

fn iscsi_access(record: &VolumeRecord, ring: &Ring) -> Access {
    let chap = proof(record, ring);
    let admission = Admission { chap };
    let mut access = Access::default();
    for initiator in &record.allow {
        match initiator {
            Initiator::Any => access.any = Some(admission.clone()),
            Initiator::Iscsi(name) => {
                access.named.insert(name.clone(), admission.clone());
            }
            Initiator::Nvme(_) => {}
        }
    }
    access
}

fn nvme_access(record: &VolumeRecord) -> Access {
    let mut access = Access::default();
    for initiator in &record.allow {
        match initiator {
            Initiator::Any => access.any = Some(Admission::default()),
            Initiator::Nvme(name) => {
                access.named.insert(name.clone(), Admission::default());
            }
            Initiator::Iscsi(_) => {}
        }
    }
    access
}

#[cfg(test)]
mod tests {
    use ::cluster::identity::{self, Role};
    use ::cluster::nodes::NodeView;
    use block::Epoch;
    use layers::mirror::record::{Member, Replica};
    use peer::Incarnation;

    use super::*;
    use crate::record::tests::{chap, place, record, ring};
    use crate::record::{Place, StoredChap};

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
                    discovery: vec![],
                },
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
        let reached = [1, 2].map(|net| ([10, 0, net, 2], 4420).into());
        assert_eq!(portals.nvme, reached, "nobody can dial a wildcard");
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
            protocols: api::Protocols { iscsi: false, nvme: true },
            ..record("b")
        };
        let closed = record("c");
        let all = [(&named, 0), (&open, 1), (&closed, 0)];
        let all = all.map(|(record, core)| (record, Here::Open { core }));
        let catalog = catalog(all.into_iter(), &ring(1), &[], &[], 3);

        let target = &catalog.targets[&named.iscsi_target];
        let chap = target.access.admission(iqn).unwrap().chap.as_ref().unwrap();
        assert_eq!((chap.user.as_str(), &chap.secret[..]), ("u", &b"0123456789ab"[..]));
        assert_eq!(chap.mutual, Some(("m".into(), b"ba9876543210".to_vec())));
        assert!(target.access.admission(nqn).is_none());
        assert_eq!(target.luns[&LUN], volume_id(named.id));
        let subsystem = &catalog.subsystems[&named.nvme_subsystem];
        assert_eq!(subsystem.access.admission(nqn), Some(&Admission::default()));
        assert!(subsystem.access.admission(iqn).is_none());
        assert_eq!(subsystem.serial.len(), 20);

        assert!(!catalog.targets.contains_key(&open.iscsi_target));
        assert_eq!(catalog.subsystems[&open.nvme_subsystem].core, 1);
        assert!(catalog.subsystems[&open.nvme_subsystem].access.admission("x").is_some());
        assert!(catalog.targets[&closed.iscsi_target].access.admission(iqn).is_none());
        assert_eq!(catalog.generation, 3);
    }

    /// RFD 0017, 2: only what is gone for good is left out.
    #[test]
    fn what_is_away_keeps_its_place() {
        let (away, elsewhere) = (record("a"), record("b"));
        let all = [(&away, Here::Away(Away::Returning)), (&elsewhere, Here::Nowhere)];
        let catalog = catalog(all.into_iter(), &Ring::default(), &[], &[], 1);
        let target = &catalog.targets[&away.iscsi_target];
        assert_eq!(target.luns[&LUN], volume_id(away.id));
        assert_eq!(target.away, [(LUN, Away::Returning)].into());
        assert_eq!((catalog.targets.len(), catalog.subsystems.len()), (1, 0));
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
        let admission = catalog.targets[&locked.iscsi_target].access.admission("iqn.x").unwrap();
        let chap = admission.chap.as_ref().expect("it still asks for a proof");
        assert_eq!((chap.user.as_str(), chap.secret.len()), ("u", 0));
    }
}
