//! The node: start, run and stop, and the routes of its API.
//!
//! * [`node`]: assembles the data directory, the [engine](engine), the [control plane](control) and
//!   the [HTTP server](http_server);
//! * [`rest`]: the routes of the REST API and of `/metrics`.

pub mod node;
pub mod rest;

pub use node::{Node, StartError};
