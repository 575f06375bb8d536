//! What a node is in its cluster, for those who put mirrors together and change volumes.

use std::time::Duration;

use ::cluster::identity::{NodeIndex, Role};
use ::cluster::mirrors::Mirrors;
use ::cluster::nodes::Nodes;
use peer::NodeId;
use tokio::sync::watch;
use uuid::Uuid;

/// A member of a cluster. Cheap to clone; the same for as long as the node runs.
#[derive(Clone, Debug)]
pub struct Membership {
    /// Its number, in frames and records.
    pub node: NodeId,
    /// Its index, for ports and controllers.
    pub index: NodeIndex,
    /// The cluster.
    pub cluster: Uuid,
    /// What the nodes of the cluster know and nobody else.
    pub secret: peer::Secret,
    /// What it is for.
    pub role: Role,
    /// TLS between nodes, where the cluster wants it.
    pub tls: Option<peer::Tls>,
    /// How long a lease runs; the same at all nodes.
    pub lease: Duration,
    /// How long a lease is waited out; the same at all nodes.
    pub grace: Duration,
    /// All nodes, this one among them, and who of them is alive; kept current.
    pub nodes: watch::Receiver<Nodes>,
    /// The records of mirrored volumes.
    pub mirrors: Mirrors,
}
