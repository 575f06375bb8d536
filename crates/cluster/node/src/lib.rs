//! A node, assembled: configuration, store, control plane, REST API, metrics.
//!
//! * [`config`]: the settings, defined once.
//! * [`anchor`]: what keeps a missing data directory from being taken for a new one.
//! * [`meta`] and [`record`]: what the node knows, durably; [`pools`]: and of its disks.
//! * [`reconcile`]: what has to happen to a volume next; pure.
//! * [`control`]: carries out what the API asks; [`engine`]: the data plane it steers;
//!   [`publish`]: what initiators are told.
//! * [`membership`]: what it is in a cluster, for those who need it.
//! * [`http`] and [`metrics`]: the doors.
//! * [`node`]: start, serve, stop.

pub mod access;
pub mod anchor;
pub mod config;
pub mod control;
pub mod data_dir;
pub mod engine;
pub mod http;
pub mod limits;
pub mod membership;
pub use ::cluster::meta;
pub mod metrics;
pub mod node;
mod part;
pub mod pools;
mod protection;
pub mod publish;
pub mod reconcile;
pub mod record;

pub use config::Config;
pub use disk::utc;
pub use node::{Node, StartError};
