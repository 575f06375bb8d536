//! The node: control plane, REST API, metrics, start and stop.
//!
//! * [`control`]: the control plane, which executes API requests with the
//!   [records](records) of volumes and the [engine](engine), which is the data plane.
//! * [`rest`]: the API and the metrics.
//! * [`node`]: start, run, stop.

pub mod control;
pub mod node;
pub mod rest;

pub use node::{Node, StartError};
