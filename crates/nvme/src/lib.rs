//! NVMe over TCP, sans-io: NVMe Base 2.0, NVM Command Set 1.0, NVMe/TCP Transport 1.0.
//!
//! * [`pdu`], [`entry`], [`Status`]: what travels.
//! * [`Connection`]: one TCP connection, one queue.
//! * [`controller`]: what commands mean; pure.

mod connection;
pub mod controller;
pub mod entry;
pub mod pdu;
mod status;

pub use connection::{Action, Config, Connection, End, IN_CAPSULE_BYTES, Queue, Tag};
pub use controller::{
    Admin, Connect, ConnectRefusal, Controller, DISCOVERY_NQN, Namespace, Portal, Subsystem,
};
pub use status::Status;

/// Most entries of a submission queue.
pub const MAX_QUEUE_ENTRIES: u16 = 128;
