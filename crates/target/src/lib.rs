//! Sockets, protocol machines and volumes, joined.
//!
//! * [`catalog`]: what is served to whom; an immutable snapshot that the node replaces.
//! * [`conn`]: the driver of one connection, the same for every protocol.

pub mod catalog;
pub mod conn;
