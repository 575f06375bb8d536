//! Initiators for tests with real processes: iSCSI and NVMe/TCP, blocking, one command at a time; a
//! model of what every block may hold after a crash; a multipath client, and a linearizability
//! checker of what such clients have seen.
//!
//! They share no code with the product on purpose: the same error on both sides would hide itself.
//! They speak only as much of the protocols as the tests need, and let a test send invalid messages
//! ([`iscsi::Pdu`], raw bytes).
#![allow(
    clippy::disallowed_methods,
    reason = "a client of the real thing: real sockets, real time, its own threads"
)]

mod disk;
pub mod iscsi;
pub mod linearizability;
pub mod multipath;
pub mod nvme;
pub mod registers;

pub use disk::{BlockClient, protocol_error};

use std::time::Duration;

/// How long a client waits for an answer before it considers the connection dead.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// How a client handles silence.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// How long the peer may be silent. With `ping_when_silent` it is then pinged and gets the same
    /// time again.
    pub read_timeout: Duration,
    /// Whether to ping (NOP-Out, RFC 7143 11.18; Keep Alive, NVMe Base 2.0 5.16) before the
    /// connection counts as dead: this tells a slow command from a dead peer.
    pub ping_when_silent: bool,
    /// How long a command may take while pings are answered.
    pub command_timeout: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            read_timeout: DEFAULT_TIMEOUT,
            ping_when_silent: false,
            command_timeout: DEFAULT_TIMEOUT,
        }
    }
}
