//! NVMe over TCP, sans-io: NVMe Base 2.0, NVM Command Set 1.0, NVMe/TCP Transport 1.0.
//!
//! Two independent halves:
//! * [`Connection`] is the machine of one TCP connection, that is of one queue: PDUs, digests,
//!   capsules, data transfers, queue slots.
//! * [`Controller`] executes the commands of an association: properties, Identify, features, logs,
//!   events, keep alive, and the translation of I/O commands to [`block::Request`]s.
//!
//! The driver connects the two with the sockets and the volumes; see the figure in
//! `docs/rfd/0006-nvme-machine.md`. [`host`] is the host side of a connection
//! (`docs/rfd/0021-the-initiator.md`). [`auth`] is in-band authentication, and [`tls`] the keys of
//! TLS, for both roles. The codecs ([`pdu`], [`entry`], [`fabrics`], [`identify`], [`log`],
//! [`reservation_data`]) serve both roles.

pub mod auth;
mod connection;
mod controller;
mod controllers;
pub mod entry;
pub mod fabrics;
pub mod host;
pub mod identify;
pub mod log;
pub mod pdu;
pub mod reservation_data;
mod status;
mod stream;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tls;

pub use connection::{Action, CloseReason, Config, Connection, IN_CAPSULE_BYTES, Queue};
pub use controller::{
    AdminAction, Controller, CopyRequest, DiscoveryEntry, DiscoveryKind, DiscoveryLog, Event,
    FusedError, IoCommand, IoOp, IoWork, Limits, MAX_IO_QUEUES, Namespace, ReservationOp, Role,
    Subsystem, TlsRequirement, write_report,
};
pub use controllers::{ConnectedQueue, Controllers};
pub use entry::{Completion, Sqe};
pub use fabrics::Connect;
pub use status::Status;
pub use stream::{Digests, Tag};
