//! Options of an iSCSI connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::iscsi::Digests;
use ::iscsi::initiator::Credentials;
use ::iscsi::params::Limits;

pub use crate::backoff::Backoff;

/// Names, addresses and time limits.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the target, which may redirect.
    pub address: SocketAddr,
    /// Name of the target.
    pub target: String,
    /// Name of this initiator.
    pub initiator: String,
    /// The initiator's part of the session identifier (ISID); random if `None`. Two sessions of one
    /// initiator with one target need different ones (RFC 7143 4.4.3.1).
    pub isid: Option<[u8; 6]>,
    /// CHAP credentials, for targets that ask.
    pub credentials: Option<Arc<Credentials>>,
    /// Digests to request; a target may decline or require them.
    pub digests: Digests,
    /// Upper limits of the negotiation.
    pub limits: Limits,
    /// Commands that may be in flight; a target may take fewer.
    pub max_in_flight: u16,
    /// After how long a silence the target counts as lost.
    pub keep_alive: Duration,
    /// Time limit of connecting, from dialling to the end of the login.
    pub connect_timeout: Duration,
    /// Time limit of a command.
    pub command_timeout: Duration,
    /// How often a unit is polled for changes; zero: never.
    pub poll_interval: Duration,
    /// Delays between connection attempts.
    pub backoff: Backoff,
    /// How long a command waits for an unreachable target, from its first failure.
    pub retry_timeout: Duration,
}

impl Options {
    /// Default options.
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
            max_in_flight: 128,
            keep_alive: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(10),
            command_timeout: Duration::from_secs(30),
            poll_interval: Duration::from_secs(10),
            backoff: Backoff::default(),
            retry_timeout: Duration::from_secs(60),
        }
    }
}
