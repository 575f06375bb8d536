//! What a host is told about a controller before it knows it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::nvme::Digests;
use ::nvme::auth::{Policy, Secret};
use ::nvme::tls::TlsKey;

pub use crate::backoff::Backoff;

/// How a host proves who it is (RFD 0020).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secrets {
    /// What the host proves to know.
    pub host: Secret,
    /// What the controller is to prove that it knows: with it, a controller that asks for no proof is
    /// refused as well.
    pub controller: Option<Secret>,
    /// What may be agreed on.
    pub policy: Policy,
}

/// Who connects to what, and how long anything may take.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the controller is.
    pub address: SocketAddr,
    /// NQN of the subsystem.
    pub subnqn: String,
    /// NQN of this host.
    pub hostnqn: String,
    /// Identifier of this host; not 0.
    pub host_id: [u8; 16],
    /// How it proves who it is, where a controller asks.
    pub secrets: Option<Arc<Secrets>>,
    /// The key that it has together with the subsystem: its connections are protected by TLS (RFD 0022). Without, they
    /// are not.
    pub tls_key: Option<Arc<TlsKey>>,
    /// Digests to ask for; a controller may decline.
    pub digests: Digests,
    /// I/O queues to open on this core; a controller may allow fewer.
    pub io_queues: u16,
    /// Entries of an I/O queue, one more than what may be in flight; a controller may have room for fewer.
    pub queue_entries: u16,
    /// After how long a silence the controller takes this host for gone, and the other way round (KATO).
    pub keep_alive: Duration,
    /// How long connecting one queue may take, from dialling to the answer to Connect.
    pub connect_timeout: Duration,
    /// How long any other command may take.
    pub command_timeout: Duration,
    /// How long to wait before connecting again.
    pub backoff: Backoff,
    /// How long a command waits for a controller that is away, from its first failure.
    pub patience: Duration,
}

impl Options {
    /// The usual ones.
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
            patience: Duration::from_secs(60),
        }
    }
}
