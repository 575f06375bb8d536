//! Options of an NVMe/TCP connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::nvme::Digests;
use ::nvme::auth::{AuthPolicy, Secret};
use ::nvme::tls::TlsKey;

pub use crate::backoff::Backoff;

/// DH-HMAC-CHAP secrets and policy (RFD 0020).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secrets {
    /// The host's secret.
    pub host: Secret,
    /// The controller's secret; if set, controllers that do not authenticate are refused.
    pub controller: Option<Secret>,
    /// Accepted hashes and groups.
    pub policy: AuthPolicy,
}

/// Names, addresses and time limits.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the controller.
    pub address: SocketAddr,
    /// NQN of the subsystem.
    pub subnqn: String,
    /// NQN of this host.
    pub hostnqn: String,
    /// Identifier of this host; not 0.
    pub host_id: [u8; 16],
    /// Secrets, for controllers that require authentication.
    pub secrets: Option<Arc<Secrets>>,
    /// The pre-shared key of host and subsystem: connections use TLS (RFD 0022). Without it they
    /// are not encrypted.
    pub tls_key: Option<Arc<TlsKey>>,
    /// Digests to request; a controller may decline.
    pub digests: Digests,
    /// I/O queues to open on this core; a controller may allow fewer.
    pub io_queues: u16,
    /// Entries of an I/O queue: one more than the commands in flight; a controller may allow fewer.
    pub queue_entries: u16,
    /// After how long a silence the controller counts this host as lost, and vice versa (KATO).
    pub keep_alive: Duration,
    /// Time limit of connecting one queue, from dialling to the answer to Connect.
    pub connect_timeout: Duration,
    /// Time limit of any other command.
    pub command_timeout: Duration,
    /// Delays between connection attempts.
    pub backoff: Backoff,
    /// How long a command waits for an unreachable controller, from its first failure.
    pub retry_timeout: Duration,
}

impl Options {
    /// Default options.
    #[must_use]
    pub fn new(address: SocketAddr, subnqn: &str, hostnqn: &str, host_id: [u8; 16]) -> Self {
        Self {
            address,
            subnqn: subnqn.to_owned(),
            hostnqn: hostnqn.to_owned(),
            host_id,
            secrets: None,
            tls_key: None,
            digests: Digests::default(),
            io_queues: 1,
            queue_entries: 128,
            keep_alive: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(10),
            command_timeout: Duration::from_secs(30),
            backoff: Backoff::default(),
            retry_timeout: Duration::from_secs(60),
        }
    }
}
