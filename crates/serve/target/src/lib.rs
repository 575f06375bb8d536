//! Sockets, protocol machines and volumes, joined.
//!
//! * [`catalog`]: which targets are served to which initiators; an immutable snapshot that the node
//!   replaces.
//! * [`server`]: one core's volumes and connections, and its links to the other cores.
//! * `migration`: the life cycle of a connection, from core to core.
//! * [`connection`]: the driver of one connection, the same for every protocol.
//! * `channel`: the byte stream of a connection: plain or TLS.
//! * [`auth_throttle`]: throttles clients that fail to authenticate.
//! * `duplicate_names`: initiators that share a name.
//! * `third_party_copy`: third-party copies between volumes.
//! * `tokens`: offloaded copies by token.

pub mod auth_throttle;
pub mod catalog;
mod channel;
pub mod connection;
mod duplicate_names;
mod iscsi;
mod migration;
mod nvme;
pub mod server;
mod third_party_copy;
mod tokens;

pub use catalog::{
    AccessList, AccessRule, Catalog, ChapCredentials, HostKey, HostSecrets, HostTls, IscsiTarget,
    NodeIndex, Portals, RemoteCatalog, ServingNode, Subsystem, Unavailability,
    UnavailableNamespace, VolumeId,
};
pub use duplicate_names::DuplicateName;
pub use server::{
    ClientReport, CoreLink, Limits, ServedVolume, Server, Service, SessionInfo, VolumeSpace,
    core_links,
};
