//! What a link between two hosts is like.

use std::time::Duration;

use crate::sim::rng::Rng;

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSetup {
    /// Nothing gets through.
    pub cut: bool,
    /// Nothing of connections that were made to this port gets through.
    pub cut_port: Option<u16>,
    /// The fastest a segment arrives, in whole milliseconds.
    pub min: Duration,
    /// The slowest, unless it is lost.
    pub max: Duration,
    /// Probability that a segment is lost and sent again [`Self::resend`] later.
    pub loss: f64,
    /// How long it takes until a lost segment is sent again; twice that at most.
    pub resend: Duration,
    /// Bytes that may be on their way or unread before a writer has to wait.
    pub window: usize,
    /// After this long without a sign of the other side a sender gives up (Linux gives up after
    /// 15 minutes).
    pub give_up: Duration,
}

impl Default for LinkSetup {
    fn default() -> Self {
        Self {
            cut: false,
            cut_port: None,
            min: Duration::from_millis(1),
            max: Duration::from_millis(3),
            loss: 0.0,
            resend: Duration::from_millis(200),
            window: 64 << 10,
            give_up: Duration::from_secs(900),
        }
    }
}

impl LinkSetup {
    /// How long one segment takes.
    pub(crate) fn delay(&self, loopback: bool, rng: &Rng) -> Duration {
        if loopback {
            return rng.time(Duration::ZERO, Duration::from_millis(1));
        }
        let lost = rng.chance(self.loss);
        let again = if lost { self.resent(rng) } else { Duration::ZERO };
        rng.time(self.min, self.max) + again
    }

    /// How long it takes until something is sent again.
    pub(crate) fn resent(&self, rng: &Rng) -> Duration {
        rng.time(self.resend, self.resend * 2)
    }
}
