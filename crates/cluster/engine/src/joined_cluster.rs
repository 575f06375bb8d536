//! A node's data as a member of its cluster, for mirrors and for changes of volumes.

use std::time::Duration;

use ::cluster::identity::{NodeIndex, Role};
use ::cluster::mirror_records::MirrorRecords;
use ::cluster::nodes::Nodes;
use peer::NodeId;
use tokio::sync::watch;
use uuid::Uuid;

/// A member of a cluster. Cheap to clone; unchanged while the node runs.
#[derive(Clone, Debug)]
pub struct JoinedCluster {
    /// The node's number, in frames and records.
    pub node: NodeId,
    /// The node's index, for ports and controllers.
    pub index: NodeIndex,
    /// The cluster's id.
    pub cluster: Uuid,
    /// The secret that only the cluster's nodes know.
    pub secret: peer::PeerSecret,
    /// Data node or witness.
    pub role: Role,
    /// TLS between nodes, if the cluster uses it.
    pub tls: Option<peer::Tls>,
    /// Duration of a lease; the same on all nodes.
    pub lease: Duration,
    /// Grace time after which a lease has certainly expired; the same on all nodes.
    pub grace: Duration,
    /// All nodes, including this one, and which are alive; kept current.
    pub nodes: watch::Receiver<Nodes>,
    /// The configurations of mirrored volumes in the store.
    pub mirrors: MirrorRecords,
}
