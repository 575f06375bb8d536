//! What is served to whom: an immutable snapshot, replaced as a whole when anything changes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

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
    /// Where initiators reach iSCSI, as SendTargets reports it when the address that the
    /// initiator came to is not telling (a wildcard listener reports that address itself).
    pub iscsi_portals: Vec<SocketAddr>,
    /// Where hosts reach NVMe/TCP I/O controllers, likewise.
    pub nvme_portals: Vec<SocketAddr>,
    /// Changes with every snapshot; the discovery log's generation counter.
    pub generation: u64,
}

/// One iSCSI target.
#[derive(Clone, Debug, Default)]
pub struct IscsiTarget {
    /// The core its volumes live on.
    pub core: usize,
    /// Volumes by logical unit number.
    pub luns: BTreeMap<u16, VolumeId>,
    /// Who may log in.
    pub access: Access,
}

/// One NVMe subsystem.
#[derive(Clone, Debug, Default)]
pub struct Subsystem {
    /// The core its volumes live on.
    pub core: usize,
    /// Volumes by namespace identifier (from 1).
    pub namespaces: BTreeMap<u32, VolumeId>,
    /// Serial number: up to 20 ASCII characters.
    pub serial: String,
    /// Who may connect.
    pub access: Access,
}

/// Who may reach a target: nobody, unless listed.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Whoever asks; an explicit choice of the administrator.
    pub any: Option<Admission>,
    /// By initiator name (IQN, EUI, NAA in lower case) or host NQN.
    pub named: BTreeMap<String, Admission>,
}

/// How an allowed initiator has to prove who it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// CHAP; `None` admits by name alone.
    pub chap: Option<Chap>,
}

/// CHAP credentials of one initiator.
#[derive(Clone, PartialEq, Eq)]
pub struct Chap {
    /// The name the initiator gives.
    pub user: String,
    /// Its secret.
    pub secret: Vec<u8>,
    /// Name and secret with which the target answers back, for mutual CHAP.
    pub mutual: Option<(String, Vec<u8>)>,
}

impl fmt::Debug for Chap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chap({}, mutual: {})", self.user, self.mutual.is_some())
    }
}

impl Access {
    /// How `name` is admitted; `None` if it is not. A rule for the name goes before `any`.
    #[must_use]
    pub fn admission(&self, name: &str) -> Option<&Admission> {
        self.named.get(name).or(self.any.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_admitted_unless_listed() {
        let chap = Chap { user: "u".into(), secret: b"s3cret".to_vec(), mutual: None };
        let mut access = Access::default();
        assert_eq!(access.admission("iqn.a"), None);
        access.named.insert("iqn.a".into(), Admission { chap: Some(chap.clone()) });
        assert!(access.admission("iqn.b").is_none());
        access.any = Some(Admission::default());
        assert!(access.admission("iqn.b").is_some_and(|a| a.chap.is_none()));
        assert!(access.admission("iqn.a").is_some_and(|a| a.chap.is_some()));
        assert!(!format!("{access:?}{chap:?}").contains("s3cret"), "secrets stay out of logs");
    }
}
