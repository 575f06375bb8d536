//! Configuration of a connection.

use std::time::Duration;

use crate::chap::{CHALLENGE_LEN, Secret};
use crate::name::Name;
use crate::params::Limits;
use crate::stream::Digests;

/// Most commands in flight on one connection: their tags have 12 bits for the slot, and non-SCSI
/// requests need some slots.
pub const MAX_IN_FLIGHT: u16 = 4000;

/// CHAP credentials of an initiator (RFC 7143 12.1.3).
#[derive(Clone, Debug)]
pub struct Credentials {
    /// User name.
    pub user: String,
    /// Its secret.
    pub secret: Secret,
    /// Name and secret of the target; if set, targets that do not authenticate are refused.
    pub mutual: Option<(String, Secret)>,
}

/// Random bytes for one login, used once.
#[derive(Clone, Debug)]
pub struct LoginNonce {
    /// The challenge for the target.
    pub challenge: [u8; CHALLENGE_LEN],
    /// Its identifier.
    pub id: u8,
}

/// Names, limits and timeouts of a connection.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of this initiator.
    pub initiator: Name,
    /// Name of the target; `None` for a discovery session.
    pub target: Option<Name>,
    /// The initiator's part of the session identifier (RFC 7143 11.12.5): a new login with the same
    /// one replaces the older session.
    pub isid: [u8; 6],
    /// Credentials, for targets that ask.
    pub credentials: Option<Credentials>,
    /// Digests to request; a target may decline or require them.
    pub digests: Digests,
    /// Upper limits of the negotiation.
    pub limits: Limits,
    /// Maximum number of commands in flight; clamped to [`MAX_IN_FLIGHT`]. A target may allow fewer
    /// at a time.
    pub max_in_flight: u16,
    /// Time limit of the login, from the start of the connection.
    pub login_timeout: Duration,
    /// After this time without input from the target it is pinged; zero: never.
    pub ping_after: Duration,
    /// Time limit of the answer to a ping.
    pub ping_timeout: Duration,
    /// Time limit of the rest of a PDU.
    pub receive_timeout: Duration,
}

impl Config {
    /// Default configuration.
    #[must_use]
    pub fn new(initiator: Name, target: Option<Name>, isid: [u8; 6]) -> Self {
        Self {
            initiator,
            target,
            isid,
            credentials: None,
            digests: Digests::default(),
            limits: Limits::default(),
            max_in_flight: 128,
            login_timeout: Duration::from_secs(15),
            ping_after: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(5),
            receive_timeout: Duration::from_secs(30),
        }
    }
}
