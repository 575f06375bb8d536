//! Volumes and sessions as the API shows them.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;

use api::{
    Access, ApiError, ErrorCode, IscsiExport, NvmeExport, PoolName, ReplicaState, Session,
    SessionList, TargetLun, VhostUserExport, Volume, VolumeList, VolumeName, VolumeReplica,
    VolumeState,
};
use cluster::nodes::NodePortals;
use engine::{CoreReport, ReportScope, VolumeReport};
use records::reconcile::Observed;
use records::record::{
    PlacementStage, ReplicaPlacement, StoredVolumeRecord, VolumeRecord, VolumeStage,
};
use status::cluster_view::ClusterView;
use status::replica_state::open_failed_hint;
use status::verdict::unusable_reason;
use status::volume_status::{
    chap_initiators, dhchap_hosts, merge_sessions, tls_hosts, volume_io, volume_state,
};
use uuid::Uuid;

use super::VolumeControl;

impl VolumeControl {
    /// Lists all volumes, by name.
    pub async fn list_volumes(&self) -> VolumeList {
        let volumes = self.0.context.volumes.all();
        let measuring = self.space_of(&volumes);
        let (reports, space) =
            tokio::join!(self.0.context.engine.report(ReportScope::All), measuring);
        let sessions = merge_sessions(&volumes, &reports);
        let usage = self.volume_context(&sessions, &reports, space.allocated).await;
        let show = |(s, o): &(StoredVolumeRecord, Observed)| self.volume_info(s, o, &usage);
        let stale_reason = self.staleness_reason(usage.cluster.as_ref());
        VolumeList { volumes: volumes.iter().map(show).collect(), stale_reason }
    }

    /// Returns one volume.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub async fn get_volume(&self, name: &VolumeName) -> Result<Volume, ApiError> {
        self.volume_by_id(self.volume_id(name)?).await
    }

    pub(super) async fn volume_by_id(&self, id: Uuid) -> Result<Volume, ApiError> {
        let volume = (self.0.context.volumes.get(id))
            .ok_or_else(|| ApiError::new(ErrorCode::NotFound, "the volume was deleted just now"))?;
        let volume = [volume];
        let measuring = self.space_of(&volume);
        let (reports, space) =
            tokio::join!(self.0.context.engine.report(ReportScope::One(id)), measuring);
        let sessions = merge_sessions(&self.0.context.volumes.all(), &reports);
        let usage = self.volume_context(&sessions, &reports, space.allocated).await;
        let [(stored, observed)] = &volume;
        Ok(self.volume_info(stored, observed, &usage))
    }

    /// Why the list of volumes here may be incomplete or outdated.
    fn staleness_reason(&self, cluster: Option<&ClusterView>) -> Option<String> {
        if let Some(what) = self.0.context.startup_wait_reason() {
            return Some(format!("this node waits for its cluster: {what}"));
        }
        if !self.0.context.volumes.has_read_store() {
            return Some("this node is starting: it has not read its store yet".to_owned());
        }
        if let Some(damage) = self.0.context.volumes.damaged_records().first() {
            return Some(format!("a record of the store cannot be read: {damage}"));
        }
        let error = cluster?.store.error.as_ref()?;
        Some(format!("{error}: this list shows the last known state"))
    }

    async fn volume_context<'a>(
        &self,
        sessions: &[Session],
        reports: &'a [CoreReport],
        space: HashMap<Uuid, u64>,
    ) -> VolumeContext<'a> {
        let (cluster, pools) =
            tokio::join!(self.0.context.cluster_view(reports), self.0.pools.pool_facts());
        let stopped = pools.into_iter().filter_map(|pool| {
            let why = pool.report?.write_error?;
            Some((pool.record.name, why))
        });
        VolumeContext::new(sessions, reports, space, cluster, stopped.collect())
    }

    fn volume_info(
        &self,
        stored: &StoredVolumeRecord,
        observed: &Observed,
        usage: &VolumeContext<'_>,
    ) -> Volume {
        let record = &stored.record;
        let own = &self.0.context.settings.portals;
        let text = |list: &[SocketAddr], all: Vec<String>| match self.joined_cluster() {
            Some(_) => all,
            None => list.iter().map(ToString::to_string).collect(),
        };
        let report = usage.reports.get(&record.id).copied();
        let owner = self.target_owner(record);
        let guard = owner.as_ref().unwrap_or(record);
        let chap = guard.chap.as_ref();
        Volume {
            name: record.name.clone(),
            id: record.id,
            size_bytes: record.size_bytes,
            block_size: record.block_size,
            thin: record.thin,
            replicas: match &usage.cluster {
                Some(cluster) => cluster.replicas(record),
                None => record
                    .placements
                    .iter()
                    .map(|p| self.standalone_replica(record, p, observed))
                    .collect(),
            },
            replicas_wanted: record.replicas_wanted,
            allocated_bytes: usage.space.get(&record.id).copied(),
            state: match self.unusable_here(record, report, usage) {
                Some(reason) => VolumeState::Offline { reason },
                None => volume_state(record, observed, usage.cluster.as_ref()),
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
                target: record.target_name().to_owned(),
                lun: record.mapping.lun,
                owner: owner.as_ref().unwrap_or(record).name.clone(),
                other_luns: self.other_luns(record, owner.as_ref()),
                portals: text(&own.iscsi, self.portal_texts(record, |p| &p.iscsi)),
            }),
            nvme: record.protocols.nvme.then(|| NvmeExport {
                subsystem: guard.nvme_subsystem.clone(),
                namespace: record.nsid(),
                portals: text(&own.nvme, self.portal_texts(record, |p| &p.nvme)),
            }),
            vhost_user: record
                .protocols
                .vhost_user
                .then(|| VhostUserExport { socket: self.vhost_user_socket(record) }),
            sessions: usage.sessions.get(&record.name).copied().unwrap_or(0),
            created_s: record.created_s,
            io: report.map(volume_io),
        }
    }

    /// Why an open volume of a standalone node does not serve.
    fn unusable_here(
        &self,
        record: &VolumeRecord,
        report: Option<&VolumeReport>,
        usage: &VolumeContext<'_>,
    ) -> Option<String> {
        if usage.cluster.is_some() || record.stage != VolumeStage::Ready {
            return None;
        }
        let pool =
            record.placement(self.this_node()).and_then(|placement| placement.backing.pool());
        if let Some((pool, why)) = pool.and_then(|pool| usage.stopped_pools.get_key_value(pool)) {
            return Some(format!("pool {pool} has stopped: {why}"));
        }
        unusable_reason(&record.name, report?).map(|(why, _)| why)
    }

    /// The vhost-user socket of a volume that has a replica here.
    fn vhost_user_socket(&self, record: &VolumeRecord) -> Option<PathBuf> {
        record.placement(self.this_node())?;
        let directory = self.0.context.settings.vhost_user.as_ref()?;
        Some(engine::socket_path(directory, &record.name))
    }

    /// The volume that owns the target of this one; `None` if it is its own.
    fn target_owner(&self, record: &VolumeRecord) -> Option<VolumeRecord> {
        let behind = record.mapping.shared_target.as_ref()?;
        self.0.context.volumes.get(behind.volume).map(|(stored, _)| stored.record)
    }

    /// The other LUNs of a volume's target.
    fn other_luns(&self, record: &VolumeRecord, owner: Option<&VolumeRecord>) -> Vec<TargetLun> {
        let target = owner.unwrap_or(record);
        let own = (target.mapping.lun, target.id);
        let guests = target.mapping.other_luns.iter().map(|(lun, id)| (*lun, *id));
        let others = std::iter::once(own).chain(guests).filter(|(_, id)| *id != record.id);
        let unit = |(lun, id)| {
            let volume = self.0.context.volumes.get(id)?.0.record.name;
            Some(TargetLun { lun, volume })
        };
        let mut others: Vec<_> = others.filter_map(unit).collect();
        others.sort_by_key(|unit| unit.lun);
        others
    }

    /// The replica of a volume on a standalone node.
    fn standalone_replica(
        &self,
        record: &VolumeRecord,
        placement: &ReplicaPlacement,
        observed: &Observed,
    ) -> VolumeReplica {
        let open_error = match observed {
            Observed::OpenFailed { reason } if placement.stage.should_be_open() => {
                Some(reason.clone())
            }
            _ => None,
        };
        let state = match &placement.stage {
            // A replica that cannot be opened counts as holding nothing.
            PlacementStage::Ready | PlacementStage::Superseded if open_error.is_some() => {
                ReplicaState::OutOfSync
            }
            PlacementStage::Ready | PlacementStage::Superseded => ReplicaState::InSync,
            PlacementStage::Creating { .. } => ReplicaState::Creating,
            PlacementStage::Removing { .. } => ReplicaState::Removing,
            PlacementStage::Failed { reason } => ReplicaState::Failed { reason: reason.clone() },
        };
        let (node, backing) = (self.0.context.settings.name.clone(), placement.backing.clone());
        let hint = open_error.as_ref().map(|_| open_failed_hint(record, &node));
        VolumeReplica { node, backing, state, reason: open_error, hint, primary: true }
    }

    /// The portals of a volume: those of all nodes that keep a replica.
    fn portal_texts(
        &self,
        record: &VolumeRecord,
        of: impl Fn(&NodePortals) -> &[SocketAddr],
    ) -> Vec<String> {
        let Some(joined) = self.joined_cluster() else { return Vec::new() };
        let nodes = joined.nodes.borrow();
        let holders = record.placements.iter().filter_map(|p| nodes.get(&p.node));
        holders.flat_map(|n| of(&n.record.portals)).map(ToString::to_string).collect()
    }

    /// All sessions: the connections and queues of one initiator to one target are one session.
    pub async fn list_sessions(&self) -> SessionList {
        let reports = self.0.context.engine.report(ReportScope::None).await;
        SessionList { sessions: merge_sessions(&self.0.context.volumes.all(), &reports) }
    }

    /// The sessions of one volume.
    pub(super) async fn sessions_of(&self, id: Uuid) -> Vec<Session> {
        let Some((stored, _)) = self.0.context.volumes.get(id) else { return Vec::new() };
        let mut all = self.list_sessions().await.sessions;
        all.retain(|s| s.volumes.contains(&stored.record.name));
        all
    }
}

/// What is known about volumes beside their records.
struct VolumeContext<'a> {
    reports: HashMap<Uuid, &'a VolumeReport>,
    space: HashMap<Uuid, u64>,
    sessions: HashMap<VolumeName, u32>,
    cluster: Option<ClusterView>,
    /// Pools that have stopped, and why.
    stopped_pools: BTreeMap<PoolName, String>,
}

impl<'a> VolumeContext<'a> {
    fn new(
        sessions: &[Session],
        cores: &'a [CoreReport],
        space: HashMap<Uuid, u64>,
        cluster: Option<ClusterView>,
        stopped: BTreeMap<PoolName, String>,
    ) -> Self {
        let reports = cores.iter().flat_map(|c| &c.volumes).map(|v| (v.id, v)).collect();
        let mut counts = HashMap::new();
        for name in sessions.iter().flat_map(|s| &s.volumes) {
            *counts.entry(name.clone()).or_default() += 1;
        }
        Self { reports, space, sessions: counts, cluster, stopped_pools: stopped }
    }
}
