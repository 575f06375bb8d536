//! What is served to whom: an immutable snapshot, replaced as a whole when anything changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use nvme::auth::Secret;
use nvme::tls::TlsKey;
pub use scsi::Away;

/// Identity of a volume: a UUID, the same on every node and for ever.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub [u8; 16]);

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// Everything that front ends need to know about what is served.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    /// iSCSI targets by name (lower case, as names are compared).
    pub targets: BTreeMap<String, IscsiTarget>,
    /// NVMe subsystems by qualified name.
    pub subsystems: BTreeMap<String, Subsystem>,
    /// Where this node listens for iSCSI. A wildcard is told as the address that somebody came to,
    /// and so is everything where nothing stands here.
    pub iscsi_portals: Vec<SocketAddr>,
    /// Where hosts reach NVMe/TCP I/O controllers, likewise.
    pub nvme_portals: Vec<SocketAddr>,
    /// Changes with every snapshot; the discovery log's generation counter.
    pub generation: u64,
    /// Which of the nodes this is that serve volumes together.
    pub node: NodeIndex,
    /// The nodes that serve a volume, for volumes that several serve; these have an access state
    /// ([`Served::access`](crate::Served)). What is said here of this node does not count: that
    /// is its access state's to say.
    pub shared: BTreeMap<VolumeId, Vec<ServingNode>>,
    /// What only other nodes have a copy of: discovery names it, with those that serve it.
    pub remote: Remote,
    /// Where initiators reach the other nodes: discovery tells it of what those serve too.
    pub others: BTreeMap<NodeIndex, Portals>,
    /// Whether there are records that this node cannot read: what it does not know may be all the same.
    pub is_incomplete: bool,
    /// Whether a login to a target whose volumes this node is out of is sent to a node that serves them.
    pub redirect: bool,
    /// How long what an NVMe host has begun may go on after its association has ended, in milliseconds: as
    /// long as another node may take to refuse what comes late.
    pub quiesce_ms: u16,
}

/// What this node has no copy of. Nobody logs in to it here, so no core and no state matters.
#[derive(Clone, Debug, Default)]
pub struct Remote {
    /// iSCSI targets by name, with the units of each that are not here; some may be.
    pub targets: BTreeMap<String, IscsiTarget>,
    /// NVMe subsystems by qualified name, likewise.
    pub subsystems: BTreeMap<String, Subsystem>,
}

/// The doors of each name: what is behind it here, and what only other nodes have behind it.
pub(crate) fn by_name<'a, D>(
    here: &'a BTreeMap<String, D>,
    remote: &'a BTreeMap<String, D>,
) -> impl Iterator<Item = (&'a str, [Option<&'a D>; 2])> {
    let names: BTreeSet<_> = here.keys().chain(remote.keys()).collect();
    names.into_iter().map(|name| (name.as_str(), [here.get(name), remote.get(name)]))
}

/// Where initiators reach another node: addresses that they can dial, no wildcards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Portals {
    /// iSCSI.
    pub iscsi: Vec<SocketAddr>,
    /// NVMe/TCP I/O controllers.
    pub nvme: Vec<SocketAddr>,
    /// Its NVMe discovery, as long as the node lives: hosts are referred to it.
    pub discovery: Vec<SocketAddr>,
}

impl Catalog {
    /// Whether several nodes serve any of these volumes.
    pub(crate) fn shares_any<'a>(&self, ids: impl IntoIterator<Item = &'a VolumeId>) -> bool {
        ids.into_iter().any(|id| self.shared.contains_key(id))
    }

    /// The other nodes that serve any of these volumes, and where they are reached.
    pub(crate) fn others_serving<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a VolumeId>,
    ) -> BTreeMap<NodeIndex, &Portals> {
        let serving = ids.into_iter().filter_map(|id| self.shared.get(id)).flatten();
        let others = serving.map(|s| s.node).filter(|node| *node != self.node);
        others.filter_map(|node| Some((node, self.others.get(&node)?))).collect()
    }

    /// Where else all of these volumes are served for good, for somebody who came to `local`: the portal whose address has
    /// most in common with it. `None` unless this node is out of one of them, or goes.
    ///
    /// Who is out is taken from the record that all nodes share ([`Self::shared`]), not from this node's own state: two nodes
    /// that both do not serve for the moment would send an initiator to and fro.
    pub(crate) fn elsewhere<'a>(
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
        let others = self.others.iter().filter(|(node, _)| **node != self.node);
        let all_served = others.filter(|(node, _)| serving.iter().all(|all| serves(**node, all)));
        let portals = all_served.flat_map(|(_, portals)| portals.iscsi.iter().copied());
        portals.rev().max_by_key(|portal| in_common(portal.ip(), local.ip()))
    }
}

/// Where somebody who came to `local` finds what listens at these addresses: nobody can dial a wildcard.
pub(crate) fn dialled(listens: &[SocketAddr], local: SocketAddr) -> Vec<SocketAddr> {
    let local = SocketAddr::new(local.ip().to_canonical(), local.port());
    if listens.is_empty() {
        return vec![local];
    }
    let mut told = Vec::new();
    for &at in listens {
        let address = if at.ip().is_unspecified() { local.ip() } else { at.ip().to_canonical() };
        // An IPv6 wildcard takes IPv4 as well.
        let reached = at.is_ipv6() || address.is_ipv4();
        let at = SocketAddr::new(address, at.port());
        if reached && !told.contains(&at) {
            told.push(at);
        }
    }
    told
}

/// Leading bits that two addresses have in common; those of different families have none.
pub(crate) fn in_common(a: IpAddr, b: IpAddr) -> u32 {
    match (a.to_canonical(), b.to_canonical()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

/// Number of a node among those that may serve volumes together: 0 to 15, each node's own, and
/// its for as long as it serves any.
///
/// What initiators must not see twice is counted from it, and so unique over the nodes without
/// their talking about it: target port groups, relative target ports and portal groups are the
/// index plus one; NVMe controller identifiers are `index * 4096 + 1` to `index * 4096 + 4095`
/// (the last node's end at FFEFh); port identifiers in the discovery log are `index * 256 + 1` and
/// up, those of its discovery `index * 256 + 129` and up. A node that shares no volume is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(u8);

impl NodeIndex {
    /// Nodes that may serve volumes together.
    pub const MAX: u8 = 16;

    /// The index, if it is below [`Self::MAX`].
    #[must_use]
    pub fn new(index: u8) -> Option<Self> {
        (index < Self::MAX).then_some(Self(index))
    }

    /// Target port group, relative target port identifier and portal group tag of the node.
    pub(crate) fn port(self) -> u16 {
        u16::from(self.0) + 1
    }

    /// Identifiers of NVMe controllers of subsystems whose namespaces are shared.
    pub(crate) fn controllers(self) -> RangeInclusive<u16> {
        /// Highest that is not reserved (NVMe Base 2.0, 5.17.2.1).
        const LAST: u16 = 0xffef;
        let first = u16::from(self.0) << 12;
        first + 1..=(first | 0xfff).min(LAST)
    }

    /// Identifier of its first port in the discovery log.
    pub(crate) fn first_portal(self) -> u16 {
        (u16::from(self.0) << 8) + 1
    }

    /// Identifier of the first port of its discovery.
    pub(crate) fn first_discovery(self) -> u16 {
        self.first_portal() + 128
    }
}

/// One of the nodes that serve a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServingNode {
    /// Which.
    pub node: NodeIndex,
    /// How the volume is to be used through it.
    pub access: block::Access,
}

/// One iSCSI target.
#[derive(Clone, Debug, Default)]
pub struct IscsiTarget {
    /// The core its volumes live on.
    pub core: usize,
    /// Volumes by logical unit number.
    pub luns: BTreeMap<u16, VolumeId>,
    /// Those of them that this node does not serve for now: initiators keep them, and are told so.
    pub away: BTreeMap<u16, Away>,
    /// Who sees one of them, by name; whoever may log in, where there is no such list.
    pub masks: BTreeMap<u16, BTreeSet<String>>,
    /// Who may log in.
    pub access: Access<Chap>,
}

impl IscsiTarget {
    /// The volumes that `initiator` sees, by number.
    pub(crate) fn maps<'a>(
        &'a self,
        initiator: &'a str,
    ) -> impl Iterator<Item = (u16, VolumeId)> + 'a {
        unmasked(&self.luns, &self.masks, initiator)
    }

    /// Whether this node serves any of its volumes.
    pub(crate) fn serves(&self) -> bool {
        self.luns.len() > self.away.len()
    }
}

/// The volumes that `initiator` sees, by number.
fn unmasked<'a, N: Copy + Ord>(
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
    /// The core its volumes live on.
    pub core: usize,
    /// Volumes by namespace identifier (from 1).
    pub namespaces: BTreeMap<u32, VolumeId>,
    /// Those of them that this node does not serve for now: hosts keep them, and are told so.
    pub away: BTreeMap<u32, Absent>,
    /// Who sees one of them, by NQN; whoever may connect, where there is no such list.
    pub masks: BTreeMap<u32, BTreeSet<String>>,
    /// Serial number: up to 20 ASCII characters.
    pub serial: String,
    /// Who may connect.
    pub access: Access<HostSecrets>,
    /// Who may come by TLS, or has to, by NQN. Says nothing of who may connect.
    pub tls: BTreeMap<String, HostTls>,
}

impl Subsystem {
    /// The volumes that `host` sees, by namespace identifier.
    pub(crate) fn maps<'a>(&'a self, host: &'a str) -> impl Iterator<Item = (u32, VolumeId)> + 'a {
        unmasked(&self.namespaces, &self.masks, host)
    }

    /// Whether `host` has to come by TLS.
    pub(crate) fn requires_tls(&self, host: &str) -> bool {
        self.tls.get(host).is_some_and(|tls| tls.required)
    }

    /// Whether this node serves any of the volumes that `host` sees.
    pub(crate) fn serves(&self, host: &str) -> bool {
        self.maps(host).any(|(nsid, _)| !self.away.contains_key(&nsid))
    }
}

/// What hosts are told of a volume that is not served here for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent {
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Whether space is allocated only as it is written.
    pub thin: bool,
}

/// Who may reach a target or subsystem: nobody, unless listed. `P` is what can be asked for.
#[derive(Clone, Debug)]
pub struct Access<P> {
    /// Whoever asks; an explicit choice of the administrator.
    pub any: Option<Admission<P>>,
    /// By initiator name (IQN, EUI, NAA in lower case) or host NQN.
    pub named: BTreeMap<String, Admission<P>>,
}

/// How an allowed initiator has to prove who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission<P> {
    /// Its name will do.
    ByName,
    /// It is asked for a proof.
    Proof(P),
}

/// CHAP credentials of one initiator.
#[derive(Clone, PartialEq, Eq)]
pub struct Chap {
    /// The name the initiator gives.
    pub user: String,
    /// Its secret. Empty if it is not known: then nobody gets in.
    pub secret: Vec<u8>,
    /// Name and secret with which the target answers back, for mutual CHAP.
    pub mutual: Option<(String, Vec<u8>)>,
}

impl fmt::Debug for Chap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chap({}, mutual: {})", self.user, self.mutual.is_some())
    }
}

/// DH-HMAC-CHAP secrets of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostSecrets {
    /// What the host proves to have, and what the subsystem proves if the host wants that.
    Known {
        /// The host's.
        host: Secret,
        /// The subsystem's.
        controller: Option<Secret>,
    },
    /// There are some, and they cannot be read for now: the host is to come again.
    Unknown,
}

/// How one host comes to one subsystem by TLS (RFD 0022).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTls {
    /// The key that both have.
    pub key: HostKey,
    /// Whether the host is refused without TLS.
    pub required: bool,
}

/// The TLS key of a host and a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKey {
    /// This one.
    Known(TlsKey),
    /// There is one, and it cannot be read for now: nobody comes by TLS.
    Unknown,
}

impl<P> Default for Access<P> {
    fn default() -> Self {
        Self { any: None, named: BTreeMap::new() }
    }
}

impl<P> Access<P> {
    /// Whoever asks, without any proof.
    #[must_use]
    pub fn anybody() -> Self {
        Self { any: Some(Admission::ByName), ..Self::default() }
    }

    /// How `name` is admitted; `None` if it is not. A rule for the name goes before `any`.
    #[must_use]
    pub fn admission(&self, name: &str) -> Option<&Admission<P>> {
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
            assert!(pair[0].port() < pair[1].port());
            assert!(pair[0].controllers().end() < pair[1].controllers().start());
            assert_eq!(pair[1].first_portal() - pair[0].first_portal(), 256);
        }
        assert_eq!((all[0].controllers(), all[0].port()), (1..=0xfff, 1));
        assert_eq!((all[15].controllers(), all[15].port()), (0xf001..=0xffef, 16));
    }

    #[test]
    fn who_is_out_of_a_volume_knows_who_serves_it() {
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
            Catalog { shared: [(a, all)].into(), others: others.into(), ..Catalog::default() }
        };
        let local: SocketAddr = "198.51.100.1:3260".parse().unwrap();
        let at = |text: &str| Some(text.parse().unwrap());
        let out = catalog(Unavailable, Optimized, Optimized);
        assert_eq!(out.elsewhere([&a], local, false), at("198.51.100.2:3260"), "the same network");
        let v6 = "[2001:db8::1]:3260".parse().unwrap();
        assert_eq!(out.elsewhere([&a], v6, false), at("[2001:db8::2]:3260"));
        assert_eq!(out.elsewhere([&b], local, false), None, "nobody else has it");
        assert_eq!(out.elsewhere([&a, &b], local, false), None);
        assert_eq!(out.elsewhere([], local, true), None);
        let third = catalog(Unavailable, Unavailable, Optimized);
        assert_eq!(third.elsewhere([&a], local, false), at("192.0.2.3:3260"));
        let none = catalog(Unavailable, Unavailable, Unavailable);
        assert_eq!(none.elsewhere([&a], local, true), None);
        let serves = catalog(Optimized, Optimized, Optimized);
        assert_eq!(serves.elsewhere([&a], local, false), None, "it serves itself");
        assert_eq!(serves.elsewhere([&a], local, true), at("198.51.100.2:3260"), "and goes");
    }

    #[test]
    fn nobody_is_told_to_dial_a_wildcard() {
        let told = |listens: &[&str], local: &str| -> Vec<String> {
            let listens: Vec<_> = listens.iter().map(|at| at.parse().unwrap()).collect();
            dialled(&listens, local.parse().unwrap()).iter().map(ToString::to_string).collect()
        };
        let v4 = "[::ffff:192.0.2.1]:8009";
        assert_eq!(told(&["[::]:4420"], v4), ["192.0.2.1:4420"], "its own port, not discovery's");
        assert_eq!(told(&["[::]:4420"], "[2001:db8::1]:8009"), ["[2001:db8::1]:4420"]);
        assert_eq!(told(&["0.0.0.0:4420", "[::]:4420"], v4), ["192.0.2.1:4420"]);
        assert_eq!(told(&["0.0.0.0:4420"], "[2001:db8::1]:8009"), [""; 0], "nobody listens there");
        let one = ["198.51.100.1:4420", "[2001:db8::2]:4420"];
        assert_eq!(told(&one, v4), one, "what is configured is told as it is");
        assert_eq!(told(&[], v4), ["192.0.2.1:8009"]);
    }

    #[test]
    fn nobody_is_admitted_unless_listed() {
        let chap = Chap { user: "u".into(), secret: b"s3cret".to_vec(), mutual: None };
        let mut access = Access::default();
        assert_eq!(access.admission("iqn.a"), None);
        access.named.insert("iqn.a".into(), Admission::Proof(chap.clone()));
        assert!(access.admission("iqn.b").is_none());
        access.any = Some(Admission::ByName);
        assert_eq!(access.admission("iqn.b"), Some(&Admission::ByName));
        assert_eq!(access.admission("iqn.a"), Some(&Admission::Proof(chap.clone())));
        assert!(!format!("{access:?}{chap:?}").contains("s3cret"), "secrets stay out of logs");
    }
}
