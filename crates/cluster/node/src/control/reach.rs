//! Whether other nodes answer. The store takes a node for alive for seconds after it has died: what it told last must
//! not be told as what is.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::Duration;

use cluster::identity::Role;
use cluster::nodes::{NodeView, Nodes};
use futures_util::future::join_all;
use peer::NodeId;
use tokio::net::TcpSocket;
use tokio::time::timeout;

use super::Control;

/// How long a node may take to accept a connection.
const PATIENCE: Duration = Duration::from_millis(1500);

/// What came of it when nodes were asked.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// Those that the store takes for alive and that do not answer here, though they did before: what has never been
    /// reached from here may be kept apart by a firewall.
    pub(super) silent: BTreeSet<NodeId>,
    /// Those that the store takes for alive and that do not answer here, whether they ever did or not.
    pub(super) unproven: BTreeSet<NodeId>,
}

/// Whether a node can be asked: a witness listens to nobody.
pub(super) fn can_be_asked(view: &NodeView) -> bool {
    view.record.role == Role::Data
}

impl Control {
    /// Asks the nodes that the store takes for alive. Nodes in `heard` are heard by mirrors here; those in `linked` have
    /// a session with this one.
    pub(super) async fn reach_alive(
        &self,
        nodes: &Nodes,
        heard: &BTreeSet<NodeId>,
        linked: &BTreeSet<NodeId>,
    ) -> Reach {
        let answers = self.dial(nodes.values().filter(|view| view.alive), heard).await;
        let unproven = unproven(nodes, self.me(), heard, &answers);
        let mut answered = self.0.answered.lock().unwrap_or_else(PoisonError::into_inner);
        answered.extend(linked);
        answered.extend(&answers);
        let silent = unproven.intersection(&answered).copied().collect();
        Reach { silent, unproven }
    }

    /// The other nodes that answer, whatever the store says of them: it cannot be asked.
    pub(super) async fn reach_any(
        &self,
        nodes: &Nodes,
        heard: &BTreeSet<NodeId>,
    ) -> BTreeSet<NodeId> {
        let answers = self.dial(nodes.values(), heard).await;
        self.0.answered.lock().unwrap_or_else(PoisonError::into_inner).extend(&answers);
        answers
    }

    /// Those of these nodes that answer, but for those that are `heard` anyway.
    async fn dial(
        &self,
        nodes: impl Iterator<Item = &NodeView>,
        heard: &BTreeSet<NodeId>,
    ) -> BTreeSet<NodeId> {
        let me = self.me();
        let other = |node| node != me && !heard.contains(&node);
        let asked = nodes.filter(|view| can_be_asked(view) && other(view.record.node));
        let answers = join_all(asked.map(|view| async { (view.record.node, answers(view).await) }));
        answers.await.into_iter().filter(|(_, answers)| *answers).map(|(node, _)| node).collect()
    }
}

/// The nodes but `me` that are taken for alive and were asked, are not heard, and have not answered.
fn unproven(
    nodes: &Nodes,
    me: NodeId,
    heard: &BTreeSet<NodeId>,
    answers: &BTreeSet<NodeId>,
) -> BTreeSet<NodeId> {
    let asked = nodes.iter().filter(|(_, view)| view.alive && can_be_asked(view));
    let alive = asked.map(|(node, _)| *node);
    alive.filter(|node| *node != me && !heard.contains(node) && !answers.contains(node)).collect()
}

/// Whether a node accepts connections of other nodes at any of its addresses.
async fn answers(view: &NodeView) -> bool {
    let dialled = join_all(view.record.data.iter().map(|at| accepts(*at)));
    dialled.await.contains(&true)
}

async fn accepts(at: SocketAddr) -> bool {
    let dial = async {
        let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        socket?.connect(at).await
    };
    matches!(timeout(PATIENCE, dial).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::super::members::tests::node;
    use super::*;

    /// After an outage of the store the leases of nodes that died in it have yet to run out.
    #[test]
    fn that_the_store_takes_a_node_for_alive_does_not_show_that_it_runs() {
        let mut nodes: Nodes = (1..=5).map(|n| node(n, &format!("n{n}"), n != 5)).collect();
        nodes.get_mut(&NodeId(4)).unwrap().record.role = Role::Witness;
        let (me, heard, answers) = (NodeId(1), [NodeId(2)].into(), BTreeSet::new());
        // 4 cannot be asked, and that 5 is down is known.
        assert_eq!(unproven(&nodes, me, &heard, &answers), [NodeId(3)].into());
        assert!(unproven(&nodes, me, &heard, &[NodeId(3)].into()).is_empty());
    }
}
