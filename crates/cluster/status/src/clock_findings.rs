//! Findings about differing wall clocks, as the store members measure them.
//!
//! Data does not depend on them: each node counts leases by its own monotonic clock. But logs of
//! different nodes no longer line up, and certificates may seem expired or not valid yet.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{Finding, Severity};
use cluster::etcd_member::ClockLag;
use cluster::node_membership::node_of_store_member;
use cluster::nodes::Nodes;
use cluster::store::etcd::MemberHealth;
use peer::NodeId;

use crate::finding;
use crate::report::NodeReport;

/// The difference from which a finding is reported.
const REPORT_THRESHOLD: Duration = Duration::from_secs(3);

/// The nodes whose clocks lag, by number, with the lag in seconds.
pub fn clocks_behind(lags: &[ClockLag], members: &[MemberHealth]) -> BTreeMap<u16, u64> {
    let node = |id: u64| {
        let health = members.iter().find(|health| health.member.id == id)?;
        node_of_store_member(&health.member.name)
    };
    let large = lags.iter().filter(|behind| behind.lag >= REPORT_THRESHOLD);
    large.filter_map(|b| Some((node(b.member)?.0, b.lag.as_secs()))).collect()
}

/// Findings about the clocks of running nodes.
pub fn findings(reports: &BTreeMap<NodeId, NodeReport>, nodes: &Nodes) -> Vec<Finding> {
    let name =
        |node: NodeId| nodes.get(&node).filter(|view| view.is_alive).map(|v| &*v.record.name);
    let mut findings = Vec::new();
    for (ahead, report) in reports {
        for (&behind, seconds) in &report.clocks_behind_s {
            let (Some(ahead), Some(behind)) = (name(*ahead), name(NodeId(behind))) else {
                continue;
            };
            let message = format!("its clock is {seconds} s ahead of that of node {behind}");
            let hint = "synchronise both with the same time servers (chrony, systemd-timesyncd): \
                logs and certificates depend on the time";
            findings.push(finding(Severity::Warning, format!("node {ahead}"), message, Some(hint)));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use cluster::store::etcd::{MemberInfo, MemberResponse};

    use super::*;
    use crate::samples::node;

    fn member(id: u64, name: &str) -> MemberHealth {
        let member = MemberInfo {
            id,
            name: name.into(),
            peer_urls: Vec::new(),
            client_urls: Vec::new(),
            is_learner: false,
        };
        MemberHealth { member, response: MemberResponse::NotQueried }
    }

    #[test]
    fn members_that_are_much_behind_are_nodes() {
        let members = [member(7, "node-2"), member(8, "node-3"), member(9, "somebody")];
        let late = |member, ms| ClockLag { member, lag: Duration::from_millis(ms) };
        let seen = [late(7, 3500), late(8, 2999), late(9, 9000), late(10, 9000)];
        assert_eq!(clocks_behind(&seen, &members), [(2, 3)].into());
    }

    #[test]
    fn both_nodes_are_named_while_they_run() {
        let report =
            NodeReport { clocks_behind_s: [(2, 12), (3, 4)].into(), ..NodeReport::default() };
        let mut nodes: Nodes = [node(1, "a", true), node(2, "b", true), node(3, "c", false)].into();
        let told = [(NodeId(1), report)].into();
        let found = findings(&told, &nodes);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((&*found[0].subject, found[0].severity), ("node a", Severity::Warning));
        assert_eq!(found[0].message, "its clock is 12 s ahead of that of node b");
        nodes.get_mut(&NodeId(1)).unwrap().is_alive = false;
        assert_eq!(findings(&told, &nodes), []);
    }
}
