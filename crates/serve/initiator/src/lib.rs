//! Windrose as a client of storage servers, its own or others'.
//!
//! [`nvme`] connects to NVMe/TCP controllers:
//!
//! ```text
//!  Namespace ── Controller ──┬─ Queue (admin) ── socket
//!  a block::    reconnects   ├─ Queue (I/O)   ── socket
//!  Layer                     └─ …                one task each
//! ```
//!
//! [`iscsi`] connects to iSCSI targets:
//!
//! ```text
//!  Lun ── Session ── socket
//!  a block::  reconnects
//!  Layer
//! ```
//!
//! What both have in common, from the connection task to the backoff, is shared. [`nbd`] connects
//! to NBD exports. [`uri`] parses the names of remote and local devices. Design decisions, and what
//! a faulty or hostile server can do, are in `docs/rfd/0021-the-initiator.md`,
//! `docs/rfd/0025-nbd.md` and `docs/rfd/0026-the-iscsi-initiator.md`.

mod backoff;
mod commands;
mod connection;
pub mod iscsi;
pub mod nbd;
pub mod nvme;
mod reconnect;
mod tls_stream;
pub mod uri;
