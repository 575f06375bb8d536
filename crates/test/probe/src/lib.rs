//! Initiators for tests with real processes: iSCSI and NVMe/TCP, blocking, one command at a time; a book that knows what every
//! block may hold after a crash; a client with several paths and a checker of what its like have seen.
//!
//! They share no code with the product on purpose: an error made twice in the same way would hide itself. They speak only as
//! much of the protocols as the tests need, and they let a test say the wrong thing ([`iscsi::Pdu`], raw bytes).
#![allow(
    clippy::disallowed_methods,
    reason = "a client of the real thing: real sockets, real time, its own threads"
)]

mod disk;
pub mod history;
pub mod iscsi;
pub mod nvme;
pub mod paths;
pub mod registers;

pub use disk::{Disk, fault};

use std::time::Duration;

/// How long a client waits for an answer before it calls the connection dead.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How a client takes silence.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long the other side may say nothing. With `ping` it is asked whether it is there and gets as long again.
    pub silence: Duration,
    /// Whether to ask (NOP-Out, RFC 7143 11.18; Keep Alive, NVMe Base 2.0 5.16) before the connection counts as dead: so one that
    /// takes long over a command is told from one that is gone.
    pub ping: bool,
    /// How long a command may take while pings are answered.
    pub command: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { silence: PATIENCE, ping: false, command: PATIENCE }
    }
}
