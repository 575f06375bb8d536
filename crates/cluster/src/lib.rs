//! What the nodes of a cluster know together: the metadata store and what is kept in it.
//!
//! * [`meta`]: the store itself; one interface, embedded in a node or kept by etcd.
//! * [`member`]: an etcd of our own, as a child process.
//! * [`mirrors`]: the records of mirrored volumes, for the cores that the volumes live on.

pub mod member;
pub mod meta;
pub mod mirrors;
#[cfg(feature = "testing")]
pub mod testing;
