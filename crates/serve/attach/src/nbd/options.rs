//! Options and limits of the server.

use std::time::Duration;

/// Options and limits of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name of the export, at most 4096 bytes. It is also the default export.
    pub export: String,
    /// Description for users, at most 4096 bytes.
    pub description: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Maximum number of connections. One more replaces the oldest that has not chosen the export
    /// yet, or is refused.
    pub connections: usize,
    /// Requests in flight on one connection.
    pub max_in_flight: u16,
    /// Most data of one request in bytes; reduced to an eighth of the core's buffer memory.
    pub payload_bytes: u32,
    /// How long a client may take to choose the export.
    pub handshake_timeout: Duration,
    /// How long a client may take to finish a request.
    pub receive_timeout: Duration,
    /// How long a client may receive nothing while output waits.
    pub send_timeout: Duration,
    /// When the server stops: how long connections have to complete what is in flight.
    pub stop_timeout: Duration,
}

impl Options {
    /// Default options.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self {
            export: export.to_owned(),
            description: String::new(),
            read_only: false,
            connections: 64,
            max_in_flight: 128,
            payload_bytes: 32 << 20,
            handshake_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(60),
            stop_timeout: Duration::from_secs(30),
        }
    }
}
