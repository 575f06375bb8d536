//! What is known of a connection before it begins.

use std::time::Duration;

use crate::chap::{CHALLENGE, Secret};
use crate::name::Name;
use crate::params::Limits;
use crate::stream::Digests;

/// Most commands in flight on one connection: their tags have 12 bits for the slot, of which requests that
/// are no commands need some.
pub const MAX_IN_FLIGHT: u16 = 4000;

/// How an initiator proves who it is: CHAP (RFC 7143 12.1.3).
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The name it gives.
    pub user: String,
    /// What it proves to know.
    pub secret: Secret,
    /// Name and secret of the target: with them, a target that proves nothing is refused as well.
    pub mutual: Option<(String, Secret)>,
}

/// Random bytes for one login, used once.
#[derive(Clone, Debug)]
pub struct Fresh {
    /// The challenge for the target.
    pub challenge: [u8; CHALLENGE],
    /// Its identifier.
    pub id: u8,
}

/// Who connects to what; limits and times of the connection.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of this initiator.
    pub initiator: Name,
    /// Name of the target; `None` for a discovery session.
    pub target: Option<Name>,
    /// The initiator's part of the session identifier (RFC 7143 11.12.5): who logs in with the same one again
    /// takes the place of its older session.
    pub isid: [u8; 6],
    /// How it proves who it is, where a target asks for it.
    pub credentials: Option<Credentials>,
    /// Digests to ask for; a target may decline, or insist on them.
    pub digests: Digests,
    /// What is negotiated at most. `max_segment` is what this side receives.
    pub limits: Limits,
    /// Commands that may be in flight; cut to [`MAX_IN_FLIGHT`]. A target may allow fewer at a time.
    pub in_flight: u16,
    /// How long the login may take from the beginning of the connection.
    pub login_timeout: Duration,
    /// After so long without a word from the target it is pinged; zero: never.
    pub ping_after: Duration,
    /// How long the answer to a ping may take.
    pub ping_timeout: Duration,
    /// How long the rest of a PDU may stay away.
    pub receive_timeout: Duration,
}

impl Config {
    /// The usual one.
    #[must_use]
    pub fn new(initiator: Name, target: Option<Name>, isid: [u8; 6]) -> Self {
        Self {
            initiator,
            target,
            isid,
            credentials: None,
            digests: Digests::default(),
            limits: Limits::default(),
            in_flight: 128,
            login_timeout: Duration::from_secs(15),
            ping_after: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(5),
            receive_timeout: Duration::from_secs(30),
        }
    }
}
