//! Volumes and sessions as the API shows them.

use std::collections::BTreeMap;

use api::{
    DhchapHost, Initiator, InitiatorChapUser, Protocol, Session, TlsHost, VolumeIo, VolumeState,
};
use engine::{CoreReport, GuestReport, VolumeReport};
use records::reconcile::Observed;
use records::record::{
    StoredChap, StoredDhchap, StoredTls, StoredVolumeRecord, VolumeRecord, VolumeStage,
};
use target::server::Service;
use volume::CommandKind;

use crate::cluster_view::ClusterView;
use crate::unserved_volumes::MIRROR_RECORD_LOST;

/// The state of a volume as seen from this node; `cluster` is its view, if it is in one.
pub fn volume_state(
    record: &VolumeRecord,
    observed: &Observed,
    cluster: Option<&ClusterView>,
) -> VolumeState {
    match (record.stage, observed, cluster) {
        (VolumeStage::Creating, ..) => VolumeState::Creating,
        (VolumeStage::Deleting, Observed::EraseFailed { reason }, _) => {
            VolumeState::Offline { reason: reason.clone() }
        }
        (VolumeStage::Deleting, ..) => VolumeState::Deleting,
        (VolumeStage::Ready, observed, Some(cluster)) => {
            cluster_volume_state(record, observed, cluster)
        }
        (
            VolumeStage::Ready,
            Observed::OpenFailed { reason } | Observed::EraseFailed { reason },
            None,
        ) => VolumeState::Offline { reason: reason.clone() },
        (VolumeStage::Ready, Observed::Open { .. }, None) => VolumeState::Online,
        (VolumeStage::Ready, _, None) => VolumeState::Opening,
    }
}

/// The state of a volume of a cluster, as seen from one node.
fn cluster_volume_state(
    record: &VolumeRecord,
    observed: &Observed,
    cluster: &ClusterView,
) -> VolumeState {
    let serving = cluster.serving_nodes(record.id);
    if serving.contains(&cluster.this_node) {
        return VolumeState::Online;
    }
    let reason = match observed {
        Observed::OpenFailed { reason } | Observed::EraseFailed { reason } => reason.clone(),
        _ => cluster.why_not_served_here(record),
    };
    match serving.is_empty() {
        true if cluster.is_mirror_record_lost(record) => {
            VolumeState::Offline { reason: MIRROR_RECORD_LOST.to_owned() }
        }
        true if cluster.awaits_first_report(record.id) => VolumeState::Opening,
        true => VolumeState::Offline { reason: cluster.why_unserved(record).0 },
        false => VolumeState::Remote { reason },
    }
}

/// What initiators did with a volume since it was opened.
pub fn volume_io(report: &VolumeReport) -> VolumeIo {
    let (read, write) = (report.kind(CommandKind::Read), report.kind(CommandKind::Write));
    VolumeIo {
        reads: read.completed,
        read_bytes: read.bytes,
        writes: write.completed,
        write_bytes: write.bytes,
        errors: report.kinds.iter().map(|k| k.failed).sum(),
    }
}

/// Initiators with CHAP secrets of their own.
pub fn chap_initiators(record: &VolumeRecord) -> Vec<InitiatorChapUser> {
    let user = |(initiator, stored): (&String, &StoredChap)| InitiatorChapUser {
        initiator: Initiator::Iscsi(initiator.clone()),
        user: stored.user().clone(),
        mutual_user: stored.mutual_user().cloned(),
    };
    record.chap_by_initiator.iter().map(user).collect()
}

/// Hosts that have to authenticate.
pub fn dhchap_hosts(record: &VolumeRecord) -> Vec<DhchapHost> {
    let host = |(host, stored): (&String, &StoredDhchap)| DhchapHost {
        host: Initiator::Nvme(host.clone()),
        mutual: stored.is_mutual(),
    };
    record.dhchap_by_host.iter().map(host).collect()
}

/// Hosts for which TLS is required or allowed.
pub fn tls_hosts(record: &VolumeRecord) -> Vec<TlsHost> {
    let host = |(host, stored): (&String, &StoredTls)| TlsHost {
        host: Initiator::Nvme(host.clone()),
        required: stored.is_required(),
    };
    record.tls_by_host.iter().map(host).collect()
}

/// Whether a volume is a LUN of sessions of `initiator`. iSCSI sessions outlive a change of mapping
/// (RFD 0017, 2).
fn is_mapped_to(record: &VolumeRecord, protocol: Protocol, initiator: &str) -> bool {
    let allows = |i: &Initiator| match (i, protocol) {
        (Initiator::Any, _) => true,
        (Initiator::Iscsi(name), Protocol::Iscsi) | (Initiator::Nvme(name), Protocol::Nvme) => {
            name == initiator
        }
        (Initiator::Iscsi(_) | Initiator::Nvme(_), _) => false,
    };
    let is_exported = match protocol {
        Protocol::Iscsi => record.protocols.iscsi,
        Protocol::Nvme => record.protocols.nvme,
        // The socket identifies its volume.
        Protocol::VhostUser => false,
    };
    record.stage == VolumeStage::Ready && is_exported && record.allow.iter().any(allows)
}

/// Merges connections to sessions; those of NVMe all use TLS, or none does (RFD 0022, 3).
pub fn merge_sessions(
    volumes: &[(StoredVolumeRecord, Observed)],
    cores: &[CoreReport],
) -> Vec<Session> {
    let records = || volumes.iter().map(|(stored, _)| &stored.record);
    let subsystems: BTreeMap<_, _> = records().map(|r| (r.id, r.nvme_subsystem.as_str())).collect();
    let reached = |protocol, initiator: &str, target: &str| {
        let stands_behind = |r: &VolumeRecord| match protocol {
            Protocol::Iscsi => r.target_name() == target,
            Protocol::Nvme => subsystems.get(&r.target_owner()) == Some(&target),
            Protocol::VhostUser => false,
        };
        let uses = |r: &&VolumeRecord| stands_behind(r) && is_mapped_to(r, protocol, initiator);
        records().filter(uses).map(|r| r.name.clone()).collect()
    };
    let mut merged = BTreeMap::<_, Session>::new();
    for connection in cores.iter().flat_map(|core| &core.sessions) {
        let Some(initiator) = &connection.initiator else { continue };
        let protocol = match connection.service {
            Service::Iscsi => Protocol::Iscsi,
            Service::Nvme => Protocol::Nvme,
        };
        let (peer, tls) = (connection.peer.ip(), connection.tls);
        let key = (protocol, initiator, &connection.target, peer, tls);
        let age_s = connection.age.as_secs();
        let session = merged.entry(key).or_insert_with(|| Session {
            protocol,
            initiator: initiator.clone(),
            peer: connection.peer.to_string(),
            target: connection.target.clone().unwrap_or_default(),
            volumes: (connection.target.as_deref())
                .map_or_else(Vec::new, |t| reached(protocol, initiator, t)),
            connections: 0,
            tls,
            core: u32::try_from(connection.core).unwrap_or(u32::MAX),
            age_s,
        });
        session.connections += 1;
        session.age_s = session.age_s.max(age_s);
    }
    let guests = cores.iter().flat_map(|core| core.guests.iter().map(move |g| (core.core, g)));
    let guests = guests.filter_map(|(core, guest)| {
        let record = records().find(|r| r.id == guest.volume)?;
        Some(guest_session(core, guest, record))
    });
    merged.into_values().chain(guests).collect()
}

/// The session of a virtual machine, which has no initiator name.
fn guest_session(core: usize, guest: &GuestReport, record: &VolumeRecord) -> Session {
    Session {
        protocol: Protocol::VhostUser,
        initiator: "a virtual machine".to_owned(),
        peer: guest.socket.display().to_string(),
        target: record.name.to_string(),
        volumes: vec![record.name.clone()],
        connections: 1,
        tls: false,
        core: u32::try_from(core).unwrap_or(u32::MAX),
        age_s: guest.age.as_secs(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use cluster::store::Revision;
    use records::samples::record;

    fn connection(initiator: Option<&str>, target: Option<&str>, port: u16) -> target::SessionInfo {
        target::SessionInfo {
            service: Service::Nvme,
            peer: ([192, 0, 2, 1], port).into(),
            local: ([192, 0, 2, 2], 4420).into(),
            initiator: initiator.map(Into::into),
            target: target.map(Into::into),
            tls: false,
            queue: port,
            age: Duration::from_secs(u64::from(port)),
            core: 0,
        }
    }

    #[test]
    fn queues_of_one_host_are_one_session() {
        let v = VolumeRecord { allow: ["any".parse().unwrap()].into(), ..record("v") };
        let nqn = v.nvme_subsystem.clone();
        let volumes = [(StoredVolumeRecord { record: v, revision: Revision(1) }, Observed::Closed)];
        let pool = rt::buf::BufferPool::new(4096).unwrap().usage();
        let core = CoreReport {
            core: 0,
            sessions: vec![
                connection(Some("nqn.h"), Some(&nqn), 1),
                connection(Some("nqn.h"), Some(&nqn), 2),
                connection(Some("nqn.other"), Some(&nqn), 3),
                connection(Some("nqn.h"), None, 4),
                connection(None, None, 5),
                target::SessionInfo { tls: true, ..connection(Some("nqn.h"), Some(&nqn), 6) },
                target::SessionInfo { tls: true, ..connection(Some("nqn.h"), Some(&nqn), 7) },
            ],
            guests: Vec::new(),
            refused_connections: 0,
            clients: target::ClientReport::default(),
            memory: pool,
            volumes: Vec::new(),
        };
        let shown = merge_sessions(&volumes, &[core]);
        let brief: Vec<_> = (shown.iter())
            .map(|s| (s.initiator.as_str(), !s.volumes.is_empty(), s.tls, s.connections, s.age_s))
            .collect();
        assert_eq!(
            brief,
            [
                ("nqn.h", false, false, 1, 4),
                ("nqn.h", true, false, 2, 2),
                ("nqn.h", true, true, 2, 7),
                ("nqn.other", true, false, 1, 3),
            ]
        );
    }
}
