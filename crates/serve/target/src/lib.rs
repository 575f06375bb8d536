//! Sockets, protocol machines and volumes, joined.
//!
//! * [`catalog`]: which targets are served to which initiators; an immutable snapshot that the node
//!   replaces.
//! * `served_volumes`: one core's volumes.
//! * `iscsi_sessions`, `nvme_controllers`: what initiators have open on one core.
//! * [`server`]: all of these, one core's connections, and its links to the other cores.
//! * `listener`: accepts connections.
//! * `migration`: the life cycle of a connection, from core to core.
//! * [`connection`]: the driver of one connection, the same for every protocol; `iscsi` and `nvme`:
//!   its protocols.
//! * `channel`: the byte stream of a connection: plain or TLS.
//! * [`auth_throttle`]: throttles clients that fail to authenticate.
//! * `duplicate_names`: initiators that share a name.
//! * [`limits`]: limits on clients.
//! * `third_party_copy`: third-party copies between volumes; `principal`: on whose behalf.
//! * `offloaded_transfer`: offloaded copies by token; `tokens`: the tokens of one core.

pub mod auth_throttle;
pub mod catalog;
mod channel;
pub mod connection;
mod connection_notice;
mod duplicate_names;
mod iscsi;
mod iscsi_sessions;
pub mod limits;
mod listener;
mod migration;
mod nvme;
mod nvme_controllers;
mod offloaded_transfer;
mod principal;
mod served_volumes;
pub mod server;
mod third_party_copy;
mod tokens;

pub use catalog::{
    AccessList, AccessRule, Catalog, ChapCredentials, HostKey, HostSecrets, HostTls, IscsiTarget,
    NodeIndex, Portals, RemoteCatalog, ServingNode, Subsystem, Unavailability,
    UnavailableNamespace, VolumeId,
};
pub use duplicate_names::DuplicateName;
pub use limits::Limits;
pub use served_volumes::{ServedVolume, VolumeSpace};
pub use server::{ClientReport, CoreLink, Server, Service, SessionInfo, core_links};
