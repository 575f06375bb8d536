//! Time limits: logins, silence, the rest of a PDU, write data.

use std::time::Duration;

use super::action::CloseReason;
use super::task::TransferFault;
use super::{Connection, Phase};

/// State of the timers. Durations are since the connection began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Timers {
    now: Duration,
    /// When the initiator last sent anything, or we last were not receiving.
    last_received: Duration,
    /// When a ping was sent that has not been answered.
    ping_sent: Option<Duration>,
    /// When we last were not receiving.
    last_not_receiving: Duration,
    /// When to check for overdue write data.
    next_data_check: Option<Duration>,
}

impl Timers {
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn record_received(&mut self) {
        self.last_received = self.now;
        self.ping_sent = None;
    }

    /// Data is expected from the initiator within `timeout`.
    pub(super) fn expect_data(&mut self, timeout: Duration) {
        self.next_data_check.get_or_insert(self.now + timeout);
    }
}

impl Connection {
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let (clock, config) = (&self.timers, &self.config);
        match self.phase {
            Phase::Closed => None,
            Phase::Login(_) | Phase::Deciding(_) | Phase::Establishing(_) => {
                Some(config.login_timeout)
            }
            Phase::FullFeature { .. } => {
                let silence = match clock.ping_sent {
                    Some(at) => at + config.ping_timeout,
                    None => clock.last_received + config.ping_after,
                };
                let rest = (!self.receiver.is_between_pdus())
                    .then(|| clock.last_received + config.receive_timeout);
                [Some(silence), rest, clock.next_data_check].into_iter().flatten().min()
            }
        }
    }

    pub(super) fn advance_to(&mut self, now: Duration) {
        self.timers.now = self.timers.now.max(now);
        let now = self.timers.now;
        match self.phase {
            Phase::Closed => {}
            Phase::Login(_) | Phase::Deciding(_) | Phase::Establishing(_) => {
                if now >= self.config.login_timeout {
                    self.end(CloseReason::LoginTimeout);
                }
            }
            Phase::FullFeature { .. } => {
                if !self.is_receiving() {
                    // Silence does not count while we are not receiving.
                    self.timers.last_not_receiving = now;
                    self.timers.record_received();
                }
                self.check_silence(now);
                self.check_data(now);
            }
        }
    }

    fn check_silence(&mut self, now: Duration) {
        let silent = now - self.timers.last_received;
        if !self.receiver.is_between_pdus() && silent >= self.config.receive_timeout {
            return self.end(CloseReason::ReceiveTimeout);
        }
        match self.timers.ping_sent {
            Some(at) if now - at >= self.config.ping_timeout => self.end(CloseReason::PingTimeout),
            Some(_) => {}
            None if silent >= self.config.ping_after => {
                self.timers.ping_sent = Some(now);
                self.ping();
            }
            None => {}
        }
    }

    /// Fails the writes whose data is overdue.
    fn check_data(&mut self, now: Duration) {
        if self.timers.next_data_check.is_none_or(|due| now < due) {
            return;
        }
        let (timeout, deaf) = (self.config.data_timeout, self.timers.last_not_receiving);
        let late = self.tasks.select(|t| {
            !t.data_out_sequences.is_empty() && now >= t.last_data_at.max(deaf) + timeout
        });
        for tag in late {
            let Some(task) = self.tasks.get(tag) else { continue };
            task.data_out_sequences.clear();
            if task.phase != super::task::TaskPhase::Ended {
                self.fail(tag, TransferFault::TIMEOUT);
            }
            self.respond_if_data_done(tag);
        }
        let since = self.tasks.longest_wait();
        self.timers.next_data_check = since.map(|since| since.max(deaf) + timeout);
    }
}
