//! The shared state of a cluster's nodes: the metadata store and the records in it.
//!
//! * [`store`]: the store; one interface, embedded in a node or kept by etcd.
//! * [`etcd_member`]: a store member: etcd as a child process.
//! * [`record_file`]: small local record files of a node.
//! * [`identity`]: a node's identity file; [`join_token`]: the token by which it joins.
//! * [`secrets`]: secrets at rest and the keys that seal them.
//! * [`node_membership`]: the steps of joining and leaving a cluster; [`join_error`]: why one
//!   fails.
//! * [`incarnations`]: which process is a node.
//! * [`admission`]: join tokens and join requests.
//! * [`certificate_authority`]: signs the certificates of a cluster's nodes.
//! * [`credential_rotation`]: replaces the cluster's secret and authority.
//! * [`pinned_tls`]: how a joining node recognises its token's cluster.
//! * [`nodes`]: the records of the nodes, and which of them are alive.
//! * [`mirror_records`]: the records of mirrored volumes, for the cores that run the volumes.

pub mod admission;
pub mod certificate_authority;
pub mod credential_rotation;
pub mod etcd_member;
pub mod identity;
pub mod incarnations;
pub mod join_error;
pub mod join_token;
pub mod mirror_records;
pub mod node_membership;
pub mod nodes;
pub mod pinned_tls;
pub mod record_file;
pub mod secrets;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
