//! Configuration of iSCSI connections.

use std::time::Duration;

use crate::params::Limits;

/// Settings of a connection in the target role; shared by all connections.
#[derive(Clone, Debug)]
pub struct Config {
    /// Upper limits of the negotiation.
    pub limits: Limits,
    /// Commands that an initiator may have outstanding: 1 to 2^16 − 1.
    pub window: u32,
    /// Time limit of the login, from the start of the connection.
    pub login_timeout: Duration,
    /// After this time without input from the initiator it is pinged.
    pub ping_after: Duration,
    /// Time limit of the answer to a ping.
    pub ping_timeout: Duration,
    /// Time limit of the rest of a PDU.
    pub receive_timeout: Duration,
    /// Time limit of the data of a write, which then fails.
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
    /// Clamps the command window to what sequence numbers can express.
    pub(crate) fn clamp_window(window: u32) -> u32 {
        window.clamp(1, 0xffff)
    }
}
