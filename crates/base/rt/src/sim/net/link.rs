//! Properties of a link between two hosts.

use std::time::Duration;

use crate::sim::rng::Rng;

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSetup {
    /// Nothing is delivered.
    pub is_cut: bool,
    /// Nothing is delivered on connections made to this port.
    pub cut_port: Option<u16>,
    /// Shortest delay of a segment, in whole milliseconds.
    pub min_delay: Duration,
    /// Longest delay, unless it is lost.
    pub max_delay: Duration,
    /// Probability that a segment is lost and retransmitted [`Self::retransmit_delay`] later.
    pub loss: f64,
    /// Delay until a lost segment is retransmitted; at most twice that.
    pub retransmit_delay: Duration,
    /// Most bytes in transit or unread before a writer must wait.
    pub window: usize,
    /// Time without an acknowledgement after which a sender gives up (Linux: 15 minutes).
    pub retransmit_timeout: Duration,
}

impl Default for LinkSetup {
    fn default() -> Self {
        Self {
            is_cut: false,
            cut_port: None,
            min_delay: Duration::from_millis(1),
            max_delay: Duration::from_millis(3),
            loss: 0.0,
            retransmit_delay: Duration::from_millis(200),
            window: 64 << 10,
            retransmit_timeout: Duration::from_secs(900),
        }
    }
}

impl LinkSetup {
    /// The delay of one segment.
    pub(crate) fn delay(&self, loopback: bool, rng: &Rng) -> Duration {
        if loopback {
            return rng.duration_between(Duration::ZERO, Duration::from_millis(1));
        }
        let lost = rng.chance(self.loss);
        let again = if lost { self.draw_retransmit_delay(rng) } else { Duration::ZERO };
        rng.duration_between(self.min_delay, self.max_delay) + again
    }

    /// The delay of a retransmission.
    pub(crate) fn draw_retransmit_delay(&self, rng: &Rng) -> Duration {
        rng.duration_between(self.retransmit_delay, self.retransmit_delay * 2)
    }
}
