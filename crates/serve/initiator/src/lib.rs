//! The other end: Windrose as a host of controllers, its own or others'.
//!
//! [`nvme`] reaches NVMe/TCP controllers:
//!
//! ```text
//!  Namespace ── Controller ──┬─ Queue (admin) ── socket
//!  a block::    reconnects   ├─ Queue (I/O)   ── socket
//!  Layer                     └─ …                one task each
//! ```
//!
//! [`iscsi`] reaches iSCSI targets:
//!
//! ```text
//!  Lun ── Session ── socket
//!  a block::  reconnects
//!  Layer
//! ```
//!
//! What both do alike, from the task of a connection to the pauses between attempts, is there once. [`nbd`] reaches the
//! exports of NBD servers. [`uri`] names what is reached, and what is here. What is decided, and what a broken or hostile
//! other end can do to whom, is in `docs/rfd/0021-the-initiator.md`, `docs/rfd/0025-nbd.md` and
//! `docs/rfd/0026-the-iscsi-initiator.md`.

mod backoff;
mod commands;
mod drive;
pub mod iscsi;
mod kept;
pub mod nbd;
pub mod nvme;
mod protected;
pub mod uri;
