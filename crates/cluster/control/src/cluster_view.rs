//! Builds the view of the cluster, for status only.

use std::collections::{BTreeMap, BTreeSet};

use cluster::node_membership::{self, store_member_name};
use cluster::nodes::{self, Nodes};
use cluster::store::StoreError;
use cluster::store::etcd::MemberHealth;
use engine::CoreReport;
use mirror::MirrorStatus;
use peer::NodeId;
use status::cluster_view::{ClusterView, NodeState};
use status::not_serving::NameLookup;
use status::report::{MissingReplica, NodeReport};
use status::resync_progress::ResyncProgress;
use status::store_view::StoreView;
use tokio::time::Instant;
use uuid::Uuid;

use crate::context::{Context, now_s};
use crate::node_probe::ProbeResult;

/// How long the nodes of a new volume may take to report it, in seconds.
const JUST_CREATED_S: u64 = 15;

impl Context {
    /// Builds the view of the cluster; `None` for a standalone node.
    pub(crate) async fn cluster_view(&self, cores: &[CoreReport]) -> Option<ClusterView> {
        let joined = self.joined_cluster()?;
        let me = joined.node;
        let mut nodes = joined.nodes.borrow().clone();
        let heard = peers_heard(cores);
        let (mut reports, error) = match self.read_reports_and_liveness(&mut nodes).await {
            Ok(reports) => (reports, None),
            Err(error) => (BTreeMap::new(), Some(error)),
        };
        let (probe, reachable) = match &error {
            None => {
                let probe = self
                    .node_probe
                    .probe_alive_nodes(me, &nodes, &heard, &peers_with_session(cores))
                    .await;
                (probe, BTreeSet::new())
            }
            Some(_) => {
                (ProbeResult::default(), self.node_probe.probe_all_nodes(me, &nodes, &heard).await)
            }
        };
        let membership = self.cluster_membership.as_ref();
        let own_members = membership.is_some_and(|membership| membership.runs_own_store());
        let mut members =
            membership.map(|membership| membership.store_health()).unwrap_or_default();
        if let Some(membership) = membership.filter(|_| own_members && error.is_none())
            && (lacks_member(&nodes, &members) || has_unknown_member(&nodes, &members))
        {
            // The node list has changed since the members were queried.
            members = membership.refresh_store_health().await;
        }
        let own = ResyncProgress::default().report_mirrors(cores, self, Instant::now());
        let own_report = reports.entry(me).or_default();
        let before = std::mem::take(&mut own_report.mirrors);
        for (id, mut reported) in own {
            // Only the periodic task samples often enough to estimate how long a resync takes.
            let before = before.get(&id).map(|m| m.resyncs.as_slice()).unwrap_or_default();
            for resync in &mut reported.resyncs {
                resync.eta_s = before.iter().find(|r| r.node == resync.node).and_then(|r| r.eta_s);
            }
            own_report.mirrors.insert(id, reported);
        }
        own_report.open_errors = self.volumes.open_errors();
        own_report.store_member_error =
            membership.and_then(|membership| membership.store_member_error());
        let mirrors = self.volumes.mirrors();
        let store = StoreView {
            error,
            runs_own_members: own_members,
            members,
            member_errors: BTreeMap::new(),
            unproven_nodes: probe.unproven,
        };
        let (created, stopped_answering) = (self.just_created_volumes(), probe.stopped_answering);
        let mut cluster = ClusterView {
            this_node: me,
            nodes,
            store,
            reports,
            mirrors,
            heard,
            stopped_answering,
            reachable,
            just_created: created,
        };
        let runs = |node: &NodeId| cluster.state_of(*node) == NodeState::Running;
        let of_those = cluster.reports.iter().filter(|(node, _)| runs(node));
        let troubles = of_those.filter_map(|(n, r)| Some((*n, r.store_member_error.clone()?)));
        cluster.store.member_errors = troubles.collect();
        Some(cluster)
    }

    fn just_created_volumes(&self) -> BTreeSet<Uuid> {
        let now = now_s();
        // The time stamp is of another node's clock, which may be ahead.
        let moment = now.saturating_sub(JUST_CREATED_S)..=now + JUST_CREATED_S;
        let all = self.volumes.all().into_iter().map(|(stored, _)| stored.record);
        all.filter(|record| moment.contains(&record.created_s)).map(|record| record.id).collect()
    }

    /// Reads the last reports; notes in `nodes` which nodes are alive now.
    async fn read_reports_and_liveness(
        &self,
        nodes: &mut Nodes,
    ) -> Result<BTreeMap<NodeId, NodeReport>, StoreError> {
        let (reports, alive) = tokio::join!(self.reports(), nodes::list_alive(&*self.meta));
        let alive = alive?;
        nodes.iter_mut().for_each(|(node, view)| view.is_alive = alive.contains(node));
        reports
    }
}

/// Whether the node list names no node for some of these members.
fn has_unknown_member(nodes: &Nodes, members: &[MemberHealth]) -> bool {
    let of_nodes: BTreeSet<_> = nodes.keys().map(|node| store_member_name(*node)).collect();
    members.iter().any(|health| !of_nodes.contains(node_membership::member_label(&health.member)))
}

/// Whether the store member of some node is missing here or was a learner: a member becomes a voter
/// before its node joins.
fn lacks_member(nodes: &Nodes, members: &[MemberHealth]) -> bool {
    let voters = members.iter().map(|h| &h.member).filter(|member| !member.is_learner);
    let called: BTreeSet<_> = voters.map(node_membership::member_label).collect();
    nodes.keys().any(|node| !called.contains(store_member_name(*node).as_str()))
}

fn mirror_statuses(cores: &[CoreReport]) -> impl Iterator<Item = &MirrorStatus> {
    let mirrors = cores.iter().flat_map(|core| &core.volumes).filter_map(|v| v.mirror.as_ref());
    mirrors.map(|mirror| &mirror.status)
}

/// The nodes with which mirrors on these cores have sessions. A session does not prove that a node
/// runs: an idle one outlasts a node that hangs or is isolated.
fn peers_with_session(cores: &[CoreReport]) -> BTreeSet<NodeId> {
    mirror_statuses(cores).flat_map(|status| status.linked.iter().copied()).collect()
}

/// The nodes with which mirrors on these cores hold leases or that they resync.
fn peers_heard(cores: &[CoreReport]) -> BTreeSet<NodeId> {
    let hears = |status: &MirrorStatus, node: &NodeId| {
        let in_sync = status.config.as_ref().is_some_and(|r| r.member(*node).is_some());
        in_sync || status.resyncs.iter().any(|(other, ..)| other == node)
    };
    let of_each = |status: &MirrorStatus| {
        let linked = status.linked.iter().copied();
        linked.filter(|node| hears(status, node)).collect::<Vec<_>>()
    };
    mirror_statuses(cores).flat_map(of_each).collect()
}

impl NameLookup for Context {
    fn own_name(&self) -> String {
        self.settings.name.clone()
    }

    fn name_of_node(&self, node: NodeId) -> String {
        self.node_name(node)
    }

    fn name_of_volume(&self, volume: Uuid) -> String {
        self.volume_name(volume)
    }

    fn missing_replica(&self, volume: Uuid) -> Option<MissingReplica> {
        self.volumes.missing_replica(volume)
    }
}
