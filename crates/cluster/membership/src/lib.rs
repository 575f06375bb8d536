//! What makes a process a certain node, of its own or of a cluster.
//!
//! * [`anchor`]: protects the data directory from being mistaken for another one;
//! * [`ClusterMembership`]: the steps by which a node joins a cluster, is in it and leaves it;
//! * [`certificates`]: the node's certificates for other nodes and the store;
//! * [`secret_keys`]: the keys that seal the secrets in the store;
//! * [`store_member`]: the store member that the node runs.

pub mod anchor;
pub mod certificates;
mod cluster_membership;
pub mod secret_keys;
pub mod store_member;

pub use cluster_membership::{
    ClusterMembership, MembershipError, MembershipOutcome, RotationError, connect_store,
};
