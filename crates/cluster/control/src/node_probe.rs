//! Probes other nodes. The store considers a node alive for seconds after it has died: its last
//! report must not be shown as current.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cluster::nodes::{NodeView, Nodes};
use futures_util::future::join_all;
use peer::NodeId;
use status::nodes::can_be_probed;
use tokio::net::TcpSocket;
use tokio::time::timeout;

/// How long a node may take to accept a connection.
const PROBE_TIMEOUT: Duration = Duration::from_millis(1500);

/// The result of a round of probes.
#[derive(Debug, Default)]
pub(crate) struct ProbeResult {
    /// Nodes that are alive by the store and do not respond here although they did before. A node
    /// that was never reached may be behind a firewall.
    pub(crate) stopped_answering: BTreeSet<NodeId>,
    /// Nodes that are alive by the store and do not respond here, whether they ever did or not.
    pub(crate) unproven: BTreeSet<NodeId>,
}

/// The other nodes that have ever responded to this one.
#[derive(Debug, Default)]
pub(crate) struct NodeProbe {
    responded: Mutex<BTreeSet<NodeId>>,
}

impl NodeProbe {
    /// Probes, for node `me`, the nodes that are alive by the store. Mirrors here hear the nodes in
    /// `heard`; those in `linked` have a session with this one.
    pub(crate) async fn probe_alive_nodes(
        &self,
        me: NodeId,
        nodes: &Nodes,
        heard: &BTreeSet<NodeId>,
        linked: &BTreeSet<NodeId>,
    ) -> ProbeResult {
        let answers = probe_nodes(me, nodes.values().filter(|view| view.is_alive), heard).await;
        let unproven = unproven(nodes, me, heard, &answers);
        let mut answered = self.responded.lock().unwrap_or_else(PoisonError::into_inner);
        answered.extend(linked);
        answered.extend(&answers);
        let stopped_answering = unproven.intersection(&answered).copied().collect();
        ProbeResult { stopped_answering, unproven }
    }

    /// The other nodes that respond, while the store cannot be asked.
    pub(crate) async fn probe_all_nodes(
        &self,
        me: NodeId,
        nodes: &Nodes,
        heard: &BTreeSet<NodeId>,
    ) -> BTreeSet<NodeId> {
        let answers = probe_nodes(me, nodes.values(), heard).await;
        self.responded.lock().unwrap_or_else(PoisonError::into_inner).extend(&answers);
        answers
    }
}

/// Probes nodes that are not `heard`; returns those that respond.
async fn probe_nodes(
    me: NodeId,
    nodes: impl Iterator<Item = &NodeView>,
    heard: &BTreeSet<NodeId>,
) -> BTreeSet<NodeId> {
    let other = |node| node != me && !heard.contains(&node);
    let probed = nodes.filter(|view| can_be_probed(view) && other(view.record.node));
    let answers =
        join_all(probed.map(|view| async { (view.record.node, is_reachable(view).await) }));
    answers.await.into_iter().filter(|(_, answers)| *answers).map(|(node, _)| node).collect()
}

/// The nodes other than `me` that are alive by the store, were probed, are not heard, and did not
/// respond.
fn unproven(
    nodes: &Nodes,
    me: NodeId,
    heard: &BTreeSet<NodeId>,
    answers: &BTreeSet<NodeId>,
) -> BTreeSet<NodeId> {
    let probed = nodes.iter().filter(|(_, view)| view.is_alive && can_be_probed(view));
    let alive = probed.map(|(node, _)| *node);
    alive.filter(|node| *node != me && !heard.contains(node) && !answers.contains(node)).collect()
}

/// Whether a node accepts connections of other nodes at any of its addresses.
async fn is_reachable(view: &NodeView) -> bool {
    let dialled = join_all(view.record.data_addresses.iter().map(|at| accepts_connection(*at)));
    dialled.await.contains(&true)
}

async fn accepts_connection(at: SocketAddr) -> bool {
    let dial = async {
        let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        socket?.connect(at).await
    };
    matches!(timeout(PROBE_TIMEOUT, dial).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use cluster::identity::Role;
    use status::samples::node;

    use super::*;

    /// After an outage of the store, leases of nodes that died during it have yet to expire.
    #[test]
    fn that_the_store_takes_a_node_for_alive_does_not_show_that_it_runs() {
        let mut nodes: Nodes = (1..=5).map(|n| node(n, &format!("n{n}"), n != 5)).collect();
        nodes.get_mut(&NodeId(4)).unwrap().record.role = Role::Witness;
        let (me, heard, answers) = (NodeId(1), [NodeId(2)].into(), BTreeSet::new());
        // 4 cannot be probed, and 5 is known to be down.
        assert_eq!(unproven(&nodes, me, &heard, &answers), [NodeId(3)].into());
        assert!(unproven(&nodes, me, &heard, &[NodeId(3)].into()).is_empty());
    }
}
