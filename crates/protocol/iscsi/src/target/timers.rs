//! What may not take for ever: logins, silence, the rest of a PDU, the data of a write.

use std::time::Duration;

use super::action::CloseReason;
use super::task::Fault;
use super::{Connection, Phase};

/// What the machine knows of time. Durations are since the connection began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clock {
    now: Duration,
    /// When the initiator last said anything, or we last did not listen.
    heard: Duration,
    /// When a ping was sent that has not been answered.
    pinged: Option<Duration>,
    /// When we last did not listen.
    deaf: Duration,
    /// When to look for writes whose data stays away.
    data_due: Option<Duration>,
}

impl Clock {
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn heard(&mut self) {
        self.heard = self.now;
        self.pinged = None;
    }

    /// Data is expected from the initiator within `timeout`.
    pub(super) fn expect_data(&mut self, timeout: Duration) {
        self.data_due.get_or_insert(self.now + timeout);
    }
}

impl Connection {
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let (clock, config) = (&self.clock, &self.config);
        match self.phase {
            Phase::Closed => None,
            Phase::Login(_) | Phase::Deciding(_) | Phase::Establishing(_) => {
                Some(config.login_timeout)
            }
            Phase::FullFeature { .. } => {
                let silence = match clock.pinged {
                    Some(at) => at + config.ping_timeout,
                    None => clock.heard + config.ping_after,
                };
                let rest =
                    (!self.receiver.is_between()).then(|| clock.heard + config.receive_timeout);
                [Some(silence), rest, clock.data_due].into_iter().flatten().min()
            }
        }
    }

    pub(super) fn at(&mut self, now: Duration) {
        self.clock.now = self.clock.now.max(now);
        let now = self.clock.now;
        match self.phase {
            Phase::Closed => {}
            Phase::Login(_) | Phase::Deciding(_) | Phase::Establishing(_) => {
                if now >= self.config.login_timeout {
                    self.end(CloseReason::LoginTimeout);
                }
            }
            Phase::FullFeature { .. } => {
                if !self.listens() {
                    // Nobody can be blamed for silence that we do not hear.
                    self.clock.deaf = now;
                    self.clock.heard();
                }
                self.check_silence(now);
                self.check_data(now);
            }
        }
    }

    fn check_silence(&mut self, now: Duration) {
        let silent = now - self.clock.heard;
        if !self.receiver.is_between() && silent >= self.config.receive_timeout {
            return self.end(CloseReason::ReceiveTimeout);
        }
        match self.clock.pinged {
            Some(at) if now - at >= self.config.ping_timeout => self.end(CloseReason::PingTimeout),
            Some(_) => {}
            None if silent >= self.config.ping_after => {
                self.clock.pinged = Some(now);
                self.ping();
            }
            None => {}
        }
    }

    /// Fails the writes whose data has stayed away for too long.
    fn check_data(&mut self, now: Duration) {
        if self.clock.data_due.is_none_or(|due| now < due) {
            return;
        }
        let (timeout, deaf) = (self.config.data_timeout, self.clock.deaf);
        let late =
            self.tasks.select(|t| !t.transfers.is_empty() && now >= t.since.max(deaf) + timeout);
        for tag in late {
            let Some(task) = self.tasks.get(tag) else { continue };
            task.transfers.clear();
            if task.phase != super::task::Phase::Over {
                self.fail(tag, Fault::TIMEOUT);
            }
            self.settle(tag);
        }
        let since = self.tasks.longest_wait();
        self.clock.data_due = since.map(|since| since.max(deaf) + timeout);
    }
}
