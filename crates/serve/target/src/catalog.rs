//! Which targets are served to which initiators: an immutable snapshot, replaced as a whole on
//! every change.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use nvme::auth::Secret;
use nvme::tls::TlsKey;
pub use scsi::Unavailability;

/// The portal group of discovery, and of targets that only this node serves: every portal reaches
/// every volume.
pub(crate) const PORTAL_GROUP: u16 = 1;

/// Identity of a volume: a UUID, the same on every node and permanent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub [u8; 16]);

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// Everything that front ends need to know about the served volumes.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    /// iSCSI targets by name (lower case, as names are compared).
    pub targets: BTreeMap<String, IscsiTarget>,
    /// NVMe subsystems by qualified name.
    pub subsystems: BTreeMap<String, Subsystem>,
    /// Where this node listens for iSCSI. A wildcard is reported as the address that the client
    /// connected to; likewise if the list is empty.
    pub iscsi_portals: Vec<SocketAddr>,
    /// Where hosts reach NVMe/TCP I/O controllers, likewise.
    pub nvme_portals: Vec<SocketAddr>,
    /// Changes with every snapshot; the discovery log's generation counter.
    pub generation: u64,
    /// This node's index among the nodes that serve volumes together.
    pub node: NodeIndex,
    /// The nodes that serve a volume, for volumes that several nodes serve; these have an access
    /// state ([`ServedVolume::access`](crate::ServedVolume)). The entry of this node is ignored:
    /// its access state decides.
    pub shared: BTreeMap<VolumeId, Vec<ServingNode>>,
    /// Volumes that have replicas only on other nodes: discovery reports them, with the nodes that
    /// serve them.
    pub remote: RemoteCatalog,
    /// Where initiators reach the other nodes: discovery reports it for the volumes that those
    /// serve.
    pub peer_portals: BTreeMap<NodeIndex, Portals>,
    /// Whether this node cannot read some records: a name that it does not know may exist.
    pub is_incomplete: bool,
    /// Whether a login is redirected to another node if this node is out of the replica set of a
    /// volume of the target.
    pub redirect: bool,
    /// How long commands of an NVMe host may still run after its association has ended, in
    /// milliseconds: as long as another node may take to reject late commands.
    pub quiesce_ms: u16,
}

/// Targets and subsystems without a local replica. No login to them happens here, so core and state
/// do not matter.
#[derive(Clone, Debug, Default)]
pub struct RemoteCatalog {
    /// iSCSI targets by name, each with the units that are not here; others of its units may be.
    pub targets: BTreeMap<String, IscsiTarget>,
    /// NVMe subsystems by qualified name, likewise.
    pub subsystems: BTreeMap<String, Subsystem>,
}

/// The export groups of each name: the local part, and the part on other nodes only.
pub(crate) fn pair_by_name<'a, D>(
    here: &'a BTreeMap<String, D>,
    remote: &'a BTreeMap<String, D>,
) -> impl Iterator<Item = (&'a str, [Option<&'a D>; 2])> {
    let names: BTreeSet<_> = here.keys().chain(remote.keys()).collect();
    names.into_iter().map(|name| (name.as_str(), [here.get(name), remote.get(name)]))
}

/// Where initiators reach another node: addresses that they can connect to, no wildcards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Portals {
    /// iSCSI.
    pub iscsi: Vec<SocketAddr>,
    /// NVMe/TCP I/O controllers.
    pub nvme: Vec<SocketAddr>,
    /// Its NVMe discovery service, while the node is up: hosts are referred to it.
    pub discovery: Vec<SocketAddr>,
}

impl Catalog {
    /// Whether several nodes serve any of these volumes.
    pub(crate) fn shares_any<'a>(&self, ids: impl IntoIterator<Item = &'a VolumeId>) -> bool {
        ids.into_iter().any(|id| self.shared.contains_key(id))
    }

    /// Tag of this node's portal group at a target. Sessions do not span nodes, so where several
    /// nodes serve a target each is a portal group of its own (RFC 7143 4.4.1).
    pub(crate) fn portal_group(&self, target: &IscsiTarget) -> u16 {
        if self.shares_any(target.luns.values()) { self.node.port_id() } else { PORTAL_GROUP }
    }

    /// The other nodes that serve any of these volumes, and their portals.
    pub(crate) fn others_serving<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a VolumeId>,
    ) -> BTreeMap<NodeIndex, &Portals> {
        let serving = ids.into_iter().filter_map(|id| self.shared.get(id)).flatten();
        let others = serving.map(|s| s.node).filter(|node| *node != self.node);
        others.filter_map(|node| Some((node, self.peer_portals.get(&node)?))).collect()
    }

    /// Where all of these volumes are served permanently, for a client that connected to `local`:
    /// the portal whose address shares the longest prefix. `None` unless this node is out of the
    /// replica set of one of them, or is leaving.
    ///
    /// That is taken from the record that all nodes share ([`Self::shared`]), not from this node's
    /// own state: two nodes that both do not serve for the moment would send an initiator back and
    /// forth.
    pub(crate) fn redirect_portal<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a VolumeId>,
        local: SocketAddr,
        goes: bool,
    ) -> Option<SocketAddr> {
        let serving: Option<Vec<_>> = ids.into_iter().map(|id| self.shared.get(id)).collect();
        let serving = serving.filter(|all| !all.is_empty())?;
        let serves = |node: NodeIndex, all: &Vec<ServingNode>| {
            all.iter().any(|s| s.node == node && s.access == block::Access::Optimized)
        };
        if !goes && serving.iter().all(|all| serves(self.node, all)) {
            return None;
        }
        let others = self.peer_portals.iter().filter(|(node, _)| **node != self.node);
        let all_served = others.filter(|(node, _)| serving.iter().all(|all| serves(**node, all)));
        let portals = all_served.flat_map(|(_, portals)| portals.iscsi.iter().copied());
        portals.rev().max_by_key(|portal| common_prefix_bits(portal.ip(), local.ip()))
    }
}

/// The addresses of these listeners for a client that connected to `local`: a wildcard cannot be
/// connected to.
pub(crate) fn reachable_addresses(listens: &[SocketAddr], local: SocketAddr) -> Vec<SocketAddr> {
    let local = SocketAddr::new(local.ip().to_canonical(), local.port());
    if listens.is_empty() {
        return vec![local];
    }
    let mut reachable = Vec::new();
    for &at in listens {
        let address = if at.ip().is_unspecified() { local.ip() } else { at.ip().to_canonical() };
        // An IPv6 wildcard takes IPv4 as well.
        let reached = at.is_ipv6() || address.is_ipv4();
        let at = SocketAddr::new(address, at.port());
        if reached && !reachable.contains(&at) {
            reachable.push(at);
        }
    }
    reachable
}

/// Length of the common prefix of two addresses in bits; 0 for different families.
pub(crate) fn common_prefix_bits(a: IpAddr, b: IpAddr) -> u32 {
    match (a.to_canonical(), b.to_canonical()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

/// Number of a node among those that serve volumes together: 0 to 15, unique, and fixed for as long
/// as the node serves any.
///
/// It keeps identifiers unique over the nodes without communication: target port groups, relative
/// target ports and portal groups are the index plus one; NVMe controller identifiers are `index *
/// 4096 + 1` to `index * 4096 + 4095` (the last node's end at FFEFh); port identifiers in the
/// discovery log are `index * 256 + 1` and up, those of its discovery service `index * 256 + 129`
/// and up. A node that shares no volume has index 0.
/// up, those of its discovery `index * 256 + 129` and up. A node that shares no volume is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(u8);

impl NodeIndex {
    /// Most nodes that may serve volumes together.
    pub const MAX: u8 = 16;

    /// The index, if it is below [`Self::MAX`].
    #[must_use]
    pub fn new(index: u8) -> Option<Self> {
        (index < Self::MAX).then_some(Self(index))
    }

    /// Target port group, relative target port identifier and portal group tag of the node.
    pub(crate) fn port_id(self) -> u16 {
        u16::from(self.0) + 1
    }

    /// Identifiers of NVMe controllers of subsystems whose namespaces are shared.
    pub(crate) fn controller_ids(self) -> RangeInclusive<u16> {
        /// Highest that is not reserved (NVMe Base 2.0, 5.17.2.1).
        const LAST: u16 = 0xffef;
        let first = u16::from(self.0) << 12;
        first + 1..=(first | 0xfff).min(LAST)
    }

    /// Identifier of its first port in the discovery log.
    pub(crate) fn first_portal_id(self) -> u16 {
        (u16::from(self.0) << 8) + 1
    }

    /// Identifier of the first port of its discovery.
    pub(crate) fn first_discovery_port_id(self) -> u16 {
        self.first_portal_id() + 128
    }
}

/// One of the nodes that serve a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServingNode {
    /// The node's index.
    pub node: NodeIndex,
    /// The access to the volume through it.
    pub access: block::Access,
}

/// One iSCSI target.
#[derive(Clone, Debug, Default)]
pub struct IscsiTarget {
    /// The core of its volumes.
    pub core: usize,
    /// Volumes by logical unit number.
    pub luns: BTreeMap<u16, VolumeId>,
    /// Those of them that this node does not serve for now: initiators keep them, and learn that
    /// they are unavailable.
    pub unavailable: BTreeMap<u16, Unavailability>,
    /// Which initiators see a logical unit, by name; without an entry, all that may log in.
    pub masks: BTreeMap<u16, BTreeSet<String>>,
    /// Which initiators may log in.
    pub access: AccessList<ChapCredentials>,
}

impl IscsiTarget {
    /// The volumes visible to `initiator`, by number.
    pub(crate) fn visible_volumes<'a>(
        &'a self,
        initiator: &'a str,
    ) -> impl Iterator<Item = (u16, VolumeId)> + 'a {
        visible_volumes(&self.luns, &self.masks, initiator)
    }

    /// Whether this node serves any of its volumes.
    pub(crate) fn serves_any(&self) -> bool {
        self.luns.len() > self.unavailable.len()
    }
}

/// The volumes visible to `initiator`, by number.
fn visible_volumes<'a, N: Copy + Ord>(
    volumes: &'a BTreeMap<N, VolumeId>,
    masks: &'a BTreeMap<N, BTreeSet<String>>,
    initiator: &'a str,
) -> impl Iterator<Item = (N, VolumeId)> + 'a {
    let sees = move |n: &N| masks.get(n).is_none_or(|m| m.contains(initiator));
    volumes.iter().map(|(&n, &id)| (n, id)).filter(move |(n, _)| sees(n))
}

/// One NVMe subsystem.
#[derive(Clone, Debug, Default)]
pub struct Subsystem {
    /// The core of its volumes.
    pub core: usize,
    /// Volumes by namespace identifier (from 1).
    pub namespaces: BTreeMap<u32, VolumeId>,
    /// Those of them that this node does not serve for now: hosts keep them, and learn that they
    /// are unavailable.
    pub unavailable: BTreeMap<u32, UnavailableNamespace>,
    /// Which hosts see a namespace, by NQN; without an entry, all that may connect.
    pub masks: BTreeMap<u32, BTreeSet<String>>,
    /// Serial number: up to 20 ASCII characters.
    pub serial: String,
    /// Which hosts may connect.
    pub access: AccessList<HostSecrets>,
    /// Which hosts may or must use TLS, by NQN. It does not allow a host to connect.
    pub tls: BTreeMap<String, HostTls>,
}

impl Subsystem {
    /// The volumes visible to `host`, by namespace identifier.
    pub(crate) fn visible_volumes<'a>(
        &'a self,
        host: &'a str,
    ) -> impl Iterator<Item = (u32, VolumeId)> + 'a {
        visible_volumes(&self.namespaces, &self.masks, host)
    }

    /// Whether `host` must use TLS.
    pub(crate) fn requires_tls(&self, host: &str) -> bool {
        self.tls.get(host).is_some_and(|tls| tls.required)
    }

    /// Whether this node serves any of the volumes visible to `host`.
    pub(crate) fn serves_any(&self, host: &str) -> bool {
        self.visible_volumes(host).any(|(nsid, _)| !self.unavailable.contains_key(&nsid))
    }
}

/// What hosts learn of a volume that this node does not serve for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnavailableNamespace {
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Whether space is allocated only as it is written.
    pub thin: bool,
}

/// Which initiators may access a target or subsystem: none, unless listed. `P` is the type of
/// credentials.
#[derive(Clone, Debug)]
pub struct AccessList<P> {
    /// The rule for any initiator; an explicit choice of the administrator.
    pub any: Option<AccessRule<P>>,
    /// By initiator name (IQN, EUI, NAA in lower case) or host NQN.
    pub named: BTreeMap<String, AccessRule<P>>,
}

/// How an allowed initiator authenticates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessRule<P> {
    /// By its name only.
    NameOnly,
    /// With these credentials.
    Proof(P),
}

/// CHAP credentials of one initiator.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapCredentials {
    /// The initiator's user name.
    pub user: String,
    /// Its secret. Empty if unknown: then no login succeeds.
    pub secret: Vec<u8>,
    /// The target's user name and secret, for mutual CHAP.
    pub mutual: Option<(String, Vec<u8>)>,
}

impl fmt::Debug for ChapCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chap({}, mutual: {})", self.user, self.mutual.is_some())
    }
}

/// DH-HMAC-CHAP secrets of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostSecrets {
    /// The host's secret, and the subsystem's if the host asks for mutual authentication.
    Known {
        /// The host's secret.
        host: Secret,
        /// The subsystem's secret.
        controller: Option<Secret>,
    },
    /// They exist but cannot be read for now: the host is to retry.
    Unknown,
}

/// The TLS settings of one host at one subsystem (RFD 0022).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTls {
    /// The pre-shared key.
    pub key: HostKey,
    /// Whether the host is refused without TLS.
    pub required: bool,
}

/// The TLS key of a host and a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKey {
    /// This one.
    Known(TlsKey),
    /// It exists but cannot be read for now: TLS connections fail.
    Unknown,
}

impl<P> Default for AccessList<P> {
    fn default() -> Self {
        Self { any: None, named: BTreeMap::new() }
    }
}

impl<P> AccessList<P> {
    /// Any initiator, without authentication.
    #[must_use]
    pub fn open() -> Self {
        Self { any: Some(AccessRule::NameOnly), ..Self::default() }
    }

    /// The rule for `name`; `None` if it is not allowed. A rule for the name takes precedence over
    /// `any`.
    #[must_use]
    pub fn rule_for(&self, name: &str) -> Option<&AccessRule<P>> {
        self.named.get(name).or(self.any.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_nodes_count_alike() {
        let all: Vec<_> = (0..=u8::MAX).map_while(NodeIndex::new).collect();
        assert_eq!((all.len(), all[0]), (16, NodeIndex::default()));
        for pair in all.windows(2) {
            assert!(pair[0].port_id() < pair[1].port_id());
            assert!(pair[0].controller_ids().end() < pair[1].controller_ids().start());
            assert_eq!(pair[1].first_portal_id() - pair[0].first_portal_id(), 256);
        }
        assert_eq!((all[0].controller_ids(), all[0].port_id()), (1..=0xfff, 1));
        assert_eq!((all[15].controller_ids(), all[15].port_id()), (0xf001..=0xffef, 16));
    }

    #[test]
    fn a_node_without_a_replica_knows_who_serves_it() {
        use block::Access::{Optimized, Unavailable};
        let node = |n| NodeIndex::new(n).unwrap();
        let (a, b) = (VolumeId([1; 16]), VolumeId([2; 16]));
        let catalog = |own, second, third| {
            let serving = |n, access| ServingNode { node: node(n), access };
            let all = vec![serving(0, own), serving(1, second), serving(2, third)];
            let portals = |list: &[&str]| Portals {
                iscsi: list.iter().map(|at| at.parse().unwrap()).collect(),
                ..Portals::default()
            };
            let others = [
                (node(1), portals(&["192.0.2.2:3260", "198.51.100.2:3260", "[2001:db8::2]:3260"])),
                (node(2), portals(&["192.0.2.3:3260"])),
            ];
            Catalog { shared: [(a, all)].into(), peer_portals: others.into(), ..Catalog::default() }
        };
        let local: SocketAddr = "198.51.100.1:3260".parse().unwrap();
        let at = |text: &str| Some(text.parse().unwrap());
        let out = catalog(Unavailable, Optimized, Optimized);
        assert_eq!(
            out.redirect_portal([&a], local, false),
            at("198.51.100.2:3260"),
            "the same network"
        );
        let v6 = "[2001:db8::1]:3260".parse().unwrap();
        assert_eq!(out.redirect_portal([&a], v6, false), at("[2001:db8::2]:3260"));
        assert_eq!(out.redirect_portal([&b], local, false), None, "no other node has it");
        assert_eq!(out.redirect_portal([&a, &b], local, false), None);
        assert_eq!(out.redirect_portal([], local, true), None);
        let third = catalog(Unavailable, Unavailable, Optimized);
        assert_eq!(third.redirect_portal([&a], local, false), at("192.0.2.3:3260"));
        let none = catalog(Unavailable, Unavailable, Unavailable);
        assert_eq!(none.redirect_portal([&a], local, true), None);
        let serves = catalog(Optimized, Optimized, Optimized);
        assert_eq!(serves.redirect_portal([&a], local, false), None, "it serves itself");
        assert_eq!(serves.redirect_portal([&a], local, true), at("198.51.100.2:3260"), "and goes");
    }

    #[test]
    fn wildcard_addresses_are_not_advertised() {
        let reachable = |listens: &[&str], local: &str| -> Vec<String> {
            let listens: Vec<_> = listens.iter().map(|at| at.parse().unwrap()).collect();
            reachable_addresses(&listens, local.parse().unwrap())
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        let v4 = "[::ffff:192.0.2.1]:8009";
        assert_eq!(
            reachable(&["[::]:4420"], v4),
            ["192.0.2.1:4420"],
            "its own port, not discovery's"
        );
        assert_eq!(reachable(&["[::]:4420"], "[2001:db8::1]:8009"), ["[2001:db8::1]:4420"]);
        assert_eq!(reachable(&["0.0.0.0:4420", "[::]:4420"], v4), ["192.0.2.1:4420"]);
        assert_eq!(
            reachable(&["0.0.0.0:4420"], "[2001:db8::1]:8009"),
            [""; 0],
            "no listener there"
        );
        let one = ["198.51.100.1:4420", "[2001:db8::2]:4420"];
        assert_eq!(reachable(&one, v4), one, "what is configured is told as it is");
        assert_eq!(reachable(&[], v4), ["192.0.2.1:8009"]);
    }

    #[test]
    fn only_listed_initiators_are_admitted() {
        let chap = ChapCredentials { user: "u".into(), secret: b"s3cret".to_vec(), mutual: None };
        let mut access = AccessList::default();
        assert_eq!(access.rule_for("iqn.a"), None);
        access.named.insert("iqn.a".into(), AccessRule::Proof(chap.clone()));
        assert!(access.rule_for("iqn.b").is_none());
        access.any = Some(AccessRule::NameOnly);
        assert_eq!(access.rule_for("iqn.b"), Some(&AccessRule::NameOnly));
        assert_eq!(access.rule_for("iqn.a"), Some(&AccessRule::Proof(chap.clone())));
        assert!(!format!("{access:?}{chap:?}").contains("s3cret"), "secrets stay out of logs");
    }
}
