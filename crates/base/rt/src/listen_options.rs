//! How to listen for connections.

/// How to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenOptions {
    /// Connections that the system queues before we accept them.
    pub backlog: u32,
    /// Whether several listeners (one per core) may share the address; the system then spreads
    /// connections over them (`SO_REUSEPORT`).
    pub reuse_port: bool,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 1024, reuse_port: false }
    }
}
