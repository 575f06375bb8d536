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
//! [`nbd`] reaches the exports of NBD servers.
//!
//! What is decided, and what a broken or hostile controller can do to whom, is in
//! `docs/rfd/0021-the-initiator.md`.

mod backoff;
mod drive;
pub mod nbd;
pub mod nvme;
