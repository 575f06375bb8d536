//! The facts of a node from which its status is derived.

use std::collections::HashSet;

use api::{Finding, NodeInfo, VolumeName};
use cluster::store::StoreProblem;
use engine::{CoreReport, VolumeReport};
use records::reconcile::Observed;
use records::record::{StoredVolumeRecord, VolumeAuthMethod, VolumeStage};
use target::ClientReport;

use crate::cluster_view::ClusterView;
use crate::pool_status::PoolFacts;
use crate::space::SpaceUsage;
use crate::startup_wait::StartupWait;

/// The facts from which the status is derived.
#[derive(Debug)]
pub struct NodeFacts {
    /// The node.
    pub node: NodeInfo,
    /// Whether it has opened its volumes and is not stopping.
    pub serving: bool,
    /// What its start waits for, if anything.
    pub startup_wait: Option<StartupWait>,
    /// Its volumes.
    pub volumes: Vec<(StoredVolumeRecord, Observed)>,
    /// Records in the store that cannot be read, as error texts.
    pub damaged_records: Vec<String>,
    /// The problem of the store itself, if any.
    pub store_trouble: Option<StoreProblem>,
    /// Location of a rival process, a copy of this node, if one runs.
    pub rival_process: Option<String>,
    /// Why the data directory has no anchor, if it has none.
    pub anchor_error: Option<String>,
    /// Whether the nodes of its cluster communicate in plain text.
    pub is_plaintext: bool,
    /// Secrets that cannot be read, and why.
    pub unreadable_secrets: Vec<UnreadableSecret>,
    /// Reports of its cores.
    pub cores: Vec<CoreReport>,
    /// Failing and duplicate clients of its API.
    pub api_clients: ClientReport,
    /// The space of volumes.
    pub space: SpaceUsage,
    /// Its pools of disks, by name.
    pub pools: Vec<PoolFacts>,
    /// Pool records that cannot be read, as error texts.
    pub damaged_pools: Vec<String>,
    /// Free space in a file system below which the status warns, in percent of its size.
    pub low_space_percent: u64,
    /// Findings about orphaned images.
    pub image_findings: Vec<Finding>,
    /// Findings about join requests.
    pub join_findings: Vec<Finding>,
    /// The cluster, if the node is in one.
    pub cluster: Option<ClusterView>,
}

/// Secrets of a volume that cannot be read.
#[derive(Clone, Debug)]
pub struct UnreadableSecret {
    /// The volume.
    pub volume: VolumeName,
    /// The authentication method of the secrets.
    pub method: VolumeAuthMethod,
    /// The reason.
    pub why: String,
}

impl NodeFacts {
    /// Returns a predicate: whether a volume is served by some node, as far as is known here.
    /// Unknown volumes are not.
    pub(crate) fn served_filter(&self) -> impl Fn(&(StoredVolumeRecord, Observed)) -> bool {
        let unusable = self.reports().filter(|report| is_unusable(report)).map(|report| report.id);
        let stopped = self.pools.iter().filter(|pool| pool.has_stopped());
        let stopped = stopped.flat_map(|pool| pool.volumes.iter().map(|(id, _)| *id));
        let unusable: HashSet<_> = unusable.chain(stopped).collect();
        move |(stored, observed)| {
            let id = stored.record.id;
            let serves = match &self.cluster {
                Some(cluster) => !cluster.serving_nodes(id).is_empty(),
                None => matches!(observed, Observed::Open { .. }) && !unusable.contains(&id),
            };
            stored.record.stage == VolumeStage::Ready && serves
        }
    }

    /// Reports of the volumes that are open on the node.
    pub(crate) fn reports(&self) -> impl Iterator<Item = &VolumeReport> {
        self.cores.iter().flat_map(|core| &core.volumes)
    }
}

/// Whether a volume that is open on this node does not serve here.
pub(crate) fn is_unusable(report: &VolumeReport) -> bool {
    report.claim_lost.is_some() || report.is_dead || report.reservations_error.is_some()
}
