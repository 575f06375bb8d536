//! Sockets, protocol machines and volumes, joined.
//!
//! * [`catalog`]: what is served to whom; an immutable snapshot that the node replaces.
//! * [`server`]: one core's volumes and connections, and the doors to the other cores.
//! * `resident`: the life of a connection, from core to core.
//! * [`conn`]: the driver of one connection, the same for every protocol.
//! * `channel`: what a connection reads and writes: plain, or by TLS.
//! * [`guesses`]: clients that fail to prove who they are, and how long they wait.
//! * `clones`: initiators that share a name.
//! * `copying`: third-party copies between volumes.
//! * `tokens`: the same by tokens.

pub mod catalog;
mod channel;
mod clones;
pub mod conn;
mod copying;
pub mod guesses;
mod iscsi;
mod nvme;
mod resident;
pub mod server;
mod tokens;

pub use catalog::{
    Absent, Access, Admission, Away, Catalog, Chap, HostKey, HostSecrets, HostTls, IscsiTarget,
    NodeIndex, Portals, Remote, ServingNode, Subsystem, VolumeId,
};
pub use clones::SharedName;
pub use server::{Clients, Door, Limits, Served, Server, Service, Session, Space, doors};
