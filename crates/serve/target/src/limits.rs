//! Limits on clients, and on what one of their requests may use.

use std::time::Duration;

/// Most data of one command in bytes, with either protocol.
pub const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// Most buffer memory that one request waits for, in bytes: its data, and at most as much again for
/// the volume's layers.
pub const MAX_REQUEST_BYTES: u64 = 2 * MAX_TRANSFER_BYTES as u64;

/// Requests of the largest size that a core's pool must hold, so that each class of work has its
/// share ([`MemoryClass`](block::MemoryClass)).
pub const MIN_POOL_REQUESTS: u64 = 8;

/// Limits on clients. All are configuration.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections per core, including those that have not logged in.
    pub connections: usize,
    /// Connections per core that have not logged in; beyond that, one is closed for the next.
    pub logins: usize,
    /// Discovery connections per core, which need no authentication; beyond that, one is closed for
    /// the next.
    pub discoveries: usize,
    /// Time limit of a login, from the first byte to full feature phase.
    pub login_timeout: Duration,
    /// Time within which a client must read some of the data sent to it.
    pub send_timeout: Duration,
    /// Time within which a client must send the rest of a message.
    pub receive_timeout: Duration,
    /// How long a command with part of its data here may wait for memory for the rest.
    pub admission_timeout: Duration,
    /// How long any other command may wait for memory.
    pub memory_timeout: Duration,
    /// Silence after which the target checks whether the client is still there.
    pub keep_alive: Duration,
    /// iSCSI commands in flight per session (the width of the CmdSN window).
    pub commands: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            logins: 512,
            discoveries: 256,
            login_timeout: Duration::from_secs(15),
            send_timeout: Duration::from_secs(30),
            receive_timeout: Duration::from_secs(30),
            admission_timeout: Duration::from_secs(1),
            memory_timeout: Duration::from_secs(5),
            keep_alive: Duration::from_secs(15),
            commands: 128,
        }
    }
}
