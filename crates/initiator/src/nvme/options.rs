//! What a host is told about a controller before it knows it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::nvme::Digests;
use ::nvme::auth::{Policy, Secret};

/// How a host proves who it is (RFD 0020).
#[derive(Clone, Debug)]
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

/// Pauses that double, up to a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The first pause.
    pub first: Duration,
    /// The longest one.
    pub longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(100), longest: Duration::from_secs(10) }
    }
}

impl Backoff {
    /// The pause before attempt `number`, from 0: between a half and all of what it has come to, by
    /// `random`, so that those who lost a controller together do not come back together.
    #[must_use]
    pub fn pause(&self, number: u32, random: u64) -> Duration {
        let factor = 1u32.checked_shl(number.min(31)).unwrap_or(u32::MAX);
        let whole = self.first.saturating_mul(factor).min(self.longest);
        let half = whole / 2;
        let parts = u32::try_from(random >> 40).unwrap_or(0);
        // Of 2^24 parts of the other half.
        half + (half / (1 << 12)) * (parts >> 12)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_have_a_bound() {
        let backoff = Backoff::default();
        for (number, whole_ms) in [(0, 100), (1, 200), (5, 3200), (7, 10_000), (4000, 10_000)] {
            let whole = Duration::from_millis(whole_ms);
            let shortest = backoff.pause(number, 0);
            let longest = backoff.pause(number, u64::MAX);
            assert_eq!(shortest, whole / 2, "{number}");
            assert!(longest > whole * 9 / 10 && longest <= whole, "{longest:?} of {whole:?}");
        }
    }
}
