//! Options of an NBD connection.

use std::time::Duration;

/// Export name and time limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name of the export; empty for the server's default.
    pub export: String,
    /// Connections to open if the server says that a flush on one covers all
    /// (`NBD_FLAG_CAN_MULTI_CONN`); otherwise one is opened.
    pub connections: u16,
    /// Commands that may be in flight on one connection.
    pub max_in_flight: u16,
    /// Time limit of connecting, and of the negotiation after it.
    pub connect_timeout: Duration,
    /// Time limit of a command, including a flush; exceeding it fails the disk.
    pub command_timeout: Duration,
    /// How long the server may receive nothing while output waits.
    pub send_timeout: Duration,
}

impl Options {
    /// Default options.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self {
            export: export.to_owned(),
            connections: 1,
            max_in_flight: 64,
            connect_timeout: Duration::from_secs(10),
            command_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(30),
        }
    }
}
