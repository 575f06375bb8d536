//! What is offered, and limits.

use std::time::Duration;

/// What is offered to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name of the export, of 4096 bytes at most. A client that names none gets it as well.
    pub export: String,
    /// What people are told of it, of 4096 bytes at most.
    pub description: String,
    /// Refuse to change the device.
    pub read_only: bool,
    /// Connections at once. One that is too many takes the place of the oldest that has not chosen the export
    /// yet, or is refused.
    pub connections: usize,
    /// Requests in flight on one connection.
    pub in_flight: u16,
    /// Most data of one request in bytes; cut to an eighth of the buffer memory of the core.
    pub payload_bytes: u32,
    /// How long a client may take to choose the export.
    pub handshake_timeout: Duration,
    /// How long it may take to finish a request.
    pub receive_timeout: Duration,
    /// How long it may take nothing of what waits to be sent.
    pub send_timeout: Duration,
    /// How long connections have, once the server is to stop, for what is in flight.
    pub stop_timeout: Duration,
}

impl Options {
    /// The usual limits.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self {
            export: export.to_owned(),
            description: String::new(),
            read_only: false,
            connections: 64,
            in_flight: 128,
            payload_bytes: 32 << 20,
            handshake_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(60),
            stop_timeout: Duration::from_secs(30),
        }
    }
}
