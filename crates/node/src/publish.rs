//! What initiators are told is there: the catalog, made from records.

use std::net::SocketAddr;

use api::Initiator;
use target::catalog::{Access, Admission, Catalog, Chap, IscsiTarget, Subsystem, VolumeId};
use uuid::Uuid;

use crate::record::VolumeRecord;

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

/// The catalog of the volumes that are open, each on its core.
pub fn catalog<'a>(
    open: impl Iterator<Item = (&'a VolumeRecord, usize)>,
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
    for (record, core) in open {
        let id = volume_id(record.id);
        if record.protocols.iscsi {
            let access = iscsi_access(record);
            let target = IscsiTarget { core, luns: [(LUN, id)].into(), access };
            catalog.targets.insert(record.iscsi_target.clone(), target);
        }
        if record.protocols.nvme {
            let mut serial = record.id.simple().to_string();
            serial.truncate(SERIAL);
            let (namespaces, access) = ([(NAMESPACE, id)].into(), nvme_access(record));
            let subsystem = Subsystem { core, namespaces, serial, access };
            catalog.subsystems.insert(record.nvme_subsystem.clone(), subsystem);
        }
    }
    catalog
}

fn iscsi_access(record: &VolumeRecord) -> Access {
    let chap = record.chap.as_ref().map(|chap| Chap {
        user: chap.user.as_str().to_owned(),
        secret: chap.secret.expose().as_bytes().to_vec(),
        mutual: (chap.mutual.as_ref())
            .map(|m| (m.user.as_str().to_owned(), m.secret.expose().as_bytes().to_vec())),
    });
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
    use super::*;
    use crate::record::tests::record;

    #[test]
    fn a_volume_is_told_to_those_it_is_exported_to() {
        let iqn = "iqn.1993-08.org.debian:01:a";
        let nqn = "nqn.2014-08.org.nvmexpress:h";
        let named = VolumeRecord {
            allow: [iqn, nqn].map(|s| s.parse().unwrap()).into(),
            chap: serde_json::from_str(
                r#"{"user":"u","secret":"0123456789ab","mutual":{"user":"m","secret":"ba9876543210"}}"#,
            )
            .unwrap(),
            ..record("a")
        };
        let open = VolumeRecord {
            allow: ["any".parse().unwrap()].into(),
            protocols: api::Protocols { iscsi: false, nvme: true },
            ..record("b")
        };
        let closed = record("c");
        let all = [(&named, 0), (&open, 1), (&closed, 0)];
        let catalog = catalog(all.into_iter(), &[], &[], 3);

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
}
