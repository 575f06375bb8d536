//! What an initiator is told about a target before it knows it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::iscsi::Digests;
use ::iscsi::initiator::Credentials;
use ::iscsi::params::Limits;

pub use crate::backoff::Backoff;

/// Who connects to what, and how long anything may take.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the target is; it may lead elsewhere.
    pub address: SocketAddr,
    /// Name of the target.
    pub target: String,
    /// Name of this initiator.
    pub initiator: String,
    /// The initiator's part of the session identifier; a random one where there is none. Two sessions of
    /// one initiator with one target need two (RFC 7143 4.4.3.1).
    pub isid: Option<[u8; 6]>,
    /// How it proves who it is, where a target asks.
    pub credentials: Option<Arc<Credentials>>,
    /// Digests to ask for; a target may decline, or insist on them.
    pub digests: Digests,
    /// What is negotiated at most.
    pub limits: Limits,
    /// Commands that may be in flight; a target may take fewer.
    pub in_flight: u16,
    /// After how long a silence the target is taken for gone.
    pub keep_alive: Duration,
    /// How long connecting may take, from dialling to the end of the login.
    pub connect_timeout: Duration,
    /// How long a command may take.
    pub command_timeout: Duration,
    /// How often a unit is asked whether it has changed; zero: only by the commands that it is sent.
    pub look_every: Duration,
    /// How long to wait before connecting again.
    pub backoff: Backoff,
    /// How long a command waits for a target that is away, from its first failure.
    pub patience: Duration,
}

impl Options {
    /// The usual ones.
    #[must_use]
    pub fn new(address: SocketAddr, target: &str, initiator: &str) -> Self {
        Self {
            address,
            target: target.to_owned(),
            initiator: initiator.to_owned(),
            isid: None,
            credentials: None,
            digests: Digests::default(),
            limits: Limits::default(),
            in_flight: 128,
            keep_alive: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(10),
            command_timeout: Duration::from_secs(30),
            look_every: Duration::from_secs(10),
            backoff: Backoff::default(),
            patience: Duration::from_secs(60),
        }
    }
}
