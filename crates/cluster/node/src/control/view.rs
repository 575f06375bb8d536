//! Volumes and sessions as they are shown.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;

use api::{
    Access, ApiError, Code, CopyState, DhchapHost, Initiator, InitiatorUser, IscsiExport,
    NvmeExport, PoolName, Protocol, Session, SessionList, TargetUnit, TlsHost, VhostUserExport,
    Volume, VolumeCopy, VolumeIo, VolumeList, VolumeName, VolumeState,
};
use cluster::nodes::NodePortals;
use target::server::Service;
use uuid::Uuid;
use volume::Kind;

use super::copy_state::broken_next;
use super::status::unusable;
use super::together::NO_MIRROR;
use super::{Control, Together};
use crate::engine::{self, CoreReport, GuestReport, Scope, VolumeReport};
use crate::reconcile::Observed;
use crate::record::{
    Place, PlaceStage, Stage, Stored, StoredChap, StoredDhchap, StoredTls, VolumeRecord,
};

impl Control {
    /// All volumes, by name.
    pub async fn list(&self) -> VolumeList {
        let volumes = self.0.state.all();
        let look = self.space_of(&volumes);
        let (reports, space) = tokio::join!(self.0.engine.report(Scope::All), look);
        let sessions = sessions(&volumes, &reports);
        let usage = self.usage(&sessions, &reports, space.taken).await;
        let show = |(s, o): &(Stored, Observed)| self.show_with(s, o, &usage);
        let unread = self.unread(usage.together.as_ref());
        VolumeList { volumes: volumes.iter().map(show).collect(), unread }
    }

    /// One volume.
    ///
    /// # Errors
    /// [`Code::NotFound`].
    pub async fn show(&self, name: &VolumeName) -> Result<Volume, ApiError> {
        self.show_id(self.find(name)?).await
    }

    pub(super) async fn show_id(&self, id: Uuid) -> Result<Volume, ApiError> {
        let volume = (self.0.state.get(id))
            .ok_or_else(|| ApiError::new(Code::NotFound, "the volume was deleted just now"))?;
        let volume = [volume];
        let look = self.space_of(&volume);
        let (reports, space) = tokio::join!(self.0.engine.report(Scope::One(id)), look);
        let sessions = sessions(&self.0.state.all(), &reports);
        let usage = self.usage(&sessions, &reports, space.taken).await;
        let [(stored, observed)] = &volume;
        Ok(self.show_with(stored, observed, &usage))
    }

    /// Why the volumes that are known here may not be all, or not as they are now.
    fn unread(&self, together: Option<&Together>) -> Option<String> {
        if let Some(what) = self.waits_for() {
            return Some(format!("this node waits for its cluster: {what}"));
        }
        if !self.0.state.has_read() {
            return Some("this node is starting: it has not read its store yet".to_owned());
        }
        if let Some(damage) = self.0.state.damaged().first() {
            return Some(format!("a record of the store cannot be read: {damage}"));
        }
        let error = together?.store.error.as_ref()?;
        Some(format!("{error}: this is what the store said last"))
    }

    async fn usage<'a>(
        &self,
        sessions: &[Session],
        reports: &'a [CoreReport],
        space: HashMap<Uuid, u64>,
    ) -> Usage<'a> {
        let (together, pools) = tokio::join!(self.together(reports), self.pool_facts());
        let stopped = pools.into_iter().filter_map(|pool| {
            let why = pool.report?.broken?;
            Some((pool.record.name, why))
        });
        Usage::new(sessions, reports, space, together, stopped.collect())
    }

    fn show_with(&self, stored: &Stored, observed: &Observed, usage: &Usage<'_>) -> Volume {
        let record = &stored.record;
        let own = &self.0.settings.portals;
        let text = |list: &[SocketAddr], all: Vec<String>| match self.membership() {
            Some(_) => all,
            None => list.iter().map(ToString::to_string).collect(),
        };
        let report = usage.reports.get(&record.id).copied();
        let owner = self.owner(record);
        let guard = owner.as_ref().unwrap_or(record);
        let chap = guard.chap.as_ref();
        Volume {
            name: record.name.clone(),
            id: record.id,
            size_bytes: record.size_bytes,
            block_size: record.block_size,
            thin: record.thin,
            copies: match &usage.together {
                Some(together) => together.copies(record),
                None => record.places.iter().map(|p| self.only_copy(record, p, observed)).collect(),
            },
            copies_wanted: record.copies_wanted,
            allocated_bytes: usage.space.get(&record.id).copied(),
            state: match self.unusable_here(record, report, usage) {
                Some(reason) => VolumeState::Offline { reason },
                None => volume_state(record, observed, usage.together.as_ref()),
            },
            access: Access {
                initiators: record.allow.iter().cloned().collect(),
                chap_user: chap.map(|c| c.user().clone()),
                chap_mutual_user: chap.and_then(|c| c.mutual_user().cloned()),
                chap_initiators: chap_initiators(guard),
                dhchap_hosts: dhchap_hosts(guard),
                tls_hosts: tls_hosts(guard),
            },
            iscsi: record.protocols.iscsi.then(|| IscsiExport {
                target: record.target().to_owned(),
                lun: record.mapping.lun,
                owner: owner.as_ref().unwrap_or(record).name.clone(),
                others: self.others(record, owner.as_ref()),
                portals: text(&own.iscsi, self.portals(record, |p| &p.iscsi)),
            }),
            nvme: record.protocols.nvme.then(|| NvmeExport {
                subsystem: guard.nvme_subsystem.clone(),
                namespace: record.namespace(),
                portals: text(&own.nvme, self.portals(record, |p| &p.nvme)),
            }),
            vhost_user: record
                .protocols
                .vhost_user
                .then(|| VhostUserExport { socket: self.socket(record) }),
            sessions: usage.sessions.get(&record.name).copied().unwrap_or(0),
            created_s: record.created_s,
            io: report.map(volume_io),
        }
    }

    /// Why a volume of a node by itself serves nobody though it is open.
    fn unusable_here(
        &self,
        record: &VolumeRecord,
        report: Option<&VolumeReport>,
        usage: &Usage<'_>,
    ) -> Option<String> {
        if usage.together.is_some() || record.stage != Stage::Ready {
            return None;
        }
        let pool = record.place(self.me()).and_then(|place| place.backing.pool());
        if let Some((pool, why)) = pool.and_then(|pool| usage.stopped.get_key_value(pool)) {
            return Some(format!("pool {pool} has stopped: {why}"));
        }
        unusable(&record.name, report?).map(|(why, _)| why)
    }

    /// Where virtual machines on this machine reach a volume that has a copy here.
    fn socket(&self, record: &VolumeRecord) -> Option<PathBuf> {
        record.place(self.me())?;
        let directory = self.0.settings.vhost_user.as_ref()?;
        Some(engine::socket(directory, &record.name))
    }

    /// The volume behind whose target another one stands; `None` for its own.
    fn owner(&self, record: &VolumeRecord) -> Option<VolumeRecord> {
        let behind = record.mapping.behind.as_ref()?;
        self.0.state.get(behind.volume).map(|(stored, _)| stored.record)
    }

    /// The other units of a volume's target.
    fn others(&self, record: &VolumeRecord, owner: Option<&VolumeRecord>) -> Vec<TargetUnit> {
        let target = owner.unwrap_or(record);
        let own = (target.mapping.lun, target.id);
        let guests = target.mapping.guests.iter().map(|(lun, id)| (*lun, *id));
        let others = std::iter::once(own).chain(guests).filter(|(_, id)| *id != record.id);
        let unit = |(lun, id)| {
            let volume = self.0.state.get(id)?.0.record.name;
            Some(TargetUnit { lun, volume })
        };
        let mut others: Vec<_> = others.filter_map(unit).collect();
        others.sort_by_key(|unit| unit.lun);
        others
    }

    /// The copy of a volume on a node that is in no cluster.
    fn only_copy(&self, record: &VolumeRecord, place: &Place, observed: &Observed) -> VolumeCopy {
        let broken = match observed {
            Observed::Broken { reason } if place.stage.is_kept() => Some(reason.clone()),
            _ => None,
        };
        let state = match &place.stage {
            // What cannot be opened holds nothing, as far as anybody knows.
            PlaceStage::Made | PlaceStage::Superseded if broken.is_some() => CopyState::Outdated,
            PlaceStage::Made | PlaceStage::Superseded => CopyState::InSync,
            PlaceStage::Wanted { .. } => CopyState::BeingMade,
            PlaceStage::Leaving { .. } => CopyState::Leaving,
            PlaceStage::Failed { reason } => CopyState::Failed { reason: reason.clone() },
        };
        let (node, backing) = (self.0.settings.name.clone(), place.backing.clone());
        let hint = broken.as_ref().map(|_| broken_next(record, &node));
        VolumeCopy { node, backing, state, reason: broken, hint, primary: true }
    }

    /// Where a volume is reached: at all nodes that keep a copy of it.
    fn portals(
        &self,
        record: &VolumeRecord,
        of: impl Fn(&NodePortals) -> &[SocketAddr],
    ) -> Vec<String> {
        let Some(membership) = self.membership() else { return Vec::new() };
        let nodes = membership.nodes.borrow();
        let places = record.places.iter().filter_map(|p| nodes.get(&p.node));
        places.flat_map(|n| of(&n.record.portals)).map(ToString::to_string).collect()
    }

    /// All sessions: connections and queues of one initiator to one target together.
    pub async fn sessions(&self) -> SessionList {
        let reports = self.0.engine.report(Scope::None).await;
        SessionList { sessions: sessions(&self.0.state.all(), &reports) }
    }

    /// The sessions of one volume.
    pub(super) async fn sessions_of(&self, id: Uuid) -> Vec<Session> {
        let Some((stored, _)) = self.0.state.get(id) else { return Vec::new() };
        let mut all = self.sessions().await.sessions;
        all.retain(|s| s.volumes.contains(&stored.record.name));
        all
    }
}

/// What is known of volumes beside their records.
struct Usage<'a> {
    reports: HashMap<Uuid, &'a VolumeReport>,
    space: HashMap<Uuid, u64>,
    sessions: HashMap<VolumeName, u32>,
    together: Option<Together>,
    /// Pools that have stopped, and why.
    stopped: BTreeMap<PoolName, String>,
}

impl<'a> Usage<'a> {
    fn new(
        sessions: &[Session],
        cores: &'a [CoreReport],
        space: HashMap<Uuid, u64>,
        together: Option<Together>,
        stopped: BTreeMap<PoolName, String>,
    ) -> Self {
        let reports = cores.iter().flat_map(|c| &c.volumes).map(|v| (v.id, v)).collect();
        let mut counts = HashMap::new();
        for name in sessions.iter().flat_map(|s| &s.volumes) {
            *counts.entry(name.clone()).or_default() += 1;
        }
        Self { reports, space, sessions: counts, together, stopped }
    }
}

pub(super) fn volume_state(
    record: &VolumeRecord,
    observed: &Observed,
    together: Option<&Together>,
) -> VolumeState {
    match (record.stage, observed, together) {
        (Stage::Creating, ..) => VolumeState::Creating,
        (Stage::Deleting, Observed::Stuck { reason }, _) => {
            VolumeState::Offline { reason: reason.clone() }
        }
        (Stage::Deleting, ..) => VolumeState::Deleting,
        (Stage::Ready, observed, Some(together)) => clustered(record, observed, together),
        (Stage::Ready, Observed::Broken { reason } | Observed::Stuck { reason }, None) => {
            VolumeState::Offline { reason: reason.clone() }
        }
        (Stage::Ready, Observed::Open { .. }, None) => VolumeState::Online,
        (Stage::Ready, _, None) => VolumeState::Opening,
    }
}

/// The state of a volume of a cluster, as it is seen from one node.
fn clustered(record: &VolumeRecord, observed: &Observed, together: &Together) -> VolumeState {
    let serving = together.served_by(record.id);
    if serving.contains(&together.me) {
        return VolumeState::Online;
    }
    let reason = match observed {
        Observed::Broken { reason } | Observed::Stuck { reason } => reason.clone(),
        _ => together.why_not(record),
    };
    match serving.is_empty() {
        true if together.lacks_mirror(record) => {
            VolumeState::Offline { reason: NO_MIRROR.to_owned() }
        }
        true if together.is_young(record.id) => VolumeState::Opening,
        true => VolumeState::Offline { reason: together.down(record).0 },
        false => VolumeState::Elsewhere { reason },
    }
}

fn volume_io(report: &VolumeReport) -> VolumeIo {
    let (read, write) = (report.of(Kind::Read), report.of(Kind::Write));
    VolumeIo {
        reads: read.completed,
        read_bytes: read.bytes,
        writes: write.completed,
        write_bytes: write.bytes,
        errors: report.kinds.iter().map(|k| k.failed).sum(),
    }
}

/// Who has a secret of its own.
fn chap_initiators(record: &VolumeRecord) -> Vec<InitiatorUser> {
    let user = |(initiator, held): (&String, &StoredChap)| InitiatorUser {
        initiator: Initiator::Iscsi(initiator.clone()),
        user: held.user().clone(),
        mutual_user: held.mutual_user().cloned(),
    };
    record.proofs.iter().map(user).collect()
}

/// Which hosts have to prove who they are.
fn dhchap_hosts(record: &VolumeRecord) -> Vec<DhchapHost> {
    let host = |(host, held): (&String, &StoredDhchap)| DhchapHost {
        host: Initiator::Nvme(host.clone()),
        mutual: held.is_mutual(),
    };
    record.hosts.iter().map(host).collect()
}

/// Which hosts come by TLS, or may.
fn tls_hosts(record: &VolumeRecord) -> Vec<TlsHost> {
    let host = |(host, held): (&String, &StoredTls)| TlsHost {
        host: Initiator::Nvme(host.clone()),
        required: held.is_required(),
    };
    record.tls.iter().map(host).collect()
}

/// Whether a volume is a unit of sessions of `initiator`. Those of iSCSI outlive that (RFD 0017, 2).
fn maps_to(record: &VolumeRecord, protocol: Protocol, initiator: &str) -> bool {
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
        // Its socket says whose it is.
        Protocol::VhostUser => false,
    };
    record.stage == Stage::Ready && is_exported && record.allow.iter().any(allows)
}

/// Connections that have logged in, put together to sessions; those of NVMe come all by TLS or all without (RFD 0022, 3).
pub(super) fn sessions(volumes: &[(Stored, Observed)], cores: &[CoreReport]) -> Vec<Session> {
    let records = || volumes.iter().map(|(stored, _)| &stored.record);
    let subsystems: BTreeMap<_, _> = records().map(|r| (r.id, r.nvme_subsystem.as_str())).collect();
    let reached = |protocol, initiator: &str, target: &str| {
        let stands_behind = |r: &VolumeRecord| match protocol {
            Protocol::Iscsi => r.target() == target,
            Protocol::Nvme => subsystems.get(&r.owner()) == Some(&target),
            Protocol::VhostUser => false,
        };
        let reaches = |r: &&VolumeRecord| stands_behind(r) && maps_to(r, protocol, initiator);
        records().filter(reaches).map(|r| r.name.clone()).collect()
    };
    let mut together = BTreeMap::<_, Session>::new();
    for connection in cores.iter().flat_map(|core| &core.sessions) {
        let Some(initiator) = &connection.initiator else { continue };
        let protocol = match connection.service {
            Service::Iscsi => Protocol::Iscsi,
            Service::Nvme => Protocol::Nvme,
        };
        let (peer, tls) = (connection.peer.ip(), connection.tls);
        let key = (protocol, initiator, &connection.target, peer, tls);
        let age_s = connection.age.as_secs();
        let session = together.entry(key).or_insert_with(|| Session {
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
    together.into_values().chain(guests).collect()
}

/// A virtual machine's session: nobody asks it for a name.
fn guest_session(core: usize, guest: &GuestReport, record: &VolumeRecord) -> Session {
    Session {
        protocol: Protocol::VhostUser,
        initiator: "a virtual machine".to_owned(),
        peer: guest.at.display().to_string(),
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
    use crate::meta::Revision;
    use crate::record::tests::record;

    fn connection(initiator: Option<&str>, target: Option<&str>, port: u16) -> target::Session {
        target::Session {
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
        let volumes = [(Stored { record: v, revision: Revision(1) }, Observed::Closed)];
        let pool = rt::buf::Pool::new(4096).unwrap().usage();
        let core = CoreReport {
            core: 0,
            sessions: vec![
                connection(Some("nqn.h"), Some(&nqn), 1),
                connection(Some("nqn.h"), Some(&nqn), 2),
                connection(Some("nqn.other"), Some(&nqn), 3),
                connection(Some("nqn.h"), None, 4),
                connection(None, None, 5),
                target::Session { tls: true, ..connection(Some("nqn.h"), Some(&nqn), 6) },
                target::Session { tls: true, ..connection(Some("nqn.h"), Some(&nqn), 7) },
            ],
            guests: Vec::new(),
            refused: 0,
            clients: target::Clients::default(),
            pool,
            volumes: Vec::new(),
        };
        let shown = sessions(&volumes, &[core]);
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
