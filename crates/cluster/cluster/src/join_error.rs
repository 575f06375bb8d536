//! Why joining or leaving a cluster fails, and the check of the settings that must be equal at all
//! nodes.

use peer::NodeId;

use crate::identity::MAX_NODES;
use crate::nodes::ClusterRecord;
use crate::store::StoreError;

/// Why joining or leaving fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store belongs to another cluster.
    #[error("the store belongs to another cluster ({found}): each cluster needs its own store")]
    OtherCluster {
        /// The cluster that owns it.
        found: uuid::Uuid,
    },
    /// The store belongs to no cluster.
    #[error("the store belongs to no cluster; check that `windrose cluster init` succeeded")]
    NoCluster,
    /// The store already has this key, with other contents.
    #[error("the store already has {key}, with other contents: a new cluster needs a new store")]
    KeyConflict {
        /// The key.
        key: String,
    },
    /// Every node index is in use.
    #[error("the cluster already has {MAX_NODES} nodes; remove one first")]
    ClusterFull,
    /// A setting differs from the cluster's.
    #[error("{setting} is {local} here and {cluster} in the cluster; set it to {cluster}")]
    SettingMismatch {
        /// Its name.
        setting: &'static str,
        /// Its value on this node.
        local: u64,
        /// Its value in the cluster.
        cluster: u64,
    },
    /// Another learner is not promoted yet; etcd accepts one learner at a time.
    #[error(
        "member {member} of the store is still catching up, and only one member can join at a \
         time; if it makes no progress, remove it at a node of the cluster: `windrose cluster \
         leave --node {member} --force`"
    )]
    LearnerPending {
        /// Its name, or its peer URL if it has never started.
        member: String,
    },
    /// The node's record was removed.
    #[error(
        "this node was removed from the cluster and serves nothing; `windrose cluster leave \
         --force` makes it a standalone node"
    )]
    Removed,
    /// A node that should be removed as dead is alive.
    #[error(
        "node {node} is running again and stays in the cluster; to remove it, run `windrose \
         cluster leave` there"
    )]
    StillAlive {
        /// The node.
        node: NodeId,
    },
}

/// Checks that the settings that must be equal on all nodes match the cluster's.
///
/// # Errors
/// [`JoinError::SettingMismatch`].
pub fn check_settings(
    cluster: &ClusterRecord,
    lease_ms: u64,
    grace_ms: u64,
) -> Result<(), JoinError> {
    let pairs = [
        ("cluster.lease_ms", lease_ms, cluster.lease_ms),
        ("cluster.grace_ms", grace_ms, cluster.grace_ms),
    ];
    match pairs.into_iter().find(|(_, local, cluster_value)| local != cluster_value) {
        Some((setting, local, cluster_value)) => {
            Err(JoinError::SettingMismatch { setting, local, cluster: cluster_value })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_must_be_the_same_are_compared() {
        let cluster = ClusterRecord {
            id: uuid::Uuid::from_u128(7),
            next_node: 2,
            runs_own_store: true,
            lease_ms: 2000,
            grace_ms: 3000,
        };
        check_settings(&cluster, 2000, 3000).unwrap();
        let other = check_settings(&cluster, 2000, 4000).unwrap_err().to_string();
        assert!(other.contains("cluster.grace_ms is 4000 here and 3000"), "{other}");
    }
}
