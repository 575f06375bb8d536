//! NVMe over TCP, sans-io: NVMe Base 2.0, NVM Command Set 1.0, NVMe/TCP Transport 1.0.
//!
//! Two halves that know nothing of each other:
//! * [`Connection`] is the machine of one TCP connection, that is of one queue: PDUs, digests,
//!   capsules, data transfers, queue slots.
//! * [`Controller`] is what the commands of an association mean: properties, Identify, features,
//!   logs, events, keep alive, and the way from I/O commands to [`block::Request`]s.
//!
//! The driver stands between the two, the sockets and the volumes; `docs/rfd/0006-nvme-machine.md`
//! draws it. [`host`] is the machine of the other end of a connection (`docs/rfd/0021-the-initiator.md`).
//! Beside them stand in-band authentication, [`auth`], and the keys of TLS, [`tls`], for both roles.
//! The codecs ([`pdu`], [`entry`], [`fabrics`], [`identify`], [`log`], [`reserving`]) serve both roles.

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
pub mod reserving;
mod status;
mod stream;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tls;

pub use connection::{Action, Config, Connection, End, IN_CAPSULE_BYTES, Queue};
pub use controller::{
    Controller, CopyWork, Discovery, DiscoveryEntry, DiscoveryKind, Event, IoCommand, IoOp, Limits,
    MAX_IO_QUEUES, Namespace, ReservationOp, Role, Subsystem, Tls, Unfused, Verdict, Work,
    write_report,
};
pub use controllers::{Connected, Controllers};
pub use entry::{Completion, Sqe};
pub use fabrics::Connect;
pub use status::Status;
pub use stream::{Digests, Tag};
