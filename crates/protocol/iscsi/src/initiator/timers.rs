//! Time limits: logins, silence, the rest of a PDU, answers.

use std::time::Duration;

use super::request::CloseReason;
use super::tasks::TaskKind;
use super::{Connection, Phase};

/// State of the timers. Durations are since the connection began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Timers {
    now: Duration,
    /// When the target last sent anything.
    last_received: Duration,
    /// When the ping was sent that is in flight.
    ping_sent: Option<Duration>,
    /// When to check for expired requests; never later than the first deadline.
    next_check: Option<Duration>,
}

impl Timers {
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn record_received(&mut self) {
        self.last_received = self.now;
    }

    /// Records the answer to the ping in flight.
    pub(super) fn ping_answered(&mut self) {
        self.ping_sent = None;
    }

    /// Adds the deadline of a request.
    pub(super) fn add_deadline(&mut self, deadline: Option<Duration>) {
        self.next_check = [self.next_check, deadline].into_iter().flatten().min();
    }
}

impl Connection {
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Closed => None,
            Phase::Login(_) => Some(self.config.login_timeout),
            Phase::Running => {
                [self.silence_deadline(), self.partial_pdu_deadline(), self.timers.next_check]
                    .into_iter()
                    .flatten()
                    .min()
            }
            Phase::LogoutRequested(until) => [
                Some(until),
                self.silence_deadline(),
                self.partial_pdu_deadline(),
                self.timers.next_check,
            ]
            .into_iter()
            .flatten()
            .min(),
        }
    }

    /// When silence becomes too long: for a ping, or for the answer to one.
    fn silence_deadline(&self) -> Option<Duration> {
        let config = &self.config;
        if config.ping_after.is_zero() {
            return None;
        }
        Some(match self.timers.ping_sent {
            Some(at) => at.max(self.timers.last_received) + config.ping_timeout,
            None => self.timers.last_received + config.ping_after,
        })
    }

    /// When the rest of a PDU is overdue.
    fn partial_pdu_deadline(&self) -> Option<Duration> {
        let unfinished = !self.receiver.is_between_pdus();
        unfinished.then(|| self.timers.last_received + self.config.receive_timeout)
    }

    pub(super) fn advance_to(&mut self, now: Duration) {
        self.timers.now = self.timers.now.max(now);
        let now = self.timers.now;
        if self.next_deadline().is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            Phase::Login(_) => return self.finish(CloseReason::LoginTimeout),
            Phase::LogoutRequested(until) if now >= until => {
                return self.finish(CloseReason::LogoutTimeout);
            }
            _ => {}
        }
        if self.partial_pdu_deadline().is_some_and(|at| now >= at) {
            return self.finish(CloseReason::ReceiveTimeout);
        }
        // Usually the request with this deadline has completed long ago.
        self.timers.next_check = self.tasks.first_deadline();
        if self.timers.next_check.is_some_and(|at| now >= at) {
            return self.finish(CloseReason::CommandTimeout);
        }
        if self.silence_deadline().is_some_and(|at| now >= at) {
            if self.timers.ping_sent.is_some() {
                return self.finish(CloseReason::PingTimeout);
            }
            self.timers.ping_sent = Some(now);
            self.send_non_scsi(TaskKind::KeepAlive, None, &[]);
        }
    }
}
