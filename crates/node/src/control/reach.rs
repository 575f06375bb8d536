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

impl Control {
    /// The nodes that the store takes for alive and that do not answer here, though they did before: what has never
    /// been reached from here may be kept apart by a firewall. Nodes in `heard` are heard by mirrors here; those in
    /// `linked` have a session with this one.
    pub(super) async fn silent_nodes(
        &self,
        nodes: &Nodes,
        heard: &BTreeSet<NodeId>,
        linked: &BTreeSet<NodeId>,
    ) -> BTreeSet<NodeId> {
        let me = self.me();
        // A witness listens to nobody.
        let asked = nodes.values().filter(|view| view.alive && view.record.role == Role::Data);
        let asked = asked.filter(|v| v.record.node != me && !heard.contains(&v.record.node));
        let answers = join_all(asked.map(|view| async { (view.record.node, answers(view).await) }));
        let answers = answers.await;
        let mut answered = self.0.answered.lock().unwrap_or_else(PoisonError::into_inner);
        answered.extend(linked);
        answered.extend(answers.iter().filter(|(_, answers)| *answers).map(|(node, _)| *node));
        let silent =
            answers.into_iter().filter(|(node, answers)| !answers && answered.contains(node));
        silent.map(|(node, _)| node).collect()
    }
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
