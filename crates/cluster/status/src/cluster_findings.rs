//! Findings about the cluster itself.

use api::{Finding, Severity};
use cluster::identity::Role;
use peer::NodeId;
use uuid::Uuid;

use crate::cluster_view::{ClusterView, NodeState};
use crate::nodes::node_argument;
use crate::startup_wait::LOST_QUORUM_HINT;
use crate::{clock_findings, finding};

impl ClusterView {
    /// Findings about the cluster itself.
    pub(crate) fn cluster_findings(&self, findings: &mut Vec<Finding>) {
        let subject = |name: &str| format!("node {name}");
        if self.is_isolated() {
            findings.push(self.isolation_finding());
        }
        self.store.findings(&self.nodes, findings);
        findings.extend(clock_findings::findings(&self.reports, &self.nodes));
        findings.extend(self.repair_settings_finding());
        for (node, view) in &self.nodes {
            let name = &view.record.name;
            if view.record.is_drained {
                let hint = format!("windrose node resume {name}");
                let message = "it is drained: it serves no volumes";
                findings.push(finding(Severity::Note, subject(name), message, Some(&hint)));
            } else if self.state_of(*node) == NodeState::Down {
                let hint = format!(
                    "start windrose on node {name}, or fix its network; if it is lost for good: \
                     windrose cluster leave --node {} --force",
                    node_argument(&self.nodes, view)
                );
                let message = "it does not respond: it is down, or cut off";
                findings.push(finding(Severity::Warning, subject(name), message, Some(&hint)));
            } else if self.stopped_answering.contains(node) {
                let hint = format!("if this persists, check whether windrose runs on node {name}");
                let message = "it stopped responding: it has just stopped, or is cut off";
                findings.push(finding(Severity::Warning, subject(name), message, Some(&hint)));
            }
        }
    }

    /// The finding that data nodes have different repair delays.
    fn repair_settings_finding(&self) -> Option<Finding> {
        let is_data =
            |node: &NodeId| self.nodes.get(node).is_some_and(|view| view.record.role == Role::Data);
        let runs = |node: &NodeId| self.state_of(*node) == NodeState::Running && is_data(node);
        let set = self.reports.iter().filter(|(node, _)| runs(node));
        let set: Vec<_> = set.map(|(node, report)| (*node, report.repair_after_s)).collect();
        let (_, first) = set.first()?;
        if set.iter().all(|(_, after_s)| after_s == first) {
            return None;
        }
        let says = set.iter().map(|(node, after_s)| match after_s {
            0 => format!("\"off\" at {}", self.node_name(*node)),
            seconds => format!("{seconds} at {}", self.node_name(*node)),
        });
        let message = format!(
            "cluster.repair_after_s is {}: each volume uses the value of its primary's node",
            says.collect::<Vec<_>>().join(", ")
        );
        let hint = "set it to the same value in the configuration of all nodes, and restart them";
        Some(finding(Severity::Note, "cluster", message, Some(hint)))
    }

    /// The finding that this node is isolated.
    fn isolation_finding(&self) -> Finding {
        let names = |unprobed: bool| {
            let which = self.others().filter(|view| self.cannot_be_probed(view) == unprobed);
            which.map(|view| view.record.name.as_str()).collect::<Vec<_>>()
        };
        let (probed, unprobed) = (names(false), names(true));
        let what = match &unprobed[..] {
            [] => {
                "it reaches neither the metadata store nor any other node: it is cut off, or all \
                other nodes are down"
                    .to_owned()
            }
            unprobed => format!(
                "it reaches neither the metadata store nor any node that it can probe ({}): it is \
                 cut off, or they are down. {} cannot be probed: a witness without a member of the \
                 store accepts no connections",
                probed.join(", "),
                unprobed.join(", ")
            ),
        };
        let message =
            format!("{what}. Their state and that of the volumes on them is unknown here");
        let name = self.node_name(self.this_node);
        let nodes = if probed.len() == 1 { "node" } else { "nodes" };
        let hint = format!(
            "check the network of node {name}: its links, its firewall (ports 7480, 2379 and 2380 \
             by default), and start windrose on {nodes} {} where it does not run. `windrose \
             status` on another node shows the state of the volumes. For the metadata store: \
             {LOST_QUORUM_HINT}",
            probed.join(", ")
        );
        // Volumes whose only replica is here go on.
        let serves = |volume: &Uuid| !self.serving_nodes(*volume).is_empty();
        let all_serve = !self.mirrors.is_empty() && self.mirrors.keys().all(serves);
        let severity = if all_serve { Severity::Warning } else { Severity::Critical };
        finding(severity, format!("node {name}"), message, Some(&hint))
    }
}
