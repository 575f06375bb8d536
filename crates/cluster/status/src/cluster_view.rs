//! The cluster as one node sees it: nodes, reports, mirrors. It decides nothing.

use std::collections::{BTreeMap, BTreeSet};

use cluster::nodes::{NodeView, Nodes};
use mirror::config::MirrorConfig;
use peer::NodeId;
use records::record::VolumeRecord;
use uuid::Uuid;

use crate::nodes::can_be_probed;
use crate::report::{NodeReport, ReportedMirror};
use crate::store_view::StoreView;

/// The cluster as one node sees it.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    /// The node whose view this is.
    pub this_node: NodeId,
    /// All nodes. Their liveness is as old as the store's last answer.
    pub nodes: Nodes,
    /// The store.
    pub store: StoreView,
    /// The last reports of the nodes, and the current one of this node; only the latter while the
    /// store does not answer.
    pub reports: BTreeMap<NodeId, NodeReport>,
    /// The mirror records.
    pub mirrors: BTreeMap<Uuid, MirrorConfig>,
    /// Nodes with which mirrors here hold leases or that they resync.
    pub heard: BTreeSet<NodeId>,
    /// Nodes that are alive by the store and have stopped answering.
    pub stopped_answering: BTreeSet<NodeId>,
    /// Nodes that answered a probe while the store does not answer. All data nodes were probed.
    pub reachable: BTreeSet<NodeId>,
    /// Volumes created moments ago: their nodes may not have reported them yet.
    pub just_created: BTreeSet<Uuid>,
}

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// It runs.
    Running,
    /// It is down, by the store.
    Down,
    /// This node cannot determine it.
    Unknown,
}

impl ClusterView {
    /// The name of a node.
    pub fn node_name(&self, node: NodeId) -> String {
        let known = self.nodes.get(&node);
        known.map_or_else(|| format!("number {node}"), |view| view.record.name.clone())
    }

    /// The state of a node. While the store does not answer, most are unknown.
    pub fn state_of(&self, node: NodeId) -> NodeState {
        let Some(view) = self.nodes.get(&node).filter(|_| node != self.this_node) else {
            return if node == self.this_node { NodeState::Running } else { NodeState::Down };
        };
        match (&self.store.error, view.is_alive) {
            _ if self.heard.contains(&node) => NodeState::Running,
            (Some(_), _) => NodeState::Unknown,
            (None, true) if self.stopped_answering.contains(&node) => NodeState::Unknown,
            (None, true) => NodeState::Running,
            (None, false) => NodeState::Down,
        }
    }

    /// Whether a node runs, as far as is known.
    pub fn runs(&self, node: NodeId) -> bool {
        self.state_of(node) == NodeState::Running
    }

    /// Whether this node reaches neither the store nor any node that it can probe: it is isolated,
    /// or the others are down.
    pub(crate) fn is_isolated(&self) -> bool {
        self.store.error.is_some()
            && self.nodes.len() > 1
            && self.heard.is_empty()
            && self.reachable.is_empty()
            && self.others().any(|view| !self.cannot_be_probed(view))
            && self.store.no_other_member_answers(self.this_node)
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.values().filter(|view| view.record.node != self.this_node)
    }

    /// Whether neither the node nor the store member that it runs can be probed.
    pub(crate) fn cannot_be_probed(&self, view: &NodeView) -> bool {
        !can_be_probed(view) && !self.store.has_member_of(view.record.node)
    }

    /// A volume as a running node reports it.
    pub(crate) fn reported_mirror(&self, node: NodeId, volume: Uuid) -> Option<&ReportedMirror> {
        self.report_of(node)?.mirrors.get(&volume)
    }

    /// Why a running node cannot open a volume, by its report.
    pub fn open_error(&self, node: NodeId, volume: Uuid) -> Option<&str> {
        self.report_of(node)?.open_errors.get(&volume).map(String::as_str)
    }

    pub(crate) fn report_of(&self, node: NodeId) -> Option<&NodeReport> {
        self.reports.get(&node).filter(|_| self.state_of(node) == NodeState::Running)
    }

    /// The nodes through which a volume is served.
    pub fn serving_nodes(&self, volume: Uuid) -> Vec<NodeId> {
        let Some(mirror) = self.mirrors.get(&volume) else { return Vec::new() };
        let members = mirror.in_sync.iter().map(|m| m.node);
        members.filter(|n| self.reported_mirror(*n, volume).is_some_and(|s| s.serves)).collect()
    }

    /// Whether the mirror record of a volume is lost: a volume with several replicas is created
    /// with one.
    pub fn is_mirror_record_lost(&self, record: &VolumeRecord) -> bool {
        !self.mirrors.contains_key(&record.id) && record.placements.len() > 1
    }

    /// Whether some node that could serve a volume has not reported it yet.
    pub(crate) fn awaits_first_report(&self, volume: Uuid) -> bool {
        let Some(mirror) = self.mirrors.get(&volume) else { return true };
        let mut members = mirror.in_sync.iter().map(|m| m.node);
        let unreported =
            |n| self.reported_mirror(n, volume).is_none() && self.open_error(n, volume).is_none();
        members.any(|n| self.state_of(n) == NodeState::Running && unreported(n))
    }
}
