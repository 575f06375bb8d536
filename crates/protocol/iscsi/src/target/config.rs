//! What an administrator can choose about iSCSI connections.

use std::time::Duration;

use crate::params::Limits;

/// Settings of a connection in the target role; shared by all connections.
#[derive(Clone, Debug)]
pub struct Config {
    /// What is negotiated at most.
    pub limits: Limits,
    /// Commands that an initiator may have outstanding: 1 to 2^16 − 1.
    pub window: u32,
    /// How long a login may take from the beginning of the connection.
    pub login_timeout: Duration,
    /// After so long without a word from the initiator it is pinged.
    pub ping_after: Duration,
    /// How long the answer to a ping may take.
    pub ping_timeout: Duration,
    /// How long the rest of a PDU may stay away.
    pub receive_timeout: Duration,
    /// How long the data of a write may stay away; the command fails then.
    pub data_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            window: 128,
            login_timeout: Duration::from_secs(15),
            ping_after: Duration::from_secs(10),
            ping_timeout: Duration::from_secs(15),
            receive_timeout: Duration::from_secs(30),
            data_timeout: Duration::from_secs(30),
        }
    }
}

impl Config {
    /// The command window within what sequence numbers can express.
    pub(crate) fn clamp_window(window: u32) -> u32 {
        window.clamp(1, 0xffff)
    }
}
