//! What a client is told about a server before it knows it.

use std::time::Duration;

/// Which export, and how long anything may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name of the export; the server's default one where it is empty.
    pub export: String,
    /// Connections to open, where the server says that a flush on one covers all of them
    /// (`NBD_FLAG_CAN_MULTI_CONN`); otherwise there is one.
    pub connections: u16,
    /// Commands that may be in flight on one connection.
    pub in_flight: u16,
    /// How long connecting may take, and then again agreeing on the export.
    pub connect_timeout: Duration,
    /// How long a command may take, a flush among them: longer, and the disk is gone.
    pub command_timeout: Duration,
    /// How long the server may take nothing of what waits to be sent.
    pub send_timeout: Duration,
}

impl Options {
    /// The usual ones.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self {
            export: export.to_owned(),
            connections: 1,
            in_flight: 64,
            connect_timeout: Duration::from_secs(10),
            command_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(30),
        }
    }
}
