//! The node: configuration, store, control plane, REST API, metrics.
//!
//! * [`config`]: the settings, each defined once.
//! * [`anchor`]: protects the data directory from being mistaken for another one.
//! * [`store`] and [`record`]: the records of volumes; [`pool_records`]: those of pools.
//! * [`reconcile`]: decides the next step for a volume; pure.
//! * [`control`]: the control plane, which executes API requests; [`engine`]: the data plane;
//!   [`catalog`]: what initiators see.
//! * [`joined_cluster`]: the node's data as a member of a cluster.
//! * [`http`] and [`metrics`]: the API and the metrics.
//! * [`node`]: start, run, stop.

pub mod anchor;
pub mod config;
pub mod control;
pub mod data_dir;
pub mod engine;
pub mod file_permissions;
pub mod http;
pub mod joined_cluster;
pub mod limits;
pub use ::cluster::store;
pub mod catalog;
mod certificates;
mod cluster_membership;
pub mod metrics;
pub mod node;
pub mod pool_records;
pub mod reconcile;
pub mod record;

pub use config::Config;
pub use disk::format_utc;
pub use node::{Node, StartError};
