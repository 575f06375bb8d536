//! Wall clocks that differ, as the members of the store see each other's.
//!
//! No data goes by them: leases are counted by each node for itself. Logs of two nodes cannot be laid
//! side by side, though, and certificates are taken for expired, or not valid yet.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{Finding, Severity};
use cluster::member::Behind;
use cluster::meta::etcd::MemberHealth;
use cluster::nodes::Nodes;
use peer::NodeId;

use super::cluster::node_of_member;
use super::report::NodeReport;
use super::status::finding;

/// A difference that is worth telling.
const MUCH: Duration = Duration::from_secs(3);

/// The nodes whose clocks are much behind, by their number, and by how many seconds.
pub(super) fn behind(seen: &[Behind], members: &[MemberHealth]) -> BTreeMap<u16, u64> {
    let node = |id: u64| {
        let health = members.iter().find(|health| health.member.id == id)?;
        node_of_member(&health.member.name)
    };
    let much = seen.iter().filter(|behind| behind.by >= MUCH);
    much.filter_map(|b| Some((node(b.member)?.0, b.by.as_secs()))).collect()
}

/// What there is to say of the clocks of nodes that run.
pub(super) fn findings(told: &BTreeMap<NodeId, NodeReport>, nodes: &Nodes) -> Vec<Finding> {
    let name = |node: NodeId| nodes.get(&node).filter(|view| view.alive).map(|v| &*v.record.name);
    let mut findings = Vec::new();
    for (ahead, report) in told {
        for (&late, seconds) in &report.behind {
            let (Some(ahead), Some(late)) = (name(*ahead), name(NodeId(late))) else { continue };
            let message = format!("its clock is {seconds} s ahead of that of node {late}");
            let hint = "have both follow the same time servers (chrony, systemd-timesyncd): \
                        logs and certificates go by it";
            findings.push(finding(Severity::Warning, format!("node {ahead}"), message, Some(hint)));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use cluster::meta::etcd::{MemberAnswer, MemberInfo};

    use super::*;
    use crate::control::members::tests::node;

    fn member(id: u64, name: &str) -> MemberHealth {
        let member = MemberInfo {
            id,
            name: name.into(),
            peer_urls: Vec::new(),
            client_urls: Vec::new(),
            is_learner: false,
        };
        MemberHealth { member, answer: MemberAnswer::NotAsked }
    }

    #[test]
    fn members_that_are_much_behind_are_nodes() {
        let members = [member(7, "node-2"), member(8, "node-3"), member(9, "somebody")];
        let late = |member, ms| Behind { member, by: Duration::from_millis(ms) };
        let seen = [late(7, 3500), late(8, 2999), late(9, 9000), late(10, 9000)];
        assert_eq!(behind(&seen, &members), [(2, 3)].into());
    }

    #[test]
    fn both_nodes_are_named_while_they_run() {
        let report = NodeReport { behind: [(2, 12), (3, 4)].into(), ..NodeReport::default() };
        let mut nodes: Nodes = [node(1, "a", true), node(2, "b", true), node(3, "c", false)].into();
        let told = [(NodeId(1), report)].into();
        let found = findings(&told, &nodes);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((&*found[0].subject, found[0].severity), ("node a", Severity::Warning));
        assert_eq!(found[0].message, "its clock is 12 s ahead of that of node b");
        nodes.get_mut(&NodeId(1)).unwrap().alive = false;
        assert_eq!(findings(&told, &nodes), []);
    }
}
