//! What the nodes of a cluster know together: the metadata store and what is kept in it.
//!
//! * [`meta`]: the store itself; one interface, embedded in a node or kept by etcd.
//! * [`member`]: an etcd of our own, as a child process.
//! * [`file`]: small files with records of a node.
//! * [`identity`]: what a node is, in a file of its own; [`token`]: what lets it in.
//! * [`vault`]: keys, and secrets that are sealed by them.
//! * [`joining`]: the steps into a cluster and out of it.
//! * [`lives`]: which process a node is.
//! * [`admission`]: who is let in, by which token.
//! * [`authority`]: what signs the certificates of a cluster's nodes.
//! * [`rotation`]: how the cluster's secret and authority are replaced.
//! * [`pin`]: how a node that joins knows the cluster of its token.
//! * [`nodes`]: the records of the nodes, and who of them is alive.
//! * [`mirrors`]: the records of mirrored volumes, for the cores that the volumes live on.

pub mod admission;
pub mod authority;
pub mod file;
pub mod identity;
pub mod joining;
pub mod lives;
pub mod member;
pub mod meta;
pub mod mirrors;
pub mod nodes;
pub mod pin;
pub mod rotation;
#[cfg(feature = "testing")]
pub mod testing;
pub mod token;
pub mod vault;
